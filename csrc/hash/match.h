// Finds a key in a bucket or a table on the CPU. All tags of a bucket are compared at once, and
// only entries with the tag of the key are read. Only `*_kernels.cpp` may include this header.
#pragma once

#include "hash/args.h"

#if !defined(EMB_ISA)
#error "match.h needs EMB_ISA: include it from a *_kernels.cpp only"
#endif

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace emb::EMB_ISA {

// Return a mask with one bit per slot of a bucket, set where its tag equals `tag`. `tags` are the
// 32 tags of the bucket, at any address.
EMB_HD uint32_t match_tags(const uint8_t* tags, uint8_t tag) {
#if defined(__AVX2__)
  const __m256i tags32 = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tags));
  return static_cast<uint32_t>(
      _mm256_movemask_epi8(_mm256_cmpeq_epi8(tags32, _mm256_set1_epi8(static_cast<char>(tag)))));
#elif defined(__SSE2__)
  const __m128i wanted = _mm_set1_epi8(static_cast<char>(tag));
  const auto half = [&](int i) {
    const __m128i tags16 = _mm_loadu_si128(reinterpret_cast<const __m128i*>(tags + 16 * i));
    return static_cast<uint32_t>(_mm_movemask_epi8(_mm_cmpeq_epi8(tags16, wanted)));
  };
  return half(0) | (half(1) << 16);
#else
  uint32_t mask = 0;
  for (int way = 0; way < kBucketSlots; ++way) mask |= uint32_t{tags[way] == tag} << way;
  return mask;
#endif
}

// Return the number of the lowest set bit; `mask` is not 0.
EMB_HD int lowest_bit(uint32_t mask) { return __builtin_ctz(mask); }

// Return the slot of `key` if it is in one of the candidates, the slots of the bucket whose bits
// are set in `candidates`. Otherwise return kNoSlot.
EMB_HD int64_t find_in_candidates(const HashTable& table, int64_t bucket, uint32_t candidates,
                                  int64_t key) {
  for (; candidates != 0; candidates &= candidates - 1) {
    const int64_t slot = bucket * kBucketSlots + lowest_bit(candidates);
    if (table.entry(slot)[HashEntry::kKey] == key) return slot;
  }
  return kNoSlot;
}

// Return the slot of `key`, which has the tag `tag`, in a bucket, or kNoSlot if the bucket does not
// have the key.
EMB_HD int64_t find_in_bucket(const HashTable& table, int64_t bucket, uint8_t tag, int64_t key) {
  return find_in_candidates(table, bucket, match_tags(table.tags + bucket * kBucketSlots, tag),
                            key);
}

// Return the slot of `key` in a table, kNoSlot if the table does not have the key.
EMB_HD int64_t find_slot(const HashTable& table, int64_t key) {
  const uint64_t full_hash = table.hash(key);
  const uint8_t tag = tag_of(full_hash);
  const int64_t slot = find_in_bucket(table, table.first_bucket(full_hash), tag, key);
  return slot != kNoSlot ? slot : find_in_bucket(table, table.second_bucket(full_hash), tag, key);
}

}  // namespace emb::EMB_ISA
