// Kernels that use the emulated machine correctly and incorrectly, to test the machine itself. Also
// the shortest example of a kernel and its launcher.
#include "driver.h"

namespace emb::cuda {
namespace {

// Sum x[0, n) in one block: butterflies in the warps, shared memory between them.
template <class T>
__global__ void sum_kernel(const T* x, int64_t n, T* sum) {
  __shared__ T of_warp[32];
  T value = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) value += x[i];
  value = simt::group_sum(value, 32);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (unsigned w = 1; w < blockDim.x / 32; ++w) value += of_warp[w];
  *sum = value;
}

// Write the result of every collective, one row of `out` each, for one warp.
__global__ void collectives_kernel(const int32_t* x, int32_t* out) {
  const int lane = static_cast<int>(threadIdx.x);
  const int32_t value = x[lane];
  const auto put = [&](int row, int32_t result) { out[row * 32 + lane] = result; };
  put(0, __shfl_sync(simt::kFullMask, value, lane + 1, 8));
  put(1, __shfl_up_sync(simt::kFullMask, value, 3u, 16));
  put(2, __shfl_down_sync(simt::kFullMask, value, 5u));
  put(3, __shfl_xor_sync(simt::kFullMask, value, 4));
  put(4, static_cast<int32_t>(__ballot_sync(simt::kFullMask, value > 0)));
  put(5, static_cast<int32_t>(__match_any_sync(simt::kFullMask, value)));
  put(6, __reduce_max_sync(simt::kFullMask, value));
  put(7, __reduce_add_sync(simt::kFullMask, value));
  // Half warps in different branches, each with a collective.
  if (lane < 16) {
    put(8, __any_sync(0xffffu, value == x[3]));
  } else {
    put(8, __all_sync(0xffff0000u, value == x[3]));
  }
}

// For each thread of a block, run an atomic on a separate number that starts as x[thread]; write
// its result and the new value, one row of `out` each.
__global__ void atomics_kernel(int32_t* x, int32_t value, int32_t* out) {
  const auto thread = threadIdx.x;
  const auto put = [&](unsigned row, int32_t result) { out[row * blockDim.x + thread] = result; };
  const int32_t start = x[thread];
  const auto run = [&](unsigned row, const auto& atomic) {
    x[thread] = start;
    put(row, atomic(x + thread));
    put(row + 1, x[thread]);
  };
  run(0, [&](int32_t* address) { return atomicMin(address, value); });
  run(2, [&](int32_t* address) { return atomicMax(address, value); });
  run(4, [&](int32_t* address) { return atomicExch(address, value); });
  run(6, [&](int32_t* address) { return atomicCAS(address, 3, value); });
  put(8, static_cast<int32_t>(__vcmpeq4(static_cast<unsigned>(start), 0x02000300u)));
}

__global__ void left_behind_kernel() {
  if (threadIdx.x < 16) __syncthreads();
}

__global__ void two_barriers_kernel() {
  if (threadIdx.x < 16) {
    __syncthreads();
  } else {
    __syncthreads();
  }
}

__global__ void deadlock_kernel() {
  if (threadIdx.x < 16) {
    __syncwarp(0xffffu | 1u << 16);
  } else {
    __syncthreads();
  }
}

__global__ void different_collectives_kernel() {
  if (threadIdx.x < 16) {
    __shfl_sync(simt::kFullMask, 1, 0);
  } else {
    __ballot_sync(simt::kFullMask, 1);
  }
}

// Add to each thread's number those of the same thread in all blocks of its cluster.
__global__ void cluster_kernel(const int32_t* x, int32_t* out) {
  auto* mine = simt::dynamic_shared<int32_t>();
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  mine[threadIdx.x] = x[i];
  simt::cluster_sync();
  int32_t sum = 0;
  for (unsigned rank = 0; rank < simt::cluster_size(); ++rank) {
    sum += simt::address_in_block(mine, rank)[threadIdx.x];
  }
  out[i] = sum * 10 + static_cast<int32_t>(simt::cluster_rank());
  simt::cluster_sync();
}

__global__ void early_access_kernel() {
  *simt::address_in_block(simt::dynamic_shared<int32_t>(), 1 - simt::cluster_rank()) = 1;
  simt::cluster_sync();
}

__global__ void left_cluster_kernel() {
  if (simt::cluster_rank() == 0) simt::cluster_sync();
}

__global__ void two_cluster_barriers_kernel() {
  if (simt::cluster_rank() == 0) {
    simt::cluster_sync();
  } else {
    simt::cluster_sync();
  }
}

__global__ void static_memory_kernel() {
  __shared__ int32_t number;
  simt::cluster_sync();
  *simt::address_in_block(&number, 0) = 1;
}

// Read the memory of the other block without a barrier before either leaves.
__global__ void late_access_kernel(int32_t* out) {
  auto* mine = simt::dynamic_shared<int32_t>();
  *mine = 5;
  simt::cluster_sync();
  out[simt::cluster_rank()] = *simt::address_in_block(mine, 1 - simt::cluster_rank());
}

// Copy the dynamic shared memory of a block, which nothing has written.
__global__ void unwritten_kernel(int32_t* out) {
  out[threadIdx.x] = simt::dynamic_shared<int32_t>()[threadIdx.x];
}

// Write the numbers of the threads in the order in which they run.
__global__ void order_kernel(int32_t* count, int32_t* out) { out[(*count)++] = threadIdx.x; }

__global__ void misaligned_kernel(const char* memory) {
  simt::load(reinterpret_cast<const simt::Pack16*>(memory + 4));
}

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

// x, n, sum, threads
extern "C" const char* simt_sum(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto* x = words.pointer<const float>();
    const int64_t n = words.number();
    auto* sum = words.pointer<float>();
    launcher(sum_kernel<float>, 1, static_cast<unsigned>(words.number()), x, n, sum);
  });
}

// x, out
extern "C" const char* simt_collectives(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto* x = words.pointer<const int32_t>();
    launcher(collectives_kernel, 1, 32, x, words.pointer<int32_t>());
  });
}

// x, value, out, threads
extern "C" const char* simt_atomics(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    auto* x = words.pointer<int32_t>();
    const auto value = static_cast<int32_t>(words.number());
    auto* out = words.pointer<int32_t>();
    launcher(atomics_kernel, 1, static_cast<unsigned>(words.number()), x, value, out);
  });
}

// x, out, clusters of how many blocks, threads
extern "C" const char* simt_cluster_sums(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto* x = words.pointer<const int32_t>();
    auto* out = words.pointer<int32_t>();
    const auto blocks = static_cast<unsigned>(words.number());
    const auto threads = static_cast<unsigned>(words.number());
    launcher.launch_cluster(cluster_kernel, blocks, threads, threads * sizeof(int32_t), x, out);
  });
}

// out
extern "C" const char* simt_late_access(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    launcher.launch_cluster(late_access_kernel, 2, 1, sizeof(int32_t), words.pointer<int32_t>());
  });
}

// out, threads
extern "C" const char* simt_unwritten(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    auto* out = words.pointer<int32_t>();
    const auto threads = static_cast<unsigned>(words.number());
    launcher.launch_with_shared(unwritten_kernel, 1, threads, threads * sizeof(int32_t), out);
  });
}

// count, out, threads
extern "C" const char* simt_order(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    auto* count = words.pointer<int32_t>();
    auto* out = words.pointer<int32_t>();
    launcher(order_kernel, 1, static_cast<unsigned>(words.number()), count, out);
  });
}

// which
extern "C" const char* simt_broken(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    alignas(16) static char memory[32];
    switch (call[0]) {
      case 0:
        return launcher(left_behind_kernel, 1, 32);
      case 1:
        return launcher(two_barriers_kernel, 1, 32);
      case 2:
        return launcher(deadlock_kernel, 1, 32);
      case 3:
        return launcher(different_collectives_kernel, 1, 32);
      case 4:
        return launcher.launch_cluster(early_access_kernel, 2, 32, 64);
      case 5:
        return launcher.launch_cluster(left_cluster_kernel, 2, 32, 64);
      case 6:
        return launcher.launch_cluster(two_cluster_barriers_kernel, 2, 32, 64);
      case 7:
        return launcher.launch_cluster(static_memory_kernel, 2, 32, 64);
      default:
        return launcher(misaligned_kernel, 1, 32, memory);
    }
  });
}
