// Functors (see optim/functor.h) of row-wise Adagrad, whose state is one number per row: the sum,
// over the steps, of the mean squared gradient of the row. Its variants are here too: they limit
// the norm of the row, make updates depend on how often a row occurs, clip the gradient by the norm
// of the row (Zheng et al., "CowClip", 2022), or apply the decay of the steps that the row missed.
// The formulas are those that FBGEMM documents for EXACT_ROWWISE_ADAGRAD. emblib/optim/adagrad.py
// describes the hyperparameters.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/portability.h"
#include "optim/functor.h"

namespace emb {

// A row-wise state of one float can hold the number of a step. Beyond 2^24 floats cannot represent
// all integers. So up to 2^24 the state is the number as a float, and beyond 2^24 each step is the
// next float (the next bit pattern). States that were saved as plain floats keep their meaning.
inline constexpr float kLastPlainStep = 1 << 24;
inline constexpr int32_t kBitsOfLastPlainStep = 0x4B800000, kBitsOfLargestFloat = 0x7F7FFFFF;
// The step that the largest float represents, about 8.9e8. Later steps are stored as this step.
inline constexpr double kMaxStep =
    double{kLastPlainStep} + (kBitsOfLargestFloat - kBitsOfLastPlainStep);

// Return the state that represents `step`, which must be 0 or more.
EMB_HD float encode_step(double step) {
  if (step <= kLastPlainStep) return static_cast<float>(step);
  if (step > kMaxStep) step = kMaxStep;
  const int32_t bits = kBitsOfLastPlainStep + static_cast<int32_t>(step - kLastPlainStep);
  float code;
  memcpy(&code, &bits, sizeof code);
  return code;
}

// Return the number of steps from 2^24 to a stored step; 0 for a step up to 2^24.
EMB_HD int32_t steps_beyond_plain(float code) {
  int32_t bits;
  memcpy(&bits, &code, sizeof bits);
  return bits > kBitsOfLastPlainStep ? bits - kBitsOfLastPlainStep : 0;
}

// Return the number of steps from the stored step `previous` to the stored step `current`, which is
// not earlier. Differences of steps are exact integers; the part beyond 2^24, and then the sum, are
// rounded to floats.
EMB_HD float steps_between(float previous, float current) {
  const float plain = fminf(current, kLastPlainStep) - fminf(previous, kLastPlainStep);
  return plain + static_cast<float>(steps_beyond_plain(current) - steps_beyond_plain(previous));
}

// The row-wise states, in their order; an optimizer has the first kRowStates of them.
struct RowwiseState {
  enum Number : int {
    kSum,       // the sum of the mean squared gradients
    kLastStep,  // the step of the last update that stored it (see encode_step), 0 if none did
    kCounter    // how often the row occurred, see OccurrenceCounter
  };
};

// Row-wise Adagrad without variations.
struct RowwiseAdagrad {
  enum Column : int { kEps = Hyper::kOptimizerArgs };
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr int kNumHyper = 1, kElementStates = 0, kSteppedStates = 0, kRowStates = 1;
  static constexpr int kNumRowSums = 1;
  static constexpr bool kSumsNeedGradientOnly = true, kCountsSteps = false;
  float lr, eps;

  EMB_HD explicit RowwiseAdagrad(const double* hyper)
      : lr(as_float(hyper[Hyper::kLearningRate])), eps(as_float(hyper[kEps])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F, F g, F, F, F* sums) const {
    sums[0] += g * g;
  }
  EMB_HD RowFactors begin_row(float* states, const float* sums, float dim) const {
    states[RowwiseState::kSum] += sums[0] / dim;
    return {adagrad_scale(lr, states[RowwiseState::kSum], eps), 1.0f};
  }
  template <class Math, class F>
  EMB_HD F step(F w, F g, F*, F*, RowFactors factors) const {
    return w - factors.gradient * g;
  }
};

// Row-wise Adagrad with a moving average of the weights as element-wise state 0, which the module
// updates, not `step`.
struct EnsembleRowwiseAdagrad : RowwiseAdagrad {
  static constexpr const char* kName = "ensemble_rowwise_adagrad";
  static constexpr int kElementStates = 1;

  using RowwiseAdagrad::RowwiseAdagrad;
};

// Base of the row-wise optimizers that can limit the norm of the row. The norm after the step
// follows from three sums over the row: sums[0] of g * g, sums[1] of w * g and sums[2] of w * w.
struct RowwiseNorms {
  enum Column : int { kEps = Hyper::kOptimizerArgs, kMaxNorm };
  static constexpr int kElementStates = 0, kSteppedStates = 0, kNumRowSums = 3;
  static constexpr bool kSumsNeedGradientOnly = false, kCountsSteps = true;
  float lr, eps;
  float max_norm;      // 0 for no limit
  float decay_factor;  // WeightDecay::factor

  EMB_HD explicit RowwiseNorms(const double* hyper)
      : lr(as_float(hyper[Hyper::kLearningRate])),
        eps(as_float(hyper[kEps])),
        max_norm(as_float(hyper[kMaxNorm])),
        decay_factor(WeightDecay(hyper).factor) {}
  template <class Math, class F>
  EMB_HD void add_sums(F w, F g, F, F, F* sums) const {
    sums[0] += g * g;
    sums[1] += w * g;
    sums[2] += w * w;
  }
  template <class Math, class F>
  EMB_HD F step(F w, F g, F*, F*, RowFactors factors) const {
    return factors.weight * w - factors.gradient * g;
  }

 protected:
  // Return `factors`, scaled so that the norm of the row after the step is at most max_norm; if
  // that is 0, return them unchanged. The norm includes the decoupled decay, which is applied to w
  // before the step.
  EMB_HD RowFactors limit_norm(RowFactors factors, const float* sums) const {
    if (max_norm <= 0.0f) return factors;
    const float weight_factor = factors.weight * decay_factor, gradient_factor = factors.gradient;
    const float square = weight_factor * weight_factor * sums[2] -
                         2.0f * weight_factor * gradient_factor * sums[1] +
                         gradient_factor * gradient_factor * sums[0];
    const float norm = sqrtf(square > 0.0f ? square : 0.0f);
    if (!(norm > max_norm)) return factors;
    const float norm_scale = max_norm / norm;
    return {factors.gradient * norm_scale, factors.weight * norm_scale};
  }
};

// Row-wise Adagrad that limits the norm of the row.
struct RowwiseAdagradMaxNorm : RowwiseNorms {
  static constexpr const char* kName = "rowwise_adagrad_max_norm";
  static constexpr int kNumHyper = 2, kRowStates = 1;
  static constexpr bool kCountsSteps = false;

  using RowwiseNorms::RowwiseNorms;
  EMB_HD RowFactors begin_row(float* states, const float* sums, float dim) const {
    states[RowwiseState::kSum] += sums[0] / dim;
    return limit_norm({adagrad_scale(lr, states[RowwiseState::kSum], eps), 1.0f}, sums);
  }
};

// Return log(1 - decay), computed in double: powers of a number close to 1 need all its digits. For
// a decay of 1 or more return a number whose exponential is 0.
EMB_HD float log_decay_factor(double decay) {
  return decay < 1.0 ? as_float(log1p(-decay)) : -1e30f;
}

// Row-wise Adagrad with a weight decay per step (GlobalDecay in emblib/optim). An update in any
// step decays the row for that step. From step kFirstStep on, updates also store their step, and
// decay the row for the steps since the stored one; the factor for these missed steps is at least
// min_factor.
struct RowwiseAdagradGlobalDecay : RowwiseNorms {
  enum DecayColumn : int { kRate = kMaxNorm + 1, kMinFactor, kFirstStep };  // entries of `hyper`
  static constexpr const char* kName = "rowwise_adagrad_global_decay";
  static constexpr int kNumHyper = 5, kRowStates = 2;
  float current_step;  // the step, as encode_step stores it
  float log_factor;    // log of the factor of one missed step
  float min_factor;
  float step_decay_factor;  // factor of the weights for the step of the update
  bool has_started;         // whether this step is kFirstStep or later

  EMB_HD explicit RowwiseAdagradGlobalDecay(const double* hyper)
      : RowwiseNorms(hyper),
        current_step(encode_step(hyper[Hyper::kStep])),
        log_factor(log_decay_factor(hyper[Hyper::kLearningRate] * hyper[kRate])),
        min_factor(as_float(hyper[kMinFactor])),
        step_decay_factor(as_float(1.0 - hyper[Hyper::kLearningRate] * hyper[kRate])),
        has_started(hyper[Hyper::kStep] >= hyper[kFirstStep]) {}
  EMB_HD RowFactors begin_row(float* states, const float* sums, float dim) const {
    states[RowwiseState::kSum] += sums[0] / dim;
    float missed_decay = 1.0f;  // factor for the steps that the row missed
    if (has_started) {
      if (states[RowwiseState::kLastStep] != 0.0f &&
          current_step != states[RowwiseState::kLastStep]) {
        const float num_steps = steps_between(states[RowwiseState::kLastStep], current_step);
        missed_decay = expf((num_steps - 1.0f) * log_factor);
        missed_decay = fminf(1.0f, missed_decay > min_factor ? missed_decay : min_factor);
      }
      states[RowwiseState::kLastStep] = current_step;
    }
    return limit_norm(
        {adagrad_scale(lr, states[RowwiseState::kSum], eps), missed_decay * step_decay_factor},
        sums);
  }
};

// Base of the optimizers that count how often a row occurred. With a positive half-life, in steps,
// the count of a row decays: it is halved after that many steps. With a negative half-life it is
// the number of updates of the row, and with 0 it is 1.
struct OccurrenceCounter : RowwiseNorms {
  enum CounterColumn : int { kHalflife = kMaxNorm + 1 };
  float current_step;  // the step, as encode_step stores it
  float halflife;      // in steps
  float decay_rate;    // a count is multiplied by exp(-decay_rate) per step

  EMB_HD OccurrenceCounter(const double* hyper, double halflife_steps)
      : RowwiseNorms(hyper),
        current_step(encode_step(hyper[Hyper::kStep])),
        halflife(as_float(halflife_steps)),
        decay_rate(halflife_steps > 0.0 ? as_float(log(2.0) / halflife_steps) : 0.0f) {}

 protected:
  // Return the number of steps since the stored step `previous`, that of the last update of the
  // row; 1 for a row without updates, whose stored step is 0.
  EMB_HD float steps_since(float previous) const {
    return previous == 0.0f ? 1.0f : steps_between(previous, current_step);
  }
  // Return the count of a row after this step. `counter` is its count at its last step `previous`.
  EMB_HD float next_count(float counter, float previous) const {
    if (halflife == 0.0f) return 1.0f;
    return halflife < 0.0f ? counter + 1.0f
                           : 1.0f + expf(-steps_since(previous) * decay_rate) * counter;
  }
};

// Row-wise Adagrad that clips the norm of the gradient (CowClip in emblib/optim). The maximum is
// the count of the row times the larger of kLowerBound and kCoefficient times the norm of the row.
// The sum of squares uses the gradient before it is clipped.
struct RowwiseAdagradCowClip : OccurrenceCounter {
  enum ClipColumn : int { kCoefficient = kHalflife + 1, kLowerBound };
  static constexpr const char* kName = "rowwise_adagrad_cowclip";
  static constexpr int kNumHyper = 5, kRowStates = 3;
  float coefficient, lower_bound;

  EMB_HD explicit RowwiseAdagradCowClip(const double* hyper)
      : OccurrenceCounter(hyper, hyper[kHalflife]),
        coefficient(as_float(hyper[kCoefficient])),
        lower_bound(as_float(hyper[kLowerBound])) {}
  EMB_HD RowFactors begin_row(float* states, const float* sums, float dim) const {
    states[RowwiseState::kSum] += sums[0] / dim;
    states[RowwiseState::kCounter] =
        next_count(states[RowwiseState::kCounter], states[RowwiseState::kLastStep]);
    states[RowwiseState::kLastStep] = current_step;
    const float scaled_norm = coefficient * sqrtf(sums[2]);
    const float max_norm_of_grad =
        states[RowwiseState::kCounter] * (scaled_norm > lower_bound ? scaled_norm : lower_bound);
    const float norm = sqrtf(sums[0]);
    const float clip = norm > max_norm_of_grad ? max_norm_of_grad / norm : 1.0f;
    return limit_norm({clip * adagrad_scale(lr, states[RowwiseState::kSum], eps), 1.0f}, sums);
  }
};

// Row-wise Adagrad whose weight decay and step size depend on the count of the row (Counter in
// emblib/optim). The *step size* of a row is the factor of its gradient: by default lr / (root of
// the sum + eps). It is changed, and weights decay, only in steps after kFirstStep. TailRate
// selects the change for rows in the *tail*, those whose count is above the threshold. CounterDecay
// selects the decay:
//   kCoupled    The L2 penalty is added to the gradient for the sum of squares, in every step, but
//               not for the step of the weights. The weights are multiplied by 1 - halflife / count
//               * kRate * step size, where the step size is that of a row outside the tail.
//   kDecoupled  The weights are multiplied by 1 - halflife / count * kRate * lr.
//   kAdagradW   The weights are multiplied by 1 - kRate * lr per step, also for the steps after
//               kFirstStep that the row missed. The factor of the missed steps multiplies the step
//               size too. With a half-life of -1 the step size is the default times the root of the
//               count; with -2 it is the default with lr * count, at most kBound, in place of lr.
//               In both cases TailRate is ignored.
struct RowwiseAdagradCounter : OccurrenceCounter {
  enum AdjustColumn : int {
    kDecayKind = kHalflife + 1,  // a CounterDecay
    kRate,                       // rate of the weight decay
    kFirstStep,  // step after which step sizes change and weights decay; <= 0: from step 1 on
    kBound,      // exponent or factor of TailRate; maximum of lr * count (kAdagradW)
    kTailRate,   // a TailRate
    kThreshold,  // a row of a higher count is in the tail
    kThresholdIsRelative,  // above 0: the threshold is a fraction of kLargestCount, rounded down
    // The largest count of a row of the module when it was last measured, plus 1; 1 before.
    kLargestCount
  };
  static constexpr const char* kName = "rowwise_adagrad_counter";
  static constexpr int kNumHyper = 11, kRowStates = 3;
  enum CounterDecay { kNoDecay = 0, kCoupled = 1, kDecoupled = 2, kAdagradW = 3 };
  // The step size of a row in the tail; the default is `default_step_size`.
  enum TailRate {
    kEqual = -1,   // the default
    kRaised = 0,   // the default times (kLargestCount / (count + 1)) ^ kBound, clamped to [1, 10]
    kLowered = 1,  // the default times ((count + 1) / kLargestCount) ^ kBound, clamped to [0.1, 1]
    kByCount = 2   // lr / (root of (kBound * count) + eps)
  };
  int decay, tail_rate;
  float rate;
  float steps_since_start;  // steps since kFirstStep
  float bound, threshold, largest_count;
  float log_factor;  // log of the factor of one missed step (kAdagradW)
  bool is_adjusted;  // whether step sizes change and weights decay in this step

  EMB_HD explicit RowwiseAdagradCounter(const double* hyper)
      : OccurrenceCounter(hyper, hyper[kHalflife]),
        decay(static_cast<int>(hyper[kDecayKind])),
        tail_rate(static_cast<int>(hyper[kTailRate])),
        rate(as_float(hyper[kRate])),
        steps_since_start(as_float(hyper[Hyper::kStep] - hyper[kFirstStep])),
        bound(as_float(hyper[kBound])),
        threshold(as_float(hyper[kThresholdIsRelative] > 0.0
                               ? floor(hyper[kThreshold] * hyper[kLargestCount])
                               : hyper[kThreshold])),
        largest_count(as_float(hyper[kLargestCount])),
        log_factor(log_decay_factor(hyper[Hyper::kLearningRate] * hyper[kRate])),
        is_adjusted(hyper[kFirstStep] <= 0.0 || hyper[Hyper::kStep] > hyper[kFirstStep]) {}

  EMB_HD RowFactors begin_row(float* states, const float* sums, float dim) const {
    float squares = sums[0];
    if (decay == kCoupled) squares += rate * (2.0f * sums[1] + rate * sums[2]);
    states[RowwiseState::kSum] += (squares > 0.0f ? squares : 0.0f) / dim;
    const float previous_step = states[RowwiseState::kLastStep];
    const float counter = next_count(states[RowwiseState::kCounter], previous_step);
    const float default_step_size = adagrad_scale(lr, states[RowwiseState::kSum], eps);
    states[RowwiseState::kCounter] = counter;
    states[RowwiseState::kLastStep] = current_step;
    RowFactors factors{default_step_size, 1.0f};
    if (!is_adjusted) return limit_norm(factors, sums);
    if (tail_rate != kEqual && counter > threshold)
      factors.gradient = tail_step_size(default_step_size, counter);
    const float halflife_over_count = halflife / counter;
    if (decay == kDecoupled) factors.weight = 1.0f - halflife_over_count * rate * lr;
    if (decay == kCoupled) factors.weight = 1.0f - halflife_over_count * rate * default_step_size;
    if (decay == kAdagradW) {
      if (halflife == -1.0f) factors.gradient = default_step_size * sqrtf(counter);
      if (halflife == -2.0f) {
        factors.gradient = adagrad_scale(lr * counter < bound ? lr * counter : bound,
                                         states[RowwiseState::kSum], eps);
      }
      const float num_steps = steps_since(previous_step);
      const float num_missed_steps =
          (num_steps < steps_since_start ? num_steps : steps_since_start) - 1.0f;
      const float missed_decay =
          num_missed_steps == 0.0f ? 1.0f : expf(num_missed_steps * log_factor);
      factors.gradient *= missed_decay;
      factors.weight = (1.0f - rate * lr) * missed_decay;
    }
    return limit_norm(factors, sums);
  }

 private:
  // Return the step size of a row in the tail.
  EMB_HD float tail_step_size(float default_step_size, float counter) const {
    if (tail_rate == kByCount) return adagrad_scale(lr, bound * counter, eps);
    const bool is_raised = tail_rate == kRaised;
    const float ratio =
        is_raised ? largest_count / (counter + 1.0f) : (counter + 1.0f) / largest_count;
    const float factor = powf(ratio, bound);
    const float min_factor = is_raised ? 1.0f : 0.1f,
                max_factor = is_raised ? 10.0f : 1.0f;  // FBGEMM's bounds
    return default_step_size *
           (factor < min_factor ? min_factor : (factor > max_factor ? max_factor : factor));
  }
};

}  // namespace emb
