// What `cache_move_` and `cache_flush_` work on, on any device: the weights and the states of all
// memory tiers, and between which places a row travels.
#pragma once

#include "cache/cache.h"
#include "core/place.h"
#include "core/rounding.h"

namespace emb {

// The weights and up to seven states; no optimizer has more.
inline constexpr int kMostTensors = 8;

struct Stored {
  void* data;
  Dtype type;
};

struct CacheMemory {
  const Feature* tables;
  int num_tables;
  int num_tensors;                       // the weights, then the states
  Stored tensors[kMostTensors][kTiers];  // null where a tier is not used
  uint32_t by_row;                       // bit k: tensor k has one entry a row
  int64_t cache_elements, cache_rows;    // what the cache holds, element-wise and row-wise
  const double* hyper;                   // for rounding; five entries or more

  EMB_HD bool is_by_row(int tensor) const { return by_row >> tensor & 1u; }
};

// A row and its place in the tier of its table; dim 0 where there is no such row.
struct HomeRow {
  int64_t row;
  int64_t dim, stride;
  RowPlace place;
};

EMB_HD HomeRow find_home(const CacheMemory& memory, int64_t row) {
  const int t = row < 0 ? -1 : find_table(memory.tables, memory.num_tables, row);
  if (t < 0 || memory.tables[t].cache_stride == 0) return {row, 0, 0, {0, 0, 0}};
  const Feature& table = memory.tables[t];
  return {row, table.dim, table.cache_stride, place_row(table, row - table.row_base, -1)};
}

EMB_HD RowPlace slot_place(const HomeRow& row, int64_t slot) {
  return {kCacheTier, slot * row.stride, slot};
}

EMB_HD bool fits(const CacheMemory& memory, const HomeRow& row, int64_t slot) {
  return row.dim > 0 && slot >= 0 && slot < memory.cache_rows &&
         (slot + 1) * row.stride <= memory.cache_elements;
}

// First entry of a row in a tensor.
EMB_HD int64_t entry(const CacheMemory& memory, int tensor, const RowPlace& place) {
  return memory.is_by_row(tensor) ? place.row : place.element;
}

// Which random numbers the write-back of a tensor draws.
EMB_HD uint32_t write_back_stream(int tensor) {
  return kRoundWriteBack + static_cast<uint32_t>(tensor);
}

// The moves of a batch, as `cache_plan_` returns them.
struct CacheMoves {
  const int64_t* rows;
  const int32_t* row_slots;
  const int64_t* evicted;
};

}  // namespace emb
