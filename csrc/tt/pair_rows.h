// The core rows that the halves of a table in a batch use, on the CPU, and the halves of each inner
// row. tt/args.h defines these words. Halves are numbered in the order of their ids, so that halves
// of one inner row are neighbours. The used rows of a core are listed in ascending order. The
// *position* of a used row is its index in this list.
#pragma once

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "tt/args.h"

namespace emb {

// The core rows that the halves of a pair use.
struct PairRows {
  std::vector<int32_t> outer_rows, inner_rows;  // the used rows of either core, ascending
  // [num_halves] the positions of the rows of each half
  std::vector<int32_t> outer_positions, inner_positions;

  // Find the rows of the distinct halves [0, num_halves) of `cores`, of which only the shape and
  // the ids are read.
  PairRows(const TtHalfCores& cores, int64_t num_halves)
      : outer_positions(num_halves), inner_positions(num_halves) {
    std::vector<int32_t> position_of_row(cores.half.num_outer_rows, -1);  // -1: the row is not used
    int64_t first_id = 0;  // id of the half with the current inner row and outer row 0
    for (int64_t u = 0; u < num_halves; ++u) {
      const int64_t id = cores.id(u);
      if (u == 0 || id >= first_id + cores.half.num_outer_rows) {
        inner_rows.push_back(static_cast<int32_t>(cores.inner_row(u)));
        first_id = inner_rows.back() * cores.half.num_outer_rows;
      }
      inner_positions[u] = static_cast<int32_t>(inner_rows.size()) - 1;
      outer_positions[u] = static_cast<int32_t>(id - first_id);  // the row, until the last loop
      position_of_row[outer_positions[u]] = 0;
    }
    for (size_t row = 0; row < position_of_row.size(); ++row) {
      if (position_of_row[row] < 0) continue;
      position_of_row[row] = static_cast<int32_t>(outer_rows.size());
      outer_rows.push_back(static_cast<int32_t>(row));
    }
    for (int32_t& position : outer_positions) position = position_of_row[position];
  }

  // Return the number of used rows of either core.
  int64_t num_outer() const { return static_cast<int64_t>(outer_rows.size()); }
  int64_t num_inner() const { return static_cast<int64_t>(inner_rows.size()); }

  // Return the maximum number of halves that have the same inner row.
  int64_t max_halves_per_inner_row() const {
    int64_t max_halves = 0, num_halves = 0;
    for (size_t u = 0; u < inner_positions.size(); ++u) {
      num_halves = u > 0 && inner_positions[u] == inner_positions[u - 1] ? num_halves + 1 : 1;
      max_halves = std::max(max_halves, num_halves);
    }
    return max_halves;
  }

  // Return the first half that has the inner row of half u, or u if that is the number of halves.
  int64_t first_half_of_inner_row(int64_t u) const {
    const auto num_halves = static_cast<int64_t>(inner_positions.size());
    while (u > 0 && u < num_halves && inner_positions[u] == inner_positions[u - 1]) --u;
    return u;
  }
};

// Return the core rows of halves that are not pairs: their ids, counted from the table's first id.
inline std::vector<int32_t> core_rows(const int32_t* ids, int64_t num_halves, int64_t first_id) {
  std::vector<int32_t> rows(num_halves);
  for (int64_t u = 0; u < num_halves; ++u) rows[u] = static_cast<int32_t>(ids[u] - first_id);
  return rows;
}

// Write the core rows that the halves [0, num_halves) of `cores` use to `outer_rows` and, for
// pairs, to `inner_rows`. Return the ids of these halves, counted from 0, in a table whose cores
// have only these rows. The order of the ids stays the same.
inline std::vector<int32_t> compact_ids(const TtHalfCores& cores, int64_t num_halves,
                                        std::vector<int32_t>* outer_rows,
                                        std::vector<int32_t>* inner_rows) {
  std::vector<int32_t> ids(num_halves);
  if (!cores.half.is_pair) {
    *outer_rows = core_rows(cores.ids, num_halves, cores.first_id);
    for (int64_t u = 0; u < num_halves; ++u) ids[u] = static_cast<int32_t>(u);
    return ids;
  }
  PairRows rows(cores, num_halves);
  const auto num_outer = static_cast<int32_t>(rows.num_outer());
  for (int64_t u = 0; u < num_halves; ++u) {
    ids[u] = rows.inner_positions[u] * num_outer + rows.outer_positions[u];
  }
  *outer_rows = std::move(rows.outer_rows);
  *inner_rows = std::move(rows.inner_rows);
  return ids;
}

// Return the first half of each group of halves [begin, end) with one inner row, and then `end`.
inline std::vector<int64_t> inner_row_groups(const TtHalfCores& cores, int64_t begin, int64_t end) {
  std::vector<int64_t> starts;
  int64_t ids_end = 0;  // end of the ids of halves with the current inner row
  for (int64_t u = begin; u < end; ++u) {
    if (u > begin && cores.id(u) < ids_end) continue;
    starts.push_back(u);
    ids_end = (cores.inner_row(u) + 1) * cores.half.num_outer_rows;
  }
  starts.push_back(end);
  return starts;
}

}  // namespace emb
