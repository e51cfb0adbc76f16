// `hash_grow_` on the GPU, in four steps:
//   (1) If not all misses are admitted, hash_clear_admitted_kernel and hash_count_admitted_kernel
//       count the admitted misses of each table.
//   (2) hash_plan_kernel computes how many buckets each table gets.
//   (3) hash_split_kernel fills the new buckets from old ones.
//   (4) hash_refresh_kernel corrects the slots of keys of the batch that moved.
// A new bucket (child) receives entries of one old bucket (parent) only, so one warp fills a child,
// with one lane per slot of the parent. All pointers are to device memory of the caller.
#pragma once

#include "hash/device_index.cuh"

namespace emb::cuda {

// Maximum number of row buffers. Weights and the states of an optimizer take at most 6, see
// kMaxElementStates and kMaxRowStates (optim/functor.h).
inline constexpr int kMaxRowBuffers = 16;

// The row buffers of all tables: P buffers with rows by slot, which move with the entries.
struct DeviceRowBuffers {
  uint8_t* data[kMaxRowBuffers];  // in device memory or mapped host memory
  int num_buffers;                // P
  const int64_t* layout;  // [T, P, 2]: the byte of the buffer at which row 0 of the table begins,
                          // and the bytes per row
};

// The arguments of the kernels.
struct Growth {
  DeviceIndex index;
  DeviceRowBuffers buffers;
  DeviceMisses misses;  // the misses for which the tables grow
  // Scratch.
  int64_t* num_admitted;        // [T], the number of admitted misses; unused if all are admitted
  int64_t* old_buckets;         // [T], the number of buckets before the op
  int64_t* new_buckets_before;  // [T + 1], the number of new buckets of all earlier tables; at T of
                                // all tables
};

// Add the number of admitted misses of every table to `num_admitted`, which must be 0 before.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_count_admitted_kernel(Growth growth) {
  __shared__ int range[2];
  const int num_tables = growth.index.num_tables;
  const DeviceMisses& misses = growth.misses;
  const auto start = [&](int t) { return misses.offsets[t]; };
  TableTally tally(growth.num_admitted, 1);
  for_each_in_intervals(
      start, num_tables, misses.offsets[num_tables], range,
      [&](int64_t miss, int t) { tally.add(t, t >= 0 && misses.admitted[miss]); });
  tally.flush();
}

// Set `num_admitted` to 0.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_clear_admitted_kernel(Growth growth) {
  for (int64_t t = simt::global_thread(); t < growth.index.num_tables;
       t += simt::threads_in_grid()) {
    growth.num_admitted[t] = 0;
  }
}

// Set the new number of buckets of every table, save the old number in `old_buckets`, and write
// `new_buckets_before`. The grid must be one block.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_plan_kernel(Growth growth) {
  __shared__ int64_t sums[kBlockWarps];
  const DeviceIndex& index = growth.index;
  int64_t new_before = 0;  // new buckets of the tables before this tile
  for (int tile = 0; tile < index.num_tables; tile += kTileThreads) {
    const int t = tile + static_cast<int>(threadIdx.x);
    int64_t num_new = 0;
    if (t < index.num_tables) {
      const int64_t old_buckets = index.field(t, HashTableColumn::kBuckets);
      const int64_t* offsets = growth.misses.offsets;
      const int64_t new_keys =
          growth.misses.admitted == nullptr ? offsets[t + 1] - offsets[t] : growth.num_admitted[t];
      const int64_t wanted = wanted_buckets(
          index.field(t, HashTableColumn::kSize) + new_keys, old_buckets,
          index.field(t, HashTableColumn::kMaxBuckets), index.field(t, HashTableColumn::kMaxLoad));
      growth.old_buckets[t] = old_buckets;
      index.field(t, HashTableColumn::kBuckets) = wanted;
      num_new = wanted - old_buckets;
    }
    int64_t total;
    const int64_t first = new_before + exclusive_sum(num_new, sums, &total);
    if (t < index.num_tables) growth.new_buckets_before[t] = first;
    new_before += total;
  }
  if (threadIdx.x == 0) growth.new_buckets_before[index.num_tables] = new_before;
}

// Copy `bytes` bytes with all lanes of the warp, in units of type Unit. Both addresses and `bytes`
// must be multiples of its size.
template <class Unit>
EMB_DEVICE void copy_units(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const auto num_units = bytes / static_cast<int64_t>(sizeof(Unit));
  // Few rows are wider than one iteration of the warp; an unrolled loop would cost registers for
  // all rows.
#pragma unroll 1
  for (int64_t i = lane_in_warp(); i < num_units; i += kWarpLanes) {
    reinterpret_cast<Unit*>(to)[i] = reinterpret_cast<const Unit*>(from)[i];
  }
}

// Copy a row of `bytes` bytes with all lanes of the warp, in units of 16, 4 or 1 bytes: the largest
// of these sizes that divides `bytes` and both addresses.
EMB_DEVICE void copy_row(uint8_t* to, const uint8_t* from, int64_t bytes) {
  const auto bits = reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) |
                    static_cast<uintptr_t>(bytes);
  if (bits % 16 == 0) {
    copy_units<simt::Pack16>(to, from, bytes);
  } else if (bits % 4 == 0) {
    copy_units<uint32_t>(to, from, bytes);
  } else {
    copy_units<uint8_t>(to, from, bytes);
  }
}

// Copy the rows in slot `from` of table t to slot `to`, in all row buffers. All 32 lanes must call
// this.
EMB_DEVICE void copy_rows(const DeviceRowBuffers& buffers, int t, int64_t to, int64_t from) {
  for (int p = 0; p < buffers.num_buffers; ++p) {
    const int64_t* layout = buffers.layout + 2 * (int64_t{t} * buffers.num_buffers + p);
    uint8_t* rows = buffers.data[p] + layout[0];
    copy_row(rows + to * layout[1], rows + from * layout[1], layout[1]);
  }
}

// Fill `child`, a new bucket of table t, which had `old_buckets` buckets before: move the entries
// of its parent that now have this bucket, with their rows. The child must be empty. All 32 lanes
// must call this. At the same time other warps may fill other children of the same parent, and
// empty slots of the parent. This lane may or may not see the old tag of such a slot. Both are
// correct, because the key of the slot does not have this bucket.
EMB_DEVICE void fill_child(const Growth& growth, int t, int64_t child, int64_t old_buckets) {
  const HashTable table = growth.index.table(t);
  const uint64_t old_mask = address_mask(old_buckets);
  const int64_t parent = bucket_address(static_cast<uint64_t>(child), old_buckets, old_mask);
  const int64_t from = parent * kBucketSlots + lane_in_warp();
  const uint8_t tag = table.tags[from];
  const uint64_t full_hash = table.hash(table.entry(from)[HashEntry::kKey]);
  const bool is_first = bucket_address(first_hash(full_hash), old_buckets, old_mask) == parent;
  const bool moves = tag != kEmptyTag && (is_first ? table.first_bucket(full_hash)
                                                   : table.second_bucket(full_hash)) == child;
  unsigned moving_lanes = __ballot_sync(simt::kFullMask, moves);
  if (moves) {
    const unsigned lower_moving_lanes = moving_lanes & ((1u << lane_in_warp()) - 1);
    const int64_t to = child * kBucketSlots + __popc(lower_moving_lanes);
    table.tags[to] = tag;
    table.tags[from] = kEmptyTag;
    for (int64_t w = 0; w < table.entry_words; ++w) table.entry(to)[w] = table.entry(from)[w];
  }
  for (int64_t to = child * kBucketSlots; moving_lanes != 0;
       moving_lanes &= moving_lanes - 1, ++to) {
    copy_rows(growth.buffers, t, to,
              parent * kBucketSlots + __ffs(static_cast<int>(moving_lanes)) - 1);
  }
}

// Fill all new buckets, one warp each.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_split_kernel(Growth growth) {
  const int num_tables = growth.index.num_tables;
  const int64_t num_new_buckets = growth.new_buckets_before[num_tables];
  const auto start = [&](int t) { return growth.new_buckets_before[t]; };
  for (int64_t i = simt::global_warp(); i < num_new_buckets; i += simt::warps_in_grid()) {
    const int t = warp_search(start, num_tables, i);
    const int64_t old_buckets = growth.old_buckets[t];
    fill_child(growth, t, old_buckets + i - growth.new_buckets_before[t], old_buckets);
  }
}

// Correct `slots` [n], the slots of the batch's keys: find each key of a grown table again that is
// no longer in its slot. Negative slots stay.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_refresh_kernel(Growth growth, KeyBatch batch, int64_t* slots) {
  __shared__ int range[2];
  if (growth.new_buckets_before[growth.index.num_tables] == 0) return;
  for_each_key(batch, growth.index.num_tables, range, [&](int64_t position, int t) {
    if (t < 0 || growth.new_buckets_before[t] == growth.new_buckets_before[t + 1]) return;
    const int64_t slot = slots[position];
    if (slot < 0) return;
    const HashTable table = growth.index.table(t);
    const int64_t key = batch.ids[position];
    const bool is_in_slot = slot < table.num_buckets * kBucketSlots &&
                            table.tags[slot] != kEmptyTag &&
                            table.entry(slot)[HashEntry::kKey] == key;
    if (!is_in_slot) slots[position] = find_slot(table, key);
  });
}

// Launch `hash_grow_`: grow the tables and correct `slots` [n] of the batch. The scratch pointers
// of `growth` are set here, from `work`. `num_buckets`, the number of buckets in the memory of the
// index, sizes the grid.
template <class Work>
void launch_grow(Work& work, Growth growth, const KeyBatch& batch, int64_t* slots,
                 int64_t num_buckets) {
  const auto& launcher = work.launcher();
  const int num_tables = growth.index.num_tables;
  if (num_tables == 0) return;
  growth.num_admitted = work.template scratch<int64_t>(num_tables);
  growth.old_buckets = work.template scratch<int64_t>(num_tables);
  growth.new_buckets_before = work.template scratch<int64_t>(num_tables + 1);
  if (growth.misses.admitted != nullptr) {
    launcher(hash_clear_admitted_kernel,
             blocks_for(num_tables, kTileThreads, launcher.max_grid_blocks(1)), kTileThreads,
             growth);
  }
  if (growth.misses.admitted != nullptr && batch.n > 0) {
    launcher(hash_count_admitted_kernel, key_blocks(launcher, batch.n), kTileThreads, growth);
  }
  launcher(hash_plan_kernel, 1, kTileThreads, growth);
  launcher(hash_split_kernel,
           blocks_for(num_buckets, kBlockWarps, launcher.max_grid_blocks(kFullBlocksPerSm)),
           kTileThreads, growth);
  if (batch.n == 0) return;
  launcher(hash_refresh_kernel, key_blocks(launcher, batch.n), kTileThreads, growth, batch, slots);
}

}  // namespace emb::cuda
