// The arguments of `fill_uniform_`, and its CPU kernels.
#pragma once

#include "core/dtype.h"

namespace emb {

struct UniformArgs {
  void* out;
  int64_t numel;
  float low, span;
  uint64_t seed;
};

// Elements of a block of the CPU kernel, which advances 16 Philox counters at once.
inline constexpr int64_t kUniformBlock = 64;

using UniformFn = void (*)(const UniformArgs&, int64_t first_block, int64_t last_block);

struct UniformTable {
  UniformFn at[kDtypes];  // [dtype]
};

}  // namespace emb
