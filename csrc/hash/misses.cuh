// The distinct missing keys of a batch on the GPU, which `hash_touch_` finds.
//
// A scratch table of open addressing holds, for every distinct missing key, the first of its
// positions: whichever thread claims a cell, the lowest position remains, so the result does not
// depend on the order of threads. Misses are numbered by table and first position without a sort: a
// plan of the batch has its segments in the order of their tables, and in that order the number of
// a miss is the number of first positions before its own. One kernel does all of it: blocks take
// parts of the batch in order, publish how many first positions they have, wait for the counts of
// the parts before, and write numbers into cells, where later positions of the same keys find them.
// A block waits only for parts that were taken before its own, by blocks that are running.
#pragma once

#include "hash/args.h"
#include "hash/device_index.cuh"

namespace emb::cuda {

inline constexpr uint32_t kNoCell = UINT32_MAX;
inline constexpr uint32_t kEmptyCell = UINT32_MAX;
inline constexpr uint32_t kNumberedCell = uint32_t{1} << 31;

// A key's cell, and whether its thread is the first to claim it.
struct CellClaim {
  uint32_t cell;
  bool is_new;
};

// Positions by key. A cell is kEmptyCell, or the lowest position so far of its key; once misses are
// numbered, kNumberedCell and the number of its miss.
struct KeyCells {
  uint32_t* cells;
  uint32_t mask;      // number of cells - 1, a mask of ones
  uint32_t* cell_of;  // cell of each position; kNoCell for keys that are not taken
  uint64_t hash_key;

  // Claim the cell of the key at a position of table t. The value of a claimed cell only decreases,
  // and all its values are positions of one key: reading an old value is harmless.
  EMB_DEVICE CellClaim claim(const KeyBatch& batch, int64_t position, int t) const {
    const auto self = static_cast<uint32_t>(position);
    const int64_t key = batch.ids[position];
    auto cell = static_cast<uint32_t>(mix((static_cast<uint64_t>(key) ^ hash_key) + mix(t)));
    for (;; ++cell) {
      cell &= mask;
      uint32_t other = cells[cell];
      if (other == kEmptyCell) other = atomicCAS(cells + cell, kEmptyCell, self);
      if (other == kEmptyCell) return {cell, true};
      if (batch.ids[other] != key || batch.table_at(other) != t) continue;
      if (self < other) atomicMin(cells + cell, self);
      return {cell, false};
    }
  }

  // Return whether a position is the first of the key in `cell`, before that is numbered.
  EMB_DEVICE bool is_first(uint32_t cell, int64_t position) const {
    return cell != kNoCell && cells[cell] == static_cast<uint32_t>(position);
  }

  // Return the number of the miss in a cell, when it has one.
  EMB_DEVICE int32_t wait_for_number(uint32_t cell) const {
    for (;;) {
      const uint32_t value = *static_cast<const volatile uint32_t*>(cells + cell);
      if ((value & kNumberedCell) != 0) return static_cast<int32_t>(value & ~kNumberedCell);
    }
  }
};

// Results by miss, and `groups` by position.
struct MissOutput {
  int64_t *first, *totals, *offsets;
  int32_t* groups;
};

// Scratch for the numbers of a batch's misses.
struct BatchPlan {
  int32_t* segments;     // segments in the order of their tables
  int64_t* starts;       // beginning of each in a batch of that order, and their end
  int32_t* next;         // next segment of each table, and of no table, while segments are ordered
  int64_t* misses;       // misses of each table
  int32_t* part_firsts;  // first positions of each part of the batch, + 1; 0 until known
  int32_t *taken_parts, *is_valid;
};

// Return the number of cells for a batch of n keys: a power of two, usually at least twice the
// keys.
inline int64_t num_cells(int64_t n) {
  int64_t cells = 64;
  while (cells < 2 * n && cells < int64_t{1} << 31) cells *= 2;
  return cells;
}

// Fill scratch with ones.
EMB_DEVICE void clear_cells(uint32_t* cells, uint32_t mask) {
  for (int64_t i = simt::global_thread(); i <= mask; i += simt::threads_in_grid()) {
    cells[i] = kEmptyCell;
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_clear_kernel(uint32_t* cells, uint32_t mask) {
  clear_cells(cells, mask);
}

// Order the segments of a batch by table; padding, the positions before the first segment, comes
// behind them. Segments that do not cover the rest of the batch in order make the plan invalid: the
// batch has no misses then. Called by one block.
EMB_DEVICE void plan_batch(const KeyBatch& batch, int num_tables, const BatchPlan& plan) {
  __shared__ int64_t sums[kTileThreads / kSlots];
  __shared__ int tile_tables[kTileThreads];
  __shared__ int is_valid;
  const auto self = static_cast<int>(threadIdx.x);
  const auto table_of = [&](int f) {
    const int64_t t = batch.tables[f];
    return t >= 0 && t < num_tables ? static_cast<int>(t) : num_tables;
  };
  if (self == 0) is_valid = batch.starts[0] >= 0 && batch.starts[batch.segments] == batch.n;
  for (int t = self; t <= num_tables; t += kTileThreads) plan.next[t] = 0;
  __syncthreads();
  for (int f = self; f < batch.segments; f += kTileThreads) {
    atomicAdd(plan.next + table_of(f), 1);
    if (batch.starts[f] > batch.starts[f + 1]) is_valid = 0;
  }
  __syncthreads();
  int64_t before = 0, total;
  for (int tile = 0; tile <= num_tables; tile += kTileThreads) {
    const int t = tile + self;
    const int64_t first = before + exclusive_sum(t <= num_tables ? plan.next[t] : 0, sums, &total);
    if (t <= num_tables) plan.next[t] = static_cast<int32_t>(first);
    before += total;
  }
  for (int tile = 0; tile < batch.segments; tile += kTileThreads) {
    const int f = tile + self, t = f < batch.segments ? table_of(f) : -1;
    tile_tables[self] = t;
    __syncthreads();
    int number = t < 0 ? 0 : plan.next[t];
    for (int other = 0; other < self; ++other) number += tile_tables[other] == t;
    if (t >= 0) plan.segments[number] = f;
    __syncthreads();
    if (t >= 0) atomicAdd(plan.next + t, 1);
  }
  __syncthreads();
  before = 0;
  for (int tile = 0; tile < batch.segments; tile += kTileThreads) {
    const int i = tile + self, f = i < batch.segments ? plan.segments[i] : -1;
    const int64_t length = f < 0 ? 0 : batch.starts[f + 1] - batch.starts[f];
    const int64_t start = before + exclusive_sum(length, sums, &total);
    if (f >= 0) plan.starts[i] = start;
    before += total;
  }
  if (self != 0) return;
  plan.starts[batch.segments] = before;
  *plan.is_valid = is_valid;
}

// Call `body(i, position)` for the i-th positions, in the order of the plan, of a part of the
// batch, tile by tile; position -1 beyond its end. Called by all threads of the block.
template <class Body>
EMB_DEVICE void for_each_of_part(const KeyBatch& batch, const BatchPlan& plan, unsigned part,
                                 int* shared, const Body& body) {
  const auto start = [&](int i) { return plan.starts[i]; };
  const bool is_valid = *plan.is_valid != 0;
  const int64_t num_in_segments = plan.starts[batch.segments];
  const int64_t begin = block_begin(batch.n, part), stop = block_begin(batch.n, part + 1);
  for (int64_t tile = begin; tile < stop; tile += kTileThreads) {
    const int64_t end = tile + kTileThreads < batch.n ? tile + kTileThreads : batch.n;
    const int64_t i = tile + threadIdx.x;
    int64_t position = i < end ? i : -1;
    if (is_valid) {
      const TileSearch search(start, batch.segments, tile, end, shared);
      const int at = i < num_in_segments ? search.find(start, i) : -1;
      if (at >= 0) position = batch.starts[plan.segments[at]] + i - plan.starts[at];
      if (i >= num_in_segments && i < end) position = i - num_in_segments;
    }
    body(i, position);
  }
}

// Write where each table begins among the misses. Called by one block.
EMB_DEVICE void write_offsets(int num_tables, const BatchPlan& plan, int64_t* offsets,
                              int64_t* sums) {
  const bool is_valid = *plan.is_valid != 0;
  int64_t before = 0, total;
  for (int tile = 0; tile < num_tables; tile += kTileThreads) {
    const int t = tile + static_cast<int>(threadIdx.x);
    const int64_t count = is_valid && t < num_tables ? plan.misses[t] : 0;
    const int64_t begin = before + exclusive_sum(count, sums, &total);
    if (t < num_tables) offsets[t] = begin;
    before += total;
  }
  if (threadIdx.x == 0) offsets[num_tables] = before;
}

// Publish the number of first positions of a part; return that of all parts before it.
EMB_DEVICE int64_t firsts_before(const BatchPlan& plan, unsigned part, int64_t firsts,
                                 int64_t* sums) {
  int64_t total;
  exclusive_sum(firsts, sums, &total);
  if (threadIdx.x == 0) atomicExch(plan.part_firsts + part, static_cast<int32_t>(total + 1));
  int64_t before = 0;
  for (unsigned other = threadIdx.x; other < part; other += kTileThreads) {
    int32_t published = 0;
    while (published == 0) {
      published = *static_cast<const volatile int32_t*>(plan.part_firsts + other);
    }
    before += published - 1;
  }
  exclusive_sum(before, sums, &total);
  return total;
}

// Add the uses of positions that are not the first ones of their keys. A key that occurs several
// times in a warp is added once. Called by the whole warp; group -1 for none.
EMB_DEVICE void add_repeats(int32_t group, const int64_t* uses, int64_t position, int64_t* totals) {
  if (!__any_sync(simt::kFullMask, group >= 0)) return;
  __threadfence();  // the uses of the first position were written before its number
  if (uses != nullptr) {
    if (group >= 0) add_uses_to(totals + group, uses[position]);
    return;
  }
  const unsigned same = __match_any_sync(simt::kFullMask, group);
  const bool leads = __ffs(static_cast<int>(same)) - 1 == lane_in_warp();
  if (group >= 0 && leads) add_uses_to(totals + group, __popc(same));
}

// Number the misses, write the number of each position's key, and add up the uses. Entries behind
// the last miss are 0: the positions that are not first write them, from the end on.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads, 6)
    hash_number_kernel(KeyBatch batch, int num_tables, BatchPlan plan, KeyCells keys,
                       const int64_t* uses, MissOutput out) {
  __shared__ int range[2];
  __shared__ int64_t sums[kTileThreads / kSlots];
  __shared__ int counts[kTileThreads / kSlots];
  __shared__ int part_of_block;
  if (threadIdx.x == 0) part_of_block = atomicAdd(plan.taken_parts, 1);
  __syncthreads();
  const auto part = static_cast<unsigned>(part_of_block);
  if (part == 0) write_offsets(num_tables, plan, out.offsets, sums);
  const bool is_valid = *plan.is_valid != 0;
  const auto cell_at = [&](int64_t position) {
    return is_valid && position >= 0 ? keys.cell_of[position] : kNoCell;
  };
  int64_t firsts = 0;
  for_each_of_part(batch, plan, part, range, [&](int64_t, int64_t position) {
    firsts += keys.is_first(cell_at(position), position);
  });
  int64_t before = firsts_before(plan, part, firsts, sums);
  for_each_of_part(batch, plan, part, range, [&](int64_t i, int64_t position) {
    const uint32_t cell = cell_at(position);
    const bool is_first = keys.is_first(cell, position);
    int total;
    const int64_t number = before + exclusive_count(is_first, counts, &total);
    before += total;
    const int64_t entry = is_first ? number : batch.n - 1 - (i - number);
    if (position >= 0) {
      out.first[entry] = is_first ? position : 0;
      out.totals[entry] = !is_first ? 0 : uses == nullptr ? 1 : uses[position];
    }
    if (is_first) {
      __threadfence();  // the uses before the number: whoever sees that adds to them
      atomicExch(keys.cells + cell, kNumberedCell | static_cast<uint32_t>(number));
    }
    __syncthreads();  // from here on threads wait for numbers, of this tile too
    const int32_t group = cell == kNoCell ? -1 : keys.wait_for_number(cell);
    if (position >= 0) out.groups[position] = group;
    add_repeats(is_first ? -1 : group, uses, position, out.totals);
  });
}

// Return cells for the keys of a batch, not cleared.
template <class Work>
KeyCells key_cells(Work& work, int64_t n) {
  const int64_t cells = num_cells(n);
  return {work.template scratch<uint32_t>(cells), static_cast<uint32_t>(cells - 1),
          work.template scratch<uint32_t>(n), batch_hash_key()};
}

// Return scratch for a batch of which `parts` blocks number the misses, not cleared.
template <class Work>
BatchPlan batch_plan(Work& work, const KeyBatch& batch, int num_tables, unsigned parts) {
  const int64_t longs = batch.segments + 1 + int64_t{num_tables};
  const int64_t ints = batch.segments + num_tables + 1 + int64_t{parts} + 2;
  BatchPlan plan{};
  plan.starts = work.template scratch<int64_t>(longs + (ints + 1) / 2);
  plan.misses = plan.starts + batch.segments + 1;
  plan.segments = reinterpret_cast<int32_t*>(plan.starts + longs);
  plan.next = plan.segments + batch.segments;
  plan.part_firsts = plan.next + num_tables + 1;
  plan.taken_parts = plan.part_firsts + parts;
  plan.is_valid = plan.taken_parts + 1;
  return plan;
}

}  // namespace emb::cuda
