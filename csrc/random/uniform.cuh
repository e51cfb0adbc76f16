// Uniform random numbers on the GPU. A Philox counter gives four random words; a thread takes one
// counter at a time and writes the four elements of its words. random/args.h has the formula.
#pragma once

#include "core/dtype.h"
#include "core/half.h"
#include "core/random.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "random/args.h"

namespace emb::cuda {

// Fill the tensor args.out of dtype T, by a grid-stride loop over counters.
template <class T>
__global__ void fill_uniform_kernel(UniformArgs args) {
  const int64_t num_counters = (args.numel + 3) / 4;
  for (int64_t i = simt::global_thread(); i < num_counters; i += simt::threads_in_grid()) {
    const Random4 random = philox(args.seed, stream_counter(static_cast<uint64_t>(i)));
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if (4 * i + w < args.numel) {
        static_cast<T*>(args.out)[4 * i + w] =
            from_float<T>(args.value(unit_float(random.word[w])));
      }
    }
  }
}

// Fill args.out, device memory of dtype `type` that must live until the kernel has run; args.numel
// may be 0. `launcher` is a CudaLauncher or, in tests, a simt::HostLauncher. Does not wait for the
// device.
template <class Launcher>
void launch_fill_uniform(const Launcher& launcher, const UniformArgs& args, Dtype type) {
  if (args.numel == 0) return;
  constexpr int kThreads = 256;
  const unsigned num_blocks = blocks_for(
      args.numel, 4 * kThreads, launcher.max_grid_blocks(kResidentThreadsPerSm / kThreads));
  if (type == Dtype::kFloat) {
    launcher(fill_uniform_kernel<float>, num_blocks, kThreads, args);
  } else if (type == Dtype::kHalf) {
    launcher(fill_uniform_kernel<half16>, num_blocks, kThreads, args);
  } else {
    launcher(fill_uniform_kernel<bfloat16>, num_blocks, kThreads, args);
  }
}

}  // namespace emb::cuda
