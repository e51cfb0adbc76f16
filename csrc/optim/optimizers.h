// The list of all optimizers. The number of an optimizer, which ops take, is its position in
// `Optimizers`. To add one, write a functor (see functor.h) and add it to the end of `Optimizers`,
// to emblib/ops/codes.py, emblib/optim and emblib/reference/optim.py.
#pragma once

#include "core/dtype.h"
#include "optim/adam.h"
#include "optim/rowwise_adagrad.h"
#include "optim/sgd.h"

namespace emb {

// Optimizers by number, for code that is compiled once per optimizer.
template <class... Opts>
struct OptimizerList {
  static constexpr int kCount = sizeof...(Opts);

  // Call `visit` with the type tag of optimizer number `index`; return false if there is none.
  template <class Visitor>
  static bool visit(int index, const Visitor& visit) {
    int i = 0;
    return ((index == i++ ? (visit(TypeTag<Opts>{}), true) : false) || ...);
  }

  static constexpr const char* kNames[kCount] = {Opts::kName...};

  // Return the size of the largest functor.
  static constexpr size_t max_bytes() {
    size_t max = 0;
    ((max = sizeof(Opts) > max ? sizeof(Opts) : max), ...);
    return max;
  }
};

using Optimizers =
    OptimizerList<Sgd, Adagrad, RowwiseAdagrad, EnsembleRowwiseAdagrad, RowwiseAdagradMaxNorm,
                  RowwiseAdagradGlobalDecay, RowwiseAdagradCowClip, RowwiseAdagradCounter, Adam,
                  PartialRowwiseAdam, Lamb, PartialRowwiseLamb, Lars, Ftrl>;

}  // namespace emb
