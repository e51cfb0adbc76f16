// The shapes of tensor-train tables, the plan of a batch, and the arguments and the function table
// of the CPU kernels.
//
// A row of a table is a product of one row of each of its 2 to 4 cores, G0[i0] G1[i1] ... The cores
// form a left and a right half, of one core or of two (a *pair*). The *value* of a half is a
// matrix, and a row is a product of two values: row[jl, jr] = sum_r left[jl, r] * right[jr, r].
// Rows of a batch that have a half in common share its value. Code that handles both halves alike
// takes the right half mirrored, with the axes of its cores reversed.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/layout.h"
#include "optim/args.h"

namespace emb {

// A half has an id, and a row has a key, which is made of the ids of its halves. An op works on all
// tables of a module. Keys and ids are numbered table after table, so that those of a table are a
// range of a sorted array. In names and shapes, u is one of the U distinct left halves of a batch,
// v one of its V distinct right halves, and j one of its M distinct rows. L is the number of
// lookups, T the number of tables. Sizes and strides are in elements. The structs do not own the
// memory to which they point.

inline constexpr int kMaxCores = 4;  // cores per table

// The shape of one half. The outer core is [num_outer_rows][q_outer, inner_rank]. A pair also has
// an inner core, [num_inner_rows][inner_rank, q_inner, rank], usually the larger one. The value of
// a half is a matrix [q_outer * q_inner, rank]. The id of a half is (inner row) * num_outer_rows +
// (outer row), so that halves with the same inner row are neighbours in the order of ids. If a half
// is not a pair, num_inner_rows and q_inner are 1, and inner_rank is the rank.
struct TtHalf {
  bool is_pair;
  int64_t num_outer_rows, num_inner_rows;
  int q_outer, q_inner, inner_rank, rank;

  EMB_HD int64_t num_ids() const { return num_outer_rows * num_inner_rows; }
  // Return the number of columns that the half contributes to a row: a row has the product of those
  // of its halves.
  EMB_HD int columns() const { return q_outer * q_inner; }
  // Return the size of a value, of a row of the outer core, and of a row of the inner core.
  EMB_HD int64_t value_size() const { return int64_t{1} * columns() * rank; }
  EMB_HD int64_t outer_size() const { return int64_t{1} * q_outer * inner_rank; }
  EMB_HD int64_t inner_size() const { return int64_t{1} * inner_rank * q_inner * rank; }
};

// A row of the `tables` tensor of an op: how ids of a table become keys, and where its keys and the
// ids of its halves begin in the numbering of all tables. The key of a row within its table is
// (id of its left half) * right_ids + (id of its right half). emblib/columns.py has the same names.
struct TtTableIds {
  int64_t rows;                                // number of rows
  int64_t multiplier, offset;                  // id i has row (multiplier * i + offset) % rows
  int64_t left_outer_rows, left_inner_rows;    // num_outer_rows and num_inner_rows of the left half
  int64_t right_ids;                           // number of ids of right halves
  int64_t left_is_pair;                        // 1 or 0
  int64_t first_key, first_left, first_right;  // first key, first ids of left and right halves
};

// Return the row of an id in [0, table.rows). The multiplier must be below table.rows, as
// emblib/tt/shapes.py draws it; this is not checked. With fewer than 2^32 rows, 64 bits then hold
// its product with an id.
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
// the ranks are 1. A row has dim() = q[0] * q[1] * ... columns. The left half is a pair if there
// are three or four cores, the right half if there are four.
struct TtShape {
  int num_cores;                           // 2 to kMaxCores
  int64_t p[kMaxCores];                    // row factors: number of rows of each core
  int q[kMaxCores], ranks[kMaxCores + 1];  // q: dim factors

  EMB_HD TtHalf left() const {
    if (num_cores == 2) return {false, p[0], 1, q[0], 1, ranks[1], ranks[1]};
    return {true, p[0], p[1], q[0], q[1], ranks[1], ranks[2]};
  }
  EMB_HD TtHalf right() const {
    const int last = num_cores - 1;
    if (num_cores < 4) return {false, p[last], 1, q[last], 1, ranks[last], ranks[last]};
    return {true, p[3], p[2], q[3], q[2], ranks[3], ranks[2]};
  }
  EMB_HD int dim() const { return left().columns() * right().columns(); }
};

// The plan of a batch: its distinct rows, grouped by their halves, as the tensors that `tt_plan`
// returns. Rows j are in key order, so that the rows of left half u are [left_segments[u],
// left_segments[u + 1]). The rows of right half v are right_rows[right_segments[v]], ...,
// right_rows[right_segments[v + 1] - 1], ascending. Rows and halves are numbered over all tables.
// Entries after the last row, half or end of a segment are unspecified.
struct TtPlan {
  int64_t capacity;    // rows for which the tensors have room: L
  int64_t num_tables;  // T
  // [L] ids of the distinct left halves, ascending; [L + 1] segments; [L] left half u of each row.
  const int32_t *lefts, *left_segments, *row_lefts;
  // The same three arrays for right halves; [L] the rows sorted by right half.
  const int32_t *rights, *right_segments, *row_rights, *right_rows;
  // [3, T + 1]: the first row (line 0), the first left half (line 1) and the first right half (line
  // 2) of each table, and at the end of a line the number of all rows or halves.
  const int32_t* starts;

  // Return the index in `starts` of the last entry of a line.
  EMB_HD static int64_t total_index(int64_t line, int64_t num_tables) {
    return (line + 1) * (num_tables + 1) - 1;
  }
  EMB_HD const int32_t* row_starts() const { return starts; }
  EMB_HD const int32_t* left_starts() const { return starts + num_tables + 1; }
  EMB_HD const int32_t* right_starts() const { return starts + 2 * (num_tables + 1); }
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
  kNumTtPlanTensors
};

// Return the plan of `arrays`, [kNumTtPlanTensors]: the data of its tensors in the order of
// TtPlanTensor.
inline TtPlan tt_plan_of_arrays(int64_t capacity, int64_t num_tables,
                                const int32_t* const* arrays) {
  return {capacity,
          num_tables,
          arrays[kTtLefts],
          arrays[kTtLeftSegments],
          arrays[kTtRowLefts],
          arrays[kTtRights],
          arrays[kTtRightSegments],
          arrays[kTtRowRights],
          arrays[kTtRightRows],
          arrays[kTtStarts]};
}

// The CPU kernels. A call works on a range of halves or rows of one table, on one thread; the
// `*_cpu.cpp` files check, allocate and divide the work. Below, u and v number the distinct halves
// of one table, and j the distinct rows of all tables.

// Maximum number of halves that a kernel processes together: enough for the product that computes
// the gradient of an inner row to run at full speed, few enough that their values stay in the first
// two levels of the cache.
inline constexpr int64_t kTtBlockHalves = 16;

// The distinct left halves, or the distinct right halves, of a table in a batch, and their cores.
struct TtHalfCores {
  TtHalf half;
  const float* outer;  // [num_outer_rows][q_outer, inner_rank]
  const float* inner;  // [num_inner_rows][inner_rank, q_inner, rank]; unused if not a pair
  const int32_t* ids;  // ids of the distinct halves, ascending, numbered over all tables
  int64_t first_id;    // the first id of the table
  bool is_mirrored;    // right halves: columns of a value are (inner, outer), not (outer, inner)
  // If `outer` and `inner` have only the core rows that the batch uses: [num_halves] each, the
  // position there of the row of each half. Null if they are whole cores.
  const int32_t *outer_positions = nullptr, *inner_positions = nullptr;

  // Return the id of half u within the table, its inner row, and the address of that row. Only a
  // pair has data of an inner row.
  EMB_HD int64_t id(int64_t u) const { return ids[u] - first_id; }
  EMB_HD int64_t inner_row(int64_t u) const { return id(u) / half.num_outer_rows; }
  EMB_HD const float* inner_row_data(int64_t u) const {
    return inner +
           (inner_positions != nullptr ? inner_positions[u] : inner_row(u)) * half.inner_size();
  }
};

// The values of halves of a table. Those of the first `num_saved` halves are in `saved_values`, a
// buffer that the forward pass filled. The others are in `unsaved_values`: rows of a core, selected
// by the ids of the halves, or, if `ids` is null, a buffer that begins with half `first_unsaved`.
struct TtValues {
  const float* saved_values = nullptr;  // [num_saved][size]
  int64_t num_saved = 0;
  const float* unsaved_values = nullptr;  // [..][size]
  const int32_t* ids = nullptr;           // ids of the halves, or null
  int64_t first_id = 0;                   // first id of the table; read if `ids` is not null
  int64_t first_unsaved = 0;              // read if `ids` is null
  int64_t size = 0;                       // floats per value

  // Return the value of half u.
  EMB_HD const float* at(int64_t u) const {
    if (u < num_saved) return saved_values + u * size;
    return unsaved_values + (ids != nullptr ? ids[u] - first_id : u - first_unsaved) * size;
  }
};

// The arguments of TtCpuKernels::write_rows, for a range of the left halves of a table.
struct TtRowsArgs {
  TtHalfCores left;
  int right_columns;          // columns of the value of a right half
  const float* right_values;  // [V][right_columns, rank]
  // The same values transposed, [rank, right_columns]; read if has_lanes_along_right().
  TtValues transposed_right_values;
  const int32_t* left_segments;  // of the plan, from the table's first left half on
  const int32_t* row_rights;     // of the plan
  int64_t first_right;           // the table's first right half, v = 0, in row_rights
  // [num_left_values][value size], an output: the values of the first left halves. Used for pairs
  // only; num_left_values is 0 for others.
  float* left_values;
  int64_t num_left_values;
  float* rows;         // [M][row_stride], an output: rows of all tables
  int64_t row_stride;  // floats, at least the dim of the table

  // Return whether the lanes of a vector run along the columns of the right half, not of the left
  // half: they run along the wider one.
  EMB_HD bool has_lanes_along_right() const { return right_columns >= left.half.columns(); }
};

// Where kernels write the gradients of the core rows that halves of one side use. The gradient of
// an inner row is complete once all halves with that row have been processed. The gradient of an
// outer row is written per half; TtCpuKernels::sum_outer adds these up. If the halves are not
// pairs, their outer core is their only core, and the first two members are null. The kernels
// overwrite the memory, which need not be zeros.
struct TtHalfGrads {
  float* inner_grads;  // [..][inner_size]
  // [num_halves] the row of `inner_grads` for the inner row of each half. With a TtInnerStep, rows
  // are counted from the first inner row of the call, and after each step from the next one.
  const int32_t* inner_positions;
  float* outer_grads_by_half;  // [..][outer_size], from half `first_half` on
  int64_t first_half;
};

// An optimizer step on inner rows as soon as their gradients are complete, while these are still in
// the cache. TtHalfGrads::inner_grads then has room for `max_rows` rows, and is reused after each
// step. A call of the kernel must get all halves of each of its inner rows; this is not checked.
struct TtInnerStep {
  UpdateRowsFn update = nullptr;  // null: no step, inner_grads has room for all rows
  UpdateRowsArgs args = {};       // `rows` is the core row at each position; apply() sets `grads`
  int64_t max_rows = 0;           // 1 or more
  float* scratch = nullptr;       // [kMatrixScratchRows, inner_size], of this thread alone

  // Apply the optimizer to the `num_rows` inner rows from position `first` on, whose gradients are
  // `grads`, [num_rows, inner_size].
  void apply(const float* grads, int64_t first, int64_t num_rows) const {
    UpdateRowsArgs update_args = args;
    update_args.grads = grads;
    update_args.rows += first;
    update(update_args, scratch, 0, num_rows);
  }
};

// The arguments of TtCpuKernels::write_left_grads; members without a comment are as in TtRowsArgs.
struct TtLeftGradsArgs {
  TtHalfCores left;
  int right_columns;
  const float* right_values;
  const int32_t *left_segments, *row_rights;
  int64_t first_right;
  const float* row_grads;  // [M][row_stride] gradients of the rows
  int64_t row_stride;
  TtHalfGrads grads;
  TtInnerStep step = {};
};

// The arguments of TtCpuKernels::add_right_grads and add_right_grads_by_row. They add the rows of a
// *wave*, a range of left halves of a table. The waves of a table follow each other in the order of
// rows.
struct TtRightGradsArgs {
  TtValues left_values;
  int left_columns, right_columns, rank;
  // Arrays of the plan; right_segments begins with the table's first right half.
  const int32_t *right_segments, *right_rows, *row_lefts, *row_rights;
  int64_t first_left, first_right;  // the table's first halves, u = 0 and v = 0, in these arrays
  // [V] index in right_rows of the next row of each right half, in and out. The caller sets them to
  // the starts of the segments before the first wave.
  int32_t* cursors;
  int64_t row_end;         // the end of the rows of this wave
  const float* row_grads;  // [M][row_stride]
  int64_t row_stride;
  float* grads;  // [V][right_columns, rank], an output; a half's first row sets it, others add
};

// The arguments of TtCpuKernels::sum_outer. To outer row i it adds the gradients of halves
// halves[starts[i]], ..., halves[starts[i + 1] - 1], in this order.
struct TtOuterSumArgs {
  const float* outer_grads_by_half;  // [num_halves][size]
  int64_t size;                      // floats per outer row
  const int32_t *starts, *halves;    // [num_rows + 1] and [num_halves]
  float* grads;                      // [num_rows][size], to which the sums are added
};

// The arguments of TtCpuKernels::reverse. Row i of `to` is row ids[i] - first_id of `from`, or row
// i if `ids` is null, with its axes reversed.
struct TtReverseArgs {
  const float* from;  // [..][a, q, b]
  float* to;          // [..][b, q, a]
  const int32_t* ids = nullptr;
  int64_t first_id = 0;
  int64_t a, q, b;
};

// The kernels. [begin, end) is a range of halves unless a comment names other items; it may be
// empty, except with a step. `scratch` is tt_scratch_floats() uninitialised floats of this thread
// alone. Calls for disjoint ranges may run at once unless a comment excludes it. For `contract`,
// and for `write_left_grads` of pairs, the halves of one inner row may be divided between calls
// only if the calls follow each other in order.
struct TtCpuKernels {
  // Write the values of halves, which must be pairs, to `values`, which begins with half `begin`.
  void (*expand)(const TtHalfCores&, float* values, float* scratch, int64_t begin, int64_t end);
  // Write the rows of left halves, and the values of the halves below num_left_values.
  void (*write_rows)(const TtRowsArgs&, float* scratch, int64_t begin, int64_t end);
  // Write the gradients of the cores of left halves. With a step, apply it to the inner rows; their
  // gradients are then lost.
  void (*write_left_grads)(const TtLeftGradsArgs&, float* scratch, int64_t begin, int64_t end);
  // Add those rows of right halves that are in the wave to the gradients of the halves' values.
  void (*add_right_grads)(const TtRightGradsArgs&, int64_t begin, int64_t end);
  // Do the same with the same bits, but for rows [begin, end), which must be the rows of the wave.
  // Only one thread at a time may call it for a table.
  void (*add_right_grads_by_row)(const TtRightGradsArgs&, int64_t begin, int64_t end);
  // Write the gradients of both cores of pairs from `value_grads`, which begins with half `begin`.
  void (*contract)(const TtHalfCores&, const TtHalfGrads&, const float* value_grads, float* scratch,
                   int64_t begin, int64_t end);
  // Add up the gradients of outer rows [begin, end).
  void (*sum_outer)(const TtOuterSumArgs&, int64_t begin, int64_t end);
  // Reverse rows [begin, end).
  void (*reverse)(const TtReverseArgs&, int64_t begin, int64_t end);
};

// The scratch of a kernel on one thread: the float at which each of its arrays begins, and their
// end. A block is kTtBlockHalves halves.
struct TtScratchLayout {
  int64_t outer_rows = 0;    // copies of the outer rows of a block
  int64_t values;            // values of a block, or their gradients
  int64_t permuted_values;   // the same with columns in another order
  int64_t transposed_inner;  // an inner row
  int64_t transposed_value;  // a value
  int64_t transposed_row;    // a row of `dim` columns
  int64_t end;

  EMB_HD TtScratchLayout(const TtHalf& half, int64_t dim)
      : values(outer_rows + kTtBlockHalves * half.outer_size()),
        permuted_values(values + kTtBlockHalves * half.value_size()),
        transposed_inner(permuted_values + kTtBlockHalves * half.value_size()),
        transposed_value(transposed_inner + half.inner_size()),
        transposed_row(transposed_value + half.value_size()),
        end(transposed_row + dim) {}
};

// Return the number of floats of scratch that suffice for each kernel above on one thread, for
// halves of this shape and rows of `dim` columns.
inline int64_t tt_scratch_floats(const TtHalf& half, int dim) {
  return TtScratchLayout(half, dim).end;
}

}  // namespace emb
