// Bounds check of a batch of any size on the GPU, in one launch of the kernel that makes the keys
// of lookups (tbe/keys.cuh), here without keys. tbe/check_batch.cuh has another kernel for small
// batches. Repaired offsets are written to a new array. Invalid indices are only counted, because
// kernels repair the indices that they read. Violations are counted on the device. If they are
// fatal, a batch that has any traps the kernel, as a failed assert does.
#pragma once

#include "tbe/keys.cuh"

namespace emb::cuda {

// The arguments of a bounds check. All pointers are to device memory that must live until the
// kernel has run.
struct BoundsArgs {
  IndexArray indices, offsets;     // [num_lookups], [num_bags + 1], with any contents
  const Feature* features;         // [F], trusted
  int64_t num_lookups, num_bags;   // at most kMaxLookups each; num_bags is 0 only without lookups
  BagMap map;                      // trusted
  bool is_fatal;                   // trap at a violation
  unsigned long long* progress;    // [2], scratch, as in BatchCheck; null if it is not needed
  int32_t* repaired_offsets;       // [num_bags + 1], an output, not null
  unsigned long long* violations;  // [2], as in BatchCheck; null if they are not counted
  bool adds_violations = true;     // add to `violations`, else overwrite it
};

// Return whether launch_bounds_check checks the batch with one block; then it does not need
// `progress`.
inline bool checks_with_one_block(int64_t num_lookups, int64_t num_bags) {
  return num_lookups <= kTileLookups && num_bags < kTileLookups;
}

// Write args.repaired_offsets and count violations. `launcher` is a CudaLauncher or, in tests, a
// simt::HostLauncher. Does not wait for the device. The kernel is compiled in group_cuda.cu; other
// files declare launch_lookup_keys as an extern template, as lookup_cuda.cu does.
template <class Launcher>
void launch_bounds_check(const Launcher& launcher, const BoundsArgs& args) {
  const KeySource source{args.features, args.indices,
                         Bags{args.offsets, args.num_bags, args.num_lookups}, args.map, nullptr};
  launch_lookup_keys(launcher, source,
                     {.repaired_offsets = args.repaired_offsets,
                      .copies_valid_offsets = true,
                      .is_fatal = args.is_fatal,
                      .violations = args.violations,
                      .adds_violations = args.adds_violations,
                      .progress = args.progress},
                     SortBuffers<uint32_t>{});
}

}  // namespace emb::cuda
