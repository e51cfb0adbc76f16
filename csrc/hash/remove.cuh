// `hash_erase_` and `hash_expire_` on the GPU. Both remove a key by writing kEmptyTag to its slot.
// A batch of `hash_erase_` may repeat a key. So the positions of a key claim a scratch cell
// (misses.cuh), and the first position removes the key. All pointers are to device memory that must
// live until the kernels have run.
#pragma once

#include "hash/find.cuh"
#include "hash/misses.cuh"

namespace emb::cuda {

// Write the slot of every key to `slots` [n], kNoSlot for a missing key, and claim a cell for each
// key that has a slot. The cells must be empty before.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_find_and_claim_kernel(DeviceIndex index, KeyBatch batch, KeyCells key_cells,
                               int64_t* slots) {
  __shared__ int range[2];
  for_each_key(batch, index.num_tables, range, [&](int64_t position, int t) {
    if (position >= batch.n) return;
    const int64_t slot = t < 0 ? kNoSlot : find_slot(index.table(t), batch.ids[position]);
    slots[position] = slot;
    key_cells.cell_of_position[position] =
        slot >= 0 ? key_cells.claim(batch, position, t).cell : kNoCell;
  });
}

// Empty the slot of every key that has one, after hash_find_and_claim_kernel for the same
// arguments. In `slots`, the first position of a key keeps the slot; the others get kNoSlot. Count
// the erased keys, and correct the sizes of the tables.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_erase_kernel(DeviceIndex index, KeyBatch batch, KeyCells key_cells, int64_t* slots) {
  __shared__ int range[2];
  TableTally erased = counter_tally(index, HashCounter::kErased);
  TableTally sizes = size_tally(index);
  for_each_key(batch, index.num_tables, range, [&](int64_t position, int t) {
    const bool is_erased =
        t >= 0 && key_cells.is_first(key_cells.cell_of_position[position], position);
    if (is_erased) {
      index.tags[index.field(t, HashTableColumn::kFirstBucket) * kBucketSlots + slots[position]] =
          kEmptyTag;
    } else if (position < batch.n) {
      slots[position] = kNoSlot;
    }
    erased.add(t, is_erased);
    sizes.add_each(t, is_erased ? -1 : 0);
  });
  erased.flush();
  sizes.flush();
}

// The keys that `hash_expire_` removes: those whose stamp is less than `min_stamp`, in the buckets
// [first_bucket, first_bucket + num_buckets) of a table. The window must lie in the memory of the
// table; not checked.
struct ExpireWindow {
  int table;
  int64_t first_bucket, num_buckets;
  int64_t min_stamp;
};

// Empty the slots of expired keys, one thread per slot. Write to `removed`, [num_buckets *
// kBucketSlots], whether each slot of the window was emptied; false in buckets that the table does
// not use.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_expire_kernel(DeviceIndex index, ExpireWindow window, bool* removed) {
  const HashTable table = index.table(window.table);
  const int64_t begin = window.first_bucket * kBucketSlots, n = window.num_buckets * kBucketSlots;
  TableTally expired = counter_tally(index, HashCounter::kExpired);
  TableTally sizes = size_tally(index);
  // n is a multiple of 32, so whole warps enter the body, as the tallies require.
  for (int64_t i = simt::global_thread(); i < n; i += simt::threads_in_grid()) {
    const int64_t slot = begin + i;
    const bool is_expired = slot < table.num_buckets * kBucketSlots &&
                            table.tags[slot] != kEmptyTag &&
                            table.entry(slot)[HashEntry::kStamp] < window.min_stamp;
    if (is_expired) table.tags[slot] = kEmptyTag;
    removed[i] = is_expired;
    expired.add(window.table, is_expired);
    sizes.add_each(window.table, is_expired ? -1 : 0);
  }
  expired.flush();
  sizes.flush();
}

// Launch `hash_erase_`: write `slots` [n], the slot that each position emptied, and change the
// index.
template <class Work>
void launch_erase(Work& work, const DeviceIndex& index, const KeyBatch& batch, int64_t* slots) {
  if (batch.n == 0) return;
  const auto& launcher = work.launcher();
  const KeyCells key_cells = allocate_key_cells(work, batch.n);
  const unsigned blocks = key_blocks(launcher, batch.n);
  launcher(hash_clear_kernel, blocks, kTileThreads, key_cells.cells, key_cells.mask);
  launcher(hash_find_and_claim_kernel, blocks, kTileThreads, index, batch, key_cells, slots);
  launcher(hash_erase_kernel, blocks, kTileThreads, index, batch, key_cells, slots);
}

// Launch `hash_expire_`: write `removed`, [num_buckets * kBucketSlots], and change the index.
template <class Launcher>
void launch_expire(const Launcher& launcher, const DeviceIndex& index, const ExpireWindow& window,
                   bool* removed) {
  if (window.num_buckets == 0) return;
  launcher(hash_expire_kernel, key_blocks(launcher, window.num_buckets * kBucketSlots),
           kTileThreads, index, window, removed);
}

}  // namespace emb::cuda
