// `tbe_group` on the CPU: turn the lookups of all features into linear row ids, sort and group
// them, and return the bag of every sorted lookup for the backward pass.
//
// Each table is grouped separately (group_by_table) if its lookups are neighbours and no lookup is
// skipped or repaired; the keys of one table are small numbers, which sort faster. Otherwise all
// lookups are grouped together (group_all_tables). Both give the same result.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <span>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/feature_bags.h"
#include "core/output_memory.h"
#include "group/group_items.h"
#include "tbe/check.h"
#include "tbe/entries.h"

namespace emb {
namespace {

// The lookups of each table: a run of neighbouring lookups, and the bags of the run.
struct TableRuns {
  std::vector<KeyRun> runs;
  // [runs + 1]: run r has the bags [first_bags[r], first_bags[r + 1]).
  std::vector<int64_t> first_bags;
};

// Return a run per table, or none if tables cannot be grouped separately, or if that would be slow:
//   - features do not read tables in the order of their rows, or there is only one table,
//   - a table has 2^32 rows or more,
//   - a run has more than kSmallInput lookups or, with several threads, more than twice the mean
//     number of lookups per thread.
// `offsets`, [bags + 1], must have been repaired.
TableRuns find_runs(const Feature* features, const FeatureBags& feature_bags,
                    std::span<const int32_t> offsets) {
  TableRuns tables;
  if (feature_bags.num_bags() <= 0) return tables;
  int64_t max_lookups = 0;
  for (int64_t f = 0; f < feature_bags.num_features(); ++f) {
    const auto key_base = static_cast<uint64_t>(features[f].row_base);
    const auto num_rows = static_cast<uint64_t>(features[f].rows);
    const int64_t bag = feature_bags.first_bags[f];
    const KeyRun* last_run = tables.runs.empty() ? nullptr : &tables.runs.back();
    if (last_run == nullptr || last_run->key_base != key_base || last_run->key_range != num_rows) {
      if (num_rows >= uint64_t{1} << 32 ||
          (last_run != nullptr && key_base < last_run->key_base + last_run->key_range)) {
        return {};
      }
      tables.runs.push_back({offsets[bag], key_base, num_rows});
      tables.first_bags.push_back(bag);
    }
    max_lookups =
        std::max(max_lookups, offsets[feature_bags.first_bags[f + 1]] - tables.runs.back().begin);
  }
  const bool is_balanced = num_threads() == 1 || max_lookups * num_threads() <= 2 * offsets.back();
  if (tables.runs.size() < 2 || max_lookups > kSmallInput || !is_balanced) return {};
  tables.first_bags.push_back(feature_bags.num_bags());
  return tables;
}

// Return whether no lookup is skipped or repaired: all lookups belong to bags, and all indices are
// rows of their table. `offsets` must have been repaired. A number that is out of range sets the
// sign bit of `sign_bits`, which is unsigned because the difference may overflow.
template <class I>
bool needs_no_repair(const Feature* features, const FeatureBags& feature_bags, const I* indices,
                     std::span<const int32_t> offsets) {
  uint64_t sign_bits = 0 - static_cast<uint64_t>(offsets[0]);  // lookups before the first bag
  for (int64_t f = 0; f < feature_bags.num_features(); ++f) {
    const auto last_row = static_cast<uint64_t>(features[f].rows) - 1;
    const int64_t end = offsets[feature_bags.first_bags[f + 1]];
    for (int64_t i = offsets[feature_bags.first_bags[f]]; i < end; ++i) {
      const auto index = static_cast<uint64_t>(static_cast<int64_t>(indices[i]));
      sign_bits |= index | (last_row - index);
    }
  }
  return static_cast<int64_t>(sign_bits) >= 0;
}

// Group the lookups of each table separately and return true, if find_runs and needs_no_repair
// allow it. Otherwise return false and write neither `out` nor `sorted_bags`, [L].
template <class I>
bool group_by_table(const Feature* features, const FeatureBags& feature_bags, const I* indices,
                    std::span<const int32_t> offsets, const GroupOutput& out,
                    int32_t* sorted_bags) {
  const TableRuns tables = find_runs(features, feature_bags, offsets);
  if (tables.runs.empty() || !needs_no_repair(features, feature_bags, indices, offsets))
    return false;
  const int64_t n = offsets.back();
  const Scratch<int32_t> bag_of = new_scratch<int32_t>(n);
  const auto put_keys = [&](int64_t run, const auto& put) {
    for (int64_t bag = tables.first_bags[run]; bag < tables.first_bags[run + 1]; ++bag) {
      for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
        put(i, static_cast<uint64_t>(indices[i]));
        bag_of[i] = static_cast<int32_t>(bag);
      }
    }
  };
  group_runs(n, tables.runs, put_keys, out,
             [&](int64_t j, int64_t position) { sorted_bags[j] = bag_of[position]; });
  return true;
}

// Group the lookups of all tables together. Skipped lookups get the key `total_rows`, which belongs
// to no group. `Item` must be Item64 unless total_rows is below 2^32. `offsets` must have been
// repaired. The bag of each sorted lookup is written to `sorted_bags`, [L].
template <class Item>
void group_all_tables(const Feature* features, const FeatureBags& feature_bags, IndexArray indices,
                      std::span<const int32_t> offsets, int64_t total_rows, const GroupOutput& out,
                      int32_t* sorted_bags) {
  const int64_t num_bags = static_cast<int64_t>(offsets.size()) - 1;
  const int64_t n = num_bags > 0 ? offsets[num_bags] : 0;
  const Scratch<int32_t> bag_of = new_scratch<int32_t>(n);
  const int64_t num_parts = num_group_parts(n);
  // The first bag and the first lookup of each part, and the ends of the last part.
  std::vector<int64_t> part_bags(num_parts + 1), part_begins(num_parts + 1);
  const auto cost = [&](int64_t bag) { return offsets[bag] + bag; };  // of all bags before it
  for (int64_t part = 0; part <= num_parts; ++part) {
    part_bags[part] = split_point(num_bags, part, num_parts, cost);
    part_begins[part] = part == 0 ? 0 : offsets[part_bags[part]];
  }
  const auto put_keys = [&](int64_t part, const auto& put) {
    // Lookups before the first bag belong to no group.
    for (int64_t i = part_begins[part]; i < offsets[part_bags[part]]; ++i) {
      put(i, total_rows);
      bag_of[i] = 0;
    }
    for (int64_t bag = part_bags[part]; bag < part_bags[part + 1];) {
      const int64_t f = feature_bags.feature_of(bag);
      const Feature& feature = features[f];
      const int64_t bag_end = std::min(part_bags[part + 1], feature_bags.first_bags[f + 1]);
      for (; bag < bag_end; ++bag) {
        for (int64_t i = offsets[bag]; i < offsets[bag + 1]; ++i) {
          const int64_t row = repair_index(indices[i], feature.rows);
          put(i, row < 0 ? total_rows : feature.row_base + row);
          bag_of[i] = static_cast<int32_t>(bag);
        }
      }
    }
  };
  group_items<Item>(n, total_rows, part_begins, put_keys, out,
                    [&](int64_t j, int64_t position) { sorted_bags[j] = bag_of[position]; });
}

}  // namespace

// The contract is in tbe/entries.h. `has_valid_offsets` is ignored: the offsets are copied to int32
// in any case, and the copy repairs them.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(
    const Tensor& features, const Tensor& indices, const Tensor& offsets,
    std::optional<Tensor> bag_layout, int64_t total_rows, bool /*has_valid_offsets*/) {
  const char* op = "tbe_group";
  check_features(op, features);
  check_lookups(op, indices, offsets);
  check_not_negative(op, "total_rows", total_rows);
  const FeatureBags feature_bags(op, features, offsets, bag_layout, Pooling::kNone, kUnlimited);
  check_feature_ranges(op, features, kUnlimited, kUnlimited, total_rows, Pooling::kNone);
  const Feature* feature = feature_array(features);
  const Tensor index_tensor = as_contiguous(indices);
  const Tensor offset_tensor = as_contiguous(offsets);
  const Scratch<int32_t> repaired = new_scratch<int32_t>(offsets.numel());
  const std::span<const int32_t> repaired_offsets(repaired.get(), offsets.numel());
  repair_offsets(index_array(offset_tensor), feature_bags.num_bags(), indices.numel(),
                 BoundsMode::kIgnore, false, repaired.get());
  GroupTensors result(indices, indices.numel(), ScalarType::Long);
  Tensor sorted_bags = allocate_output(indices, {indices.numel()}, ScalarType::Int);
  const GroupOutput output = result.output();
  int32_t* bags = sorted_bags.mutable_data_ptr<int32_t>();
  const IndexArray index_values = index_array(index_tensor);
  const auto try_by_table = [&](const auto* array) {
    return group_by_table(feature, feature_bags, array, repaired_offsets, output, bags);
  };
  const bool is_grouped = index_values.is_int64
                              ? try_by_table(static_cast<const int64_t*>(index_values.data))
                              : try_by_table(static_cast<const int32_t*>(index_values.data));
  if (!is_grouped) {
    const auto group_all =
        total_rows < int64_t{1} << 32 ? group_all_tables<Item32> : group_all_tables<Item64>;
    group_all(feature, feature_bags, index_values, repaired_offsets, total_rows, output, bags);
  }
  return {result.unique, result.segments, result.permutation, sorted_bags, result.num_groups};
}

}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, tbe_group); }
