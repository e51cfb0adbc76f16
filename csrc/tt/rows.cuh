// Rows from the values of their halves on the GPU, and the gradients of the values of left halves
// (those of right halves are in right_grads.cuh).
//
// A row is left [Ql, rank] times right [Qr, rank]. A warp computes the rows of one left half, side
// by side as columns of one product. In a warp an element is read only by the lane that multiplies
// it, so shared memory would save nothing. Lanes load four neighbours at once from global memory,
// and the tensor cores process k in the order in which lanes have loaded it. Tables whose shape
// does not suit tensor cores (TtTableRows::has_mma_rows, has_mma_grads) run on plain kernels.
//
// One launch serves the halves of all tables, whatever their shapes: a warp looks up the table of
// its half in the plan's `starts` and reads the table's arguments from device memory.
#pragma once

#include "core/codes.h"
#include "core/mma.cuh"
#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"
#include "tt/args.h"

namespace emb::cuda {

inline constexpr int kRowThreads = 128;  // threads per block of all kernels of this file
// Blocks per multiprocessor bound the registers of a thread: 5 leave 96, 6 leave 80.
inline constexpr int kMmaBlocksPerSm = 5, kLeftGradBlocksPerSm = 6;
inline constexpr int kElementsPerLane = 4;  // elements of a result that a lane keeps in registers

// A row of floats per left half. If `ids` is null, half u has row u of a buffer; else it has the
// row of a core that its id within the table selects.
template <class Float>
struct TtHalfRows {
  Float* data;
  const int32_t* ids;  // ids of all left halves, or null
  int64_t first_id;    // first id of the table
  int64_t stride;      // floats between rows

  // Return the row of left half u of all tables.
  EMB_DEVICE Float* at(int64_t u) const {
    return data + (ids != nullptr ? ids[u] - first_id : u) * stride;
  }
};

// A table of a batch, in device memory.
struct TtTableRows {
  int left_columns, right_columns, rank;
  bool has_pair;     // the left half is a pair; else its values are rows of the first core
  bool has_vectors;  // four neighbours along the rank of values can be loaded at once
  int32_t first_left, first_right;  // the first ids of the table
  const float* left;                // values of left halves, or the first core
  float* left_grads;                // gradients of `left`; null in a forward pass
  int64_t left_stride;              // floats between the rows of `left` and of `left_grads`
  const void* last_core;  // [rank, right columns] per id of a right half; null if that is a pair
  float* last_grads;      // its gradients; null in a forward pass

  EMB_HD int64_t left_size() const { return int64_t{1} * left_columns * rank; }
  EMB_HD int64_t right_size() const { return int64_t{1} * right_columns * rank; }
  EMB_HD int64_t dim() const { return int64_t{1} * left_columns * right_columns; }

  // Return whether rows, and whether the gradients of left halves, are computed on tensor cores.
  // Other tables run on tt_rows_kernel and left_grads_kernel, in which a lane computes elements of
  // the result. A batch of both launches both kernels, each of which skips the tables of the other.
  // The choice depends on the shape alone, so that a table has the same bits in every batch.
  EMB_HD bool has_mma_rows() const { return rank % 4 == 0; }
  EMB_HD bool has_mma_grads() const { return rank % 4 == 0 && right_columns % 4 == 0; }
};

// Return the table of row or half `item` of all tables; `starts`, [tables], has the first row or
// half of each table. All lanes of a warp call this.
EMB_DEVICE int table_of(const int32_t* starts, int tables, int64_t item) {
  if (tables == 1) return 0;
  return warp_search([&](int t) { return int64_t{starts[t]}; }, tables, item);
}

// All tables of a batch; pointers are to device memory. Rows and halves are numbered over all
// tables; how many there are is known on the device only.
struct TtDeviceRowsArgs {
  const TtTableRows* tables;  // [T]
  TtPlan plan;
  const float* right;    // [V][right_stride] values of right halves: [right columns, rank] each
  int64_t right_stride;  // floats
  int64_t row_stride;    // floats between rows and between their gradients
  // Maxima over the tables: groups of 16 left columns, groups of 32 columns of the rank.
  int max_fragments, max_parts;

  EMB_HD int num_tables() const { return static_cast<int>(plan.tables); }
  EMB_DEVICE int64_t lefts() const { return plan.left_starts()[plan.tables]; }
  EMB_DEVICE int64_t rights() const { return plan.right_starts()[plan.tables]; }
  EMB_DEVICE int64_t rows() const { return plan.row_starts()[plan.tables]; }

  // Return the table of a left half, and of a right one. All lanes of a warp call this.
  EMB_DEVICE const TtTableRows& table_of_left(int64_t u) const {
    return tables[table_of(plan.left_starts(), num_tables(), u)];
  }
  EMB_DEVICE const TtTableRows& table_of_right(int64_t v) const {
    return tables[table_of(plan.right_starts(), num_tables(), v)];
  }
  // Return the values of left halves of a table, and their gradients.
  EMB_DEVICE TtHalfRows<const float> left_of(const TtTableRows& table) const {
    return {table.left, table.has_pair ? nullptr : plan.lefts, table.first_left, table.left_stride};
  }
  EMB_DEVICE TtHalfRows<float> left_grads_of(const TtTableRows& table) const {
    return {table.left_grads, table.has_pair ? nullptr : plan.lefts, table.first_left,
            table.left_stride};
  }
};

// Load four neighbours, zeros if not `inside`. `uses_vectors`: `address` is a multiple of 16 bytes.
EMB_DEVICE void load_four(const float* address, bool inside, bool uses_vectors, float (&x)[4]) {
  RowSlice<float, 4> slice;
  if (inside) {
    if (uses_vectors) {
      slice.load_vector(address);
    } else {
      slice.load_scalar(address, 4);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = slice[i];
}

// Return an element of `data`, an array of dtype `type`.
EMB_DEVICE float read_float(const void* data, Dtype type, int64_t element) {
  if (type == Dtype::kFloat) return static_cast<const float*>(data)[element];
  if (type == Dtype::kHalf) return to_float(static_cast<const half16*>(data)[element]);
  return to_float(static_cast<const bfloat16*>(data)[element]);
}

// Store four neighbours. `uses_vectors`: `address` is a multiple of 16 bytes.
EMB_DEVICE void store_four(float* address, bool uses_vectors, const float (&x)[4]) {
  if (uses_vectors) {
    *reinterpret_cast<simt::Pack16*>(address) = {
        {float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])}};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) address[i] = x[i];
}

// The lane's row and column of a fragment, see core/mma.cuh.
struct FragmentLane {
  int row = static_cast<int>(threadIdx.x % simt::kWarpLanes) / 4;
  int column = static_cast<int>(threadIdx.x % simt::kWarpLanes) % 4;
};

inline constexpr int kFragmentM = 16;  // left columns of a warp
inline constexpr int kFragments = 4;   // fragments of 8 columns that a warp computes at once

// The left columns that a warp computes: 16 of them, the rows of a fragment, of which a lane has
// two.
struct LeftColumns {
  int first;
  bool has_low, has_high;  // whether the lane's two left columns exist

  // Take group `group` of 16 of `left_columns` columns.
  EMB_DEVICE LeftColumns(int left_columns, int64_t group, const FragmentLane& lane)
      : first(static_cast<int>(group) * kFragmentM),
        has_low(first + lane.row < left_columns),
        has_high(first + lane.row + 8 < left_columns) {}

  // Load four neighbours, from `element` on, of the lane's two lines of a matrix [left columns,
  // width]; zeros if not `inside` or if a line does not exist.
  EMB_DEVICE void load(const float* matrix, int64_t width, int64_t element, bool inside,
                       bool uses_vectors, const FragmentLane& lane, float (&low)[4],
                       float (&high)[4]) const {
    const float* line = matrix + (first + lane.row) * width + element;
    load_four(line, inside && has_low, uses_vectors, low);
    load_four(line + 8 * width, inside && has_high, uses_vectors, high);
  }
};

// Return the number of groups of 16 left columns.
EMB_HD int fragments_of(int64_t columns) {
  return static_cast<int>((columns + kFragmentM - 1) / kFragmentM);
}

// rows[j][jl, jr] = sum over r of left[jl, r] * right[jr, r]. A warp takes a left half,
// grid-stride, and 16 left columns, group first_fragment + blockIdx.y of them. The columns of the
// product are the right columns of all rows of the half.
template <class Products>
__global__ void __launch_bounds__(kRowThreads, kMmaBlocksPerSm)
    mma_rows_kernel(TtDeviceRowsArgs args, int first_fragment, float* rows) {
  const FragmentLane lane;
  const int group = first_fragment + static_cast<int>(blockIdx.y);
  const auto last = static_cast<unsigned>(args.lefts());
  const auto step = static_cast<unsigned>(simt::warps_in_grid());
  for (auto u = static_cast<unsigned>(simt::global_warp()); u < last; u += step) {
    const TtTableRows& table = args.table_of_left(u);
    if (group >= fragments_of(table.left_columns) || !table.has_mma_rows()) continue;
    const int rank = table.rank, right_columns = table.right_columns;
    const bool uses_vectors = table.has_vectors;
    const float* left = args.left_of(table).at(u);
    const int end = args.plan.left_segments[u + 1];
    const LeftColumns columns(table.left_columns, group, lane);
    int row = args.plan.left_segments[u];  // row of the first column
    int offset = 0;                        // offset of the first column within its row
    while (row < end) {
      // A column is `i` columns after the first; return its row, and write its number within that
      // row to `i`.
      const auto row_of = [&](int* i) {
        const auto n = static_cast<unsigned>(offset + *i);
        const unsigned rows_ahead = n / static_cast<unsigned>(right_columns);
        *i = static_cast<int>(n - rows_ahead * static_cast<unsigned>(right_columns));
        return row + static_cast<int>(rows_ahead);
      };
      const int64_t remaining_columns = int64_t{end - row} * right_columns - offset;
      constexpr int kMaxColumns = kFragments * 8;
      const int num_columns =
          remaining_columns < kMaxColumns ? static_cast<int>(remaining_columns) : kMaxColumns;
      const float* right[kFragments];
      bool has_column[kFragments];
#pragma unroll
      for (int i = 0; i < kFragments; ++i) {
        has_column[i] = i * 8 + lane.row < num_columns;
        int column = i * 8 + lane.row;
        const int j = row_of(&column), v = has_column[i] ? args.plan.row_rights[j] : 0;
        right[i] = args.right + v * args.right_stride + int64_t{1} * column * rank;
      }
      float sums[kFragments][4] = {};
      for (int k0 = 0; k0 < rank; k0 += 16) {
        const int k = k0 + lane.column * 4;
        float low[4], high[4], x[kFragments][4];
        columns.load(left, rank, k, k < rank, uses_vectors, lane, low, high);
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
          load_four(right[i] + k, k < rank && has_column[i], uses_vectors, x[i]);
        }
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
          const float of_left[4] = {low[e], high[e], low[e + 1], high[e + 1]};
          const typename Products::A a(of_left);
#pragma unroll
          for (int i = 0; i < kFragments; ++i) {
            if (i > 0 && i * 8 >= num_columns) break;
            const float of_right[2] = {x[i][e], x[i][e + 1]};
            Products::multiply_add(sums[i], a, typename Products::B(of_right));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kFragments * 2; ++i) {
        int column = i / 2 * 8 + lane.column * 2 + i % 2;
        const int j = row_of(&column);
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

// grads[u][jl, r] = sum over rows j of u and over jr of row_grads[j][jl, jr] * right[jr, r]. A warp
// computes 16 left columns and 32 columns of the rank of a left half, grid-stride. Four neighbours
// jr of a row are a quad; lane column c reads every fourth quad, from quad c on. Column n of
// fragment i is column 4 n + i of the 32.
template <class Products>
__global__ void __launch_bounds__(kRowThreads, kMmaBlocksPerSm)
    mma_left_grads_kernel(TtDeviceRowsArgs args, const float* row_grads) {
  const FragmentLane lane;
  const int64_t work = args.lefts() * args.max_fragments * args.max_parts;
  const bool has_grad_vectors = args.row_stride % 4 == 0 && is_aligned(row_grads, 16);
  for (int64_t w = simt::global_warp(); w < work; w += simt::warps_in_grid()) {
    const int64_t part = w / args.max_parts, u = part / args.max_fragments;
    const int64_t group = part - u * args.max_fragments;
    const TtTableRows& table = args.table_of_left(u);
    const int rank = table.rank, quads = table.right_columns / 4;
    const int r0 = static_cast<int>(w - part * args.max_parts) * 32;
    if (group >= fragments_of(table.left_columns) || r0 >= rank || !table.has_mma_grads()) {
      continue;
    }
    const bool uses_vectors = table.has_vectors;
    const LeftColumns columns(table.left_columns, group, lane);
    const int begin = args.plan.left_segments[u], end = args.plan.left_segments[u + 1];
    const bool has_rank = r0 + lane.row * 4 < rank;
    float sums[kFragments][4] = {};
    int row = begin + lane.column / quads, quad = lane.column % quads;
    for (int64_t remaining_quads = int64_t{end - begin} * quads; remaining_quads > 0;
         remaining_quads -= 4) {
      const bool inside = row < end;
      float low[4], high[4], x[4][4];
      columns.load(row_grads + row * args.row_stride, quads * 4, quad * 4, inside, has_grad_vectors,
                   lane, low, high);
      const int v = inside ? args.plan.row_rights[row] : 0;
      const float* right = args.right + v * args.right_stride + r0 + lane.row * 4;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        load_four(right + (int64_t{4} * quad + e) * rank, inside && has_rank, uses_vectors, x[e]);
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
    float* out = args.left_grads_of(table).at(u);
    const bool has_out_vectors = table.left_stride % 4 == 0 && is_aligned(table.left_grads, 16);
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

// rows[j][jl, jr] = sum over r of left[jl, r] * right[jr, r], for tables without has_mma_rows; one
// warp per left half.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    tt_rows_kernel(TtDeviceRowsArgs args, float* rows) {
  const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
  const int64_t last = args.lefts();
  for (int64_t u = simt::global_warp(); u < last; u += simt::warps_in_grid()) {
    const TtTableRows& table = args.table_of_left(u);
    if (table.has_mma_rows()) continue;
    const int rank = table.rank, right_columns = table.right_columns;
    const int64_t dim = table.dim();
    const float* left = args.left_of(table).at(u);
    for (int64_t j = args.plan.left_segments[u]; j < args.plan.left_segments[u + 1]; ++j) {
      const float* right = args.right + args.plan.row_rights[j] * args.right_stride;
      for (int o = lane; o < dim; o += kWarpLanes) {
        const int row = o / right_columns;
        const float* a = left + int64_t{1} * row * rank;
        const float* b = right + int64_t{1} * (o - row * right_columns) * rank;
        float sum = 0.0f;
        for (int r = 0; r < rank; ++r) sum += a[r] * b[r];
        rows[j * args.row_stride + o] = sum;
      }
    }
  }
}

// The elements of a result [columns, rank] that a lane computes in one pass: first + lane,
// first + lane + 32, ...
struct LaneElements {
  int64_t element[kElementsPerLane];
  int column[kElementsPerLane], inner[kElementsPerLane];
  bool inside[kElementsPerLane];

  EMB_DEVICE LaneElements(int64_t first, int64_t size, int rank) {
    const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) {
      element[i] = first + lane + i * kWarpLanes;
      inside[i] = element[i] < size;
      column[i] = inside[i] ? static_cast<int>(element[i] / rank) : 0;
      inner[i] = inside[i] ? static_cast<int>(element[i] % rank) : 0;
    }
  }
};

// Elements that a warp computes in one pass.
inline constexpr int64_t kPass = kElementsPerLane * static_cast<int64_t>(simt::kWarpLanes);

// grads[u][jl, r] = sum over rows j of u and over jr of row_grads[j][jl, jr] * right[jr, r], for
// tables without has_mma_grads; one warp per left half.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads, kLeftGradBlocksPerSm)
    left_grads_kernel(TtDeviceRowsArgs args, const float* row_grads) {
  const int64_t last = args.lefts();
  for (int64_t u = simt::global_warp(); u < last; u += simt::warps_in_grid()) {
    const TtTableRows& table = args.table_of_left(u);
    if (table.has_mma_grads()) continue;
    const int rank = table.rank, right_columns = table.right_columns;
    const int64_t size = table.left_size();
    float* out = args.left_grads_of(table).at(u);
    const int64_t begin = args.plan.left_segments[u], end = args.plan.left_segments[u + 1];
    for (int64_t first = 0; first < size; first += kPass) {
      const LaneElements elements(first, size, rank);
      float sums[kElementsPerLane] = {};
      for (int64_t j = begin; j < end; ++j) {
        const float* right = args.right + args.plan.row_rights[j] * args.right_stride;
        const float* grad = row_grads + j * args.row_stride;
        for (int jr = 0; jr < right_columns; ++jr) {
#pragma unroll
          for (int i = 0; i < kElementsPerLane; ++i) {
            sums[i] += grad[elements.column[i] * right_columns + jr] *
                       right[jr * rank + elements.inner[i]];
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

// Write the values of right halves that are no pairs, [V][right_stride]: the row of the last core
// (of dtype `type`) with its axes reversed. A warp takes a right half, grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    right_values_kernel(TtDeviceRowsArgs args, Dtype type, float* values) {
  const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
  const int64_t last = args.rights();
  for (int64_t v = simt::global_warp(); v < last; v += simt::warps_in_grid()) {
    const TtTableRows& table = args.table_of_right(v);
    if (table.last_core == nullptr) continue;
    const int size = static_cast<int>(table.right_size()), rank = table.rank;
    const int64_t row = (int64_t{args.plan.rights[v]} - table.first_right) * size;
    float* to = values + v * args.right_stride;
    for (int e = lane; e < size; e += kWarpLanes) {
      const int column = e / rank;
      const int64_t from = row + (e - column * rank) * table.right_columns + column;
      to[e] = read_float(table.last_core, type, from);
    }
  }
}

// A matrix whose rows get their axes reversed: row [a, q, b] of `from` becomes row [b, q, a] of
// `to`.
struct TtReverse {
  const void* from;
  float* to;
  int64_t first_row;  // number of its first row among the rows of all matrices of the launch
  int64_t a, q, b;
};

// Reverse the rows of `count` matrices of dtype `type`, `rows` in all; a block per row,
// grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    reverse_kernel(const TtReverse* matrices, int count, int64_t rows, Dtype type) {
  for (int64_t global_row = blockIdx.x; global_row < rows; global_row += gridDim.x) {
    const TtReverse& matrix =
        matrices[warp_search([&](int i) { return matrices[i].first_row; }, count, global_row)];
    const int64_t a = matrix.a, q = matrix.q, b = matrix.b, size = a * q * b;
    const int64_t row = (global_row - matrix.first_row) * size;
    for (int64_t e = threadIdx.x; e < size; e += kRowThreads) {
      const int64_t ai = e % a, j = e / a % q, bi = e / (a * q);
      matrix.to[row + e] = read_float(matrix.from, type, row + (ai * q + j) * b + bi);
    }
  }
}

inline constexpr int kMaxGridY = 65535;  // a limit of CUDA
inline constexpr int kRowWarps = kRowThreads / kWarpLanes;

// The kernels that the tables of a batch need: on tensor cores or not, with vectors or not (see
// has_mma_rows, has_mma_grads, and right_grads.cuh).
struct TtKernels {
  bool mma_rows = false, plain_rows = false;
  bool mma_grads = false, plain_grads = false;
  bool right_vectors = false, right_scalars = false;
};

// Write the distinct rows, [M][row_stride]; `lefts` is the maximum number of left halves.
template <class Launcher>
void launch_tt_rows(const Launcher& launcher, MatmulPrecision precision, const TtKernels& kernels,
                    int64_t lefts, const TtDeviceRowsArgs& args, float* rows) {
  if (kernels.mma_rows) {
    const unsigned blocks = blocks_for(lefts, kRowWarps, launcher.blocks(2 * kResidentBlocksPerSm));
    for (int first = 0; first < args.max_fragments; first += kMaxGridY) {
      const int groups = args.max_fragments - first;
      const simt::Dim3 grid(blocks, static_cast<unsigned>(groups < kMaxGridY ? groups : kMaxGridY));
      with_product_type(precision, [&](auto products) {
        launcher(mma_rows_kernel<decltype(products)>, grid, kRowThreads, args, first, rows);
      });
    }
  }
  if (kernels.plain_rows) {
    launcher(tt_rows_kernel,
             blocks_for(lefts, kRowWarps, launcher.blocks(2 * kResidentBlocksPerSm)), kRowThreads,
             args, rows);
  }
}

// Write the gradients of the values of left pairs, or of the first core where left halves are no
// pairs, from the gradients of the rows, [M][row_stride]. `lefts` is the maximum number of left
// halves.
template <class Launcher>
void launch_left_grads(const Launcher& launcher, MatmulPrecision precision,
                       const TtKernels& kernels, int64_t lefts, const TtDeviceRowsArgs& args,
                       const float* row_grads) {
  if (kernels.mma_grads) {
    const int64_t warps = lefts * args.max_fragments * args.max_parts;
    const unsigned grid = blocks_for(warps, kRowWarps, launcher.blocks(2 * kResidentBlocksPerSm));
    with_product_type(precision, [&](auto products) {
      launcher(mma_left_grads_kernel<decltype(products)>, grid, kRowThreads, args, row_grads);
    });
  }
  if (kernels.plain_grads) {
    launcher(left_grads_kernel,
             blocks_for(lefts, kRowWarps, launcher.blocks(2 * kResidentBlocksPerSm)), kRowThreads,
             args, row_grads);
  }
}

// Write the values of right halves that are no pairs; `rights` is their maximum number.
template <class Launcher>
void launch_right_values(const Launcher& launcher, int64_t rights, const TtDeviceRowsArgs& args,
                         Dtype type, float* values) {
  launcher(right_values_kernel,
           blocks_for(rights, kRowWarps, launcher.blocks(2 * kResidentBlocksPerSm)), kRowThreads,
           args, type, values);
}

}  // namespace emb::cuda
