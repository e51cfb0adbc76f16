// The grouping of lookups on the GPU, for entries that have checked their arguments: `tbe_group`,
// and ops that group as a part of a training step. The kernels are compiled in group_cuda.cu only.
#pragma once

#include "core/device_arrays.h"
#include "core/launch.h"
#include "core/layout.h"
#include "group/segments.cuh"
#include "tbe/entries.h"

namespace emb::cuda {

// The batch whose lookups are grouped. All pointers are to device memory, which must live until the
// kernels have run. Shapes must have been checked; contents need not be, but `features` and `map`
// are trusted.
struct GroupInput {
  const Feature* features;  // [F]
  IndexArray indices;       // [L], repaired as they are read
  Bags bags;
  BagMap map;
  int64_t total_rows;      // >= 0; lookups of linear row ids from this number on are skipped
  bool has_valid_offsets;  // whether bags.offsets, a result of `bounds_check`, need no repair
};

// Launch the kernels that write the grouping of a batch to `out`. They count the step of the update
// in `step`; with `{}` they count none. If the value at step.is_finite is false, *out.num_groups
// becomes 0 and no step is counted. `like` is a tensor on the device. Scratch memory is one
// allocation of torch before the first launch, so that a call that fails to allocate has launched
// nothing. Does not wait for the device.
//
// A small batch is grouped in one launch of a cluster of blocks (group/small_group.cuh). It has up
// to kMaxSmallGroup lookups, or up to 2,048 on GPUs without clusters, and up to kMaxSmallBags bags.
// Larger batches, and those with total_rows of 2^32 - 1 or more, need a kernel that makes keys,
// CUB's sort, and two kernels over the sorted keys.
void group_lookups(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                   const GroupInput& batch, const DeviceGrouping& out, const StepCount& step);

}  // namespace emb::cuda
