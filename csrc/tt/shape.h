// The algebra of a tensor-train table, shared by host and device. A row is a chain of cores,
// G0[i0] G1[i1] ..; its cores are split into a left and a right half of one or two cores each, so
// that a row is always one product, row[jl, jr] = sum_r left[jl, r] * right[jr, r], whatever the
// number of cores. The right half is kept mirrored (axes of its cores reversed): then both halves
// look alike and share all code.
#pragma once

#include "core/portability.h"

namespace emb {

inline constexpr int kMaxCores = 4;

// One half: rows of an outer core [outer_rows][q_outer, inner_rank] times, in a pair, rows of an
// inner core [inner_rows][inner_rank, q_inner, rank]. Its value is a matrix [q_outer q_inner,
// rank]. The inner core is the large one; ids of a half are inner * outer_rows + outer, so that
// ascending ids keep equal inner rows together.
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

// From row ids to keys: id of the left half, then of the right one.
struct TtKeyMap {
  int64_t rights, first, second;  // ids of right halves, rows of the first two cores
  bool pair;

  EMB_HD int64_t operator()(int64_t id) const {
    if (!pair) return id;
    const int64_t high = id / rights, low = id - high * rights;
    return (high % second * first + high / second) * rights + low;
  }
};

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

  EMB_HD TtKeyMap key_map() const { return {right().ids(), p[0], p[1], cores > 2}; }
};

}  // namespace emb
