// Checks of the arguments of the ops that are whole passes, on the CPU and on the GPU.
#pragma once

#include <optional>
#include <vector>

#include "core/check.h"

namespace emb {

// Check the number of tensors of rows that a cache has located.
inline void check_located(const char* op, const std::vector<Tensor>& located) {
  STD_TORCH_CHECK(located.size() == 6, op,
                  ": located must be [rows, segments, lookups, bags, count, row_slots], got ",
                  located.size(), " tensors");
}

}  // namespace emb
