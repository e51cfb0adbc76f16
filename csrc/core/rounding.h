// Stochastic rounding from float to 16 bits. A value is rounded up or down at random, such that the
// mean of the result is the value. So updates far below one unit in the last place still count on
// average. round_randomly states two exceptions: values above the largest finite number, and very
// small values of half. The random words come from the seed and a counter made of row, columns,
// step and tensor, so they are the same on any number of threads and on any device.
#pragma once

#include <cmath>
#include <type_traits>

#include "core/codes.h"
#include "core/half.h"
#include "core/random.h"

namespace emb {

// The number of the tensor whose row is rounded: tensors with different numbers use different
// random words. An update uses kRoundState + k for state k. The write-back of a row from the cache
// uses kRoundWriteBack + k for tensor k of CacheMemory. Numbers must be below 16.
enum RoundedTensor : uint32_t { kRoundWeights = 0, kRoundState = 1, kRoundWriteBack = 8 };

// The rounding of the values of one step to 16 bits.
struct Rounding {
  uint64_t seed;       // key of the random words
  uint32_t step;       // number of the step
  bool is_stochastic;  // whether to round at random; else to nearest

  // Round to nearest.
  EMB_HD Rounding() : seed(0), step(0), is_stochastic(false) {}
  // Read seed and step from `hyper` (Hyper). With a negative seed, round to nearest.
  EMB_HD explicit Rounding(const double* hyper)
      : seed(hyper[Hyper::kSeed] > 0.0 ? static_cast<uint64_t>(hyper[Hyper::kSeed]) : 0),
        step(hyper[Hyper::kStep] > 0.0
                 ? static_cast<uint32_t>(static_cast<uint64_t>(hyper[Hyper::kStep]))
                 : 0),
        is_stochastic(hyper[Hyper::kSeed] >= 0.0) {}

  // Return the counter whose four random words belong to columns 4 * block to 4 * block + 3 of the
  // row with linear row id `row`; block < 2^28. `tensor` is a RoundedTensor.
  EMB_HD Counter4 counter(int64_t row, uint32_t block, uint32_t tensor) const {
    const auto id = static_cast<uint64_t>(row);
    return {
        {static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32), block | tensor << 28, step}};
  }
  static constexpr int kBlockWord = 2;  // the word of a counter that `block` is added to

  // Return the random words of that counter.
  EMB_HD Random4 words(int64_t row, uint32_t block, uint32_t tensor) const {
    return philox(seed, counter(row, block, tensor));
  }
};

// Return `x` rounded to T by `word`, a uniform random word; a float is returned unchanged.
//
// The result is one of the two neighbours of x in T. It is the one away from zero with probability
// p, the distance of x from the other one, divided by the distance between both. For half, p is
// truncated to a multiple of 2^-13. That is exact for numbers of at least 2^-14; the mean magnitude
// of smaller ones is too small by less than 2^-37.
//
// Beyond the largest finite number of T, the result is that number or infinity; it is infinity only
// if rounding to nearest makes it so. Infinity stays infinite, and NaN stays NaN. The
// functions have no branches, so that loops over them vectorise.
template <class T>
EMB_HD T round_randomly(float x, uint32_t word);

template <>
EMB_HD float round_randomly<float>(float x, uint32_t) {
  return x;
}

template <>
EMB_HD bfloat16 round_randomly<bfloat16>(float x, uint32_t word) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  const uint32_t nearest_bits = (magnitude + 0x7fffu + ((magnitude >> 16) & 1u)) >> 16;
  const uint32_t random_bits = (magnitude + (word & 0xffffu)) >> 16;
  uint32_t rounded = random_bits >= 0x7f80u ? nearest_bits : random_bits;
  rounded = magnitude >= 0x7f800000u ? 0x7f80u : rounded;
  rounded = magnitude > 0x7f800000u ? 0x7fc0u : rounded;  // NaN
  return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | rounded)};
}

// Return |x| as the bits of a half, followed by 13 more bits; it is truncated after these. The bits
// are those of the float |x| * 2^-112: the factor moves the exponent bias from 127 to 15. Numbers
// below 2^-14 are subnormal in half; their spacing is 2^-24 there and 2^-37 here. For |x| >= 2^16,
// infinity and NaN the result is at least 0x7c00 << 13; for infinity and NaN it differs between
// host and device.
EMB_HD uint32_t extended_half_bits(float x) {
#if defined(__CUDA_ARCH__)
  return float_bits(__fmul_rz(fabsf(x), 0x1p-112f));
#else
  // In integers: a processor may take subnormal numbers for zeros, or a hundred cycles for each.
  const uint32_t magnitude = float_bits(x) & 0x7fffffffu;
  const uint32_t shift = 113u - (magnitude >> 23);  // a large number where x is normal in half
  const uint32_t subnormal = ((magnitude & 0x7fffffu) | 0x800000u) >> (shift < 31u ? shift : 31u);
  return magnitude < 0x38800000u ? subnormal : magnitude - 0x38000000u;
#endif
}

template <>
EMB_HD half16 round_randomly<half16>(float x, uint32_t word) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  uint32_t rounded = (extended_half_bits(x) + (word & 0x1fffu)) >> 13;
  const uint32_t overflow = magnitude >= 0x477ff000u ? 0x7c00u : 0x7bffu;
  rounded = rounded < 0x7c00u ? rounded : overflow;
  rounded = magnitude > 0x7f800000u ? 0x7e00u : rounded;  // NaN
  return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | rounded)};
}

// Round four numbers to T, half16 or bfloat16, as round_randomly does. Write two of them to each
// word of `packed`, the first in the lower half. A fused update of 16-bit rows is bound by the
// number of instructions, so the usual case has few. It is wrong for large numbers, which are rare:
// if one of the four is large, a branch rounds all four again.
template <class T>
EMB_HD void round_and_pack(const float (&x)[4], const Random4& random, uint32_t (&packed)[2]) {
  constexpr bool kIsHalf = std::is_same_v<T, half16>;
  uint32_t rounded[4], has_large = 0;
  for (int k = 0; k < 4; ++k) {
    if (kIsHalf) {
      rounded[k] = (extended_half_bits(x[k]) + (random.word[k] & 0x1fffu)) >> 13;
      has_large |= rounded[k] >= 0x7c00u;  // infinity in half
    } else {
      const uint32_t magnitude = float_bits(x[k]) & 0x7fffffffu;
      rounded[k] = (magnitude + (random.word[k] & 0xffffu)) >> 16;
      has_large |= magnitude >= 0x7f7f0000u;  // the largest finite number of bfloat16, or above
    }
  }
  if (has_large) {
    for (int k = 0; k < 4; ++k) {
      rounded[k] = round_randomly<T>(x[k], random.word[k]).bits & 0x7fffu;
    }
  }
  for (int i = 0; i < 2; ++i) {
    packed[i] = rounded[2 * i] | rounded[2 * i + 1] << 16 | (float_bits(x[2 * i]) >> 16 & 0x8000u) |
                (float_bits(x[2 * i + 1]) & 0x80000000u);
  }
}

}  // namespace emb
