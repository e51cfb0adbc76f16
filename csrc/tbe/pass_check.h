// Checks of the arguments of `tbe_backward_`, shared by the CPU and the GPU.
#pragma once

#include <optional>
#include <vector>

#include "core/check.h"

namespace emb {

// Raise unless `located` has the six tensors with which a cache's prefetch locates the rows of a
// batch. The tensors themselves are checked by their users.
inline void check_located(const char* op, const std::vector<Tensor>& located) {
  STD_TORCH_CHECK(located.size() == 6, op,
                  ": located must be [rows, segments, lookups, bags, count, row_slots], got ",
                  located.size(), " tensors");
}

}  // namespace emb
