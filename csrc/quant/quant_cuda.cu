// `quantize_rows_`, `quant_lookup` and `quant_lookup_checked_` on the GPU: check the arguments,
// allocate, launch. The contents of `features` are on the device and are not read here, so that
// nothing waits for the GPU. The contracts are those of quant_cpu.cpp, with two exceptions:
// contents of tensors are trusted, and output elements that no bag writes are unspecified if there
// are bags.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "core/launch.h"
#include "quant/check.h"
#include "quant/quant.cuh"
#include "tbe/entries.h"

namespace emb::cuda {
namespace {

// Quantise `weights`, contiguous [R, D] of float32, float16 or bfloat16, finite (not checked), into
// `packed`, uint8 [R, row_bytes(D, format)], of which every byte is written.
void quantize_rows_(Tensor packed, const Tensor& weights, int64_t format) {
  const Dtype type = check_quantize("quantize_rows_", packed, weights, format);
  const QuantizeKernelArgs args{weights.const_data_ptr(),
                                static_cast<uint8_t*>(packed.mutable_data_ptr()), weights.size(0),
                                weights.size(1), static_cast<int>(format)};
  launch_quantize(CudaLauncher(packed), args, type);
}

// Launch the lookup of a call into `out`; `bags` are those of the call, or have repaired offsets.
void look_up(const QuantCall& call, const Bags& bags, Tensor* out) {
  const QuantArgs args{static_cast<const uint8_t*>(call.packed.const_data_ptr()),
                       out->mutable_data_ptr(),
                       call.output_type,
                       feature_array(call.features),
                       static_cast<int>(call.features.size(0)),
                       index_array(call.indices),
                       bags,
                       call.map,
                       call.output_dim,
                       call.pooling,
                       call.weights(),
                       call.formats.is_mixed};
  if (bags.num_bags == 0) {
    torch::stable::zero_(*out);
  } else if (out->numel() > 0) {
    launch_quant_lookup(CudaLauncher(call.indices), args, call.formats.mask);
  }
}

// Check the number of columns and allocate the output, uninitialised.
Tensor new_output(const char* op, const QuantCall& call) {
  const int64_t num_features = call.features.size(0);
  STD_TORCH_CHECK(
      call.bag_layout || call.pooling == Pooling::kNone || call.output_dim >= num_features, op,
      ": ", num_features, " features need as many columns at least, got ", call.output_dim);
  return allocate(call.indices, call.output_sizes(), call.output_dtype);
}

// Pool the rows of every bag. Return [B, output_dim], in a variable batch [output_dim], without
// pooling [L, output_dim], of output_dtype. QuantCall and QuantArgs describe the arguments.
Tensor quant_lookup(const Tensor& packed, const Tensor& features, const Tensor& indices,
                    const Tensor& offsets, std::optional<Tensor> bag_layout,
                    std::optional<Tensor> sample_weights, int64_t pooling, int64_t format,
                    int64_t output_dim, ScalarType output_dtype) {
  const QuantCall call("quant_lookup", packed, features, indices, offsets, bag_layout,
                       sample_weights, pooling, format, output_dim, output_dtype);
  Tensor out = new_output("quant_lookup", call);
  look_up(call, call.bags, &out);
  return out;
}

// Look up a fixed batch and return [output], unlike on the CPU also for an invalid batch: the
// kernels repair invalid indices and offsets, so that the host need not wait to learn whether the
// batch is valid. With a `check_mode`, a code of BoundsMode, the batch is checked first, as in
// bounds_check_: "fatal" traps, and "warning" adds to `violations`.
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
  Tensor out = new_output(op, call);
  Bags bags = call.bags;
  std::optional<Tensor> repaired;
  if (check_mode.has_value()) {
    repaired =
        bounds_check_(call.indices, call.offsets, features, std::nullopt, *check_mode, violations);
    bags.offsets = index_array(*repaired);
  }
  look_up(call, bags, &out);
  return {out};
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, quantize_rows_);
  EMB_IMPL(m, emb::cuda, quant_lookup);
  EMB_IMPL(m, emb::cuda, quant_lookup_checked_);
}
