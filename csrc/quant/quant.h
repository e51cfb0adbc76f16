// Rows of 8 or 4 bits a value. Value d of a row is `scale * q + offset` for its number q, where
// offset is the smallest value of the row and scale a 2^bits - 1-th of what lies between it and the
// largest; of 4 bits the even columns are the low halves of their bytes. Rows lie one after the
// other, each filled up to whole bytes, scales in a tensor of their own.
#pragma once

#include <cmath>
#include <cstdint>

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

}  // namespace emb
