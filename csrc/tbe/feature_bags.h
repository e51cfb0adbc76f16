// Cutting the bags of all features into parts of equal cost, and each part by feature, since a
// kernel works on one table at a time. Everything is one parallel region.
#pragma once

#include <algorithm>

#include "core/dtype.h"
#include "core/parallel.h"

namespace emb {

// A part of the work below this many lookups and bags is not worth waking a thread for.
inline constexpr int64_t kBagGrain = 512;

// Calls `body(feature, first_bag, last_bag)`, in parallel; `batch` is the number of bags a feature.
template <class Body>
void for_feature_bags(const Bags& bags, int64_t batch, const Body& body) {
  const auto cost = [&](int64_t bag) {
    return bag + (bag == bags.count ? bags.num_lookups : bags.begin(bag));
  };
  parallel_balanced(bags.count, kBagGrain, cost, [&](int64_t begin, int64_t end) {
    while (begin < end) {
      const int64_t feature = begin / batch, stop = std::min(end, (feature + 1) * batch);
      body(feature, begin, stop);
      begin = stop;
    }
  });
}

}  // namespace emb
