// Calls of the runtime and of CUB that no correct entry makes, for mistakes.py.
#include <cstdint>

#include "cub/device/device_radix_sort.cuh"

namespace {

void nothing_kernel() {}

}  // namespace

extern "C" {

int pretend_launch_nothing(unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                           unsigned block_y, unsigned block_z) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid_x, grid_y, grid_z);
  config.blockDim = dim3(block_x, block_y, block_z);
  return cudaLaunchKernelEx(&config, nothing_kernel);
}

// Sort the first of four arrays of `n` keys; the second has the values, the others take the result.
int pretend_sort(int32_t* arrays, int n, void* scratch, size_t* bytes) {
  const auto* keys = reinterpret_cast<const uint32_t*>(arrays);
  return cub::DeviceRadixSort::SortPairs(
      scratch, *bytes, keys, reinterpret_cast<uint32_t*>(arrays + 2 * n),
      const_cast<const int32_t*>(arrays + n), arrays + 3 * n, n, 0, 32, nullptr);
}
}
