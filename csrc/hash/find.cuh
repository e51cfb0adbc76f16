// `hash_find` and `hash_touch_` on the GPU, with one thread per position. In `hash_touch_`, the
// thread of a missing key also claims a scratch cell. misses.cuh uses these cells to number the
// misses. All pointers are to device memory of the caller.
#pragma once

#include "hash/device_index.cuh"
#include "hash/misses.cuh"

namespace emb::cuda {

// How a hit updates its entry; HashTouch is the same on the CPU.
struct KeyTouch {
  HashOrder order;
  const int64_t* counts;        // [n], uses of each position's key; null for 1 each
  const int64_t* batch_scores;  // [T], the score of this batch in each table; null for 0
};

// Begin a batch, before hash_touch_kernel: advance the clock, count the lookups of each table,
// write the plan of the batch in `num_parts` parts, empty the cells, and clear the counts of misses
// and of parts. The grid may have any number of blocks.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_begin_batch_kernel(DeviceIndex index, KeyBatch batch, KeyCells key_cells, BatchPlan plan,
                            int num_parts) {
  const int64_t self = simt::global_thread(), step = simt::threads_in_grid();
  if (self == 0) {
    *index.clock += 1;
    *plan.next_part = 0;
  }
  for (int64_t f = self; f < batch.num_segments; f += step) {
    const int64_t t = batch.tables[f];
    if (t < 0 || t >= index.num_tables) continue;
    simt::atomic_add(index.counters + t * kHashCounters + static_cast<int>(HashCounter::kLookups),
                     batch.starts[f + 1] - batch.starts[f]);
  }
  for (int64_t t = self; t < index.num_tables; t += step) plan.num_misses[t] = 0;
  for (int64_t part = self; part < num_parts; part += step) plan.part_counts[part] = 0;
  clear_cells(key_cells.cells, key_cells.mask);
  if (blockIdx.x == 0) plan_batch(batch, index.num_tables, plan);
}

// Write the slot of every key to `slots` [n], kNoSlot for a missing key.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_find_kernel(DeviceIndex index, KeyBatch batch, int64_t* slots) {
  __shared__ int range[2];
  for_each_key(batch, index.num_tables, range, [&](int64_t position, int t) {
    if (position >= batch.n) return;
    slots[position] = t < 0 ? kNoSlot : find_slot(index.table(t), batch.ids[position]);
  });
}

// Update the entry of this lane's key; `entry` is null for a lane without one. `stamp` is the
// clock, and `batch_score` the score of this batch in the key's table. Several threads may have the
// same entry: all store the same stamp, and counts add up in any order. If touch.counts is null,
// one lane adds for all lanes with the same entry. All 32 lanes must call this.
EMB_DEVICE void touch_entry(const KeyTouch& touch, int64_t stamp, int64_t* entry, int64_t position,
                            int64_t batch_score) {
  if (entry != nullptr) entry[HashEntry::kStamp] = stamp;
  if (!has_scores(touch.order)) return;
  if (!order_counts_uses(touch.order)) {
    if (entry != nullptr) entry[HashEntry::kScore] = batch_score;
  } else if (touch.counts != nullptr) {
    if (entry != nullptr) add_uses_to(entry + HashEntry::kScore, touch.counts[position]);
  } else {
    const unsigned same_lanes =
        __match_any_sync(simt::kFullMask, reinterpret_cast<unsigned long long>(entry));
    const bool is_leader = __ffs(static_cast<int>(same_lanes)) - 1 == lane_in_warp();
    if (entry != nullptr && is_leader) add_uses_to(entry + HashEntry::kScore, __popc(same_lanes));
  }
}

// Find every key. Write its slot to `slots` [n], update the entry of a hit, and claim a cell for a
// missing key. Write the claimed cells to key_cells.cell_of_position, kNoCell for positions that
// claim none. Count hits in the index, and add the number of distinct missing keys of each table to
// `num_misses` [T].
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_touch_kernel(DeviceIndex index, KeyBatch batch, KeyTouch touch, KeyCells key_cells,
                      int64_t* num_misses, int64_t* slots) {
  __shared__ int range[2];
  const int64_t stamp = *index.clock;
  TableTally hits = counter_tally(index, HashCounter::kHits), new_misses(num_misses, 1);
  for_each_key(batch, index.num_tables, range, [&](int64_t position, int t) {
    int64_t slot = kNoSlot, *entry = nullptr;
    if (t >= 0) {
      const HashTable table = index.table(t);
      slot = find_slot(table, batch.ids[position]);
      if (slot != kNoSlot) entry = table.entry(slot);
    }
    CellClaim claim{kNoCell, false};
    if (t >= 0 && slot == kNoSlot) claim = key_cells.claim(batch, position, t);
    if (position < batch.n) {
      slots[position] = slot;
      key_cells.cell_of_position[position] = claim.cell;
    }
    new_misses.add(t, claim.is_new);
    touch_entry(touch, stamp, entry, position,
                t < 0 || touch.batch_scores == nullptr ? 0 : touch.batch_scores[t]);
    hits.add(t, slot != kNoSlot);
  });
  hits.flush();
  new_misses.flush();
}

// Launch `hash_find`: write `slots` [n].
template <class Launcher>
void launch_hash_find(const Launcher& launcher, const DeviceIndex& index, const KeyBatch& batch,
                      int64_t* slots) {
  if (batch.n == 0) return;
  launcher(hash_find_kernel, key_blocks(launcher, batch.n), kTileThreads, index, batch, slots);
}

// Launch `hash_touch_`: write `slots` [n] and `out`, and change the index. `work` owns the scratch
// memory; it is a DeviceWork, or a HostWork in tests. Nothing needs to be initialised.
template <class Work>
void launch_hash_touch(Work& work, const DeviceIndex& index, const KeyBatch& batch,
                       const KeyTouch& touch, int64_t* slots, const MissOutput& out) {
  const auto& launcher = work.launcher();
  const KeyCells key_cells = allocate_key_cells(work, batch.n);
  const unsigned blocks = key_blocks(launcher, batch.n);
  const BatchPlan plan = allocate_batch_plan(work, batch, index.num_tables, blocks);
  launcher(hash_begin_batch_kernel, blocks, kTileThreads, index, batch, key_cells, plan,
           static_cast<int>(blocks));
  if (batch.n > 0) {
    launcher(hash_touch_kernel, blocks, kTileThreads, index, batch, touch, key_cells,
             plan.num_misses, slots);
  }
  launcher(hash_number_kernel, blocks, kTileThreads, batch, index.num_tables, plan, key_cells,
           touch.counts, out);
}

}  // namespace emb::cuda
