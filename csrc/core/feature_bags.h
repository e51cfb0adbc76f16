// The bags of each feature, and their distribution over threads: ranges of equal cost, each of one
// feature, since a kernel works on one table at a time. All features share one parallel region.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"

namespace emb {

// The smallest cost, lookups and bags, of a range that gets a thread of its own.
inline constexpr int64_t kBagGrain = 512;

// The bags of feature f are [first_bags[f], first_bags[f + 1]).
struct FeatureBags {
  std::vector<int64_t> first_bags = {0};
  BagMap map;

  // Check `bag_layout`: its rows must lie within `columns` elements unless there is no pooling.
  FeatureBags(const char* op, const Tensor& features, const Tensor& offsets,
              const std::optional<Tensor>& bag_layout, Pooling pooling, int64_t columns)
      : map(bag_map(op, features.size(0), offsets, bag_layout, columns)) {
    const int64_t num_features = features.size(0), num_bags = offsets.numel() - 1;
    first_bags.resize(num_features + 1, 0);
    if (map.layout == nullptr) {
      for (int64_t f = 0; f < num_features; ++f)
        first_bags[f + 1] = num_bags / num_features * (f + 1);
      return;
    }
    const Feature* feature = feature_array(features);
    int64_t f = 0;
    for (int64_t bag = 0; bag < num_bags; ++bag) {
      const BagLayout& row = map.layout[bag];
      const bool ascends = row.feature >= f && row.feature < num_features;
      while (ascends && f < row.feature) first_bags[++f] = bag;
      const int64_t dim = ascends ? feature[f].dim : 0;
      STD_TORCH_CHECK(
          ascends && (pooling == Pooling::kNone ||
                      (row.element >= 0 && dim <= columns && row.element <= columns - dim)),
          op, ": bag_layout must name features of 0 to ", num_features - 1,
          " that ascend, and rows inside the ", columns, " elements of the output; bag ", bag,
          " has feature ", row.feature, " at element ", row.element);
    }
    while (f < num_features) first_bags[++f] = num_bags;
  }

  int64_t num_features() const { return static_cast<int64_t>(first_bags.size()) - 1; }
  int64_t num_bags() const { return first_bags.back(); }
  int64_t feature_of(int64_t bag) const {
    return std::upper_bound(first_bags.begin(), first_bags.end(), bag) - first_bags.begin() - 1;
  }
};

// Call `body(feature, first_bag, last_bag)` for all bags, in parallel.
template <class Body>
void for_feature_bags(const Bags& bags, const FeatureBags& features, const Body& body) {
  const auto cost = [&](int64_t bag) {
    return bag + (bag == bags.count ? bags.num_lookups : bags.begin(bag));
  };
  parallel_balanced(bags.count, kBagGrain, cost, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t feature = features.feature_of(begin);
      const int64_t stop = std::min(end, features.first_bags[feature + 1]);
      body(feature, begin, stop);
      begin = stop;
    }
  });
}

}  // namespace emb
