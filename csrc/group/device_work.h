// What an op of several steps needs besides kernels, on the device: scratch memory, which torch
// frees in stream order, and the sort of `group`. Nothing waits for the device.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "core/entry.h"
#include "group/device_sort.h"

namespace emb::cuda {

class DeviceWork {
 public:
  explicit DeviceWork(const torch::stable::Tensor& on) : like_(on), launcher_(on) {}

  const CudaLauncher& launcher() const { return launcher_; }

  template <class T>
  T* scratch(int64_t n) {
    kept_.push_back(allocate(like_, {n * static_cast<int64_t>(sizeof(T))},
                             torch::headeronly::ScalarType::Byte));
    return reinterpret_cast<T*>(kept_.back().mutable_data_ptr());
  }

  void sort(const SortBuffers<uint32_t>& buffers) { sort_keys(launcher_, like_, buffers); }

 private:
  torch::stable::Tensor like_;
  CudaLauncher launcher_;
  std::vector<torch::stable::Tensor> kept_;
};

}  // namespace emb::cuda
