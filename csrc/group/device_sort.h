// The sort under `group` on the GPU, its scratch memory, and the scratch memory of ops of several
// steps. Ops that make their own keys fill `buffers().keys` and `buffers().positions` and call
// `sort_keys`; see group_cuda.cu.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "core/entry.h"
#include "core/launch.h"
#include "group/segments.cuh"

namespace emb::cuda {

// Sort by key, stable. Nothing waits for the device.
template <class Key>
void sort_pairs(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                const SortPairs<Key>& pairs);

extern template void sort_pairs(const CudaLauncher&, const torch::stable::Tensor&,
                                const SortPairs<uint32_t>&);

// The same, and find the runs of equal keys.
template <class Key>
void sort_keys(const CudaLauncher& launcher, const torch::stable::Tensor& like,
               const SortBuffers<Key>& buffers);

extern template void sort_keys(const CudaLauncher&, const torch::stable::Tensor&,
                               const SortBuffers<uint32_t>&);
extern template void sort_keys(const CudaLauncher&, const torch::stable::Tensor&,
                               const SortBuffers<uint64_t>&);

// Scratch for n keys below `limit` on the device of `like`. torch frees it in stream order.
template <class Key>
class DeviceSort {
 public:
  DeviceSort(const torch::stable::Tensor& like, int64_t n, int64_t limit, int32_t* sorted_positions)
      : scratch_(allocate(like, {n * static_cast<int64_t>(2 * sizeof(Key) + sizeof(int32_t)) + 16},
                          torch::headeronly::ScalarType::Byte)) {
    auto* keys = static_cast<Key*>(scratch_.mutable_data_ptr());
    auto* positions = reinterpret_cast<int32_t*>(keys + 2 * n);
    // Once sorted, the input is not needed any more: the runs reuse its memory.
    buffers_ = {keys,
                keys + n,
                keys,
                positions,
                sorted_positions,
                positions,
                positions + n,
                n,
                static_cast<Key>(limit)};
  }
  const SortBuffers<Key>& buffers() const { return buffers_; }

 private:
  torch::stable::Tensor scratch_;
  SortBuffers<Key> buffers_;
};

// Return whether keys in [0, limit] need 64 bits.
inline bool needs_wide_keys(int64_t limit) { return limit >= (int64_t{1} << 32) - 1; }

// Launches, scratch memory and sorting for an op of several steps. torch frees the scratch in
// stream order. Nothing waits for the device.

class DeviceWork {
 public:
  explicit DeviceWork(const torch::stable::Tensor& on) : like_(on), launcher_(on) {}

  const CudaLauncher& launcher() const { return launcher_; }

  template <class T>
  T* scratch(int64_t n) {
    scratch_tensors_.push_back(allocate(like_, {n * static_cast<int64_t>(sizeof(T))},
                                        torch::headeronly::ScalarType::Byte));
    return reinterpret_cast<T*>(scratch_tensors_.back().mutable_data_ptr());
  }

  void sort(const SortPairs<uint32_t>& pairs) { sort_pairs(launcher_, like_, pairs); }

 private:
  torch::stable::Tensor like_;
  CudaLauncher launcher_;
  std::vector<torch::stable::Tensor> scratch_tensors_;
};

}  // namespace emb::cuda
