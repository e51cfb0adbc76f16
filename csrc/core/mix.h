// The hash of keys. Applied twice it gives the rank that holds a key, the same for everyone.
// Applied to a key and a random number of the table it gives the buckets, see HashTable::hash:
// whoever chooses keys could else fill one bucket with them.
#pragma once

#include "core/portability.h"

namespace emb {

// The finaliser of MurmurHash3 (Appleby, 2011; public domain): every bit of the key moves every
// other with a probability of about a half.
EMB_HD uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;  // so that 0 is no fixed point
  x ^= x >> 33;
  x *= 0xFF51AFD7ED558CCDu;
  x ^= x >> 33;
  x *= 0xC4CEB9FE1A85EC53u;
  return x ^ x >> 33;
}

}  // namespace emb
