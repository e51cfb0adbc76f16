// Checks the state tensors and the `hyper` vector of an optimizer against what its functor
// declares, and sorts the states into element-wise and row-wise ones. Shared by every op that
// updates weights.
#pragma once

#include <string>
#include <vector>

#include "core/check.h"
#include "optim/optimizers.h"

namespace emb {

struct States {
  float* element[2] = {nullptr, nullptr};  // as long as the weights
  float* row = nullptr;                    // one entry a row
};

inline constexpr int64_t kHyperAtLeast = 2;  // learning rate, step

inline States check_states(const char* op, const std::string& optimizer,
                           const std::vector<Tensor>& states, const Tensor& hyper,
                           int64_t num_elements, int64_t num_rows) {
  States result;
  check_dtype(op, "hyper", hyper, ScalarType::Double, "float64");
  STD_TORCH_CHECK(hyper.is_contiguous(), op, ": hyper must be contiguous");
  // Only the CPU may look inside: on a GPU the numbers are in device memory.
  STD_TORCH_CHECK(!hyper.is_cpu() || optimizer != Adam::kName || hyper.numel() < 2 ||
                      hyper.const_data_ptr<double>()[1] >= 1.0,
                  op, ": adam counts its steps from 1; hyper[1] must be >= 1 at the first update");
  const bool known = visit_optimizer(optimizer.c_str(), [&](auto tag) {
    using Opt = typename decltype(tag)::type;
    STD_TORCH_CHECK(hyper.numel() == Opt::kHyper, op, ": ", optimizer, " needs a hyper vector of ",
                    Opt::kHyper, " entries (see emblib.optim), got ", hyper.numel());
    constexpr int wanted = Opt::kElementStates + Opt::kRowStates;
    STD_TORCH_CHECK(static_cast<int>(states.size()) == wanted, op, ": ", optimizer, " keeps ",
                    wanted, " state tensors, got ", states.size());
    for (int i = 0; i < wanted; ++i) {
      const bool by_row = i >= Opt::kElementStates;  // element-wise states come first
      const int64_t entries = by_row ? num_rows : num_elements;
      check_dtype(op, "an optimizer state", states[i], ScalarType::Float, "float32");
      STD_TORCH_CHECK(states[i].is_contiguous() && states[i].numel() >= entries, op, ": state ", i,
                      " of ", optimizer, " must be contiguous with ", entries, " entries, has ",
                      states[i].numel());
      float* data = states[i].template mutable_data_ptr<float>();
      if constexpr (Opt::kElementStates > 0) {
        if (!by_row) result.element[i] = data;
      }
      if (by_row) result.row = data;
    }
  });
  STD_TORCH_CHECK(known, op, ": unknown optimizer '", optimizer, "'; have ", kOptimizerNames);
  return result;
}

// The arguments of `update_rows_`: two float32 matrices of one shape.
inline void check_matrices(const char* op, const Tensor& weights, const Tensor& grads) {
  check_dtype(op, "weights", weights, ScalarType::Float, "float32");
  check_dtype(op, "grads", grads, ScalarType::Float, "float32");
  STD_TORCH_CHECK(weights.dim() == 2 && weights.is_contiguous(), op,
                  ": weights must be a contiguous matrix, got ", weights.dim(), " dimensions");
  STD_TORCH_CHECK(
      grads.dim() == 2 && grads.size(0) == weights.size(0) && grads.size(1) == weights.size(1), op,
      ": grads must be [", weights.size(0), ", ", weights.size(1), "] like weights, got ",
      grads.numel(), " values in ", grads.dim(), " dimensions");
}

}  // namespace emb
