// Pooled lookup where bags are short (a lookup or a few each, as in click logs). Then rows of one
// bag cannot fill the memory system, so a group of lanes takes four bags at once and has a row of
// each in flight. Every lane of the warp looks after one bag's metadata and indices; the groups
// fetch them by shuffles. A bag's rows are still added in order.
#pragma once

#include "tbe/lookup.cuh"

namespace emb::cuda {

inline constexpr int kBagsInFlight = 4;
inline constexpr int kShortBagThreads = 128;

// Where row `step` of each lane's bag starts, in elements from the weights, and its weight.
struct StepRow {
  int64_t offset = -1;
  float weight = 0.0f;

  EMB_DEVICE StepRow(const LookupArgs& args, const BagTask& task, const LookupId& id, int step) {
    if (step >= task.length) return;
    offset = row_offset(args, *task.feature, id);
    if (offset < 0) return;
    weight = args.sample_weights ? args.sample_weights[task.begin + step] : 1.0f;
  }
};

// Sums this lane's columns of the group's bags; bag s of the group belongs to lane
// s * groups + group.
template <class W, int N, bool kVector>
EMB_DEVICE void sum_short_bags(const LookupArgs& args, const BagTask& task, const LaneGroup& lane,
                               int column, int longest, float (&sum)[kBagsInFlight][N]) {
  const W* weights = static_cast<const W*>(args.weights) + column;
  const auto id_at = [&](int i) {
    return i < task.length ? LookupId(args, task.begin + i) : LookupId();
  };
  LookupId id = id_at(0);
  for (int step = 0; step < longest; ++step) {
    const StepRow mine(args, task, id, step);
    id = id_at(step + 1);
    Piece<W, N> piece[kBagsInFlight];
#pragma unroll
    for (int s = 0; s < kBagsInFlight; ++s) {
      const int owner = s * lane.groups_in_warp() + lane.group;
      const int64_t row = __shfl_sync(simt::kFullMask, mine.offset, owner);
      const int valid = __shfl_sync(simt::kFullMask, task.dim, owner) - column;
      if (row >= 0 && valid > 0) piece[s].template load<kVector>(weights + row, valid);
    }
#pragma unroll
    for (int s = 0; s < kBagsInFlight; ++s) {
      const int owner = s * lane.groups_in_warp() + lane.group;
      const float weight = __shfl_sync(simt::kFullMask, mine.weight, owner);
#pragma unroll
      for (int e = 0; e < N; ++e) sum[s][e] += weight * piece[s][e];
    }
  }
}

// Writes this lane's columns of the group's bags.
template <int N>
EMB_DEVICE void write_short_bags(const LookupArgs& args, const BagTask& task, const LaneGroup& lane,
                                 uint32_t bag, int column, float (&sum)[kBagsInFlight][N]) {
  const int64_t place = task.dim > 0 ? args.map.element(bag, task.feature->column) : 0;
  const bool mean = args.pooling == Pooling::kMean && task.length > 0;
  const float scale = mean ? 1.0f / static_cast<float>(task.length) : 1.0f;
#pragma unroll
  for (int s = 0; s < kBagsInFlight; ++s) {
    const int owner = s * lane.groups_in_warp() + lane.group;
    const int64_t out = __shfl_sync(simt::kFullMask, place, owner) + column;
    const int valid = __shfl_sync(simt::kFullMask, task.dim, owner) - column;
    const float factor = __shfl_sync(simt::kFullMask, scale, owner);
    if (valid <= 0) continue;
#pragma unroll
    for (int e = 0; e < N; ++e) sum[s][e] *= factor;
    write_columns(args.output, args.output_type, out, valid, sum[s]);
  }
}

// 72 registers a thread for float, where a lane sums 4 x 4 columns, and 96 for 4 x 8 of 16 bits.
template <class W>
__global__ void __launch_bounds__(kShortBagThreads, sizeof(W) == 4 ? 7 : 5)
    short_bags_kernel(LookupArgs args, int lanes) {
  constexpr int N = 16 / sizeof(W);
  const LaneGroup lane(lanes);
  const auto bags = static_cast<uint32_t>(args.bags.count);
  const auto bags_of_warp = static_cast<uint32_t>(kBagsInFlight * lane.groups_in_warp());
  const uint32_t stride = static_cast<uint32_t>(simt::warps_in_grid()) * bags_of_warp;
  const uint32_t mine = threadIdx.x % simt::kWarp;
  for (uint32_t first = static_cast<uint32_t>(simt::global_warp()) * bags_of_warp; first < bags;
       first += stride) {
    const uint32_t bag = mine < bags_of_warp ? first + mine : bags;
    const BagTask task(args, bag);
    const int longest = __reduce_max_sync(simt::kFullMask, task.length);
    const int widest = __reduce_max_sync(simt::kFullMask, task.dim);
    const bool vector = __all_sync(simt::kFullMask, has_whole_vectors<W>(args, *task.feature));
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < widest;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      const int column = base + lane.rank * N;
      float sum[kBagsInFlight][N] = {};
      if (vector) {
        sum_short_bags<W, N, true>(args, task, lane, column, longest, sum);
      } else {
        sum_short_bags<W, N, false>(args, task, lane, column, longest, sum);
      }
      write_short_bags(args, task, lane, bag, column, sum);
    }
  }
}

// Whether four bags at once are better than four rows of one.
inline bool has_short_bags(const LookupArgs& args) {
  return args.bags.num_lookups <= kBagsInFlight * args.bags.count;
}

}  // namespace emb::cuda
