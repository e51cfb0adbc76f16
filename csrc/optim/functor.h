// What the optimizers have in common: the head of the `hyper` vector, and the form of a functor.
//
// A functor is a pure function of registers: no thread index, no device, no dtype. It is built from
// `hyper` and runs in three steps. `add_sums` is called for every element of a row and adds its
// terms to up to kSums sums; `begin_row` turns these and the row's own states into two numbers;
// `step` moves one element. An optimizer that needs no sums is never asked for any. The CPU and
// CUDA drivers differ only in who calls them:
//
//   kName, kNumbers           its name, and how many numbers of its own follow the head of `hyper`
//   kElementStates            states as long as the row, which come first in the list of states
//   kSteppedStates            how many of them `step` works on; the rest are not touched
//   kRowStates                states of one float a row
//   kSums, kSumsOfGradient    how many sums; whether they are of the gradient alone
//   kCountsSteps              whether `hyper` must hold the number of the step, from 1
//   add_sums<Math>(w, g, m, v, sums), begin_row(states, sums, dim), step(w, g, &m, &v, scale)
#pragma once

#include <cmath>

#include "core/portability.h"

namespace emb {

// hyper: learning rate, step (from 1), rate of the coupled L2 penalty (g += l2 * w before anything
// else), rate of the decoupled decay (w *= 1 - lr * decay), seed of stochastic rounding (core/
// rounding.h), then the optimizer's own numbers.
enum HyperEntry : int { kLearningRate = 0, kStep = 1, kL2 = 2, kDecay = 3, kSeed = 4, kOwn = 5 };

inline constexpr int kMostElementStates = 2, kMostRowStates = 3, kMostSums = 4;

EMB_HD float as_float(double x) { return static_cast<float>(x); }

// The two kinds of weight decay that any optimizer can have, applied around the functor.
struct WeightDecay {
  float l2, keep;

  EMB_HD explicit WeightDecay(const double* hyper)
      : l2(as_float(hyper[kL2])), keep(as_float(1.0 - hyper[kLearningRate] * hyper[kDecay])) {}
};

// How `begin_row` tells `step` what it found: what the gradient (or momentum) and the weights are
// multiplied by.
struct RowScale {
  float step = 0.0f, keep = 1.0f;
};

// Arithmetic of `add_sums` on single elements; the CPU has one on registers of several.
struct ScalarMath {
  EMB_HD static float root(float x) { return sqrtf(x); }
  EMB_HD static float ratio(float a, float b) { return b == 0.0f ? 0.0f : a / b; }
};

// lr / (sqrt(sum) + eps), and 0 where nothing but zeros was seen: 0/0 must not make NaN.
EMB_HD float adagrad_scale(float lr, float sum, float eps) {
  const float denominator = sqrtf(sum) + eps;
  return denominator == 0.0f ? 0.0f : lr / denominator;
}

}  // namespace emb
