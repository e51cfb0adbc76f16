// The hash index as GPU kernels access it, and the functions that these kernels share: search for a
// key, loops over keys that are stored table by table, sums over a block, and counters per table.
//
// One thread searches for a key. It reads the 32 tags of a bucket and compares them with the key's
// tag in registers. The tags are one sector of memory if they are aligned to 32 bytes. Only the
// device knows the numbers of keys and buckets. So the host sizes grids by upper bounds, and
// kernels loop over the existing keys and buckets. All blocks have kTileThreads threads. All
// pointers are to device memory of the caller.
#pragma once

#include <type_traits>

#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"
#include "hash/args.h"

namespace emb::cuda {

inline constexpr int kBlockWarps = kTileThreads / kWarpLanes;  // warps per block
// Blocks per multiprocessor of grids with loops over keys: as many as a multiprocessor holds.
inline constexpr int kFullBlocksPerSm = kResidentThreadsPerSm / kTileThreads;
static_assert(kBucketSlots == kWarpLanes, "a warp that works on a bucket has one lane per slot");

// The index in device memory, made from a HashIndex (check.h). Its contents are trusted.
struct DeviceIndex {
  uint8_t* tags;        // [S] for S slots of all tables, aligned to 16 bytes
  int64_t* entries;     // [S, entry_words]
  int64_t* tables;      // [T, kHashTableColumns]
  int64_t* clock;       // [1]
  int64_t* counters;    // [T, kHashCounters]
  int64_t entry_words;  // words per entry, 2 or 3
  int num_tables;       // T

  EMB_DEVICE int64_t& field(int t, HashTableColumn column) const {
    return tables[int64_t{t} * kHashTableColumns + static_cast<int>(column)];
  }
  // Return a view of table t in [0, T).
  EMB_DEVICE HashTable table(int t) const {
    const int64_t first_slot = field(t, HashTableColumn::kFirstBucket) * kBucketSlots,
                  buckets = field(t, HashTableColumn::kBuckets);
    return {tags + first_slot,     entries + first_slot * entry_words,
            entry_words,           buckets,
            address_mask(buckets), static_cast<uint64_t>(field(t, HashTableColumn::kHashKey))};
  }
};

// A batch of n keys in segments: the ids [starts[f], starts[f + 1]) are keys of table tables[f].
// `starts` must ascend from 0 to n, and `tables` must be existing tables; not checked. With other
// values, loops with for_each_key still stay inside their memory. A position before starts[0], or
// in the segment of a table that does not exist, has no table. A position from the last start on
// belongs to the last segment.
struct KeyBatch {
  const int64_t *ids, *starts, *tables;  // [n], [num_segments + 1], [num_segments]
  int64_t n;                             // positions
  int num_segments;                      // number of segments

  // Return the table of a position, which must be in a segment, by binary search.
  EMB_DEVICE int64_t table_at(int64_t position) const {
    int low = 0, high = num_segments - 1;
    while (low < high) {
      const int middle = low + (high - low + 1) / 2;
      if (starts[middle] <= position) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return tables[low];
  }
};

// The misses of a batch, as hash_touch_ numbers them by table and first position.
struct DeviceMisses {
  const int64_t* offsets;  // [T + 1]: table t has the misses [offsets[t], offsets[t + 1])
  const bool* admitted;    // by miss; null if all are admitted
};

// Add n >= 0 uses to a sum in global memory to which other threads may add too. The sum saturates:
// the thread whose addition makes the sum wrap around sets it to the maximum afterwards. This may
// overwrite additions of other threads, but the saturated sum is the maximum with or without them.
EMB_DEVICE void add_uses_to(int64_t* sum, int64_t n) {
  auto* unsigned_sum = reinterpret_cast<unsigned long long*>(sum);
  const auto before =
      static_cast<int64_t>(atomicAdd(unsigned_sum, static_cast<unsigned long long>(n)));
  if (count_overflows(before, n))
    atomicExch(unsigned_sum, static_cast<unsigned long long>(INT64_MAX));
}

// Return a mask with one bit per slot of a bucket, set where its tag equals `tag`. `tags` are the
// 32 tags of the bucket, aligned to 16 bytes.
EMB_DEVICE uint32_t match_tags(const uint8_t* tags, uint8_t tag) {
  const auto* packs = reinterpret_cast<const simt::Pack16*>(tags);
  const simt::Pack16 halves[] = {packs[0], packs[1]};
  const uint32_t repeated_tag = tag * 0x01010101u;
  uint32_t mask = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t equal_bytes = __vcmpeq4(halves[i / 4].word[i % 4], repeated_tag) & 0x01010101u;
    // The product gathers the lowest bits of the four bytes.
    mask |= (((equal_bytes * 0x01020408u) >> 24) & 0xfu) << (4 * i);
  }
  return mask;
}

// Return the slot of `key`, which has the tag `tag`, in a bucket, or kNoSlot if the bucket does not
// have the key.
EMB_DEVICE int64_t find_in_bucket(const HashTable& table, int64_t bucket, uint8_t tag,
                                  int64_t key) {
  uint32_t candidates = match_tags(table.tags + bucket * kBucketSlots, tag);
  for (; candidates != 0; candidates &= candidates - 1) {
    const int64_t slot = bucket * kBucketSlots + __ffs(static_cast<int>(candidates)) - 1;
    if (table.entry(slot)[HashEntry::kKey] == key) return slot;
  }
  return kNoSlot;
}

// Return the slot of `key` in a table, kNoSlot if the table does not have the key.
EMB_DEVICE int64_t find_slot(const HashTable& table, int64_t key) {
  const uint64_t full_hash = table.hash(key);
  const int64_t slot = find_in_bucket(table, table.first_bucket(full_hash), tag_of(full_hash), key);
  if (slot != kNoSlot) return slot;
  return find_in_bucket(table, table.second_bucket(full_hash), tag_of(full_hash), key);
}

// Return the sum of `value` over the threads of the block before this one, and write the sum over
// all threads to `*total`, in every thread. `shared` is shared memory, [kBlockWarps], that no
// thread uses otherwise during the call. All threads of the block must call this. It ends with a
// barrier, so that the next call may use the same memory.
EMB_DEVICE int64_t exclusive_sum(int64_t value, int64_t* shared, int64_t* total) {
  const int lane = lane_in_warp(), warp = static_cast<int>(threadIdx.x / simt::kWarpLanes);
  int64_t sum = value;
  for (unsigned offset = 1; offset < simt::kWarpLanes; offset *= 2) {
    const int64_t lower_sum = __shfl_up_sync(simt::kFullMask, sum, offset);
    if (lane >= static_cast<int>(offset)) sum += lower_sum;
  }
  if (lane == kWarpLanes - 1) shared[warp] = sum;
  __syncthreads();
  *total = 0;
  for (int w = 0; w < kBlockWarps; ++w) {
    if (w == warp) sum += *total;
    *total += shared[w];
  }
  __syncthreads();
  return sum - value;
}

// Return the number of threads of the block before this one whose `is_counted` is true, and write
// the number of all such threads to `*total`. Otherwise like exclusive_sum.
EMB_DEVICE int exclusive_count(bool is_counted, int* shared, int* total) {
  const unsigned bits = __ballot_sync(simt::kFullMask, is_counted);
  const int lane = lane_in_warp(), warp = static_cast<int>(threadIdx.x / simt::kWarpLanes);
  if (lane == 0) shared[warp] = __popc(bits);
  __syncthreads();
  int count = __popc(bits & ((1u << lane) - 1));
  *total = 0;
  for (int w = 0; w < kBlockWarps; ++w) {
    if (w == warp) count += *total;
    *total += shared[w];
  }
  __syncthreads();
  return count;
}

// Return where part `part` of a batch of n positions begins, a multiple of kTileThreads. The batch
// has one part per block of the grid. If `part` is the number of parts, the result is at least n.
EMB_DEVICE int64_t part_begin(int64_t n, unsigned part) {
  return (n + kTileThreads - 1) / kTileThreads * part / gridDim.x * kTileThreads;
}

// The share of a block in a loop that `num_blocks` blocks of the grid divide among them. `block` is
// the number of the block among these blocks, from 0.
struct GridSlice {
  int64_t block, num_blocks;
};

// Call `body(x, i)` for this block's slice of the numbers x in [0, n), one per thread at a time. i
// is the interval that contains x: the last i in [0, num_intervals) with starts(i) <= x, or -1 if
// there is none. All threads of the block must call this. Whole warps call `body`, so it may use
// collectives. The last threads of a loop may get x >= n; their i is -1. `shared` is shared memory
// for two ints.
template <class Starts, class Body>
EMB_DEVICE void for_each_in_intervals(const GridSlice& slice, const Starts& starts,
                                      int num_intervals, int64_t n, int* shared, const Body& body) {
  for (int64_t tile = slice.block * kTileThreads; tile < n;
       tile += slice.num_blocks * kTileThreads) {
    const int64_t end = tile + kTileThreads < n ? tile + kTileThreads : n, x = tile + threadIdx.x;
    const TileSearch search(starts, num_intervals, tile, end, shared);
    body(x, x < end ? search.find(starts, x) : -1);
  }
}

// Do the same for this block's slice of a loop that all blocks of the grid divide among them.
template <class Starts, class Body>
EMB_DEVICE void for_each_in_intervals(const Starts& starts, int num_intervals, int64_t n,
                                      int* shared, const Body& body) {
  for_each_in_intervals(GridSlice{blockIdx.x, gridDim.x}, starts, num_intervals, n, shared, body);
}

// Call `body(position, table)` for every position of a batch, which all blocks of the grid divide
// among them as in for_each_in_intervals. The table is -1 if the position is before the first
// segment or at least n, or if the index has no such table.
template <class Body>
EMB_DEVICE void for_each_key(const KeyBatch& batch, int num_tables, int* shared, const Body& body) {
  const auto start = [&](int f) { return batch.starts[f]; };
  for_each_in_intervals(start, batch.num_segments, batch.n, shared,
                        [&](int64_t position, int segment) {
                          const int64_t t = segment < 0 ? -1 : batch.tables[segment];
                          body(position, t >= 0 && t < num_tables ? static_cast<int>(t) : -1);
                        });
}

// A counter per table in global memory, to which a warp adds. The warp adds up in registers while
// it counts for one table. It adds the sum to memory when it counts for another table, and in
// `flush`. This is rare, so there are few atomic additions. All 32 lanes must make every call, and
// call `flush` at the end; without it the last sum is lost.
class TableTally {
 public:
  // `sums` is the address of the counter of table 0; the counter of the next table is `stride`
  // words later.
  EMB_DEVICE TableTally(int64_t* sums, int stride) : sums_(sums), stride_(stride) {}

  // Add 1 to the counter of this lane's table if `is_counted`. A lane with table -1 adds nothing.
  EMB_DEVICE void add(int table, bool is_counted) {
    unsigned lanes_left = __ballot_sync(simt::kFullMask, is_counted && table >= 0);
    while (lanes_left != 0) {
      const int next_table =
          __shfl_sync(simt::kFullMask, table, __ffs(static_cast<int>(lanes_left)) - 1);
      const unsigned lanes_of_table =
          __ballot_sync(simt::kFullMask, is_counted && table == next_table);
      add_once(next_table, __popc(lanes_of_table));
      lanes_left &= ~lanes_of_table;
    }
  }

  // Add `count` to the counter of this lane's table. A lane with table -1 adds nothing.
  EMB_DEVICE void add_each(int table, int count) {
    unsigned lanes_left = __ballot_sync(simt::kFullMask, count != 0 && table >= 0);
    while (lanes_left != 0) {
      const int next_table =
          __shfl_sync(simt::kFullMask, table, __ffs(static_cast<int>(lanes_left)) - 1);
      const bool is_of_table = count != 0 && table == next_table;
      lanes_left &= ~__ballot_sync(simt::kFullMask, is_of_table);
      add_once(next_table, simt::group_sum(is_of_table ? count : 0, kWarpLanes));
    }
  }

  // Add `count` once, not per lane, to the counter of one table. All lanes pass the same arguments.
  EMB_DEVICE void add_once(int table, int count) {
    if (table != table_) flush();
    table_ = table;
    count_ += count;
  }

  // Add the sum in registers to memory, and clear it.
  EMB_DEVICE void flush() {
    if (count_ != 0 && lane_in_warp() == 0)
      simt::atomic_add(sums_ + int64_t{table_} * stride_, count_);
    count_ = 0;
  }

 private:
  int64_t* sums_;
  int stride_;
  int table_ = -1, count_ = 0;
};

// Return a tally for a column of `index.counters`.
EMB_DEVICE TableTally counter_tally(const DeviceIndex& index, HashCounter counter) {
  return {index.counters + static_cast<int>(counter), kHashCounters};
}

// Return a tally for the numbers of keys in the tables.
EMB_DEVICE TableTally size_tally(const DeviceIndex& index) {
  return {index.tables + static_cast<int>(HashTableColumn::kSize), kHashTableColumns};
}

// Allocate the scratch arrays of an op in one allocation of `work`. `list(take)` must call
// `take(array, n)` for each array: `array` is the pointer to be set, and n the number of elements,
// of at most 16 bytes each. Arrays are aligned to 16 bytes and uninitialised. `list` is called
// twice, and must make the same calls both times.
template <class Work, class List>
void allocate_arrays(Work& work, const List& list) {
  const auto padded_bytes = [](size_t element_bytes, int64_t n) {
    return (n * static_cast<int64_t>(element_bytes) + 15) / 16 * 16;
  };
  int64_t bytes = 0;
  list([&](auto*& array, int64_t n) { bytes += padded_bytes(sizeof(*array), n); });
  auto* next_array = work.template scratch<uint8_t>(bytes);
  list([&](auto*& array, int64_t n) {
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(next_array);
    next_array += padded_bytes(sizeof(*array), n);
  });
}

// Return the number of blocks for a grid loop over n keys, one thread per key.
template <class Launcher>
unsigned key_blocks(const Launcher& launcher, int64_t n) {
  return blocks_for(n, kTileThreads, launcher.max_grid_blocks(kFullBlocksPerSm));
}

}  // namespace emb::cuda
