// Rows as bytes, for the CPU and the CUDA entries of the ops on rows. Rows are copied without
// regard to their dtype. A GPU copies them in the largest units that all addresses allow.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/dtype.h"

namespace emb {

// A matrix of rows by slot; not owned.
struct RowBytes {
  void* data;         // row 0, in host or device memory
  int64_t row_bytes;  // bytes per row
  int64_t stride;     // bytes from one row to the next
  int64_t num_rows;
  int64_t alignment;  // 16, 8, 4 or 2; divides `row_bytes`, `stride` and the addresses of all rows
};

// Return the greatest of 16, 8, 4 and 2 that divides all numbers whose bitwise or is `bits`. All
// must be even; not checked.
inline int64_t alignment_of(uintptr_t bits) {
  for (const int64_t bytes : {16, 8, 4}) {
    if (bits % static_cast<uintptr_t>(bytes) == 0) return bytes;
  }
  return 2;
}

// Call `body(TypeTag<T>{})`, where T is the C++ type of a dtype.
template <class Body>
void with_dtype(Dtype dtype, const Body& body) {
  for_each_dtype([&](auto tag, int number) {
    if (number == static_cast<int>(dtype)) body(tag);
  });
}

}  // namespace emb
