// `hash_insert_` on the GPU: insert the admitted misses of a batch.
//
// Keys choose buckets, one lane per key; then every chosen bucket serves its keys in order, as far
// as its share of the round goes. The keys that chose a bucket form a chain in scratch memory, in
// no order; the founder of the chain handles the bucket. A key that is alone gets the slot that it
// saw when it chose. One lane assigns empty slots to a few keys; for more keys, or if entries are
// evicted for several, the whole warp works on the bucket, one lane per slot. It then has the
// entries of the next bucket in flight while it works on one.
//
// After the rounds of all multiprocessors, one block per table goes on with a list of the keys that
// were pending in the last of them, in no order: chains are served in order of misses. The other
// blocks of that kernel wait for those, and write what became of every key.
#pragma once

#include "hash/device_index.cuh"

namespace emb::cuda {

// The value of `last_in_chain` for a bucket without a chain.
enum ChainState : int32_t {
  kEmptyChain = -1,
  kExhaustedBucket = -2,  // nor has the bucket an entry that this batch may still evict
};

// The slot of its bucket that a miss gets if no other one chose the bucket.
struct ChosenSlot {
  uint8_t way : 5;
  bool evicts : 1, exhausts : 1;  // whether the bucket has no entry to evict afterwards
};

struct Insertion {
  DeviceIndex index;
  Order order;
  bool competes;
  const int64_t *ids, *first, *totals, *batch_scores;  // batch_scores: by table, null for 0
  DeviceMisses misses;
  // By miss.
  int64_t* slots;
  uint8_t* status;
  int64_t* evicted;
  // Scratch. By bucket: the last member of its chain, or a ChainState. By miss: the previous member
  // of its chain, negative for the founder, the bucket that it chose and the slot. `pending`, by
  // miss, has a list for every table, of `num_pending` misses. Of the last kernel: how many blocks
  // have begun, and how many are done with their tables.
  int32_t *last_in_chain, *previous_in_chain, *chosen_bucket, *pending, *num_pending;
  int32_t *begun_blocks, *done_blocks;
  ChosenSlot* chosen_slot;

  EMB_DEVICE bool is_pending(int64_t miss) const {
    return status[miss] == static_cast<uint8_t>(InsertStatus::kMiss);
  }
};

// A missing key as an entry.
struct NewEntry {
  int64_t miss, key, stamp, score;
};

EMB_DEVICE NewEntry new_entry(const Insertion& insertion, int64_t miss, int t) {
  const int64_t batch_score = insertion.batch_scores == nullptr ? 0 : insertion.batch_scores[t];
  return {miss, insertion.ids[insertion.first[miss]], *insertion.index.clock,
          order_counts_uses(insertion.order) ? insertion.totals[miss] : batch_score};
}

// An entry that may be evicted, and its slot in the bucket; -1 for none.
struct Candidate {
  EntryRank rank;
  int way;
};

// Return this lane's entry of a full bucket.
EMB_DEVICE Candidate lane_entry(const Insertion& insertion, int64_t bucket, int64_t stamp) {
  const int64_t slot = bucket * kSlots + lane_in_warp();
  const int64_t* entry = insertion.index.entries + slot * insertion.index.words;
  const int64_t score = has_scores(insertion.order) ? entry[kScore] : 0;
  const bool can_evict = insertion.order != Order::kNone && entry[kStamp] < stamp;
  return {entry_rank(insertion.order, entry[kKey], entry[kStamp], score),
          can_evict ? lane_in_warp() : -1};
}

EMB_DEVICE bool comes_before(const Candidate& a, const Candidate& b) {
  return a.way >= 0 && (b.way < 0 || less(a.rank, b.rank));
}

// Return the minimum over the lanes that take part, of which there is one.
EMB_DEVICE int64_t min_of_lanes(int64_t value, bool takes_part) {
  const auto high = static_cast<int32_t>(value >> 32);
  const int32_t min_high = __reduce_min_sync(simt::kFullMask, takes_part ? high : INT32_MAX);
  const bool has_min = takes_part && high == min_high;
  const uint32_t low =
      __reduce_min_sync(simt::kFullMask, has_min ? static_cast<uint32_t>(value) : UINT32_MAX);
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(min_high)) << 32 | low);
}

// Return the lowest candidate of all lanes, in every lane. The way of a candidate is its lane.
EMB_DEVICE Candidate min_over_warp(Order order, const Candidate& candidate) {
  bool is_lowest = candidate.way >= 0;
  if (__ballot_sync(simt::kFullMask, is_lowest) == 0) return {{}, -1};
  Candidate lowest{};
  if (has_scores(order)) {
    lowest.rank.score = min_of_lanes(candidate.rank.score, is_lowest);
    is_lowest = is_lowest && candidate.rank.score == lowest.rank.score;
  }
  if (order != Order::kLfu) {
    lowest.rank.stamp = min_of_lanes(candidate.rank.stamp, is_lowest);
    is_lowest = is_lowest && candidate.rank.stamp == lowest.rank.stamp;
  }
  lowest.rank.key = min_of_lanes(candidate.rank.key, is_lowest);
  is_lowest = is_lowest && candidate.rank.key == lowest.rank.key;
  lowest.way = __ffs(static_cast<int>(__ballot_sync(simt::kFullMask, is_lowest))) - 1;
  return lowest;
}

EMB_DEVICE bool can_evict(const Insertion& insertion, const Candidate& candidate,
                          const NewEntry& to) {
  if (candidate.way < 0 || !insertion.competes) return candidate.way >= 0;
  return !less(entry_rank(insertion.order, to.key, to.stamp, to.score), candidate.rank);
}

EMB_DEVICE bool is_exhausted(const Insertion& insertion, int64_t bucket) {
  return insertion.order == Order::kNone || insertion.last_in_chain[bucket] == kExhaustedBucket;
}

// This lane's entries of the two buckets of a key.
struct BucketPair {
  int32_t first, second;
  Candidate in_first, in_second;
};

EMB_DEVICE BucketPair load_pair(const Insertion& insertion, int32_t first, int32_t second,
                                int64_t stamp) {
  return {first, second, lane_entry(insertion, first, stamp), lane_entry(insertion, second, stamp)};
}

// The choice of a key; bucket -1 for none.
struct DeviceChoice {
  int32_t bucket;
  ChosenSlot slot;
};

// Choose between two full buckets. The whole warp calls it for the key of one lane: only that lane
// passes `to` and uses the result.
EMB_DEVICE DeviceChoice full_choice(const Insertion& insertion, const BucketPair& buckets,
                                    const NewEntry& to) {
  Candidate a = min_over_warp(insertion.order, buckets.in_first);
  const Candidate b = min_over_warp(insertion.order, buckets.in_second);
  const bool take_second = comes_before(b, a);
  if (take_second) a = b;
  const int way = take_second ? buckets.in_second.way : buckets.in_first.way;
  const int count = __popc(__ballot_sync(simt::kFullMask, way >= 0));
  if (!can_evict(insertion, a, to)) return {-1, {}};
  return {take_second ? buckets.second : buckets.first,
          {static_cast<uint8_t>(a.way), true, count == 1}};
}

EMB_DEVICE uint32_t empty_slots(const Insertion& insertion, int64_t bucket) {
  return match_tags(insertion.index.tags + bucket * kSlots, kEmptyTag);
}

// Choose a bucket for this lane's miss if it is active: afterwards the miss is refused, or in the
// chain of a bucket. Return whether it is in a chain. Called by the whole warp.
EMB_DEVICE bool choose_bucket(const Insertion& insertion, int64_t miss, int t, bool active) {
  NewEntry self{};
  int32_t first = 0, second = 0;  // buckets of all tables together
  DeviceChoice choice{-1, {}};
  bool searches = false;
  if (active) {
    self = new_entry(insertion, miss, t);
    const HashTable table = insertion.index.table(t);
    const int64_t base = insertion.index.field(t, kFirstBucket);
    const uint64_t mixed = table.hash(self.key);
    first = static_cast<int32_t>(base + table.first(mixed));
    second = static_cast<int32_t>(base + table.second(mixed));
    uint32_t empty = empty_slots(insertion, first), in_second = 0;
    if (__popc(empty) <= kPreferredFreeSlots) in_second = empty_slots(insertion, second);
    const bool take_second = __popc(in_second) > __popc(empty);
    if (take_second) empty = in_second;
    if (empty != 0) {
      const auto way = static_cast<uint8_t>(__ffs(static_cast<int>(empty)) - 1);
      choice = {take_second ? second : first, {way, false, false}};
    }
    searches = empty == 0 && !(is_exhausted(insertion, first) && is_exhausted(insertion, second));
  }
  unsigned left = __ballot_sync(simt::kFullMask, searches);
  const int64_t stamp = *insertion.index.clock;
  const auto pair_of = [&](unsigned lanes) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    return load_pair(insertion, __shfl_sync(simt::kFullMask, first, lane),
                     __shfl_sync(simt::kFullMask, second, lane), stamp);
  };
  BucketPair next{};
  if (left != 0) next = pair_of(left);
  while (left != 0) {
    const BucketPair pair = next;
    const int lane = __ffs(static_cast<int>(left)) - 1;
    left &= left - 1;
    if (left != 0) next = pair_of(left);  // in flight during the search
    const DeviceChoice of_lane = full_choice(insertion, pair, self);
    if (lane_in_warp() == lane) choice = of_lane;
  }
  if (!active) return false;
  if (choice.bucket < 0) {
    insertion.status[miss] = static_cast<uint8_t>(InsertStatus::kRefused);
    return false;
  }
  insertion.chosen_bucket[miss] = choice.bucket;
  insertion.chosen_slot[miss] = choice.slot;
  insertion.previous_in_chain[miss] =
      atomicExch(insertion.last_in_chain + choice.bucket, static_cast<int32_t>(miss));
  return true;
}

// Return the first 32 members of a chain that come after `last`, one per lane, in order; INT32_MAX
// in lanes beyond them.
EMB_DEVICE int32_t next_members(const Insertion& insertion, int64_t bucket, int32_t last) {
  int32_t of_lane = INT32_MAX;
  for (int32_t member = insertion.last_in_chain[bucket]; member >= 0;
       member = insertion.previous_in_chain[member]) {
    if (member <= last) continue;
    const int lower = __popc(__ballot_sync(simt::kFullMask, of_lane < member));
    const int32_t previous = __shfl_up_sync(simt::kFullMask, of_lane, 1u);
    if (lane_in_warp() > lower) of_lane = previous;
    if (lane_in_warp() == lower) of_lane = member;
  }
  return of_lane;
}

EMB_DEVICE void write_entry(const Insertion& insertion, int t, int64_t bucket, int way,
                            const NewEntry& of, InsertStatus status) {
  const int64_t slot = bucket * kSlots + way;
  int64_t* entry = insertion.index.entries + slot * insertion.index.words;
  if (status == InsertStatus::kEvicting) {
    int64_t* evicted = insertion.evicted + 3 * of.miss;
    evicted[kKey] = entry[kKey];
    evicted[kStamp] = entry[kStamp];
    evicted[kScore] = has_scores(insertion.order) ? entry[kScore] : 0;
  }
  insertion.index.tags[slot] = tag_of(insertion.index.table(t).hash(of.key));
  entry[kKey] = of.key;
  entry[kStamp] = of.stamp;
  if (has_scores(insertion.order)) entry[kScore] = of.score;
  insertion.slots[of.miss] = slot - insertion.index.field(t, kFirstBucket) * kSlots;
  insertion.status[of.miss] = static_cast<uint8_t>(status);
}

// Assign the share of a round of the empty slots of a bucket to the first members of its chain.
EMB_DEVICE void fill_bucket(const Insertion& insertion, int t, int64_t bucket, uint32_t empty) {
  const int32_t member = next_members(insertion, bucket, -1);
  const int share = slots_of_round(__popc(empty));
  const bool gets_slot = lane_in_warp() < share && member != INT32_MAX;
  for (int k = lane_in_warp(); gets_slot && k > 0; --k) empty &= empty - 1;
  if (gets_slot) {
    const int way = __ffs(static_cast<int>(empty)) - 1;  // the lane-th empty slot
    write_entry(insertion, t, bucket, way, new_entry(insertion, member, t), InsertStatus::kNew);
  }
}

// The same by one lane, for a chain of up to kLaneMembers members that all get a slot; otherwise do
// nothing and return false.
EMB_DEVICE bool fill_by_lane(const Insertion& insertion, int t, int64_t bucket, uint32_t empty) {
  constexpr int kLaneMembers = 4;                                                // in registers
  int32_t members[kLaneMembers] = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};  // in order
  for (int32_t next = insertion.last_in_chain[bucket]; next >= 0;
       next = insertion.previous_in_chain[next]) {
    int32_t member = next;
#pragma unroll
    for (int k = 0; k < kLaneMembers; ++k) {
      const int32_t greater = member < members[k] ? members[k] : member;
      members[k] = member < members[k] ? member : members[k];
      member = greater;
    }
    if (member != INT32_MAX) return false;
  }
  const int share = slots_of_round(__popc(empty));
#pragma unroll
  for (int k = 0; k < kLaneMembers; ++k) {
    if (k >= share && members[k] != INT32_MAX) return false;
  }
#pragma unroll
  for (int k = 0; k < kLaneMembers; ++k) {
    if (members[k] == INT32_MAX) break;
    const int way = __ffs(static_cast<int>(empty)) - 1;
    write_entry(insertion, t, bucket, way, new_entry(insertion, members[k], t), InsertStatus::kNew);
    empty &= empty - 1;
  }
  return true;
}

// Replace the share of a round of the entries of a full bucket of table t by members in order, the
// lowest entry first; `self` is this lane's entry. Return whether the bucket has no entry left that
// this batch may evict.
EMB_DEVICE bool replace_in_bucket(const Insertion& insertion, int t, int64_t bucket,
                                  Candidate self) {
  Candidate candidate = min_over_warp(insertion.order, self);
  int share = slots_of_round(__popc(__ballot_sync(simt::kFullMask, self.way >= 0)));
  for (int32_t last = -1; share > 0;) {
    const int32_t member = next_members(insertion, bucket, last);
    const int members = __popc(__ballot_sync(simt::kFullMask, member != INT32_MAX));
    for (int k = 0; k < members && share > 0; ++k) {
      const NewEntry to = new_entry(insertion, __shfl_sync(simt::kFullMask, member, k), t);
      if (!can_evict(insertion, candidate, to)) continue;
      if (lane_in_warp() == candidate.way) {
        write_entry(insertion, t, bucket, candidate.way, to, InsertStatus::kEvicting);
        self.way = -1;  // belongs to this batch now
      }
      --share;
      candidate = min_over_warp(insertion.order, self);
    }
    if (members < kSlots) break;
    last = __shfl_sync(simt::kFullMask, member, kSlots - 1);
  }
  return candidate.way < 0;
}

// Serve a chain of one member.
EMB_DEVICE void serve_single(const Insertion& insertion, int64_t miss, int t, int64_t bucket,
                             ChosenSlot slot) {
  write_entry(insertion, t, bucket, slot.way, new_entry(insertion, miss, t),
              slot.evicts ? InsertStatus::kEvicting : InsertStatus::kNew);
  insertion.last_in_chain[bucket] = slot.exhausts ? kExhaustedBucket : kEmptyChain;
}

// Serve the chains that this warp's lanes founded. Called by the whole warp.
EMB_DEVICE void serve_buckets(const Insertion& insertion, int64_t miss, int t, bool active) {
  const bool founds = active && insertion.is_pending(miss) && insertion.previous_in_chain[miss] < 0;
  const int32_t chosen = founds ? insertion.chosen_bucket[miss] : 0;
  bool fills = false, replaces = false;
  if (founds) {
    const ChosenSlot slot = insertion.chosen_slot[miss];
    if (insertion.last_in_chain[chosen] == miss) {
      serve_single(insertion, miss, t, chosen, slot);
    } else if (slot.evicts) {
      replaces = true;
    } else {
      fills = !fill_by_lane(insertion, t, chosen, empty_slots(insertion, chosen));
      if (!fills) insertion.last_in_chain[chosen] = kEmptyChain;
    }
  }
  unsigned left = __ballot_sync(simt::kFullMask, fills);
  for (; left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const int32_t bucket = __shfl_sync(simt::kFullMask, chosen, lane);
    const int table = __shfl_sync(simt::kFullMask, t, lane);
    const uint32_t empty = empty_slots(insertion, bucket);
    __syncwarp();  // all lanes have read the tags before any lane writes one
    fill_bucket(insertion, table, bucket, empty);
    __syncwarp();
    if (lane_in_warp() == 0) insertion.last_in_chain[bucket] = kEmptyChain;
  }
  unsigned full = __ballot_sync(simt::kFullMask, replaces);
  const int64_t stamp = *insertion.index.clock;
  const auto entry_of = [&](unsigned lanes) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    return lane_entry(insertion, __shfl_sync(simt::kFullMask, chosen, lane), stamp);
  };
  Candidate next{};
  if (full != 0) next = entry_of(full);
  while (full != 0) {
    const Candidate self = next;
    const int lane = __ffs(static_cast<int>(full)) - 1;
    const int32_t bucket = __shfl_sync(simt::kFullMask, chosen, lane);
    const int table = __shfl_sync(simt::kFullMask, t, lane);
    full &= full - 1;
    if (full != 0) next = entry_of(full);  // in flight; no other warp changes these buckets
    const bool exhausts = replace_in_bucket(insertion, table, bucket, self);
    __syncwarp();
    if (lane_in_warp() == 0) {
      insertion.last_in_chain[bucket] = exhausts ? kExhaustedBucket : kEmptyChain;
    }
  }
}

// The rounds. Nothing waits for the device, and only the device knows how many rounds are needed.
// The first rounds, in which almost all keys get a slot, use all multiprocessors; the host
// estimates their number. In a last kernel one block per table continues until no key is pending.

inline constexpr int kMaxWideRounds = 5;
// Buckets per key of a batch above which only those buckets are cleared that a miss may choose: two
// sectors of 32 bytes per miss instead of 4 bytes per bucket.
inline constexpr int64_t kSparseBucketsPerKey = 16;

// Clear the chains of all buckets, or of those that misses may choose.
EMB_DEVICE void clear_chains(const Insertion& insertion, int64_t buckets, bool clears_all,
                             int* shared) {
  if (clears_all) {
    for (int64_t i = simt::global_thread(); i < buckets; i += simt::threads_in_grid()) {
      insertion.last_in_chain[i] = kEmptyChain;
    }
    return;
  }
  const int num_tables = insertion.index.num_tables;
  const auto start = [&](int t) { return insertion.misses.offsets[t]; };
  for_each_of(start, num_tables, start(num_tables), shared, [&](int64_t miss, int t) {
    if (t < 0) return;
    const HashTable table = insertion.index.table(t);
    int32_t* chains = insertion.last_in_chain + insertion.index.field(t, kFirstBucket);
    const uint64_t mixed = table.hash(insertion.ids[insertion.first[miss]]);
    chains[table.first(mixed)] = chains[table.second(mixed)] = kEmptyChain;
  });
}

// Initialise the results and the chains. Words of keys that are not evicted mean nothing.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_begin_kernel(Insertion insertion, int64_t n, int64_t buckets, bool clears_all) {
  __shared__ int range[2];
  const DeviceMisses& misses = insertion.misses;
  const int64_t step = simt::threads_in_grid(), count = misses.offsets[insertion.index.num_tables];
  clear_chains(insertion, buckets, clears_all, range);
  if (simt::global_thread() == 0) *insertion.begun_blocks = *insertion.done_blocks = 0;
  for (int64_t t = simt::global_thread(); t < insertion.index.num_tables; t += step) {
    insertion.num_pending[t] = 0;
  }
  for (int64_t i = simt::global_thread(); i < n; i += step) {
    const bool kept_out = i < count && misses.admitted != nullptr && !misses.admitted[i];
    insertion.slots[i] = kNoSlot;
    insertion.status[i] =
        static_cast<uint8_t>(kept_out ? InsertStatus::kNotAdmitted : InsertStatus::kMiss);
  }
}

// Call `body(miss, table, active)` for the misses; active if the miss may choose in this round. A
// bucket may occupy a warp for the key of one lane, so few misses are distributed over all warps, a
// few for each.
template <class Body>
EMB_DEVICE void for_each_chooser(const Insertion& insertion, int round, int* shared,
                                 const Body& body) {
  const int num_tables = insertion.index.num_tables;
  const int64_t* offsets = insertion.misses.offsets;
  const auto start = [&](int t) { return offsets[t]; };
  const int64_t count = offsets[num_tables], warps = simt::warps_in_grid();
  const int64_t share = (count + warps - 1) / warps;
  const int lanes = share < kSlots ? static_cast<int>(share) : kSlots;
  const int64_t tile_size = int64_t{lanes} * (kTileThreads / kSlots);
  const int64_t self = threadIdx.x / simt::kWarp * lanes + lane_in_warp();
  for (int64_t tile = blockIdx.x * tile_size; tile < count; tile += gridDim.x * tile_size) {
    const int64_t end = tile + tile_size < count ? tile + tile_size : count, miss = tile + self;
    const TileSearch search(start, num_tables, tile, end, shared);
    const int t = lane_in_warp() < lanes && miss < end ? search.find(start, miss) : -1;
    body(miss, t,
         t >= 0 && miss - offsets[t] < choosers(insertion.index.field(t, kBuckets), round));
  }
}

// Append this lane's miss to the list of its table if it is `listed`. Called by the whole warp.
EMB_DEVICE void list_pending(const Insertion& insertion, int64_t miss, int t, bool listed) {
  unsigned left = __ballot_sync(simt::kFullMask, listed);
  while (left != 0) {
    const int leader = __ffs(static_cast<int>(left)) - 1;
    const int table = __shfl_sync(simt::kFullMask, t, leader);
    const bool is_of_table = listed && t == table;
    const unsigned same = __ballot_sync(simt::kFullMask, is_of_table);
    int32_t before = 0;
    if (lane_in_warp() == leader) {
      before = atomicAdd(insertion.num_pending + table, static_cast<int32_t>(__popc(same)));
    }
    before = __shfl_sync(simt::kFullMask, before, leader);
    if (is_of_table) {
      const int lower = __popc(same & ((1u << lane_in_warp()) - 1));
      insertion.pending[insertion.misses.offsets[table] + before + lower] =
          static_cast<int32_t>(miss);
    }
    left &= ~same;
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_choose_kernel(Insertion insertion, int round, bool lists) {
  __shared__ int range[2];
  for_each_chooser(insertion, round, range, [&](int64_t miss, int t, bool active) {
    active = active && insertion.is_pending(miss);
    if (!__any_sync(simt::kFullMask, active)) return;
    const bool chooses = choose_bucket(insertion, miss, t, active);
    if (lists) list_pending(insertion, miss, t, chooses);
  });
}

// Three blocks per multiprocessor: for more, the compiler would spill registers.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads, 3)
    hash_serve_kernel(Insertion insertion, int round) {
  __shared__ int range[2];
  for_each_chooser(insertion, round, range, [&](int64_t miss, int t, bool active) {
    serve_buckets(insertion, miss, t, active);
  });
}

// The list of a table in the block that finishes it: [0, size) of `misses`.
struct PendingList {
  int32_t* misses;
  int size;

  EMB_DEVICE int64_t at(int i) const { return i < size ? misses[i] : -1; }

  // Drop the misses that are not pending. `size_of_block` is one number of the block.
  EMB_DEVICE void compact(const Insertion& insertion, int* size_of_block) {
    if (threadIdx.x == 0) *size_of_block = 0;
    for (int tile = 0; tile < size; tile += kTileThreads) {
      const int64_t miss = at(tile + static_cast<int>(threadIdx.x));
      const bool stays = miss >= 0 && insertion.is_pending(miss);
      __syncthreads();  // the list ends before the tile: all of it has been read
      if (stays) misses[atomicAdd(size_of_block, 1)] = static_cast<int32_t>(miss);
    }
    __syncthreads();
    size = *size_of_block;
    __syncthreads();
  }
};

// Run the remaining rounds of every `blocks`-th table from `block` on, until no key is pending:
// those on the list, and those that may choose in later rounds only. Neighbours on the list go to
// different warps. `list_size` is one number of the block.
EMB_DEVICE void finish_tables(const Insertion& insertion, int first_round, int block, int blocks,
                              int* list_size) {
  constexpr int kWarps = kTileThreads / kSlots;
  const auto self = static_cast<int>(threadIdx.x / simt::kWarp) + lane_in_warp() * kWarps;
  const int64_t* offsets = insertion.misses.offsets;
  for (int t = block; t < insertion.index.num_tables; t += blocks) {
    const auto first = static_cast<int>(offsets[t]);
    const int count = static_cast<int>(offsets[t + 1]) - first;
    const int64_t buckets = insertion.index.field(t, kBuckets);
    PendingList list{insertion.pending + first, insertion.num_pending[t]};
    const auto choosers_of = [&](int round) {
      const int64_t choose = choosers(buckets, round);
      return choose < count ? static_cast<int>(choose) : count;
    };
    int begun = choosers_of(first_round - 1);
    list.compact(insertion, list_size);
    for (int round = first_round; list.size > 0 || begun < count; ++round) {
      const int end = choosers_of(round);
      for (int i = begun + static_cast<int>(threadIdx.x); i < end; i += kTileThreads) {
        list.misses[list.size + i - begun] = first + i;
      }
      list.size += end - begun;
      begun = end;
      __syncthreads();
      for (int tile = 0; tile < list.size; tile += kTileThreads) {
        const int64_t miss = list.at(tile + self);
        const bool active = miss >= 0 && insertion.is_pending(miss);
        if (__any_sync(simt::kFullMask, active)) choose_bucket(insertion, miss, t, active);
      }
      __syncthreads();
      for (int tile = 0; tile < list.size; tile += kTileThreads) {
        const int64_t miss = list.at(tile + self);
        serve_buckets(insertion, miss, t, miss >= 0);
      }
      __syncthreads();
      list.compact(insertion, list_size);
    }
    __syncthreads();
  }
}

// Slots and misses of the positions of a batch, before and after the insertion; n is 0 where no one
// asks for them.
struct BatchSlots {
  const int64_t* slots;
  const int32_t* groups;
  int64_t n;
  int64_t* filled;
  uint8_t* status;
};

// Write the slot and the status of every position: those of its miss, where it has one. The loads
// of kLoads positions are in flight at once.
EMB_DEVICE void fill_positions(const Insertion& insertion, const BatchSlots& batch,
                               const GridShare& share) {
  constexpr int kLoads = 4;
  const int64_t step = share.blocks * kTileThreads;
  for (int64_t i = share.block * kTileThreads + threadIdx.x; i < batch.n; i += kLoads * step) {
    int32_t group[kLoads];
    int64_t slot[kLoads];
    uint8_t status[kLoads];
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      group[k] = i + k * step < batch.n ? batch.groups[i + k * step] : -1;
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      const bool is_miss = group[k] >= 0 && group[k] < batch.n;
      status[k] = is_miss ? insertion.status[group[k]] : static_cast<uint8_t>(InsertStatus::kHit);
      slot[k] = is_miss                  ? insertion.slots[group[k]]
                : i + k * step < batch.n ? batch.slots[i + k * step]
                                         : kNoSlot;
    }
#pragma unroll
    for (int k = 0; k < kLoads; ++k) {
      if (i + k * step >= batch.n) break;
      batch.filled[i + k * step] = slot[k];
      batch.status[i + k * step] = status[k];
    }
  }
}

// Count what became of the misses.
EMB_DEVICE void count_outcome(const Insertion& insertion, const GridShare& share, int* shared) {
  const DeviceIndex& index = insertion.index;
  TableTally inserted = counter_tally(index, kInserted), evicted = counter_tally(index, kEvicted);
  TableTally refused = counter_tally(index, kRefused);
  TableTally not_admitted = counter_tally(index, kNotAdmitted);
  TableTally sizes(index.tables + kSize, kHashTableColumns);
  const auto start = [&](int t) { return insertion.misses.offsets[t]; };
  const int64_t count = insertion.misses.offsets[index.num_tables];
  for_each_of(share, start, index.num_tables, count, shared, [&](int64_t miss, int t) {
    const auto status =
        t < 0 ? InsertStatus::kMiss : static_cast<InsertStatus>(insertion.status[miss]);
    inserted.add(t, status == InsertStatus::kNew || status == InsertStatus::kEvicting);
    evicted.add(t, status == InsertStatus::kEvicting);
    refused.add(t, status == InsertStatus::kRefused);
    not_admitted.add(t, status == InsertStatus::kNotAdmitted);
    sizes.add(t, status == InsertStatus::kNew);
  });
  for (TableTally* tally : {&inserted, &evicted, &refused, &not_admitted, &sizes}) tally->flush();
}

// Finish the tables in the first `finishers` blocks to begin; the others wait for them, then count
// what became of the misses and tell every position. A block waits for running blocks only.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads, 2)
    hash_outcome_kernel(Insertion insertion, BatchSlots batch, int rounds, int finishers) {
  __shared__ int range[2];
  __shared__ int shared;
  if (threadIdx.x == 0) shared = atomicAdd(insertion.begun_blocks, 1);
  __syncthreads();
  const int block = shared;
  __syncthreads();
  if (block < finishers) {
    finish_tables(insertion, rounds, block, finishers, &shared);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(insertion.done_blocks, 1);
    return;
  }
  if (threadIdx.x == 0) {
    while (*static_cast<const volatile int32_t*>(insertion.done_blocks) < finishers) continue;
    __threadfence();
  }
  __syncthreads();
  const GridShare share{block - finishers, static_cast<int>(gridDim.x) - finishers};
  count_outcome(insertion, share, range);
  fill_positions(insertion, batch, share);
}

// Return the number of rounds on all multiprocessors, for n keys and `buckets` buckets of all
// tables: as many as it takes until all keys may choose if all tables have their full size and the
// keys are distributed evenly, and one for keys whose bucket had no slot left for them.
inline int wide_rounds(int64_t n, int64_t buckets) {
  int rounds = 1;
  while (rounds < kMaxWideRounds - 1 && choosers(buckets, rounds - 1) < n) ++rounds;
  return rounds + 1;
}

// `insertion` comes without its scratch.
template <class Work>
void launch_insert(Work& work, Insertion insertion, const BatchSlots& batch, int64_t n,
                   int64_t buckets) {
  if (n == 0) return;
  const auto& launcher = work.launcher();
  const int num_tables = insertion.index.num_tables;
  insertion.last_in_chain =
      work.template scratch<int32_t>(buckets + 3 * n + num_tables + 2 + (n + 3) / 4);
  insertion.previous_in_chain = insertion.last_in_chain + buckets;
  insertion.chosen_bucket = insertion.previous_in_chain + n;
  insertion.pending = insertion.chosen_bucket + n;
  insertion.num_pending = insertion.pending + n;
  insertion.begun_blocks = insertion.num_pending + num_tables;
  insertion.done_blocks = insertion.begun_blocks + 1;
  insertion.chosen_slot = reinterpret_cast<ChosenSlot*>(insertion.done_blocks + 1);
  const unsigned blocks = key_blocks(launcher, n);
  const bool clears_all = buckets <= kSparseBucketsPerKey * n;
  launcher(hash_begin_kernel, key_blocks(launcher, clears_all ? n + buckets : n), kTileThreads,
           insertion, n, buckets, clears_all);
  const int rounds = wide_rounds(n, buckets);
  for (int round = 0; round < rounds; ++round) {
    launcher(hash_choose_kernel, blocks, kTileThreads, insertion, round, round + 1 == rounds);
    launcher(hash_serve_kernel, blocks, kTileThreads, insertion, round);
  }
  const unsigned finishers = blocks_for(num_tables, 1, launcher.blocks(2));
  launcher(hash_outcome_kernel, finishers + blocks, kTileThreads, insertion, batch, rounds,
           static_cast<int>(finishers));
}

}  // namespace emb::cuda
