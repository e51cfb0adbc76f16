// `update_rows_` on the CPU: what its kernels take and how they are reached.
#pragma once

#include "core/portability.h"

namespace emb {

struct UpdateRowsArgs {
  float* weights;            // [rows, width]
  float* element_states[2];  // [rows, width] each
  float* row_state;          // [rows]
  const float* grads;        // [rows, width]
  int64_t width;
  const double* hyper;
};

// Rows [begin, end).
using UpdateRowsFn = void (*)(const UpdateRowsArgs&, int64_t begin, int64_t end);

struct UpdateRowsTable {
  UpdateRowsFn (*find)(const char* optimizer);  // null if there is no such optimizer
};

}  // namespace emb
