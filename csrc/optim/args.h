// The arguments of optimizer updates: weights and states by memory tier, and the CPU kernels of
// `update_rows_`.
#pragma once

#include "core/layout.h"
#include "optim/functor.h"

namespace emb {

// One memory tier of a module. Element-wise states are laid out like the weights; row-wise ones
// have one entry per row.
struct TierRows {
  void* weights = nullptr;
  void* element_states[kMaxElementStates] = {};
  float* row_states[kMaxRowStates] = {};
  Dtype weight_type = Dtype::kFloat;
  Dtype state_types[kMaxElementStates] = {};
  int64_t elements = 0;  // elements of the weights
  int64_t rows = 0;      // entries of the row-wise states, a large number if there are none

  // Return whether weights and element-wise states start at a multiple of `columns` elements.
  EMB_HD bool is_aligned(int columns) const {
    bool result = is_multiple(weights, columns * size_of(weight_type));
    for (int s = 0; s < kMaxElementStates; ++s)
      result = result && is_multiple(element_states[s], columns * size_of(state_types[s]));
    return result;
  }

 private:
  EMB_HD static bool is_multiple(const void* address, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
  }
};

// Return the location of row `row` of the table of `feature` for an update. A slot outside the
// cache is ignored.
EMB_HD RowLocation locate_update(const Feature& feature, int64_t row, int64_t slot,
                                 const TierRows& cache) {
  const bool held = slot >= 0 && feature.cache_stride > 0 && slot < cache.rows &&
                    slot < cache.elements / feature.cache_stride;
  return locate_row(feature, row, held ? slot : -1);
}

// The CPU kernels of `update_rows_`.

struct UpdateRowsArgs {
  TierRows tier;       // matrices [rows, width], row-wise states [rows]
  const float* grads;  // [.., width]
  int64_t width;
  const double* hyper;
  const int32_t* rows = nullptr;  // row of each gradient; null if gradient i is that of row i
  int64_t first_row = 0;          // id of row 0 in the random numbers of stochastic rounding
};

// Rows of scratch of an update: the gradient, and what is stored in 16 bits as floats.
inline constexpr int64_t kMatrixScratchRows = 2 + kMaxElementStates;

// Update the rows of gradients [begin, end); `scratch` has room for kMatrixScratchRows rows.
using UpdateRowsFn = void (*)(const UpdateRowsArgs&, float* scratch, int64_t begin, int64_t end);

// Copies rows of a matrix as floats: row rows[i] of `from` becomes row i of `to`.
struct WidenRowsArgs {
  const void* from;
  Dtype type;
  const int32_t* rows;
  int64_t width;
  float* to;
};

struct UpdateRowsTable {
  UpdateRowsFn (*find)(int optimizer);  // null if there is no such optimizer
  void (*widen)(const WidenRowsArgs&, int64_t begin, int64_t end);
};

}  // namespace emb
