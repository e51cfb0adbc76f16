// Rows by slot on the GPU: finds keys and reads their rows, reads rows by slot, starts new rows,
// writes rows, adds to rows, and gathers the rows of evicted keys. check.h describes the arguments
// of the ops. All pointers are to device memory of the caller.
//
// Copies: a warp copies the rows of 32 positions at a time. Each lane computes, once, the source
// and the target address of the row of its position. Then groups of lanes copy the rows and get the
// addresses by shuffles. A lane loads a unit of each of kRowsInFlight rows before it stores the
// first. Rows are copied as bytes, in units of 16 bytes if all addresses allow it, otherwise of 8,
// 4 or 2.
//
// Writes: if a batch repeats a slot, only its last row is written. Positions claim cells of a
// scratch table by slot. Whatever the order of threads, in the end a cell has the last position of
// its slot.
//
// Additions: the rows are grouped by slot. A group of lanes adds the rows of a slot in order, with
// kRowsInFlight rows in registers.
//
// Evicted rows are gathered in the order of misses without a sort. Every block counts the evicted
// keys in its range of misses. The sum of the counts of earlier blocks is the index of its first
// output. There is one kernel per matrix (weights or states); the first one also gathers the
// entries.
#pragma once

#include <type_traits>

#include "core/row_slice.cuh"
#include "hash/device_index.cuh"
#include "hash/misses.cuh"
#include "hash/rows.h"

namespace emb::cuda {

// Rows are copied in units of one of these types, uint32_t or uint16_t.
using Unit16 = simt::Pack16;
using Unit8 = simt::Pack8;

// How a row is copied.
struct RowUnits {
  int64_t num_units;  // units per row
  int lanes;          // lanes of the group that copies a row, see LaneGroup
};

// A matrix of rows by slot.
template <class Unit>
struct RowArray {
  Unit* data;      // row 0
  int64_t stride;  // units from one row to the next
  int64_t num_rows;

  EMB_DEVICE Unit* row(int64_t number) const { return data + number * stride; }
  // Return the row in a slot, null if the matrix has no such slot.
  EMB_DEVICE Unit* in_slot(int64_t slot) const {
    return slot >= 0 && slot < num_rows ? row(slot) : nullptr;
  }
};

// The copy of a lane's row.
template <class Unit>
struct RowCopy {
  const Unit* from = nullptr;     // the source; null for default values
  Unit* to = nullptr;             // the target; null to copy nothing
  Unit* second_target = nullptr;  // null for none
};

// Return a unit of a row of default values. `word` is the result of RowMatrix::default_word.
template <class Unit>
EMB_DEVICE Unit default_unit(uint32_t word) {
  if constexpr (std::is_integral_v<Unit>) {
    return static_cast<Unit>(word);
  } else {
    Unit unit;
    for (uint32_t& part : unit.word) part = word;
    return unit;
  }
}

// Store a unit that no kernel reads soon.
template <class Unit>
EMB_DEVICE void store_unit(Unit* target, const Unit& value) {
  if constexpr (std::is_integral_v<Unit>) {
    *target = value;
  } else {
    simt::store_streaming(target, value);
  }
}

// Return the pointer of another lane. All 32 lanes must call this.
template <class T>
EMB_DEVICE T* pointer_of_lane(T* pointer, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(pointer);
  return reinterpret_cast<T*>(__shfl_sync(simt::kFullMask, bits, lane));
}

// Return the index of the n-th set bit of a mask, n from 0. If the mask has at most n set bits, the
// result is in [0, 32) but otherwise unspecified.
EMB_DEVICE int nth_set_bit(unsigned mask, int n) {
  int bit = 0;
#pragma unroll
  for (int width = kWarpLanes / 2; width > 0; width /= 2) {
    const int num_lower = __popc((mask >> bit) & ((1u << width) - 1));
    if (n >= num_lower) {
      n -= num_lower;
      bit += width;
    }
  }
  return bit;
}

// Copy the rows of the warp's lanes; `copy` is the copy of this lane's row. kHasSecondTarget must
// be true if second_target may be set. If kStreams, `to` is stored as data that is not read soon.
// `default_word` is the result of RowMatrix::default_word; it is used where `from` is null. All 32
// lanes must call this.
template <bool kHasSecondTarget, bool kStreams, class Unit>
EMB_DEVICE void copy_lane_rows(const RowUnits& row_units, RowCopy<Unit> copy,
                               uint32_t default_word) {
  const unsigned copying_lanes = __ballot_sync(simt::kFullMask, copy.to != nullptr);
  const int num_copies = __popc(copying_lanes);
  if (num_copies < kWarpLanes) {  // lane i takes over the i-th copy
    const int lane = nth_set_bit(copying_lanes, lane_in_warp());
    copy.from = pointer_of_lane(copy.from, lane);
    copy.to = pointer_of_lane(copy.to, lane);
    if constexpr (kHasSecondTarget) copy.second_target = pointer_of_lane(copy.second_target, lane);
  }
  const LaneGroup group(row_units.lanes);
  const Unit default_value = default_unit<Unit>(default_word);
  for (int first = 0; first < num_copies; first += kRowsInFlight * group.groups_in_warp()) {
    RowCopy<Unit> copies[kRowsInFlight];
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      const int row = first + r * group.groups_in_warp() + group.group, lane = row % kWarpLanes;
      copies[r].from = pointer_of_lane(copy.from, lane);
      copies[r].to = pointer_of_lane(copy.to, lane);
      if constexpr (kHasSecondTarget)
        copies[r].second_target = pointer_of_lane(copy.second_target, lane);
      if (row >= num_copies) copies[r] = {};
    }
    for (int64_t unit = group.rank; unit < row_units.num_units; unit += group.lanes) {
      Unit values[kRowsInFlight];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        values[r] = copies[r].from != nullptr ? copies[r].from[unit] : default_value;
      }
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (kHasSecondTarget && copies[r].second_target != nullptr)
          copies[r].second_target[unit] = values[r];
        if (copies[r].to == nullptr) continue;
        if constexpr (kStreams) {
          store_unit(copies[r].to + unit, values[r]);
        } else {
          copies[r].to[unit] = values[r];
        }
      }
    }
  }
}

// Find keys. Write their rows to `out`, n contiguous rows, default values for missing keys. Write
// to `found` [n] whether the index has each key. FindRowsCall says which row of `values` is that of
// a slot.
template <class Unit>
__global__ void __launch_bounds__(kTileThreads)
    hash_find_rows_kernel(DeviceIndex index, KeyBatch batch, RowArray<const Unit> values,
                          RowUnits row_units, uint32_t default_word, Unit* out, bool* found) {
  __shared__ int range[2];
  for_each_key(batch, index.num_tables, range, [&](int64_t position, int t) {
    RowCopy<Unit> copy;
    if (position < batch.n) {
      const int64_t slot = t < 0 ? kNoSlot : find_slot(index.table(t), batch.ids[position]);
      found[position] = slot >= 0;
      copy.to = out + position * row_units.num_units;
      if (slot >= 0)
        copy.from =
            values.in_slot(index.field(t, HashTableColumn::kFirstBucket) * kBucketSlots + slot);
    }
    copy_lane_rows<false, true>(row_units, copy, default_word);
  });
}

// The rows with which new keys start. The row of miss g starts as row first_positions[g] of `data`.
// The warp of this position writes it.
template <class Unit>
struct StartingRows {
  const Unit* data;       // [n], contiguous rows by position; null to start no rows
  const int32_t* groups;  // [n], by position: the miss of the key, negative if its row is not new
  // [n], by miss: the first position of the key, in [0, n); not checked.
  const int64_t* first_positions;
};

// Write the rows of new keys to the matrix unless starting.data is null. Also write the row of
// every position to `out`, n contiguous rows, unless that is null. A position whose slot has no row
// gets default values.
template <class Unit>
__global__ void __launch_bounds__(kTileThreads)
    hash_read_rows_kernel(RowArray<Unit> values, const int64_t* slots, int64_t n,
                          StartingRows<Unit> starting, RowUnits row_units, uint32_t default_word,
                          Unit* out) {
  for (int64_t tile = simt::global_warp() * kWarpLanes; tile < n;
       tile += simt::warps_in_grid() * kWarpLanes) {
    const int64_t position = tile + lane_in_warp();
    RowCopy<Unit> copy;
    if (position < n) {
      Unit* row = values.in_slot(slots[position]);
      copy.from = row;
      if (out != nullptr) copy.to = out + position * row_units.num_units;
      const int32_t group = starting.data == nullptr ? -1 : starting.groups[position];
      if (row != nullptr && group >= 0 && group < n) {
        const int64_t first = starting.first_positions[group];
        copy.from = starting.data + first * row_units.num_units;
        if (first == position) (out != nullptr ? copy.second_target : copy.to) = row;
      }
    }
    copy_lane_rows<true, true>(row_units, copy, default_word);
  }
}

// A scratch hash table of slots. A cell is -1, or the last position so far of its slot.
struct SlotCells {
  int32_t* cells;              // [mask + 1]
  uint32_t mask;               // a mask of ones; there are at least as many cells as positions
  uint32_t* cell_of_position;  // [n], by position: its cell; unset for negative slots
};

// Claim the cells of all positions with a slot, and write their cell_of_position. The cells must be
// empty before. The value of a claimed cell only increases, and all its values are positions of one
// slot.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_claim_last_kernel(const int64_t* slots, int64_t n, SlotCells slot_cells) {
  for (int64_t i = simt::global_thread(); i < n; i += simt::threads_in_grid()) {
    const int64_t slot = slots[i];
    if (slot < 0) continue;
    const auto position = static_cast<int32_t>(i);
    auto cell = static_cast<uint32_t>(mix(static_cast<uint64_t>(slot)));
    for (;; ++cell) {
      cell &= slot_cells.mask;
      int32_t other = slot_cells.cells[cell];
      if (other < 0) other = atomicCAS(slot_cells.cells + cell, -1, position);
      if (other < 0) break;
      if (slots[other] != slot) continue;
      if (position > other) atomicMax(slot_cells.cells + cell, position);
      break;
    }
    slot_cells.cell_of_position[i] = cell;
  }
}

// Write `rows` [n], contiguous rows by position, to their slots; for a repeated slot only the last
// row. All cells must have been claimed.
template <class Unit>
__global__ void __launch_bounds__(kTileThreads)
    hash_write_rows_kernel(RowArray<Unit> values, const int64_t* slots, int64_t n,
                           SlotCells slot_cells, RowUnits row_units, const Unit* rows) {
  for (int64_t tile = simt::global_warp() * kWarpLanes; tile < n;
       tile += simt::warps_in_grid() * kWarpLanes) {
    const int64_t position = tile + lane_in_warp();
    RowCopy<Unit> copy;
    if (position < n && slots[position] >= 0 &&
        slot_cells.cells[slot_cells.cell_of_position[position]] == position) {
      copy.from = rows + position * row_units.num_units;
      copy.to = values.in_slot(slots[position]);
    }
    copy_lane_rows<false, false>(row_units, copy, 0);
  }
}

// The n positions of a batch grouped by slot, as the op `group` returns them: group g has the
// positions permutation[j] for j in [segments[g], segments[g + 1]).
struct SlotGroups {
  const int64_t* slots;                           // [n], by group: the slot of the group
  const int32_t *segments, *permutation, *count;  // [n + 1], [n], [1]
  int64_t n;
};

// The number of columns that a lane of hash_add_rows_kernel holds: 16 bytes.
template <class T>
inline constexpr int kLaneColumns = 16 / static_cast<int>(sizeof(T));

// Add `rows` [n, dim], contiguous rows by position, to the rows in their slots, in the order of
// positions. Every sum is rounded to T. `lanes` is the number of lanes that add to a row.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    hash_add_rows_kernel(RowArray<T> values, SlotGroups groups, int64_t dim, int lanes,
                         const T* rows) {
  constexpr int kColumns = kLaneColumns<T>;
  const LaneGroup lane(lanes);
  const int64_t step = simt::warps_in_grid() * lane.groups_in_warp();
  const int count = *groups.count;
  for (int64_t g = simt::global_warp() * lane.groups_in_warp() + lane.group; g < count; g += step) {
    T* row = values.in_slot(groups.slots[g]);
    if (row == nullptr) continue;
    const int begin = groups.segments[g], end = groups.segments[g + 1];
    for (int64_t column = int64_t{lane.rank} * kColumns; column < dim;
         column += int64_t{lanes} * kColumns) {
      const int num_columns = dim - column < kColumns ? static_cast<int>(dim - column) : kColumns;
      float sum[kColumns];
      read_columns(row + column, num_columns, sum);
      for (int j = begin; j < end; j += kRowsInFlight) {
        float addends[kRowsInFlight][kColumns];
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r) {
          if (j + r >= end) break;
          read_columns(rows + groups.permutation[j + r] * dim + column, num_columns, addends[r]);
        }
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r) {
          if (j + r >= end) break;
#pragma unroll
          for (int k = 0; k < kColumns; ++k) {
            sum[k] = to_float(from_float<T>(sum[k] + addends[r][k]));
          }
        }
      }
      write_columns(row + column, num_columns, sum);
    }
  }
}

// The results of an insertion by miss, from which the evicted keys are gathered.
struct EvictedKeys {
  const int64_t* slots;   // [n]
  const uint8_t* status;  // [n], InsertStatus
  const int64_t* words;   // [n, 3]: key, stamp and score
  int64_t n;              // positions of the batch
  int32_t* counts;        // scratch, by block: the number of evicted keys in its range of misses

  // Return whether a miss has evicted a key.
  EMB_DEVICE bool is_evicting(int64_t miss) const {
    return miss < n && status[miss] == static_cast<uint8_t>(InsertStatus::kEvicting);
  }
};

// The outputs for the entries of evicted keys, and their number. All are null for a kernel that
// gathers rows only.
struct EvictedEntries {
  int64_t *keys, *stamps, *scores, *count;  // [n], [n], [n], [1]
};

// A matrix of rows by slot, and the output [n] for the rows of evicted keys, contiguous.
struct EvictedMatrix {
  RowBytes rows;
  void* out;
};

// Count the evicted keys in the range of misses of each block: write `evicted.counts`.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_count_evicted_kernel(EvictedKeys evicted) {
  __shared__ int64_t sums[kBlockWarps];
  int64_t num_evicted = 0, total;  // evicted keys of this thread, of the block
  const int64_t end = part_begin(evicted.n, blockIdx.x + 1);
  for (int64_t i = part_begin(evicted.n, blockIdx.x) + threadIdx.x; i < end; i += kTileThreads) {
    num_evicted += evicted.is_evicting(i);
  }
  exclusive_sum(num_evicted, sums, &total);
  if (threadIdx.x == 0) evicted.counts[blockIdx.x] = static_cast<int32_t>(total);
}

// Gather the rows of evicted keys of one matrix to `rows`, contiguous, and their entries unless the
// pointers of `entries` are null. hash_count_evicted_kernel must have run before, with as many
// blocks.
template <class Unit>
__global__ void __launch_bounds__(kTileThreads)
    hash_evicted_rows_kernel(RowArray<const Unit> values, EvictedKeys evicted, RowUnits row_units,
                             EvictedEntries entries, Unit* rows) {
  __shared__ int64_t sums[kBlockWarps];
  int64_t num_before = 0, total;  // evicted keys before those of this tile; in this tile
  for (unsigned block = threadIdx.x; block < blockIdx.x; block += kTileThreads) {
    num_before += evicted.counts[block];
  }
  exclusive_sum(num_before, sums, &num_before);
  const int64_t end = part_begin(evicted.n, blockIdx.x + 1);
  for (int64_t tile = part_begin(evicted.n, blockIdx.x); tile < end; tile += kTileThreads) {
    const int64_t miss = tile + threadIdx.x;
    const bool is_evicting = evicted.is_evicting(miss);
    const int64_t target = num_before + exclusive_sum(is_evicting, sums, &total);
    num_before += total;
    RowCopy<Unit> copy;
    if (is_evicting && entries.keys != nullptr) {
      entries.keys[target] = evicted.words[3 * miss + HashEntry::kKey];
      entries.stamps[target] = evicted.words[3 * miss + HashEntry::kStamp];
      entries.scores[target] = evicted.words[3 * miss + HashEntry::kScore];
    }
    if (is_evicting) {
      copy.from = values.in_slot(evicted.slots[miss]);
      copy.to = rows + target * row_units.num_units;
    }
    copy_lane_rows<false, true>(row_units, copy, 0);
  }
  if (entries.count != nullptr && blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    *entries.count = num_before;
  }
}

// Call `body(Unit{}, units)` with the widest unit whose size divides rows.alignment, and the number
// of such units per row.
template <class Body>
void with_unit(const RowBytes& rows, const Body& body) {
  if (rows.alignment % 16 == 0) return body(Unit16{}, rows.row_bytes / 16);
  if (rows.alignment % 8 == 0) return body(Unit8{}, rows.row_bytes / 8);
  if (rows.alignment % 4 == 0) return body(uint32_t{}, rows.row_bytes / 4);
  body(uint16_t{}, rows.row_bytes / 2);
}

// Return how rows of `num_units` units are copied.
inline RowUnits units_of_row(int64_t num_units) { return {num_units, lanes_per_row(num_units, 1)}; }

template <class Unit>
RowArray<Unit> row_array(void* data, int64_t stride_bytes, int64_t num_rows) {
  return {static_cast<Unit*>(data), stride_bytes / static_cast<int64_t>(sizeof(Unit)), num_rows};
}

// The launches of the ops. `rows` is the matrix; its alignment must also be that of the other
// addresses (RowMatrix::as_bytes). Rows by position are contiguous, of rows.row_bytes bytes each.

// Launch `hash_find_rows`: write `out` [n] and `found` [n].
template <class Launcher>
void launch_find_rows(const Launcher& launcher, const DeviceIndex& index, const KeyBatch& batch,
                      const RowBytes& rows, uint32_t default_word, void* out, bool* found) {
  if (batch.n == 0) return;
  with_unit(rows, [&](auto unit, int64_t units) {
    using Unit = decltype(unit);
    launcher(hash_find_rows_kernel<Unit>, key_blocks(launcher, batch.n), kTileThreads, index, batch,
             row_array<const Unit>(rows.data, rows.stride, rows.num_rows), units_of_row(units),
             default_word, static_cast<Unit*>(out), found);
  });
}

// Launch `hash_read_rows` or `hash_start_rows_`: start the rows of new keys unless starting.data is
// null, and write `out` [n] unless that is null.
template <class Launcher>
void launch_read_rows(const Launcher& launcher, const RowBytes& rows, const int64_t* slots,
                      int64_t n, const StartingRows<void>& starting, uint32_t default_word,
                      void* out) {
  if (n == 0) return;
  with_unit(rows, [&](auto unit, int64_t units) {
    using Unit = decltype(unit);
    const StartingRows<Unit> from{static_cast<const Unit*>(starting.data), starting.groups,
                                  starting.first_positions};
    launcher(hash_read_rows_kernel<Unit>, key_blocks(launcher, n), kTileThreads,
             row_array<Unit>(rows.data, rows.stride, rows.num_rows), slots, n, from,
             units_of_row(units), default_word, static_cast<Unit*>(out));
  });
}

// Launch `hash_write_rows_`: write the rows `from` [n] to their slots; for a repeated slot only the
// last row.
template <class Work>
void launch_write_rows(Work& work, const RowBytes& rows, const int64_t* slots, int64_t n,
                       const void* from) {
  if (n == 0) return;
  const auto& launcher = work.launcher();
  const int64_t cells = num_cells(n);
  const SlotCells slot_cells{work.template scratch<int32_t>(cells),
                             static_cast<uint32_t>(cells - 1), work.template scratch<uint32_t>(n)};
  const unsigned blocks = key_blocks(launcher, n);
  launcher(hash_clear_kernel, blocks, kTileThreads, reinterpret_cast<uint32_t*>(slot_cells.cells),
           slot_cells.mask);
  launcher(hash_claim_last_kernel, blocks, kTileThreads, slots, n, slot_cells);
  with_unit(rows, [&](auto unit, int64_t units) {
    using Unit = decltype(unit);
    launcher(hash_write_rows_kernel<Unit>, blocks, kTileThreads,
             row_array<Unit>(rows.data, rows.stride, rows.num_rows), slots, n, slot_cells,
             units_of_row(units), static_cast<const Unit*>(from));
  });
}

// Launch `hash_add_rows_`: add the rows `from` [n] to the rows in their slots.
template <class Launcher>
void launch_add_rows(const Launcher& launcher, const RowBytes& rows, Dtype dtype,
                     const SlotGroups& groups, const void* from) {
  if (groups.n == 0) return;
  with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    const int64_t dim = rows.row_bytes / static_cast<int64_t>(sizeof(T));
    const int lanes = lanes_per_row(dim, kLaneColumns<T>);
    launcher(hash_add_rows_kernel<T>,
             blocks_for(groups.n, kTileThreads / lanes, launcher.max_grid_blocks(kFullBlocksPerSm)),
             kTileThreads, row_array<T>(rows.data, rows.stride, rows.num_rows), groups, dim, lanes,
             static_cast<const T*>(from));
  });
}

// Launch `hash_evicted_rows` for `num_matrices` matrices, at least one: gather the rows of each,
// and the entries with the first. evicted.counts is set here, from `work`.
template <class Work>
void launch_evicted_rows(Work& work, EvictedKeys evicted, EvictedEntries entries,
                         const EvictedMatrix* matrices, int num_matrices) {
  const auto& launcher = work.launcher();
  const unsigned blocks = key_blocks(launcher, evicted.n);
  evicted.counts = work.template scratch<int32_t>(blocks);
  launcher(hash_count_evicted_kernel, blocks, kTileThreads, evicted);
  for (int m = 0; m < num_matrices; ++m) {
    const RowBytes& rows = matrices[m].rows;
    with_unit(rows, [&](auto unit, int64_t units) {
      using Unit = decltype(unit);
      launcher(hash_evicted_rows_kernel<Unit>, blocks, kTileThreads,
               row_array<const Unit>(rows.data, rows.stride, rows.num_rows), evicted,
               units_of_row(units), entries, static_cast<Unit*>(matrices[m].out));
    });
    entries = {};
  }
}

}  // namespace emb::cuda
