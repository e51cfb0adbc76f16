// The forward kernel of table-batched embeddings on the CPU: what it takes and how it is reached.
// It works on a range of bags of one feature; lookup_cpu.cpp checks, allocates and cuts the work.
#pragma once

#include "core/dtype.h"

namespace emb {

struct LookupArgs {
  const void* table;  // row 0 of the feature's table
  int64_t rows, dim;
  IndexArray indices;
  Bags bags;
  Pooling pooling;
  const float* sample_weights;  // [L] or null
  void* out;                    // output row of bag `first_bag`; for NONE of lookup 0
  int64_t out_stride, first_bag;
};

using LookupFn = void (*)(const LookupArgs&, int64_t first_bag, int64_t last_bag);

struct LookupTable {
  LookupFn at[3][3][2];  // [weights dtype][output dtype][indices are int64]
};

}  // namespace emb
