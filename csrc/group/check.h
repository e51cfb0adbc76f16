// Checks of the arguments of `group` and `group_inverse`, for the CPU and the GPU. Contents are not
// read.
#pragma once

#include "core/check.h"

namespace emb {

// Check the arguments of `group`: `keys` is a vector of int32 or int64 with at most kMaxLookups
// entries, and num_keys is not negative.
inline void check_group_keys(const Tensor& keys, int64_t num_keys) {
  check_index_vector("group", "keys", keys);
  check_not_negative("group", "num_keys", num_keys);
  STD_TORCH_CHECK(keys.numel() <= kMaxLookups, "group: at most ", kMaxLookups,
                  " keys per call, got ", keys.numel());
}

// Check the arguments of `group_inverse`: contiguous int32 tensors of n + 1, n and 1 entries on one
// device.
inline void check_group_inverse(const Tensor& segments, const Tensor& permutation,
                                const Tensor& count) {
  const char* op = "group_inverse";
  for (const Tensor* tensor : {&segments, &permutation, &count}) {
    check_dtype(op, "segments, permutation and count", *tensor, ScalarType::Int,
                "int32, as group returns them");
    STD_TORCH_CHECK(tensor->is_contiguous(), op, ": its arguments must be contiguous");
    check_same_device(op, "segments, permutation and count", *tensor, permutation);
  }
  const int64_t n = permutation.numel();
  STD_TORCH_CHECK(segments.numel() == n + 1, op,
                  ": segments must have one entry more than permutation = ", n + 1, ", got ",
                  segments.numel());
  STD_TORCH_CHECK(count.numel() == 1, op, ": count must have one entry, got ", count.numel());
}

}  // namespace emb
