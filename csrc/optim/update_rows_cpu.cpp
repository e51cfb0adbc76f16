// `update_rows_` on the CPU: check the arguments, then update rows in parallel with
// update_rows_kernels.cpp.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "core/check.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "core/scratch.h"
#include "optim/args.h"
#include "optim/check.h"

namespace emb {

EMB_SELECT_KERNELS(UpdateRowsTable, kUpdateRowsTable, update_rows_table)

namespace {

constexpr int64_t kGrain = 1 << 15;  // grain of parallel_balanced, in elements

// Apply an optimizer, a number of Optimizers, to the rows of `weights`, [R, D] of float32, float16
// or bfloat16, whose gradient is not zero throughout; in place in weights and states. `grads` is
// float32 [R, D]. `states` are those of the optimizer, see check_tier_states. `first_row` is the id
// of row 0 in the random numbers of stochastic rounding. The caller must have counted the step in
// `hyper`; check_hyper says what is checked.
void update_rows_(Tensor weights, std::vector<Tensor> states, const Tensor& hyper,
                  int64_t optimizer, const Tensor& grads, int64_t first_row) {
  const char* op = "update_rows_";
  check_matrices(op, weights, grads);
  const int64_t num_rows = weights.size(0), dim = weights.size(1);
  const TierMemory tier = check_matrix_states(op, optimizer, weights, states, hyper);
  if (num_rows * dim == 0) return;
  const Tensor gradient = as_contiguous(grads);
  const UpdateRowsArgs args{tier,    gradient.const_data_ptr<float>(),
                            dim,     hyper.const_data_ptr<double>(),
                            nullptr, first_row};
  const UpdateRowsFn update = update_rows_table().find(static_cast<int>(optimizer));
  parallel_balanced(
      num_rows, kGrain, [dim](int64_t row) { return row * dim; },
      [&](int64_t begin, int64_t end) {
        const Floats scratch = new_floats(kMatrixScratchRows * dim);
        update(args, scratch.get(), begin, end);
      });
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, update_rows_); }
