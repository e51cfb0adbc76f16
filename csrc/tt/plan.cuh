// The keys and the plan of a batch on the GPU; tt/args.h explains keys, halves and TtPlan.
//
// Distinct rows are in key order, so that the rows of a left half are neighbours. A plan is made in
// four phases. In the first two, a block processes a range of rows.
//   1. tt_split_kernel computes the ids of both halves of each row, and counts the left halves that
//      begin in its range.
//   2. tt_lefts_kernel adds up the counts of the ranges before its own, and writes the left halves
//      that begin in its range.
//   3. The sort of group/ groups the rows by right id.
//   4. tt_finish_kernel writes row_rights, the row of each lookup if requested, and the first row
//      and halves of each table.
#pragma once

#include "core/layout.h"
#include "core/simt.cuh"
#include "group/segments.cuh"
#include "tt/args.h"

namespace emb::cuda {

// The arguments of tt_keys_kernel. All pointers are to device memory. If there are lookups, there
// must be a bag, because feature_of_lookup reads one; check_lookups checks that.
struct TtKeysArgs {
  IndexArray indices;        // [n]; tt_key repairs invalid ones
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

// Return the position of the first of n ascending values that is at least `bound`, n if there is
// none.
template <class T>
EMB_DEVICE int32_t lower_bound(const T* values, int32_t n, int64_t bound) {
  int32_t low = 0, high = n;
  while (low < high) {
    const int32_t middle = low + (high - low) / 2;
    if (values[middle] < bound) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Maximum number of ranges of rows. Ranges have one length, a multiple of kTileThreads; the last
// range may be shorter.
inline constexpr int kMaxTtRanges = 512;

// Return the number of rows per range, for a plan of n rows at most.
EMB_HD int64_t tt_rows_per_range(int64_t n) {
  const int64_t tiles = (n + kTileThreads - 1) / kTileThreads;
  const int64_t tiles_per_range = (tiles + kMaxTtRanges - 1) / kMaxTtRanges;
  return (tiles_per_range > 0 ? tiles_per_range : 1) * kTileThreads;
}

// Return the number of ranges, for a plan of n rows at most.
inline unsigned num_tt_ranges(int64_t n) {
  const int64_t range_rows = tt_rows_per_range(n);
  return n > 0 ? static_cast<unsigned>((n + range_rows - 1) / range_rows) : 1;
}

// The arguments of tt_split_kernel. All pointers are to device memory; n = right_buffers.n is the
// capacity of the plan. A row j exists if j < *count.
struct TtSplitArgs {
  const int64_t* keys;       // [n]: of each row, numbered over all tables, distinct and ascending
  const int32_t* count;      // [1]
  const TtTableIds* tables;  // [num_tables]
  int num_tables;
  // The sort by right id. Its keys (right ids, no_group_key for rows that do not exist) and its
  // positions (rows) are outputs.
  SortBuffers<uint32_t> right_buffers;
  int32_t* left_id_of_row;  // [n], an output: -1 for rows that do not exist
  int32_t* range_counts;    // [kMaxTtRanges], an output: number of left halves that begin in each
                            // range; entries after the last range are not written
  int32_t* starts;          // [3, T + 1] of the plan; starts[T], the number of rows, is written
};

// The ids of the halves of a row.
struct TtHalfIds {
  int32_t left, right;
};

// Return the ids of the halves of a row, from its key, numbered over all tables.
EMB_DEVICE TtHalfIds ids_of_key(const TtSplitArgs& args, int64_t key) {
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

// Return, in all threads of the block, the sum of the values that lane 0 of each warp passes. All
// threads of the block call this, because it has two barriers. `shared` is shared memory for a
// value per warp, which may be used again afterwards.
EMB_DEVICE int32_t sum_of_warps(int32_t value, int32_t* shared) {
  constexpr int kWarps = kTileThreads / kWarpLanes;
  if (threadIdx.x % simt::kWarpLanes == 0) shared[threadIdx.x / simt::kWarpLanes] = value;
  __syncthreads();
  int32_t sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += shared[w];
  __syncthreads();
  return sum;
}

// Write the outputs of TtSplitArgs; a block processes a range of rows.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_split_kernel(TtSplitArgs args) {
  __shared__ int32_t counts[kTileThreads / simt::kWarpLanes];
  const int32_t num_rows = *args.count;
  if (simt::global_thread() == 0) args.starts[args.num_tables] = num_rows;
  const int64_t n = args.right_buffers.n, range_rows = tt_rows_per_range(n);
  const int64_t first = int64_t{blockIdx.x} * range_rows;
  const int64_t end = first + range_rows < n ? first + range_rows : n;
  int32_t num_new_lefts = 0;  // left halves that begin in the tiles so far, among this warp's rows
  for (int64_t tile = first; tile < end; tile += kTileThreads) {
    const int64_t j = tile + threadIdx.x;
    TtHalfIds ids{-1, static_cast<int32_t>(args.right_buffers.no_group_key)};
    if (j < num_rows) ids = ids_of_key(args, args.keys[j]);
    int32_t previous_left = __shfl_up_sync(simt::kFullMask, ids.left, 1);
    if (threadIdx.x % simt::kWarpLanes == 0) {
      previous_left = j > 0 && j < num_rows ? ids_of_key(args, args.keys[j - 1]).left : -1;
    }
    num_new_lefts +=
        __popc(__ballot_sync(simt::kFullMask, ids.left >= 0 && ids.left != previous_left));
    if (j >= end) continue;
    args.left_id_of_row[j] = ids.left;
    args.right_buffers.keys[j] = static_cast<uint32_t>(ids.right);
    args.right_buffers.positions[j] = static_cast<int32_t>(j);
  }
  const int32_t sum = sum_of_warps(num_new_lefts, counts);
  if (threadIdx.x == 0) args.range_counts[blockIdx.x] = sum;
}

// The arguments of tt_lefts_kernel. `count`, `left_id_of_row` and `range_counts` are the arrays of
// TtSplitArgs. The other pointers are outputs: `lefts`, `segments` (left_segments) and `row_lefts`
// of the plan, and the number of left halves, [1], which is an entry of `starts`.
struct TtLeftsArgs {
  const int32_t *count, *left_id_of_row, *range_counts;
  int64_t n;  // the capacity of the plan
  int32_t *lefts, *segments, *row_lefts;
  int32_t* num_lefts;
};

// Write the left halves that begin in the block's range of rows, and the left half of each row. The
// last block also writes the end of the segments and the number of left halves.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_lefts_kernel(TtLeftsArgs args) {
  constexpr int kWarps = kTileThreads / kWarpLanes;
  __shared__ int32_t shared[kWarps];
  const unsigned lane = threadIdx.x % simt::kWarpLanes, warp = threadIdx.x / simt::kWarpLanes;
  const int32_t num_rows = *args.count;
  const int64_t range_rows = tt_rows_per_range(args.n), first = int64_t{blockIdx.x} * range_rows;
  const int64_t end = first + range_rows < num_rows ? first + range_rows : num_rows;
  int32_t num_before = 0;  // left halves that begin before the tile
  for (unsigned i = threadIdx.x; i < blockIdx.x; i += kTileThreads)
    num_before += args.range_counts[i];
  num_before = sum_of_warps(simt::group_sum(num_before, simt::kWarpLanes), shared);
  for (int64_t tile = first; tile < end; tile += kTileThreads) {
    const int64_t j = tile + threadIdx.x;
    const bool exists = j < end;
    const int32_t id = exists ? args.left_id_of_row[j] : 0;
    const bool begins_left = exists && (j == 0 || args.left_id_of_row[j - 1] != id);
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
    if (exists) args.row_lefts[j] = u;
    if (begins_left) {
      args.lefts[u] = id;
      args.segments[u] = static_cast<int32_t>(j);
    }
  }
  if (blockIdx.x + 1 == gridDim.x && threadIdx.x == 0) {
    args.segments[num_before] = num_rows;
    *args.num_lefts = num_before;
  }
}

// The arguments of tt_finish_kernel, which runs after the rows have been grouped by right half.
struct TtFinishArgs {
  InverseArgs right_inverse;      // of the grouping by right half: row_rights, its `inverse`, is
                                  // written
  InverseArgs lookup_inverse;     // of the grouping of lookups by row: its `inverse`, the row of
                                  // each lookup, is written if it is not null
  const int64_t* keys;            // of the rows
  const int32_t *lefts, *rights;  // of the plan
  const TtTableIds* tables;       // [num_tables]
  int num_tables;
  // [3, T + 1] of the plan: the last entry of each line, the number of rows, left or right halves,
  // is read; the other entries are written.
  int32_t* starts;
};

// Write the outputs of TtFinishArgs.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    tt_finish_kernel(TtFinishArgs args) {
  __shared__ int range[2];
  write_inverse(args.right_inverse, range);
  if (args.lookup_inverse.inverse != nullptr) write_inverse(args.lookup_inverse, range);
  const int64_t num_starts = int64_t{3} * args.num_tables;
  for (int64_t i = simt::global_thread(); i < num_starts; i += simt::threads_in_grid()) {
    // Line 0 is of rows, 1 of left halves, 2 of right halves.
    const int line = static_cast<int>(i / args.num_tables),
              t = static_cast<int>(i % args.num_tables);
    int32_t* starts = args.starts + line * (args.num_tables + 1);
    const int32_t end = starts[args.num_tables];
    const TtTableIds& table = args.tables[t];
    starts[t] = line == 0 ? lower_bound(args.keys, end, table.first_key)
                          : (line == 1 ? lower_bound(args.lefts, end, table.first_left)
                                       : lower_bound(args.rights, end, table.first_right));
  }
}

// Write args.keys. In all launches of this file `launcher` is a CudaLauncher or, in tests, a
// simt::HostLauncher, the memory of the arguments must live until the kernels have run, and nothing
// waits for the device.
template <class Launcher>
void launch_tt_keys(const Launcher& launcher, const TtKeysArgs& args) {
  if (args.n == 0) return;
  launcher(tt_keys_kernel,
           blocks_for(args.n, kTileSize, launcher.max_grid_blocks(kResidentBlocksPerSm)),
           kTileThreads, args);
}

// Launch the first two kernels of a plan. The inputs of `lefts` must be arrays of `args`. The
// caller then sorts args.right_buffers and writes the groups (sort_and_group in
// group/device_sort.h).
template <class Launcher>
void launch_tt_split(const Launcher& launcher, const TtSplitArgs& args, const TtLeftsArgs& lefts) {
  const unsigned ranges = num_tt_ranges(args.right_buffers.n);
  launcher(tt_split_kernel, ranges, kTileThreads, args);
  launcher(tt_lefts_kernel, ranges, kTileThreads, lefts);
}

// Launch the last kernel of a plan.
template <class Launcher>
void launch_tt_finish(const Launcher& launcher, const TtFinishArgs& args) {
  const int64_t num_starts = int64_t{3} * args.num_tables;
  const int64_t work = args.right_inverse.n > num_starts ? args.right_inverse.n : num_starts;
  launcher(tt_finish_kernel,
           blocks_for(work, kTileSize, launcher.max_grid_blocks(kResidentBlocksPerSm)),
           kTileThreads, args);
}

}  // namespace emb::cuda
