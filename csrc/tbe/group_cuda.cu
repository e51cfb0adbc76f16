// `tbe_group` on the GPU: the lookups of all features as linear row ids, grouped, with the bag of
// every sorted lookup.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "core/check.h"
#include "group/device_sort.h"
#include "tbe/grouping.h"
#include "tbe/keys.cuh"

namespace emb::cuda {
namespace {

// Return how to group a batch in one launch, without items if that is impossible.
SmallGroupPlan small_plan(const CudaLauncher& launcher, const GroupBatch& batch) {
  if (batch.bags.num_lookups > kMaxSmallGroup || batch.bags.count > kMaxSmallBags ||
      needs_wide_keys(batch.total_rows)) {
    return {};
  }
  return plan_small_group(batch.bags.num_lookups, max_small_cluster<SmallLookups>(launcher));
}

LookupKeys lookup_keys(const GroupBatch& batch, int32_t* bag_of) {
  return {batch.features, batch.indices, batch.bags, batch.map, bag_of};
}

// Return the outputs of the groups; of a sort by CUB the bags are not among them.
GroupOutput group_output(const GroupWants& wants, const GroupArrays& arrays, const int32_t* bag_of,
                         const StepCount& step) {
  GroupOutput out{};
  out.unique_is_int64 = true;
  if (wants.groups) {
    out.unique = arrays.rows;
    out.segments = arrays.segments;
    out.count = arrays.count;
    out.step = step;
  }
  out.bag_of = bag_of;
  out.bags = wants.bags ? arrays.bags : nullptr;
  return out;
}

}  // namespace

LookupGrouping::LookupGrouping(const CudaLauncher& launcher, const GroupBatch& batch,
                               const GroupWants& wants)
    : launcher_(launcher),
      batch_(batch),
      wants_(wants),
      is_small_(small_plan(launcher, batch).items > 0) {}

void LookupGrouping::add_scratch(DeviceArrays* scratch) {
  if (repairs_into_scratch()) scratch->add(&repaired_, batch_.bags.count + 1);
  if (is_small_) return;
  if (!batch_.repaired) scratch->add(&progress_, 2);
  if (needs_wide_keys(batch_.total_rows)) {
    add_sort<uint64_t>(scratch);
  } else {
    add_sort<uint32_t>(scratch);
  }
}

template <class Key>
void LookupGrouping::add_sort(DeviceArrays* scratch) {
  const int64_t n = batch_.bags.num_lookups, bytes = n * static_cast<int64_t>(sizeof(Key));
  scratch->add(&keys_, bytes);
  if (!wants_.sorted_rows) scratch->add(&sorted_keys_, bytes);
  if (wants_.lookups) scratch->add(&positions_, n);
  if (wants_.bags) scratch->add(&bag_of_, n);
  if (wants_.groups) scratch->add(&range_counts_, 2 * kMaxRanges);
  if (n == 0) return;
  scratch->add(&sort_scratch_, sort_scratch_bytes(n, static_cast<Key>(batch_.total_rows)));
}

void LookupGrouping::run(const GroupArrays& arrays, const StepCount& step) {
  BatchCheck check{};
  if (!batch_.repaired) {
    check = batch_.check;
    check.progress = progress_;
    if (repairs_into_scratch()) {
      check.repaired = repaired_;
      check.copies = false;
    }
  }
  if (is_small_) {
    const GroupOutput out = group_output(wants_, arrays, nullptr, step);
    SmallGroupArgs args =
        small_group_args(batch_.bags.num_lookups, static_cast<uint32_t>(batch_.total_rows),
                         wants_.lookups ? arrays.lookups : nullptr, out);
    if (wants_.sorted_rows) args.sorted_keys = static_cast<uint32_t*>(arrays.sorted_rows);
    launch_small_group(launcher_, small_plan(launcher_, batch_),
                       SmallLookups{lookup_keys(batch_, nullptr), check}, args);
  } else if (needs_wide_keys(batch_.total_rows)) {
    run_sort<uint64_t>(check, arrays, step);
  } else {
    run_sort<uint32_t>(check, arrays, step);
  }
}

// The payload of the sort is what is wanted of positions and bags; of both it is the positions.
template <class Key>
void LookupGrouping::run_sort(const BatchCheck& check, const GroupArrays& arrays,
                              const StepCount& step) {
  const int64_t n = batch_.bags.num_lookups;
  const auto limit = static_cast<Key>(batch_.total_rows);
  auto* sorted = static_cast<Key*>(wants_.sorted_rows ? arrays.sorted_rows : sorted_keys_);
  const SortBuffers<Key> sort{
      reinterpret_cast<Key*>(keys_), sorted, positions_, arrays.lookups, range_counts_, n, limit};
  GroupOutput out = group_output(wants_, arrays, bag_of_, step);
  SortPairs<Key> pairs{sort.keys, sorted, positions_, arrays.lookups, n, limit};
  if (!wants_.lookups) {
    pairs.positions = bag_of_;
    pairs.sorted_positions = arrays.bags;
    out.bags = nullptr;  // sorted already
  }
  launch_lookup_keys(launcher_, lookup_keys(batch_, bag_of_), check, sort);
  if (n > 0) sort_pairs(launcher_, pairs, sort_scratch_);
  if (wants_.groups) {
    launch_groups(launcher_, sort, out);
  } else if (out.bags != nullptr) {
    launch_gather_bags(launcher_, out, arrays.lookups, n);
  }
}

void group_lookups(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                   const GroupBatch& batch, const GroupArrays& out, const StepCount& step) {
  LookupGrouping grouping(launcher, batch, {});
  DeviceArrays scratch;
  grouping.add_scratch(&scratch);
  if (grouping.needs_scratch()) scratch.allocate(like);
  grouping.run(out, step);
}

namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(const Tensor& features,
                                                             const Tensor& indices,
                                                             const Tensor& offsets,
                                                             std::optional<Tensor> bag_layout,
                                                             int64_t total_rows, bool repaired) {
  const char* op = "tbe_group";
  check_features(op, features);
  check_lookups(op, indices, offsets);
  check_same_device(op, "features", features, indices);
  STD_TORCH_CHECK(total_rows >= 0, "tbe_group: total_rows must be >= 0, got ", total_rows);
  const BagMap map = bag_map(op, features.size(0), offsets, bag_layout, 0);
  const int64_t n = indices.numel();
  const CudaLauncher launcher(indices);
  const Tensor index_tensor = as_contiguous(indices);
  const Tensor offset_tensor = as_contiguous(offsets);
  Tensor rows = allocate(indices, {n}, ScalarType::Long);
  Tensor segments = allocate(indices, {n + 1}, ScalarType::Int);
  Tensor lookups = allocate(indices, {n}, ScalarType::Int);
  Tensor bags = allocate(indices, {n}, ScalarType::Int);
  Tensor count = allocate(indices, {1}, ScalarType::Int);
  const GroupBatch batch{feature_array(features),
                         index_array(index_tensor),
                         Bags{index_array(offset_tensor), offsets.numel() - 1, n},
                         map,
                         total_rows,
                         repaired};
  const GroupArrays out{rows.mutable_data_ptr<int64_t>(), segments.mutable_data_ptr<int32_t>(),
                        lookups.mutable_data_ptr<int32_t>(), bags.mutable_data_ptr<int32_t>(),
                        count.mutable_data_ptr<int32_t>()};
  group_lookups(launcher, indices, batch, out, {});
  return {rows, segments, lookups, bags, count};
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) { EMB_IMPL(m, emb::cuda, tbe_group); }
