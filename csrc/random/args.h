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
  void* out;  // [numel] of the dtype for which the kernel is chosen, an output; not owned
  int64_t numel;
  float low, span;  // span is high - low
  uint64_t seed;

  // Return the element for u, before it is rounded to the dtype. A fused multiply-add, because a
  // compiler may or may not contract `low + span * u`, and processors would differ in the last bit.
  EMB_HD float value(float u) const { return fmaf(span, u, low); }
};

// Number of elements of a block of the CPU kernel. It equals kBlockWords (core/random_block.h), the
// number of random words that the kernel computes at once.
inline constexpr int64_t kUniformBlockElements = 64;

// Fill the blocks [first_block, last_block). Each must have at least one element; the last block of
// the tensor may have fewer than kUniformBlockElements. Calls for disjoint ranges may run at once.
using UniformFn = void (*)(const UniformArgs&, int64_t first_block, int64_t last_block);

// The CPU kernels for one instruction set.
struct UniformTable {
  UniformFn kernels[kNumDtypes];  // [dtype of the tensor]
};

}  // namespace emb
