// The kernel that fills a range with uniform random numbers on the CPU, and how it is reached.
#pragma once

#include "core/dtype.h"

namespace emb {

struct UniformArgs {
  void* out;
  int64_t numel;
  float low, span;
  uint64_t seed;
};

// Random numbers come in blocks of this many elements, 16 Philox counters at once.
inline constexpr int64_t kUniformBlock = 64;

using UniformFn = void (*)(const UniformArgs&, int64_t first_block, int64_t last_block);

struct UniformTable {
  UniformFn at[3];  // [dtype]
};

}  // namespace emb
