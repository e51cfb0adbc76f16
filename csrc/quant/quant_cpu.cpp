// `quantize_rows_`, `quant_lookup` and `quant_lookup_checked_` on the CPU: check the arguments,
// allocate the output, and divide rows, or bags of all features, into ranges of equal cost, which
// the threads process with quant_kernels.cpp.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "core/feature_bags.h"
#include "core/isa.h"
#include "core/output_memory.h"
#include "core/parallel.h"
#include "quant/args.h"
#include "quant/check.h"
#include "tbe/entries.h"

namespace emb {

EMB_SELECT_KERNELS(QuantizeTable, kQuantizeTable, quantize_table)

namespace {

constexpr int64_t kGrain = 4096;  // grain of parallel_balanced, in elements

// Quantise `weights`, contiguous [R, D] of float32, float16 or bfloat16, finite (not checked), into
// `packed`, uint8 [R, row_bytes(D, format)], of which every byte is written.
void quantize_rows_(Tensor packed, const Tensor& weights, int64_t format) {
  const Dtype type = check_quantize("quantize_rows_", packed, weights, format);
  const int64_t dim = weights.size(1);
  const QuantizeArgs args{weights.const_data_ptr(),
                          static_cast<uint8_t*>(packed.mutable_data_ptr()), dim};
  const QuantizeFn quantize =
      quantize_table().kernels[format_index(format)][static_cast<int>(type)];
  parallel_balanced(
      weights.size(0), kGrain, [&](int64_t row) { return row * dim; },
      [&](int64_t begin, int64_t end) { quantize(args, begin, end); });
}

}  // namespace

EMB_SELECT_KERNELS(QuantLookupTable, kQuantLookupTable, lookup_table)

namespace {

// Return the code of the format of a feature's rows.
int64_t format_of(const RowFormats& formats, const Feature& feature) {
  return formats.is_mixed ? feature.tier : __builtin_ctzll(formats.mask);
}

// Check the contents of `features`, so that reads and writes are safe whatever the caller passes.
// Throws unless every feature has rows of a format among `formats` inside `packed`, and lies inside
// the `output_dim` columns of an output row. Without pooling, every dim must be `output_dim`.
// Return whether the features, one after the other, cover all columns; it has no meaning without
// pooling.
bool check_packed_features(const char* op, const Tensor& features, const Tensor& packed,
                           const RowFormats& formats, Pooling pooling, int64_t output_dim) {
  const Feature* all_features = feature_array(features);
  int64_t num_columns = 0;  // of the features so far
  bool is_gapless = true;
  for (int64_t f = 0; f < features.size(0); ++f) {
    const Feature& feature = all_features[f];
    const int64_t format = format_of(formats, feature);
    STD_TORCH_CHECK(formats.has(format), op, ": feature ", f, " has rows of format ", format,
                    ", which is not among those that the argument names");
    // The 1 keeps the division below defined; other dims raise.
    const bool has_dim = feature.dim > 0 && feature.dim <= INT32_MAX;
    const int64_t nbytes = has_dim ? row_bytes(feature.dim, static_cast<int>(format)) : 1;
    const int64_t column = pooling == Pooling::kNone ? 0 : feature.column;
    STD_TORCH_CHECK(
        has_dim && feature.rows >= 0 && feature.weight_offset >= 0 &&
            feature.weight_offset % kWordBytes == 0 && feature.weight_offset <= packed.numel() &&
            feature.rows <= (packed.numel() - feature.weight_offset) / nbytes && column >= 0 &&
            feature.dim <= output_dim && column <= output_dim - feature.dim,
        op, ": feature ", f, " lies outside the packed rows, not at a word of ",
        "them, or outside the columns of the output; features must come from the ",
        "module that owns them");
    STD_TORCH_CHECK(pooling != Pooling::kNone || feature.dim == output_dim, op,
                    ": pooling none needs one dim for all features, got ", feature.dim, " and ",
                    output_dim);
    is_gapless = is_gapless && column == num_columns;
    num_columns += feature.dim;
  }
  return is_gapless && num_columns == output_dim;
}

// Throw if the output has more columns, or in a variable batch more elements, than its bags could
// write: an `output_dim` of another module would allocate memory without limit.
void check_output_dim(const char* op, const QuantCall& call, const FeatureBags& feature_bags) {
  const Feature* feature = feature_array(call.features);
  int64_t limit = 0;
  for (int64_t f = 0; f < feature_bags.num_features() && limit < call.output_dim; ++f) {
    const int64_t num_bags = feature_bags.first_bags[f + 1] - feature_bags.first_bags[f];
    limit += feature[f].dim * (call.is_variable() ? num_bags : 1);
  }
  STD_TORCH_CHECK(limit >= call.output_dim, op, ": the features write at most ", limit, " ",
                  call.is_variable() ? "elements" : "columns", " of an output with ",
                  call.output_dim, "; pass output_dim and features of one module");
}

// Return the output of a lookup whose bag layout has been checked; zeros where no bag writes. Check
// the contents of the features first.
Tensor look_up(const char* op, const QuantCall& call, const FeatureBags& feature_bags) {
  const Bags& bags = call.bags;
  const bool is_pooled = call.pooling != Pooling::kNone, is_variable = call.is_variable();
  // In a variable batch every bag is checked against the elements of the output separately.
  const bool covers_columns = check_packed_features(op, call.features, call.packed, call.formats,
                                                    is_variable ? Pooling::kSum : call.pooling,
                                                    is_variable ? kUnlimited : call.output_dim);
  if (is_pooled && bags.num_bags > 0) check_output_dim(op, call, feature_bags);
  Tensor out = allocate_output(call.indices, call.output_sizes(), call.output_dtype);
  // Whether the bags write all of the output. In a variable batch this is not known: then false.
  const bool is_complete = bags.num_bags > 0 && (is_pooled ? covers_columns : bags.begin(0) == 0);
  if (!is_complete) torch::stable::zero_(out);
  if (bags.num_bags == 0) return out;
  const Feature* all_features = feature_array(call.features);
  const auto* rows = static_cast<const uint8_t*>(call.packed.const_data_ptr());
  char* output = static_cast<char*>(out.mutable_data_ptr());
  const IndexArray indices = index_array(call.indices);
  for_feature_bags(bags, feature_bags, [&](int64_t f, int64_t begin, int64_t end) {
    const Feature& feature = all_features[f];
    const int64_t base_element =
        BagItems::base_element(call.map, call.pooling, begin, feature.column);
    const QuantLookupArgs args{rows + feature.weight_offset,
                               feature.rows,
                               feature.dim,
                               indices.data,
                               {bags, call.pooling, call.map.layout, call.output_dim},
                               call.weights(),
                               output + base_element * out.element_size()};
    const int format = format_index(format_of(call.formats, feature));
    const auto& kernels = lookup_table().kernels[format][static_cast<int>(call.output_type)];
    kernels[indices.is_int64](args, begin, end);
  });
  return out;
}

// Check the bag layout and return the bags of each feature.
FeatureBags feature_bags_of(const char* op, const QuantCall& call) {
  return {op, call.features, call.offsets, call.bag_layout, call.pooling, call.output_dim};
}

// Pool the rows of every bag, as `tbe_lookup` does. `packed`, uint8, has the tables of the module;
// `features`, int64 [F, 8], is that of dense tables, but weight_offset counts bytes of `packed`,
// and column `tier` has the format of the rows where `format` names several (see RowFormats).
// Indices outside a table are repaired (repair_index): -1 reads no row. The columns of features, in
// a variable batch the output rows of bags, must not overlap; not checked. Return [B, output_dim],
// in a variable batch [output_dim], without pooling [L, output_dim]; zeros where no bag writes.
Tensor quant_lookup(const Tensor& packed, const Tensor& features, const Tensor& indices,
                    const Tensor& offsets, std::optional<Tensor> bag_layout,
                    std::optional<Tensor> sample_weights, int64_t pooling, int64_t format,
                    int64_t output_dim, ScalarType output_dtype) {
  const char* op = "quant_lookup";
  const QuantCall call(op, packed, features, indices, offsets, bag_layout, sample_weights, pooling,
                       format, output_dim, output_dtype);
  return look_up(op, call, feature_bags_of(op, call));
}

// Look up a fixed batch and return [output]. With a `check_mode`, a code of BoundsMode, return no
// tensor for an invalid batch, which the caller then repairs and reports. The modes do not differ
// here, and `violations`, int64 [2], is neither read nor written.
std::vector<Tensor> quant_lookup_checked_(const Tensor& packed, const Tensor& features,
                                          const Tensor& indices, const Tensor& offsets,
                                          std::optional<Tensor> sample_weights, int64_t pooling,
                                          int64_t format, int64_t output_dim,
                                          ScalarType output_dtype,
                                          std::optional<int64_t> check_mode, Tensor violations) {
  const char* op = "quant_lookup_checked_";
  const QuantCall call(op, packed, features, indices, offsets, std::nullopt, sample_weights,
                       pooling, format, output_dim, output_dtype);
  check_bounds_arguments(op, check_mode, violations);
  const FeatureBags bags = feature_bags_of(op, call);
  if (check_mode.has_value() &&
      !is_valid_batch(features, index_array(call.indices), call.bags, bags))
    return {};
  return {look_up(op, call, bags)};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, quantize_rows_);
  EMB_IMPL(m, emb, quant_lookup);
  EMB_IMPL(m, emb, quant_lookup_checked_);
}
