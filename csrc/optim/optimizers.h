// The optimizers as pure functions of registers: no thread index, no device, no dtype. A functor is
// built from the `hyper` vector (learning rate, step, then its own parameters), `begin_row` runs
// once per row, `step` once per element; the CPU and CUDA drivers differ only in who calls them.
//
// Sources: SGD; Adagrad (Duchi et al., 2011); row-wise Adagrad keeps the mean of the squared
// gradient over the row (as FBGEMM's EXACT_ROWWISE_ADAGRAD); Adam (Kingma & Ba, 2015), lazy: only
// rows that received a gradient move, as torch.optim.SparseAdam.
#pragma once

#include <cmath>

#include "core/portability.h"

namespace emb {

// `kHyper` is the length of the hyper vector. State a row carries beside its weights:
// `kElementStates` vectors as long as the row and `kRowStates` scalars. States are float32 and kept
// in that order in the `states` list of an op.

struct Sgd {
  static constexpr const char* kName = "sgd";
  static constexpr int kHyper = 2;
  static constexpr int kElementStates = 0, kRowStates = 0;
  float lr;

  EMB_HD explicit Sgd(const double* hyper) : lr(static_cast<float>(hyper[0])) {}
  EMB_HD float begin_row(float*, float) const { return lr; }
  EMB_HD float step(float w, float g, float*, float*, float scale) const { return w - scale * g; }
};

struct Adagrad {
  static constexpr const char* kName = "adagrad";
  static constexpr int kHyper = 3;
  static constexpr int kElementStates = 1, kRowStates = 0;
  float lr, eps;

  EMB_HD explicit Adagrad(const double* hyper)
      : lr(static_cast<float>(hyper[0])), eps(static_cast<float>(hyper[2])) {}
  EMB_HD float begin_row(float*, float) const { return lr; }
  EMB_HD float step(float w, float g, float* sum, float*, float scale) const {
    *sum += g * g;
    // With eps = 0 an element whose squares are all zero has 0/0; it must stay where it is.
    return *sum == 0.0f ? w : w - scale * g / (sqrtf(*sum) + eps);
  }
};

struct RowwiseAdagrad {
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr int kHyper = 3;
  static constexpr int kElementStates = 0, kRowStates = 1;
  float lr, eps;

  EMB_HD explicit RowwiseAdagrad(const double* hyper)
      : lr(static_cast<float>(hyper[0])), eps(static_cast<float>(hyper[2])) {}
  EMB_HD float begin_row(float* sum, float mean_square) const {
    *sum += mean_square;
    return *sum == 0.0f ? 0.0f : lr / (sqrtf(*sum) + eps);
  }
  EMB_HD float step(float w, float g, float*, float*, float scale) const { return w - scale * g; }
};

struct Adam {
  static constexpr const char* kName = "adam";
  static constexpr int kHyper = 5;
  static constexpr int kElementStates = 2, kRowStates = 0;
  float lr, beta1, beta2, eps, one_minus_beta1, one_minus_beta2, correction2;

  // The bias corrections are formed in double: 1 - beta2^step loses all its digits in float.
  EMB_HD explicit Adam(const double* hyper)
      : lr(static_cast<float>(hyper[0] / (1.0 - pow(hyper[2], hyper[1])))),
        beta1(static_cast<float>(hyper[2])),
        beta2(static_cast<float>(hyper[3])),
        eps(static_cast<float>(hyper[4])),
        one_minus_beta1(static_cast<float>(1.0 - hyper[2])),
        one_minus_beta2(static_cast<float>(1.0 - hyper[3])),
        correction2(static_cast<float>(1.0 / sqrt(1.0 - pow(hyper[3], hyper[1])))) {}
  EMB_HD float begin_row(float*, float) const { return lr; }
  EMB_HD float step(float w, float g, float* m, float* v, float scale) const {
    *m = beta1 * *m + one_minus_beta1 * g;
    *v = beta2 * *v + one_minus_beta2 * g * g;
    const float denominator = sqrtf(*v) * correction2 + eps;
    return denominator == 0.0f ? w : w - scale * *m / denominator;
  }
};

// Calls `visit` with the type tag of the optimizer called `name`; false when there is none.
template <class T>
struct TypeTag {
  using type = T;
};

template <class Visitor>
bool visit_optimizer(const char* name, const Visitor& visit) {
  const auto matches = [name](const char* other) {
    const char* a = name;
    while (*a != '\0' && *a == *other) ++a, ++other;
    return *a == *other;
  };
  if (matches(Sgd::kName)) return visit(TypeTag<Sgd>{}), true;
  if (matches(Adagrad::kName)) return visit(TypeTag<Adagrad>{}), true;
  if (matches(RowwiseAdagrad::kName)) return visit(TypeTag<RowwiseAdagrad>{}), true;
  if (matches(Adam::kName)) return visit(TypeTag<Adam>{}), true;
  return false;
}

inline constexpr const char* kOptimizerNames = "sgd, adagrad, rowwise_adagrad, adam";

}  // namespace emb
