// The steps by which one op inserts a training batch and groups its lookups on the CPU. Ids repeat
// within a batch, so every step except the first and the last works on distinct keys:
//   (1) Number the keys of each table in the order of their first positions (DistinctKeys).
//   (2) Find the keys, and touch the hits (touch_keys).
//   (3) Insert the missing keys (MissingKeys), and write the initial values of their rows.
//   (4) Group the positions by key, for the backward pass (BatchGroups). Step (1) has counted the
//       positions of each key, so this step needs no sort.
// batch_cpu.cpp has the op for tables without stores, tier_batch_cpu.cpp the op for tables with
// stores in host memory.
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

#include "core/feature_bags.h"
#include "core/output_memory.h"
#include "core/parallel.h"
#include "core/scratch.h"
#include "hash/entries.h"

namespace emb {

inline constexpr int64_t kPositionGrain = 4096;  // grain of parallel_balanced for positions
// The maximum number of positions of a table, as a multiple of the average number per thread.
inline constexpr int64_t kMaxImbalance = 4;

// A batch of bags of keys and the index of its tables, checked. The struct points into the tensors
// of the caller.
//   tensors         the index, see HashIndex
//   features        int64 [F, 8], see Feature
//   ids             int64 [n], the key of each lookup
//   offsets         int32 or int64 [F * B + 1], the bags of the lookups; invalid contents do not
//                   raise, see has_valid_offsets
//   tables          int64 [F], the table of each feature
struct BagsOfKeys {
  HashIndex index;
  FeatureBags bags;
  const Feature* features;  // [F]
  int64_t n, num_bags;      // numbers of positions and of bags
  Tensor offsets;           // int32 [num_bags + 1], a copy of the offsets of the call
  Tensor starts;            // int64 [F + 1], the first position of each feature, then n
  HashBatch batch;          // its segments are the features
  bool has_valid_offsets;   // whether the batch has bags, and offsets ascend from 0 to n. If not,
                            // `starts` is not written and `batch` is not checked

  BagsOfKeys(const char* op, const std::vector<Tensor>& tensors, const Tensor& features_,
             const Tensor& ids, const Tensor& offsets_, const Tensor& tables)
      : index(op, tensors),
        bags(op, checked_features(op, features_, ids, offsets_), offsets_, std::nullopt,
             Pooling::kNone, kUnlimited),
        features(feature_array(features_)),
        n(ids.numel()),
        num_bags(bags.num_bags()),
        offsets(allocate(ids, {num_bags + 1}, ScalarType::Int)),
        starts(allocate(ids, {bags.num_features() + 1})),
        batch(op, ids, starts, tables) {
    check_same_device(op, "ids", ids, tensors[0]);
    index.check_tables(op);
    const Tensor contiguous = as_contiguous(offsets_);
    const IndexArray source = index_array(contiguous);
    int32_t* offsets_copy = offsets.mutable_data_ptr<int32_t>();
    has_valid_offsets =
        num_bags > 0 &&
        (source.is_int64
             ? copy_if_valid(static_cast<const int64_t*>(source.data), num_bags, n, offsets_copy)
             : copy_if_valid(static_cast<const int32_t*>(source.data), num_bags, n, offsets_copy));
    if (!has_valid_offsets) return;
    int64_t* start = starts.mutable_data_ptr<int64_t>();
    for (int64_t f = 0; f <= bags.num_features(); ++f) start[f] = offsets_copy[bags.first_bags[f]];
    batch.check_segments(op, index.num_tables);
  }

 private:
  // Check the arguments; return the first of them, so that a member initializer can call this.
  static const Tensor& checked_features(const char* op, const Tensor& features, const Tensor& ids,
                                        const Tensor& offsets) {
    check_features(op, features);
    check_lookups(op, ids, offsets);
    return features;
  }
};

// The rows that keys without a slot read.
//   fallback  int64 [T, 2] or null: the first fallback row of each table, counted as its slots are,
//             and the number of them. Null means that no table has any
class FallbackRows {
 public:
  FallbackRows(const char* op, const std::optional<Tensor>& fallback, const Tensor& ids,
               int64_t num_tables) {
    if (!fallback.has_value()) return;
    check_dtype(op, "fallback", *fallback, ScalarType::Long, "int64");
    check_same_device(op, "fallback", *fallback, ids);
    STD_TORCH_CHECK(fallback->dim() == 2 && fallback->size(0) == num_tables &&
                        fallback->size(1) == 2 && fallback->is_contiguous(),
                    op, ": fallback must be contiguous and [T, 2] for T = ", num_tables);
    rows_ = fallback->const_data_ptr<int64_t>();
    for (int64_t t = 0; t < num_tables; ++t) {
      STD_TORCH_CHECK(rows_[2 * t] >= 0 && rows_[2 * t] <= INT64_MAX - INT32_MAX &&
                          rows_[2 * t + 1] >= 0 && rows_[2 * t + 1] <= INT32_MAX,
                      op, ": table ", t, " must have at most 2^31 - 1 fallback rows, got ",
                      rows_[2 * t + 1], " from row ", rows_[2 * t], " on");
    }
  }

  bool is_null() const { return rows_ == nullptr; }

  // Replace kNoSlot in `slots` [n] by the fallback row of the key, in tables that have any.
  void replace_missing(const HashBatch& batch, int64_t* slots) const {
    if (rows_ == nullptr) return;
    parallel_segments(batch, [&](int64_t f, int64_t begin, int64_t end) {
      const int64_t* rows = rows_ + 2 * batch.tables[f];
      if (rows[1] == 0) return;
      for (int64_t i = begin; i < end; ++i) {
        if (slots[i] < 0) slots[i] = rows[0] + range_of_key(batch.ids[i], rows[1]);
      }
    });
  }

 private:
  const int64_t* rows_ = nullptr;
};

// The rows of the tables of a batch, checked; `row_buffers`, `layout` and `rules` are as in
// hash_initial_rows_.
struct BatchRowBuffers {
  Tensor miss_offsets;  // int64 [T + 1], see Misses; 0 until MissingKeys writes it
  Tensor empty;         // int64 [0]
  InitialRows rows;     // the rows of all tables

  BatchRowBuffers(const char* op, std::vector<Tensor>& row_buffers, const Tensor& layout,
                  const Tensor& rules, const Tensor& ids, int64_t num_tables)
      : miss_offsets(allocate_zeros(ids, {num_tables + 1}, ScalarType::Long)),
        empty(allocate(ids, {0})),
        rows(op,
             checked_inputs(op, {row_buffers, layout, rules, ids, empty, miss_offsets, empty})) {}

 private:
  static const InitialInputs& checked_inputs(const char* op, const InitialInputs& in) {
    in.check(op);
    return in;
  }
};

// The arguments of hash_insert_batch_ or tier_insert_batch_, checked: those of BagsOfKeys and
// BatchRowBuffers, and
//   batch_scores    int64 [T] or null, see HashScoring
// Features of one table have the same row_base.
struct HashBatchCall : BagsOfKeys, BatchRowBuffers {
  HashScoring scoring;
  bool must_compete;  // see parse_must_compete

  HashBatchCall(const char* op, const std::vector<Tensor>& tensors,
                std::vector<Tensor>& row_buffers, const Tensor& features_, const Tensor& ids,
                const Tensor& offsets_, const Tensor& tables,
                const std::optional<Tensor>& batch_scores, int64_t order, int64_t insert_policy,
                const Tensor& layout, const Tensor& rules)
      : BagsOfKeys(op, tensors, features_, ids, offsets_, tables),
        BatchRowBuffers(op, row_buffers, layout, rules, ids, index.num_tables),
        scoring(op, index, order, batch_scores, ids),
        must_compete(parse_must_compete(op, insert_policy)) {}
};

// The segments of a batch, sorted by table; those of a table are in ascending order.
struct TableSegments {
  std::vector<int64_t> sorted_segments;   // [num_segments]
  std::vector<int64_t> table_begins;      // [T + 1]: table t has sorted_segments[i] for i in
                                          // [table_begins[t], table_begins[t + 1])
  std::vector<int64_t> positions_before;  // [T + 1]: the number of positions of the tables before
                                          // each table, then of all tables

  TableSegments(const HashBatch& batch, int64_t num_tables)
      : sorted_segments(batch.num_segments),
        table_begins(num_tables + 1, 0),
        positions_before(num_tables + 1, 0) {
    for (int64_t f = 0; f < batch.num_segments; ++f) {
      ++table_begins[batch.tables[f] + 1];
      positions_before[batch.tables[f] + 1] += batch.starts[f + 1] - batch.starts[f];
    }
    std::partial_sum(table_begins.begin(), table_begins.end(), table_begins.begin());
    std::partial_sum(positions_before.begin(), positions_before.end(), positions_before.begin());
    std::vector<int64_t> next_indices(table_begins.begin(), table_begins.end() - 1);
    for (int64_t f = 0; f < batch.num_segments; ++f) {
      sorted_segments[next_indices[batch.tables[f]]++] = f;
    }
  }

  // Return whether each table can be one task of a thread. Then no table has more than
  // kMaxImbalance times the average number of positions per thread, so that no thread works much
  // longer than the others.
  bool is_balanced() const {
    int64_t max_positions = 0;
    for (size_t t = 0; t + 1 < positions_before.size(); ++t) {
      max_positions = std::max(max_positions, positions_before[t + 1] - positions_before[t]);
    }
    const int64_t max_threads = positions_before.back() / kPositionGrain + 1;
    return max_positions * std::min<int64_t>(num_threads(), max_threads) <=
           kMaxImbalance * positions_before.back();
  }

  // Call `body(t)` for every table, in parallel.
  template <class Body>
  void for_each_table(const Body& body) const {
    const auto cost = [&](int64_t t) { return positions_before[t] + t; };
    parallel_balanced(static_cast<int64_t>(positions_before.size()) - 1, kPositionGrain, cost,
                      [&](int64_t begin, int64_t end) {
                        for (int64_t t = begin; t < end; ++t) body(t);
                      });
  }
};

// The distinct keys of a batch, table by table. The keys of a table are numbered from 0, in the
// order of their first positions. The key of table t with number k has the index first_keys[t] + k
// in arrays by key.
struct DistinctKeys {
  Scratch<int64_t> keys, uses;      // by key: the key, and the number of its positions
  Scratch<int32_t> key_numbers;     // [n], by position: the number of its key
  std::vector<int64_t> first_keys;  // [T + 1]: table t has the indices first_keys[t] to
                                    // first_keys[t + 1] - 1

  DistinctKeys(const HashBatch& batch, const TableSegments& table_segments, const HashIndex& index)
      : keys(new_scratch<int64_t>(batch.n)),
        uses(new_scratch<int64_t>(batch.n)),
        key_numbers(new_scratch<int32_t>(batch.n)),
        first_keys(index.num_tables + 1, 0) {
    table_segments.for_each_table([&](int64_t t) {
      first_keys[t + 1] = number_keys(batch, table_segments, index.table(t), t);
    });
    for (int64_t t = 0; t < index.num_tables; ++t) {  // close the gaps between tables
      const int64_t count = first_keys[t + 1], source = table_segments.positions_before[t];
      std::memmove(keys.get() + first_keys[t], keys.get() + source, count * sizeof(int64_t));
      std::memmove(uses.get() + first_keys[t], uses.get() + source, count * sizeof(int64_t));
      first_keys[t + 1] += first_keys[t];
    }
  }

  int64_t num_keys() const { return first_keys.back(); }

  // Write the value of the key of each position to `out` [n]; `by_key` has one value per key.
  template <class T>
  void write_by_position(const HashBatch& batch, const T* by_key, T* out) const {
    parallel_segments(batch, [&](int64_t f, int64_t begin, int64_t end) {
      const T* table_values = by_key + first_keys[batch.tables[f]];
      for (int64_t i = begin; i < end; ++i) out[i] = table_values[key_numbers[i]];
    });
  }

 private:
  // Number the keys of table t: write `key_numbers`, and `keys` and `uses` from index
  // positions_before[t] on. Return the number of keys. A cell of the scratch table has the number
  // of a key, or -1. Cells are prefetched, because the cells of a large batch do not fit into the
  // cache of a core.
  //
  // No branch depends on whether a key is new, because that is unpredictable. Instead, every key is
  // written after the last known key. If it is not new, the next key overwrites it.
  int64_t number_keys(const HashBatch& batch, const TableSegments& table_segments,
                      const HashTable& table, int64_t t) {
    const int64_t num_positions =
        table_segments.positions_before[t + 1] - table_segments.positions_before[t];
    const auto num_cells =
        static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(2 * num_positions + 1)));
    const uint64_t mask = static_cast<uint64_t>(num_cells) - 1;
    const Scratch<int32_t> cells = new_scratch<int32_t>(num_cells);
    std::memset(cells.get(), 0xff, num_cells * sizeof(int32_t));
    int64_t* known_keys = keys.get() + table_segments.positions_before[t];
    int64_t* known_uses = uses.get() + table_segments.positions_before[t];
    int32_t num_known = 0;
    for (int64_t s = table_segments.table_begins[t]; s < table_segments.table_begins[t + 1]; ++s) {
      const int64_t f = table_segments.sorted_segments[s];
      for (int64_t i = batch.starts[f]; i < batch.starts[f + 1]; ++i) {
        const int64_t key = batch.ids[i];
        const int64_t key_ahead = batch.ids[std::min(i + kKeysAhead, batch.starts[f + 1] - 1)];
        __builtin_prefetch(cells.get() + (table.hash(key_ahead) >> kCellShift & mask));
        known_keys[num_known] = key;
        uint64_t cell = table.hash(key) >> kCellShift & mask;
        int32_t number = number_or(cells[cell], num_known);
        while (known_keys[number] != key) {  // the cell of another key
          cell = (cell + 1) & mask;
          number = number_or(cells[cell], num_known);
        }
        cells[cell] = key_numbers[i] = number;
        const int64_t is_new = number == num_known;
        known_uses[number] = (known_uses[number] & (is_new - 1)) + 1;
        num_known += static_cast<int32_t>(is_new);
      }
    }
    return num_known;
  }

  // Return `number`, or `default_number` if `number` is -1. The compiler would turn `?:` into a
  // branch.
  static int32_t number_or(int32_t number, int32_t default_number) {
    const int32_t is_negative = number >> 31;
    return (number & ~is_negative) | (default_number & is_negative);
  }

  // Cells skip the lowest bits of the hash, because the keys of a bucket have these in common.
  static constexpr int kCellShift = 16;
  static constexpr int64_t kKeysAhead = 16;  // keys between the prefetch of a cell and its use
};

// Return whether all distinct keys of the batch could be inserted without growing a table.
inline bool fits_without_growth(const HashIndex& index, const DistinctKeys& distinct) {
  for (int64_t t = 0; t < index.num_tables; ++t) {
    if (must_grow(index, t, distinct.first_keys[t + 1] - distinct.first_keys[t])) return false;
  }
  return true;
}

// Call `body(t, begin, end)` for ranges of the distinct keys that belong to one table, in parallel.
template <class Body>
void parallel_keys(const DistinctKeys& distinct, const Body& body) {
  const auto num_tables = static_cast<int64_t>(distinct.first_keys.size()) - 1;
  std::vector<int64_t> tables(num_tables);
  std::iota(tables.begin(), tables.end(), int64_t{0});
  parallel_segments(
      HashBatch(distinct.keys.get(), distinct.first_keys.data(), tables.data(), num_tables), body);
}

// Begin the batch: advance the clock, find the distinct keys, update the entries of hits, and count
// lookups and hits in the index. Write the slot of each distinct key to `slots` [num_keys()],
// kNoSlot for a missing key.
inline void touch_keys(const HashIndex& index, const HashScoring& scoring,
                       const TableSegments& table_segments, const DistinctKeys& distinct,
                       int64_t* slots) {
  const int64_t stamp = ++*index.clock;
  parallel_keys(distinct, [&](int64_t t, int64_t begin, int64_t end) {
    const HashTouch touch{scoring.order, stamp, scoring.score_of(t), distinct.uses.get() + begin,
                          index.queues_of(t)};
    hash_find_kernels().find(index.table(t), distinct.keys.get() + begin, end - begin, &touch,
                             slots + begin);
  });
  for (int64_t t = 0; t < index.num_tables; ++t) {
    int64_t num_hits = 0;  // positions
    for (int64_t k = distinct.first_keys[t]; k < distinct.first_keys[t + 1]; ++k) {
      num_hits += slots[k] == kNoSlot ? 0 : distinct.uses[k];
    }
    index.counter(t, HashCounter::kLookups) +=
        table_segments.positions_before[t + 1] - table_segments.positions_before[t];
    index.counter(t, HashCounter::kHits) += num_hits;
  }
}

// The missing keys of a batch, and their insertion. All arrays are by miss.
struct MissingKeys {
  std::vector<int64_t> key_indices;  // index of the key in DistinctKeys
  // Number of positions of the key. StoredMisses adds the uses that a store has recorded.
  std::vector<int64_t> uses;
  // The results of `insert`: the slot of the key, kNoSlot if it was refused, and its InsertStatus.
  // TableMoves::swap changes both.
  std::vector<int64_t> slots;
  std::vector<uint8_t> status;

  // Collect the keys without a slot in `key_slots`, the result of touch_keys. Write offsets[1] to
  // offsets[T], see Misses; offsets[0] must be 0.
  MissingKeys(int64_t num_tables, const DistinctKeys& distinct, const int64_t* key_slots,
              int64_t* offsets) {
    for (int64_t t = 0; t < num_tables; ++t) {
      for (int64_t k = distinct.first_keys[t]; k < distinct.first_keys[t + 1]; ++k) {
        if (key_slots[k] >= 0) continue;
        key_indices.push_back(k);
        uses.push_back(distinct.uses[k]);
      }
      offsets[t + 1] = static_cast<int64_t>(key_indices.size());
    }
    slots.resize(key_indices.size());
    status.resize(key_indices.size());
  }

  // Insert the missing keys that are admitted, by miss; null admits all. Write the evicted entries
  // to `evicted`, three words per miss as in HashInsertion, unless it is null.
  void insert(const HashBatchCall& call, const DistinctKeys& distinct, const int64_t* offsets,
              const bool* admitted, int64_t* evicted) {
    insert_misses(call.index, call.scoring, call.must_compete,
                  Misses(call.index.num_tables, offsets, admitted),
                  {distinct.keys.get(), key_indices.data(), uses.data(), slots.data(),
                   status.data(), evicted});
  }

  // Write the slots of the missing keys to `key_slots`, which has the slots of all distinct keys.
  void write_slots(int64_t* key_slots) const {
    for (size_t miss = 0; miss < key_indices.size(); ++miss)
      key_slots[key_indices[miss]] = slots[miss];
  }
};

// The slots of positions, and the groups of positions by key. The groups have the form of the
// results of tbe_group, but are in the order of DistinctKeys. The elements of `rows` and `segments`
// after the last group are unspecified. Positions of keys without a slot are in no group; they come
// last in `lookups` and `bags`.
struct BatchGroups {
  Tensor slots;  // int64 [n], by position: the slot of the key
  Tensor rows, segments, lookups, bags, count;
  // By distinct key, for `write`: the index in `lookups` of the key's next position.
  Scratch<int32_t> next_lookup;

  BatchGroups(const Tensor& ids, int64_t n, int64_t num_keys)
      : slots(allocate_output(ids, {n}, ScalarType::Long)),
        rows(allocate_output(ids, {n}, ScalarType::Long)),
        segments(allocate_output(ids, {n + 1}, ScalarType::Int)),
        lookups(allocate_output(ids, {n}, ScalarType::Int)),
        bags(allocate_output(ids, {n}, ScalarType::Int)),
        count(allocate(ids, {1}, ScalarType::Int)),
        next_lookup(new_scratch<int32_t>(num_keys)) {}

  // Write all results. `key_slots` has the slot of each distinct key, kNoSlot for none.
  void write(const HashBatchCall& call, const TableSegments& table_segments,
             const DistinctKeys& distinct, const int64_t* key_slots) const {
    const int64_t num_tables = call.index.num_tables;
    // By table: the index in `lookups` of its next position without a group.
    std::vector<int32_t> next_ungrouped(num_tables + 1, 0);
    std::vector<int64_t> first_rows(num_tables, 0);
    for (int64_t f = 0; f < call.batch.num_segments; ++f) {
      first_rows[call.batch.tables[f]] = call.features[f].row_base;
    }
    auto* row = rows.mutable_data_ptr<int64_t>();
    auto* segment = segments.mutable_data_ptr<int32_t>();
    int32_t num_groups = 0, num_grouped = 0;
    segment[0] = 0;
    for (int64_t t = 0; t < num_tables; ++t) {
      for (int64_t k = distinct.first_keys[t]; k < distinct.first_keys[t + 1]; ++k) {
        const auto num_positions = static_cast<int32_t>(distinct.uses[k]);
        if (key_slots[k] < 0) {
          next_ungrouped[t + 1] += num_positions;
          continue;
        }
        next_lookup[k] = num_grouped;
        row[num_groups] = first_rows[t] + key_slots[k];
        num_grouped += num_positions;
        segment[++num_groups] = num_grouped;
      }
    }
    *count.mutable_data_ptr<int32_t>() = num_groups;
    next_ungrouped[0] = num_grouped;
    std::partial_sum(next_ungrouped.begin(), next_ungrouped.end(), next_ungrouped.begin());
    table_segments.for_each_table([&](int64_t t) {
      scatter(call, table_segments, distinct, key_slots, t, next_lookup.get(), &next_ungrouped[t]);
    });
  }

 private:
  // Write the results by position, for table t. `next_ungrouped` points to the entry of table t.
  void scatter(const HashBatchCall& call, const TableSegments& table_segments,
               const DistinctKeys& distinct, const int64_t* key_slots, int64_t t,
               int32_t* next_lookup, int32_t* next_ungrouped) const {
    const auto* offset = call.offsets.const_data_ptr<int32_t>();
    auto* slot = slots.mutable_data_ptr<int64_t>();
    auto *lookup = lookups.mutable_data_ptr<int32_t>(), *bag_of = bags.mutable_data_ptr<int32_t>();
    const int64_t first_key = distinct.first_keys[t];
    for (int64_t s = table_segments.table_begins[t]; s < table_segments.table_begins[t + 1]; ++s) {
      const int64_t f = table_segments.sorted_segments[s];
      for (int64_t bag = call.bags.first_bags[f]; bag < call.bags.first_bags[f + 1]; ++bag) {
        for (int32_t i = offset[bag]; i < offset[bag + 1]; ++i) {
          const int64_t key_index = first_key + distinct.key_numbers[i];
          slot[i] = key_slots[key_index];
          const int32_t j = slot[i] < 0 ? (*next_ungrouped)++ : next_lookup[key_index]++;
          lookup[j] = i;
          bag_of[j] = static_cast<int32_t>(bag);
        }
      }
    }
  }
};

// The status of the key of each position. It must be constructed before the insertion, because a
// lack of memory afterwards would lose the results.
struct BatchStatus {
  Tensor by_position;       // uint8 [n], the result of the op
  Scratch<uint8_t> by_key;  // by distinct key, for `write`

  BatchStatus(const Tensor& ids, int64_t n, int64_t num_keys)
      : by_position(allocate(ids, {n}, ScalarType::Byte)), by_key(new_scratch<uint8_t>(num_keys)) {}

  // Write both arrays: the status of `missing` for missing keys, kHit for the others.
  void write(const HashBatch& batch, const DistinctKeys& distinct,
             const MissingKeys& missing) const {
    std::fill_n(by_key.get(), distinct.num_keys(), static_cast<uint8_t>(InsertStatus::kHit));
    for (size_t miss = 0; miss < missing.key_indices.size(); ++miss) {
      by_key[missing.key_indices[miss]] = missing.status[miss];
    }
    distinct.write_by_position<uint8_t>(batch, by_key.get(),
                                        static_cast<uint8_t*>(by_position.mutable_data_ptr()));
  }
};

}  // namespace emb
