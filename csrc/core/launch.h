// Kernel launches from the entries of the CUDA library: CudaLauncher selects the device, launches
// on torch's current stream and limits the size of grids. Errors of CUDA are thrown as errors of
// torch. torch's stable ABI (2.10) provides the current CUDA stream through a function that only
// CUDA builds of torch have; it is looked up on first use, so that the library links and loads with
// any torch.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <atomic>
#include <utility>

#include "core/simt.cuh"

namespace emb {

// Check the result of a call into CUDA: throws if it failed. `what` names the call in the message.
inline void check_cuda(cudaError_t error, const char* what) {
  STD_TORCH_CHECK(error == cudaSuccess, "emblib: ", what, " failed: ", cudaGetErrorString(error));
}

// Return torch's current stream of this thread on a device. Throws if torch is not a CUDA build.
inline cudaStream_t current_stream(int32_t device) {
  using GetStream = AOTITorchError (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    // The library is loaded if there is a CUDA tensor; RTLD_NOLOAD only looks it up.
    void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    void* symbol =
        dlsym(library != nullptr ? library : RTLD_DEFAULT, "aoti_torch_get_current_cuda_stream");
    return reinterpret_cast<GetStream>(symbol);
  }();
  STD_TORCH_CHECK(get_stream != nullptr,
                  "emblib: this torch has no aoti_torch_get_current_cuda_stream, so it is not a "
                  "CUDA build; install a CUDA build of torch >= 2.10");
  void* stream = nullptr;
  STD_TORCH_CHECK(get_stream(device, &stream) == 0,
                  "emblib: torch has no current stream for device ", device);
  return static_cast<cudaStream_t>(stream);
}

// Return the address at which kernels on the device of `like` access `tensor`, the memory of a
// tier. The tensor must be on that device or in pinned host memory, which a GPU accesses in place;
// otherwise, also for an empty tensor of the CPU, this throws. The caller keeps the tensor alive
// while kernels use it.
inline void* kernel_address(const char* op, const torch::stable::Tensor& tensor,
                            const torch::stable::Tensor& like) {
  void* address = const_cast<void*>(tensor.const_data_ptr());
  if (tensor.device() == like.device()) return address;
  cudaPointerAttributes attributes{};
  const bool is_pinned = cudaPointerGetAttributes(&attributes, address) == cudaSuccess &&
                         attributes.type == cudaMemoryTypeHost;
  if (!is_pinned) cudaGetLastError();  // reported below; the next launch must not report it again
  STD_TORCH_CHECK(is_pinned, op,
                  ": the memory of every tier must be on the device of the kernels or in pinned "
                  "host memory; move it with .to(device) or pin it with .pin_memory()");
  return attributes.devicePointer;
}

// Return an attribute of a device. The values of the first kCachedDevices devices are cached,
// unless they are 0; otherwise every call queries the device. Several threads may query one device
// at once, since all store the same value.
template <cudaDeviceAttr attribute>
int device_attribute(int device) {
  constexpr int kCachedDevices = 64;
  static std::atomic<int> cached[kCachedDevices] = {};
  int value = device < kCachedDevices ? cached[device].load(std::memory_order_relaxed) : 0;
  if (value != 0) return value;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  if (device < kCachedDevices) cached[device].store(value, std::memory_order_relaxed);
  return value;
}

// Return the number of multiprocessors of a device.
inline int num_multiprocessors(int device) {
  return device_attribute<cudaDevAttrMultiProcessorCount>(device);
}

// Return the maximum number of blocks in a cluster on a device: 8, the portable maximum, from sm_90
// on; 1 on older devices, which have no clusters.
inline unsigned device_max_cluster_blocks(int device) {
  return device_attribute<cudaDevAttrComputeCapabilityMajor>(device) >= 9 ? 8 : 1;
}

// Bytes of shared memory per block, static and dynamic together, that a kernel may have without a
// request.
inline constexpr size_t kDefaultSharedBytes = 48 * 1024;

// Starts kernels on the device of tensor `on`, on the stream that is torch's current stream of that
// device when the launcher is constructed. The device is CUDA's current device for the lifetime of
// the launcher. Launches return at once; kernels run in the order of their launches. The pointers
// among `arguments` must be valid on the device until the kernel has run. simt::HostLauncher has
// the same functions, except `stream`, for the emulation.
class CudaLauncher {
 public:
  explicit CudaLauncher(const torch::stable::Tensor& on)
      : guard_(on.get_device_index()),
        stream_(current_stream(on.get_device_index())),
        num_multiprocessors_(num_multiprocessors(on.get_device_index())),
        max_cluster_blocks_(device_max_cluster_blocks(on.get_device_index())) {}

  cudaStream_t stream() const { return stream_; }

  // Return the maximum number of blocks of a grid of a kernel with grid-stride loops:
  // `per_multiprocessor` blocks per multiprocessor of the device.
  int64_t max_grid_blocks(int per_multiprocessor) const {
    return int64_t{num_multiprocessors_} * per_multiprocessor;
  }

  // Return the maximum number of blocks in a cluster of `kernel`. It is 1 if the library was
  // compiled for older architectures only: such code runs on newer devices too, but without
  // clusters. The driver is asked once per signature, since all kernels of the library are compiled
  // for the same architectures.
  template <class... Parameters>
  unsigned max_cluster_blocks(void (*kernel)(Parameters...)) const {
    if (max_cluster_blocks_ == 1) return 1;
    static const bool has_cluster_code = [&] {
      cudaFuncAttributes attributes{};
      check_cuda(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
                 "cudaFuncGetAttributes");
      return attributes.ptxVersion >= 90;
    }();
    return has_cluster_code ? max_cluster_blocks_ : 1;
  }

  // Start `kernel` on a grid, without dynamic shared memory.
  template <class... Parameters, class... Arguments>
  void operator()(void (*kernel)(Parameters...), dim3 grid, dim3 block,
                  const Arguments&... arguments) const {
    launch_with_shared(kernel, grid, block, 0, arguments...);
  }

  // Start `kernel` on a grid, with `shared_bytes` of dynamic shared memory per block. More than
  // kDefaultSharedBytes are requested first. Static shared memory does not count for this decision:
  // the launch throws if only both together exceed kDefaultSharedBytes.
  template <class... Parameters, class... Arguments>
  void launch_with_shared(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes,
                          const Arguments&... arguments) const {
    if (shared_bytes > kDefaultSharedBytes) {
      check_cuda(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                      cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(shared_bytes)),
                 "reserving shared memory");
    }
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_;
    check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), "a kernel launch");
  }

  // Start `kernel` on a grid that is one cluster of num_blocks <= max_cluster_blocks(kernel)
  // blocks. With more than one block, `shared_bytes` must be at most kDefaultSharedBytes, else this
  // throws.
  template <class... Parameters, class... Arguments>
  void launch_cluster(void (*kernel)(Parameters...), unsigned num_blocks, dim3 block,
                      size_t shared_bytes, const Arguments&... arguments) const {
    if (num_blocks == 1) return launch_with_shared(kernel, 1, block, shared_bytes, arguments...);
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = num_blocks;
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = num_blocks;
    config.blockDim = block;
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_;
    config.attrs = &attribute;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, kernel, arguments...), "a kernel launch");
  }

  // Fill device memory with zero bytes, in stream order.
  void zero(void* data, size_t bytes) const {
    check_cuda(cudaMemsetAsync(data, 0, bytes, stream_), "cudaMemsetAsync");
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
  int num_multiprocessors_;
  unsigned max_cluster_blocks_;
};

}  // namespace emb
