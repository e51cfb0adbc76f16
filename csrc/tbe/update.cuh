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
  int64_t element = 0;
  int64_t row = 0;  // of the row-wise states of the tier
  int begin = 0, length = 0, dim = 0, tier = 0;

  EMB_DEVICE Segment(const GradArgs& args, const RowStepArgs& rule, const Step& step, uint32_t u,
                     uint32_t count) {
    if (u >= count) return;
    begin = args.segments[u];
    length = args.segments[u + 1] - begin;
    const Feature& feature = args.features[args.map.feature(args.bags[begin])];
    dim = static_cast<int>(feature.dim);
    if (rule.rule == kNoRule) {
      element = static_cast<int64_t>(u) * dim;
      return;
    }
    const int slot = args.row_slots != nullptr ? args.row_slots[u] : -1;
    const RowPlace place =
        update_place(feature, args.rows[u] - feature.row_base, slot, step.tiers[kCacheTier]);
    element = place.element;
    row = place.row;
    tier = place.tier;
  }
};

// This lane's columns of the gradient of the row. `longest` as in add_grads, over short segments.
template <class G>
EMB_DEVICE void row_gradient(const GradArgs& args, const LaneGroup& lane, const Segment& segment,
                             uint32_t u, int longest, int column, float (&sum)[kColumns]) {
#pragma unroll
  for (int k = 0; k < kColumns; ++k) sum[k] = 0.0f;
  const bool cut = is_cut(args, segment.length, segment.dim);
  add_grads<G>(args, lane, segment.begin, cut ? 0 : segment.length, longest, column, segment.dim,
               sum);
  if (cut) add_partials(args, u, segment.length, column, segment.dim, sum);
}

// The row's states, from the sums that its lanes have made: what step wants to know, for every
// lane. The new states are written by the first lane of a row that there is. The whole warp calls
// it.
EMB_DEVICE RowScale start_row(const RowStepArgs& rule, const Step& step, const Segment& segment,
                              const LaneGroup& lane, float (&sums)[kMostSums]) {
#pragma unroll
  for (int k = 0; k < kMostSums; ++k) {
    if (k < rule.sums) sums[k] = simt::group_sum(sums[k], lane.lanes);
  }
  const TierRows& tier = step.tiers[segment.tier];
  const bool exists = segment.length > 0;
  float states[kMostRowStates] = {};
#pragma unroll
  for (int s = 0; s < kMostRowStates; ++s) {
    if (s < rule.row_states && exists) states[s] = tier.row_states[s][segment.row];
  }
  const RowScale scale = begin_row(rule, step, states, sums, segment.dim);
  __syncwarp();  // no lane still has to read the old states
#pragma unroll
  for (int s = 0; s < kMostRowStates; ++s) {
    if (s < rule.row_states && exists && lane.rank == 0)
      tier.row_states[s][segment.row] = states[s];
  }
  return scale;
}

template <class G>
__global__ void __launch_bounds__(kUpdateThreads, kUpdateBlocks)
    update_kernel(GradArgs args, RowStepArgs rule, int lanes) {
  __shared__ StepStorage storage;
  build_step(rule, &storage);
  const Step& step = storage.get();
  const LaneGroup lane(lanes);
  const int width = lanes * kColumns;
  // Where a row is gone through twice its sums live on through the second time: not in registers.
  __shared__ float sums_of_thread[kUpdateThreads][kMostSums];
  float (&sums)[kMostSums] = sums_of_thread[threadIdx.x];
  const auto count = static_cast<uint32_t>(*args.count);
  const auto stride = static_cast<uint32_t>(simt::warps_in_grid()) * lane.groups_in_warp();
  uint32_t base_row = static_cast<uint32_t>(simt::global_warp()) * lane.groups_in_warp();
  for (; base_row < count; base_row += stride) {
    const uint32_t u = base_row + lane.group;
    const Segment segment(args, rule, step, u, count);
    const TierRows& tier = step.tiers[segment.tier];
    if (rule.rule != kNoRule && lane.rank * kColumns < segment.dim) {
      prefetch_columns(rule, tier, segment.element + lane.rank * kColumns);
      if (lane.rank < rule.row_states) simt::prefetch(tier.row_states[lane.rank] + segment.row);
    }
    const int longest = __reduce_max_sync(
        simt::kFullMask, is_cut(args, segment.length, segment.dim) ? 0 : segment.length);
    const int widest = __reduce_max_sync(simt::kFullMask, segment.dim);
    // What is summed over a row must be complete before the first step: rows of more than one piece
    // are gone through twice, the second time from the cache.
    const bool twice = rule.sums > 0 && widest > width;
#pragma unroll
    for (int k = 0; k < kMostSums; ++k) sums[k] = 0.0f;
    RowScale scale;
    for (int pass = twice ? 0 : 1; pass < 2; ++pass) {
      for (int base = static_cast<int>(blockIdx.y) * width; base < widest;
           base += static_cast<int>(gridDim.y) * width) {
        const int column = base + lane.rank * kColumns, valid = segment.dim - column;
        float gradient[kColumns];
        row_gradient<G>(args, lane, segment, u, longest, column, gradient);
        if (rule.rule == kNoRule) {
          if (valid > 0) {
            write_columns(static_cast<float*>(tier.weights) + segment.element + column, valid,
                          gradient);
          }
          continue;
        }
        Columns x;
        load_columns(rule, tier, segment.element + column, valid, &x);
        add_penalty(step, x, gradient);
        if (rule.sums > 0 && (pass == 0 || !twice)) sum_columns(rule, step, x, gradient, sums);
        if (pass == 0) continue;
        if (base == static_cast<int>(blockIdx.y) * width) {
          scale = start_row(rule, step, segment, lane, sums);
        }
        if (valid > 0) {
          const StepPlace place{segment.element + column, args.rows[u], column, valid};
          step_columns(rule, step, tier, place, gradient, scale, &x);
        }
      }
    }
  }
}

template <class G, class Launcher>
void launch_update_of(const Launcher& launcher, const GradArgs& args, const RowStepArgs& rule,
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
  // What belongs to a row is read and written once, so one stripe takes all columns.
  launcher(update_kernel<G>, simt::Dim3(blocks, rule.by_row() ? 1 : stripes), kUpdateThreads, args,
           rule, lanes);
}

// `mean_dim`, the mean width of the features, picks the lanes of a row.
template <class Launcher>
void launch_update(const Launcher& launcher, const GradArgs& args, const RowStepArgs& rule,
                   int64_t mean_dim) {
  if (args.num_lookups == 0 || args.bags_in.count == 0) return;
  if (args.grad_type == Dtype::kFloat) {
    launch_update_of<float>(launcher, args, rule, mean_dim);
  } else if (args.grad_type == Dtype::kHalf) {
    launch_update_of<half16>(launcher, args, rule, mean_dim);
  } else {
    launch_update_of<bfloat16>(launcher, args, rule, mean_dim);
  }
}

}  // namespace emb::cuda
