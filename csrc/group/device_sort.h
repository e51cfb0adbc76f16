// Sorting and grouping on the GPU, and scratch memory for it, for the entries of all ops that sort
// keys. An op that computes its own keys creates a DeviceSort, fills `buffers().keys` and
// `buffers().positions` by a kernel, and calls `sort_and_group`. Nothing here waits for the device.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "core/entry.h"
#include "core/launch.h"
#include "group/segments.cuh"

namespace emb::cuda {

// Return the bytes of scratch that CUB needs to sort n pairs with keys up to `limit`, at least 1.
// `Key` is uint32_t or uint64_t.
template <class Key>
int64_t sort_scratch_bytes(int64_t n, Key limit);

// Sort `pairs` by key, stable: pairs of equal keys keep their order. `scratch` is device memory of
// sort_scratch_bytes(pairs.n, pairs.limit) bytes, in use until the stream has passed.
template <class Key>
void sort_pairs(const CudaLauncher& launcher, const SortPairs<Key>& pairs, void* scratch);

// Sort `pairs` with scratch that is allocated on the device of `like`.
template <class Key>
void sort_pairs(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                const SortPairs<Key>& pairs) {
  const torch::stable::Tensor scratch = allocate(like, {sort_scratch_bytes(pairs.n, pairs.limit)},
                                                 torch::headeronly::ScalarType::Byte);
  sort_pairs(launcher, pairs, scratch.mutable_data_ptr());
}

// Sort the keys in `sort` and write their groups to `out`. The caller has filled `sort.keys`, at
// most `sort.limit` each, and `sort.positions` with 0, 1, ..., n - 1. Keys equal to the limit
// belong to no group. The sorted positions are written to `sort.sorted_positions`; the caller must
// not read `sort.sorted_keys`. A small batch with a limit below 2^31 takes one launch
// (group/small_group.cuh), any other CUB's sort, with scratch allocated on the device of `like`.
template <class Key>
void sort_and_group(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                    const SortBuffers<Key>& sort, const DeviceGroupOutput& out);

// These, and the kernels that write the groups, are compiled in group_cuda.cu only.
#define EMB_EXTERN_SORT(Key)                                                             \
  extern template void launch_groups(const CudaLauncher&, const SortBuffers<Key>&,       \
                                     const DeviceGroupOutput&);                          \
  extern template int64_t sort_scratch_bytes(int64_t, Key);                              \
  extern template void sort_pairs(const CudaLauncher&, const SortPairs<Key>&, void*);    \
  extern template void sort_and_group(const CudaLauncher&, const torch::stable::Tensor&, \
                                      const SortBuffers<Key>&, const DeviceGroupOutput&)
EMB_EXTERN_SORT(uint32_t);
EMB_EXTERN_SORT(uint64_t);
#undef EMB_EXTERN_SORT

// The buffers of a sort of n keys up to `limit` on the device of `like`. They are scratch of this
// object, freed with it in stream order; only `sorted_positions`, int32 [n] on the device, belongs
// to the caller. `Key` must be uint64_t if needs_wide_keys(limit); not checked. The scratch of
// CUB's sort is not among them.
template <class Key>
class DeviceSort {
 public:
  DeviceSort(const torch::stable::Tensor& like, int64_t n, int64_t limit, int32_t* sorted_positions)
      : scratch_(allocate(like, {bytes(n)}, torch::headeronly::ScalarType::Byte)) {
    auto* keys = static_cast<Key*>(scratch_.mutable_data_ptr());
    auto* positions = reinterpret_cast<int32_t*>(keys + 2 * n);
    buffers_ = {{keys, keys + n, positions, sorted_positions, n, static_cast<Key>(limit)},
                positions + n};
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

// Return whether keys in [0, limit] are sorted as 64 bits. 32 bits serve limits below 2^32 - 1.
inline bool needs_wide_keys(int64_t limit) { return limit >= (int64_t{1} << 32) - 1; }

// Launches and scratch memory for an op of several kernels, on the device of tensor `on`.
// The scratch is freed with this object, in stream order: kernels launched before that may still
// use it. tests/simt/host_work.h has the same interface for the emulation.
class DeviceWork {
 public:
  explicit DeviceWork(const torch::stable::Tensor& on) : like_(on), launcher_(on) {}

  const CudaLauncher& launcher() const { return launcher_; }

  // Return uninitialised device memory for n values of T. Throws AllocationError.
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
