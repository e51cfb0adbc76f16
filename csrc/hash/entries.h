// Parts of the hash ops on the CPU that several of them share: with the insertion of a whole batch
// (batch_cpu.cpp) and with the moves of rows to and from a store (tiers_cpu.cpp). The functions of
// the index check nothing: their arguments have been checked.
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "core/parallel.h"
#include "hash/check.h"
#include "hash/rows.h"

namespace emb {

inline constexpr int64_t kKeysPerTask = 2048;  // minimum number of keys that a thread looks up

// Call `body(segment, begin, end)` for ranges of positions that together are the whole batch; each
// is a non-empty range of one segment. Several threads call it at once.
template <class Body>
void parallel_segments(const HashBatch& batch, const Body& body) {
  parallel_balanced(batch.n, kKeysPerTask, kUnitCost, [&](int64_t begin, int64_t end) {
    const int64_t* after = std::upper_bound(batch.starts, batch.starts + batch.segments, begin);
    for (int64_t f = after - batch.starts - 1; begin < end; ++f) {
      const int64_t stop = std::min(end, batch.starts[f + 1]);
      if (begin < stop) body(f, begin, stop);
      begin = std::max(begin, stop);
    }
  });
}

// The arrays of the misses of all tables, see HashInsertion.
struct MissArrays {
  const int64_t *ids, *first, *totals;
  int64_t* slots;
  uint8_t* status;
  int64_t* evicted;  // null where evicted entries are not needed
};

// Insert the admitted misses of every table, and count them. Writes slots and status of all misses.
void insert_misses(const HashIndex& index, const HashScoring& scoring, bool competes,
                   const Misses& misses, const MissArrays& arrays);

// The ops of these names, which `tier_put_` calls.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_touch_(
    std::vector<Tensor> index, const Tensor& ids, const Tensor& starts, const Tensor& tables,
    std::optional<Tensor> counts, std::optional<Tensor> batch_scores, int64_t order);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_insert_(
    std::vector<Tensor> index, const Tensor& ids, const Tensor& first, const Tensor& totals,
    const Tensor& offsets, std::optional<Tensor> admitted, std::optional<Tensor> batch_scores,
    int64_t order, int64_t insert_policy, std::optional<Tensor> slots,
    std::optional<Tensor> groups);
Tensor hash_erase_(std::vector<Tensor> index, const Tensor& ids, const Tensor& starts,
                   const Tensor& tables);

// The row buffers of all tables, and how their new rows begin. The tensors own the memory.
class InitialRows {
 public:
  // Check, after in.check(op), that the rows in `layout` lie inside their row buffers.
  InitialRows(const char* op, const InitialInputs& in);

  // Write row slots[i] of each row buffer of table t for its misses i, [offsets[t],
  // offsets[t + 1]), in parallel, unless the slot is -1. The key of a miss is ids[first[i]].
  void write(const int64_t* ids, const int64_t* first, const int64_t* offsets, const int64_t* slots,
             int64_t seed) const;

  // Return the rows of a table by slot, one matrix per row buffer.
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

// Rows as bytes. A packed row has its bytes in all row buffers, one after the other; see
// emblib/ops/tiers.py.

inline constexpr int64_t kCacheLine = 64;
inline constexpr int64_t kMaxPrefetch =
    16 * kCacheLine;                               // the hardware prefetches the rest of a long row
inline constexpr int64_t kRowsAhead = 8;           // rows between a prefetch and the copy
inline constexpr int64_t kBytesPerTask = 1 << 16;  // minimum number of bytes that a thread copies

inline void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t at = 0; at < std::min(bytes, kMaxPrefetch); at += kCacheLine) {
    __builtin_prefetch(row + at);
  }
  if (bytes > 0) __builtin_prefetch(row + std::min(bytes, kMaxPrefetch) - 1);
}

// Return an uninitialised int64 tensor of these sizes on the CPU.
inline Tensor allocate_words(const Tensor& like, const std::vector<int64_t>& sizes) {
  return allocate(like, sizes, ScalarType::Long);
}

// Return the bytes of a contiguous uint8 matrix [n, bytes], which `name` is.
inline char* byte_rows(const char* op, const char* name, const Tensor& rows, int64_t n,
                       int64_t bytes) {
  check_dtype(op, name, rows, ScalarType::Byte, "uint8");
  STD_TORCH_CHECK(
      rows.dim() == 2 && rows.size(0) == n && rows.size(1) == bytes && rows.is_contiguous(), op,
      ": ", name, " must be contiguous of shape [", n, ", ", bytes, "]");
  return static_cast<char*>(rows.mutable_data_ptr());
}

// The row buffers of a table, each a matrix by slot, and where a packed row has the bytes of each.
struct PackedRows {
  std::vector<RowBytes> buffers;
  int64_t row_bytes = 0;             // of a packed row
  int64_t slots = int64_t{1} << 62;  // slots that all buffers have

  explicit PackedRows(std::vector<RowBytes> rows) : buffers(std::move(rows)) {
    for (const RowBytes& buffer : buffers) {
      row_bytes += buffer.bytes;
      slots = std::min(slots, buffer.count);
    }
  }
  PackedRows(const char* op, const std::vector<Tensor>& matrices, const Tensor& like)
      : PackedRows(matrices_as_bytes(op, matrices, like)) {}

  void prefetch(int64_t slot) const {
    for (const RowBytes& buffer : buffers) prefetch_row(row(buffer, slot), buffer.bytes);
  }

  void read(int64_t slot, char* packed) const {
    for (const RowBytes& buffer : buffers) {
      std::memcpy(packed, row(buffer, slot), buffer.bytes);
      packed += buffer.bytes;
    }
  }

  void write(int64_t slot, const char* packed) const {
    for (const RowBytes& buffer : buffers) {
      std::memcpy(row(buffer, slot), packed, buffer.bytes);
      packed += buffer.bytes;
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

// The records of a store, uint8 [S, stride]: some words of 64 bits, then the bytes of a row, which
// may be none. They are in memory or in a mapped file.
struct Records {
  char* data;
  int64_t count, stride, num_words;

  Records(const char* op, const Tensor& records, int64_t row_bytes) {
    count = records.dim() == 2 ? records.size(0) : 0;
    stride = records.dim() == 2 ? records.size(1) : 0;
    data = byte_rows(op, "records", records, count, stride);
    STD_TORCH_CHECK(row_bytes >= 0 && row_bytes <= stride, op, ": records must have a row of ",
                    row_bytes, " bytes, got ", stride);
    num_words = (stride - row_bytes) / kWordBytes;
  }

  static constexpr int64_t kWordBytes = sizeof(int64_t);

  char* at(int64_t slot) const { return data + slot * stride; }
  int64_t head_bytes() const { return num_words * kWordBytes; }

  void check_slot(const char* op, int64_t slot) const {
    STD_TORCH_CHECK(slot >= -1 && slot < count, op, ": slots must be records in [0, ", count,
                    "), or -1 for none, got ", slot);
  }
};

}  // namespace emb
