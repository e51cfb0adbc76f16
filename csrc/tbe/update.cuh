// Backward of table-batched embeddings fused with the optimizer. A group of 4 to 32 lanes takes a
// unique row: it asks for the row and its state, sums the gradients of the row's lookups meanwhile
// (four in flight), steps the optimizer in registers and writes the row once. No atomics on data.
#pragma once

#include "tbe/grads.cuh"

namespace emb::cuda {

// 7 blocks of 128 threads leave 72 registers a thread, what the kernel needs, and 28 warps. For
// Blackwell the compiler wants 94 registers.
inline constexpr int kUpdateThreads = 128;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kUpdateBlocks = 5;
#else
inline constexpr int kUpdateBlocks = 7;
#endif

// The lookups of one unique row and where the row lives.
struct Segment {
  int64_t element = 0;  // where the row starts in the weights; in the output for Rule::kNone
  int begin = 0, length = 0, dim = 0;

  EMB_DEVICE Segment(const GradArgs& args, Rule rule, uint32_t u, uint32_t count) {
    if (u >= count) return;
    begin = args.segments[u];
    length = args.segments[u + 1] - begin;
    const Feature& feature = args.features[static_cast<uint32_t>(args.bags[begin]) / args.batch];
    dim = static_cast<int>(feature.dim);
    const int64_t row = rule == Rule::kNone ? u : args.rows[u] - feature.row_base;
    element = row * dim + (rule == Rule::kNone ? 0 : feature.weight_offset);
  }
};

// Asks for the memory the row's step will touch: it arrives while the gradients are summed.
EMB_DEVICE void prefetch_row(const RowStepArgs& step, const Segment& segment,
                             const LaneGroup& lane) {
  const int column = lane.rank * kColumns;
  if (step.rule != Rule::kNone && column < segment.dim) {
    prefetch_columns(step, segment.element + column);
  }
}

// This lane's columns of the gradient of the row. `longest` as in add_grads, over short segments.
template <class G>
EMB_DEVICE void row_gradient(const GradArgs& args, const LaneGroup& lane, const Segment& segment,
                             uint32_t u, int longest, int column, float (&sum)[kColumns]) {
#pragma unroll
  for (int k = 0; k < kColumns; ++k) sum[k] = 0.0f;
  const bool is_long = segment.length > kShortSegment;
  add_grads<G>(args, lane, segment.begin, is_long ? 0 : segment.length, longest, column,
               segment.dim, sum);
  if (is_long) add_partials(args, u, segment.length, column, segment.dim, sum);
}

EMB_DEVICE float squared(const float (&x)[kColumns]) {
  float sum = 0.0f;
#pragma unroll
  for (int k = 0; k < kColumns; ++k) sum += x[k] * x[k];
  return sum;
}

template <class G>
__global__ void __launch_bounds__(kUpdateThreads, kUpdateBlocks)
    update_kernel(GradArgs args, RowStepArgs step, int lanes) {
  __shared__ OptimizerStorage storage;
  build_optimizer(step, &storage);
  const Optimizer& optimizer = storage.get();
  const LaneGroup lane(lanes);
  const int width = lanes * kColumns;
  const bool rowwise = step.rule == Rule::kRowwiseAdagrad;
  const auto count = static_cast<uint32_t>(*args.count);
  const auto stride = static_cast<uint32_t>(simt::warps_in_grid()) * lane.groups_in_warp();
  uint32_t first = static_cast<uint32_t>(simt::global_warp()) * lane.groups_in_warp();
  for (; first < count; first += stride) {
    const Segment segment(args, step.rule, first + lane.group, count);
    prefetch_row(step, segment, lane);
    const uint32_t u = first + lane.group;
    const bool stateful = rowwise && u < count;
    const float state = stateful ? step.row_state[args.rows[u]] : 0.0f;
    const int longest =
        __reduce_max_sync(simt::kFullMask, segment.length > kShortSegment ? 0 : segment.length);
    const int widest = __reduce_max_sync(simt::kFullMask, segment.dim);
    // A row state needs the whole row's gradient before the first step: rows of more than one piece
    // are summed twice, the second time from the cache.
    const bool twice = rowwise && widest > width;
    float squares = 0.0f, scale = 0.0f;
    for (int pass = twice ? 0 : 1; pass < 2; ++pass) {
      for (int base = static_cast<int>(blockIdx.y) * width; base < widest;
           base += static_cast<int>(gridDim.y) * width) {
        const int column = base + lane.rank * kColumns;
        float gradient[kColumns];
        row_gradient<G>(args, lane, segment, u, longest, column, gradient);
        if (pass == 0 || !twice) squares += squared(gradient);
        if (pass == 0) continue;
        if (rowwise && base == 0) {
          const float mean_square =
              simt::group_sum(squares, lanes) / static_cast<float>(segment.dim);
          float* place = stateful && lane.rank == 0 ? step.row_state + args.rows[u] : nullptr;
          scale = start_row(optimizer.rowwise_adagrad, state, mean_square, place);
        }
        if (column < segment.dim) {
          step_row(optimizer, step, segment.element + column, segment.dim - column, gradient,
                   scale);
        }
      }
    }
  }
}

template <class G, class Launcher>
void launch_update_of(const Launcher& launcher, const GradArgs& args, const RowStepArgs& step,
                      int64_t mean_dim) {
  const int lanes = lanes_for(mean_dim, kColumns);
  const unsigned stripes = blocks_for(mean_dim, lanes * kColumns, 64);
  if (most_chunks(args.num_lookups) > 0) {
    launcher(plan_chunks_kernel, blocks_for(args.num_lookups, kChunkThreads, launcher.blocks(8)),
             kChunkThreads, args);
    const unsigned blocks = blocks_for(most_chunks(args.num_lookups), 1, launcher.blocks(8));
    launcher(chunk_kernel<G>, simt::Dim3(blocks, stripes), kChunkThreads, args, lanes);
  }
  const int64_t rows_of_block = kUpdateThreads / lanes;
  const unsigned blocks = blocks_for(args.num_lookups, rows_of_block, launcher.blocks(28));
  // The row state is read and written once a row, so one stripe takes all columns.
  const bool rowwise = step.rule == Rule::kRowwiseAdagrad;
  launcher(update_kernel<G>, simt::Dim3(blocks, rowwise ? 1 : stripes), kUpdateThreads, args, step,
           lanes);
}

// `mean_dim`, the mean width of the features, picks the lanes of a row.
template <class Launcher>
void launch_update(const Launcher& launcher, const GradArgs& args, const RowStepArgs& step,
                   int64_t mean_dim) {
  if (args.num_lookups == 0 || args.bags_in.count == 0) return;
  if (args.grad_type == Dtype::kFloat) {
    launch_update_of<float>(launcher, args, step, mean_dim);
  } else if (args.grad_type == Dtype::kHalf) {
    launch_update_of<half16>(launcher, args, step, mean_dim);
  } else {
    launch_update_of<bfloat16>(launcher, args, step, mean_dim);
  }
}

}  // namespace emb::cuda
