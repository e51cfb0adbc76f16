// `tbe_group` on the GPU: turn the lookups of all features into linear row ids, sort and group
// them, and return the bag of every sorted lookup. tbe/grouping.h says which kernels do this.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "core/check.h"
#include "group/device_sort.h"
#include "tbe/entries.h"
#include "tbe/grouping.h"
#include "tbe/keys.cuh"

namespace emb::cuda {

// For launch_bounds_check in lookup_cuda.cu, so that the kernel is compiled in one file only.
template void launch_lookup_keys(const CudaLauncher&, const KeySource&, const BatchCheck&,
                                 const SortBuffers<uint32_t>&);

namespace {

// Return the plan for grouping a batch in one launch; items_per_thread is 0 if the batch is too
// large for that.
SmallGroupPlan plan_small_batch(const CudaLauncher& launcher, const GroupInput& batch) {
  if (batch.bags.num_lookups > kMaxSmallGroup || batch.bags.num_bags > kMaxSmallBags ||
      needs_wide_keys(batch.total_rows)) {
    return {};
  }
  return plan_small_group(batch.bags.num_lookups, max_small_cluster_blocks<SmallLookups>(launcher));
}

// Return the source of the keys. Kernels write the bag of each lookup to `bag_of`, [L], unless it
// is null.
KeySource key_source(const GroupInput& batch, int32_t* bag_of) {
  return {batch.features, batch.indices, batch.bags, batch.map, bag_of};
}

// Return the output of the kernels that write the groups. They read `bag_of`, [L], to write the
// sorted bags; it is null for the one-launch kernel, which computes the bags.
DeviceGroupOutput kernel_output_of(const DeviceGrouping& out, const int32_t* bag_of,
                                   const StepCount& step) {
  DeviceGroupOutput kernel_output{};
  kernel_output.unique = out.rows;
  kernel_output.unique_is_int64 = true;
  kernel_output.segments = out.segments;
  kernel_output.num_groups = out.num_groups;
  kernel_output.bag_of = bag_of;
  kernel_output.sorted_bags = out.sorted_bags;
  kernel_output.step_count = step;
  return kernel_output;
}

// Group a batch of any size with CUB's sort: make the keys, sort, write the groups. `Key` must be
// uint64_t if needs_wide_keys(total_rows), else uint32_t.
template <class Key>
void group_by_sort(const CudaLauncher& launcher, const Tensor& like, const GroupInput& batch,
                   const DeviceGrouping& out, const StepCount& step) {
  const int64_t n = batch.bags.num_lookups;
  const auto limit = static_cast<Key>(batch.total_rows);
  SortBuffers<Key> buffers{{nullptr, nullptr, nullptr, out.sorted_lookups, n, limit}, nullptr};
  BatchCheck check{};
  int32_t* bag_of = nullptr;
  char* sort_scratch = nullptr;
  DeviceArrays scratch;
  if (!batch.has_valid_offsets) {
    scratch.add(&check.repaired_offsets, batch.bags.num_bags + 1);
    scratch.add(&check.progress, 2);
  }
  scratch.add(&buffers.keys, n);
  scratch.add(&buffers.sorted_keys, n);
  scratch.add(&buffers.positions, n);
  scratch.add(&bag_of, n);
  scratch.add(&buffers.range_counts, 2 * kMaxRanges);
  if (n > 0) scratch.add(&sort_scratch, sort_scratch_bytes(n, limit));
  scratch.allocate(like);
  launch_lookup_keys(launcher, key_source(batch, bag_of), check, buffers);
  if (n > 0) sort_pairs<Key>(launcher, buffers, sort_scratch);
  launch_groups(launcher, buffers, kernel_output_of(out, bag_of, step));
}

}  // namespace

// The contract is in tbe/grouping.h.
void group_lookups(const CudaLauncher& launcher, const Tensor& like, const GroupInput& batch,
                   const DeviceGrouping& out, const StepCount& step) {
  const SmallGroupPlan plan = plan_small_batch(launcher, batch);
  if (plan.items_per_thread == 0) {
    const auto sort =
        needs_wide_keys(batch.total_rows) ? group_by_sort<uint64_t> : group_by_sort<uint32_t>;
    return sort(launcher, like, batch, out, step);
  }
  BatchCheck check{};
  DeviceArrays scratch;
  if (!batch.has_valid_offsets) {
    scratch.add(&check.repaired_offsets, batch.bags.num_bags + 1);
    scratch.allocate(like);
  }
  const SmallGroupArgs args =
      small_group_args(batch.bags.num_lookups, static_cast<uint32_t>(batch.total_rows),
                       out.sorted_lookups, kernel_output_of(out, nullptr, step));
  launch_small_group(launcher, plan, SmallLookups{key_source(batch, nullptr), check}, args);
}

// The contract is in tbe/entries.h.
void group_lookups(const char* op, const Tensor& features, const Tensor& indices,
                   const Tensor& offsets, const std::optional<Tensor>& bag_layout,
                   int64_t total_rows, bool has_valid_offsets, const DeviceGrouping& out) {
  check_features(op, features);
  check_lookups(op, indices, offsets);
  check_same_device(op, "features", features, indices);
  check_not_negative(op, "total_rows", total_rows);
  const BagMap map = bag_map(op, features.size(0), offsets, bag_layout, 0);
  const Tensor index_tensor = as_contiguous(indices);
  const Tensor offset_tensor = as_contiguous(offsets);
  const GroupInput batch{feature_array(features),
                         index_array(index_tensor),
                         Bags{index_array(offset_tensor), offsets.numel() - 1, indices.numel()},
                         map,
                         total_rows,
                         has_valid_offsets};
  group_lookups(CudaLauncher(indices), indices, batch, out, {});
}

// The contract is in tbe/entries.h.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(
    const Tensor& features, const Tensor& indices, const Tensor& offsets,
    std::optional<Tensor> bag_layout, int64_t total_rows, bool has_valid_offsets) {
  const int64_t n = indices.numel();
  Tensor rows = allocate(indices, {n}, ScalarType::Long);
  Tensor segments = allocate(indices, {n + 1}, ScalarType::Int);
  Tensor lookups = allocate(indices, {n}, ScalarType::Int);
  Tensor bags = allocate(indices, {n}, ScalarType::Int);
  Tensor count = allocate(indices, {1}, ScalarType::Int);
  const DeviceGrouping out{rows.mutable_data_ptr<int64_t>(), segments.mutable_data_ptr<int32_t>(),
                           lookups.mutable_data_ptr<int32_t>(), bags.mutable_data_ptr<int32_t>(),
                           count.mutable_data_ptr<int32_t>()};
  group_lookups("tbe_group", features, indices, offsets, bag_layout, total_rows, has_valid_offsets,
                out);
  return {rows, segments, lookups, bags, count};
}

}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) { EMB_IMPL(m, emb::cuda, tbe_group); }
