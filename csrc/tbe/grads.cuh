// Gradients of table rows from the gradients of bags: what both backward kernels share. Lookups are
// sorted by row; a segment is the lookups of one row. Segments of up to kShortSegment lookups are
// summed by the group of lanes that updates the row. A longer one is cut into chunks, a block each,
// so that a hot row spreads over the machine; their sums lie in `partials` and are added in order.
// Where the cuts fall depends on the segment's length alone, so the same gradients give the same
// bits.
#pragma once

#include "core/bag_map.h"
#include "core/dtype.h"
#include "core/gather.cuh"
#include "core/row_piece.cuh"
#include "core/simt.cuh"
#include "optim/row_step.cuh"

namespace emb::cuda {

inline constexpr int kChunkThreads = 256;
inline constexpr int kShortSegment = 256;
inline constexpr int kChunk = 1024;
inline constexpr int kMostChunks = 256;

EMB_HD int chunk_length(int segment_length) {
  return kChunk *
         static_cast<int>((static_cast<int64_t>(segment_length) + kChunk * kMostChunks - 1) /
                          (kChunk * kMostChunks));
}

EMB_HD int chunks_of(int segment_length) {
  const int length = chunk_length(segment_length);
  return static_cast<int>((static_cast<int64_t>(segment_length) + length - 1) / length);
}

// The most chunks L lookups can have, whatever their segments.
inline int64_t most_chunks(int64_t num_lookups) {
  return num_lookups / kShortSegment + num_lookups / kChunk;
}

// Floats between two chunk sums, for rows of up to `columns`: a multiple of 16 bytes.
inline int64_t partial_stride(int64_t columns) {
  return (columns + kColumns - 1) / kColumns * kColumns;
}

// Rows of a variable batch that are wider than this are never cut.
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
  const int32_t* row_slots;  // [U] where the cache holds a row, or null
  int64_t num_lookups;
  // Long segments: first chunk of each, what each chunk is, how many there are, and their sums.
  int32_t* first_chunk;
  ChunkTask* tasks;
  int32_t* num_tasks;
  float* partials;
  int64_t partial_stride;
};

// Where the gradient of sorted lookup j starts, in elements, and how much it counts.
EMB_DEVICE int64_t grad_offset(const GradArgs& args, int j, float* scale) {
  const auto bag = static_cast<uint32_t>(args.bags[j]);
  *scale = 1.0f;
  if (args.pooling == Pooling::kMean) {
    const int64_t length = args.bags_in.end(bag) - args.bags_in.begin(bag);
    *scale = 1.0f / static_cast<float>(length > 0 ? length : 1);
  }
  if (args.sample_weights != nullptr) *scale *= args.sample_weights[args.lookups[j]];
  if (args.pooling == Pooling::kNone) return args.lookups[j] * args.stride;
  if (args.map.places != nullptr) return args.map.places[bag].element;
  return args.map.element(bag, args.features[args.map.feature(bag)].column);
}

// Whether a segment is summed in chunks: one that is long, of a row that fits its chunk sums. Those
// of a variable batch, where nothing on the host tells the widest row, are of a fixed size.
EMB_DEVICE bool is_cut(const GradArgs& args, int length, int dim) {
  return length > kShortSegment && dim <= args.partial_stride;
}

// Adds this lane's columns of the gradients of sorted lookups [begin, begin + length); `longest` is
// the largest length in the warp, all lanes of which take part.
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

// Adds the sums of a long segment's chunks, in order.
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

// Lists the chunks of all long segments. Their order varies from run to run; no result depends on
// it.
[[maybe_unused]] static __global__ void __launch_bounds__(kChunkThreads)
    plan_chunks_kernel(GradArgs args) {
  const int count = *args.count;
  for (int64_t u = simt::global_thread(); u < count; u += simt::threads_in_grid()) {
    const int length = args.segments[u + 1] - args.segments[u];
    if (length <= kShortSegment) continue;
    const Feature& feature = args.features[args.map.feature(args.bags[args.segments[u]])];
    if (!is_cut(args, length, static_cast<int>(feature.dim))) continue;
    const int chunks = chunks_of(length);
    const int first = atomicAdd(args.num_tasks, chunks);
    args.first_chunk[u] = first;
    for (int c = 0; c < chunks; ++c) args.tasks[first + c] = {static_cast<int32_t>(u), c};
  }
}

// Sums one chunk a block: every group of lanes a stretch of it, then the stretches in order. The
// grid's second dimension shares the columns of wide rows.
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

}  // namespace emb::cuda
