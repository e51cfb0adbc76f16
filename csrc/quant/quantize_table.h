// The kernel that quantises rows on the CPU, and how it is reached.
#pragma once

#include "core/dtype.h"
#include "quant/quant.h"

namespace emb {

struct QuantizeArgs {
  const void* rows;  // [R, dim]
  uint8_t* values;   // [R, packed bytes]
  RowScale* scales;  // [R]
  int64_t dim;
  int bits;
};

using QuantizeFn = void (*)(const QuantizeArgs&, int64_t first_row, int64_t last_row);

struct QuantizeTable {
  QuantizeFn at[3];  // [dtype]
};

}  // namespace emb
