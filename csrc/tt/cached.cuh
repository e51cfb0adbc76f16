// The kernels of tensor trains that store some of their rows, on the GPU: tt_stored_kernel divides
// the lookups of a batch into lookups of stored rows and lookups whose rows the cores compute, and
// tt_count_kernel counts lookups and hits per table. A thread processes a lookup. In
// tt_count_kernel, if all counted lookups of a warp belong to one feature, as is usual, one lane
// adds their number; otherwise each lane adds its own lookup.
#pragma once

#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "tt/cached.h"

namespace emb::cuda {

inline constexpr int kStoredThreads = 256;  // threads per block of both kernels

// Write the outputs of all lookups, grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kStoredThreads)
    tt_stored_kernel(TtStoredArgs args) {
  for (int64_t i = simt::global_thread(); i < args.n; i += simt::threads_in_grid())
    args.write_outputs(i);
}

// Return the feature of lookup i, -1 if i is before or after the lookups of all features. There
// must be a feature.
EMB_DEVICE int64_t feature_of(const TtCountArgs& args, int64_t i) {
  int64_t low = -1, high = args.num_features;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (args.first_lookups[middle] <= i ? low : high) = middle;
  }
  return i < args.first_lookups[args.num_features] ? low : -1;
}

// Add the lookups and hits of all features to args.counters, grid-stride over lookups.
[[maybe_unused]] static __global__ void __launch_bounds__(kStoredThreads)
    tt_count_kernel(TtCountArgs args) {
  const int64_t lane = lane_in_warp();
  for (int64_t first = simt::global_warp() * simt::kWarpLanes; first < args.n;
       first += simt::threads_in_grid()) {
    const int64_t i = first + lane;
    const int64_t feature = i < args.n ? feature_of(args, i) : -1;
    const bool is_counted = feature >= 0 && args.is_counted(i);
    const bool is_hit = is_counted && args.is_hit(i);
    const unsigned counted_lanes = __ballot_sync(simt::kFullMask, is_counted);
    const unsigned hit_lanes = __ballot_sync(simt::kFullMask, is_hit);
    if (counted_lanes == 0) continue;
    const int leader = __ffs(static_cast<int>(counted_lanes)) - 1;
    const int64_t leader_feature = __shfl_sync(simt::kFullMask, feature, leader);
    const bool has_one_feature =
        __all_sync(simt::kFullMask, !is_counted || feature == leader_feature) != 0;
    if (!is_counted || (has_one_feature && lane != leader)) continue;
    int64_t* counters = args.counters_of(feature);
    if (counters == nullptr) continue;
    const int num_hits = has_one_feature ? __popc(hit_lanes) : int{is_hit};
    simt::atomic_add(counters, has_one_feature ? __popc(counted_lanes) : 1);
    if (num_hits > 0) simt::atomic_add(counters + 1, num_hits);
  }
}

// Write the outputs of `args`. In both launches `launcher` is a CudaLauncher or, in tests, a
// simt::HostLauncher, and the memory of `args` must live until the kernel has run. Neither waits
// for the device.
template <class Launcher>
void launch_tt_stored(const Launcher& launcher, const TtStoredArgs& args) {
  if (args.n == 0) return;
  launcher(tt_stored_kernel,
           blocks_for(args.n, kStoredThreads, launcher.max_grid_blocks(kResidentBlocksPerSm)),
           kStoredThreads, args);
}

// Add the lookups and hits of all features to args.counters.
template <class Launcher>
void launch_tt_count(const Launcher& launcher, const TtCountArgs& args) {
  if (args.n == 0 || args.num_features == 0) return;
  launcher(tt_count_kernel,
           blocks_for(args.n, kStoredThreads, launcher.max_grid_blocks(kResidentBlocksPerSm / 4)),
           kStoredThreads, args);
}

}  // namespace emb::cuda
