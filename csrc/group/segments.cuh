// The kernels of `group` before and after its sort, and of `group_inverse`. A grouping has these
// steps:
//   (1) keys_kernel writes the keys and positions to be sorted. Ops that compute keys themselves,
//       such as `tbe_group`, have a kernel of their own. A key that belongs to no group must be
//       `no_group_key`, which is greater than all other keys, so such keys come last.
//   (2) A stable sort by key (CUB on a GPU, std::stable_sort in tests).
//   (3) count_groups_kernel divides the sorted keys into at most kMaxRanges ranges, one per block,
//       and counts the groups that begin in each range.
//   (4) In groups_kernel every block adds up the counts of the ranges before its range and writes
//       the groups that begin in its range.
//
// The caller must keep n, the number of keys, at most kMaxLookups; not checked. All pointers are to
// device memory of the caller.
#pragma once

#include "core/dtype.h"
#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

// The maximum number of ranges: every block reads the counts of all of them.
inline constexpr int kMaxRanges = 1024;

// The input and output of a stable sort by key. Key is uint32_t or uint64_t.
template <class Key>
struct SortPairs {
  Key *keys, *sorted_keys;                // [n] input, [n] output
  int32_t *positions, *sorted_positions;  // [n] input, [n] output
  int64_t n;
  Key no_group_key;  // the key that belongs to no group; no key is greater
};

// The arrays of a sort by key, and of the kernels that write one group per distinct key.
template <class Key>
struct SortBuffers : SortPairs<Key> {
  // Scratch [2, kMaxRanges]: the number of groups that begin in each range, then the number of keys
  // below `no_group_key` in each range.
  int32_t* range_counts;
};

// The step counter of the update that uses a grouping: the grouping increments it, which saves a
// launch. If the gradient is not finite, the step is skipped: it is not counted, and the grouping
// reports 0 groups, so that the update changes nothing.
struct StepCount {
  double* step = nullptr;           // [1], incremented; null to count nothing
  const bool* is_finite = nullptr;  // [1]; null if the gradient is known to be finite
};

// Increment count.step unless the step is skipped or the counter is null. Return the number of
// groups to update: num_groups, or 0 if the step is skipped. Exactly one thread of the grid must
// call this.
EMB_DEVICE int count_update_step(const StepCount& count, int num_groups) {
  if (count.is_finite != nullptr && !*count.is_finite) return 0;
  if (count.step != nullptr) *count.step += 1.0;
  return num_groups;
}

// The arrays that a grouping writes, as `group` returns them, and the step counter that it
// increments.
struct DeviceGroupOutput {
  void* unique;  // [n] int32 or int64: the key of each group, ascending, then 0
  bool unique_is_int64;
  int32_t* segments;    // [n + 1]: group g has the sorted keys [segments[g], segments[g + 1]);
                        // entries after the last group repeat the number of keys in groups
  int32_t* num_groups;  // [1], 0 if the step is skipped
  // The bag of each lookup, [n], an input, and the bags of the sorted lookups, [n], an output. Null
  // except for groupings of lookups. small_group.cuh finds the bags itself and does not read
  // bag_of.
  const int32_t* bag_of = nullptr;
  int32_t* sorted_bags = nullptr;
  StepCount step_count = {};
};

// Write the keys and positions to be sorted. Keys outside [0, no_group_key) become `no_group_key`.
template <class Key>
__global__ void __launch_bounds__(kTileThreads)
    keys_kernel(IndexArray keys, SortBuffers<Key> buffers) {
  for (int64_t i = simt::global_thread(); i < buffers.n; i += simt::threads_in_grid()) {
    const int64_t key = keys[i];
    const bool is_valid = key >= 0 && static_cast<uint64_t>(key) < buffers.no_group_key;
    buffers.keys[i] = is_valid ? static_cast<Key>(key) : buffers.no_group_key;
    buffers.positions[i] = static_cast<int32_t>(i);
  }
}

// Return the number of ranges that n sorted keys are divided into, 0 without keys.
EMB_HD int64_t num_ranges(int64_t n) {
  const int64_t tiles = (n + kTileSize - 1) / kTileSize;
  return tiles < kMaxRanges ? tiles : kMaxRanges;
}
// Return where range r of n > 0 sorted keys begins, a multiple of kTileSize. Range num_ranges(n)
// begins at n.
EMB_HD int64_t range_begin(int64_t n, int64_t r) {
  const int64_t tiles = (n + kTileSize - 1) / kTileSize, ranges = num_ranges(n);
  const int64_t begin = tiles * r / ranges * kTileSize;
  return begin < n ? begin : n;
}

// Return the sum of `value` over the block, in every thread. All kTileThreads threads must call
// this; it contains barriers.
EMB_DEVICE int block_sum(int value) {
  __shared__ int warp_sums[kTileThreads / simt::kWarpLanes];
  value = __reduce_add_sync(simt::kFullMask, value);
  __syncthreads();
  if (threadIdx.x % simt::kWarpLanes == 0) warp_sums[threadIdx.x / simt::kWarpLanes] = value;
  __syncthreads();
  value = 0;
#pragma unroll
  for (const int warp_sum : warp_sums) value += warp_sum;
  return value;
}

// Return whether a group begins at sorted key i.
template <class Key>
EMB_DEVICE bool begins_group(const SortBuffers<Key>& buffers, int64_t i) {
  const Key key = buffers.sorted_keys[i];
  return key != buffers.no_group_key && (i == 0 || buffers.sorted_keys[i - 1] != key);
}

// Write the two counts of every range to `buffers.range_counts`. The grid must have num_ranges(n)
// blocks, one per range.
template <class Key>
__global__ void __launch_bounds__(kTileThreads) count_groups_kernel(SortBuffers<Key> buffers) {
  const int64_t end = range_begin(buffers.n, blockIdx.x + 1);
  int num_groups = 0, num_grouped = 0;
  for (int64_t i = range_begin(buffers.n, blockIdx.x) + threadIdx.x; i < end; i += kTileThreads) {
    num_groups += begins_group(buffers, i);
    num_grouped += buffers.sorted_keys[i] != buffers.no_group_key;
  }
  num_groups = block_sum(num_groups);
  num_grouped = block_sum(num_grouped);
  if (threadIdx.x != 0) return;
  buffers.range_counts[blockIdx.x] = num_groups;
  buffers.range_counts[kMaxRanges + blockIdx.x] = num_grouped;
}

// Sums of range_counts.
struct GroupTotals {
  int groups_before = 0;  // groups that begin in the ranges before this block's range
  int num_groups = 0;     // all groups
  int num_grouped = 0;    // keys that belong to a group
};

// Add up `counts`, the range_counts of num_ranges ranges; range blockIdx.x is this block's range.
// All kTileThreads threads must call this; it contains barriers. All threads get the sums.
EMB_DEVICE GroupTotals sum_range_counts(const int32_t* counts, int num_ranges) {
  GroupTotals sums;
  for (int r = static_cast<int>(threadIdx.x); r < num_ranges; r += kTileThreads) {
    sums.num_groups += counts[r];
    sums.num_grouped += counts[kMaxRanges + r];
    if (r < static_cast<int>(blockIdx.x)) sums.groups_before += counts[r];
  }
  return {block_sum(sums.groups_before), block_sum(sums.num_groups), block_sum(sums.num_grouped)};
}

// Write `key` to entry i of out.unique.
EMB_DEVICE void write_unique(const DeviceGroupOutput& out, int64_t i, int64_t key) {
  if (out.unique_is_int64) {
    static_cast<int64_t*>(out.unique)[i] = key;
  } else {
    static_cast<int32_t*>(out.unique)[i] = static_cast<int32_t>(key);
  }
}

// Write `unique` and `segments` of the groups that begin in this block's range, and, unless
// sorted_bags is null, the bags of the sorted lookups of the range. Entries of `unique` after the
// last group become 0, and those of `segments` the number of keys that belong to groups. One thread
// also writes num_groups and counts the update step (count_update_step). `buffers.range_counts`
// must be complete. The grid must have num_ranges(n) blocks, or one block if there are no keys.
template <class Key>
__global__ void __launch_bounds__(kTileThreads)
    groups_kernel(SortBuffers<Key> buffers, DeviceGroupOutput out) {
  // A thread has key j * kTileThreads + threadIdx.x of a tile, for j < kThreadKeys. The 32 keys of
  // a warp for one j are a strip, in the order of the tile: strip j * kWarps + warp.
  constexpr int kThreadKeys = kTileSize / kTileThreads, kWarps = kTileThreads / simt::kWarpLanes;
  __shared__ int strip_groups[kThreadKeys * kWarps];  // groups that begin in each strip
  const unsigned lane = threadIdx.x % simt::kWarpLanes, warp = threadIdx.x / simt::kWarpLanes;
  const int ranges = static_cast<int>(num_ranges(buffers.n));
  GroupTotals totals = sum_range_counts(buffers.range_counts, ranges);
  if (simt::global_thread() == 0) {
    *out.num_groups = count_update_step(out.step_count, totals.num_groups);
    out.segments[buffers.n] = totals.num_grouped;
  }
  const int64_t end = ranges == 0 ? 0 : range_begin(buffers.n, blockIdx.x + 1);
  for (int64_t tile = ranges == 0 ? 0 : range_begin(buffers.n, blockIdx.x); tile < end;
       tile += kTileSize) {
    unsigned head_lanes[kThreadKeys];  // the lanes of this warp whose key begins a group
#pragma unroll
    for (int j = 0; j < kThreadKeys; ++j) {
      const int64_t i = tile + j * kTileThreads + threadIdx.x;
      head_lanes[j] = __ballot_sync(simt::kFullMask, i < end && begins_group(buffers, i));
      if (lane == 0) strip_groups[j * kWarps + warp] = __popc(head_lanes[j]);
    }
    __syncthreads();
    int first_group[kThreadKeys];  // number of the first group that begins in this warp's strip j
    int num_groups = 0;            // groups that begin in the tile
#pragma unroll
    for (int strip = 0; strip < kThreadKeys * kWarps; ++strip) {
      if (strip % kWarps == static_cast<int>(warp)) {
        first_group[strip / kWarps] = totals.groups_before + num_groups;
      }
      num_groups += strip_groups[strip];
    }
    __syncthreads();
    totals.groups_before += num_groups;
#pragma unroll
    for (int j = 0; j < kThreadKeys; ++j) {
      const int64_t i = tile + j * kTileThreads + threadIdx.x;
      if (i >= end) continue;
      if (head_lanes[j] >> lane & 1u) {
        const int group = first_group[j] + __popc(head_lanes[j] & ((1u << lane) - 1));
        write_unique(out, group, static_cast<int64_t>(buffers.sorted_keys[i]));
        out.segments[group] = static_cast<int32_t>(i);
      }
      if (i >= totals.num_groups) {
        write_unique(out, i, 0);
        out.segments[i] = totals.num_grouped;
      }
      if (out.sorted_bags != nullptr) out.sorted_bags[i] = out.bag_of[buffers.sorted_positions[i]];
    }
  }
}

// The groups of n keys, which must come from one call of `group` (not checked), and the output of
// `group_inverse`.
struct InverseArgs {
  const int32_t *segments, *permutation, *num_groups;  // [n + 1], [n], [1]
  int64_t n;
  int32_t* inverse;  // [n]: the group of each position, -1 for none; null if it is not wanted
};

// Write `args.inverse`, which must not be null. All threads of the grid, in blocks of kTileThreads,
// must call this; it contains barriers. `search_range` is shared memory for two ints (TileSearch).
EMB_DEVICE void write_inverse(const InverseArgs& args, int* search_range) {
  const int num_groups = *args.num_groups;
  const int32_t num_grouped = args.segments[num_groups];
  const auto start = [&](int group) { return static_cast<int64_t>(args.segments[group]); };
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileSize; tile < args.n;
       tile += static_cast<int64_t>(gridDim.x) * kTileSize) {
    const int64_t end = tile + kTileSize < args.n ? tile + kTileSize : args.n;
    const TileSearch search(start, num_groups, tile, end, search_range);
    for (int64_t j = tile + threadIdx.x; j < end; j += kTileThreads) {
      args.inverse[args.permutation[j]] = j < num_grouped ? search.find(start, j) : -1;
    }
  }
}

// The kernel of launch_inverse.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    inverse_kernel(InverseArgs args) {
  __shared__ int search_range[2];
  write_inverse(args, search_range);
}

// Write `buffers.keys` and `buffers.positions` from `keys` [n]; n must be greater than 0.
template <class Key, class Launcher>
void launch_keys(const Launcher& launcher, const IndexArray& keys,
                 const SortBuffers<Key>& buffers) {
  launcher(keys_kernel<Key>,
           blocks_for(buffers.n, kTileSize, launcher.max_grid_blocks(kResidentBlocksPerSm)),
           kTileThreads, keys, buffers);
}

// Write the groups of the sorted keys in `buffers`, and count the update step (count_update_step).
// n may be 0.
template <class Key, class Launcher>
void launch_groups(const Launcher& launcher, const SortBuffers<Key>& buffers,
                   const DeviceGroupOutput& out) {
  const auto ranges = static_cast<unsigned>(num_ranges(buffers.n));
  if (ranges > 0) launcher(count_groups_kernel<Key>, ranges, kTileThreads, buffers);
  launcher(groups_kernel<Key>, ranges > 0 ? ranges : 1, kTileThreads, buffers, out);
}

// Write the group of every position to args.inverse, which must not be null. n may be 0.
template <class Launcher>
void launch_inverse(const Launcher& launcher, const InverseArgs& args) {
  if (args.n == 0) return;
  launcher(inverse_kernel,
           blocks_for(args.n, kTileSize, launcher.max_grid_blocks(kResidentBlocksPerSm)),
           kTileThreads, args);
}

}  // namespace emb::cuda
