// `tbe_group` on the CPU: the lookups of all features as linear row ids, grouped. The bag of every
// sorted lookup comes along, since the backward pass needs it more than anything else.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "core/check.h"
#include "group/group_items.h"
#include "group/outputs.h"

namespace emb {
namespace {

template <class Item>
void group_lookups(const Feature* features, int64_t batch, IndexArray indices, const Bags& bags,
                   int64_t total_rows, const GroupOutput& out, int32_t* sorted_bags) {
  const int64_t n = bags.num_lookups;
  const std::unique_ptr<Item[]> items(new Item[n]), scratch(new Item[n]);
  const std::unique_ptr<int32_t[]> bag_of(new int32_t[n]);
  // Lookups that no bag covers, and skipped ones, carry the limit as key and fall out at the end.
  for (int64_t i = 0; i < n; ++i) {
    items[i].key = total_rows;
    items[i].position = i;
    bag_of[i] = 0;
  }
  const auto cost = [&](int64_t bag) { return bag + (bag == bags.count ? n : bags.begin(bag)); };
  parallel_balanced(bags.count, 8192, cost, [&](int64_t begin, int64_t end) {
    int64_t start = bags.begin(begin);
    for (int64_t bag = begin; bag < end;) {
      const Feature& feature = features[bag / batch];
      const int64_t last = std::min(end, (bag / batch + 1) * batch);
      for (; bag < last; ++bag) {
        const int64_t stop = bags.end(bag);
        for (int64_t i = start; i < stop; ++i) {
          const int64_t row = repair_index(indices[i], feature.rows);
          if (row < 0) continue;
          items[i].key = feature.row_base + row;
          bag_of[i] = static_cast<int32_t>(bag);
        }
        start = bag + 1 < bags.count ? bags.begin(bag + 1) : n;
      }
    }
  });
  group_items(items.get(), scratch.get(), n, total_rows, out,
              [&](int64_t j, int64_t position) { sorted_bags[j] = bag_of[position]; });
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(const Tensor& features,
                                                             const Tensor& indices,
                                                             const Tensor& offsets,
                                                             int64_t total_rows) {
  const char* op = "tbe_group";
  check_features(op, features);
  check_lookups(op, indices, offsets);
  STD_TORCH_CHECK(total_rows >= 0, "tbe_group: total_rows must be >= 0, got ", total_rows);
  const int64_t num_features = features.size(0), batch = batch_size(op, num_features, offsets);
  const Feature* feature = feature_array(features);
  for (int64_t f = 0; f < num_features; ++f) {
    STD_TORCH_CHECK(feature[f].row_base >= 0 && feature[f].row_base + feature[f].rows <= total_rows,
                    "tbe_group: feature ", f, " ends at row ", feature[f].row_base + feature[f].rows,
                    ", beyond total_rows = ", total_rows);
  }
  const Tensor index_tensor = torch::stable::contiguous(indices);
  const Tensor offset_tensor = torch::stable::contiguous(offsets);
  const Bags bags{index_array(offset_tensor), num_features * batch, indices.numel()};
  GroupTensors result(indices, indices.numel(), ScalarType::Long);
  Tensor sorted_bags = torch::stable::new_empty(indices, {indices.numel()}, ScalarType::Int);
  const auto run = [&](auto group) {
    group(feature, batch, index_array(index_tensor), bags, total_rows, result.output(),
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

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { m.impl("tbe_group", TORCH_BOX(&emb::tbe_group)); }
