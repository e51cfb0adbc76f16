// From the arguments of an updating op to what its kernels take. The checks are those of the CPU
// (check_states.h); `hyper` stays on the device, where a captured graph sees it change.
#pragma once

#include <string>
#include <vector>

#include "optim/check_states.h"
#include "optim/row_step.cuh"

namespace emb::cuda {

inline RowStepArgs row_step_args(const char* op, const Tensor& weights, Dtype weight_type,
                                 const std::string& optimizer, const std::vector<Tensor>& states,
                                 const Tensor& hyper, int64_t num_rows) {
  const States state = check_states(op, optimizer, states, hyper, weights.numel(), num_rows);
  check_same_device(op, "hyper", hyper, weights);
  for (const Tensor& tensor : states) check_same_device(op, "an optimizer state", tensor, weights);
  RowStepArgs step{};
  find_rule(optimizer.c_str(), &step.rule);
  step.hyper = hyper.const_data_ptr<double>();
  step.weights = weights.mutable_data_ptr();
  step.weight_type = weight_type;
  step.element_states[0] = state.element[0];
  step.element_states[1] = state.element[1];
  step.row_state = state.row;
  return step;
}

}  // namespace emb::cuda
