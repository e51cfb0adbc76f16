// `tbe_lookup` on the CPU: checks, allocation, and cutting the bags into equal parts. All tables
// are one parallel region.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>

#include "core/check.h"
#include "core/isa.h"
#include "tbe/feature_bags.h"
#include "tbe/lookup_table.h"

namespace emb {

namespace baseline {
extern const LookupTable kLookupTable;
}
#if defined(EMB_X86)
namespace avx2 {
extern const LookupTable kLookupTable;
}
namespace avx512 {
extern const LookupTable kLookupTable;
}
#endif

namespace {

const LookupTable& lookup_table() {
#if defined(EMB_X86)
  return pick_isa(baseline::kLookupTable, avx2::kLookupTable, avx512::kLookupTable);
#else
  return baseline::kLookupTable;
#endif
}

Tensor tbe_lookup(const Tensor& weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> sample_weights, std::string pooling,
                  int64_t columns, ScalarType output_dtype) {
  const char* op = "tbe_lookup";
  const Dtype weight_type = float_dtype(op, "weights", weights.scalar_type());
  const Dtype output_type = float_dtype(op, "output_dtype", output_dtype);
  const Pooling mode = parse_pooling(op, pooling);
  check_features(op, features);
  check_lookups(op, indices, offsets);
  check_sample_weights(op, sample_weights, indices);
  STD_TORCH_CHECK(
      mode != Pooling::kNone || !sample_weights,
      "tbe_lookup: sample_weights need sum or mean pooling; with none, scale the output");
  STD_TORCH_CHECK(weights.is_contiguous(), "tbe_lookup: weights must be contiguous");
  const int64_t num_features = features.size(0), batch = batch_size(op, num_features, offsets);
  const Tensor index_tensor = torch::stable::contiguous(indices);
  const Tensor offset_tensor = torch::stable::contiguous(offsets);
  std::optional<Tensor> scales = sample_weights;
  if (scales) scales = torch::stable::contiguous(*scales);

  const Feature* feature = feature_array(features);
  check_layout(op, features, weights.numel(), columns, kAnyNumber, mode);
  int64_t covered = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    covered += feature[f].dim;
    STD_TORCH_CHECK(mode != Pooling::kNone || feature[f].dim == columns,
                    "tbe_lookup: pooling none needs one dim for all features, got ", feature[f].dim,
                    " and ", columns);
  }
  const int64_t lines = mode == Pooling::kNone ? indices.numel() : batch;
  Tensor out = torch::stable::new_empty(weights, {lines, columns}, output_dtype);
  if (offsets.numel() == 1) {
    torch::stable::zero_(out);
    return out;
  }
  const Bags bags{index_array(offset_tensor), num_features * batch, indices.numel()};
  const bool complete = mode == Pooling::kNone ? bags.begin(0) == 0 : covered == columns;
  if (!complete) torch::stable::zero_(out);
  const LookupFn kernel =
      lookup_table().at[static_cast<int>(weight_type)][static_cast<int>(output_type)]
                       [indices.scalar_type() == ScalarType::Long];
  for_feature_bags(bags, batch, [&](int64_t f, int64_t begin, int64_t end) {
    const int64_t element = feature[f].weight_offset;
    const int64_t first = mode == Pooling::kNone ? 0 : begin % batch * columns + feature[f].column;
    const LookupArgs args{
        static_cast<const char*>(weights.const_data_ptr()) + element * weights.element_size(),
        feature[f].rows,
        feature[f].dim,
        index_array(index_tensor),
        bags,
        mode,
        scales ? scales->const_data_ptr<float>() : nullptr,
        static_cast<char*>(out.mutable_data_ptr()) + first * out.element_size(),
        columns,
        begin};
    kernel(args, begin, end);
  });
  return out;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { m.impl("tbe_lookup", TORCH_BOX(&emb::tbe_lookup)); }
