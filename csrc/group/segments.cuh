// The kernels before and after the sort of `group`: make keys sortable, write the groups. The sort
// itself (CUB on a GPU, std::stable_sort in tests) delivers the sorted keys and positions. Keys
// that belong to no group are set to `limit`, the largest key, so they form the last run, if any.
//
// The sorted keys are cut into at most kMaxRanges ranges, a block each. One kernel counts the
// groups that begin in each range; in the other, a block adds up the counts of the ranges before
// its own and writes the groups that begin in it.
#pragma once

#include "core/dtype.h"
#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kMaxRanges = 1024;

// The input and output of a stable sort by key, all on the device; n elements each.
template <class Key>
struct SortPairs {
  Key *keys, *sorted_keys;
  int32_t *positions, *sorted_positions;
  int64_t n;
  Key limit;  // the greatest key
};

// The same for a sort whose runs of equal keys become groups.
template <class Key>
struct SortBuffers {
  Key *keys, *sorted_keys;
  int32_t *positions, *sorted_positions;
  int32_t*
      range_counts;  // [2, kMaxRanges]: of each range, groups that begin and keys below `limit`
  int64_t n;
  Key limit;
};

// The step of the update that reads a grouping, which the grouping counts on the way. If the
// gradient is not finite there is no step, and the grouping reports no groups.
struct StepCount {
  double* step = nullptr;           // counter to add one to
  const bool* is_finite = nullptr;  // null for a gradient that is
};

// Count the step, and return the number of groups to update. Called by one thread of the grid.
EMB_DEVICE int count_step(const StepCount& count, int groups) {
  if (count.is_finite != nullptr && !*count.is_finite) return 0;
  if (count.step != nullptr) *count.step += 1.0;
  return groups;
}

struct GroupOutput {
  void* unique;  // [n] int32 or int64
  bool unique_is_int64;
  int32_t *segments, *count;  // [n + 1], [1]
  // For `tbe_group`: the bag of each lookup, and the output for the bags of the sorted ones; else
  // null.
  const int32_t* bag_of;
  int32_t* bags;
  StepCount step = {};
};

// Make the keys of the sort. Keys outside [0, limit) belong to no group.
template <class Key>
__global__ void __launch_bounds__(kTileThreads)
    keys_kernel(IndexArray keys, SortBuffers<Key> sort) {
  for (int64_t i = simt::global_thread(); i < sort.n; i += simt::threads_in_grid()) {
    const int64_t key = keys[i];
    const bool valid = key >= 0 && static_cast<uint64_t>(key) < sort.limit;
    sort.keys[i] = valid ? static_cast<Key>(key) : sort.limit;
    sort.positions[i] = static_cast<int32_t>(i);
  }
}

// Return the number of ranges that n sorted keys are cut into, and below it the first key of range
// r.
EMB_HD int64_t num_ranges(int64_t n) {
  const int64_t tiles = (n + kTileSize - 1) / kTileSize;
  return tiles < kMaxRanges ? tiles : kMaxRanges;
}
EMB_HD int64_t range_begin(int64_t n, int64_t r) {
  const int64_t tiles = (n + kTileSize - 1) / kTileSize, ranges = num_ranges(n);
  const int64_t begin = tiles * r / ranges * kTileSize;
  return begin < n ? begin : n;
}

// Return the sum over the block, in every thread.
EMB_DEVICE int block_sum(int value) {
  __shared__ int of_warp[kTileThreads / simt::kWarp];
  value = __reduce_add_sync(simt::kFullMask, value);
  __syncthreads();
  if (threadIdx.x % simt::kWarp == 0) of_warp[threadIdx.x / simt::kWarp] = value;
  __syncthreads();
  value = 0;
#pragma unroll
  for (const int other : of_warp) value += other;
  return value;
}

// Return whether a group begins at sorted key i.
template <class Key>
EMB_DEVICE bool begins_group(const SortBuffers<Key>& sort, int64_t i) {
  const Key key = sort.sorted_keys[i];
  return key != sort.limit && (i == 0 || sort.sorted_keys[i - 1] != key);
}

template <class Key>
__global__ void __launch_bounds__(kTileThreads) count_groups_kernel(SortBuffers<Key> sort) {
  const int64_t end = range_begin(sort.n, blockIdx.x + 1);
  int begun = 0, grouped = 0;
  for (int64_t i = range_begin(sort.n, blockIdx.x) + threadIdx.x; i < end; i += kTileThreads) {
    begun += begins_group(sort, i);
    grouped += sort.sorted_keys[i] != sort.limit;
  }
  begun = block_sum(begun);
  grouped = block_sum(grouped);
  if (threadIdx.x != 0) return;
  sort.range_counts[blockIdx.x] = begun;
  sort.range_counts[kMaxRanges + blockIdx.x] = grouped;
}

// The groups before a block's range, and in all ranges; the sorted keys that belong to groups.
struct GroupTotals {
  int before = 0, count = 0, grouped = 0;
};

EMB_DEVICE GroupTotals add_ranges(const int32_t* counts, int ranges) {
  GroupTotals sums;
  for (int r = static_cast<int>(threadIdx.x); r < ranges; r += kTileThreads) {
    sums.count += counts[r];
    sums.grouped += counts[kMaxRanges + r];
    if (r < static_cast<int>(blockIdx.x)) sums.before += counts[r];
  }
  return {block_sum(sums.before), block_sum(sums.count), block_sum(sums.grouped)};
}

EMB_DEVICE void put_unique(const GroupOutput& out, int64_t i, int64_t key) {
  if (out.unique_is_int64) {
    static_cast<int64_t*>(out.unique)[i] = key;
  } else {
    static_cast<int32_t*>(out.unique)[i] = static_cast<int32_t>(key);
  }
}

// Write the groups, and after the last one zeros to `unique` and the number of grouped keys to
// `segments`, as `group` returns them.
template <class Key>
__global__ void __launch_bounds__(kTileThreads)
    groups_kernel(SortBuffers<Key> sort, GroupOutput out) {
  constexpr int kEach = kTileSize / kTileThreads, kWarps = kTileThreads / simt::kWarp;
  __shared__ int begun[kEach * kWarps];
  const unsigned lane = threadIdx.x % simt::kWarp, warp = threadIdx.x / simt::kWarp;
  const int ranges = static_cast<int>(num_ranges(sort.n));
  GroupTotals totals = add_ranges(sort.range_counts, ranges);
  if (simt::global_thread() == 0) {
    *out.count = count_step(out.step, totals.count);
    out.segments[sort.n] = totals.grouped;
  }
  const int64_t end = ranges == 0 ? 0 : range_begin(sort.n, blockIdx.x + 1);
  for (int64_t tile = ranges == 0 ? 0 : range_begin(sort.n, blockIdx.x); tile < end;
       tile += kTileSize) {
    unsigned heads[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = tile + j * kTileThreads + threadIdx.x;
      heads[j] = __ballot_sync(simt::kFullMask, i < end && begins_group(sort, i));
      if (lane == 0) begun[j * kWarps + warp] = __popc(heads[j]);
    }
    __syncthreads();
    int group[kEach],
        in_tile = 0;  // the number of the first group of this warp's part of tile row j
#pragma unroll
    for (int w = 0; w < kEach * kWarps; ++w) {
      if (w % kWarps == static_cast<int>(warp)) group[w / kWarps] = totals.before + in_tile;
      in_tile += begun[w];
    }
    __syncthreads();
    totals.before += in_tile;
#pragma unroll
    for (int j = 0; j < kEach; ++j) {
      const int64_t i = tile + j * kTileThreads + threadIdx.x;
      if (i >= end) continue;
      if (heads[j] >> lane & 1u) {
        const int u = group[j] + __popc(heads[j] & ((1u << lane) - 1));
        put_unique(out, u, static_cast<int64_t>(sort.sorted_keys[i]));
        out.segments[u] = static_cast<int32_t>(i);
      }
      if (i >= totals.count) {
        put_unique(out, i, 0);
        out.segments[i] = totals.grouped;
      }
      if (out.bags != nullptr) out.bags[i] = out.bag_of[sort.sorted_positions[i]];
    }
  }
}

// The groups of n keys, and an output for the group of each key, -1 for none; null: none.
struct InverseArgs {
  const int32_t *segments, *permutation, *count;
  int64_t n;
  int32_t* inverse;
};

// Write the group of every key. `range` is shared memory for two numbers.
EMB_DEVICE void write_inverse(const InverseArgs& args, int* range) {
  const int groups = *args.count;
  const int32_t grouped = args.segments[groups];
  const auto start = [&](int group) { return static_cast<int64_t>(args.segments[group]); };
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileSize; tile < args.n;
       tile += static_cast<int64_t>(gridDim.x) * kTileSize) {
    const int64_t end = tile + kTileSize < args.n ? tile + kTileSize : args.n;
    const TileSearch search(start, groups, tile, end, range);
    for (int64_t j = tile + threadIdx.x; j < end; j += kTileThreads) {
      args.inverse[args.permutation[j]] = j < grouped ? search.find(start, j) : -1;
    }
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    inverse_kernel(InverseArgs args) {
  __shared__ int range[2];
  write_inverse(args, range);
}

template <class Key, class Launcher>
void launch_keys(const Launcher& launcher, const IndexArray& keys, const SortBuffers<Key>& sort) {
  launcher(keys_kernel<Key>, blocks_for(sort.n, kTileSize, launcher.blocks(32)), kTileThreads, keys,
           sort);
}

template <class Key, class Launcher>
void launch_groups(const Launcher& launcher, const SortBuffers<Key>& sort, const GroupOutput& out) {
  const auto ranges = static_cast<unsigned>(num_ranges(sort.n));
  if (ranges > 0) launcher(count_groups_kernel<Key>, ranges, kTileThreads, sort);
  launcher(groups_kernel<Key>, ranges > 0 ? ranges : 1, kTileThreads, sort, out);
}

template <class Launcher>
void launch_inverse(const Launcher& launcher, const InverseArgs& args) {
  if (args.n == 0) return;
  launcher(inverse_kernel, blocks_for(args.n, kTileSize, launcher.blocks(32)), kTileThreads, args);
}

}  // namespace emb::cuda
