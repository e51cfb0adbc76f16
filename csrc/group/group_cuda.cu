// `group` and `group_inverse` on the GPU. CUB's radix sort runs over the significant bits only, on
// 32-bit keys where they suffice; another pass of CUB finds the runs. Everything stays on the
// device.
#include <thrust/iterator/counting_iterator.h>
#include <torch/csrc/stable/library.h>

#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>
#include <tuple>

#include "core/check.h"
#include "group/device_sort.h"

namespace emb::cuda {

// Call a CUB algorithm twice: for the size of its scratch, then to run it.
template <class Algorithm>
void with_scratch(const torch::stable::Tensor& like, const Algorithm& run) {
  size_t bytes = 0;
  check_cuda(run(nullptr, bytes), "sizing CUB's scratch");
  torch::stable::Tensor scratch =
      allocate(like, {static_cast<int64_t>(bytes > 0 ? bytes : 1)}, ScalarType::Byte);
  check_cuda(run(scratch.mutable_data_ptr(), bytes), "CUB");
}

template <class Key>
void sort_pairs(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                const SortPairs<Key>& in) {
  const int bits = std::max(1, static_cast<int>(std::bit_width(in.limit)));
  const int n = static_cast<int>(in.n);
  with_scratch(like, [&](void* scratch, size_t& bytes) {
    return cub::DeviceRadixSort::SortPairs(scratch, bytes, in.keys, in.sorted_keys, in.positions,
                                           in.sorted_positions, n, 0, bits, launcher.stream());
  });
}

template void sort_pairs(const CudaLauncher&, const torch::stable::Tensor&,
                         const SortPairs<uint32_t>&);

template <class Key>
void sort_keys(const CudaLauncher& launcher, const torch::stable::Tensor& like,
               const SortBuffers<Key>& in) {
  sort_pairs(
      launcher, like,
      SortPairs<Key>{in.keys, in.sorted_keys, in.positions, in.sorted_positions, in.n, in.limit});
  const int n = static_cast<int>(in.n);
  with_scratch(like, [&](void* scratch, size_t& bytes) {
    return cub::DeviceSelect::UniqueByKey(scratch, bytes, in.sorted_keys,
                                          thrust::counting_iterator<int32_t>(0), in.run_keys,
                                          in.run_starts, in.runs, n, launcher.stream());
  });
}

template void sort_keys(const CudaLauncher&, const torch::stable::Tensor&,
                        const SortBuffers<uint32_t>&);
template void sort_keys(const CudaLauncher&, const torch::stable::Tensor&,
                        const SortBuffers<uint64_t>&);

namespace {

template <class Key>
void group_keys(const CudaLauncher& launcher, const Tensor& keys, int64_t num_keys,
                int32_t* permutation, const GroupOutput& out) {
  const DeviceSort<Key> sort(keys, keys.numel(), num_keys, permutation);
  if (keys.numel() > 0) {
    launch_keys(launcher, index_array(keys), sort.buffers());
    sort_keys(launcher, keys, sort.buffers());
  }
  launch_groups(launcher, sort.buffers(), out);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group(const Tensor& keys, int64_t num_keys) {
  check_index_dtype("group", "keys", keys);
  STD_TORCH_CHECK(num_keys >= 0, "group: num_keys must be >= 0, got ", num_keys);
  STD_TORCH_CHECK(keys.numel() <= kMaxLookups, "group: at most 2^31 - 1 keys a call, got ",
                  keys.numel());
  const CudaLauncher launcher(keys);
  const Tensor input = as_contiguous(keys);
  const int64_t n = keys.numel();
  Tensor unique = allocate(keys, {n});
  Tensor segments = allocate(keys, {n + 1}, ScalarType::Int);
  Tensor permutation = allocate(keys, {n}, ScalarType::Int);
  Tensor count = allocate(keys, {1}, ScalarType::Int);
  const GroupOutput out{unique.mutable_data_ptr(),
                        unique.scalar_type() == ScalarType::Long,
                        segments.mutable_data_ptr<int32_t>(),
                        count.mutable_data_ptr<int32_t>(),
                        nullptr,
                        nullptr};
  if (needs_wide_keys(num_keys)) {
    group_keys<uint64_t>(launcher, input, num_keys, permutation.mutable_data_ptr<int32_t>(), out);
  } else {
    group_keys<uint32_t>(launcher, input, num_keys, permutation.mutable_data_ptr<int32_t>(), out);
  }
  return {unique, segments, permutation, count};
}

Tensor group_inverse(const Tensor& segments, const Tensor& permutation, const Tensor& count) {
  const char* op = "group_inverse";
  for (const Tensor* tensor : {&segments, &permutation, &count}) {
    check_dtype(op, "segments, permutation and count", *tensor, ScalarType::Int,
                "int32, as group returns them");
    STD_TORCH_CHECK(tensor->is_contiguous(), op, ": its arguments must be contiguous");
    check_same_device(op, "segments, permutation and count", *tensor, permutation);
  }
  const int64_t n = permutation.numel();
  STD_TORCH_CHECK(segments.numel() == n + 1 && count.numel() == 1, op,
                  ": segments must have one entry more than permutation = ", n + 1, ", got ",
                  segments.numel());
  const CudaLauncher launcher(permutation);
  Tensor inverse = allocate(permutation, {n});
  launch_inverse(launcher, segments.const_data_ptr<int32_t>(),
                 permutation.const_data_ptr<int32_t>(), count.const_data_ptr<int32_t>(), n,
                 inverse.mutable_data_ptr<int32_t>());
  return inverse;
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, group);
  EMB_IMPL(m, emb::cuda, group_inverse);
}
