// Stochastic rounding from float to 16 bits. A value is rounded up or down at random, such that its
// mean is exact: updates far below one unit in the last place still count on average. The random
// words come from a counter made of row, columns, step and tensor, so they are the same on any
// number of threads and on any device.
#pragma once

#include "core/codes.h"
#include "core/half.h"
#include "core/random.h"

namespace emb {

// The tensor of a row that is rounded; each value selects separate random words. States are
// numbered from kRoundState on. kRoundWriteBack is added for the write-back of a cached row.
enum RoundedTensor : uint32_t { kRoundWeights = 0, kRoundState = 1, kRoundWriteBack = 8 };

// How the values of one step are rounded to 16 bits.
struct Rounding {
  uint64_t seed;    // the key of the random words
  uint32_t step;    // number of the step
  bool stochastic;  // whether to round at random; else to nearest

  // Round to nearest.
  EMB_HD Rounding() : seed(0), step(0), stochastic(false) {}
  // Take seed and step from a vector `hyper` (HyperColumn); a negative seed rounds to nearest.
  EMB_HD explicit Rounding(const double* hyper)
      : seed(hyper[kSeed] > 0.0 ? static_cast<uint64_t>(hyper[kSeed]) : 0),
        step(hyper[kStep] > 0.0 ? static_cast<uint32_t>(static_cast<uint64_t>(hyper[kStep])) : 0),
        stochastic(hyper[kSeed] >= 0.0) {}

  // Return the random words for columns [4 * block, 4 * block + 4), block < 2^28, of the row with
  // linear row id `row`. `tensor` is a RoundedTensor.
  EMB_HD Random4 words(int64_t row, uint32_t block, uint32_t tensor) const {
    const auto id = static_cast<uint64_t>(row);
    return philox(seed, static_cast<uint32_t>(id), static_cast<uint32_t>(id >> 32),
                  block | tensor << 28, step);
  }
};

// Return `x` rounded to T, away from zero with a probability that is the fraction of the distance
// from the next value towards zero. `word` is a uniform random word. A finite value becomes
// infinite only if rounding to nearest makes it infinite; NaN stays NaN. The functions have no
// branches, so that loops over them vectorise.
template <class T>
EMB_HD T round_randomly(float x, uint32_t word);

template <>
EMB_HD float round_randomly<float>(float x, uint32_t) {
  return x;
}

template <>
EMB_HD bfloat16 round_randomly<bfloat16>(float x, uint32_t word) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  const uint32_t nearest = (magnitude + 0x7fffu + (magnitude >> 16 & 1u)) >> 16;
  const uint32_t random = (magnitude + (word & 0xffffu)) >> 16;
  uint32_t rounded = random >= 0x7f80u ? nearest : random;
  rounded = magnitude >= 0x7f800000u ? 0x7f80u : rounded;
  rounded = magnitude > 0x7f800000u ? 0x7fc0u : rounded;  // NaN
  return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | rounded)};
}

template <>
EMB_HD half16 round_randomly<half16>(float x, uint32_t word) {
  const uint32_t bits = float_bits(x), magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - 0x38000000u + (word & 0x1fffu)) >> 13;
  // Below 2^-14 the spacing is 2^-24: `mantissa` * 2^-shift counts it. For shifts beyond 31 bits
  // the mantissa itself is shifted, which loses less than 2^-31 of the spacing.
  const uint32_t exponent = magnitude >> 23;
  const uint32_t implicit = exponent > 0 ? 0x800000u : 0u;
  const uint32_t shift = 126u - (exponent > 0 ? exponent : 1u);
  const uint32_t low = shift < 31u ? shift : 31u;
  const uint32_t high = shift - low < 31u ? shift - low : 31u;
  const uint32_t mantissa = ((magnitude & 0x7fffffu) | implicit) >> (high & 31u);
  const uint32_t mask = (1u << (low & 31u)) - 1u;
  const uint32_t subnormal = (mantissa + (word & mask)) >> (low & 31u);
  uint32_t rounded = magnitude < 0x38800000u ? subnormal : normal;
  rounded = rounded < 0x7c00u ? rounded : magnitude >= 0x477ff000u ? 0x7c00u : 0x7bffu;
  rounded = magnitude > 0x7f800000u ? 0x7e00u : rounded;  // NaN
  return {static_cast<uint16_t>((bits >> 16 & 0x8000u) | rounded)};
}

}  // namespace emb
