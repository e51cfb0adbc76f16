// The cache ops on the GPU: plan (probe, group the misses by set, admit, count), locate, move,
// flush, and a whole prefetch. `cache_evictions` has no GPU version. No op waits for the device.
// plan_cpu.cpp, move_cpu.cpp and prefetch_cpu.cpp describe the arguments. The results are those of
// the CPU, with these differences: the contents of tensors are trusted, a cache without sets throws
// for every batch, and cache_move_ and cache_prefetch_ have the additions described below.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "cache/check.h"
#include "cache/move.cuh"
#include "cache/plan.cuh"
#include "core/device_arrays.h"
#include "core/launch.h"
#include "group/device_sort.h"
#include "tbe/entries.h"

namespace emb::cuda {
namespace {

// A plan on the device, which points into the tensors of `call`, and its output. Throws for a cache
// without sets.
struct DevicePlan {
  Tensor row_slots, evicted;  // int32 [L], int64 [L]: see DevicePlanArgs
  DevicePlanArgs args;

  explicit DevicePlan(const PlanCall& call)
      : row_slots(allocate(call.tags, {call.n}, ScalarType::Int)),
        evicted(allocate(call.tags, {call.n}, ScalarType::Long)),
        args{call.cache,
             call.clock,
             call.counters,
             feature_array(call.tables),
             call.num_tables(),
             call.rows,
             call.segments,
             call.count,
             call.n,
             row_slots.mutable_data_ptr<int32_t>(),
             evicted.mutable_data_ptr<int64_t>()} {
    STD_TORCH_CHECK(call.cache.num_sets > 0, call.op, ": a cache needs at least one set");
  }

  // Launch the four steps of plan.cuh. Advance the clock unless args.lag is negative. Write
  // lookups.slots unless `lookups` is the default. Throws AllocationError if there is no memory for
  // scratch. If the sort of a large batch throws it, the probe has already changed stamps and, for
  // LFU, counts, but no tag.
  void run(const CudaLauncher& launcher, const LookupSlots& lookups = {}) const {
    const int64_t n = args.n;
    int32_t *sets, *segments, *num_groups;
    SortBuffers<uint32_t> sort{};
    sort.n = n;
    sort.no_group_key = static_cast<uint32_t>(args.cache.num_sets);
    DeviceArrays scratch;
    scratch.add(&sets, n);
    scratch.add(&segments, n + 1);
    scratch.add(&num_groups, 1);
    scratch.add(&sort.keys, n);
    scratch.add(&sort.sorted_keys, n);
    scratch.add(&sort.positions, n);
    scratch.add(&sort.sorted_positions, n);
    scratch.add(&sort.range_counts, 2 * kMaxRanges);
    scratch.allocate(row_slots);
    launch_probe(launcher, args, sort);
    sort_and_group(
        launcher, row_slots, sort,
        {.unique = sets, .unique_is_int64 = false, .segments = segments, .num_groups = num_groups});
    launch_admit(launcher, args, {sets, segments, sort.sorted_positions, num_groups}, lookups);
  }
};

// Plan a batch: assign slots to its rows, and update tags, stamps, counts and counters in place.
// Return (row_slots, evicted), int32 [L] and int64 [L]: see DevicePlanArgs. No row moves.
std::tuple<Tensor, Tensor> cache_plan_(Tensor tags, Tensor stamps, Tensor counts, Tensor counters,
                                       const Tensor& clock, const Tensor& tables,
                                       const Tensor& rows, const Tensor& segments,
                                       const Tensor& count, int64_t policy) {
  PlanCall call("cache_plan_", tags, stamps, counts, counters, clock, tables, policy);
  call.set_rows(rows, segments, count);
  const DevicePlan plan(call);
  plan.run(CudaLauncher(tags));
  return {plan.row_slots, plan.evicted};
}

// Return the slot of each distinct row of a batch, int32 [L], -1 for a row that is not in the cache
// and after the last row. Nothing changes.
Tensor cache_locate(const Tensor& tags, const Tensor& tables, const Tensor& rows,
                    const Tensor& count) {
  const char* op = "cache_locate";
  DevicePlanArgs plan{};
  plan.cache.num_sets = check_tags(op, tags);
  check_rows(op, rows, count, tags);
  check_features(op, tables);
  check_same_device(op, "tables", tables, tags);
  STD_TORCH_CHECK(plan.cache.num_sets > 0, op, ": a cache needs at least one set");
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

// Return the slot of the row of every lookup, as on the CPU (cache/entries.h).
Tensor cache_lookup_slots(const Tensor& row_slots, const Tensor& segments, const Tensor& lookups,
                          const Tensor& count) {
  const char* op = "cache_lookup_slots";
  const int64_t n = lookups.numel();
  check_cache_tensor(op, "row_slots", row_slots, ScalarType::Int, row_slots);
  check_cache_numel(op, "segments", segments, ScalarType::Int, n + 1, row_slots);
  check_cache_numel(op, "lookups", lookups, ScalarType::Int, n, row_slots);
  check_cache_numel(op, "count", count, ScalarType::Int, 1, row_slots);
  Tensor slots = allocate(row_slots, {n}, ScalarType::Int);
  launch_lookup_slots(
      CudaLauncher(row_slots),
      LookupSlots{row_slots.const_data_ptr<int32_t>(), segments.const_data_ptr<int32_t>(),
                  lookups.const_data_ptr<int32_t>(), count.const_data_ptr<int32_t>(), n,
                  slots.mutable_data_ptr<int32_t>()});
  return slots;
}

// Check the weights, states, hyper and tables of an op that moves rows, and return the addresses
// that kernels use. The host tier is pinned memory, which kernels read and write in place.
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

// The tensors of `postponed`, in their order. Without the last three no fetch is postponed.
enum PostponedTensor : int {
  kPostponedClock,
  kPostponedConflicts,
  kPostponedRows,
  kPostponedSlots,
  kPostponedCount,
  kNumPostponedTensors
};

// Check `postponed`, which is empty, [clock, conflicts] or [clock, conflicts, rows, slots, count],
// and return its PostponedFetches. `rows` are those of the batch, whose length rows and slots must
// have. The caller must set `count` to 0 before the move.
PostponedFetches postponed_fetches(const char* op, std::vector<Tensor>& postponed,
                                   const Tensor& rows) {
  PostponedFetches fetches{};
  if (postponed.empty()) return fetches;
  STD_TORCH_CHECK(
      postponed.size() == kPostponedRows || postponed.size() == kNumPostponedTensors, op,
      ": postponed must be empty, [clock, conflicts] or [clock, conflicts, rows, slots, "
      "count], got ",
      postponed.size(), " tensors");
  check_cache_numel(op, "clock", postponed[kPostponedClock], ScalarType::Long, 2, rows);
  check_cache_tensor(op, "conflicts", postponed[kPostponedConflicts], ScalarType::Long, rows);
  fetches.clock = postponed[kPostponedClock].const_data_ptr<int64_t>();
  fetches.num_sets = postponed[kPostponedConflicts].numel();
  STD_TORCH_CHECK(fetches.num_sets > 0, op, ": conflicts needs an entry per set");
  fetches.conflicts = postponed[kPostponedConflicts].mutable_data_ptr<int64_t>();
  if (postponed.size() == kPostponedRows) return fetches;
  check_cache_numel(op, "postponed rows", postponed[kPostponedRows], ScalarType::Long, rows.numel(),
                    rows);
  check_cache_numel(op, "postponed slots", postponed[kPostponedSlots], ScalarType::Int,
                    rows.numel(), rows);
  check_cache_numel(op, "postponed count", postponed[kPostponedCount], ScalarType::Int, 1, rows);
  fetches.rows = postponed[kPostponedRows].mutable_data_ptr<int64_t>();
  fetches.slots = postponed[kPostponedSlots].mutable_data_ptr<int32_t>();
  fetches.count = postponed[kPostponedCount].mutable_data_ptr<int32_t>();
  return fetches;
}

// Move as on the CPU, with three additions. If `evicted` is empty, every row is fetched and none is
// evicted. If `hyper` is empty, nothing is rounded stochastically. `postponed` records conflicts
// and, with five tensors, postpones fetches (see PostponedFetches); its count must be 0 before.
void cache_move_(std::vector<Tensor> weights, std::vector<Tensor> states, const Tensor& hyper,
                 const Tensor& tables, const Tensor& rows, const Tensor& count,
                 const Tensor& row_slots, const Tensor& evicted, std::vector<Tensor> postponed) {
  const char* op = "cache_move_";
  const CacheMemory memory = device_memory(op, weights, states, hyper, tables);
  check_rows(op, rows, count, tables);
  check_cache_numel(op, "row_slots", row_slots, ScalarType::Int, rows.numel(), tables);
  const bool evicts = evicted.numel() > 0;
  check_cache_numel(op, "evicted", evicted, ScalarType::Long, evicts ? rows.numel() : 0, tables);
  const CacheMoves moves{rows.const_data_ptr<int64_t>(), row_slots.const_data_ptr<int32_t>(),
                         evicts ? evicted.const_data_ptr<int64_t>() : nullptr};
  launch_move(CudaLauncher(tables), memory, moves, postponed_fetches(op, postponed, rows),
              count.const_data_ptr<int32_t>(), rows.numel());
}

// Prefetch as on the CPU, with two differences. With a `check_mode`, an invalid batch does not end
// the op: its offsets are repaired, in the mode "warning" its violations are added to `violations`,
// and in the mode "fatal" the kernel traps. With `postpones`, fetches may be postponed. Return the
// seven tensors of the CPU, then, if `postpones`, the postponed fetches (rows, slots, count), then,
// with a `check_mode`, the repaired offsets. All arguments are checked, and all memory is
// allocated, before tags change. DevicePlan::run describes what may throw after the probe.
std::vector<Tensor> cache_prefetch_(std::vector<Tensor> weights, std::vector<Tensor> states,
                                    const Tensor& hyper, std::vector<Tensor> cache,
                                    const Tensor& tables, int64_t policy, int64_t lag,
                                    bool postpones, const Tensor& features, const Tensor& indices,
                                    const Tensor& offsets_in, std::optional<Tensor> bag_layout,
                                    int64_t total_rows, bool has_valid_offsets,
                                    std::optional<int64_t> check_mode, Tensor violations) {
  const char* op = "cache_prefetch_";
  const bool is_checked = check_mode.has_value();
  check_prefetch(op, cache, lag, check_mode, violations);
  PlanCall call(op, cache[CacheTensor::kTags], cache[CacheTensor::kStamps],
                cache[CacheTensor::kCounts], cache[CacheTensor::kCounters],
                cache[CacheTensor::kClock], tables, policy);
  const CacheMemory memory = device_memory(op, weights, states, hyper, tables);
  check_same_device(op, "indices", indices, tables);
  const int64_t n = indices.numel();
  Tensor slots = allocate(tables, {n}, ScalarType::Int);
  std::vector<Tensor> postponed{cache[CacheTensor::kClock], cache[CacheTensor::kConflicts]};
  if (postpones) {
    postponed.push_back(allocate(tables, {n}, ScalarType::Long));
    postponed.push_back(allocate(tables, {n}, ScalarType::Int));
    postponed.push_back(allocate(tables, {1}, ScalarType::Int));
  }
  Tensor offsets = offsets_in;
  if (is_checked) {
    offsets = bounds_check_(indices, offsets, features, bag_layout, *check_mode, violations);
  }
  const auto [rows, segments, lookups, bags, count] = tbe_group(
      features, indices, offsets, bag_layout, total_rows, has_valid_offsets || is_checked);
  call.set_rows(rows, segments, count);
  const PostponedFetches fetches = postponed_fetches(op, postponed, rows);
  DevicePlan plan(call);
  plan.args.lag = lag;
  plan.args.num_postponed = fetches.count;
  const CudaLauncher launcher(tables);
  plan.run(launcher, {plan.args.row_slots, call.segments, lookups.const_data_ptr<int32_t>(),
                      call.count, n, slots.mutable_data_ptr<int32_t>()});
  launch_move(launcher, memory, {call.rows, plan.args.row_slots, plan.args.evicted}, fetches,
              call.count, n);
  std::vector<Tensor> results{rows, segments, lookups, bags, count, plan.row_slots, slots};
  if (postpones) results.insert(results.end(), postponed.begin() + kPostponedRows, postponed.end());
  if (is_checked) results.push_back(offsets);
  return results;
}

// Flush as on the CPU. Unlike that of cache_move_, `hyper` must not be empty.
void cache_flush_(std::vector<Tensor> weights, std::vector<Tensor> states, const Tensor& hyper,
                  const Tensor& tables, const Tensor& tags) {
  const char* op = "cache_flush_";
  const CacheMemory memory = device_memory(op, weights, states, hyper, tables);
  STD_TORCH_CHECK(memory.hyper != nullptr, op, ": hyper must have at least ",
                  static_cast<int>(Hyper::kOptimizerArgs),
                  " entries; only cache_move_ takes an empty one");
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
  EMB_IMPL(m, emb::cuda, cache_prefetch_);
  EMB_IMPL(m, emb::cuda, cache_flush_);
}
