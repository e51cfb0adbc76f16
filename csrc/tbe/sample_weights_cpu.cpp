// `tbe_sample_weight_grad` on the CPU: check the arguments, allocate the result, and divide the
// bags into ranges of equal cost, which the threads process with sample_weights_kernels.cpp.
#include <torch/csrc/stable/library.h>

#include <memory>
#include <vector>

#include "core/isa.h"
#include "tbe/args.h"
#include "tbe/check.h"

namespace emb {

EMB_SELECT_KERNELS(SampleWeightKernels, kSampleWeightKernels, sample_weight_kernels)

namespace {

// Return the kernel for `rows`, tables of dtype `weights`, and a gradient of dtype `grad`.
SampleWeightFn find_sample_weight_kernel(const TableRows& rows, Dtype weights, Dtype grad) {
  const SampleWeightKernels& kernels = sample_weight_kernels();
  if (rows.caching == Caching::kMixedDtypes) return kernels.mixed[static_cast<int>(grad)];
  return kernels.uniform[rows.caching == Caching::kSameDtype][static_cast<int>(weights)]
                        [static_cast<int>(grad)];
}

// Return the gradient of the sample weights of `tbe_lookup`, float32 [L]. It is 0 for lookups that
// are skipped or before the first bag. `grad` is the gradient of the pooled output, [B, output_dim]
// or, with bag_layout, [output_dim], of float32, float16 or bfloat16. Its rows may be apart in
// memory; it is copied only if its columns are. `pooling` must be the code of sum or mean. The
// other arguments are those of `tbe_lookup`.
Tensor tbe_sample_weight_grad(const Tensor& grad, std::vector<Tensor> weights,
                              const Tensor& features, const Tensor& indices, const Tensor& offsets,
                              std::optional<Tensor> slots, std::optional<Tensor> bag_layout,
                              int64_t pooling) {
  const char* op = "tbe_sample_weight_grad";
  const Dtype grad_type = float_dtype(op, "grad", grad.scalar_type());
  const int64_t output_dim = check_pooled_grad(op, grad, bag_layout.has_value());
  const LookupInputs in(op, weights, features, indices, offsets, slots, bag_layout, pooling,
                        output_dim);
  STD_TORCH_CHECK(in.pooling != Pooling::kNone, op, ": needs sum or mean pooling");
  BagMap map = in.feature_bags.map;
  const int64_t num_features = in.feature_bags.num_features();
  const int64_t batch = num_features > 0 ? in.bags.num_bags / num_features : 0;
  STD_TORCH_CHECK(map.layout || grad.size(0) == batch, op, ": grad must have B = ", batch,
                  " rows, got ", grad.size(0));
  const Tensor grad_tensor = with_adjacent_columns(grad);
  map.stride = row_stride(grad_tensor);
  Tensor out = allocate_zeros(grad, {indices.numel()}, ScalarType::Float);
  const Feature* feature = feature_array(features);
  const auto* gradient = static_cast<const char*>(grad_tensor.const_data_ptr());
  float* result = out.mutable_data_ptr<float>();
  for_feature_bags(in.bags, in.feature_bags, [&](int64_t f, int64_t begin, int64_t end) {
    const TableRows rows = in.rows_of(feature[f]);
    const int64_t base = BagItems::base_element(map, in.pooling, begin, feature[f].column);
    SampleWeightArgs args{rows,
                          {in.bags, in.pooling, map.layout, map.stride},
                          gradient + base * grad.element_size(),
                          result};
    const bool is_mixed = rows.caching == Caching::kMixedDtypes;
    const std::unique_ptr<float[]> scratch(is_mixed ? new float[rows.dim] : nullptr);
    args.scratch = scratch.get();
    find_sample_weight_kernel(rows, in.weights.type, grad_type)(args, begin, end);
  });
  return out;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, tbe_sample_weight_grad); }
