// Bounds check of indices and offsets on the GPU, in one launch of the kernel that makes the keys
// of lookups (tbe/keys.cuh), here without keys. Repaired offsets are written to a new array.
// Invalid indices are only counted, because kernels repair the indices that they read. Violations
// are counted on the device; if they are fatal, the kernel traps instead, as a failed assert does.
#pragma once

#include "tbe/keys.cuh"

namespace emb::cuda {

// The arguments of a bounds check. All pointers are to device memory that must live until the
// kernel has run.
struct BoundsArgs {
  IndexArray indices, offsets;    // [num_lookups], [num_bags + 1]
  const Feature* features;        // [F], contents not checked
  int64_t num_lookups, num_bags;  // num_bags is 0 only without lookups
  BagMap map;
  bool is_fatal;                   // trap at a violation
  unsigned long long* progress;    // [2], scratch; may be null if `checks_with_one_block`
  int32_t* repaired_offsets;       // [num_bags + 1], an output
  unsigned long long* violations;  // [2], as in BatchCheck; null if they are not counted
  bool adds_violations = true;     // add to `violations`, else overwrite it
};

// Return whether launch_bounds_check checks the batch with one block, which needs no `progress`.
inline bool checks_with_one_block(int64_t num_lookups, int64_t num_bags) {
  return num_lookups <= kKeyTile && num_bags < kKeyTile;
}

// Write args.repaired_offsets and count violations; `launcher` is a CudaLauncher or a
// simt::HostLauncher. Does not wait for the device.
template <class Launcher>
void launch_bounds_check(const Launcher& launcher, const BoundsArgs& args) {
  const LookupKeys in{args.features, args.indices,
                      Bags{args.offsets, args.num_bags, args.num_lookups}, args.map, nullptr};
  launch_lookup_keys(launcher, in,
                     {.repaired_offsets = args.repaired_offsets,
                      .copies_valid_offsets = true,
                      .is_fatal = args.is_fatal,
                      .violations = args.violations,
                      .adds_violations = args.adds_violations,
                      .progress = args.progress},
                     SortBuffers<uint32_t>{});
}

}  // namespace emb::cuda
