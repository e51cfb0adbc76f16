// Whole passes of tensor-train tables on the CPU. `tt_lookup_checked_` computes, in this order,
// keys, a grouping of the lookups, a plan, the distinct rows and the pooled output. `tt_backward_`
// computes the gradients of the rows and updates the cores. Rows and their gradients, the largest
// tensors between these steps, are in scratch memory (core/scratch.h). The forward pass trusts the
// plan that it makes; the backward pass gets the plan from the caller, and checks its contents.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "core/output_memory.h"
#include "core/scratch.h"
#include "group/entries.h"
#include "tbe/entries.h"
#include "tt/check.h"
#include "tt/entries.h"

namespace emb {
namespace {

// A float32 matrix [rows, columns] in scratch memory, and a tensor that refers to this memory, for
// functions that take a tensor. Both are valid as long as the object.
struct ScratchMatrix {
  Floats memory;
  Tensor tensor;

  ScratchMatrix(const Tensor& like, int64_t rows, int64_t columns)
      : memory(new_floats(rows * columns)),
        tensor(torch::stable::from_blob(memory.get(), {rows, columns}, {columns, 1}, like.device(),
                                        ScalarType::Float)) {}
};

// Check that `layout`, [num_tables], has the halves and the first keys and ids of `tables`; throw
// otherwise. Rows, multipliers and offsets are not compared.
void check_table_layout(const char* op, const TtTableIds* layout, int64_t num_tables,
                        const TtTables& tables) {
  bool is_equal = num_tables == tables.size();
  for (int64_t t = 0; is_equal && t < num_tables; ++t) {
    const TtHalf left = tables.shapes[t].left(), right = tables.shapes[t].right();
    is_equal = layout[t].left_outer_rows == left.num_outer_rows &&
               layout[t].left_inner_rows == left.num_inner_rows &&
               layout[t].right_ids == right.num_ids() && layout[t].left_is_pair == left.is_pair &&
               layout[t].first_key == tables.first_keys[t] &&
               layout[t].first_left == tables.first_left_ids[t] &&
               layout[t].first_right == tables.first_right_ids[t];
  }
  STD_TORCH_CHECK(is_equal, op,
                  ": tables must be those of row_factors and num_cores, as emblib.ops.tt.layout_of "
                  "makes them");
}

// Return a copy of `features`, [F, 8], that describes the distinct rows of the batch as one table
// of `num_rows` rows. If tables differ in dim, rows have the stride of the widest table. tbe_lookup
// takes a stride for cached rows alone, so the rows are then looked up as rows of a cache, with the
// stride `cache_stride`. It is 0 if all tables have one dim.
Tensor features_of_rows(const Tensor& features, int64_t num_rows, int64_t cache_stride) {
  Tensor copy = allocate(features, {features.size(0), features.size(1)});
  const Feature* from = feature_array(features);
  auto* to = static_cast<Feature*>(copy.mutable_data_ptr());
  for (int64_t f = 0; f < features.size(0); ++f) {
    to[f] = from[f];
    to[f].row_base = 0;
    to[f].rows = num_rows;
    to[f].cache_stride = cache_stride;
  }
  return copy;
}

// The number of tensors that a lookup returns for its backward pass: a grouping, a plan, and the
// values of the first left halves.
constexpr size_t kNumKeptTensors = size_t{kNumGroupTensors} + size_t{kNumTtPlanTensors} + 1;

// Return whether all indices and offsets are valid. Throw if `mode` is not a code of BoundsMode,
// but not for invalid indices or offsets, whatever the mode.
bool has_valid_lookups(const char* op, const Tensor& features, const Tensor& indices,
                       const Tensor& offsets, const std::optional<Tensor>& bag_layout,
                       int64_t mode) {
  parse_choice<BoundsMode>(op, "check", mode, kBoundsModes);
  constexpr auto kIgnore = static_cast<int64_t>(BoundsMode::kIgnore);
  const Tensor violations = std::get<1>(bounds_check(
      indices, offsets, tt_features(op, features, kTtIdFeatures), bag_layout, kIgnore));
  const auto* counts = violations.const_data_ptr<int64_t>();
  return counts[0] == 0 && counts[1] == 0;
}

// Look up a batch. Return the output of tbe_lookup and, if num_saved >= 0, the kNumKeptTensors
// tensors that tt_backward_ needs. With `check`, a code of BoundsMode, return no tensor if an index
// or offset is invalid; without `check` invalid ones are repaired as they are read. No argument is
// written. Wrong dtypes, shapes and tables throw.
//   cores, row_factors, dim_factors, num_cores   the tables, see TtTables
//   tables, feature_tables    int64 [T, 10] and [F, 10], rows of TtTableIds by table and by feature
//   features                  int64 [3 F, 8], see TtFeatureKind
//   num_saved                 number of left halves whose values are returned; below 0: return the
//                             output alone
//   violations                not used on the CPU: the caller counts those of an invalid batch
//   matmul_precision          a MatmulPrecision; products on the CPU are float32 with any
// The other arguments are those of tbe_lookup.
std::vector<Tensor> tt_lookup_checked_(
    std::vector<Tensor> cores, const Tensor& tables, const Tensor& feature_tables,
    const Tensor& features, const Tensor& indices, const Tensor& offsets,
    std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights, int64_t pooling,
    int64_t output_dim, ScalarType output_dtype, std::vector<int64_t> row_factors,
    std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores, int64_t num_saved,
    std::optional<int64_t> check, Tensor /*violations*/, int64_t matmul_precision) {
  const char* op = "tt_lookup_checked_";
  parse_matmul_precision(op, matmul_precision);
  const TtTables checked_tables(op, cores, row_factors, dim_factors, num_cores);
  check_table_layout(op, tt_table_ids(op, "tables", tables), tables.size(0), checked_tables);
  const Tensor key_features = tt_features(op, features, kTtKeyFeatures);
  if (check && !has_valid_lookups(op, features, indices, offsets, bag_layout, *check)) return {};
  const Tensor keys = tt_keys(indices, offsets, bag_layout, feature_tables);
  const auto [unique_keys, segments, lookups, bags, count] = tbe_group(
      key_features, keys, offsets, bag_layout, checked_tables.first_keys.back(), check.has_value());
  const std::vector<Tensor> plan =
      tt_plan(unique_keys, count, tables, checked_tables.first_left_ids.back(),
              checked_tables.first_right_ids.back());
  const ScratchMatrix rows(cores[0], keys.numel(), checked_tables.max_dim);
  const Tensor left_values =
      allocate_output(cores[0], {std::max<int64_t>(num_saved, 0), checked_tables.left_value_size},
                      ScalarType::Float);
  tt_make_rows(checked_tables, tt_plan_of(op, plan, checked_tables.size()), left_values,
               rows.memory.get());
  const Tensor row_of_lookup = group_inverse(segments, lookups, count);
  const Tensor weight = torch::stable::view(rows.tensor, {keys.numel() * checked_tables.max_dim});
  const bool has_one_dim = checked_tables.has_one_dim();
  std::vector<Tensor> weights = {weight};
  if (!has_one_dim) {
    const Tensor empty_tier = allocate(rows.tensor, {0});
    weights = {weight, empty_tier, empty_tier, weight};
  }
  std::vector<Tensor> results{tbe_lookup(
      weights,
      features_of_rows(key_features, keys.numel(), has_one_dim ? 0 : checked_tables.max_dim),
      row_of_lookup, offsets, has_one_dim ? std::nullopt : std::optional<Tensor>(row_of_lookup),
      bag_layout, sample_weights, pooling, output_dim, output_dtype)};
  if (num_saved < 0) return results;
  for (const Tensor& tensor : {unique_keys, segments, lookups, bags, count})
    results.push_back(tensor);
  results.insert(results.end(), plan.begin(), plan.end());
  results.push_back(left_values);
  return results;
}

// Count the step in `hyper`, and update the cores and `states` in place: all states of the first
// core, then all of the second, and so on. If the update throws, the step is not counted. If
// `is_finite`, bool [1] or null, is false, nothing is counted or updated.
//   grad        the gradient of the output of tt_lookup_checked_
//   kept        the other tensors that it returned for these indices
//   is_stale    the cores have changed since that call, so that its left values are not used
//   hyper       float64, on the CPU, see optim/functor.h; check_hyper says what is checked
//   optimizer   a number of Optimizers
// The other arguments are those of tt_lookup_checked_.
void tt_backward_(std::vector<Tensor> cores, std::vector<Tensor> states, Tensor hyper,
                  int64_t optimizer, const Tensor& grad, const Tensor& features,
                  const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout,
                  std::optional<Tensor> sample_weights, int64_t pooling, std::vector<Tensor> kept,
                  std::vector<int64_t> row_factors, std::vector<int64_t> dim_factors,
                  std::vector<int64_t> num_cores, bool is_stale, int64_t matmul_precision,
                  std::optional<Tensor> is_finite) {
  const char* op = "tt_backward_";
  parse_matmul_precision(op, matmul_precision);
  check_has_step(op, hyper);
  check_is_finite(op, is_finite);
  STD_TORCH_CHECK(kept.size() == kNumKeptTensors && kept[kGroupLookups].numel() == indices.numel(),
                  op, ": kept must be the ", kNumKeptTensors,
                  " tensors that tt_lookup_checked_ returns for these indices, got ", kept.size());
  const TtTables checked_tables(op, cores, row_factors, dim_factors, num_cores);
  const Tensor key_features = tt_features(op, features, kTtKeyFeatures);
  const ScratchMatrix row_grads(grad, indices.numel(), checked_tables.max_dim);
  sum_row_grads(op, grad, key_features,
                {kept[kGroupRows], kept[kGroupSegments], kept[kGroupLookups], kept[kGroupBags],
                 kept[kGroupCount]},
                offsets, bag_layout, sample_weights, pooling, checked_tables.max_dim,
                row_grads.memory.get());
  // Not before sum_row_grads, whose checks throw for a skipped step, too.
  if (is_finite && !*is_finite->const_data_ptr<bool>()) return;
  const std::vector<Tensor> plan(kept.begin() + kNumGroupTensors, kept.end() - 1);
  // The update computes the left values that it does not get.
  const Tensor left_values =
      is_stale ? allocate(kept.back(), {0, checked_tables.left_value_size}) : kept.back();
  count_step(hyper, [&] {
    tt_update_rows(op, checked_tables, cores, states, hyper, optimizer, plan, left_values,
                   row_grads.tensor);
  });
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tt_lookup_checked_);
  EMB_IMPL(m, emb, tt_backward_);
}
