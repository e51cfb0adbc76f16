// Sorting and grouping on the GPU, for the entries of ops that sort keys, and scratch memory for
// ops of several kernels (DeviceWork). An op that computes its own keys allocates SortBuffers,
// writes `keys` and `positions` in a kernel, and calls `sort_and_group`. Nothing here waits for the
// device.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <vector>

#include "core/entry.h"
#include "core/launch.h"
#include "group/segments.cuh"

namespace emb::cuda {

// Return the bytes of scratch that CUB needs on the current device to sort n pairs whose keys are
// at most `max_key`. The result is at least 1. `Key` is uint32_t or uint64_t.
template <class Key>
int64_t sort_scratch_bytes(int64_t n, Key max_key);

// Sort `pairs` by key with CUB, stable: pairs of equal keys keep their order. `scratch` is device
// memory of sort_scratch_bytes(pairs.n, pairs.no_group_key) bytes. The sort runs on the launcher's
// stream, so it may still use the scratch after the call.
template <class Key>
void sort_pairs(const CudaLauncher& launcher, const SortPairs<Key>& pairs, void* scratch);

// Sort the keys in `buffers` and write their groups to `out`. The caller must have written
// `buffers.keys`, at most `buffers.no_group_key` each, and `buffers.positions`, 0 to n - 1 in this
// order; neither is checked. Keys equal to `buffers.no_group_key` belong to no group. The sorted
// positions are written to `buffers.sorted_positions`; the contents of `buffers.sorted_keys` are
// unspecified. `out.sorted_bags` must be null, because a single launch would not write bags.
//
// A small batch takes a single launch (group/small_group.cuh) if Key is uint32_t and `no_group_key`
// is below 2^31. Otherwise CUB sorts, with scratch allocated on the device of `like`. Throws
// AllocationError.
template <class Key>
void sort_and_group(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                    const SortBuffers<Key>& buffers, const DeviceGroupOutput& out);

// The templates are instantiated in group_cuda.cu only.
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

// Return whether keys in [0, max_key] are sorted as 64 bits. A `max_key` of 2^32 - 1 would fit into
// 32 bits, but is sorted as 64 bits too.
inline bool needs_wide_keys(int64_t max_key) { return max_key >= (int64_t{1} << 32) - 1; }

// The launcher and the scratch memory of an op of several kernels, on the device of `like`. The
// scratch is freed with this object, in stream order: kernels launched before that may still use
// it. tests/simt/host_work.h has the same interface for the emulation.
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
