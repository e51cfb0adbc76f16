// `quantize_rows_` and `quant_lookup` on the GPU: checks, allocation, launch. The contents of
// `features` are on the device and are not read here: nothing waits for the GPU.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "core/launch.h"
#include "quant/check.h"
#include "quant/quant.cuh"

namespace emb::cuda {
namespace {

void quantize_rows_(Tensor packed, const Tensor& weights, int64_t bits) {
  const Dtype type = check_quantize("quantize_rows_", packed, weights, bits);
  const QuantizeRows args{weights.const_data_ptr(),
                          static_cast<uint8_t*>(packed.mutable_data_ptr()), weights.size(0),
                          weights.size(1), static_cast<int>(bits)};
  launch_quantize(CudaLauncher(packed), args, type);
}

Tensor quant_lookup(const Tensor& packed, const Tensor& features, const Tensor& indices_in,
                    const Tensor& offsets_in, std::optional<Tensor> bag_layout,
                    std::optional<Tensor> sample_weights, int64_t pooling_code, int64_t bits,
                    int64_t columns, ScalarType output_dtype) {
  const char* op = "quant_lookup";
  const Dtype output_type = float_dtype(op, "output_dtype", output_dtype);
  check_packed(op, packed, bits);
  const Pooling pooling = check_quant_lookup(op, packed, features, indices_in, offsets_in,
                                             sample_weights, pooling_code);
  const Tensor indices = as_contiguous(indices_in);
  const Tensor offsets = as_contiguous(offsets_in);
  if (sample_weights) sample_weights = as_contiguous(*sample_weights);
  const int64_t num_features = features.size(0);
  const bool variable = bag_layout.has_value() && pooling != Pooling::kNone;
  const BagMap map = bag_map(op, num_features, offsets, bag_layout, columns);
  STD_TORCH_CHECK(bag_layout || pooling == Pooling::kNone || columns >= num_features, op, ": ",
                  num_features, " features need as many columns at least, got ", columns);
  Tensor out =
      allocate(indices, quant_output_sizes(features, indices, offsets, variable, pooling, columns),
               output_dtype);
  const QuantArgs args{static_cast<const uint8_t*>(packed.const_data_ptr()),
                       out.mutable_data_ptr(),
                       output_type,
                       feature_array(features),
                       static_cast<int>(num_features),
                       index_array(indices),
                       Bags{index_array(offsets), offsets.numel() - 1, indices.numel()},
                       map,
                       columns,
                       pooling,
                       sample_weights ? sample_weights->const_data_ptr<float>() : nullptr};
  if (args.bags.count == 0) {
    torch::stable::zero_(out);
  } else if (out.numel() > 0) {
    launch_quant_lookup(CudaLauncher(indices), args, static_cast<int>(bits));
  }
  return out;
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, quantize_rows_);
  EMB_IMPL(m, emb::cuda, quant_lookup);
}
