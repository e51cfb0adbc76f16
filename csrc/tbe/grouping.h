// The grouping of lookups on the GPU as a function, for `tbe_group` and for ops that group as a
// part of a training step. The kernels are compiled in group_cuda.cu only. The function does not
// wait for the device.
#pragma once

#include "core/device_arrays.h"
#include "core/launch.h"
#include "core/layout.h"
#include "group/segments.cuh"
#include "tbe/entries.h"

namespace emb::cuda {

// A batch whose lookups are to be grouped. All pointers are to device memory, which must live until
// the kernels have run; shapes have been checked.
struct GroupBatch {
  const Feature* features;  // [F]
  IndexArray indices;       // [L], repaired as they are read
  Bags bags;
  BagMap map;
  int64_t total_rows;      // above all linear row ids: at least row_base + rows of every feature
  bool has_valid_offsets;  // bags.offsets are a result of `bounds_check`, so they are not checked
                           // again
};

// Write the grouping of a batch to `out`, and count the step of its update in `step`; with `{}` as
// `step` no step is counted. `like` is a tensor on the device. Scratch memory is one allocation of
// torch, made before the first launch, so that a failure launches nothing.
//
// A small batch is grouped in one launch of a cluster of blocks (group/small_group.cuh). It has up
// to kMaxSmallGroup lookups, or up to 2,048 on GPUs without clusters, and up to kMaxSmallBags bags.
// Larger batches, and any with total_rows of 2^32 - 1 or more, need a kernel that makes keys, CUB's
// sort, and two kernels over the sorted keys. The last kernel counts the step.
void group_lookups(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                   const GroupBatch& batch, const GroupArrays& out, const StepCount& step);

}  // namespace emb::cuda
