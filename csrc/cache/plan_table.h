// The kernels of `cache_plan_` and `cache_locate` on the CPU: what they take, how they are reached.
#pragma once

#include "cache/cache.h"

namespace emb {

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

}  // namespace emb
