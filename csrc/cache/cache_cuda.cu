// The cache ops on the GPU: plan (probe, group the misses by set, admit, count), locate, move and
// flush. Nothing waits for the device.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "cache/check.h"
#include "cache/move.cuh"
#include "cache/plan.cuh"
#include "core/launch.h"
#include "group/device_sort.h"

namespace emb::cuda {
namespace {

// The output of the grouping of the misses.
struct GroupScratch {
  Tensor sets, segments, permutation, count;

  GroupScratch(const Tensor& like, int64_t n)
      : sets(allocate(like, {n}, ScalarType::Int)),
        segments(allocate(like, {n + 1}, ScalarType::Int)),
        permutation(allocate(like, {n}, ScalarType::Int)),
        count(allocate(like, {1}, ScalarType::Int)) {}

  GroupOutput output() const {
    return {sets.mutable_data_ptr(),           false,   segments.mutable_data_ptr<int32_t>(),
            count.mutable_data_ptr<int32_t>(), nullptr, nullptr};
  }
  MissGroups groups() const {
    return {sets.const_data_ptr<int32_t>(), segments.const_data_ptr<int32_t>(),
            permutation.const_data_ptr<int32_t>(), count.const_data_ptr<int32_t>()};
  }
};

std::tuple<Tensor, Tensor> cache_plan_(Tensor tags, Tensor stamps, Tensor counts, Tensor counters,
                                       const Tensor& clock, const Tensor& tables,
                                       const Tensor& rows, const Tensor& segments,
                                       const Tensor& count, int64_t policy) {
  const char* op = "cache_plan_";
  const PlanState state = check_plan(op, tags, stamps, counts, counters, clock, tables, policy);
  check_rows(op, rows, count, tags);
  check_segments(op, segments, rows);
  STD_TORCH_CHECK(state.cache.sets > 0, op, ": a cache needs at least one set");
  const int64_t n = rows.numel();
  const CudaLauncher launcher(tags);
  Tensor row_slots = allocate(rows, {n}, ScalarType::Int);
  Tensor evicted = allocate(rows, {n}, ScalarType::Long);
  const CachePlan plan{state.cache,
                       clock.const_data_ptr<int64_t>(),
                       state.counters,
                       feature_array(tables),
                       static_cast<int>(tables.size(0)),
                       rows.const_data_ptr<int64_t>(),
                       segments.const_data_ptr<int32_t>(),
                       count.const_data_ptr<int32_t>(),
                       n,
                       row_slots.mutable_data_ptr<int32_t>(),
                       evicted.mutable_data_ptr<int64_t>()};
  const GroupScratch scratch(tags, n);
  const DeviceSort<uint32_t> sort(tags, n, state.cache.sets,
                                  scratch.permutation.mutable_data_ptr<int32_t>());
  launch_probe(launcher, plan, sort.buffers());
  sort_and_group(launcher, tags, sort.buffers(), scratch.output());
  launch_admit(launcher, plan, scratch.groups());
  return {row_slots, evicted};
}

Tensor cache_locate(const Tensor& tags, const Tensor& tables, const Tensor& rows,
                    const Tensor& count) {
  const char* op = "cache_locate";
  CachePlan plan{};
  plan.cache.sets = check_tags(op, tags);
  check_rows(op, rows, count, tags);
  check_features(op, tables);
  check_same_device(op, "tables", tables, tags);
  STD_TORCH_CHECK(plan.cache.sets > 0, op, ": a cache needs at least one set");
  Tensor row_slots = allocate(rows, {rows.numel()}, ScalarType::Int);
  plan.cache.tags = const_cast<int64_t*>(tags.const_data_ptr<int64_t>());  // read only
  plan.tables = feature_array(tables);
  plan.num_tables = static_cast<int>(tables.size(0));
  plan.rows = rows.const_data_ptr<int64_t>();
  plan.count = count.const_data_ptr<int32_t>();
  plan.n = rows.numel();
  plan.row_slots = row_slots.mutable_data_ptr<int32_t>();
  launch_locate(CudaLauncher(tags), plan);
  return row_slots;
}

Tensor cache_lookup_slots(const Tensor& row_slots, const Tensor& segments, const Tensor& lookups,
                          const Tensor& count) {
  const char* op = "cache_lookup_slots";
  const int64_t n = lookups.numel();
  check_cache_tensor(op, "row_slots", row_slots, ScalarType::Int, row_slots);
  check_cache_vector(op, "segments", segments, ScalarType::Int, n + 1, row_slots);
  check_cache_vector(op, "lookups", lookups, ScalarType::Int, n, row_slots);
  check_cache_vector(op, "count", count, ScalarType::Int, 1, row_slots);
  Tensor slots = allocate(row_slots, {n}, ScalarType::Int);
  launch_lookup_slots(CudaLauncher(row_slots), row_slots.const_data_ptr<int32_t>(),
                      segments.const_data_ptr<int32_t>(), lookups.const_data_ptr<int32_t>(),
                      count.const_data_ptr<int32_t>(), n, slots.mutable_data_ptr<int32_t>());
  return slots;
}

// Check the memory of `cache_move_` and `cache_flush_` and return its device addresses. The host
// tier is pinned memory, which kernels read and write in place.

CacheMemory device_memory(const char* op, std::vector<Tensor>& weights, std::vector<Tensor>& states,
                          const Tensor& hyper, const Tensor& tables) {
  CacheMemory memory = cache_memory(op, weights, states, hyper, tables);
  check_same_device(op, "hyper", hyper, tables);
  for (int tier = 0; tier < kTiers; ++tier) {
    for (int k = 0; k < memory.num_tensors; ++k) {
      const Tensor& tensor =
          k == 0 ? weights[tier] : states[tier * (memory.num_tensors - 1) + k - 1];
      void*& data = memory.tensors[k][tier].data;
      if (data != nullptr) data = kernel_address(op, tensor, tables);
    }
  }
  return memory;
}

PostponedFetches postponed_fetches(const char* op, std::vector<Tensor>& later, const Tensor& rows) {
  PostponedFetches fetches{};
  if (later.empty()) return fetches;
  STD_TORCH_CHECK(later.size() == 2 || later.size() == 5, op,
                  ": later must be empty, [clock, conflicts] or [clock, conflicts, rows, slots, "
                  "count], got ",
                  later.size(), " tensors");
  check_cache_vector(op, "clock", later[0], ScalarType::Long, 2, rows);
  check_cache_tensor(op, "conflicts", later[1], ScalarType::Long, rows);
  fetches.clock = later[0].const_data_ptr<int64_t>();
  fetches.sets = later[1].numel();
  STD_TORCH_CHECK(fetches.sets > 0, op, ": conflicts needs an entry per set");
  fetches.conflicts = later[1].mutable_data_ptr<int64_t>();
  if (later.size() == 2) return fetches;
  check_cache_vector(op, "later rows", later[2], ScalarType::Long, rows.numel(), rows);
  check_cache_vector(op, "later slots", later[3], ScalarType::Int, rows.numel(), rows);
  check_cache_vector(op, "later count", later[4], ScalarType::Int, 1, rows);
  fetches.rows = later[2].mutable_data_ptr<int64_t>();
  fetches.slots = later[3].mutable_data_ptr<int32_t>();
  fetches.count = later[4].mutable_data_ptr<int32_t>();
  return fetches;
}

void cache_move_(std::vector<Tensor> weights, std::vector<Tensor> states, const Tensor& hyper,
                 const Tensor& tables, const Tensor& rows, const Tensor& count,
                 const Tensor& row_slots, const Tensor& evicted, std::vector<Tensor> later) {
  const char* op = "cache_move_";
  const CacheMemory memory = device_memory(op, weights, states, hyper, tables);
  check_rows(op, rows, count, tables);
  check_cache_vector(op, "row_slots", row_slots, ScalarType::Int, rows.numel(), tables);
  const bool evicts = evicted.numel() > 0;  // if not, all rows are fetched
  check_cache_vector(op, "evicted", evicted, ScalarType::Long, evicts ? rows.numel() : 0, tables);
  const CacheMoves moves{rows.const_data_ptr<int64_t>(), row_slots.const_data_ptr<int32_t>(),
                         evicts ? evicted.const_data_ptr<int64_t>() : nullptr};
  launch_move(CudaLauncher(tables), memory, moves, postponed_fetches(op, later, rows),
              count.const_data_ptr<int32_t>(), rows.numel());
}

void cache_flush_(std::vector<Tensor> weights, std::vector<Tensor> states, const Tensor& hyper,
                  const Tensor& tables, const Tensor& tags) {
  const char* op = "cache_flush_";
  const CacheMemory memory = device_memory(op, weights, states, hyper, tables);
  check_tags(op, tags);
  check_same_device(op, "tags", tags, tables);
  launch_flush(CudaLauncher(tables), memory, tags.const_data_ptr<int64_t>(), tags.numel());
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, cache_plan_);
  EMB_IMPL(m, emb::cuda, cache_locate);
  EMB_IMPL(m, emb::cuda, cache_lookup_slots);
  EMB_IMPL(m, emb::cuda, cache_move_);
  EMB_IMPL(m, emb::cuda, cache_flush_);
}
