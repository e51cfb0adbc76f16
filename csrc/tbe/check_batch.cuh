// Bounds check of a batch before its lookup, with the same results as bounds.cuh, which checks
// large batches. A small batch needs one launch, and no memory that is cleared beforehand.
//
// Every block reads all offsets. They need no repair if the first is not negative, no offset
// exceeds the next, and the last is the number of indices. This check needs no scan, and no block
// waits for another. If the offsets need no repair, a block copies its share of them and checks its
// tiles of indices. Otherwise, which is rare, each thread reads the offsets from the first on, and
// computes the running maximum up to its own offset and the bag of its own index. This is quadratic
// work, but still no block waits.
#pragma once

#include "tbe/bounds.cuh"

namespace emb::cuda {

inline constexpr int kCheckThreads = 1024;  // threads per block
// Blocks per multiprocessor. Two fill a multiprocessor of 2,048 threads (A100, H100).
inline constexpr int kCheckBlocksPerSm = 2;
// The limits of a small batch, see is_small_batch. A block reads this many offsets in a few
// microseconds, about the time of a launch (an estimate, not measured).
inline constexpr int64_t kMaxCheckedOffsets = 32 * kCheckThreads;
inline constexpr int64_t kMaxCheckedLookups = 32 * kCheckThreads;

// Return whether the batch is checked by check_batch_kernel, which needs no args.progress.
inline bool is_small_batch(const BoundsArgs& args) {
  return args.num_bags < kMaxCheckedOffsets && args.num_lookups <= kMaxCheckedLookups;
}

// Return, in every thread, whether `value` is true in any thread of the block. All threads of the
// block must call this; it has a barrier. A second call needs a barrier before it, because all
// calls use the same shared array.
EMB_DEVICE bool any_of_block(bool value) {
  __shared__ int any_of_warp[kCheckThreads / simt::kWarpLanes];
  // One warp's lanes read the results of all warps.
  static_assert(kCheckThreads == simt::kWarpLanes * simt::kWarpLanes);
  const unsigned lane = threadIdx.x % simt::kWarpLanes;
  const bool any_of_lanes = __any_sync(simt::kFullMask, value);
  if (lane == 0) any_of_warp[threadIdx.x / simt::kWarpLanes] = any_of_lanes;
  __syncthreads();
  return __any_sync(simt::kFullMask, any_of_warp[lane] != 0);
}

// Return whether this thread finds an invalid offset. A thread compares every kCheckThreads-th
// offset of the batch with the next. Thread 0 also checks the first and the last offset. The loads
// are independent, so that many are in flight.
EMB_DEVICE bool has_invalid_offset(const BoundsArgs& args) {
  const int64_t num_bags = args.num_bags;
  bool is_invalid =
      threadIdx.x == 0 && (args.offsets[0] < 0 || args.offsets[num_bags] != args.num_lookups);
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < num_bags; i += kCheckThreads) {
    is_invalid |= args.offsets[i] > args.offsets[i + 1];
  }
  return is_invalid;
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
EMB_DEVICE int bag_of_lookup(const BoundsArgs& args, int64_t i) {
  int64_t bag = 0;
  while (bag < args.num_bags && clamped_offset(bags_of(args), bag) <= i) ++bag;
  return static_cast<int>(bag) - 1;
}

// Count the index of lookup i in `counts` if it is lost or invalid. `bag` is the bag of the lookup,
// -1 if the lookup precedes all bags.
EMB_DEVICE void check_index(const BoundsArgs& args, int64_t i, int bag, BadIndexCounts* counts) {
  const int64_t index = args.indices[i];
  if (bag < 0) {
    counts->num_lost += index != -1;
    return;
  }
  const int64_t num_rows = args.features[args.map.feature(static_cast<uint32_t>(bag))].rows;
  counts->num_invalid += !((index >= 0 && index < num_rows) || index == -1);
}

// Add the `num_violations` of all lanes to args.violations[kind], unless that array is null. Kind 0
// is invalid indices, kind 1 changed offsets and lost indices. All lanes of the warp must call
// this.
EMB_DEVICE void count_violations(const BoundsArgs& args, int kind, int num_violations) {
  num_violations = __reduce_add_sync(simt::kFullMask, num_violations);
  if (num_violations == 0 || args.violations == nullptr || threadIdx.x % simt::kWarpLanes != 0)
    return;
  atomicAdd(&args.violations[kind], static_cast<unsigned long long>(num_violations));
}

// Write args.repaired_offsets, and add the violations to args.violations, or trap if there are any
// and args.is_fatal. The loops are grid-stride over offsets and over tiles of kCheckThreads
// indices. args.adds_violations and args.progress are not used.
[[maybe_unused]] static __global__ void __launch_bounds__(kCheckThreads)
    check_batch_kernel(BoundsArgs args) {
  __shared__ int range[2];
  const bool needs_repair = any_of_block(has_invalid_offset(args));
  if (needs_repair && args.is_fatal) fail_for_offsets();
  int num_changed_offsets = 0;
  BadIndexCounts counts;
  for (int64_t i = simt::global_thread(); i <= args.num_bags; i += simt::threads_in_grid()) {
    const int64_t offset = args.offsets[i];
    const auto repaired = needs_repair ? repaired_offset(args, i) : static_cast<int32_t>(offset);
    num_changed_offsets += repaired != offset;
    args.repaired_offsets[i] = repaired;
  }
  const auto start = [&](int bag) { return args.offsets[bag]; };
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kCheckThreads;
       tile < args.num_lookups && args.num_bags > 0;
       tile += static_cast<int64_t>(gridDim.x) * kCheckThreads) {
    const int64_t i = tile + threadIdx.x;
    const int64_t end =
        tile + kCheckThreads < args.num_lookups ? tile + kCheckThreads : args.num_lookups;
    if (needs_repair) {
      if (i < end) check_index(args, i, bag_of_lookup(args, i), &counts);
    } else {
      const TileSearch search(start, static_cast<int>(args.num_bags), tile, end, range);
      if (i < end) check_index(args, i, search.find(start, i), &counts);
    }
  }
  if (args.is_fatal) {
    __syncthreads();  // all threads have left the first any_of_block
    if (any_of_block(counts.num_lost > 0)) fail_for_offsets();
  }
  if (args.is_fatal && counts.num_invalid > 0) fail_for_indices();
  count_violations(args, 0, counts.num_invalid);
  count_violations(args, 1, num_changed_offsets + counts.num_lost);
}

// Write args.repaired_offsets, and add the violations to args.violations, or trap if there are any
// and args.is_fatal. args.adds_violations must be true, because small batches cannot overwrite; not
// checked. args.progress may be null if is_small_batch(args). `launcher` is a CudaLauncher or, in
// tests, a simt::HostLauncher. Does not wait for the device.
template <class Launcher>
void launch_check_batch(const Launcher& launcher, const BoundsArgs& args) {
  if (!is_small_batch(args)) {
    launch_bounds_check(launcher, args);
    return;
  }
  const int64_t num_items = args.num_lookups > args.num_bags ? args.num_lookups : args.num_bags + 1;
  launcher(check_batch_kernel,
           blocks_for(num_items, kCheckThreads, launcher.max_grid_blocks(kCheckBlocksPerSm)),
           kCheckThreads, args);
}

}  // namespace emb::cuda
