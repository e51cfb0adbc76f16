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

}  // namespace emb
