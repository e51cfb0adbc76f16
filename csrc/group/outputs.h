// The tensors that a grouping returns on the CPU; shared by `group` and `tbe_group`.
#pragma once

#include "core/check.h"
#include "group/group_items.h"

namespace emb {

struct GroupTensors {
  Tensor unique, segments, permutation, count;

  GroupTensors(const Tensor& like, int64_t n, ScalarType unique_type)
      : unique(allocate(like, {n}, unique_type)),
        segments(allocate(like, {n + 1}, ScalarType::Int)),
        permutation(allocate(like, {n}, ScalarType::Int)),
        count(allocate(like, {1}, ScalarType::Int)) {}

  GroupOutput output() const {
    return {unique.mutable_data_ptr(), unique.scalar_type() == ScalarType::Long,
            segments.mutable_data_ptr<int32_t>(), permutation.mutable_data_ptr<int32_t>(),
            count.mutable_data_ptr<int32_t>()};
  }
};

}  // namespace emb
