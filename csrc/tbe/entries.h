// Entries of table-batched embeddings that other entries call, on the CPU and on the GPU.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/feature_bags.h"

namespace emb {

// The five tensors of a grouping, as `tbe_group` returns them.
struct Grouping {
  const Tensor &rows, &segments, &lookups, &bags, &count;
};

// `repaired` says that `offsets` never decrease and end with the number of indices, as
// `bounds_check` returns them.
std::tuple<Tensor, Tensor> bounds_check(const Tensor& indices, const Tensor& offsets,
                                        const Tensor& features, std::optional<Tensor> bag_layout,
                                        int64_t mode);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(const Tensor& features,
                                                             const Tensor& indices,
                                                             const Tensor& offsets,
                                                             std::optional<Tensor> bag_layout,
                                                             int64_t total_rows, bool repaired);

Tensor tbe_lookup(std::vector<Tensor> weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> slots,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, int64_t columns, ScalarType output_dtype);

// Check the mode of a bounds check, if there is one, and the counters that it adds to.
inline std::optional<BoundsMode> check_bounds_arguments(const char* op,
                                                        const std::optional<int64_t>& mode,
                                                        const Tensor& violations) {
  check_dtype(op, "violations", violations, ScalarType::Long, "int64");
  STD_TORCH_CHECK(violations.numel() == 2 && violations.is_contiguous(), op,
                  ": violations must be 2 contiguous numbers, got ", violations.numel());
  if (!mode) return std::nullopt;
  return parse_choice<BoundsMode>(op, "mode", *mode, kBoundsModes);
}

// Return whether neither indices nor offsets of a batch need a repair or a report.
bool is_valid_batch(const Tensor& features, IndexArray indices, const Bags& bags,
                    const FeatureBags& feature_bags);

// Sum the gradients of the lookups of each group into row `group` of `out`, [L, dim].
void sum_row_grads(const char* op, const Tensor& grad, const Tensor& features,
                   const Grouping& groups, const Tensor& offsets,
                   const std::optional<Tensor>& bag_layout,
                   const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t dim,
                   float* out);

namespace cuda {

// A grouping of n lookups, as `tbe_group` returns it.
struct GroupArrays {
  int64_t* rows;            // [n]
  int32_t* segments;        // [n + 1]
  int32_t *lookups, *bags;  // [n]
  int32_t* count;           // [1]
};

Tensor bounds_check_(const Tensor& indices, const Tensor& offsets, const Tensor& features,
                     std::optional<Tensor> bag_layout, int64_t mode_code, Tensor violations);

// `tbe_group` into memory of the caller.
void group_lookups(const char* op, const Tensor& features, const Tensor& indices,
                   const Tensor& offsets, const std::optional<Tensor>& bag_layout,
                   int64_t total_rows, bool repaired, const GroupArrays& out);

Tensor tbe_lookup(std::vector<Tensor> weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> slots,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, int64_t columns, ScalarType output_dtype);

// `tbe_row_grads` into memory of the caller: of the rows of groups, their columns alone.
void sum_row_grads(const char* op, const Tensor& grad, const Tensor& features,
                   const Tensor& indices, const GroupArrays& groups, const Tensor& offsets,
                   const std::optional<Tensor>& bag_layout,
                   const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t dim,
                   float* out);

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(const Tensor& features,
                                                             const Tensor& indices,
                                                             const Tensor& offsets,
                                                             std::optional<Tensor> bag_layout,
                                                             int64_t total_rows, bool repaired);

}  // namespace cuda
}  // namespace emb
