// The plan of a batch on the GPU, in four steps on one stream:
//   (1) launch_probe: probe_kernel stamps the hits. A warp works on one row; each lane has one of
//       the 32 ways, so that the tags of a set are one coalesced load.
//   (2) The caller groups the misses by set (sort_and_group of group/).
//   (3) launch_admit: admit_kernel assigns ways to the misses. A warp works on one set.
//   (4) launch_admit: finish_plan_kernel counts the batch, advances the clock and, if the caller
//       wants them, writes the slots of lookups.
//
// Here `launcher` is a CudaLauncher or, in tests, a simt::HostLauncher. No function waits for the
// device.
#pragma once

#include "cache/args.h"
#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"
#include "group/segments.cuh"

namespace emb::cuda {

inline constexpr int kCacheThreads = 256;
inline constexpr int kCacheWarps = kCacheThreads / kWarpLanes;
static_assert(kWays == kWarpLanes);  // a warp that works on a set has one lane per way

// The arguments of the kernels. All pointers are to device memory that must live until the kernels
// have run. Contents are trusted.
struct DevicePlanArgs {
  CacheState cache;       // num_sets > 0; first_row is not used: kernels compute it from `tables`
  int64_t* clock;         // [2], see CacheClock
  int64_t* counters;      // [num_tables + 1, kCacheCounters], to which the batch is added
  const Feature* tables;  // [num_tables], in the order that find_table requires
  int num_tables;
  const int64_t* rows;      // [n] distinct rows, ascending; the first *count exist
  const int32_t* segments;  // [n + 1], row u has segments[u + 1] - segments[u] lookups
  const int32_t* count;     // [1], the number of distinct rows
  int64_t n;                // L, the length of `rows`
  int32_t* row_slots;       // [n], an output: the slot of each row, -1 for none and from *count on
  int64_t* evicted;  // [n], an output: the row that each row replaces, kNoRow, or kNoMove, also
                     // from *count on
  // If `lag` is negative, `clock` has the numbers of this batch. Otherwise `clock` has the numbers
  // of the previous batch: this batch has the next number, and the oldest batch in flight has this
  // number minus `lag`. finish_plan_kernel then writes both numbers to `clock`.
  int64_t lag = -1;
  int32_t* num_postponed = nullptr;  // [1], set to 0 by finish_plan_kernel; may be null

  // Return the numbers of the batch and of the oldest batch in flight.
  EMB_HD int64_t now() const { return clock[CacheClock::kNow] + (lag < 0 ? 0 : 1); }
  EMB_HD int64_t oldest() const {
    const int64_t oldest = lag < 0 ? clock[CacheClock::kOldest] : now() - lag;
    return oldest < now() ? oldest : now();
  }
};

// The misses grouped by set. Group g < *num_groups has the misses permutation[segments[g]], ...,
// permutation[segments[g + 1] - 1] of set sets[g], which are positions in DevicePlanArgs::rows and
// ascend.
struct DeviceMissGroups {
  const int32_t *sets, *segments, *permutation, *num_groups;  // [n], [n + 1], [n], [1]
};

// Return the number of lookups of row u in the batch.
EMB_DEVICE int64_t num_lookups_at(const DevicePlanArgs& plan, int64_t u) {
  return plan.segments[u + 1] - plan.segments[u];
}

// Return the way of set `set` that has `row`, -1 if there is none. The result is the same in every
// lane. All 32 lanes must call this.
EMB_DEVICE int find_way(const CacheState& cache, int64_t set, int64_t row) {
  const int64_t tag = cache.tags[set * kWays + lane_in_warp()];
  return __ffs(static_cast<int>(__ballot_sync(simt::kFullMask, tag == row))) - 1;
}

// For every row write row_slots, -1 for a miss and for a row that is not cacheable, and set
// `evicted` to kNoMove. Stamp the hits. For LFU add the lookups of the batch, to the stamps of hits
// and to `counts` of misses. Also write the input of the sort that groups the misses: the position
// of each row, and its key, which is the set of a miss and sort.no_group_key for any other row. A
// warp works on one row, in a grid-stride loop.
[[maybe_unused]] static __global__ void __launch_bounds__(kCacheThreads)
    probe_kernel(DevicePlanArgs plan, SortBuffers<uint32_t> sort) {
  const CacheState& cache = plan.cache;
  const int64_t first_row = first_cacheable_row(plan.tables, plan.num_tables);
  const int64_t count = *plan.count, now = plan.now();
  for (int64_t u = simt::global_warp(); u < plan.n; u += simt::warps_in_grid()) {
    const int64_t row = u < count ? plan.rows[u] : -1;
    const bool is_cacheable = u < count && row >= first_row;
    const int64_t set = is_cacheable ? set_of(row, cache.num_sets) : 0;
    const int way = is_cacheable ? find_way(cache, set, row) : -1;
    if (lane_in_warp() != (way < 0 ? 0 : way)) continue;
    const int64_t slot = set * kWays + way;
    plan.row_slots[u] = way < 0 ? -1 : static_cast<int32_t>(slot);
    plan.evicted[u] = kNoMove;
    sort.keys[u] = is_cacheable && way < 0 ? static_cast<uint32_t>(set) : sort.no_group_key;
    sort.positions[u] = static_cast<int32_t>(u);
    if (!is_cacheable) continue;
    if (way >= 0) {
      const int64_t num_lookups =
          cache.policy == CachePolicy::kLru
              ? 0
              : add_lookups(num_lookups_of(cache.stamps[slot]), num_lookups_at(plan, u));
      cache.stamps[slot] = make_stamp(cache.policy, num_lookups, now);
    } else if (cache.policy == CachePolicy::kLfu) {
      int32_t& count_of_row = cache.counts[row - first_row];
      count_of_row = static_cast<int32_t>(add_lookups(count_of_row, num_lookups_at(plan, u)));
    }
  }
}

// Write row_slots of all rows and change nothing else. The kernel uses only these members of
// `plan`: cache.tags, cache.num_sets, tables, num_tables, rows, count, n and row_slots.
[[maybe_unused]] static __global__ void __launch_bounds__(kCacheThreads)
    locate_kernel(DevicePlanArgs plan) {
  const int64_t first_row = first_cacheable_row(plan.tables, plan.num_tables), count = *plan.count;
  for (int64_t u = simt::global_warp(); u < plan.n; u += simt::warps_in_grid()) {
    const int64_t row = u < count ? plan.rows[u] : -1;
    const bool is_cacheable = u < count && row >= first_row;
    const int64_t set = is_cacheable ? set_of(row, plan.cache.num_sets) : 0;
    const int way = is_cacheable ? find_way(plan.cache, set, row) : -1;
    if (lane_in_warp() == 0)
      plan.row_slots[u] = way < 0 ? -1 : static_cast<int32_t>(set * kWays + way);
  }
}

// LFU orders the misses of a set by priority, the highest first. The upper 32 bits of a priority
// are the number of lookups of the row; the lower 32 bits decrease with the index of the miss in
// its group. kNoMiss is below all priorities.
inline constexpr int64_t kNoMiss = -1;

EMB_DEVICE int64_t miss_priority(int64_t num_lookups, int32_t index) {
  return (num_lookups << 32) | (INT32_MAX - index);
}
EMB_DEVICE int64_t num_lookups_of_miss(int64_t priority) { return priority >> 32; }
EMB_DEVICE int32_t index_of_miss(int64_t priority) {
  return INT32_MAX - static_cast<int32_t>(priority & 0xffffffff);
}

// Return how many of the first `num_lanes` lanes pass a `lane_priority` that is higher than the
// `priority` that this lane passes. All 32 lanes must call this.
EMB_DEVICE int count_higher(int64_t priority, int64_t lane_priority, int num_lanes) {
  int num_higher = 0;
  for (int k = 0; k < num_lanes; ++k) {
    num_higher += __shfl_sync(simt::kFullMask, lane_priority, k) > priority;
  }
  return num_higher;
}

// Write the kWays highest priorities of the misses of the group [begin, end), the highest first, to
// `leaders`, [kWays] in shared memory of this warp. If there are fewer, the other elements are
// kNoMiss. 32 misses at a time are ranked against the leaders so far, so that each count of lookups
// is read once. All 32 lanes must call this; it ends with a __syncwarp. Before the next call, the
// caller needs one after its last read of `leaders`.
EMB_DEVICE void rank_by_lookups(const DevicePlanArgs& plan, const DeviceMissGroups& groups,
                                int64_t first_row, int32_t begin, int32_t end, int64_t* leaders) {
  int64_t leader = kNoMiss;  // the leader so far whose rank is the number of this lane
  int num_leaders = 0;
  for (int32_t tile = begin; tile < end; tile += kWarpLanes) {
    const int32_t j = tile + lane_in_warp();
    const int num_in_tile = end - tile < kWarpLanes ? end - tile : kWarpLanes;
    int64_t priority = kNoMiss;
    if (j < end) {
      const int64_t row = plan.rows[groups.permutation[j]];
      priority = miss_priority(plan.cache.counts[row - first_row], j - begin);
    }
    const int rank =
        count_higher(priority, priority, num_in_tile) + count_higher(priority, leader, num_leaders);
    const int rank_of_leader = lane_in_warp() + count_higher(leader, priority, num_in_tile);
    __syncwarp();  // all lanes have read the leaders so far
    leaders[lane_in_warp()] = kNoMiss;
    __syncwarp();
    if (lane_in_warp() < num_leaders && rank_of_leader < kWays) leaders[rank_of_leader] = leader;
    if (j < end && rank < kWays) leaders[rank] = priority;
    __syncwarp();
    leader = leaders[lane_in_warp()];
    num_leaders = num_leaders + num_in_tile < kWays ? num_leaders + num_in_tile : kWays;
  }
}

// Assign ways to the misses. A warp works on one set, in a grid-stride loop. Lane w decides whether
// way w is replaced. Its candidate is the miss whose rank among the misses is the rank of way w
// among the ways. For a row that gets a way, write row_slots, evicted, the tag and the stamp. For
// LFU also write the number of lookups of the evicted row to `counts`.
[[maybe_unused]] static __global__ void __launch_bounds__(kCacheThreads)
    admit_kernel(DevicePlanArgs plan, DeviceMissGroups groups) {
  __shared__ int64_t leaders_of_warps[kCacheWarps][kWays];
  int64_t* leaders = leaders_of_warps[threadIdx.x / simt::kWarpLanes];
  const CacheState& cache = plan.cache;
  const int64_t first_row = first_cacheable_row(plan.tables, plan.num_tables);
  const int64_t end_row = end_of_rows(plan.tables, plan.num_tables);
  const int64_t now = plan.now(), oldest = plan.oldest();
  const bool is_lfu = cache.policy == CachePolicy::kLfu;
  const int num_groups = *groups.num_groups;
  for (int64_t g = simt::global_warp(); g < num_groups; g += simt::warps_in_grid()) {
    const int64_t slot = int64_t{groups.sets[g]} * kWays + lane_in_warp();
    const int32_t begin = groups.segments[g], end = groups.segments[g + 1];
    const int64_t stamp = cache.stamps[slot], order = way_order(cache.policy, stamp, oldest);
    int rank = 0;  // rank of this way among all ways
    for (int k = 0; k < kWays; ++k) {
      const int64_t other_order = __shfl_sync(simt::kFullMask, order, k);
      rank += other_order < order || (other_order == order && k < lane_in_warp());
    }
    if (is_lfu) rank_by_lookups(plan, groups, first_row, begin, end, leaders);
    if (rank < end - begin) {
      const int32_t u = groups.permutation[begin + (is_lfu ? index_of_miss(leaders[rank]) : rank)];
      const int64_t row = plan.rows[u];
      const int64_t num_lookups = is_lfu ? num_lookups_of_miss(leaders[rank]) : 0;
      if (may_replace(cache.policy, num_lookups, order)) {
        const int64_t evicted = cache.tags[slot];
        // A tag that is not a cacheable row, e.g. that of an empty way, has no entry in `counts`.
        if (is_lfu && evicted >= first_row && evicted < end_row) {
          cache.counts[evicted - first_row] = static_cast<int32_t>(num_lookups_of(stamp));
        }
        plan.row_slots[u] = static_cast<int32_t>(slot);
        plan.evicted[u] = evicted < 0 ? kNoRow : evicted;
        cache.tags[slot] = row;
        cache.stamps[slot] = make_stamp(cache.policy, num_lookups, now);
      }
    }
    __syncwarp();  // before `leaders` is overwritten
  }
}

// Counts of one table that a warp has not yet added to the counters. Every lane has partial sums,
// which flush_counts adds up.
struct TableCounts {
  static constexpr int kCounters = CacheCounter::kWriteBacks;  // all counters before kWriteBacks
  int table = -1;                                              // the same in all lanes; -1: none
  int32_t sums[kCounters] = {};  // by counter; a batch has fewer than 2^31 lookups
};

// Add n to a counter of a table; table num_tables has the totals.
EMB_DEVICE void add_counter(const DevicePlanArgs& plan, int table, CacheCounter::Column counter,
                            int64_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(plan.counters + table * kCacheCounters + counter),
            static_cast<unsigned long long>(n));
}

// Add `counts` to the counters of its table and, except for calls, to the totals; clear the sums.
// All 32 lanes must call this.
EMB_DEVICE void flush_counts(const DevicePlanArgs& plan, TableCounts* counts) {
#pragma unroll
  for (int c = 0; c < TableCounts::kCounters; ++c) {
    const auto counter = static_cast<CacheCounter::Column>(c);
    const int32_t sum = simt::group_sum(counts->sums[c], kWarpLanes);
    counts->sums[c] = 0;
    if (lane_in_warp() != 0 || sum == 0) continue;
    add_counter(plan, counts->table, counter, sum);
    // A call may have rows of several tables; finish_plan_kernel counts it once in the totals.
    if (counter != CacheCounter::kCalls) add_counter(plan, plan.num_tables, counter, sum);
  }
}

// Add row u, of a table that begins with row `row_base`, to this lane's TableCounts::sums of the
// table. The first row of the batch in the table counts the call.
EMB_DEVICE void count_row(const DevicePlanArgs& plan, int64_t u, int64_t row_base, int32_t* sums) {
  const auto num_lookups = static_cast<int32_t>(num_lookups_at(plan, u));
  const bool is_conflict = plan.row_slots[u] < 0;
  const bool is_miss = is_conflict || plan.evicted[u] != kNoMove;
  sums[CacheCounter::kCalls] += u == 0 || plan.rows[u - 1] < row_base;
  sums[CacheCounter::kLookups] += num_lookups;
  sums[CacheCounter::kUnique] += 1;
  sums[CacheCounter::kUniqueMisses] += is_miss;
  sums[CacheCounter::kLookupMisses] += is_miss ? num_lookups : 0;
  sums[CacheCounter::kConflictUniqueMisses] += is_conflict;
  sums[CacheCounter::kConflictMisses] += is_conflict ? num_lookups : 0;
}

// Count the cacheable rows of a plan, and the rows that they evict, as block `block` of the
// `num_blocks` blocks that count. Each warp counts a contiguous range of rows, 32 at a time; rows
// ascend, so their table seldom changes. All lanes of a warp must call this.
EMB_DEVICE void count_rows(const DevicePlanArgs& plan, unsigned block, unsigned num_blocks) {
  const int64_t first_row = first_cacheable_row(plan.tables, plan.num_tables), count = *plan.count;
  const int64_t num_tiles = (count + kWarpLanes - 1) / kWarpLanes,
                num_warps = int64_t{num_blocks} * kCacheWarps;
  const int64_t warp = int64_t{block} * kCacheWarps + threadIdx.x / simt::kWarpLanes;
  const int64_t tiles_per_warp = (num_tiles + num_warps - 1) / num_warps,
                first_tile = warp * tiles_per_warp;
  TableCounts counts;
  for (int64_t tile = first_tile; tile < first_tile + tiles_per_warp && tile < num_tiles; ++tile) {
    const int64_t u = tile * kWarpLanes + lane_in_warp();
    const bool is_cacheable = u < count && plan.rows[u] >= first_row;
    const int table = is_cacheable ? find_table(plan.tables, plan.num_tables, plan.rows[u]) : -1;
    unsigned lanes_left = __ballot_sync(simt::kFullMask, table >= 0);  // lanes not yet counted
    while (lanes_left != 0) {
      const int next_table =
          __shfl_sync(simt::kFullMask, table, __ffs(static_cast<int>(lanes_left)) - 1);
      if (next_table != counts.table) {
        if (counts.table >= 0) flush_counts(plan, &counts);
        counts.table = next_table;
      }
      if (table == next_table) count_row(plan, u, plan.tables[table].row_base, counts.sums);
      lanes_left &= ~__ballot_sync(simt::kFullMask, table == next_table);
    }
    const int64_t evicted = is_cacheable ? plan.evicted[u] : -1;
    const int evicted_table = evicted >= 0 ? find_table(plan.tables, plan.num_tables, evicted) : -1;
    lanes_left = __ballot_sync(simt::kFullMask, evicted_table >= 0);
    while (lanes_left != 0) {
      const int next_table =
          __shfl_sync(simt::kFullMask, evicted_table, __ffs(static_cast<int>(lanes_left)) - 1);
      const unsigned lanes_of_table = __ballot_sync(simt::kFullMask, evicted_table == next_table);
      if (lane_in_warp() == 0) {
        add_counter(plan, next_table, CacheCounter::kWriteBacks, __popc(lanes_of_table));
        add_counter(plan, plan.num_tables, CacheCounter::kWriteBacks, __popc(lanes_of_table));
      }
      lanes_left &= ~lanes_of_table;
    }
  }
  if (counts.table >= 0) flush_counts(plan, &counts);
}

// The slots of n lookups, computed from the slots of their rows. The default has no lookups.
struct LookupSlots {
  const int32_t* row_slots;                   // [*count] slot of each distinct row, -1 for none
  const int32_t *segments, *lookups, *count;  // the grouping of tbe_group: [n + 1], [n], [1]
  int64_t n;
  int32_t* slots;  // [n], an output: the slot of the row of each lookup, -1 for none
};

// Write the slots of lookups, as block `block` of the `num_blocks` blocks that write. All
// kTileThreads threads of the block must call this, because TileSearch has barriers; `range`, [2],
// is shared memory for it.
EMB_DEVICE void write_lookup_slots(const LookupSlots& args, unsigned block, unsigned num_blocks,
                                   int* range) {
  const int num_groups = *args.count;
  const int32_t num_grouped = args.segments[num_groups];  // lookups with a row; others get -1
  const auto start = [&](int group) { return static_cast<int64_t>(args.segments[group]); };
  for (int64_t tile = int64_t{block} * kTileSize; tile < args.n;
       tile += int64_t{num_blocks} * kTileSize) {
    const int64_t end = tile + kTileSize < args.n ? tile + kTileSize : args.n;
    const TileSearch search(start, num_groups, tile, end, range);
    for (int64_t j = tile + threadIdx.x; j < end; j += kTileThreads) {
      const int group = j < num_grouped ? search.find(start, j) : -1;
      args.slots[args.lookups[j]] = group < 0 ? -1 : args.row_slots[group];
    }
  }
}

// Write the slot of every lookup, by the whole grid.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    lookup_slots_kernel(LookupSlots args) {
  __shared__ int range[2];
  write_lookup_slots(args, blockIdx.x, gridDim.x, range);
}

// Blocks per multiprocessor of finish_plan_kernel, which leave a thread 40 registers. Without this
// bound nvcc 13.0 takes 32 registers for sm_80 and sm_90, and spills.
inline constexpr int kFinishBlocksPerSm = 6;
// Rows per thread of a block that counts. A warp ends with an atomic addition per counter, so it
// should count many rows. The number is not measured.
inline constexpr int kRowsPerCountingThread = 8;

// The last kernel of a plan: the first `num_counting_blocks` blocks count the rows; the others, if
// any, write the slots of `lookups`. One thread counts the call, sets *plan.num_postponed to 0
// unless that is null, and advances the clock unless plan.lag is negative.
[[maybe_unused]] static __global__ void __launch_bounds__(kCacheThreads, kFinishBlocksPerSm)
    finish_plan_kernel(DevicePlanArgs plan, unsigned num_counting_blocks, LookupSlots lookups) {
  __shared__ int range[2];
  if (simt::global_thread() == 0) {
    add_counter(plan, plan.num_tables, CacheCounter::kCalls, 1);
    if (plan.num_postponed != nullptr) *plan.num_postponed = 0;
    if (plan.lag >= 0) {
      plan.clock[CacheClock::kOldest] = plan.clock[CacheClock::kNow] + 1 - plan.lag;
      plan.clock[CacheClock::kNow] += 1;
    }
  }
  if (blockIdx.x < num_counting_blocks) {
    count_rows(plan, blockIdx.x, num_counting_blocks);
  } else {
    write_lookup_slots(lookups, blockIdx.x - num_counting_blocks, gridDim.x - num_counting_blocks,
                       range);
  }
}
static_assert(kCacheThreads == kTileThreads);

// Probe all rows, and write sort.keys and sort.positions, which the caller sorts to group the
// misses.
template <class Launcher>
void launch_probe(const Launcher& launcher, const DevicePlanArgs& plan,
                  const SortBuffers<uint32_t>& sort) {
  if (plan.n == 0) return;
  launcher(probe_kernel,
           blocks_for(plan.n, kCacheWarps, launcher.max_grid_blocks(kResidentBlocksPerSm)),
           kCacheThreads, plan, sort);
}

// Launch locate_kernel.
template <class Launcher>
void launch_locate(const Launcher& launcher, const DevicePlanArgs& plan) {
  if (plan.n == 0) return;
  launcher(locate_kernel,
           blocks_for(plan.n, kCacheWarps, launcher.max_grid_blocks(kResidentBlocksPerSm)),
           kCacheThreads, plan);
}

// Admit the misses, which the caller has grouped by set. Then launch finish_plan_kernel, also
// without rows; it writes lookups.slots.
template <class Launcher>
void launch_admit(const Launcher& launcher, const DevicePlanArgs& plan,
                  const DeviceMissGroups& groups, const LookupSlots& lookups = {}) {
  if (plan.n > 0) {
    const int64_t max_sets = plan.n < plan.cache.num_sets ? plan.n : plan.cache.num_sets;
    launcher(admit_kernel,
             blocks_for(max_sets, kCacheWarps, launcher.max_grid_blocks(kResidentBlocksPerSm)),
             kCacheThreads, plan, groups);
  }
  const unsigned num_counting_blocks =
      blocks_for(plan.n, kRowsPerCountingThread * kCacheThreads,
                 launcher.max_grid_blocks(kResidentThreadsPerSm / kCacheThreads));
  const unsigned num_writing_blocks =
      lookups.n == 0
          ? 0
          : blocks_for(lookups.n, kTileSize, launcher.max_grid_blocks(kResidentBlocksPerSm));
  launcher(finish_plan_kernel, num_counting_blocks + num_writing_blocks, kCacheThreads, plan,
           num_counting_blocks, lookups);
}

// Launch lookup_slots_kernel.
template <class Launcher>
void launch_lookup_slots(const Launcher& launcher, const LookupSlots& args) {
  if (args.n == 0) return;
  launcher(lookup_slots_kernel,
           blocks_for(args.n, kTileSize, launcher.max_grid_blocks(kResidentBlocksPerSm)),
           kTileThreads, args);
}

}  // namespace emb::cuda
