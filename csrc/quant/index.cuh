// `map_ids` on the GPU, with one thread per id.
#pragma once

#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "quant/index.h"

namespace emb::cuda {

inline constexpr int kMapThreads = 256;

// Write args.rows, grid-stride over lookups.
__global__ void map_ids_kernel(IndexArgs args) {
  for (int64_t i = simt::global_thread(); i < args.bags.num_lookups; i += simt::threads_in_grid()) {
    const int64_t id = args.ids[i];
    if (args.bags.num_bags == 0 || i < args.bags.begin(0)) {
      args.rows[i] = id;  // a lookup of no bag, which the bounds check of the rows finds
      continue;
    }
    const IndexTable& table =
        args.tables[feature_of_lookup(args.map, args.bags, args.num_features, i)];
    args.rows[i] = stored_row(args.index, table, id, index_address(args.index, table, id));
  }
}

// Write args.rows. `launcher` is a CudaLauncher or, in tests, a simt::HostLauncher. Does not wait
// for the device.
template <class Launcher>
void launch_map_ids(const Launcher& launcher, const IndexArgs& args) {
  if (args.bags.num_lookups == 0) return;
  const unsigned num_blocks = blocks_for(args.bags.num_lookups, kMapThreads,
                                         launcher.max_grid_blocks(2 * kResidentBlocksPerSm));
  launcher(map_ids_kernel, num_blocks, kMapThreads, args);
}

}  // namespace emb::cuda
