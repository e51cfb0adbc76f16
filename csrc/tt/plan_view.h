// A batch's plan as the kernels read it: pointers into the tensors that `tt_plan` returns.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emb {

// The grouping of a batch's distinct rows by their halves, as `tt_plan` returns it. Rows j are in
// key order, so the rows of left half u are [left_segments[u], left_segments[u + 1]); the rows of
// right half v are right_rows[right_segments[v]], .., ascending. Entries after the counts mean
// nothing.
struct TtPlan {
  int64_t capacity;  // rows the tensors have room for, L
  const int32_t *lefts, *left_segments, *row_lefts;
  const int32_t *rights, *right_segments, *row_rights, *right_rows;
  const int32_t* counts;  // distinct rows M, left halves U, right halves V
};

inline constexpr size_t kTtPlanTensors = 8;

}  // namespace emb
