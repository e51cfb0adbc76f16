// Validation and repair of the offsets of a batch on the GPU, with the results of tbe/check.h.
// Repaired offsets are a running maximum of the offsets, clamped to [0, L], where L is the number
// of lookups; the last one is L. Lookups before the first offset, if that is above 0, belong to no
// bag. An index of -1 there is padding. Any other index there is *lost*, which counts as a
// violation of the offsets.
//
// Nearly every batch is valid, so all threads first check the offsets, without a scan. If a thread
// finds an invalid offset, a single block repairs all offsets in the same launch
// (lookup_keys_kernel and SmallLookups of tbe/keys.cuh). The exception is tbe/check_batch.cuh,
// where each thread repairs the offsets that it writes.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"
#include "core/simt.cuh"

namespace emb::cuda {

// The check of a batch by a kernel over its lookups. If `repaired_offsets` is null, nothing is
// checked and no other member is read. Pointers are to device memory, which must live until the
// kernel has run.
struct BatchCheck {
  int32_t* repaired_offsets = nullptr;  // [bags + 1], an output, written if an offset is invalid
  bool copies_valid_offsets = false;    // write `repaired_offsets` for a valid batch, too
  bool is_fatal = false;                // trap at a violation, as an assert does
  // [2]: the number of invalid indices, and the number of offsets that the repair changed plus that
  // of lost indices. Null if violations are not counted.
  unsigned long long* violations = nullptr;
  bool adds_violations = true;  // add to `violations`, else overwrite it
  // [2], scratch of a launch of lookup_keys_kernel with several blocks: packed counts, see
  // finish_block in tbe/keys.cuh. launch_lookup_keys sets it to 0; unspecified after the kernel.
  // May be null for one block.
  unsigned long long* progress = nullptr;
};

EMB_DEVICE int32_t max_of(int32_t a, int32_t b) { return a > b ? a : b; }

// Return offset i, clamped to [0, L].
EMB_DEVICE int32_t clamped_offset(const Bags& bags, int64_t i) {
  const int64_t offset = bags.offsets[i];
  return static_cast<int32_t>(offset < 0 ? 0
                                         : (offset > bags.num_lookups ? bags.num_lookups : offset));
}

// Return how many of the offsets at the positions first, first + step, ... are invalid. An offset
// is invalid if it is below its predecessor (offset 0: below 0), if it is above L, or if it is the
// last of a batch with bags and not L. The batch needs no repair if the result is 0 in all threads.
// The repair may change a different number of offsets, because a repaired offset depends on all
// offsets before it. If check.copies_valid_offsets, also copy these offsets to
// check.repaired_offsets.
EMB_DEVICE int count_invalid_offsets(const Bags& bags, const BatchCheck& check, int64_t first,
                                     int64_t step) {
  int num_invalid = 0;
#pragma unroll 4
  for (int64_t i = first; i <= bags.num_bags; i += step) {
    const int64_t offset = bags.offsets[i], previous = i == 0 ? 0 : bags.offsets[i - 1];
    num_invalid += offset < previous || offset > bags.num_lookups ||
                   (i == bags.num_bags && i > 0 && offset != bags.num_lookups);
    if (check.copies_valid_offsets) check.repaired_offsets[i] = static_cast<int32_t>(offset);
  }
  return num_invalid;
}

// Write the repaired offsets to `repaired_offsets`, [bags + 1], which must not be the memory of
// bags.offsets. Return how many of the offsets that this thread wrote differ from bags.offsets. All
// threads of one block of whole warps must call this; it has barriers, the last one at its end.
// `warp_scratch` is shared memory for an int per warp. There must be fewer than 2^31 lookups; not
// checked.
EMB_DEVICE int repair_offsets(const Bags& bags, int32_t* repaired_offsets, int32_t* warp_scratch) {
  constexpr int kOffsetsPerThread = 4;  // neighbouring offsets per thread and tile
  const unsigned lane = threadIdx.x % simt::kWarpLanes, warp = threadIdx.x / simt::kWarpLanes;
  int32_t maximum_before = 0;  // of all tiles before this one
  int num_changed = 0;
  for (int64_t tile = 0; tile <= bags.num_bags; tile += int64_t{blockDim.x} * kOffsetsPerThread) {
    const int64_t first = tile + int64_t{threadIdx.x} * kOffsetsPerThread;
    int32_t maximum = 0;
#pragma unroll 1
    for (int64_t i = first; i < first + kOffsetsPerThread && i <= bags.num_bags; ++i) {
      maximum = max_of(maximum, clamped_offset(bags, i));
    }
    for (unsigned delta = 1; delta < simt::kWarpLanes; delta *= 2) {
      const int32_t lower_maximum = __shfl_up_sync(simt::kFullMask, maximum, delta);
      if (lane >= delta) maximum = max_of(maximum, lower_maximum);
    }
    if (lane == simt::kWarpLanes - 1) warp_scratch[warp] = maximum;
    int32_t running_max = __shfl_up_sync(simt::kFullMask, maximum, 1u);
    running_max = lane == 0 ? maximum_before : max_of(maximum_before, running_max);
    __syncthreads();
    for (unsigned w = 0; w < blockDim.x / simt::kWarpLanes; ++w) {
      maximum_before = max_of(maximum_before, warp_scratch[w]);
      if (w < warp) running_max = max_of(running_max, warp_scratch[w]);
    }
#pragma unroll 1
    for (int64_t i = first; i < first + kOffsetsPerThread && i <= bags.num_bags; ++i) {
      running_max = max_of(running_max, clamped_offset(bags, i));
      // Without bags there are no lookups, and the only offset is 0.
      if (i == bags.num_bags && i > 0) running_max = static_cast<int32_t>(bags.num_lookups);
      num_changed += running_max != bags.offsets[i];
      repaired_offsets[i] = running_max;
    }
    __syncthreads();
  }
  return num_changed;
}

// Trap because of an invalid offset or a lost index, so that the launch fails. (A first offset
// above 0 is no violation if all indices before it are -1.)
EMB_DEVICE void fail_for_offsets() {
  simt::trap(
      "bounds_check: offsets must start at 0, not decrease, and end at the number of indices");
}

// Trap because of an invalid index, so that the launch fails.
EMB_DEVICE void fail_for_indices() {
  simt::trap(
      "bounds_check: indices must be in [0, rows) of their table (or -1 for a pruned one); "
      "BoundsCheck.WARNING reads row 0 instead");
}

// Report the violations of a batch: the number of invalid indices, and the number of offsets that
// the repair changed plus that of lost indices. If check.is_fatal, trap unless both are 0. Unless
// check.violations is null, add them to it, or overwrite it if not check.adds_violations. Exactly
// one thread of the grid must call this. The additions are atomic because kernels on other streams
// may add to the same counts.
EMB_DEVICE void report_violations(const BatchCheck& check, int64_t num_invalid_indices,
                                  int64_t num_offset_violations) {
  if (check.is_fatal && num_offset_violations > 0) fail_for_offsets();
  if (check.is_fatal && num_invalid_indices > 0) fail_for_indices();
  if (check.violations == nullptr) return;
  const auto index_violations = static_cast<unsigned long long>(num_invalid_indices);
  const auto offset_violations = static_cast<unsigned long long>(num_offset_violations);
  if (!check.adds_violations) {
    check.violations[0] = index_violations;
    check.violations[1] = offset_violations;
  } else if (index_violations + offset_violations > 0) {
    atomicAdd(&check.violations[0], index_violations);
    atomicAdd(&check.violations[1], offset_violations);
  }
}

}  // namespace emb::cuda
