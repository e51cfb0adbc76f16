// Checks of `fill_uniform_`, shared by the CPU and the GPU.
#pragma once

#include <cmath>

#include "core/check.h"

namespace emb {

// Return the dtype of `tensor`. Throws unless `tensor` is contiguous and float32, float16 or
// bfloat16, and `low` <= `high`, both finite.
inline Dtype check_uniform_fill(const char* op, const Tensor& tensor, double low, double high) {
  STD_TORCH_CHECK(tensor.is_contiguous(), op, ": tensor must be contiguous");
  STD_TORCH_CHECK(std::isfinite(low) && std::isfinite(high) && low <= high, op,
                  ": low and high must be finite and low <= high, got ", low, " and ", high);
  return float_dtype(op, "tensor", tensor.scalar_type());
}

}  // namespace emb
