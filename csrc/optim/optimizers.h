// All optimizers, and how one is found by its number, its place in `Optimizers`. To add one: a
// functor (functor.h says what it has), its place in `Optimizers` and in emblib/ops/codes.py.
#pragma once

#include "core/dtype.h"
#include "optim/adam.h"
#include "optim/rowwise_adagrad.h"
#include "optim/sgd.h"

namespace emb {

template <class... Opts>
struct OptimizerList {
  static constexpr int kCount = sizeof...(Opts);

  // Calls `visit` with the type tag of optimizer number `index`; false when there is none.
  template <class Visitor>
  static bool visit(int index, const Visitor& visit) {
    int i = 0;
    return ((index == i++ ? (visit(TypeTag<Opts>{}), true) : false) || ...);
  }

  static constexpr const char* kNames[kCount] = {Opts::kName...};

  static constexpr size_t most_bytes() {
    size_t most = 0;
    ((most = sizeof(Opts) > most ? sizeof(Opts) : most), ...);
    return most;
  }
};

using Optimizers =
    OptimizerList<Sgd, Adagrad, RowwiseAdagrad, EnsembleRowwiseAdagrad, RowwiseAdagradMaxNorm,
                  RowwiseAdagradGlobalDecay, RowwiseAdagradCowClip, RowwiseAdagradCounter, Adam,
                  PartialRowwiseAdam, Lamb, PartialRowwiseLamb, Lars>;

}  // namespace emb
