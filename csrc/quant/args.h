// Rows of 8 or 4 bits per value, and the arguments of their ops. Value d of a row is
// `scale * q + offset` for its number q: offset is the minimum of the row and scale the range of
// the row divided by 2^bits - 1. With 4 bits the even columns are the low halves of their bytes.
// Rows are contiguous, each padded to whole bytes; the scales are a separate tensor.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/layout.h"
#include "core/portability.h"

namespace emb {

struct RowScale {
  float scale, offset;
};

EMB_HD int64_t packed_bytes(int64_t columns, int bits) { return (columns * bits + 7) / 8; }

// Return the scale of a row with values in [low, high].
EMB_HD RowScale row_scale(float low, float high, int bits) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  // Not (high - low) / levels: the difference may overflow.
  return {high / levels - low / levels, low};
}

// Return the number of a value, rounded to nearest even.
EMB_HD uint8_t quantized(float value, RowScale row, int bits) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  const float steps = row.scale > 0.0f ? (value - row.offset) / row.scale : 0.0f;
  const float inside = steps < levels ? steps : levels;
  return static_cast<uint8_t>(static_cast<int>(rintf(inside > 0.0f ? inside : 0.0f)));
}

// The CPU kernels of `quantize_rows_`.

struct QuantizeArgs {
  const void* rows;  // [R, dim]
  uint8_t* values;   // [R, packed bytes]
  RowScale* scales;  // [R]
  int64_t dim;
  int bits;
};

using QuantizeFn = void (*)(const QuantizeArgs&, int64_t first_row, int64_t last_row);

struct QuantizeTable {
  QuantizeFn at[kDtypes];  // [dtype]
};

// The CPU kernels of `quant_lookup`, which work on a range of bags of one feature.

struct QuantLookupArgs {
  const uint8_t* values;  // row 0 of the feature's table
  const RowScale* scales;
  int64_t rows, dim;
  const void* indices;
  Bags bags;
  Pooling pooling;
  const float* sample_weights;  // [L] or null
  const BagLayout* bag_layout;  // of a variable batch, else null
  // Output row of bag `first_bag`; of lookup 0 for NONE; element 0 in a variable batch.
  void* out;
  int64_t out_stride, first_bag;
};

using QuantLookupFn = void (*)(const QuantLookupArgs&, int64_t first_bag, int64_t last_bag);

struct QuantLookupTable {
  QuantLookupFn at[2][kDtypes][2];  // [8 bits, 4 bits][output dtype][indices are int64]
};

}  // namespace emb
