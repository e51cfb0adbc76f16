// The gradient of sample weights on the CPU: what its kernel takes and how it is reached. It works
// on a range of bags of one feature.
#pragma once

#include "core/bag_map.h"
#include "tbe/table_rows.h"

namespace emb {

struct SampleWeightArgs {
  TableRows rows;
  Bags bags;
  Pooling pooling;
  const BagPlace* places;  // of a variable batch, else null
  const void* grad;        // row of bag `first_bag`; element 0 in a variable batch
  int64_t grad_stride, first_bag;
  float* out;                // [L]
  float* scratch = nullptr;  // one row, where the cache has another dtype than the table
};

using SampleWeightFn = void (*)(const SampleWeightArgs&, int64_t first_bag, int64_t last_bag);

struct SampleWeightTable {
  SampleWeightFn at[2][3][3];  // [cached][weights dtype][gradient dtype]
  SampleWeightFn mixed[3];     // [gradient dtype], where the cache has another dtype
};

}  // namespace emb
