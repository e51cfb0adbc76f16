// Offsets as the CPU kernels want them: int32, clamped to [0, L], never decreasing, the last equal
// to L. The usual case, all valid, is one branch-free loop; the rest runs only where it is not. A
// first offset above 0 is invalid as well, though nothing repairs it: what comes before it would be
// in no bag. That, and offsets without the last entry, is another form rather than a wrong number:
// repaired, it would silently lose ids or a whole bag.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>
#include <vector>

#include "core/check.h"
#include "core/codes.h"
#include "core/feature_bags.h"
#include "tbe/args.h"

namespace emb {

inline constexpr const char* kLastOffset =
    "; append it where it is left out (in a KeyedJaggedTensor it never is), or make the module "
    "with include_last_offset=False, which takes offsets in the form of nn.EmbeddingBag (are they "
    "offsets, not lengths?)";

// Whether offsets are valid; copies them on the way. A negative sign anywhere in the differences or
// in the offsets themselves means no, so that all that the loop needs is subtraction and or.
template <class I>
bool copy_if_valid(const I* given, int64_t num_bags, int64_t num_lookups, int32_t* fixed) {
  using U = std::make_unsigned_t<I>;
  U signs = 0;
  for (int64_t i = 0; i < num_bags; ++i) {
    signs |=
        static_cast<U>(given[i + 1]) | (static_cast<U>(given[i + 1]) - static_cast<U>(given[i]));
    fixed[i] = static_cast<int32_t>(given[i]);
  }
  fixed[num_bags] = static_cast<int32_t>(given[num_bags]);
  return static_cast<I>(signs) >= 0 && given[0] == 0 &&
         (num_bags == 0 || static_cast<int64_t>(given[num_bags]) == num_lookups);
}

// Returns how many offsets are invalid. kFatal raises at the first one, kWarning for another form,
// which `one_feature` tells from a wrong number: with several features the number of bags gives it
// away.
inline int64_t repair_offsets(IndexArray given, int64_t num_bags, int64_t num_lookups,
                              BoundsMode mode, bool one_feature, int32_t* fixed) {
  const bool valid =
      given.is_int64
          ? copy_if_valid(static_cast<const int64_t*>(given.data), num_bags, num_lookups, fixed)
          : copy_if_valid(static_cast<const int32_t*>(given.data), num_bags, num_lookups, fixed);
  if (valid) return 0;
  const bool fatal = mode == BoundsMode::kFatal, warning = mode == BoundsMode::kWarning;
  STD_TORCH_CHECK(!warning || given[0] <= 0, "bounds_check: offsets must begin with 0, got ",
                  given[0],
                  ": no bag would have the ids before it; leave them out of the indices (are they "
                  "offsets, not lengths?)");
  int64_t floor = 0, bad = 0;
  for (int64_t i = 0; i <= num_bags; ++i) {
    floor = std::max(floor, std::min(given[i], num_lookups));
    if (i == num_bags && num_bags > 0) {
      STD_TORCH_CHECK(!warning || !one_feature || floor == num_lookups,
                      "bounds_check: offsets must end with the number of indices = ", num_lookups,
                      ", got ", given[i], ": the last bag would be lost", kLastOffset);
      floor = num_lookups;
    }
    const bool valid_here = floor == given[i] && (i > 0 || floor == 0);
    STD_TORCH_CHECK(valid_here || !fatal,
                    "bounds_check: offsets must start at 0, not decrease, and end at the number of "
                    "indices = ",
                    num_lookups, "; got ", given[i], " at position ", i, kLastOffset);
    bad += !valid_here;
    fixed[i] = static_cast<int32_t>(floor);
  }
  return bad;
}

// The arguments that the lookup ops share on the CPU, checked, with the contiguous copies they
// point into.

struct LookupInputs {
  TierWeights weights;
  Pooling pooling;
  Tensor features, indices, offsets;
  std::optional<Tensor> slots;
  FeatureBags feature_bags;
  Bags bags;

  // `columns` of the output or its gradient: of a row, or in a variable batch of all there is.
  LookupInputs(const char* op, const std::vector<Tensor>& weights_in, const Tensor& features_in,
               const Tensor& indices_in, const Tensor& offsets_in,
               const std::optional<Tensor>& slots_in, const std::optional<Tensor>& bag_layout,
               int64_t pooling_code, int64_t columns)
      : weights(op, weights_in),
        pooling(parse_pooling(op, pooling_code)),
        features(checked(op, features_in, indices_in, offsets_in)),
        indices(torch::stable::contiguous(indices_in)),
        offsets(torch::stable::contiguous(offsets_in)),
        slots(slots_in),
        feature_bags(op, features, offsets, bag_layout, pooling, columns),
        bags{index_array(offsets), feature_bags.num_bags(), indices.numel()} {
    check_slots(op, slots, indices);
    const bool placed = bag_layout && pooling != Pooling::kNone;
    check_layout(op, features, weights, columns_of(placed, columns), kAnyNumber,
                 placed ? Pooling::kNone : pooling);
  }

  TableRows rows_of(const Feature& feature) const {
    const auto* table = static_cast<const char*>(weights.data[feature.tier]);
    TableRows rows{table + feature.weight_offset * size_of(weights.type), feature.rows, feature.dim,
                   index_array(indices)};
    if (!slots || feature.cache_stride == 0) return rows;
    rows.num_slots = weights.elements[kCacheTier] / feature.cache_stride;
    if (rows.num_slots == 0) return rows;
    rows.caching = weights.cache_type == weights.type ? Caching::kSame : Caching::kMixed;
    rows.type = weights.type;
    rows.cache_type = weights.cache_type;
    rows.cache = weights.data[kCacheTier];
    rows.slots = slots->const_data_ptr<int32_t>();
    rows.cache_stride = feature.cache_stride;
    return rows;
  }

 private:
  // In a variable batch every bag is checked against the columns, so that a feature without bags
  // may be wider than the whole output.
  static int64_t columns_of(bool placed, int64_t columns) { return placed ? kAnyNumber : columns; }
  static const Tensor& checked(const char* op, const Tensor& features, const Tensor& indices,
                               const Tensor& offsets) {
    check_features(op, features);
    check_lookups(op, indices, offsets);
    return features;
  }
};

}  // namespace emb
