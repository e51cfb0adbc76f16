// The entry of `tbe_group` on the CPU, for `tbe_backward_`.
#pragma once

#include <optional>
#include <tuple>

#include "core/check.h"

namespace emb {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(const Tensor& features,
                                                             const Tensor& indices,
                                                             const Tensor& offsets,
                                                             std::optional<Tensor> bag_layout,
                                                             int64_t total_rows);

}  // namespace emb
