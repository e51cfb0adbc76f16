// Adam (Kingma & Ba, 2015), lazy: only rows that received a gradient move, as in
// torch.optim.SparseAdam; LAMB (You et al., 2020), Adam with steps as long as the row is; and the
// two with one second moment a row.
#pragma once

#include "optim/functor.h"

namespace emb {

// Own numbers: beta1, beta2, eps.
struct AdamMoments {
  static constexpr bool kCountsSteps = true;
  float lr, beta1, beta2, eps, one_minus_beta1, one_minus_beta2, correction1, correction2;

  // The bias corrections are formed in double: 1 - beta2^step loses all its digits in float.
  EMB_HD explicit AdamMoments(const double* hyper)
      : lr(as_float(hyper[kLearningRate])),
        beta1(as_float(hyper[kOwn])),
        beta2(as_float(hyper[kOwn + 1])),
        eps(as_float(hyper[kOwn + 2])),
        one_minus_beta1(as_float(1.0 - hyper[kOwn])),
        one_minus_beta2(as_float(1.0 - hyper[kOwn + 1])),
        correction1(as_float(1.0 / (1.0 - pow(hyper[kOwn], hyper[kStep])))),
        correction2(as_float(1.0 / sqrt(1.0 - pow(hyper[kOwn + 1], hyper[kStep])))) {}

 protected:
  template <class F>
  EMB_HD F first(F m, F g) const {
    return beta1 * m + one_minus_beta1 * g;
  }
  template <class F>
  EMB_HD F second(F v, F square) const {
    return beta2 * v + one_minus_beta2 * square;
  }
  // What a first moment is multiplied by where the second is `v`.
  EMB_HD float direction(float v) const {
    return ScalarMath::ratio(correction1, sqrtf(v) * correction2 + eps);
  }
};

struct Adam : AdamMoments {
  static constexpr const char* kName = "adam";
  static constexpr int kNumbers = 3, kElementStates = 2, kSteppedStates = 2, kRowStates = 0;
  static constexpr int kSums = 0;
  static constexpr bool kSumsOfGradient = true;
  float corrected_lr;

  EMB_HD explicit Adam(const double* hyper)
      : AdamMoments(hyper),
        corrected_lr(as_float(hyper[kLearningRate] / (1.0 - pow(hyper[kOwn], hyper[kStep])))) {}
  template <class Math, class F>
  EMB_HD void add_sums(F, F, F, F, F*) const {}
  EMB_HD RowScale begin_row(float*, const float*, float) const { return {corrected_lr, 1.0f}; }
  EMB_HD float step(float w, float g, float* m, float* v, RowScale scale) const {
    *m = first(*m, g);
    *v = second(*v, g * g);
    const float denominator = sqrtf(*v) * correction2 + eps;
    return denominator == 0.0f ? w : w - scale.step * *m / denominator;
  }
};

struct PartialRowwiseAdam : AdamMoments {
  static constexpr const char* kName = "partial_rowwise_adam";
  static constexpr int kNumbers = 3, kElementStates = 1, kSteppedStates = 1, kRowStates = 1;
  static constexpr int kSums = 1;
  static constexpr bool kSumsOfGradient = true;

  using AdamMoments::AdamMoments;
  template <class Math, class F>
  EMB_HD void add_sums(F, F g, F, F, F* sums) const {
    sums[0] += g * g;
  }
  EMB_HD RowScale begin_row(float* states, const float* sums, float dim) const {
    states[0] = second(states[0], sums[0] / dim);
    return {lr * direction(states[0]), 1.0f};
  }
  EMB_HD float step(float w, float g, float* m, float*, RowScale scale) const {
    *m = first(*m, g);
    return w - scale.step * *m;
  }
};

// ||w|| / ||r|| from the squares of the norms. Where either is zero there is no ratio: the row
// takes Adam's own step, so that a row of zeros can leave it.
EMB_HD float trust_ratio(float weight_square, float step_square) {
  return weight_square > 0.0f && step_square > 0.0f ? sqrtf(weight_square) / sqrtf(step_square)
                                                    : 1.0f;
}

// Own numbers: beta1, beta2, eps, weight decay, which is part of the step whose norm is taken.
struct Lamb : AdamMoments {
  static constexpr const char* kName = "lamb";
  static constexpr int kNumbers = 4, kElementStates = 2, kSteppedStates = 2, kRowStates = 0;
  static constexpr int kSums = 2;
  static constexpr bool kSumsOfGradient = false;
  float decay;

  EMB_HD explicit Lamb(const double* hyper)
      : AdamMoments(hyper), decay(as_float(hyper[kOwn + 3])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F w, F g, F m, F v, F* sums) const {
    const F r = whole_step<Math>(w, first(m, g), second(v, g * g));
    sums[0] += w * w;
    sums[1] += r * r;
  }
  EMB_HD RowScale begin_row(float*, const float* sums, float) const {
    return {lr * trust_ratio(sums[0], sums[1]), 1.0f};
  }
  EMB_HD float step(float w, float g, float* m, float* v, RowScale scale) const {
    *m = first(*m, g);
    *v = second(*v, g * g);
    return w - scale.step * whole_step<ScalarMath>(w, *m, *v);
  }

 private:
  template <class Math, class F>
  EMB_HD F whole_step(F w, F m, F v) const {
    return Math::ratio(correction1 * m, Math::root(v) * correction2 + eps) + decay * w;
  }
};

// Own numbers as LAMB. With one second moment a row, the norm of the step follows from sums of
// m * m, m * w and w * w: no second pass over the row.
struct PartialRowwiseLamb : AdamMoments {
  static constexpr const char* kName = "partial_rowwise_lamb";
  static constexpr int kNumbers = 4, kElementStates = 1, kSteppedStates = 1, kRowStates = 1;
  static constexpr int kSums = 4;
  static constexpr bool kSumsOfGradient = false;
  float decay;

  EMB_HD explicit PartialRowwiseLamb(const double* hyper)
      : AdamMoments(hyper), decay(as_float(hyper[kOwn + 3])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F w, F g, F m, F, F* sums) const {
    const F next = first(m, g);
    sums[0] += g * g;
    sums[1] += next * next;
    sums[2] += next * w;
    sums[3] += w * w;
  }
  EMB_HD RowScale begin_row(float* states, const float* sums, float dim) const {
    states[0] = second(states[0], sums[0] / dim);
    const float q = direction(states[0]);
    const float square = q * q * sums[1] + 2.0f * q * decay * sums[2] + decay * decay * sums[3];
    const float length = lr * trust_ratio(sums[3], square);
    return {length * q, 1.0f - length * decay};
  }
  EMB_HD float step(float w, float g, float* m, float*, RowScale scale) const {
    *m = first(*m, g);
    return scale.keep * w - scale.step * *m;
  }
};

}  // namespace emb
