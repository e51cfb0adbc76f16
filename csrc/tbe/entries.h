// Entries of table-batched embeddings on the CPU that other entries call.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "core/check.h"

namespace emb {

// The five tensors of a grouping, as `tbe_group` returns them.
struct Grouping {
  const Tensor &rows, &segments, &lookups, &bags, &count;
};

// `repaired` says that `offsets` never decrease and end with the number of indices, as
// `bounds_check` returns them.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(const Tensor& features,
                                                             const Tensor& indices,
                                                             const Tensor& offsets,
                                                             std::optional<Tensor> bag_layout,
                                                             int64_t total_rows, bool repaired);

Tensor tbe_lookup(std::vector<Tensor> weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> slots,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, int64_t columns, ScalarType output_dtype);

// Sum the gradients of the lookups of each group into row `group` of `out`, [L, dim].
void sum_row_grads(const char* op, const Tensor& grad, const Tensor& features,
                   const Grouping& groups, const Tensor& offsets,
                   const std::optional<Tensor>& bag_layout,
                   const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t dim,
                   float* out);

}  // namespace emb
