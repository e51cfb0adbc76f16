// Checks of the tensor-train ops: the shape that cores and factors imply, and the plan of a batch.
// Shared by the CPU and CUDA entries; all checks run before anything is written.
#pragma once

#include <vector>

#include "core/check.h"
#include "tt/args.h"

namespace emb {

// Rows of cores and ids of halves are int32 in the plan.
inline constexpr int64_t kMaxTtIds = (int64_t{1} << 31) - 1;
// Digits, keys and the product of all row factors are int64; the margin prevents overflow of sums.
inline constexpr double kMaxTtRows = 4.0e18;

inline TtShape tt_row_shape(const char* op, const std::vector<int64_t>& row_factors) {
  TtShape shape{};
  shape.cores = static_cast<int>(row_factors.size());
  STD_TORCH_CHECK(shape.cores >= 2 && shape.cores <= kMaxCores, op,
                  ": row_factors must have 2 to 4 entries, one a core, got ", row_factors.size());
  double rows = 1.0;
  for (int k = 0; k < shape.cores; ++k) {
    STD_TORCH_CHECK(row_factors[k] >= 1, op, ": row factors must be >= 1, got ", row_factors[k]);
    shape.p[k] = row_factors[k];
    rows *= static_cast<double>(row_factors[k]);
  }
  STD_TORCH_CHECK(rows <= kMaxTtRows, op, ": row_factors must multiply to less than 2^62, got ",
                  rows);
  const TtHalf left = shape.left(), right = shape.right();
  STD_TORCH_CHECK(left.ids() <= kMaxTtIds && right.ids() <= kMaxTtIds, op,
                  ": the row factors of either half must multiply to less than 2^31, got ",
                  left.ids(), " and ", right.ids(), "; use more cores or more even factors");
  return shape;
}

// Check the arguments of `tt_keys`.
inline TtShape tt_table_shape(const char* op, const Tensor& indices, int64_t rows,
                              const std::vector<int64_t>& row_factors) {
  check_index_dtype(op, "indices", indices);
  const TtShape shape = tt_row_shape(op, row_factors);
  const int64_t max_rows = shape.left().ids() * shape.right().ids();
  STD_TORCH_CHECK(rows >= 1 && rows <= max_rows, op,
                  ": rows must be in [1, product of row_factors = ", max_rows, "], got ", rows);
  return shape;
}

// Check the cores and return their shape. Cores are [p_k, R_k q_k R_{k+1}]; the ranks follow from
// their widths.
inline TtShape tt_shape(const char* op, const std::vector<Tensor>& cores,
                        const std::vector<int64_t>& row_factors,
                        const std::vector<int64_t>& dim_factors) {
  TtShape shape = tt_row_shape(op, row_factors);
  STD_TORCH_CHECK(cores.size() == row_factors.size() && dim_factors.size() == row_factors.size(),
                  op, ": cores, row_factors and dim_factors must have one length, got ",
                  cores.size(), ", ", row_factors.size(), " and ", dim_factors.size());
  constexpr int64_t kMaxWidth = int64_t{1} << 30;
  int64_t rank = 1, dim = 1;
  for (int k = 0; k < shape.cores; ++k) {
    const Tensor& core = cores[k];
    check_dtype(op, "each core", core, ScalarType::Float, "float32");
    check_same_device(op, "each core", core, cores[0]);
    STD_TORCH_CHECK(core.dim() == 2 && core.is_contiguous(), op, ": core ", k,
                    " must be a contiguous matrix [p, R q R'], got ", core.dim(), " dimensions");
    STD_TORCH_CHECK(core.size(0) == shape.p[k], op, ": core ", k, " must have row_factors[", k,
                    "] = ", shape.p[k], " rows, got ", core.size(0));
    const int64_t q = dim_factors[k], width = core.size(1);
    STD_TORCH_CHECK(
        q >= 1 && width >= 1 && width <= kMaxWidth && q <= width && width % (rank * q) == 0, op,
        ": core ", k, " has ", width, " columns, which is no multiple of rank * q = ", rank, " * ",
        q);
    shape.q[k] = static_cast<int>(q);
    shape.ranks[k] = static_cast<int>(rank);
    rank = width / (rank * q);
    dim = dim <= kMaxWidth ? dim * q : dim;
  }
  STD_TORCH_CHECK(rank == 1, op, ": the last core must end with rank 1, its width implies ", rank);
  shape.ranks[shape.cores] = 1;
  STD_TORCH_CHECK(dim <= kMaxWidth, op, ": dim_factors must multiply to at most 2^30, got ", dim);
  return shape;
}

inline TtPlan tt_plan_of(const char* op, const std::vector<Tensor>& tensors) {
  STD_TORCH_CHECK(tensors.size() == kTtPlanTensors, op, ": plan must be the ",
                  static_cast<int>(kTtPlanTensors), " tensors that tt_plan returns, got ",
                  tensors.size());
  const int64_t capacity = tensors[kTtRowLefts].numel();
  const int64_t sizes[kTtPlanTensors] = {capacity,     capacity + 1, capacity, capacity,
                                         capacity + 1, capacity,     capacity, 3};
  const int32_t* data[kTtPlanTensors];
  for (int i = 0; i < kTtPlanTensors; ++i) {
    check_dtype(op, "each plan tensor", tensors[i], ScalarType::Int, "int32");
    check_same_device(op, "each plan tensor", tensors[i], tensors[0]);
    STD_TORCH_CHECK(tensors[i].numel() == sizes[i] && tensors[i].is_contiguous(), op,
                    ": plan tensor ", i, " must be contiguous with ", sizes[i], " entries, has ",
                    tensors[i].numel());
    data[i] = tensors[i].const_data_ptr<int32_t>();
  }
  return {capacity,           data[kTtLefts],     data[kTtLeftSegments],
          data[kTtRowLefts],  data[kTtRights],    data[kTtRightSegments],
          data[kTtRowRights], data[kTtRightRows], data[kTtCounts]};
}

// Check the distinct ids of halves, ascending and below `ids`, and the rows of each: segments from
// row 0 to row `rows`, none of them empty.
inline bool halves_fit(const int32_t* halves, const int32_t* segments, int64_t count, int64_t ids,
                       int64_t rows) {
  bool fit = count <= rows && (count > 0 || rows == 0) && segments[0] == 0;
  if (!fit) return false;
  for (int64_t u = 0; u < count; ++u) {
    fit &= halves[u] >= 0 && halves[u] < ids && segments[u] < segments[u + 1];
  }
  for (int64_t u = 1; u < count; ++u) fit &= halves[u - 1] < halves[u];
  return fit && segments[count] == rows;
}

// Check the contents of a plan, on the CPU only: the kernels trust them. This takes a few
// comparisons per row, compared to thousands of multiplications.
inline void check_plan_contents(const char* op, const TtPlan& plan, const TtShape& shape) {
  const int64_t rows = plan.counts[0], lefts = plan.counts[1], rights = plan.counts[2];
  bool fit = rows >= 0 && rows <= plan.capacity && lefts >= 0 && rights >= 0 &&
             halves_fit(plan.lefts, plan.left_segments, lefts, shape.left().ids(), rows) &&
             halves_fit(plan.rights, plan.right_segments, rights, shape.right().ids(), rows);
  for (int64_t u = 0; fit && u < lefts; ++u) {
    for (int32_t j = plan.left_segments[u]; j < plan.left_segments[u + 1]; ++j) {
      fit &= plan.row_lefts[j] == u;
    }
  }
  for (int64_t v = 0; fit && v < rights; ++v) {
    int64_t before = -1;
    for (int32_t t = plan.right_segments[v]; fit && t < plan.right_segments[v + 1]; ++t) {
      const int64_t row = plan.right_rows[t];
      fit = row > before && row < rows && plan.row_rights[row] == v;
      before = row;
    }
  }
  STD_TORCH_CHECK(fit, op, ": plan must be what tt_plan returned for these row_factors");
}

// Check the remaining arguments of `tt_core_grads`; `num_rows` is the minimum number of rows.
inline void check_core_grad_inputs(const char* op, const TtShape& shape, int64_t num_rows,
                                   const Tensor& prefixes, const Tensor& row_grads) {
  check_dtype(op, "row_grads", row_grads, ScalarType::Float, "float32");
  check_dtype(op, "prefixes", prefixes, ScalarType::Float, "float32");
  STD_TORCH_CHECK(
      row_grads.dim() == 2 && row_grads.size(0) >= num_rows && row_grads.size(1) == shape.dim(), op,
      ": row_grads must be [", num_rows, " rows or more, ", shape.dim(), "], got ",
      row_grads.numel(), " values");
  STD_TORCH_CHECK(prefixes.dim() == 2 && prefixes.size(1) == shape.left().value_size() &&
                      prefixes.is_contiguous(),
                  op, ": prefixes must be what tt_rows returned for these cores");
}

}  // namespace emb
