// The arguments of `fill_uniform_` on any device, and the function table of its CPU kernels.
// Element i of the tensor is low + span * u, with low and span in float32, rounded once to float32
// and then to the dtype. u in [0, 1) depends only on the seed and on i.
#pragma once

#include <cmath>

#include "core/dtype.h"
#include "core/portability.h"

namespace emb {

// The arguments of the kernels.
struct UniformArgs {
  void* out;  // [numel] of the dtype for which the kernel is chosen
  int64_t numel;
  float low, span;  // span is high - low
  uint64_t seed;

  // Return the element for u. A compiler may contract `low + span * u` or not, so that processors
  // would differ in the last bit.
  EMB_HD float value(float u) const { return fmaf(span, u, low); }
};

// Elements per block of the CPU kernel: kBlockWords, the words of its block of Philox counters.
inline constexpr int64_t kUniformBlock = 64;

// Fill blocks [first_block, last_block) of kUniformBlock elements, which must have elements; the
// last block of the tensor may be shorter.
using UniformFn = void (*)(const UniformArgs&, int64_t first_block, int64_t last_block);

// The CPU kernels for one instruction set.
struct UniformTable {
  UniformFn kernels[kNumDtypes];  // [dtype of the tensor]
};

}  // namespace emb
