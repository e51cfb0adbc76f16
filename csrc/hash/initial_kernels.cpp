// Writes the initial values of one row on a CPU thread, a block of random words at a time.
// initial.h describes the arguments.
#include "core/random_block.h"
#include "hash/initial.h"

namespace emb::EMB_ISA {
namespace {

// Return the values of kLanes elements with the random words `words`, for kUniform, as
// uniform_value does. This uses intrinsics, because GCC does not vectorise a loop over so few
// elements. The values are not collected in an array of the whole row, because GCC would copy the
// array by `rep movs`, which takes longer than all the arithmetic.
EMB_HD Vec uniform_values(const InitialRule& rule, const uint32_t* words) {
#if defined(__AVX512F__)
  const __m512d unit = _mm512_set1_pd(0x1p-24);
  const __m512d scale = _mm512_set1_pd(rule.scale), base = _mm512_set1_pd(rule.base);
  const auto half = [&](__m256i numbers) {
    const __m512d u = _mm512_mul_pd(_mm512_cvtepi32_pd(numbers), unit);
    return _mm512_cvtpd_ps(_mm512_fmadd_pd(scale, u, base));
  };
  const __m512i numbers = _mm512_srli_epi32(_mm512_loadu_si512(words), 8);
  const __m256 low = half(_mm512_castsi512_si256(numbers));
  const __m256 high = half(_mm512_extracti64x4_epi64(numbers, 1));
  return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
#elif defined(__AVX2__)
  const __m256d unit = _mm256_set1_pd(0x1p-24);
  const __m256d scale = _mm256_set1_pd(rule.scale), base = _mm256_set1_pd(rule.base);
  const auto half = [&](__m128i numbers) {
    const __m256d u = _mm256_mul_pd(_mm256_cvtepi32_pd(numbers), unit);
    return _mm256_cvtpd_ps(_mm256_fmadd_pd(scale, u, base));
  };
  const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(words));
  const __m256i numbers = _mm256_srli_epi32(all, 8);
  return _mm256_set_m128(half(_mm256_extracti128_si256(numbers, 1)),
                         half(_mm256_castsi256_si128(numbers)));
#else
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = uniform_value(rule, words[i]);
  return load(values);
#endif
}

// Return the values of kLanes elements with the random words `words`, for kNormal.
EMB_HD Vec normal_values(const InitialRule& rule, const uint32_t* words) {
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = normal_value(rule, words[i]);
  return load(values);
}

// InitialKernels::write_row for row buffers of dtype T.
template <class T>
void write_row(const InitialRow& row, const InitialRule& shared_rule) {
  // A copy in registers, because a loop with a load inside a condition is not vectorised.
  const InitialRule rule = shared_rule;
  T* out = static_cast<T*>(row.out);
  const auto kind = static_cast<InitialKind>(static_cast<int>(rule.kind));
  if (kind == InitialKind::kConstant || kind == InitialKind::kKeyModulo) {
    const T value = from_float<T>(value_of_row(rule, row.key));
    for (int64_t d = 0; d < row.dim; ++d) out[d] = value;
    return;
  }
  for (int64_t first = 0; first < row.dim; first += kBlockWords) {
    const int64_t num_left = row.dim - first;
    const int num_elements = num_left < kBlockWords ? static_cast<int>(num_left) : kBlockWords;
    uint32_t words[kBlockWords];
    const int num_vecs = (num_elements + kLanes - 1) / kLanes;
    const Counter4 counter = row_counter(row.stream, row.key, static_cast<uint32_t>(first / 4));
    philox_block<kRowBlockWord>(row.seed, counter, num_vecs * kLanes / 4, words);
    // One loop for both kinds: with a loop each, GCC would compute the normal values one by one.
    for (int i = 0; i < num_elements; i += kLanes) {
      const Vec values = kind == InitialKind::kUniform ? uniform_values(rule, words + i)
                                                       : normal_values(rule, words + i);
      if (num_elements - i >= kLanes) {
        store(out + first + i, values);
      } else {
        store_first(out + first + i, values, num_elements - i);
      }
    }
  }
}

}  // namespace

extern const InitialKernels kInitialKernels;
const InitialKernels kInitialKernels = {{write_row<float>, write_row<half16>, write_row<bfloat16>}};

}  // namespace emb::EMB_ISA
