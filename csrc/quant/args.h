// The format of rows of 8 or 4 bits per value, and the arguments and function tables of the CPU
// kernels of their ops.
//
// A row is its scale and its offset, both float16, then the *number* q of each column, an unsigned
// integer of 8 or 4 bits, then zeros up to a multiple of 4 bytes, so that a GPU can load words. The
// value of a column is scale * q + offset. With 4 bits the even columns are the low halves of their
// bytes. FBGEMM's IntNBit rows have the same format.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/half.h"
#include "core/layout.h"
#include "core/portability.h"

namespace emb {

// The header of a row.
struct RowScale {
  half16 scale, offset;
};

inline constexpr int kWordBytes = 4;  // rows are a multiple of a word
inline constexpr int kHeaderBytes = sizeof(RowScale);
static_assert(kHeaderBytes == 4);

inline constexpr float kLargestHalf = 65504.0f;

// Return the bytes that the numbers of `columns` columns take.
EMB_HD int64_t packed_bytes(int64_t columns, int bits) { return (columns * bits + 7) / 8; }

// Return the bytes of a row of `dim` columns, header and padding included.
EMB_HD int64_t row_bytes(int64_t dim, int bits) {
  const uint64_t words = (static_cast<uint64_t>(dim * bits) + 31) / 32;
  return kHeaderBytes + static_cast<int64_t>(words) * kWordBytes;
}

// Return the largest half that is at most x, for a finite x of at least -kLargestHalf.
EMB_HD half16 half_at_most(float x) {
  const half16 nearest = from_float<half16>(x);
  if (to_float(nearest) <= x) return nearest;
  const bool negative = (nearest.bits & 0x8000u) != 0;
  return {static_cast<uint16_t>(negative ? nearest.bits + 1 : nearest.bits - 1)};
}

// Return the smallest half that is at least x, for a finite x of at most kLargestHalf.
EMB_HD half16 half_at_least(float x) {
  return {static_cast<uint16_t>(half_at_most(-x).bits ^ 0x8000u)};
}

// Return x, or the closest end of the range of finite halves. Return 0 for -0, because the sign
// would make rows of equal values differ.
EMB_HD float clamp_to_half(float x) {
  return (x > kLargestHalf ? kLargestHalf : x < -kLargestHalf ? -kLargestHalf : x) + 0.0f;
}

// Return the header of a row whose minimum and maximum are `low` and `high`, both finite. The
// offset is rounded down and the scale up, so that the numbers reach both ends.
EMB_HD RowScale row_scale(float low, float high, int bits) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  const half16 offset = half_at_most(clamp_to_half(low));
  return {half_at_least((clamp_to_half(high) - to_float(offset)) / levels), offset};
}

// The scale and offset of a row as floats.
struct RowStep {
  float scale, offset;

  EMB_HD explicit RowStep(RowScale row)
      : scale(to_float(row.scale)), offset(to_float(row.offset)) {}
};

// Return the number of a value, to nearest, ties to even; 0 if the scale is 0.
EMB_HD uint8_t quantized(float value, RowStep row, int bits) {
  const auto levels = static_cast<float>((1 << bits) - 1);
  const float steps = row.scale > 0.0f ? (value - row.offset) / row.scale : 0.0f;
  const float inside = steps < levels ? steps : levels;
  return static_cast<uint8_t>(static_cast<int>(rintf(inside > 0.0f ? inside : 0.0f)));
}

// The CPU kernels of `quantize_rows_`.

struct QuantizeArgs {
  const void* rows;  // [R, dim], dim > 0; the kernel is chosen by dtype
  uint8_t* packed;   // [R, row_bytes(dim, bits)], an output
  int64_t dim;
  int bits;  // 8 or 4
};

// Quantise rows [first_row, last_row).
using QuantizeFn = void (*)(const QuantizeArgs&, int64_t first_row, int64_t last_row);

struct QuantizeTable {
  QuantizeFn at[kDtypes];  // [dtype]
};

// The CPU kernels of `quant_lookup`, which work on a range of bags of one feature.

struct QuantLookupArgs {
  const uint8_t* packed;  // [rows, row_bytes(dim, bits)]: the feature's table
  int64_t rows, dim;
  const void* indices;  // [L], repaired as they are read
  BagRows bags;
  const float* sample_weights;  // [L] or null; null without pooling
  void* out;                    // the base of the output rows (see BagRows), of the output dtype
};

// Write the output rows of bags [first_bag, last_bag), at least one, all of the same feature.
using QuantLookupFn = void (*)(const QuantLookupArgs&, int64_t first_bag, int64_t last_bag);

struct QuantLookupTable {
  QuantLookupFn at[2][kDtypes][2];  // [8 bits, 4 bits][output dtype][indices are int64]
};

}  // namespace emb
