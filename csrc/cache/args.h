// The software cache in front of tables in slow memory: 32-way set-associative, with the same
// results on CPU and GPU; emblib/reference/cache.py is the definition. A batch is a deterministic
// program. (1) Every distinct row probes its set; a hit is stamped with the number of the batch.
// (2) The missing rows of a set take its ways, both in order. (3) Rows that find no way stay in
// their tier. No set depends on another, so sets run in parallel in any order.
//
// This file has the arithmetic that CPU and CUDA share, the arguments of the kernels, and the CPU's
// tables of kernels.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"
#include "core/random.h"
#include "core/rounding.h"

namespace emb {

inline constexpr int kWays = 32;
inline constexpr int64_t kNoRow = -1;  // the tag of an empty way, and its usage word
inline constexpr int64_t kNoMove =
    -2;  // an entry of `evicted` whose row does not move; kNoRow there means an empty way

// Columns of `counters`; emblib/tables/row_cache.py describes each.
enum CacheCounter : int {
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

// Return the set of a linear row, for fewer than 2^32 sets. A multiplication replaces the
// remainder, which would cost more than the probe.
EMB_HD int64_t set_of(int64_t row, int64_t sets) {
  return static_cast<int64_t>(
      (finalise(static_cast<uint64_t>(row)) >> 32) * static_cast<uint64_t>(sets) >> 32);
}

// The usage of a way is one word. LRU: the number of the batch that used it last; the lowest is
// replaced first. LFU: the lookups of its row so far, above the 32 low bits of that number; fewest
// lookups first, and among equal ones the row that was used last: if batches come again, as in a
// next epoch, the others are needed sooner, and if not, it makes no difference. The count
// of a row is in the word while the row is cached and in `counts` otherwise, so that neither a
// probe nor the choice of a way reads other memory.
EMB_HD int64_t usage_word(Policy policy, int64_t lookups, int64_t now) {
  return policy == Policy::kLru ? now : lookups << 32 | (now & 0xffffffff);
}
EMB_HD int64_t batch_of(Policy policy, int64_t word) {
  return policy == Policy::kLru ? word : word & 0xffffffff;
}
EMB_HD int64_t lookups_of(int64_t word) { return word >> 32; }

// Add to a number of lookups, which saturates at the maximum of int32.
EMB_HD int64_t add_lookups(int64_t before, int64_t more) {
  const int64_t sum = before + more;
  return sum < 0x7fffffff ? sum : 0x7fffffff;
}

// The position of a way in the order in which ways are replaced: empty ones first, kNotFree never.
// Rows used by batch `oldest` or a later one are in flight and stay. The tags are not needed.
inline constexpr int64_t kNotFree = INT64_MAX;

EMB_HD int64_t way_order(Policy policy, int64_t word, int64_t oldest) {
  if (word < 0) return word;
  if (batch_of(policy, word) >= oldest) return kNotFree;
  return policy == Policy::kLru ? word : word ^ 0xffffffff;
}

// Return whether a row with so many lookups may replace the row of a way; `order` is the result of
// way_order.
EMB_HD bool may_replace(Policy policy, int64_t lookups, int64_t order) {
  if (order == kNotFree) return false;
  return policy == Policy::kLru || order < 0 || lookups >= lookups_of(order);
}

// Return the table of a linear row, or -1. `tables` ascend by row_base.
EMB_HD int find_table(const Feature* tables, int num_tables, int64_t row) {
  int low = -1,
      high = num_tables;  // [low, high) contains the last table that begins at or before `row`
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

// Return the first cached table; all tables after it are cached as well.
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

// Return the first cached linear row; all rows after it are cached as well.
EMB_HD int64_t first_cached_row(const Feature* tables, int num_tables) {
  const int table = first_cached_table(tables, num_tables);
  return table < num_tables ? tables[table].row_base : INT64_MAX;
}

// Return one past the last linear row.
EMB_HD int64_t end_of_rows(const Feature* tables, int num_tables) {
  return num_tables == 0 ? 0 : tables[num_tables - 1].row_base + tables[num_tables - 1].rows;
}

// The state of a cache.
struct CacheState {
  int64_t* tags;    // [sets, kWays] linear rows
  int64_t* words;   // [sets, kWays], see usage_word
  int32_t* counts;  // [cached rows], LFU only: lookups so far of rows that are not cached
  int64_t sets;
  int64_t first_row;  // first cached linear row
  Policy policy;
};

// The CPU kernels of `cache_plan_` and `cache_locate`.

// A distinct row of a batch that is not cached: its position in `rows`, and its set.
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
  int64_t end_row;  // one past the last linear row; higher tags belong to no table
};

// The misses of a batch by set, as `group` returns them.
struct MissGroups {
  const Miss* misses;  // ascending by position
  const int32_t *sets, *segments, *permutation;
};

struct CachePlanTable {
  // Find the slots of rows [begin, end), -1 for misses. Also list the misses in `misses` unless
  // that is null. Return the number of misses.
  int64_t (*locate)(const CachePlanArgs&, int64_t begin, int64_t end, Miss* misses);
  // The same, and record the use of the hits.
  int64_t (*probe)(const CachePlanArgs&, int64_t begin, int64_t end, Miss* misses);
  // Assign ways to the misses of groups [begin, end).
  void (*admit)(const CachePlanArgs&, const MissGroups&, int64_t begin, int64_t end);
};

// The arguments of `cache_move_` and `cache_flush_` on any device: the weights and states of all
// memory tiers, and the locations that a row moves between.

// The weights and up to seven states; no optimizer has more.
inline constexpr int kMaxCacheTensors = 8;

struct TierTensor {
  void* data;
  Dtype type;
};

struct CacheMemory {
  const Feature* tables;
  int num_tables;
  int num_tensors;                               // the weights, then the states
  TierTensor tensors[kMaxCacheTensors][kTiers];  // null if a tier is not used
  uint32_t by_row;                               // bit k: tensor k has one entry per row
  int64_t cache_elements, cache_rows;  // sizes of the cache tier: element-wise and row-wise
  // For stochastic rounding, at least kOptimizerArgs entries; on a GPU null if nothing is rounded.
  const double* hyper;

  EMB_HD bool is_by_row(int tensor) const { return by_row >> tensor & 1u; }
};

// A row and its location in the tier of its table; dim 0 if there is no such row.
struct TierRow {
  int64_t row;
  int64_t dim, stride;
  RowLocation location;
};

EMB_HD TierRow find_tier_row(const CacheMemory& memory, int64_t row) {
  const int t = row < 0 ? -1 : find_table(memory.tables, memory.num_tables, row);
  if (t < 0 || memory.tables[t].cache_stride == 0) return {row, 0, 0, {0, 0, 0}};
  const Feature& table = memory.tables[t];
  return {row, table.dim, table.cache_stride, locate_row(table, row - table.row_base, -1)};
}

EMB_HD RowLocation slot_location(const TierRow& row, int64_t slot) {
  return {kCacheTier, slot * row.stride, slot};
}

EMB_HD bool fits(const CacheMemory& memory, const TierRow& row, int64_t slot) {
  return row.dim > 0 && slot >= 0 && slot < memory.cache_rows &&
         (slot + 1) * row.stride <= memory.cache_elements;
}

// Return the first entry of a row in a tensor.
EMB_HD int64_t entry(const CacheMemory& memory, int tensor, const RowLocation& location) {
  return memory.is_by_row(tensor) ? location.row : location.element;
}

// Return which random numbers the write-back of a tensor uses.
EMB_HD uint32_t write_back_stream(int tensor) {
  return kRoundWriteBack + static_cast<uint32_t>(tensor);
}

// The moves of a batch, as `cache_plan_` returns them.
struct CacheMoves {
  const int64_t* rows;
  const int32_t* row_slots;
  const int64_t*
      evicted;  // evicted rows; null, on a GPU, if every row is fetched and none is evicted
};

// What a GPU leaves out of the moves of a batch that is prefetched while earlier batches are in
// flight: their updates need not wait for it then. A row without a way is updated in its table, and
// the set remembers the batch. A row of the batch that takes a way of such a set may be one that is
// updated there: it is fetched by a later call, after the update. Its slot is in `slots`, and the
// row that it evicts is written back at once.
struct PostponedFetches {
  const int64_t* clock = nullptr;  // clock of the batch that `cache_plan_` planned
  int64_t* conflicts = nullptr;    // [sets] the last batch with a row without a way; null: on a CPU
  int64_t sets = 0;
  int64_t* rows = nullptr;   // [U]
  int32_t* slots = nullptr;  // [U]
  int32_t* count = nullptr;  // null: nothing is postponed

  EMB_HD bool may_be_updated(int64_t slot) const {
    return count != nullptr && slot / kWays < sets && conflicts[slot / kWays] >= clock[1];
  }
  EMB_HD void note_conflict(int64_t row) const { conflicts[set_of(row, sets)] = clock[0]; }
};

// The CPU kernels of `cache_move_` and `cache_flush_`.

struct CacheMoveTable {
  // For rows [begin, end) of the batch: write back the rows that they evict, then fetch them.
  void (*move)(const CacheMemory&, const CacheMoves&, int64_t begin, int64_t end);
  // Write back the rows that `tags` names in slots [begin, end).
  void (*flush)(const CacheMemory&, const int64_t* tags, int64_t begin, int64_t end);
};

}  // namespace emb
