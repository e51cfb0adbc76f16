// The shapes of tensor-train tables, the plan of a batch, and the arguments and the function table
// of the CPU kernels.
//
// A row of a table is a product of one row of each of its 2 to 4 cores, G0[i0] G1[i1] ... The cores
// are divided into a left and a right half of one or two cores each (a *pair*), so that a row is
// always one product, row[jl, jr] = sum_r left[jl, r] * right[jr, r], whatever the number of cores.
// The right half is stored mirrored (the axes of its cores reversed), so that both halves have the
// same form and share all code. Rows of a batch with the same half share its *value*, a matrix.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/layout.h"
#include "optim/args.h"

namespace emb {

// A half has an id, and a row has a key made of the ids of its halves. An op works on all tables of
// a module: keys and ids are numbered table after table, so that the keys or ids of a table are a
// range of every sorted array. In names and shapes, u counts the U distinct left halves of a batch,
// v its V distinct right halves, j its M distinct rows; L is the number of lookups, T the number of
// tables. All structs hold pointers that they do not own.

inline constexpr int kMaxCores = 4;  // cores per table

// The shape of one half. The outer core is [outer_rows][q_outer, inner_rank]; a pair also has an
// inner core [inner_rows][inner_rank, q_inner, rank], which is the large one. The value of a half
// is a matrix [q_outer q_inner, rank]. The id of a half is inner row * outer_rows + outer row, so
// that in ascending order halves with the same inner row are neighbours. Without a pair inner_rows
// and q_inner are 1 and inner_rank is the rank.
struct TtHalf {
  bool is_pair;
  int64_t outer_rows, inner_rows;
  int q_outer, q_inner, inner_rank, rank;

  EMB_HD int64_t ids() const { return outer_rows * inner_rows; }
  EMB_HD int columns() const { return q_outer * q_inner; }
  // Elements of a value, of a row of the outer core, and of a row of the inner core.
  EMB_HD int64_t value_size() const { return int64_t{1} * columns() * rank; }
  EMB_HD int64_t outer_size() const { return int64_t{1} * q_outer * inner_rank; }
  EMB_HD int64_t inner_size() const { return int64_t{1} * inner_rank * q_inner * rank; }
};

// A row of the `tables` tensor of an op: how ids of a table become keys, and where its keys and the
// ids of its halves begin in the numbering of all tables. The key of a row within its table is
// (id of its left half) * right_ids + (id of its right half).
struct TtTableIds {
  int64_t rows;                                // rows of the table
  int64_t multiplier, offset;                  // id i has row (multiplier * i + offset) % rows
  int64_t left_outer_rows, left_inner_rows;    // outer_rows and inner_rows of the left TtHalf
  int64_t right_ids;                           // ids of right halves
  int64_t left_is_pair;                        // 1 or 0
  int64_t first_key, first_left, first_right;  // first key, first ids of left and right halves
};

// Return the row of an id in [0, rows). With fewer than 2^32 rows, 64 bits hold the product of an
// id and a multiplier below `rows`, as emblib/tt/shapes.py draws it; this is not checked.
EMB_HD int64_t tt_row(const TtTableIds& table, int64_t id) {
  if (table.multiplier == 1 && table.offset == 0) return id;
  const auto rows = static_cast<uint64_t>(table.rows);
  const auto multiplier = static_cast<uint64_t>(table.multiplier);
  const auto i = static_cast<uint64_t>(id), offset = static_cast<uint64_t>(table.offset);
  if (rows < uint64_t{1} << 32)
    return static_cast<int64_t>(((multiplier * i) % rows + offset) % rows);
  using Wide = unsigned __int128;
  return static_cast<int64_t>((Wide{multiplier} * i + offset) % rows);
}

// Return the key, within its table, of the row of an index: -1 for an index of -1 or an empty
// table, and the key of id 0 for any other index out of range (see repair_index).
EMB_HD int64_t tt_key(const TtTableIds& table, int64_t index) {
  const int64_t repaired = repair_index(index, table.rows);
  if (repaired < 0) return -1;
  const int64_t row = tt_row(table, repaired);
  if (table.left_is_pair == 0) return row;
  const int64_t left_row = row / table.right_ids, right_id = row - left_row * table.right_ids;
  const int64_t outer_row = left_row / table.left_inner_rows,
                inner_row = left_row % table.left_inner_rows;
  return (inner_row * table.left_outer_rows + outer_row) * table.right_ids + right_id;
}

inline constexpr int kTtTableColumns = 10;
static_assert(sizeof(TtTableIds) == kTtTableColumns * sizeof(int64_t));

// The shape of a table: core k is [p[k]][ranks[k], q[k], ranks[k + 1]]; the first and the last of
// the ranks are 1. A row has dim() = q[0] * q[1] * ... columns.
struct TtShape {
  int cores;  // 2 to kMaxCores
  int64_t p[kMaxCores];
  int q[kMaxCores], ranks[kMaxCores + 1];

  EMB_HD TtHalf left() const {
    if (cores == 2) return {false, p[0], 1, q[0], 1, ranks[1], ranks[1]};
    return {true, p[0], p[1], q[0], q[1], ranks[1], ranks[2]};
  }
  EMB_HD TtHalf right() const {
    const int last = cores - 1;
    if (cores < 4) return {false, p[last], 1, q[last], 1, ranks[last], ranks[last]};
    return {true, p[3], p[2], q[3], q[2], ranks[3], ranks[2]};
  }
  EMB_HD int dim() const { return left().columns() * right().columns(); }
};

// The plan of a batch: its distinct rows grouped by their halves, as the tensors that `tt_plan`
// returns. Rows j are in key order, so that the rows of left half u are [left_segments[u],
// left_segments[u + 1]). The rows of right half v are right_rows[right_segments[v]], ...,
// right_rows[right_segments[v + 1] - 1], ascending. Numbers u, v and j count those of all tables;
// entries after the last existing one are unspecified.
struct TtPlan {
  int64_t capacity;  // rows for which the tensors have room: L
  int64_t tables;    // T
  // Ids of the distinct left halves, ascending [L]; segments [L + 1]; left half u of each row [L].
  const int32_t *lefts, *left_segments, *row_lefts;
  // The same three arrays for right halves, and the rows sorted by right half [L].
  const int32_t *rights, *right_segments, *row_rights, *right_rows;
  const int32_t* starts;  // [3, T + 1] first row, first left and first right half of each table

  // Return the index in `starts` of the last entry of a line: the number of all rows (line 0), left
  // halves (1) or right halves (2).
  EMB_HD static int64_t total_index(int64_t line, int64_t num_tables) {
    return (line + 1) * (num_tables + 1) - 1;
  }
  EMB_HD const int32_t* row_starts() const { return starts; }
  EMB_HD const int32_t* left_starts() const { return starts + tables + 1; }
  EMB_HD const int32_t* right_starts() const { return starts + 2 * (tables + 1); }
};

// The order of these tensors in the list that `tt_plan` returns.
enum TtPlanTensor : int {
  kTtLefts,
  kTtLeftSegments,
  kTtRowLefts,
  kTtRights,
  kTtRightSegments,
  kTtRowRights,
  kTtRightRows,
  kTtStarts,
  kTtPlanTensors
};

// The CPU kernels. Each works on a range of halves or rows of one table on one thread; the
// `*_cpu.cpp` files check, allocate and divide the work. Below, u and v count the distinct halves
// of one table, j the distinct rows of all tables.

// Maximum number of halves processed together: enough for the product that computes the gradient of
// an inner row to run at full speed, few enough that their values stay in the first-level cache.
inline constexpr int64_t kTtBlock = 16;

// The distinct left halves, or right halves, of a table in a batch, and the cores that they are
// made of.
struct TtHalfCores {
  TtHalf half;
  const float* outer;  // [outer_rows][q_outer, inner_rank]
  const float* inner;  // [inner_rows][inner_rank, q_inner, rank]; unused when not a pair
  const int32_t* ids;  // ids of the distinct halves, ascending
  int64_t first_id;    // the first id of the table
  bool is_mirrored;    // right halves: columns of a value are (inner, outer), not (outer, inner)
  // [halves] each: the position of the row of each half in `outer` and in `inner`, if these are not
  // whole cores but only the rows that the batch uses. Else null.
  const int32_t *outer_positions = nullptr, *inner_positions = nullptr;

  // Return the id of half u within the table, its inner row, and the elements of that row.
  EMB_HD int64_t id(int64_t u) const { return ids[u] - first_id; }
  EMB_HD int64_t inner_row(int64_t u) const { return id(u) / half.outer_rows; }
  EMB_HD const float* inner_of(int64_t u) const {
    return inner +
           (inner_positions != nullptr ? inner_positions[u] : inner_row(u)) * half.inner_size();
  }
};

// The values of halves. The first `num_saved` are in a buffer that the forward pass saved. The
// others are in `unsaved`: rows of a core if `ids` is not null, else a buffer that begins with half
// `first_unsaved`.
struct TtValues {
  const float* saved = nullptr;  // [num_saved][size]
  int64_t num_saved = 0;
  const float* unsaved = nullptr;  // [..][size]
  const int32_t* ids = nullptr;    // ids of the halves, or null
  int64_t first_id = 0;            // first id of the table
  int64_t first_unsaved = 0;       // first half in `unsaved`
  int64_t size = 0;                // floats per value

  // Return the value of half u.
  EMB_HD const float* at(int64_t u) const {
    if (u < num_saved) return saved + u * size;
    return unsaved + (ids != nullptr ? ids[u] - first_id : u - first_unsaved) * size;
  }
};

// The arguments that make the rows of left halves. M is the number of distinct rows of all tables.
struct TtRowsArgs {
  TtHalfCores left;
  int right_columns;       // columns of a right half
  const float* right;      // [V][right_columns, rank] values of the right halves
  TtValues right_natural;  // these values as [rank, right_columns]; read if lanes_along_right()
  const int32_t *left_segments, *row_rights;  // of the plan, from the table's first half on
  int64_t first_right;                        // the number of half v = 0 in row_rights
  float* saved;  // [num_saved][value size], an output: values of the first left halves
  int64_t num_saved;
  float* rows;         // [M][row_stride], an output
  int64_t row_stride;  // floats

  // Return whether lanes run along the right half: they run along the wider one.
  EMB_HD bool lanes_along_right() const { return right_columns >= left.half.columns(); }
};

// The gradients of the core rows of one half that the batch uses, an output. The gradient of an
// inner row is complete once all halves with that row have been processed. Gradients of outer rows
// are stored per half, and summed afterwards by `sum_outer`.
struct TtHalfGrads {
  float* inner;                    // [..][inner_size]; null if the half is no pair
  const int32_t* inner_positions;  // [halves] the row in `inner` of each half
  float* outer_values;             // [..][outer_size], of halves from `first` on
  int64_t first;
};

// The optimizer step on inner rows as soon as their gradients are complete and still in the cache.
// TtHalfGrads::inner then has room for `capacity` rows only, and a call must get all halves of each
// of its inner rows; not checked.
struct TtInnerStep {
  UpdateRowsFn update = nullptr;  // null: no step, all gradients are kept
  UpdateRowsArgs args = {};       // `rows` is the core row at each position; apply sets `grads`
  int64_t capacity = 0;
  float* scratch = nullptr;  // [kMatrixScratchRows, inner_size], of this thread alone

  // Apply the optimizer to the `count` inner rows from position `first` on, whose gradients are
  // `grads`, [count, inner_size].
  void apply(const float* grads, int64_t first, int64_t count) const {
    UpdateRowsArgs update_args = args;
    update_args.grads = grads;
    update_args.rows += first;
    update(update_args, scratch, 0, count);
  }
};

// The arguments that make the gradients of the cores of left halves; members as in TtRowsArgs.
struct TtLeftGradsArgs {
  TtHalfCores left;
  int right_columns;
  const float* right;
  const int32_t *left_segments, *row_rights;
  int64_t first_right;
  const float* row_grads;  // [M][row_stride] gradients of the rows
  int64_t row_stride;
  TtHalfGrads grads;
  TtInnerStep step = {};
};

// The arguments that compute the gradients of the values of right halves, in waves of left halves:
// a call adds the rows before `row_end` that no earlier call has added.
struct TtRightGradsArgs {
  TtValues left;  // values of the left halves
  int left_columns, right_columns, rank;
  // right_segments, right_rows, row_lefts and row_rights of the plan.
  const int32_t *segments, *rows, *row_lefts, *row_rights;
  int64_t first_left, first_right;  // numbers of halves u = 0 and v = 0 in these arrays
  int32_t* cursors;                 // [V] index in `rows` of each half's next row, in and out
  int64_t row_end;                  // the end of the rows of this wave
  const float* row_grads;           // [M][row_stride]
  int64_t row_stride;
  float* grads;  // [V][right_columns, rank], an output; a half's first row sets it, others add
};

// The arguments that sum the gradients of outer rows: row i gets those of halves
// members[starts[i]], ..., members[starts[i + 1] - 1], in this order.
struct TtOuterSumArgs {
  const float* outer_values;  // [halves][size]
  int64_t size;               // floats per outer row
  const int32_t *starts, *members;
  float* grads;  // [rows][size], to which the sums are added
};

// The arguments that reverse the axes of rows: row ids[i] - first_id of `from` becomes row i of
// `to`. If `ids` is null, it is row i of `from`.
struct TtReverseArgs {
  const float* from;  // [..][a, q, b]
  float* to;          // [..][b, q, a]
  const int32_t* ids = nullptr;
  int64_t first_id = 0;
  int64_t a, q, b;
};

// The kernels. [begin, end) is a range of halves unless a comment names other items; `scratch` is
// tt_scratch_size floats of this thread alone. Calls for disjoint ranges may run at once unless a
// comment excludes it.
struct TtTable {
  // Write the values of halves of a pair to `values`, which begins with half `begin`.
  void (*expand)(const TtHalfCores&, float* values, float* scratch, int64_t begin, int64_t end);
  // Write the rows of left halves, and save the values of the halves below num_saved.
  void (*rows)(const TtRowsArgs&, float* scratch, int64_t begin, int64_t end);
  // Write the gradients of the cores of left halves. With a step, apply it to the inner core
  // instead of keeping the gradients of inner rows.
  void (*left_grads)(const TtLeftGradsArgs&, float* scratch, int64_t begin, int64_t end);
  // Add rows to the gradients of the values of right halves.
  void (*right_grads)(const TtRightGradsArgs&, int64_t begin, int64_t end);
  // Add rows [begin, end) instead of the rows of right halves, with the same bits. Only one thread
  // at a time may call it for a table.
  void (*right_grads_by_row)(const TtRightGradsArgs&, int64_t begin, int64_t end);
  // Write the gradients of both cores of a pair from `value_grads`, which begins with half `begin`.
  void (*contract)(const TtHalfCores&, const TtHalfGrads&, const float* value_grads, float* scratch,
                   int64_t begin, int64_t end);
  // Sum the gradients of outer rows [begin, end).
  void (*sum_outer)(const TtOuterSumArgs&, int64_t begin, int64_t end);
  // Reverse rows [begin, end).
  void (*reverse)(const TtReverseArgs&, int64_t begin, int64_t end);
};

// The scratch of a kernel on one thread: the floats at which its arrays begin, and their end.
struct TtScratchLayout {
  int64_t packed = 0;  // outer rows of a block
  int64_t values;      // values of a block
  int64_t permuted;    // these values with columns in another order
  int64_t inner;       // an inner row
  int64_t value;       // a value
  int64_t row;         // a row of `dim` columns
  int64_t end;

  EMB_HD TtScratchLayout(const TtHalf& half, int64_t dim)
      : values(packed + kTtBlock * half.outer_size()),
        permuted(values + kTtBlock * half.value_size()),
        inner(permuted + kTtBlock * half.value_size()),
        value(inner + half.inner_size()),
        row(value + half.value_size()),
        end(row + dim) {}
};

// Return the floats of scratch that any kernel above needs on one thread, for rows of `dim`
// columns.
inline int64_t tt_scratch_size(const TtHalf& half, int dim) {
  return TtScratchLayout(half, dim).end;
}

}  // namespace emb
