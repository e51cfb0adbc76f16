// Whole passes of tensor-train tables on the CPU: `tt_lookup` and `tt_backward_` call the ops of
// which a pass consists. Rows and their gradients, the largest tensors between these ops, are in
// scratch memory that the thread keeps; a plan is checked once, when it comes back for backward.
#include <torch/csrc/stable/library.h>

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

std::tuple<Tensor, std::vector<Tensor>, std::vector<Tensor>, Tensor> tt_lookup(
    std::vector<Tensor> cores, const Tensor& tables, const Tensor& feature_tables,
    const Tensor& features, const Tensor& indices, const Tensor& offsets,
    std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights, int64_t pooling,
    int64_t output_dim, ScalarType output_dtype, std::vector<int64_t> row_factors,
    std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores, int64_t num_saved,
    int64_t matmul_precision) {
  const char* op = "tt_lookup";
  parse_matmul_precision(op, matmul_precision);
  const TtTables shapes(op, cores, row_factors, dim_factors, num_cores);
  check_layout_of(op, tt_table_ids(op, "tables", tables), tables.size(0), shapes);
  check_features(op, features);
  STD_TORCH_CHECK(num_saved >= 0, op, ": num_saved must be >= 0, got ", num_saved);
  const Tensor keys = tt_keys(indices, offsets, bag_layout, feature_tables);
  const auto [unique, segments, lookups, bags, count] =
      tbe_group(features, keys, offsets, bag_layout, shapes.first_keys.back(), false);
  const std::vector<Tensor> plan =
      tt_plan(unique, count, tables, shapes.first_lefts.back(), shapes.first_rights.back());
  const ScratchRows rows(cores[0], keys.numel(), shapes.dim);
  const Tensor prefixes =
      allocate_output(cores[0], {num_saved, shapes.value_size}, ScalarType::Float);
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
  Tensor out =
      tbe_lookup(memory, features_of_rows(features, keys.numel(), has_one_dim ? 0 : shapes.dim),
                 inverse, offsets, has_one_dim ? std::nullopt : std::optional<Tensor>(inverse),
                 bag_layout, sample_weights, pooling, output_dim, output_dtype);
  return {out, {unique, segments, lookups, bags, count}, plan, prefixes};
}

void tt_backward_(std::vector<Tensor> cores, std::vector<Tensor> states, Tensor hyper,
                  int64_t optimizer, const Tensor& grad, const Tensor& features,
                  std::vector<Tensor> groups, const Tensor& offsets,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, std::vector<Tensor> plan, const Tensor& prefixes,
                  std::vector<int64_t> row_factors, std::vector<int64_t> dim_factors,
                  std::vector<int64_t> num_cores, int64_t matmul_precision) {
  const char* op = "tt_backward_";
  parse_matmul_precision(op, matmul_precision);
  check_has_step(op, hyper);
  STD_TORCH_CHECK(groups.size() == 5, op,
                  ": groups must be the 5 tensors that tt_lookup returns, got ", groups.size());
  const TtTables shapes(op, cores, row_factors, dim_factors, num_cores);
  const ScratchRows row_grads(grad, groups[2].numel(), shapes.dim);
  sum_row_grads(op, grad, features, {groups[0], groups[1], groups[2], groups[3], groups[4]},
                offsets, bag_layout, sample_weights, pooling, shapes.dim, row_grads.memory.get());
  count_step(hyper, [&] {
    tt_update_rows(op, shapes, cores, states, hyper, optimizer, plan, prefixes, row_grads.tensor);
  });
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tt_lookup);
  EMB_IMPL(m, emb, tt_backward_);
}
