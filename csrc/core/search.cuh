// Find the interval that contains an element, given the starts of the intervals: the bag of a
// lookup, the group of a sorted position. A block takes a tile of neighbouring elements. Two of its
// warps find the intervals of the first and the last element, 32 probes at a time; each thread then
// searches only between them. The work is proportional to the number of elements, so one long
// interval is no problem.
#pragma once

#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kTileThreads = 256;
inline constexpr int kTileSize = 1024;

// Return the last i in [0, n) with starts(i) <= x, or -1; the same in each lane of a full warp.
// `starts` should not decrease; where it does, the result is some i in range.
template <class Starts>
EMB_DEVICE int warp_search(const Starts& starts, int n, int64_t x) {
  const int lane = static_cast<int>(threadIdx.x % simt::kWarp);
  int low = -1, high = n;  // starts(low) <= x < starts(high)
  while (high - low > 1) {
    const int step = (high - low + 32) / 33;
    // 64 bits: a probe may exceed the largest int before it is compared with `high`.
    const int64_t probe = low + (lane + int64_t{1}) * step;
    const unsigned hits =
        __ballot_sync(simt::kFullMask, probe < high && starts(static_cast<int>(probe)) <= x);
    const int count = hits == simt::kFullMask ? 32 : __ffs(static_cast<int>(~hits)) - 1;
    low += count * step;
    if (count < 32 && high - low > step) high = low + step;
  }
  return low;
}

// The range of intervals that a tile's elements fall into.
struct TileSearch {
  int first, last;

  // Called by all threads of a block of at least two warps, for elements [begin, end), not empty;
  // `shared` is two ints that no thread uses before the next barrier.
  template <class Starts>
  EMB_DEVICE TileSearch(const Starts& starts, int n, int64_t begin, int64_t end, int* shared) {
    const unsigned warp = threadIdx.x / simt::kWarp;
    if (warp < 2) {
      const int found = warp_search(starts, n, warp == 0 ? begin : end - 1);
      if (threadIdx.x % simt::kWarp == 0) shared[warp] = found;
    }
    __syncthreads();
    first = shared[0];
    last = shared[1];
    __syncthreads();
  }

  // Return the interval of x, one of the tile's elements; -1 if x precedes all intervals.
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
