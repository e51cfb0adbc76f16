// Applies an optimizer to all rows of matrices with dense gradients on the GPU. A warp updates a
// row of at most 128 columns, and a block updates a wider row. A row whose gradient is zero
// throughout keeps its weights and states, as if it were not part of the batch. A launch updates
// one matrix (launch_update_rows), which is an argument of the kernel, or any number of matrices
// (launch_update_matrices), which are listed in device memory. Neither waits for the device.
#pragma once

#include "core/search.cuh"
#include "optim/optimizer_step.cuh"

namespace emb::cuda {

inline constexpr int kMatrixThreads = 128;  // threads per block
// Blocks per multiprocessor that the registers of a thread must allow: with six a thread may have
// 80. Without the bound, ptxas uses 64 registers and spills two.
inline constexpr int kMatrixBlocksPerSm = 6;
// The maximum numbers of blocks per multiprocessor of a grid. Over many matrices it is twice as
// many as run at once: more would take longer, because each block builds the functor of the
// optimizer, for Adam with two powers in double. Other numbers for one matrix were not measured.
inline constexpr int kMaxMatrixBlocksPerSm = 2 * kMatrixBlocksPerSm;
inline constexpr int kMaxSingleMatrixBlocksPerSm = 2 * kResidentBlocksPerSm;

// The gradient of a matrix, in device memory, and how a launch divides its rows.
struct MatrixGrad {
  const float* grad;      // [num_rows, dim]
  int64_t num_rows, dim;  // dim < 2^31
  int64_t first_row;      // id of row 0 in the random numbers of stochastic rounding

  // Return whether a warp updates a row; if not, a block does.
  EMB_HD bool has_row_per_warp() const { return dim <= int64_t{simt::kWarpLanes} * kColumns; }
  // Return the number of rows that a block updates.
  EMB_HD int rows_per_block() const { return has_row_per_warp() ? kMatrixThreads / kWarpLanes : 1; }
  // Return the number of blocks for all rows.
  EMB_HD int64_t num_blocks() const { return (num_rows + rows_per_block() - 1) / rows_per_block(); }
};

// One of the matrices of a launch.
struct MatrixStep {
  MatrixGrad gradient;
  TierMemory tier;      // weights and states of the matrix
  int64_t first_block;  // number of the first block of the matrix among the blocks of all matrices
};

// Replace each of `values`, in every thread, by its sum over the block, added in the order of
// warps. Return whether `flag` is true in any thread. All threads of the block must call this. It
// ends with a barrier, so that the next call needs none before it.
EMB_DEVICE bool block_sums(float (&values)[kMaxRowSums], bool flag) {
  constexpr int kWarps = kMatrixThreads / kWarpLanes;
  __shared__ float sum_of_warp[kWarps][kMaxRowSums];
  __shared__ bool flag_of_warp[kWarps];
  const unsigned warp = threadIdx.x / simt::kWarpLanes;
#pragma unroll
  for (int k = 0; k < kMaxRowSums; ++k) values[k] = simt::group_sum(values[k], simt::kWarpLanes);
  flag = __any_sync(simt::kFullMask, flag);
  if (threadIdx.x % simt::kWarpLanes == 0) {
#pragma unroll
    for (int k = 0; k < kMaxRowSums; ++k) sum_of_warp[warp][k] = values[k];
    flag_of_warp[warp] = flag;
  }
  __syncthreads();
  bool any_flag = false;
#pragma unroll
  for (int k = 0; k < kMaxRowSums; ++k) values[k] = 0.0f;
  for (int w = 0; w < kWarps; ++w) {
#pragma unroll
    for (int k = 0; k < kMaxRowSums; ++k) values[k] += sum_of_warp[w][k];
    any_flag = any_flag || flag_of_warp[w];
  }
  __syncthreads();
  return any_flag;
}

// Do what block_sums does, but within a warp and without a barrier. All 32 lanes must call this.
// The result has the bits that block_sums returns if all other warps pass zeros: adding 0.0f turns
// -0 into 0, as block_sums does.
EMB_DEVICE bool warp_sums(float (&values)[kMaxRowSums], bool flag) {
#pragma unroll
  for (int k = 0; k < kMaxRowSums; ++k) {
    values[k] = 0.0f + simt::group_sum(values[k], simt::kWarpLanes);
  }
  return __any_sync(simt::kFullMask, flag) != 0;
}

// Add the terms of a thread's columns to `sums`, the sums of the row that begins at element
// `row_begin`. Return whether the gradient of one of these columns is not zero. `num_threads`
// threads share the row, and `rank` is the number of this one among them, from 0. `tier` has the
// weights and states of the matrix.
template <class Selection>
EMB_DEVICE bool add_row_sums(const MatrixGrad& matrix, const OptimizerStepArgs& args,
                             const BlockStep& step, const TierMemory& tier, int64_t row_begin,
                             unsigned rank, unsigned num_threads, float (&sums)[kMaxRowSums]) {
  bool is_nonzero = false;
  for (int64_t column = rank * kColumns; column < matrix.dim; column += num_threads * kColumns) {
    const int num_valid = static_cast<int>(matrix.dim - column);
    float gradient[kColumns];
    read_columns(matrix.grad + row_begin + column, num_valid, gradient);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) is_nonzero = is_nonzero || gradient[k] != 0.0f;
    if (args.num_row_sums == 0) continue;
    LaneColumns columns;
    if (!args.sums_need_gradient_only || step.decay.l2 != 0.0f) {
      load_columns<Selection>(args, tier, row_begin + column, num_valid, &columns);
      add_penalty(step, columns, gradient);
    }
    sum_columns<Selection>(args, step, columns, gradient, sums);
  }
  return is_nonzero;
}

// Update the rows of block `block` of a matrix, whose weights and states are in `tier`, except rows
// whose gradient is zero throughout. `block` is a number in [0, matrix.num_blocks()). All threads
// of the block must call this; it may have barriers.
template <class Selection>
EMB_DEVICE void update_matrix_rows(const MatrixGrad& matrix, const OptimizerStepArgs& args,
                                   const BlockStep& step, const TierMemory& tier, int64_t block) {
  const bool has_row_per_warp = matrix.has_row_per_warp();
  const unsigned rank = has_row_per_warp ? threadIdx.x % simt::kWarpLanes : threadIdx.x;
  const unsigned num_threads = has_row_per_warp ? simt::kWarpLanes : kMatrixThreads;
  const int64_t row =
      has_row_per_warp ? block * matrix.rows_per_block() + threadIdx.x / simt::kWarpLanes : block;
  if (row >= matrix.num_rows) return;  // only if warps update rows: then no barrier follows
  const int64_t row_begin = row * matrix.dim;
  float states[kMaxRowStates] = {}, sums[kMaxRowSums] = {};
  for (int s = 0; s < kMaxRowStates; ++s) {
    if (s < args.num_row_states) states[s] = tier.row_states[s][row];
  }
  const bool is_nonzero =
      add_row_sums<Selection>(matrix, args, step, tier, row_begin, rank, num_threads, sums);
  if (!(has_row_per_warp ? warp_sums(sums, is_nonzero) : block_sums(sums, is_nonzero))) return;
  const RowFactors factors =
      begin_row<Selection>(args, step, states, sums, static_cast<int>(matrix.dim));
  for (int s = 0; s < kMaxRowStates; ++s) {
    if (s < args.num_row_states && rank == 0) tier.row_states[s][row] = states[s];
  }
  for (int64_t column = rank * kColumns; column < matrix.dim; column += num_threads * kColumns) {
    const int num_valid = static_cast<int>(matrix.dim - column);
    float gradient[kColumns];
    LaneColumns columns;
    read_columns(matrix.grad + row_begin + column, num_valid, gradient);
    load_columns<Selection>(args, tier, row_begin + column, num_valid, &columns);
    add_penalty(step, columns, gradient);
    const ColumnLocation location{row_begin + column, matrix.first_row + row,
                                  static_cast<int>(column), num_valid};
    step_columns<Selection>(args, step, tier, location, gradient, factors, &columns);
  }
}

// The matrices of a launch: those that `matrices` lists in device memory or, if it is null, only
// `single_matrix`.
struct MatrixSteps {
  MatrixStep single_matrix;
  const MatrixStep* matrices = nullptr;  // [num_matrices]
  int num_matrices = 1;
  int64_t num_blocks = 0;  // of all matrices together

  // Return the matrix to which a block belongs, a number in [0, num_blocks). All lanes of a warp
  // must call this with the same block.
  EMB_DEVICE const MatrixStep& matrix_of_block(int64_t block) const {
    if (matrices == nullptr) return single_matrix;
    const auto first_block = [&](int i) { return matrices[i].first_block; };
    return matrices[warp_search(first_block, num_matrices, block)];
  }
};

// Update the rows of all matrices, in a grid-stride loop over their blocks.
template <class Selection>
__global__ void __launch_bounds__(kMatrixThreads, kMatrixBlocksPerSm)
    update_matrices_kernel(const EMB_GRID_CONSTANT MatrixSteps matrices, OptimizerStepArgs args) {
  __shared__ BlockStepStorage storage;
  build_step<Selection>(args, &storage);
  const BlockStep& step = storage.get();
  for (int64_t block = blockIdx.x; block < matrices.num_blocks; block += gridDim.x) {
    const MatrixStep& matrix = matrices.matrix_of_block(block);
    update_matrix_rows<Selection>(matrix.gradient, args, step, matrix.tier,
                                  block - matrix.first_block);
  }
}

// Update one matrix; its weights and states are tier 0 of `args`, which find_optimizer must have
// set up for an optimizer. `launcher` is a CudaLauncher or, in tests, a simt::HostLauncher.
template <class Launcher>
void launch_update_rows(const Launcher& launcher, const MatrixGrad& gradient,
                        const OptimizerStepArgs& args) {
  if (gradient.num_rows * gradient.dim == 0) return;
  const MatrixSteps matrix{{gradient, args.tiers[0], 0}, nullptr, 1, gradient.num_blocks()};
  launcher(
      update_matrices_kernel<AtRunTime>,
      blocks_for(gradient.num_blocks(), 1, launcher.max_grid_blocks(kMaxSingleMatrixBlocksPerSm)),
      kMatrixThreads, matrix, args);
}

// Update `matrices`, [num_matrices] in device memory, in ascending order of first_block. They have
// `num_blocks` blocks in all. `args` is as in launch_update_rows, but its tiers are not used. Both
// launches have the same kernel, because a copy is a hundred kilobytes of code.
template <class Launcher>
void launch_update_matrices(const Launcher& launcher, const MatrixStep* matrices, int num_matrices,
                            int64_t num_blocks, const OptimizerStepArgs& args) {
  if (num_blocks == 0) return;
  launcher(update_matrices_kernel<AtRunTime>,
           blocks_for(num_blocks, 1, launcher.max_grid_blocks(kMaxMatrixBlocksPerSm)),
           kMatrixThreads, MatrixSteps{{}, matrices, num_matrices, num_blocks}, args);
}

}  // namespace emb::cuda
