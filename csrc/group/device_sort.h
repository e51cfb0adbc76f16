// Sorting and grouping on the GPU, for ops that compute their own keys. Such an op allocates
// SortBuffers, writes `keys` and `positions` in a kernel, and calls `sort_and_group`. An op that
// needs other kernels between sorting and grouping calls `sort_pairs` and launch_groups
// (group/segments.cuh) instead. Nothing here waits for the device.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "core/launch.h"
#include "group/segments.cuh"

namespace emb::cuda {

// Return the number of bytes of scratch that CUB needs on the current device to sort n pairs whose
// keys are at most `max_key`; at least 1 byte. `Key` is uint32_t or uint64_t, here and below.
template <class Key>
int64_t sort_scratch_bytes(int64_t n, Key max_key);

// Sort `pairs` by key with CUB, stable: pairs of equal keys keep their order. `scratch` is device
// memory of sort_scratch_bytes(pairs.n, pairs.no_group_key) bytes. The sort runs on the launcher's
// stream, so it may still use the scratch after the call.
template <class Key>
void sort_pairs(const CudaLauncher& launcher, const SortPairs<Key>& pairs, void* scratch);

// Sort the keys in `buffers` and write their groups to `out`. The caller must have written
// `buffers.keys`, at most `buffers.no_group_key` each, and `buffers.positions`, 0 to n - 1 in this
// order; neither is checked. Keys equal to `buffers.no_group_key` belong to no group. n may be 0.
// The sorted positions are written to `buffers.sorted_positions`; the contents of
// `buffers.sorted_keys` are unspecified. `out.sorted_bags` must be null: a small batch would fill
// it with zeros.
//
// A small batch takes one launch (group/small_group.cuh) if Key is uint32_t and `no_group_key` is
// below 2^31. Otherwise CUB sorts, with scratch allocated on the device of `like`. Throws
// AllocationError.
template <class Key>
void sort_and_group(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                    const SortBuffers<Key>& buffers, const DeviceGroupOutput& out);

// group_cuda.cu instantiates the templates for both types of keys; other files do not.
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

// Return whether keys in [0, max_key] must be uint64_t. A `max_key` of 2^32 - 1 would fit into
// uint32_t, but counts as wide too.
inline bool needs_wide_keys(int64_t max_key) { return max_key >= (int64_t{1} << 32) - 1; }

}  // namespace emb::cuda
