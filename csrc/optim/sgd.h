// SGD and Adagrad (Duchi et al., 2011), element by element.
#pragma once

#include "optim/functor.h"

namespace emb {

struct Sgd {
  static constexpr const char* kName = "sgd";
  static constexpr int kNumbers = 0, kElementStates = 0, kSteppedStates = 0, kRowStates = 0;
  static constexpr int kSums = 0;
  static constexpr bool kSumsOfGradient = true, kCountsSteps = false;
  float lr;

  EMB_HD explicit Sgd(const double* hyper) : lr(as_float(hyper[kLearningRate])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F, F, F, F, F*) const {}
  EMB_HD RowScale begin_row(float*, const float*, float) const { return {lr, 1.0f}; }
  EMB_HD float step(float w, float g, float*, float*, RowScale scale) const {
    return w - scale.step * g;
  }
};

struct Adagrad {
  static constexpr const char* kName = "adagrad";
  static constexpr int kNumbers = 1, kElementStates = 1, kSteppedStates = 1, kRowStates = 0;
  static constexpr int kSums = 0;
  static constexpr bool kSumsOfGradient = true, kCountsSteps = false;
  float lr, eps;

  EMB_HD explicit Adagrad(const double* hyper)
      : lr(as_float(hyper[kLearningRate])), eps(as_float(hyper[kOwn])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F, F, F, F, F*) const {}
  EMB_HD RowScale begin_row(float*, const float*, float) const { return {lr, 1.0f}; }
  EMB_HD float step(float w, float g, float* sum, float*, RowScale scale) const {
    *sum += g * g;
    // With eps = 0 an element whose squares are all zero has 0/0; it must stay where it is.
    return *sum == 0.0f ? w : w - scale.step * g / (sqrtf(*sum) + eps);
  }
};

// SGD with momentum and a learning rate for each row that follows the norms of row and gradient
// (You et al., "Large Batch Training of Convolutional Networks", 2017).

// Own numbers: momentum, eta, weight decay.
struct Lars {
  static constexpr const char* kName = "lars";
  static constexpr int kNumbers = 3, kElementStates = 1, kSteppedStates = 1, kRowStates = 0;
  static constexpr int kSums = 2;
  static constexpr bool kSumsOfGradient = false, kCountsSteps = false;
  float lr, momentum, eta, decay;

  EMB_HD explicit Lars(const double* hyper)
      : lr(as_float(hyper[kLearningRate])),
        momentum(as_float(hyper[kOwn])),
        eta(as_float(hyper[kOwn + 1])),
        decay(as_float(hyper[kOwn + 2])) {}
  template <class Math, class F>
  EMB_HD void add_sums(F w, F g, F, F, F* sums) const {
    sums[0] += w * w;
    sums[1] += g * g;
  }
  // A row of zeros has no ratio of norms: it takes the learning rate itself, so that it can leave
  // zero.
  EMB_HD RowScale begin_row(float*, const float* sums, float) const {
    const float norm = sqrtf(sums[0]), denominator = sqrtf(sums[1]) + decay * norm;
    const bool ratio = norm > 0.0f && denominator > 0.0f;
    return {ratio ? lr * eta * norm / denominator : lr, 1.0f};
  }
  EMB_HD float step(float w, float g, float* m, float*, RowScale scale) const {
    *m = momentum * *m + scale.step * (g + decay * w);
    return w - *m;
  }
};

}  // namespace emb
