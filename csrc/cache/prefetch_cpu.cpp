// `cache_prefetch_` on the CPU: check, group, plan and move a batch in one call. All arguments are
// checked before the cache changes. So if the op throws for an argument, the cache has no tag whose
// row has not been fetched.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "cache/check.h"
#include "cache/entries.h"
#include "core/feature_bags.h"
#include "tbe/entries.h"

namespace emb {
namespace {

// Do what is_valid_batch of tbe/entries.h does, for a batch whose arguments are not yet converted.
bool is_valid_batch(const char* op, const Tensor& features, const Tensor& indices_in,
                    const Tensor& offsets_in, const std::optional<Tensor>& bag_layout) {
  const Tensor indices = as_contiguous(indices_in), offsets = as_contiguous(offsets_in);
  const FeatureBags feature_bags(op, features, offsets, bag_layout, Pooling::kNone, kUnlimited);
  const Bags bags{index_array(offsets), feature_bags.num_bags(), indices.numel()};
  return emb::is_valid_batch(features, index_array(indices), bags, feature_bags);
}

// Advance the clock to the next batch, and plan this batch. The oldest batch in flight is `lag`
// batches before it. Return what plan_batch returns. If the plan throws, the clock is reset.
std::tuple<Tensor, Tensor> plan_next_batch(const PlanCall& call, int64_t lag) {
  const int64_t now = call.clock[CacheClock::kNow], oldest = call.clock[CacheClock::kOldest];
  call.clock[CacheClock::kNow] = now + 1;
  call.clock[CacheClock::kOldest] = now + 1 - lag;
  try {
    return plan_batch(call);
  } catch (...) {
    call.clock[CacheClock::kNow] = now;
    call.clock[CacheClock::kOldest] = oldest;
    throw;
  }
}

// Prefetch a batch: advance the clock, assign slots of the cache to the batch's rows, write back
// the rows that they evict, and fetch the batch's rows into their slots. L is the number of
// lookups, F of features, T of tables, B of bags per feature. Return seven tensors:
//   rows, segments, lookups, bags, count   the grouping of the batch, as tbe_group returns it
//   row_slots                              int32 [L]: the slot of each distinct row, -1 for none
//   slots                                  int32 [L]: the slot of each lookup's row, -1 for none
// If the batch is invalid and there is a `check_mode`, return no tensor and change nothing: the
// caller must report and repair the batch. Without a `check_mode`, indices and offsets are repaired
// as they are read. plan_batch describes what a call that runs out of memory may have changed.
//   weights, states  as for cache_move_
//   hyper       float64 of the optimizer, read for stochastic rounding of rows written back
//   tables      int64 [T, 8], a Feature per table
//   cache       [tags, stamps, counts, counters, clock, conflicts], see emblib/ops/cache.py;
//               conflicts is not used here
//   policy      a code of CachePolicy
//   lag         number of this batch minus the number of the oldest batch in flight, at least 0
//   postpones   must be false: only a GPU postpones fetches
//   features    int64 [F, 8]
//   indices     int32 or int64 [L]
//   offsets     int32 or int64 [F * B + 1], [bags + 1] with a bag_layout
//   bag_layout  int64 [bags, 2], see BagLayout; none if all features have B bags
//   total_rows  a number above every linear row id
//   has_valid_offsets  whether `offsets` are a result of `bounds_check` (`repaired` in the schema)
//   check_mode  a code of BoundsMode, if the batch is to be checked. The modes do not differ here:
//               the caller applies the mode when it reports the violations
//   violations  int64 [2], neither read nor written here
std::vector<Tensor> cache_prefetch_(std::vector<Tensor> weights, std::vector<Tensor> states,
                                    const Tensor& hyper, std::vector<Tensor> cache,
                                    const Tensor& tables, int64_t policy, int64_t lag,
                                    bool postpones, const Tensor& features, const Tensor& indices,
                                    const Tensor& offsets, std::optional<Tensor> bag_layout,
                                    int64_t total_rows, bool has_valid_offsets,
                                    std::optional<int64_t> check_mode, Tensor violations) {
  const char* op = "cache_prefetch_";
  const bool is_checked = check_mode.has_value();
  check_prefetch(op, cache, lag, check_mode, violations);
  STD_TORCH_CHECK(!postpones, op, ": on the CPU all rows move at once: postpones must be False");
  check_features(op, features);
  check_lookups(op, indices, offsets);
  PlanCall call(op, cache[CacheTensor::kTags], cache[CacheTensor::kStamps],
                cache[CacheTensor::kCounts], cache[CacheTensor::kCounters],
                cache[CacheTensor::kClock], tables, policy);
  const CacheMemory memory = host_memory(op, weights, states, hyper, tables);
  if (is_checked && !is_valid_batch(op, features, indices, offsets, bag_layout)) return {};
  const auto [rows, segments, lookups, bags, count] = tbe_group(
      features, indices, offsets, bag_layout, total_rows, has_valid_offsets || is_checked);
  call.set_rows(rows, segments, count);
  const auto [row_slots, evicted] = plan_next_batch(call, lag);
  move_batch(memory,
             {call.rows, row_slots.const_data_ptr<int32_t>(), evicted.const_data_ptr<int64_t>()},
             *call.count);
  const Tensor slots = cache_lookup_slots(row_slots, segments, lookups, count);
  return {rows, segments, lookups, bags, count, row_slots, slots};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, cache_prefetch_); }
