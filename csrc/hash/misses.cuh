// The distinct missing keys of a batch on the GPU. A scratch table of open addressing holds, for
// every distinct key, the first of its positions: whichever thread claims a cell, the lowest
// position remains, so the result does not depend on the order of threads. The sort of `group` then
// orders the first positions by table.
#pragma once

#include "group/segments.cuh"
#include "hash/args.h"
#include "hash/device_index.cuh"

namespace emb::cuda {

// Positions by key. A cell is empty (-1) or holds the lowest position so far of its key.
struct KeyCells {
  int32_t* cells;
  uint32_t mask;      // of the cells
  int32_t* tables;    // by position; -1 if its key is not taken
  uint32_t* cell_of;  // by position
  uint64_t hash_key;
};

struct MissOutput {
  int64_t *first, *totals, *offsets;
  int32_t* groups;
};

// Return the number of cells for a batch of n keys: a power of two, usually at least twice the
// keys.
inline int64_t num_cells(int64_t n) {
  int64_t cells = 64;
  while (cells < 2 * n && cells < int64_t{1} << 31) cells *= 2;
  return cells;
}

// Empty the cells and select positions: those with a slot if `found`, otherwise those without.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_part_kernel(KeyBatch batch, int num_tables, const int64_t* slots, bool found,
                     KeyCells keys) {
  __shared__ int range[2];
  for (int64_t i = simt::global_thread(); i <= keys.mask; i += simt::threads_in_grid()) {
    keys.cells[i] = -1;
  }
  for_each_key(batch, num_tables, range, [&](int64_t position, int t) {
    if (position >= batch.n) return;
    keys.tables[position] = (slots[position] >= 0) == found ? t : -1;
  });
}

// The value of a claimed cell only decreases, and all its values are positions of one key: reading
// an old value is harmless.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_claim_kernel(const int64_t* ids, int64_t n, KeyCells keys) {
  for (int64_t i = simt::global_thread(); i < n; i += simt::threads_in_grid()) {
    const int t = keys.tables[i];
    if (t < 0) continue;
    const auto position = static_cast<int32_t>(i);
    const int64_t key = ids[i];
    auto cell = static_cast<uint32_t>(mix((static_cast<uint64_t>(key) ^ keys.hash_key) + mix(t)));
    for (;; ++cell) {
      cell &= keys.mask;
      int32_t other = keys.cells[cell];
      if (other < 0) other = atomicCAS(keys.cells + cell, -1, position);
      if (other < 0) break;
      if (ids[other] != key || keys.tables[other] != t) continue;
      if (position < other) atomicMin(keys.cells + cell, position);
      break;
    }
    keys.cell_of[i] = cell;
  }
}

// Give first positions their table as the key of a sort.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_first_kernel(KeyCells keys, SortPairs<uint32_t> sort) {
  for (int64_t i = simt::global_thread(); i < sort.n; i += simt::threads_in_grid()) {
    const int t = keys.tables[i];
    const bool is_first = t >= 0 && keys.cells[keys.cell_of[i]] == i;
    sort.keys[i] = is_first ? static_cast<uint32_t>(t) : sort.limit;
    sort.positions[i] = static_cast<int32_t>(i);
  }
}

// Number the misses, whose tables are the sorted keys: the cell of a key now holds its number.
// Write where each table begins among them.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_number_kernel(SortPairs<uint32_t> sort, KeyCells keys, MissOutput out) {
  for (int64_t i = simt::global_thread(); i <= sort.n; i += simt::threads_in_grid()) {
    const int64_t last = i == sort.n ? sort.limit : sort.sorted_keys[i];
    const int64_t before = i == 0 ? -1 : int64_t{sort.sorted_keys[i - 1]};
    for (int64_t t = before + 1; t <= last; ++t) out.offsets[t] = i;
    if (i == sort.n) continue;
    const bool is_miss = last < sort.limit;
    const int32_t first = is_miss ? sort.sorted_positions[i] : 0;
    out.first[i] = first;
    out.totals[i] = 0;
    if (is_miss) keys.cells[keys.cell_of[first]] = static_cast<int32_t>(i);
  }
}

// Write the number of each position's key, and add up the uses. A key that occurs several times in
// a warp is added once.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_total_kernel(const int64_t* counts, int64_t n, KeyCells keys, MissOutput out) {
  const int64_t rounded = (n + kSlots - 1) / kSlots * kSlots;
  for (int64_t i = simt::global_thread(); i < rounded; i += simt::threads_in_grid()) {
    const int32_t group = i < n && keys.tables[i] >= 0 ? keys.cells[keys.cell_of[i]] : -1;
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

// Return scratch for a sort of n keys up to `limit`.
template <class Work>
SortPairs<uint32_t> sort_scratch(Work& work, int64_t n, int64_t limit) {
  auto* keys = work.template scratch<uint32_t>(2 * n);
  auto* positions = work.template scratch<int32_t>(2 * n);
  return {keys, keys + n, positions, positions + n, n, static_cast<uint32_t>(limit)};
}

// Make the cells of all keys of the batch that have a slot, or of those that have none.
template <class Work>
KeyCells launch_cells(Work& work, const KeyBatch& batch, int num_tables, const int64_t* slots,
                      bool found) {
  const auto& launcher = work.launcher();
  const int64_t cells = num_cells(batch.n);
  const KeyCells keys{work.template scratch<int32_t>(cells), static_cast<uint32_t>(cells - 1),
                      work.template scratch<int32_t>(batch.n),
                      work.template scratch<uint32_t>(batch.n), batch_hash_key()};
  const unsigned blocks = key_blocks(launcher, batch.n);
  launcher(hash_part_kernel, blocks, kTileThreads, batch, num_tables, slots, found, keys);
  launcher(hash_claim_kernel, blocks, kTileThreads, batch.ids, batch.n, keys);
  return keys;
}

// `Work` launches kernels, allocates scratch memory and sorts: DeviceWork, or its counterpart on
// the host in tests.
template <class Work>
void launch_misses(Work& work, const KeyBatch& batch, int num_tables, const int64_t* slots,
                   const int64_t* counts, const MissOutput& out) {
  const auto& launcher = work.launcher();
  const SortPairs<uint32_t> sort = sort_scratch(work, batch.n, num_tables);
  const unsigned blocks = key_blocks(launcher, batch.n);
  KeyCells keys{};
  if (batch.n > 0) {
    keys = launch_cells(work, batch, num_tables, slots, false);
    launcher(hash_first_kernel, blocks, kTileThreads, keys, sort);
    work.sort(sort);
  }
  launcher(hash_number_kernel, key_blocks(launcher, batch.n + 1), kTileThreads, sort, keys, out);
  if (batch.n == 0) return;
  launcher(hash_total_kernel, blocks, kTileThreads, counts, batch.n, keys, out);
}

}  // namespace emb::cuda
