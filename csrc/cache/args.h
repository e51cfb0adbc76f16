// The software cache in front of tables in slow memory. It is 32-way set-associative and has the
// same results on CPU and GPU. emblib/reference/cache.py is the definition, and emblib/ops/cache.py
// has the shapes of the tensors. A batch is planned in three steps:
//   (1) Probe: every distinct cacheable row is searched in its set. The way of a hit gets a new
//       stamp.
//   (2) Admission: the ways of a set are assigned to its missing rows. The rows come in the order
//       of the policy and the ways in the order of way_order, until may_replace returns false.
//   (3) A row that gets no way stays in the tier of its table; this is a *conflict*.
// No set depends on another, so sets are processed in parallel in any order.
//
// This file has the arithmetic that CPU and GPU share, the arguments of the kernels, and the lists
// of CPU kernels. A *row* is a linear row id. A row of a table with a cache is *cacheable*, whether
// or not the cache has it. A slot is set * kWays + way. T is the number of tables, L the number of
// lookups of a batch, U the number of distinct rows that they read, and u the position of a row
// among them, in ascending order. Pointers are to memory of the caller that the op's device can
// access.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"
#include "core/random.h"
#include "core/rounding.h"

namespace emb {

inline constexpr int kWays = 32;        // slots per set
inline constexpr int64_t kNoRow = -1;   // tag and stamp of an empty way; in `evicted`: the row
                                        // moves to an empty way
inline constexpr int64_t kNoMove = -2;  // in `evicted`: the row does not move

// Columns of `counters`, int64 [T + 1, kCacheCounters]: a row per table, then the totals. Lookups
// and rows of tables without a cache are not counted.
struct CacheCounter {
  enum Column : int {
    kCalls,                 // batches; in the row of a table: batches that look up the table
    kLookups,               // lookups of rows
    kUnique,                // distinct rows, summed over batches
    kUniqueMisses,          // distinct rows that were not in the cache when the batch was planned
    kConflictUniqueMisses,  // distinct rows that got no way
    kConflictMisses,        // lookups of rows that got no way
    kLookupMisses,          // lookups of rows that were not in the cache
    kWriteBacks,            // evicted rows; in the row of a table: evicted rows of this table
  };
};
inline constexpr int kCacheCounters = 8;
static_assert(kCacheCounters == CacheCounter::kWriteBacks + 1);

// Entries of `clock`, int64 [2]: numbers of batches. A batch is *in flight* from its plan until its
// rows have been updated.
struct CacheClock {
  enum Entry : int {
    kNow,    // the batch that is being planned, or was planned last
    kOldest  // the oldest batch in flight
  };
};

// Return the set of a linear row; `num_sets` must be in [1, 2^32). A multiplication is cheaper than
// a remainder.
EMB_HD int64_t set_of(int64_t row, int64_t num_sets) {
  return static_cast<int64_t>(
      (finalise(static_cast<uint64_t>(row)) >> 32) * static_cast<uint64_t>(num_sets) >> 32);
}

// Return the stamp of a way that batch `now` uses.
//
// For LRU this is the number of the batch, and `num_lookups` is ignored. The way with the lowest
// stamp is replaced first.
//
// For LFU the upper 32 bits are the number of lookups of the row so far, at most kMaxRowLookups,
// and the lower 32 bits those of the number of the batch. The way with the fewest lookups is
// replaced first; among equals, the way that was used last. If the same batches are repeated, as in
// the next epoch, the rows that were used earlier are needed sooner; if not, the choice makes no
// difference. The lookups of a row are counted in its stamp while the row is in the cache, else in
// `counts`. So neither a hit nor the choice of a way reads `counts`.
EMB_HD int64_t make_stamp(CachePolicy policy, int64_t num_lookups, int64_t now) {
  return policy == CachePolicy::kLru ? now : (num_lookups << 32) | (now & 0xffffffff);
}
// Return the number of the batch in a stamp; for LFU only the low 32 bits of the number.
EMB_HD int64_t batch_of(CachePolicy policy, int64_t stamp) {
  return policy == CachePolicy::kLru ? stamp : stamp & 0xffffffff;
}
// Return the number of lookups in a stamp of LFU.
EMB_HD int64_t num_lookups_of(int64_t stamp) { return stamp >> 32; }

// The maximum number of lookups that is counted per row, so that `counts` can be int32.
inline constexpr int64_t kMaxRowLookups = INT32_MAX;

// Return the sum of two numbers of lookups, or kMaxRowLookups if it is greater.
EMB_HD int64_t add_lookups(int64_t num_lookups, int64_t num_more_lookups) {
  const int64_t sum = num_lookups + num_more_lookups;
  return sum < kMaxRowLookups ? sum : kMaxRowLookups;
}

// The order of a way that may not be replaced.
inline constexpr int64_t kNotReplaceable = INT64_MAX;

// Return the order of a way: the ways of a set are replaced in ascending order, empty ways (with a
// negative stamp) first. `oldest` is the oldest batch in flight; a way that it or a later batch
// uses may not be replaced. For LFU `oldest` must be below 2^32.
EMB_HD int64_t way_order(CachePolicy policy, int64_t stamp, int64_t oldest) {
  if (stamp < 0) return stamp;
  if (batch_of(policy, stamp) >= oldest) return kNotReplaceable;
  return policy == CachePolicy::kLru ? stamp : stamp ^ 0xffffffff;
}

// Return whether a row with `num_lookups` lookups so far may replace the row of a way; `order` is
// the result of way_order.
EMB_HD bool may_replace(CachePolicy policy, int64_t num_lookups, int64_t order) {
  if (order == kNotReplaceable) return false;
  return policy == CachePolicy::kLru || order < 0 || num_lookups >= num_lookups_of(order);
}

// Return the number of the table of a linear row, -1 if no table has the row. Here and below,
// `tables`, [num_tables], must ascend by row_base, and the tables with a cache must be the last
// ones. On the CPU check_tables checks both; on a GPU neither is checked.
EMB_HD int find_table(const Feature* tables, int num_tables, int64_t row) {
  // The last table that begins at or before `row` is in [low, high); low = -1 means none.
  int low = -1, high = num_tables;
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

// Return the first cached table, num_tables if there is none; all tables after it are cached too.
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

// Return the first cacheable row, INT64_MAX if there is none; all rows after it are cacheable too.
EMB_HD int64_t first_cacheable_row(const Feature* tables, int num_tables) {
  const int table = first_cached_table(tables, num_tables);
  return table < num_tables ? tables[table].row_base : INT64_MAX;
}

// Return one past the last linear row.
EMB_HD int64_t end_of_rows(const Feature* tables, int num_tables) {
  return num_tables == 0 ? 0 : tables[num_tables - 1].row_base + tables[num_tables - 1].rows;
}

// The state of a cache, which a plan changes in place.
struct CacheState {
  int64_t* tags;    // [num_sets, kWays] linear row of each way, negative for an empty way
  int64_t* stamps;  // [num_sets, kWays], see make_stamp; negative for an empty way
  // [cacheable rows], LFU only: numbers of lookups so far, out of date for rows in the cache.
  int32_t* counts;
  int64_t num_sets;
  int64_t first_row;  // first cacheable row, whose count is counts[0]
  CachePolicy policy;
};

// The CPU kernels of `cache_plan_`, `cache_evictions` and `cache_locate`. Each call works on one
// thread.

// A distinct row of a batch that is not in the cache.
struct Miss {
  int32_t position;  // its position u in `rows`
  uint32_t set;
};

// A plan on the CPU. The caller must have checked the contents of `rows` and `segments`. `locate`
// reads and writes only cache.tags, cache.num_sets, rows and row_slots.
struct CachePlanArgs {
  CacheState cache;
  int64_t now, oldest;      // numbers of this batch, and of the oldest batch in flight
  const int64_t* rows;      // [U] the distinct rows of the batch, ascending
  const int32_t* segments;  // [U + 1] row u has segments[u + 1] - segments[u] lookups
  int32_t* row_slots;       // [U], an output: the slot of each row, -1 for none
  int64_t* evicted;         // [U], an output: the row that each row replaces, kNoRow or kNoMove
  int64_t end_row;          // one past the last linear row; tags from here on belong to no table
};

// The misses of a batch grouped by set. Group g has the misses permutation[segments[g]], ...,
// permutation[segments[g + 1] - 1] of set sets[g], which are indices in `misses` and ascend.
struct MissGroups {
  const Miss* misses;                            // [number of misses], ascending by position
  const int32_t *sets, *segments, *permutation;  // [groups], [groups + 1], [number of misses]
};

// The CPU kernels of a plan. Calls for disjoint ranges may run at once.
struct CachePlanKernels {
  // Write row_slots of rows [begin, end), which must be cacheable: -1 for misses. Unless `misses`,
  // [end - begin], is null, list the misses in it; its elements after the last miss are
  // unspecified. Return the number of misses, 0 if `misses` is null.
  int64_t (*locate)(const CachePlanArgs&, int64_t begin, int64_t end, Miss* misses);
  // Do what `locate` does; also set `evicted` to kNoMove and stamp the hits. For LFU also add the
  // lookups of the batch, to the stamps of hits and to `counts` of misses. `misses` must not be
  // null.
  int64_t (*probe)(const CachePlanArgs&, int64_t begin, int64_t end, Miss* misses);
  // Assign ways to the misses of groups [begin, end), after `probe` of the whole batch. Write
  // row_slots and evicted of the misses that get a way, and the tags and stamps of these ways. For
  // LFU also write `counts` of the evicted rows.
  void (*admit)(const CachePlanArgs&, const MissGroups&, int64_t begin, int64_t end);
};

// The arguments of moves and flushes on any device: the weights and states of all memory tiers, and
// the locations between which a row moves. *Fetching* a row copies it from the tier of its table to
// a slot, *writing back* copies it from its slot to that tier.

// The weights and up to seven states; no optimizer has more.
inline constexpr int kMaxCacheTensors = 8;

// The memory of one tensor in one tier.
struct TierTensor {
  void* data;
  Dtype type;
};

// The tensors between which rows move, by tier, and the tables in them.
struct CacheMemory {
  const Feature* tables;  // [num_tables], in the order that find_table requires
  int num_tables;
  int num_tensors;                               // tensor 0 is the weights, the others are states
  TierTensor tensors[kMaxCacheTensors][kTiers];  // data is null if a tier is not used
  uint32_t row_wise_mask;      // bit k: tensor k has one entry per row, else one per element
  int64_t num_cache_elements;  // elements of the weights in the cache tier
  int64_t num_cache_rows;  // entries of the shortest row-wise state in the cache tier; INT64_MAX
                           // if there is none
  // The vector Hyper of the optimizer, read for stochastic rounding. Null, only for moves on a GPU:
  // nothing is rounded stochastically.
  const double* hyper;

  EMB_HD bool has_entry_per_row(int tensor) const { return row_wise_mask >> tensor & 1u; }
};

// A row and its location in the tier of its table. dim is 0 if the row is not cacheable.
struct TierRow {
  int64_t row;           // linear row id
  int64_t dim;           // columns of the row
  int64_t cache_stride;  // elements between rows of the cache
  RowLocation location;
};

// Return the TierRow of a linear row id; dim is 0 unless the row is cacheable.
EMB_HD TierRow find_tier_row(const CacheMemory& memory, int64_t row) {
  const int t = row < 0 ? -1 : find_table(memory.tables, memory.num_tables, row);
  if (t < 0 || memory.tables[t].cache_stride == 0) return {row, 0, 0, {0, 0, 0}};
  const Feature& table = memory.tables[t];
  return {row, table.dim, table.cache_stride, locate_row(table, row - table.row_base, -1)};
}

// Return the location of a row in a slot of the cache.
EMB_HD RowLocation slot_location(const TierRow& row, int64_t slot) {
  return {kCacheTier, slot * row.cache_stride, slot};
}

// Return whether the row is cacheable and the slot lies inside the tensors of the cache.
EMB_HD bool can_cache(const CacheMemory& memory, const TierRow& row, int64_t slot) {
  return row.dim > 0 && slot >= 0 && slot < memory.num_cache_rows &&
         (slot + 1) * row.cache_stride <= memory.num_cache_elements;
}

// Return the index of the first entry of the row at `location` in tensor number `tensor` of its
// tier.
EMB_HD int64_t first_entry(const CacheMemory& memory, int tensor, const RowLocation& location) {
  return memory.has_entry_per_row(tensor) ? location.state_row : location.element;
}

// Return the stream of random numbers with which tensor number `tensor` is rounded when it is
// written back.
EMB_HD uint32_t write_back_stream(int tensor) {
  return kRoundWriteBack + static_cast<uint32_t>(tensor);
}

// The moves of a batch, as `cache_plan_` returns them. Unless evicted[u] is kNoMove, row rows[u] is
// fetched into slot row_slots[u]. If evicted[u] is a row, it is in this slot, and is written back
// first. Rows must be distinct, and so must the slots of rows that are fetched; neither is checked.
struct CacheMoves {
  const int64_t* rows;       // [U]
  const int32_t* row_slots;  // [U]
  const int64_t* evicted;    // [U]; null, on a GPU: every row is fetched and none is evicted
};

// The fetches that a GPU postpones while earlier batches are in flight, so that a prefetch need not
// wait for the updates of these batches. A row that gets no way is updated in its table, and
// `conflicts` records the batch for the row's set. If a row of a later batch gets a way of this
// set, it may be the same row, not updated yet. So its fetch is listed in `rows` and `slots`, and
// another call fetches the row after the update. The row that it evicts is written back at once.
struct PostponedFetches {
  const int64_t* clock = nullptr;  // [2], see CacheClock
  // [num_sets]: the last batch that had a conflict in the set. If this is null, nothing is
  // recorded, and `count` must be null.
  int64_t* conflicts = nullptr;
  int64_t num_sets = 0;
  int64_t* rows = nullptr;   // [U], an output: the rows whose fetches are postponed, in any order
  int32_t* slots = nullptr;  // [U], an output: the slots of these rows
  // [1], an output: the number of postponed fetches. The caller must set it to 0 before. If this is
  // null, no fetch is postponed.
  int32_t* count = nullptr;

  // Return whether the row that gets this slot may be a row that a batch in flight has yet to
  // update.
  EMB_HD bool may_be_updated(int64_t slot) const {
    return count != nullptr && slot / kWays < num_sets &&
           conflicts[slot / kWays] >= clock[CacheClock::kOldest];
  }
  // Record that `row`, a cacheable row of the batch, got no way. `conflicts` must not be null.
  EMB_HD void record_conflict(int64_t row) const {
    conflicts[set_of(row, num_sets)] = clock[CacheClock::kNow];
  }
};

// The CPU kernels of `cache_move_` and `cache_flush_`. Calls for disjoint ranges may run at once if
// their rows and slots are distinct (CacheMoves).
struct CacheMoveKernels {
  // Fetch rows [begin, end) of the batch; before each, write back the row that it evicts. Rows with
  // kNoMove, and rows that do not exist or whose slot does not exist, are skipped.
  void (*move)(const CacheMemory&, const CacheMoves&, int64_t begin, int64_t end);
  // Write back the rows in slots [begin, end); tags[slot] is the row in a slot. The rows stay in
  // the cache. Empty slots, and slots whose tag is not a cacheable row, are skipped.
  void (*flush)(const CacheMemory&, const int64_t* tags, int64_t begin, int64_t end);
};

}  // namespace emb
