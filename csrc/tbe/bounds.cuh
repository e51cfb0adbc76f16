// Bounds check of indices and offsets on the GPU. Offsets are repaired into a new array (clamped to
// [0, L], never decreasing, the last equal to L): a running maximum, in two kernels. Violations are
// counted on the device; in the fatal mode the kernel fails as an assert does. The lookups before a
// first offset above 0 belong to no bag: indices of -1 there are padding, each other one is lost,
// which counts as a violation of the offsets.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"
#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

struct BoundsArgs {
  IndexArray indices, offsets;
  const Feature* features;
  int64_t num_lookups, num_bags;
  BagMap map;
  bool fatal;
  int32_t* tile_max;               // one per tile of offsets
  int32_t* repaired;               // [num_bags + 1]
  unsigned long long* violations;  // [2], zeroed: indices, offsets; null to count none
};

EMB_DEVICE int32_t clamped_offset(const BoundsArgs& args, int64_t i) {
  const int64_t x = args.offsets[i];
  return static_cast<int32_t>(x < 0 ? 0 : x > args.num_lookups ? args.num_lookups : x);
}

EMB_DEVICE int32_t max_of(int32_t a, int32_t b) { return a > b ? a : b; }

// Return the maximum over the block, in every thread.
EMB_DEVICE int32_t block_max(int32_t value) {
  __shared__ int32_t of_warp[kTileThreads / simt::kWarp];
  value = __reduce_max_sync(simt::kFullMask, value);
  __syncthreads();
  if (threadIdx.x % simt::kWarp == 0) of_warp[threadIdx.x / simt::kWarp] = value;
  __syncthreads();
#pragma unroll
  for (int32_t other : of_warp) value = max_of(value, other);
  return value;
}

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    offset_max_kernel(BoundsArgs args) {
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTileSize;
  int32_t maximum = 0;
  for (int64_t i = first + threadIdx.x; i < first + kTileSize && i <= args.num_bags;
       i += kTileThreads) {
    maximum = max_of(maximum, clamped_offset(args, i));
  }
  maximum = block_max(maximum);
  if (threadIdx.x == 0) args.tile_max[blockIdx.x] = maximum;
}

// Return the maximum over the threads of the block before this one.
EMB_DEVICE int32_t max_of_threads_before(int32_t value) {
  __shared__ int32_t of_warp[kTileThreads / simt::kWarp];
  const unsigned lane = threadIdx.x % simt::kWarp, warp = threadIdx.x / simt::kWarp;
  for (unsigned delta = 1; delta < simt::kWarp; delta *= 2) {
    const int32_t other = __shfl_up_sync(simt::kFullMask, value, delta);
    if (lane >= delta) value = max_of(value, other);
  }
  if (lane == simt::kWarp - 1) of_warp[warp] = value;
  __syncthreads();
  int32_t before = __shfl_up_sync(simt::kFullMask, value, 1u);
  if (lane == 0) before = 0;
  for (unsigned w = 0; w < warp; ++w) before = max_of(before, of_warp[w]);
  return before;
}

// Count the bad offsets of a warp, or fail; `bad` is the same in each lane.
EMB_DEVICE void report_offsets(const BoundsArgs& args, int bad) {
  if (bad == 0) return;
  if (args.fatal) {
    simt::trap(
        "bounds_check: offsets must start at 0, not decrease, and end at the number of indices");
  }
  if (threadIdx.x % simt::kWarp == 0 && args.violations != nullptr) {
    atomicAdd(&args.violations[1], static_cast<unsigned long long>(bad));
  }
}

// One block per tile, as offset_max_kernel; a thread repairs kTileSize / kTileThreads neighbours.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    repair_offsets_kernel(BoundsArgs args) {
  constexpr int kEach = kTileSize / kTileThreads;
  int32_t floor = 0;
  for (unsigned t = threadIdx.x; t < blockIdx.x; t += kTileThreads) {
    floor = max_of(floor, args.tile_max[t]);
  }
  floor = block_max(floor);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kTileSize + threadIdx.x * kEach;
  int32_t maximum = 0;
  for (int64_t i = first; i < first + kEach && i <= args.num_bags; ++i) {
    maximum = max_of(maximum, clamped_offset(args, i));
  }
  floor = max_of(floor, max_of_threads_before(maximum));
  int bad = 0;
  for (int64_t i = first; i < first + kEach && i <= args.num_bags; ++i) {
    floor = max_of(floor, clamped_offset(args, i));
    if (i == args.num_bags && i > 0) floor = static_cast<int32_t>(args.num_lookups);
    bad += floor != args.offsets[i];
    args.repaired[i] = floor;
  }
  bad = __reduce_add_sync(simt::kFullMask, bad);
  report_offsets(args, bad);
}

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    check_indices_kernel(BoundsArgs args) {
  __shared__ int range[2];
  const auto start = [&](int bag) { return static_cast<int64_t>(args.repaired[bag]); };
  int bad = 0, lost = 0;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileSize; tile < args.num_lookups;
       tile += static_cast<int64_t>(gridDim.x) * kTileSize) {
    const int64_t end = tile + kTileSize < args.num_lookups ? tile + kTileSize : args.num_lookups;
    const TileSearch search(start, static_cast<int>(args.num_bags), tile, end, range);
    for (int64_t i = tile + threadIdx.x; i < end; i += kTileThreads) {
      const int bag = search.find(start, i);
      const int64_t index = args.indices[i];
      lost += bag < 0 && index != -1;
      if (bag < 0) continue;
      const int64_t rows = args.features[args.map.feature(static_cast<uint32_t>(bag))].rows;
      bad += !((index >= 0 && index < rows) || index == -1);
    }
  }
  report_offsets(args, __reduce_add_sync(simt::kFullMask, lost));
  bad = __reduce_add_sync(simt::kFullMask, bad);
  if (bad == 0) return;
  if (args.fatal) {
    simt::trap(
        "bounds_check: indices must be in [0, rows) of their table (or -1 for a pruned one); "
        "BoundsCheck.WARNING reads row 0 instead");
  }
  if (threadIdx.x % simt::kWarp == 0) {
    atomicAdd(&args.violations[0], static_cast<unsigned long long>(bad));
  }
}

inline int64_t offset_tiles(int64_t num_bags) { return (num_bags + 1 + kTileSize - 1) / kTileSize; }

template <class Launcher>
void launch_repair_offsets(const Launcher& launcher, const BoundsArgs& args) {
  const auto tiles = static_cast<unsigned>(offset_tiles(args.num_bags));
  // A tile reads the maximums of the tiles before it: of a single one there are none.
  if (tiles > 1) launcher(offset_max_kernel, tiles, kTileThreads, args);
  launcher(repair_offsets_kernel, tiles, kTileThreads, args);
}

template <class Launcher>
void launch_bounds_check(const Launcher& launcher, const BoundsArgs& args) {
  launch_repair_offsets(launcher, args);
  if (args.num_lookups == 0 || args.num_bags == 0) return;
  launcher(check_indices_kernel, blocks_for(args.num_lookups, kTileSize, launcher.blocks(32)),
           kTileThreads, args);
}

}  // namespace emb::cuda
