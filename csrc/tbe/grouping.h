// The grouping of lookups on the GPU, for ops that group on the way: `tbe_group` and steps of
// training. The kernels are compiled with group_cuda.cu alone. Nothing waits for the device.
#pragma once

#include "core/device_arrays.h"
#include "core/launch.h"
#include "core/layout.h"
#include "group/segments.cuh"
#include "tbe/entries.h"

namespace emb::cuda {

// A batch whose lookups are grouped by linear row id, which is below `total_rows`.
struct GroupBatch {
  const Feature* features;
  IndexArray indices;
  Bags bags;
  BagMap map;
  int64_t total_rows;
  bool repaired;  // whether `bags.offsets` is what `bounds_check` returned
};

// Group the lookups of a batch on the device of `like`, and count the step of their update. All
// memory is allocated before the first launch, in one piece.
//
// Up to kMaxSmallGroup lookups one launch on GPUs with clusters of blocks. Above, without them
// above 2,048, and for total_rows of 2^32 - 1 and more: a pass that makes keys, CUB's sort, and two
// passes over the sorted keys. The last of them counts the step.
void group_lookups(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                   const GroupBatch& batch, const GroupArrays& out, const StepCount& step);

}  // namespace emb::cuda
