// `fill_uniform_` on the GPU: check the arguments and launch.
#include <torch/csrc/stable/library.h>

#include "core/check.h"
#include "core/launch.h"
#include "random/check.h"
#include "random/uniform.cuh"

namespace emb::cuda {
namespace {

// Fill `tensor`, contiguous and float32, float16 or bfloat16, with low + (high - low) * u for
// uniform u in [0, 1), rounded to its dtype. `low` and high - low are rounded to float32 first, so
// elements may lie outside [low, high) by the rounding errors of these two and of the result.
// random/check.h has the limits of `low` and `high`. The elements have the same bits as on the CPU.
// Does not wait for the device.
void fill_uniform_(Tensor tensor, double low, double high, int64_t seed) {
  const Dtype type = check_uniform_fill("fill_uniform_", tensor, low, high);
  const UniformArgs args{tensor.mutable_data_ptr(), tensor.numel(), static_cast<float>(low),
                         static_cast<float>(high - low), static_cast<uint64_t>(seed)};
  launch_fill_uniform(CudaLauncher(tensor), args, type);
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) { EMB_IMPL(m, emb::cuda, fill_uniform_); }
