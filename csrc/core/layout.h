// How a batch and the tables are laid out: which columns and rows a feature reads, where each bag
// begins and ends, in which memory tier a row is stored, and where the output row of a bag goes.
#pragma once

#include "core/dtype.h"

namespace emb {

// What one feature reads. Mirrors a row of the `features` tensor. Row r of its table is
// [weight_offset + r * dim, + dim) of the weights of memory tier `tier`, has the linear row id
// row_base + r (unique over the module; groups and caches know rows by it) and entry
// state_base + r of that tier's row-wise states. The pooled row goes to output columns
// [column, column + dim).
struct Feature {
  int64_t weight_offset;
  int64_t row_base;
  int64_t rows;
  int64_t dim;
  int64_t column;
  int64_t tier;
  int64_t state_base;
  int64_t cache_stride;  // elements between rows of the cache; 0 where the table is not cached
};

inline constexpr int kFeatureFields = 8;
static_assert(sizeof(Feature) == kFeatureFields * sizeof(int64_t));

// Bags as they are read: in any state of `offsets` a bag is a range inside [0, num_lookups].
struct Bags {
  IndexArray offsets;
  int64_t count = 0;
  int64_t num_lookups = 0;

  EMB_HD int64_t begin(int64_t bag) const { return clamp(offsets[bag], 0); }
  EMB_HD int64_t end(int64_t bag) const {
    return bag + 1 == count ? num_lookups : clamp(offsets[bag + 1], begin(bag));
  }

 private:
  EMB_HD int64_t clamp(int64_t x, int64_t low) const {
    return x < low ? low : x > num_lookups ? num_lookups : x;
  }
};

// FBGEMM's repair of an index: -1 means "pruned, skip me", anything else out of range reads row 0
// (of a table that has one).
EMB_HD int64_t repair_index(int64_t index, int64_t rows) {
  return index >= 0 && index < rows ? index : index == -1 || rows == 0 ? -1 : 0;
}

// The weights of a module are spread over up to four memory tiers, and every kernel gets the base
// of each. Rows of a cached table are in the cache tier while a slot holds them, otherwise in the
// tier of their table.
//
// The order of the `weights` list of an op; tiers a module does not use are empty or left out.
enum Tier : int { kDeviceTier = 0, kHostTier = 1, kDiskTier = 2, kCacheTier = 3 };

inline constexpr int kTiers = 4;

struct RowPlace {
  int tier;
  int64_t element;  // of the tier's weights and element-wise states
  int64_t row;      // of the tier's row-wise states
};

// Row `row` of the table of `feature`; `slot` is where the cache holds it, -1 if it does not.
EMB_HD RowPlace place_row(const Feature& feature, int64_t row, int64_t slot) {
  if (slot >= 0 && feature.cache_stride > 0) {
    return {kCacheTier, slot * feature.cache_stride, slot};
  }
  return {static_cast<int>(feature.tier), feature.weight_offset + row * feature.dim,
          feature.state_base + row};
}

// In a fixed batch every feature has the same number of bags, and a bag's number determines its
// feature and its output row. In a variable batch (VBE) the caller lists both in `bag_layout`.
//
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
