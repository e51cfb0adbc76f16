// Rows of values by slot as bytes: what the CPU and the CUDA entries of the row ops share.
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace emb {

// Rows `stride` bytes apart; `alignment` divides the row's bytes, the stride and every address that
// rows are copied from or to.
struct RowBytes {
  void* data;
  int64_t bytes, stride, count, alignment;
};

// Return the greatest of 16, 8, 4 and 2 that divides all of these or-ed together.
inline int64_t alignment_of(uintptr_t bits) {
  for (const int64_t bytes : {16, 8, 4}) {
    if (bits % static_cast<uintptr_t>(bytes) == 0) return bytes;
  }
  return 2;
}

// Call `body(TypeTag<T>{})` for the element type of a dtype.
template <class Body>
void with_dtype(Dtype dtype, const Body& body) {
  for_each_dtype([&](auto tag, int number) {
    if (number == static_cast<int>(dtype)) body(tag);
  });
}

}  // namespace emb
