// The steps of the cache ops on the CPU, which `cache_prefetch_` (prefetch_cpu.cpp) calls one after
// the other. L is the number of lookups of a batch.
#pragma once

#include <tuple>
#include <vector>

#include "cache/check.h"

namespace emb {

// Plan a batch, whose rows are set in `call`: check the contents of the arguments, then change the
// cache and its counters. Return (row_slots, evicted), int32 [L] and int64 [L]: see CachePlanArgs.
// For rows that are not cacheable, and after the last row, they are -1 and kNoMove. Throws before
// any change if the contents are invalid. A plan that throws because it runs out of memory may have
// stamped hits and, for LFU, added lookups, but has changed no tag.
std::tuple<Tensor, Tensor> plan_batch(const PlanCall& call);

// Check weights, states, hyper and tables as cache_memory does, also the contents of the tables
// (check_tables), and that every cached table lies inside its tier. Devices are not checked. Return
// the memory in which rows are moved, which points into the tensors.
CacheMemory host_memory(const char* op, std::vector<Tensor>& weights, std::vector<Tensor>& states,
                        const Tensor& hyper, const Tensor& tables);

// Do the first num_rows moves of a batch, in parallel. The moves must be those of one plan (see
// CacheMoves); that rows and slots are distinct is not checked.
void move_batch(const CacheMemory& memory, const CacheMoves& moves, int64_t num_rows);

// Return the slot of the row of every lookup, int32 [L], -1 for none. `row_slots` comes from
// cache_plan_ or cache_locate; segments [L + 1], lookups [L] and count [1] come from tbe_group.
// Throws if their contents are out of range. That `lookups` is a permutation is not checked: if a
// position is missing, its slot is unspecified.
Tensor cache_lookup_slots(const Tensor& row_slots, const Tensor& segments, const Tensor& lookups,
                          const Tensor& count);

}  // namespace emb
