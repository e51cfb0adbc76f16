// `tbe_lookup` and `tbe_lookup_checked_` on the CPU: check the arguments, allocate the output, and
// divide the bags of all features into ranges of equal cost, which the threads pool with the
// kernels of lookup_kernels.cpp. All tables share one parallel region.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "core/isa.h"
#include "core/output_memory.h"
#include "tbe/args.h"
#include "tbe/check.h"
#include "tbe/entries.h"

namespace emb {

EMB_SELECT_KERNELS(LookupKernels, kLookupKernels, lookup_kernels)

namespace {

// Return the kernel for `rows`, tables of dtype `weights`, and an output of dtype `output`.
LookupFn find_lookup_kernel(const TableRows& rows, Dtype weights, Dtype output) {
  const LookupKernels& kernels = lookup_kernels();
  if (rows.caching == Caching::kMixedDtypes) return kernels.mixed[static_cast<int>(output)];
  return kernels.uniform[rows.caching == Caching::kSameDtype][static_cast<int>(weights)]
                        [static_cast<int>(output)][rows.indices.is_int64];
}

// An output of at least this many bytes is stored past the caches if the kernel can do that: it
// would be evicted from the caches before it is read. An ordinary store would also read each cache
// line of the output first, and evict rows.
constexpr int64_t kMinBypassBytes = int64_t{2} << 20;

int64_t num_bytes(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

// Return whether rows of `dim` floats, the first at `out` and each `stride` floats after the one
// before, consist of whole, aligned cache lines.
bool has_whole_lines(const void* out, int64_t stride, int64_t dim) {
  constexpr int64_t kLineFloats = kCacheLineBytes / sizeof(float);
  return reinterpret_cast<uintptr_t>(out) % kCacheLineBytes == 0 && stride % kLineFloats == 0 &&
         dim % kLineFloats == 0;
}

// Throw unless each of the `output_dim` columns of the output belongs to exactly one feature or, in
// a variable batch, each of its `output_dim` elements to exactly one bag. Kernels write no other
// elements. Features or bags are usually ordered by column; then there are few runs.
void check_coverage(const char* op, const LookupInputs& in, int64_t output_dim) {
  const FeatureBags& bags = in.feature_bags;
  const BagLayout* layout = bags.map.layout;
  const Feature* feature = feature_array(in.features);
  std::vector<std::pair<int64_t, int64_t>> runs;  // [begin, end) of neighbouring columns
  const auto add = [&](int64_t begin, int64_t dim) {
    if (!runs.empty() && runs.back().second == begin) {
      runs.back().second += dim;
    } else {
      runs.emplace_back(begin, begin + dim);
    }
  };
  for (int64_t f = 0; f < bags.num_features(); ++f) {
    if (layout == nullptr) add(feature[f].column, feature[f].dim);
    for (int64_t bag = bags.first_bags[f]; layout != nullptr && bag < bags.first_bags[f + 1];
         ++bag) {
      add(layout[bag].element, feature[f].dim);
    }
  }
  std::sort(runs.begin(), runs.end());
  runs.emplace_back(output_dim, output_dim);
  int64_t end = 0;
  for (const auto& run : runs) {
    const bool is_gap = run.first > end;  // an overlap begins before `end`
    STD_TORCH_CHECK(run.first == end, op, ": the output must have each of its ", output_dim,
                    layout == nullptr ? " columns from one feature" : " elements from one bag",
                    ", but ", is_gap ? end : run.first, " to ",
                    (is_gap ? run.first : std::min(run.second, end)) - 1,
                    is_gap ? " have none" : " have several",
                    layout == nullptr ? "; pass output_dim and features of one module"
                                      : "; lay out bag_layout without gaps");
    end = run.second;
  }
}

// Allocate the output: [output_dim] with pooling in a variable batch, else [rows, output_dim].
// Clear it if kernels do not write all of it: without bags they write nothing, and without pooling
// they do not write rows of lookups before the first bag. Without pooling, throw if a feature's dim
// is not `output_dim`. With pooling and bags, throw unless they cover the output (check_coverage).
Tensor new_output(const char* op, const LookupInputs& in, int64_t output_dim, ScalarType dtype) {
  const int64_t num_features = in.feature_bags.num_features();
  const bool is_variable = in.feature_bags.map.layout != nullptr;
  const bool is_unpooled = in.pooling == Pooling::kNone;
  const Feature* feature = feature_array(in.features);
  for (int64_t f = 0; is_unpooled && f < num_features; ++f) {
    STD_TORCH_CHECK(feature[f].dim == output_dim, op,
                    ": pooling none needs one dim for all features, got ", feature[f].dim, " and ",
                    output_dim);
  }
  const bool has_bags = in.bags.num_bags > 0;
  if (has_bags && !is_unpooled) check_coverage(op, in, output_dim);
  const int64_t num_rows =
      is_unpooled ? in.indices.numel() : (num_features == 0 ? 0 : in.bags.num_bags / num_features);
  Tensor out = is_variable && !is_unpooled
                   ? allocate_output(in.indices, {output_dim}, dtype)
                   : allocate_output(in.indices, {num_rows, output_dim}, dtype);
  if (!has_bags || (is_unpooled && in.bags.begin(0) > 0)) torch::stable::zero_(out);
  return out;
}

// Return `sample_weights` as contiguous float32 [L], or null without. Throws unless they have the
// shape and dtype, and the pooling is sum or mean.
std::optional<Tensor> checked_sample_weights(const char* op, const LookupInputs& in,
                                             const std::optional<Tensor>& sample_weights) {
  check_sample_weights(op, sample_weights, in.indices);
  STD_TORCH_CHECK(in.pooling != Pooling::kNone || !sample_weights, op,
                  ": sample_weights need sum or mean pooling; with none, scale the output");
  return sample_weights ? std::optional(as_contiguous(*sample_weights)) : std::nullopt;
}

// Allocate the output of a lookup, pool the bags into it and return it. `in` and sample_weights,
// contiguous float32 [L] or null, have been checked; new_output and float_dtype check the rest.
Tensor look_up(const char* op, const LookupInputs& in, const std::optional<Tensor>& sample_weights,
               int64_t output_dim, ScalarType output_dtype) {
  const Dtype output_type = float_dtype(op, "output_dtype", output_dtype);
  Tensor out = new_output(op, in, output_dim, output_dtype);
  if (in.bags.num_bags == 0) return out;
  const Feature* feature = feature_array(in.features);
  char* output = static_cast<char*>(out.mutable_data_ptr());
  const bool is_large = num_bytes(out) >= kMinBypassBytes;
  const BagMap& map = in.feature_bags.map;
  for_feature_bags(in.bags, in.feature_bags, [&](int64_t f, int64_t begin, int64_t end) {
    const TableRows rows = in.rows_of(feature[f]);
    const bool has_fixed_rows = in.pooling != Pooling::kNone && map.layout == nullptr;
    const int64_t base = BagItems::base_element(map, in.pooling, begin, feature[f].column);
    LookupArgs args{rows,
                    {in.bags, in.pooling, map.layout, output_dim},
                    sample_weights ? sample_weights->const_data_ptr<float>() : nullptr,
                    output + base * out.element_size()};
    const bool is_mixed = rows.caching == Caching::kMixedDtypes;
    const std::unique_ptr<float[]> scratch(is_mixed ? new float[rows.dim] : nullptr);
    args.scratch = scratch.get();
    args.bypasses_caches =
        has_fixed_rows && is_large && has_whole_lines(args.out, output_dim, rows.dim);
    find_lookup_kernel(rows, in.weights.type, output_type)(args, begin, end);
  });
  return out;
}

}  // namespace

// The contract is in tbe/entries.h.
Tensor tbe_lookup(std::vector<Tensor> weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> slots,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, int64_t output_dim, ScalarType output_dtype) {
  const char* op = "tbe_lookup";
  const LookupInputs in(op, weights, features, indices, offsets, slots, bag_layout, pooling,
                        output_dim);
  return look_up(op, in, checked_sample_weights(op, in, sample_weights), output_dim, output_dtype);
}

namespace {

// Look up a fixed batch and return [output], as `tbe_lookup` returns it. If the batch is not valid
// (is_valid_batch), return an empty list, whatever `check_mode` is. The caller must then repair and
// report the batch with `bounds_check`, or call `tbe_lookup`. `check_mode` and `violations` are
// checked but not used: no violation is counted here.
std::vector<Tensor> tbe_lookup_checked_(std::vector<Tensor> weights, const Tensor& features,
                                        const Tensor& indices, const Tensor& offsets,
                                        std::optional<Tensor> sample_weights, int64_t pooling,
                                        int64_t output_dim, ScalarType output_dtype,
                                        std::optional<int64_t> check_mode, Tensor violations,
                                        std::optional<Tensor> slots) {
  const char* op = "tbe_lookup_checked_";
  float_dtype(op, "output_dtype", output_dtype);
  check_bounds_arguments(op, check_mode, violations);
  const LookupInputs in(op, weights, features, indices, offsets, slots, std::nullopt, pooling,
                        output_dim);
  sample_weights = checked_sample_weights(op, in, sample_weights);
  if (!is_valid_batch(features, index_array(in.indices), in.bags, in.feature_bags)) return {};
  return {look_up(op, in, sample_weights, output_dim, output_dtype)};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tbe_lookup);
  EMB_IMPL(m, emb, tbe_lookup_checked_);
}
