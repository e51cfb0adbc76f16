// Hashing of 64-bit keys, and random numbers that are computed from a counter. All functions are
// pure and give the same bits on host and device.
#pragma once

#include "core/portability.h"

namespace emb {

// Return a hash of `x`, the finaliser of MurmurHash3 (Appleby, 2011; public domain): every input
// bit flips every output bit with a probability of about one half. 0 is a fixed point.
EMB_HD uint64_t finalise(uint64_t x) {
  x = (x ^ x >> 33) * 0xFF51AFD7ED558CCDu;
  x = (x ^ x >> 33) * 0xC4CEB9FE1A85EC53u;
  return x ^ x >> 33;
}

// Return a hash of `x` of which 0 is not a fixed point: a constant is added first. Of a key
// combined with a random number it selects the key's buckets in a table (HashTable::hash); without
// that number an adversary could choose keys that fill one bucket. Scratch tables use it too.
EMB_HD uint64_t mix(uint64_t x) { return finalise(x + 0x9E3779B97F4A7C15u); }

// Return the range of a key in [0, num_ranges): the block of rows, and so the rank, that stores it,
// or its fallback row. `num_ranges` is 1 to 2^31. `range_indices` of emblib/dynamic/keys.py must
// return the same range.
EMB_HD int64_t range_of_key(int64_t key, int64_t num_ranges) {
  const uint64_t hash = mix(mix(static_cast<uint64_t>(key)));
  return static_cast<int64_t>(((hash >> 32) * static_cast<uint64_t>(num_ranges)) >> 32);
}

// Four random words of Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
// 2011). They depend on the key and the counter only, so any thread of any device may compute them,
// in any order, with the same result.
struct Random4 {
  uint32_t word[4];
};
// The counter of a call of philox, four words.
struct Counter4 {
  uint32_t word[4];
};

// The constants of Philox4x32-10: the factors of words 0 and 2 of the counter, and the numbers
// added to words 0 and 1 of the key after each round.
inline constexpr int kPhiloxRounds = 10;
inline constexpr uint32_t kPhiloxFactor0 = 0xD2511F53u, kPhiloxFactor1 = 0xCD9E8D57u;
inline constexpr uint32_t kPhiloxKeyStep0 = 0x9E3779B9u, kPhiloxKeyStep1 = 0xBB67AE85u;

// Return the four words of a counter under the key `seed`. random_block.h does the same for many
// counters at once, in CPU kernels.
EMB_HD Random4 philox(uint64_t seed, const Counter4& counter) {
  uint32_t c0 = counter.word[0], c1 = counter.word[1], c2 = counter.word[2], c3 = counter.word[3];
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = uint64_t{kPhiloxFactor0} * c0, p1 = uint64_t{kPhiloxFactor1} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(p1);
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxKeyStep0;
    k1 += kPhiloxKeyStep1;
  }
  return {{c0, c1, c2, c3}};
}

// Return the counter of words [4 * block, 4 * block + 4) of a stream of random words.
EMB_HD Counter4 stream_counter(uint64_t block) {
  return {{static_cast<uint32_t>(block), static_cast<uint32_t>(block >> 32), 0, 0}};
}

// Map a word to one of 2^24 equidistant numbers in [0, 1), which float32 represents exactly.
EMB_HD float unit_float(uint32_t word) { return static_cast<float>(word >> 8) * 0x1p-24f; }

}  // namespace emb
