// `group` and `group_inverse` on the GPU. Small batches take one launch (small_group.cuh). For
// others CUB's radix sort runs over the significant bits only, on 32-bit keys where they suffice.
// Everything stays on the device.
#include <torch/csrc/stable/library.h>

#include <bit>
#include <cub/device/device_radix_sort.cuh>
#include <limits>
#include <tuple>

#include "core/check.h"
#include "group/device_sort.h"
#include "group/small_group.cuh"

namespace emb::cuda {

namespace {

// Call CUB's sort: for the size of its scratch if that is null, else to sort.
template <class Key>
void run_sort(const SortPairs<Key>& in, void* scratch, size_t* bytes, cudaStream_t stream) {
  const int bits = std::max(1, static_cast<int>(std::bit_width(in.limit)));
  check_cuda(
      cub::DeviceRadixSort::SortPairs(scratch, *bytes, in.keys, in.sorted_keys, in.positions,
                                      in.sorted_positions, static_cast<int>(in.n), 0, bits, stream),
      scratch == nullptr ? "sizing CUB's scratch" : "CUB");
}

// Group a small batch and return true; false if it is not one.
bool group_small(const CudaLauncher& launcher, const IndexArray& keys, int64_t n, int64_t limit,
                 int32_t* positions, const GroupOutput& out) {
  if (n > kMaxSmallGroup || needs_wide_keys(limit)) return false;
  const auto plan = plan_small_group(n, max_small_cluster<GivenKeys>(launcher));
  if (plan.items == 0) return false;
  launch_small_group(launcher, plan, GivenKeys{keys},
                     small_group_args(n, static_cast<uint32_t>(limit), positions, out));
  return true;
}

template <class Key>
void group_large(const CudaLauncher& launcher, const Tensor& like, const SortBuffers<Key>& sort,
                 const GroupOutput& out) {
  if (sort.n > 0) {
    sort_pairs(launcher, like,
               SortPairs<Key>{sort.keys, sort.sorted_keys, sort.positions, sort.sorted_positions,
                              sort.n, sort.limit});
  }
  launch_groups(launcher, sort, out);
}

}  // namespace

template <class Key>
int64_t sort_scratch_bytes(int64_t n, Key limit) {
  size_t bytes = 0;
  run_sort(SortPairs<Key>{nullptr, nullptr, nullptr, nullptr, n, limit}, nullptr, &bytes, nullptr);
  return static_cast<int64_t>(bytes > 0 ? bytes : 1);
}

template <class Key>
void sort_pairs(const CudaLauncher& launcher, const SortPairs<Key>& pairs, void* scratch) {
  auto bytes = static_cast<size_t>(sort_scratch_bytes(pairs.n, pairs.limit));
  run_sort(pairs, scratch, &bytes, launcher.stream());
}

template <class Key>
void sort_and_group(const CudaLauncher& launcher, const Tensor& like, const SortBuffers<Key>& sort,
                    const GroupOutput& out) {
  // Keys of 31 bits are numbers of an index array; `limit` is none that belongs to a group.
  const bool is_int32 = sizeof(Key) == 4 && sort.limit <= std::numeric_limits<int32_t>::max();
  const auto limit = static_cast<int64_t>(sort.limit);
  if (is_int32 && group_small(launcher, IndexArray{sort.keys, false}, sort.n, limit,
                              sort.sorted_positions, out)) {
    return;
  }
  group_large(launcher, like, sort, out);
}

#define EMB_SORT(Key)                                                                            \
  template void launch_groups(const CudaLauncher&, const SortBuffers<Key>&, const GroupOutput&); \
  template int64_t sort_scratch_bytes(int64_t, Key);                                             \
  template void sort_pairs(const CudaLauncher&, const SortPairs<Key>&, void*);                   \
  template void sort_and_group(const CudaLauncher&, const Tensor&, const SortBuffers<Key>&,      \
                               const GroupOutput&)
EMB_SORT(uint32_t);
EMB_SORT(uint64_t);
#undef EMB_SORT

namespace {

template <class Key>
void group_keys(const CudaLauncher& launcher, const Tensor& keys, int64_t num_keys,
                int32_t* permutation, const GroupOutput& out) {
  const DeviceSort<Key> sort(keys, keys.numel(), num_keys, permutation);
  if (keys.numel() > 0) launch_keys(launcher, index_array(keys), sort.buffers());
  group_large(launcher, keys, sort.buffers(), out);
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
