// Where a row lives. The weights of a module are spread over up to four memory tiers, and every
// kernel gets the base of each: rows of a table that is cached are in the cache tier while a slot
// holds them, in the tier of their table otherwise. Whoever reads or updates a row asks here.
#pragma once

#include "core/dtype.h"

namespace emb {

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

}  // namespace emb
