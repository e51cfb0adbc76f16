// The software cache: 32-way set-associative, one semantics on CPU and GPU, and the definition is
// emblib/reference/cache.py. One batch is a deterministic program. (1) Every distinct row probes
// its set; a row that is there is stamped with the number of the batch. (2) The rows of a set that
// are missing, in order, take its ways, in order. (3) Rows that find no way stay in their tier.
// No set depends on another, so sets run in parallel and the result is the same in any order.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"
#include "core/rounding.h"

namespace emb {

inline constexpr int kWays = 32;
inline constexpr int64_t kNoRow = -1;         // the tag of an empty way, and its word
inline constexpr int64_t kNothingMoves = -2;  // in `evicted`; -1 there is an empty way

// Columns of `counters`; what each counts is said in emblib/tables/cache.py.
enum Counter : int {
  kCalls,
  kLookups,
  kUnique,
  kUniqueMisses,
  kConflictUniqueMisses,
  kConflictMisses,
  kLookupMisses,
  kWriteBacks,
};
inline constexpr int kCounters = 8;

// The finaliser of MurmurHash3 (Appleby, 2011).
EMB_HD uint64_t mix64(uint64_t x) {
  x = (x ^ x >> 33) * 0xff51afd7ed558ccdull;
  x = (x ^ x >> 33) * 0xc4ceb9fe1a85ec53ull;
  return x ^ x >> 33;
}

// The set of a linear row, for fewer than 2^32 sets: a multiplication instead of a remainder, which
// would cost more than the probe.
EMB_HD int64_t set_of(int64_t row, int64_t sets) {
  return static_cast<int64_t>(
      (mix64(static_cast<uint64_t>(row)) >> 32) * static_cast<uint64_t>(sets) >> 32);
}

// What is remembered of the use of a way is one word, and a smaller word gives way first. LRU: the
// number of the batch that used it last. LFU: above that number, in 32 bits, the lookups of its row
// so far; the count of a row is kept here while it is in the cache and in `counts` while it is not,
// so that neither a probe nor the choice of a way touches memory elsewhere.
EMB_HD int64_t use_word(Policy policy, int64_t lookups, int64_t now) {
  return policy == Policy::kLru ? now : lookups << 32 | (now & 0xffffffff);
}
EMB_HD int64_t batch_of(Policy policy, int64_t word) {
  return policy == Policy::kLru ? word : word & 0xffffffff;
}
EMB_HD int64_t lookups_of(int64_t word) { return word >> 32; }

// Lookups are counted up to what an int32 holds.
EMB_HD int64_t add_lookups(int64_t before, int64_t more) {
  const int64_t sum = before + more;
  return sum < 0x7fffffff ? sum : 0x7fffffff;
}

// The place of a way in the order in which ways are taken: empty ones first, kNotFree never. Rows
// that batch `oldest` or a later one used are in flight and stay. Tags are not needed for this.
inline constexpr int64_t kNotFree = INT64_MAX;

EMB_HD int64_t way_order(Policy policy, int64_t word, int64_t oldest) {
  return word < 0 || batch_of(policy, word) < oldest ? word : kNotFree;
}

// Whether a row with so many lookups may replace the one of a way; `order` as way_order returns it.
EMB_HD bool may_replace(Policy policy, int64_t lookups, int64_t order) {
  if (order == kNotFree) return false;
  return policy == Policy::kLru || order < 0 || lookups >= lookups_of(order);
}

// The table of a linear row, or -1. `tables` ascend by row_base.
EMB_HD int find_table(const Feature* tables, int num_tables, int64_t row) {
  int low = -1,
      high = num_tables;  // the last table that begins at `row` or before is in [low, high)
  while (high - low > 1) {
    const int middle = low + (high - low) / 2;
    if (tables[middle].row_base <= row) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low >= 0 && row - tables[low].row_base < tables[low].rows ? low : -1;
}

// The first cached table; those after it are cached as well.
EMB_HD int first_cached_table(const Feature* tables, int num_tables) {
  int low = 0, high = num_tables;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (tables[middle].cache_stride > 0) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return low;
}

// Linear rows from here on are cached.
EMB_HD int64_t first_cached_row(const Feature* tables, int num_tables) {
  const int table = first_cached_table(tables, num_tables);
  return table < num_tables ? tables[table].row_base : INT64_MAX;
}

// One past the last linear row.
EMB_HD int64_t end_of_rows(const Feature* tables, int num_tables) {
  return num_tables == 0 ? 0 : tables[num_tables - 1].row_base + tables[num_tables - 1].rows;
}

// The state of a cache.
struct CacheState {
  int64_t* tags;    // [sets, kWays] linear rows
  int64_t* words;   // [sets, kWays], see use_word
  int32_t* counts;  // [cached rows], LFU only: lookups so far of rows that are not in the cache
  int64_t sets;
  int64_t first_row;  // of the cached ones
  Policy policy;
};

// The kernels of `cache_plan_` and `cache_locate` on the CPU: what they take, how they are reached.

// A distinct row of a batch that is not in the cache: its position in `rows`, and its set.
struct Miss {
  int32_t position;
  uint32_t set;
};

struct CachePlanArgs {
  CacheState cache;
  int64_t now, oldest;
  const int64_t* rows;
  const int32_t* segments;
  int32_t* row_slots;
  int64_t* evicted;
  int64_t end_row;  // one past the last linear row: other tags are of no table
};

// The misses of a batch by set, as `group` returns them.
struct MissGroups {
  const Miss* misses;  // ascending by position
  const int32_t *sets, *segments, *permutation;
};

struct CachePlanTable {
  // Rows [begin, end): slots of the ones that are there, -1 of the others, which are also listed in
  // `misses`, or not where that is null. Returns how many.
  int64_t (*locate)(const CachePlanArgs&, int64_t begin, int64_t end, Miss* misses);
  // The same, and those that are there are used.
  int64_t (*probe)(const CachePlanArgs&, int64_t begin, int64_t end, Miss* misses);
  // Groups [begin, end) take ways.
  void (*admit)(const CachePlanArgs&, const MissGroups&, int64_t begin, int64_t end);
};

// What `cache_move_` and `cache_flush_` work on, on any device: the weights and the states of all
// memory tiers, and between which places a row travels.

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

// The kernels of `cache_move_` and `cache_flush_` on the CPU, and how they are reached.

struct CacheMoveTable {
  // Rows [begin, end) of the batch: what gives way is written back, then they are fetched.
  void (*move)(const CacheMemory&, const CacheMoves&, int64_t begin, int64_t end);
  // Slots [begin, end): the rows that `tags` says are there are written back.
  void (*flush)(const CacheMemory&, const int64_t* tags, int64_t begin, int64_t end);
};

}  // namespace emb
