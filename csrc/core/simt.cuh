// What a kernel may use besides C++, in a form that both nvcc and the host compiler understand.
//
// Kernels live in `*.cuh` files as plain `__global__` templates that include only torch-free
// headers and this one. Under nvcc the names below are CUDA's own. Under a host compiler they come
// from core/simt_host.h, in which the threads of a block are fibers that meet at barriers and warp
// collectives and blocks run one after another, so that tests run every kernel without a GPU
// (tests/simt). The contract, which the emulation enforces with an error instead of a hang:
//   * names: threadIdx blockIdx blockDim gridDim, __shared__ (static), dynamic_shared<T>(),
//     __syncthreads __syncwarp __shfl_sync __shfl_up_sync __shfl_down_sync __shfl_xor_sync
//     __ballot_sync __any_sync __all_sync __match_any_sync __reduce_{add,min,max}_sync,
//     atomicAdd atomicMax atomicMin atomicExch atomicCAS, __threadfence, __popc __ffs __clz
//     __vcmpeq4;
//   * simt::copy_async<N> copies from global to shared memory while the thread goes on; no thread
//     may read the copy before that thread has waited (simt::wait_for_copies) and the block has
//     met;
//   * every lane of its mask reaches a collective, at one source line, before any of them leaves
//     it; lanes of the mask must not have left the kernel. A shuffle reads only lanes of its mask;
//   * every thread of the block reaches a barrier at one source line: no early return;
//   * trap(message) ends the launch: an error on the host, a device-side trap on the GPU;
//   * the blocks of a cluster (launcher.cluster) run together: simt::cluster_rank, cluster_size,
//     cluster_sync, and of_block(address, rank) for the dynamic shared memory of another block,
//     after a first cluster_sync and before the last one that this block reaches. Such a kernel has
//     no static __shared__ memory: here it would be one for all blocks. Code for architectures
//     before sm_90 has no clusters: the functions are those of a cluster of one block.
// Host code starts kernels through a launcher object, `launcher(kernel, grid, block, args...)`:
// CudaLauncher (core/launch.h) or simt::HostLauncher, so that both share the code that sizes grids.
#pragma once

#include <cstdint>

#include "core/portability.h"

#if defined(__CUDACC__)
#include <cassert>
#define EMB_DEVICE __device__ __forceinline__
// Of a parameter: kernels read it where it is, also at an index that differs between threads.
#define EMB_GRID_CONSTANT __grid_constant__
#else
#include "core/simt_host.h"
#define EMB_DEVICE inline
#define EMB_GRID_CONSTANT
#endif

namespace emb::simt {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

// 16 bytes that move in one instruction; the address must be a multiple of 16.
struct alignas(16) Pack16 {
  uint32_t word[4];
};
struct alignas(8) Pack8 {
  uint32_t word[2];
};

#if defined(__CUDACC__)

using Dim3 = dim3;

// Zeros in device memory: what a load reads that has nothing to load.
[[maybe_unused]] static __device__ const Pack16 kZeros = {};

EMB_DEVICE Pack16 load(const Pack16* address) {
  const uint4 v = __ldg(reinterpret_cast<const uint4*>(address));
  return {{v.x, v.y, v.z, v.w}};
}
EMB_DEVICE Pack8 load(const Pack8* address) {
  const uint2 v = __ldg(reinterpret_cast<const uint2*>(address));
  return {{v.x, v.y}};
}
EMB_DEVICE uint32_t load(const uint32_t* address) { return __ldg(address); }
EMB_DEVICE uint16_t load(const uint16_t* address) { return __ldg(address); }
EMB_DEVICE uint8_t load(const uint8_t* address) { return __ldg(address); }

// Return `x & mask | bits` in one instruction; the compiler makes two of constants.
EMB_DEVICE uint32_t mask_and_set(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
  return result;
}

// Keep an address in registers: the compiler would add it up from kernel arguments at every use.
template <class T>
EMB_DEVICE void keep_in_registers(T*& address) {
  asm("" : "+l"(address));
}

// Store what no kernel reads soon: it leaves the L2 cache before other lines, such as rows of hot
// ids.
EMB_DEVICE void store_streaming(Pack16* address, const Pack16& value) {
  __stcs(reinterpret_cast<uint4*>(address),
         make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]));
}
EMB_DEVICE void store_streaming(Pack8* address, const Pack8& value) {
  __stcs(reinterpret_cast<uint2*>(address), make_uint2(value.word[0], value.word[1]));
}

// Start to copy kBytes (4, 8 or 16) from global to shared memory, both aligned to that, or to fill
// with zeros if not `inside`; `global` must be an address of device memory in either case. Copies
// of 16 bytes go past the first-level cache.
template <int kBytes>
EMB_DEVICE void copy_async(void* shared, const void* global, bool inside) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int from_bytes = inside ? kBytes : 0;
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(global),
                 "r"(from_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(global),
                 "n"(kBytes), "r"(from_bytes)
                 : "memory");
  }
}

// Close the group of copies that this thread started since the last one.
EMB_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kGroups of this thread's groups of copies are not complete.
template <int kGroups>
EMB_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// End the kernel as a failed assert does: the message is printed and the next call into CUDA fails.
EMB_DEVICE void trap(const char* message) { __assert_fail(message, "emblib", 0, "kernel"); }

template <class T>
EMB_DEVICE T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char emb_dynamic_shared[];
  return reinterpret_cast<T*>(emb_dynamic_shared);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

EMB_DEVICE unsigned cluster_rank() { return __clusterRelativeBlockRank(); }
EMB_DEVICE unsigned cluster_size() { return __clusterSizeInBlocks(); }
// Meet all threads of the cluster; what they wrote before is visible after.
EMB_DEVICE void cluster_sync() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
template <class T>
EMB_DEVICE T* of_block(T* address, unsigned rank) {
  return static_cast<T*>(__cluster_map_shared_rank(address, rank));
}

#else

EMB_DEVICE unsigned cluster_rank() { return 0; }
EMB_DEVICE unsigned cluster_size() { return 1; }
EMB_DEVICE void cluster_sync() { __syncthreads(); }
template <class T>
EMB_DEVICE T* of_block(T* address, unsigned) {
  return address;
}

#endif

#else

inline const Pack16 kZeros = {};

template <class Pack>
Pack load(const Pack* address) {
  if (reinterpret_cast<uintptr_t>(address) % alignof(Pack) != 0) {
    fail("a vector load of " + std::to_string(sizeof(Pack)) + " bytes is misaligned");
  }
  return *address;
}

template <class Pack>
void store_streaming(Pack* address, const Pack& value) {
  *address = value;
}

inline uint32_t mask_and_set(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }

template <class T>
void keep_in_registers(T*&) {}

template <int kBytes>
void copy_async(void* shared, const void* global, bool inside) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const auto addresses = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global);
  if (addresses % kBytes != 0) {
    fail("a copy of " + std::to_string(kBytes) + " bytes to shared memory is misaligned");
  }
  Machine::get().start_copy(static_cast<uint32_t*>(shared), static_cast<const uint32_t*>(global),
                            kBytes / 4, inside);
}

inline void commit_copies() { Machine::get().commit_copies(); }

template <int kGroups>
void wait_for_copies() {
  Machine::get().wait_for_copies(kGroups);
}

[[noreturn]] inline void trap(const char* message) { fail(message); }

template <class T>
T* dynamic_shared() {
  return reinterpret_cast<T*>(Machine::get().dynamic_shared());
}

inline unsigned cluster_rank() { return Machine::get().rank(); }
inline unsigned cluster_size() { return Machine::get().cluster_size(); }
inline void cluster_sync(Where where = Where::current()) { Machine::get().meet_cluster(where); }
template <class T>
T* of_block(T* address, unsigned rank, Where where = Where::current()) {
  return static_cast<T*>(Machine::get().map_shared(address, rank, where));
}

#endif

// Return the sum over the groups of `width` lanes (a power of two) that tile the warp, in every
// lane. The additions form a butterfly, hence the same order in each lane and each run.
template <class T>
EMB_DEVICE T group_sum(T value, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullMask, value, offset);
  }
  return value;
}

// Add to a count that several threads change; a negative `n` subtracts.
EMB_DEVICE void atomic_add(int64_t* count, int64_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(count), static_cast<unsigned long long>(n));
}

// The warp's number in the grid and the number of warps in the grid, for grid-stride loops over
// warps.
EMB_DEVICE int64_t global_warp() {
  return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarp;
}
EMB_DEVICE int64_t warps_in_grid() { return static_cast<int64_t>(gridDim.x) * blockDim.x / kWarp; }

// The same for threads.
EMB_DEVICE int64_t global_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
EMB_DEVICE int64_t threads_in_grid() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

}  // namespace emb::simt
