// The arguments that the lookup ops share on the CPU, checked, with the contiguous copies they
// point into.
#pragma once

#include <optional>
#include <vector>

#include "core/check.h"
#include "core/feature_bags.h"
#include "tbe/table_rows.h"

namespace emb {

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
    TableRows rows{table + feature.weight_offset * element_size(weights.type), feature.rows,
                   feature.dim, index_array(indices)};
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
  static int64_t element_size(Dtype type) { return type == Dtype::kFloat ? 4 : 2; }
  static const Tensor& checked(const char* op, const Tensor& features, const Tensor& indices,
                               const Tensor& offsets) {
    check_features(op, features);
    check_lookups(op, indices, offsets);
    return features;
  }
};

}  // namespace emb
