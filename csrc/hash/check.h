// The arguments of the hash ops, checked and converted for the kernels. Most ops have a struct,
// which both their CPU and their CUDA entry construct. Its constructor checks what the host knows
// about tensors on any device (dtypes, shapes, devices) and allocates the results. `check_contents`
// reads the tensors, so only the CPU entry calls it, before it writes anything. On a GPU contents
// are trusted. Constructors and checks throw an error that states the rule.
//
// The structs point into the tensors of the caller, own no memory but the results, and are used
// within one call. A pointer has the name of the argument of the op, except first_positions
// (`first`) and evicted_words (`evicted`); emblib/ops/hash.py describes the arguments. A
// constructor's parameter ends in `_` if it would otherwise have the name of a member. n is the
// number of positions of the batch, T the number of tables, S the number of slots of all tables.
// Positions and misses are explained in args.h.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/half.h"
#include "hash/args.h"
#include "hash/initial.h"
#include "hash/rows.h"

namespace emb {

// The index: the list of tensors [tags, entries, tables, clock, counters], contiguous and on one
// device. On the CPU `queues` may follow; CUDA does not use them.
struct HashIndex {
  uint8_t* tags;                    // [S]
  int64_t* entries;                 // [S, entry_words], see HashEntry
  int64_t* tables;                  // [T, kHashTableColumns], see HashTableColumn
  int64_t* clock;                   // [1], advanced by every batch
  int64_t* counters;                // [T, kHashCounters], see HashCounter
  EvictionQueue* queues = nullptr;  // [S / kBucketSlots], or null
  int64_t num_slots;                // S
  int64_t entry_words;              // words per entry, 2 or 3
  int64_t num_tables;               // T

  HashIndex(const char* op, const std::vector<Tensor>& index) {
    STD_TORCH_CHECK(index.size() == 5 || index.size() == 6, op,
                    ": index must be [tags, entries, tables, clock, counters], got ", index.size(),
                    " tensors; on the CPU queues may follow");
    STD_TORCH_CHECK(index[0].scalar_type() == ScalarType::Byte && index[0].dim() == 1, op,
                    ": tags must be uint8 [S]");
    for (size_t i = 0; i < index.size(); ++i) {
      STD_TORCH_CHECK(index[i].is_contiguous(), op, ": the tensors of index must be contiguous");
      if (i > 0)
        check_dtype(op, "the tensors of index but tags", index[i], ScalarType::Long, "int64");
      check_same_device(op, "every tensor of index", index[i], index[0]);
    }
    num_slots = index[0].numel();
    STD_TORCH_CHECK(index[1].dim() == 2 && index[1].size(0) == num_slots &&
                        (index[1].size(1) == 2 || index[1].size(1) == 3),
                    op, ": entries must be [S, 2] or, with scores, [S, 3] for S = ", num_slots);
    entry_words = index[1].size(1);
    num_tables = index[2].dim() == 2 ? index[2].size(0) : -1;
    STD_TORCH_CHECK(num_tables >= 0 && index[2].size(1) == kHashTableColumns &&
                        index[3].numel() == 1 && index[4].dim() == 2 &&
                        index[4].size(0) == num_tables && index[4].size(1) == kHashCounters,
                    op, ": tables must be [T, ", kHashTableColumns,
                    "], clock [1] and counters [T, ", kHashCounters, "]");
    tags = static_cast<uint8_t*>(index[0].mutable_data_ptr());
    entries = index[1].mutable_data_ptr<int64_t>();
    tables = index[2].mutable_data_ptr<int64_t>();
    clock = index[3].mutable_data_ptr<int64_t>();
    counters = index[4].mutable_data_ptr<int64_t>();
    if (index.size() == 5) return;
    STD_TORCH_CHECK(index[5].numel() * kBucketSlots == num_slots * kQueueWords, op,
                    ": queues must have ", kQueueWords, " words per ", kBucketSlots, " slots, got ",
                    index[5].numel(), " words for ", num_slots, " slots");
    queues = reinterpret_cast<EvictionQueue*>(index[5].mutable_data_ptr<int64_t>());
  }

  // All functions below except check_table read the tensors, so they are for the CPU only.

  int64_t& field(int64_t table, HashTableColumn column) const {
    return tables[table * kHashTableColumns + static_cast<int>(column)];
  }
  int64_t& counter(int64_t table, HashCounter column) const {
    return counters[table * kHashCounters + static_cast<int>(column)];
  }

  // Return a view of table t in [0, T).
  HashTable table(int64_t t) const {
    const int64_t first_slot = field(t, HashTableColumn::kFirstBucket) * kBucketSlots;
    const int64_t buckets = field(t, HashTableColumn::kBuckets);
    return {tags + first_slot,     entries + first_slot * entry_words,
            entry_words,           buckets,
            address_mask(buckets), static_cast<uint64_t>(field(t, HashTableColumn::kHashKey))};
  }

  // Return the eviction queues of table t by bucket, null if the index has none.
  EvictionQueue* queues_of(int64_t t) const {
    return queues == nullptr ? nullptr : queues + field(t, HashTableColumn::kFirstBucket);
  }

  // Check that there is a table t.
  void check_table(const char* op, int64_t t) const {
    STD_TORCH_CHECK(t >= 0 && t < num_tables, op, ": table must be in [0, ", num_tables, "), got ",
                    t);
  }

  // Check that the buckets of every table lie inside the memory of the index, so that an op cannot
  // access other memory, whatever `tables` contains. Also check that kMaxLoad is in [1, kLoadUnits]
  // and that kSize is at most the slots of the buckets in use. Tables that overlap are not
  // detected.
  void check_tables(const char* op) const {
    for (int64_t t = 0; t < num_tables; ++t) {
      const int64_t first = field(t, HashTableColumn::kFirstBucket),
                    max_buckets = field(t, HashTableColumn::kMaxBuckets);
      const int64_t buckets = field(t, HashTableColumn::kBuckets),
                    load = field(t, HashTableColumn::kMaxLoad);
      const int64_t size = field(t, HashTableColumn::kSize);
      STD_TORCH_CHECK(first >= 0 && buckets >= 1 && buckets <= max_buckets &&
                          max_buckets <= INT32_MAX &&
                          first <= num_slots / kBucketSlots - max_buckets,
                      op, ": table ", t, " lies outside the memory of the index; `tables` must ",
                      "come from the module that owns it");
      STD_TORCH_CHECK(load >= 1 && load <= kLoadUnits, op, ": the maximum load of table ", t,
                      " must be in [1, ", kLoadUnits, "], got ", load);
      STD_TORCH_CHECK(size >= 0 && size <= buckets * kBucketSlots, op, ": table ", t,
                      " must have 0 to ", buckets * kBucketSlots, " keys, got ", size);
    }
  }
};

// Return the order with the number `code`. Throws if there is no such order, or if it needs scores
// but `entry_words` is not 3.
inline HashOrder parse_order(const char* op, int64_t code, int64_t entry_words) {
  const auto order = parse_choice<HashOrder>(op, "order", code, kHashOrders);
  STD_TORCH_CHECK(!has_scores(order) || entry_words == 3, op, ": order ", kHashOrders[code],
                  " needs scores, so entries of 3 words, got ", entry_words);
  return order;
}

// Check the number of keys or positions of a call, which kernels number with 32 bits.
inline void check_num_keys(const char* op, int64_t n) {
  STD_TORCH_CHECK(n <= kMaxLookups, op, ": at most ", kMaxLookups, " keys per call, got ", n,
                  "; split the batch");
}

// A batch of n keys in segments: the ids [starts[f], starts[f + 1]) are keys of table tables[f].
// All tensors are contiguous int64 vectors on one device.
struct HashBatch {
  const int64_t* ids;       // [n], any 64 bits each
  const int64_t* starts;    // [num_segments + 1], from 0 to n, ascending
  const int64_t* tables;    // [num_segments], in [0, T); a table may have several segments
  int64_t n, num_segments;  // numbers of positions and of segments

  HashBatch(const char* op, const Tensor& ids_, const Tensor& starts_, const Tensor& tables_) {
    const auto check = [&](const char* name, const Tensor& tensor) {
      check_dtype(op, name, tensor, ScalarType::Long, "int64");
      STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous(), op, ": ", name,
                      " must be contiguous and have 1 dimension");
      check_same_device(op, name, tensor, ids_);
    };
    check("ids", ids_);
    check("starts", starts_);
    check("tables", tables_);
    n = ids_.numel();
    num_segments = tables_.numel();
    check_num_keys(op, n);
    STD_TORCH_CHECK(starts_.numel() == num_segments + 1, op,
                    ": starts must have one entry more than tables, got ", starts_.numel(), " and ",
                    num_segments);
    ids = ids_.const_data_ptr<int64_t>();
    starts = starts_.const_data_ptr<int64_t>();
    tables = tables_.const_data_ptr<int64_t>();
  }

  // A batch with one segment per table. `tables_` must be [0, 1, ..., num_tables - 1]; nothing is
  // checked.
  HashBatch(const int64_t* ids_, const int64_t* starts_, const int64_t* tables_, int64_t num_tables)
      : ids(ids_),
        starts(starts_),
        tables(tables_),
        n(starts_[num_tables]),
        num_segments(num_tables) {}

  // Check the contents of `starts` and `tables`; on the CPU only.
  void check_segments(const char* op, int64_t num_tables) const {
    STD_TORCH_CHECK(starts[0] == 0 && starts[num_segments] == n, op,
                    ": starts must begin with 0 and end with the number of ids, ", n, ", got ",
                    starts[0], " and ", starts[num_segments]);
    for (int64_t f = 0; f < num_segments; ++f) {
      STD_TORCH_CHECK(starts[f] <= starts[f + 1], op, ": starts must not decrease, got ",
                      starts[f + 1], " after ", starts[f]);
      STD_TORCH_CHECK(tables[f] >= 0 && tables[f] < num_tables, op, ": tables[", f,
                      "] must be in [0, ", num_tables, "), got ", tables[f]);
    }
  }
};

// Return the data of a tensor. Throws unless it is a contiguous tensor of T, int64_t or int32_t,
// with `length` entries on the device of `like`.
template <class T>
const T* required_array(const char* op, const char* name, const Tensor& tensor, int64_t length,
                        const Tensor& like) {
  constexpr bool kIsLong = sizeof(T) == sizeof(int64_t);
  check_dtype(op, name, tensor, kIsLong ? ScalarType::Long : ScalarType::Int,
              kIsLong ? "int64" : "int32");
  check_same_device(op, name, tensor, like);
  STD_TORCH_CHECK(tensor.is_contiguous() && tensor.numel() == length, op, ": ", name,
                  " must be contiguous with ", length, " entries, got ", tensor.numel());
  return tensor.const_data_ptr<T>();
}

// Return the data of an optional int64 tensor, checked as required_array does; null if the caller
// does not pass it.
inline const int64_t* optional_array(const char* op, const char* name,
                                     const std::optional<Tensor>& tensor, int64_t length,
                                     const Tensor& like) {
  return tensor ? required_array<int64_t>(op, name, *tensor, length, like) : nullptr;
}

// The index and the batch of an op on keys, on one device.
struct HashCall {
  const char* op;
  HashIndex index;
  HashBatch batch;

  HashCall(const char* op_, const std::vector<Tensor>& tensors, const Tensor& ids,
           const Tensor& starts, const Tensor& tables)
      : op(op_), index(op, tensors), batch(op, ids, starts, tables) {
    check_same_device(op, "ids", ids, tensors[0]);
  }

  void check_contents() const {
    index.check_tables(op);
    batch.check_segments(op, index.num_tables);
  }
};

// Return `must_compete` of HashInsertion: whether the insert policy with the number `insert_policy`
// is kCompetes. Throws if there is no such policy.
inline bool parse_must_compete(const char* op, int64_t insert_policy) {
  return parse_choice<InsertPolicy>(op, "insert_policy", insert_policy, kInsertPolicies) ==
         InsertPolicy::kCompetes;
}

// How entries are ranked, and the scores that the caller assigns.
struct HashScoring {
  HashOrder order;
  // [T], the score of this batch in each table; null for 0. Not null for the order "assigned".
  const int64_t* batch_scores;

  HashScoring(const char* op, const HashIndex& index, int64_t order_code,
              const std::optional<Tensor>& batch_scores_, const Tensor& like)
      : order(parse_order(op, order_code, index.entry_words)),
        batch_scores(optional_array(op, "batch_scores", batch_scores_, index.num_tables, like)) {
    STD_TORCH_CHECK(order != HashOrder::kAssigned || batch_scores != nullptr, op,
                    ": order assigned needs batch_scores, the score of the batch by table");
  }

  // Return the score of the batch in a table; on the CPU only.
  int64_t score_of(int64_t table) const {
    return batch_scores == nullptr ? 0 : batch_scores[table];
  }
};

// Check that the buckets [first_bucket, first_bucket + num_buckets) lie in [0, max_buckets).
inline void check_window(const char* op, int64_t max_buckets, int64_t first_bucket,
                         int64_t num_buckets) {
  STD_TORCH_CHECK(
      first_bucket >= 0 && num_buckets >= 0 && first_bucket <= max_buckets - num_buckets, op,
      ": buckets [first_bucket, first_bucket + num_buckets) must lie in [0, ", max_buckets,
      "), got ", first_bucket, " and ", num_buckets);
}

// The misses of a batch, as `hash_touch_` returns them: table t has the misses offsets[t] to
// offsets[t + 1] - 1. There are at most as many misses as ids.
class Misses {
 public:
  // `offsets` is int64 [T + 1]; `admitted` is bool [n], by miss, and may be omitted if all misses
  // are admitted.
  Misses(const char* op, const HashIndex& index, const Tensor& ids, const Tensor& offsets,
         const std::optional<Tensor>& admitted)
      : n_(ids.numel()),
        num_tables_(index.num_tables),
        offsets_(required_array<int64_t>(op, "offsets", offsets, index.num_tables + 1, ids)) {
    if (!admitted) return;
    check_dtype(op, "admitted", *admitted, ScalarType::Bool, "bool");
    check_same_device(op, "admitted", *admitted, ids);
    STD_TORCH_CHECK(admitted->is_contiguous() && admitted->numel() == n_, op,
                    ": admitted must be contiguous with one entry per id = ", n_, ", got ",
                    admitted->numel());
    admitted_ = static_cast<const bool*>(admitted->const_data_ptr());
  }

  // The misses of `num_tables` tables; nothing is checked.
  Misses(int64_t num_tables, const int64_t* offsets, const bool* admitted)
      : n_(offsets[num_tables]), num_tables_(num_tables), offsets_(offsets), admitted_(admitted) {}

  // Check that `offsets` ascend from 0 to at most n; on the CPU only.
  void check_offsets(const char* op) const {
    int64_t previous = 0;
    for (int64_t t = 0; t <= num_tables_; ++t) {
      STD_TORCH_CHECK(offsets_[t] >= previous && offsets_[t] <= n_ && (t > 0 || offsets_[t] == 0),
                      op, ": offsets must ascend from 0 to at most the number of ids, ", n_,
                      ", got ", offsets_[t], " after ", previous);
      previous = offsets_[t];
    }
  }

  const int64_t* offsets() const { return offsets_; }
  const bool* admitted() const { return admitted_; }  // null if all misses are admitted

  // The functions below are for the CPU only. A table has the misses [begin, end).
  int64_t begin(int64_t table) const { return offsets_[table]; }
  int64_t end(int64_t table) const { return offsets_[table + 1]; }
  // Return the number of misses of all tables.
  int64_t count() const { return offsets_[num_tables_]; }
  bool is_admitted(int64_t miss) const { return admitted_ == nullptr || admitted_[miss]; }
  // Return the number of admitted misses of a table.
  int64_t num_admitted(int64_t table) const {
    int64_t sum = 0;
    for (int64_t i = begin(table); i < end(table); ++i) sum += is_admitted(i);
    return sum;
  }

 private:
  int64_t n_, num_tables_;
  const int64_t* offsets_;
  const bool* admitted_ = nullptr;
};

// The arguments of `hash_touch_` and its results, allocated but not written:
//   slots    int64 [n], by position: the slot of the key in its table, counted from the table's
//            first bucket; -1 for a miss
//   first    int64 [n], by miss: the first position of the key; 0 after the last miss
//   groups   int32 [n], by position: the miss of the key, -1 for a hit
//   totals   int64 [n], by miss: the uses of the key in the batch; 0 after the last miss
//   offsets  int64 [T + 1]: table t has the misses offsets[t] to offsets[t + 1] - 1
struct TouchCall : HashCall {
  HashScoring scoring;
  const int64_t* counts;  // [n], uses of each position's key; null for 1 each
  Tensor slots, first_positions, groups, totals, offsets;

  TouchCall(const std::vector<Tensor>& tensors, const Tensor& ids, const Tensor& starts,
            const Tensor& tables, const std::optional<Tensor>& counts_,
            const std::optional<Tensor>& batch_scores, int64_t order)
      : HashCall("hash_touch_", tensors, ids, starts, tables),
        scoring(op, index, order, batch_scores, ids),
        counts(optional_array(op, "counts", counts_, batch.n, ids)),
        slots(allocate(ids, {batch.n})),
        first_positions(allocate(ids, {batch.n})),
        groups(allocate(ids, {batch.n}, ScalarType::Int)),
        totals(allocate(ids, {batch.n})),
        offsets(allocate(ids, {index.num_tables + 1})) {}

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> results() const {
    return {slots, first_positions, groups, totals, offsets};
  }
};

// The arguments of `hash_insert_` and its results, allocated but not written:
//   inserted    int64 [n], by miss: the slot of the key in its table, -1 if it was not inserted
//   status      uint8 [n], by miss: InsertStatus
//   evicted     int64 [n, 3], by miss: key, stamp and score of the evicted entry; unspecified if
//               the status is not kEvicting
//   key_slots   int64 [num_positions], by position: the slot of the key, -1 if it has none
//   key_status  uint8 [num_positions], by position: InsertStatus
// If the caller passes the `slots` and `groups` of the batch, `num_positions` is n. Otherwise
// `num_positions` is 0, and the last two results are empty.
struct InsertCall {
  const char* op = "hash_insert_";
  HashIndex index;
  HashScoring scoring;
  bool must_compete;                              // see parse_must_compete
  int64_t n;                                      // positions of the batch
  const int64_t *ids, *first_positions, *totals;  // [n] each: by position, by miss, by miss
  Misses misses;
  const int64_t* slots;   // [n], by position, as hash_touch_ returns them; or null
  const int32_t* groups;  // [n], by position, as hash_touch_ returns them; or null
  int64_t num_positions;  // n with `slots` and `groups`, else 0
  Tensor inserted, status, evicted, key_slots, key_status;

  InsertCall(const std::vector<Tensor>& tensors, const Tensor& ids_, const Tensor& first_positions_,
             const Tensor& totals_, const Tensor& offsets, const std::optional<Tensor>& admitted,
             const std::optional<Tensor>& batch_scores, int64_t order, int64_t insert_policy,
             const std::optional<Tensor>& slots_, const std::optional<Tensor>& groups_)
      : index(op, tensors),
        scoring(op, index, order, batch_scores, ids_),
        must_compete(parse_must_compete(op, insert_policy)),
        n(ids_.numel()),
        ids(required_array<int64_t>(op, "ids", ids_, n, ids_)),
        first_positions(required_array<int64_t>(op, "first", first_positions_, n, ids_)),
        totals(required_array<int64_t>(op, "totals", totals_, n, ids_)),
        misses(op, index, ids_, offsets, admitted),
        slots(optional_array(op, "slots", slots_, n, ids_)),
        groups(groups_ ? required_array<int32_t>(op, "groups", *groups_, n, ids_) : nullptr),
        num_positions(slots_ ? n : 0),
        inserted(allocate(ids_, {n})),
        status(allocate(ids_, {n}, ScalarType::Byte)),
        evicted(allocate(ids_, {n, 3})),
        key_slots(allocate(ids_, {num_positions})),
        key_status(allocate(ids_, {num_positions}, ScalarType::Byte)) {
    check_same_device(op, "ids", ids_, tensors[0]);
    check_num_keys(op, n);
    STD_TORCH_CHECK(slots_.has_value() == groups_.has_value(), op,
                    ": slots and groups must be passed together");
  }

  // On the CPU only. `slots` needs no check, because its values are only copied.
  void check_contents() const {
    index.check_tables(op);
    misses.check_offsets(op);
    for (int64_t i = 0; i < misses.count(); ++i) {
      STD_TORCH_CHECK(first_positions[i] >= 0 && first_positions[i] < n, op,
                      ": first must be positions in ids, got ", first_positions[i], " for ", n,
                      " ids");
    }
    for (int64_t i = 0; i < num_positions; ++i) {
      STD_TORCH_CHECK(groups[i] < n, op, ": groups must be below the number of ids, ", n, ", got ",
                      groups[i]);
    }
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> results() const {
    return {inserted, status, evicted, key_slots, key_status};
  }
};

// The row buffers of all tables on the CPU: P buffers with rows by slot, which move with the
// entries. `row_layout` is int64 [T, P, 2]. For each table and buffer it has the byte of the buffer
// at which row 0 of the table begins, and the number of bytes per row.
struct RowBuffers {
  int num_buffers;                 // P
  std::vector<RowBuffer> buffers;  // [T, P], pointing into the tensors

  // On the CPU only, after index.check_tables. Throws unless the rows of every table, for its
  // maximum number of buckets, lie inside the buffers.
  RowBuffers(const char* op, const HashIndex& index, const std::vector<Tensor>& row_buffers,
             const Tensor& row_layout)
      : num_buffers(static_cast<int>(row_buffers.size())) {
    check_dtypes_and_shapes(op, index, row_buffers, row_layout);
    const int64_t* layout = row_layout.const_data_ptr<int64_t>();
    for (int64_t t = 0; t < index.num_tables; ++t) {
      for (int p = 0; p < num_buffers; ++p, layout += 2) {
        const int64_t max_slots = index.field(t, HashTableColumn::kMaxBuckets) * kBucketSlots;
        const int64_t nbytes = row_buffers[p].numel() * row_buffers[p].element_size();
        STD_TORCH_CHECK(layout[0] >= 0 && layout[1] >= 0 && layout[0] <= nbytes &&
                            (layout[1] == 0 || max_slots <= (nbytes - layout[0]) / layout[1]),
                        op, ": the rows of table ", t, " lie outside row_buffers[", p, "]");
        buffers.push_back(
            {static_cast<uint8_t*>(row_buffers[p].mutable_data_ptr()) + layout[0], layout[1]});
      }
    }
  }

  // Check dtypes and shapes, for tensors on any device.
  static void check_dtypes_and_shapes(const char* op, const HashIndex& index,
                                      const std::vector<Tensor>& row_buffers,
                                      const Tensor& row_layout) {
    check_dtype(op, "row_layout", row_layout, ScalarType::Long, "int64");
    const auto buffers = static_cast<int64_t>(row_buffers.size());
    STD_TORCH_CHECK(
        row_layout.dim() == 3 && row_layout.size(0) == index.num_tables &&
            row_layout.size(1) == buffers && row_layout.size(2) == 2 && row_layout.is_contiguous(),
        op, ": row_layout must be a contiguous [T, P, 2] for ", buffers, " row buffers");
    for (const Tensor& buffer : row_buffers) {
      STD_TORCH_CHECK(buffer.is_contiguous(), op, ": row_buffers must be contiguous");
    }
  }

  // Return the `num_buffers` row buffers of a table.
  const RowBuffer* buffers_of(int64_t table) const { return buffers.data() + table * num_buffers; }
};

// The arguments of `hash_grow_` except the row buffers, of which only dtypes and shapes are
// checked. The CUDA entry also checks their devices, and the CPU entry the contents of `row_layout`
// (RowBuffers).
struct GrowCall : HashCall {
  Misses misses;   // the misses for which the tables grow
  int64_t* slots;  // [n], by position: the slot of the key, corrected when entries move

  GrowCall(const std::vector<Tensor>& tensors, const std::vector<Tensor>& row_buffers,
           const Tensor& row_layout, const Tensor& ids, const Tensor& starts, const Tensor& tables,
           const Tensor& slots_, const Tensor& offsets, const std::optional<Tensor>& admitted)
      : HashCall("hash_grow_", tensors, ids, starts, tables),
        misses(op, index, ids, offsets, admitted),
        slots(const_cast<int64_t*>(required_array<int64_t>(op, "slots", slots_, batch.n, ids))) {
    RowBuffers::check_dtypes_and_shapes(op, index, row_buffers, row_layout);
    check_same_device(op, "row_layout", row_layout, ids);
  }

  void check_contents() const {
    HashCall::check_contents();
    misses.check_offsets(op);
  }
};

// A matrix of rows by slot, [num_rows, dim], with contiguous rows that do not overlap. Elements of
// 2, 4 or 8 bytes are allowed. Slots outside [0, num_rows) have no row.
struct RowMatrix {
  const Tensor& values;   // of the caller; must outlive this struct
  int64_t num_rows, dim;  // numbers of rows and of columns

  // Throws unless `values_` is such a matrix on the device of `like`.
  RowMatrix(const char* op, const Tensor& values_, const Tensor& like)
      : values(values_),
        num_rows(values_.dim() == 2 ? values_.size(0) : 0),
        dim(values_.dim() == 2 ? values_.size(1) : 0) {
    const int64_t size = values.element_size();
    STD_TORCH_CHECK(
        values.dim() == 2 && (dim <= 1 || values.stride(1) == 1) && values.stride(0) >= dim, op,
        ": values must be a matrix [slots, dim] with contiguous rows");
    STD_TORCH_CHECK(size == 2 || size == 4 || size == 8, op,
                    ": elements of values must have 2, 4 or 8 bytes, got ", size);
    check_same_device(op, "values", values, like);
  }

  // Return the data of the argument `rows`. Throws unless it is a contiguous [n, dim] of the dtype
  // of the matrix, on its device.
  const void* required_rows(const char* op, const char* name, const Tensor& rows, int64_t n) const {
    STD_TORCH_CHECK(rows.dim() == 2 && rows.size(0) == n && rows.size(1) == dim &&
                        rows.is_contiguous() && rows.scalar_type() == values.scalar_type(),
                    op, ": ", name, " must be contiguous, of the dtype of values and of shape [", n,
                    ", ", dim, "]");
    check_same_device(op, name, rows, values);
    return rows.const_data_ptr();
  }

  // Return the matrix as bytes. Its alignment is that of all rows and of `other_addresses`, to or
  // from which rows are copied; an address may be null.
  RowBytes as_bytes(std::initializer_list<const void*> other_addresses) const {
    const int64_t size = values.element_size(), stride = num_rows > 1 ? values.stride(0) : dim;
    void* data = const_cast<void*>(values.const_data_ptr());
    auto bits = reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(dim * size) |
                static_cast<uintptr_t>(stride * size);
    for (const void* address : other_addresses) bits |= reinterpret_cast<uintptr_t>(address);
    return {data, dim * size, stride * size, num_rows, alignment_of(bits)};
  }

  // Return 32 bits with the default value `value` in the dtype of the matrix. They have the value
  // twice if the dtype has 16 bits. Throws unless the dtype is float32, float16 or bfloat16.
  uint32_t default_word(const char* op, double value) const {
    const auto number = static_cast<float>(value);
    switch (float_dtype(op, "values", values.scalar_type())) {
      case Dtype::kFloat:
        return float_bits(number);
      case Dtype::kHalf:
        return from_float<half16>(number).bits * 0x10001u;
      default:
        return from_float<bfloat16>(number).bits * 0x10001u;
    }
  }
};

// The ops on rows. Results are allocated but not written.

// The arguments and results of `hash_find_rows`. The matrix has a row per slot of all tables. Slot
// s of a table is row kFirstBucket * kBucketSlots + s (HashTableColumn).
struct FindRowsCall : HashCall {
  RowMatrix matrix;
  uint32_t default_word;  // the default value, see RowMatrix::default_word
  // `rows` is [n, dim]: the row of each key, or default values for a missing key. `found` is bool
  // [n]: whether the table has the key.
  Tensor rows, found;

  FindRowsCall(const std::vector<Tensor>& tensors, const Tensor& ids, const Tensor& starts,
               const Tensor& tables, const Tensor& values, double default_value)
      : HashCall("hash_find_rows", tensors, ids, starts, tables),
        matrix(op, values, ids),
        default_word(matrix.default_word(op, default_value)),
        rows(allocate(values, {batch.n, matrix.dim})),
        found(allocate(ids, {batch.n}, ScalarType::Bool)) {}
};

// A matrix, and the slot of each of n positions. Slots outside the matrix, such as -1, have no row.
struct SlotRows {
  RowMatrix matrix;
  const int64_t* slots;  // [n], numbered over all tables, as the rows of the matrix
  int64_t n;

  SlotRows(const char* op, const Tensor& values, const Tensor& slots_)
      : matrix(op, values, slots_),
        slots(required_array<int64_t>(op, "slots", slots_, slots_.numel(), values)),
        n(slots_.numel()) {
    check_num_keys(op, n);
  }
};

// The arguments and the result of `hash_read_rows`.
struct ReadRowsCall : SlotRows {
  uint32_t default_word;  // the default value, see RowMatrix::default_word
  Tensor rows;  // [n, dim]: the row in each slot, default values if there is none; [0, dim]
                // unless `returns_rows`

  ReadRowsCall(const char* op, const Tensor& values, const Tensor& slots_, double default_value,
               bool returns_rows = true)
      : SlotRows(op, values, slots_),
        default_word(matrix.default_word(op, default_value)),
        rows(allocate(values, {returns_rows ? n : 0, matrix.dim})) {}
};

// The arguments and the result of `hash_start_rows_`, which also writes the rows of new keys: the
// row of miss g starts as row first_positions[g] of `starting`.
struct StartRowsCall : ReadRowsCall {
  const int32_t* groups;  // [n], by position: the miss of the key, negative if its row is not new
  const int64_t* first_positions;  // [n], by miss: the first position of the key
  const void* starting;            // [n, dim], by position, of the dtype of the matrix

  StartRowsCall(const Tensor& values, const Tensor& slots_, const Tensor& groups_,
                const Tensor& first_positions_, const Tensor& starting_, double default_value,
                bool returns_rows)
      : ReadRowsCall(kOp, values, slots_, default_value, returns_rows),
        groups(required_array<int32_t>(kOp, "groups", groups_, n, values)),
        first_positions(required_array<int64_t>(kOp, "first", first_positions_, n, values)),
        starting(matrix.required_rows(kOp, "starting", starting_, n)) {}

  void check_contents() const {
    for (int64_t i = 0; i < n; ++i) {
      STD_TORCH_CHECK(groups[i] < n && first_positions[i] >= 0 && first_positions[i] < n, kOp,
                      ": groups must be below the number of positions, ", n,
                      ", and first must be positions, got ", groups[i], " and ",
                      first_positions[i]);
    }
  }

 private:
  static constexpr const char* kOp = "hash_start_rows_";
};

// The arguments of `hash_write_rows_`.
struct WriteRowsCall : SlotRows {
  const void* rows;  // [n, dim], the row to write to each slot; the last row of a slot remains

  WriteRowsCall(const char* op, const Tensor& values, const Tensor& slots_, const Tensor& rows_)
      : SlotRows(op, values, slots_), rows(matrix.required_rows(op, "rows", rows_, n)) {}
};

// The arguments of `hash_add_rows_`. The positions of `rows` are grouped by slot, as the op `group`
// returns them. `slots` is the result `unique` of that op: its first `*count` entries have the slot
// of each group. Group g has the rows permutation[j] for j in [segments[g], segments[g + 1]).
struct AddRowsCall : WriteRowsCall {
  Dtype dtype;                                    // of matrix and rows
  const int32_t *segments, *permutation, *count;  // [n + 1], [n], [1]

  AddRowsCall(const Tensor& values, const Tensor& slots_, const Tensor& segments_,
              const Tensor& permutation_, const Tensor& count_, const Tensor& rows_)
      : WriteRowsCall(kOp, values, slots_, rows_),
        dtype(float_dtype(kOp, "values", values.scalar_type())),
        segments(required_array<int32_t>(kOp, "segments", segments_, n + 1, values)),
        permutation(required_array<int32_t>(kOp, "permutation", permutation_, n, values)),
        count(required_array<int32_t>(kOp, "count", count_, 1, values)) {}

  void check_contents() const {
    STD_TORCH_CHECK(*count >= 0 && *count <= n && segments[0] == 0 && segments[*count] <= n, kOp,
                    ": slots, segments, permutation and count must be those that group returns");
    for (int64_t g = 0; g < *count; ++g) {
      STD_TORCH_CHECK(segments[g] <= segments[g + 1], kOp, ": segments must not decrease");
    }
    for (int64_t j = 0; j < segments[*count]; ++j) {
      STD_TORCH_CHECK(permutation[j] >= 0 && permutation[j] < n, kOp,
                      ": permutation must have positions in [0, ", n, "), got ", permutation[j]);
    }
  }

 private:
  static constexpr const char* kOp = "hash_add_rows_";
};

// The arguments and results of `hash_evicted_rows`, which gathers the keys that an insertion
// evicted, in the order of misses. The op takes the results of `hash_insert_` for the misses of one
// table and must run before the rows of the new keys are written. All matrices, such as weights and
// states, have rows by slot; there is at least one. The CPU fills the rest of the results with 0.
struct EvictedRowsCall {
  std::vector<RowMatrix> matrices;  // P
  const int64_t* slots;             // [n], by miss: the slot, which is its row in the matrices
  const int64_t* evicted_words;     // [n, 3], by miss: the words of the evicted entry
  const uint8_t* status;            // [n], by miss: InsertStatus
  int64_t n;                        // positions of the batch
  // int64 [n] each, of which the first `count` are written; `count` is int64 [1].
  Tensor keys, stamps, scores, count;
  std::vector<Tensor> rows;  // P matrices [n, dim], of which the first `count` rows are written

  EvictedRowsCall(const std::vector<Tensor>& values, const Tensor& slots_, const Tensor& status_,
                  const Tensor& evicted)
      : slots(required_array<int64_t>(kOp, "slots", slots_, slots_.numel(), slots_)),
        evicted_words(required_array<int64_t>(kOp, "evicted", evicted, 3 * slots_.numel(), slots_)),
        n(slots_.numel()),
        keys(allocate(slots_, {n})),
        stamps(allocate(slots_, {n})),
        scores(allocate(slots_, {n})),
        count(allocate(slots_, {1})) {
    STD_TORCH_CHECK(!values.empty(), kOp, ": values must have at least one matrix");
    check_num_keys(kOp, n);
    check_dtype(kOp, "status", status_, ScalarType::Byte, "uint8");
    check_same_device(kOp, "status", status_, slots_);
    STD_TORCH_CHECK(status_.is_contiguous() && status_.numel() == n, kOp,
                    ": status must be contiguous with ", n, " entries, got ", status_.numel());
    status = static_cast<const uint8_t*>(status_.const_data_ptr());
    for (const Tensor& matrix : values) {
      matrices.emplace_back(kOp, matrix, slots_);
      rows.push_back(allocate(matrix, {n, matrices.back().dim}));
    }
  }

  std::tuple<Tensor, std::vector<Tensor>, Tensor, Tensor, Tensor> results() const {
    return {keys, rows, stamps, scores, count};
  }

 private:
  static constexpr const char* kOp = "hash_evicted_rows";
};

// The arguments of `hash_initial_rows_`, which writes the initial rows of the misses of a batch.
// All tensors are contiguous and on one device. The struct refers to the caller's tensors.
struct InitialInputs {
  std::vector<Tensor>& row_buffers;  // P float tensors: weights and states of all tables
  // layout is int64 [T, P, 5], see InitialLayout. rules is float64 [T, P, 7], see InitialRule. ids
  // is int64 and has the keys of the batch. first_positions is int64, by miss: a position of the
  // key in `ids`. slots is int64, by miss: the slot in its table, -1 for none. offsets is int64
  // [T + 1], see Misses.
  const Tensor &layout, &rules, &ids, &first_positions, &offsets, &slots;

  int64_t num_tables() const { return offsets.numel() - 1; }
  int64_t num_buffers() const { return static_cast<int64_t>(row_buffers.size()); }

  // Check dtypes, shapes and devices, and no contents. InitialRows checks those of `layout`; an
  // unknown InitialRule::kind in `rules` is not detected.
  void check(const char* op) const {
    for (const Tensor* tensor : {&layout, &ids, &first_positions, &offsets, &slots}) {
      check_dtype(op, "each of layout, ids, first, offsets and slots", *tensor, ScalarType::Long,
                  "int64");
    }
    check_dtype(op, "rules", rules, ScalarType::Double, "float64");
    for (const Tensor* tensor : {&layout, &rules, &ids, &first_positions, &offsets, &slots}) {
      STD_TORCH_CHECK(tensor->is_contiguous(), op, ": tensors must be contiguous");
      check_same_device(op, "each tensor", *tensor, ids);
    }
    STD_TORCH_CHECK(offsets.dim() == 1 && offsets.numel() >= 1, op,
                    ": offsets must have tables + 1 entries, got ", offsets.numel());
    check_shape(op, "layout", layout, kInitialLayoutColumns);
    check_shape(op, "rules", rules, kInitialRuleColumns);
    STD_TORCH_CHECK(first_positions.numel() == slots.numel(), op,
                    ": slots must have one entry per missing key, as first has, = ",
                    first_positions.numel(), ", got ", slots.numel());
    for (const Tensor& buffer : row_buffers) {
      float_dtype(op, "each row buffer", buffer.scalar_type());
      STD_TORCH_CHECK(buffer.is_contiguous(), op, ": row_buffers must be contiguous");
      check_same_device(op, "each row buffer", buffer, ids);
    }
  }

 private:
  void check_shape(const char* op, const char* name, const Tensor& tensor, int64_t fields) const {
    STD_TORCH_CHECK(tensor.dim() == 3 && tensor.size(0) == num_tables() &&
                        tensor.size(1) == num_buffers() && tensor.size(2) == fields,
                    op, ": ", name, " must be [tables, row_buffers, ", fields, "] = [",
                    num_tables(), ", ", num_buffers(), ", ", fields, "], got ", tensor.numel(),
                    " values in ", tensor.dim(), " dimensions");
  }
};

}  // namespace emb
