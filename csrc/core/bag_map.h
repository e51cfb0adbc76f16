// Whose bag a bag is, and where its row lies in the output and in its gradient. In a fixed batch
// every feature has as many bags and both follow from the bag's number; in a variable one (VBE) the
// caller lists them, a `BagPlace` a bag.
#pragma once

#include "core/dtype.h"

namespace emb {

// A row of the `bag_layout` tensor. Bags of a feature are neighbours, and features ascend.
struct BagPlace {
  int64_t feature;
  int64_t element;  // of the pooled output, flat, where the bag's row begins
};

struct BagMap {
  const BagPlace* places = nullptr;  // a variable batch; null in a fixed one
  uint32_t batch = 1;                // bags a feature of a fixed batch, at least 1
  int64_t columns = 0;               // of the output of a fixed batch

  EMB_HD int64_t feature(uint32_t bag) const {
    return places != nullptr ? places[bag].feature : bag / batch;
  }
  // `column` is the first output column of the bag's feature.
  EMB_HD int64_t element(uint32_t bag, int64_t column) const {
    return places != nullptr ? places[bag].element : bag % batch * columns + column;
  }
};

// The feature that lookup i belongs to: the last one, or in a variable batch that of the last bag,
// that begins at or before i. Of invalid offsets it is any feature in range.
EMB_HD int64_t feature_of_lookup(const BagMap& map, const Bags& bags, int num_features, int64_t i) {
  const bool variable = map.places != nullptr;
  const int64_t bags_of_step = variable ? 1 : map.batch;
  int low = 0, high = (variable ? static_cast<int>(bags.count) : num_features) - 1;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (bags.begin(middle * bags_of_step) <= i) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return variable ? map.places[low].feature : low;
}

}  // namespace emb
