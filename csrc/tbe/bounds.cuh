// Bounds check of indices and offsets on the GPU, in one launch: the pass that makes the keys of
// lookups (tbe/keys.cuh), without keys. Offsets are repaired into a new array. Violations are
// counted on the device; in the fatal mode the kernel fails as an assert does.
#pragma once

#include "tbe/keys.cuh"

namespace emb::cuda {

struct BoundsArgs {
  IndexArray indices, offsets;
  const Feature* features;
  int64_t num_lookups, num_bags;
  BagMap map;
  bool fatal;
  unsigned long long* progress;    // [2], scratch; null will do for `checks_with_one_block`
  int32_t* repaired;               // [num_bags + 1]
  unsigned long long* violations;  // [2]: indices, offsets; null to count none
  bool adds = true;                // counts are added to `violations`, else they replace it
};

inline bool checks_with_one_block(int64_t num_lookups, int64_t num_bags) {
  return num_lookups <= kKeyTile && num_bags < kKeyTile;
}

template <class Launcher>
void launch_bounds_check(const Launcher& launcher, const BoundsArgs& args) {
  const LookupKeys in{args.features, args.indices,
                      Bags{args.offsets, args.num_bags, args.num_lookups}, args.map, nullptr};
  launch_lookup_keys(launcher, in,
                     {args.repaired, true, args.fatal, args.violations, args.adds, args.progress},
                     SortBuffers<uint32_t>{});
}

}  // namespace emb::cuda
