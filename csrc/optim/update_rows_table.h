// `update_rows_` on the CPU: what its kernels take and how they are reached.
#pragma once

#include "optim/tiers.h"

namespace emb {

struct UpdateRowsArgs {
  TierRows tier;       // float32 matrices [rows, width], states of one number a row [rows]
  const float* grads;  // [rows, width]
  int64_t width;
  const double* hyper;
};

// Rows [begin, end); `scratch` has room for a row.
using UpdateRowsFn = void (*)(const UpdateRowsArgs&, float* scratch, int64_t begin, int64_t end);

struct UpdateRowsTable {
  UpdateRowsFn (*find)(int optimizer);  // null if there is no such optimizer
};

}  // namespace emb
