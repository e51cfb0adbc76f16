// Readers of rows for CPU kernels: given a lookup, a reader returns its row. There is a reader per
// value of Caching, so that loops over lookups do not test for it: PlainRows for tables without a
// cache, CachedRows for a cache of the table's dtype, and MixedRows for a cache of another dtype,
// whose rows it copies as floats. All have Element, `dim` and the functions that PlainRows
// documents. They point into the arrays of a TableRows. Only `*_kernels.cpp` may include this file.
#pragma once

#include "core/vec.h"
#include "tbe/args.h"

namespace emb::EMB_ISA {

// Rows of a table. `Indices` is a pointer to the indices, or an IndexArray if their dtype is known
// at run time only.
template <class W, class Indices>
struct PlainRows {
  using Element = W;
  const W* table;
  Indices indices;
  int64_t num_rows, dim;

  PlainRows(const TableRows& in, Indices lookup_indices)
      : table(static_cast<const W*>(in.table)),
        indices(lookup_indices),
        num_rows(in.num_rows),
        dim(in.dim) {}

  // Let later calls of `at` and `prefetch` begin `num_columns` columns later in each row.
  EMB_HD void skip_columns(int64_t num_columns) { table += num_columns; }
  // Return the address of the row of lookup i, after the skipped columns; null for a lookup to
  // skip.
  EMB_HD const W* at(int64_t i) const {
    const int64_t row = repair_index(indices[i], num_rows);
    return row < 0 ? nullptr : table + row * dim;
  }
  // Prefetch `num_columns` columns from at(i) on; nothing for a lookup to skip.
  EMB_HD void prefetch(int64_t i, int64_t num_columns) const {
    const W* row = at(i);
    if (row == nullptr) return;
    prefetch_row<false>(row, num_columns * static_cast<int64_t>(sizeof(W)));
  }
};

// Rows of a table and its cache. Lookup i reads the cache if slots[i] is in [0, num_slots).
template <class W, class Indices>
struct CachedRows {
  using Element = W;
  const W *table, *cache;
  Indices indices;
  const int32_t* slots;
  int64_t num_rows, dim, num_slots, cache_stride;

  CachedRows(const TableRows& in, Indices lookup_indices)
      : table(static_cast<const W*>(in.table)),
        cache(static_cast<const W*>(in.cache)),
        indices(lookup_indices),
        slots(in.slots),
        num_rows(in.num_rows),
        dim(in.dim),
        num_slots(in.num_slots),
        cache_stride(in.cache_stride) {}

  EMB_HD void skip_columns(int64_t num_columns) {
    table += num_columns;
    cache += num_columns;
  }
  EMB_HD const W* at(int64_t i) const {
    const int64_t row = repair_index(indices[i], num_rows), slot = slots[i];
    if (row < 0) return nullptr;
    return slot >= 0 && slot < num_slots ? cache + slot * cache_stride : table + row * dim;
  }
  EMB_HD void prefetch(int64_t i, int64_t num_columns) const {
    const W* row = at(i);
    if (row == nullptr) return;
    prefetch_row<false>(row, num_columns * static_cast<int64_t>(sizeof(W)));
  }
};

// Rows of a table and its cache of another dtype. `at` copies a row as floats to `scratch`, [dim],
// and returns an address in it, whose contents the next call overwrites. `prefetch` does nothing.
// `table_rows` and `scratch` must outlive the reader.
struct MixedRows {
  using Element = float;
  const TableRows& table_rows;
  float* scratch;
  int64_t dim, first_column = 0;

  MixedRows(const TableRows& rows, float* row_of_floats)
      : table_rows(rows), scratch(row_of_floats), dim(rows.dim) {}

  EMB_HD void skip_columns(int64_t num_columns) { first_column += num_columns; }
  EMB_HD const float* at(int64_t i) const {
    const int64_t row = repair_index(table_rows.indices[i], table_rows.num_rows),
                  slot = table_rows.slots[i];
    if (row < 0) return nullptr;
    if (slot >= 0 && slot < table_rows.num_slots) {
      widen_row(table_rows.cache, table_rows.cache_type, slot * table_rows.cache_stride, dim,
                scratch);
    } else {
      widen_row(table_rows.table, table_rows.table_type, row * dim, dim, scratch);
    }
    return scratch + first_column;
  }
  EMB_HD void prefetch(int64_t, int64_t) const {}
};

}  // namespace emb::EMB_ISA
