// Lookups of tensor trains that *store* some of their rows, shared by the CPU and the GPU: which
// lookups read a stored row (a hit), for which lookups the cores compute the row, and the counts of
// lookups and hits per table. Pointers are to memory of the device on which the op runs. n, the
// number of lookups, may be 0. The schema of the ops calls core_ids `cold`, stored_rows `rows`, and
// counted_keys `counted`.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"

namespace emb {

// The arguments of `tt_stored`. Arrays are [n], by lookup, except row_of_slot.
struct TtStoredArgs {
  IndexArray indices;          // indices of the batch, as the caller passed them
  const int64_t* ids;          // the repaired indices; -1 for lookups to skip
  const int64_t* keys;         // the ids, numbered over all tables; -1 for lookups to skip
  const int64_t* slots;        // slot of each key in the index of stored rows, -1 for none; null if
                               // no row is stored
  const int64_t* row_of_slot;  // [num_slots] stored row of each slot, -1 for none
  int64_t num_slots;
  int64_t n;
  // Outputs. If `slots` is null, only counted_keys is written.
  int64_t* core_ids;      // the id if the cores must compute its row, -1 if the row is stored
  int64_t* stored_rows;   // the stored row, -1 for none
  int64_t* counted_keys;  // the key if the index was valid, else -1

  // Write the outputs of lookup i.
  EMB_HD void write_outputs(int64_t i) const {
    const int64_t id = ids[i];
    counted_keys[i] = indices[i] == id ? keys[i] : -1;
    if (slots == nullptr) return;
    const int64_t slot = slots[i];
    const int64_t row = slot >= 0 && slot < num_slots ? row_of_slot[slot] : -1;
    stored_rows[i] = row;
    core_ids[i] = row < 0 ? id : -1;
  }
};

// The arguments of `tt_count_`.
struct TtCountArgs {
  // [n] outputs of `tt_stored`; stored_rows is null if no rows are stored.
  const int64_t *counted_keys, *stored_rows;
  int64_t n;
  const int64_t* first_lookups;     // [F + 1] first lookup of each feature, ascending, then the end
  const int64_t* table_of_feature;  // [F]
  int64_t num_features, num_tables;
  int64_t* counters;    // [num_tables, num_columns]: column 0 counts lookups, column 1 hits
  int64_t num_columns;  // 2 or more; the others are not changed

  // Return whether lookup i is counted, and whether it is counted as a hit.
  EMB_HD bool is_counted(int64_t i) const { return counted_keys[i] >= 0; }
  EMB_HD bool is_hit(int64_t i) const {
    return stored_rows != nullptr && is_counted(i) && stored_rows[i] >= 0;
  }
  // Return the counters of the table of feature f, null if that table does not exist.
  EMB_HD int64_t* counters_of(int64_t f) const {
    const int64_t table = table_of_feature[f];
    return table >= 0 && table < num_tables ? counters + table * num_columns : nullptr;
  }
};

}  // namespace emb
