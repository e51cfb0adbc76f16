// Random words for the CPU kernels: compute Philox for up to 16 counters at once, and round rows
// with the words. They are those of `philox` (random.h), bit for bit. Only `*_kernels.cpp` and
// headers for them may include this header, since its meaning depends on EMB_ISA.
#pragma once

#include "core/rounding.h"
#include "core/vec.h"

namespace emb::EMB_ISA {

inline constexpr int kBlockCounters = 16;  // two AVX-512 or four AVX2 registers of counters
inline constexpr int kBlockWords = 4 * kBlockCounters;

#if defined(__AVX2__)

// A register of 64-bit lanes. A lane has a word of a counter in its low half. The contents of its
// high half do not matter, since the intrinsic for a multiplication reads low halves only. A plain
// multiplication of 64 bits takes three times as long.
#if defined(__AVX512F__)
typedef uint64_t WordVec __attribute__((vector_size(64)));

EMB_HD WordVec multiply_words(WordVec a, uint32_t factor) {
  return reinterpret_cast<WordVec>(_mm512_mul_epu32(
      reinterpret_cast<__m512i>(a), _mm512_set1_epi64(static_cast<int64_t>(factor))));
}
// Interleave the 64-bit lanes of `a` and `b`: write a[0], b[0], a[1], b[1], ... to `out`, which has
// room for 4 * kWordLanes words of 32 bits.
EMB_HD void store_interleaved(WordVec a, WordVec b, uint32_t* out) {
  const WordVec low = shuffle<0, 8, 1, 9, 2, 10, 3, 11>(a, b);
  const WordVec high = shuffle<4, 12, 5, 13, 6, 14, 7, 15>(a, b);
  __builtin_memcpy(out, &low, sizeof(low));
  __builtin_memcpy(out + 16, &high, sizeof(high));
}
#else
typedef uint64_t WordVec __attribute__((vector_size(32)));

EMB_HD WordVec multiply_words(WordVec a, uint32_t factor) {
  return reinterpret_cast<WordVec>(_mm256_mul_epu32(
      reinterpret_cast<__m256i>(a), _mm256_set1_epi64x(static_cast<int64_t>(factor))));
}
EMB_HD void store_interleaved(WordVec a, WordVec b, uint32_t* out) {
  const WordVec low = shuffle<0, 4, 1, 5>(a, b);
  const WordVec high = shuffle<2, 6, 3, 7>(a, b);
  __builtin_memcpy(out, &low, sizeof(low));
  __builtin_memcpy(out + 8, &high, sizeof(high));
}
#endif

inline constexpr int kWordLanes = sizeof(WordVec) / sizeof(uint64_t);

// Write the words of kRegisters * kWordLanes counters to `words`, which has room for four words per
// counter; philox_block describes the other arguments.
template <int kSteppedWord, int kRegisters>
EMB_HD void philox_registers(uint64_t seed, const Counter4& counter, uint32_t* words) {
  WordVec c[kRegisters][4];
  for (int v = 0; v < kRegisters; ++v) {
    for (int w = 0; w < 4; ++w) c[v][w] = WordVec{} + counter.word[w];
    for (int i = 0; i < kWordLanes; ++i) c[v][kSteppedWord][i] += v * kWordLanes + i;
  }
  auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    for (int v = 0; v < kRegisters; ++v) {
      const WordVec p0 = multiply_words(c[v][0], kPhiloxFactor0);
      const WordVec p1 = multiply_words(c[v][2], kPhiloxFactor1);
      c[v][0] = p1 >> 32 ^ c[v][1] ^ k0;
      c[v][2] = p0 >> 32 ^ c[v][3] ^ k1;
      c[v][1] = p1;
      c[v][3] = p0;
    }
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  constexpr uint64_t kLow = 0xffffffffu;
  for (int v = 0; v < kRegisters; ++v) {
    store_interleaved((c[v][0] & kLow) | c[v][1] << 32, (c[v][2] & kLow) | c[v][3] << 32,
                      words + v * 4 * kWordLanes);
  }
}

#endif

// Write the words of `num_counters` counters, four per counter, to `words`. There may be at most
// kBlockCounters counters; the rest of `words` may be overwritten. The first counter is `counter`;
// word kSteppedWord of each next counter is greater by 1, modulo 2^32.
template <int kSteppedWord>
EMB_HD void philox_block(uint64_t seed, const Counter4& counter, int num_counters,
                         uint32_t (&words)[kBlockWords]) {
#if defined(__AVX2__)
  if (num_counters <= kWordLanes) return philox_registers<kSteppedWord, 1>(seed, counter, words);
  philox_registers<kSteppedWord, kBlockCounters / kWordLanes>(seed, counter, words);
#else
  for (int i = 0; i < num_counters; ++i) {
    Counter4 stepped = counter;
    stepped.word[kSteppedWord] += static_cast<uint32_t>(i);
    const Random4 random = philox(seed, stepped);
    for (int w = 0; w < 4; ++w) words[4 * i + w] = random.word[w];
  }
#endif
}

// Round `dim` values (at most 2^30) stochastically to fp16 or bf16, and write them to `row`. A row
// of floats is written exactly. The arrays must not overlap. `rounding.is_stochastic` is not read:
// the caller has tested it. The random words depend on the seed and step of `rounding`, on the
// linear row id `row_id`, and on `tensor`, a RoundedTensor.
template <class To, class From>
inline void round_row_randomly(const From* __restrict values, int64_t dim, const Rounding& rounding,
                               int64_t row_id, uint32_t tensor, To* __restrict row) {
  // A local copy: stores to `row` cannot change it, so it stays in registers.
  const Rounding local_rounding = rounding;
  for (int64_t begin = 0; begin < dim; begin += kBlockWords) {
    uint32_t words[kBlockWords];
    const auto round = [&](int count) {
      const Counter4 counter =
          local_rounding.counter(row_id, static_cast<uint32_t>(begin / 4), tensor);
      philox_block<Rounding::kBlockWord>(local_rounding.seed, counter, (count + 3) / 4, words);
      for (int k = 0; k < count; ++k) {
        row[begin + k] = round_randomly<To>(to_float(values[begin + k]), words[k]);
      }
    };
    // A known length vectorises without a remainder.
    if (dim - begin >= kBlockWords) {
      round(kBlockWords);
    } else {
      round(static_cast<int>(dim - begin));
    }
  }
}

}  // namespace emb::EMB_ISA
