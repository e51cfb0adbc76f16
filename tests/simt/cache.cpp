// Emulated cache: plan, locate, slots of lookups, move and flush.
#include <vector>

#include "cache/move.cuh"
#include "cache/plan.cuh"
#include "driver.h"
#include "host_sort.h"

namespace emb::cuda {
namespace {

// tables, number of tables
void read_tables(Words* words, const Feature** tables, int* num_tables) {
  *tables = words->pointer<const Feature>();
  *num_tables = static_cast<int>(words->number());
}

// hyper, tables, number of tables, number of tensors, bits of the row-wise ones, elements and rows
// of the cache; then address and dtype of every tensor, tier by tier
CacheMemory read_memory(Words* words) {
  CacheMemory memory{};
  memory.hyper = words->pointer<const double>();
  read_tables(words, &memory.tables, &memory.num_tables);
  memory.num_tensors = static_cast<int>(words->number());
  memory.row_wise_mask = static_cast<uint32_t>(words->number());
  memory.num_cache_elements = words->number();
  memory.num_cache_rows = words->number();
  for (int tier = 0; tier < kTiers; ++tier) {
    for (int k = 0; k < memory.num_tensors; ++k) {
      void* data = words->pointer<void>();
      memory.tensors[k][tier] = {data, words->dtype()};
    }
  }
  return memory;
}

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

// tags, stamps, counts, sets, policy, clock, counters, tables, number of tables, rows, segments,
// count, n, row_slots, evicted
extern "C" const char* simt_cache_plan(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    DevicePlanArgs plan{};
    plan.cache.tags = words.pointer<int64_t>();
    plan.cache.stamps = words.pointer<int64_t>();
    plan.cache.counts = words.pointer<int32_t>();
    plan.cache.num_sets = words.number();
    plan.cache.policy = static_cast<emb::CachePolicy>(words.number());
    plan.clock = words.pointer<int64_t>();
    plan.counters = words.pointer<int64_t>();
    read_tables(&words, &plan.tables, &plan.num_tables);
    plan.rows = words.pointer<const int64_t>();
    plan.segments = words.pointer<const int32_t>();
    plan.count = words.pointer<const int32_t>();
    plan.n = words.number();
    plan.row_slots = words.pointer<int32_t>();
    plan.evicted = words.pointer<int64_t>();
    std::vector<int32_t> sets(plan.n), segments(plan.n + 1), permutation(plan.n);
    int32_t num_groups = 0;
    HostSort<uint32_t> sort(plan.n, static_cast<uint64_t>(plan.cache.num_sets), permutation.data());
    launch_probe(launcher, plan, sort.buffers);
    if (plan.n > 0) sort.run();
    const DeviceGroupOutput out{.unique = sets.data(),
                                .unique_is_int64 = false,
                                .segments = segments.data(),
                                .num_groups = &num_groups};
    launch_groups(launcher, sort.buffers, out);
    launch_admit(launcher, plan,
                 DeviceMissGroups{sets.data(), segments.data(), permutation.data(), &num_groups});
  });
}

// tags, sets, tables, number of tables, rows, count, n, row_slots
extern "C" const char* simt_cache_locate(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    DevicePlanArgs plan{};
    plan.cache.tags = words.pointer<int64_t>();
    plan.cache.num_sets = words.number();
    read_tables(&words, &plan.tables, &plan.num_tables);
    plan.rows = words.pointer<const int64_t>();
    plan.count = words.pointer<const int32_t>();
    plan.n = words.number();
    plan.row_slots = words.pointer<int32_t>();
    launch_locate(launcher, plan);
  });
}

// row_slots, segments, lookups, count, n, slots
extern "C" const char* simt_cache_lookup_slots(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto* row_slots = words.pointer<const int32_t>();
    const auto* segments = words.pointer<const int32_t>();
    const auto* lookups = words.pointer<const int32_t>();
    const auto* count = words.pointer<const int32_t>();
    const int64_t n = words.number();
    launch_lookup_slots(launcher, emb::cuda::LookupSlots{row_slots, segments, lookups, count, n,
                                                         words.pointer<int32_t>()});
  });
}

// rows, row_slots, evicted, count, n, clock, conflicts, sets, later rows, slots and count, then
// read_memory's
extern "C" const char* simt_cache_move(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    emb::CacheMoves moves{};
    moves.rows = words.pointer<const int64_t>();
    moves.row_slots = words.pointer<const int32_t>();
    moves.evicted = words.pointer<const int64_t>();
    const auto* count = words.pointer<const int32_t>();
    const int64_t n = words.number();
    emb::PostponedFetches later{};
    later.clock = words.pointer<const int64_t>();
    later.conflicts = words.pointer<int64_t>();
    later.num_sets = words.number();
    later.rows = words.pointer<int64_t>();
    later.slots = words.pointer<int32_t>();
    later.count = words.pointer<int32_t>();
    launch_move(launcher, read_memory(&words), moves, later, count, n);
  });
}

// tags, number of slots, then read_memory's
extern "C" const char* simt_cache_flush(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto* tags = words.pointer<const int64_t>();
    const int64_t slots = words.number();
    launch_flush(launcher, read_memory(&words), tags, slots);
  });
}
