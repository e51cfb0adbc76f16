// `bounds_check` and `bounds_check_` on the CPU, and is_valid_batch. Branch-free loops, which
// vectorise, find out whether all indices and offsets are valid, as they usually are. Otherwise
// violations are counted one by one, and in the mode "fatal" located for the error message.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/feature_bags.h"
#include "core/output_memory.h"
#include "core/parallel.h"
#include "tbe/check.h"
#include "tbe/entries.h"

namespace emb {
namespace {

// Return how many of the indices [begin, end) are neither -1 nor rows of a table of num_rows rows.
template <class I>
int64_t count_invalid(const I* indices, int64_t begin, int64_t end, int64_t num_rows) {
  if (indices_are_valid(indices, begin, end, num_rows)) return 0;
  int64_t num_invalid = 0;
  for (int64_t i = begin; i < end; ++i) num_invalid += indices[i] < -1 || indices[i] >= num_rows;
  return num_invalid;
}

int64_t count_invalid(IndexArray indices, int64_t begin, int64_t end, int64_t num_rows) {
  return indices.is_int64
             ? count_invalid(static_cast<const int64_t*>(indices.data), begin, end, num_rows)
             : count_invalid(static_cast<const int32_t*>(indices.data), begin, end, num_rows);
}

// Throw an error that locates the first invalid index; there must be one. `offsets`, [bags + 1],
// must have been repaired.
[[noreturn]] void throw_for_first_invalid_index(const Feature* features, IndexArray indices,
                                                const int32_t* offsets, const FeatureBags& bags) {
  for (int64_t f = 0; f < bags.num_features(); ++f) {
    for (int64_t bag = bags.first_bags[f]; bag < bags.first_bags[f + 1]; ++bag) {
      for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
        STD_TORCH_CHECK(indices[i] >= -1 && indices[i] < features[f].rows,
                        "bounds_check: indices of feature ", f, " must be in [0, ",
                        features[f].rows, "), or -1 for a pruned one, got ", indices[i],
                        " at position ", i, " (sample ", bag - bags.first_bags[f],
                        "); with BoundsCheck.WARNING it would read row 0");
      }
    }
  }
  STD_TORCH_CHECK(false, "bounds_check: indices out of range");
}

}  // namespace

// The contract is in tbe/entries.h.
bool is_valid_batch(const Tensor& features, IndexArray indices, const Bags& bags,
                    const FeatureBags& feature_bags) {
  if (!offsets_are_valid(bags.offsets, bags.num_bags, bags.num_lookups)) return false;
  const Feature* feature = feature_array(features);
  const int64_t num_features = feature_bags.num_features();
  const int64_t num_parts = std::clamp<int64_t>(bags.num_lookups / kCheckGrain, 1, num_threads());
  std::vector<char> is_valid(num_parts, 1);
  parallel_tasks(num_parts, [&](int64_t part) {
    for (int64_t f = 0; f < num_features; ++f) {
      const int64_t begin = bags.offsets[feature_bags.first_bags[f]];
      const int64_t length = bags.offsets[feature_bags.first_bags[f + 1]] - begin;
      is_valid[part] &= indices_are_valid(indices, begin + length * part / num_parts,
                                          begin + length * (part + 1) / num_parts, feature[f].rows);
    }
  });
  return std::find(is_valid.begin(), is_valid.end(), 0) == is_valid.end();
}

// The contract is in tbe/entries.h.
std::tuple<Tensor, Tensor> bounds_check(const Tensor& indices, const Tensor& offsets,
                                        const Tensor& features, std::optional<Tensor> bag_layout,
                                        int64_t check_mode) {
  const char* op = "bounds_check";
  const auto mode = parse_choice<BoundsMode>(op, "mode", check_mode, kBoundsModes);
  check_features(op, features);
  check_lookups(op, indices, offsets);
  const FeatureBags bags(op, features, offsets, bag_layout, Pooling::kNone, kUnlimited);
  const int64_t num_lookups = indices.numel(), num_bags = bags.num_bags();
  const Tensor index_tensor = as_contiguous(indices);
  const Tensor offset_tensor = as_contiguous(offsets);
  const IndexArray index_values = index_array(index_tensor);

  Tensor repaired = allocate_output(offsets, {num_bags + 1}, ScalarType::Int);
  int32_t* repaired_offsets = repaired.mutable_data_ptr<int32_t>();
  Tensor violations = allocate_zeros(offsets, {2}, ScalarType::Long);
  int64_t* counts = violations.mutable_data_ptr<int64_t>();  // invalid indices, then offsets
  const IndexArray offset_array = index_array(offset_tensor);
  counts[1] = repair_offsets(offset_array, num_bags, num_lookups, mode,
                             bags.num_features() == 1 && !bag_layout, repaired_offsets,
                             count_lost(index_values, offset_array, num_bags, num_lookups));

  const Feature* feature = feature_array(features);
  const int64_t num_parts = std::clamp<int64_t>(num_lookups / kCheckGrain, 1, num_threads());
  std::vector<int64_t> num_invalid(num_parts, 0);  // indices, per part
  parallel_tasks(num_parts, [&](int64_t part) {
    for (int64_t f = 0; f < bags.num_features(); ++f) {
      const int64_t begin = repaired_offsets[bags.first_bags[f]],
                    length = repaired_offsets[bags.first_bags[f + 1]] - begin;
      num_invalid[part] += count_invalid(index_values, begin + length * part / num_parts,
                                         begin + length * (part + 1) / num_parts, feature[f].rows);
    }
  });
  for (const int64_t count : num_invalid) counts[0] += count;
  if (counts[0] > 0 && mode == BoundsMode::kFatal)
    throw_for_first_invalid_index(feature, index_values, repaired_offsets, bags);
  return {repaired, violations};
}

namespace {

// Return the repaired offsets, int32 [bags + 1], as `bounds_check` does. In the mode "warning" add
// its two numbers of violations to `violations`, int64 [2]; the other modes do not write it.
Tensor bounds_check_(const Tensor& indices, const Tensor& offsets, const Tensor& features,
                     std::optional<Tensor> bag_layout, int64_t check_mode, Tensor violations) {
  const bool is_counted =
      check_bounds_arguments("bounds_check_", check_mode, violations) == BoundsMode::kWarning;
  const auto [repaired, violations_of_batch] =
      bounds_check(indices, offsets, features, bag_layout, check_mode);
  for (int kind = 0; is_counted && kind < 2; ++kind) {
    violations.mutable_data_ptr<int64_t>()[kind] +=
        violations_of_batch.const_data_ptr<int64_t>()[kind];
  }
  return repaired;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, bounds_check);
  EMB_IMPL(m, emb, bounds_check_);
}
