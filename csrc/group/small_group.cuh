// Grouping of a small batch in one launch: a cluster of blocks makes the keys, sorts them in shared
// memory, finds the runs and writes all that `group` returns. CUB would take five launches, most of
// whose time is not work.
//
// A block holds blockDim * kItems neighbouring keys; item i of a lane is element i * 32 + lane of
// its warp's part, so order within a warp is order by (item, lane). Every pass of the radix sort
// ranks by up to kDigitBits bits, stably: equal digits within the warp by ballots, then warps by a
// histogram each, then blocks by reading each other's totals. Pairs go to their place in the memory
// of the block that holds it. A payload is the position and, 14 bits up, the bag of a lookup. Keys
// beyond n have all bits set: they follow the keys of no group and are dropped.
//
// A device without clusters runs one block. `Source` makes the keys: GivenKeys below, or lookups
// (tbe/keys.cuh).
#pragma once

#include <algorithm>
#include <bit>

#include "group/segments.cuh"

namespace emb::cuda {

inline constexpr int kDigitBits = 7, kDigits = 1 << kDigitBits;
inline constexpr unsigned kSmallThreads = 512;  // most threads per block, at least one per digit
inline constexpr int kPositionBits = 14;
inline constexpr int64_t kMaxSmallGroup = int64_t{1} << kPositionBits;
inline constexpr int64_t kMaxSmallBags = int64_t{1} << (32 - kPositionBits);

// How many keys each thread holds, threads per block, blocks of the cluster; no items: too many.
struct SmallGroupPlan {
  int items = 0;
  unsigned threads = 0, blocks = 0;
};

// Measured on an H100: of equal capacities, more blocks with fewer items per thread are faster.
inline SmallGroupPlan plan_small_group(int64_t n, unsigned max_cluster) {
  const auto size =
      static_cast<unsigned>(std::bit_ceil(static_cast<uint64_t>(std::max(n, int64_t{1}))));
  const unsigned threads = std::clamp(size, static_cast<unsigned>(kDigits), kSmallThreads);
  const unsigned parts = std::max(size / threads, 1u);  // blocks with one item per thread
  const unsigned blocks = std::min(parts, max_cluster), items = parts / blocks;
  if (n > kMaxSmallGroup || items > 4) return {};
  return {static_cast<int>(items), threads, blocks};
}

// The shared memory of a block, all of it dynamic: blocks reach each other's.
struct SmallMemory {
  uint32_t *keys, *payloads;  // [blockDim * kItems]
  uint32_t* histograms;       // [warps, kDigits]
  uint32_t *totals, *bases;   // [kDigits]
  uint32_t* of_warp;          // [32]
  uint32_t* tally;            // [kTallies]
  int* range;                 // [2]

  // Groups that begin here, keys that belong to groups; for lookups, invalid indices, offsets that
  // were repaired and indices before them, offsets that are not valid.
  enum Tally { kBegun, kGrouped, kBadIndices, kBadOffsets, kInvalid, kTallies };

  static size_t bytes(unsigned threads, int items) {
    return (2 * size_t{threads} * items + (threads / simt::kWarp + 2) * kDigits + 32 + kTallies +
            2) *
           sizeof(uint32_t);
  }

  explicit EMB_DEVICE SmallMemory(unsigned size) {
    keys = simt::dynamic_shared<uint32_t>();
    payloads = keys + size;
    histograms = payloads + size;
    totals = histograms + blockDim.x / simt::kWarp * kDigits;
    bases = totals + kDigits;
    of_warp = bases + kDigits;
    tally = of_warp + 32;
    range = reinterpret_cast<int*>(tally + kTallies);
  }
};

// Return the sum of a tally over the blocks of the cluster.
EMB_DEVICE uint32_t cluster_total(const SmallMemory& memory, SmallMemory::Tally which) {
  uint32_t sum = 0;
  for (unsigned b = 0; b < simt::cluster_size(); ++b) sum += simt::of_block(memory.tally, b)[which];
  return sum;
}

// Add what the lanes of a warp counted to a tally of the block.
EMB_DEVICE void count_in_block(const SmallMemory& memory, SmallMemory::Tally which,
                               uint32_t count) {
  count = __reduce_add_sync(simt::kFullMask, count);
  if (threadIdx.x % simt::kWarp == 0 && count > 0) atomicAdd(memory.tally + which, count);
}

struct SmallGroupArgs {
  int32_t n;
  uint32_t limit;
  int bits, bits_per_pass;  // bits that keys up to `limit` have, and bits sorted per pass
  int32_t* positions;       // [n] outputs; null: none
  uint32_t* sorted_keys;    // [n]
  GroupOutput out;          // null `segments`: no groups
  unsigned block_bits = 0;  // a block holds 2^block_bits keys; set by the launch
};

inline SmallGroupArgs small_group_args(int64_t n, uint32_t limit, int32_t* positions,
                                       const GroupOutput& out) {
  const int bits = std::max(1, static_cast<int>(std::bit_width(limit)));
  const int passes = (bits + kDigitBits - 1) / kDigitBits;
  return {
      static_cast<int32_t>(n), limit, bits, (bits + passes - 1) / passes, positions, nullptr, out};
}

// The keys of `group`: those outside [0, limit) belong to no group.
struct GivenKeys {
  static constexpr bool kHasBags = false;
  IndexArray keys;

  EMB_DEVICE GivenKeys prepared(const SmallMemory&) const { return *this; }

  struct Tile {
    EMB_DEVICE Tile(const GivenKeys&, int64_t, int64_t, int*) {}
    EMB_DEVICE uint32_t key(const GivenKeys& source, int64_t i, uint32_t limit, uint32_t*) const {
      const int64_t key = source.keys[i];
      return key >= 0 && key < limit ? static_cast<uint32_t>(key) : limit;
    }
    EMB_DEVICE uint32_t num_bad() const { return 0; }
    EMB_DEVICE uint32_t num_lost() const { return 0; }
  };
  EMB_DEVICE void report(const SmallMemory&) const {}
};

template <int kItems>
struct SmallSort {
  uint32_t key[kItems], payload[kItems];
  const SmallGroupArgs& args;
  const SmallMemory& memory;
  unsigned rank, lane, warp, own;  // own: the thread's first element in its block
  unsigned size, size_bits;        // keys per block, and log2 of that

  EMB_DEVICE SmallSort(const SmallGroupArgs& args_, const SmallMemory& memory_)
      : args(args_),
        memory(memory_),
        rank(simt::cluster_rank()),
        lane(threadIdx.x % simt::kWarp),
        warp(threadIdx.x / simt::kWarp),
        own(warp * simt::kWarp * kItems + lane),
        size(blockDim.x * kItems),
        size_bits(args_.block_bits) {}

  // Return the position of item i in the batch.
  EMB_DEVICE int position(int i) const {
    return static_cast<int>(rank * size + own + i * simt::kWarp);
  }

  template <class Source>
  EMB_DEVICE void make_keys(const Source& source) {
    const int first = static_cast<int>(rank * size);
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
      count_in_block(memory, SmallMemory::kBadIndices, tile.num_bad());
      count_in_block(memory, SmallMemory::kBadOffsets, tile.num_lost());
    }
  }

  // Return the keys of the same digit before each item in its warp; leave the warp's counts.
  EMB_DEVICE void rank_in_warp(const uint32_t (&digit)[kItems], uint32_t (&before)[kItems]) {
    uint32_t* const counts = memory.histograms + warp * kDigits;
#pragma unroll
    for (int d = 0; d < kDigits; d += simt::kWarp) counts[d + lane] = 0;
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

  // Turn the counts of the warps into those of the warps before, and find where each digit of this
  // block begins in the order of the cluster. A thread per digit.
  EMB_DEVICE void scan_digits() {
    const unsigned digit = threadIdx.x;
    uint32_t total = 0;
    if (digit < kDigits) {
#pragma unroll 8
      for (unsigned w = 0; w < blockDim.x / simt::kWarp; ++w) {
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
      for (unsigned b = 0; b < 8; ++b) {  // loads of all blocks at once
        const uint32_t count = simt::of_block(memory.totals, b < blocks ? b : 0)[digit];
        if (b < rank) before += count;
        if (b < blocks) all += count;
      }
      inclusive = all;
#pragma unroll
      for (unsigned delta = 1; delta < simt::kWarp; delta *= 2) {
        const uint32_t other = __shfl_up_sync(simt::kFullMask, inclusive, delta);
        if (lane >= delta) inclusive += other;
      }
      if (lane == simt::kWarp - 1) memory.of_warp[warp] = inclusive;
    }
    __syncthreads();
    if (digit < kDigits) {
      uint32_t base = inclusive - all + before;
      for (unsigned w = 0; w < warp; ++w) base += memory.of_warp[w];
      memory.bases[digit] = base;
    }
    __syncthreads();
  }

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
        const uint32_t to = memory.bases[digit[i]] + warps_before[digit[i]] + before[i];
        const unsigned at = to & (size - 1);
        simt::of_block(memory.keys, to >> size_bits)[at] = key[i];
        simt::of_block(memory.payloads, to >> size_bits)[at] = payload[i];
      }
      simt::cluster_sync();
#pragma unroll
      for (int i = 0; i < kItems; ++i) {
        key[i] = memory.keys[own + i * simt::kWarp];
        payload[i] = memory.payloads[own + i * simt::kWarp];
      }
    }
  }

  // Return, for each item, a bit per lane of the warp whose key begins a group; count them.
  EMB_DEVICE uint32_t find_groups(uint32_t (&heads)[kItems]) {
    uint32_t begun = 0, grouped = 0;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const unsigned at = own + i * simt::kWarp;
      uint32_t previous = args.limit;
      if (at > 0) {
        previous = memory.keys[at - 1];
      } else if (rank > 0) {
        previous = simt::of_block(memory.keys, rank - 1)[size - 1];
      }
      const bool valid = key[i] < args.limit;
      heads[i] = __ballot_sync(simt::kFullMask, valid && previous != key[i]);
      grouped += valid;
      begun += __popc(heads[i]);
    }
    if (lane == 0) memory.of_warp[warp] = begun;
    count_in_block(memory, SmallMemory::kBegun, lane == 0 ? begun : 0);
    count_in_block(memory, SmallMemory::kGrouped, grouped);
    simt::cluster_sync();
    uint32_t before = 0;
    for (unsigned w = 0; w < warp; ++w) before += memory.of_warp[w];
    for (unsigned b = 0; b < rank; ++b) {
      before += simt::of_block(memory.tally, b)[SmallMemory::kBegun];
    }
    return before;
  }

  EMB_DEVICE void write(const uint32_t (&heads)[kItems], uint32_t group) const {
    const GroupOutput& out = args.out;
    const uint32_t count = cluster_total(memory, SmallMemory::kBegun);
    const auto grouped = static_cast<int32_t>(cluster_total(memory, SmallMemory::kGrouped));
    if (rank == 0 && threadIdx.x == 0 && out.segments != nullptr) {
      *out.count = count_step(out.step, static_cast<int>(count));
      out.segments[args.n] = grouped;
    }
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int at = position(i);
      if (at < args.n) {
        if (args.positions != nullptr) {
          args.positions[at] = static_cast<int32_t>(payload[i] & ((1u << kPositionBits) - 1));
        }
        if (args.sorted_keys != nullptr) args.sorted_keys[at] = key[i];
        if (out.bags != nullptr) out.bags[at] = static_cast<int32_t>(payload[i] >> kPositionBits);
        if (out.segments != nullptr && static_cast<uint32_t>(at) >= count) {
          put_unique(out, at, 0);
          out.segments[at] = grouped;
        }
        if (out.segments != nullptr && (heads[i] >> lane & 1u)) {
          const uint32_t u = group + __popc(heads[i] & ((1u << lane) - 1));
          put_unique(out, u, key[i]);
          out.segments[u] = at;
        }
      }
      group += __popc(heads[i]);
    }
  }
};

template <class Source, int kItems>
__global__ void __launch_bounds__(kSmallThreads)
    small_group_kernel(Source source, SmallGroupArgs args) {
  const SmallMemory memory(blockDim.x * kItems);
  if (threadIdx.x < SmallMemory::kTallies) memory.tally[threadIdx.x] = 0;
  __syncthreads();
  SmallSort<kItems> sort(args, memory);
  sort.make_keys(source.prepared(memory));
  sort.sort();
  uint32_t heads[kItems];
  const uint32_t group = sort.find_groups(heads);
  source.report(memory);
  sort.write(heads, group);
  simt::cluster_sync();  // no block leaves while another reads its memory
}

template <class Source>
using SmallGroupKernel = void (*)(Source, SmallGroupArgs);

// Return the kernel for 1, 2 or 4 keys per thread.
template <class Source>
SmallGroupKernel<Source> find_small_group_kernel(int items) {
  return items == 1   ? small_group_kernel<Source, 1>
         : items == 2 ? small_group_kernel<Source, 2>
                      : small_group_kernel<Source, 4>;
}

// Return the largest cluster that the kernels for `Source` may be started in.
template <class Source, class Launcher>
unsigned max_small_cluster(const Launcher& launcher) {
  return launcher.max_cluster(small_group_kernel<Source, 1>);
}

template <class Source, class Launcher>
void launch_small_group(const Launcher& launcher, const SmallGroupPlan& plan, const Source& source,
                        SmallGroupArgs args) {
  args.block_bits = static_cast<unsigned>(std::countr_zero(plan.threads * plan.items));
  launcher.cluster(find_small_group_kernel<Source>(plan.items), plan.blocks, plan.threads,
                   SmallMemory::bytes(plan.threads, plan.items), source, args);
}

}  // namespace emb::cuda
