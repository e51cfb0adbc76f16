// CRC-32 of bytes as zlib computes it: the reflected polynomial 0xEDB88320, with the initial and
// the final value inverted.
//
// crc32_by_tables reads 16 bytes per step and looks each byte up in a table ("slicing by 16"). On
// big-endian processors it reads one byte per step. crc32_by_folding needs PCLMULQDQ and SSE4.1,
// and folds 64 bytes per step by carry-less multiplications, as in V. Gopal et al., "Fast CRC
// Computation for Generic Polynomials Using PCLMULQDQ Instruction" (Intel, 2009). It uses the
// tables for the last bytes and for short inputs.
#pragma once

#include <array>
#include <bit>
#include <cstdint>
#include <cstring>

#if defined(EMB_X86)
#include <immintrin.h>
#endif

namespace emb {

inline constexpr uint32_t kCrcPolynomial = 0xEDB88320;
inline constexpr int kNumCrcTables = 16;  // also the bytes per step of extend_crc32_by_tables

using CrcTables = std::array<std::array<uint32_t, 256>, kNumCrcTables>;

// Return the tables: entry [k][byte] is the CRC of `byte` followed by k zero bytes, not inverted.
constexpr CrcTables make_crc_tables() {
  CrcTables tables{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1 ? kCrcPolynomial : 0);
    tables[0][byte] = crc;
  }
  for (int k = 1; k < kNumCrcTables; ++k) {
    for (uint32_t byte = 0; byte < 256; ++byte) {
      const uint32_t crc = tables[k - 1][byte];
      tables[k][byte] = (crc >> 8) ^ tables[0][crc & 0xFF];
    }
  }
  return tables;
}

inline constexpr CrcTables kCrcTables = make_crc_tables();

// Extend a CRC by the `size` >= 0 bytes of `data`. `crc` and the result are not inverted.
inline uint32_t extend_crc32_by_tables(uint32_t crc, const unsigned char* data, int64_t size) {
  if constexpr (std::endian::native == std::endian::little) {
    for (; size >= kNumCrcTables; data += kNumCrcTables, size -= kNumCrcTables) {
      uint32_t words[4];
      std::memcpy(words, data, sizeof(words));
      words[0] ^= crc;
      crc = 0;
      for (int word = 0; word < 4; ++word) {
        for (int byte = 0; byte < 4; ++byte) {
          crc ^=
              kCrcTables[kNumCrcTables - 1 - 4 * word - byte][(words[word] >> (8 * byte)) & 0xFF];
        }
      }
    }
  }
  for (; size > 0; ++data, --size) crc = (crc >> 8) ^ kCrcTables[0][(crc ^ *data) & 0xFF];
  return crc;
}

// Return the CRC-32 of `size` >= 0 bytes.
inline uint32_t crc32_by_tables(const unsigned char* data, int64_t size) {
  return ~extend_crc32_by_tables(~uint32_t{0}, data, size);
}

#if defined(EMB_X86)

inline constexpr int64_t kCrcFoldBytes = 64;  // bytes per step, in four registers

// The next two functions need a processor with PCLMULQDQ and SSE4.1.

// Multiply `value` by the power of x for which `factors` were computed, and add `addend`, a
// polynomial over GF(2). Return 128 bits with the remainder of the result modulo the CRC
// polynomial.
__attribute__((target("pclmul,sse4.1"))) inline __m128i fold_crc(__m128i value, __m128i factors,
                                                                 __m128i addend) {
  const __m128i low = _mm_clmulepi64_si128(value, factors, 0x00);
  const __m128i high = _mm_clmulepi64_si128(value, factors, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), addend);
}

// Return the CRC-32 of `size` >= 0 bytes: fold 64 bytes per step, then 16, reduce the sum to 32
// bits, and extend it by the last bytes with the tables. The constants are from the paper above:
// factors x^k mod P, bit-reflected, for the distances of the folds, and the polynomial P with its
// quotient for Barrett's reduction.
__attribute__((target("pclmul,sse4.1"))) inline uint32_t crc32_by_folding(const unsigned char* data,
                                                                          int64_t size) {
  if (size < kCrcFoldBytes) return crc32_by_tables(data, size);
  const auto load = [&](int64_t offset) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + offset));
  };
  const __m128i by_64_bytes = _mm_set_epi64x(0x01C6E41596, 0x0154442BD4);
  const __m128i by_16_bytes = _mm_set_epi64x(0x00CCAA009E, 0x01751997D0);
  const __m128i by_8_bytes = _mm_set_epi64x(0, 0x0163CD6124);
  const __m128i polynomial = _mm_set_epi64x(0x01F7011641, 0x01DB710641);
  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);

  __m128i sums[4];
  for (int i = 0; i < 4; ++i) sums[i] = load(16 * i);
  sums[0] = _mm_xor_si128(sums[0], _mm_cvtsi32_si128(-1));  // the inverted start
  int64_t offset = kCrcFoldBytes;
  for (; offset + kCrcFoldBytes <= size; offset += kCrcFoldBytes) {
    for (int i = 0; i < 4; ++i) sums[i] = fold_crc(sums[i], by_64_bytes, load(offset + 16 * i));
  }
  __m128i sum = sums[0];
  for (int i = 1; i < 4; ++i) sum = fold_crc(sum, by_16_bytes, sums[i]);
  for (; offset + 16 <= size; offset += 16) sum = fold_crc(sum, by_16_bytes, load(offset));

  // Reduce 128 bits to 64, then to 32 by Barrett's method.
  sum = _mm_xor_si128(_mm_srli_si128(sum, 8), _mm_clmulepi64_si128(sum, by_16_bytes, 0x10));
  sum = _mm_xor_si128(_mm_srli_si128(sum, 4),
                      _mm_clmulepi64_si128(_mm_and_si128(sum, low_words), by_8_bytes, 0x00));
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(sum, low_words), polynomial, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), polynomial, 0x00);
  const auto crc = static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(sum, quotient), 1));
  return ~extend_crc32_by_tables(crc, data + offset, size - offset);
}

#endif

}  // namespace emb
