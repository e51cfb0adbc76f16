// Backward of table-batched embeddings on the GPU, fused with the optimizer.
//
// The gradients of rows come from the gradients of bags. Lookups are sorted by row; a segment is
// the lookups of one row. The group of lanes that updates a row sums segments of up to
// kShortSegment lookups. A longer segment is divided into chunks, one block each, so that a hot row
// is spread over the device; the chunk sums are in `partials` and are added in order. The chunks
// depend on the length of the segment only, so the same gradients give the same bits.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "optim/optimizer_step.cuh"

namespace emb::cuda {

inline constexpr int kChunkThreads = 256;
inline constexpr int kShortSegment = 256;
inline constexpr int kChunk = 1024;
inline constexpr int kMaxChunks = 256;

EMB_HD int chunk_length(int segment_length) {
  return kChunk *
         static_cast<int>((static_cast<int64_t>(segment_length) + kChunk * kMaxChunks - 1) /
                          (kChunk * kMaxChunks));
}

EMB_HD int chunks_of(int segment_length) {
  const int length = chunk_length(segment_length);
  return static_cast<int>((static_cast<int64_t>(segment_length) + length - 1) / length);
}

// Return the maximum number of chunks of L lookups, whatever their segments.
inline int64_t max_chunks(int64_t num_lookups) {
  return num_lookups / kShortSegment + num_lookups / kChunk;
}

// Return the floats between two chunk sums, for rows of up to `columns`: a multiple of 16 bytes.
inline int64_t partial_stride(int64_t columns) {
  return (columns + kColumns - 1) / kColumns * kColumns;
}

// Rows of a variable batch that are wider than this are not divided into chunks.
inline constexpr int64_t kVariableColumns = 1024;

struct ChunkTask {
  int32_t segment, chunk;
};

struct GradArgs {
  const void* grad;  // as `map` says, or [L, stride] for NONE
  Dtype grad_type;
  int64_t stride;
  const Feature* features;
  BagMap map;
  Bags bags_in;  // for the lengths that MEAN divides by
  Pooling pooling;
  const float* sample_weights;  // [L] or null
  // As `tbe_group` returns them.
  const int64_t* rows;
  const int32_t *segments, *lookups, *bags, *count;
  const int32_t* row_slots;  // [U] slots of rows in the cache, or null
  int64_t num_lookups;
  // Long segments: the first chunk of each, what each chunk is, their number, and their sums.
  int32_t* first_chunk;
  ChunkTask* tasks;
  int32_t* num_tasks;
  float* partials;
  int64_t partial_stride;
  int64_t result_stride;  // between the gradients that an op without an optimizer writes
};

// Return where the gradient of sorted lookup j starts, in elements, and set its weight.
EMB_DEVICE int64_t grad_offset(const GradArgs& args, int j, float* scale) {
  const auto bag = static_cast<uint32_t>(args.bags[j]);
  *scale = 1.0f;
  if (args.pooling == Pooling::kMean) {
    const int64_t length = args.bags_in.end(bag) - args.bags_in.begin(bag);
    *scale = 1.0f / static_cast<float>(length > 0 ? length : 1);
  }
  if (args.sample_weights != nullptr) *scale *= args.sample_weights[args.lookups[j]];
  if (args.pooling == Pooling::kNone) return args.lookups[j] * args.stride;
  if (args.map.layout != nullptr) return args.map.layout[bag].element;
  return args.map.element(bag, args.features[args.map.feature(bag)].column);
}

// Return whether a segment is summed in chunks: it must be long, and its row must fit a chunk sum.
// Chunk sums of a variable batch have a fixed size, since the host does not know the widest row.
EMB_DEVICE bool has_chunks(const GradArgs& args, int length, int dim) {
  return length > kShortSegment && dim <= args.partial_stride;
}

// Add this lane's columns of the gradients of sorted lookups [begin, begin + length); `longest` is
// the maximum length in the warp. Called by all lanes.
template <class G>
EMB_DEVICE void add_grads(const GradArgs& args, const LaneGroup& lane, int begin, int length,
                          int longest, int column, int dim, float (&sum)[kColumns]) {
  const G* base = static_cast<const G*>(args.grad) + column;
  const bool aligned = dim % kColumns == 0 && is_aligned(args.grad, kColumns * sizeof(G));
  for (int tile = 0; tile < longest; tile += lane.lanes) {
    int64_t offset = -1;
    float scale = 0.0f;
    if (tile + lane.rank < length) offset = grad_offset(args, begin + tile + lane.rank, &scale);
    const int steps = longest - tile < lane.lanes ? longest - tile : lane.lanes;
    const bool vector =
        __all_sync(simt::kFullMask, offset < 0 || (aligned && offset % kColumns == 0));
    if (vector) {
      add_rows<G, kColumns, true>(base, offset, scale, dim - column, lane.lanes, steps, sum);
    } else {
      add_rows<G, kColumns, false>(base, offset, scale, dim - column, lane.lanes, steps, sum);
    }
  }
}

// Add the sums of a long segment's chunks, in order.
EMB_DEVICE void add_partials(const GradArgs& args, uint32_t segment, int length, int column,
                             int dim, float (&sum)[kColumns]) {
  if (column >= dim) return;
  const int chunks = chunks_of(length);
  const float* partial = args.partials + args.first_chunk[segment] * args.partial_stride + column;
#pragma unroll 4
  for (int c = 0; c < chunks; ++c) {
    float values[kColumns];
    read_columns(partial + c * args.partial_stride, dim - column, values);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) sum[k] += values[k];
  }
}

// List the chunks of all long segments. Their order varies from run to run; no result depends on
// it.
[[maybe_unused]] static __global__ void __launch_bounds__(kChunkThreads)
    plan_chunks_kernel(GradArgs args) {
  const int count = *args.count;
  for (int64_t u = simt::global_thread(); u < count; u += simt::threads_in_grid()) {
    const int length = args.segments[u + 1] - args.segments[u];
    if (length <= kShortSegment) continue;
    const Feature& feature = args.features[args.map.feature(args.bags[args.segments[u]])];
    if (!has_chunks(args, length, static_cast<int>(feature.dim))) continue;
    const int chunks = chunks_of(length);
    const int first = atomicAdd(args.num_tasks, chunks);
    args.first_chunk[u] = first;
    for (int c = 0; c < chunks; ++c) args.tasks[first + c] = {static_cast<int32_t>(u), c};
  }
}

// Sum one chunk per block: every group of lanes sums a range of it, then the sums are added in
// order. The grid's second dimension divides the columns of wide rows.
template <class G>
__global__ void __launch_bounds__(kChunkThreads, 4) chunk_kernel(GradArgs args, int lanes) {
  __shared__ float stretch_sum[kChunkThreads][kColumns];
  const LaneGroup lane(lanes);
  const int stretches = kChunkThreads / lanes;
  const int stretch = static_cast<int>(threadIdx.x) / lanes;
  const int num_tasks = *args.num_tasks;
  for (int t = static_cast<int>(blockIdx.x); t < num_tasks; t += static_cast<int>(gridDim.x)) {
    const ChunkTask task = args.tasks[t];
    int begin = args.segments[task.segment];
    const int total = args.segments[task.segment + 1] - begin;
    const int offset = task.chunk * chunk_length(total);
    const int length = total - offset < chunk_length(total) ? total - offset : chunk_length(total);
    const int share = (length + stretches - 1) / stretches;
    const int rest = length - stretch * share;
    const auto bag = static_cast<uint32_t>(args.bags[begin]);
    const int dim = static_cast<int>(args.features[args.map.feature(bag)].dim);
    begin += offset + stretch * share;
    for (int base = static_cast<int>(blockIdx.y) * lanes * kColumns; base < dim;
         base += static_cast<int>(gridDim.y) * lanes * kColumns) {
      const int column = base + lane.rank * kColumns;
      float sum[kColumns] = {};
      add_grads<G>(args, lane, begin, rest < share ? rest : share, share, column, dim, sum);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) stretch_sum[threadIdx.x][k] = sum[k];
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < lanes && column < dim) {
        for (int s = 1; s < stretches; ++s) {
#pragma unroll
          for (int k = 0; k < kColumns; ++k) sum[k] += stretch_sum[s * lanes + threadIdx.x][k];
        }
        write_columns(args.partials + t * args.partial_stride + column, dim - column, sum);
      }
      __syncthreads();
    }
  }
}

// The update. A group of 4 to 32 lanes takes a unique row: it asks for the row and its state, then
// sums the gradients of the row's lookups (four in flight), updates in registers and writes the row
// once. A kernel of one optimizer asks by loading them into registers; the kernel of all optimizers
// has none left, and prefetches them. No atomics on data.

inline constexpr int kUpdateThreads = 128;

// Blocks per multiprocessor, which bound the registers of a thread: 7 leave 72, 6 leave 80. For
// Blackwell, where the compiler needs more, 5 leave 96 and 4 leave 128.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kMostUpdateBlocks = 5;
#else
inline constexpr int kMostUpdateBlocks = 7;
#endif
template <class Selection>
inline constexpr int kUpdateBlocks = kMostUpdateBlocks - 1;
template <>
inline constexpr int kUpdateBlocks<Float32<Sgd>> = kMostUpdateBlocks;
template <>
inline constexpr int kUpdateBlocks<GradientOnly> = kMostUpdateBlocks;

// What the grouping says of one unique row. Its loads do not depend on each other, so that those of
// the next row are in flight while a row is updated.
struct GroupedRow {
  int64_t id = 0;  // linear
  int begin = 0, length = 0, slot = -1;

  EMB_DEVICE GroupedRow(const GradArgs& args, uint32_t u, uint32_t count) {
    if (u >= count) return;
    begin = args.segments[u];
    const int end = args.segments[u + 1];
    id = args.rows[u];
    if (args.row_slots != nullptr) slot = args.row_slots[u];
    length = end - begin;
  }
};

// The lookups of one unique row, and the location of the row.
struct Segment {
  int64_t element = 0;
  int64_t row = 0;  // in the row-wise states of the tier
  int64_t id = 0;   // linear
  int begin = 0, length = 0, dim = 0, tier = 0;

  template <class Selection>
  EMB_DEVICE Segment(Selection, const GradArgs& args, const Step& step, const GroupedRow& grouped,
                     uint32_t u)
      : id(grouped.id), begin(grouped.begin), length(grouped.length) {
    if (length == 0) return;
    const Feature& feature = args.features[args.map.feature(args.bags[begin])];
    dim = static_cast<int>(feature.dim);
    if constexpr (Selection::kHasOptimizer) {
      const RowLocation location =
          locate_update(feature, id - feature.row_base, grouped.slot, step.tiers[kCacheTier]);
      element = location.element;
      row = location.row;
      tier = location.tier;
    } else {
      element = static_cast<int64_t>(u) * args.result_stride;
    }
  }
};

// Compute this lane's columns of the gradient of the row. `longest` as in add_grads, over short
// segments.
template <class G>
EMB_DEVICE void row_gradient(const GradArgs& args, const LaneGroup& lane, const Segment& segment,
                             uint32_t u, int longest, int column, float (&sum)[kColumns]) {
#pragma unroll
  for (int k = 0; k < kColumns; ++k) sum[k] = 0.0f;
  const bool chunked = has_chunks(args, segment.length, segment.dim);
  add_grads<G>(args, lane, segment.begin, chunked ? 0 : segment.length, longest, column,
               segment.dim, sum);
  if (chunked) add_partials(args, u, segment.length, column, segment.dim, sum);
}

// Return the factors of a row from the sums over its lanes and its row-wise states, in every lane.
// The first lane of an existing row writes the new states. Called by the whole warp.
template <class Selection>
EMB_DEVICE RowFactors start_row(const OptimizerStepArgs& optimizer, const Step& step,
                                const Segment& segment, const LaneGroup& lane,
                                float (&sums)[kMaxRowSums]) {
#pragma unroll
  for (int k = 0; k < kMaxRowSums; ++k) {
    if (k < Selection::sums(optimizer)) sums[k] = simt::group_sum(sums[k], lane.lanes);
  }
  const TierRows& tier = step.tiers[segment.tier];
  const bool exists = segment.length > 0;
  float states[kMaxRowStates] = {};
#pragma unroll
  for (int s = 0; s < kMaxRowStates; ++s) {
    if (s < Selection::row_states(optimizer) && exists) states[s] = tier.row_states[s][segment.row];
  }
  const RowFactors scale = begin_row<Selection>(optimizer, step, states, sums, segment.dim);
  __syncwarp();  // all lanes have read the old states
#pragma unroll
  for (int s = 0; s < kMaxRowStates; ++s) {
    if (s < Selection::row_states(optimizer) && exists && lane.rank == 0)
      tier.row_states[s][segment.row] = states[s];
  }
  return scale;
}

template <class G, class Selection>
__global__ void __launch_bounds__(kUpdateThreads, kUpdateBlocks<Selection>)
    update_kernel(GradArgs args, OptimizerStepArgs optimizer, int lanes) {
  __shared__ StepStorage storage;
  build_step<Selection>(optimizer, &storage);
  const Step& step = storage.get();
  const LaneGroup lane(lanes);
  const int width = lanes * kColumns;
  // The sums of a row that is processed in two passes live through the second one: in shared
  // memory.
  __shared__ float sums_of_thread[kUpdateThreads][kMaxRowSums];
  float (&sums)[kMaxRowSums] = sums_of_thread[threadIdx.x];
  const auto count = static_cast<uint32_t>(*args.count);
  const auto stride = static_cast<uint32_t>(simt::warps_in_grid()) * lane.groups_in_warp();
  uint32_t base_row = static_cast<uint32_t>(simt::global_warp()) * lane.groups_in_warp();
  constexpr bool kReadsAhead =
      !std::is_same_v<Selection, AtRunTime>;  // which has no registers left
  GroupedRow next(args, base_row + lane.group, count);
  for (; base_row < count; base_row += stride) {
    const uint32_t u = base_row + lane.group;
    if constexpr (!kReadsAhead) next = GroupedRow(args, u, count);
    const Segment segment(Selection{}, args, step, next, u);
    if constexpr (kReadsAhead) next = GroupedRow(args, u + stride, count);
    const TierRows& tier = step.tiers[segment.tier];
    if constexpr (Selection::kHasOptimizer) {
      if (lane.rank * kColumns < segment.dim) {
        if constexpr (!kReadsAhead) {
          prefetch_columns<Selection>(optimizer, tier, segment.element + lane.rank * kColumns);
        }
        if (lane.rank < Selection::row_states(optimizer))
          simt::prefetch(tier.row_states[lane.rank] + segment.row);
      }
    }
    const int longest = __reduce_max_sync(
        simt::kFullMask, has_chunks(args, segment.length, segment.dim) ? 0 : segment.length);
    const int widest = __reduce_max_sync(simt::kFullMask, segment.dim);
    // Sums over a row must be complete before its first column is updated: rows wider than the
    // group are processed in two passes, the second from the cache.
    const bool twice = Selection::sums(optimizer) > 0 && widest > width;
#pragma unroll
    for (int k = 0; k < kMaxRowSums; ++k) sums[k] = 0.0f;
    RowFactors scale;
    for (int pass = twice ? 0 : 1; pass < 2; ++pass) {
      for (int base = static_cast<int>(blockIdx.y) * width; base < widest;
           base += static_cast<int>(gridDim.y) * width) {
        const int column = base + lane.rank * kColumns, valid = segment.dim - column;
        Columns x;
        if constexpr (kReadsAhead && Selection::kHasOptimizer) {
          load_columns<Selection>(optimizer, tier, segment.element + column, valid, &x);
        }
        float gradient[kColumns];
        row_gradient<G>(args, lane, segment, u, longest, column, gradient);
        if constexpr (!Selection::kHasOptimizer) {
          if (valid > 0) {
            stream_columns(static_cast<float*>(tier.weights) + segment.element + column, valid,
                           gradient);
          }
        } else {
          if constexpr (!kReadsAhead) {
            load_columns<Selection>(optimizer, tier, segment.element + column, valid, &x);
          }
          add_penalty(step, x, gradient);
          if (Selection::sums(optimizer) > 0 && (pass == 0 || !twice))
            sum_columns<Selection>(optimizer, step, x, gradient, sums);
          if (pass == 0) continue;
          if (base == static_cast<int>(blockIdx.y) * width) {
            scale = start_row<Selection>(optimizer, step, segment, lane, sums);
          }
          if (valid > 0) {
            const ColumnLocation location{segment.element + column, segment.id, column, valid};
            step_columns<Selection>(optimizer, step, tier, location, gradient, scale, &x);
          }
        }
      }
    }
  }
}

template <class G, class Launcher>
void launch_update_of(const Launcher& launcher, const GradArgs& args,
                      const OptimizerStepArgs& optimizer, int64_t mean_dim) {
  const int lanes = lanes_for(mean_dim, kColumns);
  const unsigned stripes = blocks_for(mean_dim, lanes * kColumns, 64);
  if (max_chunks(args.num_lookups) > 0) {
    launcher(plan_chunks_kernel, blocks_for(args.num_lookups, kChunkThreads, launcher.blocks(8)),
             kChunkThreads, args);
    const unsigned blocks = blocks_for(max_chunks(args.num_lookups), 1, launcher.blocks(8));
    launcher(chunk_kernel<G>, simt::Dim3(blocks, stripes), kChunkThreads, args, lanes);
  }
  const int64_t rows_of_block = kUpdateThreads / lanes;
  const unsigned blocks = blocks_for(args.num_lookups, rows_of_block, launcher.blocks(28));
  // Row-wise states are read and written once per row, so one stripe takes all columns.
  const simt::Dim3 grid(blocks, optimizer.by_row() ? 1 : stripes);
  visit_selection<G>(optimizer, [&](auto tag) {
    using Selection = typename decltype(tag)::type;
    launcher(update_kernel<G, Selection>, grid, kUpdateThreads, args, optimizer, lanes);
  });
}

// `mean_dim`, the mean width of the features, determines the lanes per row.
template <class Launcher>
void launch_update(const Launcher& launcher, const GradArgs& args,
                   const OptimizerStepArgs& optimizer, int64_t mean_dim) {
  if (args.num_lookups == 0 || args.bags_in.count == 0) return;
  if (args.grad_type == Dtype::kFloat) {
    launch_update_of<float>(launcher, args, optimizer, mean_dim);
  } else if (args.grad_type == Dtype::kHalf) {
    launch_update_of<half16>(launcher, args, optimizer, mean_dim);
  } else {
    launch_update_of<bfloat16>(launcher, args, optimizer, mean_dim);
  }
}

}  // namespace emb::cuda
