// Bounds check of a batch in front of its lookup, with the results of bounds.cuh. A small batch
// takes one launch and no memory to be cleared before it; a large one is left to bounds.cuh.
//
// Every block reads all offsets. They are valid if the first is not negative, no offset exceeds the
// next, and the last is the number of indices: this takes no scan, and no block waits for another.
// If they are valid, a block copies its share of the offsets and checks its tiles of indices. If
// they are not, which is rare, each thread computes the running maximum up to its own offset, and
// the bag of its own index, from the first offset on. This is quadratic work, but no block waits.
#pragma once

#include "tbe/bounds.cuh"

namespace emb::cuda {

inline constexpr int kCheckThreads = 1024;
// Two blocks fill a multiprocessor of 2,048 threads (A100, H100).
inline constexpr int kCheckBlocksPerSm = 2;
// The bounds of a small batch, see is_small_batch. A block reads this many offsets in a few
// microseconds, about the time of a launch (an estimate, not measured).
inline constexpr int64_t kMaxCheckedOffsets = 32 * kCheckThreads;
inline constexpr int64_t kMaxCheckedLookups = 32 * kCheckThreads;

// Return whether check_batch_kernel takes the batch.
inline bool is_small_batch(const BoundsArgs& args) {
  return args.num_bags < kMaxCheckedOffsets && args.num_lookups <= kMaxCheckedLookups;
}

// Return, in every thread, whether `value` is true in any thread of the block. All threads must
// call it. A second call needs a barrier before it, since both calls use the same shared array.
EMB_DEVICE bool any_of_block(bool value) {
  __shared__ int any_of_warp[kCheckThreads / simt::kWarpLanes];
  // One warp's lanes read the results of all warps.
  static_assert(kCheckThreads == simt::kWarpLanes * simt::kWarpLanes);
  const unsigned lane = threadIdx.x % simt::kWarpLanes;
  const bool any = __any_sync(simt::kFullMask, value);
  if (lane == 0) any_of_warp[threadIdx.x / simt::kWarpLanes] = any;
  __syncthreads();
  return __any_sync(simt::kFullMask, any_of_warp[lane] != 0);
}

// Return whether one of the offsets of this thread (every kCheckThreads-th of the batch) exceeds
// its successor, or, in thread 0, whether the first or the last offset is wrong. The loads are
// independent, so that many are in flight.
EMB_DEVICE bool finds_bad_offset(const BoundsArgs& args) {
  const int64_t last = args.num_bags;
  bool bad = threadIdx.x == 0 && (args.offsets[0] < 0 || args.offsets[last] != args.num_lookups);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < last; i += kCheckThreads) {
    bad |= args.offsets[i] > args.offsets[i + 1];
  }
  return bad;
}

// Return the bags of the batch, with its unrepaired offsets.
EMB_DEVICE Bags bags_of(const BoundsArgs& args) {
  return {args.offsets, args.num_bags, args.num_lookups};
}

// Return the repaired offset i, computed from all offsets up to i.
EMB_DEVICE int32_t repaired_offset(const BoundsArgs& args, int64_t i) {
  if (i == args.num_bags && i > 0) return static_cast<int32_t>(args.num_lookups);
  int32_t maximum = 0;
  for (int64_t j = 0; j <= i; ++j) maximum = max_of(maximum, clamped_offset(bags_of(args), j));
  return maximum;
}

// Return the bag of lookup i according to the repaired offsets, -1 if it precedes all bags.
EMB_DEVICE int bag_by_repaired(const BoundsArgs& args, int64_t i) {
  int64_t bag = 0;
  while (bag < args.num_bags && clamped_offset(bags_of(args), bag) <= i) ++bag;
  return static_cast<int>(bag) - 1;
}

// Add the violation of lookup i of bag `bag` (-1: before the first bag), if any, to `bad`.
EMB_DEVICE void check_index(const BoundsArgs& args, int64_t i, int bag, BadIndices* bad) {
  const int64_t index = args.indices[i];
  if (bag < 0) {
    bad->lost += index != -1;
    return;
  }
  const int64_t rows = args.features[args.map.feature(static_cast<uint32_t>(bag))].rows;
  bad->invalid += !((index >= 0 && index < rows) || index == -1);
}

// Add the violations of a warp, `bad` in each lane, to args.violations[kind], unless that is null:
// kind 0 counts indices, kind 1 offsets. Called by the whole warp.
EMB_DEVICE void count_violations(const BoundsArgs& args, int kind, int bad) {
  bad = __reduce_add_sync(simt::kFullMask, bad);
  if (bad == 0 || args.violations == nullptr || threadIdx.x % simt::kWarpLanes != 0) return;
  atomicAdd(&args.violations[kind], static_cast<unsigned long long>(bad));
}

// Write args.repaired, and add the violations to args.violations, or trap if args.is_fatal.
// Grid-stride over offsets and over tiles of kCheckThreads indices. args.adds_counts is ignored.
[[maybe_unused]] static __global__ void __launch_bounds__(kCheckThreads)
    check_batch_kernel(BoundsArgs args) {
  __shared__ int range[2];
  const bool repairs = any_of_block(finds_bad_offset(args));
  if (repairs && args.is_fatal) fail_for_offsets();
  int bad_offsets = 0;
  BadIndices bad;
  for (int64_t i = simt::global_thread(); i <= args.num_bags; i += simt::threads_in_grid()) {
    const int64_t offset = args.offsets[i];
    const auto repaired = repairs ? repaired_offset(args, i) : static_cast<int32_t>(offset);
    bad_offsets += repaired != offset;
    args.repaired[i] = repaired;
  }
  const auto start = [&](int bag) { return args.offsets[bag]; };
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kCheckThreads;
       tile < args.num_lookups && args.num_bags > 0;
       tile += static_cast<int64_t>(gridDim.x) * kCheckThreads) {
    const int64_t i = tile + threadIdx.x;
    const int64_t end =
        tile + kCheckThreads < args.num_lookups ? tile + kCheckThreads : args.num_lookups;
    if (repairs) {
      if (i < end) check_index(args, i, bag_by_repaired(args, i), &bad);
    } else {
      const TileSearch search(start, static_cast<int>(args.num_bags), tile, end, range);
      if (i < end) check_index(args, i, search.find(start, i), &bad);
    }
  }
  if (args.is_fatal) {
    __syncthreads();  // all threads have left the first any_of_block
    if (any_of_block(bad.lost > 0)) fail_for_offsets();
  }
  if (args.is_fatal && bad.invalid > 0) fail_for_indices();
  count_violations(args, 0, bad.invalid);
  count_violations(args, 1, bad_offsets + bad.lost);
}

// Write args.repaired and add the violations to args.violations, or trap if args.is_fatal. The
// caller must set args.adds_counts, since small batches always add; not checked. args.progress may
// be null if is_small_batch.
template <class Launcher>
void launch_check_batch(const Launcher& launcher, const BoundsArgs& args) {
  if (!is_small_batch(args)) {
    launch_bounds_check(launcher, args);
    return;
  }
  const int64_t items = args.num_lookups > args.num_bags ? args.num_lookups : args.num_bags + 1;
  launcher(check_batch_kernel, blocks_for(items, kCheckThreads, launcher.blocks(kCheckBlocksPerSm)),
           kCheckThreads, args);
}

}  // namespace emb::cuda
