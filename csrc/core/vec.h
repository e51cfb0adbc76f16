// Vec, a register of floats for the CPU kernels. It has 16, 8 or 4 lanes, depending on the
// instruction set that this translation unit is compiled for. Loads convert from float, fp16 or
// bf16, and stores convert to them, rounding to nearest even. Addresses need no alignment. Only
// `*_kernels.cpp` and headers for them may include it, since its meaning depends on EMB_ISA.
#pragma once

#if !defined(EMB_ISA)
#error "vec.h needs EMB_ISA: include it from a *_kernels.cpp only"
#endif

#include "core/dtype.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace emb::EMB_ISA {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__)
inline constexpr int kLanes = 8;
#else
inline constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));

// Return a vector with the lanes kSources of the concatenation of `a` and `b`.
template <int... kSources, typename V>
EMB_HD V shuffle(V a, V b) {
#if __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, kSources...);
#else  // gcc 11
  return __builtin_shuffle(a, b, decltype(a == b){kSources...});
#endif
}

// Return a register with x in all lanes.
EMB_HD Vec broadcast(float x) { return Vec{} + x; }

// Load or store kLanes elements at `p`, which may have any alignment.
EMB_HD Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}

EMB_HD void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }

#if defined(__AVX512F__)

// Convert 16 numbers of 16 bits to floats, or floats to them. The first argument only selects the
// type.
EMB_HD Vec widen(half16, __m256i bits) { return _mm512_cvtph_ps(bits); }
EMB_HD Vec widen(bfloat16, __m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
EMB_HD __m256i narrow(half16, Vec v) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
EMB_HD __m256i narrow(bfloat16, Vec v) {
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(
      _mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16));
}

template <class T>
EMB_HD Vec load(const T* p) {
  return widen(T{}, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
template <class T>
EMB_HD void store(T* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(T{}, v));
}

#elif defined(__AVX2__)

EMB_HD Vec load(const half16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
EMB_HD Vec load(const bfloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
EMB_HD void store(half16* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
EMB_HD void store(bfloat16* p, Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256 is_nan = _mm256_cmp_ps(v, v, _CMP_UNORD_Q);
  const __m256i words =
      _mm256_srli_epi32(_mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(rounded),
                                                             _mm256_castsi256_ps(quiet), is_nan)),
                        16);
  // Packing works within halves of 128 bits, so quarters 0 and 2 have the eight words.
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(words, words), 0x08);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
}

#else

template <class T>
EMB_HD Vec load(const T* p) {
  Vec v;
  for (int i = 0; i < kLanes; ++i) v[i] = to_float(p[i]);
  return v;
}
template <class T>
EMB_HD void store(T* p, Vec v) {
  for (int i = 0; i < kLanes; ++i) p[i] = from_float<T>(v[i]);
}

#endif

// Copy n < kLanes elements, in copies of powers of two: a loop over n would become a call of
// memcpy.
template <class T>
EMB_HD void copy_first(const T* from, int n, T* to) {
  for (int count = kLanes / 2; count > 0; count /= 2) {
    if ((n & count) == 0) continue;
    __builtin_memcpy(to, from, count * sizeof(T));
    from += count;
    to += count;
  }
}

// Load or store the first `n` elements only, 0 < n < kLanes. The other lanes load as zero; memory
// beyond the n elements is neither read nor written.
template <class T>
EMB_HD Vec load_first(const T* p, int n) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>((1u << n) - 1u);
  if constexpr (sizeof(T) == 4) return _mm512_maskz_loadu_ps(mask, p);
  if constexpr (sizeof(T) == 2) return widen(T{}, _mm256_maskz_loadu_epi16(mask, p));
#elif defined(__AVX2__)
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256i is_first = _mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes);
  if constexpr (sizeof(T) == 4) return _mm256_maskload_ps(p, is_first);
#endif
  T buffer[kLanes] = {};
  copy_first(p, n, buffer);
  return load(buffer);
}

template <class T>
EMB_HD void store_first(T* p, Vec v, int n) {
#if defined(__AVX512F__)
  const auto mask = static_cast<__mmask16>((1u << n) - 1u);
  if constexpr (sizeof(T) == 4) return _mm512_mask_storeu_ps(p, mask, v);
  if constexpr (sizeof(T) == 2) return _mm256_mask_storeu_epi16(p, mask, narrow(T{}, v));
#endif
  T buffer[kLanes];
  store(buffer, v);
  copy_first(buffer, n, p);
}

// Convert `count` elements of the row `from` to the dtype of the row `to`, rounded to nearest. The
// rows must not overlap.
template <class To, class From>
EMB_HD void convert_row(const From* __restrict from, int64_t count, To* __restrict to) {
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) store(to + i, load(from + i));
  const int num_remaining = static_cast<int>(count - i);
  if (num_remaining > 0) store_first(to + i, load_first(from + i, num_remaining), num_remaining);
}

// Convert `dim` elements of `data`, from element number `element` on, to the floats `out`. `type`
// is kFloat, kHalf or, for any other value, bfloat16.
[[gnu::noinline]] inline void widen_row(const void* data, Dtype type, int64_t element, int64_t dim,
                                        float* out) {
  if (type == Dtype::kFloat) {
    convert_row(static_cast<const float*>(data) + element, dim, out);
  } else if (type == Dtype::kHalf) {
    convert_row(static_cast<const half16*>(data) + element, dim, out);
  } else {
    convert_row(static_cast<const bfloat16*>(data) + element, dim, out);
  }
}

// Return the sum of the lanes, added pairwise: a chain of log2(kLanes) additions.
EMB_HD float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(v);
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
#endif
}

// Prefetch a row of `nbytes` bytes, for a store if kForWrite, else for a load. One address per
// cache line is prefetched, from `row` on, so the last line of an unaligned row can be missed.
// `row` may be any address: a prefetch does not fault.
template <bool kForWrite>
EMB_HD void prefetch_row(const void* row, int64_t nbytes) {
  const char* p = static_cast<const char*>(row);
  for (int64_t i = 0; i < nbytes; i += kCacheLineBytes) {
    __builtin_prefetch(p + i, kForWrite ? 1 : 0, 3);
  }
}

}  // namespace emb::EMB_ISA
