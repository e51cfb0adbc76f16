// `cache_prefetch_` on the CPU: check, group, plan and move a batch in one call. All arguments are
// checked before the cache changes, so tags and rows belong together whatever raises.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "cache/check.h"
#include "cache/entries.h"
#include "core/feature_bags.h"
#include "tbe/entries.h"

namespace emb {
namespace {

bool is_valid(const char* op, const Tensor& features, const Tensor& indices_in,
              const Tensor& offsets_in, const std::optional<Tensor>& bag_layout) {
  const Tensor indices = as_contiguous(indices_in), offsets = as_contiguous(offsets_in);
  const FeatureBags feature_bags(op, features, offsets, bag_layout, Pooling::kNone, kUnlimited);
  const Bags bags{index_array(offsets), feature_bags.num_bags(), indices.numel()};
  return is_valid_batch(features, index_array(indices), bags, feature_bags);
}

// Plan the next batch: the clock returns to the last one if there is no memory for the plan.
std::tuple<Tensor, Tensor> plan_next(const PlanCall& call, int64_t lag) {
  const int64_t now = call.clock[0], oldest = call.clock[1];
  call.clock[0] = now + 1;
  call.clock[1] = now + 1 - lag;
  try {
    return plan_batch(call);
  } catch (...) {
    call.clock[0] = now;
    call.clock[1] = oldest;
    throw;
  }
}

std::vector<Tensor> cache_prefetch_(std::vector<Tensor> weights, std::vector<Tensor> states,
                                    const Tensor& hyper, std::vector<Tensor> cache,
                                    const Tensor& tables, int64_t policy, int64_t lag,
                                    bool postpones, const Tensor& features, const Tensor& indices,
                                    const Tensor& offsets, std::optional<Tensor> bag_layout,
                                    int64_t total_rows, bool repaired, std::optional<int64_t> check,
                                    Tensor violations) {
  const char* op = "cache_prefetch_";
  check_prefetch(op, cache, lag, check, violations);
  STD_TORCH_CHECK(!postpones, op, ": on the CPU all rows move at once: postpones must be False");
  check_features(op, features);
  check_lookups(op, indices, offsets);
  PlanCall call(op, cache[0], cache[1], cache[2], cache[3], cache[4], tables, policy);
  const CacheMemory memory = check_memory(op, weights, states, hyper, tables);
  if (check && !is_valid(op, features, indices, offsets, bag_layout)) return {};
  const auto [rows, segments, lookups, bags, count] =
      tbe_group(features, indices, offsets, bag_layout, total_rows, repaired || check);
  call.set_rows(rows, segments, count);
  const auto [row_slots, evicted] = plan_next(call, lag);
  move_batch(memory,
             {call.rows, row_slots.const_data_ptr<int32_t>(), evicted.const_data_ptr<int64_t>()},
             *call.count);
  const Tensor slots = cache_lookup_slots(row_slots, segments, lookups, count);
  return {rows, segments, lookups, bags, count, row_slots, slots};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, cache_prefetch_); }
