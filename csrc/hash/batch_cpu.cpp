// `hash_find_batch` and `hash_insert_batch_` on the CPU. The first checks the offsets of a batch
// and finds its keys. The second inserts a training batch and groups its lookups, by the steps of
// batch.h. It changes the index and the rows exactly as hash_touch_, hash_insert_ and
// hash_initial_rows_ would. Both *decline* some batches: then they change nothing and return an
// empty list.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "hash/batch.h"

namespace emb {
namespace {

// Find the keys of a batch. Return [offsets, starts, slots]: members of BagsOfKeys, then the slot
// of each position, int64 [n], -1 for a missing key, or its row by `fallback`, see FallbackRows.
// Changes nothing.
//
// The op declines a batch without bags, and a batch whose offsets do not ascend from 0 to n.
std::vector<Tensor> hash_find_batch(std::vector<Tensor> tensors, const Tensor& features,
                                    const Tensor& ids, const Tensor& offsets, const Tensor& tables,
                                    std::optional<Tensor> fallback) {
  const BagsOfKeys call("hash_find_batch", tensors, features, ids, offsets, tables);
  const FallbackRows fallback_rows("hash_find_batch", fallback, ids, call.index.num_tables);
  if (!call.has_valid_offsets) return {};
  Tensor slots = allocate(ids, {call.n});
  find_keys(call.index, call.batch, slots.mutable_data_ptr<int64_t>());
  fallback_rows.replace_missing(call.batch, slots.mutable_data_ptr<int64_t>());
  return {call.offsets, call.starts, slots};
}

// Insert a batch: change the index in `tensors` and the rows in `row_buffers`. `seed` selects the
// random numbers of initial rows, as in hash_initial_rows_. Return [offsets, starts, slots, rows,
// segments, lookups, bags, count]; the first two are members of BagsOfKeys, the others of
// BatchGroups. If keys were missing, the status of the key of each position follows, uint8 [n].
//
// The op declines a batch without bags, a batch whose offsets do not ascend from 0 to n or whose
// tables are not balanced (is_balanced), and a batch for which a table may have to grow. It then
// changes nothing and returns an empty list.
std::vector<Tensor> hash_insert_batch_(std::vector<Tensor> tensors, std::vector<Tensor> row_buffers,
                                       const Tensor& features, const Tensor& ids,
                                       const Tensor& offsets, const Tensor& tables,
                                       std::optional<Tensor> batch_scores, int64_t order,
                                       int64_t insert_policy, const Tensor& layout,
                                       const Tensor& rules, int64_t seed) {
  const HashBatchCall call("hash_insert_batch_", tensors, row_buffers, features, ids, offsets,
                           tables, batch_scores, order, insert_policy, layout, rules);
  if (!call.has_valid_offsets) return {};
  const TableSegments table_segments(call.batch, call.index.num_tables);
  if (!table_segments.is_balanced()) return {};
  const DistinctKeys distinct(call.batch, table_segments, call.index);
  if (!fits_without_growth(call.index, distinct)) return {};
  const BatchGroups groups(ids, call.n, distinct.num_keys());
  const Scratch<int64_t> key_slots = new_scratch<int64_t>(distinct.num_keys());
  touch_keys(call, distinct, key_slots.get());
  int64_t* miss_offsets = call.miss_offsets.mutable_data_ptr<int64_t>();
  MissingKeys missing(call, table_segments, distinct, key_slots.get(), miss_offsets);
  std::vector<Tensor> results{call.offsets,    call.starts,    groups.slots, groups.rows,
                              groups.segments, groups.lookups, groups.bags,  groups.count};
  if (!missing.key_indices.empty()) {
    const BatchStatus status(ids, call.n, distinct.num_keys());
    results.push_back(status.by_position);
    missing.insert(call, distinct, miss_offsets, nullptr);
    call.rows.write(distinct.keys.get(), missing.key_indices.data(), miss_offsets,
                    missing.slots.data(), seed);
    missing.write_slots(key_slots.get());
    status.write(call, table_segments, distinct, missing);
  }
  groups.write(call, table_segments, distinct, key_slots.get());
  return results;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, hash_find_batch);
  EMB_IMPL(m, emb, hash_insert_batch_);
}
