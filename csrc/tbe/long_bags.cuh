// Pooled lookup where bags are long and few. A group of lanes a bag would leave most of the GPU
// idle, so a block takes a bag: each of its groups sums a stretch of the lookups, then the
// stretches are added in order.
#pragma once

#include "tbe/lookup.cuh"

namespace emb::cuda {

// One group's stretch of a bag that the whole block shares; stretches have `share` lookups but for
// the last.
EMB_DEVICE BagTask stretch_of(const BagTask& bag, int stretch, int share) {
  BagTask part = bag;
  const int rest = bag.length - stretch * share;
  part.begin += stretch * share;
  part.length = rest < 0 ? 0 : rest < share ? rest : share;
  return part;
}

template <class W>
__global__ void __launch_bounds__(kLookupThreads, 3) long_bags_kernel(LookupArgs args, int lanes) {
  constexpr int N = 16 / sizeof(W);
  __shared__ float stretch_sum[kLookupThreads][N];
  const LaneGroup lane(lanes);
  const int stretches = kLookupThreads / lanes;
  const auto bags = static_cast<uint32_t>(args.bags.count);
  for (uint32_t bag = blockIdx.x; bag < bags; bag += gridDim.x) {
    const BagTask task(args, bag);
    const int share = (task.length + stretches - 1) / stretches;
    const BagTask part = stretch_of(task, static_cast<int>(threadIdx.x) / lanes, share);
    const bool vector = has_whole_vectors<W>(args, *task.feature);
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < task.dim;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      const int column = base + lane.rank * N;
      float sum[N] = {};
      if (vector) {
        sum_bag<W, N, true>(args, part, lane, column, share, sum);
      } else {
        sum_bag<W, N, false>(args, part, lane, column, share, sum);
      }
#pragma unroll
      for (int e = 0; e < N; ++e) stretch_sum[threadIdx.x][e] = sum[e];
      __syncthreads();
      if (static_cast<int>(threadIdx.x) < lanes) {
        for (int s = 1; s < stretches; ++s) {
#pragma unroll
          for (int e = 0; e < N; ++e) sum[e] += stretch_sum[s * lanes + threadIdx.x][e];
        }
        write_bag(args, task, bag, column, sum);
      }
      __syncthreads();
    }
  }
}

// Whether blocks should share bags: they are long, and too few to give each warp of a GPU one. No
// property of the device enters, so that a result has the same bits on every GPU.
inline bool has_long_bags(const LookupArgs& args, int lanes) {
  constexpr int64_t kLong = 64, kEnoughLanes = 1 << 17;
  return args.bags.num_lookups >= kLong * args.bags.count && args.bags.count * lanes < kEnoughLanes;
}

}  // namespace emb::cuda
