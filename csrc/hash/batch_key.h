// The number that the scratch tables of a batch are hashed with.
#pragma once

#include <cstdint>
#include <random>

namespace emb {

// Drawn once per process, so that nobody can choose keys that all hash alike; no result depends on
// it, only where scratch tables keep what.
inline uint64_t batch_hash_key() {
  static const uint64_t key = [] {
    std::random_device source;
    return uint64_t{source()} << 32 | source();
  }();
  return key;
}

}  // namespace emb
