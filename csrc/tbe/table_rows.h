// The rows that the lookups of one feature read, on the CPU: those of its table, or of the cache
// that stands before it. Torch-free; the entries fill it in, kernels read it.
#pragma once

#include "core/dtype.h"
#include "core/place.h"

namespace emb {

// Whether a table stands behind a cache, and whether that has another dtype than the table.
enum class Caching : int { kNone = 0, kSame = 1, kMixed = 2 };

struct TableRows {
  const void* table;  // row 0 of the feature's table
  int64_t rows, dim;
  IndexArray indices;
  Caching caching = Caching::kNone;
  // All that follows only where there is a cache.
  Dtype type = Dtype::kFloat, cache_type = Dtype::kFloat;
  const void* cache = nullptr;
  const int32_t* slots = nullptr;  // [L]
  int64_t num_slots = 0, cache_stride = 0;
};

}  // namespace emb
