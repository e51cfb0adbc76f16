// Grouping of a small batch in one launch: a cluster of blocks makes the keys, sorts them in shared
// memory, finds the groups of equal keys and writes the outputs of `group` or `tbe_group`, in this
// order (SmallGroupSort). CUB would need several launches, whose overhead exceeds the work. A batch
// of up to 512 keys needs one block, and a cluster takes up to kMaxSmallGroup = 16,384 keys. On a
// device without clusters a launch has one block only, for up to 2,048 keys. Larger batches have no
// plan (plan_small_group), and CUB sorts them.
//
// The sort is a stable radix sort of up to kDigitBits bits per pass. In a pass, the new position of
// an item is the number of items that come before it: those with a smaller digit, and those with
// the same digit at an earlier position. They are counted within the warp by ballots
// (rank_in_warp), over the warps of a block by one histogram per warp, and over the blocks by
// reading each other's totals (both scan_digits). Then every item is written to its new position,
// in the shared memory of the block that has this position (sort).
#pragma once

#include <algorithm>
#include <bit>

#include "group/segments.cuh"

namespace emb::cuda {

inline constexpr int kDigitBits = 7, kDigits = 1 << kDigitBits;
inline constexpr unsigned kSmallGroupThreads = 512;  // maximum number of threads per block
inline constexpr int kPositionBits = 14;             // of a payload; the bag has the other bits
inline constexpr int64_t kMaxSmallGroup = int64_t{1} << kPositionBits;  // maximum number of keys
inline constexpr int64_t kMaxSmallBags = int64_t{1} << (32 - kPositionBits);  // and of bags
// Maximum number of blocks of a cluster; scan_digits unrolls a loop over it.
inline constexpr unsigned kMaxClusterBlocks = 8;
inline constexpr unsigned kMaxThreadItems = 4;  // maximum number of items per thread
static_assert(kMaxSmallGroup <= kMaxClusterBlocks * kSmallGroupThreads * kMaxThreadItems);

// The shape of a launch. All three members are powers of two, and a block has at least one thread
// per digit. The plan {}, with 0 items per thread, means that the batch is too large for a launch
// of this kind.
struct SmallGroupPlan {
  int items_per_thread = 0;  // 1, 2 or 4
  unsigned threads = 0;      // threads per block
  unsigned blocks = 0;       // blocks of the cluster
};

// Return the plan for n keys and clusters of up to `max_cluster_blocks` blocks, a power of two. Of
// plans with equal capacities, more blocks with fewer items per thread were faster on an H100; the
// figures are not recorded.
inline SmallGroupPlan plan_small_group(int64_t n, unsigned max_cluster_blocks) {
  const auto padded_n =
      static_cast<unsigned>(std::bit_ceil(static_cast<uint64_t>(std::max(n, int64_t{1}))));
  const unsigned threads = std::clamp(padded_n, static_cast<unsigned>(kDigits), kSmallGroupThreads);
  const unsigned single_item_blocks = std::max(padded_n / threads, 1u);  // with one item per thread
  const unsigned blocks = std::min({single_item_blocks, max_cluster_blocks, kMaxClusterBlocks});
  const unsigned items_per_thread = single_item_blocks / blocks;
  if (n > kMaxSmallGroup || items_per_thread > kMaxThreadItems) return {};
  return {static_cast<int>(items_per_thread), threads, blocks};
}

// The shared memory of a block. It is dynamic, because the blocks of a cluster access the shared
// memory of each other. Its arrays, in the order of their members, have no gaps.
struct SmallGroupMemory {
  uint32_t *keys, *payloads;  // [blockDim * kItems], the items of this block
  uint32_t* histograms;       // [warps, kDigits]: the number of items of each digit in each warp;
                              // after scan_digits, in the earlier warps of the block
  uint32_t* totals;           // [kDigits]: the number of items of each digit in this block
  uint32_t* bases;         // [kDigits]: the new position in the cluster of this block's first item
                           // of each digit
  uint32_t* warp_scratch;  // [kMaxWarps]: one number per warp
  uint32_t* tallies;       // [kTallies], by Tally
  int* search_range;       // [kSearchRangeWords], for a TileSearch

  static constexpr unsigned kMaxWarps = 32;  // maximum number of warps of a CUDA block
  static constexpr unsigned kSearchRangeWords = 2;

  // The counts of a block in `tallies`.
  enum Tally {
    kGroups,          // groups that begin in this block
    kGroupedKeys,     // keys of this block that belong to groups
    kInvalidIndices,  // the sum of Source::Tile::num_invalid over the block
    // The number of offsets that Source::prepare changed, plus the sum of Source::Tile::num_lost.
    kOffsetViolations,
    kOffsetsToRepair,  // invalid offsets that Source::prepare found; if any, one block repairs all
    kTallies
  };

  // The positions of the arrays, and their end, for a block of `num_items` items and `num_warps`
  // warps. `Position` is a pointer, or a number of words from the beginning.
  template <class Position>
  struct Layout {
    Position keys, payloads, histograms, totals, bases, warp_scratch, tallies, search_range, end;

    EMB_HD Layout(Position begin, unsigned num_items, unsigned num_warps)
        : keys(begin),
          payloads(keys + num_items),
          histograms(payloads + num_items),
          totals(histograms + num_warps * kDigits),
          bases(totals + kDigits),
          warp_scratch(bases + kDigits),
          tallies(warp_scratch + kMaxWarps),
          search_range(tallies + kTallies),
          end(search_range + kSearchRangeWords) {}
  };

  // Return the bytes of shared memory for `threads` threads with `items_per_thread` items each.
  static size_t bytes(unsigned threads, int items_per_thread) {
    return Layout<size_t>(0, threads * items_per_thread, threads / simt::kWarpLanes).end *
           sizeof(uint32_t);
  }

  // The arrays in the dynamic shared memory of this block of `num_items` items.
  explicit EMB_DEVICE SmallGroupMemory(unsigned num_items) {
    const Layout<uint32_t*> layout(simt::dynamic_shared<uint32_t>(), num_items,
                                   blockDim.x / simt::kWarpLanes);
    keys = layout.keys;
    payloads = layout.payloads;
    histograms = layout.histograms;
    totals = layout.totals;
    bases = layout.bases;
    warp_scratch = layout.warp_scratch;
    tallies = layout.tallies;
    search_range = reinterpret_cast<int*>(layout.search_range);
  }
};

// Return the sum of a tally over the blocks of the cluster. Between the last addition to the tally
// and this call there must be a cluster_sync.
EMB_DEVICE uint32_t cluster_total(const SmallGroupMemory& memory, SmallGroupMemory::Tally tally) {
  uint32_t sum = 0;
  for (unsigned b = 0; b < simt::cluster_size(); ++b)
    sum += simt::address_in_block(memory.tallies, b)[tally];
  return sum;
}

// Add the sum of `count` over the lanes of this warp to a tally of the block. All 32 lanes must
// call this.
EMB_DEVICE void count_in_block(const SmallGroupMemory& memory, SmallGroupMemory::Tally tally,
                               uint32_t count) {
  count = __reduce_add_sync(simt::kFullMask, count);
  if (threadIdx.x % simt::kWarpLanes == 0 && count > 0) atomicAdd(memory.tallies + tally, count);
}

// The arguments of the kernel; outputs are in device memory of the caller.
struct SmallGroupArgs {
  int32_t n;                  // keys, at most kMaxSmallGroup
  uint32_t no_group_key;      // the key that belongs to no group; no key is greater
  int bits, bits_per_pass;    // bits of keys up to `no_group_key`, and bits that a pass sorts by
  int32_t* sorted_positions;  // [n] output: the positions in sorted order; null if not wanted
  uint32_t* sorted_keys;      // [n] output; null if not wanted
  DeviceGroupOutput out;      // with null `segments` if no groups are wanted
  unsigned block_items_log2 = 0;  // log2 of the items per block; set by launch_small_group
};

// Return the arguments for n keys, without an output of sorted keys; `sorted_positions` may be
// null.
inline SmallGroupArgs small_group_args(int64_t n, uint32_t no_group_key, int32_t* sorted_positions,
                                       const DeviceGroupOutput& out) {
  const int bits = std::max(1, static_cast<int>(std::bit_width(no_group_key)));
  const int num_passes = (bits + kDigitBits - 1) / kDigitBits;
  return {static_cast<int32_t>(n), no_group_key, bits, (bits + num_passes - 1) / num_passes,
          sorted_positions,        nullptr,      out};
}

// The keys come from a `Source`: KeyArray below, or SmallLookups (tbe/keys.cuh), the lookups of a
// batch. A source has these members:
//   kHasBags            true if keys have bags and violations are counted
//   prepare(memory)     Return the source that makes the keys. It may check and repair its input,
//                       add to tallies, and wait for the cluster: all threads of the cluster call
//                       it.
//   Tile(source, begin, end, search_range)
//                       A class: the state of one thread for the positions [begin, end) of its
//                       block, at least one. All threads of the block call the constructor, which
//                       may wait for the block. `search_range` is SmallGroupMemory::search_range.
//   tile.key(source, i, no_group_key, &bag)
//                       Return the key of position i, or no_group_key if it belongs to no group.
//                       With kHasBags, write its bag and count its violations in the tile.
//   tile.num_invalid()  Return the number of invalid indices that `key` has counted.
//   tile.num_lost()     Return the number of lost indices that `key` has counted: those before the
//                       first bag, except -1.
//   report(memory)      Report the violations, from the tallies of the cluster, which are complete
//                       then. All threads call it, and one of them reports.

// The `Source` of the op `group`: its keys, [n] in device memory. Keys outside [0, no_group_key)
// belong to no group.
struct KeyArray {
  static constexpr bool kHasBags = false;
  IndexArray keys;

  EMB_DEVICE KeyArray prepare(const SmallGroupMemory&) const { return *this; }

  struct Tile {
    EMB_DEVICE Tile(const KeyArray&, int64_t, int64_t, int*) {}
    EMB_DEVICE uint32_t key(const KeyArray& source, int64_t i, uint32_t no_group_key,
                            uint32_t*) const {
      const int64_t key = source.keys[i];
      return key >= 0 && key < no_group_key ? static_cast<uint32_t>(key) : no_group_key;
    }
    EMB_DEVICE uint32_t num_invalid() const { return 0; }
    EMB_DEVICE uint32_t num_lost() const { return 0; }
  };
  EMB_DEVICE void report(const SmallGroupMemory&) const {}
};

// The sort and the grouping, as one thread executes them. All threads of the cluster must call
// make_keys, sort, find_groups and write, in this order. Before make_keys, the tallies of every
// block must be 0.
//
// An item is a key and a payload. The payload has the position of the key in its lower
// kPositionBits bits and, for a lookup, the bag in the bits above. Before and after the sort, every
// block has blockDim * kItems neighbouring items of the sequence, and every warp 32 * kItems
// neighbouring items of these. Item i of a lane is number 32 * i + lane of its warp. Items beyond n
// have keys with all args.bits bits set: the sort leaves them behind all keys of the batch, and
// they are not written.
template <int kItems>
struct SmallGroupSort {
  uint32_t key[kItems], payload[kItems];  // of the thread's items
  const SmallGroupArgs& args;
  const SmallGroupMemory& memory;
  unsigned block_rank;  // rank of the block in the cluster
  unsigned lane, warp;  // of the thread in its block
  unsigned first_item;  // number of the thread's item 0 in its block; item i is 32 * i later
  unsigned block_items, block_items_log2;  // items per block, and log2 of that

  EMB_DEVICE SmallGroupSort(const SmallGroupArgs& args_, const SmallGroupMemory& memory_)
      : args(args_),
        memory(memory_),
        block_rank(simt::cluster_rank()),
        lane(threadIdx.x % simt::kWarpLanes),
        warp(threadIdx.x / simt::kWarpLanes),
        first_item(warp * simt::kWarpLanes * kItems + lane),
        block_items(blockDim.x * kItems),
        block_items_log2(args_.block_items_log2) {}

  // Return the position of item i in the cluster: its position in the batch before the sort, its
  // position in sorted order after it.
  EMB_DEVICE int position(int i) const {
    return static_cast<int>(block_rank * block_items + first_item + i * simt::kWarpLanes);
  }

  // Make the items of this thread from `source`. Add the violations that it counts to the tallies.
  template <class Source>
  EMB_DEVICE void make_keys(const Source& source) {
    const int first = static_cast<int>(block_rank * block_items);
    const int block_end = first + static_cast<int>(block_items);
    const int end = block_end < args.n ? block_end : args.n;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      key[i] = args.bits >= 32 ? 0xffffffffu : (1u << args.bits) - 1;
      payload[i] = 0;
    }
    if (first >= end) return;
    typename Source::Tile tile(source, first, end, memory.search_range);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (position(i) >= end) continue;
      uint32_t bag = 0;
      key[i] = tile.key(source, position(i), args.no_group_key, &bag);
      payload[i] = static_cast<uint32_t>(position(i)) | bag << kPositionBits;
    }
    if constexpr (Source::kHasBags) {
      count_in_block(memory, SmallGroupMemory::kInvalidIndices, tile.num_invalid());
      count_in_block(memory, SmallGroupMemory::kOffsetViolations, tile.num_lost());
    }
  }

  // For every item i of this thread, write to warp_rank[i] how many items of digit digit[i] precede
  // it in its warp. Write to the histogram of the warp how many of its items have each digit. All
  // lanes must call this; a barrier of the block must follow before another warp reads it.
  EMB_DEVICE void rank_in_warp(const uint32_t (&digit)[kItems], uint32_t (&warp_rank)[kItems]) {
    uint32_t* const counts = memory.histograms + warp * kDigits;
#pragma unroll
    for (int d = 0; d < kDigits; d += simt::kWarpLanes) counts[d + lane] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      uint32_t peer_lanes = simt::kFullMask;
#pragma unroll
      for (int b = 0; b < kDigitBits; ++b) {
        const bool bit = (digit[i] >> b & 1u) != 0;
        const uint32_t votes = __ballot_sync(simt::kFullMask, bit);
        peer_lanes &= bit ? votes : ~votes;
      }
      const uint32_t count = counts[digit[i]],
                     num_lower_peers = __popc(peer_lanes & ((1u << lane) - 1));
      warp_rank[i] = count + num_lower_peers;
      __syncwarp();
      if (num_lower_peers == 0) counts[digit[i]] = count + __popc(peer_lanes);
      __syncwarp();
    }
  }

  // Replace each count in the histograms by the number of items of its digit in the earlier warps
  // of the block. Write `totals` and `bases` for every digit. All threads must call this; one
  // thread per digit computes, and all wait at one barrier of the cluster and two of the block.
  EMB_DEVICE void scan_digits() {
    const unsigned digit = threadIdx.x;
    uint32_t total = 0;
    if (digit < kDigits) {
#pragma unroll 8
      for (unsigned w = 0; w < blockDim.x / simt::kWarpLanes; ++w) {
        uint32_t& count = memory.histograms[w * kDigits + digit];
        const uint32_t earlier_warps = total;
        total += count;
        count = earlier_warps;
      }
      memory.totals[digit] = total;
    }
    simt::cluster_sync();
    uint32_t earlier_blocks = 0;  // items of this digit in the earlier blocks
    uint32_t cluster_count = 0;   // items of this digit in the cluster
    uint32_t inclusive_sum = 0;   // items of this digit and of the warp's lower digits
    if (digit < kDigits) {
      const unsigned blocks = simt::cluster_size();
#pragma unroll
      for (unsigned b = 0; b < kMaxClusterBlocks; ++b) {  // a constant bound: all loads at once
        const uint32_t count = simt::address_in_block(memory.totals, b < blocks ? b : 0)[digit];
        if (b < block_rank) earlier_blocks += count;
        if (b < blocks) cluster_count += count;
      }
      inclusive_sum = cluster_count;
#pragma unroll
      for (unsigned delta = 1; delta < simt::kWarpLanes; delta *= 2) {
        const uint32_t lower_sum = __shfl_up_sync(simt::kFullMask, inclusive_sum, delta);
        if (lane >= delta) inclusive_sum += lower_sum;
      }
      if (lane == simt::kWarpLanes - 1) memory.warp_scratch[warp] = inclusive_sum;
    }
    __syncthreads();
    if (digit < kDigits) {
      uint32_t base = inclusive_sum - cluster_count + earlier_blocks;
      for (unsigned w = 0; w < warp; ++w) base += memory.warp_scratch[w];
      memory.bases[digit] = base;
    }
    __syncthreads();
  }

  // Sort the items of the cluster by key, stable; each thread gets the items at its positions.
  // After a block has read its items at the end of a pass, no barrier is needed: the next pass
  // writes to other blocks' memory only after the cluster_sync in scan_digits.
  EMB_DEVICE void sort() {
    for (int shift = 0; shift < args.bits; shift += args.bits_per_pass) {
      uint32_t digit[kItems], warp_rank[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        digit[i] = key[i] >> shift & ((1u << args.bits_per_pass) - 1);
      }
      rank_in_warp(digit, warp_rank);
      __syncthreads();
      scan_digits();
      const uint32_t* const earlier_warps = memory.histograms + warp * kDigits;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const uint32_t target = memory.bases[digit[i]] + earlier_warps[digit[i]] + warp_rank[i];
        const unsigned target_item = target & (block_items - 1);
        const uint32_t block = target >> block_items_log2;
        simt::address_in_block(memory.keys, block)[target_item] = key[i];
        simt::address_in_block(memory.payloads, block)[target_item] = payload[i];
      }
      simt::cluster_sync();
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        key[i] = memory.keys[first_item + i * simt::kWarpLanes];
        payload[i] = memory.payloads[first_item + i * simt::kWarpLanes];
      }
    }
  }

  // Find where groups begin in the sorted items. For item i of this thread's warp, write to
  // head_lanes[i] the lanes whose key begins a group, as a bit mask. Return the number of groups
  // that begin before this warp's items. Also add to the tallies kGroups and kGroupedKeys, and wait
  // for the cluster: after this call all tallies of every block are complete.
  EMB_DEVICE uint32_t find_groups(uint32_t (&head_lanes)[kItems]) {
    uint32_t warp_groups = 0;  // groups that begin in the warp
    uint32_t num_grouped = 0;  // keys of this thread that belong to groups
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const unsigned item = first_item + i * simt::kWarpLanes;
      uint32_t previous_key = args.no_group_key;
      if (item > 0) {
        previous_key = memory.keys[item - 1];
      } else if (block_rank > 0) {
        previous_key = simt::address_in_block(memory.keys, block_rank - 1)[block_items - 1];
      }
      const bool is_valid = key[i] < args.no_group_key;
      head_lanes[i] = __ballot_sync(simt::kFullMask, is_valid && previous_key != key[i]);
      num_grouped += is_valid;
      warp_groups += __popc(head_lanes[i]);
    }
    if (lane == 0) memory.warp_scratch[warp] = warp_groups;
    count_in_block(memory, SmallGroupMemory::kGroups, lane == 0 ? warp_groups : 0);
    count_in_block(memory, SmallGroupMemory::kGroupedKeys, num_grouped);
    simt::cluster_sync();
    uint32_t groups_before = 0;
    for (unsigned w = 0; w < warp; ++w) groups_before += memory.warp_scratch[w];
    for (unsigned b = 0; b < block_rank; ++b) {
      groups_before += simt::address_in_block(memory.tallies, b)[SmallGroupMemory::kGroups];
    }
    return groups_before;
  }

  // Write the outputs of this thread's items, except those that are null. If groups are wanted, one
  // thread also writes num_groups and counts the update step; count_update_step may reduce
  // num_groups to 0. `head_lanes` and `first_group` are the results of find_groups.
  EMB_DEVICE void write(const uint32_t (&head_lanes)[kItems], uint32_t first_group) const {
    const DeviceGroupOutput& out = args.out;
    const uint32_t num_groups = cluster_total(memory, SmallGroupMemory::kGroups);
    const auto num_grouped =
        static_cast<int32_t>(cluster_total(memory, SmallGroupMemory::kGroupedKeys));
    if (block_rank == 0 && threadIdx.x == 0 && out.segments != nullptr) {
      *out.num_groups = count_update_step(out.step_count, static_cast<int>(num_groups));
      out.segments[args.n] = num_grouped;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int sorted_position = position(i);
      if (sorted_position < args.n) {
        if (args.sorted_positions != nullptr) {
          args.sorted_positions[sorted_position] =
              static_cast<int32_t>(payload[i] & ((1u << kPositionBits) - 1));
        }
        if (args.sorted_keys != nullptr) args.sorted_keys[sorted_position] = key[i];
        if (out.sorted_bags != nullptr)
          out.sorted_bags[sorted_position] = static_cast<int32_t>(payload[i] >> kPositionBits);
        if (out.segments != nullptr && static_cast<uint32_t>(sorted_position) >= num_groups) {
          write_unique(out, sorted_position, 0);
          out.segments[sorted_position] = num_grouped;
        }
        if (out.segments != nullptr && (head_lanes[i] >> lane & 1u)) {
          const uint32_t group = first_group + __popc(head_lanes[i] & ((1u << lane) - 1));
          write_unique(out, group, key[i]);
          out.segments[group] = sorted_position;
        }
      }
      // Now the first group that begins in item i + 1 of the warp.
      first_group += __popc(head_lanes[i]);
    }
  }
};

// Group the keys of `source` in one cluster, whose shape must be a SmallGroupPlan with kItems items
// per thread.
template <class Source, int kItems>
__global__ void __launch_bounds__(kSmallGroupThreads)
    small_group_kernel(Source source, SmallGroupArgs args) {
  const SmallGroupMemory memory(blockDim.x * kItems);
  if (threadIdx.x < SmallGroupMemory::kTallies) memory.tallies[threadIdx.x] = 0;
  __syncthreads();
  SmallGroupSort<kItems> sort(args, memory);
  sort.make_keys(source.prepare(memory));
  sort.sort();
  uint32_t head_lanes[kItems];
  const uint32_t first_group = sort.find_groups(head_lanes);
  source.report(memory);
  sort.write(head_lanes, first_group);
  simt::cluster_sync();  // no block leaves while another reads its memory
}

template <class Source>
using SmallGroupKernel = void (*)(Source, SmallGroupArgs);

// Return the kernel for 1, 2 or 4 items per thread.
template <class Source>
SmallGroupKernel<Source> find_small_group_kernel(int items_per_thread) {
  if (items_per_thread == 1) return small_group_kernel<Source, 1>;
  if (items_per_thread == 2) return small_group_kernel<Source, 2>;
  return small_group_kernel<Source, 4>;
}

// Return the maximum number of blocks in a cluster of the kernels for `Source`.
template <class Source, class Launcher>
unsigned max_small_cluster_blocks(const Launcher& launcher) {
  return launcher.max_cluster_blocks(small_group_kernel<Source, 1>);
}

// Group the keys of `source`. `plan` must be plan_small_group(args.n, max_cluster) and not {},
// where max_cluster is at most max_small_cluster_blocks<Source>(launcher). Bags must have numbers
// below kMaxSmallBags, so that they fit into a payload. Neither is checked.
template <class Source, class Launcher>
void launch_small_group(const Launcher& launcher, const SmallGroupPlan& plan, const Source& source,
                        SmallGroupArgs args) {
  args.block_items_log2 =
      static_cast<unsigned>(std::countr_zero(plan.threads * plan.items_per_thread));
  launcher.launch_cluster(
      find_small_group_kernel<Source>(plan.items_per_thread), plan.blocks, plan.threads,
      SmallGroupMemory::bytes(plan.threads, plan.items_per_thread), source, args);
}

}  // namespace emb::cuda
