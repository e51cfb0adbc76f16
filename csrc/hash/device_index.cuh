// The tables of an index as kernels see them, and how a grid walks over keys that lie table by
// table. A thread takes a key: the 32 tags of a bucket are one sector of memory, which it compares
// with the key's in registers. Sizes of tables are known on the device alone, so grids are made for
// what the host knows and walk over what there is.
#pragma once

#include "core/row_piece.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"
#include "hash/args.h"

namespace emb::cuda {

static_assert(kSlots == static_cast<int>(simt::kWarp), "a lane is a slot of a bucket");

struct DeviceIndex {
  uint8_t* tags;
  int64_t* entries;
  int64_t* tables;  // [T, kTableFields]
  int64_t* clock;
  int64_t* counters;  // [T, kHashCounters]
  int64_t words;
  int num_tables;

  EMB_DEVICE int64_t& field(int t, TableField field) const {
    return tables[int64_t{t} * kTableFields + field];
  }
  EMB_DEVICE HashTable table(int t) const {
    const int64_t first_slot = field(t, kFirstBucket) * kSlots, buckets = field(t, kBuckets);
    return {
        tags + first_slot, entries + first_slot * words, words,
        buckets,           address_mask(buckets),        static_cast<uint64_t>(field(t, kHashKey))};
  }
};

// A batch of keys: segment f, ids [starts[f], starts[f + 1]), belongs to table tables[f].
struct KeyBatch {
  const int64_t *ids, *starts, *tables;
  int64_t n;
  int segments;
};

EMB_DEVICE int lane_in_warp() { return static_cast<int>(threadIdx.x % simt::kWarp); }

EMB_DEVICE void add_to(int64_t* sum, int64_t n) {
  atomicAdd(reinterpret_cast<unsigned long long*>(sum), static_cast<unsigned long long>(n));
}

// The same up to the largest number, for n >= 0. Whoever makes the sum wrap puts it right, and does
// so after all that wrapped: what is added in between is not lost, as the sum is at its end anyway.
EMB_DEVICE void add_uses_to(int64_t* sum, int64_t n) {
  auto* words = reinterpret_cast<unsigned long long*>(sum);
  const auto before = static_cast<int64_t>(atomicAdd(words, static_cast<unsigned long long>(n)));
  if (count_overflows(before, n)) atomicExch(words, static_cast<unsigned long long>(INT64_MAX));
}

// Which of the 32 tags of a bucket equal a byte, as a mask.
EMB_DEVICE uint32_t match_tags(const uint8_t* tags, uint8_t tag) {
  const auto* packs = reinterpret_cast<const simt::Pack16*>(tags);
  const simt::Pack16 halves[] = {packs[0], packs[1]};
  const uint32_t wanted = tag * 0x01010101u;
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t equal = __vcmpeq4(halves[i / 4].word[i % 4], wanted) & 0x01010101u;
    mask |= (equal * 0x01020408u >> 24 & 0xfu) << 4 * i;  // the product puts the four bits together
  }
  return mask;
}

EMB_DEVICE int64_t find_in_bucket(const HashTable& table, int64_t bucket, uint8_t tag,
                                  int64_t key) {
  uint32_t candidates = match_tags(table.tags + bucket * kSlots, tag);
  for (; candidates != 0; candidates &= candidates - 1) {
    const int64_t slot = bucket * kSlots + __ffs(static_cast<int>(candidates)) - 1;
    if (table.entry(slot)[kKey] == key) return slot;
  }
  return kNoSlot;
}

EMB_DEVICE int64_t find_slot(const HashTable& table, int64_t key) {
  const uint64_t mixed = table.hash(key);
  const int64_t slot = find_in_bucket(table, table.first(mixed), tag_of(mixed), key);
  if (slot != kNoSlot) return slot;
  return find_in_bucket(table, table.second(mixed), tag_of(mixed), key);
}

// Calls `body(x, i)` for every x in [0, n), where i is the interval x lies in by `starts`, -1 for
// none. Called by all threads of a grid of kTileThreads a block; whole warps call `body`, so it may
// use collectives, and the last ones with x >= n and i = -1. `shared` is two ints of the block.
template <class Starts, class Body>
EMB_DEVICE void for_each_of(const Starts& starts, int intervals, int64_t n, int* shared,
                            const Body& body) {
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileThreads; tile < n;
       tile += static_cast<int64_t>(gridDim.x) * kTileThreads) {
    const int64_t end = tile + kTileThreads < n ? tile + kTileThreads : n, x = tile + threadIdx.x;
    const TileSearch search(starts, intervals, tile, end, shared);
    body(x, x < end ? search.find(starts, x) : -1);
  }
}

// Calls `body(position, table)` for every key of a batch, as above; the table is -1 where it is
// none of the index.
template <class Body>
EMB_DEVICE void for_each_key(const KeyBatch& batch, int num_tables, int* shared, const Body& body) {
  const auto start = [&](int f) { return batch.starts[f]; };
  for_each_of(start, batch.segments, batch.n, shared, [&](int64_t position, int segment) {
    const int64_t t = segment < 0 ? -1 : batch.tables[segment];
    body(position, t >= 0 && t < num_tables ? static_cast<int>(t) : -1);
  });
}

// What a warp has counted of one table and not added to memory yet. A warp seldom changes the
// table, so few atomics are left.
class TableTally {
 public:
  // `sums` of table 0; that of the next one is `stride` further.
  EMB_DEVICE TableTally(int64_t* sums, int stride) : sums_(sums), stride_(stride) {}

  // The whole warp calls it: every lane for a table of its own, 1 where `counts`.
  EMB_DEVICE void add(int table, bool counts) {
    unsigned left = __ballot_sync(simt::kFullMask, counts && table >= 0);
    while (left != 0) {
      const int next = __shfl_sync(simt::kFullMask, table, __ffs(static_cast<int>(left)) - 1);
      const unsigned same = __ballot_sync(simt::kFullMask, counts && table == next);
      add_all(next, __popc(same));
      left &= ~same;
    }
  }

  // The same with a number a lane.
  EMB_DEVICE void add_each(int table, int count) {
    unsigned left = __ballot_sync(simt::kFullMask, count != 0 && table >= 0);
    while (left != 0) {
      const int next = __shfl_sync(simt::kFullMask, table, __ffs(static_cast<int>(left)) - 1);
      const bool same = count != 0 && table == next;
      left &= ~__ballot_sync(simt::kFullMask, same);
      add_all(next, simt::group_sum(same ? count : 0, kSlots));
    }
  }

  // The same arguments in every lane.
  EMB_DEVICE void add_all(int table, int count) {
    if (table != table_) flush();
    table_ = table;
    count_ += count;
  }

  EMB_DEVICE void flush() {
    if (count_ != 0 && lane_in_warp() == 0) add_to(sums_ + int64_t{table_} * stride_, count_);
    count_ = 0;
  }

 private:
  int64_t* sums_;
  int stride_;
  int table_ = -1, count_ = 0;
};

EMB_DEVICE TableTally counter_tally(const DeviceIndex& index, HashCounter counter) {
  return {index.counters + counter, kHashCounters};
}

// The blocks of a grid that walks over n keys, a thread a key.
template <class Launcher>
unsigned key_blocks(const Launcher& launcher, int64_t n) {
  return blocks_for(n, kTileThreads, launcher.blocks(8));
}

}  // namespace emb::cuda
