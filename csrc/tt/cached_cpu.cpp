// `tt_stored` and `tt_count_` on the CPU: which lookups of cached tensor trains read a stored row,
// and the counts of lookups and hits per table. See tt/cached.h.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "core/parallel.h"
#include "tt/check.h"

namespace emb {
namespace {

constexpr int64_t kCachedGrain = 1 << 15;  // grain of parallel_balanced, in lookups

// Return (cold, rows, counted), int64 [n] each; `cold` and `rows` are empty if `slots` is null.
// `ids`, `keys` and `slots` are int64 [n], row_of_slot int64 [slots].
std::tuple<Tensor, Tensor, Tensor> tt_stored(const Tensor& indices, const Tensor& ids,
                                             const Tensor& keys, std::optional<Tensor> slots,
                                             const Tensor& row_of_slot) {
  const Tensor input = as_contiguous(indices);
  const TtStored stored("tt_stored", input, ids, keys, slots, row_of_slot);
  parallel_balanced(stored.args.n, kCachedGrain, kUnitCost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) stored.args.split(i);
  });
  return {stored.cold, stored.rows, stored.counted};
}

// Add the numbers of lookups and hits of a batch to `counters`, int64 [T, 2 or more]. `rows` is
// int64 [n], or empty if no rows are stored.
void tt_count_(const Tensor& counted, const Tensor& rows, const Tensor& starts,
               const Tensor& tables, Tensor counters) {
  const TtCountArgs args = tt_count_args("tt_count_", counted, rows, starts, tables, &counters);
  for (int64_t f = 0; f < args.num_features; ++f) {
    int64_t* const table_counters = args.counters_of(f);
    if (table_counters == nullptr) continue;
    int64_t lookups = 0, hits = 0;
    const int64_t end = std::min(args.starts[f + 1], args.n);
    for (int64_t i = std::max<int64_t>(args.starts[f], 0); i < end; ++i) {
      lookups += args.is_lookup(i);
      hits += args.is_hit(i);
    }
    table_counters[0] += lookups;
    table_counters[1] += hits;
  }
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tt_stored);
  EMB_IMPL(m, emb, tt_count_);
}
