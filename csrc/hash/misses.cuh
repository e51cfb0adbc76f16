// Finds and numbers the misses of a batch, its distinct missing keys, on the GPU for `hash_touch_`.
//
// A scratch table with open addressing has a cell for every distinct missing key. The threads of
// all positions of a key claim its cell, and the lowest position remains in it, so the result does
// not depend on the order of threads.
//
// Misses are numbered by table and first position, without a sort. A plan of the batch lists its
// segments, and thereby the positions, in the order of their tables. In this order the first
// positions of the misses are counted: the k-th one has the miss with number k, from 0. One kernel
// (hash_number_kernel) counts them. It divides the batch into parts in the order of the plan, and
// blocks take parts in order. A block publishes how many first positions its part has, and adds up
// the counts of the earlier parts. Then it writes the number of each of its misses into the cell of
// the key, from which later positions of the key read it. A block waits only for parts that were
// taken before its own. Their blocks run already or have finished, so every wait ends.
#pragma once

#include "hash/args.h"
#include "hash/device_index.cuh"

namespace emb::cuda {

inline constexpr uint32_t kNoCell = UINT32_MAX;               // the cell of a position without one
inline constexpr uint32_t kEmptyCell = UINT32_MAX;            // the value of an unclaimed cell
inline constexpr uint32_t kNumberedCell = uint32_t{1} << 31;  // the bit that marks a numbered cell

// The result of KeyCells::claim.
struct CellClaim {
  uint32_t cell;  // the cell of the key
  bool is_new;    // whether no thread had claimed it before: true for one position per key
};

// A scratch hash table whose keys are pairs of a table and a key. The value of a cell is
// kEmptyCell, or the lowest position of its pair that has claimed it so far. After the pair is
// numbered, it is kNumberedCell | number of the miss.
struct KeyCells {
  uint32_t* cells;             // [mask + 1]
  uint32_t mask;               // number of cells - 1; there are at least as many as positions
  uint32_t* cell_of_position;  // [n], by position: its cell; kNoCell for positions that claim none
  uint64_t hash_key;           // random number that the hash of keys depends on

  // Claim the cell of the key at `position`, which belongs to table t. The value of a claimed cell
  // only decreases, and all its values are positions of one key. So it is harmless if a thread
  // reads an old value.
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

  // Return whether `position` is the first position of the key in `cell`; false if `cell` is
  // kNoCell or has been numbered. An earlier kernel must have claimed the cells of all positions.
  EMB_DEVICE bool is_first(uint32_t cell, int64_t position) const {
    return cell != kNoCell && cells[cell] == static_cast<uint32_t>(position);
  }

  // Wait until a thread has numbered `cell`, which must not be kNoCell. Return the number of its
  // miss.
  EMB_DEVICE int32_t wait_for_number(uint32_t cell) const {
    for (;;) {
      // Volatile: memory is read at every iteration.
      const uint32_t value = *static_cast<const volatile uint32_t*>(cells + cell);
      if ((value & kNumberedCell) != 0) return static_cast<int32_t>(value & ~kNumberedCell);
    }
  }
};

// The results of `hash_touch_` except the slots; TouchCall in check.h describes them.
struct MissOutput {
  int64_t *first_positions, *totals, *offsets;  // [n], [n], [T + 1]
  int32_t* groups;                              // [n]
};

// The plan of a batch, in scratch memory. F is the number of segments. hash_begin_batch_kernel
// (find.cuh) writes the plan and sets `part_counts`, `next_part` and `num_misses` to 0;
// hash_touch_kernel counts the misses.
struct BatchPlan {
  int32_t* segments;  // [F], the segments in the order of their tables; segments of no table last
  int64_t* starts;    // [F + 1], where each segment starts in the order of the plan, then the end
  int32_t* write_indices;  // [T + 1], used by plan_batch: the index in `segments` at which the next
                           // segment of each table is written, then the next segment of no table
  int64_t* num_misses;     // [T], by table
  // [num_parts]: the number of first positions of the part, plus 1; 0 until a block has counted.
  int32_t* part_counts;
  int32_t* next_part;  // [1], the part that the next block takes, from 0
  int32_t* is_valid;   // [1], whether the segments cover the batch from starts[0] >= 0 on, in order
};

// Return the number of cells for a batch of n < 2^31 keys: a power of two from 64 to 2^31, at least
// twice the number of keys up to 2^30 keys.
inline int64_t num_cells(int64_t n) {
  int64_t cells = 64;
  while (cells < 2 * n && cells < int64_t{1} << 31) cells *= 2;
  return cells;
}

// Empty all cells. All threads of the grid must call this.
EMB_DEVICE void clear_cells(uint32_t* cells, uint32_t mask) {
  for (int64_t i = simt::global_thread(); i <= mask; i += simt::threads_in_grid()) {
    cells[i] = kEmptyCell;
  }
}

// Empty all cells, in a separate kernel. It also empties the cells of SlotCells (rows.cuh), whose
// empty value, -1, has the same bits.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_clear_kernel(uint32_t* cells, uint32_t mask) {
  clear_cells(cells, mask);
}

// Write the plan of a batch: sort its segments by table with a stable counting sort. Positions
// before the first segment come after all segments in the order of the plan. If the segments do not
// cover the rest of the batch in order, the plan is invalid, and hash_number_kernel finds no
// misses. `batch.starts` must have an element, also without segments. All threads of one block must
// call this.
EMB_DEVICE void plan_batch(const KeyBatch& batch, int num_tables, const BatchPlan& plan) {
  __shared__ int64_t sums[kBlockWarps];
  __shared__ int tile_tables[kTileThreads];
  __shared__ int is_valid;
  const auto self = static_cast<int>(threadIdx.x);
  const auto table_of = [&](int f) {
    const int64_t t = batch.tables[f];
    return t >= 0 && t < num_tables ? static_cast<int>(t) : num_tables;
  };
  if (self == 0) is_valid = batch.starts[0] >= 0 && batch.starts[batch.num_segments] == batch.n;
  // Count the segments of each table.
  for (int t = self; t <= num_tables; t += kTileThreads) plan.write_indices[t] = 0;
  __syncthreads();
  for (int f = self; f < batch.num_segments; f += kTileThreads) {
    atomicAdd(plan.write_indices + table_of(f), 1);
    if (batch.starts[f] > batch.starts[f + 1]) is_valid = 0;
  }
  __syncthreads();
  // Replace each count by the number of segments of the tables before.
  int64_t sum_before = 0, total;
  for (int tile = 0; tile <= num_tables; tile += kTileThreads) {
    const int t = tile + self;
    const int64_t begin =
        sum_before + exclusive_sum(t <= num_tables ? plan.write_indices[t] : 0, sums, &total);
    if (t <= num_tables) plan.write_indices[t] = static_cast<int32_t>(begin);
    sum_before += total;
  }
  // Place the segments, a tile at a time, one per thread. A segment comes after the segments of its
  // table in earlier tiles and of threads with lower numbers.
  for (int tile = 0; tile < batch.num_segments; tile += kTileThreads) {
    const int f = tile + self, t = f < batch.num_segments ? table_of(f) : -1;
    tile_tables[self] = t;
    __syncthreads();
    int index = t < 0 ? 0 : plan.write_indices[t];
    for (int other = 0; other < self; ++other) index += tile_tables[other] == t;
    if (t >= 0) plan.segments[index] = f;
    __syncthreads();
    if (t >= 0) atomicAdd(plan.write_indices + t, 1);
  }
  __syncthreads();
  // Add up the lengths of the segments.
  sum_before = 0;
  for (int tile = 0; tile < batch.num_segments; tile += kTileThreads) {
    const int i = tile + self, f = i < batch.num_segments ? plan.segments[i] : -1;
    const int64_t length = f < 0 ? 0 : batch.starts[f + 1] - batch.starts[f];
    const int64_t start = sum_before + exclusive_sum(length, sums, &total);
    if (f >= 0) plan.starts[i] = start;
    sum_before += total;
  }
  if (self != 0) return;
  plan.starts[batch.num_segments] = sum_before;
  *plan.is_valid = is_valid;
}

// Call `body(i, position)` for the positions of part `part` of the batch, one per thread, tile by
// tile. `position` has the index i in the order of the plan; it is -1 if i is beyond the end of the
// batch. If the plan is invalid, `position` is i. All threads of the block must call this, and all
// call `body` equally often, so that it may have barriers. `range` is shared memory for two ints.
template <class Body>
EMB_DEVICE void for_each_in_part(const KeyBatch& batch, const BatchPlan& plan, unsigned part,
                                 int* range, const Body& body) {
  const auto start = [&](int i) { return plan.starts[i]; };
  const bool is_valid = *plan.is_valid != 0;
  const int64_t num_in_segments = plan.starts[batch.num_segments];
  const int64_t part_end = part_begin(batch.n, part + 1);
  for (int64_t tile = part_begin(batch.n, part); tile < part_end; tile += kTileThreads) {
    const int64_t end = tile + kTileThreads < batch.n ? tile + kTileThreads : batch.n;
    const int64_t i = tile + threadIdx.x;
    int64_t position = i < end ? i : -1;
    if (is_valid) {
      const TileSearch search(start, batch.num_segments, tile, end, range);
      const int s = i < num_in_segments ? search.find(start, i) : -1;
      if (s >= 0) position = batch.starts[plan.segments[s]] + i - plan.starts[s];
      if (i >= num_in_segments && i < end) position = i - num_in_segments;
    }
    body(i, position);
  }
}

// Write `offsets` [T + 1], see DeviceMisses. All threads of one block must call this. `sums` is
// shared memory, [kBlockWarps].
EMB_DEVICE void write_offsets(int num_tables, const BatchPlan& plan, int64_t* offsets,
                              int64_t* sums) {
  const bool is_valid = *plan.is_valid != 0;
  int64_t num_before = 0, total;
  for (int tile = 0; tile < num_tables; tile += kTileThreads) {
    const int t = tile + static_cast<int>(threadIdx.x);
    const int64_t count = is_valid && t < num_tables ? plan.num_misses[t] : 0;
    const int64_t begin = num_before + exclusive_sum(count, sums, &total);
    if (t < num_tables) offsets[t] = begin;
    num_before += total;
  }
  if (threadIdx.x == 0) offsets[num_tables] = num_before;
}

// Publish the count of part `part`; `thread_count` is the number of first positions that this
// thread has found in it. Wait for the earlier parts, and return the sum of their counts. All
// threads of the block must call this. `sums` is shared memory, [kBlockWarps].
EMB_DEVICE int64_t publish_and_sum_counts(const BatchPlan& plan, unsigned part,
                                          int64_t thread_count, int64_t* sums) {
  int64_t total;
  exclusive_sum(thread_count, sums, &total);
  if (threadIdx.x == 0) atomicExch(plan.part_counts + part, static_cast<int32_t>(total + 1));
  int64_t earlier_count = 0;
  for (unsigned other = threadIdx.x; other < part; other += kTileThreads) {
    int32_t published = 0;  // read from memory at every iteration, hence volatile
    while (published == 0) {
      published = *static_cast<const volatile int32_t*>(plan.part_counts + other);
    }
    earlier_count += published - 1;
  }
  exclusive_sum(earlier_count, sums, &total);
  return total;
}

// Add the uses of this lane's position to the total of its miss, which saturates. `miss` must be -1
// for the first position of a key, whose uses are in the total, and for a lane without a miss.
// `uses` is by position; null for 1 each. If it is null, one lane adds for all lanes of the warp
// with the same miss. All 32 lanes must call this.
EMB_DEVICE void add_repeated_uses(int32_t miss, const int64_t* uses, int64_t position,
                                  int64_t* totals) {
  if (!__any_sync(simt::kFullMask, miss >= 0)) return;
  __threadfence();  // the uses of the first position were written before its number
  if (uses != nullptr) {
    if (miss >= 0) add_uses_to(totals + miss, uses[position]);
    return;
  }
  const unsigned same_lanes = __match_any_sync(simt::kFullMask, miss);
  const bool is_leader = __ffs(static_cast<int>(same_lanes)) - 1 == lane_in_warp();
  if (miss >= 0 && is_leader) add_uses_to(totals + miss, __popc(same_lanes));
}

// Blocks per multiprocessor of the next kernel. The bound allows up to 40 registers per thread;
// without it the compiler uses 32 on sm_90 and spills.
inline constexpr int kNumberBlocksPerSm = 6;

// Number the misses and write all of `out`. `uses` is [n], the uses of each position; null for 1
// each. The grid must have one block per part. `plan` must be that of hash_begin_batch_kernel, and
// all missing keys must have claimed their cells in hash_touch_kernel; else blocks wait for ever.
// Elements of out.first_positions and out.totals after the last miss become 0. Each position that
// is not the first position of a miss writes one of these zeros; the first such position writes the
// last element.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads, kNumberBlocksPerSm)
    hash_number_kernel(KeyBatch batch, int num_tables, BatchPlan plan, KeyCells key_cells,
                       const int64_t* uses, MissOutput out) {
  __shared__ int range[2];
  __shared__ int64_t sums[kBlockWarps];
  __shared__ int counts[kBlockWarps];
  __shared__ int part_of_block;
  if (threadIdx.x == 0) part_of_block = atomicAdd(plan.next_part, 1);
  __syncthreads();
  const auto part = static_cast<unsigned>(part_of_block);
  if (part == 0) write_offsets(num_tables, plan, out.offsets, sums);
  const bool is_valid = *plan.is_valid != 0;
  const auto cell_at = [&](int64_t position) {
    return is_valid && position >= 0 ? key_cells.cell_of_position[position] : kNoCell;
  };
  int64_t thread_count = 0;  // first positions
  for_each_in_part(batch, plan, part, range, [&](int64_t, int64_t position) {
    thread_count += key_cells.is_first(cell_at(position), position);
  });
  int64_t num_before = publish_and_sum_counts(plan, part, thread_count, sums);
  for_each_in_part(batch, plan, part, range, [&](int64_t i, int64_t position) {
    const uint32_t cell = cell_at(position);
    const bool is_first = key_cells.is_first(cell, position);
    int total;
    // The miss, if this is its first position; else the number of misses before it.
    const int64_t number = num_before + exclusive_count(is_first, counts, &total);
    num_before += total;
    // The element that this position writes: `i - number` earlier positions are not the first of a
    // miss, and they have written the last elements.
    const int64_t element = is_first ? number : batch.n - 1 - (i - number);
    if (position >= 0) {
      out.first_positions[element] = is_first ? position : 0;
      out.totals[element] = !is_first ? 0 : (uses == nullptr ? 1 : uses[position]);
    }
    if (is_first) {
      __threadfence();  // a thread that sees the number adds to the uses, so these come first
      atomicExch(key_cells.cells + cell, kNumberedCell | static_cast<uint32_t>(number));
    }
    __syncthreads();  // the numbers of this tile are written before its threads wait for them
    const int32_t miss = cell == kNoCell ? -1 : key_cells.wait_for_number(cell);
    if (position >= 0) out.groups[position] = miss;
    add_repeated_uses(is_first ? -1 : miss, uses, position, out.totals);
  });
}

// Allocate cells for a batch of n keys in scratch memory of `work`. They are uninitialised:
// hash_begin_batch_kernel or hash_clear_kernel must empty them.
template <class Work>
KeyCells allocate_key_cells(Work& work, int64_t n) {
  const int64_t cells = num_cells(n);
  return {work.template scratch<uint32_t>(cells), static_cast<uint32_t>(cells - 1),
          work.template scratch<uint32_t>(n), batch_hash_key()};
}

// Allocate a plan for a batch in `num_parts` parts, in scratch memory of `work`. It is
// uninitialised; hash_begin_batch_kernel writes it.
template <class Work>
BatchPlan allocate_batch_plan(Work& work, const KeyBatch& batch, int num_tables,
                              unsigned num_parts) {
  BatchPlan plan{};
  allocate_arrays(work, [&](const auto& take) {
    take(plan.segments, batch.num_segments);
    take(plan.starts, int64_t{batch.num_segments} + 1);
    take(plan.write_indices, int64_t{num_tables} + 1);
    take(plan.num_misses, num_tables);
    take(plan.part_counts, num_parts);
    take(plan.next_part, 1);
    take(plan.is_valid, 1);
  });
  return plan;
}

}  // namespace emb::cuda
