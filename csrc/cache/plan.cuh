// Probing, admission and counting on the GPU. A warp takes one row, or one set, and each lane one
// way: the tags of a set are one coalesced load. The sort of `group` groups the misses by set.
#pragma once

#include "cache/args.h"
#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"
#include "group/segments.cuh"

namespace emb::cuda {

inline constexpr int kCacheThreads = 256;
inline constexpr int kCacheWarps = kCacheThreads / static_cast<int>(simt::kWarp);
static_assert(kWays == static_cast<int>(simt::kWarp));

struct CachePlan {
  CacheState cache;  // first_row is computed on the device, where the tables are
  const int64_t* clock;
  int64_t* counters;
  const Feature* tables;
  int num_tables;
  const int64_t* rows;
  const int32_t *segments, *count;
  int64_t n;  // entries of `rows`, of which the first `count` are in use
  int32_t* row_slots;
  int64_t* evicted;
};

// The misses by set, as `group` returns them.
struct MissGroups {
  const int32_t *sets, *segments, *permutation, *count;
};

EMB_DEVICE int lane_id() { return static_cast<int>(threadIdx.x % simt::kWarp); }

EMB_DEVICE int64_t lookups_at(const CachePlan& plan, int64_t u) {
  return plan.segments[u + 1] - plan.segments[u];
}

// Return the way that holds `row`, the same in every lane; -1 if there is none.
EMB_DEVICE int find_way(const CacheState& cache, int64_t set, int64_t row) {
  const int64_t tag = cache.tags[set * kWays + lane_id()];
  return __ffs(static_cast<int>(__ballot_sync(simt::kFullMask, tag == row))) - 1;
}

// Record the use of hits; give misses their set as the key of a sort.
[[maybe_unused]] static __global__ void __launch_bounds__(kCacheThreads)
    probe_kernel(CachePlan plan, SortBuffers<uint32_t> sort) {
  const CacheState& cache = plan.cache;
  const int64_t first_row = first_cached_row(plan.tables, plan.num_tables);
  const int64_t count = *plan.count, now = plan.clock[0];
  for (int64_t u = simt::global_warp(); u < plan.n; u += simt::warps_in_grid()) {
    const int64_t row = u < count ? plan.rows[u] : -1;
    const bool cached = u < count && row >= first_row;
    const int64_t set = cached ? set_of(row, cache.sets) : 0;
    const int way = cached ? find_way(cache, set, row) : -1;
    if (lane_id() != (way < 0 ? 0 : way)) continue;
    const int64_t slot = set * kWays + way;
    plan.row_slots[u] = way < 0 ? -1 : static_cast<int32_t>(slot);
    plan.evicted[u] = kNoMove;
    sort.keys[u] = cached && way < 0 ? static_cast<uint32_t>(set) : sort.limit;
    sort.positions[u] = static_cast<int32_t>(u);
    if (!cached) continue;
    if (way >= 0) {
      const int64_t lookups = cache.policy == Policy::kLru
                                  ? 0
                                  : add_lookups(lookups_of(cache.words[slot]), lookups_at(plan, u));
      cache.words[slot] = usage_word(cache.policy, lookups, now);
    } else if (cache.policy == Policy::kLfu) {
      int32_t& lookups = cache.counts[row - first_row];
      lookups = static_cast<int32_t>(add_lookups(lookups, lookups_at(plan, u)));
    }
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kCacheThreads)
    locate_kernel(CachePlan plan) {
  const int64_t first_row = first_cached_row(plan.tables, plan.num_tables), count = *plan.count;
  for (int64_t u = simt::global_warp(); u < plan.n; u += simt::warps_in_grid()) {
    const int64_t row = u < count ? plan.rows[u] : -1;
    const bool cached = u < count && row >= first_row;
    const int64_t set = cached ? set_of(row, plan.cache.sets) : 0;
    const int way = cached ? find_way(plan.cache, set, row) : -1;
    if (lane_id() == 0) plan.row_slots[u] = way < 0 ? -1 : static_cast<int32_t>(set * kWays + way);
  }
}

// Write the rows of misses [begin, end) to `best` by descending lookups; ties are in the order of
// the misses. One round per row: a set rarely misses more than a few. Called by the whole warp.
EMB_DEVICE void rank_by_lookups(const CachePlan& plan, const MissGroups& groups, int64_t first_row,
                                int32_t begin, int32_t end, int32_t* best) {
  int64_t before = INT64_MAX;  // the key of the row chosen last; keys decrease
  const int wanted = end - begin < kWays ? end - begin : kWays;
  for (int k = 0; k < wanted; ++k) {
    int64_t key = -1;
    for (int32_t j = begin + lane_id(); j < end; j += kWays) {
      const int64_t row = plan.rows[groups.permutation[j]];
      const int64_t lookups = plan.cache.counts[row - first_row];
      const int64_t other = lookups << 32 | (0x7fffffff - (j - begin));
      if (other < before && other > key) key = other;
    }
    for (int offset = kWays / 2; offset > 0; offset /= 2) {
      const int64_t other = __shfl_xor_sync(simt::kFullMask, key, offset);
      key = other > key ? other : key;
    }
    if (lane_id() == 0) {
      best[k] = groups.permutation[begin + (0x7fffffff - static_cast<int32_t>(key & 0xffffffff))];
    }
    before = key;
  }
  __syncwarp();
}

// One warp per set: lane w decides whether way w is replaced, and by which row.
[[maybe_unused]] static __global__ void __launch_bounds__(kCacheThreads)
    admit_kernel(CachePlan plan, MissGroups groups) {
  __shared__ int32_t best[kCacheWarps][kWays];
  int32_t* chosen = best[threadIdx.x / simt::kWarp];
  const CacheState& cache = plan.cache;
  const int64_t first_row = first_cached_row(plan.tables, plan.num_tables), now = plan.clock[0];
  const int64_t oldest = plan.clock[1] < now ? plan.clock[1] : now;
  const bool lfu = cache.policy == Policy::kLfu;
  const int num_groups = *groups.count;
  for (int64_t g = simt::global_warp(); g < num_groups; g += simt::warps_in_grid()) {
    const int64_t slot = int64_t{groups.sets[g]} * kWays + lane_id();
    const int32_t begin = groups.segments[g], end = groups.segments[g + 1];
    const int64_t word = cache.words[slot], order = way_order(cache.policy, word, oldest);
    int rank = 0;  // of this way among all ways
    for (int k = 0; k < kWays; ++k) {
      const int64_t other = __shfl_sync(simt::kFullMask, order, k);
      rank += other < order || (other == order && k < lane_id());
    }
    if (lfu) rank_by_lookups(plan, groups, first_row, begin, end, chosen);
    if (rank < end - begin) {
      const int32_t u = lfu ? chosen[rank] : groups.permutation[begin + rank];
      const int64_t row = plan.rows[u], lookups = lfu ? cache.counts[row - first_row] : 0;
      if (may_replace(cache.policy, lookups, order)) {
        const int64_t old = cache.tags[slot];
        // Higher tags belong to no table. The bound is computed here: to keep it would take one
        // register too many.
        if (lfu && old >= first_row && old < end_of_rows(plan.tables, plan.num_tables)) {
          cache.counts[old - first_row] = static_cast<int32_t>(lookups_of(word));
        }
        plan.row_slots[u] = static_cast<int32_t>(slot);
        plan.evicted[u] = old < 0 ? kNoRow : old;
        cache.tags[slot] = row;
        cache.words[slot] = usage_word(cache.policy, lookups, now);
      }
    }
    __syncwarp();  // before `chosen` is overwritten
  }
}

// Counters of one table that a warp has not written yet; every lane has a partial sum.
struct Tally {
  int table = -1;
  int32_t sums[kWriteBacks] = {};  // a batch has fewer than 2^31 lookups
};

EMB_DEVICE void add_counter(const CachePlan& plan, int table, CacheCounter counter, int64_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(plan.counters + table * kCounters + counter),
            static_cast<unsigned long long>(n));
}

// Called by the whole warp.
EMB_DEVICE void flush_tally(const CachePlan& plan, Tally* tally) {
#pragma unroll
  for (int c = 0; c < kWriteBacks; ++c) {
    const int32_t sum = simt::group_sum(tally->sums[c], kWays);
    tally->sums[c] = 0;
    if (lane_id() != 0 || sum == 0) continue;
    add_counter(plan, tally->table, static_cast<CacheCounter>(c), sum);
    if (c != kCalls) add_counter(plan, plan.num_tables, static_cast<CacheCounter>(c), sum);
  }
}

// Count row u. Rows ascend, so a warp seldom changes the table.
EMB_DEVICE void tally_row(const CachePlan& plan, int64_t u, int64_t row_base, int32_t* sums) {
  const auto lookups = static_cast<int32_t>(lookups_at(plan, u));
  const bool conflict = plan.row_slots[u] < 0;
  const bool miss = conflict || plan.evicted[u] != kNoMove;
  sums[kCalls] += u == 0 || plan.rows[u - 1] < row_base;
  sums[kLookups] += lookups;
  sums[kUnique] += 1;
  sums[kUniqueMisses] += miss;
  sums[kLookupMisses] += miss ? lookups : 0;
  sums[kConflictUniqueMisses] += conflict;
  sums[kConflictMisses] += conflict ? lookups : 0;
}

// Each warp counts 32 rows at a time of a contiguous range of rows.
[[maybe_unused]] static __global__ void __launch_bounds__(kCacheThreads)
    count_kernel(CachePlan plan) {
  if (simt::global_thread() == 0) add_counter(plan, plan.num_tables, kCalls, 1);
  const int64_t first_row = first_cached_row(plan.tables, plan.num_tables), count = *plan.count;
  const int64_t tiles = (count + kWays - 1) / kWays, warps = simt::warps_in_grid();
  const int64_t share = (tiles + warps - 1) / warps, first = simt::global_warp() * share;
  Tally tally;
  for (int64_t tile = first; tile < first + share && tile < tiles; ++tile) {
    const int64_t u = tile * kWays + lane_id();
    const bool cached = u < count && plan.rows[u] >= first_row;
    const int table = cached ? find_table(plan.tables, plan.num_tables, plan.rows[u]) : -1;
    unsigned left = __ballot_sync(simt::kFullMask, table >= 0);
    while (left != 0) {
      const int next = __shfl_sync(simt::kFullMask, table, __ffs(static_cast<int>(left)) - 1);
      if (next != tally.table) {
        if (tally.table >= 0) flush_tally(plan, &tally);
        tally.table = next;
      }
      if (table == next) tally_row(plan, u, plan.tables[table].row_base, tally.sums);
      left &= ~__ballot_sync(simt::kFullMask, table == next);
    }
    const int64_t old = cached ? plan.evicted[u] : -1;
    const int owner = old >= 0 ? find_table(plan.tables, plan.num_tables, old) : -1;
    left = __ballot_sync(simt::kFullMask, owner >= 0);
    while (left != 0) {
      const int next = __shfl_sync(simt::kFullMask, owner, __ffs(static_cast<int>(left)) - 1);
      const unsigned same = __ballot_sync(simt::kFullMask, owner == next);
      if (lane_id() == 0) {
        add_counter(plan, next, kWriteBacks, __popc(same));
        add_counter(plan, plan.num_tables, kWriteBacks, __popc(same));
      }
      left &= ~same;
    }
  }
  if (tally.table >= 0) flush_tally(plan, &tally);
}

// Write the slot of every lookup, -1 for none.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    lookup_slots_kernel(const int32_t* row_slots, const int32_t* segments,
                        const int32_t* permutation, const int32_t* count, int64_t n,
                        int32_t* slots) {
  __shared__ int range[2];
  const int groups = *count;
  const int32_t grouped = segments[groups];
  const auto start = [&](int group) { return static_cast<int64_t>(segments[group]); };
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileSize; tile < n;
       tile += static_cast<int64_t>(gridDim.x) * kTileSize) {
    const int64_t end = tile + kTileSize < n ? tile + kTileSize : n;
    const TileSearch search(start, groups, tile, end, range);
    for (int64_t j = tile + threadIdx.x; j < end; j += kTileThreads) {
      const int group = j < grouped ? search.find(start, j) : -1;
      slots[permutation[j]] = group < 0 ? -1 : row_slots[group];
    }
  }
}

template <class Launcher>
void launch_probe(const Launcher& launcher, const CachePlan& plan,
                  const SortBuffers<uint32_t>& sort) {
  if (plan.n == 0) return;
  launcher(probe_kernel, blocks_for(plan.n, kCacheWarps, launcher.blocks(32)), kCacheThreads, plan,
           sort);
}

template <class Launcher>
void launch_locate(const Launcher& launcher, const CachePlan& plan) {
  if (plan.n == 0) return;
  launcher(locate_kernel, blocks_for(plan.n, kCacheWarps, launcher.blocks(32)), kCacheThreads,
           plan);
}

// Called after the misses were grouped.
template <class Launcher>
void launch_admit(const Launcher& launcher, const CachePlan& plan, const MissGroups& groups) {
  if (plan.n > 0) {
    const int64_t max_sets = plan.n < plan.cache.sets ? plan.n : plan.cache.sets;
    launcher(admit_kernel, blocks_for(max_sets, kCacheWarps, launcher.blocks(32)), kCacheThreads,
             plan, groups);
  }
  launcher(count_kernel, blocks_for(plan.n, 8 * kCacheThreads, launcher.blocks(8)), kCacheThreads,
           plan);
}

template <class Launcher>
void launch_lookup_slots(const Launcher& launcher, const int32_t* row_slots,
                         const int32_t* segments, const int32_t* permutation, const int32_t* count,
                         int64_t n, int32_t* slots) {
  if (n == 0) return;
  launcher(lookup_slots_kernel, blocks_for(n, kTileSize, launcher.blocks(32)), kTileThreads,
           row_slots, segments, permutation, count, n, slots);
}

}  // namespace emb::cuda
