// Functors (see optim/functor.h) of Adam and LAMB, and of variants with one second moment per row.
// Adam (Kingma & Ba, 2015) is lazy, as torch.optim.SparseAdam: only rows with a gradient are
// updated. LAMB (You et al., 2020) is Adam with steps scaled to the norm of the row.
//
// State 0 is the first moment of each element (`m`). The second moment is state 1 (`v`) of each
// element or, in the variants, row-wise state 0.
#pragma once

#include "optim/functor.h"

namespace emb {

// Base of the optimizers of this file: the moments and their bias corrections.
struct AdamMoments {
  enum Column : int { kBeta1 = Hyper::kOptimizerArgs, kBeta2, kEps };
  static constexpr bool kCountsSteps = true;
  float lr, beta1, beta2, eps, one_minus_beta1, one_minus_beta2;
  float correction1;  // 1 / (1 - beta1^step), the factor of the first moment
  float correction2;  // 1 / sqrt(1 - beta2^step), the factor of the root of the second moment

  // The bias corrections are computed in double: in float, 1 - beta2^step
  // loses digits when beta2^step is near 1.
  EMB_HD explicit AdamMoments(const double* hyper)
      : lr(as_float(hyper[Hyper::kLearningRate])),
        beta1(as_float(hyper[kBeta1])),
        beta2(as_float(hyper[kBeta2])),
        eps(as_float(hyper[kEps])),
        one_minus_beta1(as_float(1.0 - hyper[kBeta1])),
        one_minus_beta2(as_float(1.0 - hyper[kBeta2])),
        correction1(as_float(1.0 / (1.0 - pow(hyper[kBeta1], hyper[Hyper::kStep])))),
        correction2(as_float(1.0 / sqrt(1.0 - pow(hyper[kBeta2], hyper[Hyper::kStep])))) {}

 protected:
  // Return the next first moment, and the next second moment.
  template <class F>
  EMB_HD F first_moment(F m, F g) const {
    return beta1 * m + one_minus_beta1 * g;
  }
  template <class F>
  EMB_HD F second_moment(F v, F square) const {
    return beta2 * v + one_minus_beta2 * square;
  }
  // Return the factor of a first moment whose second moment is `v`: correction1 divided by the sum
  // of eps and the corrected root of v; 0 if that sum is 0.
  EMB_HD float momentum_scale(float v) const {
    return ScalarMath::ratio(correction1, sqrtf(v) * correction2 + eps);
  }
};

// Adam with both moments per element.
struct Adam : AdamMoments {
  static constexpr const char* kName = "adam";
  static constexpr int kNumHyper = 3, kElementStates = 2, kSteppedStates = 2, kRowStates = 0;
  static constexpr int kNumRowSums = 0;
  static constexpr bool kSumsNeedGradientOnly = true;
  float corrected_lr;

  EMB_HD explicit Adam(const double* hyper)
      : AdamMoments(hyper),
        corrected_lr(as_float(hyper[Hyper::kLearningRate] /
                              (1.0 - pow(hyper[kBeta1], hyper[Hyper::kStep])))) {}
  template <class Math, class F>
  EMB_HD void add_sums(F, F, F, F, F*) const {}
  EMB_HD RowFactors begin_row(float*, const float*, float) const { return {corrected_lr, 1.0f}; }
  template <class Math, class F>
  EMB_HD F step(F w, F g, F* m, F* v, RowFactors factors) const {
    *m = first_moment(*m, g);
    *v = second_moment(*v, g * g);
    const F denominator = Math::root(*v) * correction2 + eps;
    return denominator == 0.0f ? w : w - factors.gradient * *m / denominator;
  }
};

// Adam with one second moment per row, of the mean squared gradient.
struct PartialRowwiseAdam : AdamMoments {
  static constexpr const char* kName = "partial_rowwise_adam";
  static constexpr int kNumHyper = 3, kElementStates = 1, kSteppedStates = 1, kRowStates = 1;
  static constexpr int kNumRowSums = 1;
  static constexpr bool kSumsNeedGradientOnly = true;

  using AdamMoments::AdamMoments;
  template <class Math, class F>
  EMB_HD void add_sums(F, F g, F, F, F* sums) const {
    sums[0] += g * g;
  }
  EMB_HD RowFactors begin_row(float* states, const float* sums, float dim) const {
    states[0] = second_moment(states[0], sums[0] / dim);
    return {lr * momentum_scale(states[0]), 1.0f};
  }
  template <class Math, class F>
  EMB_HD F step(F w, F g, F* m, F*, RowFactors factors) const {
    *m = first_moment(*m, g);
    return w - factors.gradient * *m;
  }
};

// Return the norm of the weights over the norm of Adam's step, from the squares of both norms.
// Return 1 if either is zero, so that Adam's step can change a row of zeros.
EMB_HD float trust_ratio(float weight_square, float step_square) {
  return weight_square > 0.0f && step_square > 0.0f ? sqrtf(weight_square) / sqrtf(step_square)
                                                    : 1.0f;
}

// LAMB with both moments per element. The sums are the squared norms of the row and of Adam's step,
// which includes the weight decay.
struct Lamb : AdamMoments {
  enum LambColumn : int { kWeightDecay = kEps + 1 };
  static constexpr const char* kName = "lamb";
  static constexpr int kNumHyper = 4, kElementStates = 2, kSteppedStates = 2, kRowStates = 0;
  static constexpr int kNumRowSums = 2;
  static constexpr bool kSumsNeedGradientOnly = false;
  float decay;

  EMB_HD explicit Lamb(const double* hyper)
      : AdamMoments(hyper), decay(as_float(hyper[kWeightDecay])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F w, F g, F m, F v, F* sums) const {
    const F adam_step = decayed_step<Math>(w, first_moment(m, g), second_moment(v, g * g));
    sums[0] += w * w;
    sums[1] += adam_step * adam_step;
  }
  EMB_HD RowFactors begin_row(float*, const float* sums, float) const {
    return {lr * trust_ratio(sums[0], sums[1]), 1.0f};
  }
  template <class Math, class F>
  EMB_HD F step(F w, F g, F* m, F* v, RowFactors factors) const {
    *m = first_moment(*m, g);
    *v = second_moment(*v, g * g);
    return w - factors.gradient * decayed_step<Math>(w, *m, *v);
  }

 private:
  // Return Adam's step with weight decay, from the next moments, without the learning rate.
  template <class Math, class F>
  EMB_HD F decayed_step(F w, F m, F v) const {
    return Math::ratio(correction1 * m, Math::root(v) * correction2 + eps) + decay * w;
  }
};

// LAMB with one second moment per row. The norm of the step then follows from sums of m * m, m * w
// and w * w, without a second pass over the row.
struct PartialRowwiseLamb : AdamMoments {
  enum LambColumn : int { kWeightDecay = kEps + 1 };
  static constexpr const char* kName = "partial_rowwise_lamb";
  static constexpr int kNumHyper = 4, kElementStates = 1, kSteppedStates = 1, kRowStates = 1;
  static constexpr int kNumRowSums = 4;
  static constexpr bool kSumsNeedGradientOnly = false;
  float decay;

  EMB_HD explicit PartialRowwiseLamb(const double* hyper)
      : AdamMoments(hyper), decay(as_float(hyper[kWeightDecay])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F w, F g, F m, F, F* sums) const {
    const F next_m = first_moment(m, g);
    sums[0] += g * g;
    sums[1] += next_m * next_m;
    sums[2] += next_m * w;
    sums[3] += w * w;
  }
  EMB_HD RowFactors begin_row(float* states, const float* sums, float dim) const {
    states[0] = second_moment(states[0], sums[0] / dim);
    const float scale = momentum_scale(states[0]);  // the step is scale * m + decay * w
    const float step_square =
        scale * scale * sums[1] + 2.0f * scale * decay * sums[2] + decay * decay * sums[3];
    const float row_lr = lr * trust_ratio(sums[3], step_square);
    return {row_lr * scale, 1.0f - row_lr * decay};
  }
  template <class Math, class F>
  EMB_HD F step(F w, F g, F* m, F*, RowFactors factors) const {
    *m = first_moment(*m, g);
    return factors.weight * w - factors.gradient * *m;
  }
};

}  // namespace emb
