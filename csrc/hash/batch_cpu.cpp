// `hash_insert_batch_` and `tier_insert_batch_` on the CPU: they insert a training batch and group
// its lookups in one call, if every missing key is admitted. Ids repeat within a batch, so every
// step except the first and the last works on distinct keys:
//   (1) Number the keys of each table in the order of their first positions (number_keys).
//   (2) Find the keys, and touch the hits.
//   (3) Insert the missing keys, and write the initial values of their rows.
//   (4) Group the positions by key, for the backward pass. Step (1) has counted the positions of
//       each key, so this step needs no sort.
// tier_insert_batch_ is for tables with backing stores in host memory. After the insertion it
// copies the rows of evicted keys out of their slots, and rows of a store into the slots of their
// keys. It can also change the store: remove the keys that have a slot now, and put the evicted
// rows into it.
//
// hash_insert_batch_ changes the index and the rows exactly as hash_touch_, hash_insert_ and
// hash_initial_rows_ would. The ops *decline* some batches, see hash_insert_batch_: then they
// change nothing and return an empty list.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "core/feature_bags.h"
#include "core/isa.h"
#include "core/output_memory.h"
#include "core/parallel.h"
#include "core/scratch.h"
#include "hash/entries.h"
#include "hash/host_store.h"

namespace emb {
namespace {

constexpr int64_t kPositionGrain = 4096;  // grain of parallel_balanced for positions
// The maximum number of positions of a table, as a multiple of the average number per thread.
constexpr int64_t kMaxImbalance = 4;

// Copy `offsets` [num_bags + 1] to `int32_offsets`. Return whether the offsets ascend from 0 to n.
// If they do not, the copy is unspecified.
template <class I>
bool copy_offsets(const I* offsets, int64_t num_bags, int64_t n, int32_t* int32_offsets) {
  int64_t sign_bits = 0;  // negative if an offset is negative or less than the previous one
  for (int64_t i = 0; i < num_bags; ++i) {
    sign_bits |=
        static_cast<int64_t>(offsets[i]) | (static_cast<int64_t>(offsets[i + 1]) - offsets[i]);
    int32_offsets[i] = static_cast<int32_t>(offsets[i]);
  }
  int32_offsets[num_bags] = static_cast<int32_t>(offsets[num_bags]);
  return sign_bits >= 0 && offsets[0] == 0 && static_cast<int64_t>(offsets[num_bags]) == n;
}

// The arguments of hash_insert_batch_ or tier_insert_batch_, checked. The struct points into the
// tensors of the caller.
//   tensors         the index, see HashIndex
//   row_buffers, layout, rules  as in hash_initial_rows_
//   features        int64 [F, 8], see Feature; those of one table have the same row_base
//   ids             int64 [n], the key of each lookup
//   offsets         int32 or int64 [F * B + 1], the bags of the lookups; invalid contents do not
//                   raise, see has_valid_offsets
//   tables          int64 [F], the table of each feature
//   batch_scores    int64 [T] or null, see HashScoring
struct HashBatchCall {
  HashIndex index;
  HashScoring scoring;
  bool must_compete;  // see parse_must_compete
  FeatureBags bags;
  const Feature* features;  // [F]
  int64_t n, num_bags;
  Tensor offsets;          // int32 [num_bags + 1], a copy of the offsets of the call
  Tensor starts;           // int64 [F + 1], the first position of each feature, then n
  Tensor miss_offsets;     // int64 [T + 1], see Misses; 0 until MissingKeys writes it
  Tensor empty;            // int64 [0]
  HashBatch batch;         // its segments are the features
  InitialRows rows;        // the rows of all tables
  bool has_valid_offsets;  // whether the batch has bags, and offsets ascend from 0 to n. If not,
                           // `starts` is not written and `batch` is not checked

  HashBatchCall(const char* op, const std::vector<Tensor>& tensors,
                std::vector<Tensor>& row_buffers, const Tensor& features_, const Tensor& ids,
                const Tensor& offsets_, const Tensor& tables,
                const std::optional<Tensor>& batch_scores, int64_t order, int64_t insert_policy,
                const Tensor& layout, const Tensor& rules)
      : index(op, tensors),
        scoring(op, index, order, batch_scores, ids),
        must_compete(parse_must_compete(op, insert_policy)),
        bags(op, checked_features(op, features_, ids, offsets_), offsets_, std::nullopt,
             Pooling::kNone, kUnlimited),
        features(feature_array(features_)),
        n(ids.numel()),
        num_bags(bags.num_bags()),
        offsets(allocate(ids, {num_bags + 1}, ScalarType::Int)),
        starts(allocate(ids, {bags.num_features() + 1})),
        miss_offsets(allocate_zeros(ids, {index.num_tables + 1}, ScalarType::Long)),
        empty(allocate(ids, {0})),
        batch(op, ids, starts, tables),
        rows(op,
             checked_inputs(op, {row_buffers, layout, rules, ids, empty, miss_offsets, empty})) {
    check_same_device(op, "ids", ids, tensors[0]);
    index.check_tables(op);
    const Tensor contiguous = as_contiguous(offsets_);
    const IndexArray source = index_array(contiguous);
    int32_t* offsets_copy = offsets.mutable_data_ptr<int32_t>();
    has_valid_offsets =
        num_bags > 0 &&
        (source.is_int64
             ? copy_offsets(static_cast<const int64_t*>(source.data), num_bags, n, offsets_copy)
             : copy_offsets(static_cast<const int32_t*>(source.data), num_bags, n, offsets_copy));
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
  static const InitialInputs& checked_inputs(const char* op, const InitialInputs& in) {
    in.check(op);
    return in;
  }
};

// The segments of a batch, sorted by table; those of a table are in ascending order.
struct TableSegments {
  std::vector<int64_t> sorted;            // [num_segments], the sorted segments
  std::vector<int64_t> table_begins;      // [T + 1]: table t has sorted[table_begins[t]] to
                                          // sorted[table_begins[t + 1] - 1]
  std::vector<int64_t> positions_before;  // [T + 1]: the number of positions of the tables before
                                          // each table, then of all tables

  TableSegments(const HashBatch& batch, int64_t num_tables)
      : sorted(batch.num_segments),
        table_begins(num_tables + 1, 0),
        positions_before(num_tables + 1, 0) {
    for (int64_t f = 0; f < batch.num_segments; ++f) {
      ++table_begins[batch.tables[f] + 1];
      positions_before[batch.tables[f] + 1] += batch.starts[f + 1] - batch.starts[f];
    }
    std::partial_sum(table_begins.begin(), table_begins.end(), table_begins.begin());
    std::partial_sum(positions_before.begin(), positions_before.end(), positions_before.begin());
    std::vector<int64_t> next_indices(table_begins.begin(), table_begins.end() - 1);
    for (int64_t f = 0; f < batch.num_segments; ++f) sorted[next_indices[batch.tables[f]]++] = f;
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
      const int64_t count = first_keys[t + 1], from = table_segments.positions_before[t];
      std::memmove(keys.get() + first_keys[t], keys.get() + from, count * sizeof(int64_t));
      std::memmove(uses.get() + first_keys[t], uses.get() + from, count * sizeof(int64_t));
      first_keys[t + 1] += first_keys[t];
    }
  }

  int64_t num_keys() const { return first_keys.back(); }

 private:
  // Number the keys of table t, and return how many there are. `keys` and `uses` of the table begin
  // at positions_before[t]. A cell of the scratch table has the number of a key, or -1. Cells are
  // prefetched, because the cells of a large batch do not fit into the cache of a core.
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
      const int64_t f = table_segments.sorted[s];
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
bool fits_without_growth(const HashIndex& index, const DistinctKeys& distinct) {
  for (int64_t t = 0; t < index.num_tables; ++t) {
    const int64_t keys = index.field(t, HashTableColumn::kSize) + distinct.first_keys[t + 1] -
                         distinct.first_keys[t];
    const int64_t buckets = index.field(t, HashTableColumn::kBuckets);
    if (wanted_buckets(keys, buckets, index.field(t, HashTableColumn::kMaxBuckets),
                       index.field(t, HashTableColumn::kMaxLoad)) != buckets) {
      return false;
    }
  }
  return true;
}

// Begin the batch: advance the clock, find the distinct keys, and update the entries of hits. Write
// the slot of each distinct key to `slots` [num_keys()], kNoSlot for a missing key.
void touch_keys(const HashBatchCall& call, const DistinctKeys& distinct, int64_t* slots) {
  const HashIndex& index = call.index;
  const int64_t stamp = ++*index.clock;
  std::vector<int64_t> tables(index.num_tables);
  std::iota(tables.begin(), tables.end(), int64_t{0});
  const HashBatch keys(distinct.keys.get(), distinct.first_keys.data(), tables.data(),
                       index.num_tables);
  const HashFindKernels& kernels = hash_find_kernels();
  parallel_segments(keys, [&](int64_t t, int64_t begin, int64_t end) {
    const HashTouch touch{call.scoring.order, stamp, call.scoring.score_of(t),
                          distinct.uses.get() + begin, index.queues_of(t)};
    kernels.find(index.table(t), keys.ids + begin, end - begin, &touch, slots + begin);
  });
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

  // Collect the keys without a slot in `key_slots`, and count lookups and hits in the index. Write
  // `offsets` [1] to [T], see Misses; offsets[0] must be 0.
  MissingKeys(const HashBatchCall& call, const TableSegments& table_segments,
              const DistinctKeys& distinct, const int64_t* key_slots, int64_t* offsets) {
    for (int64_t t = 0; t < call.index.num_tables; ++t) {
      int64_t missing_positions = 0;
      for (int64_t k = distinct.first_keys[t]; k < distinct.first_keys[t + 1]; ++k) {
        if (key_slots[k] >= 0) continue;
        key_indices.push_back(k);
        uses.push_back(distinct.uses[k]);
        missing_positions += distinct.uses[k];
      }
      offsets[t + 1] = static_cast<int64_t>(key_indices.size());
      const int64_t num_positions =
          table_segments.positions_before[t + 1] - table_segments.positions_before[t];
      call.index.counter(t, HashCounter::kLookups) += num_positions;
      call.index.counter(t, HashCounter::kHits) += num_positions - missing_positions;
    }
    slots.resize(key_indices.size());
    status.resize(key_indices.size());
  }

  // Insert the missing keys. Write the evicted entries, three words per miss, unless `evicted` is
  // null.
  void insert(const HashBatchCall& call, const DistinctKeys& distinct, const int64_t* offsets,
              int64_t* evicted) {
    insert_misses(call.index, call.scoring, call.must_compete,
                  Misses(call.index.num_tables, offsets),
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
  // Write the results of the positions of table t. `next_ungrouped` points to the entry of table t.
  void scatter(const HashBatchCall& call, const TableSegments& table_segments,
               const DistinctKeys& distinct, const int64_t* key_slots, int64_t t,
               int32_t* next_lookup, int32_t* next_ungrouped) const {
    const auto* offset = call.offsets.const_data_ptr<int32_t>();
    auto* slot = slots.mutable_data_ptr<int64_t>();
    auto *lookup = lookups.mutable_data_ptr<int32_t>(), *bag_of = bags.mutable_data_ptr<int32_t>();
    const int64_t first_key = distinct.first_keys[t];
    for (int64_t s = table_segments.table_begins[t]; s < table_segments.table_begins[t + 1]; ++s) {
      const int64_t f = table_segments.sorted[s];
      for (int64_t bag = call.bags.first_bags[f]; bag < call.bags.first_bags[f + 1]; ++bag) {
        for (int32_t i = offset[bag]; i < offset[bag + 1]; ++i) {
          const int64_t key = first_key + distinct.key_numbers[i];
          slot[i] = key_slots[key];
          const int32_t j = key_slots[key] < 0 ? (*next_ungrouped)++ : next_lookup[key]++;
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
  void write(const HashBatchCall& call, const TableSegments& table_segments,
             const DistinctKeys& distinct, const MissingKeys& missing) const {
    std::fill_n(by_key.get(), distinct.num_keys(), static_cast<uint8_t>(InsertStatus::kHit));
    for (size_t miss = 0; miss < missing.key_indices.size(); ++miss) {
      by_key[missing.key_indices[miss]] = missing.status[miss];
    }
    auto* out = static_cast<uint8_t*>(by_position.mutable_data_ptr());
    table_segments.for_each_table([&](int64_t t) {
      const uint8_t* table_statuses = by_key.get() + distinct.first_keys[t];
      for (int64_t s = table_segments.table_begins[t]; s < table_segments.table_begins[t + 1];
           ++s) {
        const int64_t f = table_segments.sorted[s];
        for (int64_t i = call.batch.starts[f]; i < call.batch.starts[f + 1]; ++i) {
          out[i] = table_statuses[distinct.key_numbers[i]];
        }
      }
    });
  }
};

// Insert a batch: change the index in `tensors` and the rows in `row_buffers`. `seed` selects the
// random numbers of initial rows, as in hash_initial_rows_. Return [offsets, starts, slots, rows,
// segments, lookups, bags, count]; the first two are members of HashBatchCall, the others of
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

// The stores in host memory of the tables of a batch, checked. The arguments are
//   indices         six tensors per table: the index of its store, an index of one table
//   records         per table: uint8 [S or more, record_bytes], by slot of its store, which has S
//                   slots; a record has stamp, score and packed row
//   orders          how each store evicts: the number of a HashOrder
//   first_overflow  the first overflow row of each table
struct BatchStores {
  struct Store {
    HostStore host;
    PackedRows rows;         // the rows of the table, by slot
    int64_t first_overflow;  // the rows from this number on are overflow rows
  };
  std::vector<Store> stores;

  BatchStores(const char* op, const HashBatchCall& call, const std::vector<Tensor>& indices,
              const std::vector<Tensor>& records, const std::vector<int64_t>& orders,
              const std::vector<int64_t>& first_overflow) {
    constexpr int64_t kIndexTensors = 6;
    const int64_t num_tables = call.index.num_tables;
    STD_TORCH_CHECK(static_cast<int64_t>(indices.size()) == kIndexTensors * num_tables &&
                        static_cast<int64_t>(records.size()) == num_tables &&
                        static_cast<int64_t>(orders.size()) == num_tables &&
                        static_cast<int64_t>(first_overflow.size()) == num_tables,
                    op, ": each of ", num_tables, " tables needs the ", kIndexTensors,
                    " tensors of an index, records, an order and first_overflow, got ",
                    indices.size(), ", ", records.size(), ", ", orders.size(), " and ",
                    first_overflow.size());
    for (int64_t t = 0; t < num_tables; ++t) {
      const auto first = indices.begin() + kIndexTensors * t;
      PackedRows rows(call.rows.rows_of(t));
      const int64_t row_bytes = rows.row_bytes;
      stores.push_back(
          {HostStore(op, {first, first + kIndexTensors}, records[t], row_bytes, orders[t]),
           std::move(rows), first_overflow[t]});
      const Store& store = stores.back();
      const int64_t slots = call.index.field(t, HashTableColumn::kMaxBuckets) * kBucketSlots;
      STD_TORCH_CHECK(first_overflow[t] >= slots && first_overflow[t] <= store.rows.num_slots, op,
                      ": first_overflow must be in [", slots, ", ", store.rows.num_slots,
                      "], from the slots of the table to its rows, got ", first_overflow[t]);
    }
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
};

// The records of the missing keys of a batch.
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
  kNumTierCounts
};

// The rows and keys that a batch moves between a table and its store. It must be constructed before
// the batch is inserted, because a lack of memory after the insertion would lose evicted rows.
struct TableMoves {
  // Results, see SwappedMisses of emblib/ops/tiers.py. If the op changes the stores, the first
  // three are empty, otherwise `dropped` is. The others have room for all misses of the table.
  Tensor demoted, demoted_rows, promoted, refused, dropped;
  // The evicted entries, [misses, 3], and their rows, [misses, row_bytes]. They are in `change_` if
  // the op changes the stores, otherwise in `demoted` and `demoted_rows`.
  int64_t* entries;
  char* rows;
  std::vector<int64_t> demoted_numbers;  // by miss of the table: its evicted row, -1 for none
  int64_t counts[kNumTierCounts] = {};
  int64_t num_dropped = 0;

  TableMoves(const Tensor& like, int64_t misses, const HostStore& store, bool changes_store)
      : demoted(allocate_words(like, {changes_store ? 0 : misses, 3})),
        demoted_rows(
            allocate_output(like, {changes_store ? 0 : misses, store.row_bytes}, ScalarType::Byte)),
        promoted(allocate_words(like, {changes_store ? 0 : misses})),
        refused(allocate_words(like, {misses, 2})),
        dropped(allocate_words(like, {changes_store ? misses : 0})),
        entries(demoted.mutable_data_ptr<int64_t>()),
        rows(static_cast<char*>(demoted_rows.mutable_data_ptr())),
        demoted_numbers(misses, -1) {
    if (!changes_store) return;
    change_.emplace(store, misses);
    entries = change_->entries.get();
    rows = change_->rows.get();
  }

  // Copy the rows of evicted keys out of their slots, and rows of the store to the slots of their
  // keys. `first_miss` is the first miss of the table, and `evicted` has the evicted entries of all
  // misses. Refused misses get overflow rows, which this writes to missing->slots. The status of a
  // key of the store becomes kStored, that of any other refused miss kNew.
  void swap(const BatchStores::Store& store, const DistinctKeys& distinct,
            const StoredMisses& stored, int64_t first_miss, const int64_t* evicted,
            MissingKeys* missing) {
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
        refused_words[2 * number] = key;
        refused_words[2 * number + 1] = missing->uses[miss];
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
    change_->put.for_dropped(
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
    Scratch<int64_t> entries;         // [misses, 3], see TableMoves
    Scratch<char> rows;               // [misses, row_bytes]
    Scratch<int64_t> promoted_slots;  // [misses], slots of the promoted keys in the store

    StoreChange(const HostStore& store, int64_t misses)
        : put(store, misses),
          entries(new_scratch<int64_t>(3 * misses)),
          rows(new_scratch<char>(misses * store.row_bytes)),
          promoted_slots(new_scratch<int64_t>(misses)) {}
  };
  std::optional<StoreChange> change_;  // has a value if the op changes the stores
};

// Insert a batch into tables with stores in host memory. If `changes_stores`, keys of a store that
// got a slot are removed from it, and evicted rows are put into it. Otherwise the stores are only
// read, and the results tell the caller what to move. The op declines a batch that
// hash_insert_batch_ would decline, and a batch with more distinct keys of a table than the table
// has overflow rows. Otherwise it returns the first eight results of hash_insert_batch_ and, if
// keys were missing, these:
//   - the status of the key of each position, uint8 [n], as TableMoves::swap leaves it
//   - the counts of each table, int64 [T, kNumTierCounts]
//   - the tensors of TableMoves, kNumMoveResults per table
std::vector<Tensor> tier_insert_batch_(
    std::vector<Tensor> tensors, std::vector<Tensor> row_buffers, const Tensor& features,
    const Tensor& ids, const Tensor& offsets, const Tensor& tables,
    std::optional<Tensor> batch_scores, int64_t order, int64_t insert_policy, const Tensor& layout,
    const Tensor& rules, int64_t seed, std::vector<Tensor> store_indices,
    std::vector<Tensor> records, std::vector<int64_t> store_orders,
    std::vector<int64_t> first_overflow, bool changes_stores) {
  const char* op = "tier_insert_batch_";
  const HashBatchCall call(op, tensors, row_buffers, features, ids, offsets, tables, batch_scores,
                           order, insert_policy, layout, rules);
  const BatchStores stores(op, call, store_indices, records, store_orders, first_overflow);
  if (!call.has_valid_offsets) return {};
  const TableSegments table_segments(call.batch, call.index.num_tables);
  if (!table_segments.is_balanced()) return {};
  const DistinctKeys distinct(call.batch, table_segments, call.index);
  if (!fits_without_growth(call.index, distinct) || !stores.have_overflow_rows_for(distinct))
    return {};
  const BatchGroups groups(ids, call.n, distinct.num_keys());
  const Scratch<int64_t> key_slots = new_scratch<int64_t>(distinct.num_keys());
  touch_keys(call, distinct, key_slots.get());
  int64_t* miss_offsets = call.miss_offsets.mutable_data_ptr<int64_t>();
  MissingKeys missing(call, table_segments, distinct, key_slots.get(), miss_offsets);
  std::vector<Tensor> miss_results;
  if (!missing.key_indices.empty()) {
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
    missing.insert(call, distinct, miss_offsets, evicted.get());
    for (int64_t t = 0; t < num_tables; ++t) {
      moves[t].swap(stores.stores[t], distinct, stored, miss_offsets[t], evicted.get(), &missing);
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
    status.write(call, table_segments, distinct, missing);
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

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, hash_insert_batch_);
  EMB_IMPL(m, emb, tier_insert_batch_);
}
