// The dtypes the kernels know, as an enum that torch-free code can use, and index arrays whose
// integer width is known at run time only.
#pragma once

#include <cstdint>

#include "core/codes.h"
#include "core/half.h"

namespace emb {

enum class Dtype : int { kFloat = 0, kHalf = 1, kBfloat16 = 2 };

// int32 or int64 data; one predictable branch an access, which offsets (one a bag) can afford.
struct IndexArray {
  const void* data = nullptr;
  bool is_int64 = true;

  EMB_HD int64_t operator[](int64_t i) const {
    return is_int64 ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
};

// What one feature reads. Mirrors a row of the `features` tensor. Row r of its table is
// [weight_offset + r * dim, + dim) of the weights of memory tier `tier`, has the linear row id
// row_base + r (unique over the module; groups and caches know rows by it) and entry
// state_base + r of that tier's row-wise states. The pooled row goes to output columns
// [column, column + dim). See core/place.h for tiers and caches.
struct Feature {
  int64_t weight_offset;
  int64_t row_base;
  int64_t rows;
  int64_t dim;
  int64_t column;
  int64_t tier;
  int64_t state_base;
  int64_t cache_stride;  // elements between rows of the cache; 0 where the table is not cached
};

inline constexpr int kFeatureFields = 8;
static_assert(sizeof(Feature) == kFeatureFields * sizeof(int64_t));

// Bags as they are read: in any state of `offsets` a bag is a range inside [0, num_lookups].
struct Bags {
  IndexArray offsets;
  int64_t count = 0;
  int64_t num_lookups = 0;

  EMB_HD int64_t begin(int64_t bag) const { return clamp(offsets[bag], 0); }
  EMB_HD int64_t end(int64_t bag) const {
    return bag + 1 == count ? num_lookups : clamp(offsets[bag + 1], begin(bag));
  }

 private:
  EMB_HD int64_t clamp(int64_t x, int64_t low) const {
    return x < low ? low : x > num_lookups ? num_lookups : x;
  }
};

// FBGEMM's repair of an index: -1 means "pruned, skip me", anything else out of range reads row 0
// (of a table that has one).
EMB_HD int64_t repair_index(int64_t index, int64_t rows) {
  return index >= 0 && index < rows ? index : index == -1 || rows == 0 ? -1 : 0;
}

}  // namespace emb
