// Checks of the state tensors and the `hyper` vector of an optimizer against the declarations of
// its functor, shared by all ops that update weights, on the CPU and on the GPU. They also sort
// weights and states by memory tier. A failed check throws; `op` is the name of the op, for the
// message. Devices are not checked here.
#pragma once

#include <vector>

#include "core/check.h"
#include "optim/args.h"
#include "optim/optimizers.h"

namespace emb {

// The numbers of state tensors and of entries of `hyper` that an optimizer needs.
struct OptimizerShape {
  const char* name = nullptr;
  int num_element_states = 0, num_row_states = 0;
  int num_hyper = 0;          // entries of `hyper`
  bool counts_steps = false;  // whether it needs the number of the step, from 1

  int num_states() const { return num_element_states + num_row_states; }
};

// Return the shape of an optimizer. Throws if there is none of that number.
inline OptimizerShape optimizer_shape(const char* op, int64_t optimizer) {
  OptimizerShape shape;
  Optimizers::visit(parse_choice<int>(op, "optimizer", optimizer, Optimizers::kNames),
                    [&](auto tag) {
                      using Opt = typename decltype(tag)::type;
                      shape = {Opt::kName, Opt::kElementStates, Opt::kRowStates,
                               Hyper::kOptimizerArgs + Opt::kNumHyper, Opt::kCountsSteps};
                    });
  return shape;
}

// Check `is_finite`, bool [1] or null, which says whether to update at all; false skips the step.
inline void check_is_finite(const char* op, const std::optional<Tensor>& is_finite) {
  if (!is_finite) return;
  check_dtype(op, "is_finite", *is_finite, ScalarType::Bool, "bool");
  STD_TORCH_CHECK(is_finite->numel() == 1, op, ": is_finite must be a scalar, got ",
                  is_finite->numel(), " elements");
}

// Check that `hyper` is a contiguous float64 tensor with an entry for the step, for an op that
// counts it.
inline void check_has_step(const char* op, const Tensor& hyper) {
  check_dtype(op, "hyper", hyper, ScalarType::Double, "float64");
  STD_TORCH_CHECK(hyper.is_contiguous() && hyper.numel() > Hyper::kStep, op,
                  ": hyper must be contiguous and have the step");
}

// Add 1 to the step in `hyper`, which must be on the CPU and checked by check_has_step, and call
// `update`. If that throws, subtract the 1 again.
template <class Update>
void count_step(const Tensor& hyper, const Update& update) {
  double* step = static_cast<double*>(hyper.mutable_data_ptr()) + Hyper::kStep;
  *step += 1.0;
  try {
    update();
  } catch (...) {
    *step -= 1.0;
    throw;
  }
}

// Check `hyper` of an optimizer: float64, contiguous, of its length, and, on the CPU, with a step
// of 1 or more if the optimizer needs one.
inline void check_hyper(const char* op, const OptimizerShape& shape, const Tensor& hyper) {
  check_dtype(op, "hyper", hyper, ScalarType::Double, "float64");
  STD_TORCH_CHECK(hyper.is_contiguous() && hyper.numel() == shape.num_hyper, op, ": ", shape.name,
                  " needs a contiguous hyper vector of ", shape.num_hyper,
                  " entries (see emblib.optim), got ", hyper.numel());
  // A step on a GPU is not read: that would wait for the device.
  STD_TORCH_CHECK(
      !hyper.is_cpu() || !shape.counts_steps || hyper.const_data_ptr<double>()[Hyper::kStep] >= 1.0,
      op, ": ", shape.name, " counts its steps from 1; hyper[1] must be >= 1 at the first update");
}

// Check the states of one tier and set them in `tier`. Element-wise states need at least as many
// entries as the weights have elements, row-wise states at least `min_rows`. Row-wise states must
// be float32; element-wise states may also have 16 bits. `states` has shape.num_states() tensors.
// tier->num_elements and tier->num_rows must be set; num_rows is lowered to the number of entries
// of the shortest row-wise state.
inline void check_tier_states(const char* op, const OptimizerShape& shape, const Tensor* states,
                              int64_t min_rows, TierMemory* tier) {
  for (int i = 0; i < shape.num_states(); ++i) {
    const bool is_row_wise = i >= shape.num_element_states;  // element-wise states come first
    const int64_t min_entries = is_row_wise ? min_rows : tier->num_elements;
    STD_TORCH_CHECK(states[i].is_contiguous() && states[i].numel() >= min_entries, op, ": state ",
                    i, " of ", shape.name, " must be contiguous with at least ", min_entries,
                    " entries, has ", states[i].numel());
    if (is_row_wise) {
      check_dtype(op, "an optimizer state of one number per row", states[i], ScalarType::Float,
                  "float32");
      tier->row_states[i - shape.num_element_states] =
          static_cast<float*>(states[i].mutable_data_ptr());
      if (states[i].numel() < tier->num_rows) tier->num_rows = states[i].numel();
    } else {
      tier->state_types[i] = float_dtype(op, "an optimizer state", states[i].scalar_type());
      tier->element_states[i] = states[i].mutable_data_ptr();
    }
  }
}

// Check the weights and states of all tiers and set `tiers` to them. `states` is tier-major: all
// states of tier 0, then all of tier 1, and so on. `min_rows` is the minimum number of entries of
// the row-wise states of each tier. Tiers without weights in the list are not set.
inline void check_tiers(const char* op, int64_t optimizer, const std::vector<Tensor>& weights,
                        const std::vector<Tensor>& states, const int64_t (&min_rows)[kTiers],
                        TierMemory (&tiers)[kTiers]) {
  const TierWeights layout(op, weights);
  const OptimizerShape shape = optimizer_shape(op, optimizer);
  const auto num_states = static_cast<int>(weights.size()) * shape.num_states();
  STD_TORCH_CHECK(static_cast<int>(states.size()) == num_states, op, ": ", shape.name, " keeps ",
                  shape.num_states(), " state tensors for each of ", weights.size(),
                  " tensors of weights, got ", states.size());
  for (size_t t = 0; t < weights.size(); ++t) {
    TierMemory& tier = tiers[t];
    tier.weights = weights[t].mutable_data_ptr();
    tier.num_elements = weights[t].numel();
    tier.weight_type = t == kCacheTier ? layout.cache_type : layout.type;
    tier.num_rows = kUnlimited;
    check_tier_states(op, shape, states.data() + t * shape.num_states(), min_rows[t], &tier);
  }
}

// Check the cache slots of the unique rows: a contiguous int32 vector of `num_groups` entries or
// more.
inline void check_row_slots(const char* op, const Tensor& row_slots, int64_t num_groups) {
  check_dtype(op, "row_slots", row_slots, ScalarType::Int, "int32");
  STD_TORCH_CHECK(
      row_slots.dim() == 1 && row_slots.is_contiguous() && row_slots.numel() >= num_groups, op,
      ": row_slots must be a contiguous vector with one entry per group = ", num_groups,
      " or more, got ", row_slots.numel());
}

// Check the matrices of `update_rows_`: of one shape, `weights` contiguous and of float32, float16
// or bfloat16, `grads` float32.
inline void check_matrices(const char* op, const Tensor& weights, const Tensor& grads) {
  float_dtype(op, "weights", weights.scalar_type());
  check_dtype(op, "grads", grads, ScalarType::Float, "float32");
  STD_TORCH_CHECK(weights.dim() == 2 && weights.is_contiguous() && weights.size(1) <= INT32_MAX, op,
                  ": weights must be a contiguous matrix of fewer than 2^31 columns, got ",
                  weights.dim(), " dimensions of ", weights.numel(), " elements");
  STD_TORCH_CHECK(
      grads.dim() == 2 && grads.size(0) == weights.size(0) && grads.size(1) == weights.size(1), op,
      ": grads must be [", weights.size(0), ", ", weights.size(1), "] like weights, got ",
      grads.numel(), " values in ", grads.dim(), " dimensions");
}

// Check `hyper`, the weights and the states of `update_rows_`, and return weights and states as one
// tier.
inline TierMemory check_matrix_states(const char* op, int64_t optimizer, const Tensor& weights,
                                      const std::vector<Tensor>& states, const Tensor& hyper) {
  check_hyper(op, optimizer_shape(op, optimizer), hyper);
  TierMemory tiers[kTiers];
  const int64_t min_rows[kTiers] = {weights.size(0)};
  check_tiers(op, optimizer, {weights}, states, min_rows, tiers);
  return tiers[0];
}

}  // namespace emb
