// The number of a step as a state of one float per row, exact far beyond 2^24, where the floats
// themselves are not: up to 2^24 it is the float of that value, from there on each step is the next
// float (the next bit pattern). What was saved when steps were plain floats is read as it was
// meant.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/portability.h"
#include "optim/functor.h"

namespace emb {

inline constexpr float kLastPlainStep = 1 << 24;
inline constexpr int32_t kBitsOfLastPlainStep = 0x4B800000, kBitsOfLargestFloat = 0x7F7FFFFF;
// What the largest float stands for: about 8.9e8 steps. Later steps are written as this one.
inline constexpr double kLastStep =
    double{kLastPlainStep} + (kBitsOfLargestFloat - kBitsOfLastPlainStep);

EMB_HD float encode_step(double step) {
  if (step <= kLastPlainStep) return static_cast<float>(step);
  if (step > kLastStep) step = kLastStep;
  const int32_t bits = kBitsOfLastPlainStep + static_cast<int32_t>(step - kLastPlainStep);
  float code;
  memcpy(&code, &bits, sizeof code);
  return code;
}

// Steps after 2^24; 0 up to it.
EMB_HD int32_t steps_beyond_plain(float code) {
  int32_t bits;
  memcpy(&bits, &code, sizeof bits);
  return bits > kBitsOfLastPlainStep ? bits - kBitsOfLastPlainStep : 0;
}

// Steps from one number to a later one, rounded to a float only at the end.
EMB_HD float steps_between(float previous, float now) {
  const float plain = fminf(now, kLastPlainStep) - fminf(previous, kLastPlainStep);
  return plain + static_cast<float>(steps_beyond_plain(now) - steps_beyond_plain(previous));
}

// Row-wise Adagrad, which keeps the mean of the squared gradient over the row, and its variants:
// limited norms, updates that depend on how often a row is seen, clipping by the norm of the row
// (Zheng et al., "CowClip", 2022) and decay that catches up on the steps a row was not seen. The
// formulas are those FBGEMM documents for EXACT_ROWWISE_ADAGRAD.

struct RowwiseAdagrad {
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr int kNumbers = 1, kElementStates = 0, kSteppedStates = 0, kRowStates = 1;
  static constexpr int kSums = 1;
  static constexpr bool kSumsOfGradient = true, kCountsSteps = false;
  float lr, eps;

  EMB_HD explicit RowwiseAdagrad(const double* hyper)
      : lr(as_float(hyper[kLearningRate])), eps(as_float(hyper[kOwn])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F, F g, F, F, F* sums) const {
    sums[0] += g * g;
  }
  EMB_HD RowScale begin_row(float* states, const float* sums, float dim) const {
    states[0] += sums[0] / dim;
    return {adagrad_scale(lr, states[0], eps), 1.0f};
  }
  EMB_HD float step(float w, float g, float*, float*, RowScale scale) const {
    return w - scale.step * g;
  }
};

// The same with a moving average of the weights beside them, state 0, which only the module
// touches.
struct EnsembleRowwiseAdagrad : RowwiseAdagrad {
  static constexpr const char* kName = "ensemble_rowwise_adagrad";
  static constexpr int kElementStates = 1;

  using RowwiseAdagrad::RowwiseAdagrad;
};

// Sums of a row that tell its norm before and after the step.
struct RowwiseNorms {
  static constexpr int kElementStates = 0, kSteppedStates = 0, kSums = 3;
  static constexpr bool kSumsOfGradient = false, kCountsSteps = true;
  float lr, eps, max_norm, keep;

  EMB_HD explicit RowwiseNorms(const double* hyper)
      : lr(as_float(hyper[kLearningRate])),
        eps(as_float(hyper[kOwn])),
        max_norm(as_float(hyper[kOwn + 1])),
        keep(WeightDecay(hyper).keep) {}
  template <class Math, class F>
  EMB_HD void add_sums(F w, F g, F, F, F* sums) const {
    sums[0] += g * g;
    sums[1] += w * g;
    sums[2] += w * w;
  }
  EMB_HD float step(float w, float g, float*, float*, RowScale scale) const {
    return scale.keep * w - scale.step * g;
  }

 protected:
  // Scales the step so that the row ends with a norm of at most max_norm (0: any). The decoupled
  // decay that the driver applies to w counts as well.
  EMB_HD RowScale limited(RowScale scale, const float* sums) const {
    if (max_norm <= 0.0f) return scale;
    const float k = scale.keep * keep, s = scale.step;
    const float square = k * k * sums[2] - 2.0f * k * s * sums[1] + s * s * sums[0];
    const float norm = sqrtf(square > 0.0f ? square : 0.0f);
    if (!(norm > max_norm)) return scale;
    const float shrink = max_norm / norm;
    return {scale.step * shrink, scale.keep * shrink};
  }
};

struct RowwiseAdagradMaxNorm : RowwiseNorms {
  static constexpr const char* kName = "rowwise_adagrad_max_norm";
  static constexpr int kNumbers = 2, kRowStates = 1;
  static constexpr bool kCountsSteps = false;

  using RowwiseNorms::RowwiseNorms;
  EMB_HD RowScale begin_row(float* states, const float* sums, float dim) const {
    states[0] += sums[0] / dim;
    return limited({adagrad_scale(lr, states[0], eps), 1.0f}, sums);
  }
};

// log(1 - decay), formed in double: powers of a number so near to 1 need all its digits. A decay of
// 1 or more leaves nothing.
EMB_HD float log_of_keep(double decay) { return decay < 1.0 ? as_float(log1p(-decay)) : -1e30f; }

// Weight decay whose missed steps are made up for when a row is seen again. Own numbers: eps,
// max_norm, rate, least factor, first step. States: sum, step of the last update (step_number.h).
struct RowwiseAdagradGlobalDecay : RowwiseNorms {
  static constexpr const char* kName = "rowwise_adagrad_global_decay";
  static constexpr int kNumbers = 5, kRowStates = 2;
  float now, log_keep, least, keep_now;
  bool started;

  EMB_HD explicit RowwiseAdagradGlobalDecay(const double* hyper)
      : RowwiseNorms(hyper),
        now(encode_step(hyper[kStep])),
        log_keep(log_of_keep(hyper[kLearningRate] * hyper[kOwn + 2])),
        least(as_float(hyper[kOwn + 3])),
        keep_now(as_float(1.0 - hyper[kLearningRate] * hyper[kOwn + 2])),
        started(hyper[kStep] >= hyper[kOwn + 4]) {}
  EMB_HD RowScale begin_row(float* states, const float* sums, float dim) const {
    states[0] += sums[0] / dim;
    float missed = 1.0f;
    if (started) {
      if (states[1] != 0.0f && now != states[1]) {
        const float steps = steps_between(states[1], now);
        missed = expf((steps - 1.0f) * log_keep);
        missed = fminf(1.0f, missed > least ? missed : least);
      }
      states[1] = now;
    }
    return limited({adagrad_scale(lr, states[0], eps), missed * keep_now}, sums);
  }
};

// How often a row was seen, each time counting less with a half-life of so many steps.
struct SeenRows : RowwiseNorms {
  float now, halflife, forget;

  EMB_HD SeenRows(const double* hyper, double half)
      : RowwiseNorms(hyper),
        now(encode_step(hyper[kStep])),
        halflife(as_float(half)),
        forget(half > 0.0 ? as_float(log(2.0) / half) : 0.0f) {}

 protected:
  // Steps since the row was seen last; 1 for a row that was never seen.
  EMB_HD float gap(float previous) const {
    return previous == 0.0f ? 1.0f : steps_between(previous, now);
  }
  EMB_HD float count(float counter, float previous) const {
    if (halflife == 0.0f) return 1.0f;
    return halflife < 0.0f ? counter + 1.0f : 1.0f + expf(-gap(previous) * forget) * counter;
  }
};

// Own numbers: eps, max_norm, half-life, coefficient of the norm, lower bound. States: sum, step of
// the last update, counter.
struct RowwiseAdagradCowClip : SeenRows {
  static constexpr const char* kName = "rowwise_adagrad_cowclip";
  static constexpr int kNumbers = 5, kRowStates = 3;
  float coefficient, lower_bound;

  EMB_HD explicit RowwiseAdagradCowClip(const double* hyper)
      : SeenRows(hyper, hyper[kOwn + 2]),
        coefficient(as_float(hyper[kOwn + 3])),
        lower_bound(as_float(hyper[kOwn + 4])) {}
  EMB_HD RowScale begin_row(float* states, const float* sums, float dim) const {
    states[0] += sums[0] / dim;
    states[2] = count(states[2], states[1]);
    states[1] = now;
    const float allowed = coefficient * sqrtf(sums[2]);
    const float most = states[2] * (allowed > lower_bound ? allowed : lower_bound);
    const float norm = sqrtf(sums[0]);
    const float clip = norm > most ? most / norm : 1.0f;
    return limited({clip * adagrad_scale(lr, states[0], eps), 1.0f}, sums);
  }
};

// Own numbers: eps, max_norm, half-life, decay (as CounterDecay), its rate, first step of the
// adjustments, their exponent or bound, learning rate (as TailRate), count from which it holds,
// whether that is a share of the largest count, largest count. States as above. Its L2 penalty
// enters the sum of squares and, weighed by frequency, the weights.
struct RowwiseAdagradCounter : SeenRows {
  static constexpr const char* kName = "rowwise_adagrad_counter";
  static constexpr int kNumbers = 11, kRowStates = 3;
  enum CounterDecay { kNoDecay = 0, kCoupled = 1, kDecoupled = 2, kAdagradW = 3 };
  enum TailRate { kPlainRate = -1, kRaised = 0, kLowered = 1, kOfCount = 2 };
  int decay, tail_rate;
  float rate, since, bound, threshold, largest, log_keep;
  bool adjusting;

  EMB_HD explicit RowwiseAdagradCounter(const double* hyper)
      : SeenRows(hyper, hyper[kOwn + 2]),
        decay(static_cast<int>(hyper[kOwn + 3])),
        tail_rate(static_cast<int>(hyper[kOwn + 7])),
        rate(as_float(hyper[kOwn + 4])),
        since(as_float(hyper[kStep] - hyper[kOwn + 5])),
        bound(as_float(hyper[kOwn + 6])),
        threshold(as_float(hyper[kOwn + 9] > 0.0 ? floor(hyper[kOwn + 8] * hyper[kOwn + 10])
                                                 : hyper[kOwn + 8])),
        largest(as_float(hyper[kOwn + 10])),
        log_keep(log_of_keep(hyper[kLearningRate] * hyper[kOwn + 4])),
        adjusting(hyper[kOwn + 5] <= 0.0 || hyper[kStep] > hyper[kOwn + 5]) {}

  EMB_HD RowScale begin_row(float* states, const float* sums, float dim) const {
    float squares = sums[0];
    if (decay == kCoupled) squares += rate * (2.0f * sums[1] + rate * sums[2]);
    states[0] += (squares > 0.0f ? squares : 0.0f) / dim;
    const float counter = count(states[2], states[1]), previous = states[1];
    const float plain = adagrad_scale(lr, states[0], eps);
    states[2] = counter;
    states[1] = now;
    RowScale scale{plain, 1.0f};
    if (!adjusting) return limited(scale, sums);
    if (tail_rate != kPlainRate && counter > threshold) scale.step = of_tail(plain, counter);
    const float frequency = halflife / counter;
    if (decay == kDecoupled) scale.keep = 1.0f - frequency * rate * lr;
    if (decay == kCoupled) scale.keep = 1.0f - frequency * rate * plain;
    if (decay == kAdagradW) {
      if (halflife == -1.0f) scale.step = plain * sqrtf(counter);
      if (halflife == -2.0f) {
        scale.step = adagrad_scale(lr * counter < bound ? lr * counter : bound, states[0], eps);
      }
      const float steps = gap(previous);
      const float missed = (steps < since ? steps : since) - 1.0f;
      const float lazy = missed == 0.0f ? 1.0f : expf(missed * log_keep);
      scale.step *= lazy;
      scale.keep = (1.0f - rate * lr) * lazy;
    }
    return limited(scale, sums);
  }

 private:
  EMB_HD float of_tail(float plain, float counter) const {
    if (tail_rate == kOfCount) return adagrad_scale(lr, bound * counter, eps);
    const bool raised = tail_rate == kRaised;
    const float ratio = raised ? largest / (counter + 1.0f) : (counter + 1.0f) / largest;
    const float factor = powf(ratio, bound);
    const float low = raised ? 1.0f : 0.1f, high = raised ? 10.0f : 1.0f;
    return plain * (factor < low ? low : factor > high ? high : factor);
  }
};

}  // namespace emb
