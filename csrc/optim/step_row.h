// An optimizer's step on one row of floats, for the CPU kernels of every op that updates weights.
// Only `*_kernels.cpp` may include it.
#pragma once

#include "core/vec.h"
#include "optim/functor.h"

namespace emb::EMB_ISA {

// Arithmetic of a functor's sums on registers of floats.
struct VecMath {
  EMB_HD static Vec root(Vec x) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
    return _mm256_sqrt_ps(x);
#else
    for (int i = 0; i < kLanes; ++i) x[i] = sqrtf(x[i]);
    return x;
#endif
  }
  EMB_HD static Vec ratio(Vec a, Vec b) {
    const auto none = b == Vec{};
    return none ? Vec{} : a / (none ? broadcast(1.0f) : b);
  }
};

// The rows an optimizer works on: weights, gradient and the states that it steps.
struct RowViews {
  float* __restrict w;
  float* __restrict g;
  float* __restrict first;
  float* __restrict second;
};

// The sums that `begin_row` wants. Lanes past the end are zeros, which add nothing to any of them.
template <class Opt>
EMB_HD void row_sums(const Opt& opt, int64_t dim, const RowViews& row, float* sums) {
  if constexpr (Opt::kSums > 0) {
    Vec totals[Opt::kSums] = {};
    const auto add = [&](const auto& read) {
      const Vec w = Opt::kSumsOfGradient ? Vec{} : read(row.w);
      const Vec m = Opt::kSumsOfGradient || Opt::kSteppedStates < 1 ? Vec{} : read(row.first);
      const Vec v = Opt::kSumsOfGradient || Opt::kSteppedStates < 2 ? Vec{} : read(row.second);
      opt.template add_sums<VecMath>(w, read(row.g), m, v, totals);
    };
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      add([d](const float* values) { return load(values + d); });
    }
    const int rest = static_cast<int>(dim - d);
    if (rest > 0) {
      add([d, rest](const float* values) { return load_first(values + d, rest); });
    }
    for (int k = 0; k < Opt::kSums; ++k) sums[k] = sum(totals[k]);
  }
}

// `scale` is what Opt::begin_row returned; states that Opt does not step are not touched.
template <class Opt>
EMB_HD void step_row(const Opt& opt, int64_t dim, RowScale scale, const RowViews& row) {
  float* __restrict w = row.w;
  float* __restrict first = row.first;
  float* __restrict second = row.second;
  const float* __restrict g = row.g;
  for (int64_t d = 0; d < dim; ++d) {
    float s1 = Opt::kSteppedStates > 0 ? first[d] : 0.0f;
    float s2 = Opt::kSteppedStates > 1 ? second[d] : 0.0f;
    w[d] = opt.step(w[d], g[d], &s1, &s2, scale);
    if constexpr (Opt::kSteppedStates > 0) first[d] = s1;
    if constexpr (Opt::kSteppedStates > 1) second[d] = s2;
  }
}

// The parts of weight decay before and after `begin_row`; rows are in the core's cache.
EMB_HD void add_penalty(const WeightDecay& decay, int64_t dim, const RowViews& row) {
  if (decay.l2 == 0.0f) return;
  float* __restrict g = row.g;
  const float* __restrict w = row.w;
  for (int64_t d = 0; d < dim; ++d) g[d] += decay.l2 * w[d];
}

EMB_HD void decay_row(const WeightDecay& decay, int64_t dim, const RowViews& row) {
  if (decay.keep == 1.0f) return;
  float* __restrict w = row.w;
  for (int64_t d = 0; d < dim; ++d) w[d] *= decay.keep;
}

}  // namespace emb::EMB_ISA
