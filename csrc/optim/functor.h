// The common part of the optimizers: the form of a functor, and weight decay.
//
// A functor is the arithmetic of an optimizer on registers. It depends on no thread index, device
// or dtype. It is built from `hyper`, the optimizer's float64 vector: the common entries that
// core/codes.h names (learning rate, step, ..), then kNumHyper entries that only this functor
// reads. A row is updated in three steps. `add_sums` is called for every element of the row and
// adds the element's terms to kNumRowSums sums. `begin_row` computes two factors from these sums
// and the row-wise states, and updates the row-wise states. `step` updates one element and its
// states. Optimizers without sums skip `add_sums`, and the CUDA drivers compute sums[0] themselves
// where kSumsNeedGradientOnly.
#pragma once

#include <cmath>

#include "core/codes.h"
#include "core/portability.h"

namespace emb {

// The members of a functor:
//
//   kName                 its name
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
//   begin_row(states, sums, dim)         return the RowFactors of a row of `dim` columns
//   step<Math>(w, g, &m, &v, factors)    return the new weight; w is after the decoupled decay

// The maximum numbers over all optimizers.
inline constexpr int kMaxElementStates = 2, kMaxRowStates = 3, kMaxRowSums = 4;

// Round a hyperparameter to the float with which kernels compute.
EMB_HD float as_float(double x) { return static_cast<float>(x); }

// The two kinds of weight decay that every optimizer supports; the drivers apply them.
struct WeightDecay {
  // l2 times the weight is added to the gradient; the weight is multiplied by `factor` (decoupled
  // decay) before the step.
  float l2, factor;

  EMB_HD explicit WeightDecay(const double* hyper)
      : l2(as_float(hyper[Hyper::kL2])),
        factor(as_float(1.0 - hyper[Hyper::kLearningRate] * hyper[Hyper::kDecay])) {}
};

// The two factors of a row that `begin_row` returns and `step` takes: `gradient` is the factor of
// the gradient, or of the first moment that replaces it, and `weight` the factor of the weights.
// FTRL has 1 / lr in `gradient`, see sgd.h.
struct RowFactors {
  float gradient = 0.0f, weight = 1.0f;
};

// The arithmetic of `add_sums` and `step` on single elements; VecMath is that on registers.
struct ScalarMath {
  EMB_HD static float root(float x) { return sqrtf(x); }
  EMB_HD static float ratio(float a, float b) { return b == 0.0f ? 0.0f : a / b; }
};

// Return lr / (sqrt(sum) + eps); 0 if that denominator is 0, so that 0/0 does not become NaN.
EMB_HD float adagrad_scale(float lr, float sum, float eps) {
  const float denominator = sqrtf(sum) + eps;
  return denominator == 0.0f ? 0.0f : lr / denominator;
}

}  // namespace emb
