// Probing and admission on one CPU thread: the functions of CachePlanKernels (cache/args.h). The
// tags of a set are four cache lines, which are prefetched a block of rows ahead. A hit of `probe`
// writes one stamp. Only the admission of misses reads all stamps of a set; it reads the tags of
// the replaced ways only. Sets with misses are in ascending order, so admission reads memory in
// ascending order.
#include "cache/args.h"
#include "core/vec.h"

namespace emb::EMB_ISA {
namespace {

constexpr int kBlockRows = 16;  // rows whose tags are prefetched while the previous block is probed

// Prefetch the words of a set in `words`, the tags or the stamps of all sets.
EMB_HD void prefetch_set(const int64_t* words, int64_t set) {
  prefetch_row<false>(words + set * kWays, kWays * static_cast<int64_t>(sizeof(int64_t)));
}

// Return the first way whose word in `words`, [kWays], is `value`, kWays if there is none.
EMB_HD int find_way(const int64_t* words, int64_t value) {
  uint32_t equal_ways = 0;
#if defined(__AVX512F__)
  const __m512i repeated_value = _mm512_set1_epi64(value);
  for (int w = 0; w < kWays; w += 8) {
    const __mmask8 equal = _mm512_cmpeq_epi64_mask(_mm512_loadu_si512(words + w), repeated_value);
    equal_ways |= static_cast<uint32_t>(equal) << w;
  }
#elif defined(__AVX2__)
  const __m256i repeated_value = _mm256_set1_epi64x(value);
  for (int w = 0; w < kWays; w += 4) {
    const __m256i four_words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words + w));
    const __m256d equal = _mm256_castsi256_pd(_mm256_cmpeq_epi64(four_words, repeated_value));
    equal_ways |= static_cast<uint32_t>(_mm256_movemask_pd(equal)) << w;
  }
#else
  for (int w = 0; w < kWays; ++w) equal_ways |= static_cast<uint32_t>(words[w] == value) << w;
#endif
  return equal_ways == 0 ? kWays : __builtin_ctz(equal_ways);
}

// Return the number of lookups of row u in the batch.
EMB_HD int64_t num_lookups_at(const CachePlanArgs& args, int64_t u) {
  return args.segments[u + 1] - args.segments[u];
}

// Write the stamps of the hits among rows [begin, end). A stamp has the number of the batch and,
// for LFU, of the lookups of the row so far, including those of the batch.
EMB_HD void stamp_hits(const CachePlanArgs& args, int64_t begin, int64_t end) {
  const CacheState& cache = args.cache;
  for (int64_t u = begin; u < end; ++u) {
    if (args.row_slots[u] < 0) continue;
    int64_t& stamp = cache.stamps[args.row_slots[u]];
    const int64_t num_lookups = cache.policy == CachePolicy::kLru
                                    ? 0
                                    : add_lookups(num_lookups_of(stamp), num_lookups_at(args, u));
    stamp = make_stamp(cache.policy, num_lookups, args.now);
  }
}

// CachePlanKernels::probe if kWritesStamps, else CachePlanKernels::locate.
template <bool kWritesStamps>
int64_t probe(const CachePlanArgs& args, int64_t begin, int64_t end, Miss* misses) {
  const CacheState& cache = args.cache;
  int64_t num_misses = 0;
  int64_t sets[2][kBlockRows];
  const auto prefetch_block = [&](int64_t block, int64_t* sets_of_block) {
    const int64_t block_end = block + kBlockRows < end ? block + kBlockRows : end;
    for (int64_t u = block; u < block_end; ++u) {
      sets_of_block[u - block] = set_of(args.rows[u], cache.num_sets);
      prefetch_set(cache.tags, sets_of_block[u - block]);
    }
  };
  prefetch_block(begin, sets[0]);
  int64_t first_unstamped = begin;  // hits before this row have their new stamps
  for (int64_t block = begin, parity = 0; block < end; block += kBlockRows, parity ^= 1) {
    prefetch_block(block + kBlockRows, sets[parity ^ 1]);
    const int64_t block_end = block + kBlockRows < end ? block + kBlockRows : end;
    for (int64_t u = block; u < block_end; ++u) {
      const int64_t set = sets[parity][u - block], first_slot = set * kWays;
      const int way = find_way(cache.tags + first_slot, args.rows[u]);
      const bool is_hit = way < kWays;
      args.row_slots[u] = is_hit ? static_cast<int32_t>(first_slot + way) : -1;
      if (misses != nullptr) {  // without a branch: a hit is listed too, and then overwritten
        misses[num_misses] = {static_cast<int32_t>(u), static_cast<uint32_t>(set)};
        num_misses += !is_hit;
      }
      if constexpr (kWritesStamps) {
        args.evicted[u] = kNoMove;
        // For a miss, prefetch the line of `evicted` that was just written: this avoids a branch
        // and causes no traffic.
        __builtin_prefetch(is_hit ? cache.stamps + first_slot + way : args.evicted + u, 1);
      }
    }
    if constexpr (kWritesStamps) stamp_hits(args, first_unstamped, block);
    first_unstamped = block;
  }
  if constexpr (kWritesStamps) stamp_hits(args, first_unstamped, end);
  if (kWritesStamps && cache.policy == CachePolicy::kLfu) {
    const auto count_of = [&](int64_t i) -> int32_t& {
      return cache.counts[args.rows[misses[i].position] - cache.first_row];
    };
    for (int64_t i = 0; i < num_misses; ++i) {
      if (i + kBlockRows < num_misses) __builtin_prefetch(&count_of(i + kBlockRows), 1);
      count_of(i) =
          static_cast<int32_t>(add_lookups(count_of(i), num_lookups_at(args, misses[i].position)));
    }
  }
  return num_misses;
}

// A missing row that may get a way.
struct Candidate {
  int32_t position;     // its position u in `rows`
  int32_t num_lookups;  // so far, with those of the batch; 0 for LRU, which does not count them
};

// Write the misses of group g that come first in the order of the policy to `candidates`, [kWays].
// The order of LRU is ascending rows. The order of LFU is descending lookups and, among equals,
// ascending rows. Return the number of candidates, at most kWays.
EMB_HD int first_candidates(const CachePlanArgs& args, const MissGroups& groups, int64_t g,
                            Candidate* candidates) {
  const CacheState& cache = args.cache;
  int num_candidates = 0;
  for (int32_t j = groups.segments[g]; j < groups.segments[g + 1]; ++j) {
    const int32_t position = groups.misses[groups.permutation[j]].position;
    if (cache.policy == CachePolicy::kLru) {
      if (num_candidates == kWays) break;
      candidates[num_candidates++] = {position, 0};
      continue;
    }
    const int32_t num_lookups = cache.counts[args.rows[position] - cache.first_row];
    int rank = num_candidates;
    while (rank > 0 && candidates[rank - 1].num_lookups < num_lookups) --rank;
    if (rank == kWays) continue;
    const int last = num_candidates < kWays ? num_candidates : kWays - 1;
    for (int k = last; k > rank; --k) candidates[k] = candidates[k - 1];
    candidates[rank] = {position, num_lookups};
    num_candidates += num_candidates < kWays;
  }
  return num_candidates;
}

// CachePlanKernels::admit.
void admit(const CachePlanArgs& args, const MissGroups& groups, int64_t begin, int64_t end) {
  const CacheState& cache = args.cache;
  constexpr int kSetsAhead = 6;  // sets between the prefetch of stamps and their use
  for (int64_t g = begin; g < end; ++g) {
    if (g + kSetsAhead < end) prefetch_set(cache.stamps, groups.sets[g + kSetsAhead]);
    const int64_t first_slot = int64_t{groups.sets[g]} * kWays;
    int64_t *tags = cache.tags + first_slot, *stamps = cache.stamps + first_slot;
    int64_t orders[kWays];
    for (int w = 0; w < kWays; ++w) {
      orders[w] = way_order(cache.policy, stamps[w], args.oldest);
    }
    Candidate candidates[kWays];
    const int num_candidates = first_candidates(args, groups, g, candidates);
    for (int k = 0; k < num_candidates; ++k) {
      // Find the minimum first, then its way. Both loops are vectorised; one loop for both would
      // not be.
      int64_t min_order = kNotReplaceable;
      for (int w = 0; w < kWays; ++w) min_order = orders[w] < min_order ? orders[w] : min_order;
      const int way = find_way(orders, min_order);
      // No other way is easier to replace, and no later row has a higher priority.
      if (!may_replace(cache.policy, candidates[k].num_lookups, min_order)) break;
      orders[way] = kNotReplaceable;
      const int64_t u = candidates[k].position, evicted = tags[way];
      if (cache.policy == CachePolicy::kLfu && evicted >= cache.first_row &&
          evicted < args.end_row) {
        cache.counts[evicted - cache.first_row] = static_cast<int32_t>(num_lookups_of(stamps[way]));
      }
      args.row_slots[u] = static_cast<int32_t>(first_slot + way);
      args.evicted[u] = evicted < 0 ? kNoRow : evicted;
      tags[way] = args.rows[u];
      stamps[way] = make_stamp(cache.policy, candidates[k].num_lookups, args.now);
    }
  }
}

}  // namespace

extern const CachePlanKernels kCachePlanKernels;
const CachePlanKernels kCachePlanKernels = {probe<false>, probe<true>, admit};

}  // namespace emb::EMB_ISA
