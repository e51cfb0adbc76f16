// Steps and types that several hash ops on the CPU share: the insertion of misses (defined in
// hash_cpu.cpp), the initial rows of new keys (initial_cpu.cpp), and rows as bytes, for whole
// batches (batch.h) and for moves of rows to and from a store (host_store.h, tiers_cpu.cpp).
// insert_misses and InitialRows::write check nothing: the caller must have checked the arguments.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "core/isa.h"
#include "core/parallel.h"
#include "hash/args.h"
#include "hash/check.h"
#include "hash/rows.h"

namespace emb {

// Define hash_find_kernels(), which returns the kernels of find_kernels.cpp for this processor.
EMB_SELECT_KERNELS(HashFindKernels, kHashFindKernels, hash_find_kernels)

inline constexpr int64_t kKeyGrain = 2048;  // grain of parallel_balanced for lookups of keys

// Return whether a table must grow to insert `num_keys` more keys.
inline bool must_grow(const HashIndex& index, int64_t table, int64_t num_keys) {
  const int64_t buckets = index.field(table, HashTableColumn::kBuckets);
  return wanted_buckets(index.field(table, HashTableColumn::kSize) + num_keys, buckets,
                        index.field(table, HashTableColumn::kMaxBuckets),
                        index.field(table, HashTableColumn::kMaxLoad)) != buckets;
}

// Remove the entry in a slot of `table`: empty the slot, and the eviction queue of its bucket. The
// caller corrects the size of the table. `queues` are those of the table, or null.
inline void remove_entry(const HashTable& table, EvictionQueue* queues, int64_t slot) {
  table.tags[slot] = kEmptyTag;
  if (queues != nullptr) queues[slot / kBucketSlots].size = 0;
}

// Divide the positions of a batch into non-empty ranges, each in one segment, and call
// `body(segment, begin, end)` for every range. HashBatch::check_segments must have accepted the
// batch. Several threads call `body` at once, so it must not throw.
template <class Body>
void parallel_segments(const HashBatch& batch, const Body& body) {
  parallel_balanced(batch.n, kKeyGrain, kUnitCost, [&](int64_t begin, int64_t end) {
    const int64_t* next_start =
        std::upper_bound(batch.starts, batch.starts + batch.num_segments, begin);
    for (int64_t segment = next_start - batch.starts - 1; begin < end; ++segment) {
      const int64_t stop = std::min(end, batch.starts[segment + 1]);
      if (begin < stop) body(segment, begin, stop);
      begin = std::max(begin, stop);
    }
  });
}

// Write the slot of the key of each position to `slots` [n], kNoSlot for a missing key.
inline void find_keys(const HashIndex& index, const HashBatch& batch, int64_t* slots) {
  parallel_segments(batch, [&](int64_t f, int64_t begin, int64_t end) {
    hash_find_kernels().find(index.table(batch.tables[f]), batch.ids + begin, end - begin, nullptr,
                             slots + begin);
  });
}

// The arrays of the misses of all tables, in memory of the caller. HashInsertion describes them;
// insert_misses initialises the outputs.
struct MissArrays {
  const int64_t* ids;  // by position
  // By miss. `totals` may be null unless the order counts uses.
  const int64_t *first_positions, *totals;
  int64_t* slots;    // output, by miss
  uint8_t* status;   // output, by miss: InsertStatus
  int64_t* evicted;  // output, by miss, three words each; null if not wanted
};

// Insert the admitted misses of every table. This changes the index, with its counters and queues.
// Write the slot and the status of every miss. Also write the evicted entries unless arrays.evicted
// is null. Memory is allocated before anything changes.
void insert_misses(const HashIndex& index, const HashScoring& scoring, bool must_compete,
                   const Misses& misses, const MissArrays& arrays);

// The row buffers of all tables, and the rules for the initial values of new rows. The tensors own
// the memory.
class InitialRows {
 public:
  // The caller must have called inputs.check(op). Throws unless the rows in `layout` lie inside
  // their row buffers and have strides from `dim` to INT32_MAX. Keeps pointers to the row buffers,
  // `layout` and `rules`.
  InitialRows(const char* op, const InitialInputs& inputs);

  // Write the initial rows of the misses of all tables, in parallel. Table t has the misses
  // offsets[t] to offsets[t + 1] - 1. The row of miss i is row slots[i] in each row buffer of its
  // table, and its key is ids[first_positions[i]]. A row buffer that has no row for the slot is
  // skipped. If the slot is -1, no row is written. `seed` selects the random numbers.
  void write(const int64_t* ids, const int64_t* first_positions, const int64_t* offsets,
             const int64_t* slots, int64_t seed) const;

  // Return the rows of a table by slot: one matrix per row buffer, which points into the buffer.
  std::vector<RowBytes> rows_of(int64_t table) const;

 private:
  struct Buffer {
    char* data;
    Dtype type;
    int64_t numel;
  };

  std::vector<Buffer> buffers_;
  const InitialLayout* layout_;  // [T, P]
  const InitialRule* rules_;     // [T, P]
  int64_t num_tables_;
};

// Rows as bytes. A *packed* row is the concatenation of a slot's rows in all row buffers; see
// emblib/ops/tiers.py.

// The maximum number of bytes per row that prefetch_row prefetches; the hardware prefetches the
// rest.
inline constexpr int64_t kMaxPrefetchBytes = 16 * kCacheLineBytes;
inline constexpr int64_t kRowsAhead = 8;        // rows between a prefetch and the copy
inline constexpr int64_t kCopyGrain = 1 << 16;  // grain of parallel_balanced for copies

// Prefetch the first kMaxPrefetchBytes of a row of `row_bytes` bytes, or the whole row if it is
// shorter. `row` may have any alignment.
inline void prefetch_row(const char* row, int64_t row_bytes) {
  const int64_t prefetch_bytes = std::min(row_bytes, kMaxPrefetchBytes);
  for (int64_t i = 0; i < prefetch_bytes; i += kCacheLineBytes) __builtin_prefetch(row + i);
  if (row_bytes > 0) __builtin_prefetch(row + prefetch_bytes - 1);
}

// Return an uninitialised int64 tensor of these sizes on the device of `like`, of any dtype.
inline Tensor allocate_words(const Tensor& like, const std::vector<int64_t>& sizes) {
  return allocate(like, sizes, ScalarType::Long);
}

// Return the data of `rows`, the argument `name` of the op. Throws unless it is a contiguous uint8
// [n, row_bytes].
inline char* byte_rows(const char* op, const char* name, const Tensor& rows, int64_t n,
                       int64_t row_bytes) {
  check_dtype(op, name, rows, ScalarType::Byte, "uint8");
  STD_TORCH_CHECK(
      rows.dim() == 2 && rows.size(0) == n && rows.size(1) == row_bytes && rows.is_contiguous(), op,
      ": ", name, " must be contiguous of shape [", n, ", ", row_bytes, "]");
  return static_cast<char*>(rows.mutable_data_ptr());
}

// The row buffers of a table, in the order in which a packed row concatenates their rows. Each is a
// matrix of rows by slot. The tensors own the memory. Slots must be in [0, num_slots); not checked.
struct PackedRows {
  std::vector<RowBytes> buffers;
  int64_t row_bytes = 0;  // bytes of a packed row
  // Number of slots of the smallest buffer; kUnlimited without buffers.
  int64_t num_slots = kUnlimited;

  explicit PackedRows(std::vector<RowBytes> rows) : buffers(std::move(rows)) {
    for (const RowBytes& buffer : buffers) {
      row_bytes += buffer.row_bytes;
      num_slots = std::min(num_slots, buffer.num_rows);
    }
  }
  // Throws unless RowMatrix accepts each of `matrices`, and they are on the device of `like`.
  PackedRows(const char* op, const std::vector<Tensor>& matrices, const Tensor& like)
      : PackedRows(matrices_as_bytes(op, matrices, like)) {}

  // Prefetch the rows in a slot.
  void prefetch(int64_t slot) const {
    for (const RowBytes& buffer : buffers) prefetch_row(row(buffer, slot), buffer.row_bytes);
  }

  // Copy the rows in a slot to `packed`, [row_bytes].
  void read(int64_t slot, char* packed) const {
    for (const RowBytes& buffer : buffers) {
      std::memcpy(packed, row(buffer, slot), buffer.row_bytes);
      packed += buffer.row_bytes;
    }
  }

  // Copy `packed`, [row_bytes], to the rows in a slot.
  void write(int64_t slot, const char* packed) const {
    for (const RowBytes& buffer : buffers) {
      std::memcpy(row(buffer, slot), packed, buffer.row_bytes);
      packed += buffer.row_bytes;
    }
  }

 private:
  static std::vector<RowBytes> matrices_as_bytes(const char* op,
                                                 const std::vector<Tensor>& matrices,
                                                 const Tensor& like) {
    std::vector<RowBytes> rows;
    for (const Tensor& matrix : matrices) rows.push_back(RowMatrix(op, matrix, like).as_bytes({}));
    return rows;
  }
  static char* row(const RowBytes& buffer, int64_t slot) {
    return static_cast<char*>(buffer.data) + slot * buffer.stride;
  }
};

// The records of a store, uint8 [num_records, record_bytes], in memory or in a mapped file. A
// record is a head, as many 64-bit words as fit before the row, and then a packed row, which may be
// empty. The tensor owns the records.
struct Records {
  char* data;
  int64_t num_records;   // one per slot of the store
  int64_t record_bytes;  // bytes per record
  int64_t num_words;     // words of a head

  // Throws unless `records` is a contiguous uint8 matrix with room for a row of `row_bytes` bytes
  // per record.
  Records(const char* op, const Tensor& records, int64_t row_bytes) {
    STD_TORCH_CHECK(records.dim() == 2, op, ": records must be a matrix, got ", records.dim(),
                    " dimensions");
    num_records = records.size(0);
    record_bytes = records.size(1);
    data = byte_rows(op, "records", records, num_records, record_bytes);
    STD_TORCH_CHECK(row_bytes >= 0 && row_bytes <= record_bytes, op,
                    ": records must have a row of ", row_bytes, " bytes, got ", record_bytes);
    num_words = (record_bytes - row_bytes) / kWordBytes;
  }

  static constexpr int64_t kWordBytes = sizeof(int64_t);

  // Return the record in a slot in [0, num_records).
  char* at(int64_t slot) const { return data + slot * record_bytes; }
  // Return the size of the head of a record, in bytes. The row begins after it.
  int64_t head_bytes() const { return num_words * kWordBytes; }

  // Check that a slot is in [-1, num_records); -1 is no record.
  void check_slot(const char* op, int64_t slot) const {
    STD_TORCH_CHECK(slot >= -1 && slot < num_records, op, ": slots must be records in [0, ",
                    num_records, "), or -1 for none, got ", slot);
  }
};

}  // namespace emb
