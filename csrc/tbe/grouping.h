// The grouping of lookups on the GPU, for ops that group on the way: `tbe_group` and
// `tbe_backward_`. The kernels are compiled with group_cuda.cu alone.
#pragma once

#include "core/launch.h"
#include "core/layout.h"
#include "group/segments.cuh"

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

// The result, as `tbe_group` returns it, for n lookups.
struct GroupArrays {
  int64_t* rows;            // [n]
  int32_t* segments;        // [n + 1]
  int32_t *lookups, *bags;  // [n]
  int32_t* count;           // [1]
};

// Group the lookups of a batch on the device of `like`, and count the step of their update.
// Nothing waits for the device. All memory is allocated before the first launch.
void group_lookups(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                   const GroupBatch& batch, const GroupArrays& out, const StepCount& step);

}  // namespace emb::cuda
