// An optimizer over all rows of a matrix with a dense gradient on the GPU, one block per row. A row
// whose gradient is all zero was not part of the batch and keeps its weights and states.
#pragma once

#include "optim/optimizer_step.cuh"

namespace emb::cuda {

inline constexpr int kMatrixThreads = 128;

struct MatrixGrad {
  const float* grad;  // [rows, width]
  int64_t rows, width;
  int64_t first_row;  // id of row 0 in the random numbers of stochastic rounding
};

// Replace each of `values` by its sum over the block, in warp order, and return whether `flag`
// holds in any thread; in every thread. Two barriers.
EMB_DEVICE bool block_sums(float (&values)[kMaxRowSums], bool flag) {
  constexpr int kWarps = kMatrixThreads / static_cast<int>(simt::kWarp);
  __shared__ float sum_of_warp[kWarps][kMaxRowSums];
  __shared__ bool flag_of_warp[kWarps];
  const unsigned warp = threadIdx.x / simt::kWarp;
#pragma unroll
  for (int k = 0; k < kMaxRowSums; ++k) values[k] = simt::group_sum(values[k], simt::kWarp);
  flag = __any_sync(simt::kFullMask, flag);
  if (threadIdx.x % simt::kWarp == 0) {
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

// Add the terms of this thread's columns to the sums of a row; return whether their gradient is
// nonzero.
EMB_DEVICE bool sum_row(const MatrixGrad& in, const OptimizerStepArgs& args, const Step& step,
                        int64_t start, float (&sums)[kMaxRowSums]) {
  bool nonzero = false;
  for (int64_t column = threadIdx.x * kColumns; column < in.width;
       column += kMatrixThreads * kColumns) {
    const int valid = static_cast<int>(in.width - column);
    float gradient[kColumns];
    read_columns(in.grad + start + column, valid, gradient);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) nonzero = nonzero || gradient[k] != 0.0f;
    if (args.sums == 0) continue;
    Columns x;
    if (!args.sums_need_gradient_only || step.decay.l2 != 0.0f) {
      load_columns<AtRunTime>(args, step.tiers[0], start + column, valid, &x);
      add_penalty(step, x, gradient);
    }
    sum_columns<AtRunTime>(args, step, x, gradient, sums);
  }
  return nonzero;
}

// Six blocks per multiprocessor allow 80 registers; left alone, ptxas takes 64 and spills two.
[[maybe_unused]] static __global__ void __launch_bounds__(kMatrixThreads, 6)
    update_rows_kernel(MatrixGrad in, OptimizerStepArgs args) {
  __shared__ StepStorage storage;
  build_step<AtRunTime>(args, &storage);
  const Step& step = storage.get();
  const TierRows& tier = step.tiers[0];
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    const int64_t start = row * in.width;
    float states[kMaxRowStates] = {}, sums[kMaxRowSums] = {};
    for (int s = 0; s < kMaxRowStates; ++s) {
      if (s < args.row_states) states[s] = tier.row_states[s][row];
    }
    const bool nonzero = sum_row(in, args, step, start, sums);
    if (!block_sums(sums, nonzero)) continue;
    const RowFactors scale =
        begin_row<AtRunTime>(args, step, states, sums, static_cast<int>(in.width));
    for (int s = 0; s < kMaxRowStates; ++s) {
      if (s < args.row_states && threadIdx.x == 0) tier.row_states[s][row] = states[s];
    }
    for (int64_t column = threadIdx.x * kColumns; column < in.width;
         column += kMatrixThreads * kColumns) {
      const int valid = static_cast<int>(in.width - column);
      float gradient[kColumns];
      Columns x;
      read_columns(in.grad + start + column, valid, gradient);
      load_columns<AtRunTime>(args, tier, start + column, valid, &x);
      add_penalty(step, x, gradient);
      const ColumnLocation location{start + column, in.first_row + row, static_cast<int>(column),
                                    valid};
      step_columns<AtRunTime>(args, step, tier, location, gradient, scale, &x);
    }
  }
}

template <class Launcher>
void launch_update_rows(const Launcher& launcher, const MatrixGrad& in,
                        const OptimizerStepArgs& step) {
  if (in.rows * in.width == 0) return;
  launcher(update_rows_kernel, blocks_for(in.rows, 1, launcher.blocks(64)), kMatrixThreads, in,
           step);
}

}  // namespace emb::cuda
