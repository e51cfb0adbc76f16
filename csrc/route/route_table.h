// The kernels that count and move the ids of a range of bags on the CPU, and how they are reached.
#pragma once

#include "route/route.h"

namespace emb {

struct RouteArgs {
  Routing routing;
  const void* ids;
  Bags bags;
  void* out;  // lengths or ids, of the dtype of the ids
  // Of `move` alone.
  IndexArray starts;
  int64_t total;
  int64_t* positions;
  const float* weights;
  float* out_weights;
  int64_t* scratch;  // three numbers a block of the feature that has most
};

// Bags [begin, end) of feature f. False where the arguments contradict each other: offsets that
// descend, or starts that are not those of the ids.
using RouteFn = bool (*)(const RouteArgs&, int64_t f, int64_t begin, int64_t end);

struct RouteTable {
  RouteFn count[2], move[2];  // [ids are int64]
};

}  // namespace emb
