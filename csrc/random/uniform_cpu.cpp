// `fill_uniform_` on the CPU: check the arguments, then fill blocks in parallel with
// uniform_kernels.cpp.
#include <torch/csrc/stable/library.h>

#include "core/check.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "random/args.h"
#include "random/check.h"

namespace emb {

EMB_SELECT_KERNELS(UniformTable, kUniformTable, uniform_table)

namespace {

constexpr int64_t kBlockGrain = 256;  // grain of parallel_balanced, in blocks

// Fill `tensor`, contiguous and float32, float16 or bfloat16, with low + (high - low) * u for
// uniform u in [0, 1), rounded to its dtype. `low` and high - low are rounded to float32 first, so
// elements may lie outside [low, high) by the rounding errors of these two and of the result.
// random/check.h has the limits of `low` and `high`. The result depends on neither the device nor
// the number of threads.
void fill_uniform_(Tensor tensor, double low, double high, int64_t seed) {
  const Dtype type = check_uniform_fill("fill_uniform_", tensor, low, high);
  const UniformArgs args{tensor.mutable_data_ptr(), tensor.numel(), static_cast<float>(low),
                         static_cast<float>(high - low), static_cast<uint64_t>(seed)};
  const UniformFn fill_blocks = uniform_table().kernels[static_cast<int>(type)];
  const int64_t num_blocks = (args.numel + kUniformBlockElements - 1) / kUniformBlockElements;
  parallel_balanced(num_blocks, kBlockGrain, kUnitCost,
                    [&](int64_t begin, int64_t end) { fill_blocks(args, begin, end); });
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, fill_uniform_); }
