// `tbe_group` on the GPU: the lookups of all features as linear row ids, grouped, with the bag of
// every sorted lookup.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "core/check.h"
#include "group/device_sort.h"
#include "tbe/bounds.cuh"
#include "tbe/grouping.h"
#include "tbe/keys.cuh"

namespace emb::cuda {
namespace {

// The memory of offsets that do not fall, which the search for bags needs, and its two launches.
class RepairedOffsets {
 public:
  RepairedOffsets(const Tensor& like, const GroupBatch& batch)
      : batch_(batch),
        memory_(allocate(like, {batch.bags.count + 1 + offset_tiles(batch.bags.count)},
                         ScalarType::Int)) {}

  IndexArray launch(const CudaLauncher& launcher) {
    auto* repaired = memory_.mutable_data_ptr<int32_t>();
    launch_repair_offsets(launcher,
                          BoundsArgs{batch_.indices, batch_.bags.offsets, batch_.features,
                                     batch_.bags.num_lookups, batch_.bags.count, batch_.map, false,
                                     repaired + batch_.bags.count + 1, repaired, nullptr});
    return {repaired, false};
  }

 private:
  const GroupBatch& batch_;
  Tensor memory_;
};

template <class Key>
void group_by_key(const CudaLauncher& launcher, const Tensor& like, const GroupBatch& batch,
                  const GroupArrays& out, const StepCount& step) {
  const int64_t n = batch.bags.num_lookups;
  const DeviceSort<Key> sort(like, n, batch.total_rows, out.lookups);
  Tensor bag_of = allocate(like, {n}, ScalarType::Int);
  LookupKeys keys{batch.features, batch.indices, batch.bags, batch.map,
                  bag_of.mutable_data_ptr<int32_t>()};
  std::optional<RepairedOffsets> repaired;
  if (!batch.repaired) keys.bags.offsets = repaired.emplace(like, batch).launch(launcher);
  if (n > 0) {
    launch_lookup_keys(launcher, keys, sort.buffers());
    sort_keys(launcher, like, sort.buffers());
  }
  launch_groups(launcher, sort.buffers(),
                GroupOutput{out.rows, true, out.segments, out.count, keys.bag_of, out.bags, step});
}

}  // namespace

void group_lookups(const CudaLauncher& launcher, const Tensor& like, const GroupBatch& batch,
                   const GroupArrays& out, const StepCount& step) {
  const auto group =
      needs_wide_keys(batch.total_rows) ? group_by_key<uint64_t> : group_by_key<uint32_t>;
  group(launcher, like, batch, out, step);
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
  const int64_t n = indices.numel(), num_bags = offsets.numel() - 1;
  const Tensor index_tensor = as_contiguous(indices), offset_tensor = as_contiguous(offsets);
  Tensor rows = allocate(indices, {n}, ScalarType::Long);
  Tensor segments = allocate(indices, {n + 1}, ScalarType::Int);
  Tensor lookups = allocate(indices, {n}, ScalarType::Int);
  Tensor bags = allocate(indices, {n}, ScalarType::Int);
  Tensor count = allocate(indices, {1}, ScalarType::Int);
  const GroupBatch batch{feature_array(features),
                         index_array(index_tensor),
                         Bags{index_array(offset_tensor), num_bags, n},
                         map,
                         total_rows,
                         repaired};
  const GroupArrays out{rows.mutable_data_ptr<int64_t>(), segments.mutable_data_ptr<int32_t>(),
                        lookups.mutable_data_ptr<int32_t>(), bags.mutable_data_ptr<int32_t>(),
                        count.mutable_data_ptr<int32_t>()};
  group_lookups(CudaLauncher(indices), indices, batch, out, {});
  return {rows, segments, lookups, bags, count};
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) { EMB_IMPL(m, emb::cuda, tbe_group); }
