// `tt_stored` and `tt_count_` on the CPU: which lookups of tensor trains read a stored row, and the
// counts of lookups and hits per table. tt/cached.h describes the arguments by their names.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>

#include "core/parallel.h"
#include "tt/check.h"

namespace emb {
namespace {

constexpr int64_t kCachedGrain = 1 << 15;  // grain of parallel_balanced, in lookups

// Return (core_ids, stored_rows, counted_keys), int64 [n] each, see TtStoredArgs; the first two are
// empty if `slots` is null. `indices` is int32 or int64 [n]; `ids`, `keys` and `slots`, int64 [n],
// and `row_of_slot`, int64 [num_slots], must be contiguous and on the device of `indices`. Throws
// for other dtypes, sizes and devices. A slot that does not exist has no row.
std::tuple<Tensor, Tensor, Tensor> tt_stored(const Tensor& indices, const Tensor& ids,
                                             const Tensor& keys, std::optional<Tensor> slots,
                                             const Tensor& row_of_slot) {
  const Tensor input = as_contiguous(indices);
  const TtStoredCall call("tt_stored", input, ids, keys, slots, row_of_slot);
  parallel_balanced(call.args.n, kCachedGrain, kUnitCost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) call.args.write_outputs(i);
  });
  return {call.core_ids, call.stored_rows, call.counted_keys};
}

// Add the numbers of lookups and hits of a batch to `counters`, int64 [T, 2 or more]. counted_keys
// and stored_rows are results of tt_stored; stored_rows is empty if no rows are stored.
// first_lookups and table_of_feature, `starts` and `tables` in the schema, are int64 [F + 1] and
// [F], see TtCountArgs. All arguments must be contiguous and on one device. Throws for other
// dtypes, sizes and devices. Lookups and tables that do not exist are skipped. That first_lookups
// ascends is not checked.
void tt_count_(const Tensor& counted_keys, const Tensor& stored_rows, const Tensor& first_lookups,
               const Tensor& table_of_feature, Tensor counters) {
  const TtCountArgs args = tt_count_args("tt_count_", counted_keys, stored_rows, first_lookups,
                                         table_of_feature, &counters);
  for (int64_t f = 0; f < args.num_features; ++f) {
    int64_t* const table_counters = args.counters_of(f);
    if (table_counters == nullptr) continue;
    int64_t num_lookups = 0, num_hits = 0;
    const int64_t end = std::min(args.first_lookups[f + 1], args.n);
    for (int64_t i = std::max<int64_t>(args.first_lookups[f], 0); i < end; ++i) {
      num_lookups += args.is_counted(i);
      num_hits += args.is_hit(i);
    }
    table_counters[0] += num_lookups;
    table_counters[1] += num_hits;
  }
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tt_stored);
  EMB_IMPL(m, emb, tt_count_);
}
