// Checks of the arguments of `tbe_backward_`, shared by the CPU and the GPU.
#pragma once

#include <optional>
#include <vector>

#include "core/check.h"
#include "tbe/entries.h"

namespace emb {

// The lengths of the list `located` of a batch: the tensors of a grouping, then, if a cache has
// prefetched the batch, the cache slot of each row.
inline constexpr int kLocatedRowSlots = kGroupTensors, kLocatedTensors = kGroupTensors + 1;

// Check the length of `located`. If `needs_slots`, a list without row_slots is refused. The
// functions that use the tensors check them.
inline void check_located(const char* op, const std::vector<Tensor>& located,
                          bool needs_slots = true) {
  STD_TORCH_CHECK(
      located.size() == kLocatedTensors || (!needs_slots && located.size() == kGroupTensors), op,
      ": located must be [rows, segments, lookups, bags, count, row_slots], got ", located.size(),
      " tensors");
}

}  // namespace emb
