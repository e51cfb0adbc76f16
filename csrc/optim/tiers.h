// The memory tiers of a module as an update sees them: weights and states together.
#pragma once

#include "core/place.h"
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

EMB_HD int64_t size_of(Dtype type) { return type == Dtype::kFloat ? 4 : 2; }

}  // namespace emb
