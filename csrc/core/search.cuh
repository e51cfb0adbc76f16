// Finds the interval that contains an element, given where the intervals start: for example the bag
// of a lookup, or the group of a sorted position. Interval i ends where interval i + 1 starts. A
// block takes a tile of neighbouring elements. Two of its warps find the intervals of the first and
// the last element of the tile, with 32 probes at a time (TileSearch). Then each thread searches
// for its elements between these two intervals only (TileSearch::find). All tiles of a kernel but
// the last have equally many elements, so a long interval does not unbalance the work. Kernels also
// use warp_search alone, for one element per warp.
#pragma once

#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kTileThreads = 256;  // threads per block of most kernels that take tiles
inline constexpr int kTileSize = 1024;    // elements per tile, unless a kernel has its own size

// Return the last i in [0, n) with starts(i) <= x, or -1 if there is none. All 32 lanes of a warp
// must call this with the same arguments; they get the same result. `starts(i)`, an integer for i
// in [0, n), should not decrease; if it decreases, the result is some i in [-1, n).
template <class Starts>
EMB_DEVICE int warp_search(const Starts& starts, int n, int64_t x) {
  const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
  int low = -1, high = n;  // starts(low) <= x < starts(high)
  while (high - low > 1) {
    const int step = (high - low + 32) / 33;  // 32 probes divide the range into 33 parts
    // 64 bits: a probe may exceed the largest int before it is compared with `high`.
    const int64_t probe = low + (lane + int64_t{1}) * step;
    const unsigned reached_probes =
        __ballot_sync(simt::kFullMask, probe < high && starts(static_cast<int>(probe)) <= x);
    // The number of probes before the first one whose start is greater than x.
    const int num_passed =
        reached_probes == simt::kFullMask ? 32 : __ffs(static_cast<int>(~reached_probes)) - 1;
    low += num_passed * step;
    if (num_passed < 32 && high - low > step) high = low + step;
  }
  return low;
}

// The intervals of the first and the last element of a tile, between which `find` searches.
struct TileSearch {
  int first, last;  // interval of the tile's first and last element; -1 before all intervals

  // Find both intervals. All threads of a block of at least two warps must call this. `starts(i)`
  // is where interval i in [0, n) starts. The tile is [begin, end), not empty. `shared` is shared
  // memory for two ints: no thread may use it during the call; it is free on return. Contains
  // barriers.
  template <class Starts>
  EMB_DEVICE TileSearch(const Starts& starts, int n, int64_t begin, int64_t end, int* shared) {
    const unsigned warp = threadIdx.x / simt::kWarpLanes;
    if (warp < 2) {
      const int interval = warp_search(starts, n, warp == 0 ? begin : end - 1);
      if (threadIdx.x % simt::kWarpLanes == 0) shared[warp] = interval;
    }
    __syncthreads();
    first = shared[0];
    last = shared[1];
    __syncthreads();
  }

  // Return the interval of element x of the tile, -1 if x is before all intervals. `starts` is that
  // of the constructor. Each thread may call this with its own x.
  template <class Starts>
  EMB_DEVICE int find(const Starts& starts, int64_t x) const {
    int low = first, high = last;
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (starts(middle) <= x) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return low;
  }
};

}  // namespace emb::cuda
