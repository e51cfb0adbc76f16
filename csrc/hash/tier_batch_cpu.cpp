// `tier_insert_batch_` and `tier_find_batch_` on the CPU, for tables with backing stores in host
// memory. The first inserts a training batch by the steps of batch.h. After the insertion it copies
// the rows of evicted keys out of their slots, and rows of a store into the slots of their keys. It
// can also change the store: first write the overflow rows of the last batch back to it, and in the
// end remove the keys that have a slot now, and put the evicted rows into it. The second only finds
// keys, and copies the rows of keys in a store into overflow rows.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "hash/batch.h"
#include "hash/host_store.h"

namespace emb {
namespace {

// The stores in host memory of the tables of a batch, checked. The arguments are
//   indices         six tensors per table: the index of its store, an index of one table
//   records         per table: uint8 [S or more, record_bytes], by slot of its store, which has S
//                   slots; a record has stamp, score and packed row
//   orders          how each store evicts: the number of a HashOrder
//   first_overflow  the first overflow row of each table
//   overflow        per table: int64 [m, 3], the entries of its first overflow rows, which go back
//                   to the store; none unless the op changes the stores
struct BatchStores {
  struct Store {
    HostStore host;
    PackedRows rows;          // the rows of the table, by slot
    int64_t first_overflow;   // the rows from this number on are overflow rows
    const int64_t* overflow;  // [num_overflow, 3], see the argument
    int64_t num_overflow;
  };
  std::vector<Store> stores;

  BatchStores(const char* op, const HashIndex& index, const InitialRows& table_rows,
              const std::vector<Tensor>& indices, const std::vector<Tensor>& records,
              const std::vector<int64_t>& orders, const std::vector<int64_t>& first_overflow,
              const std::vector<Tensor>& overflow, bool changes_stores) {
    constexpr int64_t kIndexTensors = 6;
    const int64_t num_tables = index.num_tables;
    STD_TORCH_CHECK(static_cast<int64_t>(indices.size()) == kIndexTensors * num_tables &&
                        static_cast<int64_t>(records.size()) == num_tables &&
                        static_cast<int64_t>(orders.size()) == num_tables &&
                        static_cast<int64_t>(first_overflow.size()) == num_tables &&
                        static_cast<int64_t>(overflow.size()) == num_tables,
                    op, ": each of ", num_tables, " tables needs the ", kIndexTensors,
                    " tensors of an index, records, an order, first_overflow and overflow, got ",
                    indices.size(), ", ", records.size(), ", ", orders.size(), ", ",
                    first_overflow.size(), " and ", overflow.size());
    for (int64_t t = 0; t < num_tables; ++t) {
      const auto first = indices.begin() + kIndexTensors * t;
      PackedRows rows(table_rows.rows_of(t));
      const int64_t row_bytes = rows.row_bytes, num_overflow = overflow[t].numel() / 3;
      stores.push_back(
          {HostStore(op, {first, first + kIndexTensors}, records[t], row_bytes, orders[t]),
           std::move(rows), first_overflow[t],
           required_array<int64_t>(op, "overflow", overflow[t], 3 * num_overflow, indices[0]),
           num_overflow});
      const Store& store = stores.back();
      const int64_t slots = index.field(t, HashTableColumn::kMaxBuckets) * kBucketSlots;
      STD_TORCH_CHECK(first_overflow[t] >= slots && first_overflow[t] <= store.rows.num_slots, op,
                      ": first_overflow must be in [", slots, ", ", store.rows.num_slots,
                      "], from the slots of the table to its rows, got ", first_overflow[t]);
      STD_TORCH_CHECK(num_overflow <= store.rows.num_slots - first_overflow[t] &&
                          (changes_stores || num_overflow == 0),
                      op, ": overflow must be entries of overflow rows, and empty unless the op ",
                      "changes the stores, got ", num_overflow, " entries");
      check_num_keys(op, num_overflow);
    }
  }

  // Put the overflow rows into their stores. Return how many rows each store drops for them, [T],
  // or an empty vector if there are no overflow rows. If memory is short, this throws, and some
  // stores may have their rows; the caller can put the same rows again.
  std::vector<int64_t> write_back() const {
    std::vector<int64_t> num_dropped;
    const auto has_overflow = [](const Store& store) { return store.num_overflow > 0; };
    if (std::none_of(stores.begin(), stores.end(), has_overflow)) return num_dropped;
    for (const Store& store : stores) num_dropped.push_back(write_back(store));
    return num_dropped;
  }

  // Return whether every table has at least as many overflow rows as the batch has distinct keys of
  // the table. Then every key gets a row, even if all are refused.
  bool have_overflow_rows_for(const DistinctKeys& distinct) const {
    for (size_t t = 0; t < stores.size(); ++t) {
      const int64_t keys = distinct.first_keys[t + 1] - distinct.first_keys[t];
      if (keys > stores[t].rows.num_slots - stores[t].first_overflow) return false;
    }
    return true;
  }

 private:
  // Put the overflow rows of one table into its store. Return how many rows it drops for them.
  static int64_t write_back(const Store& store) {
    const int64_t n = store.num_overflow, row_bytes = store.host.row_bytes;
    StorePut put(store.host, n);
    const Scratch<char> rows = new_scratch<char>(n * row_bytes);
    for (int64_t i = 0; i < n; ++i) {
      store.rows.read(store.first_overflow + i, rows.get() + i * row_bytes);
    }
    put.insert(store.overflow, n);
    int64_t num_dropped = 0;
    put.for_each_dropped([&](int64_t, const int64_t*) { ++num_dropped; },
                         [&](int64_t) { ++num_dropped; });
    put.write(rows.get());
    return num_dropped;
  }
};

// The records that stores have of the missing keys of a batch.
struct StoredMisses {
  std::vector<int64_t> slots;  // by miss: the slot of the key in its store, kNoSlot if it has none

  // Find the records of the misses. If the order counts uses, add the uses in a record to the uses
  // of its miss in `missing`.
  StoredMisses(const HashBatchCall& call, const BatchStores& stores, const DistinctKeys& distinct,
               const int64_t* offsets, MissingKeys* missing)
      : slots(missing->key_indices.size()) {
    std::vector<int64_t> keys(missing->key_indices.size());
    for (size_t miss = 0; miss < keys.size(); ++miss) {
      keys[miss] = distinct.keys[missing->key_indices[miss]];
    }
    for (int64_t t = 0; t < call.index.num_tables; ++t) {
      const HostStore& store = stores.stores[t].host;
      store.find(keys.data() + offsets[t], offsets[t + 1] - offsets[t], slots.data() + offsets[t]);
      if (!order_counts_uses(call.scoring.order)) continue;
      for (int64_t miss = offsets[t]; miss < offsets[t + 1]; ++miss) {
        if (slots[miss] == kNoSlot) continue;
        missing->uses[miss] = add_uses(store.score(slots[miss]), missing->uses[miss]);
      }
    }
  }
};

// The number of results of tier_insert_batch_ about the misses of all tables, and the number of
// results of TableMoves per table.
constexpr int64_t kNumMissResults = 2, kNumMoveResults = 5;

// The counts of a batch in one table; emblib/ops/tiers.py has the same columns.
enum TierCount {
  kStoredKeys,    // missing keys that are in the store
  kNewKeys,       // missing keys that are not in the store
  kPromotedKeys,  // keys of the store that got a slot
  kDemotedKeys,   // keys that were evicted from the table
  kRefusedKeys,   // missing keys that got an overflow row
  kDroppedRows,   // rows that the store dropped when overflow rows were written back
  kNumTierCounts
};

// The rows and keys that a batch moves between a table and its store. It must be constructed before
// the batch is inserted, because a lack of memory after the insertion would lose evicted rows.
struct TableMoves {
  // Results, see SwappedMisses of emblib/ops/tiers.py. If the op changes the stores, the first
  // three are empty, otherwise `dropped` is. The others have room for all misses of the table.
  Tensor demoted, demoted_rows, promoted, refused, dropped;
  // The evicted entries, [num_misses, 3], and their rows, [num_misses, row_bytes]. They are in
  // `change_` if the op changes the stores, otherwise in `demoted` and `demoted_rows`.
  int64_t* entries;
  char* rows;
  std::vector<int64_t> demoted_numbers;  // by miss of the table: the number in `entries` and `rows`
                                         // of the key that it evicted, -1 for none
  int64_t counts[kNumTierCounts] = {};
  int64_t num_dropped = 0;  // keys in `dropped`

  // `num_misses` is the number of missing keys of the table.
  TableMoves(const Tensor& like, int64_t num_misses, const HostStore& store, bool changes_store)
      : demoted(allocate_words(like, {changes_store ? 0 : num_misses, 3})),
        demoted_rows(allocate_output(like, {changes_store ? 0 : num_misses, store.row_bytes},
                                     ScalarType::Byte)),
        promoted(allocate_words(like, {changes_store ? 0 : num_misses})),
        refused(allocate_words(like, {num_misses, 3})),
        dropped(allocate_words(like, {changes_store ? num_misses : 0})),
        entries(demoted.mutable_data_ptr<int64_t>()),
        rows(static_cast<char*>(demoted_rows.mutable_data_ptr())),
        demoted_numbers(num_misses, -1) {
    if (!changes_store) return;
    change_.emplace(store, num_misses);
    entries = change_->entries.get();
    rows = change_->rows.get();
  }

  // Copy the rows of evicted keys out of their slots, and rows of the store to the slots of their
  // keys. `first_miss` is the first miss of the table, and `evicted` has the evicted entries of all
  // misses. Refused misses get overflow rows, which this writes to missing->slots. The status of a
  // key of the store becomes kStored, that of any other refused miss kNew.
  void swap(const HashBatchCall& call, int64_t t, const BatchStores::Store& store,
            const DistinctKeys& distinct, const StoredMisses& stored, int64_t first_miss,
            const int64_t* evicted, MissingKeys* missing) {
    const auto n = static_cast<int64_t>(demoted_numbers.size());
    const int64_t row_bytes = store.rows.row_bytes;
    auto* const promoted_words =
        change_ ? change_->promoted_slots.get() : promoted.mutable_data_ptr<int64_t>();
    auto* const refused_words = refused.mutable_data_ptr<int64_t>();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t miss = first_miss + i;
      const int64_t key = distinct.keys[missing->key_indices[miss]];
      const auto status = static_cast<InsertStatus>(missing->status[miss]);
      const bool is_stored = stored.slots[miss] != kNoSlot;
      ++counts[is_stored ? kStoredKeys : kNewKeys];
      if (status == InsertStatus::kEvicting) demoted_numbers[i] = counts[kDemotedKeys]++;
      if (status == InsertStatus::kRefused) {
        const int64_t number = counts[kRefusedKeys]++;
        missing->slots[miss] = store.first_overflow + number;
        missing->status[miss] = static_cast<uint8_t>(InsertStatus::kNew);
        int64_t* const entry = refused_words + 3 * number;
        entry[HashEntry::kKey] = key;
        entry[HashEntry::kStamp] = *call.index.clock;
        entry[HashEntry::kScore] =
            order_counts_uses(call.scoring.order) ? missing->uses[miss] : call.scoring.score_of(t);
      } else if (is_stored) {
        promoted_words[counts[kPromotedKeys]++] = change_ ? stored.slots[miss] : key;
      }
      if (is_stored) missing->status[miss] = static_cast<uint8_t>(InsertStatus::kStored);
    }
    const auto record_of = [&](int64_t i) {
      return stored.slots[first_miss + i] == kNoSlot
                 ? nullptr
                 : store.host.records.at(stored.slots[first_miss + i]);
    };
    const auto cost = [&](int64_t i) { return 2 * row_bytes * i; };
    parallel_balanced(n, kCopyGrain, cost, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kRowsAhead < end) {
          store.rows.prefetch(missing->slots[first_miss + i + kRowsAhead]);
          const char* const next_record = record_of(i + kRowsAhead);
          if (next_record != nullptr) prefetch_row(next_record, store.host.records.record_bytes);
        }
        const int64_t slot = missing->slots[first_miss + i];
        if (const int64_t number = demoted_numbers[i]; number >= 0) {
          std::memcpy(entries + 3 * number, evicted + 3 * (first_miss + i), 3 * sizeof(int64_t));
          store.rows.read(slot, rows + number * row_bytes);
        }
        const char* const source = record_of(i);
        if (source != nullptr) store.rows.write(slot, source + store.host.records.head_bytes());
      }
    });
  }

  // Remove the promoted keys from the store, put the demoted rows into it, and write the keys that
  // it evicts or refuses to `dropped`. Only if the op changes the stores, and after `swap`.
  void change_store(const HostStore& store) {
    store.erase(change_->promoted_slots.get(), counts[kPromotedKeys]);
    change_->put.insert(entries, counts[kDemotedKeys]);
    auto* const keys = dropped.mutable_data_ptr<int64_t>();
    change_->put.for_each_dropped(
        [&](int64_t, const int64_t* evicted) { keys[num_dropped++] = evicted[HashEntry::kKey]; },
        [&](int64_t i) { keys[num_dropped++] = entries[3 * i + HashEntry::kKey]; });
    change_->put.write(rows);
  }

  // Append the five results, cut to the rows that were written.
  void append_to(std::vector<Tensor>* results) const {
    const int64_t num_demoted = change_ ? 0 : counts[kDemotedKeys];
    const int64_t num_promoted = change_ ? 0 : counts[kPromotedKeys];
    results->insert(results->end(),
                    {first_rows(demoted, num_demoted), first_rows(demoted_rows, num_demoted),
                     first_rows(promoted, num_promoted), first_rows(refused, counts[kRefusedKeys]),
                     first_rows(dropped, num_dropped)});
  }

 private:
  // Memory for `change_store`.
  struct StoreChange {
    StorePut put;
    Scratch<int64_t> entries;         // [num_misses, 3], see TableMoves
    Scratch<char> rows;               // [num_misses, row_bytes]
    Scratch<int64_t> promoted_slots;  // [num_misses], slots of the promoted keys in the store

    StoreChange(const HostStore& store, int64_t num_misses)
        : put(store, num_misses),
          entries(new_scratch<int64_t>(3 * num_misses)),
          rows(new_scratch<char>(num_misses * store.row_bytes)),
          promoted_slots(new_scratch<int64_t>(num_misses)) {}
  };
  std::optional<StoreChange> change_;  // has a value if the op changes the stores
};

// Insert a batch into tables with stores in host memory. If `changes_stores`, keys of a store that
// got a slot are removed from it, and evicted rows are put into it. Otherwise the stores are only
// read, and the results tell the caller what to move. The op declines a batch that
// hash_insert_batch_ would decline, and a batch with more distinct keys of a table than the table
// has overflow rows. Otherwise it returns the first eight results of hash_insert_batch_ and, if
// keys were missing or overflow rows were written back, these:
//   - the status of the key of each position, uint8 [n], as TableMoves::swap leaves it
//   - the counts of each table, int64 [T, kNumTierCounts]
//   - the tensors of TableMoves, kNumMoveResults per table
std::vector<Tensor> tier_insert_batch_(
    std::vector<Tensor> tensors, std::vector<Tensor> row_buffers, const Tensor& features,
    const Tensor& ids, const Tensor& offsets, const Tensor& tables,
    std::optional<Tensor> batch_scores, int64_t order, int64_t insert_policy, const Tensor& layout,
    const Tensor& rules, int64_t seed, std::vector<Tensor> store_indices,
    std::vector<Tensor> records, std::vector<int64_t> store_orders,
    std::vector<int64_t> first_overflow, std::vector<Tensor> overflow, bool changes_stores) {
  const char* op = "tier_insert_batch_";
  const HashBatchCall call(op, tensors, row_buffers, features, ids, offsets, tables, batch_scores,
                           order, insert_policy, layout, rules);
  const BatchStores stores(op, call.index, call.rows, store_indices, records, store_orders,
                           first_overflow, overflow, changes_stores);
  if (!call.has_valid_offsets) return {};
  const TableSegments table_segments(call.batch, call.index.num_tables);
  if (!table_segments.is_balanced()) return {};
  const DistinctKeys distinct(call.batch, table_segments, call.index);
  if (!fits_without_growth(call.index, distinct) || !stores.have_overflow_rows_for(distinct))
    return {};
  const BatchGroups groups(ids, call.n, distinct.num_keys());
  const Scratch<int64_t> key_slots = new_scratch<int64_t>(distinct.num_keys());
  const std::vector<int64_t> num_dropped = stores.write_back();
  touch_keys(call.index, call.scoring, table_segments, distinct, key_slots.get());
  int64_t* miss_offsets = call.miss_offsets.mutable_data_ptr<int64_t>();
  MissingKeys missing(call.index.num_tables, distinct, key_slots.get(), miss_offsets);
  std::vector<Tensor> miss_results;
  if (!missing.key_indices.empty() || !num_dropped.empty()) {
    const StoredMisses stored(call, stores, distinct, miss_offsets, &missing);
    const int64_t num_tables = call.index.num_tables;
    std::vector<TableMoves> moves;
    for (int64_t t = 0; t < num_tables; ++t) {
      moves.emplace_back(ids, miss_offsets[t + 1] - miss_offsets[t], stores.stores[t].host,
                         changes_stores);
    }
    const auto num_misses = static_cast<int64_t>(missing.key_indices.size());
    const Scratch<int64_t> evicted = new_scratch<int64_t>(3 * num_misses);
    const BatchStatus status(ids, call.n, distinct.num_keys());
    Tensor counts = allocate_words(ids, {num_tables, kNumTierCounts});
    std::vector<int64_t> new_slots(num_misses);  // by miss; kNoSlot for a key of the store
    miss_results.reserve(kNumMissResults + kNumMoveResults * num_tables);
    missing.insert(call, distinct, miss_offsets, /*admitted=*/nullptr, evicted.get());
    for (int64_t t = 0; t < num_tables; ++t) {
      moves[t].swap(call, t, stores.stores[t], distinct, stored, miss_offsets[t], evicted.get(),
                    &missing);
      if (!num_dropped.empty()) moves[t].counts[kDroppedRows] = num_dropped[t];
      if (changes_stores) moves[t].change_store(stores.stores[t].host);
      std::copy_n(moves[t].counts, kNumTierCounts,
                  counts.mutable_data_ptr<int64_t>() + t * kNumTierCounts);
    }
    for (size_t miss = 0; miss < new_slots.size(); ++miss) {
      new_slots[miss] = stored.slots[miss] == kNoSlot ? missing.slots[miss] : kNoSlot;
    }
    call.rows.write(distinct.keys.get(), missing.key_indices.data(), miss_offsets, new_slots.data(),
                    seed);
    missing.write_slots(key_slots.get());
    status.write(call.batch, distinct, missing);
    miss_results.push_back(status.by_position);
    miss_results.push_back(counts);
    for (const TableMoves& table_moves : moves) table_moves.append_to(&miss_results);
  }
  groups.write(call, table_segments, distinct, key_slots.get());
  std::vector<Tensor> results{call.offsets,    call.starts,    groups.slots, groups.rows,
                              groups.segments, groups.lookups, groups.bags,  groups.count};
  results.insert(results.end(), miss_results.begin(), miss_results.end());
  return results;
}

// Search the store of table t for the keys of the table that have no slot, and copy the rows that
// it has of them to the overflow rows, in the order of the keys. `key_slots` has the slot of each
// distinct key, kNoSlot for none; the overflow rows are written to it. Return key, stamp and score
// of each copied row, int64 [r, 3], or nullopt, with no row copied, if there are fewer overflow
// rows.
std::optional<Tensor> copy_stored_rows(const BatchStores::Store& store, int64_t t,
                                       const DistinctKeys& distinct, const Tensor& like,
                                       int64_t* key_slots) {
  std::vector<int64_t> keys, key_indices;
  for (int64_t k = distinct.first_keys[t]; k < distinct.first_keys[t + 1]; ++k) {
    if (key_slots[k] != kNoSlot) continue;
    keys.push_back(distinct.keys[k]);
    key_indices.push_back(k);
  }
  std::vector<int64_t> slots(keys.size());  // in the store
  store.host.find(keys.data(), static_cast<int64_t>(keys.size()), slots.data());
  int64_t n = 0;  // the keys with a row in the store come first
  for (size_t i = 0; i < keys.size(); ++i) {
    keys[n] = keys[i], key_indices[n] = key_indices[i], slots[n] = slots[i];
    n += slots[i] != kNoSlot;
  }
  if (n > store.rows.num_slots - store.first_overflow) return std::nullopt;
  Tensor entries = allocate_words(like, {n, 3});
  auto* const entry = entries.mutable_data_ptr<int64_t>();
  const Records& records = store.host.records;
  const auto cost = [&](int64_t i) { return 2 * store.rows.row_bytes * i; };
  parallel_balanced(n, kCopyGrain, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < end)
        prefetch_row(records.at(slots[i + kRowsAhead]), records.record_bytes);
      entry[3 * i + HashEntry::kKey] = keys[i];
      std::memcpy(entry + 3 * i + HashEntry::kStamp, records.at(slots[i]), records.head_bytes());
      store.rows.write(store.first_overflow + i, store.host.row(slots[i]));
      key_slots[key_indices[i]] = store.first_overflow + i;
    }
  });
  return entries;
}

// Find the keys of a batch in tables with stores in host memory. Rows of keys without a slot that
// are in a store are copied to overflow rows; nothing else changes. Return [offsets, starts,
// slots], as hash_find_batch does, with overflow rows as slots. If a key has no slot, they are
// followed by key, stamp and score of the overflow rows of each table, int64 [r, 3].
//
// The op declines a batch that hash_find_batch would decline, a batch whose tables are not balanced
// (is_balanced), and a batch with more keys in the store of a table than the table has overflow
// rows. It then returns an empty list; overflow rows may have changed.
std::vector<Tensor> tier_find_batch_(std::vector<Tensor> tensors, std::vector<Tensor> row_buffers,
                                     const Tensor& features, const Tensor& ids,
                                     const Tensor& offsets, const Tensor& tables,
                                     std::optional<Tensor> fallback, const Tensor& layout,
                                     const Tensor& rules, std::vector<Tensor> store_indices,
                                     std::vector<Tensor> records, std::vector<int64_t> store_orders,
                                     std::vector<int64_t> first_overflow) {
  const char* op = "tier_find_batch_";
  const BagsOfKeys call(op, tensors, features, ids, offsets, tables);
  const int64_t num_tables = call.index.num_tables;
  const FallbackRows fallback_rows(op, fallback, ids, num_tables);
  const BatchRowBuffers buffers(op, row_buffers, layout, rules, ids, num_tables);
  const std::vector<Tensor> no_overflow(num_tables, buffers.empty);
  const BatchStores stores(op, call.index, buffers.rows, store_indices, records, store_orders,
                           first_overflow, no_overflow, /*changes_stores=*/false);
  if (!call.has_valid_offsets) return {};
  const TableSegments table_segments(call.batch, num_tables);
  if (!table_segments.is_balanced()) return {};
  const DistinctKeys distinct(call.batch, table_segments, call.index);
  const Scratch<int64_t> key_slots = new_scratch<int64_t>(distinct.num_keys());
  parallel_keys(distinct, [&](int64_t t, int64_t begin, int64_t end) {
    hash_find_kernels().find(call.index.table(t), distinct.keys.get() + begin, end - begin, nullptr,
                             key_slots.get() + begin);
  });
  Tensor slots = allocate(ids, {call.n});
  std::vector<Tensor> results{call.offsets, call.starts, slots};
  if (std::find(key_slots.get(), key_slots.get() + distinct.num_keys(), kNoSlot) !=
      key_slots.get() + distinct.num_keys()) {
    for (int64_t t = 0; t < num_tables; ++t) {
      std::optional<Tensor> entries =
          copy_stored_rows(stores.stores[t], t, distinct, ids, key_slots.get());
      if (!entries.has_value()) return {};
      results.push_back(*std::move(entries));
    }
  }
  auto* const out = slots.mutable_data_ptr<int64_t>();
  distinct.write_by_position<int64_t>(call.batch, key_slots.get(), out);
  fallback_rows.replace_missing(call.batch, out);
  return results;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tier_insert_batch_);
  EMB_IMPL(m, emb, tier_find_batch_);
}
