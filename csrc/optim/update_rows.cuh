// An optimizer over all rows of a matrix whose gradient is dense, on the GPU: a block takes a row.
// A row whose gradient is zero throughout took no part in the batch and keeps its weights and
// state.
#pragma once

#include "optim/row_step.cuh"

namespace emb::cuda {

inline constexpr int kMatrixThreads = 128;

struct MatrixGrad {
  const float* grad;  // [rows, width]
  int64_t rows, width;
};

// The sum over the block of `value`, in warp order, and whether `flag` holds anywhere, for every
// thread. Two barriers.
EMB_DEVICE float block_sum(float value, bool flag, bool* any) {
  constexpr int kWarps = kMatrixThreads / static_cast<int>(simt::kWarp);
  __shared__ float sum_of_warp[kWarps];
  __shared__ bool flag_of_warp[kWarps];
  const unsigned warp = threadIdx.x / simt::kWarp;
  value = simt::group_sum(value, simt::kWarp);
  flag = __any_sync(simt::kFullMask, flag);
  if (threadIdx.x % simt::kWarp == 0) {
    sum_of_warp[warp] = value;
    flag_of_warp[warp] = flag;
  }
  __syncthreads();
  value = 0.0f;
  *any = false;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    value += sum_of_warp[w];
    *any = *any || flag_of_warp[w];
  }
  __syncthreads();
  return value;
}

[[maybe_unused]] static __global__ void __launch_bounds__(kMatrixThreads)
    update_rows_kernel(MatrixGrad in, RowStepArgs step) {
  __shared__ OptimizerStorage storage;
  build_optimizer(step, &storage);
  const Optimizer& optimizer = storage.get();
  constexpr int kStride = kMatrixThreads * kColumns;
  const int64_t first = threadIdx.x * kColumns;
  for (int64_t row = blockIdx.x; row < in.rows; row += gridDim.x) {
    const int64_t start = row * in.width;
    const bool rowwise = step.rule == Rule::kRowwiseAdagrad;
    float state = rowwise ? step.row_state[row] : 0.0f;
    float squares = 0.0f, gradient[kColumns];
    bool nonzero = false;
    for (int64_t column = first; column < in.width; column += kStride) {
      read_columns(in.grad + start + column, static_cast<int>(in.width - column), gradient);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) {
        squares += gradient[k] * gradient[k];
        nonzero = nonzero || gradient[k] != 0.0f;
      }
    }
    bool any = false;
    squares = block_sum(squares, nonzero, &any);
    if (!any) continue;
    float scale = 0.0f;
    if (rowwise) {
      const float mean = squares / static_cast<float>(in.width);
      scale = optimizer.rowwise_adagrad.begin_row(&state, mean);
      if (threadIdx.x == 0) step.row_state[row] = state;
    }
    for (int64_t column = first; column < in.width; column += kStride) {
      const int valid = static_cast<int>(in.width - column);
      read_columns(in.grad + start + column, valid, gradient);
      step_row(optimizer, step, start + column, valid, gradient, scale);
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
