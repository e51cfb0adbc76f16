// From the arguments of an updating op to what its kernels take. The checks are those of the CPU
// (check.h); `hyper` stays on the device, where a captured graph sees it change.
#pragma once

#include <vector>

#include "core/launch.h"
#include "optim/check.h"
#include "optim/optimizer_step.cuh"

namespace emb::cuda {

// Makes `address` of a tensor of tier `tier` the one that kernels know it by; that of the host tier
// may be pinned host memory.
template <class T>
void reach(const char* op, const char* name, const Tensor& tensor, const Tensor& hyper, int tier,
           T** address) {
  if (tensor.numel() == 0) return;
  if (tier != kHostTier) check_same_device(op, name, tensor, hyper);
  *address = static_cast<T*>(kernel_address(op, tensor, hyper));
}

// How many rows the tables have is on the device; that the states are long enough is the module's
// care, `rows` what is known.
inline RowStepArgs row_step_args(const char* op, const std::vector<Tensor>& weights,
                                 int64_t optimizer, const std::vector<Tensor>& states,
                                 const Tensor& hyper, int64_t rows) {
  const OptimizerShape shape = optimizer_shape(op, optimizer);
  check_hyper(op, shape, hyper);
  RowStepArgs args;
  const int64_t at_least[kTiers] = {rows};
  check_tiers(op, optimizer, weights, states, at_least, args.tiers);
  for (int t = 0; t < static_cast<int>(weights.size()); ++t) {
    TierRows& tier = args.tiers[t];
    reach(op, "weights", weights[t], hyper, t, &tier.weights);
    for (int s = 0; s < shape.states(); ++s) {
      const Tensor& state = states[t * shape.states() + s];
      const int by_row = s - shape.element_states;  // element-wise states come first
      if (by_row < 0) {
        reach(op, "an optimizer state", state, hyper, t, &tier.element_states[s]);
      } else {
        reach(op, "an optimizer state", state, hyper, t, &tier.row_states[by_row]);
      }
    }
  }
  find_rule(static_cast<int>(optimizer), &args);
  args.hyper = hyper.const_data_ptr<double>();
  return args;
}

}  // namespace emb::cuda
