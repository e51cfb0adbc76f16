// An optimizer over all rows of a matrix whose gradient is dense, on the GPU: a block takes a row.
// A row whose gradient is zero throughout took no part in the batch and keeps its weights and
// state.
#pragma once

#include "optim/optimizer_step.cuh"

namespace emb::cuda {

inline constexpr int kMatrixThreads = 128;

struct MatrixGrad {
  const float* grad;  // [rows, width]
  int64_t rows, width;
};

// The sum over the block of each of `values`, in warp order, and whether `flag` holds anywhere, for
// every thread. Two barriers.
EMB_DEVICE bool block_sums(float (&values)[kMostSums], bool flag) {
  constexpr int kWarps = kMatrixThreads / static_cast<int>(simt::kWarp);
  __shared__ float sum_of_warp[kWarps][kMostSums];
  __shared__ bool flag_of_warp[kWarps];
  const unsigned warp = threadIdx.x / simt::kWarp;
#pragma unroll
  for (int k = 0; k < kMostSums; ++k) values[k] = simt::group_sum(values[k], simt::kWarp);
  flag = __any_sync(simt::kFullMask, flag);
  if (threadIdx.x % simt::kWarp == 0) {
#pragma unroll
    for (int k = 0; k < kMostSums; ++k) sum_of_warp[warp][k] = values[k];
    flag_of_warp[warp] = flag;
  }
  __syncthreads();
  bool any = false;
#pragma unroll
  for (int k = 0; k < kMostSums; ++k) values[k] = 0.0f;
  for (int w = 0; w < kWarps; ++w) {
#pragma unroll
    for (int k = 0; k < kMostSums; ++k) values[k] += sum_of_warp[w][k];
    any = any || flag_of_warp[w];
  }
  __syncthreads();
  return any;
}

// The sums of a row over this thread's columns; true where its gradient is not zero.
EMB_DEVICE bool sum_row(const MatrixGrad& in, const RowStepArgs& args, const Step& step,
                        int64_t start, float (&sums)[kMostSums]) {
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
    if (!args.sums_of_gradient || step.decay.l2 != 0.0f) {
      load_columns(args, step.tiers[0], start + column, valid, &x);
      add_penalty(step, x, gradient);
    }
    sum_columns(args, step, x, gradient, sums);
  }
  return nonzero;
}

[[maybe_unused]] static __global__ void __launch_bounds__(kMatrixThreads)
    update_rows_kernel(MatrixGrad in, RowStepArgs args) {
  __shared__ StepStorage storage;
  build_step(args, &storage);
  const Step& step = storage.get();
  const TierRows& tier = step.tiers[0];
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    const int64_t start = row * in.width;
    float states[kMostRowStates] = {}, sums[kMostSums] = {};
    for (int s = 0; s < kMostRowStates; ++s) {
      if (s < args.row_states) states[s] = tier.row_states[s][row];
    }
    const bool nonzero = sum_row(in, args, step, start, sums);
    if (!block_sums(sums, nonzero)) continue;
    const RowScale scale = begin_row(args, step, states, sums, static_cast<int>(in.width));
    for (int s = 0; s < kMostRowStates; ++s) {
      if (s < args.row_states && threadIdx.x == 0) tier.row_states[s][row] = states[s];
    }
    for (int64_t column = threadIdx.x * kColumns; column < in.width;
         column += kMatrixThreads * kColumns) {
      const int valid = static_cast<int>(in.width - column);
      float gradient[kColumns];
      Columns x;
      read_columns(in.grad + start + column, valid, gradient);
      load_columns(args, tier, start + column, valid, &x);
      add_penalty(step, x, gradient);
      const StepPlace place{start + column, row, static_cast<int>(column), valid};
      step_columns(args, step, tier, place, gradient, scale, &x);
    }
  }
}

template <class Launcher>
void launch_update_rows(const Launcher& launcher, const MatrixGrad& in, const RowStepArgs& step) {
  if (in.rows * in.width == 0) return;
  launcher(update_rows_kernel, blocks_for(in.rows, 1, launcher.blocks(64)), kMatrixThreads, in,
           step);
}

}  // namespace emb::cuda
