// Division of 32-bit numbers by a number that is fixed for a whole call: one multiplication instead
// of a divide. With magic = ceil(2^64 / d) the high half of n * magic is n /
// d for all n, d < 2^32 (Lemire, Kaser & Kurz, 2019).
#pragma once

#include "core/portability.h"

namespace emb {

struct Divider {
  uint64_t magic;

  EMB_HD explicit Divider(uint32_t divisor) : magic(~uint64_t{0} / divisor + 1) {}

  // d = 1 has a magic of 2^64, which wraps to 0.
  EMB_HD uint32_t operator()(uint32_t n) const {
    if (magic == 0) return n;
#if defined(__CUDA_ARCH__)
    return static_cast<uint32_t>(__umul64hi(magic, n));
#else
    return static_cast<uint32_t>(static_cast<unsigned __int128>(magic) * n >> 64);
#endif
  }
};

}  // namespace emb
