// Registers of floats from packed numbers, `kLanes` at a time. Only for `*_kernels.cpp`.
#pragma once

#include "core/vec.h"
#include "quant/quant.h"

namespace emb::EMB_ISA {

template <int kBits>
inline constexpr int kPackedBytes = kLanes * kBits / 8;

#if defined(__AVX2__)

// The two numbers of each of 8 bytes, in order.
EMB_HD __m128i unpack_halves(__m128i bytes) {
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
  return _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), high);
}

#endif

// `kLanes` numbers from `p` on, which need not be aligned.
template <int kBits>
EMB_HD Vec load_packed(const uint8_t* p) {
#if defined(__AVX512F__)
  __m128i bytes;
  if constexpr (kBits == 8) {
    bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  } else {
    bytes = unpack_halves(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  __m128i bytes;
  if constexpr (kBits == 8) {
    bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  } else {
    int32_t word;
    __builtin_memcpy(&word, p, sizeof(word));
    bytes = unpack_halves(_mm_cvtsi32_si128(word));
  }
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) {
    v[i] = static_cast<float>(kBits == 8 ? p[i] : p[i / 2] >> (i % 2 * 4) & 15);
  }
  return v;
#endif
}

// The first `n` (0 < n < kLanes) of them; no byte behind those is read, and the rest is no number
// of the row.
template <int kBits>
EMB_HD Vec load_packed_first(const uint8_t* p, int n) {
  uint8_t buffer[kPackedBytes<kBits>] = {};
  const int bytes = (n * kBits + 7) / 8;
  for (int i = 0; i < bytes; ++i) buffer[i] = p[i];
  return load_packed<kBits>(buffer);
}

}  // namespace emb::EMB_ISA
