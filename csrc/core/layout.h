// The layout of tables and batches, shared by CPU and CUDA kernels. It answers four questions:
// which rows and output columns belong to a feature (Feature), which lookups belong to a bag
// (Bags), in which memory tier a row is stored (locate_row), and where the output row of a bag
// begins (BagMap).
//
// A *lookup* is an entry of `indices`, a *bag* a range of lookups whose rows are pooled, and a
// *feature* a range of bags that read one table. All structs here are views: they own no memory.
#pragma once

#include "core/codes.h"
#include "core/dtype.h"

namespace emb {

// The maximum number of lookups, and of bags, groups and the like, per call. Kernels count them
// with int32. It is less than 2^31 by 4,096, so that a loop counter can step past the last one
// without an overflow.
inline constexpr int64_t kMaxLookups = (int64_t{1} << 31) - 4096;

// The table of a feature and its output columns: a row of the tensor `features`, int64 [F, 8].
// Sizes are in elements. Row r of the table, 0 <= r < rows, consists of the elements
// [weight_offset + r * dim, weight_offset + (r + 1) * dim) of the weights of its tier.
struct Feature {
  int64_t weight_offset;  // first element of row 0 in the weights of its tier
  int64_t row_base;       // row r has the linear row id row_base + r, unique in the module; groups
                          // and caches identify rows by it
  int64_t rows;           // number of rows of the table
  int64_t dim;            // number of columns of a row
  int64_t column;         // with pooling in a fixed batch: the first output column of the feature
  int64_t tier;           // memory tier of the table, a Tier below kCacheTier
  int64_t state_base;     // row-wise states of row r are entry state_base + r of the tier's states
  int64_t cache_stride;   // elements between rows of the cache; 0 if the table is not cached
};

inline constexpr int kFeatureColumns = 8;
static_assert(sizeof(Feature) == kFeatureColumns * sizeof(int64_t));

// The bags of a batch: bag b has the lookups [begin(b), end(b)), 0 <= b < num_bags. Offsets need
// not be valid. They are clamped when they are read, so that every bag is a range inside [0,
// num_lookups]; where offsets decrease, bags may overlap (bounds_check repairs such offsets). The
// last bag ends at num_lookups, whatever the last offset is. Lookups before the first offset belong
// to no bag.
struct Bags {
  IndexArray offsets;  // [num_bags + 1], the first lookup of each bag
  int64_t num_bags = 0;
  int64_t num_lookups = 0;

  EMB_HD int64_t begin(int64_t bag) const { return clamp(offsets[bag], 0); }
  EMB_HD int64_t end(int64_t bag) const {
    return bag + 1 == num_bags ? num_lookups : clamp(offsets[bag + 1], begin(bag));
  }

 private:
  // Return the number in [low, num_lookups] that is closest to x.
  EMB_HD int64_t clamp(int64_t x, int64_t low) const {
    return x < low ? low : (x > num_lookups ? num_lookups : x);
  }
};

// Return the factor for the sum of the rows of a bag of `length` lookups: 1 / length for the mean,
// otherwise 1. `Length` is an integer type.
template <class Length>
EMB_HD float mean_factor(Pooling pooling, Length length) {
  return pooling == Pooling::kMean && length > 0 ? 1.0f / static_cast<float>(length) : 1.0f;
}

// Return the row that a lookup reads, -1 if it is skipped. As in FBGEMM, index -1 means "pruned"
// and is skipped, and any other index outside [0, rows) reads row 0. In an empty table every lookup
// is skipped.
EMB_HD int64_t repair_index(int64_t index, int64_t rows) {
  return (index >= 0 && index < rows) ? index : (index == -1 || rows == 0 ? -1 : 0);
}

// The memory tiers of a module's weights; a value is the position in the list `weights` of an op.
// Tensors of unused tiers are empty, and trailing ones may be omitted. A row of a cached table is
// in the cache tier while it has a cache slot, otherwise in the tier of its table.
enum Tier : int { kDeviceTier = 0, kHostTier = 1, kDiskTier = 2, kCacheTier = 3 };

inline constexpr int kTiers = 4;

// The location of the weights and states of a row.
struct RowLocation {
  int tier;           // a Tier
  int64_t element;    // first element of the row in the tier's weights and element-wise states
  int64_t state_row;  // entry of the row in the tier's row-wise states
};

// Return the location of row `row` in [0, feature.rows) of the table of `feature`. `slot` is the
// cache slot of the row, -1 if it has none; it is ignored for a table that is not cached.
EMB_HD RowLocation locate_row(const Feature& feature, int64_t row, int64_t slot) {
  if (slot >= 0 && feature.cache_stride > 0) {
    return {kCacheTier, slot * feature.cache_stride, slot};
  }
  return {static_cast<int>(feature.tier), feature.weight_offset + row * feature.dim,
          feature.state_base + row};
}

// A divisor, at least 1, of numbers n < 2^31. It divides by a multiplication and a shift, because a
// GPU has no instruction for integer division. The quotient is exact: let d be the divisor, 2^(s-1)
// < d <= 2^s, and m = ceil(2^(31+s) / d), which is below 2^32. Then m n / 2^(31+s) exceeds n / d by
// less than 1 / d, so rounding it down gives the quotient.
class Divisor {
 public:
  // NOLINTNEXTLINE: the conversion from a number is implicit on purpose.
  EMB_HD Divisor(uint32_t value) : value_(value) {
    while ((uint64_t{1} << shift_) < value) ++shift_;
    shift_ += 31;
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + value - 1) / value);
  }

  EMB_HD uint32_t value() const { return value_; }
  EMB_HD uint32_t quotient(uint32_t n) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier_) >> shift_);
  }
  EMB_HD uint32_t remainder(uint32_t n) const { return n - quotient(n) * value_; }

 private:
  uint32_t value_, multiplier_, shift_ = 0;
};

// A batch is fixed or variable. In a *fixed batch* every feature has the same number of bags, and
// the number of a bag determines its feature and its output row: bag f * B + b is row b of feature
// f. In a *variable batch* (VBE) the caller lists both for every bag in the tensor `bag_layout`,
// int64 [bags, 2], of which this is a row. The bags of a feature are neighbours, and features
// ascend.
struct BagLayout {
  int64_t feature;
  int64_t element;  // first element of the bag's output row in the flat pooled output
};

// The feature and the output row of every bag. An *output element* is a position in the flat pooled
// output, or in its gradient, counted from its beginning.
struct BagMap {
  const BagLayout* layout = nullptr;  // [bags] of a variable batch; null for a fixed batch
  Divisor batch_size = 1;             // fixed batch: number of bags per feature, at least 1
  int64_t stride = 0;                 // fixed batch: number of elements between output rows

  // Return the feature of a bag.
  EMB_HD int64_t feature(uint32_t bag) const {
    return layout != nullptr ? layout[bag].feature : batch_size.quotient(bag);
  }
  // Return the first output element of a bag; `column` is the first output column of its feature.
  EMB_HD int64_t output_element(uint32_t bag, int64_t column) const {
    return layout != nullptr ? layout[bag].element : batch_size.remainder(bag) * stride + column;
  }
};

// An item of BagItems, with the lookups [begin, end).
struct BagItem {
  int64_t begin, end;
  int64_t output_offset;  // number of elements from the base of the output to the item's output row
};

// The bags of one feature and their output rows, as a CPU kernel sees them. A kernel works on a
// range of bags [first_bag, last_bag), not empty. With pooling an *item* of the range is a bag.
// Without pooling it is a lookup, as if every lookup were a bag of its own.
//
// A kernel gets a pointer to the *base* of the output, or of its gradient, and adds an
// `output_offset` to it. The caller sets the pointer to the output element base_element(), which is
//   without pooling      0: an output offset is an output element,
//   in a fixed batch     the first output element of first_bag,
//   in a variable batch  0: an output offset is an output element.
// So a kernel that is called for a range of bags must pass the first_bag of that range to the
// functions below.
struct BagItems {
  Bags bags;  // of all features
  Pooling pooling;
  const BagLayout* layout;  // [bags] of a variable batch; null for a fixed batch
  int64_t stride;           // number of elements between output rows; not read for a variable batch
                            // with pooling

  // Return the output element of the base for a range that begins at first_bag; `column` is the
  // first output column of the feature.
  static int64_t base_element(const BagMap& map, Pooling pooling, int64_t first_bag,
                              int64_t column) {
    if (pooling == Pooling::kNone || map.layout != nullptr) return 0;
    return map.output_element(static_cast<uint32_t>(first_bag), column);
  }

  // Return the first lookup of a range of bags, and one past its last lookup.
  EMB_HD int64_t first_lookup(int64_t first_bag) const { return bags.begin(first_bag); }
  EMB_HD int64_t end_lookup(int64_t last_bag) const { return bags.end(last_bag - 1); }

  // Return the number of items of a range.
  EMB_HD int64_t num_items(int64_t first_bag, int64_t last_bag) const {
    return pooling == Pooling::kNone ? end_lookup(last_bag) - first_lookup(first_bag)
                                     : last_bag - first_bag;
  }
  // Return item k of the range that begins at first_bag.
  EMB_HD BagItem item(int64_t first_bag, int64_t k) const {
    if (pooling == Pooling::kNone) {
      const int64_t lookup = first_lookup(first_bag) + k;
      return {lookup, lookup + 1, lookup * stride};
    }
    const int64_t bag = first_bag + k;
    return {bags.begin(bag), bags.end(bag), output_offset(first_bag, bag)};
  }
  // Return the number of elements from the base to the output row of `bag`, a bag of the range that
  // begins at first_bag. With pooling only.
  EMB_HD int64_t output_offset(int64_t first_bag, int64_t bag) const {
    return layout != nullptr ? layout[bag].element : (bag - first_bag) * stride;
  }
};

// Return the feature of lookup i: the last feature that begins at or before i, by binary search
// over the first lookups of features, or in a variable batch over the first lookups of bags. There
// must be at least one bag. If the offsets do not ascend, or i is before the first bag, the result
// is the feature of some bag; in a variable batch map.layout names it, unchecked.
EMB_HD int64_t feature_of_lookup(const BagMap& map, const Bags& bags, int num_features, int64_t i) {
  const bool is_variable = map.layout != nullptr;
  // The search is over runs of bags: single bags of a variable batch, else the bags of a feature.
  const int64_t bags_per_run = is_variable ? 1 : map.batch_size.value();
  int low = 0, high = (is_variable ? static_cast<int>(bags.num_bags) : num_features) - 1;
  while (low < high) {
    const int middle = low + (high - low + 1) / 2;
    if (bags.begin(middle * bags_per_run) <= i) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return is_variable ? map.layout[low].feature : low;
}

}  // namespace emb
