// Attributes that let one header serve the host compiler and nvcc.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define EMB_HD __host__ __device__ __forceinline__
#else
#define EMB_HD inline __attribute__((always_inline))
#endif
