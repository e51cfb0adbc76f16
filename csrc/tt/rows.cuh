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

// A row of floats per half: of a buffer, or, with ids, of a core.
template <class Float>
struct TtHalfRows {
  Float* data;
  const int32_t* ids;
  int64_t first_id;  // of the table
  int64_t stride;    // floats between rows

  EMB_DEVICE Float* at(int64_t u) const {
    return data + (ids != nullptr ? ids[u] - first_id : u) * stride;
  }
};

// Rows of a core or of a buffer, in the dtype in which they are stored, read as floats.
struct TtStoredRows {
  const void* data;
  Dtype type;
  const int32_t* ids;  // null: row u is that of half u
  int64_t first_id;    // of the table
  int64_t stride;      // elements between rows

  EMB_DEVICE float at(int64_t u, int64_t element) const {
    const int64_t i = (ids != nullptr ? ids[u] - first_id : u) * stride + element;
    if (type == Dtype::kFloat) return static_cast<const float*>(data)[i];
    if (type == Dtype::kHalf) return to_float(static_cast<const half16*>(data)[i]);
    return to_float(static_cast<const bfloat16*>(data)[i]);
  }
};

// One table of a batch. Numbers of rows and halves are those of all tables; the ranges of this one
// are known on the device only.
struct TtRowsArgs {
  int left_columns, right_columns, rank;
  TtHalfRows<const float> left;
  const float* right;  // [V][right_stride], of which [right columns, rank] are used
  int64_t right_stride;
  int64_t row_stride;  // floats between rows and between their gradients
  const int32_t *left_segments, *row_lefts, *row_rights;
  const int32_t *left_range, *right_range;
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
  const int64_t dim = args.dim(), last = args.left_range[1];
  const bool vectors = args.rank % 4 == 0 && args.left.stride % 4 == 0 &&
                       args.right_stride % 4 == 0 && is_aligned(args.left.data, 16) &&
                       is_aligned(args.right, 16);
  for (int64_t u = args.left_range[0] + simt::global_warp(); u < last; u += simt::warps_in_grid()) {
    const float* left = args.left.at(u);
    for (int64_t j = args.left_segments[u]; j < args.left_segments[u + 1]; ++j) {
      const float* right = args.right + args.row_rights[j] * args.right_stride;
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
        rows[j * args.row_stride + o] = sum;
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
// warp per left half. With ids the results are rows of a core's gradient.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads, 6)
    left_grads_kernel(TtRowsArgs args, const float* row_grads, TtHalfRows<float> grads) {
  const int64_t size = args.left_size(), last = args.left_range[1];
  for (int64_t u = args.left_range[0] + simt::global_warp(); u < last; u += simt::warps_in_grid()) {
    float* out = grads.at(u);
    const int64_t begin = args.left_segments[u], end = args.left_segments[u + 1];
    for (int64_t first = 0; first < size; first += kPass) {
      const LaneElements elements(first, size, args.rank);
      float sums[kElementsPerLane] = {};
      for (int64_t j = begin; j < end; ++j) {
        const float* right = args.right + args.row_rights[j] * args.right_stride;
        const float* grad = row_grads + j * args.row_stride;
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
// kTtChunk, counted from the first row of the table. Chunk c of half number v of the table has slot
// v + c: this needs no scan, and no two chunks share a slot.
inline constexpr int64_t kTtChunk = 64;

EMB_HD int64_t tt_slots(int64_t rights, int64_t rows) { return rights + rows / kTtChunk + 1; }

// partials[slot][jr, r] = sum over the rows j of the chunk and over jl of
// row_grads[j][jl, jr] * left[jl, r]; one warp per slot and pass.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    right_partials_kernel(TtRowsArgs args, const float* row_grads, float* partials) {
  const int64_t size = args.right_size();
  const int first_right = args.right_range[0], rights = args.right_range[1] - first_right;
  const int32_t* segments = args.right_segments + first_right;
  const int64_t first_row = segments[0];
  const int64_t passes = (size + kPass - 1) / kPass;
  const int64_t work = rights == 0 ? 0 : tt_slots(rights, segments[rights] - first_row) * passes;
  for (int64_t w = simt::global_warp(); w < work; w += simt::warps_in_grid()) {
    const int64_t slot = w / passes;
    int low = 0, high = rights - 1;  // the last half whose first slot is <= slot
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (middle + (segments[middle] - first_row) / kTtChunk <= slot) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const int64_t chunk = slot - low;
    const int64_t segment = segments[low] - first_row, segment_end = segments[low + 1] - first_row;
    const int64_t begin = segment > chunk * kTtChunk ? segment : chunk * kTtChunk;
    const int64_t last = (chunk + 1) * kTtChunk, end = segment_end < last ? segment_end : last;
    if (begin >= end) continue;
    const LaneElements elements((w - slot * passes) * kPass, size, args.rank);
    float sums[kElementsPerLane] = {};
    for (int64_t t = begin; t < end; ++t) {
      const int64_t j = args.right_rows[first_row + t];
      const float* left = args.left.at(args.row_lefts[j]);
      const float* grad = row_grads + j * args.row_stride;
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
  const int64_t size = args.right_size();
  const int first_right = args.right_range[0];
  const int32_t* segments = args.right_segments + first_right;
  const int64_t work = (args.right_range[1] - first_right) * size, first_row = segments[0];
  for (int64_t e = simt::global_thread(); e < work; e += simt::threads_in_grid()) {
    const int64_t v = e / size, element = e - v * size;
    const int64_t first = v + (segments[v] - first_row) / kTtChunk;
    const int64_t last = v + (segments[v + 1] - 1 - first_row) / kTtChunk;
    float sum = 0.0f;
    for (int64_t slot = first; slot <= last; ++slot) sum += partials[slot * size + element];
    grads[(first_right + v) * args.right_stride + element] = sum;
  }
}

// Reverses the axes of rows, those in `range` or all `rows`; one thread per element.
struct TtReverseArgs {
  TtStoredRows from;     // [..][a, q, b]
  TtHalfRows<float> to;  // [..][b, q, a]
  const int32_t* range;  // of the rows; if null, all
  int64_t rows, a, q, b;
};

[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    reverse_kernel(TtReverseArgs args) {
  const int64_t size = args.a * args.q * args.b;
  const int64_t first = args.range != nullptr ? args.range[0] : 0;
  const int64_t rows = args.range != nullptr ? args.range[1] - first : args.rows;
  for (int64_t e = simt::global_thread(); e < rows * size; e += simt::threads_in_grid()) {
    const int64_t row = e / size, element = e - row * size;
    const int64_t ai = element % args.a, j = element / args.a % args.q;
    const int64_t bi = element / (args.a * args.q);
    args.to.at(first + row)[element] = args.from.at(first + row, (ai * args.q + j) * args.b + bi);
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
                        const TtHalfRows<float>& left_grads, float* partials, float* right_grads) {
  launcher(left_grads_kernel, blocks_for(args.left_capacity, kRowWarps, launcher.blocks(64)),
           kRowThreads, args, row_grads, left_grads);
  const int64_t slots = tt_slots(args.right_capacity, args.row_capacity);
  const int64_t passes = (args.right_size() + kPass - 1) / kPass;
  launcher(right_partials_kernel, blocks_for(slots * passes, kRowWarps, launcher.blocks(64)),
           kRowThreads, args, row_grads, partials);
  launcher(right_sums_kernel,
           blocks_for(args.right_capacity * args.right_size(), kRowThreads, launcher.blocks(32)),
           kRowThreads, args, static_cast<const float*>(partials), right_grads);
}

}  // namespace emb::cuda
