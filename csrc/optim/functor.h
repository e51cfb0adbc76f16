// What the optimizers have in common: the first entries of the `hyper` vector, and the form of a
// functor.
//
// A functor is a pure function of registers: no thread index, no device, no dtype. It is built from
// `hyper`. `add_sums` is called for every element of a row and adds its terms to up to kNumRowSums
// sums; `begin_row` turns these and the row-wise states into two factors; `step` updates one
// element. Optimizers without sums skip the first. The CPU and CUDA drivers differ only in which
// thread calls them. The members of a functor:
//
//   kName                 its name
//   kNumHyper             its arguments in `hyper`, after the common entries
//   kElementStates        states with one entry per element, which come first in the list of states
//   kSteppedStates        how many of them `step` updates; the others are not touched
//   kRowStates            states of one float per row
//   kNumRowSums           sums over a row
//   kSumsNeedGradientOnly whether the sums depend on the gradient only
//   kCountsSteps          whether `hyper` must hold the number of the step, from 1
//   add_sums<Math>(w, g, m, v, sums), begin_row(states, sums, dim), step(w, g, &m, &v, scale)
#pragma once

#include <cmath>

#include "core/codes.h"
#include "core/portability.h"

namespace emb {

inline constexpr int kMaxElementStates = 2, kMaxRowStates = 3, kMaxRowSums = 4;

EMB_HD float as_float(double x) { return static_cast<float>(x); }

// The two kinds of weight decay that every optimizer supports, applied around the functor.
struct WeightDecay {
  float l2, factor;

  EMB_HD explicit WeightDecay(const double* hyper)
      : l2(as_float(hyper[kL2])), factor(as_float(1.0 - hyper[kLearningRate] * hyper[kDecay])) {}
};

// The factors that `begin_row` passes to `step`: of the gradient (or momentum), and of the weights.
struct RowFactors {
  float gradient = 0.0f, weight = 1.0f;
};

// The arithmetic of `add_sums` on single elements; VecMath is the one on registers.
struct ScalarMath {
  EMB_HD static float root(float x) { return sqrtf(x); }
  EMB_HD static float ratio(float a, float b) { return b == 0.0f ? 0.0f : a / b; }
};

// Return lr / (sqrt(sum) + eps), and 0 if all squares were zero: 0/0 must not become NaN.
EMB_HD float adagrad_scale(float lr, float sum, float eps) {
  const float denominator = sqrtf(sum) + eps;
  return denominator == 0.0f ? 0.0f : lr / denominator;
}

}  // namespace emb
