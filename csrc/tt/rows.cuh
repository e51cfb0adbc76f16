// Rows from the values of their halves on the GPU, and the gradients of those values. A row is left
// [Ql, rank] times right [Qr, rank]; a warp takes the rows of one half, which lie side by side as
// columns of one product. Each operand is read once, by the lanes that multiply it, so that shared
// memory would save nothing: lanes load four neighbours at once from global memory, and the order
// of k on the tensor cores is that in which they have them.
//
// On tensor cores run rows and the gradients of left halves, for ranks (and, for gradients, right
// columns) that are multiples of four; other shapes run on `tt_rows_kernel` and
// `left_grads_kernel`, whose lanes own elements of the result. The choice depends on the shape of
// the table alone: a table has the same bits in every batch. The gradients of right halves are not
// worth it: they read about a byte per multiplication (docs/cuda_performance.md).
#pragma once

#include "core/codes.h"
#include "core/mma.cuh"
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

  // Return whether rows, and whether the gradients of left halves, run on tensor cores.
  EMB_HD bool has_mma_rows() const { return rank % 4 == 0; }
  EMB_HD bool has_mma_grads() const { return rank % 4 == 0 && right_columns % 4 == 0; }
  // Return whether four neighbours along the rank can be loaded at once.
  EMB_DEVICE bool has_vectors() const {
    return rank % 4 == 0 && left.stride % 4 == 0 && right_stride % 4 == 0 &&
           is_aligned(left.data, 16) && is_aligned(right, 16);
  }
};

// Load four neighbours, zeros if not `inside`.
EMB_DEVICE void load_four(const float* address, bool inside, bool vectors, float (&x)[4]) {
  RowSlice<float, 4> slice;
  if (inside) {
    if (vectors) {
      slice.load_vector(address);
    } else {
      slice.load_scalar(address, 4);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = slice[i];
}

EMB_DEVICE void store_four(float* address, bool vectors, const float (&x)[4]) {
  if (vectors) {
    *reinterpret_cast<simt::Pack16*>(address) = {
        {float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])}};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) address[i] = x[i];
}

// Where the lane's elements of a fragment are, see core/mma.cuh.
struct FragmentLane {
  int row = static_cast<int>(threadIdx.x % simt::kWarp) / 4;
  int column = static_cast<int>(threadIdx.x % simt::kWarp) % 4;
};

inline constexpr int kFragmentM = 16;  // left columns of a warp
inline constexpr int kFragments = 4;   // of 8 columns each: what a warp computes at once

// The left columns that a warp computes: 16 of them.
struct LeftColumns {
  int first;
  bool has_low, has_high;  // whether the lane's two rows of a fragment exist

  EMB_DEVICE LeftColumns(const TtRowsArgs& args, int64_t number, const FragmentLane& lane)
      : first(static_cast<int>(number) * kFragmentM),
        has_low(first + lane.row < args.left_columns),
        has_high(first + lane.row + 8 < args.left_columns) {}

  // Load four neighbours of the lane's two lines of a matrix [left columns, width].
  EMB_DEVICE void load(const float* matrix, int64_t width, int64_t element, bool inside,
                       bool vectors, const FragmentLane& lane, float (&low)[4],
                       float (&high)[4]) const {
    const float* line = matrix + (first + lane.row) * width + element;
    load_four(line, inside && has_low, vectors, low);
    load_four(line + 8 * width, inside && has_high, vectors, high);
  }
};

EMB_HD int fragments_of(int64_t columns) {
  return static_cast<int>((columns + kFragmentM - 1) / kFragmentM);
}

// rows[j][jl, jr] = sum over r of left[jl, r] * right[jr, r]; one warp per left half and 16 left
// columns. The columns of the product are the right columns of all rows.
template <class Products>
__global__ void __launch_bounds__(kRowThreads, 5) mma_rows_kernel(TtRowsArgs args, float* rows) {
  const FragmentLane lane;
  const int rank = args.rank, right_columns = args.right_columns;
  const int fragments = fragments_of(args.left_columns);
  const int64_t first = args.left_range[0], work = (args.left_range[1] - first) * fragments;
  const bool vectors = args.has_vectors();
  for (int64_t w = simt::global_warp(); w < work; w += simt::warps_in_grid()) {
    const int64_t u = first + w / fragments;
    const LeftColumns columns(args, w % fragments, lane);
    const float* left = args.left.at(u);
    const int64_t end = args.left_segments[u + 1];
    int64_t row = args.left_segments[u];  // of the first column
    int offset = 0;                       // of the first column within its row
    while (row < end) {
      // A column is `i` columns after the first; return its row, and its number there in `i`.
      const auto row_of = [&](int* i) {
        const auto n = static_cast<unsigned>(offset + *i);
        const unsigned rows_on = n / static_cast<unsigned>(right_columns);
        *i = static_cast<int>(n - rows_on * static_cast<unsigned>(right_columns));
        return row + static_cast<int64_t>(rows_on);
      };
      const int64_t rest = (end - row) * right_columns - offset;  // columns
      const float* right[kFragments];
      bool has_column[kFragments];
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        has_column[i] = i * 8 + lane.row < rest;
        int column = i * 8 + lane.row;
        const int64_t j = row_of(&column), v = has_column[i] ? args.row_rights[j] : 0;
        right[i] = args.right + v * args.right_stride + int64_t{1} * column * rank;
      }
      float sums[kFragments][4] = {};
      for (int k0 = 0; k0 < rank; k0 += 16) {
        const int k = k0 + lane.column * 4;
        float low[4], high[4], x[kFragments][4];
        columns.load(left, rank, k, k < rank, vectors, lane, low, high);
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
          load_four(right[i] + k, k < rank && has_column[i], vectors, x[i]);
        }
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const float of_left[4] = {low[e], high[e], low[e + 1], high[e + 1]};
          const typename Products::A a(of_left);
#pragma unroll
          for (int i = 0; i < kFragments; ++i) {
            if (i > 0 && i * 8 >= rest) break;
            const float of_right[2] = {x[i][e], x[i][e + 1]};
            Products::multiply_add(sums[i], a, typename Products::B(of_right));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kFragments * 2; ++i) {
        int column = i / 2 * 8 + lane.column * 2 + i % 2;
        const int64_t j = row_of(&column);
        if (j >= end) continue;
        float* out = rows + j * args.row_stride +
                     int64_t{1} * (columns.first + lane.row) * right_columns + column;
        if (columns.has_low) out[0] = sums[i / 2][i % 2];
        if (columns.has_high) out[int64_t{8} * right_columns] = sums[i / 2][2 + i % 2];
      }
      offset += kFragments * 8;
      row += offset / right_columns;
      offset %= right_columns;
    }
  }
}

// grads[u][jl, r] = sum over rows j of u and over jr of row_grads[j][jl, jr] * right[jr, r]; one
// warp per left half, 16 left columns and 32 columns of the rank. Four neighbours jr of a row are
// a quad; lane column c has every fourth quad, from c on. Column n of fragment i is 4 n + i.
template <class Products>
__global__ void __launch_bounds__(kRowThreads, 5)
    mma_left_grads_kernel(TtRowsArgs args, const float* row_grads, TtHalfRows<float> grads) {
  const FragmentLane lane;
  const int rank = args.rank, quads = args.right_columns / 4;
  const int fragments = fragments_of(args.left_columns), parts = (rank + 31) / 32;
  const int64_t first = args.left_range[0];
  const int64_t work = (args.left_range[1] - first) * fragments * parts;
  const bool vectors = args.has_vectors();
  const bool has_grad_vectors = args.row_stride % 4 == 0 && is_aligned(row_grads, 16);
  for (int64_t w = simt::global_warp(); w < work; w += simt::warps_in_grid()) {
    const int64_t number = w / parts, u = first + number / fragments;
    const int r0 = static_cast<int>(w % parts) * 32;
    const LeftColumns columns(args, number % fragments, lane);
    const int64_t begin = args.left_segments[u], end = args.left_segments[u + 1];
    const bool has_rank = r0 + lane.row * 4 < rank;
    float sums[kFragments][4] = {};
    int64_t row = begin + lane.column / quads;
    int quad = lane.column % quads;
    for (int64_t left_over = (end - begin) * quads; left_over > 0; left_over -= 4) {
      const bool inside = row < end;
      float low[4], high[4], x[4][4];
      columns.load(row_grads + row * args.row_stride, args.right_columns, quad * 4, inside,
                   has_grad_vectors, lane, low, high);
      const int64_t v = inside ? args.row_rights[row] : 0;
      const float* right = args.right + v * args.right_stride + r0 + lane.row * 4;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        load_four(right + (int64_t{4} * quad + e) * rank, inside && has_rank, vectors, x[e]);
      }
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const float of_grads[4] = {low[e], high[e], low[e + 1], high[e + 1]};
        const typename Products::A a(of_grads);
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
          const float of_right[2] = {x[e][i], x[e + 1][i]};
          Products::multiply_add(sums[i], a, typename Products::B(of_right));
        }
      }
      quad += 4;
      row += quad / quads;
      quad %= quads;
    }
    float* out = grads.at(u);
    const bool has_out_vectors = grads.stride % 4 == 0 && is_aligned(grads.data, 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // the lane's row of the fragment, then its column
      const int r = r0 + lane.column * 8 + i % 2 * 4;
      if (r >= rank || !(i < 2 ? columns.has_low : columns.has_high)) continue;
      const float values[4] = {sums[0][i], sums[1][i], sums[2][i], sums[3][i]};
      float* line = out + int64_t{1} * (columns.first + lane.row + i / 2 * 8) * rank + r;
      store_four(line, has_out_vectors, values);
    }
  }
}

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

// The elements of a result [columns, rank] that a lane owns in one pass: lane, lane + 32, .., or
// four neighbours.
struct LaneElements {
  int64_t element[kElementsPerLane];
  int column[kElementsPerLane], inner[kElementsPerLane];
  bool inside[kElementsPerLane];

  EMB_DEVICE LaneElements(int64_t first, int64_t size, int rank, bool neighbours = false) {
    const int lane = static_cast<int>(threadIdx.x % simt::kWarp);
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) {
      const int own =
          neighbours ? lane * kElementsPerLane + i : lane + i * static_cast<int>(simt::kWarp);
      element[i] = first + own;
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
// row_grads[j][jl, jr] * left[jl, r]; one warp per slot and pass. With kVectors the four elements
// of a lane are neighbours along the rank; sums have the same bits.
template <bool kVectors>
__global__ void __launch_bounds__(kRowThreads)
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
    const LaneElements elements((w - slot * passes) * kPass, size, args.rank, kVectors);
    float sums[kElementsPerLane] = {};
    for (int64_t t = begin; t < end; ++t) {
      const int64_t j = args.right_rows[first_row + t];
      const float* left = args.left.at(args.row_lefts[j]);
      const float* grad = row_grads + j * args.row_stride;
#pragma unroll 4
      for (int jl = 0; jl < args.left_columns; ++jl) {
        const float* line = left + int64_t{1} * jl * args.rank;
        const float* grad_line = grad + int64_t{1} * jl * args.right_columns;
        if constexpr (kVectors) {
          float x[4];
          load_four(line + elements.inner[0], true, true, x);
          const float scale = grad_line[elements.column[0]];
#pragma unroll
          for (int i = 0; i < 4; ++i) sums[i] += scale * x[i];
        } else {
#pragma unroll
          for (int i = 0; i < kElementsPerLane; ++i) {
            sums[i] += grad_line[elements.column[i]] * line[elements.inner[i]];
          }
        }
      }
    }
    if constexpr (kVectors) {
      if (elements.inside[0]) store_four(partials + slot * size + elements.element[0], true, sums);
    } else {
#pragma unroll
      for (int i = 0; i < kElementsPerLane; ++i) {
        if (elements.inside[i]) partials[slot * size + elements.element[i]] = sums[i];
      }
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
void launch_tt_rows(const Launcher& launcher, MatmulPrecision precision, const TtRowsArgs& args,
                    float* rows) {
  const int64_t warps = args.left_capacity * fragments_of(args.left_columns);
  const unsigned grid = blocks_for(warps, kRowWarps, launcher.blocks(64));
  if (!args.has_mma_rows()) return launcher(tt_rows_kernel, grid, kRowThreads, args, rows);
  with_products(precision, [&](auto products) {
    launcher(mma_rows_kernel<decltype(products)>, grid, kRowThreads, args, rows);
  });
}

template <class Launcher>
void launch_left_grads(const Launcher& launcher, MatmulPrecision precision, const TtRowsArgs& args,
                       const float* row_grads, const TtHalfRows<float>& grads) {
  const int64_t warps = args.left_capacity * fragments_of(args.left_columns);
  const unsigned grid = blocks_for(warps, kRowWarps, launcher.blocks(64));
  if (!args.has_mma_grads()) {
    return launcher(left_grads_kernel, grid, kRowThreads, args, row_grads, grads);
  }
  with_products(precision, [&](auto products) {
    launcher(mma_left_grads_kernel<decltype(products)>, grid, kRowThreads, args, row_grads, grads);
  });
}

// `partials` is scratch, [tt_slots(right_capacity, row_capacity)][right_size].
template <class Launcher>
void launch_right_grads(const Launcher& launcher, const TtRowsArgs& args, const float* row_grads,
                        float* partials, float* grads) {
  const int64_t slots = tt_slots(args.right_capacity, args.row_capacity);
  const int64_t passes = (args.right_size() + kPass - 1) / kPass;
  const bool vectors = args.rank % 4 == 0 && args.left.stride % 4 == 0 &&
                       is_aligned(args.left.data, 16) && is_aligned(partials, 16);
  launcher(vectors ? right_partials_kernel<true> : right_partials_kernel<false>,
           blocks_for(slots * passes, kRowWarps, launcher.blocks(64)), kRowThreads, args, row_grads,
           partials);
  launcher(right_sums_kernel,
           blocks_for(args.right_capacity * args.right_size(), kRowThreads, launcher.blocks(32)),
           kRowThreads, args, static_cast<const float*>(partials), grads);
}

}  // namespace emb::cuda
