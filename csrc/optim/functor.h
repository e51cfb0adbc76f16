// The common part of the optimizers: the form of a functor, and weight decay.
//
// A functor is the arithmetic of an optimizer on registers. It depends on no thread index, device
// or dtype. It is built from `hyper`, the optimizer's float64 vector: the common entries that
// core/codes.h names (learning rate, step, ..), then kNumHyper entries that only this functor
// reads. A row is updated in three steps:
//   (1) `add_sums`, called for every element of the row, adds the element's terms to kNumRowSums
//       sums. For an optimizer without sums it is not called. Where kSumsNeedGradientOnly, CUDA
//       kernels compute sums[0] themselves.
//   (2) `begin_row` computes two factors from these sums and the row-wise states, and updates the
//       row-wise states.
//   (3) `step`, called for every element, updates the element and its states.
#pragma once

#include <cmath>

#include "core/codes.h"
#include "core/portability.h"

namespace emb {

// The members of a functor:
//
//   kName                 its name
//   Column                (and other enums ..Column) the indices of its own arguments in `hyper`
//   kNumHyper             the number of its arguments in `hyper`, after the common entries
//   kElementStates        the number of states with one entry per element; they come first in the
//                         list of states
//   kSteppedStates        the number of these, from the first on, that `step` updates
//   kRowStates            the number of states of one float per row
//   kNumRowSums           the number of sums over a row
//   kSumsNeedGradientOnly whether there are no sums, or only sums[0], the sum of g * g
//   kCountsSteps          whether `hyper` must hold the number of the step, from 1
//   add_sums<Math>(w, g, m, v, sums)     w weight before the decoupled decay, g gradient with the
//                                        L2 penalty, m and v the element-wise states before the
//                                        step; floats or vectors
//   begin_row(states, sums, dim)         return the RowFactors of a row of `dim` columns; `states`
//                                        has kRowStates entries and is updated, `sums` has
//                                        kNumRowSums; an optimizer without them does not read them
//   step<Math>(w, g, &m, &v, factors)    return the new weight; w is after the decoupled decay

// The maximum numbers over all optimizers.
inline constexpr int kMaxElementStates = 2, kMaxRowStates = 3, kMaxRowSums = 4;

// Round a hyperparameter to the float with which kernels compute.
EMB_HD float as_float(double x) { return static_cast<float>(x); }

// The two kinds of weight decay that every optimizer supports. The code that calls a functor
// applies them: it adds l2 * weight to the gradient, and multiplies the weight by `factor`
// (decoupled decay) before the step.
struct WeightDecay {
  float l2, factor;

  EMB_HD explicit WeightDecay(const double* hyper)
      : l2(as_float(hyper[Hyper::kL2])),
        factor(as_float(1.0 - hyper[Hyper::kLearningRate] * hyper[Hyper::kDecay])) {}
};

// The two factors of a row that `begin_row` returns and `step` takes.
struct RowFactors {
  float gradient = 0.0f;  // of the gradient, or of the first moment instead of it; FTRL: 1 / lr
  float weight = 1.0f;    // of the weights
};

// The arithmetic of `add_sums` and `step` on single elements; VecMath (optimizer_step_cpu.h) is the
// same on registers.
struct ScalarMath {
  EMB_HD static float root(float x) { return sqrtf(x); }
  // Return a / b, or 0 if b is 0.
  EMB_HD static float ratio(float a, float b) { return b == 0.0f ? 0.0f : a / b; }
};

// Return lr / (sqrt(sum) + eps); 0 if that denominator is 0, so that 0/0 does not become NaN.
EMB_HD float adagrad_scale(float lr, float sum, float eps) {
  const float denominator = sqrtf(sum) + eps;
  return denominator == 0.0f ? 0.0f : lr / denominator;
}

}  // namespace emb
