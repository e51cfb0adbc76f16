// `tbe_group` on the GPU: the lookups of all features as linear row ids, grouped, with the bag of
// every sorted lookup.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "core/check.h"
#include "group/device_sort.h"
#include "tbe/bounds.cuh"
#include "tbe/keys.cuh"

namespace emb::cuda {
namespace {

template <class Key>
void group_lookups(const CudaLauncher& launcher, const Tensor& like, const LookupKeys& in,
                   int64_t total_rows, int32_t* lookups, const GroupOutput& out) {
  const DeviceSort<Key> sort(like, in.bags.num_lookups, total_rows, lookups);
  if (in.bags.num_lookups > 0) {
    launch_lookup_keys(launcher, in, sort.buffers());
    sort_keys(launcher, like, sort.buffers());
  }
  launch_groups(launcher, sort.buffers(), out);
}

// Return offsets that do not fall, which the search for bags needs: in two launches.
Tensor repair_offsets(const CudaLauncher& launcher, const Tensor& features, const Tensor& indices,
                      const Tensor& offsets, const BagMap& map) {
  const int64_t num_bags = offsets.numel() - 1;
  Tensor repaired = allocate(indices, {num_bags + 1}, ScalarType::Int);
  Tensor tile_max = allocate(indices, {offset_tiles(num_bags)}, ScalarType::Int);
  launch_repair_offsets(launcher, BoundsArgs{index_array(indices), index_array(offsets),
                                             feature_array(features), indices.numel(), num_bags,
                                             map, false, tile_max.mutable_data_ptr<int32_t>(),
                                             repaired.mutable_data_ptr<int32_t>(), nullptr});
  return repaired;
}

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
  const CudaLauncher launcher(indices);
  const Tensor index_tensor = as_contiguous(indices);
  Tensor offset_tensor = as_contiguous(offsets);
  Tensor rows = allocate(indices, {n}, ScalarType::Long);
  Tensor segments = allocate(indices, {n + 1}, ScalarType::Int);
  Tensor lookups = allocate(indices, {n}, ScalarType::Int);
  Tensor bags = allocate(indices, {n}, ScalarType::Int);
  Tensor count = allocate(indices, {1}, ScalarType::Int);
  Tensor bag_of = allocate(indices, {n}, ScalarType::Int);
  if (!repaired) {
    offset_tensor = repair_offsets(launcher, features, index_tensor, offset_tensor, map);
  }
  const LookupKeys in{feature_array(features), index_array(index_tensor),
                      Bags{index_array(offset_tensor), num_bags, n}, map,
                      bag_of.mutable_data_ptr<int32_t>()};
  const GroupOutput out{rows.mutable_data_ptr(),
                        true,
                        segments.mutable_data_ptr<int32_t>(),
                        count.mutable_data_ptr<int32_t>(),
                        bag_of.const_data_ptr<int32_t>(),
                        bags.mutable_data_ptr<int32_t>()};
  if (needs_wide_keys(total_rows)) {
    group_lookups<uint64_t>(launcher, indices, in, total_rows, lookups.mutable_data_ptr<int32_t>(),
                            out);
  } else {
    group_lookups<uint32_t>(launcher, indices, in, total_rows, lookups.mutable_data_ptr<int32_t>(),
                            out);
  }
  return {rows, segments, lookups, bags, count};
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) { EMB_IMPL(m, emb::cuda, tbe_group); }
