// Which interval an element lies in, given where the intervals start: which bag a lookup belongs
// to, which group a sorted position. A block takes a tile of neighbouring elements; two of its
// warps find the intervals of the first and the last one, 32 probes at a time, and each thread then
// searches only between them. All work is in proportion to the elements, so one long interval is no
// problem.
#pragma once

#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kTileThreads = 256;
inline constexpr int kTileSize = 1024;

// The last i in [0, n) with starts(i) <= x, or -1; the same answer in each lane of a full warp.
// `starts` should not decrease; where it does, some i in range comes out.
template <class Starts>
EMB_DEVICE int warp_search(const Starts& starts, int n, int64_t x) {
  const int lane = static_cast<int>(threadIdx.x % simt::kWarp);
  int low = -1, high = n;  // starts(low) <= x < starts(high)
  while (high - low > 1) {
    const int step = (high - low + 32) / 33;
    // 64 bits: a probe may lie beyond the largest int before it is compared with `high`.
    const int64_t probe = low + (lane + int64_t{1}) * step;
    const unsigned hits =
        __ballot_sync(simt::kFullMask, probe < high && starts(static_cast<int>(probe)) <= x);
    const int count = hits == simt::kFullMask ? 32 : __ffs(static_cast<int>(~hits)) - 1;
    low += count * step;
    if (count < 32 && high - low > step) high = low + step;
  }
  return low;
}

// The intervals of a tile's elements.
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

  // The interval of x, one of the tile's elements; -1 where x comes before all intervals.
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
