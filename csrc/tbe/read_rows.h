// Readers of the row of a lookup, for CPU kernels. Each kind of table has a reader, so that the
// kind is decided outside the loops over lookups: PlainRows for rows of a table, CachedRows for
// rows of a table or of its cache, and MixedRows for a table and a cache of two dtypes, whose rows
// are copied as floats. All have Element, `dim` and the functions of PlainRows. Only
// `*_kernels.cpp` may include this file.
#pragma once

#include "core/vec.h"
#include "tbe/args.h"

namespace emb::EMB_ISA {

// Rows of a table. `Indices` is a pointer to the indices or, if their width is known at run time
// only, an IndexArray.
template <class W, class Indices>
struct PlainRows {
  using Element = W;
  const W* table;
  Indices indices;
  int64_t rows, dim;

  PlainRows(const TableRows& in, Indices lookup_indices)
      : table(static_cast<const W*>(in.table)),
        indices(lookup_indices),
        rows(in.rows),
        dim(in.dim) {}

  // Make rows begin `count` columns later.
  EMB_HD void skip_columns(int64_t count) { table += count; }
  // Return the first column of the row of lookup i, or null for a lookup to skip.
  EMB_HD const W* at(int64_t i) const {
    const int64_t row = repair_index(indices[i], rows);
    return row < 0 ? nullptr : table + row * dim;
  }
  // Prefetch the first `count` values of the row of lookup i.
  EMB_HD void prefetch(int64_t i, int64_t count) const {
    const W* row = at(i);
    if (row == nullptr) return;
    prefetch_row<false>(row, count * static_cast<int64_t>(sizeof(W)));
  }
};

// Rows of a table, or of its cache if slots[i] of the lookup is a slot of the cache.
template <class W, class Indices>
struct CachedRows {
  using Element = W;
  const W *table, *cache;
  Indices indices;
  const int32_t* slots;
  int64_t rows, dim, num_slots, stride;

  CachedRows(const TableRows& in, Indices lookup_indices)
      : table(static_cast<const W*>(in.table)),
        cache(static_cast<const W*>(in.cache)),
        indices(lookup_indices),
        slots(in.slots),
        rows(in.rows),
        dim(in.dim),
        num_slots(in.num_slots),
        stride(in.cache_stride) {}

  EMB_HD void skip_columns(int64_t count) {
    table += count;
    cache += count;
  }
  EMB_HD const W* at(int64_t i) const {
    const int64_t row = repair_index(indices[i], rows), slot = slots[i];
    if (row < 0) return nullptr;
    return slot >= 0 && slot < num_slots ? cache + slot * stride : table + row * dim;
  }
  EMB_HD void prefetch(int64_t i, int64_t count) const {
    const W* row = at(i);
    if (row == nullptr) return;
    prefetch_row<false>(row, count * static_cast<int64_t>(sizeof(W)));
  }
};

// Rows of a table or of a cache of another dtype. `at` copies a row as floats to `scratch`, [dim],
// and returns an address in it, valid until the next call. `prefetch` does nothing. `in` and
// `scratch` must outlive the reader.
struct MixedRows {
  using Element = float;
  const TableRows& in;
  float* scratch;
  int64_t dim, skipped = 0;

  EMB_HD void skip_columns(int64_t count) { skipped += count; }

  MixedRows(const TableRows& rows, float* row_of_floats)
      : in(rows), scratch(row_of_floats), dim(rows.dim) {}

  EMB_HD const float* at(int64_t i) const {
    const int64_t row = repair_index(in.indices[i], in.rows), slot = in.slots[i];
    if (row < 0) return nullptr;
    if (slot >= 0 && slot < in.num_slots) {
      widen_row(in.cache, in.cache_type, slot * in.cache_stride, dim, scratch);
    } else {
      widen_row(in.table, in.table_type, row * dim, dim, scratch);
    }
    return scratch + skipped;
  }
  EMB_HD void prefetch(int64_t, int64_t) const {}
};

}  // namespace emb::EMB_ISA
