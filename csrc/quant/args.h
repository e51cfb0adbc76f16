// Formats of read-only rows, and the arguments of their ops.
//
// A quantised row consists of
//   * its header: its scale and offset, two fp16 values;
//   * its *numbers* q, one per column: integers of 2, 4 or 8 bits, or floats of 8 bits. They fill
//     bytes from the lowest bits on. The value of a column is scale * q + offset;
//   * zeros up to a multiple of 4 bytes, so that a GPU can load words.
// Rows in fp16, bf16 and fp32 have values instead of numbers, and no header. Rows of integers in
// FBGEMM's IntNBit tables have the same header and numbers.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/dtype.h"
#include "core/half.h"
#include "core/layout.h"
#include "core/portability.h"

namespace emb {

// The codes of the formats; the code of an integer format is its number of bits per column.
enum RowFormat : int {
  kInt2 = 2,
  kInt4 = 4,
  kInt8 = 8,
  kFp8E4m3 = 9,
  kFp8E5m2 = 10,
  kFp16 = 16,
  kBf16 = 17,
  kFp32 = 32
};

inline constexpr int kRowFormats[] = {kInt2, kInt4, kInt8, kFp8E4m3, kFp8E5m2, kFp16, kBf16, kFp32};
inline constexpr int kNumRowFormats = sizeof(kRowFormats) / sizeof(int);

// Return the position of a format in `kRowFormats`, -1 for a code that is not there.
constexpr int format_index(int64_t format) {
  for (int i = 0; i < kNumRowFormats; ++i) {
    if (kRowFormats[i] == format) return i;
  }
  return -1;
}

// The header of a row in a format with has_scale(): value = scale * number + offset.
struct RowHeader {
  half16 scale, offset;
};

inline constexpr int kWordBytes = 4;  // the size of a row is a multiple of a word
inline constexpr int kHeaderBytes = sizeof(RowHeader);
static_assert(kHeaderBytes == 4);

inline constexpr float kMaxHalf = 65504.0f;

// Return the number of bits per column in a row of this format. (The codes of fp16 and bf16 are 16
// and 17.)
EMB_HD constexpr int bits_per_column(int format) {
  return format >= kFp16 ? (format & ~1) : (format < kInt8 ? format : 8);
}

EMB_HD constexpr bool is_integer(int format) { return format <= kInt8; }
// Return whether rows of this format have a header, a RowHeader.
EMB_HD constexpr bool has_scale(int format) { return format < kFp16; }

// Return the number of bytes of a row before its numbers.
EMB_HD constexpr int header_bytes(int format) { return has_scale(format) ? kHeaderBytes : 0; }

// Return the number of bytes that the numbers of `num_columns` columns take, the last one rounded
// up.
EMB_HD constexpr int64_t packed_bytes(int64_t num_columns, int format) {
  return (num_columns * bits_per_column(format) + 7) / 8;
}

// Return the number of bytes of a row of `dim` columns, header and padding included.
EMB_HD int64_t row_bytes(int64_t dim, int format) {
  const uint64_t words = (static_cast<uint64_t>(dim * bits_per_column(format)) + 31) / 32;
  return header_bytes(format) + static_cast<int64_t>(words) * kWordBytes;
}

// The next functions are for kFp8E4m3 and kFp8E5m2 only. A float of 8 bits has a sign, an exponent
// with the bias exponent_bias(), and mantissa_bits() bits of mantissa.
EMB_HD constexpr int mantissa_bits(int format) { return format == kFp8E4m3 ? 3 : 2; }
EMB_HD constexpr int exponent_bias(int format) { return format == kFp8E4m3 ? 7 : 15; }
EMB_HD constexpr float max_float8(int format) { return format == kFp8E4m3 ? 448.0f : 57344.0f; }

// Return the factor for decoding a float of 8 bits: its magnitude bits are moved to the top of the
// magnitude bits of a float32, which is then multiplied by the factor, since the biases differ.
EMB_HD constexpr float float8_factor(int format) {
  return format == kFp8E4m3 ? 0x1p120f : 0x1p112f;  // 2^(127 - bias)
}

// Return the bits of the float of 8 bits nearest to x (ties to even); |x| must be at most
// max_float8(format).
EMB_HD uint32_t float8_bits(float x, int format) {
  const int shift = 23 - mantissa_bits(format), bias = exponent_bias(format);
  const uint32_t bits = float_bits(x), sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Below the smallest normal number, 2^(1 - bias), round to a multiple of the smallest subnormal.
  if (magnitude < static_cast<uint32_t>(128 - bias) << 23) {
    const float multiple = float_from_bits(magnitude) * (format == kFp8E4m3 ? 0x1p9f : 0x1p16f);
    return sign | static_cast<uint32_t>(rintf(multiple));
  }
  const uint32_t rounded = magnitude + (1u << (shift - 1)) - 1 + ((magnitude >> shift) & 1u);
  return sign | ((rounded >> shift) - (static_cast<uint32_t>(127 - bias) << mantissa_bits(format)));
}

// Return x, clamped to the range of finite fp16. Return 0 for -0, because the sign would make rows
// of equal values differ.
EMB_HD float clamp_to_half(float x) {
  return (x > kMaxHalf ? kMaxHalf : (x < -kMaxHalf ? -kMaxHalf : x)) + 0.0f;
}

// Return the header of a row with this minimum and maximum, both finite; they are clamped to the
// range of fp16 first. `format` must have a header. For integers it is the header of FBGEMM: the
// offset is the minimum in fp16, and the scale is (maximum - offset) / largest number. (The scale
// is negative if the maximum is below the offset, which may have been rounded up.) For floats of 8
// bits the offset is 0, and the scale is large enough that no magnitude exceeds max_float8. A scale
// of 0 is replaced by 1.
EMB_HD RowHeader row_header(float minimum, float maximum, int format) {
  const half16 one = {0x3c00u};
  if (!is_integer(format)) {
    const float magnitude = clamp_to_half(-minimum > maximum ? -minimum : maximum);
    half16 scale = from_float<half16>(magnitude / max_float8(format));
    if (to_float(scale) * max_float8(format) < magnitude) ++scale.bits;
    return {scale.bits == 0 ? one : scale, {0}};
  }
  const half16 offset = from_float<half16>(clamp_to_half(minimum));
  const float range = clamp_to_half(maximum) - to_float(offset);
  const half16 scale = from_float<half16>(range / static_cast<float>((1 << format) - 1));
  return {(scale.bits & 0x7fffu) == 0 ? one : scale, offset};
}

// The offset of a row and the inverse of its scale, as floats, to encode its values.
struct InverseHeader {
  float inverse_scale, offset;

  EMB_HD explicit InverseHeader(RowHeader row)
      : inverse_scale(1.0f / to_float(row.scale)), offset(to_float(row.offset)) {}
};

// Return the bits of a value in a row of this format, rounded to the nearest number, ties to even.
// In a format with a header, values outside the range of the numbers are clamped to the range; in
// other formats `row` is not read.
EMB_HD uint32_t encode(float value, InverseHeader row, int format) {
  if (format == kFp32) return float_bits(value);
  if (format == kFp16) return from_float<half16>(value).bits;
  if (format == kBf16) return from_float<bfloat16>(value).bits;
  const float unrounded = (value - row.offset) * row.inverse_scale;
  const float max_number =
      is_integer(format) ? static_cast<float>((1 << format) - 1) : max_float8(format);
  const float capped = unrounded < max_number ? unrounded : max_number;
  if (!is_integer(format)) {
    return float8_bits(capped > -max_number ? capped : -max_number, format);
  }
  return static_cast<uint32_t>(static_cast<int>(rintf(capped > 0.0f ? capped : 0.0f)));
}

// The arguments of the CPU kernels of `quantize_rows_`. Pointers are to the op's tensors.
struct QuantizeArgs {
  const void* weights;  // [R, dim], dim > 0, of the dtype for which the kernel is chosen
  uint8_t* packed;      // [R, row_bytes(dim, format)], an output
  int64_t dim;
};

// Quantise rows [first_row, last_row). Calls for disjoint ranges may run at once.
using QuantizeFn = void (*)(const QuantizeArgs&, int64_t first_row, int64_t last_row);

// The CPU kernels of `quantize_rows_`.
struct QuantizeTable {
  QuantizeFn kernels[kNumRowFormats][kNumDtypes];  // [format_index][dtype of `weights`]
};

// The arguments of the CPU kernels of `quant_lookup`, which pool a range of bags of one feature.
// Pointers are to the op's tensors.
struct QuantLookupArgs {
  const uint8_t* packed;  // [num_rows, row_bytes(dim, format)]: the feature's table
  int64_t num_rows, dim;
  const void* indices;  // [L] of all features, int32 or int64; repaired as they are read
  BagItems bags;
  const float* sample_weights;  // [L] or null; null without pooling
  void* out;                    // the base of the output (see BagItems), of the output dtype
};

// Write the output rows of bags [first_bag, last_bag), at least one, all of the same feature. Calls
// for disjoint ranges may run at once.
using QuantLookupFn = void (*)(const QuantLookupArgs&, int64_t first_bag, int64_t last_bag);

// The CPU kernels of `quant_lookup`.
struct QuantLookupTable {
  // [format_index][output dtype][whether indices are int64]
  QuantLookupFn kernels[kNumRowFormats][kNumDtypes][2];
};

}  // namespace emb
