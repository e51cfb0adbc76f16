// `tt_keys` and `tt_plan` on the CPU: the keys of the lookups of a batch, and its distinct rows
// grouped by their halves (TtPlan in tt/args.h). Rows are sorted by key, so that the rows of a left
// half are neighbours. The sort of group/ then groups them by right half.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "core/feature_bags.h"
#include "core/output_memory.h"
#include "core/parallel.h"
#include "group/group_items.h"
#include "tt/check.h"
#include "tt/entries.h"

namespace emb {
namespace {

constexpr int64_t kKeysGrain = 1 << 14;  // grain of parallel_balanced, in lookups (not measured)

}  // namespace

// The contract is in tt/entries.h.
Tensor tt_keys(const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout,
               const Tensor& feature_tables) {
  const char* op = "tt_keys";
  check_lookups(op, indices, offsets);
  const TtTableIds* tables = tt_table_ids(op, "feature_tables", feature_tables);
  for (int64_t f = 0; f < feature_tables.size(0); ++f) check_table_ids(op, tables[f]);
  const Tensor input = as_contiguous(indices), input_offsets = as_contiguous(offsets);
  const FeatureBags feature_bags(op, feature_tables, input_offsets, bag_layout, Pooling::kNone, 0);
  const int64_t n = indices.numel();
  Tensor keys = allocate_output(indices, {n}, ScalarType::Long);
  const IndexArray index_values = index_array(input);
  int64_t* out = keys.mutable_data_ptr<int64_t>();
  const Bags bags{index_array(input_offsets), feature_bags.num_bags(), n};
  // The lookups of feature f are [feature_ends[f - 1], feature_ends[f]).
  std::vector<int64_t> feature_ends(std::max<int64_t>(feature_bags.num_features(), 1), n);
  for (int64_t f = 0; f + 1 < feature_bags.num_features(); ++f) {
    const int64_t bag = feature_bags.first_bags[f + 1];
    feature_ends[f] =
        std::max(f > 0 ? feature_ends[f - 1] : 0, bag < bags.num_bags ? bags.begin(bag) : n);
  }
  STD_TORCH_CHECK(n == 0 || feature_bags.num_features() > 0, op,
                  ": feature_tables must have a row per feature, got none for ", n, " indices");
  parallel_balanced(n, kKeysGrain, kUnitCost, [&](int64_t begin, int64_t end) {
    int64_t f =
        std::upper_bound(feature_ends.begin(), feature_ends.end(), begin) - feature_ends.begin();
    for (; begin < end; ++f) {
      const TtTableIds table = tables[f];
      const int64_t stop = std::min(end, feature_ends[f]);
      for (; begin < stop; ++begin) out[begin] = tt_key(table, index_values[begin]);
    }
  });
  return keys;
}

namespace {

// The tensors of a plan in the order of TtPlanTensor, and their memory.
struct PlanTensors {
  std::vector<Tensor> tensors;
  int32_t* data[kNumTtPlanTensors];

  // Allocate a plan for as many rows as `keys` has elements.
  PlanTensors(const Tensor& keys, int64_t num_tables) {
    for (const int64_t size : tt_plan_sizes(keys.numel(), num_tables)) {
      tensors.push_back(allocate_output(keys, {size}, ScalarType::Int));
    }
    for (int i = 0; i < kNumTtPlanTensors; ++i) data[i] = tensors[i].mutable_data_ptr<int32_t>();
  }
};

// The distinct keys of a batch, numbered over all tables, and the tables.
struct SortedKeys {
  const int64_t* data;  // [count], ascending
  int64_t count;
  const TtTableIds* tables;  // [num_tables]
  int64_t num_tables;

  // Return the first key of table t; for t = num_tables, a bound above all keys.
  int64_t first_key(int64_t t) const { return t < num_tables ? tables[t].first_key : kUnlimited; }
};

// Write the tensors of `plan` about left halves, and the first row and left half of each table.
void write_lefts(const SortedKeys& keys, const PlanTensors& plan) {
  int32_t *lefts = plan.data[kTtLefts], *segments = plan.data[kTtLeftSegments],
          *row_lefts = plan.data[kTtRowLefts], *starts = plan.data[kTtStarts];
  int32_t* left_starts = starts + keys.num_tables + 1;
  int64_t num_lefts = 0, j = 0;
  for (int64_t t = 0; t < keys.num_tables; ++t) {
    const TtTableIds table = keys.tables[t];
    const int64_t keys_end = keys.first_key(t + 1);
    int64_t left_keys_end = 0;  // end of the keys of the current left half
    starts[t] = static_cast<int32_t>(j);
    left_starts[t] = static_cast<int32_t>(num_lefts);
    for (; j < keys.count && keys.data[j] < keys_end; ++j) {
      if (keys.data[j] >= left_keys_end) {
        const int64_t left = (keys.data[j] - table.first_key) / table.right_ids;
        left_keys_end = table.first_key + (left + 1) * table.right_ids;
        lefts[num_lefts] = static_cast<int32_t>(table.first_left + left);
        segments[num_lefts++] = static_cast<int32_t>(j);
      }
      row_lefts[j] = static_cast<int32_t>(num_lefts - 1);
    }
  }
  starts[keys.num_tables] = static_cast<int32_t>(keys.count);
  left_starts[keys.num_tables] = static_cast<int32_t>(num_lefts);
  segments[num_lefts] = static_cast<int32_t>(keys.count);
}

// Write the tensors of `plan` about right halves, and the first right half of each table, after
// write_lefts. `right_ids` is the number of ids of right halves of all tables. Runs in parallel.
void write_rights(const SortedKeys& keys, int64_t right_ids, const PlanTensors& plan) {
  const int32_t *lefts = plan.data[kTtLefts], *row_lefts = plan.data[kTtRowLefts],
                *starts = plan.data[kTtStarts];
  const int64_t num_rows = keys.count;
  std::vector<int64_t> part_begins(num_group_parts(num_rows) + 1);
  const int64_t num_parts = static_cast<int64_t>(part_begins.size()) - 1;
  for (int64_t part = 0; part <= num_parts; ++part) {
    part_begins[part] = num_rows * part / num_parts;
  }
  // Call put(j, right id) for each row j of a part.
  const auto fill = [&](int64_t part, const auto& put) {
    int64_t j = part_begins[part];
    int64_t t = std::upper_bound(starts, starts + keys.num_tables + 1, j) - starts - 1;
    for (; j < part_begins[part + 1]; ++t) {
      const TtTableIds table = keys.tables[t];
      const int64_t stop = std::min<int64_t>(part_begins[part + 1], starts[t + 1]);
      for (; j < stop; ++j) {
        const int64_t left = lefts[row_lefts[j]] - table.first_left;
        put(j, table.first_right + keys.data[j] - table.first_key - left * table.right_ids);
      }
    }
  };
  int32_t num_rights = 0;
  const GroupOutput out{.unique = plan.data[kTtRights],
                        .unique_is_int64 = false,
                        .segments = plan.data[kTtRightSegments],
                        .permutation = plan.data[kTtRightRows],
                        .num_groups = &num_rights};
  group_items<Item32>(num_rows, right_ids, part_begins, fill, out, [](int64_t, int64_t) {});
  const int32_t *rights = plan.data[kTtRights], *segments = plan.data[kTtRightSegments],
                *rows = plan.data[kTtRightRows];
  for (int32_t v = 0; v < num_rights; ++v) {
    for (int32_t i = segments[v]; i < segments[v + 1]; ++i) plan.data[kTtRowRights][rows[i]] = v;
  }
  int32_t* right_starts = plan.data[kTtStarts] + 2 * (keys.num_tables + 1);
  for (int64_t t = 0; t < keys.num_tables; ++t) {
    const int64_t first = keys.tables[t].first_right;
    right_starts[t] =
        static_cast<int32_t>(std::lower_bound(rights, rights + num_rights, first) - rights);
  }
  right_starts[keys.num_tables] = num_rights;
}

}  // namespace

// The contract is in tt/entries.h. Sets entries after the last row or half to 0.
std::vector<Tensor> tt_plan(const Tensor& keys, const Tensor& count, const Tensor& tables,
                            int64_t left_ids, int64_t right_ids) {
  const char* op = "tt_plan";
  check_dtype(op, "keys", keys, ScalarType::Long, "int64");
  check_dtype(op, "count", count, ScalarType::Int, "int32");
  const TtTableIds* table_ids = tt_table_ids(op, "tables", tables);
  const int64_t num_tables = tables.size(0);
  int64_t keys_end = 0, lefts_end = 0, rights_end = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    const TtTableIds& table = table_ids[t];
    check_table_ids(op, table);
    STD_TORCH_CHECK(table.first_key == keys_end && table.first_left == lefts_end &&
                        table.first_right == rights_end,
                    op, ": tables must follow each other, as emblib.ops.tt.layout_of makes them");
    const int64_t num_left_ids = table.left_outer_rows * table.left_inner_rows;
    const double num_keys =
        static_cast<double>(num_left_ids) * static_cast<double>(table.right_ids);
    STD_TORCH_CHECK(
        num_left_ids <= kMaxTtIds - lefts_end && table.right_ids <= kMaxTtIds - rights_end &&
            num_keys <= kMaxTtKeys - static_cast<double>(keys_end),
        op, ": the halves of all tables must be fewer than 2^31, and their keys at most 4e18");
    keys_end += num_left_ids * table.right_ids;
    lefts_end += num_left_ids;
    rights_end += table.right_ids;
  }
  STD_TORCH_CHECK(num_tables > 0, op, ": tables must not be empty");
  STD_TORCH_CHECK(left_ids == lefts_end && right_ids == rights_end, op,
                  ": left_ids and right_ids must be ", lefts_end, " and ", rights_end,
                  ", as the tables say, got ", left_ids, " and ", right_ids);
  const int64_t n = keys.numel();
  const int64_t num_rows = count.numel() > 0 ? *count.const_data_ptr<int32_t>() : 0;
  STD_TORCH_CHECK(num_rows >= 0 && num_rows <= n && keys.is_contiguous(), op,
                  ": keys must be contiguous, and count, the number of distinct keys, in [0, ", n,
                  "], got ", num_rows);
  PlanTensors plan(keys, num_tables);
  const SortedKeys distinct_keys{keys.const_data_ptr<int64_t>(), num_rows, table_ids, num_tables};
  const int64_t* key = distinct_keys.data;
  bool is_ascending = true;
  for (int64_t j = 1; j < num_rows; ++j) is_ascending &= key[j - 1] < key[j];
  STD_TORCH_CHECK(num_rows == 0 || (is_ascending && key[0] >= 0 && key[num_rows - 1] < keys_end),
                  op,
                  ": keys must be distinct and ascending, as tbe_group returns them, and in [0, ",
                  keys_end, ")");
  write_lefts(distinct_keys, plan);
  write_rights(distinct_keys, right_ids, plan);
  const int32_t* starts = plan.data[kTtStarts];
  const int64_t num_lefts = starts[TtPlan::total_index(1, num_tables)],
                num_rights = starts[TtPlan::total_index(2, num_tables)];
  const int64_t num_used[] = {num_lefts,      num_lefts + 1, num_rows, num_rights,
                              num_rights + 1, num_rows,      num_rows};
  for (int i = 0; i < kTtStarts; ++i) {  // all but the starts, which have no unused entries
    std::fill(plan.data[i] + num_used[i], plan.data[i] + plan.tensors[i].numel(), 0);
  }
  return plan.tensors;
}

}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tt_keys);
  EMB_IMPL(m, emb, tt_plan);
}
