// Checks of the arguments that the ops of the cache share.
#pragma once

#include <optional>
#include <vector>

#include "cache/cache.h"
#include "core/check.h"

namespace emb {

// Contiguous, of the dtype, on the device of `like`.
inline void check_cache_tensor(const char* op, const char* name, const Tensor& tensor,
                               ScalarType type, const Tensor& like) {
  check_dtype(op, name, tensor, type, type == ScalarType::Int ? "int32" : "int64");
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous");
  check_same_device(op, name, tensor, like);
}

// Number of sets.
inline int64_t check_tags(const char* op, const Tensor& tags) {
  check_cache_tensor(op, "tags", tags, ScalarType::Long, tags);
  STD_TORCH_CHECK(tags.dim() == 2 && tags.size(1) == kWays, op, ": tags must be [sets, ", kWays,
                  "], got ", tags.numel(), " values in ", tags.dim(), " dimensions");
  STD_TORCH_CHECK(tags.numel() <= kMaxLookups, op, ": a cache has at most 2^31 - 1 slots, got ",
                  tags.numel());
  return tags.size(0);
}

inline void check_one(const char* op, const char* name, const Tensor& tensor, ScalarType type,
                      int64_t numel, const Tensor& like) {
  check_cache_tensor(op, name, tensor, type, like);
  STD_TORCH_CHECK(tensor.numel() == numel, op, ": ", name, " must have ", numel, " entries, got ",
                  tensor.numel());
}

// The distinct rows of a batch, as tbe_group returns them.
inline void check_rows(const char* op, const Tensor& rows, const Tensor& count,
                       const Tensor& like) {
  STD_TORCH_CHECK(rows.numel() <= kMaxLookups, op, ": at most 2^31 - 1 rows a call, got ",
                  rows.numel());
  check_cache_tensor(op, "rows", rows, ScalarType::Long, like);
  check_one(op, "count", count, ScalarType::Int, 1, like);
}

inline void check_segments(const char* op, const Tensor& segments, const Tensor& rows) {
  check_one(op, "segments", segments, ScalarType::Int, rows.numel() + 1, rows);
}

struct PlanState {
  CacheState cache;
  int64_t* counters;
};

// All that `cache_plan_` changes, whatever the device; cache.first_row is left to the caller.
inline PlanState check_plan(const char* op, Tensor& tags, Tensor& words,
                            std::optional<Tensor>& counts, Tensor& counters, const Tensor& clock,
                            const Tensor& tables, int64_t policy) {
  const Policy parsed = parse_choice<Policy>(op, "policy", policy, kPolicies);
  const int64_t sets = check_tags(op, tags);
  check_one(op, "stamps", words, ScalarType::Long, tags.numel(), tags);
  check_features(op, tables);
  check_same_device(op, "tables", tables, tags);
  check_one(op, "counters", counters, ScalarType::Long, (tables.size(0) + 1) * kCounters, tags);
  check_one(op, "clock", clock, ScalarType::Long, 2, tags);
  STD_TORCH_CHECK(parsed == Policy::kLru || counts.has_value(), op,
                  ": policy lfu needs counts, int32 with one entry a cached row");
  if (counts) check_cache_tensor(op, "counts", *counts, ScalarType::Int, tags);
  return {{tags.mutable_data_ptr<int64_t>(), words.mutable_data_ptr<int64_t>(),
           counts ? counts->mutable_data_ptr<int32_t>() : nullptr, sets, 0, parsed},
          counters.mutable_data_ptr<int64_t>()};
}

// `tables`, where they can be read: ascending by row, those that are cached last, one after the
// other, and with one stride.
inline void check_tables(const char* op, const Tensor& tables) {
  check_features(op, tables);
  const Feature* table = feature_array(tables);
  const int num_tables = static_cast<int>(tables.size(0));
  int64_t stride = 0, end = -1;
  for (int t = 0; t < num_tables; ++t) {
    const Feature& x = table[t];
    STD_TORCH_CHECK(x.rows >= 0 && x.row_base >= 0 && x.dim > 0 && x.row_base <= kAnyNumber &&
                        x.rows <= kAnyNumber - x.row_base &&
                        (t == 0 || x.row_base >= table[t - 1].row_base + table[t - 1].rows),
                    op, ": tables must ascend by row_base and not overlap; table ", t, " does not");
    if (x.cache_stride == 0 && stride == 0) continue;
    STD_TORCH_CHECK(x.cache_stride >= x.dim && x.cache_stride <= kMaxLookups &&
                        (stride == 0 || x.cache_stride == stride) && (end < 0 || x.row_base == end),
                    op, ": the cached tables must be the last ones, follow each other without a ",
                    "gap and have one cache_stride, at least their dim and below 2^31; table ", t,
                    " does not");
    stride = x.cache_stride;
    end = x.row_base + x.rows;
  }
}

}  // namespace emb
