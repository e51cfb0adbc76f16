// Scratch arrays of an op on a device in one allocation: an allocation through torch costs the host
// more than a kernel costs the GPU. torch frees the memory in stream order.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "core/entry.h"

namespace emb::cuda {

class DeviceArrays {
 public:
  // Reserve an array of n elements, aligned to 256 bytes; `allocate` writes where it is.
  template <class T>
  void add(T** address, int64_t n) {
    constexpr int64_t kAlignment = 256;
    arrays_.push_back({reinterpret_cast<void**>(address), bytes_});
    bytes_ += (n * static_cast<int64_t>(sizeof(T)) + kAlignment - 1) / kAlignment * kAlignment;
  }

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
