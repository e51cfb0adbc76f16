// An optimizer over all rows of matrices with dense gradients on the GPU. A block takes a row, or a
// warp if the row has at most 128 columns; both give the same bits. A row whose gradient is zero
// throughout was not part of the batch and keeps its weights and states. One launch serves one
// matrix, described by the arguments of the kernel, or any number of them, described in device
// memory.
#pragma once

#include "core/search.cuh"
#include "optim/optimizer_step.cuh"

namespace emb::cuda {

inline constexpr int kMatrixThreads = 128;  // threads per block
// Blocks per multiprocessor: six leave a thread 80 registers. Without the bound, ptxas takes 64
// registers and spills two (reports/LOG.md has no entry on this).
inline constexpr int kMatrixBlocksPerSm = 6;
// A grid over many matrices has at most this many blocks per multiprocessor, twice what runs at
// once: each block builds the functor of the optimizer, which takes Adam two powers in double.
inline constexpr int kMaxMatrixBlocksPerSm = 2 * kMatrixBlocksPerSm;

// The gradient of a matrix, in device memory.
struct MatrixGrad {
  const float* grad;  // [rows, width]
  int64_t rows, width;
  int64_t first_row;  // id of row 0 in the random numbers of stochastic rounding

  // Return whether a warp takes a row, else a block does.
  EMB_HD bool by_warp() const { return width <= int64_t{simt::kWarpLanes} * kColumns; }
  EMB_HD int rows_of_block() const { return by_warp() ? kMatrixThreads / kWarpLanes : 1; }
  // Return the number of blocks that take all rows.
  EMB_HD int64_t blocks() const { return (rows + rows_of_block() - 1) / rows_of_block(); }
};

// One of the matrices of a launch: its gradient, its weights and states.
struct MatrixStep {
  MatrixGrad in;
  TierMemory tier;
  int64_t first_block;  // number of its first block among the blocks of all matrices
};

// Replace each of `values`, in every thread, by its sum over the block, added in the order of
// warps. Return whether `flag` is true in any thread. All threads of the block call this; it has
// two barriers, of which the second lets the next call reuse the shared memory.
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
  bool any = false;
#pragma unroll
  for (int k = 0; k < kMaxRowSums; ++k) values[k] = 0.0f;
  for (int w = 0; w < kWarps; ++w) {
#pragma unroll
    for (int k = 0; k < kMaxRowSums; ++k) values[k] += sum_of_warp[w][k];
    any = any || flag_of_warp[w];
  }
  __syncthreads();
  return any;
}

// Do what block_sums does, but within a warp and without a barrier. The result has the bits that
// block_sums gives if all other warps pass zeros.
EMB_DEVICE bool warp_sums(float (&values)[kMaxRowSums], bool flag) {
#pragma unroll
  for (int k = 0; k < kMaxRowSums; ++k) {
    values[k] = 0.0f + simt::group_sum(values[k], simt::kWarpLanes);
  }
  return __any_sync(simt::kFullMask, flag) != 0;
}

// Add the terms of this thread's columns to the sums of the row that begins at element `start`;
// return whether one of their gradients is not zero. `threads` threads have the row, of which this
// is number `thread`.
template <class Selection>
EMB_DEVICE bool sum_row(const MatrixGrad& in, const OptimizerStepArgs& args, const BlockStep& step,
                        const TierMemory& tier, int64_t start, unsigned thread, unsigned threads,
                        float (&sums)[kMaxRowSums]) {
  bool nonzero = false;
  for (int64_t column = thread * kColumns; column < in.width; column += threads * kColumns) {
    const int valid = static_cast<int>(in.width - column);
    float gradient[kColumns];
    read_columns(in.grad + start + column, valid, gradient);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) nonzero = nonzero || gradient[k] != 0.0f;
    if (args.sums == 0) continue;
    LaneColumns x;
    if (!args.sums_need_gradient_only || step.decay.l2 != 0.0f) {
      load_columns<Selection>(args, tier, start + column, valid, &x);
      add_penalty(step, x, gradient);
    }
    sum_columns<Selection>(args, step, x, gradient, sums);
  }
  return nonzero;
}

// Update the rows of block `block` of a matrix, except rows whose gradient is zero throughout. All
// threads of the block must call this; it may have barriers.
template <class Selection>
EMB_DEVICE void update_matrix_rows(const MatrixGrad& in, const OptimizerStepArgs& args,
                                   const BlockStep& step, const TierMemory& tier, int64_t block) {
  const bool by_warp = in.by_warp();
  const unsigned thread = by_warp ? threadIdx.x % simt::kWarpLanes : threadIdx.x;
  const unsigned threads = by_warp ? simt::kWarpLanes : kMatrixThreads;
  const int64_t row = by_warp ? block * in.rows_of_block() + threadIdx.x / simt::kWarpLanes : block;
  if (row >= in.rows) return;  // only if warps take rows: then no barrier follows
  const int64_t start = row * in.width;
  float states[kMaxRowStates] = {}, sums[kMaxRowSums] = {};
  for (int s = 0; s < kMaxRowStates; ++s) {
    if (s < args.row_states) states[s] = tier.row_states[s][row];
  }
  const bool nonzero = sum_row<Selection>(in, args, step, tier, start, thread, threads, sums);
  if (!(by_warp ? warp_sums(sums, nonzero) : block_sums(sums, nonzero))) return;
  const RowFactors factors =
      begin_row<Selection>(args, step, states, sums, static_cast<int>(in.width));
  for (int s = 0; s < kMaxRowStates; ++s) {
    if (s < args.row_states && thread == 0) tier.row_states[s][row] = states[s];
  }
  for (int64_t column = thread * kColumns; column < in.width; column += threads * kColumns) {
    const int valid = static_cast<int>(in.width - column);
    float gradient[kColumns];
    LaneColumns x;
    read_columns(in.grad + start + column, valid, gradient);
    load_columns<Selection>(args, tier, start + column, valid, &x);
    add_penalty(step, x, gradient);
    const ColumnLocation location{start + column, in.first_row + row, static_cast<int>(column),
                                  valid};
    step_columns<Selection>(args, step, tier, location, gradient, factors, &x);
  }
}

// The matrices of a launch: `one`, or, if `many` is not null, `count` of them in device memory.
struct MatrixSteps {
  MatrixStep one;
  const MatrixStep* many = nullptr;
  int count = 1;
  int64_t blocks = 0;  // blocks that all matrices take together

  // Return the matrix to which a block belongs. All lanes of a warp call this.
  EMB_DEVICE const MatrixStep& of_block(int64_t block) const {
    if (many == nullptr) return one;
    const auto first_block = [&](int i) { return many[i].first_block; };
    return many[warp_search(first_block, count, block)];
  }
};

// Update the rows of all matrices, grid-stride over their blocks. One kernel serves one matrix and
// many, and one file compiles it (update_matrix.h), since a copy is a hundred kilobytes of code.
template <class Selection>
__global__ void __launch_bounds__(kMatrixThreads, kMatrixBlocksPerSm)
    update_matrices_kernel(const EMB_GRID_CONSTANT MatrixSteps matrices, OptimizerStepArgs args) {
  __shared__ BlockStepStorage storage;
  build_step<Selection>(args, &storage);
  const BlockStep& step = storage.get();
  for (int64_t block = blockIdx.x; block < matrices.blocks; block += gridDim.x) {
    const MatrixStep& matrix = matrices.of_block(block);
    update_matrix_rows<Selection>(matrix.in, args, step, matrix.tier, block - matrix.first_block);
  }
}

// Update the matrix `in`, whose weights and states are tier 0 of `step`. `launcher` is a
// CudaLauncher or, in tests, a simt::HostLauncher. Does not wait for the device.
template <class Launcher>
void launch_update_rows(const Launcher& launcher, const MatrixGrad& in,
                        const OptimizerStepArgs& step) {
  if (in.rows * in.width == 0) return;
  const MatrixSteps one{{in, step.tiers[0], 0}, nullptr, 1, in.blocks()};
  launcher(update_matrices_kernel<AtRunTime>,
           blocks_for(in.blocks(), 1, launcher.blocks(2 * kResidentBlocksPerSm)), kMatrixThreads,
           one, step);
}

// Update the `count` matrices of `matrices`, in device memory, which take `blocks` blocks in all.
// The tiers of `step` are not used.
template <class Launcher>
void launch_update_matrices(const Launcher& launcher, const MatrixStep* matrices, int count,
                            int64_t blocks, const OptimizerStepArgs& step) {
  if (blocks == 0) return;
  launcher(update_matrices_kernel<AtRunTime>,
           blocks_for(blocks, 1, launcher.blocks(kMaxMatrixBlocksPerSm)), kMatrixThreads,
           MatrixSteps{{}, matrices, count, blocks}, step);
}

}  // namespace emb::cuda
