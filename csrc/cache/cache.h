// The software cache: 32-way set-associative, one semantics on CPU and GPU, and the definition is
// emblib/reference/cache.py. One batch is a deterministic program. (1) Every distinct row probes
// its set; a row that is there is stamped with the number of the batch. (2) The rows of a set that
// are missing, in order, take its ways, in order. (3) Rows that find no way stay in their tier.
// No set depends on another, so sets run in parallel and the result is the same in any order.
#pragma once

#include "core/dtype.h"

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

}  // namespace emb
