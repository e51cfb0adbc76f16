// Checks of the arguments of the ops that are whole passes, on the CPU and on the GPU.
#pragma once

#include <optional>

#include "core/check.h"

namespace emb {

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

// Check the scalar that says whether a step is made.
inline void check_is_finite(const char* op, const std::optional<Tensor>& is_finite) {
  if (!is_finite) return;
  check_dtype(op, "is_finite", *is_finite, ScalarType::Bool, "bool");
  STD_TORCH_CHECK(is_finite->numel() == 1, op, ": is_finite must be a scalar, got ",
                  is_finite->numel(), " elements");
}

}  // namespace emb
