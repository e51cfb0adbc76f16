// Turns the arguments of an op that updates weights on the GPU into those of its kernels. The
// checks are those of the CPU (check.h). `hyper` stays on the device, so that a captured graph
// reads its current values.
#pragma once

#include <vector>

#include "core/launch.h"
#include "optim/check.h"
#include "optim/optimizer_step.cuh"

namespace emb::cuda {

// Set `*address` to the address at which kernels access `tensor`, the memory of tier `tier`. Throws
// unless it is on the device of `hyper` or, for the host tier, in pinned host memory. An empty
// tensor changes nothing.
template <class T>
void set_kernel_address(const char* op, const char* name, const Tensor& tensor, const Tensor& hyper,
                        int tier, T** address) {
  if (tensor.numel() == 0) return;
  if (tier != kHostTier) check_same_device(op, name, tensor, hyper);
  *address = static_cast<T*>(kernel_address(op, tensor, hyper));
}

// Check weights, states and `hyper`, which must be on a GPU (not checked), and return the arguments
// of an optimizer step, which refer to these tensors. `min_rows` is the minimum number of entries
// of the row-wise states of tier 0. Pass 0 if only the device knows the rows of tables; then the
// module must ensure that states are long enough.
inline OptimizerStepArgs optimizer_step_args(const char* op, const std::vector<Tensor>& weights,
                                             int64_t optimizer, const std::vector<Tensor>& states,
                                             const Tensor& hyper, int64_t min_rows) {
  const OptimizerShape shape = optimizer_shape(op, optimizer);
  check_hyper(op, shape, hyper);
  OptimizerStepArgs args;
  const int64_t min_rows_by_tier[kTiers] = {min_rows};
  check_tiers(op, optimizer, weights, states, min_rows_by_tier, args.tiers);
  for (int t = 0; t < static_cast<int>(weights.size()); ++t) {
    TierMemory& tier = args.tiers[t];
    set_kernel_address(op, "weights", weights[t], hyper, t, &tier.weights);
    for (int s = 0; s < shape.num_states(); ++s) {
      const Tensor& state = states[t * shape.num_states() + s];
      const int row_state = s - shape.num_element_states;  // element-wise states come first
      if (row_state < 0) {
        set_kernel_address(op, "an optimizer state", state, hyper, t, &tier.element_states[s]);
      } else {
        set_kernel_address(op, "an optimizer state", state, hyper, t, &tier.row_states[row_state]);
      }
    }
  }
  find_optimizer(static_cast<int>(optimizer), &args);
  args.hyper = hyper.const_data_ptr<double>();
  return args;
}

}  // namespace emb::cuda
