// EMB_HD, the attributes of an inline function in a header that both the host compiler and nvcc
// compile (under nvcc the function runs on host and device), and the cache line of the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define EMB_HD __host__ __device__ __forceinline__
#else
#define EMB_HD inline __attribute__((always_inline))
#endif

namespace emb {

inline constexpr int64_t kCacheLineBytes = 64;  // of x86-64 and most Arm CPUs

}  // namespace emb
