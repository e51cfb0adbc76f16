// `update_rows_` on the GPU: check the arguments and launch. The op does not wait for the device.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "core/check.h"
#include "optim/device_states.h"
#include "optim/update_matrix.h"

namespace emb::cuda {

template void launch_update_matrices(const CudaLauncher&, const MatrixStep*, int, int64_t,
                                     const OptimizerStepArgs&);

namespace {

// Update the rows of `weights` whose gradient is not zero throughout. The arguments are those of
// the function of this name in update_rows_cpu.cpp, all on one device.
void update_rows_(Tensor weights, std::vector<Tensor> states, const Tensor& hyper,
                  int64_t optimizer, const Tensor& grads, int64_t first_row) {
  const char* op = "update_rows_";
  check_matrices(op, weights, grads);
  check_same_device(op, "grads", grads, weights);
  check_same_device(op, "hyper", hyper, weights);
  const CudaLauncher launcher(weights);
  const OptimizerStepArgs step_args =
      optimizer_step_args(op, {weights}, optimizer, states, hyper, weights.size(0));
  const Tensor gradient = as_contiguous(grads);
  const MatrixGrad matrix{gradient.const_data_ptr<float>(), weights.size(0), weights.size(1),
                          first_row};
  launch_update_rows(launcher, matrix, step_args);
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) { EMB_IMPL(m, emb::cuda, update_rows_); }
