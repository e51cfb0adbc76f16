// The tensor-train kernels of the CPU: what they take and how they are reached. Each works on a
// range of halves on one thread; the `*_cpu.cpp` files check, allocate and cut the work. Indices u
// count distinct left halves, v distinct right halves, j distinct rows; rows are sorted by left
// half.
#pragma once

#include "tt/shape.h"

namespace emb {

// Left halves handled together: enough for the gradient of the inner core to run at full speed,
// few enough that their values stay in the first cache.
inline constexpr int64_t kTtBlock = 16;

struct TtHalfCores {
  TtHalf half;
  const float* outer;  // [outer_rows][q_outer, inner_rank]
  const float* inner;  // [inner_rows][inner_rank, q_inner, rank]; unused when not a pair
  const int32_t* ids;  // distinct ids, ascending
  bool mirrored;       // the right half: its columns come out as (inner, outer)
};

// Where the values of halves are: the first `num_kept` from the forward pass, the others either in
// the core itself (`ids` given) or in a buffer that starts with half `first`.
struct TtValues {
  const float* kept;
  int64_t num_kept;
  const float* rest;
  const int32_t* ids;
  int64_t first, size;

  EMB_HD const float* at(int64_t u) const {
    if (u < num_kept) return kept + u * size;
    return rest + (ids != nullptr ? ids[u] : u - first) * size;
  }
};

struct TtRowsArgs {
  TtHalfCores left;
  int right_columns;
  const float* right;      // [V][right columns, rank]
  TtValues right_natural;  // [rank, right columns] each; only read when lanes run along the right
  const int32_t *left_segments, *row_rights;
  float* kept;  // values of the first `num_kept` left halves
  int64_t num_kept;
  float* rows;  // [M][dim]

  // Lanes run along the wider half.
  EMB_HD bool lanes_along_right() const { return right_columns >= left.half.columns(); }
};

// Gradients of one half. The inner core's are complete when a group has been walked through; the
// outer core's are left per half (from `first` on) and summed afterwards, see sum_outer.
struct TtHalfGrads {
  float* inner;         // [inner_rows][inner_size]
  float* outer_values;  // [..][outer_size]; not a pair: the core's own gradient, by id
  int64_t first;
};

struct TtLeftGradsArgs {
  TtHalfCores left;
  int right_columns;
  const float* right;
  const int32_t *left_segments, *row_rights;
  const float* row_grads;  // [M][dim]
  TtHalfGrads grads;
};

struct TtRightGradsArgs {
  TtValues left;
  int left_columns, right_columns, rank;
  const int32_t *segments, *rows, *row_lefts;
  int32_t* cursors;  // [V] next entry of `rows` of each right half
  int64_t row_end;   // rows from here on belong to a later wave
  const float* row_grads;
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
  int64_t a, q, b;
};

struct TtTable {
  void (*expand)(const TtHalfCores&, float* values, float* scratch, int64_t begin, int64_t end);
  void (*rows)(const TtRowsArgs&, float* scratch, int64_t begin, int64_t end);
  void (*left_grads)(const TtLeftGradsArgs&, float* scratch, int64_t begin, int64_t end);
  void (*right_grads)(const TtRightGradsArgs&, int64_t begin, int64_t end);
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
