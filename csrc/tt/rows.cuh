// Rows from the values of their halves on the GPU, and the gradients of the values of left halves;
// right_grads.cuh has those of right halves. tt/args.h explains halves, values and plans.
//
// A row is left [Ql, rank] times the transpose of right [Qr, rank]. A warp computes the rows of one
// left half, side by side as the columns of one product. It uses no shared memory, because an
// element is read by the lane that multiplies it and by no other lane of the warp. Lanes load four
// neighbours at once, and the tensor cores process k in the order of these loads. Tables whose
// shape does not suit tensor cores (TtTableArgs::has_mma_rows, has_mma_grads) run on plain kernels.
//
// A launch serves the halves of all tables: a warp looks up the table of its half in the plan's
// `starts`, and reads the table's arguments from device memory.
#pragma once

#include "core/codes.h"
#include "core/mma.cuh"
#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"
#include "tt/args.h"

namespace emb::cuda {

inline constexpr int kRowThreads = 128;  // threads per block of all kernels of this file
inline constexpr int kRowWarps = kRowThreads / kWarpLanes;
// Blocks per multiprocessor, which bound the registers of a thread: 5 leave 96, 6 leave 80.
inline constexpr int kMmaBlocksPerSm = 5, kLeftGradBlocksPerSm = 6;
inline constexpr int kElementsPerLane = 4;  // elements of a result that a lane keeps in registers

// The values of left halves, or their gradients, a row of floats per half. If `ids` is null, half u
// has row u of `data`, else the row that is its id within the table: `data` is then a core.
template <class Float>
struct LeftValueRows {
  Float* data;
  const int32_t* ids;  // ids of all left halves of the batch, or null
  int64_t first_id;    // first id of the table
  int64_t stride;      // floats between rows

  // Return the row of left half u, numbered over all tables.
  EMB_DEVICE Float* at(int64_t u) const {
    return data + (ids != nullptr ? ids[u] - first_id : u) * stride;
  }
};

// The arguments for one table of a batch, in device memory.
struct TtTableArgs {
  int left_columns, right_columns, rank;
  bool has_left_pair;  // the left half is a pair; else its values are rows of the first core
  bool has_vectors;    // four neighbours along the rank of values can be loaded at once
  int32_t first_left_id, first_right_id;  // the first ids of the table, over all tables
  const float* left;                      // values of left halves, or the first core
  float* left_grads;                      // gradients of `left`; null in a forward pass
  int64_t left_stride;                    // floats between the rows of `left` and of `left_grads`
  const void* last_core;  // [rank, right columns] per id of a right half; null if that is a pair
  float* last_grads;      // its gradients; null in a forward pass and if last_core is null

  EMB_HD int64_t left_size() const { return int64_t{1} * left_columns * rank; }
  EMB_HD int64_t right_size() const { return int64_t{1} * right_columns * rank; }
  EMB_HD int64_t dim() const { return int64_t{1} * left_columns * right_columns; }

  // Return whether tensor cores compute the rows, or the gradients of left values. The other tables
  // run on tt_rows_kernel and left_grads_kernel. A batch of both kinds launches both kernels, and
  // each skips the tables of the other. The choice depends on the shape alone, so that a table has
  // the same bits in every batch.
  EMB_HD bool has_mma_rows() const { return rank % 4 == 0; }
  EMB_HD bool has_mma_grads() const { return rank % 4 == 0 && right_columns % 4 == 0; }
  // Return whether four neighbours along the right columns of a row can be loaded at once, too, if
  // the gradients of rows allow vectors.
  EMB_HD bool has_right_vectors() const { return has_vectors && right_columns % 4 == 0; }
};

// Return the table of the half with number `half` over all tables; `starts`, [num_tables], has the
// number of the first half of each table. All lanes of a warp call this with the same half.
EMB_DEVICE int table_of(const int32_t* starts, int num_tables, int64_t half) {
  if (num_tables == 1) return 0;
  return warp_search([&](int t) { return int64_t{starts[t]}; }, num_tables, half);
}

// The arguments for all tables of a batch; pointers are to device memory. Rows and halves are
// numbered over all tables. How many there are is known on the device only.
struct TtBatchArgs {
  const TtTableArgs* tables;  // [T]
  TtPlan plan;
  const float* right_values;  // [V][right_stride], [right columns, rank] each
  int64_t right_stride;       // floats between values of right halves
  int64_t row_stride;         // floats between rows and between their gradients
  // Maxima over the tables: number of groups of 16 left columns, and of groups of 32 ranks.
  int max_column_groups, max_rank_groups;

  EMB_HD int num_tables() const { return static_cast<int>(plan.num_tables); }
  EMB_DEVICE int64_t num_lefts() const { return plan.left_starts()[plan.num_tables]; }
  EMB_DEVICE int64_t num_rights() const { return plan.right_starts()[plan.num_tables]; }
  EMB_DEVICE int64_t num_rows() const { return plan.row_starts()[plan.num_tables]; }

  // Return the table of left half u, or of right half v. All lanes of a warp call this with the
  // same half.
  EMB_DEVICE const TtTableArgs& table_of_left(int64_t u) const {
    return tables[table_of(plan.left_starts(), num_tables(), u)];
  }
  EMB_DEVICE const TtTableArgs& table_of_right(int64_t v) const {
    return tables[table_of(plan.right_starts(), num_tables(), v)];
  }
  // Return the values of the left halves of a table, and their gradients.
  EMB_DEVICE LeftValueRows<const float> left_values_of(const TtTableArgs& table) const {
    return {table.left, table.has_left_pair ? nullptr : plan.lefts, table.first_left_id,
            table.left_stride};
  }
  EMB_DEVICE LeftValueRows<float> left_grads_of(const TtTableArgs& table) const {
    return {table.left_grads, table.has_left_pair ? nullptr : plan.lefts, table.first_left_id,
            table.left_stride};
  }
};

// Load four neighbours, or zeros if `exists` is false; `address` is then not read. If
// `uses_vectors`, `address` must be a multiple of 16 bytes.
EMB_DEVICE void load_four(const float* address, bool exists, bool uses_vectors, float (&x)[4]) {
  RowSlice<float, 4> slice;
  if (exists) {
    if (uses_vectors) {
      slice.load_vector(address);
    } else {
      slice.load_scalar(address, 4);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = slice[i];
}

// Return an element of `data`, an array of `type`: float32, float16 or bfloat16.
EMB_DEVICE float read_float(const void* data, Dtype type, int64_t element) {
  if (type == Dtype::kFloat) return static_cast<const float*>(data)[element];
  if (type == Dtype::kHalf) return to_float(static_cast<const half16*>(data)[element]);
  return to_float(static_cast<const bfloat16*>(data)[element]);
}

// Store four neighbours. If `uses_vectors`, `address` must be a multiple of 16 bytes.
EMB_DEVICE void store_four(float* address, bool uses_vectors, const float (&x)[4]) {
  if (uses_vectors) {
    *reinterpret_cast<simt::Pack16*>(address) = {
        {float_bits(x[0]), float_bits(x[1]), float_bits(x[2]), float_bits(x[3])}};
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) address[i] = x[i];
}

// This lane's row and column of a fragment, see core/mma.cuh. With lane_in_warp(), nvcc 13 spills
// two registers of mma_left_grads_kernel<Tf32x3>.
struct FragmentLane {
  int row = static_cast<int>(threadIdx.x % simt::kWarpLanes) / 4;
  int column = static_cast<int>(threadIdx.x % simt::kWarpLanes) % 4;
};

inline constexpr int kFragmentM = 16;  // left columns that a warp computes
inline constexpr int kFragments = 4;   // fragments of 8 columns that a warp computes at once

// The 16 left columns that a warp computes: the rows of a fragment. A lane has two of them: the low
// one, first + lane.row, and the high one, 8 columns further.
struct LeftColumns {
  int first;
  bool has_low, has_high;  // whether the lane's two left columns exist

  // Select group `group` of 16 of the `left_columns` columns of a table.
  EMB_DEVICE LeftColumns(int left_columns, int64_t group, const FragmentLane& lane)
      : first(static_cast<int>(group) * kFragmentM),
        has_low(first + lane.row < left_columns),
        has_high(first + lane.row + 8 < left_columns) {}

  // Load four neighbours, from `element` on, of the lane's two lines of a matrix [left columns,
  // width]; zeros if `exists` is false or if the matrix has no such line.
  EMB_DEVICE void load(const float* matrix, int64_t width, int64_t element, bool exists,
                       bool uses_vectors, const FragmentLane& lane, float (&low)[4],
                       float (&high)[4]) const {
    const float* line = matrix + (first + lane.row) * width + element;
    load_four(line, exists && has_low, uses_vectors, low);
    load_four(line + 8 * width, exists && has_high, uses_vectors, high);
  }
};

// Return the number of groups of 16 left columns.
EMB_HD int num_column_groups(int64_t columns) {
  return static_cast<int>((columns + kFragmentM - 1) / kFragmentM);
}

// Compute rows[j][jl, jr] = sum over r of left[jl, r] * right[jr, r]. A warp processes a left half,
// grid-stride, and 16 of its left columns, group first_group + blockIdx.y. The columns of the
// product are the right columns of all rows of the half.
template <class Products>
__global__ void __launch_bounds__(kRowThreads, kMmaBlocksPerSm)
    mma_rows_kernel(TtBatchArgs args, int first_group, float* rows) {
  const FragmentLane lane;
  const int group = first_group + static_cast<int>(blockIdx.y);
  const auto num_lefts = static_cast<unsigned>(args.num_lefts());
  const auto num_warps = static_cast<unsigned>(simt::warps_in_grid());
  for (auto u = static_cast<unsigned>(simt::global_warp()); u < num_lefts; u += num_warps) {
    const TtTableArgs& table = args.table_of_left(u);
    if (group >= num_column_groups(table.left_columns) || !table.has_mma_rows()) continue;
    const int rank = table.rank, right_columns = table.right_columns;
    const bool uses_vectors = table.has_vectors;
    const float* left = args.left_values_of(table).at(u);
    const int end = args.plan.left_segments[u + 1];
    const LeftColumns columns(table.left_columns, group, lane);
    int row = args.plan.left_segments[u];  // row of the first column of the product
    int offset = 0;                        // right column of the first column of the product
    while (row < end) {
      // *column is a column of the product, counted from the first. Return its row, and replace
      // *column with its right column.
      const auto split_column = [&](int* column) {
        const auto n = static_cast<unsigned>(offset + *column);
        const unsigned rows_ahead = n / static_cast<unsigned>(right_columns);
        *column = static_cast<int>(n - rows_ahead * static_cast<unsigned>(right_columns));
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
        const int j = split_column(&column), v = has_column[i] ? args.plan.row_rights[j] : 0;
        right[i] = args.right_values + v * args.right_stride + int64_t{1} * column * rank;
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
          const float left_elements[4] = {low[e], high[e], low[e + 1], high[e + 1]};
          const typename Products::A a(left_elements);
#pragma unroll
          for (int i = 0; i < kFragments; ++i) {
            if (i > 0 && i * 8 >= num_columns) break;
            const float right_elements[2] = {x[i][e], x[i][e + 1]};
            Products::multiply_add(sums[i], a, typename Products::B(right_elements));
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kFragments * 2; ++i) {
        int column = i / 2 * 8 + lane.column * 2 + i % 2;
        const int j = split_column(&column);
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

// Compute the gradients of left values,
//   grads[u][jl, r] = sum over rows j of u and over jr of row_grads[j][jl, jr] * right[jr, r].
// A warp computes 16 left columns and 32 ranks of a left half, grid-stride. Four neighbours jr of a
// row are a quad; lanes with fragment column c read quads c, c + 4, c + 8 and so on. Column n of
// fragment i is rank 4 n + i of the 32.
template <class Products>
__global__ void __launch_bounds__(kRowThreads, kMmaBlocksPerSm)
    mma_left_grads_kernel(TtBatchArgs args, const float* row_grads) {
  const FragmentLane lane;
  const int64_t work = args.num_lefts() * args.max_column_groups * args.max_rank_groups;
  const bool has_grad_vectors = args.row_stride % 4 == 0 && is_aligned(row_grads, 16);
  for (int64_t w = simt::global_warp(); w < work; w += simt::warps_in_grid()) {
    // w counts left halves, groups of left columns and groups of ranks, the last fastest.
    const int64_t half_and_group = w / args.max_rank_groups,
                  u = half_and_group / args.max_column_groups;
    const int64_t group = half_and_group - u * args.max_column_groups;
    const TtTableArgs& table = args.table_of_left(u);
    const int rank = table.rank, quads_per_row = table.right_columns / 4;
    const int r0 = static_cast<int>(w - half_and_group * args.max_rank_groups) * 32;
    if (group >= num_column_groups(table.left_columns) || r0 >= rank || !table.has_mma_grads()) {
      continue;
    }
    const bool uses_vectors = table.has_vectors;
    const LeftColumns columns(table.left_columns, group, lane);
    const int begin = args.plan.left_segments[u], end = args.plan.left_segments[u + 1];
    const bool has_rank = r0 + lane.row * 4 < rank;
    float sums[kFragments][4] = {};
    int row = begin + lane.column / quads_per_row, quad = lane.column % quads_per_row;
    for (int64_t remaining_quads = int64_t{end - begin} * quads_per_row; remaining_quads > 0;
         remaining_quads -= 4) {
      const bool exists = row < end;
      float low[4], high[4], x[4][4];
      columns.load(row_grads + row * args.row_stride, quads_per_row * 4, quad * 4, exists,
                   has_grad_vectors, lane, low, high);
      const int v = exists ? args.plan.row_rights[row] : 0;
      const float* right = args.right_values + v * args.right_stride + r0 + lane.row * 4;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        load_four(right + (int64_t{4} * quad + e) * rank, exists && has_rank, uses_vectors, x[e]);
      }
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const float grad_elements[4] = {low[e], high[e], low[e + 1], high[e + 1]};
        const typename Products::A a(grad_elements);
#pragma unroll
        for (int i = 0; i < kFragments; ++i) {
          const float right_elements[2] = {x[e][i], x[e + 1][i]};
          Products::multiply_add(sums[i], a, typename Products::B(right_elements));
        }
      }
      quad += 4;
      row += quad / quads_per_row;
      quad %= quads_per_row;
    }
    float* out = args.left_grads_of(table).at(u);
    const bool has_out_vectors = table.left_stride % 4 == 0 && is_aligned(table.left_grads, 16);
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // i / 2: the low or the high left column; i % 2: four ranks
      const int r = r0 + lane.column * 8 + i % 2 * 4;
      if (r >= rank || !(i < 2 ? columns.has_low : columns.has_high)) continue;
      const float values[4] = {sums[0][i], sums[1][i], sums[2][i], sums[3][i]};
      float* line = out + int64_t{1} * (columns.first + lane.row + i / 2 * 8) * rank + r;
      store_four(line, has_out_vectors, values);
    }
  }
}

// Compute rows[j][jl, jr] = sum over r of left[jl, r] * right[jr, r], for tables without
// has_mma_rows. A warp processes a left half, grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    tt_rows_kernel(TtBatchArgs args, float* rows) {
  const int lane = lane_in_warp();
  const int64_t num_lefts = args.num_lefts();
  for (int64_t u = simt::global_warp(); u < num_lefts; u += simt::warps_in_grid()) {
    const TtTableArgs& table = args.table_of_left(u);
    if (table.has_mma_rows()) continue;
    const int rank = table.rank, right_columns = table.right_columns;
    const int64_t dim = table.dim();
    const float* left = args.left_values_of(table).at(u);
    for (int64_t j = args.plan.left_segments[u]; j < args.plan.left_segments[u + 1]; ++j) {
      const float* right = args.right_values + args.plan.row_rights[j] * args.right_stride;
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

// The elements of a matrix [columns, rank] of `size` elements that a lane computes in one pass:
// first + lane, first + lane + 32, ...
struct LaneElements {
  int64_t element[kElementsPerLane];
  int column[kElementsPerLane], r[kElementsPerLane];  // its column and rank; 0 if it does not exist
  bool exists[kElementsPerLane];

  EMB_DEVICE LaneElements(int64_t first, int64_t size, int rank) {
    const int lane = lane_in_warp();
#pragma unroll
    for (int i = 0; i < kElementsPerLane; ++i) {
      element[i] = first + lane + i * kWarpLanes;
      exists[i] = element[i] < size;
      column[i] = exists[i] ? static_cast<int>(element[i] / rank) : 0;
      r[i] = exists[i] ? static_cast<int>(element[i] % rank) : 0;
    }
  }
};

// Elements that a warp computes in one pass.
inline constexpr int64_t kElementsPerPass =
    kElementsPerLane * static_cast<int64_t>(simt::kWarpLanes);

// Compute the same gradients as mma_left_grads_kernel, for tables without has_mma_grads. A warp
// processes a left half, grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads, kLeftGradBlocksPerSm)
    left_grads_kernel(TtBatchArgs args, const float* row_grads) {
  const int64_t num_lefts = args.num_lefts();
  for (int64_t u = simt::global_warp(); u < num_lefts; u += simt::warps_in_grid()) {
    const TtTableArgs& table = args.table_of_left(u);
    if (table.has_mma_grads()) continue;
    const int rank = table.rank, right_columns = table.right_columns;
    const int64_t size = table.left_size();
    float* out = args.left_grads_of(table).at(u);
    const int64_t begin = args.plan.left_segments[u], end = args.plan.left_segments[u + 1];
    for (int64_t first = 0; first < size; first += kElementsPerPass) {
      const LaneElements elements(first, size, rank);
      float sums[kElementsPerLane] = {};
      for (int64_t j = begin; j < end; ++j) {
        const float* right = args.right_values + args.plan.row_rights[j] * args.right_stride;
        const float* grad = row_grads + j * args.row_stride;
        for (int jr = 0; jr < right_columns; ++jr) {
#pragma unroll
          for (int i = 0; i < kElementsPerLane; ++i) {
            sums[i] +=
                grad[elements.column[i] * right_columns + jr] * right[jr * rank + elements.r[i]];
          }
        }
      }
#pragma unroll
      for (int i = 0; i < kElementsPerLane; ++i) {
        if (elements.exists[i]) out[elements.element[i]] = sums[i];
      }
    }
  }
}

// Write the values of right halves that are not pairs to `values`, [V][right_stride]: rows of the
// last core, of dtype `type`, with reversed axes. A warp processes a right half, grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    right_values_kernel(TtBatchArgs args, Dtype type, float* values) {
  const int lane = lane_in_warp();
  const int64_t num_rights = args.num_rights();
  for (int64_t v = simt::global_warp(); v < num_rights; v += simt::warps_in_grid()) {
    const TtTableArgs& table = args.table_of_right(v);
    if (table.last_core == nullptr) continue;
    const int size = static_cast<int>(table.right_size()), rank = table.rank;
    const int64_t row = (int64_t{args.plan.rights[v]} - table.first_right_id) * size;
    float* value = values + v * args.right_stride;
    for (int e = lane; e < size; e += kWarpLanes) {
      const int column = e / rank;
      const int64_t from = row + (e - column * rank) * table.right_columns + column;
      value[e] = read_float(table.last_core, type, from);
    }
  }
}

// A matrix whose rows are copied with reversed axes: row [a, q, b] of `from` becomes row [b, q, a]
// of `to`.
struct TtReverse {
  const void* from;
  float* to;
  int64_t first_row;  // number of its first row, over all matrices of the launch
  int64_t a, q, b;
};

// Copy the rows of matrices of dtype `type`, num_rows in all, with reversed axes. A block processes
// a row, grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads)
    reverse_kernel(const TtReverse* matrices, int num_matrices, int64_t num_rows, Dtype type) {
  for (int64_t global_row = blockIdx.x; global_row < num_rows; global_row += gridDim.x) {
    const TtReverse& matrix = matrices[warp_search([&](int i) { return matrices[i].first_row; },
                                                   num_matrices, global_row)];
    const int64_t a = matrix.a, q = matrix.q, b = matrix.b, size = a * q * b;
    const int64_t row = (global_row - matrix.first_row) * size;
    for (int64_t e = threadIdx.x; e < size; e += kRowThreads) {
      const int64_t ai = e % a, j = e / a % q, bi = e / (a * q);
      matrix.to[row + e] = read_float(matrix.from, type, row + (ai * q + j) * b + bi);
    }
  }
}

inline constexpr int kMaxGridY = 65535;  // a limit of CUDA

// The kernels that the tables of a batch need, see the functions of TtTableArgs of similar names:
// those on tensor cores or the plain ones, and the instantiations of right_partials_kernel with and
// without vectors.
struct TtKernelFlags {
  bool needs_mma_rows = false, needs_plain_rows = false;
  bool needs_mma_grads = false, needs_plain_grads = false;
  bool needs_right_vectors = false, needs_right_scalars = false;
};

// Write the distinct rows, [M][row_stride]; columns beyond the dim of a table are not written.
// max_lefts is the maximum number of left halves. In all launches of this file `launcher` is a
// CudaLauncher or, in tests, a simt::HostLauncher, and nothing waits for the device.
template <class Launcher>
void launch_tt_rows(const Launcher& launcher, MatmulPrecision precision,
                    const TtKernelFlags& kernels, int64_t max_lefts, const TtBatchArgs& args,
                    float* rows) {
  if (kernels.needs_mma_rows) {
    const unsigned blocks =
        blocks_for(max_lefts, kRowWarps, launcher.max_grid_blocks(2 * kResidentBlocksPerSm));
    for (int first = 0; first < args.max_column_groups; first += kMaxGridY) {
      const int num_groups = args.max_column_groups - first;
      const simt::Dim3 grid(blocks,
                            static_cast<unsigned>(num_groups < kMaxGridY ? num_groups : kMaxGridY));
      with_product_type(precision, [&](auto products) {
        launcher(mma_rows_kernel<decltype(products)>, grid, kRowThreads, args, first, rows);
      });
    }
  }
  if (kernels.needs_plain_rows) {
    launcher(tt_rows_kernel,
             blocks_for(max_lefts, kRowWarps, launcher.max_grid_blocks(2 * kResidentBlocksPerSm)),
             kRowThreads, args, rows);
  }
}

// Write the gradients of the values of left pairs, and of the first core where left halves are no
// pairs, from the gradients of the rows, [M][row_stride]. Of such a core, rows that the batch does
// not use are not written. max_lefts is the maximum number of left halves.
template <class Launcher>
void launch_left_grads(const Launcher& launcher, MatmulPrecision precision,
                       const TtKernelFlags& kernels, int64_t max_lefts, const TtBatchArgs& args,
                       const float* row_grads) {
  if (kernels.needs_mma_grads) {
    const int64_t num_warps = max_lefts * args.max_column_groups * args.max_rank_groups;
    const unsigned grid =
        blocks_for(num_warps, kRowWarps, launcher.max_grid_blocks(2 * kResidentBlocksPerSm));
    with_product_type(precision, [&](auto products) {
      launcher(mma_left_grads_kernel<decltype(products)>, grid, kRowThreads, args, row_grads);
    });
  }
  if (kernels.needs_plain_grads) {
    launcher(left_grads_kernel,
             blocks_for(max_lefts, kRowWarps, launcher.max_grid_blocks(2 * kResidentBlocksPerSm)),
             kRowThreads, args, row_grads);
  }
}

// Write the values of right halves that are not pairs to `values`, [V][right_stride]. `type` is the
// dtype of the cores. max_rights is the maximum number of right halves.
template <class Launcher>
void launch_right_values(const Launcher& launcher, int64_t max_rights, const TtBatchArgs& args,
                         Dtype type, float* values) {
  launcher(right_values_kernel,
           blocks_for(max_rights, kRowWarps, launcher.max_grid_blocks(2 * kResidentBlocksPerSm)),
           kRowThreads, args, type, values);
}

}  // namespace emb::cuda
