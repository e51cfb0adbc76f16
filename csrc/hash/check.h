// The arguments of the hash ops, checked and in the form that the kernels take. There is one struct
// per op, which the CPU and the CUDA entry construct; a constructor checks what the host knows:
// dtypes, shapes, devices. `check_contents` reads tensors, so only the CPU entries call it.
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

// The list [tags, entries, tables, clock, counters].
struct HashIndex {
  uint8_t* tags;
  int64_t* entries;
  int64_t* tables;  // [T, kHashTableColumns]
  int64_t* clock;
  int64_t* counters;  // [T, kHashCounters]
  int64_t slots, words, num_tables;

  HashIndex(const char* op, const std::vector<Tensor>& index) {
    STD_TORCH_CHECK(index.size() == 5, op,
                    ": index must be [tags, entries, tables, clock, counters], got ", index.size(),
                    " tensors");
    STD_TORCH_CHECK(index[0].scalar_type() == ScalarType::Byte && index[0].dim() == 1, op,
                    ": tags must be uint8 [S]");
    for (size_t i = 0; i < index.size(); ++i) {
      STD_TORCH_CHECK(index[i].is_contiguous(), op, ": the tensors of index must be contiguous");
      if (i > 0)
        check_dtype(op, "the tensors of index but tags", index[i], ScalarType::Long, "int64");
      check_same_device(op, "every tensor of index", index[i], index[0]);
    }
    slots = index[0].numel();
    STD_TORCH_CHECK(index[1].dim() == 2 && index[1].size(0) == slots &&
                        (index[1].size(1) == 2 || index[1].size(1) == 3),
                    op, ": entries must be [S, 2] or, with scores, [S, 3] for S = ", slots);
    words = index[1].size(1);
    num_tables = index[2].dim() == 2 ? index[2].size(0) : -1;
    STD_TORCH_CHECK(num_tables >= 0 && index[2].size(1) == kHashTableColumns &&
                        index[3].numel() == 1 && index[4].dim() == 2 &&
                        index[4].size(0) == num_tables && index[4].size(1) == kHashCounters,
                    op, ": tables must be [T, ", static_cast<int>(kHashTableColumns),
                    "], clock [1] and counters [T, ", static_cast<int>(kHashCounters), "]");
    tags = static_cast<uint8_t*>(index[0].mutable_data_ptr());
    entries = index[1].mutable_data_ptr<int64_t>();
    tables = index[2].mutable_data_ptr<int64_t>();
    clock = index[3].mutable_data_ptr<int64_t>();
    counters = index[4].mutable_data_ptr<int64_t>();
  }

  int64_t& field(int64_t table, HashTableColumn field) const {
    return tables[table * kHashTableColumns + field];
  }
  int64_t& counter(int64_t table, HashCounter counter) const {
    return counters[table * kHashCounters + counter];
  }

  // Return a table; reads `tables`, so on the CPU only.
  HashTable table(int64_t t) const {
    const int64_t first_slot = field(t, kFirstBucket) * kSlots;
    const int64_t buckets = field(t, kBuckets);
    return {
        tags + first_slot, entries + first_slot * words, words,
        buckets,           address_mask(buckets),        static_cast<uint64_t>(field(t, kHashKey))};
  }

  void check_table(const char* op, int64_t t) const {
    STD_TORCH_CHECK(t >= 0 && t < num_tables, op, ": table must be in [0, ", num_tables, "), got ",
                    t);
  }

  // Check that every table lies inside the memory, whatever the caller passes; on the CPU only.
  void check_tables(const char* op) const {
    for (int64_t t = 0; t < num_tables; ++t) {
      const int64_t first = field(t, kFirstBucket), max_buckets = field(t, kMaxBuckets);
      const int64_t buckets = field(t, kBuckets), load = field(t, kMaxLoad);
      const int64_t size = field(t, kSize);
      STD_TORCH_CHECK(first >= 0 && buckets >= 1 && buckets <= max_buckets &&
                          max_buckets <= INT32_MAX && first <= slots / kSlots - max_buckets &&
                          load >= 1 && load <= 1024 && size >= 0 && size <= buckets * kSlots,
                      op, ": table ", t, " lies outside the memory of the index; `tables` must ",
                      "come from the module that owns it");
    }
  }
};

inline Order parse_order(const char* op, int64_t code, int64_t words) {
  const auto order = parse_choice<Order>(op, "order", code, kOrders);
  STD_TORCH_CHECK(!has_scores(order) || words == 3, op, ": order ", kOrders[code],
                  " needs scores, so entries of 3 words, got ", words);
  return order;
}

inline void check_num_tables(const char* op, int64_t num_tables) {
  STD_TORCH_CHECK(num_tables >= 0 && num_tables <= kMaxLookups, op,
                  ": num_tables must be in [0, 2^31), got ", num_tables);
}

inline void check_num_keys(const char* op, int64_t n) {
  STD_TORCH_CHECK(n <= kMaxLookups, op, ": at most 2^31 - 1 keys a call, got ", n,
                  "; split the batch");
}

// A batch of keys: segment f, ids [starts[f], starts[f + 1]), belongs to table tables[f].
struct HashBatch {
  const int64_t* ids;
  const int64_t* starts;
  const int64_t* tables;
  int64_t n, segments;

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
    segments = tables_.numel();
    check_num_keys(op, n);
    STD_TORCH_CHECK(starts_.numel() == segments + 1, op,
                    ": starts must have one entry more than tables, got ", starts_.numel(), " and ",
                    segments);
    ids = ids_.const_data_ptr<int64_t>();
    starts = starts_.const_data_ptr<int64_t>();
    tables = tables_.const_data_ptr<int64_t>();
  }

  // Check that segments cover the ids in order and name existing tables; on the CPU only.
  void check_segments(const char* op, int64_t num_tables) const {
    STD_TORCH_CHECK(starts[0] == 0 && starts[segments] == n, op,
                    ": starts must begin with 0 and end with the number of ids, ", n, ", got ",
                    starts[0], " and ", starts[segments]);
    for (int64_t f = 0; f < segments; ++f) {
      STD_TORCH_CHECK(starts[f] <= starts[f + 1], op, ": starts must not decrease, got ",
                      starts[f + 1], " after ", starts[f]);
      STD_TORCH_CHECK(tables[f] >= 0 && tables[f] < num_tables, op, ": tables[", f,
                      "] must be in [0, ", num_tables, "), got ", tables[f]);
    }
  }
};

// Return the data of an optional int64 tensor with `length` entries, or null.
inline const int64_t* optional_longs(const char* op, const char* name,
                                     const std::optional<Tensor>& tensor, int64_t length,
                                     const Tensor& like) {
  if (!tensor) return nullptr;
  check_dtype(op, name, *tensor, ScalarType::Long, "int64");
  check_same_device(op, name, *tensor, like);
  STD_TORCH_CHECK(tensor->is_contiguous() && tensor->numel() == length, op, ": ", name,
                  " must be contiguous with ", length, " entries, got ", tensor->numel());
  return tensor->const_data_ptr<int64_t>();
}

// The same for int32, always passed.
inline const int32_t* required_ints(const char* op, const char* name, const Tensor& tensor,
                                    int64_t length, const Tensor& like) {
  check_dtype(op, name, tensor, ScalarType::Int, "int32");
  check_same_device(op, name, tensor, like);
  STD_TORCH_CHECK(tensor.is_contiguous() && tensor.numel() == length, op, ": ", name,
                  " must be contiguous with ", length, " entries, got ", tensor.numel());
  return tensor.const_data_ptr<int32_t>();
}

// The index and the batch of an op on keys. On the CPU, where contents of tensors can be read,
// `check_contents` must follow.
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

// Return whether a new key must rank at least as high as the entry that it evicts.
inline bool parse_competes(const char* op, int64_t insert_policy) {
  return parse_choice<InsertPolicy>(op, "insert_policy", insert_policy, kInsertPolicies) ==
         InsertPolicy::kCompetes;
}

// How entries are ranked, and the score of the batch.
struct HashScoring {
  Order order;
  const int64_t* batch_scores;  // [T], for the order "assigned"

  HashScoring(const char* op, const HashIndex& index, int64_t order_code,
              const std::optional<Tensor>& batch_scores_, const Tensor& like)
      : order(parse_order(op, order_code, index.words)),
        batch_scores(optional_longs(op, "batch_scores", batch_scores_, index.num_tables, like)) {
    STD_TORCH_CHECK(order != Order::kAssigned || batch_scores != nullptr, op,
                    ": order assigned needs batch_scores, the score of the batch by table");
  }

  // Return the score of the batch in a table; on the CPU only.
  int64_t of(int64_t table) const { return batch_scores == nullptr ? 0 : batch_scores[table]; }
};

// Check the bucket range [first_bucket, first_bucket + num_buckets) of a table of at most
// `max_buckets`.
inline void check_window(const char* op, int64_t max_buckets, int64_t first_bucket,
                         int64_t num_buckets) {
  STD_TORCH_CHECK(
      first_bucket >= 0 && num_buckets >= 0 && first_bucket <= max_buckets - num_buckets, op,
      ": buckets [first_bucket, first_bucket + num_buckets) must lie in [0, ", max_buckets,
      "), got ", first_bucket, " and ", num_buckets);
}

// The missing keys of a batch: those of table t are ids [offsets[t], offsets[t + 1]), as
// `hash_touch_` returns them.
class Misses {
 public:
  Misses(const char* op, const HashIndex& index, const Tensor& ids, const Tensor& offsets,
         const std::optional<Tensor>& admitted)
      : n_(ids.numel()),
        tables_(index.num_tables),
        offsets_(optional_longs(op, "offsets", offsets, index.num_tables + 1, ids)) {
    if (!admitted) return;
    check_dtype(op, "admitted", *admitted, ScalarType::Bool, "bool");
    check_same_device(op, "admitted", *admitted, ids);
    STD_TORCH_CHECK(admitted->is_contiguous() && admitted->numel() == n_, op,
                    ": admitted must be contiguous with one entry an id = ", n_, ", got ",
                    admitted->numel());
    admitted_ = static_cast<const bool*>(admitted->const_data_ptr());
  }

  // Check the contents of `offsets`; on the CPU only.
  void check_ends(const char* op) const {
    int64_t previous = 0;
    for (int64_t t = 0; t <= tables_; ++t) {
      STD_TORCH_CHECK(offsets_[t] >= previous && offsets_[t] <= n_ && (t > 0 || offsets_[t] == 0),
                      op, ": offsets must ascend from 0 to at most the number of ids, ", n_,
                      ", got ", offsets_[t], " after ", previous);
      previous = offsets_[t];
    }
  }

  const int64_t* offsets() const { return offsets_; }
  const bool* admitted() const { return admitted_; }

  int64_t begin(int64_t table) const { return offsets_[table]; }
  int64_t end(int64_t table) const { return offsets_[table + 1]; }
  int64_t count() const { return offsets_[tables_]; }
  bool is_admitted(int64_t miss) const { return admitted_ == nullptr || admitted_[miss]; }
  int64_t admitted_of(int64_t table) const {
    int64_t sum = 0;
    for (int64_t i = begin(table); i < end(table); ++i) sum += is_admitted(i);
    return sum;
  }

 private:
  int64_t n_, tables_;
  const int64_t* offsets_;
  const bool* admitted_ = nullptr;
};

// The inputs of `hash_touch_`, and its results, uninitialised: slots [n] of the ids, -1 for a miss;
// first [misses], the position at which each missing key first occurs; groups [n], the miss of each
// position; totals [misses], the uses of each missing key; offsets [T + 1] of the tables' misses.
struct TouchCall : HashCall {
  HashScoring scoring;
  const int64_t* counts;
  Tensor slots, first, groups, totals, offsets;

  TouchCall(const std::vector<Tensor>& tensors, const Tensor& ids, const Tensor& starts,
            const Tensor& tables, const std::optional<Tensor>& counts_,
            const std::optional<Tensor>& batch_scores, int64_t order)
      : HashCall("hash_touch_", tensors, ids, starts, tables),
        scoring(op, index, order, batch_scores, ids),
        counts(optional_longs(op, "counts", counts_, batch.n, ids)),
        slots(allocate(ids, {batch.n})),
        first(allocate(ids, {batch.n})),
        groups(allocate(ids, {batch.n}, ScalarType::Int)),
        totals(allocate(ids, {batch.n})),
        offsets(allocate(ids, {index.num_tables + 1})) {}

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> results() const {
    return {slots, first, groups, totals, offsets};
  }
};

// The inputs of `hash_insert_`, and its results, uninitialised: by miss, and by position if `slots`
// and `groups`, those of the batch, are passed.
struct InsertCall {
  const char* op = "hash_insert_";
  HashIndex index;
  HashScoring scoring;
  bool competes;
  int64_t n;
  const int64_t *ids, *first, *totals;
  Misses misses;
  const int64_t* slots;
  const int32_t* groups;
  int64_t positions;
  Tensor inserted, status, evicted, filled, key_status;

  InsertCall(const std::vector<Tensor>& tensors, const Tensor& ids_, const Tensor& first_,
             const Tensor& totals_, const Tensor& offsets, const std::optional<Tensor>& admitted,
             const std::optional<Tensor>& batch_scores, int64_t order, int64_t insert_policy,
             const std::optional<Tensor>& slots_, const std::optional<Tensor>& groups_)
      : index(op, tensors),
        scoring(op, index, order, batch_scores, ids_),
        competes(parse_competes(op, insert_policy)),
        n(ids_.numel()),
        ids(optional_longs(op, "ids", ids_, n, ids_)),
        first(optional_longs(op, "first", first_, n, ids_)),
        totals(optional_longs(op, "totals", totals_, n, ids_)),
        misses(op, index, ids_, offsets, admitted),
        slots(optional_longs(op, "slots", slots_, n, ids_)),
        groups(groups_ ? required_ints(op, "groups", *groups_, n, ids_) : nullptr),
        positions(slots_ ? n : 0),
        inserted(allocate(ids_, {n})),
        status(allocate(ids_, {n}, ScalarType::Byte)),
        evicted(allocate(ids_, {n, 3})),
        filled(allocate(ids_, {positions})),
        key_status(allocate(ids_, {positions}, ScalarType::Byte)) {
    check_same_device(op, "ids", ids_, tensors[0]);
    check_num_keys(op, n);
    STD_TORCH_CHECK(slots_.has_value() == groups_.has_value(), op,
                    ": slots and groups must be passed together");
  }

  // Check the contents of tensors; on the CPU only.
  void check_contents() const {
    index.check_tables(op);
    misses.check_ends(op);
    for (int64_t i = 0; i < misses.count(); ++i) {
      STD_TORCH_CHECK(first[i] >= 0 && first[i] < n, op, ": first must be positions in ids, got ",
                      first[i], " for ", n, " ids");
    }
    for (int64_t i = 0; i < positions; ++i) {
      STD_TORCH_CHECK(groups[i] < n, op, ": groups must be below the number of ids, ", n, ", got ",
                      groups[i]);
    }
  }

  std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> results() const {
    return {inserted, status, evicted, filled, key_status};
  }
};

// The row buffers of all tables: arrays of values by slot that move with the entries. For each
// table and buffer, row_layout int64 [T, P, 2] holds the byte at which its row 0 begins and the
// bytes per row.
struct RowBuffers {
  int count;
  std::vector<RowBuffer> buffers;  // [T, P], on the CPU

  RowBuffers(const char* op, const HashIndex& index, const std::vector<Tensor>& row_buffers,
             const Tensor& row_layout)
      : count(static_cast<int>(row_buffers.size())) {
    check_form(op, index, row_buffers, row_layout);
    const int64_t* layout = row_layout.const_data_ptr<int64_t>();
    for (int64_t t = 0; t < index.num_tables; ++t) {
      for (int p = 0; p < count; ++p, layout += 2) {
        const int64_t max_slots = index.field(t, kMaxBuckets) * kSlots;
        const int64_t nbytes = row_buffers[p].numel() * row_buffers[p].element_size();
        STD_TORCH_CHECK(layout[0] >= 0 && layout[1] >= 0 && layout[0] <= nbytes &&
                            (layout[1] == 0 || max_slots <= (nbytes - layout[0]) / layout[1]),
                        op, ": the rows of table ", t, " lie outside row_buffers[", p, "]");
        buffers.push_back(
            {static_cast<uint8_t*>(row_buffers[p].mutable_data_ptr()) + layout[0], layout[1]});
      }
    }
  }

  static void check_form(const char* op, const HashIndex& index,
                         const std::vector<Tensor>& row_buffers, const Tensor& row_layout) {
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

  const RowBuffer* of(int64_t table) const { return buffers.data() + table * count; }
};

// The inputs of `hash_grow_`.
struct GrowCall : HashCall {
  Misses misses;
  int64_t* slots;

  GrowCall(const std::vector<Tensor>& tensors, const std::vector<Tensor>& row_buffers,
           const Tensor& row_layout, const Tensor& ids, const Tensor& starts, const Tensor& tables,
           const Tensor& slots_, const Tensor& offsets, const std::optional<Tensor>& admitted)
      : HashCall("hash_grow_", tensors, ids, starts, tables),
        misses(op, index, ids, offsets, admitted),
        slots(const_cast<int64_t*>(optional_longs(op, "slots", slots_, batch.n, ids))) {
    RowBuffers::check_form(op, index, row_buffers, row_layout);
    check_same_device(op, "row_layout", row_layout, ids);
  }

  void check_contents() const {
    HashCall::check_contents();
    misses.check_ends(op);
  }
};

// Values by slot: [slots, dim], of which the rows are contiguous.
struct RowMatrix {
  const Tensor& values;
  int64_t count, dim;

  RowMatrix(const char* op, const Tensor& values_, const Tensor& like)
      : values(values_),
        count(values_.dim() == 2 ? values_.size(0) : 0),
        dim(values_.dim() == 2 ? values_.size(1) : 0) {
    const int64_t size = values.element_size();
    STD_TORCH_CHECK(
        values.dim() == 2 && (dim <= 1 || values.stride(1) == 1) && values.stride(0) >= dim, op,
        ": values must be a matrix [slots, dim] with contiguous rows");
    STD_TORCH_CHECK(size == 2 || size == 4 || size == 8, op,
                    ": elements of values must have 2, 4 or 8 bytes, got ", size);
    check_same_device(op, "values", values, like);
  }

  // Return the data of `rows` [n, dim], which must be of the same kind.
  const void* check_rows(const char* op, const char* name, const Tensor& rows, int64_t n) const {
    STD_TORCH_CHECK(rows.dim() == 2 && rows.size(0) == n && rows.size(1) == dim &&
                        rows.is_contiguous() && rows.scalar_type() == values.scalar_type(),
                    op, ": ", name, " must be contiguous, of the dtype of values and of shape [", n,
                    ", ", dim, "]");
    check_same_device(op, name, rows, values);
    return rows.const_data_ptr();
  }

  // Return the rows; `with` are addresses that rows are copied from or to.
  RowBytes bytes(std::initializer_list<const void*> with) const {
    const int64_t size = values.element_size(), stride = count > 1 ? values.stride(0) : dim;
    void* data = const_cast<void*>(values.const_data_ptr());
    auto bits = reinterpret_cast<uintptr_t>(data) | static_cast<uintptr_t>(dim * size) |
                static_cast<uintptr_t>(stride * size);
    for (const void* address : with) bits |= reinterpret_cast<uintptr_t>(address);
    return {data, dim * size, stride * size, count, alignment_of(bits)};
  }

  // Return the bits of a default value, which fill 32 bits.
  uint32_t fill(const char* op, double value) const {
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

// The inputs of the ops on rows, checked, with their results, uninitialised. The constructors check
// dtypes, shapes and devices. `check_contents` also reads the tensors, so only the CPU ops call it.

struct FindRowsCall : HashCall {
  RowMatrix matrix;
  uint32_t fill;
  Tensor rows, found;

  FindRowsCall(const std::vector<Tensor>& tensors, const Tensor& ids, const Tensor& starts,
               const Tensor& tables, const Tensor& values, double default_value)
      : HashCall("hash_find_rows", tensors, ids, starts, tables),
        matrix(op, values, ids),
        fill(matrix.fill(op, default_value)),
        rows(allocate(values, {batch.n, matrix.dim})),
        found(allocate(ids, {batch.n}, ScalarType::Bool)) {}
};

// Rows by position: slots [n] of a matrix.
struct SlotRows {
  RowMatrix matrix;
  const int64_t* slots;
  int64_t n;

  SlotRows(const char* op, const Tensor& values, const Tensor& slots_)
      : matrix(op, values, slots_),
        slots(optional_longs(op, "slots", slots_, slots_.numel(), values)),
        n(slots_.numel()) {
    check_num_keys(op, n);
  }
};

struct ReadRowsCall : SlotRows {
  uint32_t fill;
  Tensor rows;

  ReadRowsCall(const char* op, const Tensor& values, const Tensor& slots_, double default_value,
               bool returns_rows = true)
      : SlotRows(op, values, slots_),
        fill(matrix.fill(op, default_value)),
        rows(allocate(values, {returns_rows ? n : 0, matrix.dim})) {}
};

struct StartRowsCall : ReadRowsCall {
  const int32_t* groups;
  const int64_t* first;
  const void* starting;

  StartRowsCall(const Tensor& values, const Tensor& slots_, const Tensor& groups_,
                const Tensor& first_, const Tensor& starting_, double default_value,
                bool returns_rows)
      : ReadRowsCall(kOp, values, slots_, default_value, returns_rows),
        groups(required_ints(kOp, "groups", groups_, n, values)),
        first(optional_longs(kOp, "first", first_, n, values)),
        starting(matrix.check_rows(kOp, "starting", starting_, n)) {}

  void check_contents() const {
    for (int64_t i = 0; i < n; ++i) {
      STD_TORCH_CHECK(groups[i] < n && first[i] >= 0 && first[i] < n, kOp,
                      ": groups must be below the number of positions, ", n,
                      ", and first must be positions, got ", groups[i], " and ", first[i]);
    }
  }

 private:
  static constexpr const char* kOp = "hash_start_rows_";
};

struct WriteRowsCall : SlotRows {
  const void* rows;

  WriteRowsCall(const char* op, const Tensor& values, const Tensor& slots_, const Tensor& rows_)
      : SlotRows(op, values, slots_), rows(matrix.check_rows(op, "rows", rows_, n)) {}
};

// The groups of positions are those that `group` makes of slots: `slots` here are the distinct
// ones.
struct AddRowsCall : WriteRowsCall {
  Dtype dtype;
  const int32_t *segments, *permutation, *count;

  AddRowsCall(const Tensor& values, const Tensor& slots_, const Tensor& segments_,
              const Tensor& permutation_, const Tensor& count_, const Tensor& rows_)
      : WriteRowsCall(kOp, values, slots_, rows_),
        dtype(float_dtype(kOp, "values", values.scalar_type())),
        segments(required_ints(kOp, "segments", segments_, n + 1, values)),
        permutation(required_ints(kOp, "permutation", permutation_, n, values)),
        count(required_ints(kOp, "count", count_, 1, values)) {}

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

// Several matrices, e.g. weights and states of an optimizer, of the same slots.
struct EvictedRowsCall {
  std::vector<RowMatrix> matrices;
  const int64_t *slots, *words;
  const uint8_t* status;
  int64_t n;
  Tensor keys, stamps, scores, count;
  std::vector<Tensor> rows;

  EvictedRowsCall(const std::vector<Tensor>& values, const Tensor& slots_, const Tensor& status_,
                  const Tensor& evicted)
      : slots(optional_longs(kOp, "slots", slots_, slots_.numel(), slots_)),
        words(optional_longs(kOp, "evicted", evicted, 3 * slots_.numel(), slots_)),
        n(slots_.numel()),
        keys(allocate(slots_, {n})),
        stamps(allocate(slots_, {n})),
        scores(allocate(slots_, {n})),
        count(allocate(slots_, {1})) {
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

// The arguments of `hash_initial_rows_`; `check` covers everything but the contents of tensors that
// may be on a device.
struct InitialInputs {
  std::vector<Tensor>& row_buffers;
  const Tensor &layout, &rules, &ids, &first, &offsets, &slots;

  int64_t num_tables() const { return offsets.numel() - 1; }
  int64_t num_buffers() const { return static_cast<int64_t>(row_buffers.size()); }

  void check(const char* op) const {
    for (const Tensor* tensor : {&layout, &ids, &first, &offsets, &slots}) {
      check_dtype(op, "each of layout, ids, first, offsets and slots", *tensor, ScalarType::Long,
                  "int64");
    }
    check_dtype(op, "rules", rules, ScalarType::Double, "float64");
    for (const Tensor* tensor : {&layout, &rules, &ids, &first, &offsets, &slots}) {
      STD_TORCH_CHECK(tensor->is_contiguous(), op, ": tensors must be contiguous");
      check_same_device(op, "each tensor", *tensor, ids);
    }
    STD_TORCH_CHECK(offsets.dim() == 1 && offsets.numel() >= 1, op,
                    ": offsets must have tables + 1 entries, got ", offsets.numel());
    check_shape(op, "layout", layout, kInitialLayoutColumns);
    check_shape(op, "rules", rules, kInitialRuleColumns);
    STD_TORCH_CHECK(first.numel() == slots.numel(), op,
                    ": slots must have one entry a missing key, as first has, = ", first.numel(),
                    ", got ", slots.numel());
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
