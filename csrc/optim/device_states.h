// From the arguments of an updating op to what its kernels take. The checks are those of the CPU
// (check_states.h); `hyper` stays on the device, where a captured graph sees it change.
#pragma once

#include <string>
#include <vector>

#include "optim/check_states.h"
#include "optim/row_step.cuh"

namespace emb::cuda {

// Memory that the kernels can reach: of their device, or of the host where the tier allows that.
inline void check_reachable(const char* op, const char* name, const Tensor& tensor,
                            const Tensor& hyper, bool may_be_host) {
  if (tensor.numel() == 0 || (may_be_host && tensor.is_cpu())) return;
  check_same_device(op, name, tensor, hyper);
}

// How many rows the tables have is on the device; that the states are long enough is the module's
// care, `rows` what is known.
inline RowStepArgs row_step_args(const char* op, const std::vector<Tensor>& weights,
                                 const std::string& optimizer, const std::vector<Tensor>& states,
                                 const Tensor& hyper, int64_t rows) {
  const OptimizerShape shape = optimizer_shape(op, optimizer);
  check_hyper(op, optimizer, shape, hyper);
  RowStepArgs args;
  const int64_t at_least[kTiers] = {rows};
  check_tiers(op, optimizer, weights, states, at_least, args.tiers);
  for (size_t t = 0; t < weights.size(); ++t) {
    const bool host = t == kHostTier;
    check_reachable(op, "weights", weights[t], hyper, host);
    for (int s = 0; s < shape.states(); ++s) {
      check_reachable(op, "an optimizer state", states[t * shape.states() + s], hyper, host);
    }
  }
  find_rule(optimizer.c_str(), &args);
  args.hyper = hyper.const_data_ptr<double>();
  return args;
}

}  // namespace emb::cuda
