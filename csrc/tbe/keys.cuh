// The keys of jagged lookups for `group`: every lookup gets its linear row id and its bag. Skipped
// lookups (index -1, or before the first bag) get the key that belongs to no group.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"
#include "core/search.cuh"
#include "group/segments.cuh"

namespace emb::cuda {

struct LookupKeys {
  const Feature* features;
  IndexArray indices;
  Bags bags;
  BagMap map;
  int32_t* bag_of;  // [L]
};

// Return the linear row id of lookup i in bag `bag`, -1 for none.
EMB_DEVICE int64_t linear_row(const LookupKeys& in, int64_t i, int bag) {
  if (bag < 0) return -1;
  const Feature& feature = in.features[in.map.feature(static_cast<uint32_t>(bag))];
  const int64_t row = repair_index(in.indices[i], feature.rows);
  return row >= 0 && row < feature.rows ? feature.row_base + row : -1;
}

template <class Key>
__global__ void __launch_bounds__(kTileThreads)
    lookup_keys_kernel(LookupKeys in, SortBuffers<Key> sort) {
  __shared__ int range[2];
  const auto start = [&](int bag) { return in.bags.begin(bag); };
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileSize; tile < sort.n;
       tile += static_cast<int64_t>(gridDim.x) * kTileSize) {
    const int64_t end = tile + kTileSize < sort.n ? tile + kTileSize : sort.n;
    const TileSearch search(start, static_cast<int>(in.bags.count), tile, end, range);
    for (int64_t i = tile + threadIdx.x; i < end; i += kTileThreads) {
      const int bag = search.find(start, i);
      const int64_t row = linear_row(in, i, bag);
      const bool valid = row >= 0 && static_cast<uint64_t>(row) < sort.limit;
      sort.keys[i] = valid ? static_cast<Key>(row) : sort.limit;
      sort.positions[i] = static_cast<int32_t>(i);
      in.bag_of[i] = bag < 0 ? 0 : bag;
    }
  }
}

template <class Key, class Launcher>
void launch_lookup_keys(const Launcher& launcher, const LookupKeys& in,
                        const SortBuffers<Key>& sort) {
  if (sort.n == 0) return;
  launcher(lookup_keys_kernel<Key>, blocks_for(sort.n, kTileSize, launcher.blocks(32)),
           kTileThreads, in, sort);
}

}  // namespace emb::cuda
