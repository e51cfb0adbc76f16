// What the tensor-train ops are given: the shape that cores and factors imply, and the plan of a
// batch. Checks run before anything is written. Shared by the CPU and CUDA entries.
#pragma once

#include <vector>

#include "core/check.h"
#include "tt/shape.h"

namespace emb {

// Rows of cores and ids of halves are int32 in the plan.
inline constexpr int64_t kMaxTtIds = (int64_t{1} << 31) - 1;
// Digits, keys and the product of all row factors are int64; the margin keeps sums from wrapping.
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
  STD_TORCH_CHECK(rows <= kMaxTtRows, op, ": row_factors must multiply to less than 2^62, got ", rows);
  const TtHalf left = shape.left(), right = shape.right();
  STD_TORCH_CHECK(left.ids() <= kMaxTtIds && right.ids() <= kMaxTtIds, op,
                  ": the row factors of either half must multiply to less than 2^31, got ",
                  left.ids(), " and ", right.ids(), "; use more cores or more even factors");
  return shape;
}

// Cores are [p_k, R_k q_k R_{k+1}]; the ranks follow from their widths.
inline TtShape tt_shape(const char* op, const std::vector<Tensor>& cores,
                        const std::vector<int64_t>& row_factors,
                        const std::vector<int64_t>& dim_factors) {
  TtShape shape = tt_row_shape(op, row_factors);
  STD_TORCH_CHECK(cores.size() == row_factors.size() && dim_factors.size() == row_factors.size(), op,
                  ": cores, row_factors and dim_factors must have one length, got ", cores.size(),
                  ", ", row_factors.size(), " and ", dim_factors.size());
  constexpr int64_t kMaxWidth = int64_t{1} << 30;
  int64_t rank = 1;
  for (int k = 0; k < shape.cores; ++k) {
    const Tensor& core = cores[k];
    check_dtype(op, "each core", core, ScalarType::Float, "float32");
    check_same_device(op, "each core", core, cores[0]);
    STD_TORCH_CHECK(core.dim() == 2 && core.is_contiguous(), op, ": core ", k,
                    " must be a contiguous matrix [p, R q R'], got ", core.dim(), " dimensions");
    STD_TORCH_CHECK(core.size(0) == shape.p[k], op, ": core ", k, " must have row_factors[", k,
                    "] = ", shape.p[k], " rows, got ", core.size(0));
    const int64_t q = dim_factors[k], width = core.size(1);
    STD_TORCH_CHECK(q >= 1 && width >= 1 && width <= kMaxWidth && width % (rank * q) == 0, op,
                    ": core ", k, " has ", width, " columns, which is no multiple of rank * q = ",
                    rank, " * ", q);
    shape.q[k] = static_cast<int>(q);
    shape.ranks[k] = static_cast<int>(rank);
    rank = width / (rank * q);
  }
  STD_TORCH_CHECK(rank == 1, op, ": the last core must end with rank 1, its width implies ", rank);
  shape.ranks[shape.cores] = 1;
  return shape;
}

// The grouping of a batch's distinct rows by their halves, as `tt_plan` returns it. Rows j are in
// key order, so the rows of left half u are [left_segments[u], left_segments[u + 1]); the rows of
// right half v are right_rows[right_segments[v]], .., ascending. Entries after the counts are 0.
struct TtPlan {
  int64_t capacity;  // rows the tensors have room for, L
  const int32_t *lefts, *left_segments, *row_lefts;
  const int32_t *rights, *right_segments, *row_rights, *right_rows;
  const int32_t* counts;  // distinct rows M, left halves U, right halves V
};

inline constexpr size_t kTtPlanTensors = 8;

inline TtPlan tt_plan_of(const char* op, const std::vector<Tensor>& tensors) {
  STD_TORCH_CHECK(tensors.size() == kTtPlanTensors, op, ": plan must be the ", kTtPlanTensors,
                  " tensors that tt_plan returns, got ", tensors.size());
  const int64_t capacity = tensors[2].numel();
  const int64_t sizes[kTtPlanTensors] = {capacity, capacity + 1, capacity, capacity,
                                         capacity + 1, capacity, capacity, 3};
  const int32_t* data[kTtPlanTensors];
  for (size_t i = 0; i < kTtPlanTensors; ++i) {
    check_dtype(op, "each plan tensor", tensors[i], ScalarType::Int, "int32");
    check_same_device(op, "each plan tensor", tensors[i], tensors[0]);
    STD_TORCH_CHECK(tensors[i].numel() == sizes[i] && tensors[i].is_contiguous(), op,
                    ": plan tensor ", i, " must be contiguous with ", sizes[i], " entries, has ",
                    tensors[i].numel());
    data[i] = tensors[i].const_data_ptr<int32_t>();
  }
  return {capacity, data[0], data[1], data[2], data[3], data[4], data[5], data[6], data[7]};
}

}  // namespace emb
