// Whole passes of tensor-train tables on the CPU: `tt_lookup_checked_` and `tt_backward_` call the
// ops of which a pass consists. Rows and their gradients, the largest tensors between these ops,
// are in scratch memory that the thread keeps; a plan is checked once, when it comes back for
// backward.
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

// Rows of floats in scratch memory, as the tensor that entries take.
struct ScratchRows {
  Floats memory;
  Tensor tensor;

  ScratchRows(const Tensor& like, int64_t rows, int64_t columns)
      : memory(new_floats(rows * columns)),
        tensor(torch::stable::from_blob(memory.get(), {rows, columns}, {columns, 1}, like.device(),
                                        ScalarType::Float)) {}
};

// Check that the layout of the tables, from which keys are made, is that of the cores.
void check_layout_of(const char* op, const TtTableIds* layout, int64_t count,
                     const TtTables& tables) {
  bool equal = count == tables.size();
  for (int64_t t = 0; equal && t < count; ++t) {
    const TtHalf left = tables.shapes[t].left(), right = tables.shapes[t].right();
    equal = layout[t].first == left.outer_rows && layout[t].second == left.inner_rows &&
            layout[t].rights == right.ids() && layout[t].is_pair == left.pair &&
            layout[t].first_key == tables.first_keys[t] &&
            layout[t].first_left == tables.first_lefts[t] &&
            layout[t].first_right == tables.first_rights[t];
  }
  STD_TORCH_CHECK(equal, op,
                  ": tables must be those of row_factors and num_cores, as emblib.ops.tt.layout_of "
                  "makes them");
}

// Copy `features` for a lookup in the distinct rows of the batch, which are a table of `rows` rows.
// Rows of tables of several dims have the stride of the widest, which only rows of a cache have.
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

// The tensors that a lookup returns for its backward pass: a grouping, a plan, left-half values.
constexpr size_t kGroupTensors = 5, kKeptTensors = kGroupTensors + kTtPlanTensors + 1;

// Return whether all indices and offsets are valid; raise in no mode.
bool is_valid(const char* op, const Tensor& features, const Tensor& indices, const Tensor& offsets,
              const std::optional<Tensor>& bag_layout, int64_t mode) {
  parse_choice<BoundsMode>(op, "check", mode, kBoundsModes);
  constexpr auto kIgnore = static_cast<int64_t>(BoundsMode::kIgnore);
  const Tensor violations = std::get<1>(
      bounds_check(indices, offsets, tt_features(op, features, kTtOfIds), bag_layout, kIgnore));
  const auto* counts = violations.const_data_ptr<int64_t>();
  return counts[0] == 0 && counts[1] == 0;
}

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
  std::vector<Tensor> memory = {table};
  if (!has_one_dim) {
    const Tensor nothing = allocate(rows.tensor, {0});
    memory = {table, nothing, nothing, table};
  }
  std::vector<Tensor> results{
      tbe_lookup(memory, features_of_rows(of_keys, keys.numel(), has_one_dim ? 0 : shapes.dim),
                 inverse, offsets, has_one_dim ? std::nullopt : std::optional<Tensor>(inverse),
                 bag_layout, sample_weights, pooling, output_dim, output_dtype)};
  if (num_saved < 0) return results;
  for (const Tensor& tensor : {unique, segments, lookups, bags, count}) results.push_back(tensor);
  results.insert(results.end(), plan.begin(), plan.end());
  results.push_back(prefixes);
  return results;
}

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
  STD_TORCH_CHECK(kept.size() == kKeptTensors && kept[2].numel() == indices.numel(), op,
                  ": kept must be the ", kKeptTensors,
                  " tensors that tt_lookup_checked_ returns for these indices, got ", kept.size());
  const TtTables shapes(op, cores, row_factors, dim_factors, num_cores);
  const Tensor of_keys = tt_features(op, features, kTtOfKeys);
  const ScratchRows row_grads(grad, indices.numel(), shapes.dim);
  sum_row_grads(op, grad, of_keys, {kept[0], kept[1], kept[2], kept[3], kept[4]}, offsets,
                bag_layout, sample_weights, pooling, shapes.dim, row_grads.memory.get());
  if (is_finite && !*is_finite->const_data_ptr<bool>()) return;
  const std::vector<Tensor> plan(kept.begin() + kGroupTensors, kept.end() - 1);
  // Values that are not kept are made as they are needed.
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
