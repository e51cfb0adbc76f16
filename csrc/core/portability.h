// What lets one header serve the host compiler and nvcc: the only macro of the code base, and the
// few attributes whose spelling differs between compilers.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define EMB_HD __host__ __device__ __forceinline__
#else
#define EMB_HD inline __attribute__((always_inline))
#endif
