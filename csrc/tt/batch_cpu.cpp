// Whole passes of tensor-train tables on the CPU. `tt_lookup_checked_` calls the ops for keys,
// grouping, plan, rows and pooling; `tt_backward_` those for gradients of rows and the update. Rows
// and their gradients, the largest tensors between these ops, are in scratch memory that the thread
// keeps. The contents of a plan are checked only in the backward pass, to which the caller passes
// the plan.
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

// Rows of floats, [rows, columns], in scratch memory, and a tensor that refers to this memory,
// because entries take tensors. Both are valid as long as the object.
struct ScratchRows {
  Floats memory;
  Tensor tensor;

  ScratchRows(const Tensor& like, int64_t rows, int64_t columns)
      : memory(new_floats(rows * columns)),
        tensor(torch::stable::from_blob(memory.get(), {rows, columns}, {columns, 1}, like.device(),
                                        ScalarType::Float)) {}
};

// Throws unless `layout`, from which keys are computed, has `count` tables with the shapes of the
// cores in `tables`.
void check_layout_of(const char* op, const TtTableIds* layout, int64_t count,
                     const TtTables& tables) {
  bool equal = count == tables.size();
  for (int64_t t = 0; equal && t < count; ++t) {
    const TtHalf left = tables.shapes[t].left(), right = tables.shapes[t].right();
    equal = layout[t].left_outer_rows == left.outer_rows &&
            layout[t].left_inner_rows == left.inner_rows && layout[t].right_ids == right.ids() &&
            layout[t].left_is_pair == left.is_pair && layout[t].first_key == tables.first_keys[t] &&
            layout[t].first_left == tables.first_lefts[t] &&
            layout[t].first_right == tables.first_rights[t];
  }
  STD_TORCH_CHECK(equal, op,
                  ": tables must be those of row_factors and num_cores, as emblib.ops.tt.layout_of "
                  "makes them");
}

// Return a copy of `features` for a lookup in the distinct rows of the batch, as one table of
// `rows` rows. If tables differ in dim, all rows have the stride of the widest table. Only rows of
// a cache can have a stride, so they are then looked up as rows of a cache, with the stride
// `cache_stride`; it is 0 if tables have one dim.
Tensor features_of_rows(const Tensor& features, int64_t rows, int64_t cache_stride) {
  Tensor copy = allocate(features, {features.size(0), features.size(1)});
  const Feature* from = feature_array(features);
  auto* to = static_cast<Feature*>(copy.mutable_data_ptr());
  for (int64_t f = 0; f < features.size(0); ++f) {
    to[f] = from[f];
    to[f].row_base = 0;
    to[f].rows = rows;
    to[f].cache_stride = cache_stride;
  }
  return copy;
}

// The tensors that a lookup returns for its backward pass: a grouping, a plan, the values of left
// halves.
constexpr size_t kKeptTensors = size_t{kGroupTensors} + size_t{kTtPlanTensors} + 1;

// Return whether all indices and offsets are valid. Invalid ones do not throw, whatever the mode;
// a `mode` that is no code of BoundsMode throws.
bool is_valid(const char* op, const Tensor& features, const Tensor& indices, const Tensor& offsets,
              const std::optional<Tensor>& bag_layout, int64_t mode) {
  parse_choice<BoundsMode>(op, "check", mode, kBoundsModes);
  constexpr auto kIgnore = static_cast<int64_t>(BoundsMode::kIgnore);
  const Tensor violations = std::get<1>(
      bounds_check(indices, offsets, tt_features(op, features, kTtOfIds), bag_layout, kIgnore));
  const auto* counts = violations.const_data_ptr<int64_t>();
  return counts[0] == 0 && counts[1] == 0;
}

// Look up a batch: return the pooled rows and, if num_saved >= 0, what tt_backward_ needs of this
// pass (kKeptTensors tensors). With `check`, a code of BoundsMode, nothing is looked up in an
// invalid batch, and no tensor is returned; without `check` indices and offsets are repaired.
//   cores, row_factors, dim_factors, num_cores   the tables, see TtTables
//   tables, feature_tables    int64 [T, 10] and [F, 10] rows of TtTableIds, by table and by feature
//   features                  int64 [3 F, 8], see TtFeatures
//   num_saved                 left halves whose values are kept; below 0: a pass without backward
//   violations                not used on the CPU: the caller counts for an invalid batch
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
  const TtTables shapes(op, cores, row_factors, dim_factors, num_cores);
  check_layout_of(op, tt_table_ids(op, "tables", tables), tables.size(0), shapes);
  const Tensor of_keys = tt_features(op, features, kTtOfKeys);
  if (check && !is_valid(op, features, indices, offsets, bag_layout, *check)) return {};
  const Tensor keys = tt_keys(indices, offsets, bag_layout, feature_tables);
  const auto [unique, segments, lookups, bags, count] =
      tbe_group(of_keys, keys, offsets, bag_layout, shapes.first_keys.back(), check.has_value());
  const std::vector<Tensor> plan =
      tt_plan(unique, count, tables, shapes.first_lefts.back(), shapes.first_rights.back());
  const ScratchRows rows(cores[0], keys.numel(), shapes.dim);
  const Tensor prefixes = allocate_output(
      cores[0], {std::max<int64_t>(num_saved, 0), shapes.value_size}, ScalarType::Float);
  tt_make_rows(shapes, tt_plan_of(op, plan, shapes.size()), prefixes, rows.memory.get());
  const Tensor inverse = group_inverse(segments, lookups, count);
  const Tensor table = torch::stable::view(rows.tensor, {keys.numel() * shapes.dim});
  bool has_one_dim = true;
  for (const TtShape& shape : shapes.shapes) has_one_dim &= shape.dim() == shapes.dim;
  std::vector<Tensor> weights = {table};
  if (!has_one_dim) {
    const Tensor empty_tier = allocate(rows.tensor, {0});
    weights = {table, empty_tier, empty_tier, table};
  }
  std::vector<Tensor> results{
      tbe_lookup(weights, features_of_rows(of_keys, keys.numel(), has_one_dim ? 0 : shapes.dim),
                 inverse, offsets, has_one_dim ? std::nullopt : std::optional<Tensor>(inverse),
                 bag_layout, sample_weights, pooling, output_dim, output_dtype)};
  if (num_saved < 0) return results;
  for (const Tensor& tensor : {unique, segments, lookups, bags, count}) results.push_back(tensor);
  results.insert(results.end(), plan.begin(), plan.end());
  results.push_back(prefixes);
  return results;
}

// Count the step in `hyper` and update the cores and `states` (all states of the first core, then
// all of the second, and so on) in place. `kept` must be the tensors that tt_lookup_checked_
// returned for these indices after the output. `is_stale`: the cores have changed since, so that
// kept values of left halves are not used. If `is_finite`, bool [1] or null, is false, nothing is
// updated. `grad` is the gradient of the output. If the update throws, the step is not counted.
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
  STD_TORCH_CHECK(kept.size() == kKeptTensors && kept[kGroupLookups].numel() == indices.numel(), op,
                  ": kept must be the ", kKeptTensors,
                  " tensors that tt_lookup_checked_ returns for these indices, got ", kept.size());
  const TtTables shapes(op, cores, row_factors, dim_factors, num_cores);
  const Tensor of_keys = tt_features(op, features, kTtOfKeys);
  const ScratchRows row_grads(grad, indices.numel(), shapes.dim);
  sum_row_grads(op, grad, of_keys,
                {kept[kGroupRows], kept[kGroupSegments], kept[kGroupLookups], kept[kGroupBags],
                 kept[kGroupCount]},
                offsets, bag_layout, sample_weights, pooling, shapes.dim, row_grads.memory.get());
  if (is_finite && !*is_finite->const_data_ptr<bool>()) return;
  const std::vector<Tensor> plan(kept.begin() + kGroupTensors, kept.end() - 1);
  // Values that are not passed are computed as they are needed.
  const Tensor prefixes = is_stale ? allocate(kept.back(), {0, shapes.value_size}) : kept.back();
  count_step(hyper, [&] {
    tt_update_rows(op, shapes, cores, states, hyper, optimizer, plan, prefixes, row_grads.tensor);
  });
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tt_lookup_checked_);
  EMB_IMPL(m, emb, tt_backward_);
}
