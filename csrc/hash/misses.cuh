// The distinct missing keys of a batch on the GPU, which `hash_touch_` finds.
//
// A scratch table of open addressing holds, for every distinct missing key, its table and the first
// of its positions: whichever thread claims a cell, the lowest position remains, so the result does
// not depend on the order of threads. Misses are numbered by table and first position without a
// sort: every block counts the first positions of its range of the batch, in all and by segment.
// One block turns the counts of segments into the first number of every segment, and the number of
// a miss follows from the first positions before it.
#pragma once

#include "hash/args.h"
#include "hash/device_index.cuh"

namespace emb::cuda {

inline constexpr uint32_t kNoCell = UINT32_MAX;
inline constexpr unsigned long long kEmptyCell = UINT64_MAX;
inline constexpr unsigned long long kNumberedCell = 1ull << 63;

// Positions by key. A cell is kEmptyCell, or table and lowest position so far of its key; once
// misses are numbered, kNumberedCell and the number of its miss.
struct KeyCells {
  unsigned long long* cells;
  uint32_t mask;      // of the cells
  uint32_t* cell_of;  // by position; kNoCell for keys that are not taken
  uint64_t hash_key;

  EMB_DEVICE static unsigned long long word(int t, int64_t position) {
    return static_cast<unsigned long long>(t) << 32 | static_cast<uint32_t>(position);
  }

  // Claim the cell of the key at a position of table t. The value of a claimed cell only decreases,
  // and all its values are positions of one key: reading an old value is harmless.
  EMB_DEVICE uint32_t claim(const int64_t* ids, int64_t position, int t) const {
    const unsigned long long mine = word(t, position);
    const int64_t key = ids[position];
    auto cell = static_cast<uint32_t>(mix((static_cast<uint64_t>(key) ^ hash_key) + mix(t)));
    for (;; ++cell) {
      cell &= mask;
      unsigned long long other = cells[cell];
      if (other == kEmptyCell) other = atomicCAS(cells + cell, kEmptyCell, mine);
      if (other == kEmptyCell) return cell;
      if (static_cast<int>(other >> 32) != t || ids[static_cast<uint32_t>(other)] != key) continue;
      if (mine < other) atomicMin(cells + cell, mine);
      return cell;
    }
  }

  // Return the table of the key whose first position this is, otherwise -1. Before misses are
  // numbered, or for numbered cells: -1.
  EMB_DEVICE int table_of_first(int64_t position) const {
    const uint32_t cell = cell_of[position];
    if (cell == kNoCell) return -1;
    const unsigned long long value = cells[cell];
    const bool is_first = (value & kNumberedCell) == 0 && static_cast<uint32_t>(value) == position;
    return is_first ? static_cast<int>(value >> 32) : -1;
  }

  // Return the number of the miss at a position, -1 for none.
  EMB_DEVICE int32_t number_at(int64_t position) const {
    const uint32_t cell = cell_of[position];
    if (cell == kNoCell) return -1;
    const unsigned long long value = cells[cell];
    return (value & kNumberedCell) != 0 ? static_cast<int32_t>(value) : -1;
  }
};

// Results by miss, and `groups` by position.
struct MissOutput {
  int64_t *first, *totals, *offsets;
  int32_t* groups;
};

// Counts of first positions: by block and by segment. `shifts`, by segment, leads from the number
// of first positions before one to the number of its miss; `next` is by table.
struct FirstCounts {
  int32_t* by_block;
  int64_t *by_segment, *shifts, *next;
};

// Return the number of cells for a batch of n keys: a power of two, usually at least twice the
// keys.
inline int64_t num_cells(int64_t n) {
  int64_t cells = 64;
  while (cells < 2 * n && cells < int64_t{1} << 31) cells *= 2;
  return cells;
}

// Fill scratch with ones.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_clear_kernel(unsigned long long* words, int64_t n) {
  for (int64_t i = simt::global_thread(); i < n; i += simt::threads_in_grid()) {
    words[i] = kEmptyCell;
  }
}

// Call `body(position, segment)` for the positions of this block's part of the batch, tile by tile;
// segment -1 for none. Called by all threads of a grid of kTileThreads per block.
template <class Body>
EMB_DEVICE void for_each_of_block(const KeyBatch& batch, int* shared, const Body& body) {
  const auto start = [&](int f) { return batch.starts[f]; };
  const int64_t begin = block_begin(batch.n, blockIdx.x),
                stop = block_begin(batch.n, blockIdx.x + 1);
  for (int64_t tile = begin; tile < stop; tile += kTileThreads) {
    const int64_t end = tile + kTileThreads < batch.n ? tile + kTileThreads : batch.n;
    const TileSearch search(start, batch.segments, tile, end, shared);
    const int64_t position = tile + threadIdx.x;
    body(position, position < end ? search.find(start, position) : -1);
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_count_firsts_kernel(KeyBatch batch, KeyCells keys, FirstCounts counts) {
  __shared__ int range[2];
  __shared__ int64_t sums[kTileThreads / kSlots];
  int64_t mine = 0, total;
  TableTally of_segment(counts.by_segment, 1);
  for_each_of_block(batch, range, [&](int64_t position, int segment) {
    const bool is_first = segment >= 0 && keys.table_of_first(position) >= 0;
    mine += is_first;
    of_segment.add(segment, is_first);
  });
  of_segment.flush();
  exclusive_sum(mine, sums, &total);
  if (threadIdx.x == 0) counts.by_block[blockIdx.x] = static_cast<int32_t>(total);
}

// Write where each table begins among the misses, and the shift of every segment. Runs in one
// block.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_plan_misses_kernel(KeyBatch batch, int num_tables, FirstCounts counts, int64_t* offsets) {
  __shared__ int64_t sums[kTileThreads / kSlots];
  __shared__ int64_t tile_counts[kTileThreads];
  __shared__ int tile_tables[kTileThreads];
  const auto self = static_cast<int>(threadIdx.x);
  const auto table_of = [&](int f) {
    const int64_t t = f < batch.segments ? batch.tables[f] : -1;
    return t >= 0 && t < num_tables ? static_cast<int>(t) : -1;
  };
  for (int t = self; t < num_tables; t += kTileThreads) counts.next[t] = 0;
  __syncthreads();
  for (int f = self; f < batch.segments; f += kTileThreads) {
    if (table_of(f) >= 0) add_to(counts.next + table_of(f), counts.by_segment[f]);
  }
  __syncthreads();
  int64_t before = 0, total;
  for (int tile = 0; tile < num_tables; tile += kTileThreads) {
    const int t = tile + self;
    const int64_t count = t < num_tables ? counts.next[t] : 0;
    const int64_t begin = before + exclusive_sum(count, sums, &total);
    if (t < num_tables) counts.next[t] = offsets[t] = begin;
    before += total;
  }
  if (self == 0) offsets[num_tables] = before;
  before = 0;
  for (int tile = 0; tile < batch.segments; tile += kTileThreads) {
    const int f = tile + self, t = table_of(f);
    const int64_t count = f < batch.segments ? counts.by_segment[f] : 0;
    tile_tables[self] = t;
    tile_counts[self] = count;
    const int64_t firsts = before + exclusive_sum(count, sums, &total);  // and a barrier
    before += total;
    int64_t number = t < 0 ? 0 : counts.next[t];
    for (int other = 0; other < self; ++other) {
      if (tile_tables[other] == t) number += tile_counts[other];
    }
    if (f < batch.segments) counts.shifts[f] = number - firsts;
    __syncthreads();
    if (t >= 0) add_to(counts.next + t, count);
    __syncthreads();
  }
}

// Number the misses: the cell of a key now holds its number.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_number_kernel(KeyBatch batch, KeyCells keys, FirstCounts counts, MissOutput out) {
  __shared__ int range[2];
  __shared__ int64_t sums[kTileThreads / kSlots];
  int64_t before = 0, total;
  for (unsigned block = threadIdx.x; block < blockIdx.x; block += kTileThreads) {
    before += counts.by_block[block];
  }
  exclusive_sum(before, sums, &before);
  for_each_of_block(batch, range, [&](int64_t position, int segment) {
    const bool is_first = segment >= 0 && keys.table_of_first(position) >= 0;
    const int64_t firsts = before + exclusive_sum(is_first, sums, &total);
    before += total;
    if (!is_first) return;
    const int64_t number = firsts + counts.shifts[segment];
    if (number < 0 || number >= batch.n) return;  // only if segments are not in order
    out.first[number] = position;
    keys.cells[keys.cell_of[position]] = kNumberedCell | static_cast<uint32_t>(number);
  });
}

// Write the number of each position's key, and add up the uses. A key that occurs several times in
// a warp is added once.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_total_kernel(const int64_t* counts, int64_t n, KeyCells keys, MissOutput out) {
  const int64_t rounded = (n + kSlots - 1) / kSlots * kSlots;
  for (int64_t i = simt::global_thread(); i < rounded; i += simt::threads_in_grid()) {
    const int32_t group = i < n ? keys.number_at(i) : -1;
    if (i < n) out.groups[i] = group;
    if (counts != nullptr) {
      if (group >= 0) add_uses_to(out.totals + group, counts[i]);
      continue;
    }
    const unsigned same = __match_any_sync(simt::kFullMask, group);
    const bool leads = __ffs(static_cast<int>(same)) - 1 == lane_in_warp();
    if (group >= 0 && leads) add_uses_to(out.totals + group, __popc(same));
  }
}

// Return cells for the keys of a batch, not cleared.
template <class Work>
KeyCells key_cells(Work& work, int64_t n) {
  const int64_t cells = num_cells(n);
  return {work.template scratch<unsigned long long>(cells), static_cast<uint32_t>(cells - 1),
          work.template scratch<uint32_t>(n), batch_hash_key()};
}

// Number the misses whose keys have claimed `keys`. `Work` launches kernels and allocates scratch
// memory: DeviceWork, or its counterpart on the host in tests.
template <class Work>
void launch_number_misses(Work& work, const KeyBatch& batch, int num_tables, const KeyCells& keys,
                          const FirstCounts& counts, const int64_t* uses, const MissOutput& out) {
  const auto& launcher = work.launcher();
  const unsigned blocks = key_blocks(launcher, batch.n);
  if (batch.n > 0) {
    launcher(hash_count_firsts_kernel, blocks, kTileThreads, batch, keys, counts);
  }
  launcher(hash_plan_misses_kernel, 1, kTileThreads, batch, num_tables, counts, out.offsets);
  if (batch.n == 0) return;
  launcher(hash_number_kernel, blocks, kTileThreads, batch, keys, counts, out);
  launcher(hash_total_kernel, blocks, kTileThreads, uses, batch.n, keys, out);
}

}  // namespace emb::cuda
