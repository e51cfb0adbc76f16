// The part of CUDA that kernels may use, in a form that both nvcc and a host compiler understand.
//
// Kernels live in `*.cuh` files as plain `__global__` functions and templates; these files include
// only torch-free headers. Under nvcc the names below are CUDA's own or wrap them. Under a host
// compiler CUDA's names come from core/simt_host.h, an emulation in which the threads of a block
// are fibers that meet at barriers and warp collectives, and blocks (or clusters) run one after
// another. So tests run the kernels without a GPU (tests/simt).
//
// Host code starts kernels through a launcher object: CudaLauncher (core/launch.h), or
// simt::HostLauncher in the emulation. Both have the same functions, except `stream`, which only
// CudaLauncher has; the usual one is `launcher(kernel, grid, block, args...)`.
#pragma once

#include <cstdint>

#include "core/portability.h"

#if defined(__CUDACC__)
#include <cassert>
#define EMB_DEVICE __device__ __forceinline__
// Marks a kernel parameter that is read in place, without a copy in local memory, even if it is an
// array that threads index differently.
#define EMB_GRID_CONSTANT __grid_constant__
#else
#include "core/simt_host.h"
#define EMB_DEVICE inline
#define EMB_GRID_CONSTANT
#endif

// Kernels must keep to the contract below. The emulation (core/simt_host.h) ends the launch with a
// report where a GPU would hang, and where it sees a wrong collective, mask or barrier. In it,
// dynamic shared memory that no thread has written has all bits set, NaN as a float. The emulation
// does not detect a missing barrier, nor a read of static memory that no thread has written.
//   * besides C++, kernels use the names of this file and only these names of CUDA:
//     threadIdx blockIdx blockDim gridDim, __shared__ (static), dynamic_shared<T>(),
//     __syncthreads __syncwarp __shfl_sync __shfl_up_sync __shfl_down_sync __shfl_xor_sync
//     __ballot_sync __any_sync __all_sync __match_any_sync __reduce_{add,min,max}_sync,
//     atomicAdd atomicMax atomicMin atomicExch atomicCAS, __threadfence, __popc __ffs __vcmpeq4;
//   * simt::copy_async<N> copies from global to shared memory while the thread continues. A thread
//     may read the copy only after the thread that started it has waited (simt::wait_for_copies)
//     and the block has met at a barrier;
//   * every lane in the mask of a collective reaches it, at the same source line; no lane in the
//     mask has left the kernel. A shuffle reads only lanes in its mask;
//   * every thread of the block reaches a barrier, at the same source line: no early return;
//   * trap(message) ends the launch: with an error on the host, with a device-side trap on a GPU;
//   * the blocks of a cluster (launcher.launch_cluster) run together. They have simt::cluster_rank,
//     cluster_size and cluster_sync, and address_in_block(address, rank) for the dynamic shared
//     memory of another block, which is valid between the first and the last cluster_sync of the
//     kernel. Such a kernel has no static __shared__ memory: the emulation has only one for all
//     blocks. Code for architectures before sm_90 has no clusters; there the functions describe a
//     cluster of one block.
namespace emb::simt {

inline constexpr unsigned kWarpLanes = 32;
inline constexpr unsigned kFullMask = 0xffffffffu;

// 16 or 8 bytes that move in one instruction; the address must be a multiple of that size.
struct alignas(16) Pack16 {
  uint32_t word[4];
};
struct alignas(8) Pack8 {
  uint32_t word[2];
};

#if defined(__CUDACC__)

using Dim3 = dim3;

// 16 bytes of zeros in device memory: a valid address for loads and copies that have nothing to
// read.
[[maybe_unused]] static __device__ const Pack16 kZeros = {};

// Load from global memory that no thread writes during the kernel (the read-only path).
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

// Return `(x & mask) | bits` in one instruction; the compiler would use two if the operands are
// constants.
EMB_DEVICE uint32_t mask_and_set(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(x), "r"(mask), "r"(bits));
  return result;
}

// Keep an address in registers; the compiler would compute it again from kernel arguments at every
// use.
template <class T>
EMB_DEVICE void keep_in_registers(T*& address) {
  asm("" : "+l"(address));
}

// Store a value that no kernel reads soon. Its cache line is evicted from the L2 cache before
// others, such as rows of hot ids.
EMB_DEVICE void store_streaming(Pack16* address, const Pack16& value) {
  __stcs(reinterpret_cast<uint4*>(address),
         make_uint4(value.word[0], value.word[1], value.word[2], value.word[3]));
}
EMB_DEVICE void store_streaming(Pack8* address, const Pack8& value) {
  __stcs(reinterpret_cast<uint2*>(address), make_uint2(value.word[0], value.word[1]));
}

// Start to copy kBytes (4, 8 or 16) bytes from `global` to `shared`, or to fill `shared` with zeros
// if not `reads_global`. Both addresses must be multiples of kBytes, and `global` must be a valid
// address of global memory even if it is not read. Copies of 16 bytes bypass the L1 cache.
template <int kBytes>
EMB_DEVICE void copy_async(void* shared, const void* global, bool reads_global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const auto to = static_cast<unsigned>(__cvta_generic_to_shared(shared));
  const int from_bytes = reads_global ? kBytes : 0;
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

// Put the copies that this thread started since its last commit into one group.
EMB_DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until at most kGroups of this thread's groups of copies, the latest ones, are incomplete.
template <int kGroups>
EMB_DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// End the kernel as a failed assert does: the message is printed and the next call into CUDA fails.
EMB_DEVICE void trap(const char* message) { __assert_fail(message, "emblib", 0, "kernel"); }

// Return the dynamic shared memory of this block, aligned to 16 bytes.
template <class T>
EMB_DEVICE T* dynamic_shared() {
  extern __shared__ __align__(16) unsigned char emb_dynamic_shared[];
  return reinterpret_cast<T*>(emb_dynamic_shared);
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

EMB_DEVICE unsigned cluster_rank() { return __clusterRelativeBlockRank(); }
EMB_DEVICE unsigned cluster_size() { return __clusterSizeInBlocks(); }
// Wait for all threads of the cluster; what they wrote before is visible to all afterwards.
EMB_DEVICE void cluster_sync() {
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
}
// Return the address in block `rank` of the cluster that corresponds to `address`, which is in the
// dynamic shared memory of this block.
template <class T>
EMB_DEVICE T* address_in_block(T* address, unsigned rank) {
  return static_cast<T*>(__cluster_map_shared_rank(address, rank));
}

#else

EMB_DEVICE unsigned cluster_rank() { return 0; }
EMB_DEVICE unsigned cluster_size() { return 1; }
EMB_DEVICE void cluster_sync() { __syncthreads(); }
template <class T>
EMB_DEVICE T* address_in_block(T* address, unsigned) {
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
void copy_async(void* shared, const void* global, bool reads_global) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16);
  const auto addresses = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(global);
  if (addresses % kBytes != 0) {
    fail("a copy of " + std::to_string(kBytes) + " bytes to shared memory is misaligned");
  }
  Machine::get().start_copy(static_cast<uint32_t*>(shared), static_cast<const uint32_t*>(global),
                            kBytes / 4, reads_global);
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

inline unsigned cluster_rank() { return Machine::get().block_rank(); }
inline unsigned cluster_size() { return Machine::get().num_cluster_blocks(); }
inline void cluster_sync(Where where = Where::current()) { Machine::get().meet_cluster(where); }
template <class T>
T* address_in_block(T* address, unsigned rank, Where where = Where::current()) {
  return static_cast<T*>(Machine::get().map_shared(address, rank, where));
}

#endif

// Return, in every lane, the sum of `value` over this lane's group of `lanes` neighbouring lanes, a
// power of two. All 32 lanes must call this with the same `lanes`. The additions form a butterfly,
// so their order is the same in every run.
template <class T>
EMB_DEVICE T group_sum(T value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kFullMask, value, offset);
  }
  return value;
}

// Add `n`, which may be negative, to a count in global memory that several threads change.
EMB_DEVICE void atomic_add(int64_t* count, int64_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(count), static_cast<unsigned long long>(n));
}

// Return the index of this warp in the grid, and the number of warps of the grid, for grid-stride
// loops. Grid and block have one dimension, and blocks have whole warps.
EMB_DEVICE int64_t global_warp() {
  return (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / kWarpLanes;
}
EMB_DEVICE int64_t warps_in_grid() {
  return static_cast<int64_t>(gridDim.x) * blockDim.x / kWarpLanes;
}

// Return the index of this thread in the grid, and the number of threads of the grid. Grid and
// block have one dimension.
EMB_DEVICE int64_t global_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
EMB_DEVICE int64_t threads_in_grid() { return static_cast<int64_t>(gridDim.x) * blockDim.x; }

}  // namespace emb::simt
