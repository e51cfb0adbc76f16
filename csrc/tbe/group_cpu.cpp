// `tbe_group` on the CPU: the lookups of all features as linear row ids, grouped, with the bag of
// every sorted lookup for the backward pass.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/feature_bags.h"
#include "group/group_items.h"
#include "tbe/check.h"

namespace emb {
namespace {

template <class Item>
void group_lookups(const Feature* features, const FeatureBags& feature_bags, IndexArray indices,
                   const std::vector<int32_t>& offsets, int64_t total_rows, const GroupOutput& out,
                   int32_t* sorted_bags) {
  const int64_t num_bags = static_cast<int64_t>(offsets.size()) - 1;
  const int64_t n = num_bags > 0 ? offsets[num_bags] : 0;
  const std::unique_ptr<int32_t[]> bag_of(new int32_t[n]);
  const int64_t parts = group_parts(n);
  std::vector<int64_t> bags(parts + 1), firsts(parts + 1);
  const auto cost = [&](int64_t bag) { return offsets[bag] + bag; };
  for (int64_t part = 0; part <= parts; ++part) {
    bags[part] = split_point(num_bags, part, parts, cost);
    firsts[part] = part == 0 ? 0 : offsets[bags[part]];
  }
  const auto fill = [&](int64_t part, const auto& put) {
    // Lookups before the first bag belong to no group.
    for (int64_t i = firsts[part]; i < offsets[bags[part]]; ++i) put(i, total_rows), bag_of[i] = 0;
    for (int64_t bag = bags[part]; bag < bags[part + 1];) {
      const int64_t f = feature_bags.of(bag);
      const Feature& feature = features[f];
      const int64_t last = std::min(bags[part + 1], feature_bags.first[f + 1]);
      for (; bag < last; ++bag) {
        for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
          const int64_t row = repair_index(indices[i], feature.rows);
          put(i, row < 0 ? total_rows : feature.row_base + row);
          bag_of[i] = static_cast<int32_t>(bag);
        }
      }
    }
  };
  group_items<Item>(n, total_rows, firsts, fill, out,
                    [&](int64_t j, int64_t position) { sorted_bags[j] = bag_of[position]; });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(const Tensor& features,
                                                             const Tensor& indices,
                                                             const Tensor& offsets,
                                                             std::optional<Tensor> bag_layout,
                                                             int64_t total_rows) {
  const char* op = "tbe_group";
  check_features(op, features);
  check_lookups(op, indices, offsets);
  STD_TORCH_CHECK(total_rows >= 0, "tbe_group: total_rows must be >= 0, got ", total_rows);
  const FeatureBags feature_bags(op, features, offsets, bag_layout, Pooling::kNone, kUnlimited);
  check_layout(op, features, kUnlimited, kUnlimited, total_rows, Pooling::kNone);
  const Feature* feature = feature_array(features);
  const Tensor index_tensor = torch::stable::contiguous(indices);
  const Tensor offset_tensor = torch::stable::contiguous(offsets);
  std::vector<int32_t> fixed(offsets.numel());
  repair_offsets(index_array(offset_tensor), feature_bags.num_bags(), indices.numel(),
                 BoundsMode::kIgnore, false, fixed.data());
  GroupTensors result(indices, indices.numel(), ScalarType::Long);
  Tensor sorted_bags = allocate(indices, {indices.numel()}, ScalarType::Int);
  const auto run = [&](auto group) {
    group(feature, feature_bags, index_array(index_tensor), fixed, total_rows, result.output(),
          sorted_bags.mutable_data_ptr<int32_t>());
  };
  if (total_rows < int64_t{1} << 32) {
    run(group_lookups<Item32>);
  } else {
    run(group_lookups<Item64>);
  }
  return {result.unique, result.segments, result.permutation, sorted_bags, result.count};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, tbe_group); }
