// The keys by which the lookups of a batch are grouped: the key of a lookup is its linear row id.
// Skipped lookups (index -1, a table without rows, or before the first bag) get `no_group_key`,
// which belongs to no group. The same kernel writes the bag of each lookup, and can check indices
// and offsets.
//
// lookup_keys_kernel works in these steps:
//   (1) Each thread checks some offsets, if the batch is to be checked.
//   (2) Blocks make the keys of tiles of lookups from the unrepaired offsets. For each bag that
//       begins in a tile, the number of the bag is written at its first lookup; the running maximum
//       of these numbers is then the bag of each lookup (find_bags).
//   (3) If an offset is invalid, the block that finishes last (finish_block) repairs all offsets
//       and makes all keys again. This is slow, but such batches are rare.
//   (4) This block reports the violations.
// SmallLookups has the same steps for the one-launch grouping of a small batch.
#pragma once

#include "core/search.cuh"
#include "group/small_group.cuh"
#include "tbe/offsets.cuh"

namespace emb::cuda {

// The lookups of a batch, whose keys a kernel makes. All pointers are to device memory. A batch
// without bags has no lookups (check_lookups).
struct KeySource {
  const Feature* features;  // [F], trusted
  IndexArray indices;       // [L], contents not checked
  Bags bags;
  BagMap map;
  // [L], an output: the bag of each lookup, 0 for a lookup before the first bag; null: not written.
  int32_t* bag_of;
};

// The numbers of bad indices that a thread has read. `num_invalid` counts indices in bags that are
// neither -1 nor rows of their table. `num_lost` counts indices before the first bag other than -1.
struct BadIndexCounts {
  int num_invalid = 0, num_lost = 0;
};

// Return the key of lookup i: its linear row id, or `no_group_key` for a skipped lookup or an id
// that is not below `no_group_key`. `bag` is the bag of the lookup, -1 before the first bag. If the
// index is invalid or lost, count it in `counts`.
template <class Key>
EMB_DEVICE Key lookup_key(const KeySource& source, int64_t i, int bag, Key no_group_key,
                          BadIndexCounts* counts) {
  const int64_t index = source.indices[i];
  if (bag < 0) {
    counts->num_lost += index != -1;
    return no_group_key;
  }
  const Feature& feature = source.features[source.map.feature(static_cast<uint32_t>(bag))];
  const int64_t row = repair_index(index, feature.rows);
  counts->num_invalid += !((index >= 0 && index < feature.rows) || index == -1);
  if (row < 0 || row >= feature.rows) return no_group_key;
  const auto id = static_cast<uint64_t>(feature.row_base + row);
  return id < no_group_key ? static_cast<Key>(id) : no_group_key;
}

// Lookups per thread and tile, and per tile of a block.
inline constexpr int kKeysPerThread = 8, kTileLookups = kTileThreads * kKeysPerThread;

// The shared memory of a block that makes keys.
struct KeyTileStorage {
  int bags[kTileLookups];                             // the bag of each lookup of the tile
  int warp_scratch[kTileThreads / simt::kWarpLanes];  // a number per warp
  int range[2];                                       // for TileSearch
};

// Write the bag of each lookup in [tile, end), at most kTileLookups, to shared.bags, -1 for a
// lookup before the first bag. All kTileThreads threads of the block must call this; it has
// barriers, the last one at its end. Before the next call, the caller needs one after its last read
// of `shared`.
EMB_DEVICE void find_bags(const Bags& bags, int64_t tile, int64_t end, KeyTileStorage& shared) {
  const auto start = [&](int bag) { return bags.begin(bag); };
  const unsigned lane = threadIdx.x % simt::kWarpLanes, warp = threadIdx.x / simt::kWarpLanes;
  for (int i = static_cast<int>(threadIdx.x); i < kTileLookups; i += kTileThreads)
    shared.bags[i] = -1;
  const TileSearch search(start, static_cast<int>(bags.num_bags), tile, end, shared.range);
  for (int64_t bag = search.first + 1 + int64_t{threadIdx.x}; bag <= search.last;
       bag += kTileThreads) {
    const int64_t first_lookup = start(static_cast<int>(bag)) - tile;
    if (first_lookup >= 0 && first_lookup < kTileLookups)
      atomicMax(&shared.bags[first_lookup], static_cast<int>(bag));
  }
  __syncthreads();
  int* const bags_of_thread = shared.bags + threadIdx.x * kKeysPerThread;
  int bag[kKeysPerThread], maximum = search.first;
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) bag[i] = maximum = max_of(maximum, bags_of_thread[i]);
#pragma unroll
  for (unsigned delta = 1; delta < simt::kWarpLanes; delta *= 2) {
    const int lower_maximum = __shfl_up_sync(simt::kFullMask, maximum, delta);
    if (lane >= delta) maximum = max_of(maximum, lower_maximum);
  }
  if (lane == simt::kWarpLanes - 1) shared.warp_scratch[warp] = maximum;
  int maximum_before = __shfl_up_sync(simt::kFullMask, maximum, 1u);
  if (lane == 0) maximum_before = search.first;
  __syncthreads();
  for (unsigned w = 0; w < warp; ++w)
    maximum_before = max_of(maximum_before, shared.warp_scratch[w]);
#pragma unroll
  for (int i = 0; i < kKeysPerThread; ++i) bags_of_thread[i] = max_of(bag[i], maximum_before);
  __syncthreads();
}

// Write the keys, positions and bags of the kTileLookups lookups from `tile` on, or fewer at the
// end. `bags` is source.bags, or the same bags with repaired offsets. A null array in `buffers` or
// `source` is not written. Count this thread's bad indices in `counts`. All threads of the block
// must call this; it has barriers, the last one at its end.
template <class Key>
EMB_DEVICE void make_keys(const KeySource& source, const Bags& bags,
                          const SortBuffers<Key>& buffers, int64_t tile, KeyTileStorage& shared,
                          BadIndexCounts* counts) {
  const int64_t end =
      tile + kTileLookups < bags.num_lookups ? tile + kTileLookups : bags.num_lookups;
  find_bags(bags, tile, end, shared);
#pragma unroll
  for (int j = 0; j < kKeysPerThread; ++j) {
    const int tile_position = j * kTileThreads + static_cast<int>(threadIdx.x);
    const int64_t i = tile + tile_position;
    if (i >= end) continue;
    const int bag = shared.bags[tile_position];
    const Key key = lookup_key(source, i, bag, buffers.no_group_key, counts);
    if (buffers.keys != nullptr) buffers.keys[i] = key;
    if (buffers.positions != nullptr) buffers.positions[i] = static_cast<int32_t>(i);
    if (source.bag_of != nullptr) source.bag_of[i] = bag < 0 ? 0 : bag;
  }
  __syncthreads();
}

// The violations that the blocks of a grid have counted. The numbers are set only in the block that
// finishes last, where `is_last` is true.
struct GridCounts {
  int64_t num_invalid, num_lost;  // indices, see BadIndexCounts
  int64_t num_bad_offsets;        // invalid offsets; after the repair, offsets that it changed
  bool is_last;
};

// Add the counts of this block, of which each thread passes its part, to `check.progress`. In the
// block that finishes last, return the counts of the grid. A grid of one block does not use
// check.progress. All threads of the block must call this; it has barriers.
//
// The first word counts invalid indices in its lower 32 bits and lost indices in the upper 32. The
// second word counts invalid offsets in its lower 40 bits and finished blocks in the upper 24.
// These bits suffice, because there are fewer than 2^31 lookups and bags. Both words must be 0
// before the launch. The block *arrives* when it adds to the second word. The first fence orders
// the keys that the block wrote before its arrival, because the last block may overwrite them. The
// second orders its counts of indices before its arrival. The third orders all arrivals before the
// last block reads the counts of indices.
EMB_DEVICE GridCounts finish_block(const BatchCheck& check, const BadIndexCounts& thread_counts,
                                   int num_invalid_offsets) {
  constexpr int kLostShift = 32, kFinishedShift = 40;
  __shared__ GridCounts totals;
  __threadfence();
  const int num_invalid = block_sum(thread_counts.num_invalid),
            num_lost = block_sum(thread_counts.num_lost);
  num_invalid_offsets = block_sum(num_invalid_offsets);
  if (gridDim.x == 1) return {num_invalid, num_lost, num_invalid_offsets, true};
  if (threadIdx.x == 0) {
    const unsigned long long lost_bits = static_cast<unsigned>(num_lost);
    atomicAdd(&check.progress[0], static_cast<unsigned>(num_invalid) + (lost_bits << kLostShift));
    __threadfence();
    const unsigned long long one_block = 1ull << kFinishedShift;
    const unsigned long long offsets_of_block = static_cast<unsigned>(num_invalid_offsets);
    const unsigned long long earlier_counts =
        atomicAdd(&check.progress[1], one_block + offsets_of_block);
    __threadfence();
    const bool is_last = (earlier_counts >> kFinishedShift) == gridDim.x - 1;
    totals = {0, 0, 0, is_last};
    if (is_last) {
      const unsigned long long index_counts = atomicAdd(&check.progress[0], 0ull);
      totals.num_invalid = static_cast<int64_t>(index_counts & ((1ull << kLostShift) - 1));
      totals.num_lost = static_cast<int64_t>(index_counts >> kLostShift);
      totals.num_bad_offsets =
          static_cast<int64_t>((earlier_counts & (one_block - 1)) + offsets_of_block);
    }
  }
  __syncthreads();
  return totals;
}

// Minimum number of blocks per multiprocessor: six leave a thread 40 registers. Without the bound
// the compiler uses 32 registers and spills.
inline constexpr int kKeyBlocksPerSm = 6;

// Write the keys, positions and bags of all lookups to those arrays of `buffers` and `source` that
// are not null. Unless check.repaired_offsets is null, check the batch and report its violations.
// check.progress must be 0 before, unless there is one block.
template <class Key>
__global__ void __launch_bounds__(kTileThreads, kKeyBlocksPerSm)
    lookup_keys_kernel(KeySource source, BatchCheck check, SortBuffers<Key> buffers) {
  __shared__ KeyTileStorage shared;
  const int64_t n = source.bags.num_lookups;
  Bags bags = source.bags;
  int num_invalid_offsets = 0;
  if (check.repaired_offsets != nullptr) {
    num_invalid_offsets =
        count_invalid_offsets(bags, check, simt::global_thread(), simt::threads_in_grid());
  }
  int64_t first = static_cast<int64_t>(blockIdx.x) * kTileLookups;
  int64_t step = static_cast<int64_t>(gridDim.x) * kTileLookups;
  GridCounts totals{};
  // One loop runs both passes, so that the kernel contains the code of make_keys once.
#pragma unroll 1
  for (bool is_repaired = false;; is_repaired = true) {
    BadIndexCounts counts;
    for (int64_t tile = first; tile < n; tile += step) {
      make_keys(source, bags, buffers, tile, shared, &counts);
    }
    if (check.repaired_offsets == nullptr) return;
    if (is_repaired) {
      totals.num_invalid = block_sum(counts.num_invalid);
      totals.num_lost = block_sum(counts.num_lost);
      break;
    }
    totals = finish_block(check, counts, num_invalid_offsets);
    if (!totals.is_last) return;
    if (totals.num_bad_offsets == 0) break;
    totals.num_bad_offsets =
        block_sum(repair_offsets(bags, check.repaired_offsets, shared.warp_scratch));
    bags.offsets = IndexArray{check.repaired_offsets, false};
    first = 0;
    step = kTileLookups;
  }
  if (threadIdx.x == 0)
    report_violations(check, totals.num_invalid, totals.num_bad_offsets + totals.num_lost);
}

// Launch lookup_keys_kernel, which uses keys, positions and no_group_key of `buffers`. If several
// blocks check the batch, first clear check.progress, which must then not be null. Nothing is
// launched without lookups and offsets to check. `launcher` is a CudaLauncher or, in tests, a
// simt::HostLauncher. Does not wait for the device.
template <class Key, class Launcher>
void launch_lookup_keys(const Launcher& launcher, const KeySource& source, const BatchCheck& check,
                        const SortBuffers<Key>& buffers) {
  const int64_t num_offsets = check.repaired_offsets != nullptr ? source.bags.num_bags + 1 : 0;
  const int64_t num_items =
      num_offsets < source.bags.num_lookups ? source.bags.num_lookups : num_offsets;
  if (num_items == 0) return;
  const unsigned num_blocks =
      blocks_for(num_items, kTileLookups, launcher.max_grid_blocks(kResidentBlocksPerSm));
  if (num_blocks > 1 && check.repaired_offsets != nullptr) {
    launcher.zero(check.progress, 2 * sizeof(*check.progress));
  }
  launcher(lookup_keys_kernel<Key>, num_blocks, kTileThreads, source, check, buffers);
}

// The source of keys for the one-launch grouping of a small batch. group/small_group.cuh calls
// these members, and says when.
struct SmallLookups {
  static constexpr bool kHasBags = true;
  KeySource source;
  BatchCheck check;

  // Check the offsets with all blocks of the cluster, and repair them with one block if necessary.
  // Return the source with valid offsets. If check.repaired_offsets is null, nothing is checked.
  // All threads of the cluster must call this; it has cluster barriers.
  EMB_DEVICE SmallLookups prepare(const SmallGroupMemory& memory) const {
    if (check.repaired_offsets == nullptr) return *this;
    const unsigned rank = simt::cluster_rank(), step = simt::cluster_size() * blockDim.x;
    const int num_invalid =
        count_invalid_offsets(source.bags, check, rank * blockDim.x + threadIdx.x, step);
    count_in_block(memory, SmallGroupMemory::kOffsetsToRepair, static_cast<uint32_t>(num_invalid));
    simt::cluster_sync();
    if (cluster_total(memory, SmallGroupMemory::kOffsetsToRepair) == 0) return *this;
    if (rank == 0) {
      auto* scratch = reinterpret_cast<int32_t*>(memory.warp_scratch);
      const int num_changed = repair_offsets(source.bags, check.repaired_offsets, scratch);
      count_in_block(memory, SmallGroupMemory::kOffsetViolations,
                     static_cast<uint32_t>(num_changed));
    }
    simt::cluster_sync();
    SmallLookups repaired = *this;
    repaired.source.bags.offsets = IndexArray{check.repaired_offsets, false};
    return repaired;
  }

  // The lookups [begin, end) of a block. All threads of the block must call the constructor, which
  // has barriers; `range`, [2], is shared memory for the TileSearch.
  struct Tile {
    TileSearch search;
    BadIndexCounts counts;  // of this thread

    EMB_DEVICE Tile(const SmallLookups& lookups, int64_t begin, int64_t end, int* range)
        : search([&](int bag) { return lookups.source.bags.begin(bag); },
                 static_cast<int>(lookups.source.bags.num_bags), begin, end, range) {}
    // Return the key of lookup i, and write its bag (0 for none) to `bag_of_lookup`.
    EMB_DEVICE uint32_t key(const SmallLookups& lookups, int64_t i, uint32_t no_group_key,
                            uint32_t* bag_of_lookup) {
      const int bag = search.find([&](int b) { return lookups.source.bags.begin(b); }, i);
      *bag_of_lookup = bag < 0 ? 0 : static_cast<uint32_t>(bag);
      return lookup_key(lookups.source, i, bag, no_group_key, &counts);
    }
    EMB_DEVICE uint32_t num_invalid() const { return static_cast<uint32_t>(counts.num_invalid); }
    EMB_DEVICE uint32_t num_lost() const { return static_cast<uint32_t>(counts.num_lost); }
  };

  // Report the violations (report_violations) unless check.repaired_offsets is null. All threads
  // must call this after the cluster_sync that completes the tallies; one thread reports.
  EMB_DEVICE void report(const SmallGroupMemory& memory) const {
    if (check.repaired_offsets == nullptr || simt::cluster_rank() > 0 || threadIdx.x > 0) return;
    report_violations(check, cluster_total(memory, SmallGroupMemory::kInvalidIndices),
                      cluster_total(memory, SmallGroupMemory::kOffsetViolations));
  }
};

}  // namespace emb::cuda
