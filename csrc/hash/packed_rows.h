// Rows of dynamic tables and of their stores as bytes, on the CPU; shared by tiers_cpu.cpp and
// batch_cpu.cpp. emblib/ops/tiers.py describes packed rows and records.
#pragma once

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "hash/check.h"
#include "hash/rows.h"

namespace emb {

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
