// Tensor-train forward and backward on one CPU thread: the kernels of TtCpuKernels (tt/args.h,
// which also explains halves, pairs and values). They consist of products of small matrices, whose
// operands stay in the first two cache levels. Halves are sorted by inner row, and are processed in
// *blocks* of up to kTtBlockHalves halves of one inner row, with one product for all of them.

#include "core/vec.h"
#include "tt/args.h"
#include "tt/small_products.h"

namespace emb::EMB_ISA {

namespace {

EMB_HD void copy_floats(const float* from, int64_t n, float* to) {
  __builtin_memcpy(to, from, static_cast<size_t>(n) * sizeof(float));
}

// The scratch of one call, tt_scratch_floats floats from `p` on, as TtScratchLayout divides it.
struct BlockScratch {
  float *outer_rows, *values, *permuted_values, *transposed_inner, *transposed_value,
      *transposed_row;

  BlockScratch(const TtHalf& half, float* p) : BlockScratch(TtScratchLayout(half, 0), p) {}

 private:
  BlockScratch(const TtScratchLayout& layout, float* p)
      : outer_rows(p + layout.outer_rows),
        values(p + layout.values),
        permuted_values(p + layout.permuted_values),
        transposed_inner(p + layout.transposed_inner),
        transposed_value(p + layout.transposed_value),
        transposed_row(p + layout.transposed_row) {}
};

// Return the end of the block that begins with half u: at most kTtBlockHalves halves of one inner
// row.
EMB_HD int64_t block_end(const TtHalfCores& cores, int64_t u, int64_t end) {
  const int64_t max_end = u + kTtBlockHalves < end ? u + kTtBlockHalves : end;
  // Without a pair this exceeds all ids.
  const int64_t ids_end = (cores.inner_row(u) + 1) * cores.half.num_outer_rows;
  int64_t end_u = u + 1;
  while (end_u < max_end && cores.id(end_u) < ids_end) ++end_u;
  return end_u;
}

// The prefetch of the inner row of half u, with which the next block begins: the products read the
// row by columns, an order that hardware does not prefetch. The caller prefetches the row in
// `num_parts` parts, with work in between, because a processor stalls if it prefetches more lines
// than it can have in flight. Does nothing if u is `end` or the half is not a pair.
class InnerPrefetch {
 public:
  EMB_HD InnerPrefetch(const TtHalfCores& cores, int64_t u, int64_t end, int64_t num_parts) {
    if (u >= end || !cores.half.is_pair) return;
    const int64_t nbytes = cores.half.inner_size() * int64_t{sizeof(float)};
    next_line_ = reinterpret_cast<const char*>(cores.inner_row_data(u));
    row_end_ = next_line_ + nbytes;
    part_bytes_ = (nbytes / num_parts + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes;
  }

  // Prefetch the next part, if the row has more.
  EMB_HD void prefetch_part() {
    const char* part_end =
        row_end_ - next_line_ > part_bytes_ ? next_line_ + part_bytes_ : row_end_;
    for (; next_line_ < part_end; next_line_ += kCacheLineBytes) {
      __builtin_prefetch(next_line_, 0, 3);
    }
  }

 private:
  const char *next_line_ = nullptr, *row_end_ = nullptr;
  int64_t part_bytes_ = 0;
};

// How many rows ahead add_right_grads prefetches the operands of a row. The rows of a right half
// are in the order of their left halves, not side by side, so that hardware does not prefetch them.
constexpr int64_t kRowsAhead = 6;
// How many rows ahead add_right_grads_by_row prefetches sums, which are in the second-level cache.
constexpr int64_t kSumsAhead = 2;

// Copy the outer rows of the halves [begin, end) of one block, one after the other, to
// `outer_rows`, [(end - begin) * q_outer, inner_rank].
EMB_HD void copy_outer_rows(const TtHalfCores& cores, int64_t begin, int64_t end,
                            float* outer_rows) {
  const int64_t size = cores.half.outer_size();
  const int64_t base = cores.inner_row(begin) * cores.half.num_outer_rows;
  for (int64_t u = begin; u < end; ++u) {
    const int64_t row =
        cores.outer_positions != nullptr ? cores.outer_positions[u] : cores.id(u) - base;
    copy_floats(cores.outer + row * size, size, outer_rows + (u - begin) * size);
  }
}

// The order of the columns of a value: (inner, outer) or (outer, inner).
enum class ColumnOrder { kInnerFirst, kOuterFirst };

// Copy n values whose columns have the other order, so that the copies have `to_order`.
EMB_HD void reorder_columns(const TtHalf& half, const float* from, ColumnOrder to_order, int64_t n,
                            float* to) {
  const int first = to_order == ColumnOrder::kInnerFirst ? half.q_inner : half.q_outer;
  const int second = half.columns() / first;
  for (int64_t u = 0; u < n; ++u, from += half.value_size(), to += half.value_size()) {
    for (int i = 0; i < first; ++i) {
      for (int j = 0; j < second; ++j) {
        copy_floats(from + (j * first + i) * half.rank, half.rank,
                    to + (i * second + j) * half.rank);
      }
    }
  }
}

// Write the values of the halves [begin, end) of one block to `values`, which begins with half
// `begin`. Uses scratch.outer_rows and scratch.permuted_values.
EMB_HD void expand_block(const TtHalfCores& cores, int64_t begin, int64_t end,
                         const BlockScratch& scratch, float* values) {
  const TtHalf& half = cores.half;
  const int64_t width = int64_t{1} * half.q_inner * half.rank;
  copy_outer_rows(cores, begin, end, scratch.outer_rows);
  float* out = cores.is_mirrored ? scratch.permuted_values : values;
  multiply({.m = (end - begin) * half.q_outer,
            .n = width,
            .k = half.inner_rank,
            .a = scratch.outer_rows,
            .a_row_stride = half.inner_rank,
            .a_column_stride = 1,
            .b = cores.inner_row_data(begin),
            .b_row_stride = width,
            .c = out,
            .c_row_stride = width,
            .store = Store::kSet});
  if (cores.is_mirrored) reorder_columns(half, out, ColumnOrder::kInnerFirst, end - begin, values);
}

// TtCpuKernels::expand.
void expand(const TtHalfCores& cores, float* values, float* scratch_data, int64_t begin,
            int64_t end) {
  const int64_t size = cores.half.value_size();
  const BlockScratch scratch(cores.half, scratch_data);
  for (int64_t u = begin, next; u < end; u = next) {
    next = block_end(cores, u, end);
    InnerPrefetch(cores, next, end, 1).prefetch_part();
    expand_block(cores, u, next, scratch, values + (u - begin) * size);
  }
}

// Write `row`, [4, kRight], the product of a left value, [4, rank], and a transposed right value,
// [rank, kRight]. Each element has two sums in registers, over even and over odd k, so that their
// additions overlap.
template <int kRight>
EMB_HD void small_row(const float* value, const float* right, int64_t rank, float* row) {
  using V = typename VecOf<kRight>::type;
  V sums[2][4] = {};
  int64_t k = 0;
  for (; k + 2 <= rank; k += 2) {
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; ++odd) {
      V b;
      __builtin_memcpy(&b, right + (k + odd) * kRight, sizeof(V));
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) sums[odd][i] += value[i * rank + k + odd] * b;
    }
  }
  if (k < rank) {
    V b;
    __builtin_memcpy(&b, right + k * kRight, sizeof(V));
    for (int i = 0; i < 4; ++i) sums[0][i] += value[i * rank + k] * b;
  }
  for (int i = 0; i < 4; ++i) {
    const V sum = sums[0][i] + sums[1][i];
    __builtin_memcpy(row + i * kRight, &sum, sizeof(V));
  }
}

// Write the rows of left half u, whose value is `value`.
EMB_HD void write_rows_of_left(const TtRowsArgs& args, int64_t u, const float* value,
                               const BlockScratch& scratch) {
  const TtHalf& left = args.left.half;
  const int64_t columns = left.columns(), rank = left.rank, right_columns = args.right_columns;
  const int64_t begin = args.left_segments[u], end = args.left_segments[u + 1];
  const bool is_along_right = args.has_lanes_along_right();
  if (!is_along_right) transpose({value, columns, rank, rank}, scratch.transposed_value, columns);
  for (int64_t j = begin; j < end; ++j) {
    const int64_t v = args.row_rights[j] - args.first_right;
    float* row = args.rows + j * args.row_stride;
    if (is_along_right && columns == 4 && right_columns == 4) {
      small_row<4>(value, args.transposed_right_values.at(v), rank, row);
    } else if (is_along_right) {
      multiply({.m = columns,
                .n = right_columns,
                .k = rank,
                .a = value,
                .a_row_stride = rank,
                .a_column_stride = 1,
                .b = args.transposed_right_values.at(v),
                .b_row_stride = right_columns,
                .c = row,
                .c_row_stride = right_columns,
                .store = Store::kSet});
    } else {
      multiply({.m = right_columns,
                .n = columns,
                .k = rank,
                .a = args.right_values + v * right_columns * rank,
                .a_row_stride = rank,
                .a_column_stride = 1,
                .b = scratch.transposed_value,
                .b_row_stride = columns,
                .c = scratch.transposed_row,
                .c_row_stride = columns,
                .store = Store::kSet});
      transpose({scratch.transposed_row, right_columns, columns, columns}, row, right_columns);
    }
  }
}

// TtCpuKernels::write_rows.
void write_rows(const TtRowsArgs& args, float* scratch_data, int64_t begin, int64_t end) {
  const TtHalfCores& left = args.left;
  const int64_t size = left.half.value_size();
  const BlockScratch scratch(left.half, scratch_data);
  for (int64_t u = begin, next; u < end; u = next) {
    next = block_end(
        left, u,
        u < args.num_left_values && args.num_left_values < end ? args.num_left_values : end);
    InnerPrefetch next_inner(left, next, end, next - u);
    float* values = u < args.num_left_values ? args.left_values + u * size : scratch.values;
    if (left.half.is_pair) expand_block(left, u, next, scratch, values);
    for (int64_t i = u; i < next; ++i) {
      next_inner.prefetch_part();
      const float* value =
          left.half.is_pair ? values + (i - u) * size : left.outer + left.id(i) * size;
      write_rows_of_left(args, i, value, scratch);
    }
  }
}

// Write the gradients of both cores for the halves [begin, end) of one block of pairs, from the
// gradients of their values. The gradient of an outer row is written per half. The first block of
// an inner row writes `inner_grad`, the gradient of that row, and the other blocks add to it. The
// caller must have called transpose_inner for half `begin`.
EMB_HD void contract_block(const TtHalfCores& cores, const TtHalfGrads& grads, float* inner_grad,
                           int64_t begin, int64_t end, const float* value_grads,
                           const BlockScratch& scratch) {
  const TtHalf& half = cores.half;
  const int64_t width = int64_t{1} * half.q_inner * half.rank;
  const int64_t num_lines = (end - begin) * half.q_outer;  // outer columns of all halves
  const int64_t position = grads.inner_positions[begin];
  const bool is_first_block = begin == 0 || grads.inner_positions[begin - 1] != position;
  if (cores.is_mirrored) {
    reorder_columns(half, value_grads, ColumnOrder::kOuterFirst, end - begin,
                    scratch.permuted_values);
    value_grads = scratch.permuted_values;
  }
  copy_outer_rows(cores, begin, end, scratch.outer_rows);
  multiply({.m = half.inner_rank,
            .n = width,
            .k = num_lines,
            .a = scratch.outer_rows,
            .a_row_stride = 1,
            .a_column_stride = half.inner_rank,
            .b = value_grads,
            .b_row_stride = width,
            .c = inner_grad,
            .c_row_stride = width,
            .store = is_first_block ? Store::kSet : Store::kAdd});
  multiply({.m = num_lines,
            .n = half.inner_rank,
            .k = width,
            .a = value_grads,
            .a_row_stride = width,
            .a_column_stride = 1,
            .b = scratch.transposed_inner,
            .b_row_stride = half.inner_rank,
            .c = grads.outer_grads_by_half + (begin - grads.first_half) * half.outer_size(),
            .c_row_stride = half.inner_rank,
            .store = Store::kSet});
}

// Write the transposed inner row of half u, with which a block begins, to the scratch, unless the
// block of half u - 1 has left it there. `begin` is the first half of the caller's range.
EMB_HD void transpose_inner(const TtHalfCores& cores, int64_t begin, int64_t u,
                            const BlockScratch& scratch) {
  const TtHalf& half = cores.half;
  if (u > begin && cores.inner_row(u - 1) == cores.inner_row(u)) return;
  const int64_t width = int64_t{1} * half.q_inner * half.rank;
  transpose({cores.inner_row_data(u), half.inner_rank, width, width}, scratch.transposed_inner,
            half.inner_rank);
}

// TtCpuKernels::contract.
void contract(const TtHalfCores& cores, const TtHalfGrads& grads, const float* value_grads,
              float* scratch_data, int64_t begin, int64_t end) {
  const int64_t size = cores.half.value_size();
  const BlockScratch scratch(cores.half, scratch_data);
  for (int64_t u = begin, next; u < end; u = next) {
    next = block_end(cores, u, end);
    transpose_inner(cores, begin, u, scratch);
    float* inner_grad = grads.inner_grads + grads.inner_positions[u] * cores.half.inner_size();
    contract_block(cores, grads, inner_grad, u, next, value_grads + (u - begin) * size, scratch);
  }
}

// Write a tile of the gradient of the value of left half u, `out`, for right halves of four
// columns: columns [m, m + 4), ranks [n, n + kVectors * kLanes). The sums stay in registers over
// all rows.
template <int kVectors>
EMB_HD void write_left_grad_tile(const TtLeftGradsArgs& args, int64_t u, int64_t m, int64_t n,
                                 float* out) {
  const int64_t rank = args.left.half.rank;
  const int64_t begin = args.left_segments[u], end = args.left_segments[u + 1];
  Vec sums[4][kVectors] = {};
  for (int64_t j = begin; j < end; ++j) {
    const float* grad = args.row_grads + j * args.row_stride + m * 4;
    const float* right = args.right_values + (args.row_rights[j] - args.first_right) * 4 * rank + n;
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      Vec b[kVectors];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) b[v] = load(right + k * rank + v * kLanes);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v) sums[i][v] += grad[i * 4 + k] * b[v];
      }
    }
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) store(out + (m + i) * rank + n + v * kLanes, sums[i][v]);
  }
}

// Write the gradient of the value of left half u to `out`, [columns, rank]: the sum, over its rows,
// of the gradient of the row times the value of its right half.
EMB_HD void write_left_grad(const TtLeftGradsArgs& args, int64_t u, float* out) {
  const TtHalf& left = args.left.half;
  const int64_t columns = left.columns(), rank = left.rank, right_columns = args.right_columns;
  const int64_t begin = args.left_segments[u], end = args.left_segments[u + 1];
  if (right_columns == 4 && columns % 4 == 0 && rank % kLanes == 0) {
    for (int64_t m = 0; m < columns; m += 4) {
      int64_t n = 0;
      for (; n + 2 * kLanes <= rank; n += 2 * kLanes) write_left_grad_tile<2>(args, u, m, n, out);
      if (n < rank) write_left_grad_tile<1>(args, u, m, n, out);
    }
    return;
  }
  for (int64_t j = begin; j < end; ++j) {
    multiply(
        {.m = columns,
         .n = rank,
         .k = right_columns,
         .a = args.row_grads + j * args.row_stride,
         .a_row_stride = right_columns,
         .a_column_stride = 1,
         .b = args.right_values + (args.row_rights[j] - args.first_right) * right_columns * rank,
         .b_row_stride = rank,
         .c = out,
         .c_row_stride = rank,
         .store = j == begin ? Store::kSet : Store::kAdd});
  }
}

// TtCpuKernels::write_left_grads.
void write_left_grads(const TtLeftGradsArgs& args, float* scratch_data, int64_t begin,
                      int64_t end) {
  const TtHalfCores& left = args.left;
  const TtHalf& half = left.half;
  const int64_t size = half.value_size();
  const BlockScratch scratch(half, scratch_data);
  if (!half.is_pair) {
    for (int64_t u = begin; u < end; ++u)
      write_left_grad(args, u, args.grads.outer_grads_by_half + u * size);
    return;
  }
  const bool has_step = args.step.update != nullptr;
  const int32_t* positions = args.grads.inner_positions;
  int64_t first = has_step ? positions[begin] : 0;  // position of row 0 of grads.inner_grads
  for (int64_t u = begin, next; u < end; u = next) {
    next = block_end(left, u, end);
    InnerPrefetch next_inner(left, next, end, next - u);
    for (int64_t i = u; i < next; ++i) {
      next_inner.prefetch_part();
      write_left_grad(args, i, scratch.values + (i - u) * size);
    }
    transpose_inner(left, begin, u, scratch);
    const int64_t position = positions[u];
    contract_block(left, args.grads,
                   args.grads.inner_grads + (position - first) * half.inner_size(), u, next,
                   scratch.values, scratch);
    if (!has_step || (next < end && positions[next] == position)) continue;
    const int64_t num_complete = position + 1 - first;
    if (num_complete < args.step.max_rows && next < end) continue;
    args.step.apply(args.grads.inner_grads, first, num_complete);
    first = position + 1;
  }
}

// Prefetch the gradient and the left value of the row at entry `cursor + kRowsAhead` of right_rows,
// if the entry is before `entries_end` and the row is of this wave.
EMB_HD void prefetch_row_of_right(const TtRightGradsArgs& args, int64_t cursor,
                                  int64_t entries_end) {
  if (cursor + kRowsAhead >= entries_end) return;
  const int64_t j = args.right_rows[cursor + kRowsAhead];
  if (j >= args.row_end) return;  // a row of a later wave
  const int64_t nbytes = args.left_columns * int64_t{sizeof(float)};
  prefetch_row<false>(args.row_grads + j * args.row_stride, nbytes * args.right_columns);
  prefetch_row<false>(args.left_values.at(args.row_lefts[j] - args.first_left), nbytes * args.rank);
}

// Add the product of a row's gradient, `grad` [left columns, 4], and its left value to `sums`, the
// gradient of a right half of four columns at kVectors * kLanes ranks; `left` is the left value
// from the first of these ranks on.
template <int kVectors>
EMB_HD void add_row(const TtRightGradsArgs& args, const float* grad, const float* left,
                    Vec (&sums)[4][kVectors]) {
  const int64_t columns = args.left_columns, rank = args.rank;
  for (int64_t column = 0; column < columns; ++column, grad += 4, left += rank) {
    Vec b[kVectors];
#pragma GCC unroll 2
    for (int k = 0; k < kVectors; ++k) b[k] = load(left + k * kLanes);
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
      for (int k = 0; k < kVectors; ++k) sums[i][k] += grad[i] * b[k];
    }
  }
}

// Add the rows of this wave to ranks [n, n + kVectors * kLanes) of the gradient of right half v, of
// four columns; the sums stay in registers. The half's first row overall sets the gradient. Return
// the half's next entry in right_rows. `entries_end` as in prefetch_row_of_right.
template <int kVectors>
EMB_HD int32_t add_right_grad_tile(const TtRightGradsArgs& args, int64_t v, int64_t n,
                                   int64_t entries_end) {
  const int64_t rank = args.rank;
  float* out = args.grads + v * 4 * rank + n;
  Vec sums[4][kVectors] = {};
  int32_t cursor = args.cursors[v];
  if (cursor != args.right_segments[v]) {
    for (int i = 0; i < 4; ++i) {
      for (int k = 0; k < kVectors; ++k) sums[i][k] = load(out + i * rank + k * kLanes);
    }
  }
  for (; cursor < args.right_segments[v + 1] && args.right_rows[cursor] < args.row_end; ++cursor) {
    if (n == 0) prefetch_row_of_right(args, cursor, entries_end);
    const int64_t j = args.right_rows[cursor];
    const float* grad = args.row_grads + j * args.row_stride;
    const float* left = args.left_values.at(args.row_lefts[j] - args.first_left) + n;
    add_row<kVectors>(args, grad, left, sums);
  }
  for (int i = 0; i < 4; ++i) {
    for (int k = 0; k < kVectors; ++k) store(out + i * rank + k * kLanes, sums[i][k]);
  }
  return cursor;
}

// Return the product that adds the contribution of row j to the gradient of its right half v, or
// sets the gradient to it if `is_first`.
EMB_HD Product right_grad_product(const TtRightGradsArgs& args, int64_t j, int64_t v,
                                  bool is_first) {
  return {.m = args.right_columns,
          .n = args.rank,
          .k = args.left_columns,
          .a = args.row_grads + j * args.row_stride,
          .a_row_stride = 1,
          .a_column_stride = args.right_columns,
          .b = args.left_values.at(args.row_lefts[j] - args.first_left),
          .b_row_stride = args.rank,
          .c = args.grads + v * args.right_columns * args.rank,
          .c_row_stride = args.rank,
          .store = is_first ? Store::kSet : Store::kAdd};
}

// TtCpuKernels::add_right_grads.
void add_right_grads(const TtRightGradsArgs& args, int64_t begin, int64_t end) {
  const int64_t right_columns = args.right_columns, rank = args.rank;
  const bool keeps_sums_in_registers = right_columns == 4 && rank % kLanes == 0;
  const int64_t entries_end = args.right_segments[end];
  for (int64_t v = begin; v < end; ++v) {
    int32_t cursor = args.cursors[v];
    if (keeps_sums_in_registers) {
      if (cursor == args.right_segments[v + 1] || args.right_rows[cursor] >= args.row_end) continue;
      int64_t n = 0;
      for (; n + 2 * kLanes <= rank; n += 2 * kLanes) {
        cursor = add_right_grad_tile<2>(args, v, n, entries_end);
      }
      if (n < rank) cursor = add_right_grad_tile<1>(args, v, n, entries_end);
      args.cursors[v] = cursor;
      continue;
    }
    for (; cursor < args.right_segments[v + 1] && args.right_rows[cursor] < args.row_end;
         ++cursor) {
      prefetch_row_of_right(args, cursor, entries_end);
      multiply(
          right_grad_product(args, args.right_rows[cursor], v, cursor == args.right_segments[v]));
    }
    args.cursors[v] = cursor;
  }
}

// Add the contribution of row j to ranks [n, n + kVectors * kLanes) of the gradient of its right
// half v, of four columns, or set the ranks to it if `is_first`.
template <int kVectors>
EMB_HD void add_row_to_tile(const TtRightGradsArgs& args, int64_t j, int64_t v, int64_t n,
                            bool is_first) {
  const int64_t rank = args.rank;
  float* out = args.grads + v * 4 * rank + n;
  Vec sums[4][kVectors] = {};
  if (!is_first) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
      for (int k = 0; k < kVectors; ++k) sums[i][k] = load(out + i * rank + k * kLanes);
    }
  }
  add_row<kVectors>(args, args.row_grads + j * args.row_stride,
                    args.left_values.at(args.row_lefts[j] - args.first_left) + n, sums);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
#pragma GCC unroll 2
    for (int k = 0; k < kVectors; ++k) store(out + i * rank + k * kLanes, sums[i][k]);
  }
}

// TtCpuKernels::add_right_grads_by_row. Rows are added in their order, so that left values and
// gradients of rows, the larger part of the memory, are read from front to back. add_right_grads
// adds the rows of a right half in the same order, and a sum in memory has the bits of a sum in
// registers, so that the results are equal.
void add_right_grads_by_row(const TtRightGradsArgs& args, int64_t begin, int64_t end) {
  const int64_t rank = args.rank, nbytes = args.right_columns * rank * int64_t{sizeof(float)};
  const bool keeps_sums_in_registers = args.right_columns == 4 && rank % kLanes == 0;
  for (int64_t j = begin; j < end; ++j) {
    const int64_t v = args.row_rights[j] - args.first_right;
    const bool is_first = args.cursors[v]++ == args.right_segments[v];
    if (j + kSumsAhead < end) {
      const int64_t v_ahead = args.row_rights[j + kSumsAhead] - args.first_right;
      prefetch_row<true>(args.grads + v_ahead * args.right_columns * rank, nbytes);
    }
    if (!keeps_sums_in_registers) {
      multiply(right_grad_product(args, j, v, is_first));
      continue;
    }
    int64_t n = 0;
    for (; n + 2 * kLanes <= rank; n += 2 * kLanes) add_row_to_tile<2>(args, j, v, n, is_first);
    if (n < rank) add_row_to_tile<1>(args, j, v, n, is_first);
  }
}

// TtCpuKernels::sum_outer.
void sum_outer(const TtOuterSumArgs& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    float* __restrict sum = args.grads + i * args.size;
    for (int32_t j = args.starts[i]; j < args.starts[i + 1]; ++j) {
      const float* __restrict value = args.outer_grads_by_half + args.halves[j] * args.size;
      for (int64_t d = 0; d < args.size; ++d) sum[d] += value[d];
    }
  }
}

// TtCpuKernels::reverse.
void reverse(const TtReverseArgs& args, int64_t begin, int64_t end) {
  const int64_t a = args.a, q = args.q, b = args.b, size = a * q * b;
  for (int64_t i = begin; i < end; ++i) {
    const float* from = args.from + (args.ids != nullptr ? args.ids[i] - args.first_id : i) * size;
    float* to = args.to + i * size;
    if (b == 1 || a == 1) {  // one axis of length 1: a plain transposition
      const int64_t num_rows = b == 1 ? a : q;
      transpose({from, num_rows, size / num_rows, size / num_rows}, to, num_rows);
      continue;
    }
    for (int64_t j = 0; j < q; ++j) transpose({from + j * b, a, b, q * b}, to + j * a, q * a);
  }
}

}  // namespace

extern const TtCpuKernels kTtCpuKernels;
const TtCpuKernels kTtCpuKernels = {
    expand,   write_rows, write_left_grads, add_right_grads, add_right_grads_by_row,
    contract, sum_outer,  reverse};

}  // namespace emb::EMB_ISA
