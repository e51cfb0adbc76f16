// The shapes of tensor-train tables, the plan of a batch, and the arguments and tables of the CPU
// kernels.
//
// A row is a chain of cores, G0[i0] G1[i1] .. The cores are divided into a left and a right half of
// one or two cores each, so that a row is always one product, row[jl, jr] = sum_r
// left[jl, r] * right[jr, r], whatever the number of cores. The right half is stored mirrored
// (axes of its cores reversed), so that both halves have the same form and share all code.
//
// An op works on all tables of a module. Keys, and ids of halves, are numbered table after table,
// so that what belongs to a table is a range of every sorted array.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/layout.h"
#include "optim/args.h"

namespace emb {

inline constexpr int kMaxCores = 4;

// One half: rows of an outer core [outer_rows][q_outer, inner_rank] times, in a pair, rows of an
// inner core [inner_rows][inner_rank, q_inner, rank]. Its value is a matrix
// [q_outer q_inner, rank]. The inner core is the large one. The id of a half is
// inner * outer_rows + outer, so that in ascending order equal inner rows are contiguous.
struct TtHalf {
  bool pair;
  int64_t outer_rows, inner_rows;
  int q_outer, q_inner, inner_rank, rank;

  EMB_HD int64_t ids() const { return outer_rows * inner_rows; }
  EMB_HD int columns() const { return q_outer * q_inner; }
  EMB_HD int64_t value_size() const { return int64_t{1} * columns() * rank; }
  EMB_HD int64_t outer_size() const { return int64_t{1} * q_outer * inner_rank; }
  EMB_HD int64_t inner_size() const { return int64_t{1} * inner_rank * q_inner * rank; }
};

// A row of the `tables` tensor: how row ids of a table become keys, the id of the left half and
// then that of the right one; and where its keys and the ids of its halves begin among those of all
// tables.
struct TtTableIds {
  int64_t rows;
  int64_t multiplier, offset;  // id i has row (multiplier * i + offset) % rows
  int64_t first, second;       // rows of the first two cores
  int64_t rights;              // ids of right halves
  int64_t is_pair;             // 1 if the left half is a pair
  int64_t first_key, first_left, first_right;
};

// Return the row of an id. With fewer than 2^32 rows the product has 64 bits.
EMB_HD int64_t tt_row(const TtTableIds& table, int64_t id) {
  if (table.multiplier == 1 && table.offset == 0) return id;
  const auto rows = static_cast<uint64_t>(table.rows);
  const auto multiplier = static_cast<uint64_t>(table.multiplier);
  const auto i = static_cast<uint64_t>(id), offset = static_cast<uint64_t>(table.offset);
  if (rows < uint64_t{1} << 32)
    return static_cast<int64_t>((multiplier * i % rows + offset) % rows);
  using Wide = unsigned __int128;
  return static_cast<int64_t>((Wide{multiplier} * i + offset) % rows);
}

// Return the key of a row within its table, -1 for one to skip; other ids are repaired.
EMB_HD int64_t tt_key(const TtTableIds& table, int64_t index) {
  const int64_t repaired = repair_index(index, table.rows);
  if (repaired < 0) return -1;
  const int64_t id = tt_row(table, repaired);
  if (table.is_pair == 0) return id;
  const int64_t high = id / table.rights, low = id - high * table.rights;
  return (high % table.second * table.first + high / table.second) * table.rights + low;
}

inline constexpr int kTtTableColumns = 10;
static_assert(sizeof(TtTableIds) == kTtTableColumns * sizeof(int64_t));

struct TtShape {
  int cores;
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

// The grouping of a batch's distinct rows by their halves: the tensors that `tt_plan` returns. Rows
// j are in key order, so the rows of left half u are [left_segments[u], left_segments[u + 1]). The
// rows of right half v are right_rows[right_segments[v]], .., ascending. Rows and halves of table t
// are [starts[t], starts[t + 1]) of the three rows of `starts`. Entries after the last table are
// meaningless.
struct TtPlan {
  int64_t capacity;  // rows that the tensors have room for, L
  int64_t tables;    // T
  const int32_t *lefts, *left_segments, *row_lefts;
  const int32_t *rights, *right_segments, *row_rights, *right_rows;
  const int32_t* starts;  // [3, T + 1]: of rows, left halves, right halves

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

// The CPU kernels. Each works on a range of halves of one table on one thread; the `*_cpu.cpp`
// files check, allocate and divide the work. Indices u count distinct left halves of the table, v
// distinct right halves of the table, j distinct rows of all tables; rows are sorted by left half.

// Left halves processed together: enough for the gradient of the inner core to run at full speed,
// few enough that their values stay in the first-level cache.
inline constexpr int64_t kTtBlock = 16;

struct TtHalfCores {
  TtHalf half;
  const float* outer;  // [outer_rows][q_outer, inner_rank]
  const float* inner;  // [inner_rows][inner_rank, q_inner, rank]; unused when not a pair
  const int32_t* ids;  // distinct ids, ascending
  int64_t first_id;    // the first id of the table
  bool mirrored;       // the right half: its columns come out as (inner, outer)
  // The rows of `outer` and `inner` of each half where these have the rows of the batch only; null
  // where they are the cores.
  const int32_t *outer_numbers = nullptr, *inner_numbers = nullptr;

  EMB_HD int64_t id(int64_t u) const { return ids[u] - first_id; }
  EMB_HD int64_t inner_row(int64_t u) const { return id(u) / half.outer_rows; }
  EMB_HD int64_t outer_row(int64_t u) const { return id(u) % half.outer_rows; }
  EMB_HD const float* inner_of(int64_t u) const {
    return inner + (inner_numbers != nullptr ? inner_numbers[u] : inner_row(u)) * half.inner_size();
  }
};

// The values of halves: the first `num_saved` from the forward pass, the others either in the core
// itself (if `ids` is not null) or in a buffer that starts with half `first`.
struct TtValues {
  const float* saved;
  int64_t num_saved;
  const float* rest;
  const int32_t* ids;
  int64_t first_id, first, size;

  EMB_HD const float* at(int64_t u) const {
    if (u < num_saved) return saved + u * size;
    return rest + (ids != nullptr ? ids[u] - first_id : u - first) * size;
  }
};

struct TtRowsArgs {
  TtHalfCores left;
  int right_columns;
  const float* right;      // [V][right columns, rank]
  TtValues right_natural;  // [rank, right columns] each; only read when lanes run along the right
  const int32_t *left_segments, *row_rights;
  int64_t first_right;  // what row_rights has for v = 0
  float* saved;         // values of the first `num_saved` left halves
  int64_t num_saved;
  float* rows;  // [M][row_stride]
  int64_t row_stride;

  // Return whether lanes run along the right half: they run along the wider one.
  EMB_HD bool lanes_along_right() const { return right_columns >= left.half.columns(); }
};

// The gradients of one half, of the core rows of the batch only. Those of the inner core are
// complete once all of a group has been processed. Those of the outer core are stored per half
// (from `first` on) and summed afterwards, see sum_outer.
struct TtHalfGrads {
  float* inner;                  // [..][inner_size]
  const int32_t* inner_numbers;  // the row of `inner` of each half
  float* outer_values;           // [..][outer_size]
  int64_t first;
};

// Where the optimizer is applied to inner rows while their gradients are in the cache. `grads` then
// has room for `capacity` rows only, and halves [begin, end) must begin and end with an inner row.
struct TtInnerStep {
  UpdateRowsFn update = nullptr;  // null: all gradients are kept
  UpdateRowsArgs args = {};       // `grads` is not read; `rows` by number, as inner_numbers
  int64_t capacity = 0;
  float* scratch = nullptr;

  // Apply the optimizer to `count` inner rows from number `first` on.
  void apply(const float* grads, int64_t first, int64_t count) const {
    UpdateRowsArgs now = args;
    now.grads = grads;
    now.rows += first;
    update(now, scratch, 0, count);
  }
};

struct TtLeftGradsArgs {
  TtHalfCores left;
  int right_columns;
  const float* right;
  const int32_t *left_segments, *row_rights;
  int64_t first_right;
  const float* row_grads;  // [M][row_stride]
  int64_t row_stride;
  TtHalfGrads grads;
  TtInnerStep step = {};
};

struct TtRightGradsArgs {
  TtValues left;
  int left_columns, right_columns, rank;
  const int32_t *segments, *rows, *row_lefts, *row_rights;
  int64_t first_left, first_right;  // what row_lefts and row_rights have for u = 0 and v = 0
  int32_t* cursors;                 // [V] next entry of `rows` of each right half
  int64_t row_end;                  // rows from here on belong to a later wave
  const float* row_grads;
  int64_t row_stride;
  float* grads;  // [V][right columns, rank]
};

// Adds outer_values of the halves members[starts[i]], .. to row i of the gradient.
struct TtOuterSumArgs {
  const float* outer_values;
  int64_t size;
  const int32_t *starts, *members;
  float* grads;
};

// Reverses the axes of rows: row from_ids[i] of `from`, or i, becomes row to_ids[i] of `to`, or i.
struct TtReverseArgs {
  const float* from;  // [..][a, q, b]
  float* to;          // [..][b, q, a]
  const int32_t *from_ids, *to_ids;
  int64_t first_id;  // what the ids have for row 0
  int64_t a, q, b;
};

struct TtTable {
  void (*expand)(const TtHalfCores&, float* values, float* scratch, int64_t begin, int64_t end);
  void (*rows)(const TtRowsArgs&, float* scratch, int64_t begin, int64_t end);
  void (*left_grads)(const TtLeftGradsArgs&, float* scratch, int64_t begin, int64_t end);
  void (*right_grads)(const TtRightGradsArgs&, int64_t begin, int64_t end);
  // The same for a range of rows instead of right halves: same bits, see there.
  void (*right_grads_by_row)(const TtRightGradsArgs&, int64_t begin, int64_t end);
  void (*contract)(const TtHalfCores&, const TtHalfGrads&, const float* value_grads, float* scratch,
                   int64_t begin, int64_t end);
  void (*sum_outer)(const TtOuterSumArgs&, int64_t begin, int64_t end);
  void (*reverse)(const TtReverseArgs&, int64_t begin, int64_t end);
};

// Floats of scratch that any kernel above needs on one thread.
inline int64_t tt_scratch_size(const TtHalf& half, int dim) {
  return kTtBlock * (2 * half.value_size() + half.outer_size()) + half.inner_size() +
         half.value_size() + dim;
}

}  // namespace emb
