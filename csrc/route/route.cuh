// Counts and moves ids on the GPU, one warp per bag. A match finds the lanes whose ids go to the
// same block; the first of them counts for all, so no atomics are needed and ids keep their order.
// Layouts are not trusted: whatever lies outside the tensors is skipped.
#pragma once

#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "route/args.h"

namespace emb::cuda {

inline constexpr int kRouteThreads = 256;

struct DeviceRoute {
  Routing routing;
  const void* ids;
  Bags bags;
  void* out;         // lengths, which are 0 before; or ids
  int64_t out_bags;  // bags of all units
  // For the ids only.
  IndexArray starts;
  int64_t total;
  int64_t* positions;
  const float* weights;
  float* out_weights;
  int32_t* used;  // [out_bags], 0 before: ids of a bag that have been moved
};

// Return the last feature whose bags begin at or before `bag`; the caller must check that it
// contains the bag.
EMB_DEVICE int64_t feature_of_bag(const Routing& routing, int64_t bag) {
  int64_t low = 0, high = routing.num_features;
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    if (routing.first_bags[middle] <= bag) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// A feature and one of its bags; not `usable` if the layout is invalid.
struct BagRoute {
  RouteFeature feature;
  const RouteBlock* blocks;
  int64_t bag;  // relative to the first of the feature
  bool usable;

  EMB_DEVICE BagRoute(const Routing& routing, int64_t number) : blocks(nullptr), usable(false) {
    const int64_t f = feature_of_bag(routing, number);
    feature = routing.features[f];
    bag = number - routing.first_bags[f];
    usable = bag >= 0 && number < routing.first_bags[f + 1] && feature.first_block >= 0 &&
             feature.num_blocks > 0 && feature.num_blocks <= routing.num_blocks &&
             feature.first_block <= routing.num_blocks - feature.num_blocks;
    if (usable) blocks = routing.blocks + feature.first_block;
  }

  EMB_DEVICE int64_t copies(const Routing& routing, int64_t block) const {
    const RouteBlock& b = blocks[block];
    const bool fits = b.first_copy >= 0 && b.num_copies <= routing.num_copies &&
                      b.first_copy <= routing.num_copies - b.num_copies;
    return fits && b.num_copies > 0 ? b.num_copies : 0;
  }

  // Return the index of the bag among the bags of copy `copy` of a block; -1 if there is none.
  EMB_DEVICE int64_t cell(const DeviceRoute& in, int64_t block, int64_t copy) const {
    const int64_t unit = in.routing.copies[blocks[block].first_copy + copy];
    if (unit < 0 || unit >= in.routing.num_units) return -1;
    const int64_t cell = in.routing.units[unit] + bag;
    return cell >= 0 && cell < in.out_bags ? cell : -1;
  }
};

// The lanes whose ids go to the same block; `block` is -1 for lanes without an id.
struct BlockPeers {
  unsigned peers;
  int leader, rank;

  EMB_DEVICE explicit BlockPeers(int block) {
    peers = __match_any_sync(simt::kFullMask, block);
    leader = __ffs(static_cast<int>(peers)) - 1;
    const unsigned lane = threadIdx.x % simt::kWarp;
    rank = __popc(peers & ((1u << lane) - 1u));
  }
  EMB_DEVICE bool leads() const { return rank == 0; }
  EMB_DEVICE int count() const { return __popc(peers); }
};

template <class I>
__global__ void __launch_bounds__(kRouteThreads, 4) route_count_kernel(DeviceRoute in) {
  const I* ids = static_cast<const I*>(in.ids);
  I* out = static_cast<I*>(in.out);
  const int lane = static_cast<int>(threadIdx.x % simt::kWarp);
  for (int64_t number = simt::global_warp(); number < in.bags.count;
       number += simt::warps_in_grid()) {
    const BagRoute route(in.routing, number);
    if (!route.usable) continue;
    const int64_t begin = in.bags.begin(number), end = in.bags.end(number);
    for (int64_t i = begin; i < end; i += simt::kWarp) {
      int block = -1;
      if (i + lane < end) {
        block = static_cast<int>(route_id(route.feature, route.blocks, ids[i + lane]).block);
      }
      const BlockPeers peers(block);
      if (block >= 0 && peers.leads()) {
        const int64_t copies = route.copies(in.routing, block);
        for (int64_t copy = 0; copy < copies; ++copy) {
          const int64_t cell = route.cell(in, block, copy);
          if (cell >= 0) out[cell] += static_cast<I>(peers.count());
        }
      }
      __syncwarp();  // the next ids of the block may have another leader
    }
  }
}

template <class I>
EMB_DEVICE void put_id(const DeviceRoute& in, int64_t to, I id, int64_t position) {
  static_cast<I*>(in.out)[to] = id;
  in.positions[to] = position;
  if (in.weights != nullptr) in.out_weights[to] = in.weights[position];
}

template <class I>
__global__ void __launch_bounds__(kRouteThreads, 4) route_move_kernel(DeviceRoute in) {
  const I* ids = static_cast<const I*>(in.ids);
  const int lane = static_cast<int>(threadIdx.x % simt::kWarp);
  for (int64_t number = simt::global_warp(); number < in.bags.count;
       number += simt::warps_in_grid()) {
    const BagRoute route(in.routing, number);
    if (!route.usable) continue;
    const int64_t begin = in.bags.begin(number), end = in.bags.end(number);
    for (int64_t i = begin; i < end; i += simt::kWarp) {
      const bool has_id = i + lane < end;
      RoutedId routed{-1, 0};
      if (has_id) routed = route_id(route.feature, route.blocks, ids[i + lane]);
      const BlockPeers peers(static_cast<int>(routed.block));
      const int64_t copies = has_id ? route.copies(in.routing, routed.block) : 0;
      const int64_t first_cell = copies > 0 ? route.cell(in, routed.block, 0) : -1;
      int moved = 0;
      if (first_cell >= 0 && peers.leads()) {
        moved = in.used[first_cell];
        in.used[first_cell] = moved + peers.count();
      }
      moved = __shfl_sync(simt::kFullMask, moved, peers.leader) + peers.rank;
      for (int64_t copy = 0; copy < copies; ++copy) {
        const int64_t cell = copy == 0 ? first_cell : route.cell(in, routed.block, copy);
        if (cell < 0) continue;
        const int64_t start = in.starts[cell], to = start + moved;
        if (start >= 0 && to < in.starts[cell + 1] && to < in.total) {
          put_id(in, to, static_cast<I>(routed.id), i + lane);
        }
      }
      __syncwarp();
    }
  }
}

template <class Launcher>
void launch_route_count(const Launcher& launcher, const DeviceRoute& in, bool is_int64) {
  if (in.bags.count == 0 || in.routing.num_features == 0) return;
  const unsigned blocks =
      blocks_for(in.bags.count, kRouteThreads / simt::kWarp, launcher.blocks(32));
  if (is_int64) {
    launcher(route_count_kernel<int64_t>, blocks, kRouteThreads, in);
  } else {
    launcher(route_count_kernel<int32_t>, blocks, kRouteThreads, in);
  }
}

template <class Launcher>
void launch_route_move(const Launcher& launcher, const DeviceRoute& in, bool is_int64) {
  if (in.bags.count == 0 || in.routing.num_features == 0) return;
  const unsigned blocks =
      blocks_for(in.bags.count, kRouteThreads / simt::kWarp, launcher.blocks(32));
  if (is_int64) {
    launcher(route_move_kernel<int64_t>, blocks, kRouteThreads, in);
  } else {
    launcher(route_move_kernel<int32_t>, blocks, kRouteThreads, in);
  }
}

}  // namespace emb::cuda
