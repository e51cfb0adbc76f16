// Forward of table-batched embeddings on the GPU. A group of 4 to 32 lanes takes a bag; each lane
// owns 16 bytes of the row, so a warp always asks for 512 bytes at a time, and four rows of each
// bag are in flight before the first is used. Indices are read one a lane, a tile ahead of their
// use, and handed around by shuffles. Groups of a warp run in step (the trip count is that of the
// longest bag), so all collectives name the full warp. Sums are in the order of the lookups.
#pragma once

#include "core/dtype.h"
#include "core/gather.cuh"
#include "core/row_piece.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kLookupThreads = 256;

struct LookupArgs {
  const void* weights;
  Dtype weight_type;
  void* output;  // [B, columns], or [L, columns] for NONE
  Dtype output_type;
  const Feature* features;
  int num_features;
  IndexArray indices;
  Bags bags;
  int64_t batch, columns;
  Pooling pooling;
  const float* sample_weights;  // [L] or null
};

// Element offset of a lookup's row within its table, -1 for a lookup to skip.
EMB_DEVICE int64_t row_offset(int64_t index, const Feature& feature) {
  const int64_t row = repair_index(index, feature.rows);
  return row >= 0 && row < feature.rows ? row * feature.dim : -1;
}

// The bag of one group of lanes. Only what the inner loop needs stays in registers: the rest of the
// feature is read again, from the cache, where it is used.
struct BagTask {
  const Feature* feature;
  int begin = 0, length = 0, dim = 0;

  EMB_DEVICE BagTask(const LookupArgs& args, uint32_t bag) : feature(args.features) {
    if (bag >= args.bags.count) return;
    feature += bag / static_cast<uint32_t>(args.batch);
    begin = static_cast<int>(args.bags.begin(bag));
    length = static_cast<int>(args.bags.end(bag)) - begin;
    dim = static_cast<int>(feature->dim);
  }
};

// Sums columns [column, column + N) of a bag over all of its lookups.
template <class W, int N, bool kVector>
EMB_DEVICE void sum_bag(const LookupArgs& args, const BagTask& task, const LaneGroup& lane,
                        int column, int longest, float (&sum)[N]) {
  const W* table = static_cast<const W*>(args.weights) + task.feature->weight_offset + column;
  const auto index_at = [&](int i) {
    return i < task.length ? args.indices[task.begin + i] : int64_t{-1};
  };
  int64_t index = index_at(lane.rank);
  for (int tile = 0; tile < longest; tile += lane.lanes) {
    const int i = tile + lane.rank;
    const int64_t offset = row_offset(index, *task.feature);
    index = index_at(i + lane.lanes);
    float weight = 0.0f;
    if (offset >= 0) weight = args.sample_weights ? args.sample_weights[task.begin + i] : 1.0f;
    const int steps = longest - tile < lane.lanes ? longest - tile : lane.lanes;
    add_rows<W, N, kVector>(table, offset, weight, task.dim - column, lane.lanes, steps, sum);
  }
}

template <int N>
EMB_DEVICE void write_bag(const LookupArgs& args, const BagTask& task, uint32_t bag, int column,
                          float (&sum)[N]) {
  if (column >= task.dim) return;
  if (args.pooling == Pooling::kMean && task.length > 0) {
    const float scale = 1.0f / static_cast<float>(task.length);
#pragma unroll
    for (int e = 0; e < N; ++e) sum[e] *= scale;
  }
  const int64_t sample = bag % static_cast<uint32_t>(args.batch);
  write_columns(args.output, args.output_type,
                sample * args.columns + task.feature->column + column, task.dim - column, sum);
}

// Pooled lookup. The grid's second dimension shares the columns of rows wider than a warp.
template <class W>
__global__ void __launch_bounds__(kLookupThreads, 4) pool_kernel(LookupArgs args, int lanes) {
  constexpr int N = 16 / sizeof(W);
  const LaneGroup lane(lanes);
  const auto bags = static_cast<uint32_t>(args.bags.count);
  const auto stride = static_cast<uint32_t>(simt::warps_in_grid()) * lane.groups_in_warp();
  for (uint32_t first = static_cast<uint32_t>(simt::global_warp()) * lane.groups_in_warp();
       first < bags; first += stride) {
    const BagTask task(args, first + lane.group);
    const int longest = __reduce_max_sync(simt::kFullMask, task.length);
    const int widest = __reduce_max_sync(simt::kFullMask, task.dim);
    const W* table = static_cast<const W*>(args.weights) + task.feature->weight_offset;
    const bool vector = __all_sync(simt::kFullMask, task.dim % N == 0 && is_aligned(table, 16));
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < widest;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      const int column = base + lane.rank * N;
      float sum[N] = {};
      if (vector) {
        sum_bag<W, N, true>(args, task, lane, column, longest, sum);
      } else {
        sum_bag<W, N, false>(args, task, lane, column, longest, sum);
      }
      write_bag(args, task, first + lane.group, column, sum);
    }
  }
}

// The feature that lookup i belongs to; valid offsets assumed, any answer is in range otherwise.
EMB_DEVICE int feature_of(const LookupArgs& args, int64_t i) {
  int low = 0, high = args.num_features - 1;  // the last feature that begins at or before i
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (args.bags.begin(middle * args.batch) <= i) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// Copies columns [column, column + N) of the rows of the warp's 32 lookups, four a group at a time.
template <class W, int N, bool kVector>
EMB_DEVICE void copy_rows(const LookupArgs& args, const LaneGroup& lane, int64_t offset,
                          int64_t first, int column) {
  const W* weights = static_cast<const W*>(args.weights) + column;
  const int valid = static_cast<int>(args.columns) - column;
  for (int k = 0; k < lane.lanes; k += kRowsInFlight) {
    Piece<W, N> piece[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int source = (k + u) * lane.groups_in_warp() + lane.group;
      const int64_t row = __shfl_sync(simt::kFullMask, offset, source);
      if (row >= 0 && valid > 0) piece[u].template load<kVector>(weights + row, valid);
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t i = first + (k + u) * lane.groups_in_warp() + lane.group;
      if (i >= args.bags.num_lookups || valid <= 0) continue;
      float values[N];
#pragma unroll
      for (int e = 0; e < N; ++e) values[e] = piece[u][e];
      write_columns(args.output, args.output_type, i * args.columns + column, valid, values);
    }
  }
}

// Sequence lookup (NONE): every lookup is a row of the output; skipped ones give zeros.
template <class W>
__global__ void __launch_bounds__(kLookupThreads, 4) sequence_kernel(LookupArgs args, int lanes) {
  constexpr int N = 16 / sizeof(W);
  const LaneGroup lane(lanes);
  const int width = static_cast<int>(args.columns);
  for (int64_t first = simt::global_warp() * simt::kWarp; first < args.bags.num_lookups;
       first += simt::warps_in_grid() * simt::kWarp) {
    const int64_t i = first + threadIdx.x % simt::kWarp;
    int64_t offset = -1;
    if (i < args.bags.num_lookups && args.bags.count > 0 && i >= args.bags.begin(0)) {
      const Feature& feature = args.features[feature_of(args, i)];
      offset = row_offset(args.indices[i], feature);
      if (offset >= 0) offset += feature.weight_offset;
    }
    const bool vector =
        __all_sync(simt::kFullMask, width % N == 0 && (offset < 0 || offset % N == 0)) &&
        is_aligned(args.weights, 16);
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < width;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      if (vector) {
        copy_rows<W, N, true>(args, lane, offset, first, base + lane.rank * N);
      } else {
        copy_rows<W, N, false>(args, lane, offset, first, base + lane.rank * N);
      }
    }
  }
}

}  // namespace emb::cuda
