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
#include "tbe/pass_check.h"

namespace emb {

EMB_SELECT_KERNELS(LookupTable, kLookupTable, lookup_table)

namespace {

// Return the kernel for rows of dtype `weights` and an output of dtype `output`.
LookupFn kernel_for(const TableRows& rows, Dtype weights, Dtype output) {
  const LookupTable& table = lookup_table();
  if (rows.caching == Caching::kMixed) return table.mixed[static_cast<int>(output)];
  return table.at[rows.caching == Caching::kSame][static_cast<int>(weights)]
                 [static_cast<int>(output)][rows.indices.is_int64];
}

// Outputs of at least this many bytes are written past the caches, which would not hold them until
// they are read: an ordinary store reads the cache line first, and evicts rows.
constexpr int64_t kStreamBytes = int64_t{2} << 20;

int64_t bytes_of(const Tensor& tensor) {
  return tensor.numel() * static_cast<int64_t>(tensor.element_size());
}

// Return whether rows of `dim` floats from `out` on, `columns` floats apart, are whole cache lines.
bool is_lines(const void* out, int64_t columns, int64_t dim) {
  constexpr int64_t kLine = 64 / sizeof(float);
  return reinterpret_cast<uintptr_t>(out) % 64 == 0 && columns % kLine == 0 && dim % kLine == 0;
}

// Return whether the output rows of a variable batch cover `columns` elements without gaps or
// overlaps. Usually they are a few runs of neighbouring rows, one per feature and rank; for too
// many runs the answer is no, which only costs a needless clearing of the output.
bool variable_rows_cover(const LookupInputs& in, int64_t columns) {
  constexpr size_t kMaxRuns = 4096;
  const FeatureBags& feature_bags = in.feature_bags;
  const BagLayout* layout = feature_bags.map.layout;
  const Feature* feature = feature_array(in.features);
  std::vector<std::pair<int64_t, int64_t>> runs;
  for (int64_t f = 0; f < feature_bags.num_features(); ++f) {
    const int64_t dim = feature[f].dim;
    for (int64_t bag = feature_bags.first_bags[f]; bag < feature_bags.first_bags[f + 1]; ++bag) {
      const int64_t element = layout[bag].element;
      if (!runs.empty() && runs.back().second == element) {
        runs.back().second += dim;
      } else if (runs.size() < kMaxRuns) {
        runs.emplace_back(element, element + dim);
      } else {
        return false;
      }
    }
  }
  std::sort(runs.begin(), runs.end());
  int64_t end = 0;
  for (const auto& run : runs) {
    if (run.first != end) return false;
    end = run.second;
  }
  return end == columns;
}

// Allocate the output, and clear it if the kernels may leave some of it unwritten. Raise if there
// is no pooling and a feature's dim is not `columns`.
Tensor new_output(const LookupInputs& in, int64_t columns, ScalarType dtype) {
  const FeatureBags& feature_bags = in.feature_bags;
  const int64_t num_features = feature_bags.num_features();
  const Feature* feature = feature_array(in.features);
  const bool variable = feature_bags.map.layout != nullptr, none = in.pooling == Pooling::kNone;
  int64_t covered = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    const int64_t bags = feature_bags.first_bags[f + 1] - feature_bags.first_bags[f];
    covered += feature[f].dim * (variable ? bags : 1);
    STD_TORCH_CHECK(!none || feature[f].dim == columns,
                    "tbe_lookup: pooling none needs one dim for all features, got ", feature[f].dim,
                    " and ", columns);
  }
  const int64_t lines = none                ? in.indices.numel()
                        : num_features == 0 ? 0
                                            : in.bags.num_bags / num_features;
  Tensor out = variable && !none ? allocate_output(in.indices, {columns}, dtype)
                                 : allocate_output(in.indices, {lines, columns}, dtype);
  // The rows of a variable batch may overlap and leave gaps, whatever their total size.
  const bool complete =
      in.bags.num_bags > 0 && (none       ? in.bags.begin(0) == 0
                               : variable ? covered == columns && variable_rows_cover(in, columns)
                                          : covered == columns);
  if (!complete) torch::stable::zero_(out);
  return out;
}

// Look up the checked arguments; `scales` are the sample weights, contiguous.
Tensor look_up(const LookupInputs& in, const std::optional<Tensor>& scales, int64_t columns,
               ScalarType output_dtype) {
  const Dtype output_type = float_dtype("tbe_lookup", "output_dtype", output_dtype);
  Tensor out = new_output(in, columns, output_dtype);
  if (in.bags.num_bags == 0) return out;
  const Feature* feature = feature_array(in.features);
  char* output = static_cast<char*>(out.mutable_data_ptr());
  const bool large = bytes_of(out) >= kStreamBytes;
  const BagMap& map = in.feature_bags.map;
  for_feature_bags(in.bags, in.feature_bags, [&](int64_t f, int64_t begin, int64_t end) {
    const TableRows rows = in.rows_of(feature[f]);
    const bool fixed = in.pooling != Pooling::kNone && map.layout == nullptr;
    const int64_t base = BagRows::base(map, in.pooling, begin, feature[f].column);
    LookupArgs args{rows,
                    {in.bags, in.pooling, map.layout, columns},
                    scales ? scales->const_data_ptr<float>() : nullptr,
                    output + base * out.element_size()};
    const bool mixed = rows.caching == Caching::kMixed;
    const std::unique_ptr<float[]> scratch(mixed ? new float[rows.dim] : nullptr);
    args.scratch = scratch.get();
    args.stream = fixed && large && is_lines(args.out, columns, rows.dim);
    kernel_for(rows, in.weights.type, output_type)(args, begin, end);
  });
  return out;
}

}  // namespace

// The contract of both functions is in tbe/entries.h.
Tensor tbe_lookup(std::vector<Tensor> weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> slots,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, int64_t columns, ScalarType output_dtype) {
  const char* op = "tbe_lookup";
  float_dtype(op, "output_dtype", output_dtype);
  const LookupInputs in(op, weights, features, indices, offsets, slots, bag_layout, pooling,
                        columns);
  check_sample_weights(op, sample_weights, indices);
  STD_TORCH_CHECK(
      in.pooling != Pooling::kNone || !sample_weights,
      "tbe_lookup: sample_weights need sum or mean pooling; with none, scale the output");
  std::optional<Tensor> scales = sample_weights;
  if (scales) scales = as_contiguous(*scales);
  return look_up(in, scales, columns, output_dtype);
}

bool is_valid_batch(const Tensor& features, IndexArray indices, const Bags& bags,
                    const FeatureBags& feature_bags) {
  if (!offsets_are_valid(bags.offsets, bags.num_bags, bags.num_lookups)) return false;
  const Feature* feature = feature_array(features);
  const int64_t num_features = feature_bags.num_features();
  const int64_t parts = std::clamp<int64_t>(bags.num_lookups / 65536, 1, num_threads());
  std::vector<char> valid(parts, 1);
  parallel_tasks(parts, [&](int64_t part) {
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t first = bags.offsets[feature_bags.first_bags[f]];
      const int64_t length = bags.offsets[feature_bags.first_bags[f + 1]] - first;
      valid[part] &= indices_are_valid(indices, first + length * part / parts,
                                       first + length * (part + 1) / parts, feature[f].rows);
    }
  });
  return std::find(valid.begin(), valid.end(), 0) == valid.end();
}

namespace {

// Check a fixed batch and look it up: return [output], as `tbe_lookup` returns it, or no tensor for
// an invalid batch, which the caller then repairs and reports with `bounds_check`. `mode` and
// `violations` are only validated: nothing is counted here.
std::vector<Tensor> tbe_lookup_checked_(std::vector<Tensor> weights, const Tensor& features,
                                        const Tensor& indices, const Tensor& offsets,
                                        std::optional<Tensor> sample_weights, int64_t pooling,
                                        int64_t columns, ScalarType output_dtype,
                                        std::optional<int64_t> mode, Tensor violations,
                                        std::optional<Tensor> slots) {
  const char* op = "tbe_lookup_checked_";
  float_dtype(op, "output_dtype", output_dtype);
  check_bounds_arguments(op, mode, violations);
  const LookupInputs in(op, weights, features, indices, offsets, slots, std::nullopt, pooling,
                        columns);
  check_sample_weights(op, sample_weights, indices);
  STD_TORCH_CHECK(in.pooling != Pooling::kNone || !sample_weights, op,
                  ": sample_weights need sum or mean pooling; with none, scale the output");
  if (!is_valid_batch(features, index_array(in.indices), in.bags, in.feature_bags)) return {};
  std::optional<Tensor> scales = sample_weights;
  if (scales) scales = as_contiguous(*scales);
  return {look_up(in, scales, columns, output_dtype)};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tbe_lookup);
  EMB_IMPL(m, emb, tbe_lookup_checked_);
}
