// Uniform random numbers on the GPU: a thread takes one Philox counter, which makes four elements.
#pragma once

#include "core/dtype.h"
#include "core/half.h"
#include "core/random.h"
#include "core/simt.cuh"
#include "random/args.h"

namespace emb::cuda {

// Fill a tensor of dtype T, grid-stride over counters.
template <class T>
__global__ void fill_uniform_kernel(UniformArgs fill) {
  const int64_t counters = (fill.numel + 3) / 4, stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < counters; i += stride) {
    const Random4 random = philox(fill.seed, stream_counter(static_cast<uint64_t>(i)));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (4 * i + w < fill.numel) {
        static_cast<T*>(fill.out)[4 * i + w] =
            from_float<T>(fill.low + fill.span * unit(random.word[w]));
      }
    }
  }
}

// Fill a tensor of dtype `type`.
template <class Launcher>
void launch_fill_uniform(const Launcher& launcher, const UniformArgs& fill, Dtype type) {
  if (fill.numel == 0) return;
  constexpr int kThreads = 256;
  const int64_t needed = (fill.numel + 4 * kThreads - 1) / (4 * kThreads);
  const int64_t max_blocks = launcher.blocks(8);
  const auto blocks = static_cast<unsigned>(needed < max_blocks ? needed : max_blocks);
  if (type == Dtype::kFloat) {
    launcher(fill_uniform_kernel<float>, blocks, kThreads, fill);
  } else if (type == Dtype::kHalf) {
    launcher(fill_uniform_kernel<half16>, blocks, kThreads, fill);
  } else {
    launcher(fill_uniform_kernel<bfloat16>, blocks, kThreads, fill);
  }
}

}  // namespace emb::cuda
