// The kernels before and after the sort of `group`: make keys sortable, write the groups. The sort
// itself (CUB on a GPU, std::stable_sort in tests) delivers the sorted positions, the distinct keys
// and where each of them starts. Keys that belong to no group are set to `limit`, the largest key,
// so they form the last run, if any.
#pragma once

#include "core/dtype.h"
#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

// The input and output of a stable sort by key, all on the device; n elements each.
template <class Key>
struct SortPairs {
  Key *keys, *sorted_keys;
  int32_t *positions, *sorted_positions;
  int64_t n;
  Key limit;  // the greatest key
};

// The same for a sort that finds the runs of equal keys as well; `runs` has one element.
template <class Key>
struct SortBuffers {
  Key *keys, *sorted_keys, *run_keys;
  int32_t *positions, *sorted_positions, *run_starts, *runs;
  int64_t n;
  Key limit;
};

// What a grouping does for the update that reads it, on the way: it counts the step, and it clears
// a counter. Without a finite gradient there is no step: no group is counted either.
struct StepCount {
  double* step = nullptr;           // to add one to
  const bool* is_finite = nullptr;  // null for a gradient that is
  int32_t* cleared = nullptr;
};

// Count the step, and return the number of groups to update. Called by one thread of the grid.
EMB_DEVICE int count_step(const StepCount& count, int groups) {
  if (count.cleared != nullptr) *count.cleared = 0;
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

// Turn the runs of equal sorted keys into groups: drop the run of `limit`, and fill what follows
// the last group as the schema says.
template <class Key>
__global__ void __launch_bounds__(kTileThreads)
    groups_kernel(SortBuffers<Key> sort, GroupOutput out) {
  const int runs = sort.n == 0 ? 0 : *sort.runs;
  const bool has_rest = runs > 0 && sort.run_keys[runs - 1] == sort.limit;
  const int count = has_rest ? runs - 1 : runs;
  const int32_t grouped = has_rest ? sort.run_starts[runs - 1] : static_cast<int32_t>(sort.n);
  if (simt::global_thread() == 0) *out.count = count_step(out.step, count);
  for (int64_t i = simt::global_thread(); i <= sort.n; i += simt::threads_in_grid()) {
    out.segments[i] = i < count ? sort.run_starts[i] : grouped;
    if (i == sort.n) continue;
    const int64_t key = i < count ? static_cast<int64_t>(sort.run_keys[i]) : 0;
    if (out.unique_is_int64) {
      static_cast<int64_t*>(out.unique)[i] = key;
    } else {
      static_cast<int32_t*>(out.unique)[i] = static_cast<int32_t>(key);
    }
    if (out.bags != nullptr) out.bags[i] = out.bag_of[sort.sorted_positions[i]];
  }
}

// Write the group of every input position, -1 for none.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    inverse_kernel(const int32_t* segments, const int32_t* permutation, const int32_t* count,
                   int64_t n, int32_t* inverse) {
  __shared__ int range[2];
  const int groups = *count;
  const int32_t grouped = segments[groups];
  const auto start = [&](int group) { return static_cast<int64_t>(segments[group]); };
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileSize; tile < n;
       tile += static_cast<int64_t>(gridDim.x) * kTileSize) {
    const int64_t end = tile + kTileSize < n ? tile + kTileSize : n;
    const TileSearch search(start, groups, tile, end, range);
    for (int64_t j = tile + threadIdx.x; j < end; j += kTileThreads) {
      inverse[permutation[j]] = j < grouped ? search.find(start, j) : -1;
    }
  }
}

template <class Key, class Launcher>
void launch_keys(const Launcher& launcher, const IndexArray& keys, const SortBuffers<Key>& sort) {
  launcher(keys_kernel<Key>, blocks_for(sort.n, kTileSize, launcher.blocks(32)), kTileThreads, keys,
           sort);
}

template <class Key, class Launcher>
void launch_groups(const Launcher& launcher, const SortBuffers<Key>& sort, const GroupOutput& out) {
  launcher(groups_kernel<Key>, blocks_for(sort.n + 1, kTileSize, launcher.blocks(32)), kTileThreads,
           sort, out);
}

template <class Launcher>
void launch_inverse(const Launcher& launcher, const int32_t* segments, const int32_t* permutation,
                    const int32_t* count, int64_t n, int32_t* inverse) {
  if (n == 0) return;
  launcher(inverse_kernel, blocks_for(n, kTileSize, launcher.blocks(32)), kTileThreads, segments,
           permutation, count, n, inverse);
}

}  // namespace emb::cuda
