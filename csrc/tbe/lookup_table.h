// The forward kernel of table-batched embeddings on the CPU: what it takes and how it is reached.
// It works on a range of bags of one feature; lookup_cpu.cpp checks, allocates and cuts the work.
#pragma once

#include "core/bag_map.h"
#include "tbe/table_rows.h"

namespace emb {

struct LookupArgs {
  TableRows rows;
  Bags bags;
  Pooling pooling;
  const float* sample_weights;  // [L] or null
  const BagPlace* places;       // of a variable batch, else null
  // Output row of bag `first_bag`; of lookup 0 for NONE; element 0 in a variable batch.
  void* out;
  int64_t out_stride, first_bag;
  float* scratch = nullptr;  // one row, where the cache has another dtype than the table
};

using LookupFn = void (*)(const LookupArgs&, int64_t first_bag, int64_t last_bag);

struct LookupTable {
  LookupFn at[2][3][3][2];  // [cached][weights dtype][output dtype][indices are int64]
  LookupFn mixed[3];        // [output dtype], where the cache has another dtype than the table
};

}  // namespace emb
