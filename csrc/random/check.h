// Checks of `fill_uniform_`, shared by the CPU and the GPU.
#pragma once

#include <limits>

#include "core/check.h"

namespace emb {

// Return the largest finite number of dtype `type`.
inline double max_finite(Dtype type) {
  if (type == Dtype::kHalf) return 65504.0;
  return type == Dtype::kBfloat16 ? 0x1.FEp127 : double{std::numeric_limits<float>::max()};
}

// Return the dtype of `tensor`. Throws unless `tensor` is contiguous and float32, float16 or
// bfloat16, `low` <= `high`, both are finite in the dtype of `tensor`, and high - low is finite in
// float32. Without these limits kernels would write infinities and NaN.
inline Dtype check_uniform_fill(const char* op, const Tensor& tensor, double low, double high) {
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": tensor must be contiguous");
  const Dtype type = float_dtype(op, "tensor", tensor.scalar_type());
  const double max_value = max_finite(type);
  // Comparisons with NaN are false, so a NaN throws too.
  STD_TORCH_CHECK(low >= -max_value && low <= high && high <= max_value &&
                      high - low <= max_finite(Dtype::kFloat),
                  op, ": low and high must be finite in ", dtype_name(tensor.scalar_type()),
                  ", low <= high, and high - low finite in float32, got ", low, " and ", high);
  return type;
}

}  // namespace emb
