// The lookup in quantised tables on the CPU: what its kernel takes and how it is reached. It works
// on a range of bags of one feature.
#pragma once

#include "core/bag_map.h"
#include "quant/quant.h"

namespace emb {

struct QuantLookupArgs {
  const uint8_t* values;  // of row 0 of the feature's table
  const RowScale* scales;
  int64_t rows, dim;
  const void* indices;
  Bags bags;
  Pooling pooling;
  const float* sample_weights;  // [L] or null
  const BagPlace* places;       // of a variable batch, else null
  // Output row of bag `first_bag`; of lookup 0 for NONE; element 0 in a variable batch.
  void* out;
  int64_t out_stride, first_bag;
};

using QuantLookupFn = void (*)(const QuantLookupArgs&, int64_t first_bag, int64_t last_bag);

struct QuantLookupTable {
  QuantLookupFn at[2][3][2];  // [8 bits, 4 bits][output dtype][indices are int64]
};

}  // namespace emb
