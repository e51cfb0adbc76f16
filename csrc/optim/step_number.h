// The number of a step as a state of one float a row: exact far beyond 2^24, where the floats
// themselves are not. Up to 2^24 it is the float of that value; each further step is the next float
// (the next bit pattern), and after the largest finite one come the negative ones from the smallest
// on. So what was saved when steps were plain floats is read as it was meant.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/portability.h"

namespace emb {

inline constexpr int64_t kLastPlainStep = 1 << 24;
inline constexpr uint32_t kBitsOfLastPlainStep = 0x4B800000u, kBitsOfInfinity = 0x7F800000u;
inline constexpr uint32_t kSkippedPatterns = 0x00800001u;  // infinity, NaNs and -0
// What the largest negative float stands for: about 3.0e9 steps. It stays there.
inline constexpr int64_t kLastStep =
    kLastPlainStep + (0xFF7FFFFFu - kSkippedPatterns - kBitsOfLastPlainStep);

EMB_HD float encode_step(int64_t step) {
  if (step <= kLastPlainStep) return static_cast<float>(step);
  if (step > kLastStep) step = kLastStep;
  uint32_t bits = kBitsOfLastPlainStep + static_cast<uint32_t>(step - kLastPlainStep);
  if (bits >= kBitsOfInfinity) bits += kSkippedPatterns;
  float code;
  memcpy(&code, &bits, sizeof code);
  return code;
}

EMB_HD int64_t decode_step(float code) {
  uint32_t bits;
  memcpy(&bits, &code, sizeof bits);
  if (bits <= kBitsOfLastPlainStep) return static_cast<int64_t>(code);
  if (bits > kBitsOfInfinity) bits -= kSkippedPatterns;
  return kLastPlainStep + (bits - kBitsOfLastPlainStep);
}

}  // namespace emb
