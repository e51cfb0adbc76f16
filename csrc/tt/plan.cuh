// The keys and the plan of a batch on the GPU (see TtPlan in tt/args.h).
//
// Distinct rows are in key order, so that the rows of a left half are neighbours. tt_split_kernel
// computes the ids of both halves of each row, and counts the left halves that begin in each range
// of rows, a block per range. In tt_lefts_kernel each block adds up the counts of the ranges before
// its own range, and writes the left halves that begin in its range. The sort and grouping of
// group/ then group the rows by right id. At last tt_finish_kernel writes row_rights, the row of
// each lookup if requested, and where the rows and halves of each table begin.
#pragma once

#include "core/layout.h"
#include "core/simt.cuh"
#include "group/segments.cuh"
#include "tt/args.h"

namespace emb::cuda {

// The arguments of tt_keys_kernel. All pointers are to device memory. If there are lookups, there
// must be at least one bag, which feature_of_lookup reads: every entry calls check_lookups.
struct TtKeysArgs {
  IndexArray indices;        // [n] of the batch, repaired as they are read
  int64_t n;                 // lookups
  const TtTableIds* tables;  // [num_features] the table of each feature
  int num_features;
  Bags bags;
  BagMap map;
  int64_t* keys;  // [n], an output: keys within the table, -1 for lookups to skip
};

// Write args.keys, grid-stride over lookups.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_keys_kernel(TtKeysArgs args) {
  for (int64_t i = simt::global_thread(); i < args.n; i += simt::threads_in_grid()) {
    const int64_t feature = feature_of_lookup(args.map, args.bags, args.num_features, i);
    args.keys[i] = tt_key(args.tables[feature], args.indices[i]);
  }
}

// Return the position of the first of n ascending values that is at least x, n if there is none.
template <class T>
EMB_DEVICE int32_t first_at_least(const T* values, int32_t n, int64_t x) {
  int32_t low = 0, high = n;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (values[middle] < x) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Rows are divided into at most kTtRanges ranges of equal length, a multiple of kTileThreads. A
// block processes a range.
inline constexpr int kTtRanges = 512;

// Return the number of rows per range, for at most n rows.
EMB_HD int64_t tt_range_rows(int64_t n) {
  const int64_t tiles = (n + kTileThreads - 1) / kTileThreads;
  const int64_t tiles_per_range = (tiles + kTtRanges - 1) / kTtRanges;
  return (tiles_per_range > 0 ? tiles_per_range : 1) * kTileThreads;
}

// Return the number of ranges, for at most n rows.
inline unsigned tt_ranges(int64_t n) {
  const int64_t rows = tt_range_rows(n);
  return n > 0 ? static_cast<unsigned>((n + rows - 1) / rows) : 1;
}

// The arguments of tt_split_kernel. All pointers are to device memory; n = right_buffers.n is the
// capacity of the plan.
struct TtSplitArgs {
  const int64_t* keys;       // [n] distinct keys of all tables, ascending; the first *count exist
  const int32_t* count;      // [1]
  const TtTableIds* tables;  // [num_tables]
  int num_tables;
  SortBuffers<uint32_t> right_buffers;  // its keys (right ids, `no_group_key` for rows that do not
                                        // exist) and positions (rows) are outputs
  int32_t* left_ids;      // [n], an output: left id of each row, -1 if it does not exist
  int32_t* range_counts;  // [kTtRanges], an output: left halves that begin in each range
  int32_t* starts;        // [3, T + 1] of the plan; starts[T], the number of rows, is written
};

// The ids of the halves of a row.
struct TtIds {
  int32_t left, right;
};

// Return the ids of the halves of a key of all tables.
EMB_DEVICE TtIds ids_of_key(const TtSplitArgs& args, int64_t key) {
  int low = 0, high = args.num_tables - 1;  // the last table whose first key is <= the key
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (args.tables[middle].first_key <= key) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const TtTableIds& table = args.tables[low];
  const int64_t key_of_table = key - table.first_key, left = key_of_table / table.right_ids;
  return {static_cast<int32_t>(table.first_left + left),
          static_cast<int32_t>(table.first_right + key_of_table - left * table.right_ids)};
}

// Return, in every thread of the block, the sum of the values that lane 0 of each warp passes. Has
// two barriers; `shared` is shared memory for a value per warp.
EMB_DEVICE int32_t sum_of_warps(int32_t value, int32_t* shared) {
  constexpr int kWarps = kTileThreads / kWarpLanes;
  if (threadIdx.x % simt::kWarpLanes == 0) shared[threadIdx.x / simt::kWarpLanes] = value;
  __syncthreads();
  int32_t sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += shared[w];
  __syncthreads();
  return sum;
}

// Write the ids of the halves of each row, the positions of the sort by right id, and how many left
// halves begin in the block's range. One thread also writes starts[T].
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_split_kernel(TtSplitArgs args) {
  __shared__ int32_t counts[kTileThreads / simt::kWarpLanes];
  const int32_t rows = *args.count;
  if (simt::global_thread() == 0) args.starts[args.num_tables] = rows;
  const int64_t n = args.right_buffers.n, length = tt_range_rows(n);
  const int64_t first = int64_t{blockIdx.x} * length;
  const int64_t end = first + length < n ? first + length : n;
  int32_t num_begun = 0;
  for (int64_t tile = first; tile < end; tile += kTileThreads) {
    const int64_t j = tile + threadIdx.x;
    TtIds ids{-1, static_cast<int32_t>(args.right_buffers.no_group_key)};
    if (j < rows) ids = ids_of_key(args, args.keys[j]);
    int32_t previous_left = __shfl_up_sync(simt::kFullMask, ids.left, 1);
    if (threadIdx.x % simt::kWarpLanes == 0) {
      previous_left = j > 0 && j < rows ? ids_of_key(args, args.keys[j - 1]).left : -1;
    }
    num_begun += __popc(__ballot_sync(simt::kFullMask, ids.left >= 0 && ids.left != previous_left));
    if (j >= end) continue;
    args.left_ids[j] = ids.left;
    args.right_buffers.keys[j] = static_cast<uint32_t>(ids.right);
    args.right_buffers.positions[j] = static_cast<int32_t>(j);
  }
  const int32_t sum = sum_of_warps(num_begun, counts);
  if (threadIdx.x == 0) args.range_counts[blockIdx.x] = sum;
}

// The arguments of tt_lefts_kernel. `count`, `left_ids` and `range_counts` are the arrays of
// TtSplitArgs; the other pointers are outputs: tensors of the plan, and the number of left halves,
// [1].
struct TtLeftsArgs {
  const int32_t *count, *left_ids, *range_counts;
  int64_t n;  // the capacity of the plan
  int32_t *lefts, *segments, *row_lefts;
  int32_t* num_lefts;
};

// Write the left halves that begin in the block's range, and the left half of each of its rows. The
// last block also writes the end of the segments and the number of left halves.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_lefts_kernel(TtLeftsArgs args) {
  constexpr int kWarps = kTileThreads / kWarpLanes;
  __shared__ int32_t shared[kWarps];
  const unsigned lane = threadIdx.x % simt::kWarpLanes, warp = threadIdx.x / simt::kWarpLanes;
  const int32_t rows = *args.count;
  const int64_t length = tt_range_rows(args.n), first = int64_t{blockIdx.x} * length;
  const int64_t end = first + length < rows ? first + length : rows;
  int32_t num_before = 0;  // left halves that begin before the tile
  for (unsigned i = threadIdx.x; i < blockIdx.x; i += kTileThreads)
    num_before += args.range_counts[i];
  num_before = sum_of_warps(simt::group_sum(num_before, simt::kWarpLanes), shared);
  for (int64_t tile = first; tile < end; tile += kTileThreads) {
    const int64_t j = tile + threadIdx.x;
    const bool is_inside = j < end;
    const int32_t id = is_inside ? args.left_ids[j] : 0;
    const bool begins_left = is_inside && (j == 0 || args.left_ids[j - 1] != id);
    const unsigned begin_bits = __ballot_sync(simt::kFullMask, begins_left);
    if (lane == 0) shared[warp] = __popc(begin_bits);
    __syncthreads();
    const unsigned bits_up_to_lane = begin_bits & (0xffffffffu >> (simt::kWarpLanes - 1 - lane));
    int32_t u = num_before + __popc(bits_up_to_lane) - 1;
    for (int w = 0; w < kWarps; ++w) {
      u += w < static_cast<int>(warp) ? shared[w] : 0;
      num_before += shared[w];
    }
    __syncthreads();
    if (is_inside) args.row_lefts[j] = u;
    if (begins_left) {
      args.lefts[u] = id;
      args.segments[u] = static_cast<int32_t>(j);
    }
  }
  if (blockIdx.x + 1 == gridDim.x && threadIdx.x == 0) {
    args.segments[num_before] = rows;
    *args.num_lefts = num_before;
  }
}

// The arguments of tt_finish_kernel, the last step of a plan, after right halves have been grouped.
struct TtFinishArgs {
  InverseArgs rights;   // writes the right half of each row
  InverseArgs lookups;  // writes the row of each lookup, unless its `inverse` is null
  const int64_t* keys;  // distinct keys
  const int32_t *left_ids, *right_ids;  // ids of the distinct halves, as in the plan
  const TtTableIds* tables;
  int num_tables;
  // [3, T + 1] of the plan: the last entry of each line, the number of rows, left or right halves,
  // is read; the other entries, where the rows or halves of each table begin, are written.
  int32_t* starts;
};

// Write the right half of each row, the row of each lookup unless args.lookups.inverse is null, and
// where the rows and halves of each table begin.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_finish_kernel(TtFinishArgs args) {
  __shared__ int range[2];
  write_inverse(args.rights, range);
  if (args.lookups.inverse != nullptr) write_inverse(args.lookups, range);
  const int64_t work = int64_t{3} * args.num_tables;
  for (int64_t i = simt::global_thread(); i < work; i += simt::threads_in_grid()) {
    // Kind 0 are rows, 1 left halves, 2 right halves.
    const int kind = static_cast<int>(i / args.num_tables),
              t = static_cast<int>(i % args.num_tables);
    int32_t* starts = args.starts + kind * (args.num_tables + 1);
    const int32_t end = starts[args.num_tables];
    const TtTableIds& table = args.tables[t];
    starts[t] = kind == 0 ? first_at_least(args.keys, end, table.first_key)
                          : (kind == 1 ? first_at_least(args.left_ids, end, table.first_left)
                                       : first_at_least(args.right_ids, end, table.first_right));
  }
}

// Write args.keys. `launcher` is a CudaLauncher or, in tests, a simt::HostLauncher. No launch of
// this file waits for the device.
template <class Launcher>
void launch_tt_keys(const Launcher& launcher, const TtKeysArgs& args) {
  if (args.n == 0) return;
  launcher(tt_keys_kernel, blocks_for(args.n, kTileSize, launcher.blocks(kResidentBlocksPerSm)),
           kTileThreads, args);
}

// Launch the first two kernels of a plan. The inputs of `lefts` must be the outputs of `args`.
template <class Launcher>
void launch_tt_split(const Launcher& launcher, const TtSplitArgs& args, const TtLeftsArgs& lefts) {
  const unsigned ranges = tt_ranges(args.right_buffers.n);
  launcher(tt_split_kernel, ranges, kTileThreads, args);
  launcher(tt_lefts_kernel, ranges, kTileThreads, lefts);
}

// Launch the last kernel of a plan.
template <class Launcher>
void launch_tt_finish(const Launcher& launcher, const TtFinishArgs& args) {
  const int64_t starts = int64_t{3} * args.num_tables;
  const int64_t work = args.rights.n > starts ? args.rights.n : starts;
  launcher(tt_finish_kernel, blocks_for(work, kTileSize, launcher.blocks(kResidentBlocksPerSm)),
           kTileThreads, args);
}

}  // namespace emb::cuda
