// The arguments of optimizer updates: weights and states by memory tier, on any device, and the
// arguments and function table of the CPU kernels of `update_rows_`. Pointers are to memory of the
// op's tensors, which its caller holds.
#pragma once

#include "core/layout.h"
#include "optim/functor.h"

namespace emb {

// The weights and states of one memory tier. Pointers are null for states that the optimizer does
// not have, and for a tier that is not in the list of weights.
struct TierMemory {
  void* weights = nullptr;                       // [elements]
  void* element_states[kMaxElementStates] = {};  // [elements], laid out like the weights
  float* row_states[kMaxRowStates] = {};         // [rows], see RowLocation::state_row
  Dtype weight_type = Dtype::kFloat;
  Dtype state_types[kMaxElementStates] = {};
  int64_t elements = 0;  // elements of the weights
  // Entries of the shortest row-wise state, kUnlimited if the optimizer has none; 0 for a tier
  // that is not in the list of weights.
  int64_t rows = 0;

  // Return whether weights and element-wise states start at a multiple of `columns` elements.
  EMB_HD bool is_aligned(int columns) const {
    bool result = is_multiple(weights, columns * element_bytes(weight_type));
    for (int s = 0; s < kMaxElementStates; ++s)
      result = result && is_multiple(element_states[s], columns * element_bytes(state_types[s]));
    return result;
  }

 private:
  EMB_HD static bool is_multiple(const void* address, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(bytes) == 0;
  }
};

// Return the location of row `row` of the table of `feature` for an update. `slot` is its slot in
// the cache, negative for none; a slot outside the cache counts as none.
EMB_HD RowLocation locate_update(const Feature& feature, int64_t row, int64_t slot,
                                 const TierMemory& cache) {
  const bool is_in_cache = slot >= 0 && feature.cache_stride > 0 && slot < cache.rows &&
                           slot < cache.elements / feature.cache_stride;
  return locate_row(feature, row, is_in_cache ? slot : -1);
}

// The arguments of the CPU kernels of `update_rows_`.
struct UpdateRowsArgs {
  TierMemory tier;     // matrices [rows, width], row-wise states [rows]
  const float* grads;  // [.., width]
  int64_t width;
  const double* hyper;            // see functor.h
  const int32_t* rows = nullptr;  // row of each gradient, distinct; null: gradient i is of row i
  int64_t first_row = 0;          // id of row 0 in the random numbers of stochastic rounding
};

// Rows of scratch of an update: the gradient, and weights and states that are stored in 16 bits.
inline constexpr int64_t kMatrixScratchRows = 2 + kMaxElementStates;

// Update the rows of gradients [begin, end), except those whose gradient is zero throughout.
// `scratch`, of this thread alone, is kMatrixScratchRows * width floats.
using UpdateRowsFn = void (*)(const UpdateRowsArgs&, float* scratch, int64_t begin, int64_t end);

// Rows of a matrix that are copied as floats: row rows[i] of `source` becomes row i of `target`.
struct WidenRowsArgs {
  const void* source;  // [.., width] of 16-bit dtype `type`
  Dtype type;
  const int32_t* rows;  // source row of each row of `target`
  int64_t width;
  float* target;  // [.., width]
};

// The CPU kernels. Calls for disjoint ranges may run at once.
struct UpdateRowsTable {
  // Return the kernel of an optimizer; null if no optimizer has that number.
  UpdateRowsFn (*find)(int optimizer);
  // Copy rows [begin, end) of `target`.
  void (*widen)(const WidenRowsArgs&, int64_t begin, int64_t end);
};

}  // namespace emb
