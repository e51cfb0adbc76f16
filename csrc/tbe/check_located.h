// The check of the list `located` of `tbe_backward_`, shared by the CPU and the GPU.
#pragma once

#include <optional>
#include <vector>

#include "core/check.h"
#include "tbe/entries.h"

namespace emb {

// The list has the tensors of a grouping and, if a cache has prefetched the batch, the cache slot
// of each row at this position.
inline constexpr int kLocatedRowSlots = kNumGroupTensors, kNumLocatedTensors = kNumGroupTensors + 1;

// Throw unless the list has kNumLocatedTensors tensors or, if not `needs_slots`, only those of a
// grouping. The tensors themselves are not checked here.
inline void check_located(const char* op, const std::vector<Tensor>& located,
                          bool needs_slots = true) {
  STD_TORCH_CHECK(
      located.size() == kNumLocatedTensors || (!needs_slots && located.size() == kNumGroupTensors),
      op, ": located must be [rows, segments, lookups, bags, count, row_slots], got ",
      located.size(), " tensors");
}

}  // namespace emb
