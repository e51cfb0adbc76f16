// How a batch and the tables are laid out: which columns and rows a feature reads, where each bag
// begins and ends, in which memory tier a row is stored, and where the output row of a bag goes.
#pragma once

#include "core/dtype.h"

namespace emb {

// The table and the output columns of a feature: a row of the `features` tensor. Row r of its table
// is [weight_offset + r * dim, + dim) of the weights of memory tier `tier`. Its linear row id is
// row_base + r, unique in the module; groups and caches identify rows by it. Its row-wise states
// are entry state_base + r of that tier. The pooled row goes to output columns
// [column, column + dim).
struct Feature {
  int64_t weight_offset;
  int64_t row_base;
  int64_t rows;
  int64_t dim;
  int64_t column;
  int64_t tier;
  int64_t state_base;
  int64_t cache_stride;  // elements between rows of the cache; 0 if the table is not cached
};

inline constexpr int kFeatureColumns = 8;
static_assert(sizeof(Feature) == kFeatureColumns * sizeof(int64_t));

// The bags of a batch. Whatever the contents of `offsets`, a bag is a range inside
// [0, num_lookups].
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

// Return what the sum of a bag's rows is multiplied by. `Length` is an integer.
template <class Length>
EMB_HD float mean_factor(Pooling pooling, Length length) {
  return pooling == Pooling::kMean && length > 0 ? 1.0f / static_cast<float>(length) : 1.0f;
}

// Repair an index as FBGEMM does: -1 means "pruned, skip"; any other index out of range reads row
// 0, if the table has rows.
EMB_HD int64_t repair_index(int64_t index, int64_t rows) {
  return index >= 0 && index < rows ? index : index == -1 || rows == 0 ? -1 : 0;
}

// The weights of a module are spread over up to four memory tiers, and every kernel gets the base
// of each. A row of a cached table is in the cache tier while it has a slot, otherwise in the tier
// of its table.
//
// These are the positions in the `weights` list of an op; unused tiers are empty or left out.
enum Tier : int { kDeviceTier = 0, kHostTier = 1, kDiskTier = 2, kCacheTier = 3 };

inline constexpr int kTiers = 4;

struct RowLocation {
  int tier;
  int64_t element;  // first element of the row in the tier's weights and element-wise states
  int64_t row;      // entry of the tier's row-wise states
};

// Return the location of row `row` of the table of `feature`; `slot` is its slot in the cache, -1
// if it has none.
EMB_HD RowLocation locate_row(const Feature& feature, int64_t row, int64_t slot) {
  if (slot >= 0 && feature.cache_stride > 0) {
    return {kCacheTier, slot * feature.cache_stride, slot};
  }
  return {static_cast<int>(feature.tier), feature.weight_offset + row * feature.dim,
          feature.state_base + row};
}

// A divisor of numbers below 2^31. A quotient takes a multiplication and a shift, where a GPU,
// which cannot divide integers, needs some 20 instructions. With 2^(s-1) < d <= 2^s and m =
// ceil(2^(31+s) / d), m n / 2^(31+s) exceeds n / d by less than 1 / d for n < 2^31, so that
// rounding down gives the quotient.
class Divisor {
 public:
  // NOLINTNEXTLINE: a number becomes a divisor wherever one is needed.
  EMB_HD Divisor(uint32_t value) : value_(value) {
    while ((uint64_t{1} << shift_) < value) ++shift_;
    shift_ += 31;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + value - 1) / value);
  }

  EMB_HD uint32_t value() const { return value_; }
  EMB_HD uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>(static_cast<uint64_t>(n) * multiplier_ >> shift_);
  }
  EMB_HD uint32_t remainder(uint32_t n) const { return n - quotient(n) * value_; }

 private:
  uint32_t value_, multiplier_, shift_ = 0;
};

// In a fixed batch every feature has the same number of bags, and a bag's number determines its
// feature and its output row. In a variable batch (VBE) the caller lists both in `bag_layout`.
//
// A row of the `bag_layout` tensor. Bags of a feature are contiguous, and features ascend.
struct BagLayout {
  int64_t feature;
  int64_t element;  // first element of the bag's row in the flat pooled output
};

struct BagMap {
  const BagLayout* layout = nullptr;  // the bags of a variable batch; null for a fixed one
  Divisor batch = 1;                  // bags per feature of a fixed batch, at least 1
  int64_t columns = 0;                // columns of the output of a fixed batch

  EMB_HD int64_t feature(uint32_t bag) const {
    return layout != nullptr ? layout[bag].feature : batch.quotient(bag);
  }
  // Return the first output element of a bag; `column` is the first output column of its feature.
  EMB_HD int64_t element(uint32_t bag, int64_t column) const {
    return layout != nullptr ? layout[bag].element : batch.remainder(bag) * columns + column;
  }
};

// The lookups [begin, end) of a bag, and the first element of its row, counted from a base.
struct BagSpan {
  int64_t begin, end, element;
};

// The bags of one feature as the CPU kernels see them, which work on ranges [first_bag, last_bag)
// of bags. Without pooling every lookup of the range is a bag of its own. Rows of the output, or of
// its gradient, are counted from a base: in a fixed batch the row of `first_bag` in the columns of
// the feature, without pooling the row of lookup 0, in a variable batch element 0.
struct BagRows {
  Bags bags;
  Pooling pooling;
  const BagLayout* layout;  // the bags of a variable batch, else null
  int64_t stride;           // elements between rows of a fixed batch, or of lookups

  // Return the elements from the beginning of the output to the base.
  static int64_t base(const BagMap& map, Pooling pooling, int64_t first_bag, int64_t column) {
    if (pooling == Pooling::kNone || map.layout != nullptr) return 0;
    return map.element(static_cast<uint32_t>(first_bag), column);
  }

  EMB_HD int64_t first_lookup(int64_t first_bag) const { return bags.begin(first_bag); }
  EMB_HD int64_t end_lookup(int64_t last_bag) const { return bags.end(last_bag - 1); }

  // Return the number of bags, or of lookups without pooling.
  EMB_HD int64_t count(int64_t first_bag, int64_t last_bag) const {
    return pooling == Pooling::kNone ? end_lookup(last_bag) - first_lookup(first_bag)
                                     : last_bag - first_bag;
  }
  // Return the k-th of them.
  EMB_HD BagSpan span(int64_t first_bag, int64_t k) const {
    if (pooling == Pooling::kNone) {
      const int64_t lookup = first_lookup(first_bag) + k;
      return {lookup, lookup + 1, lookup * stride};
    }
    const int64_t bag = first_bag + k;
    return {bags.begin(bag), bags.end(bag), element(first_bag, bag)};
  }
  // Return the first element of the row of a bag with pooling.
  EMB_HD int64_t element(int64_t first_bag, int64_t bag) const {
    return layout != nullptr ? layout[bag].element : (bag - first_bag) * stride;
  }
};

// Return the feature of lookup i: the last feature that begins at or before i; in a variable batch
// the feature of the last bag that does. For invalid offsets the result is any feature in range.
EMB_HD int64_t feature_of_lookup(const BagMap& map, const Bags& bags, int num_features, int64_t i) {
  const bool variable = map.layout != nullptr;
  const int64_t bags_of_step = variable ? 1 : map.batch.value();
  int low = 0, high = (variable ? static_cast<int>(bags.count) : num_features) - 1;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (bags.begin(middle * bags_of_step) <= i) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return variable ? map.layout[low].feature : low;
}

}  // namespace emb
