// The arguments of optimizer updates: the weights and states of a memory tier, on any device, and
// the arguments of the CPU kernels of `update_rows_`. Pointers are to memory of the op's tensors,
// which its caller holds.
#pragma once

#include "core/layout.h"
#include "optim/functor.h"

namespace emb {

// The weights and states of one memory tier. Pointers are null for states that the optimizer does
// not have, and for a tier that is not in the list of weights.
struct TierMemory {
  void* weights = nullptr;                       // [num_elements]
  void* element_states[kMaxElementStates] = {};  // [num_elements], laid out like the weights
  float* row_states[kMaxRowStates] = {};         // [num_rows], see RowLocation::state_row
  Dtype weight_type = Dtype::kFloat;
  Dtype state_types[kMaxElementStates] = {};
  int64_t num_elements = 0;  // elements of the weights
  // Entries of the shortest row-wise state, kUnlimited if the optimizer has none; 0 for a tier
  // that is not in the list of weights.
  int64_t num_rows = 0;

  // Return whether the addresses of weights and element-wise states are multiples of the size of
  // `num_columns` elements; null counts as aligned.
  EMB_HD bool is_aligned(int num_columns) const {
    bool result = is_multiple(weights, num_columns * element_bytes(weight_type));
    for (int s = 0; s < kMaxElementStates; ++s)
      result =
          result && is_multiple(element_states[s], num_columns * element_bytes(state_types[s]));
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
  const bool is_in_cache = slot >= 0 && feature.cache_stride > 0 && slot < cache.num_rows &&
                           slot < cache.num_elements / feature.cache_stride;
  return locate_row(feature, row, is_in_cache ? slot : -1);
}

// The arguments of the CPU kernels of `update_rows_`: a matrix of R rows, and the gradients of n of
// them.
struct UpdateRowsArgs {
  TierMemory tier;      // weights and element-wise states [R, dim], row-wise states [R]
  const float* grads;   // [n, dim]
  int64_t dim;          // columns
  const double* hyper;  // see functor.h
  // [n], the row of each gradient, distinct; null if gradient i is that of row i.
  const int32_t* rows = nullptr;
  int64_t first_row = 0;  // id of row 0 in the random numbers of stochastic rounding
};

// Rows of scratch of an update: the gradient, and weights and states that are stored in 16 bits.
inline constexpr int64_t kMatrixScratchRows = 2 + kMaxElementStates;

// Update the rows of gradients [begin, end), except those whose gradient is zero throughout.
// `scratch` has kMatrixScratchRows * dim floats, which no other thread uses; it need not be set.
using UpdateRowsFn = void (*)(const UpdateRowsArgs&, float* scratch, int64_t begin, int64_t end);

// Rows of a matrix that are copied as floats: row rows[i] of `source` becomes row i of `target`.
struct WidenRowsArgs {
  const void* source;  // [R, dim] of 16-bit dtype `type`
  Dtype type;
  const int32_t* rows;  // [n], the row of `source` for each row of `target`
  int64_t dim;
  float* target;  // [n, dim]
};

// The CPU kernels for one instruction set. Calls for disjoint ranges may run at once.
struct UpdateRowsTable {
  // Return the kernel of an optimizer, a number in Optimizers; null if no optimizer has it.
  UpdateRowsFn (*find)(int optimizer);
  // Copy rows [begin, end) of `target`.
  void (*widen)(const WidenRowsArgs&, int64_t begin, int64_t end);
};

}  // namespace emb
