// Checks of the arguments of the tensor-train ops, shared by the CPU and the GPU: cores and
// factors, the layout of the tables, the plan of a batch, stored rows. A failed check throws, with
// the op's name `op` in the message; ops run the checks before they write to their arguments.
// Functions marked "CPU only" read the contents of tensors; on a GPU contents are trusted.
// tt/args.h explains halves, keys, ids and plans.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "core/check.h"
#include "core/codes.h"
#include "optim/check.h"
#include "tt/args.h"
#include "tt/cached.h"

namespace emb {

// The maximum number of rows of a core, and of ids of halves, which are int32 in a plan.
inline constexpr int64_t kMaxTtIds = (int64_t{1} << 31) - 1;
// The maximum number of keys, and the maximum product of the row factors of a table. Both are
// int64; the limit leaves a margin for sums.
inline constexpr double kMaxTtKeys = 4.0e18;

// Check the row factors of a table, one per core. Return a shape with `num_cores` and `p` set and
// the other members 0.
inline TtShape tt_row_shape(const char* op, const std::vector<int64_t>& row_factors) {
  TtShape shape{};
  shape.num_cores = static_cast<int>(row_factors.size());
  STD_TORCH_CHECK(shape.num_cores >= 2 && shape.num_cores <= kMaxCores, op,
                  ": row_factors must have 2 to 4 entries, one per core, got ", row_factors.size());
  double num_keys = 1.0;
  for (int k = 0; k < shape.num_cores; ++k) {
    STD_TORCH_CHECK(row_factors[k] >= 1, op, ": row factors must be >= 1, got ", row_factors[k]);
    shape.p[k] = row_factors[k];
    num_keys *= static_cast<double>(row_factors[k]);
  }
  STD_TORCH_CHECK(num_keys <= kMaxTtKeys, op, ": row_factors must multiply to at most 4e18, got ",
                  num_keys);
  const TtHalf left = shape.left(), right = shape.right();
  STD_TORCH_CHECK(left.num_ids() <= kMaxTtIds && right.num_ids() <= kMaxTtIds, op,
                  ": the row factors of either half must multiply to less than 2^31, got ",
                  left.num_ids(), " and ", right.num_ids(),
                  "; use more cores or more even factors");
  return shape;
}

// Return the MatmulPrecision whose value is `code`. Throws if there is none.
inline MatmulPrecision parse_matmul_precision(const char* op, int64_t code) {
  return parse_choice<MatmulPrecision>(op, "matmul_precision", code, kMatmulPrecisions);
}

// Check the dtype and shape of the tensor `tables`, which messages call `name`: int64 [T, 10], a
// row per table, or [F, 10], a row per feature, contiguous. Return its rows, on the tensor's
// device.
inline const TtTableIds* tt_table_ids(const char* op, const char* name, const Tensor& tables) {
  check_dtype(op, name, tables, ScalarType::Long, "int64");
  STD_TORCH_CHECK(tables.dim() == 2 && tables.size(1) == kTtTableColumns && tables.is_contiguous(),
                  op, ": ", name, " must be a contiguous [T, ", kTtTableColumns, "] tensor");
  return reinterpret_cast<const TtTableIds*>(tables.const_data_ptr<int64_t>());
}

// Check the contents of a row of such a tensor; CPU only. Not checked are left_is_pair, first_key,
// first_left and first_right, and that multiplier and offset are below the number of rows.
inline void check_table_ids(const char* op, const TtTableIds& table) {
  const bool is_positive = table.rows >= 1 && table.left_outer_rows >= 1 &&
                           table.left_inner_rows >= 1 && table.right_ids >= 1 &&
                           table.multiplier >= 1 && table.offset >= 0;
  const double num_left_ids =
      static_cast<double>(table.left_outer_rows) * static_cast<double>(table.left_inner_rows);
  const double num_keys = num_left_ids * static_cast<double>(table.right_ids);
  STD_TORCH_CHECK(is_positive && num_left_ids <= kMaxTtIds && table.right_ids <= kMaxTtIds &&
                      static_cast<double>(table.rows) <= num_keys && num_keys <= kMaxTtKeys,
                  op, ": a table must have rows in [1, ", num_keys, "] and factors >= 1, got ",
                  table.rows, " rows; make tables with emblib.ops.tt.layout_of");
}

// Check the cores of a table and return its shape. Core k is a contiguous matrix [p_k, R_k q_k
// R_{k+1}], with p_k = row_factors[k] and q_k = dim_factors[k]; the ranks R follow from the widths.
// All cores must have one dtype (float32, float16 or bfloat16) and one device.
inline TtShape tt_shape(const char* op, const std::vector<Tensor>& cores,
                        const std::vector<int64_t>& row_factors,
                        const std::vector<int64_t>& dim_factors) {
  TtShape shape = tt_row_shape(op, row_factors);
  STD_TORCH_CHECK(cores.size() == row_factors.size() && dim_factors.size() == row_factors.size(),
                  op, ": cores, row_factors and dim_factors must have one length, got ",
                  cores.size(), ", ", row_factors.size(), " and ", dim_factors.size());
  constexpr int64_t kMaxWidth = int64_t{1} << 30;
  int64_t rank = 1, dim = 1;
  for (int k = 0; k < shape.num_cores; ++k) {
    const Tensor& core = cores[k];
    float_dtype(op, "each core", core.scalar_type());
    STD_TORCH_CHECK(core.scalar_type() == cores[0].scalar_type(), op,
                    ": all cores must have one dtype, got ", dtype_name(cores[0].scalar_type()),
                    " and ", dtype_name(core.scalar_type()));
    check_same_device(op, "each core", core, cores[0]);
    STD_TORCH_CHECK(core.dim() == 2 && core.is_contiguous(), op, ": core ", k,
                    " must be a contiguous matrix [p, R q R'], got ", core.dim(), " dimensions");
    STD_TORCH_CHECK(core.size(0) == shape.p[k], op, ": core ", k, " must have row_factors[", k,
                    "] = ", shape.p[k], " rows, got ", core.size(0));
    const int64_t q = dim_factors[k], width = core.size(1);
    STD_TORCH_CHECK(
        q >= 1 && width >= 1 && width <= kMaxWidth && q <= width && width % (rank * q) == 0, op,
        ": core ", k, " must have a multiple of rank * q = ", rank, " * ", q,
        " columns, at most 2^30, got ", width);
    shape.q[k] = static_cast<int>(q);
    shape.ranks[k] = static_cast<int>(rank);
    rank = width / (rank * q);
    dim = dim <= kMaxWidth ? dim * q : dim;
  }
  STD_TORCH_CHECK(rank == 1, op, ": the last core must end with rank 1, its width implies ", rank);
  shape.ranks[shape.num_cores] = 1;
  STD_TORCH_CHECK(dim <= kMaxWidth, op, ": dim_factors must multiply to at most 2^30, got ", dim);
  // 65,535 tiles of 32, the height of a grid: see launch_contract in tt/pair.cuh.
  constexpr int kMaxPairWidth = 65535 * 32;
  for (const TtHalf& half : {shape.left(), shape.right()}) {
    STD_TORCH_CHECK(half.value_size() <= kMaxWidth, op, ": dim factors of a half times its rank ",
                    "must multiply to at most 2^30, got ", half.value_size());
    const int width = half.q_inner * half.rank;
    STD_TORCH_CHECK(!half.is_pair || (width <= kMaxPairWidth && half.inner_rank <= kMaxPairWidth),
                    op, ": the sides of an inner core, [rank, dim factor * rank], must be at most ",
                    kMaxPairWidth, ", got ", half.inner_rank, " and ", width);
    STD_TORCH_CHECK(!half.is_pair || half.num_outer_rows * half.q_outer <= kMaxWidth, op,
                    ": row factor times dim factor must be at most 2^30 in the first and the last "
                    "core, got ",
                    half.num_outer_rows, " * ", half.q_outer, "; use more even factors");
  }
  return shape;
}

// The tensor-train tables of an op: their shapes and cores, and the numbers of their first core,
// key and ids. The vectors first_* have an entry per table, and the total at the end. Shares the
// memory of the cores.
struct TtTables {
  std::vector<TtShape> shapes;             // [T]
  std::vector<std::vector<Tensor>> cores;  // [T][num_cores[t]]
  std::vector<int64_t> first_cores = {0};
  std::vector<int64_t> first_keys = {0}, first_left_ids = {0}, first_right_ids = {0};
  Dtype type = Dtype::kFloat;   // dtype of all cores
  int64_t max_dim = 0;          // columns of the widest table
  int64_t left_value_size = 0;  // floats of the largest value of a left half

  // Check the cores and factors of all tables, at least one. The first three lists are
  // concatenated: table t has num_cores[t] entries in each.
  TtTables(const char* op, const std::vector<Tensor>& all_cores,
           const std::vector<int64_t>& row_factors, const std::vector<int64_t>& dim_factors,
           const std::vector<int64_t>& num_cores) {
    const auto num_all_cores = static_cast<int64_t>(all_cores.size());
    STD_TORCH_CHECK(
        row_factors.size() == all_cores.size() && dim_factors.size() == row_factors.size(), op,
        ": cores, row_factors and dim_factors must have one length, got ", num_all_cores, ", ",
        row_factors.size(), " and ", dim_factors.size());
    int64_t sum = 0;
    for (const int64_t count : num_cores)
      sum += count >= 2 && count <= kMaxCores ? count : num_all_cores + 1;
    STD_TORCH_CHECK(sum == num_all_cores && num_all_cores > 0, op,
                    ": num_cores must be 2 to 4 for each table and ", num_all_cores, " in all");
    type = float_dtype(op, "each core", all_cores[0].scalar_type());
    int64_t first = 0;
    for (const int64_t count : num_cores) {
      cores.emplace_back(all_cores.begin() + first, all_cores.begin() + first + count);
      shapes.push_back(tt_shape(
          op, cores.back(), {row_factors.begin() + first, row_factors.begin() + first + count},
          {dim_factors.begin() + first, dim_factors.begin() + first + count}));
      check_same_device(op, "each core", all_cores[first], all_cores[0]);
      STD_TORCH_CHECK(all_cores[first].scalar_type() == all_cores[0].scalar_type(), op,
                      ": all cores must have one dtype, got ",
                      dtype_name(all_cores[0].scalar_type()), " and ",
                      dtype_name(all_cores[first].scalar_type()));
      first += count;
      first_cores.push_back(first);
      append(op, shapes.back());
    }
  }

  int64_t size() const { return static_cast<int64_t>(shapes.size()); }
  // Return whether all tables have the same dim.
  bool has_one_dim() const {
    return std::all_of(shapes.begin(), shapes.end(),
                       [&](const TtShape& shape) { return shape.dim() == max_dim; });
  }

 private:
  // Number the ids and keys of the next table after the ids and keys of the earlier tables.
  void append(const char* op, const TtShape& shape) {
    const TtHalf left = shape.left(), right = shape.right();
    const double num_keys =
        static_cast<double>(left.num_ids()) * static_cast<double>(right.num_ids());
    STD_TORCH_CHECK(
        left.num_ids() <= kMaxTtIds - first_left_ids.back() &&
            right.num_ids() <= kMaxTtIds - first_right_ids.back() &&
            num_keys <= kMaxTtKeys - static_cast<double>(first_keys.back()),
        op,
        ": the halves of all tables must be fewer than 2^31, and their keys at most 4e18; "
        "use several modules");
    first_left_ids.push_back(first_left_ids.back() + left.num_ids());
    first_right_ids.push_back(first_right_ids.back() + right.num_ids());
    first_keys.push_back(first_keys.back() + left.num_ids() * right.num_ids());
    max_dim = max_dim < shape.dim() ? shape.dim() : max_dim;
    if (left_value_size < left.value_size()) left_value_size = left.value_size();
  }
};

// The thirds of `features`, int64 [3 F, 8], of the ops for a whole pass. Each is [F, 8], rows of
// Feature, and describes the tables for another step: as tables of keys (to group lookups), of ids
// (to check bounds), and of the distinct rows that the op computes (to pool them on a GPU; the CPU
// derives this third from the first).
enum TtFeatureKind : int { kTtKeyFeatures, kTtIdFeatures, kTtRowFeatures, kNumTtFeatureKinds };

// Return a third of `features` as a tensor that shares its memory, which must outlive it.
inline Tensor tt_features(const char* op, const Tensor& features, TtFeatureKind kind) {
  check_features(op, features);
  STD_TORCH_CHECK(features.size(0) % kNumTtFeatureKinds == 0, op,
                  ": features must have a row per feature for keys, for ids and for computed rows, "
                  "got ",
                  features.size(0), " rows");
  const int64_t num_features = features.size(0) / kNumTtFeatureKinds;
  void* first = const_cast<Feature*>(feature_array(features) + kind * num_features);
  return torch::stable::from_blob(first, {num_features, features.size(1)}, {features.size(1), 1},
                                  features.device(), ScalarType::Long);
}

// Return the number of elements of each tensor of a plan of n lookups, in the order of
// TtPlanTensor.
inline std::vector<int64_t> tt_plan_sizes(int64_t n, int64_t num_tables) {
  return {n, n + 1, n, n, n + 1, n, n, 3 * (num_tables + 1)};
}

// Check the number, dtypes and sizes of the tensors of a plan, in the order of TtPlanTensor, and
// that they are on one device. Return the plan, which refers to their memory. Contents are not
// checked.
inline TtPlan tt_plan_of(const char* op, const std::vector<Tensor>& tensors, int64_t num_tables) {
  STD_TORCH_CHECK(tensors.size() == kNumTtPlanTensors, op, ": plan must be the ",
                  static_cast<int>(kNumTtPlanTensors), " tensors that tt_plan returns, got ",
                  tensors.size());
  const int64_t capacity = tensors[kTtRowLefts].numel();
  const std::vector<int64_t> sizes = tt_plan_sizes(capacity, num_tables);
  const int32_t* data[kNumTtPlanTensors];
  for (int i = 0; i < kNumTtPlanTensors; ++i) {
    check_dtype(op, "each plan tensor", tensors[i], ScalarType::Int, "int32");
    check_same_device(op, "each plan tensor", tensors[i], tensors[0]);
    STD_TORCH_CHECK(tensors[i].numel() == sizes[i] && tensors[i].is_contiguous(), op,
                    ": plan tensor ", i, " must be contiguous with ", sizes[i], " entries, has ",
                    tensors[i].numel());
    data[i] = tensors[i].const_data_ptr<int32_t>();
  }
  return tt_plan_of_arrays(capacity, num_tables, data);
}

// Return whether the ids of halves, [num_halves], ascend and are in [0, num_ids), and whether the
// segments of the halves are not empty and together [0, num_rows).
inline bool are_halves_valid(const int32_t* ids, const int32_t* segments, int64_t num_halves,
                             int64_t num_ids, int64_t num_rows) {
  bool is_valid = num_halves <= num_rows && (num_halves > 0 || num_rows == 0) && segments[0] == 0;
  if (!is_valid) return false;
  for (int64_t u = 0; u < num_halves; ++u) {
    is_valid &= ids[u] >= 0 && ids[u] < num_ids && segments[u] < segments[u + 1];
  }
  for (int64_t u = 1; u < num_halves; ++u) is_valid &= ids[u - 1] < ids[u];
  return is_valid && segments[num_halves] == num_rows;
}

// Return whether the ids of the halves of each table t are in [first_ids[t], first_ids[t + 1]), and
// its first half begins with its first row. starts[t] is the first half of table t.
inline bool are_starts_valid(const TtPlan& plan, const TtTables& tables, const int32_t* starts,
                             const int32_t* ids, const int32_t* segments,
                             const std::vector<int64_t>& first_ids) {
  for (int64_t t = 0; t < tables.size(); ++t) {
    for (int32_t u = starts[t]; u < starts[t + 1]; ++u) {
      if (ids[u] < first_ids[t] || ids[u] >= first_ids[t + 1]) return false;
    }
    if (segments[starts[t]] != plan.row_starts()[t]) return false;
  }
  return true;
}

// Return whether half_of(i) is v for all i in [segments[v], segments[v + 1]), for all halves v with
// valid segments (see are_halves_valid). This holds if half_of begins with 0, does not decrease,
// and grows by one where a segment begins but nowhere else. The loop over rows has no branch: a
// loop per segment would be slow, because most segments have few rows.
template <class HalfOf>
bool are_segments_valid(const int32_t* segments, int64_t num_halves, int64_t num_rows,
                        const HalfOf& half_of) {
  bool is_valid = num_rows == 0 || (half_of(0) == 0 && half_of(num_rows - 1) == num_halves - 1);
  for (int64_t i = 1; i < num_rows; ++i) {
    is_valid &= static_cast<uint32_t>(half_of(i)) - static_cast<uint32_t>(half_of(i - 1)) <= 1;
  }
  for (int64_t v = 1; v < num_halves; ++v) {
    is_valid &= half_of(segments[v]) == v && half_of(segments[v] - 1) == v - 1;
  }
  return is_valid;
}

// Check that the contents of a plan are consistent; CPU only. The kernels trust them. The check
// takes a few comparisons per row, far less than the multiplications for the row.
inline void check_plan_contents(const char* op, const TtPlan& plan, const TtTables& tables) {
  const int64_t num_tables = tables.size();
  bool is_valid = true;
  for (const int32_t* starts : {plan.row_starts(), plan.left_starts(), plan.right_starts()}) {
    is_valid &= starts[0] == 0 && starts[num_tables] <= plan.capacity;
    for (int64_t t = 0; t < num_tables; ++t) is_valid &= starts[t] <= starts[t + 1];
  }
  STD_TORCH_CHECK(is_valid, op, ": plan must be what tt_plan returned for these row_factors");
  const int64_t num_rows = plan.row_starts()[num_tables];
  const int64_t num_lefts = plan.left_starts()[num_tables];
  const int64_t num_rights = plan.right_starts()[num_tables];
  is_valid = are_halves_valid(plan.lefts, plan.left_segments, num_lefts,
                              tables.first_left_ids.back(), num_rows) &&
             are_halves_valid(plan.rights, plan.right_segments, num_rights,
                              tables.first_right_ids.back(), num_rows) &&
             are_starts_valid(plan, tables, plan.left_starts(), plan.lefts, plan.left_segments,
                              tables.first_left_ids) &&
             are_starts_valid(plan, tables, plan.right_starts(), plan.rights, plan.right_segments,
                              tables.first_right_ids);
  is_valid = is_valid && are_segments_valid(plan.left_segments, num_lefts, num_rows,
                                            [&](int64_t j) { return plan.row_lefts[j]; });
  for (int64_t t = 0; is_valid && t < num_tables; ++t) {
    const int32_t begin = plan.row_starts()[t], end = plan.row_starts()[t + 1];
    for (int32_t i = begin; i < end; ++i) {
      is_valid &= plan.right_rows[i] >= begin && plan.right_rows[i] < end;
    }
  }
  is_valid = is_valid &&
             are_segments_valid(plan.right_segments, num_rights, num_rows,
                                [&](int64_t i) { return plan.row_rights[plan.right_rows[i]]; });
  for (int64_t i = 1; is_valid && i < num_rows; ++i) {
    const int32_t row = plan.right_rows[i], previous = plan.right_rows[i - 1];
    is_valid &= row > previous || plan.row_rights[row] != plan.row_rights[previous];
  }
  STD_TORCH_CHECK(is_valid, op, ": plan must be what tt_plan returned for these row_factors");
}

// Check the dtypes, shapes and devices of `left_values`, float32 [any number, left_value_size], the
// values of the first left halves, contiguous, and of `row_grads`, float32 [num_rows or more,
// max_dim].
inline void check_core_grad_inputs(const char* op, const TtTables& tables, int64_t num_rows,
                                   const Tensor& left_values, const Tensor& row_grads) {
  check_dtype(op, "row_grads", row_grads, ScalarType::Float, "float32");
  check_dtype(op, "left_values", left_values, ScalarType::Float, "float32");
  STD_TORCH_CHECK(
      row_grads.dim() == 2 && row_grads.size(0) >= num_rows && row_grads.size(1) == tables.max_dim,
      op, ": row_grads must be [", num_rows, " rows or more, ", tables.max_dim, "], got ",
      row_grads.numel(), " values");
  STD_TORCH_CHECK(left_values.dim() == 2 && left_values.size(1) == tables.left_value_size &&
                      left_values.is_contiguous(),
                  op, ": left_values must be what tt_rows returned for these cores");
  check_same_device(op, "row_grads", row_grads, tables.cores[0][0]);
  check_same_device(op, "left_values", left_values, tables.cores[0][0]);
}

// The outputs of `tt_stored`, allocated here, and its checked arguments, which refer to the outputs
// and to the caller's tensors. The caller must keep these alive. `indices` must be contiguous; this
// is not checked.
struct TtStoredCall {
  Tensor core_ids, stored_rows, counted_keys;
  TtStoredArgs args{};

  TtStoredCall(const char* op, const Tensor& indices, const Tensor& ids, const Tensor& keys,
               const std::optional<Tensor>& slots, const Tensor& row_of_slot)
      : core_ids(allocate(ids, {slots ? ids.numel() : 0}, ScalarType::Long)),
        stored_rows(allocate(ids, {slots ? ids.numel() : 0}, ScalarType::Long)),
        counted_keys(allocate(ids, {ids.numel()}, ScalarType::Long)) {
    check_index_vector(op, "indices", indices);
    std::vector<const Tensor*> inputs{&ids, &keys};
    if (slots) inputs.push_back(&*slots);
    for (const Tensor* input : inputs) {
      STD_TORCH_CHECK(input->numel() == indices.numel(), op,
                      ": ids, keys and slots must have one entry per index = ", indices.numel(),
                      ", got ", input->numel());
    }
    inputs.push_back(&row_of_slot);
    for (const Tensor* input : inputs) {
      check_dtype(op, "ids, keys, slots and row_of_slot", *input, ScalarType::Long, "int64");
      check_same_device(op, "ids, keys, slots and row_of_slot", *input, indices);
      STD_TORCH_CHECK(input->is_contiguous(), op,
                      ": ids, keys, slots and row_of_slot must be contiguous");
    }
    args = {index_array(indices),
            ids.const_data_ptr<int64_t>(),
            keys.const_data_ptr<int64_t>(),
            slots ? slots->const_data_ptr<int64_t>() : nullptr,
            row_of_slot.const_data_ptr<int64_t>(),
            row_of_slot.numel(),
            ids.numel(),
            core_ids.mutable_data_ptr<int64_t>(),
            stored_rows.mutable_data_ptr<int64_t>(),
            counted_keys.mutable_data_ptr<int64_t>()};
  }
};

// Check that the arguments of `tt_count_` are int64, contiguous, on one device, and of sizes that
// fit each other; return them. Messages have the names of the schema. If stored_rows is empty, it
// is null in the result.
inline TtCountArgs tt_count_args(const char* op, const Tensor& counted_keys,
                                 const Tensor& stored_rows, const Tensor& first_lookups,
                                 const Tensor& table_of_feature, Tensor* counters) {
  const Tensor* inputs[] = {&counted_keys, &stored_rows, &first_lookups, &table_of_feature,
                            counters};
  for (const Tensor* input : inputs) {
    check_dtype(op, "each argument", *input, ScalarType::Long, "int64");
    check_same_device(op, "each argument", *input, counted_keys);
    STD_TORCH_CHECK(input->is_contiguous(), op, ": all arguments must be contiguous");
  }
  const int64_t n = counted_keys.numel(), num_features = table_of_feature.numel();
  STD_TORCH_CHECK(stored_rows.numel() == n || stored_rows.numel() == 0, op,
                  ": rows must have one entry per lookup = ", n, " or none, got ",
                  stored_rows.numel());
  STD_TORCH_CHECK(first_lookups.numel() == num_features + 1, op, ": starts must have ",
                  num_features + 1, " entries, got ", first_lookups.numel());
  STD_TORCH_CHECK(counters->dim() == 2 && counters->size(1) >= 2, op,
                  ": counters must be [T, 2 or more], got ", counters->dim(), " dimensions");
  return {counted_keys.const_data_ptr<int64_t>(),
          stored_rows.numel() > 0 ? stored_rows.const_data_ptr<int64_t>() : nullptr,
          n,
          first_lookups.const_data_ptr<int64_t>(),
          table_of_feature.const_data_ptr<int64_t>(),
          num_features,
          counters->size(0),
          static_cast<int64_t*>(counters->mutable_data_ptr()),
          counters->size(1)};
}

// Return the optimizer states of each of `num_cores` cores, at least one, from the list `states`:
// all states of the first core, then all of the second, and so on. Throws if the cores would have
// different numbers of states; the states themselves are not checked.
inline std::vector<std::vector<Tensor>> states_by_core(const char* op,
                                                       const std::vector<Tensor>& states,
                                                       size_t num_cores) {
  STD_TORCH_CHECK(states.size() % num_cores == 0, op,
                  ": states must have the same number of tensors for each of ", num_cores,
                  " cores, got ", states.size());
  const size_t states_per_core = states.size() / num_cores;
  std::vector<std::vector<Tensor>> result;
  for (auto first = states.begin(); result.size() < num_cores; first += states_per_core) {
    result.emplace_back(first, first + states_per_core);
  }
  return result;
}

}  // namespace emb
