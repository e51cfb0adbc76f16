// The inner loop that forward and backward share: a group of lanes adds up rows from anywhere, four
// in flight, in the order given.
#pragma once

#include "core/row_piece.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kRowsInFlight = 4;

// Adds `weight` times the row at `offset` (elements from `base`; negative: none) for the first
// `steps` lanes of a group, each of which holds one row's offset and weight. `base` points at this
// lane's first column, `valid` is the number of columns from there to the end of the row. All
// lanes of the warp call it with equal `steps`.
template <class T, int N, bool kVector>
EMB_DEVICE void add_rows(const T* base, int64_t offset, float weight, int valid, int lanes,
                         int steps, float (&sum)[N]) {
  for (int k = 0; k < steps; k += kRowsInFlight) {
    Piece<T, N> piece[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t row = __shfl_sync(simt::kFullMask, offset, k + u, lanes);
      if (row >= 0 && valid > 0) piece[u].template load<kVector>(base + row, valid);
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const float scale = __shfl_sync(simt::kFullMask, weight, k + u, lanes);
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] += scale * piece[u][e];
    }
  }
}

}  // namespace emb::cuda
