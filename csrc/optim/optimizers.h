// All optimizers, and how one is found by its name or number. To add one: a functor (functor.h says
// what it has) and its place in `Optimizers`.
#pragma once

#include "optim/adam.h"
#include "optim/gradient_step.h"
#include "optim/lars.h"
#include "optim/rowwise_adagrad.h"

namespace emb {

template <class T>
struct TypeTag {
  using type = T;
};

template <class... Opts>
struct OptimizerList {
  static constexpr int kCount = sizeof...(Opts);

  // Calls `visit` with the type tag of optimizer number `index`; false when there is none.
  template <class Visitor>
  static bool visit(int index, const Visitor& visit) {
    int i = 0;
    return ((index == i++ ? (visit(TypeTag<Opts>{}), true) : false) || ...);
  }

  // The number of the optimizer called `name`, -1 when there is none.
  EMB_HD static int find(const char* name) {
    int i = 0, found = -1;
    ((found = same(name, Opts::kName) ? i : found, ++i), ...);
    return found;
  }

  // The names, "a, b, c", into a string of the caller's.
  template <class String>
  static String names() {
    String text;
    ((text += (text.empty() ? "" : ", "), text += Opts::kName), ...);
    return text;
  }

  static constexpr size_t most_bytes() {
    size_t most = 0;
    ((most = sizeof(Opts) > most ? sizeof(Opts) : most), ...);
    return most;
  }

 private:
  EMB_HD static bool same(const char* a, const char* b) {
    while (*a != '\0' && *a == *b) ++a, ++b;
    return *a == *b;
  }
};

using Optimizers =
    OptimizerList<Sgd, Adagrad, RowwiseAdagrad, EnsembleRowwiseAdagrad, RowwiseAdagradMaxNorm,
                  RowwiseAdagradGlobalDecay, RowwiseAdagradCowClip, RowwiseAdagradCounter, Adam,
                  PartialRowwiseAdam, Lamb, PartialRowwiseLamb, Lars>;

// Calls `visit` with the type tag of the optimizer called `name`; false when there is none.
template <class Visitor>
bool visit_optimizer(const char* name, const Visitor& visit) {
  return Optimizers::visit(Optimizers::find(name), visit);
}

}  // namespace emb
