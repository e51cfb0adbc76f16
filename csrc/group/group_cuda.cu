// `group` and `group_inverse` on the GPU, and the sort that other ops use (device_sort.h). `group`
// takes one launch for a small batch (small_group.cuh), unless the keys need 64 bits. Any other
// batch is sorted by CUB's radix sort, on 32-bit keys if they suffice and on their significant bits
// only. Kernels before and after the sort make the keys and write the groups (segments.cuh). The
// number of groups stays on the device.
#include <torch/csrc/stable/library.h>

#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <limits>
#include <tuple>

#include "group/check.h"
#include "group/device_sort.h"
#include "group/small_group.cuh"

namespace emb::cuda {

namespace {

// Sort with CUB, in `*bytes` bytes of `scratch` in device memory. If `scratch` is null, only write
// to `*bytes` how many bytes the sort needs.
template <class Key>
void cub_sort_pairs(const SortPairs<Key>& in, void* scratch, size_t* bytes, cudaStream_t stream) {
  const int bits = std::max(1, static_cast<int>(std::bit_width(in.no_group_key)));
  check_cuda(
      cub::DeviceRadixSort::SortPairs(scratch, *bytes, in.keys, in.sorted_keys, in.positions,
                                      in.sorted_positions, static_cast<int>(in.n), 0, bits, stream),
      scratch == nullptr ? "sizing CUB's scratch" : "CUB");
}

// Group n keys in one launch and return true; return false, without a launch, if the batch is too
// large for that or the keys need 64 bits. Keys outside [0, no_group_key) belong to no group. The
// sorted positions are written to `sorted_positions`, int32 [n].
bool group_small(const CudaLauncher& launcher, const IndexArray& keys, int64_t n,
                 int64_t no_group_key, int32_t* sorted_positions, const DeviceGroupOutput& out) {
  if (n > kMaxSmallGroup || needs_wide_keys(no_group_key)) return false;
  const auto plan = plan_small_group(n, max_small_cluster_blocks<KeyArray>(launcher));
  if (plan.items_per_thread == 0) return false;
  launch_small_group(
      launcher, plan, KeyArray{keys},
      small_group_args(n, static_cast<uint32_t>(no_group_key), sorted_positions, out));
  return true;
}

// Sort the keys in `buffers` with CUB, unless there are none, and write their groups. The scratch
// of the sort is allocated on the device of `like`.
template <class Key>
void group_large(const CudaLauncher& launcher, const Tensor& like, const SortBuffers<Key>& buffers,
                 const DeviceGroupOutput& out) {
  if (buffers.n > 0) {
    const Tensor scratch =
        allocate(like, {sort_scratch_bytes(buffers.n, buffers.no_group_key)}, ScalarType::Byte);
    sort_pairs<Key>(launcher, buffers, scratch.mutable_data_ptr());
  }
  launch_groups(launcher, buffers, out);
}

}  // namespace

template <class Key>
int64_t sort_scratch_bytes(int64_t n, Key max_key) {
  size_t bytes = 0;
  cub_sort_pairs(SortPairs<Key>{nullptr, nullptr, nullptr, nullptr, n, max_key}, nullptr, &bytes,
                 nullptr);
  return static_cast<int64_t>(bytes > 0 ? bytes : 1);
}

template <class Key>
void sort_pairs(const CudaLauncher& launcher, const SortPairs<Key>& pairs, void* scratch) {
  auto bytes = static_cast<size_t>(sort_scratch_bytes(pairs.n, pairs.no_group_key));
  cub_sort_pairs(pairs, scratch, &bytes, launcher.stream());
}

template <class Key>
void sort_and_group(const CudaLauncher& launcher, const Tensor& like,
                    const SortBuffers<Key>& buffers, const DeviceGroupOutput& out) {
  // group_small reads 32-bit keys as int32 (IndexArray). It puts keys equal to `no_group_key` into
  // no group, as group_large does.
  const bool is_int32 =
      sizeof(Key) == 4 && buffers.no_group_key <= std::numeric_limits<int32_t>::max();
  const auto no_group_key = static_cast<int64_t>(buffers.no_group_key);
  if (is_int32 && group_small(launcher, IndexArray{buffers.keys, false}, buffers.n, no_group_key,
                              buffers.sorted_positions, out)) {
    return;
  }
  group_large(launcher, like, buffers, out);
}

#define EMB_SORT(Key)                                                                       \
  template void launch_groups(const CudaLauncher&, const SortBuffers<Key>&,                 \
                              const DeviceGroupOutput&);                                    \
  template int64_t sort_scratch_bytes(int64_t, Key);                                        \
  template void sort_pairs(const CudaLauncher&, const SortPairs<Key>&, void*);              \
  template void sort_and_group(const CudaLauncher&, const Tensor&, const SortBuffers<Key>&, \
                               const DeviceGroupOutput&)
EMB_SORT(uint32_t);
EMB_SORT(uint64_t);
#undef EMB_SORT

namespace {

// Group a contiguous vector of int32 or int64 keys with CUB's sort. `permutation` is int32 [n] on
// the device. The other buffers of the sort are in one tensor, which is freed in stream order.
template <class Key>
void group_keys(const CudaLauncher& launcher, const Tensor& keys, int64_t num_keys,
                int32_t* permutation, const DeviceGroupOutput& out) {
  const int64_t n = keys.numel();
  const auto pair_bytes = static_cast<int64_t>(2 * sizeof(Key) + sizeof(int32_t));
  const auto count_bytes = 2 * kMaxRanges * static_cast<int64_t>(sizeof(int32_t));
  const Tensor scratch = allocate(keys, {n * pair_bytes + count_bytes}, ScalarType::Byte);
  auto* sort_keys = static_cast<Key*>(scratch.mutable_data_ptr());
  auto* positions = reinterpret_cast<int32_t*>(sort_keys + 2 * n);
  const SortBuffers<Key> buffers{
      {sort_keys, sort_keys + n, positions, permutation, n, static_cast<Key>(num_keys)},
      positions + n};
  if (n > 0) launch_keys(launcher, index_array(keys), buffers);
  group_large(launcher, keys, buffers, out);
}

// Group equal keys. `keys` is a vector of n int32 or int64 values; those outside [0, num_keys)
// belong to no group. Returns, as on the CPU, for `count` groups in ascending order of their keys:
//   unique       [n], dtype of keys: the key of each group, then 0
//   segments     int32 [n + 1]: group g has the sorted positions [segments[g], segments[g + 1]);
//                entries after `count` repeat segments[count]
//   permutation  int32 [n]: positions in `keys` sorted by key, equal keys in their order; positions
//                of keys without a group at the end
//   count        int32 [1]: the number of groups
std::tuple<Tensor, Tensor, Tensor, Tensor> group(const Tensor& keys, int64_t num_keys) {
  check_group_keys(keys, num_keys);
  const CudaLauncher launcher(keys);
  const Tensor input = as_contiguous(keys);
  const int64_t n = keys.numel();
  Tensor unique = allocate(keys, {n});
  Tensor segments = allocate(keys, {n + 1}, ScalarType::Int);
  Tensor permutation = allocate(keys, {n}, ScalarType::Int);
  Tensor count = allocate(keys, {1}, ScalarType::Int);
  const DeviceGroupOutput out{.unique = unique.mutable_data_ptr(),
                              .unique_is_int64 = unique.scalar_type() == ScalarType::Long,
                              .segments = segments.mutable_data_ptr<int32_t>(),
                              .num_groups = count.mutable_data_ptr<int32_t>()};
  int32_t* positions = permutation.mutable_data_ptr<int32_t>();
  if (group_small(launcher, index_array(input), n, num_keys, positions, out)) {
    return {unique, segments, permutation, count};
  }
  if (needs_wide_keys(num_keys)) {
    group_keys<uint64_t>(launcher, input, num_keys, positions, out);
  } else {
    group_keys<uint32_t>(launcher, input, num_keys, positions, out);
  }
  return {unique, segments, permutation, count};
}

// The op `group_inverse`, see entries.h, for tensors on one GPU. Their contents, which must come
// from one call of `group` or `tbe_group`, are not checked.
Tensor group_inverse(const Tensor& segments, const Tensor& permutation, const Tensor& count) {
  check_group_inverse(segments, permutation, count);
  const int64_t n = permutation.numel();
  const CudaLauncher launcher(permutation);
  Tensor inverse = allocate(permutation, {n});
  launch_inverse(launcher,
                 {segments.const_data_ptr<int32_t>(), permutation.const_data_ptr<int32_t>(),
                  count.const_data_ptr<int32_t>(), n, inverse.mutable_data_ptr<int32_t>()});
  return inverse;
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, group);
  EMB_IMPL(m, emb::cuda, group_inverse);
}
