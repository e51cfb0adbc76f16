// The grouping of lookups on the GPU, for ops that group on the way: `tbe_group` and steps of
// training. The kernels are compiled with group_cuda.cu alone. Nothing waits for the device.
#pragma once

#include "core/device_arrays.h"
#include "core/launch.h"
#include "core/layout.h"
#include "group/segments.cuh"
#include "tbe/offsets.cuh"

namespace emb::cuda {

// A batch whose lookups are grouped by linear row id, which is below `total_rows`.
struct GroupBatch {
  const Feature* features;
  IndexArray indices;
  Bags bags;
  BagMap map;
  int64_t total_rows;
  bool repaired;  // whether `bags.offsets` is what `bounds_check` returned
  // Of offsets that are not: with `check.repaired` the caller gets them repaired, and violations
  // are counted on the way. The default repairs into scratch. `check.progress` is set by the
  // grouping.
  BatchCheck check = {};
};

// The result, as `tbe_group` returns it, for n lookups. What is not wanted may be null.
struct GroupArrays {
  int64_t* rows;            // [n]
  int32_t* segments;        // [n + 1]
  int32_t *lookups, *bags;  // [n]
  int32_t* count;           // [1]
  // [n] linear row id of each sorted lookup, total_rows of a skipped one: uint32, or uint64 where
  // needs_wide_keys(total_rows)
  void* sorted_rows = nullptr;
};

// Which of them to write. Fewer are less work: an update that finds the runs of equal sorted rows
// itself needs no groups, and of lookups and bags one alone goes through the sort of a large batch,
// while both take another pass.
struct GroupWants {
  bool groups = true;  // rows, segments and count
  bool lookups = true, bags = true;
  bool sorted_rows = false;
};

// A grouping whose scratch is part of an allocation of the caller, which `arrays` may be part of:
// they are read by `run`.
class LookupGrouping {
 public:
  LookupGrouping(const CudaLauncher& launcher, const GroupBatch& batch, const GroupWants& wants);
  LookupGrouping(const LookupGrouping&) = delete;
  LookupGrouping& operator=(const LookupGrouping&) = delete;

  bool needs_scratch() const { return !is_small_ || repairs_into_scratch(); }
  void add_scratch(DeviceArrays* scratch);

  // Up to kMaxSmallGroup lookups one launch on GPUs with clusters of blocks. Above, without them
  // above 2,048, and for total_rows of 2^32 - 1 and more: a pass that makes keys, CUB's sort, and
  // for groups two passes over the sorted keys. The last of them counts the step: without groups
  // none is counted.
  void run(const GroupArrays& arrays, const StepCount& step);

 private:
  bool repairs_into_scratch() const { return !batch_.repaired && batch_.check.repaired == nullptr; }
  template <class Key>
  void add_sort(DeviceArrays* scratch);
  template <class Key>
  void run_sort(const BatchCheck& check, const GroupArrays& arrays, const StepCount& step);

  const CudaLauncher& launcher_;
  GroupBatch batch_;
  GroupWants wants_;
  bool is_small_;
  // Scratch; null where it is not needed.
  int32_t *repaired_ = nullptr, *positions_ = nullptr, *bag_of_ = nullptr;
  int32_t* range_counts_ = nullptr;
  unsigned long long* progress_ = nullptr;
  char *keys_ = nullptr, *sorted_keys_ = nullptr, *sort_scratch_ = nullptr;
};

// Group the lookups of a batch on the device of `like`, and count the step of their update. All
// memory is allocated before the first launch, in one piece.
void group_lookups(const CudaLauncher& launcher, const torch::stable::Tensor& like,
                   const GroupBatch& batch, const GroupArrays& out, const StepCount& step);

}  // namespace emb::cuda
