// The repair of offsets on the CPU, then the checks that the lookup ops share (LookupInputs). Valid
// offsets begin with 0 (or after padding, see below), do not decrease, and end with L, the number
// of lookups. Repaired offsets are int32, clamped to [0, L], do not decrease, and end with L. The
// repair runs unless a branch-free loop finds that the offsets are valid and begin with 0, as they
// usually do.
//
// Lookups before the first offset, if that is above 0, belong to no bag. An index of -1 there is
// padding: with it, batches of different sizes can have the shape of one captured step. Any other
// index there is *lost*. In a fixed batch of one feature, offsets that all are below L probably
// mean that the caller's format omits the last offset, and the repair would put two bags into one.
// In both cases the format is wrong rather than a single number, so the mode "warning" throws
// instead of repairing. The mode "fatal" throws for every violation; "ignore" repairs all of them.
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

// Minimum number of indices per thread, if several threads check them (not measured).
inline constexpr int64_t kCheckGrain = 65536;

// The remedy for an omitted last offset, for messages.
inline constexpr const char* kLastOffsetRemedy =
    "; append it where it is left out (in a KeyedJaggedTensor it never is), or make the module "
    "with include_last_offset=False, which takes offsets in the form of nn.EmbeddingBag (are they "
    "offsets, not lengths?)";

// Return whether offsets, [num_bags + 1], are valid, as copy_if_valid does.
template <class I>
bool offsets_are_valid(const I* offsets, int64_t num_bags, int64_t num_lookups) {
  using U = std::make_unsigned_t<I>;
  U sign_bits = 0;
  for (int64_t i = 0; i < num_bags; ++i) {
    sign_bits |= static_cast<U>(offsets[i + 1]) |
                 (static_cast<U>(offsets[i + 1]) - static_cast<U>(offsets[i]));
  }
  return static_cast<I>(sign_bits) >= 0 && offsets[0] == 0 &&
         (num_bags == 0 || static_cast<int64_t>(offsets[num_bags]) == num_lookups);
}

inline bool offsets_are_valid(IndexArray offsets, int64_t num_bags, int64_t num_lookups) {
  return offsets.is_int64
             ? offsets_are_valid(static_cast<const int64_t*>(offsets.data), num_bags, num_lookups)
             : offsets_are_valid(static_cast<const int32_t*>(offsets.data), num_bags, num_lookups);
}

// Return whether indices [begin, end) are all rows of a table of num_rows rows, or -1. An invalid
// index sets the sign bit of (index + 1) or of (num_rows - 1 - index). A loop with 64-bit
// comparisons would not vectorise.
template <class I>
bool indices_are_valid(const I* indices, int64_t begin, int64_t end, int64_t num_rows) {
  uint64_t sign_bits = 0;
  for (int64_t i = begin; i < end; ++i) {
    const auto index = static_cast<uint64_t>(static_cast<int64_t>(indices[i]));
    sign_bits |= (index + 1) | (static_cast<uint64_t>(num_rows) - 1 - index);
  }
  return static_cast<int64_t>(sign_bits) >= 0;
}

inline bool indices_are_valid(IndexArray indices, int64_t begin, int64_t end, int64_t num_rows) {
  return indices.is_int64
             ? indices_are_valid(static_cast<const int64_t*>(indices.data), begin, end, num_rows)
             : indices_are_valid(static_cast<const int32_t*>(indices.data), begin, end, num_rows);
}

// Return the number of lost indices: those before the first bag that are not -1.
inline int64_t count_lost(IndexArray indices, IndexArray offsets, int64_t num_bags,
                          int64_t num_lookups) {
  if (num_bags == 0) return 0;
  const int64_t first_offset = std::min(offsets[0], num_lookups);
  int64_t num_lost = 0;
  for (int64_t i = 0; i < first_offset; ++i) num_lost += indices[i] != -1;
  return num_lost;
}

// Write the repaired offsets to `repaired_offsets`, [num_bags + 1]. Return how many of them differ
// from `offsets`, plus `num_lost`, the result of count_lost (or 0 to ignore lost indices). kFatal
// throws for lost indices, for the first offset that is negative, above num_lookups or below the
// one before it, and for a last one that is not num_lookups. kWarning throws for lost indices and,
// if may_lack_last_offset, for an omitted last offset. Pass true for a fixed batch of one feature:
// with several features the number of offsets would not be F * B + 1, which batch_size refuses.
inline int64_t repair_offsets(IndexArray offsets, int64_t num_bags, int64_t num_lookups,
                              BoundsMode mode, bool may_lack_last_offset, int32_t* repaired_offsets,
                              int64_t num_lost = 0) {
  const bool is_valid = offsets.is_int64 ? copy_if_valid(static_cast<const int64_t*>(offsets.data),
                                                         num_bags, num_lookups, repaired_offsets)
                                         : copy_if_valid(static_cast<const int32_t*>(offsets.data),
                                                         num_bags, num_lookups, repaired_offsets);
  if (is_valid) return 0;
  const bool is_fatal = mode == BoundsMode::kFatal, is_warning = mode == BoundsMode::kWarning;
  STD_TORCH_CHECK(mode == BoundsMode::kIgnore || num_lost == 0,
                  "bounds_check: offsets must begin with 0, got ", offsets[0],
                  ": no bag would have the ids before it; leave them out of the indices, or make "
                  "them -1 if they are padding (are they offsets, not lengths?)");
  int64_t maximum = 0;  // of the offsets so far
  int64_t num_changed = 0;
  for (int64_t i = 0; i <= num_bags; ++i) {
    maximum = std::max(maximum, std::min(offsets[i], num_lookups));
    if (i == num_bags && num_bags > 0) {
      STD_TORCH_CHECK(!is_warning || !may_lack_last_offset || maximum == num_lookups,
                      "bounds_check: offsets must end with the number of indices = ", num_lookups,
                      ", got ", offsets[i], ": the last bag would be lost", kLastOffsetRemedy);
      maximum = num_lookups;
    }
    const bool is_unchanged = maximum == offsets[i];
    STD_TORCH_CHECK(is_unchanged || !is_fatal,
                    "bounds_check: offsets must start at 0, not decrease, and end at the number of "
                    "indices = ",
                    num_lookups, "; got ", offsets[i], " at position ", i,
                    i == num_bags && may_lack_last_offset ? kLastOffsetRemedy
                                                          : " (are they offsets, not lengths?)");
    num_changed += !is_unchanged;
    repaired_offsets[i] = static_cast<int32_t>(maximum);
  }
  return num_changed + num_lost;
}

// The checked arguments that the lookup ops share on the CPU. `bags` and the results of rows_of
// point into the tensors of this object. The op's caller must keep alive the weights, and
// `bag_layout`, to which feature_bags.map points.
struct LookupInputs {
  TierWeights weights;
  Pooling pooling;
  Tensor features, indices, offsets;
  std::optional<Tensor> slots;
  FeatureBags feature_bags;
  Bags bags;

  // Throws unless shapes and dtypes are as the kernels need them, each feature lies within the
  // weights of its tier, and the output rows lie within `output_dim`. That is the number of columns
  // of the output or of its gradient, with pooling in a variable batch the number of elements of
  // all rows together. The contents of indices, offsets and slots are not checked: kernels repair
  // them as they read them.
  LookupInputs(const char* op, const std::vector<Tensor>& weights_in, const Tensor& features_in,
               const Tensor& indices_in, const Tensor& offsets_in,
               const std::optional<Tensor>& slots_in, const std::optional<Tensor>& bag_layout,
               int64_t pooling_code, int64_t output_dim)
      : weights(op, weights_in),
        pooling(parse_pooling(op, pooling_code)),
        features(checked_features(op, features_in, indices_in, offsets_in)),
        indices(as_contiguous(indices_in)),
        offsets(as_contiguous(offsets_in)),
        slots(slots_in),
        feature_bags(op, features, offsets, bag_layout, pooling, output_dim),
        bags{index_array(offsets), feature_bags.num_bags(), indices.numel()} {
    check_not_negative(op, "output_dim", output_dim);
    check_slots(op, slots, indices);
    const bool is_variable = bag_layout && pooling != Pooling::kNone;
    check_feature_ranges(op, features, weights, columns_of(is_variable, output_dim), kUnlimited,
                         is_variable ? Pooling::kNone : pooling);
  }

  // Return the rows that the lookups of `feature`, one of `features`, read. The result is valid as
  // long as this object and the weights are.
  TableRows rows_of(const Feature& feature) const {
    const auto* table = static_cast<const char*>(weights.data[feature.tier]);
    TableRows rows{table + feature.weight_offset * element_bytes(weights.type), feature.rows,
                   feature.dim, index_array(indices)};
    if (!slots || feature.cache_stride == 0) return rows;
    rows.num_slots = weights.elements[kCacheTier] / feature.cache_stride;
    if (rows.num_slots == 0) return rows;
    rows.caching = weights.cache_type == weights.type ? Caching::kSameDtype : Caching::kMixedDtypes;
    rows.table_type = weights.type;
    rows.cache_type = weights.cache_type;
    rows.cache = weights.data[kCacheTier];
    rows.slots = slots->const_data_ptr<int32_t>();
    rows.cache_stride = feature.cache_stride;
    return rows;
  }

 private:
  // Return the columns for check_feature_ranges. In a variable batch FeatureBags checks each bag
  // instead, so that a feature without bags may be wider than the whole output.
  static int64_t columns_of(bool is_variable, int64_t output_dim) {
    return is_variable ? kUnlimited : output_dim;
  }
  static const Tensor& checked_features(const char* op, const Tensor& features,
                                        const Tensor& indices, const Tensor& offsets) {
    check_features(op, features);
    check_lookups(op, indices, offsets);
    return features;
  }
};

}  // namespace emb
