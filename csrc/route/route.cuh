// `route_lengths` and `route_ids` on the GPU: counting and moving ids. If bags are short on
// average, a lane processes each bag of up to kShortBag ids. A warp processes any other bag, 32 ids
// at a time: a match instruction finds the lanes whose ids go to the same block, and the first of
// these lanes counts for all. No two threads change the count of one output bag at a time, so that
// no atomics are needed and ids keep their order. Layouts are on the device and have not been
// checked: entries that lie outside the tensors are skipped.
#pragma once

#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "route/args.h"

namespace emb::cuda {

inline constexpr int kRouteThreads = 256;
inline constexpr int kRouteBlocksPerSm = 4;  // so that a thread may have 64 registers
// No measurement of the next two is recorded.
inline constexpr int kShortBag = 16;  // ids that one lane routes
inline constexpr int kShortMean = 8;  // mean ids per bag up to which lanes take bags

// The arguments of the kernels. Pointers are to device memory that must live until the kernels have
// run.
struct DeviceRoute {
  Routing routing;
  const void* ids;  // [L]
  Bags bags;        // of the batch
  // An output of the dtype of `ids`: the lengths, [num_output_bags], which the caller fills with
  // zeros, or the moved ids, [num_output_ids].
  void* out;
  int64_t num_output_bags;
  // The other members are used by the move only.
  IndexArray starts;       // [num_output_bags + 1], sums of the lengths
  int64_t num_output_ids;  // the last of `starts`
  int64_t* positions;      // [num_output_ids], an output: the position in `ids` of each output id
  const float* weights;    // [L], or null
  float* out_weights;      // [num_output_ids], an output; not used if `weights` is null
  // Scratch [num_output_bags], which the caller fills with zeros: the number of ids that have been
  // moved to each output bag. Only the bags of the first copy of a block are counted.
  int32_t* moved_counts;
};

// Return the last feature whose bags begin at or before `bag`, 0 if there is none. There must be at
// least one feature. The result need not have the bag: see BagRoute::is_valid.
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

// A bag of the batch, its feature, and the blocks of the feature.
struct BagRoute {
  RouteFeature feature;
  const RouteBlock* blocks;  // of the feature
  int64_t bag_in_feature;    // number of the bag among those of the feature
  // Whether the feature has the bag and a block, its blocks are in range, and its num_rows is not
  // negative. If it is false, the bag is skipped.
  bool is_valid;

  // `bag` is the number of the bag in the batch.
  EMB_DEVICE BagRoute(const Routing& routing, int64_t bag) : blocks(nullptr), is_valid(false) {
    const int64_t f = feature_of_bag(routing, bag);
    feature = routing.features[f];
    bag_in_feature = bag - routing.first_bags[f];
    is_valid = (bag_in_feature | feature.num_rows) >= 0 && bag < routing.first_bags[f + 1] &&
               feature.first_block >= 0 && feature.num_blocks > 0 &&
               feature.num_blocks <= routing.num_blocks &&
               feature.first_block <= routing.num_blocks - feature.num_blocks;
    if (is_valid) blocks = routing.blocks + feature.first_block;
  }

  // Return the number of copies of a block, 0 if its copies are out of range.
  EMB_DEVICE int64_t num_copies(const Routing& routing, int64_t block) const {
    const RouteBlock& route_block = blocks[block];
    const bool is_in_range = route_block.first_copy >= 0 &&
                             route_block.num_copies <= routing.num_copies &&
                             route_block.first_copy <= routing.num_copies - route_block.num_copies;
    return is_in_range && route_block.num_copies > 0 ? route_block.num_copies : 0;
  }

  // Return the output bag of this bag in copy `copy` of a block, -1 if the layout has none.
  EMB_DEVICE int64_t output_bag(const DeviceRoute& args, int64_t block, int64_t copy) const {
    const int64_t unit = args.routing.copies[blocks[block].first_copy + copy];
    if (unit < 0 || unit >= args.routing.num_units) return -1;
    // Unsigned, so that the sum cannot overflow.
    const auto output_bag =
        static_cast<uint64_t>(args.routing.units[unit]) + static_cast<uint64_t>(bag_in_feature);
    return output_bag < static_cast<uint64_t>(args.num_output_bags)
               ? static_cast<int64_t>(output_bag)
               : -1;
  }
};

// The peers of a lane: the lanes of its warp whose ids go to the same block as its own id.
struct BlockPeers {
  unsigned lanes;  // bit mask of the peers, with this lane
  int leader;      // the first peer
  int rank;        // the number of peers before this lane

  // All lanes of the warp must call this, those without an id with block -1.
  EMB_DEVICE explicit BlockPeers(int block) {
    lanes = __match_any_sync(simt::kFullMask, block);
    leader = __ffs(static_cast<int>(lanes)) - 1;
    const unsigned lane = threadIdx.x % simt::kWarpLanes;
    rank = __popc(lanes & ((1u << lane) - 1u));
  }
  EMB_DEVICE bool is_leader() const { return rank == 0; }
  EMB_DEVICE int num_lanes() const { return __popc(lanes); }
};

// Counts the ids [begin, end) of a bag: adds their number per block to the lengths in args.out. I
// is the dtype of ids and lengths.
template <class I>
struct CountIds {
  // Called by one lane.
  EMB_DEVICE static void process_in_lane(const DeviceRoute& args, const BagRoute& route,
                                         int64_t begin, int64_t end) {
    const I* ids = static_cast<const I*>(args.ids);
    for (int64_t i = begin; i < end; ++i) {
      const RoutedId routed = route_id(route.feature, route.blocks, ids[i]);
      add(args, route, routed.block, 1);
    }
  }

  // Called by all lanes of a warp with the same arguments.
  EMB_DEVICE static void process_in_warp(const DeviceRoute& args, const BagRoute& route,
                                         int64_t begin, int64_t end) {
    const I* ids = static_cast<const I*>(args.ids);
    const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
    for (int64_t i = begin; i < end; i += simt::kWarpLanes) {
      int block = -1;
      if (i + lane < end) {
        block = static_cast<int>(route_id(route.feature, route.blocks, ids[i + lane]).block);
      }
      const BlockPeers peers(block);
      if (block >= 0 && peers.is_leader()) add(args, route, block, peers.num_lanes());
      __syncwarp();  // the next ids of the block may have another leader
    }
  }

 private:
  EMB_DEVICE static void add(const DeviceRoute& args, const BagRoute& route, int64_t block,
                             int count) {
    const int64_t num_copies = route.num_copies(args.routing, block);
    for (int64_t copy = 0; copy < num_copies; ++copy) {
      const int64_t output_bag = route.output_bag(args, block, copy);
      if (output_bag >= 0) static_cast<I*>(args.out)[output_bag] += static_cast<I>(count);
    }
  }
};

// Moves the ids [begin, end) of a bag: writes them, their positions and weights to the outputs.
template <class I>
struct MoveIds {
  // Called by one lane.
  EMB_DEVICE static void process_in_lane(const DeviceRoute& args, const BagRoute& route,
                                         int64_t begin, int64_t end) {
    const I* ids = static_cast<const I*>(args.ids);
    for (int64_t i = begin; i < end; ++i) {
      const RoutedId routed = route_id(route.feature, route.blocks, ids[i]);
      const int64_t num_copies = route.num_copies(args.routing, routed.block);
      const int64_t first_output_bag =
          num_copies > 0 ? route.output_bag(args, routed.block, 0) : -1;
      const int num_moved = first_output_bag >= 0 ? args.moved_counts[first_output_bag]++ : 0;
      write_id(args, route, routed, num_copies, first_output_bag, num_moved, i);
    }
  }

  // Called by all lanes of a warp with the same arguments.
  EMB_DEVICE static void process_in_warp(const DeviceRoute& args, const BagRoute& route,
                                         int64_t begin, int64_t end) {
    const I* ids = static_cast<const I*>(args.ids);
    const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
    for (int64_t i = begin; i < end; i += simt::kWarpLanes) {
      const bool has_id = i + lane < end;
      RoutedId routed{-1, 0};
      if (has_id) routed = route_id(route.feature, route.blocks, ids[i + lane]);
      const BlockPeers peers(static_cast<int>(routed.block));
      const int64_t num_copies = has_id ? route.num_copies(args.routing, routed.block) : 0;
      const int64_t first_output_bag =
          num_copies > 0 ? route.output_bag(args, routed.block, 0) : -1;
      int num_moved = 0;
      if (first_output_bag >= 0 && peers.is_leader()) {
        num_moved = args.moved_counts[first_output_bag];
        args.moved_counts[first_output_bag] = num_moved + peers.num_lanes();
      }
      num_moved = __shfl_sync(simt::kFullMask, num_moved, peers.leader) + peers.rank;
      write_id(args, route, routed, num_copies, first_output_bag, num_moved, i + lane);
      __syncwarp();
    }
  }

 private:
  // Write the id at `position` of the batch for each copy of its block, with its position and
  // weight. first_output_bag is the output bag of copy 0, and `num_moved` is the number of ids that
  // have been moved there.
  EMB_DEVICE static void write_id(const DeviceRoute& args, const BagRoute& route,
                                  const RoutedId& routed, int64_t num_copies,
                                  int64_t first_output_bag, int num_moved, int64_t position) {
    for (int64_t copy = 0; copy < num_copies; ++copy) {
      const int64_t output_bag =
          copy == 0 ? first_output_bag : route.output_bag(args, routed.block, copy);
      if (output_bag < 0) continue;
      const int64_t start = args.starts[output_bag];
      if (start < 0 || num_moved >= args.num_output_ids - start) continue;
      const int64_t target = start + num_moved;
      if (target >= args.starts[output_bag + 1]) continue;
      static_cast<I*>(args.out)[target] = static_cast<I>(routed.id);
      args.positions[target] = position;
      if (args.weights != nullptr) args.out_weights[target] = args.weights[position];
    }
  }
};

// Process all bags with `Work` (CountIds or MoveIds), grid-stride. A warp takes `bags_per_warp`
// bags at a time, 1 or 32. All lanes process a single bag together. Of 32 bags, each lane first
// processes one if it is short, and then all lanes process the long ones together, one by one.
template <class Work>
EMB_DEVICE void route_bags(const DeviceRoute& args, int bags_per_warp) {
  const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
  const bool has_bag_per_lane = bags_per_warp > 1;
  for (int64_t first = simt::global_warp() * bags_per_warp; first < args.bags.num_bags;
       first += simt::warps_in_grid() * bags_per_warp) {
    bool is_long = lane == 0;  // a single bag counts as long
    if (has_bag_per_lane) {
      is_long = false;
      const int64_t bag = first + lane;
      if (bag < args.bags.num_bags) {
        const int64_t begin = args.bags.begin(bag), end = args.bags.end(bag);
        is_long = end - begin > kShortBag;
        const BagRoute route(args.routing, bag);
        if (!is_long && route.is_valid) Work::process_in_lane(args, route, begin, end);
      }
    }
    unsigned long_bags = __ballot_sync(simt::kFullMask, is_long);  // bit b: bag first + b
    for (; long_bags != 0; long_bags &= long_bags - 1) {
      const int64_t bag = first + __ffs(static_cast<int>(long_bags)) - 1;
      const BagRoute route(args.routing, bag);
      if (route.is_valid)
        Work::process_in_warp(args, route, args.bags.begin(bag), args.bags.end(bag));
    }
  }
}

// Add the numbers of ids of every bag to the lengths in args.out, which must be 0 before.
template <class I>
__global__ void __launch_bounds__(kRouteThreads, kRouteBlocksPerSm)
    route_count_kernel(DeviceRoute args, int bags_per_warp) {
  route_bags<CountIds<I>>(args, bags_per_warp);
}

// Write the ids of every bag to args.out, from args.starts on; also args.positions and, with
// weights, args.out_weights. args.moved_counts must be 0 before.
template <class I>
__global__ void __launch_bounds__(kRouteThreads, kRouteBlocksPerSm)
    route_move_kernel(DeviceRoute args, int bags_per_warp) {
  route_bags<MoveIds<I>>(args, bags_per_warp);
}

// Launch a kernel over all bags of the batch; nothing if there are no bags or no features.
template <class Launcher, class Kernel>
void launch_over_bags(const Launcher& launcher, Kernel kernel, const DeviceRoute& args) {
  if (args.bags.num_bags == 0 || args.routing.num_features == 0) return;
  const bool has_short_bags = args.bags.num_lookups <= args.bags.num_bags * kShortMean;
  const int bags_per_warp = has_short_bags ? kWarpLanes : 1;
  const int64_t bags_per_block = int64_t{kRouteThreads / simt::kWarpLanes} * bags_per_warp;
  const unsigned blocks = blocks_for(args.bags.num_bags, bags_per_block,
                                     launcher.max_grid_blocks(kResidentBlocksPerSm));
  launcher(kernel, blocks, kRouteThreads, args, bags_per_warp);
}

// Add the numbers of ids of all bags to the lengths in args.out, which must be 0 before.
// `is_int64`: ids and lengths are int64, else int32. Does not wait for the device.
template <class Launcher>
void launch_route_count(const Launcher& launcher, const DeviceRoute& args, bool is_int64) {
  launch_over_bags(launcher, is_int64 ? route_count_kernel<int64_t> : route_count_kernel<int32_t>,
                   args);
}

// Move the ids of all bags; args.moved_counts must be 0 before. `is_int64`: ids are int64, else
// int32.
template <class Launcher>
void launch_route_move(const Launcher& launcher, const DeviceRoute& args, bool is_int64) {
  launch_over_bags(launcher, is_int64 ? route_move_kernel<int64_t> : route_move_kernel<int32_t>,
                   args);
}

}  // namespace emb::cuda
