// The kernels that add up pieces of rows on the CPU, and their adjoint, and how they are reached.
#pragma once

#include "route/route.h"

namespace emb {

struct CombineArgs {
  const void* in;
  void* out;
  const SourcePiece* pieces;
  IndexArray lengths;
  const int32_t* rows;
  float scale;
};

// Rows [begin, end) of a target.
using CombineFn = void (*)(const CombineArgs&, const Target&, int64_t begin, int64_t end);

struct CombineTable {
  CombineFn combine[3][3], spread[3][3];  // [dtype of in][dtype of out]
};

}  // namespace emb
