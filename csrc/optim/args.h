// The memory tiers of a module as an update sees them: weights and states together.
#pragma once

#include "core/layout.h"
#include "optim/functor.h"

namespace emb {

// Element-wise states are laid out like the weights; row-wise ones have an entry a row.
struct TierRows {
  void* weights = nullptr;
  void* element_states[kMostElementStates] = {};
  float* row_states[kMostRowStates] = {};
  Dtype weight_type = Dtype::kFloat;
  Dtype state_types[kMostElementStates] = {};
  int64_t elements = 0;  // of the weights
  int64_t rows = 0;      // entries of the row-wise states, a large number where there are none
};

// Where row `row` of the table of `feature` is updated. A slot outside the cache holds nothing.
EMB_HD RowPlace update_place(const Feature& feature, int64_t row, int64_t slot,
                             const TierRows& cache) {
  const bool held = slot >= 0 && feature.cache_stride > 0 && slot < cache.rows &&
                    slot < cache.elements / feature.cache_stride;
  return place_row(feature, row, held ? slot : -1);
}

// `update_rows_` on the CPU: what its kernels take and how they are reached.

struct UpdateRowsArgs {
  TierRows tier;       // float32 matrices [rows, width], states of one number a row [rows]
  const float* grads;  // [rows, width]
  int64_t width;
  const double* hyper;
};

// Rows [begin, end); `scratch` has room for a row.
using UpdateRowsFn = void (*)(const UpdateRowsArgs&, float* scratch, int64_t begin, int64_t end);

struct UpdateRowsTable {
  UpdateRowsFn (*find)(int optimizer);  // null if there is no such optimizer
};

}  // namespace emb
