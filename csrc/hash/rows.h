// Rows of values as bytes, shared by the CPU and the CUDA entries of the ops on rows: a row is
// copied without regard to its dtype, in units as wide as all addresses allow.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace emb {

// A matrix of rows by slot; not owned.
struct RowBytes {
  void* data;  // row 0, in host or device memory
  // Bytes per row, bytes from one row to the next, and number of rows. `alignment` is 16, 8, 4 or
  // 2, and divides `bytes`, `stride` and every address that rows are copied from or to.
  int64_t bytes, stride, count, alignment;
};

// Return the greatest of 16, 8, 4 and 2 that divides all numbers whose bitwise or is `bits`, which
// must be even.
inline int64_t alignment_of(uintptr_t bits) {
  for (const int64_t bytes : {16, 8, 4}) {
    if (bits % static_cast<uintptr_t>(bytes) == 0) return bytes;
  }
  return 2;
}

// Call `body(TypeTag<T>{})`, where T is the element type of a dtype.
template <class Body>
void with_dtype(Dtype dtype, const Body& body) {
  for_each_dtype([&](auto tag, int number) {
    if (number == static_cast<int>(dtype)) body(tag);
  });
}

}  // namespace emb
