// Scratch memory of an op on a GPU. DeviceArrays has all arrays of an op in one allocation: an
// allocation through torch takes the host longer than a small kernel takes the GPU. DeviceWork
// allocates each array when a function of the op asks for it. Both free the memory with the object,
// in stream order: kernels that were launched before on the same stream may still use it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/entry.h"
#include "core/launch.h"

namespace emb::cuda {

// Scratch arrays in one allocation: `add` every array, then `allocate` once.
class DeviceArrays {
 public:
  // Reserve an array of n elements, aligned to 256 bytes; n may be 0. `allocate` writes its device
  // address to `*address`, which must exist until then. The array is uninitialised.
  template <class T>
  void add(T** address, int64_t n) {
    constexpr int64_t kAlignment = 256;
    arrays_.push_back({reinterpret_cast<void**>(address), bytes_});
    bytes_ += (n * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  }

  // Allocate all arrays on the device of `like`. Throws AllocationError.
  void allocate(const torch::stable::Tensor& like) {
    memory_ = emb::allocate(like, {bytes_}, torch::headeronly::ScalarType::Byte);
    auto* memory = static_cast<char*>(memory_->mutable_data_ptr());
    for (const Array& array : arrays_) *array.address = memory + array.offset;
  }

 private:
  struct Array {
    void** address;
    int64_t offset;
  };

  std::vector<Array> arrays_;
  int64_t bytes_ = 0;
  std::optional<torch::stable::Tensor> memory_;
};

// The launcher and the scratch memory of an op of several kernels, on the device of `like`.
// tests/simt/host_work.h has the same interface for the emulation.
class DeviceWork {
 public:
  explicit DeviceWork(const torch::stable::Tensor& like) : like_(like), launcher_(like) {}

  const CudaLauncher& launcher() const { return launcher_; }

  // Return uninitialised device memory for n values of T, which this object owns. Throws
  // AllocationError.
  template <class T>
  T* scratch(int64_t n) {
    scratch_tensors_.push_back(allocate(like_, {n * static_cast<int64_t>(sizeof(T))},
                                        torch::headeronly::ScalarType::Byte));
    return reinterpret_cast<T*>(scratch_tensors_.back().mutable_data_ptr());
  }

 private:
  torch::stable::Tensor like_;
  CudaLauncher launcher_;
  std::vector<torch::stable::Tensor> scratch_tensors_;
};

}  // namespace emb::cuda
