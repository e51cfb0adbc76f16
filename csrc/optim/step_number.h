// The number of a step as a state of one float per row, exact far beyond 2^24, where the floats
// themselves are not: up to 2^24 it is the float of that value, from there on each step is the next
// float (the next bit pattern). What was saved when steps were plain floats is read as it was
// meant.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "core/portability.h"

namespace emb {

inline constexpr float kLastPlainStep = 1 << 24;
inline constexpr int32_t kBitsOfLastPlainStep = 0x4B800000, kBitsOfLargestFloat = 0x7F7FFFFF;
// What the largest float stands for: about 8.9e8 steps. Later steps are written as this one.
inline constexpr double kLastStep =
    double{kLastPlainStep} + (kBitsOfLargestFloat - kBitsOfLastPlainStep);

EMB_HD float encode_step(double step) {
  if (step <= kLastPlainStep) return static_cast<float>(step);
  if (step > kLastStep) step = kLastStep;
  const int32_t bits = kBitsOfLastPlainStep + static_cast<int32_t>(step - kLastPlainStep);
  float code;
  memcpy(&code, &bits, sizeof code);
  return code;
}

// Steps after 2^24; 0 up to it.
EMB_HD int32_t steps_beyond_plain(float code) {
  int32_t bits;
  memcpy(&bits, &code, sizeof bits);
  return bits > kBitsOfLastPlainStep ? bits - kBitsOfLastPlainStep : 0;
}

// Steps from one number to a later one, rounded to a float only at the end.
EMB_HD float steps_between(float previous, float now) {
  const float plain = fminf(now, kLastPlainStep) - fminf(previous, kLastPlainStep);
  return plain + static_cast<float>(steps_beyond_plain(now) - steps_beyond_plain(previous));
}

}  // namespace emb
