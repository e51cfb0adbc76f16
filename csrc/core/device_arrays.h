// The scratch arrays of an op on a GPU, in one allocation. An allocation through torch takes the
// host longer than a small kernel takes the GPU. `add` every array, then `allocate` once. The
// memory is freed with this object, in stream order: kernels that were launched before on the same
// stream may still use it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/entry.h"

namespace emb::cuda {

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

}  // namespace emb::cuda
