// Functors (see optim/functor.h) of SGD, Adagrad (Duchi et al., 2011), LARS and FTRL.
#pragma once

#include "optim/functor.h"

namespace emb {

// w -= lr * g.
struct Sgd {
  static constexpr const char* kName = "sgd";
  static constexpr int kNumHyper = 0, kElementStates = 0, kSteppedStates = 0, kRowStates = 0;
  static constexpr int kNumRowSums = 0;
  static constexpr bool kSumsNeedGradientOnly = true, kCountsSteps = false;
  float lr;

  EMB_HD explicit Sgd(const double* hyper) : lr(as_float(hyper[Hyper::kLearningRate])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F, F, F, F, F*) const {}
  EMB_HD RowFactors begin_row(float*, const float*, float) const { return {lr, 1.0f}; }
  template <class Math, class F>
  EMB_HD F step(F w, F g, F*, F*, RowFactors factors) const {
    return w - factors.gradient * g;
  }
};

// Adagrad; state 0 is the sum of squared gradients of each element.
struct Adagrad {
  enum Column : int { kEps = Hyper::kOptimizerArgs };
  static constexpr const char* kName = "adagrad";
  static constexpr int kNumHyper = 1, kElementStates = 1, kSteppedStates = 1, kRowStates = 0;
  static constexpr int kNumRowSums = 0;
  static constexpr bool kSumsNeedGradientOnly = true, kCountsSteps = false;
  float lr, eps;

  EMB_HD explicit Adagrad(const double* hyper)
      : lr(as_float(hyper[Hyper::kLearningRate])), eps(as_float(hyper[kEps])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F, F, F, F, F*) const {}
  EMB_HD RowFactors begin_row(float*, const float*, float) const { return {lr, 1.0f}; }
  template <class Math, class F>
  EMB_HD F step(F w, F g, F* sum, F*, RowFactors factors) const {
    *sum += g * g;
    // With eps = 0, squares that are all zero make 0/0: the element must not change.
    return *sum == 0.0f ? w : w - factors.gradient * g / (Math::root(*sum) + eps);
  }
};

// SGD with momentum (state 0) and a learning rate per row that follows the norms of row and
// gradient (You et al., "Large Batch Training of Convolutional Networks", 2017).
struct Lars {
  enum Column : int { kMomentum = Hyper::kOptimizerArgs, kEta, kWeightDecay };
  static constexpr const char* kName = "lars";
  static constexpr int kNumHyper = 3, kElementStates = 1, kSteppedStates = 1, kRowStates = 0;
  static constexpr int kNumRowSums = 2;
  static constexpr bool kSumsNeedGradientOnly = false, kCountsSteps = false;
  float lr, momentum, eta, decay;

  EMB_HD explicit Lars(const double* hyper)
      : lr(as_float(hyper[Hyper::kLearningRate])),
        momentum(as_float(hyper[kMomentum])),
        eta(as_float(hyper[kEta])),
        decay(as_float(hyper[kWeightDecay])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F w, F g, F, F, F* sums) const {
    sums[0] += w * w;
    sums[1] += g * g;
  }
  // A row of zeros has no ratio of norms: it uses the learning rate itself, so that it can leave
  // zero.
  EMB_HD RowFactors begin_row(float*, const float* sums, float) const {
    const float norm = sqrtf(sums[0]), denominator = sqrtf(sums[1]) + decay * norm;
    const bool has_ratio = norm > 0.0f && denominator > 0.0f;
    return {has_ratio ? lr * eta * norm / denominator : lr, 1.0f};
  }
  template <class Math, class F>
  EMB_HD F step(F w, F g, F* m, F*, RowFactors factors) const {
    *m = momentum * *m + factors.gradient * (g + decay * w);
    return w - *m;
  }
};

// FTRL-Proximal per coordinate (McMahan et al., "Ad Click Prediction: a View from the Trenches",
// 2013). State 0 (`m`) is the sum of squared gradients, state 1 (`v`) the linear term.
// RowFactors::gradient is 1 / lr, or 0 if lr is 0. `step` does not change an element whose squared
// gradient is zero, nor any element if lr is 0.
struct Ftrl {
  enum Column : int { kBeta = Hyper::kOptimizerArgs, kL1, kL2Term };
  static constexpr const char* kName = "ftrl";
  static constexpr int kNumHyper = 3, kElementStates = 2, kSteppedStates = 2, kRowStates = 0;
  static constexpr int kNumRowSums = 0;
  static constexpr bool kSumsNeedGradientOnly = true, kCountsSteps = false;
  float inverse_lr, beta, l1, l2;  // l2 is not Hyper::kL2, which WeightDecay applies

  EMB_HD explicit Ftrl(const double* hyper)
      : inverse_lr(hyper[Hyper::kLearningRate] == 0.0
                       ? 0.0f
                       : as_float(1.0 / hyper[Hyper::kLearningRate])),
        beta(as_float(hyper[kBeta])),
        l1(as_float(hyper[kL1])),
        l2(as_float(hyper[kL2Term])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F, F, F, F, F*) const {}
  EMB_HD RowFactors begin_row(float*, const float*, float) const { return {inverse_lr, 1.0f}; }
  template <class Math, class F>
  EMB_HD F step(F w, F g, F* m, F* v, RowFactors factors) const {
    if (factors.gradient == 0.0f) return w;
    const F square = g * g, square_sum = *m + square, root = Math::root(square_sum);
    const F linear = *v + g - (root - Math::root(*m)) * factors.gradient * w;
    const F excess = (linear < 0.0f ? -linear : linear) - l1;
    const F denominator = (beta + root) * factors.gradient + l2;
    // The comparison with l1 is false for NaN, which must not become 0.
    const F next_w = excess <= 0.0f ? F{} : (linear < 0.0f ? excess : -excess) / denominator;
    *m = square == 0.0f ? *m : square_sum;
    *v = square == 0.0f ? *v : linear;
    return square == 0.0f ? w : next_w;
  }
};

}  // namespace emb
