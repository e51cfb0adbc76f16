// Element types for code without torch: the dtypes of weights, states and outputs as an enum, and
// arrays of indices whose integer width is known at run time only.
#pragma once

#include <cstdint>

#include "core/half.h"

namespace emb {

enum class Dtype : int { kFloat = 0, kHalf = 1, kBfloat16 = 2 };

inline constexpr int kNumDtypes = 3;

// Return the number of bytes of an element of dtype `type`.
EMB_HD constexpr int64_t element_bytes(Dtype type) { return type == Dtype::kFloat ? 4 : 2; }

// An empty value that passes type T to a function template.
template <class T>
struct TypeTag {
  using type = T;
};

// Call `body(TypeTag<T>{}, code)` for each Dtype, where T is its element type and `code` its value
// as an int: for example to fill a table of kernels that is indexed by dtype.
template <class Body>
constexpr void for_each_dtype(const Body& body) {
  body(TypeTag<float>{}, static_cast<int>(Dtype::kFloat));
  body(TypeTag<half16>{}, static_cast<int>(Dtype::kHalf));
  body(TypeTag<bfloat16>{}, static_cast<int>(Dtype::kBfloat16));
}

// A view of an array of int32 or int64 on the host or on a device. Each access takes a branch,
// which is the same for the whole array. Fast CPU loops over lookups select the width once, outside
// the loop.
struct IndexArray {
  const void* data = nullptr;  // not owned
  bool is_int64 = true;        // else int32

  EMB_HD int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace emb
