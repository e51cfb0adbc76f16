// Grouping of a small batch in one launch: a cluster of blocks makes the keys, sorts them in shared
// memory, finds the groups of equal keys and writes the outputs of `group` or `tbe_group`. CUB
// would take several launches, whose overhead exceeds the work. A batch of up to 512 keys takes one
// block. A device without clusters has one block only, which takes up to 2,048 keys;
// plan_small_group leaves larger batches to CUB.
//
// The sort is a stable radix sort of up to kDigitBits bits per pass. In a pass, the new position of
// an item is the number of items that have a smaller digit, or the same digit and an earlier
// position. Within the warp these items are counted by ballots, over the warps of a block by one
// histogram per warp, and over the blocks by reading each other's totals. Then every item is
// written to its new position, in the shared memory of the block that has this position.
#pragma once

#include <algorithm>
#include <bit>

#include "group/segments.cuh"

namespace emb::cuda {

inline constexpr int kDigitBits = 7, kDigits = 1 << kDigitBits;
inline constexpr unsigned kSmallGroupThreads = 512;  // maximum number of threads per block
inline constexpr int kPositionBits = 14;             // bits of a payload for the position
inline constexpr int64_t kMaxSmallGroup = int64_t{1} << kPositionBits;  // keys
inline constexpr int64_t kMaxSmallBags = int64_t{1} << (32 - kPositionBits);
// Maximum number of blocks of a cluster; scan_digits unrolls a loop over it.
inline constexpr unsigned kMaxClusterBlocks = 8;
inline constexpr unsigned kMaxThreadItems = 4;  // maximum number of items per thread
static_assert(kMaxSmallGroup <= kMaxClusterBlocks * kSmallGroupThreads * kMaxThreadItems);

// The shape of a launch. All three are powers of two, and a block has at least one thread per
// digit; a batch that is too large for one launch has the plan {}, with 0 items.
struct SmallGroupPlan {
  int items_per_thread = 0;  // 1, 2 or 4
  unsigned threads = 0;      // threads per block
  unsigned blocks = 0;       // blocks of the cluster
};

// Return the plan for n keys and clusters of up to `max_cluster_blocks` blocks, a power of two. Of
// plans with equal capacities, more blocks with fewer items per thread were faster on an H100; the
// figures are not recorded.
inline SmallGroupPlan plan_small_group(int64_t n, unsigned max_cluster_blocks) {
  const auto size =
      static_cast<unsigned>(std::bit_ceil(static_cast<uint64_t>(std::max(n, int64_t{1}))));
  const unsigned threads = std::clamp(size, static_cast<unsigned>(kDigits), kSmallGroupThreads);
  const unsigned parts = std::max(size / threads, 1u);  // blocks with one item per thread
  const unsigned blocks = std::min({parts, max_cluster_blocks, kMaxClusterBlocks});
  const unsigned items = parts / blocks;
  if (n > kMaxSmallGroup || items > kMaxThreadItems) return {};
  return {static_cast<int>(items), threads, blocks};
}

// The shared memory of a block. All of it is dynamic, because blocks of a cluster access each
// other's. Its arrays, in the order of their members, have no gaps.
struct SmallGroupMemory {
  uint32_t *keys, *payloads;  // [blockDim * kItems], the items of this block
  uint32_t* histograms;       // [warps, kDigits]: the number of items of each digit in each warp;
                              // after scan_digits, in the earlier warps of the block
  uint32_t* totals;           // [kDigits]: the number of items of each digit in this block
  uint32_t* bases;         // [kDigits]: the position in the cluster of this block's first item of
                           // each digit
  uint32_t* warp_scratch;  // [kMaxWarps]: one number per warp
  uint32_t* tally;         // [kTallies], by Tally
  int* range;              // [kRangeWords], for a TileSearch

  static constexpr unsigned kMaxWarps = 32;  // maximum number of warps of a CUDA block
  static constexpr unsigned kRangeWords = 2;

  // The counts of a block in `tally`.
  enum Tally {
    kGroups,       // groups that begin in this block
    kGroupedKeys,  // keys of this block that belong to groups
    kBadIndices,   // invalid indices, see Source::Tile::num_bad
    // Violations of the offsets: the offsets that Source::prepared changed, plus the lost indices
    // (indices other than -1 before the first bag) that make_keys found.
    kOffsetViolations,
    kOffsetsToRepair,  // invalid offsets that Source::prepared found; if any, one block repairs all
    kTallies
  };

  // Where the arrays begin, and their end, for a block of `size` items and `warps` warps. `Word` is
  // the type of a position in the memory: a pointer, or a number of words.
  template <class Word>
  struct Layout {
    Word keys, payloads, histograms, totals, bases, warp_scratch, tally, range, end;

    EMB_HD Layout(Word begin, unsigned size, unsigned warps)
        : keys(begin),
          payloads(keys + size),
          histograms(payloads + size),
          totals(histograms + warps * kDigits),
          bases(totals + kDigits),
          warp_scratch(bases + kDigits),
          tally(warp_scratch + kMaxWarps),
          range(tally + kTallies),
          end(range + kRangeWords) {}
  };

  // Return the bytes of shared memory for `threads` threads with `items` items each.
  static size_t bytes(unsigned threads, int items) {
    return Layout<size_t>(0, threads * items, threads / simt::kWarpLanes).end * sizeof(uint32_t);
  }

  // The arrays in the dynamic shared memory of this block of `size` items.
  explicit EMB_DEVICE SmallGroupMemory(unsigned size) {
    const Layout<uint32_t*> layout(simt::dynamic_shared<uint32_t>(), size,
                                   blockDim.x / simt::kWarpLanes);
    keys = layout.keys;
    payloads = layout.payloads;
    histograms = layout.histograms;
    totals = layout.totals;
    bases = layout.bases;
    warp_scratch = layout.warp_scratch;
    tally = layout.tally;
    range = reinterpret_cast<int*>(layout.range);
  }
};

// Return the sum of a tally over the blocks of the cluster. The caller must have called
// cluster_sync after the last addition to the tally.
EMB_DEVICE uint32_t cluster_total(const SmallGroupMemory& memory, SmallGroupMemory::Tally which) {
  uint32_t sum = 0;
  for (unsigned b = 0; b < simt::cluster_size(); ++b)
    sum += simt::address_in_block(memory.tally, b)[which];
  return sum;
}

// Add the sum of `count` over the lanes of the warp to a tally of the block. All 32 lanes must call
// this.
EMB_DEVICE void count_in_block(const SmallGroupMemory& memory, SmallGroupMemory::Tally which,
                               uint32_t count) {
  count = __reduce_add_sync(simt::kFullMask, count);
  if (threadIdx.x % simt::kWarpLanes == 0 && count > 0) atomicAdd(memory.tally + which, count);
}

// The arguments of the kernel; outputs are in device memory of the caller.
struct SmallGroupArgs {
  int32_t n;                  // keys, at most kMaxSmallGroup
  uint32_t limit;             // the key that belongs to no group; no key is greater
  int bits, bits_per_pass;    // bits of keys up to `limit`, and bits that a pass sorts by
  int32_t* sorted_positions;  // [n] output: the positions in sorted order; null if not wanted
  uint32_t* sorted_keys;      // [n] output; null if not wanted
  DeviceGroupOutput out;      // with null `segments` if no groups are wanted
  unsigned size_bits = 0;     // log2 of the items per block; set by launch_small_group
};

// Return the arguments for n keys, without an output of sorted keys; `sorted_positions` may be
// null.
inline SmallGroupArgs small_group_args(int64_t n, uint32_t limit, int32_t* sorted_positions,
                                       const DeviceGroupOutput& out) {
  const int bits = std::max(1, static_cast<int>(std::bit_width(limit)));
  const int passes = (bits + kDigitBits - 1) / kDigitBits;
  return {static_cast<int32_t>(n), limit,   bits, (bits + passes - 1) / passes,
          sorted_positions,        nullptr, out};
}

// The keys come from a `Source`: GivenKeys, or the lookups of a batch (SmallLookups in
// tbe/keys.cuh). Its members are
//   kHasBags            whether keys have bags, and violations are counted
//   prepared(memory)    returns the source to make the keys from. All threads of the cluster call
//                       it: it may check and repair, add to tallies, and contain cluster barriers
//   Tile(source, begin, end, range)  the state of a thread for positions [begin, end), not empty.
//                       All threads of the block construct it: it may contain block barriers
//     key(source, i, limit, &bag)      returns the key of position i, `limit` if it belongs to no
//                                      group, and writes its bag; counts a violation in the Tile
//     num_bad(), num_lost()            invalid indices, and indices other than -1 before the first
//                                      bag, so far in this thread
//   report(memory)      writes the sums of the tallies of violations. All threads call it after a
//                       cluster_sync that completes the tallies; one of them writes

// The keys of the op `group`, [n] in device memory; keys outside [0, limit) belong to no group.
struct GivenKeys {
  static constexpr bool kHasBags = false;
  IndexArray keys;

  EMB_DEVICE GivenKeys prepared(const SmallGroupMemory&) const { return *this; }

  struct Tile {
    EMB_DEVICE Tile(const GivenKeys&, int64_t, int64_t, int*) {}
    EMB_DEVICE uint32_t key(const GivenKeys& source, int64_t i, uint32_t limit, uint32_t*) const {
      const int64_t key = source.keys[i];
      return key >= 0 && key < limit ? static_cast<uint32_t>(key) : limit;
    }
    EMB_DEVICE uint32_t num_bad() const { return 0; }
    EMB_DEVICE uint32_t num_lost() const { return 0; }
  };
  EMB_DEVICE void report(const SmallGroupMemory&) const {}
};

// The sort and the grouping, as one thread sees them. All threads of the cluster must call every
// function except `position`.
//
// An item is a key and a payload: the position of the key and, from bit kPositionBits on, the bag
// of a lookup. Every block has blockDim * kItems neighbouring items of the sequence, before and
// after the sort, and every warp 32 * kItems of these. Item i of a lane is number 32 * i + lane of
// its warp. Items beyond n have keys with all args.bits bits set: the sort leaves them behind all
// keys of the batch, and they are not written.
template <int kItems>
struct SmallGroupSort {
  uint32_t key[kItems], payload[kItems];  // of the thread's items
  const SmallGroupArgs& args;
  const SmallGroupMemory& memory;
  unsigned block_rank;       // rank of the block in the cluster
  unsigned lane, warp;       // of the thread in its block
  unsigned first_item;       // number of the thread's item 0 in its block; item i is 32 * i later
  unsigned size, size_bits;  // items per block, and log2 of that

  EMB_DEVICE SmallGroupSort(const SmallGroupArgs& args_, const SmallGroupMemory& memory_)
      : args(args_),
        memory(memory_),
        block_rank(simt::cluster_rank()),
        lane(threadIdx.x % simt::kWarpLanes),
        warp(threadIdx.x / simt::kWarpLanes),
        first_item(warp * simt::kWarpLanes * kItems + lane),
        size(blockDim.x * kItems),
        size_bits(args_.size_bits) {}

  // Return the position of item i in the cluster: its position in the batch before the sort, its
  // position in sorted order after it.
  EMB_DEVICE int position(int i) const {
    return static_cast<int>(block_rank * size + first_item + i * simt::kWarpLanes);
  }

  // Make the items of this thread, and add the violations that `source` counts to the tallies.
  template <class Source>
  EMB_DEVICE void make_keys(const Source& source) {
    const int first = static_cast<int>(block_rank * size);
    const int end =
        first + static_cast<int>(size) < args.n ? first + static_cast<int>(size) : args.n;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      key[i] = args.bits >= 32 ? 0xffffffffu : (1u << args.bits) - 1;
      payload[i] = 0;
    }
    if (first >= end) return;
    typename Source::Tile tile(source, first, end, memory.range);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      if (position(i) >= end) continue;
      uint32_t bag = 0;
      key[i] = tile.key(source, position(i), args.limit, &bag);
      payload[i] = static_cast<uint32_t>(position(i)) | bag << kPositionBits;
    }
    if constexpr (Source::kHasBags) {
      count_in_block(memory, SmallGroupMemory::kBadIndices, tile.num_bad());
      count_in_block(memory, SmallGroupMemory::kOffsetViolations, tile.num_lost());
    }
  }

  // Write to `before`, for every item, how many items of the same digit precede it in its warp, and
  // to the histogram of the warp, for every digit, how many items of the warp have it.
  EMB_DEVICE void rank_in_warp(const uint32_t (&digit)[kItems], uint32_t (&before)[kItems]) {
    uint32_t* const counts = memory.histograms + warp * kDigits;
#pragma unroll
    for (int d = 0; d < kDigits; d += simt::kWarpLanes) counts[d + lane] = 0;
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      uint32_t peers = simt::kFullMask;
#pragma unroll
      for (int b = 0; b < kDigitBits; ++b) {
        const bool bit = (digit[i] >> b & 1u) != 0;
        const uint32_t votes = __ballot_sync(simt::kFullMask, bit);
        peers &= bit ? votes : ~votes;
      }
      const uint32_t count = counts[digit[i]], lower = __popc(peers & ((1u << lane) - 1));
      before[i] = count + lower;
      __syncwarp();
      if (lower == 0) counts[digit[i]] = count + __popc(peers);
      __syncwarp();
    }
  }

  // Replace each count in the histograms by the number of items of its digit in the earlier warps
  // of the block. Write `totals` and `bases` for every digit. One thread per digit computes; all
  // threads wait at one barrier of the cluster and two of the block.
  EMB_DEVICE void scan_digits() {
    const unsigned digit = threadIdx.x;
    uint32_t total = 0;
    if (digit < kDigits) {
#pragma unroll 8
      for (unsigned w = 0; w < blockDim.x / simt::kWarpLanes; ++w) {
        uint32_t& count = memory.histograms[w * kDigits + digit];
        const uint32_t before = total;
        total += count;
        count = before;
      }
      memory.totals[digit] = total;
    }
    simt::cluster_sync();
    uint32_t before = 0, all = 0, inclusive = 0;
    if (digit < kDigits) {
      const unsigned blocks = simt::cluster_size();
#pragma unroll
      for (unsigned b = 0; b < kMaxClusterBlocks; ++b) {  // a constant bound: all loads at once
        const uint32_t count = simt::address_in_block(memory.totals, b < blocks ? b : 0)[digit];
        if (b < block_rank) before += count;
        if (b < blocks) all += count;
      }
      inclusive = all;
#pragma unroll
      for (unsigned delta = 1; delta < simt::kWarpLanes; delta *= 2) {
        const uint32_t other = __shfl_up_sync(simt::kFullMask, inclusive, delta);
        if (lane >= delta) inclusive += other;
      }
      if (lane == simt::kWarpLanes - 1) memory.warp_scratch[warp] = inclusive;
    }
    __syncthreads();
    if (digit < kDigits) {
      uint32_t base = inclusive - all + before;
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
      uint32_t digit[kItems], before[kItems];
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        digit[i] = key[i] >> shift & ((1u << args.bits_per_pass) - 1);
      }
      rank_in_warp(digit, before);
      __syncthreads();
      scan_digits();
      const uint32_t* const warps_before = memory.histograms + warp * kDigits;
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        const uint32_t target = memory.bases[digit[i]] + warps_before[digit[i]] + before[i];
        const unsigned target_item = target & (size - 1);
        const uint32_t block = target >> size_bits;
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

  // For each item, which `sort` has sorted, write to `heads` a mask of the lanes of the warp whose
  // key begins a group. Return the number of groups that begin before this warp's items. Add to the
  // tallies kGroups and kGroupedKeys; the cluster_sync after that completes all tallies of every
  // block.
  EMB_DEVICE uint32_t find_groups(uint32_t (&heads)[kItems]) {
    uint32_t warp_groups = 0;  // groups that begin in the warp
    uint32_t num_grouped = 0;  // keys of this thread that belong to groups
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const unsigned item = first_item + i * simt::kWarpLanes;
      uint32_t previous = args.limit;
      if (item > 0) {
        previous = memory.keys[item - 1];
      } else if (block_rank > 0) {
        previous = simt::address_in_block(memory.keys, block_rank - 1)[size - 1];
      }
      const bool valid = key[i] < args.limit;
      heads[i] = __ballot_sync(simt::kFullMask, valid && previous != key[i]);
      num_grouped += valid;
      warp_groups += __popc(heads[i]);
    }
    if (lane == 0) memory.warp_scratch[warp] = warp_groups;
    count_in_block(memory, SmallGroupMemory::kGroups, lane == 0 ? warp_groups : 0);
    count_in_block(memory, SmallGroupMemory::kGroupedKeys, num_grouped);
    simt::cluster_sync();
    uint32_t before = 0;
    for (unsigned w = 0; w < warp; ++w) before += memory.warp_scratch[w];
    for (unsigned b = 0; b < block_rank; ++b) {
      before += simt::address_in_block(memory.tally, b)[SmallGroupMemory::kGroups];
    }
    return before;
  }

  // Write the outputs of this thread's items, except those that are null. If groups are wanted, one
  // thread also writes num_groups and counts the update step (count_update_step, which may reduce
  // num_groups to 0). `heads` and `first_group` are what find_groups wrote and returned.
  EMB_DEVICE void write(const uint32_t (&heads)[kItems], uint32_t first_group) const {
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
      const int sorted = position(i);
      if (sorted < args.n) {
        if (args.sorted_positions != nullptr) {
          args.sorted_positions[sorted] =
              static_cast<int32_t>(payload[i] & ((1u << kPositionBits) - 1));
        }
        if (args.sorted_keys != nullptr) args.sorted_keys[sorted] = key[i];
        if (out.sorted_bags != nullptr)
          out.sorted_bags[sorted] = static_cast<int32_t>(payload[i] >> kPositionBits);
        if (out.segments != nullptr && static_cast<uint32_t>(sorted) >= num_groups) {
          write_unique(out, sorted, 0);
          out.segments[sorted] = num_grouped;
        }
        if (out.segments != nullptr && (heads[i] >> lane & 1u)) {
          const uint32_t group = first_group + __popc(heads[i] & ((1u << lane) - 1));
          write_unique(out, group, key[i]);
          out.segments[group] = sorted;
        }
      }
      first_group += __popc(heads[i]);  // now the first group that begins in item i + 1 of the warp
    }
  }
};

// Group the keys of `source` by one cluster, whose shape is a SmallGroupPlan with kItems items per
// thread.
template <class Source, int kItems>
__global__ void __launch_bounds__(kSmallGroupThreads)
    small_group_kernel(Source source, SmallGroupArgs args) {
  const SmallGroupMemory memory(blockDim.x * kItems);
  if (threadIdx.x < SmallGroupMemory::kTallies) memory.tally[threadIdx.x] = 0;
  __syncthreads();
  SmallGroupSort<kItems> sort(args, memory);
  sort.make_keys(source.prepared(memory));
  sort.sort();
  uint32_t heads[kItems];
  const uint32_t first_group = sort.find_groups(heads);
  source.report(memory);
  sort.write(heads, first_group);
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
unsigned max_small_cluster(const Launcher& launcher) {
  return launcher.max_cluster_blocks(small_group_kernel<Source, 1>);
}

// Group the keys of `source`. `plan` must be plan_small_group(args.n, ...) and not {}. A source
// with bags must have at most kMaxSmallBags, so that a payload has room for their numbers. Neither
// is checked.
template <class Source, class Launcher>
void launch_small_group(const Launcher& launcher, const SmallGroupPlan& plan, const Source& source,
                        SmallGroupArgs args) {
  args.size_bits = static_cast<unsigned>(std::countr_zero(plan.threads * plan.items_per_thread));
  launcher.launch_cluster(
      find_small_group_kernel<Source>(plan.items_per_thread), plan.blocks, plan.threads,
      SmallGroupMemory::bytes(plan.threads, plan.items_per_thread), source, args);
}

}  // namespace emb::cuda
