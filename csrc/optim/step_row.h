// An optimizer's step on one row of floats, for the CPU kernels of every op that updates weights.
// Only
// `*_kernels.cpp` may include it.
#pragma once

#include "core/vec.h"

namespace emb::EMB_ISA {

// What a row-wise optimizer wants to know of a gradient.
EMB_HD float mean_square(const float* g, int64_t dim) {
  Vec squares = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) squares += load(g + d) * load(g + d);
  float total = sum(squares);
  for (; d < dim; ++d) total += g[d] * g[d];
  return total / static_cast<float>(dim);
}

// `scale` is what Opt::begin_row returned; states that Opt does not keep are not touched.
template <class Opt>
EMB_HD void step_row(const Opt& opt, int64_t dim, float scale, float* __restrict w,
                     const float* __restrict g, float* __restrict first, float* __restrict second) {
  for (int64_t d = 0; d < dim; ++d) {
    float s1 = Opt::kElementStates > 0 ? first[d] : 0.0f;
    float s2 = Opt::kElementStates > 1 ? second[d] : 0.0f;
    w[d] = opt.step(w[d], g[d], &s1, &s2, scale);
    if constexpr (Opt::kElementStates > 0) first[d] = s1;
    if constexpr (Opt::kElementStates > 1) second[d] = s2;
  }
}

}  // namespace emb::EMB_ISA
