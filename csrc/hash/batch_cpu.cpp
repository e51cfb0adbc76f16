// `hash_find_batch`, `hash_touch_batch_` and `hash_insert_batch_` on the CPU. The first checks the
// offsets of a batch and finds its keys. The last inserts a training batch and groups its lookups,
// by the steps of batch.h; if the caller decides which keys to admit, hash_touch_batch_ makes the
// steps (1) and (2) before. They change the index and the rows exactly as hash_touch_, hash_insert_
// and hash_initial_rows_ would. They *decline* some batches: then they change nothing and return an
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

// Return for each missing key the lowest threshold of the features that use it, int64 [m].
Tensor lowest_thresholds(const Tensor& ids, const HashBatch& batch, const DistinctKeys& distinct,
                         const MissingKeys& missing, const int64_t* threshold_of_feature) {
  const Scratch<int64_t> by_key = new_scratch<int64_t>(distinct.num_keys());
  std::fill_n(by_key.get(), distinct.num_keys(), INT64_MAX);
  for (int64_t f = 0; f < batch.num_segments; ++f) {
    int64_t* table_thresholds = by_key.get() + distinct.first_keys[batch.tables[f]];
    for (int64_t i = batch.starts[f]; i < batch.starts[f + 1]; ++i) {
      int64_t& threshold = table_thresholds[distinct.key_numbers[i]];
      threshold = std::min(threshold, threshold_of_feature[f]);
    }
  }
  Tensor lowest = allocate(ids, {static_cast<int64_t>(missing.key_indices.size())});
  int64_t* out = lowest.mutable_data_ptr<int64_t>();
  for (int64_t index : missing.key_indices) *out++ = by_key[index];
  return lowest;
}

// Touch the keys of a batch that hash_insert_batch_ will insert. Return [touched, keys, uses,
// tables]: the slot of each distinct key, int64 [num_keys], in the order of DistinctKeys, kNoSlot
// for a missing key; then of each missing key, in this order, the key, the number of its positions
// and its table, int64 [m] each. With `thresholds`, int64 [F] by feature, the lowest threshold of
// the features that use the key follows, int64 [m].
//
// The op declines a batch without bags, a batch whose offsets do not ascend from 0 to n or whose
// tables are not balanced (is_balanced), and a batch for which a table may have to grow.
std::vector<Tensor> hash_touch_batch_(std::vector<Tensor> tensors, const Tensor& features,
                                      const Tensor& ids, const Tensor& offsets,
                                      const Tensor& tables, std::optional<Tensor> batch_scores,
                                      int64_t order, std::optional<Tensor> thresholds) {
  const char* op = "hash_touch_batch_";
  const BagsOfKeys call(op, tensors, features, ids, offsets, tables);
  const int64_t* threshold_of_feature =
      optional_array(op, "thresholds", thresholds, call.batch.num_segments, ids);
  const HashScoring scoring(op, call.index, order, batch_scores, ids);
  if (!call.has_valid_offsets) return {};
  const TableSegments table_segments(call.batch, call.index.num_tables);
  if (!table_segments.is_balanced()) return {};
  const DistinctKeys distinct(call.batch, table_segments, call.index);
  if (!fits_without_growth(call.index, distinct)) return {};
  const Tensor touched = allocate(ids, {distinct.num_keys()});
  int64_t* slots = touched.mutable_data_ptr<int64_t>();
  touch_keys(call.index, scoring, table_segments, distinct, slots);
  std::vector<int64_t> offsets_of_tables(call.index.num_tables + 1, 0);
  const MissingKeys missing(call.index.num_tables, distinct, slots, offsets_of_tables.data());
  const int64_t num_missing = offsets_of_tables.back();
  Tensor keys = allocate(ids, {num_missing}), uses = allocate(ids, {num_missing}),
         tables_of_keys = allocate(ids, {num_missing});
  int64_t* key = keys.mutable_data_ptr<int64_t>();
  for (int64_t index : missing.key_indices) *key++ = distinct.keys[index];
  std::copy_n(missing.uses.data(), num_missing, uses.mutable_data_ptr<int64_t>());
  int64_t* table = tables_of_keys.mutable_data_ptr<int64_t>();
  for (int64_t t = 0; t < call.index.num_tables; ++t) {
    std::fill(table + offsets_of_tables[t], table + offsets_of_tables[t + 1], t);
  }
  if (threshold_of_feature == nullptr) return {touched, keys, uses, tables_of_keys};
  return {touched, keys, uses, tables_of_keys,
          lowest_thresholds(ids, call.batch, distinct, missing, threshold_of_feature)};
}

// Return the data of `admitted`, bool by missing key, or null if it is null. Check it and
// `touched`, a result of hash_touch_batch_ for the batch.
const bool* checked_admission(const char* op, const HashIndex& index, const DistinctKeys& distinct,
                              const Tensor& touched, const std::optional<Tensor>& admitted) {
  const auto* slots = required_array<int64_t>(op, "touched", touched, distinct.num_keys(), touched);
  int64_t num_missing = 0;
  for (int64_t t = 0; t < index.num_tables; ++t) {
    const int64_t num_slots = index.field(t, HashTableColumn::kBuckets) * kBucketSlots;
    for (int64_t k = distinct.first_keys[t]; k < distinct.first_keys[t + 1]; ++k) {
      STD_TORCH_CHECK(slots[k] >= kNoSlot && slots[k] < num_slots, op,
                      ": touched must be slots of table ", t, ", below ", num_slots, ", got ",
                      slots[k]);
      num_missing += slots[k] == kNoSlot;
    }
  }
  if (!admitted.has_value()) return nullptr;
  check_dtype(op, "admitted", *admitted, ScalarType::Bool, "bool");
  check_same_device(op, "admitted", *admitted, touched);
  STD_TORCH_CHECK(admitted->is_contiguous() && admitted->numel() == num_missing, op,
                  ": admitted must be contiguous with one entry per missing key = ", num_missing,
                  ", got ", admitted->numel());
  return static_cast<const bool*>(admitted->const_data_ptr());
}

// The misses of a batch, for callers that record what an insertion does: the fields of `Misses` and
// of `InsertResult` of emblib/ops/hash.py, but only as long as there are misses. It must be
// constructed before the insertion, because a lack of memory afterwards would lose the results.
struct MissResults {
  Tensor first_positions, groups, uses, offsets, slots, status, evicted;
  Scratch<int32_t> miss_of_key;  // by distinct key, -1 for a hit

  MissResults(const Tensor& ids, int64_t n, const Tensor& miss_offsets,
              const DistinctKeys& distinct, const MissingKeys& missing)
      : offsets(miss_offsets), miss_of_key(new_scratch<int32_t>(distinct.num_keys())) {
    const auto num_misses = static_cast<int64_t>(missing.key_indices.size());
    for (Tensor* vector : {&first_positions, &uses, &slots}) {
      *vector = allocate(ids, {num_misses}, ScalarType::Long);
    }
    groups = allocate(ids, {n}, ScalarType::Int);
    status = allocate(ids, {num_misses}, ScalarType::Byte);
    evicted = allocate_zeros(ids, {num_misses, 3}, ScalarType::Long);
    std::fill_n(miss_of_key.get(), distinct.num_keys(), -1);
    for (size_t miss = 0; miss < missing.key_indices.size(); ++miss) {
      miss_of_key[missing.key_indices[miss]] = static_cast<int32_t>(miss);
    }
  }

  // Write all but `evicted`, which the insertion has written.
  void write(const HashBatch& batch, const DistinctKeys& distinct, const MissingKeys& missing) {
    std::copy(missing.uses.begin(), missing.uses.end(), uses.mutable_data_ptr<int64_t>());
    std::copy(missing.slots.begin(), missing.slots.end(), slots.mutable_data_ptr<int64_t>());
    std::copy(missing.status.begin(), missing.status.end(),
              static_cast<uint8_t*>(status.mutable_data_ptr()));
    auto* group = groups.mutable_data_ptr<int32_t>();
    auto* first_position = first_positions.mutable_data_ptr<int64_t>();
    for (int64_t f = batch.num_segments - 1; f >= 0; --f) {
      const int32_t* misses = miss_of_key.get() + distinct.first_keys[batch.tables[f]];
      for (int64_t i = batch.starts[f + 1] - 1; i >= batch.starts[f]; --i) {
        group[i] = misses[distinct.key_numbers[i]];
        if (group[i] >= 0) first_position[group[i]] = i;  // the first position is written last
      }
    }
  }

  void append_to(std::vector<Tensor>* results) const {
    results->insert(results->end(),
                    {first_positions, groups, uses, offsets, slots, status, evicted});
  }
};

// Insert a batch: change the index in `tensors` and the rows in `row_buffers`. `seed` selects the
// random numbers of initial rows, as in hash_initial_rows_. Return [offsets, starts, slots, rows,
// segments, lookups, bags, count]; the first two are members of BagsOfKeys, the others of
// BatchGroups. If keys were missing, the status of the key of each position follows, uint8 [n], and
// unless `fallback` is null, `slots` with the fallback rows of keys that got no slot, see
// FallbackRows; then, if `returns_misses`, the members of MissResults.
//
// `touched` is the result of hash_touch_batch_ for this batch, and `admitted` tells which of its
// missing keys are inserted; null inserts all. If `touched` is null, this op touches the keys, and
// declines the batches that hash_touch_batch_ declines.
std::vector<Tensor> hash_insert_batch_(
    std::vector<Tensor> tensors, std::vector<Tensor> row_buffers, const Tensor& features,
    const Tensor& ids, const Tensor& offsets, const Tensor& tables,
    std::optional<Tensor> batch_scores, int64_t order, int64_t insert_policy, const Tensor& layout,
    const Tensor& rules, int64_t seed, std::optional<Tensor> fallback,
    std::optional<Tensor> touched, std::optional<Tensor> admitted, bool returns_misses) {
  const char* op = "hash_insert_batch_";
  STD_TORCH_CHECK(touched.has_value() || !admitted.has_value(), op, ": admitted needs touched");
  const HashBatchCall call(op, tensors, row_buffers, features, ids, offsets, tables, batch_scores,
                           order, insert_policy, layout, rules);
  const FallbackRows fallback_rows(op, fallback, ids, call.index.num_tables);
  if (!call.has_valid_offsets) return {};
  const TableSegments table_segments(call.batch, call.index.num_tables);
  if (!touched.has_value() && !table_segments.is_balanced()) return {};
  const DistinctKeys distinct(call.batch, table_segments, call.index);
  if (!touched.has_value() && !fits_without_growth(call.index, distinct)) return {};
  const BatchGroups groups(ids, call.n, distinct.num_keys());
  const Tensor rows = allocate(ids, {fallback_rows.is_null() ? 0 : call.n});
  const Scratch<int64_t> key_slots = new_scratch<int64_t>(distinct.num_keys());
  const bool* is_admitted = nullptr;
  if (touched.has_value()) {
    is_admitted = checked_admission(op, call.index, distinct, *touched, admitted);
    std::copy_n(touched->const_data_ptr<int64_t>(), distinct.num_keys(), key_slots.get());
  } else {
    touch_keys(call.index, call.scoring, table_segments, distinct, key_slots.get());
  }
  int64_t* miss_offsets = call.miss_offsets.mutable_data_ptr<int64_t>();
  MissingKeys missing(call.index.num_tables, distinct, key_slots.get(), miss_offsets);
  std::vector<Tensor> results{call.offsets,    call.starts,    groups.slots, groups.rows,
                              groups.segments, groups.lookups, groups.bags,  groups.count};
  std::optional<MissResults> misses;
  if (!missing.key_indices.empty()) {
    const BatchStatus status(ids, call.n, distinct.num_keys());
    results.push_back(status.by_position);
    if (returns_misses) misses.emplace(ids, call.n, call.miss_offsets, distinct, missing);
    missing.insert(call, distinct, miss_offsets, is_admitted,
                   misses ? misses->evicted.mutable_data_ptr<int64_t>() : nullptr);
    call.rows.write(distinct.keys.get(), missing.key_indices.data(), miss_offsets,
                    missing.slots.data(), seed);
    missing.write_slots(key_slots.get());
    status.write(call.batch, distinct, missing);
    if (misses) misses->write(call.batch, distinct, missing);
  }
  groups.write(call, table_segments, distinct, key_slots.get());
  if (!missing.key_indices.empty() && !fallback_rows.is_null()) {
    std::copy_n(groups.slots.const_data_ptr<int64_t>(), call.n, rows.mutable_data_ptr<int64_t>());
    fallback_rows.replace_missing(call.batch, rows.mutable_data_ptr<int64_t>());
    results.push_back(rows);
  }
  if (misses) misses->append_to(&results);
  return results;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, hash_find_batch);
  EMB_IMPL(m, emb, hash_touch_batch_);
  EMB_IMPL(m, emb, hash_insert_batch_);
}
