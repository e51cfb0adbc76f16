// The sort under `group` on the GPU and its scratch memory, for the entries of all ops that sort.
// Ops that make their own keys fill `buffers().keys` and `buffers().positions` and call
// `sort_and_group`; see group_cuda.cu.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "core/entry.h"
#include "core/launch.h"
#include "group/segments.cuh"

namespace emb::cuda {

// Return the bytes of scratch that CUB needs for n pairs with keys up to `limit`.
template <class Key>
int64_t sort_scratch_bytes(int64_t n, Key limit);

// Sort by key, stable, with that much scratch. Nothing waits for the device.
template <class Key>
void sort_pairs(const CudaLauncher& launcher, const SortPairs<Key>& pairs, void* scratch);

// The same, and allocate the scratch.
template <class Key>
void sort_pairs(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                const SortPairs<Key>& pairs) {
  const torch::stable::Tensor scratch = allocate(like, {sort_scratch_bytes(pairs.n, pairs.limit)},
                                                 torch::headeronly::ScalarType::Byte);
  sort_pairs(launcher, pairs, scratch.mutable_data_ptr());
}

// Group the keys in `sort`, whose positions are 0, 1, ..., and write the groups: small batches in
// one launch (group/small_group.cuh), others with CUB. Nothing waits for the device.
template <class Key>
void sort_and_group(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                    const SortBuffers<Key>& sort, const GroupOutput& out);

// These, and the kernels that write the groups, are compiled with group_cuda.cu alone.
#define EMB_EXTERN_SORT(Key)                                                             \
  extern template void launch_groups(const CudaLauncher&, const SortBuffers<Key>&,       \
                                     const GroupOutput&);                                \
  extern template int64_t sort_scratch_bytes(int64_t, Key);                              \
  extern template void sort_pairs(const CudaLauncher&, const SortPairs<Key>&, void*);    \
  extern template void sort_and_group(const CudaLauncher&, const torch::stable::Tensor&, \
                                      const SortBuffers<Key>&, const GroupOutput&)
EMB_EXTERN_SORT(uint32_t);
EMB_EXTERN_SORT(uint64_t);
#undef EMB_EXTERN_SORT

// Scratch for n keys below `limit` on the device of `like`. torch frees it in stream order.
template <class Key>
class DeviceSort {
 public:
  DeviceSort(const torch::stable::Tensor& like, int64_t n, int64_t limit, int32_t* sorted_positions)
      : scratch_(allocate(like, {bytes(n)}, torch::headeronly::ScalarType::Byte)) {
    auto* keys = static_cast<Key*>(scratch_.mutable_data_ptr());
    auto* positions = reinterpret_cast<int32_t*>(keys + 2 * n);
    buffers_ = {
        keys, keys + n, positions, sorted_positions, positions + n, n, static_cast<Key>(limit)};
  }
  const SortBuffers<Key>& buffers() const { return buffers_; }

 private:
  static int64_t bytes(int64_t n) {
    const auto pair = static_cast<int64_t>(2 * sizeof(Key) + sizeof(int32_t));
    return n * pair + 2 * kMaxRanges * static_cast<int64_t>(sizeof(int32_t));
  }

  torch::stable::Tensor scratch_;
  SortBuffers<Key> buffers_;
};

// Return whether keys in [0, limit] need 64 bits.
inline bool needs_wide_keys(int64_t limit) { return limit >= (int64_t{1} << 32) - 1; }

// Launches, scratch memory and sorting for an op of several steps. torch frees the scratch, which
// lives as long as this object, in stream order. Nothing waits for the device.
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
