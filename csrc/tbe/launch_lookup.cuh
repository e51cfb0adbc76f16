// Which kernel a lookup takes, and how many lanes a row and blocks a grid it gets. What the
// features hold is known on the device only, so lanes follow the mean width; any choice gives the
// same result.
#pragma once

#include "tbe/long_bags.cuh"
#include "tbe/lookup.cuh"
#include "tbe/mixed_rows.cuh"
#include "tbe/short_bags.cuh"

namespace emb::cuda {

// `launcher` is a CudaLauncher or, in tests, a simt::HostLauncher.
template <class W, class Launcher>
void launch_lookup_of(const Launcher& launcher, const LookupArgs& args) {
  constexpr int N = 16 / sizeof(W);
  const int64_t mean_dim = mean_width(args);
  const int lanes = lanes_for(mean_dim, N), groups = static_cast<int>(simt::kWarp) / lanes;
  const unsigned stripes = blocks_for(mean_dim, lanes * N, 64);
  const auto start = [&](auto kernel, int64_t items, int items_of_warp, int threads) {
    const int64_t items_of_block = items_of_warp * (threads / static_cast<int>(simt::kWarp));
    const unsigned blocks = blocks_for(items, items_of_block, launcher.blocks(256));
    launcher(kernel, simt::Dim3(blocks, stripes), simt::Dim3(threads), args, lanes);
  };
  if (args.pooling == Pooling::kNone) {
    start(sequence_kernel<W>, args.bags.num_lookups, simt::kWarp, kLookupThreads);
  } else if (has_short_bags(args)) {
    start(short_bags_kernel<W>, args.bags.count, groups * kBagsInFlight, kShortBagThreads);
  } else if (has_long_bags(args, lanes)) {
    const int warps = kLookupThreads / static_cast<int>(simt::kWarp);
    start(long_bags_kernel<W>, args.bags.count * warps, 1, kLookupThreads);
  } else {
    start(pool_kernel<W>, args.bags.count, groups, kLookupThreads);
  }
}

template <class Launcher>
void launch_lookup(const Launcher& launcher, const LookupArgs& args) {
  if (args.columns == 0) return;
  if (has_mixed_rows(args)) {
    launch_mixed_lookup(launcher, args);
  } else if (args.weight_type == Dtype::kFloat) {
    launch_lookup_of<float>(launcher, args);
  } else if (args.weight_type == Dtype::kHalf) {
    launch_lookup_of<half16>(launcher, args);
  } else {
    launch_lookup_of<bfloat16>(launcher, args);
  }
}

}  // namespace emb::cuda
