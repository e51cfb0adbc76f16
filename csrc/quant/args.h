// Rows of 8 or 4 bits a value. Value d of a row is `scale * q + offset` for its number q, where
// offset is the smallest value of the row and scale a 2^bits - 1-th of what lies between it and the
// largest; of 4 bits the even columns are the low halves of their bytes. Rows lie one after the
// other, each filled up to whole bytes, scales in a tensor of their own.
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

// The scale of a row between `low` and `high`.
EMB_HD RowScale row_scale(float low, float high, int bits) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  // Not (high - low) / levels, which may be too large for a float.
  return {high / levels - low / levels, low};
}

// The number of a value, rounded to nearest even.
EMB_HD uint8_t quantized(float value, RowScale row, int bits) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  const float steps = row.scale > 0.0f ? (value - row.offset) / row.scale : 0.0f;
  const float inside = steps < levels ? steps : levels;
  return static_cast<uint8_t>(static_cast<int>(rintf(inside > 0.0f ? inside : 0.0f)));
}

// The kernel that quantises rows on the CPU, and how it is reached.

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

// The lookup in quantised tables on the CPU: what its kernel takes and how it is reached. It works
// on a range of bags of one feature.

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
  QuantLookupFn at[2][kDtypes][2];  // [8 bits, 4 bits][output dtype][indices are int64]
};

}  // namespace emb
