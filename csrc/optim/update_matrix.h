// One step of an optimizer on the rows of a matrix on the GPU, for the entries that have gradients
// of matrices.
#pragma once

#include <vector>

#include "core/check.h"
#include "core/launch.h"
#include "optim/device_states.h"
#include "optim/update_rows.cuh"

namespace emb::cuda {

// `first_row` is the id of row 0 in the random numbers of stochastic rounding.
inline void update_matrix(const char* op, const CudaLauncher& launcher, const Tensor& weights,
                          const std::vector<Tensor>& states, const Tensor& hyper, int64_t optimizer,
                          const Tensor& grads, int64_t first_row) {
  check_same_device(op, "grads", grads, weights);
  check_same_device(op, "hyper", hyper, weights);
  const OptimizerStepArgs step =
      optimizer_step_args(op, {weights}, optimizer, states, hyper, weights.size(0));
  const Tensor gradient = torch::stable::contiguous(grads);
  const MatrixGrad in{gradient.const_data_ptr<float>(), weights.size(0), weights.size(1),
                      first_row};
  launch_update_rows(launcher, in, step);
}

}  // namespace emb::cuda
