// `cache_move_` and `cache_flush_` on the CPU: check the arguments, then move rows, or flush slots,
// in parallel. The rows of a plan have distinct slots, so moves may run in any order. It is not
// checked that slots are distinct: row_slots and evicted must come from cache_plan_.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "cache/args.h"
#include "cache/check.h"
#include "cache/entries.h"
#include "core/isa.h"
#include "core/parallel.h"

namespace emb {

EMB_SELECT_KERNELS(CacheMoveKernels, kCacheMoveKernels, move_kernels)

namespace {

constexpr int64_t kMoveGrain = 512;  // grain of parallel_balanced, in rows or slots

// Throw unless every cached table lies inside the weights and states of its tier.
void check_tier_rows(const char* op, const CacheMemory& memory, const std::vector<Tensor>& weights,
                     const std::vector<Tensor>& states) {
  for (int t = 0; t < memory.num_tables; ++t) {
    const Feature& table = memory.tables[t];
    if (table.cache_stride == 0) continue;
    STD_TORCH_CHECK(table.tier >= 0 && table.tier < kCacheTier && table.weight_offset >= 0 &&
                        table.state_base >= 0,
                    op, ": table ", t, " must have a tier of 0 to 2, and a weight_offset and a ",
                    "state_base of 0 or more, got ", table.tier, ", ", table.weight_offset, " and ",
                    table.state_base);
    for (int k = 0; k < memory.num_tensors; ++k) {
      const Tensor& tensor =
          k == 0 ? weights[table.tier] : states[table.tier * (memory.num_tensors - 1) + k - 1];
      const bool has_entry_per_row = memory.has_entry_per_row(k);
      const int64_t first = has_entry_per_row ? table.state_base : table.weight_offset;
      STD_TORCH_CHECK(
          first <= tensor.numel() &&
              table.rows <= (tensor.numel() - first) / (has_entry_per_row ? 1 : table.dim),
          op, ": table ", t, " lies outside the ", k == 0 ? "weights" : "states", " of tier ",
          table.tier, "; tables must come from the module that owns them");
    }
  }
}

}  // namespace

// The contracts of both functions are in cache/entries.h.
CacheMemory host_memory(const char* op, std::vector<Tensor>& weights, std::vector<Tensor>& states,
                        const Tensor& hyper, const Tensor& tables) {
  check_tables(op, tables);
  const CacheMemory memory = cache_memory(op, weights, states, hyper, tables);
  check_tier_rows(op, memory, weights, states);
  return memory;
}

void move_batch(const CacheMemory& memory, const CacheMoves& moves, int64_t num_rows) {
  parallel_balanced(num_rows, kMoveGrain, kUnitCost, [&](int64_t begin, int64_t end) {
    move_kernels().move(memory, moves, begin, end);
  });
}

namespace {

// Write back the rows that a batch evicts, then fetch the rows of the batch. States move with them.
//   weights, states      weights of each tier (device, host, disk, cache); all states of tier 0,
//                        then all of tier 1, and so on
//   hyper                float64 of the optimizer, read for stochastic rounding of rows that are
//                        written back
//   tables               int64 [T, 8], as check_tables requires
//   rows, count          int64 [L] and int32 [1]: the rows of the batch, of which the first `count`
//                        exist
//   row_slots, evicted   int32 [L] and int64 [L]: the plan of these rows, from cache_plan_. Two
//                        rows with one slot would be a data race; not checked
//   postponed            must be empty: only a GPU postpones fetches
void cache_move_(std::vector<Tensor> weights, std::vector<Tensor> states, const Tensor& hyper,
                 const Tensor& tables, const Tensor& rows, const Tensor& count,
                 const Tensor& row_slots, const Tensor& evicted, std::vector<Tensor> postponed) {
  const char* op = "cache_move_";
  STD_TORCH_CHECK(postponed.empty(), op,
                  ": on the CPU all rows move at once: postponed must be empty, got ",
                  postponed.size(), " tensors");
  const CacheMemory memory = host_memory(op, weights, states, hyper, tables);
  check_rows(op, rows, count, tables);
  check_cache_numel(op, "row_slots", row_slots, ScalarType::Int, rows.numel(), tables);
  check_cache_numel(op, "evicted", evicted, ScalarType::Long, rows.numel(), tables);
  const int64_t n = *count.const_data_ptr<int32_t>();
  STD_TORCH_CHECK(n >= 0 && n <= rows.numel(), op,
                  ": count must be in [0, entries of rows = ", rows.numel(), "], got ", n);
  move_batch(memory,
             {rows.const_data_ptr<int64_t>(), row_slots.const_data_ptr<int32_t>(),
              evicted.const_data_ptr<int64_t>()},
             n);
}

// Write the rows in the cache back to their tables, with their states. They stay in the cache.
// `tags`, int64 [sets, kWays], is the row in each slot; empty ways, and tags that are not cacheable
// rows, are skipped. The other arguments are as for cache_move_.
void cache_flush_(std::vector<Tensor> weights, std::vector<Tensor> states, const Tensor& hyper,
                  const Tensor& tables, const Tensor& tags) {
  const char* op = "cache_flush_";
  const CacheMemory memory = host_memory(op, weights, states, hyper, tables);
  check_tags(op, tags);
  parallel_balanced(tags.numel(), kMoveGrain, kUnitCost, [&](int64_t begin, int64_t end) {
    move_kernels().flush(memory, tags.const_data_ptr<int64_t>(), begin, end);
  });
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, cache_move_);
  EMB_IMPL(m, emb, cache_flush_);
}
