// The core rows that the halves of a table in a batch use, on the CPU: which they are, and the
// halves of each inner row. Ids of halves ascend, so that halves of one inner row are neighbours.
// The *position* of a used core row is its index among the used rows of its core, which ascend.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "tt/args.h"

namespace emb {

// The core rows that the halves of a pair use.
struct PairRows {
  std::vector<int32_t> outer, inner;  // the used core rows, ascending
  // [halves] position of the row of each half
  std::vector<int32_t> outer_positions, inner_positions;

  // Find the rows of `halves` halves; of `cores` only the shape and the ids are read.
  PairRows(const TtHalfCores& cores, int64_t halves)
      : outer_positions(halves), inner_positions(halves) {
    std::vector<int32_t> position_of(cores.half.outer_rows, -1);
    int64_t first_id = 0;  // id of the current inner row with outer row 0
    for (int64_t u = 0; u < halves; ++u) {
      const int64_t id = cores.id(u);
      if (u == 0 || id >= first_id + cores.half.outer_rows) {
        inner.push_back(static_cast<int32_t>(cores.inner_row(u)));
        first_id = inner.back() * cores.half.outer_rows;
      }
      inner_positions[u] = static_cast<int32_t>(inner.size()) - 1;
      outer_positions[u] = static_cast<int32_t>(id - first_id);
      position_of[outer_positions[u]] = 0;
    }
    for (size_t row = 0; row < position_of.size(); ++row) {
      if (position_of[row] < 0) continue;
      position_of[row] = static_cast<int32_t>(outer.size());
      outer.push_back(static_cast<int32_t>(row));
    }
    // Until here outer_positions has the core rows themselves.
    for (int32_t& position : outer_positions) position = position_of[position];
  }

  int64_t num_outer() const { return static_cast<int64_t>(outer.size()); }
  int64_t num_inner() const { return static_cast<int64_t>(inner.size()); }

  // Return the maximum number of halves that have the same inner row.
  int64_t max_halves_of_inner() const {
    int64_t longest = 0, num_halves = 0;
    for (size_t u = 0; u < inner_positions.size(); ++u) {
      num_halves = u > 0 && inner_positions[u] == inner_positions[u - 1] ? num_halves + 1 : 1;
      longest = std::max(longest, num_halves);
    }
    return longest;
  }

  // Return the first half that has the inner row of half u; u itself if it is the number of halves.
  int64_t first_of_inner(int64_t u) const {
    const auto halves = static_cast<int64_t>(inner_positions.size());
    while (u > 0 && u < halves && inner_positions[u] == inner_positions[u - 1]) --u;
    return u;
  }
};

// Return the core rows of halves that are no pairs: their ids, counted from the table's first id.
inline std::vector<int32_t> core_rows(const int32_t* ids, int64_t count, int64_t first_id) {
  std::vector<int32_t> rows(count);
  for (int64_t i = 0; i < count; ++i) rows[i] = static_cast<int32_t>(ids[i] - first_id);
  return rows;
}

// Write the core rows that the halves of a table use to `outer` and, for a pair, `inner`. Return
// the ids of the halves in a table that has only these rows.
inline std::vector<int32_t> compact_ids(const TtHalfCores& cores, int64_t halves,
                                        std::vector<int32_t>* outer, std::vector<int32_t>* inner) {
  std::vector<int32_t> ids(halves);
  if (!cores.half.is_pair) {
    *outer = core_rows(cores.ids, halves, cores.first_id);
    for (int64_t u = 0; u < halves; ++u) ids[u] = static_cast<int32_t>(u);
    return ids;
  }
  PairRows rows(cores, halves);
  const auto num_outer = static_cast<int32_t>(rows.num_outer());
  for (int64_t u = 0; u < halves; ++u) {
    ids[u] = rows.inner_positions[u] * num_outer + rows.outer_positions[u];
  }
  *outer = std::move(rows.outer);
  *inner = std::move(rows.inner);
  return ids;
}

// Divide halves [begin, end) by their inner row, and return the start of each group and then `end`.
inline std::vector<int64_t> inner_groups(const TtHalfCores& cores, int64_t begin, int64_t end) {
  std::vector<int64_t> starts;
  int64_t ids_end = 0;  // of the current inner row
  for (int64_t u = begin; u < end; ++u) {
    if (u > begin && cores.id(u) < ids_end) continue;
    starts.push_back(u);
    ids_end = (cores.inner_row(u) + 1) * cores.half.outer_rows;
  }
  starts.push_back(end);
  return starts;
}

}  // namespace emb
