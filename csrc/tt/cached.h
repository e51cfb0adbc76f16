// Lookups of tensor trains with a cache of rows: which of them read a stored row and which the
// cores, and what is counted of a batch.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"

namespace emb {

// The outputs are [n]; `rows` and `cold` are null where no rows are stored.
struct TtStoredArgs {
  IndexArray indices;    // indices of the batch
  const int64_t* ids;    // repaired: -1 for lookups to skip
  const int64_t* keys;   // the ids among those of all tables
  const int64_t* slots;  // slot of each key in the index of stored rows, -1 for none; null: all are
  const int64_t* row_of_slot;
  int64_t num_slots;
  int64_t n;
  int64_t* cold;     // the id where the cores make the row, else -1
  int64_t* rows;     // the stored row, -1 for none
  int64_t* counted;  // the key of a valid id, -1 for others

  EMB_HD void split(int64_t i) const {
    const int64_t id = ids[i];
    counted[i] = indices[i] == id ? keys[i] : -1;
    if (slots == nullptr) return;
    const int64_t slot = slots[i];
    const int64_t row = slot >= 0 && slot < num_slots ? row_of_slot[slot] : -1;
    rows[i] = row;
    cold[i] = row < 0 ? id : -1;
  }
};

struct TtCountArgs {
  const int64_t *counted, *rows;  // [n] as above; `rows` null where none are stored
  int64_t n;
  const int64_t* starts;  // [F + 1] first lookup of each feature
  const int64_t* tables;  // [F]
  int64_t num_features, num_tables;
  int64_t* counters;  // [T, columns]: lookups, hits, ..
  int64_t columns;

  EMB_HD bool is_lookup(int64_t i) const { return counted[i] >= 0; }
  EMB_HD bool is_hit(int64_t i) const { return rows != nullptr && is_lookup(i) && rows[i] >= 0; }
  // Return the counters of a feature; null for a table that there is not.
  EMB_HD int64_t* of_feature(int64_t f) const {
    return tables[f] >= 0 && tables[f] < num_tables ? counters + tables[f] * columns : nullptr;
  }
};

}  // namespace emb
