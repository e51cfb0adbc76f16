// Parts of the cache's ops on the CPU that its whole pass, `cache_prefetch_`, is made of.
#pragma once

#include <tuple>
#include <vector>

#include "cache/check.h"

namespace emb {

// Plan a batch; return its row_slots and evicted rows, as `cache_plan_` does.
std::tuple<Tensor, Tensor> plan_batch(const PlanCall& call);

// Check the memory that rows are moved in.
CacheMemory check_memory(const char* op, std::vector<Tensor>& weights, std::vector<Tensor>& states,
                         const Tensor& hyper, const Tensor& tables);

// Move the first `count` rows of a batch.
void move_batch(const CacheMemory& memory, const CacheMoves& moves, int64_t count);

Tensor cache_lookup_slots(const Tensor& row_slots, const Tensor& segments, const Tensor& lookups,
                          const Tensor& count);

}  // namespace emb
