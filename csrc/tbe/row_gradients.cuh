// Gradients of rows on the GPU for the fused update (update.cuh): sums over the lookups of a row.
//
// Lookups are sorted by row; a *segment* is the lookups of one row. Usually the lanes that update a
// row also sum its segment. A segment of more than kShortSegment lookups is divided into chunks,
// unless the row is wider than a chunk sum (only in a variable batch, see kMaxVariableColumns). So
// one hot row occupies the whole device. The steps, on one stream, are
//   (1) plan_chunks_kernel writes the task of each chunk slot, and may count the step,
//   (2) chunk_kernel sums the chunks,
//   (3) update_kernel (update.cuh) adds the chunk sums of a row in order.
// The bits of a sum depend on the gradients in their order and, in a segment with chunks, on the
// mean width of the features, which determines the stretches of a chunk (sum_chunk).
#pragma once

#include "core/dtype.h"
#include "core/layout.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "group/segments.cuh"
#include "optim/optimizer_step.cuh"

namespace emb::cuda {

inline constexpr int kChunkThreads = 256;
// Minimum number of blocks per multiprocessor of chunk_kernel: with four, a thread has at most 64
// registers.
inline constexpr int kChunkSumBlocksPerSm = 4;
// The three limits below are not measured.
inline constexpr int kShortSegment = 256;      // lookups of the longest segment without chunks
inline constexpr int kMinChunkLookups = 1024;  // per chunk; in very long segments a multiple
inline constexpr int kMaxChunks = 256;         // maximum number of chunks of a segment

// Return the number of lookups per chunk of a segment, of which the last chunk may have fewer.
EMB_HD int chunk_length(int segment_length) {
  return kMinChunkLookups * static_cast<int>((static_cast<int64_t>(segment_length) +
                                              kMinChunkLookups * kMaxChunks - 1) /
                                             (kMinChunkLookups * kMaxChunks));
}

// Return the number of chunks of a segment.
EMB_HD int num_chunks(int segment_length) {
  const int length = chunk_length(segment_length);
  return static_cast<int>((static_cast<int64_t>(segment_length) + length - 1) / length);
}

// Chunk sums are stored in *chunk slots*, one per kShortSegment sorted lookups: slot s belongs to
// the segment of sorted lookup s * kShortSegment. So the position of a segment determines its
// slots, without a counter. A segment that is divided into chunks has at least as many slots as
// chunks, and chunk c is in its slot c.
//
// Return the number of chunk slots of a batch, 0 if no segment can be long.
EMB_HD int64_t num_chunk_slots(int64_t num_lookups) {
  return num_lookups > kShortSegment ? (num_lookups + kShortSegment - 1) / kShortSegment : 0;
}

// Return the first chunk slot of a segment that begins at sorted lookup `begin`.
EMB_HD int64_t first_chunk_slot(int64_t begin) {
  return (begin + kShortSegment - 1) / kShortSegment;
}

// Return the number of floats from one chunk sum to the next, for rows of up to `columns` columns:
// a multiple of kColumns, so that chunk sums are aligned to 16 bytes.
inline int64_t chunk_sum_stride(int64_t columns) {
  return (columns + kColumns - 1) / kColumns * kColumns;
}

// The maximum number of columns of a chunk sum in a variable batch, in which the host does not know
// the widest row. Segments of wider rows are not divided into chunks.
inline constexpr int64_t kMaxVariableColumns = 1024;

// The chunk of a chunk slot.
struct ChunkTask {
  int32_t segment;  // number of its segment; negative: the slot has no chunk
  int32_t chunk;    // number of the chunk in the segment
};

// The gradients of a batch and its grouping, for the kernels that sum the gradients of rows. All
// pointers are to device memory that must live until the kernels have run. The entry has checked
// shapes; the contents (grouping, features, bag layout) are trusted, but not those of row_slots and
// offsets. F is the number of features, B of bags per feature of a fixed batch, L of lookups, and D
// of columns of the gradient of a lookup.
struct DeviceGradArgs {
  // [B, output_dim]; [output_dim] with pooling in a variable batch; [L, D] without pooling
  const void* grad;
  Dtype grad_type;
  int64_t grad_stride;      // elements between rows of `grad`; read without pooling only
  const Feature* features;  // [F]
  BagMap map;
  Bags bags;  // MEAN divides by their lengths
  Pooling pooling;
  const float* sample_weights;  // [L] by lookup; null: all are 1
  // The grouping of `tbe_group`: group u < *num_groups is the lookups of row rows[u], the sorted
  // lookups [segments[u], segments[u + 1]); sorted lookup j is lookup sorted_lookups[j], of bag
  // sorted_bags[j].
  const int64_t* rows;  // [L] linear row ids; not used without an optimizer
  const int32_t *segments, *sorted_lookups, *sorted_bags, *num_groups;  // [L + 1], [L], [L], [1]
  const int32_t* row_slots;  // [L] cache slot of the row of each group, -1 for none; null: no cache
  int64_t num_lookups;       // L
  // Scratch, null if num_chunk_slots(L) is 0: the chunk of each chunk slot, [slots], and its sum,
  // [slots, chunk_sum_stride].
  ChunkTask* chunk_tasks;
  float* chunk_sums;
  int64_t chunk_sum_stride;  // a result of the function chunk_sum_stride
  // The number of floats from one gradient to the next in the result, the weights of tier 0. Used
  // only without an optimizer.
  int64_t result_stride;
};

// Return the bag of sorted lookup j.
EMB_DEVICE uint32_t bag_of(const DeviceGradArgs& args, int j) {
  return static_cast<uint32_t>(args.sorted_bags[j]);
}

// Return the feature of sorted lookup j.
EMB_DEVICE const Feature& feature_of(const DeviceGradArgs& args, int j) {
  return args.features[args.map.feature(bag_of(args, j))];
}

// Return the index in args.grad of the first element of the gradient of sorted lookup j, which is
// in bag `bag`.
EMB_DEVICE int64_t grad_offset(const DeviceGradArgs& args, int j, uint32_t bag) {
  if (args.pooling == Pooling::kNone) return args.sorted_lookups[j] * args.grad_stride;
  if (args.map.layout != nullptr) return args.map.layout[bag].element;
  return args.map.output_element(bag, args.features[args.map.feature(bag)].column);
}

// Return the factor of the gradient of sorted lookup j, which is in bag `bag`: its sample weight (1
// without sample weights), for MEAN times 1 / length of the bag.
EMB_DEVICE float grad_scale(const DeviceGradArgs& args, int j, uint32_t bag) {
  float weight = 1.0f;
  if (args.pooling == Pooling::kMean) {
    const int64_t length = args.bags.end(bag) - args.bags.begin(bag);
    weight = 1.0f / static_cast<float>(length > 0 ? length : 1);
  }
  if (args.sample_weights != nullptr) weight *= args.sample_weights[args.sorted_lookups[j]];
  return weight;
}

// Return whether a segment of `length` lookups of a row of `dim` columns is summed in chunks.
EMB_DEVICE bool has_chunks(const DeviceGradArgs& args, int length, int dim) {
  return length > kShortSegment && dim <= args.chunk_sum_stride;
}

// Add columns [column, column + kColumns) of the gradients of sorted lookups [begin, begin +
// length), times their factors, to `sum`. The lanes of a group of lanes pass the same lookups, of a
// row of `dim` columns; `length` may be negative for none. `max_length` is at least the `length` of
// every lane of the warp, and the same in all. All lanes of a warp must call this. G is the dtype
// of the gradient.
template <class G>
EMB_DEVICE void add_grads(const DeviceGradArgs& args, const LaneGroup& lane, int begin, int length,
                          int max_length, int column, int dim, float (&sum)[kColumns]) {
  const G* base = static_cast<const G*>(args.grad) + column;
  const bool has_aligned_rows = dim % kColumns == 0 && is_aligned(args.grad, kColumns * sizeof(G));
  for (int tile = 0; tile < max_length; tile += lane.lanes) {
    int64_t offset = -1;
    float scale = 0.0f;
    if (const int j = begin + tile + lane.rank; tile + lane.rank < length) {
      offset = grad_offset(args, j, bag_of(args, j));
      scale = grad_scale(args, j, bag_of(args, j));
    }
    const int num_steps = max_length - tile < lane.lanes ? max_length - tile : lane.lanes;
    const bool uses_vectors =
        __all_sync(simt::kFullMask, offset < 0 || (has_aligned_rows && offset % kColumns == 0));
    if (uses_vectors) {
      add_rows<G, kColumns, true>(base, offset, scale, dim - column, lane.lanes, num_steps, sum);
    } else {
      add_rows<G, kColumns, false>(base, offset, scale, dim - column, lane.lanes, num_steps, sum);
    }
  }
}

// Set the tasks of the chunk slots of all groups, unless args.chunk_tasks is null. If the grouping
// has not counted the step, num_groups_to_update, [1], must not be null: then count the step, and
// write the number of groups to update; if the gradient is not finite, count nothing and write 0.
// The loop over groups is grid-stride, in blocks of whole warps.
[[maybe_unused]] static __global__ void __launch_bounds__(kChunkThreads)
    plan_chunks_kernel(DeviceGradArgs args, StepCount step, int32_t* num_groups_to_update) {
  const int num_groups = *args.num_groups;
  if (num_groups_to_update != nullptr && simt::global_thread() == 0)
    *num_groups_to_update = count_update_step(step, num_groups);
  if (args.chunk_tasks == nullptr) return;
  const auto lane = static_cast<int64_t>(threadIdx.x % simt::kWarpLanes);
  for (int64_t base = simt::global_warp() * simt::kWarpLanes; base < num_groups;
       base += simt::threads_in_grid()) {
    const int64_t group = base + lane;
    int begin = 0, end = 0, chunks = 0;
    if (group < num_groups) {
      begin = args.segments[group];
      end = args.segments[group + 1];
      if (end - begin > kShortSegment &&
          has_chunks(args, end - begin, static_cast<int>(feature_of(args, begin).dim))) {
        chunks = num_chunks(end - begin);
      }
    }
    // A short segment has one slot at most; the warp writes the slots of a long segment together.
    const int64_t slot = first_chunk_slot(begin);
    const bool is_long = end - begin > kShortSegment;
    if (!is_long && slot * kShortSegment < end) args.chunk_tasks[slot] = {-1, 0};
    for (uint32_t lanes_left = __ballot_sync(simt::kFullMask, is_long); lanes_left != 0;
         lanes_left &= lanes_left - 1) {
      const int holder = __ffs(static_cast<int>(lanes_left)) - 1;  // the lane of the segment
      const int64_t first = __shfl_sync(simt::kFullMask, slot, holder);
      const int end_of_segment = __shfl_sync(simt::kFullMask, end, holder);
      const int chunks_of_segment = __shfl_sync(simt::kFullMask, chunks, holder);
      for (int64_t c = lane; (first + c) * kShortSegment < end_of_segment; c += simt::kWarpLanes) {
        args.chunk_tasks[first + c] = {
            c < chunks_of_segment ? static_cast<int32_t>(base + holder) : -1,
            static_cast<int32_t>(c)};
      }
    }
  }
}

// Write the sum of `task`, the chunk of slot `slot`, to row `slot` of args.chunk_sums. Every group
// of lanes sums a stretch of the chunk, then the sums of the stretches are added in order. The
// grid's second dimension divides the columns of wide rows. `stretch_sum` is shared memory,
// [kChunkThreads]. All threads of a block must call this with the same task; it has barriers, the
// last one at its end.
template <class G>
EMB_DEVICE void sum_chunk(const DeviceGradArgs& args, const LaneGroup& lane, ChunkTask task,
                          int64_t slot, float (*stretch_sum)[kColumns]) {
  const int num_stretches = kChunkThreads / lane.lanes;
  const int stretch = static_cast<int>(threadIdx.x) / lane.lanes;
  int begin = args.segments[task.segment];
  const int segment_length = args.segments[task.segment + 1] - begin;
  const int offset = task.chunk * chunk_length(segment_length);
  const int length = segment_length - offset < chunk_length(segment_length)
                         ? segment_length - offset
                         : chunk_length(segment_length);
  const int stretch_length = (length + num_stretches - 1) / num_stretches;
  const int remaining = length - stretch * stretch_length;
  const int dim = static_cast<int>(feature_of(args, begin).dim);
  const int columns_per_group = lane.lanes * kColumns;
  begin += offset + stretch * stretch_length;
  for (int base = static_cast<int>(blockIdx.y) * columns_per_group; base < dim;
       base += static_cast<int>(gridDim.y) * columns_per_group) {
    const int column = base + lane.rank * kColumns;
    float sum[kColumns] = {};
    add_grads<G>(args, lane, begin, remaining < stretch_length ? remaining : stretch_length,
                 stretch_length, column, dim, sum);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) stretch_sum[threadIdx.x][k] = sum[k];
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < lane.lanes && column < dim) {
      for (int s = 1; s < num_stretches; ++s) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) sum[k] += stretch_sum[s * lane.lanes + threadIdx.x][k];
      }
      write_columns(args.chunk_sums + slot * args.chunk_sum_stride + column, dim - column, sum);
    }
    __syncthreads();
  }
}

// Sum the chunks of all slots, `lanes` lanes per stretch. One block sums a chunk, or its columns of
// a stripe: the grid's second dimension is over stripes. Each warp of a block reads the tasks of
// the block's next 32 slots at once, since most slots have no chunk.
template <class G>
__global__ void __launch_bounds__(kChunkThreads, kChunkSumBlocksPerSm)
    chunk_kernel(DeviceGradArgs args, int lanes) {
  __shared__ float stretch_sum[kChunkThreads][kColumns];
  const LaneGroup lane(lanes);
  const int64_t num_slots = first_chunk_slot(args.segments[*args.num_groups]);
  for (int64_t first = blockIdx.x; first < num_slots;
       first += int64_t{gridDim.x} * simt::kWarpLanes) {
    const int64_t slot = first + static_cast<int64_t>(threadIdx.x % simt::kWarpLanes) * gridDim.x;
    ChunkTask lane_task{-1, 0};
    if (slot < num_slots) lane_task = args.chunk_tasks[slot];
    for (uint32_t lanes_left = __ballot_sync(simt::kFullMask, lane_task.segment >= 0);
         lanes_left != 0; lanes_left &= lanes_left - 1) {
      const int holder = __ffs(static_cast<int>(lanes_left)) - 1;
      const ChunkTask task{__shfl_sync(simt::kFullMask, lane_task.segment, holder),
                           __shfl_sync(simt::kFullMask, lane_task.chunk, holder)};
      sum_chunk<G>(args, lane, task, first + static_cast<int64_t>(holder) * gridDim.x, stretch_sum);
    }
  }
}

}  // namespace emb::cuda
