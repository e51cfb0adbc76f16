// `update_rows_` on the GPU: checks and launch.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "optim/update_matrix.h"

namespace emb::cuda {
namespace {

void update_rows_(Tensor weights, std::vector<Tensor> states, const Tensor& hyper,
                  int64_t optimizer, const Tensor& grads, int64_t first_row) {
  const char* op = "update_rows_";
  check_matrices(op, weights, grads);
  update_matrix(op, CudaLauncher(weights), weights, states, hyper, optimizer, grads, first_row);
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) { EMB_IMPL(m, emb::cuda, update_rows_); }
