// Rows of values by slot on the GPU: find and read them, read them, start new ones, write them, add
// to them, and gather those of evicted keys.
//
// A warp takes 32 keys. Each lane computes once where the row of its key comes from and where it
// goes; then groups of lanes copy the rows, the addresses by shuffles, and each group has
// kRowsInFlight rows in registers before it stores the first. Rows are bytes, so they move in units
// of 16 bytes where addresses allow, of 8, 4 or 2 otherwise.
//
// Where a batch repeats a key, its last row is written: positions claim cells of a scratch table by
// slot, and a cell ends with the last position of its slot, whatever the order of threads.
//
// Rows that are added come in groups of equal slots: a group of lanes adds up those of a slot in
// order, with kRowsInFlight in registers.
//
// Evicted rows are gathered in the order of their keys without a sort: every block counts those of
// its range of keys, and later begins at the sum of the counts before it. Every matrix, of weights
// or states, takes one kernel; the first one also gathers the entries.
#pragma once

#include <type_traits>

#include "core/row_slice.cuh"
#include "hash/device_index.cuh"
#include "hash/misses.cuh"
#include "hash/rows.h"

namespace emb::cuda {

using Unit16 = simt::Pack16;
using Unit8 = simt::Pack8;

// Rows of `units` units each, which groups of `lanes` lanes copy.
struct RowUnits {
  int64_t units;
  int lanes;
};

// Rows in memory, `stride` units apart; `rows` of them.
template <class Unit>
struct RowArray {
  Unit* data;
  int64_t stride, rows;

  EMB_DEVICE Unit* row(int64_t number) const { return data + number * stride; }
  // Return the row in a slot, null for slots that are -1 or outside.
  EMB_DEVICE Unit* in_slot(int64_t slot) const {
    return slot >= 0 && slot < rows ? row(slot) : nullptr;
  }
};

// What a lane's row is copied from (null: the default value), and to (null: nowhere); `also` is a
// second target.
template <class Unit>
struct RowMove {
  const Unit* from = nullptr;
  Unit *to = nullptr, *also = nullptr;
};

// Return the unit of which a row of default values consists; `word` repeats the element.
template <class Unit>
EMB_DEVICE Unit filled_unit(uint32_t word) {
  if constexpr (std::is_integral_v<Unit>) {
    return static_cast<Unit>(word);
  } else {
    Unit unit;
    for (uint32_t& part : unit.word) part = word;
    return unit;
  }
}

template <class Unit>
EMB_DEVICE void store_unit(Unit* address, const Unit& value) {
  if constexpr (std::is_integral_v<Unit>) {
    *address = value;
  } else {
    simt::store_streaming(address, value);
  }
}

template <class T>
EMB_DEVICE T* from_lane(T* pointer, int lane) {
  const auto bits = reinterpret_cast<unsigned long long>(pointer);
  return reinterpret_cast<T*>(__shfl_sync(simt::kFullMask, bits, lane));
}

// Return the n-th set bit of a mask that has more than n; some bit otherwise.
EMB_DEVICE int nth_set_bit(unsigned mask, int n) {
  int bit = 0;
#pragma unroll
  for (int width = kSlots / 2; width > 0; width /= 2) {
    const int lower = __popc(mask >> bit & ((1u << width) - 1));
    if (n >= lower) {
      n -= lower;
      bit += width;
    }
  }
  return bit;
}

// Copy the rows of the warp's lanes. Called by the whole warp. `kTwice`: some have two targets;
// `kStreams`: no kernel reads the first target soon.
template <bool kTwice, bool kStreams, class Unit>
EMB_DEVICE void move_rows(const RowUnits& shape, RowMove<Unit> move, uint32_t fill) {
  const unsigned moves = __ballot_sync(simt::kFullMask, move.to != nullptr);
  const int count = __popc(moves);
  if (count < kSlots) {  // the lanes that have a row become the first ones
    const int lane = nth_set_bit(moves, lane_in_warp());
    move.from = from_lane(move.from, lane);
    move.to = from_lane(move.to, lane);
    if constexpr (kTwice) move.also = from_lane(move.also, lane);
  }
  const LaneGroup group(shape.lanes);
  const Unit empty = filled_unit<Unit>(fill);
  for (int first = 0; first < count; first += kRowsInFlight * group.groups_in_warp()) {
    RowMove<Unit> rows[kRowsInFlight];
#pragma unroll
    for (int r = 0; r < kRowsInFlight; ++r) {
      const int row = first + r * group.groups_in_warp() + group.group, lane = row % kSlots;
      rows[r].from = from_lane(move.from, lane);
      rows[r].to = from_lane(move.to, lane);
      if constexpr (kTwice) rows[r].also = from_lane(move.also, lane);
      if (row >= count) rows[r] = {};
    }
    for (int64_t unit = group.rank; unit < shape.units; unit += group.lanes) {
      Unit values[kRowsInFlight];
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        values[r] = rows[r].from != nullptr ? rows[r].from[unit] : empty;
      }
#pragma unroll
      for (int r = 0; r < kRowsInFlight; ++r) {
        if (kTwice && rows[r].also != nullptr) rows[r].also[unit] = values[r];
        if (rows[r].to == nullptr) continue;
        if constexpr (kStreams) {
          store_unit(rows[r].to + unit, values[r]);
        } else {
          rows[r].to[unit] = values[r];
        }
      }
    }
  }
}

// Slots are those of all tables together: rows of table t begin with that of its first slot.
template <class Unit>
__global__ void __launch_bounds__(kTileThreads)
    hash_find_rows_kernel(DeviceIndex index, KeyBatch batch, RowArray<const Unit> values,
                          RowUnits shape, uint32_t fill, Unit* out, bool* found) {
  __shared__ int range[2];
  for_each_key(batch, index.num_tables, range, [&](int64_t position, int t) {
    RowMove<Unit> move;
    if (position < batch.n) {
      const int64_t slot = t < 0 ? kNoSlot : find_slot(index.table(t), batch.ids[position]);
      found[position] = slot >= 0;
      move.to = out + position * shape.units;
      if (slot >= 0) move.from = values.in_slot(index.field(t, kFirstBucket) * kSlots + slot);
    }
    move_rows<false, true>(shape, move, fill);
  });
}

// Rows that start: position i has missing key `groups[i]`, -1 for none; the row of missing key g
// starts as row `first[g]` of `data`, and position first[g] writes it. Null `data` starts none.
template <class Unit>
struct StartingRows {
  const Unit* data;
  const int32_t* groups;
  const int64_t* first;
};

// Read the row of every slot, and write those of new keys; null `out` reads nothing.
template <class Unit>
__global__ void __launch_bounds__(kTileThreads)
    hash_read_rows_kernel(RowArray<Unit> values, const int64_t* slots, int64_t n,
                          StartingRows<Unit> starting, RowUnits shape, uint32_t fill, Unit* out) {
  for (int64_t tile = simt::global_warp() * kSlots; tile < n;
       tile += simt::warps_in_grid() * kSlots) {
    const int64_t position = tile + lane_in_warp();
    RowMove<Unit> move;
    if (position < n) {
      Unit* row = values.in_slot(slots[position]);
      move.from = row;
      if (out != nullptr) move.to = out + position * shape.units;
      const int32_t group = starting.data == nullptr ? -1 : starting.groups[position];
      if (row != nullptr && group >= 0 && group < n) {
        const int64_t first = starting.first[group];
        move.from = starting.data + first * shape.units;
        if (first == position) (out != nullptr ? move.also : move.to) = row;
      }
    }
    move_rows<true, true>(shape, move, fill);
  }
}

// The positions of a batch by slot: a cell is -1 or holds the last position so far of its slot.
struct SlotCells {
  int32_t* cells;
  uint32_t mask;
  uint32_t* cell_of;  // cell of each position
};

// The value of a claimed cell only increases, and all its values are positions of one slot.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_claim_last_kernel(const int64_t* slots, int64_t n, SlotCells keys) {
  for (int64_t i = simt::global_thread(); i < n; i += simt::threads_in_grid()) {
    const int64_t slot = slots[i];
    if (slot < 0) continue;
    const auto position = static_cast<int32_t>(i);
    auto cell = static_cast<uint32_t>(mix(static_cast<uint64_t>(slot)));
    for (;; ++cell) {
      cell &= keys.mask;
      int32_t other = keys.cells[cell];
      if (other < 0) other = atomicCAS(keys.cells + cell, -1, position);
      if (other < 0) break;
      if (slots[other] != slot) continue;
      if (position > other) atomicMax(keys.cells + cell, position);
      break;
    }
    keys.cell_of[i] = cell;
  }
}

template <class Unit>
__global__ void __launch_bounds__(kTileThreads)
    hash_write_rows_kernel(RowArray<Unit> values, const int64_t* slots, int64_t n, SlotCells keys,
                           RowUnits shape, const Unit* rows) {
  for (int64_t tile = simt::global_warp() * kSlots; tile < n;
       tile += simt::warps_in_grid() * kSlots) {
    const int64_t position = tile + lane_in_warp();
    RowMove<Unit> move;
    if (position < n && slots[position] >= 0 && keys.cells[keys.cell_of[position]] == position) {
      move.from = rows + position * shape.units;
      move.to = values.in_slot(slots[position]);
    }
    move_rows<false, false>(shape, move, 0);
  }
}

// Positions by slot, as `group` returns them: group g, that of slots[g], has the positions
// permutation[j] for j in [segments[g], segments[g + 1]). There are at most n groups.
struct SlotGroups {
  const int64_t* slots;
  const int32_t *segments, *permutation, *count;
  int64_t n;
};

// Add rows of `dim` elements to those in slots, each sum rounded to T.
template <class T>
__global__ void __launch_bounds__(kTileThreads)
    hash_add_rows_kernel(RowArray<T> values, SlotGroups groups, int64_t dim, int lanes,
                         const T* rows) {
  constexpr int kColumns = 16 / static_cast<int>(sizeof(T));  // columns that a lane holds
  const LaneGroup lane(lanes);
  const int64_t step = simt::warps_in_grid() * lane.groups_in_warp();
  const int count = *groups.count;
  for (int64_t g = simt::global_warp() * lane.groups_in_warp() + lane.group; g < count; g += step) {
    T* row = values.in_slot(groups.slots[g]);
    if (row == nullptr) continue;
    const int begin = groups.segments[g], end = groups.segments[g + 1];
    for (int64_t column = int64_t{lane.rank} * kColumns; column < dim;
         column += int64_t{lanes} * kColumns) {
      const int valid = dim - column < kColumns ? static_cast<int>(dim - column) : kColumns;
      float sum[kColumns];
      read_columns(row + column, valid, sum);
      for (int j = begin; j < end; j += kRowsInFlight) {
        float more[kRowsInFlight][kColumns];
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r) {
          if (j + r >= end) break;
          read_columns(rows + groups.permutation[j + r] * dim + column, valid, more[r]);
        }
#pragma unroll
        for (int r = 0; r < kRowsInFlight; ++r) {
          if (j + r >= end) break;
#pragma unroll
          for (int k = 0; k < kColumns; ++k) sum[k] = to_float(from_float<T>(sum[k] + more[r][k]));
        }
      }
      write_columns(row + column, valid, sum);
    }
  }
}

// The entries and rows of evicted keys, gathered; all by miss.
struct EvictedKeys {
  const int64_t* slots;
  const uint8_t* status;
  const int64_t* words;  // three each
  int64_t n;
  int32_t* counts;  // scratch, by block

  EMB_DEVICE bool has(int64_t miss) const {
    return miss < n && status[miss] == static_cast<uint8_t>(InsertStatus::kEvicting);
  }
};

// Null where a kernel gathers rows only.
struct EvictedEntries {
  int64_t *keys, *stamps, *scores, *count;
};

// Rows by slot, and where those of evicted keys go.
struct EvictedMatrix {
  RowBytes rows;
  void* out;
};

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_count_evicted_kernel(EvictedKeys evicted) {
  __shared__ int64_t sums[kTileThreads / kSlots];
  int64_t mine = 0, total;
  const int64_t end = block_begin(evicted.n, blockIdx.x + 1);
  for (int64_t i = block_begin(evicted.n, blockIdx.x) + threadIdx.x; i < end; i += kTileThreads) {
    mine += evicted.has(i);
  }
  exclusive_sum(mine, sums, &total);
  if (threadIdx.x == 0) evicted.counts[blockIdx.x] = static_cast<int32_t>(total);
}

template <class Unit>
__global__ void __launch_bounds__(kTileThreads)
    hash_evicted_rows_kernel(RowArray<const Unit> values, EvictedKeys evicted, RowUnits shape,
                             EvictedEntries entries, Unit* rows) {
  __shared__ int64_t sums[kTileThreads / kSlots];
  int64_t before = 0, total;
  for (unsigned block = threadIdx.x; block < blockIdx.x; block += kTileThreads) {
    before += evicted.counts[block];
  }
  exclusive_sum(before, sums, &before);
  const int64_t end = block_begin(evicted.n, blockIdx.x + 1);
  for (int64_t tile = block_begin(evicted.n, blockIdx.x); tile < end; tile += kTileThreads) {
    const int64_t miss = tile + threadIdx.x;
    const bool has = evicted.has(miss);
    const int64_t to = before + exclusive_sum(has, sums, &total);
    before += total;
    RowMove<Unit> move;
    if (has && entries.keys != nullptr) {
      entries.keys[to] = evicted.words[3 * miss + kKey];
      entries.stamps[to] = evicted.words[3 * miss + kStamp];
      entries.scores[to] = evicted.words[3 * miss + kScore];
    }
    if (has) {
      move.from = values.in_slot(evicted.slots[miss]);
      move.to = rows + to * shape.units;
    }
    move_rows<false, true>(shape, move, 0);
  }
  if (entries.count != nullptr && blockIdx.x == gridDim.x - 1 && threadIdx.x == 0) {
    *entries.count = before;
  }
}

// Call `body(Unit{}, units)` for the widest unit that rows of `bytes` can be divided into, where
// all addresses are multiples of it.
template <class Body>
void with_unit(const RowBytes& rows, const Body& body) {
  if (rows.alignment % 16 == 0) return body(Unit16{}, rows.bytes / 16);
  if (rows.alignment % 8 == 0) return body(Unit8{}, rows.bytes / 8);
  if (rows.alignment % 4 == 0) return body(uint32_t{}, rows.bytes / 4);
  body(uint16_t{}, rows.bytes / 2);
}

inline RowUnits row_units(int64_t units) { return {units, lanes_for(units, 1)}; }

template <class Unit>
RowArray<Unit> row_array(void* data, int64_t stride_bytes, int64_t rows) {
  return {static_cast<Unit*>(data), stride_bytes / static_cast<int64_t>(sizeof(Unit)), rows};
}

template <class Launcher>
void launch_find_rows(const Launcher& launcher, const DeviceIndex& index, const KeyBatch& batch,
                      const RowBytes& rows, uint32_t fill, void* out, bool* found) {
  if (batch.n == 0) return;
  with_unit(rows, [&](auto unit, int64_t units) {
    using Unit = decltype(unit);
    launcher(hash_find_rows_kernel<Unit>, key_blocks(launcher, batch.n), kTileThreads, index, batch,
             row_array<const Unit>(rows.data, rows.stride, rows.count), row_units(units), fill,
             static_cast<Unit*>(out), found);
  });
}

// `starting.data` is untyped here.
template <class Launcher>
void launch_read_rows(const Launcher& launcher, const RowBytes& rows, const int64_t* slots,
                      int64_t n, const StartingRows<void>& starting, uint32_t fill, void* out) {
  if (n == 0) return;
  with_unit(rows, [&](auto unit, int64_t units) {
    using Unit = decltype(unit);
    const StartingRows<Unit> from{static_cast<const Unit*>(starting.data), starting.groups,
                                  starting.first};
    launcher(hash_read_rows_kernel<Unit>, key_blocks(launcher, n), kTileThreads,
             row_array<Unit>(rows.data, rows.stride, rows.count), slots, n, from, row_units(units),
             fill, static_cast<Unit*>(out));
  });
}

template <class Work>
void launch_write_rows(Work& work, const RowBytes& rows, const int64_t* slots, int64_t n,
                       const void* from) {
  if (n == 0) return;
  const auto& launcher = work.launcher();
  const int64_t cells = num_cells(n);
  const SlotCells keys{work.template scratch<int32_t>(cells), static_cast<uint32_t>(cells - 1),
                       work.template scratch<uint32_t>(n)};
  const unsigned blocks = key_blocks(launcher, n);
  launcher(hash_clear_kernel, blocks, kTileThreads, reinterpret_cast<uint32_t*>(keys.cells),
           keys.mask);
  launcher(hash_claim_last_kernel, blocks, kTileThreads, slots, n, keys);
  with_unit(rows, [&](auto unit, int64_t units) {
    using Unit = decltype(unit);
    launcher(hash_write_rows_kernel<Unit>, blocks, kTileThreads,
             row_array<Unit>(rows.data, rows.stride, rows.count), slots, n, keys, row_units(units),
             static_cast<const Unit*>(from));
  });
}

template <class Launcher>
void launch_add_rows(const Launcher& launcher, const RowBytes& rows, Dtype dtype,
                     const SlotGroups& groups, const void* from) {
  if (groups.n == 0) return;
  with_dtype(dtype, [&](auto tag) {
    using T = typename decltype(tag)::type;
    constexpr int kColumns = 16 / static_cast<int>(sizeof(T));
    const int64_t dim = rows.bytes / static_cast<int64_t>(sizeof(T));
    const int lanes = lanes_for(dim, kColumns);
    launcher(hash_add_rows_kernel<T>,
             blocks_for(groups.n, kTileThreads / lanes, launcher.blocks(8)), kTileThreads,
             row_array<T>(rows.data, rows.stride, rows.count), groups, dim, lanes,
             static_cast<const T*>(from));
  });
}

// `evicted` comes without its scratch.
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
               row_array<const Unit>(rows.data, rows.stride, rows.count), evicted, row_units(units),
               entries, static_cast<Unit*>(matrices[m].out));
    });
    entries = {};
  }
}

}  // namespace emb::cuda
