// The bags of each feature on the CPU, and their distribution over threads. Threads get ranges of
// bags of about equal cost. A range is divided where the feature changes, because a kernel works on
// one table at a time. All features share one parallel loop.
#pragma once

#include <algorithm>
#include <optional>
#include <type_traits>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"

namespace emb {

// The grain of parallel_balanced for loops over bags, in lookups plus bags.
inline constexpr int64_t kBagGrain = 512;

// Copy offsets, [num_bags + 1], to `int32_offsets`, [num_bags + 1], and return whether they are
// valid (without bags: whether the only one is 0). The copy of invalid offsets is meaningless. A
// negative offset or difference of neighbours sets the sign bit, so that the loop needs only
// subtraction and or.
template <class I>
bool copy_if_valid(const I* offsets, int64_t num_bags, int64_t num_lookups,
                   int32_t* int32_offsets) {
  using U = std::make_unsigned_t<I>;
  U sign_bits = 0;
  for (int64_t i = 0; i < num_bags; ++i) {
    sign_bits |= static_cast<U>(offsets[i + 1]) |
                 (static_cast<U>(offsets[i + 1]) - static_cast<U>(offsets[i]));
    int32_offsets[i] = static_cast<int32_t>(offsets[i]);
  }
  int32_offsets[num_bags] = static_cast<int32_t>(offsets[num_bags]);
  return static_cast<I>(sign_bits) >= 0 && offsets[0] == 0 &&
         (num_bags == 0 || static_cast<int64_t>(offsets[num_bags]) == num_lookups);
}

// The range of bags of every feature. `map` points into the tensor `bag_layout`, which must live as
// long as this object.
struct FeatureBags {
  // [F + 1]: feature f has the bags [first_bags[f], first_bags[f + 1]), which may be none.
  std::vector<int64_t> first_bags = {0};
  BagMap map;

  // Find the bags of each feature. `offsets` has one entry more than there are bags; its contents
  // are not read. With a `bag_layout`, in host memory, the batch is variable. `features` has a row
  // per feature; its contents are read in a variable batch with pooling only, and must then be in
  // host memory and have passed check_features. `output_dim` is the number of columns of the output
  // of a fixed batch, or of elements of that of a variable batch. Throws if the number of bags does
  // not fit a fixed batch. For a variable batch, throws if the features of `bag_layout` decrease or
  // are out of range, or if the output row of a bag does not lie inside the output (not checked
  // without pooling).
  FeatureBags(const char* op, const Tensor& features, const Tensor& offsets,
              const std::optional<Tensor>& bag_layout, Pooling pooling, int64_t output_dim)
      : map(bag_map(op, features.size(0), offsets, bag_layout, output_dim)) {
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
      const BagLayout& layout = map.layout[bag];
      const bool is_in_order = layout.feature >= f && layout.feature < num_features;
      while (is_in_order && f < layout.feature) first_bags[++f] = bag;
      STD_TORCH_CHECK(is_in_order, op, ": bag_layout must name features of 0 to ", num_features - 1,
                      " that ascend; bag ", bag, " has feature ", layout.feature);
      if (pooling == Pooling::kNone) continue;
      const int64_t dim = feature[f].dim;
      STD_TORCH_CHECK(
          layout.element >= 0 && dim <= output_dim && layout.element <= output_dim - dim, op,
          ": bag_layout must name rows inside the ", output_dim, " elements of the output; bag ",
          bag, " of feature ", f, " is at element ", layout.element);
    }
    while (f < num_features) first_bags[++f] = num_bags;
  }

  int64_t num_features() const { return static_cast<int64_t>(first_bags.size()) - 1; }
  int64_t num_bags() const { return first_bags.back(); }
  // Return the feature of a bag in [0, num_bags()), by binary search.
  int64_t feature_of(int64_t bag) const {
    return std::upper_bound(first_bags.begin(), first_bags.end(), bag) - first_bags.begin() - 1;
  }
};

// Call `body(feature, first_bag, last_bag)` for disjoint ranges [first_bag, last_bag) that together
// are all bags; each is a non-empty range of bags of one feature. `bags` and `features` must be of
// one batch. Offsets that decrease only make the costs of ranges unequal. Several threads call
// `body` at once; see parallel.h for what happens if it throws.
template <class Body>
void for_feature_bags(const Bags& bags, const FeatureBags& features, const Body& body) {
  const auto cost = [&](int64_t bag) {
    return bag + (bag == bags.num_bags ? bags.num_lookups : bags.begin(bag));
  };
  parallel_balanced(bags.num_bags, kBagGrain, cost, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t feature = features.feature_of(begin);
      const int64_t range_end = std::min(end, features.first_bags[feature + 1]);
      body(feature, begin, range_end);
      begin = range_end;
    }
  });
}

}  // namespace emb
