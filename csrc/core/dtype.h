// The dtypes of the kernels as an enum for torch-free code, and index arrays whose integer width is
// known at run time only.
#pragma once

#include <cstdint>

#include "core/codes.h"
#include "core/half.h"

namespace emb {

enum class Dtype : int { kFloat = 0, kHalf = 1, kBfloat16 = 2 };

inline constexpr int kDtypes = 3;

// Return the bytes of an element.
EMB_HD constexpr int64_t size_of(Dtype type) { return type == Dtype::kFloat ? 4 : 2; }

template <class T>
struct TypeTag {
  using type = T;
};

// Call `body(TypeTag<T>{}, index)` for the element type and the number of each Dtype, to fill a
// table of kernels that is indexed by dtype.
template <class Body>
constexpr void for_each_dtype(const Body& body) {
  body(TypeTag<float>{}, static_cast<int>(Dtype::kFloat));
  body(TypeTag<half16>{}, static_cast<int>(Dtype::kHalf));
  body(TypeTag<bfloat16>{}, static_cast<int>(Dtype::kBfloat16));
}

// int32 or int64 data. Each access costs one predictable branch, which is fine for offsets
// (one per bag).
struct IndexArray {
  const void* data = nullptr;
  bool is_int64 = true;

  EMB_HD int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

}  // namespace emb
