// Counting and moving ids on the GPU. In a batch of short bags, a lane takes a bag of up to
// kShortBag ids. Any other bag takes a warp, 32 ids at a time: a match instruction finds the lanes
// whose ids go to the same block, and the first of them counts for all. No two threads change the
// count of one output bag at a time, so that no atomics are needed and ids keep their order.
// Layouts are on the device and have not been checked: entries that lie outside the tensors are
// skipped.
#pragma once

#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "route/args.h"

namespace emb::cuda {

inline constexpr int kRouteThreads = 256;
inline constexpr int kRouteBlocksPerSm = 4;  // they leave a thread 64 registers
// No measurement of the next two is recorded.
inline constexpr int kShortBag = 16;  // ids that one lane routes
inline constexpr int kShortMean = 8;  // mean ids per bag up to which lanes take bags

// The arguments of the kernels. Pointers are to device memory that must live until the kernels have
// run.
struct DeviceRoute {
  Routing routing;
  const void* ids;   // [L]
  Bags bags;         // of the batch
  void* out;         // of the dtype of ids: [out_bags] lengths, 0 before; or [total] ids
  int64_t out_bags;  // output bags
  // The other members are read by the move only.
  IndexArray starts;     // [out_bags + 1] sums of the lengths
  int64_t total;         // ids in the output
  int64_t* positions;    // [total], an output: the position in `ids` of each id of the output
  const float* weights;  // [L], or null
  float* out_weights;    // [total], an output, unless `weights` is null
  int32_t* num_moved;    // [out_bags], 0 before: ids moved so far to each output bag of a copy 0
};

// Return the last feature whose bags begin at or before `bag`, 0 if no feature does. There must be
// at least one feature; the caller must check that the result has the bag.
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

// A bag of the batch and its feature.
struct BagRoute {
  RouteFeature feature;
  const RouteBlock* blocks;  // of the feature
  int64_t bag_in_feature;    // index of the bag among those of the feature
  // Whether a feature has the bag, its blocks exist and are in range, and `rows` is not negative.
  bool is_valid;

  // `bag` counts the bags of the batch.
  EMB_DEVICE BagRoute(const Routing& routing, int64_t bag) : blocks(nullptr), is_valid(false) {
    const int64_t f = feature_of_bag(routing, bag);
    feature = routing.features[f];
    bag_in_feature = bag - routing.first_bags[f];
    is_valid = (bag_in_feature | feature.rows) >= 0 && bag < routing.first_bags[f + 1] &&
               feature.first_block >= 0 && feature.num_blocks > 0 &&
               feature.num_blocks <= routing.num_blocks &&
               feature.first_block <= routing.num_blocks - feature.num_blocks;
    if (is_valid) blocks = routing.blocks + feature.first_block;
  }

  // Return the number of copies of a block, 0 if its copies are out of range.
  EMB_DEVICE int64_t num_copies(const Routing& routing, int64_t block) const {
    const RouteBlock& b = blocks[block];
    const bool fits = b.first_copy >= 0 && b.num_copies <= routing.num_copies &&
                      b.first_copy <= routing.num_copies - b.num_copies;
    return fits && b.num_copies > 0 ? b.num_copies : 0;
  }

  // Return the output bag of this bag in copy `copy` of a block, -1 if the layout has none.
  EMB_DEVICE int64_t out_bag(const DeviceRoute& in, int64_t block, int64_t copy) const {
    const int64_t unit = in.routing.copies[blocks[block].first_copy + copy];
    if (unit < 0 || unit >= in.routing.num_units) return -1;
    // Unsigned, so that the sum cannot overflow.
    const auto out_bag =
        static_cast<uint64_t>(in.routing.units[unit]) + static_cast<uint64_t>(bag_in_feature);
    return out_bag < static_cast<uint64_t>(in.out_bags) ? static_cast<int64_t>(out_bag) : -1;
  }
};

// The lanes of a warp whose ids go to the block of this lane's id.
struct BlockPeers {
  unsigned lanes;  // bit mask of these lanes
  int leader;      // the first of them
  int rank;        // how many of them come before this lane

  // All lanes of the warp call this, those without an id with -1.
  EMB_DEVICE explicit BlockPeers(int block) {
    lanes = __match_any_sync(simt::kFullMask, block);
    leader = __ffs(static_cast<int>(lanes)) - 1;
    const unsigned lane = threadIdx.x % simt::kWarpLanes;
    rank = __popc(lanes & ((1u << lane) - 1u));
  }
  EMB_DEVICE bool leads() const { return rank == 0; }
  EMB_DEVICE int count() const { return __popc(lanes); }
};

// Counts the ids [begin, end) of a bag: adds their number per block to the lengths in in.out. I is
// the dtype of ids and lengths.
template <class I>
struct CountIds {
  // Called by one lane.
  EMB_DEVICE static void by_lane(const DeviceRoute& in, const BagRoute& route, int64_t begin,
                                 int64_t end) {
    const I* ids = static_cast<const I*>(in.ids);
    for (int64_t i = begin; i < end; ++i) {
      const RoutedId routed = route_id(route.feature, route.blocks, ids[i]);
      add(in, route, routed.block, 1);
    }
  }

  // Called by all lanes of a warp with the same arguments.
  EMB_DEVICE static void by_warp(const DeviceRoute& in, const BagRoute& route, int64_t begin,
                                 int64_t end) {
    const I* ids = static_cast<const I*>(in.ids);
    const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
    for (int64_t i = begin; i < end; i += simt::kWarpLanes) {
      int block = -1;
      if (i + lane < end) {
        block = static_cast<int>(route_id(route.feature, route.blocks, ids[i + lane]).block);
      }
      const BlockPeers peers(block);
      if (block >= 0 && peers.leads()) add(in, route, block, peers.count());
      __syncwarp();  // the next ids of the block may have another leader
    }
  }

 private:
  EMB_DEVICE static void add(const DeviceRoute& in, const BagRoute& route, int64_t block,
                             int count) {
    const int64_t copies = route.num_copies(in.routing, block);
    for (int64_t copy = 0; copy < copies; ++copy) {
      const int64_t out_bag = route.out_bag(in, block, copy);
      if (out_bag >= 0) static_cast<I*>(in.out)[out_bag] += static_cast<I>(count);
    }
  }
};

// Moves the ids [begin, end) of a bag: writes them, their positions and weights to the outputs.
template <class I>
struct MoveIds {
  // Called by one lane.
  EMB_DEVICE static void by_lane(const DeviceRoute& in, const BagRoute& route, int64_t begin,
                                 int64_t end) {
    const I* ids = static_cast<const I*>(in.ids);
    for (int64_t i = begin; i < end; ++i) {
      const RoutedId routed = route_id(route.feature, route.blocks, ids[i]);
      const int64_t copies = route.num_copies(in.routing, routed.block);
      const int64_t first_out_bag = copies > 0 ? route.out_bag(in, routed.block, 0) : -1;
      const int moved = first_out_bag >= 0 ? in.num_moved[first_out_bag]++ : 0;
      put(in, route, routed, copies, first_out_bag, moved, i);
    }
  }

  // Called by all lanes of a warp with the same arguments.
  EMB_DEVICE static void by_warp(const DeviceRoute& in, const BagRoute& route, int64_t begin,
                                 int64_t end) {
    const I* ids = static_cast<const I*>(in.ids);
    const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
    for (int64_t i = begin; i < end; i += simt::kWarpLanes) {
      const bool has_id = i + lane < end;
      RoutedId routed{-1, 0};
      if (has_id) routed = route_id(route.feature, route.blocks, ids[i + lane]);
      const BlockPeers peers(static_cast<int>(routed.block));
      const int64_t copies = has_id ? route.num_copies(in.routing, routed.block) : 0;
      const int64_t first_out_bag = copies > 0 ? route.out_bag(in, routed.block, 0) : -1;
      int moved = 0;
      if (first_out_bag >= 0 && peers.leads()) {
        moved = in.num_moved[first_out_bag];
        in.num_moved[first_out_bag] = moved + peers.count();
      }
      moved = __shfl_sync(simt::kFullMask, moved, peers.leader) + peers.rank;
      put(in, route, routed, copies, first_out_bag, moved, i + lane);
      __syncwarp();
    }
  }

 private:
  // Write the id at `position` of the batch for each copy of its block, with its position and
  // weight. first_out_bag is the output bag of copy 0, and `moved` is the number of ids that have
  // been moved there.
  EMB_DEVICE static void put(const DeviceRoute& in, const BagRoute& route, const RoutedId& routed,
                             int64_t copies, int64_t first_out_bag, int moved, int64_t position) {
    for (int64_t copy = 0; copy < copies; ++copy) {
      const int64_t out_bag = copy == 0 ? first_out_bag : route.out_bag(in, routed.block, copy);
      if (out_bag < 0) continue;
      const int64_t start = in.starts[out_bag];
      if (start < 0 || moved >= in.total - start) continue;
      const int64_t to = start + moved;
      if (to >= in.starts[out_bag + 1]) continue;
      static_cast<I*>(in.out)[to] = static_cast<I>(routed.id);
      in.positions[to] = position;
      if (in.weights != nullptr) in.out_weights[to] = in.weights[position];
    }
  }
};

// Process all bags with `Work` (CountIds or MoveIds), grid-stride. A warp takes `bags_of_warp`
// bags, 1 or 32. All lanes process a single bag together. Of 32 bags, each lane processes one if it
// is short; then all lanes process the long ones together, one after the other.
template <class Work>
EMB_DEVICE void route_bags(const DeviceRoute& in, int bags_of_warp) {
  const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
  const bool lane_takes_bag = bags_of_warp > 1;
  for (int64_t first = simt::global_warp() * bags_of_warp; first < in.bags.num_bags;
       first += simt::warps_in_grid() * bags_of_warp) {
    bool is_long = lane == 0;  // a single bag counts as long
    if (lane_takes_bag) {
      is_long = false;
      const int64_t bag = first + lane;
      if (bag < in.bags.num_bags) {
        const int64_t begin = in.bags.begin(bag), end = in.bags.end(bag);
        is_long = end - begin > kShortBag;
        const BagRoute route(in.routing, bag);
        if (!is_long && route.is_valid) Work::by_lane(in, route, begin, end);
      }
    }
    unsigned long_bags = __ballot_sync(simt::kFullMask, is_long);  // bit b: bag first + b
    for (; long_bags != 0; long_bags &= long_bags - 1) {
      const int64_t bag = first + __ffs(static_cast<int>(long_bags)) - 1;
      const BagRoute route(in.routing, bag);
      if (route.is_valid) Work::by_warp(in, route, in.bags.begin(bag), in.bags.end(bag));
    }
  }
}

// Add the numbers of ids of every bag to the lengths in in.out, which must be 0 before.
template <class I>
__global__ void __launch_bounds__(kRouteThreads, kRouteBlocksPerSm)
    route_count_kernel(DeviceRoute in, int bags_of_warp) {
  route_bags<CountIds<I>>(in, bags_of_warp);
}

// Write the ids of every bag to in.out, from in.starts on; also in.positions and, with weights,
// in.out_weights. in.num_moved must be 0 before.
template <class I>
__global__ void __launch_bounds__(kRouteThreads, kRouteBlocksPerSm)
    route_move_kernel(DeviceRoute in, int bags_of_warp) {
  route_bags<MoveIds<I>>(in, bags_of_warp);
}

// Launch a kernel over all bags of the batch; nothing if there are no bags or no features.
template <class Launcher, class Kernel>
void launch_over_bags(const Launcher& launcher, Kernel kernel, const DeviceRoute& in) {
  if (in.bags.num_bags == 0 || in.routing.num_features == 0) return;
  const bool short_bags = in.bags.num_lookups <= in.bags.num_bags * kShortMean;
  const int bags_of_warp = short_bags ? kWarpLanes : 1;
  const int64_t bags_of_block = int64_t{kRouteThreads / simt::kWarpLanes} * bags_of_warp;
  const unsigned blocks =
      blocks_for(in.bags.num_bags, bags_of_block, launcher.blocks(kResidentBlocksPerSm));
  launcher(kernel, blocks, kRouteThreads, in, bags_of_warp);
}

// Add the numbers of ids of all bags to the lengths in in.out, which must be 0 before. `is_int64`:
// ids and lengths are int64, else int32. Does not wait for the device.
template <class Launcher>
void launch_route_count(const Launcher& launcher, const DeviceRoute& in, bool is_int64) {
  launch_over_bags(launcher, is_int64 ? route_count_kernel<int64_t> : route_count_kernel<int32_t>,
                   in);
}

// Move the ids of all bags; in.num_moved must be 0 before. `is_int64`: ids are int64, else int32.
template <class Launcher>
void launch_route_move(const Launcher& launcher, const DeviceRoute& in, bool is_int64) {
  launch_over_bags(launcher, is_int64 ? route_move_kernel<int64_t> : route_move_kernel<int32_t>,
                   in);
}

}  // namespace emb::cuda
