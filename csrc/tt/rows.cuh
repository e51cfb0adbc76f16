// Rows from the values of their halves on the GPU, and the gradients of those values. A row is left
// [Ql, rank] times right [Qr, rank], too small a product for tiles: lanes own elements of the
// result and read their operands through the first-level cache, which a warp shares.
#pragma once

#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "tt/args.h"

namespace emb::cuda {

inline constexpr int kRowThreads = 128;
inline constexpr int kElementsPerLane = 4;  // elements of a result that a lane keeps in registers

// The values of left halves: in a buffer, or, if the half is a single core, the core's row
// `ids[u]`.
struct TtLeftValues {
  const float* data;
  const int32_t* ids;

  EMB_DEVICE const float* at(int64_t u, int64_t size) const {
    return data + (ids != nullptr ? ids[u] : u) * size;
  }
};

struct TtRowsArgs {
  int left_columns, right_columns, rank;
  TtLeftValues left;
  const float* right;  // [V][right columns, rank]
  const int32_t *left_segments, *row_lefts, *row_rights;
  const int32_t *left_count, *right_count;
  const int32_t *right_segments, *right_rows;
  int64_t left_capacity, right_capacity, row_capacity;

  EMB_HD int64_t left_size() const { return int64_t{1} * left_columns * rank; }
  EMB_HD int64_t right_size() const { return int64_t{1} * right_columns * rank; }
  EMB_HD int64_t dim() const { return int64_t{1} * left_columns * right_columns; }
};

template <int kStep>
EMB_DEVICE float dot(const float* a, const float* b, int n) {
  float sum = 0.0f;
  for (int r = 0; r < n; r += kStep) {
    RowSlice<float, kStep> x, y;
    x.load_vector(a + r);
    y.load_vector(b + r);
#pragma unroll
    for (int k = 0; k < kStep; ++k) sum += x[k] * y[k];
  }
  return sum;
}

// rows[j][jl, jr] = sum over r of left[jl, r] * right[jr, r]; one warp per left half.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    tt_rows_kernel(TtRowsArgs args, float* rows) {
  const int lane = static_cast<int>(threadIdx.x % simt::kWarp);
  const int64_t dim = args.dim(), lefts = *args.left_count;
  const bool vectors =
      args.rank % 4 == 0 && is_aligned(args.left.data, 16) && is_aligned(args.right, 16);
  for (int64_t u = simt::global_warp(); u < lefts; u += simt::warps_in_grid()) {
    const float* left = args.left.at(u, args.left_size());
    for (int64_t j = args.left_segments[u]; j < args.left_segments[u + 1]; ++j) {
      const float* right = args.right + args.row_rights[j] * args.right_size();
      for (int o = lane; o < dim; o += static_cast<int>(simt::kWarp)) {
        const int row = o / args.right_columns;
        const float* a = left + int64_t{1} * row * args.rank;
        const float* b = right + int64_t{1} * (o - row * args.right_columns) * args.rank;
        float sum = 0.0f;
        if (vectors) {
          sum = dot<4>(a, b, args.rank);
        } else {
          for (int r = 0; r < args.rank; ++r) sum += a[r] * b[r];
        }
        rows[j * dim + o] = sum;
      }
    }
  }
}

// The elements of a result [columns, rank] that a lane owns in one pass: lane, lane + 32, ..
struct LaneElements {
  int64_t element[kElementsPerLane];
  int column[kElementsPerLane], inner[kElementsPerLane];
  bool inside[kElementsPerLane];

  EMB_DEVICE LaneElements(int64_t first, int64_t size, int rank) {
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) {
      element[i] = first + threadIdx.x % simt::kWarp + i * static_cast<int64_t>(simt::kWarp);
      inside[i] = element[i] < size;
      column[i] = inside[i] ? static_cast<int>(element[i] / rank) : 0;
      inner[i] = inside[i] ? static_cast<int>(element[i] % rank) : 0;
    }
  }
};

inline constexpr int64_t kPass = kElementsPerLane * static_cast<int64_t>(simt::kWarp);

// grads[u][jl, r] = sum over rows j of u and over jr of row_grads[j][jl, jr] * right[jr, r]; one
// warp per left half. With `ids` the result is written to the row of a core.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    left_grads_kernel(TtRowsArgs args, const float* row_grads, float* grads, const int32_t* ids) {
  const int64_t size = args.left_size(), dim = args.dim(), lefts = *args.left_count;
  for (int64_t u = simt::global_warp(); u < lefts; u += simt::warps_in_grid()) {
    float* out = grads + (ids != nullptr ? ids[u] : u) * size;
    const int64_t begin = args.left_segments[u], end = args.left_segments[u + 1];
    for (int64_t first = 0; first < size; first += kPass) {
      const LaneElements elements(first, size, args.rank);
      float sums[kElementsPerLane] = {};
      for (int64_t j = begin; j < end; ++j) {
        const float* right = args.right + args.row_rights[j] * args.right_size();
        const float* grad = row_grads + j * dim;
        for (int jr = 0; jr < args.right_columns; ++jr) {
#pragma unroll
          for (int i = 0; i < kElementsPerLane; ++i) {
            sums[i] += grad[elements.column[i] * args.right_columns + jr] *
                       right[jr * args.rank + elements.inner[i]];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kElementsPerLane; ++i) {
        if (elements.inside[i]) out[elements.element[i]] = sums[i];
      }
    }
  }
}

// A right half may be in any number of rows, so the rows are divided into chunks at multiples of
// kTtChunk. Chunk c of half v has slot v + c: this needs no scan, and no two chunks share a slot.
inline constexpr int64_t kTtChunk = 64;

EMB_HD int64_t tt_slots(int64_t rights, int64_t rows) { return rights + rows / kTtChunk + 1; }

// partials[slot][jr, r] = sum over the rows j of the chunk and over jl of
// row_grads[j][jl, jr] * left[jl, r]; one warp per slot and pass.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    right_partials_kernel(TtRowsArgs args, const float* row_grads, float* partials) {
  const int64_t size = args.right_size(), dim = args.dim();
  const int rights = *args.right_count;
  const int64_t passes = (size + kPass - 1) / kPass;
  const int64_t work = rights == 0 ? 0 : tt_slots(rights, args.right_segments[rights]) * passes;
  for (int64_t w = simt::global_warp(); w < work; w += simt::warps_in_grid()) {
    const int64_t slot = w / passes;
    int low = 0, high = rights - 1;  // the last half whose first slot is <= slot
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (middle + args.right_segments[middle] / kTtChunk <= slot) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t chunk = slot - low;
    const int64_t segment = args.right_segments[low], segment_end = args.right_segments[low + 1];
    const int64_t begin = segment > chunk * kTtChunk ? segment : chunk * kTtChunk;
    const int64_t last = (chunk + 1) * kTtChunk, end = segment_end < last ? segment_end : last;
    if (begin >= end) continue;
    const LaneElements elements((w - slot * passes) * kPass, size, args.rank);
    float sums[kElementsPerLane] = {};
    for (int64_t t = begin; t < end; ++t) {
      const int64_t j = args.right_rows[t];
      const float* left = args.left.at(args.row_lefts[j], args.left_size());
      const float* grad = row_grads + j * dim;
      for (int jl = 0; jl < args.left_columns; ++jl) {
#pragma unroll
        for (int i = 0; i < kElementsPerLane; ++i) {
          sums[i] += grad[jl * args.right_columns + elements.column[i]] *
                     left[jl * args.rank + elements.inner[i]];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) {
      if (elements.inside[i]) partials[slot * size + elements.element[i]] = sums[i];
    }
  }
}

// grads[v] = sum of the chunks of v, in order.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    right_sums_kernel(TtRowsArgs args, const float* partials, float* grads) {
  const int64_t size = args.right_size(), work = *args.right_count * size;
  for (int64_t e = simt::global_thread(); e < work; e += simt::threads_in_grid()) {
    const int64_t v = e / size;
    const int64_t first = v + args.right_segments[v] / kTtChunk;
    const int64_t last = v + (args.right_segments[v + 1] - 1) / kTtChunk;
    float sum = 0.0f;
    for (int64_t slot = first; slot <= last; ++slot) sum += partials[slot * size + e - v * size];
    grads[e] = sum;
  }
}

// Reverses the axes of rows: row from_ids[i] of `from`, or i, becomes row to_ids[i] of `to`, or i;
// one thread per element.
struct TtReverseArgs {
  const float* from;                         // [..][a, q, b]
  float* to;                                 // [..][b, q, a]
  const int32_t *from_ids, *to_ids, *count;  // count: number of rows; if null, `rows`
  int64_t rows, a, q, b;
};

[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    reverse_kernel(TtReverseArgs args) {
  const int64_t size = args.a * args.q * args.b;
  const int64_t rows = args.count != nullptr ? *args.count : args.rows;
  for (int64_t e = simt::global_thread(); e < rows * size; e += simt::threads_in_grid()) {
    const int64_t row = e / size, element = e - row * size;
    const int64_t ai = element % args.a, j = element / args.a % args.q;
    const int64_t bi = element / (args.a * args.q);
    const int64_t from = args.from_ids != nullptr ? args.from_ids[row] : row;
    const int64_t to = args.to_ids != nullptr ? args.to_ids[row] : row;
    args.to[to * size + element] = args.from[from * size + (ai * args.q + j) * args.b + bi];
  }
}

template <class Launcher>
void launch_reverse(const Launcher& launcher, const TtReverseArgs& args) {
  const int64_t work = args.rows * args.a * args.q * args.b;
  launcher(reverse_kernel, blocks_for(work, kRowThreads, launcher.blocks(32)), kRowThreads, args);
}

inline constexpr int kRowWarps = kRowThreads / static_cast<int>(simt::kWarp);

template <class Launcher>
void launch_tt_rows(const Launcher& launcher, const TtRowsArgs& args, float* rows) {
  launcher(tt_rows_kernel, blocks_for(args.left_capacity, kRowWarps, launcher.blocks(64)),
           kRowThreads, args, rows);
}

// `partials` is scratch, [tt_slots(right_capacity, row_capacity)][right_size].
template <class Launcher>
void launch_value_grads(const Launcher& launcher, const TtRowsArgs& args, const float* row_grads,
                        float* left_grads, const int32_t* left_ids, float* partials,
                        float* right_grads) {
  launcher(left_grads_kernel, blocks_for(args.left_capacity, kRowWarps, launcher.blocks(64)),
           kRowThreads, args, row_grads, left_grads, left_ids);
  const int64_t slots = tt_slots(args.right_capacity, args.row_capacity);
  const int64_t passes = (args.right_size() + kPass - 1) / kPass;
  launcher(right_partials_kernel, blocks_for(slots * passes, kRowWarps, launcher.blocks(64)),
           kRowThreads, args, row_grads, partials);
  launcher(right_sums_kernel,
           blocks_for(args.right_capacity * args.right_size(), kRowThreads, launcher.blocks(32)),
           kRowThreads, args, static_cast<const float*>(partials), right_grads);
}

}  // namespace emb::cuda
