// Argument checks that the cache ops share on CPU and GPU. A check throws if an argument is wrong;
// `op` and `name`, the names of the op and of the argument, are for the message. The checks look at
// shapes, dtypes and devices, unless the comment of a function says otherwise. Only check_tables
// reads contents, on the CPU; on a GPU contents are trusted. emblib/ops/cache.py describes the
// tensors. L is the number of lookups of a batch, T the number of tables.
#pragma once

#include <optional>
#include <vector>

#include "cache/args.h"
#include "core/check.h"
#include "tbe/entries.h"

namespace emb {

// Check that a tensor of any shape is contiguous, has the dtype `type`, Int or Long, and is on the
// device of `like`.
inline void check_cache_tensor(const char* op, const char* name, const Tensor& tensor,
                               ScalarType type, const Tensor& like) {
  check_dtype(op, name, tensor, type, type == ScalarType::Int ? "int32" : "int64");
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous");
  check_same_device(op, name, tensor, like);
}

// Check `tags`, int64 [sets, kWays] on any device, and return the number of sets.
inline int64_t check_tags(const char* op, const Tensor& tags) {
  check_cache_tensor(op, "tags", tags, ScalarType::Long, tags);
  STD_TORCH_CHECK(tags.dim() == 2 && tags.size(1) == kWays, op, ": tags must be [sets, ", kWays,
                  "], got ", tags.numel(), " values in ", tags.dim(), " dimensions");
  STD_TORCH_CHECK(tags.numel() <= INT32_MAX, op, ": a cache has at most 2^31 - 1 slots, got ",
                  tags.numel());
  return tags.size(0);
}

// Check what check_cache_tensor checks, and that the tensor has `numel` entries.
inline void check_cache_numel(const char* op, const char* name, const Tensor& tensor,
                              ScalarType type, int64_t numel, const Tensor& like) {
  check_cache_tensor(op, name, tensor, type, like);
  STD_TORCH_CHECK(tensor.numel() == numel, op, ": ", name, " must have ", numel, " entries, got ",
                  tensor.numel());
}

// Check the distinct rows of a batch, as tbe_group returns them: `rows`, int64 [L], of which the
// first `count`, int32 [1], exist. `like` is a tensor on the cache's device.
inline void check_rows(const char* op, const Tensor& rows, const Tensor& count,
                       const Tensor& like) {
  STD_TORCH_CHECK(rows.numel() <= kMaxLookups, op, ": at most ", kMaxLookups,
                  " rows per call, got ", rows.numel());
  check_cache_tensor(op, "rows", rows, ScalarType::Long, like);
  check_cache_numel(op, "count", count, ScalarType::Int, 1, like);
}

// Check the `segments` of `rows`: int32 [L + 1], on the device of `rows`.
inline void check_segments(const char* op, const Tensor& segments, const Tensor& rows) {
  check_cache_numel(op, "segments", segments, ScalarType::Int, rows.numel() + 1, rows);
}

// The arguments of an op that plans, on any device, checked and converted for the kernels. Pointers
// are to the tensors of the op's caller, which must keep them alive. The constructor checks all
// arguments but the rows, which set_rows checks and sets. The length of `counts` depends on the
// contents of `tables`: HostPlan checks it on the CPU, and it is not checked on a GPU.
struct PlanCall {
  const char* op;
  Tensor tags, tables;
  CacheState cache;               // first_row is 0: HostPlan, or the kernels, compute it
  int64_t num_counts;             // length of cache.counts
  int64_t* counters;              // [T + 1, kCacheCounters]
  int64_t* clock;                 // [2], see CacheClock
  const int64_t* rows = nullptr;  // [n], of which the first *count exist
  const int32_t *segments = nullptr, *count = nullptr;  // [n + 1], [1]
  int64_t n = 0;                                        // L, the length of `rows`

  PlanCall(const char* op, const Tensor& tags, const Tensor& stamps, const Tensor& counts,
           const Tensor& counters_tensor, const Tensor& clock_tensor, const Tensor& tables,
           int64_t policy)
      : op(op), tags(tags), tables(tables) {
    cache.policy = parse_choice<CachePolicy>(op, "policy", policy, kCachePolicies);
    cache.num_sets = check_tags(op, tags);
    check_cache_numel(op, "stamps", stamps, ScalarType::Long, tags.numel(), tags);
    check_features(op, tables);
    check_same_device(op, "tables", tables, tags);
    check_cache_numel(op, "counters", counters_tensor, ScalarType::Long,
                      (tables.size(0) + 1) * kCacheCounters, tags);
    check_cache_numel(op, "clock", clock_tensor, ScalarType::Long, 2, tags);
    check_cache_tensor(op, "counts", counts, ScalarType::Int, tags);
    cache.tags = tags.mutable_data_ptr<int64_t>();
    cache.stamps = stamps.mutable_data_ptr<int64_t>();
    cache.counts = counts.mutable_data_ptr<int32_t>();
    cache.first_row = 0;
    num_counts = counts.numel();
    counters = counters_tensor.mutable_data_ptr<int64_t>();
    clock = clock_tensor.mutable_data_ptr<int64_t>();
  }

  // Check and set the distinct rows of the batch, as tbe_group returns them.
  void set_rows(const Tensor& rows_tensor, const Tensor& segments_tensor,
                const Tensor& count_tensor) {
    check_rows(op, rows_tensor, count_tensor, tags);
    check_segments(op, segments_tensor, rows_tensor);
    rows = rows_tensor.const_data_ptr<int64_t>();
    segments = segments_tensor.const_data_ptr<int32_t>();
    count = count_tensor.const_data_ptr<int32_t>();
    n = rows_tensor.numel();
  }

  int num_tables() const { return static_cast<int>(tables.size(0)); }
};

// The positions of the tensors in the list `cache` of `cache_prefetch_`.
struct CacheTensor {
  enum Index : int { kTags, kStamps, kCounts, kCounters, kClock, kConflicts, kNumTensors };
};

// Check the arguments that only `cache_prefetch_` has: `cache` must have kNumTensors tensors, whose
// shapes are not checked here, `lag` must be at least 0, and check_bounds_arguments must accept
// `check_mode` and `violations`.
inline void check_prefetch(const char* op, const std::vector<Tensor>& cache, int64_t lag,
                           const std::optional<int64_t>& check_mode, const Tensor& violations) {
  STD_TORCH_CHECK(cache.size() == CacheTensor::kNumTensors, op,
                  ": cache must be [tags, stamps, counts, counters, clock, conflicts], got ",
                  cache.size(), " tensors");
  check_not_negative(op, "lag", lag);
  check_bounds_arguments(op, check_mode, violations);
}

// Check `tables`, int64 [T, 8] in host memory, and its contents. Tables must ascend by row_base,
// not overlap, and have a dim of at least 1 and row ids below 2^62. The cached tables must be the
// last ones, without gaps between their rows. They must have the same cache_stride, which is at
// least the dim of each of them and below 2^31.
inline void check_tables(const char* op, const Tensor& tables) {
  check_features(op, tables);
  const Feature* all_tables = feature_array(tables);
  const int num_tables = static_cast<int>(tables.size(0));
  int64_t stride = 0, end = -1;
  for (int t = 0; t < num_tables; ++t) {
    const Feature& table = all_tables[t];
    STD_TORCH_CHECK(table.rows >= 0 && table.row_base >= 0 && table.dim > 0 &&
                        table.row_base <= kUnlimited && table.rows <= kUnlimited - table.row_base,
                    op, ": tables must have dim >= 1, and rows in [0, 2^62]; table ", t,
                    " does not");
    STD_TORCH_CHECK(t == 0 || table.row_base >= all_tables[t - 1].row_base + all_tables[t - 1].rows,
                    op, ": tables must ascend by row_base and not overlap; table ", t, " does not");
    if (table.cache_stride == 0 && stride == 0) continue;
    STD_TORCH_CHECK(
        table.cache_stride >= table.dim && table.cache_stride <= INT32_MAX &&
            (stride == 0 || table.cache_stride == stride) && (end < 0 || table.row_base == end),
        op, ": the cached tables must be the last ones, follow each other without a ",
        "gap and have one cache_stride, at least their dim and below 2^31; table ", t, " does not");
    stride = table.cache_stride;
    end = table.row_base + table.rows;
  }
}

// Check the tensors of an op that moves rows between tiers, and return pointers to them, which are
// valid as long as the tensors. Not checked: devices, contents, and whether the tables lie inside
// the tensors (host_memory checks the latter on the CPU).
//   weights  a flat tensor per tier: device, host, disk, cache
//   states   all states of tier 0, then all of tier 1, and so on. A state has one entry per row if
//            it has fewer entries in the cache tier than the weights, else one per element. This is
//            unambiguous, because the module pads cached rows to a multiple of four elements
//   hyper    float64 of the optimizer. It may be empty on a GPU; then memory.hyper is null
//   tables   int64 [T, 8], see Feature
inline CacheMemory cache_memory(const char* op, std::vector<Tensor>& weights,
                                std::vector<Tensor>& states, const Tensor& hyper,
                                const Tensor& tables) {
  STD_TORCH_CHECK(weights.size() == kTiers, op, ": weights must be a list of ", kTiers,
                  " tensors (device, host, disk, cache), got ", weights.size());
  const auto num_states = static_cast<int>(states.size() / kTiers);
  STD_TORCH_CHECK(states.size() % kTiers == 0 && num_states < kMaxCacheTensors, op,
                  ": states must be a list of ", kTiers, " times at most ", kMaxCacheTensors - 1,
                  " tensors, all of one tier after the other, got ", states.size());
  check_dtype(op, "hyper", hyper, ScalarType::Double, "float64");
  const bool has_no_rounding = hyper.is_cuda() && hyper.numel() == 0;
  STD_TORCH_CHECK(
      hyper.is_contiguous() && (has_no_rounding || hyper.numel() >= Hyper::kOptimizerArgs), op,
      ": hyper must have at least ", static_cast<int>(Hyper::kOptimizerArgs),
      " entries (see emblib.optim), got ", hyper.numel());
  check_features(op, tables);
  CacheMemory memory{};
  memory.tables = feature_array(tables);
  memory.num_tables = static_cast<int>(tables.size(0));
  memory.num_tensors = 1 + num_states;
  memory.num_cache_elements = weights[kCacheTier].numel();
  memory.num_cache_rows = INT64_MAX;
  memory.hyper = has_no_rounding ? nullptr : hyper.const_data_ptr<double>();
  for (int tier = 0; tier < kTiers; ++tier) {
    for (int k = 0; k <= num_states; ++k) {
      Tensor& tensor = k == 0 ? weights[tier] : states[tier * num_states + k - 1];
      const char* name = k == 0 ? "weights" : "a state";
      STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous");
      memory.tensors[k][tier] = {tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr(),
                                 float_dtype(op, name, tensor.scalar_type())};
      if (tier != kCacheTier || k == 0 || tensor.numel() == memory.num_cache_elements) continue;
      STD_TORCH_CHECK(tensor.numel() < memory.num_cache_elements, op,
                      ": a state in the cache must be as long as the weights there = ",
                      memory.num_cache_elements, " or have one entry per slot, got ",
                      tensor.numel());
      memory.row_wise_mask |= 1u << k;
      memory.num_cache_rows =
          tensor.numel() < memory.num_cache_rows ? tensor.numel() : memory.num_cache_rows;
    }
  }
  return memory;
}

}  // namespace emb
