// EMB_HD, the attributes of an inline function in a header that both the host compiler and nvcc
// compile. Under nvcc the function runs on host and device.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__)
#define EMB_HD __host__ __device__ __forceinline__
#else
#define EMB_HD inline __attribute__((always_inline))
#endif
