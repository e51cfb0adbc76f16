// Forward of table-batched embeddings on the GPU. A group of 4 to 32 lanes takes a bag; each lane
// owns 16 bytes of the row, so a warp always asks for 512 bytes at a time, and four rows of each
// bag are in flight before the first is used. Indices are read one a lane, a tile ahead of their
// use, and handed around by shuffles. Groups of a warp run in step (the trip count is that of the
// longest bag), so all collectives name the full warp. Sums are in the order of the lookups.
#pragma once

#include "core/bag_map.h"
#include "core/dtype.h"
#include "core/gather.cuh"
#include "core/place.h"
#include "core/row_piece.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kLookupThreads = 256;

struct LookupArgs {
  // The tier with the lowest address; all rows are found by their distance from it, in elements.
  const void* weights;
  int64_t distance[kTiers];
  Dtype weight_type;
  void* output;  // [B, columns], [columns] in a variable batch, or [L, columns] for NONE
  Dtype output_type;
  const Feature* features;
  int num_features;
  IndexArray indices;
  Bags bags;
  BagMap map;
  int64_t columns;
  Pooling pooling;
  const float* sample_weights;  // [L] or null
  const int32_t* slots;         // [L] or null: nothing is cached
  const void* cache;
  int64_t cache_elements;
  Dtype cache_type;
};

// Gives every tier its distance from the lowest one. A cache of another dtype has none: its rows
// are read by kernels of their own.
inline void set_tiers(const void* const (&data)[kTiers], const int64_t (&elements)[kTiers],
                      LookupArgs* args) {
  const int64_t size = args->weight_type == Dtype::kFloat ? 4 : 2;
  const bool one_dtype = args->cache_type == args->weight_type;
  uintptr_t lowest = 0;
  for (int tier = 0; tier < kTiers; ++tier) {
    const auto address = reinterpret_cast<uintptr_t>(data[tier]);
    const bool used = elements[tier] > 0 && (tier != kCacheTier || one_dtype);
    if (used && (lowest == 0 || address < lowest)) lowest = address;
  }
  args->weights = reinterpret_cast<const void*>(lowest);
  for (int tier = 0; tier < kTiers; ++tier) {
    const uintptr_t bytes = reinterpret_cast<uintptr_t>(data[tier]) - lowest;
    args->distance[tier] = elements[tier] > 0 ? static_cast<int64_t>(bytes) / size : 0;
  }
  args->cache = data[kCacheTier];
  args->cache_elements = elements[kCacheTier];
}

// A slot as `slots` has it, -1 if the cache has none of that number.
EMB_DEVICE int64_t valid_slot(const LookupArgs& args, const Feature& feature, int64_t slot) {
  return slot >= 0 && (slot + 1) * feature.cache_stride <= args.cache_elements ? slot : -1;
}

// What a lookup asks for, and where the cache has it; read ahead of the row.
struct LookupId {
  int64_t index = -1;
  int32_t slot = -1;

  LookupId() = default;
  EMB_DEVICE LookupId(const LookupArgs& args, int64_t i) : index(args.indices[i]) {
    if (args.slots != nullptr) slot = args.slots[i];
  }
};

// Elements from `args.weights` to the row of a lookup, -1 for one to skip.
EMB_DEVICE int64_t row_offset(const LookupArgs& args, const Feature& feature, const LookupId& id) {
  const int64_t row = repair_index(id.index, feature.rows);
  if (row < 0 || row >= feature.rows) return -1;
  const RowPlace place = place_row(feature, row, valid_slot(args, feature, id.slot));
  return args.distance[place.tier] + place.element;
}

// Whether all rows of a feature begin at multiples of 16 bytes and end there too.
template <class W>
EMB_DEVICE bool has_whole_vectors(const LookupArgs& args, const Feature& feature) {
  constexpr int N = 16 / sizeof(W);
  const W* base = static_cast<const W*>(args.weights);
  const W* table = base + args.distance[feature.tier] + feature.weight_offset;
  bool whole = feature.dim % N == 0 && is_aligned(table, 16);
  if (args.slots != nullptr && feature.cache_stride > 0) {
    whole = whole && feature.cache_stride % N == 0 && is_aligned(args.cache, 16);
  }
  return whole;
}

// The bag of one group of lanes. Only what the inner loop needs stays in registers: the rest of the
// feature is read again, from the cache, where it is used.
struct BagTask {
  const Feature* feature;
  int begin = 0, length = 0, dim = 0;

  EMB_DEVICE BagTask(const LookupArgs& args, uint32_t bag) : feature(args.features) {
    if (bag >= args.bags.count) return;
    feature += args.map.feature(bag);
    begin = static_cast<int>(args.bags.begin(bag));
    length = static_cast<int>(args.bags.end(bag)) - begin;
    dim = static_cast<int>(feature->dim);
  }
};

// Columns of an output row of one bag, on average.
inline int64_t mean_width(const LookupArgs& args) {
  const int64_t rows = args.map.places != nullptr ? args.bags.count : args.num_features;
  if (args.pooling == Pooling::kNone || rows == 0) return args.columns;
  return (args.columns + rows - 1) / rows;
}

// Sums columns [column, column + N) of a bag over all of its lookups.
template <class W, int N, bool kVector>
EMB_DEVICE void sum_bag(const LookupArgs& args, const BagTask& task, const LaneGroup& lane,
                        int column, int longest, float (&sum)[N]) {
  const W* weights = static_cast<const W*>(args.weights) + column;
  const auto id_at = [&](int i) {
    return i < task.length ? LookupId(args, task.begin + i) : LookupId();
  };
  LookupId id = id_at(lane.rank);
  for (int tile = 0; tile < longest; tile += lane.lanes) {
    const int i = tile + lane.rank;
    const int64_t offset = row_offset(args, *task.feature, id);
    id = id_at(i + lane.lanes);
    float weight = 0.0f;
    if (offset >= 0) weight = args.sample_weights ? args.sample_weights[task.begin + i] : 1.0f;
    const int steps = longest - tile < lane.lanes ? longest - tile : lane.lanes;
    add_rows<W, N, kVector>(weights, offset, weight, task.dim - column, lane.lanes, steps, sum);
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
  const int64_t place = args.map.element(bag, task.feature->column);
  write_columns(args.output, args.output_type, place + column, task.dim - column, sum);
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
    const bool vector = __all_sync(simt::kFullMask, has_whole_vectors<W>(args, *task.feature));
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
      const int64_t f = feature_of_lookup(args.map, args.bags, args.num_features, i);
      const Feature& feature = args.features[f];
      offset = row_offset(args, feature, LookupId(args, i));
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
