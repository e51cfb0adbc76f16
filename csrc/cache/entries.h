// Parts of the cache's ops on the CPU, of which the whole pass, `cache_prefetch_`, is made.
#pragma once

#include <tuple>
#include <vector>

#include "cache/check.h"

namespace emb {

// Plan a batch, whose rows are set in `call`: check the contents of the arguments, then change the
// cache and its counters. Return row_slots, int32 [L], and evicted, int64 [L]: see CachePlanArgs;
// entries behind the last row are -1 and kNoMove. A plan that runs out of memory may have stamped
// hits, but has changed no tag.
std::tuple<Tensor, Tensor> plan_batch(const PlanCall& call);

// Check weights, states, hyper and tables, including that every cached table lies inside its tier,
// and return the memory in which rows are moved. It refers to the tensors.
CacheMemory check_memory(const char* op, std::vector<Tensor>& weights, std::vector<Tensor>& states,
                         const Tensor& hyper, const Tensor& tables);

// Move the first `count` rows of a batch, in parallel.
void move_batch(const CacheMemory& memory, const CacheMoves& moves, int64_t count);

// Return the slot of the row of every lookup, int32 [L], -1 for none. `row_slots` is that of a
// plan; the others, [L + 1], [L] and [1], are those of tbe_group, and are checked.
Tensor cache_lookup_slots(const Tensor& row_slots, const Tensor& segments, const Tensor& lookups,
                          const Tensor& count);

}  // namespace emb
