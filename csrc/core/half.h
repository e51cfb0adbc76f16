// The storage types fp16 (half16) and bf16 (bfloat16): 16 bits in memory, float in registers. There
// is no arithmetic in 16 bits, only conversion. `to_float` is exact. `from_float<T>`, for these
// types and float, rounds to nearest, ties to even; large numbers become infinity, and a NaN stays
// a NaN. Host and device return the same bits, except for a NaN. On a host thread that flushes
// denormals (torch.set_flush_denormal) `to_float` of a subnormal half16 is 0.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/portability.h"

#if defined(__CUDACC__)
#include <cuda_fp16.h>
#endif

namespace emb {

// 1 sign bit, 5 bits of exponent, 10 of mantissa.
struct half16 {
  uint16_t bits;
};

// The upper 16 bits of a float32: 1 sign bit, 8 bits of exponent, 7 of mantissa.
struct bfloat16 {
  uint16_t bits;
};

// Return the bits of a float.
EMB_HD uint32_t float_bits(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof(bits));
  return bits;
}

// Return the float that has the bits `bits`.
EMB_HD float float_from_bits(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof(x));
  return x;
}

EMB_HD float to_float(float x) { return x; }

EMB_HD float to_float(bfloat16 x) { return float_from_bits(static_cast<uint32_t>(x.bits) << 16); }

EMB_HD float to_float(half16 x) {
#if defined(__CUDA_ARCH__)
  return __half2float(__ushort_as_half(x.bits));
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) {  // infinity stays infinite, and NaN keeps its payload
    return float_from_bits(sign | 0x7f800000u | (magnitude & 0x03ffu) << 13);
  }
  // Scaling by 2^112 moves the exponent bias from 15 to 127, subnormals included.
  return float_from_bits(sign | float_bits(float_from_bits(magnitude << 13) * 0x1p112f));
#endif
}

template <class T>
EMB_HD T from_float(float x);

template <>
EMB_HD float from_float<float>(float x) {
  return x;
}

template <>
EMB_HD bfloat16 from_float<bfloat16>(float x) {
  const uint32_t bits = float_bits(x);
  // NaN must stay NaN: set the highest bit of its payload, which the upper half keeps.
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
EMB_HD half16 from_float<half16>(float x) {
#if defined(__CUDA_ARCH__)
  return {__half_as_ushort(__float2half_rn(x))};
#else
  const uint32_t bits = float_bits(x);
  const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};   // NaN
  if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};  // >= 65520: inf
  if (magnitude < 0x38800000u) {
    // Below 2^-14 the result is subnormal: adding 0.5 aligns the mantissa so that the FPU rounds.
    const uint32_t rounded = float_bits(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u;
  return {static_cast<uint16_t>(sign | rounded >> 13)};
#endif
}

}  // namespace emb
