// `hash_insert_` on the GPU: inserts the admitted misses of a batch in rounds. emblib/ops/hash.py
// describes the rounds, args.h the statuses and ranks.
//
// A round has two kernels. In hash_choose_kernel pending misses choose buckets, one lane per miss.
// The misses that choose a bucket form a chain in scratch memory, in any order. The miss whose
// thread is the first to choose the bucket is the founder of the chain. In hash_serve_kernel the
// warp of the founder serves the bucket: it assigns up to slots_per_round slots to the members of
// the chain, in the order of misses. There are three cases:
//   - a chain of one member: it gets the slot that it saw when it chose;
//   - a bucket with empty slots and a few members: one lane assigns the slots;
//   - more members, or evictions for several: the whole warp works on the bucket, with one lane per
//     slot. For evictions it loads the entries of the next bucket at the same time.
//
// Only the device knows how many rounds are needed, and the host does not wait for it. Almost all
// misses get a slot in the first rounds, which use all multiprocessors; the host estimates the
// number of these rounds (num_wide_rounds). The last kernel, hash_outcome_kernel, finishes the
// tables with one block per table at a time, from a list of the misses that are still pending. Its
// other blocks wait until all tables are finished, and then write the results.
//
// Buckets are numbered over all tables here, and misses over all tables of the batch. All pointers
// are to device memory of the caller.
#pragma once

#include "hash/device_index.cuh"

namespace emb::cuda {

// The values of `last_in_chain` for a bucket without a chain.
enum ChainState : int32_t {
  kEmptyChain = -1,
  kExhaustedBucket = -2,  // the bucket also has no entry that this batch may still evict
};

// The slot that a miss chose. The miss gets it if no other miss chose the same bucket.
struct ChosenSlot {
  uint8_t way : 5;    // the slot in its bucket, see args.h
  bool evicts : 1;    // whether the slot has an entry, which is evicted
  bool exhausts : 1;  // whether this batch may evict no entry of the bucket afterwards
};

// The arguments of the kernels. n is the number of positions of the batch. Arrays by miss have n
// elements. Elements after the last miss are not used, but those of `slots` and `status` are
// written.
struct Insertion {
  DeviceIndex index;
  HashOrder order;
  bool must_compete;   // whether a new key must rank at least as high as the entry it evicts
  const int64_t* ids;  // [n], the keys of the batch, by position
  const int64_t* first_positions;  // by miss: the first position of the key
  const int64_t* totals;           // by miss: uses of the key, in the batch and before
  const int64_t* batch_scores;     // [T], the score of the batch in each table; null for 0
  DeviceMisses misses;
  // Results, see InsertCall in check.h.
  int64_t* slots;    // by miss
  uint8_t* status;   // by miss, InsertStatus
  int64_t* evicted;  // by miss, three words each
  // Scratch.
  int32_t* last_in_chain;      // by bucket: the last miss of its chain, or a ChainState
  int32_t* previous_in_chain;  // by miss: the previous miss of its chain, negative for the founder
  int32_t* chosen_bucket;      // by miss: the bucket that it chose last
  int32_t* pending;      // by miss: from offsets[t] on, a list of pending misses of each table t
  int32_t* num_pending;  // [T], the length of each list
  int32_t* next_block;   // [1], the number of the next block of the last kernel to begin, from 0
  int32_t* num_finished_blocks;  // [1], blocks of the last kernel that have finished their tables
  ChosenSlot* chosen_slot;       // by miss

  EMB_DEVICE bool is_pending(int64_t miss) const {
    return status[miss] == static_cast<uint8_t>(InsertStatus::kMiss);
  }
};

// The entry that a miss gets.
struct NewEntry {
  int64_t miss, key, stamp, score;
};

// Return the entry of a miss of table t.
EMB_DEVICE NewEntry new_entry(const Insertion& insertion, int64_t miss, int t) {
  const int64_t batch_score = insertion.batch_scores == nullptr ? 0 : insertion.batch_scores[t];
  return {miss, insertion.ids[insertion.first_positions[miss]], *insertion.index.clock,
          order_counts_uses(insertion.order) ? insertion.totals[miss] : batch_score};
}

// An entry that may be evicted.
struct Candidate {
  EntryRank rank;
  int way;  // number of its slot in the bucket; -1 for no entry
};

// Load the entry in this lane's slot of a full bucket. Return no entry if it may not be evicted,
// because the batch, whose clock is `stamp`, uses it, or because the order evicts nothing.
EMB_DEVICE Candidate load_candidate(const Insertion& insertion, int64_t bucket, int64_t stamp) {
  const int64_t slot = bucket * kBucketSlots + lane_in_warp();
  const int64_t* entry = insertion.index.entries + slot * insertion.index.entry_words;
  const int64_t score = has_scores(insertion.order) ? entry[HashEntry::kScore] : 0;
  const bool can_evict = insertion.order != HashOrder::kNone && entry[HashEntry::kStamp] < stamp;
  return {entry_rank(insertion.order, entry[HashEntry::kKey], entry[HashEntry::kStamp], score),
          can_evict ? lane_in_warp() : -1};
}

// Return whether `a` is evicted before `b`; false if `a` is no entry.
EMB_DEVICE bool comes_before(const Candidate& a, const Candidate& b) {
  return a.way >= 0 && (b.way < 0 || ranks_below(a.rank, b.rank));
}

// Return, in every lane, the minimum of `value` over the lanes whose `is_compared` is true; there
// must be one. All 32 lanes must call this.
EMB_DEVICE int64_t min_of_lanes(int64_t value, bool is_compared) {
  const auto high = static_cast<int32_t>(value >> 32);
  const int32_t min_high = __reduce_min_sync(simt::kFullMask, is_compared ? high : INT32_MAX);
  const bool has_min = is_compared && high == min_high;
  const uint32_t low =
      __reduce_min_sync(simt::kFullMask, has_min ? static_cast<uint32_t>(value) : UINT32_MAX);
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<uint32_t>(min_high)) << 32 | low);
}

// Return, in every lane, the candidate of the lowest rank of all lanes, or no entry if no lane has
// one. The way of a lane's candidate must be the lane, or -1. All 32 lanes must call this.
EMB_DEVICE Candidate lowest_over_warp(HashOrder order, const Candidate& candidate) {
  bool is_lowest = candidate.way >= 0;
  if (__ballot_sync(simt::kFullMask, is_lowest) == 0) return {{}, -1};
  Candidate lowest{};
  if (has_scores(order)) {
    lowest.rank.score = min_of_lanes(candidate.rank.score, is_lowest);
    is_lowest = is_lowest && candidate.rank.score == lowest.rank.score;
  }
  if (order != HashOrder::kLfu) {
    lowest.rank.stamp = min_of_lanes(candidate.rank.stamp, is_lowest);
    is_lowest = is_lowest && candidate.rank.stamp == lowest.rank.stamp;
  }
  lowest.rank.key = min_of_lanes(candidate.rank.key, is_lowest);
  is_lowest = is_lowest && candidate.rank.key == lowest.rank.key;
  lowest.way = __ffs(static_cast<int>(__ballot_sync(simt::kFullMask, is_lowest))) - 1;
  return lowest;
}

// Return whether a new entry may replace a candidate.
EMB_DEVICE bool can_evict(const Insertion& insertion, const Candidate& candidate,
                          const NewEntry& entry) {
  if (candidate.way < 0 || !insertion.must_compete) return candidate.way >= 0;
  return !ranks_below(entry_rank(insertion.order, entry.key, entry.stamp, entry.score),
                      candidate.rank);
}

// Return whether it is known, without reading entries, that this batch may evict no entry of a full
// bucket.
EMB_DEVICE bool is_exhausted(const Insertion& insertion, int64_t bucket) {
  return insertion.order == HashOrder::kNone || insertion.last_in_chain[bucket] == kExhaustedBucket;
}

// The two buckets of a key, both full, and the entries in this lane's slot of each.
struct BucketPair {
  int32_t first, second;
  Candidate in_first, in_second;
};

// Load the entries in this lane's slot of two full buckets. `stamp` is the clock.
EMB_DEVICE BucketPair load_pair(const Insertion& insertion, int32_t first, int32_t second,
                                int64_t stamp) {
  return {first, second, load_candidate(insertion, first, stamp),
          load_candidate(insertion, second, stamp)};
}

// What a miss chose.
struct DeviceChoice {
  int32_t bucket;   // -1 if the miss is refused
  ChosenSlot slot;  // unused if it is refused
};

// Choose the entry of the lowest rank in two full buckets, unless `entry` may not evict it. All 32
// lanes must call this with the buckets of one lane's key. The result is meaningful in that lane
// only, because each lane passes its own `entry`.
EMB_DEVICE DeviceChoice choose_entry(const Insertion& insertion, const BucketPair& buckets,
                                     const NewEntry& entry) {
  Candidate lowest = lowest_over_warp(insertion.order, buckets.in_first);
  const Candidate in_second = lowest_over_warp(insertion.order, buckets.in_second);
  const bool takes_second = comes_before(in_second, lowest);
  if (takes_second) lowest = in_second;
  const int way = takes_second ? buckets.in_second.way : buckets.in_first.way;
  const int num_candidates = __popc(__ballot_sync(simt::kFullMask, way >= 0));
  if (!can_evict(insertion, lowest, entry)) return {-1, {}};
  return {takes_second ? buckets.second : buckets.first,
          {static_cast<uint8_t>(lowest.way), true, num_candidates == 1}};
}

// Return a mask of the empty slots of a bucket.
EMB_DEVICE uint32_t empty_slots(const Insertion& insertion, int64_t bucket) {
  return match_tags(insertion.index.tags + bucket * kBucketSlots, kEmptyTag);
}

// Choose a bucket for this lane's miss of table t if `is_active`: add the miss to the chain of the
// bucket and return true, or set its status to kRefused and return false. A lane that is not active
// returns false and changes nothing. Tags and entries do not change. All 32 lanes must call this.
EMB_DEVICE bool choose_bucket(const Insertion& insertion, int64_t miss, int t, bool is_active) {
  NewEntry entry{};
  int32_t first = 0, second = 0;  // the buckets of the key
  DeviceChoice choice{-1, {}};
  bool needs_search = false;  // both buckets are full, so the warp must compare entries
  if (is_active) {
    entry = new_entry(insertion, miss, t);
    const HashTable table = insertion.index.table(t);
    const int64_t base = insertion.index.field(t, HashTableColumn::kFirstBucket);
    const uint64_t full_hash = table.hash(entry.key);
    first = static_cast<int32_t>(base + table.first_bucket(full_hash));
    second = static_cast<int32_t>(base + table.second_bucket(full_hash));
    uint32_t empty = empty_slots(insertion, first), empty_in_second = 0;
    if (__popc(empty) <= kPreferredFreeSlots) empty_in_second = empty_slots(insertion, second);
    const bool takes_second = __popc(empty_in_second) > __popc(empty);
    if (takes_second) empty = empty_in_second;
    if (empty != 0) {
      const auto way = static_cast<uint8_t>(__ffs(static_cast<int>(empty)) - 1);
      choice = {takes_second ? second : first, {way, false, false}};
    }
    needs_search =
        empty == 0 && !(is_exhausted(insertion, first) && is_exhausted(insertion, second));
  }
  unsigned lanes_left = __ballot_sync(simt::kFullMask, needs_search);
  const int64_t stamp = *insertion.index.clock;
  const auto pair_of_lowest_lane = [&](unsigned lanes) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    return load_pair(insertion, __shfl_sync(simt::kFullMask, first, lane),
                     __shfl_sync(simt::kFullMask, second, lane), stamp);
  };
  BucketPair next_pair{};
  if (lanes_left != 0) next_pair = pair_of_lowest_lane(lanes_left);
  while (lanes_left != 0) {
    const BucketPair pair = next_pair;
    const int lane = __ffs(static_cast<int>(lanes_left)) - 1;
    lanes_left &= lanes_left - 1;
    // In flight during the search.
    if (lanes_left != 0) next_pair = pair_of_lowest_lane(lanes_left);
    const DeviceChoice choice_of_lane = choose_entry(insertion, pair, entry);
    if (lane_in_warp() == lane) choice = choice_of_lane;
  }
  if (!is_active) return false;
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

// Return the 32 lowest misses greater than `previous_member` in the chain of a bucket, one per lane
// in ascending order. If there are fewer, the last lanes get INT32_MAX. All 32 lanes must call
// this.
EMB_DEVICE int32_t next_members(const Insertion& insertion, int64_t bucket,
                                int32_t previous_member) {
  int32_t lane_member = INT32_MAX;
  for (int32_t member = insertion.last_in_chain[bucket]; member >= 0;
       member = insertion.previous_in_chain[member]) {
    if (member <= previous_member) continue;
    const int num_lower = __popc(__ballot_sync(simt::kFullMask, lane_member < member));
    const int32_t lower_member = __shfl_up_sync(simt::kFullMask, lane_member, 1u);
    if (lane_in_warp() > num_lower) lane_member = lower_member;
    if (lane_in_warp() == num_lower) lane_member = member;
  }
  return lane_member;
}

// Write a new entry of table t into slot `way` of a bucket, and the results of its miss. For the
// status kEvicting, first copy the entry that is in the slot to `insertion.evicted`.
EMB_DEVICE void write_entry(const Insertion& insertion, int t, int64_t bucket, int way,
                            const NewEntry& entry, InsertStatus status) {
  const int64_t slot = bucket * kBucketSlots + way;
  int64_t* words = insertion.index.entries + slot * insertion.index.entry_words;
  if (status == InsertStatus::kEvicting) {
    int64_t* evicted = insertion.evicted + 3 * entry.miss;
    evicted[HashEntry::kKey] = words[HashEntry::kKey];
    evicted[HashEntry::kStamp] = words[HashEntry::kStamp];
    evicted[HashEntry::kScore] = has_scores(insertion.order) ? words[HashEntry::kScore] : 0;
  }
  insertion.index.tags[slot] = tag_of(insertion.index.table(t).hash(entry.key));
  words[HashEntry::kKey] = entry.key;
  words[HashEntry::kStamp] = entry.stamp;
  if (has_scores(insertion.order)) words[HashEntry::kScore] = entry.score;
  insertion.slots[entry.miss] =
      slot - insertion.index.field(t, HashTableColumn::kFirstBucket) * kBucketSlots;
  insertion.status[entry.miss] = static_cast<uint8_t>(status);
}

// Assign empty slots of a bucket to the first members of its chain, up to slots_per_round. `empty`
// is the mask of the empty slots. All 32 lanes must call this.
EMB_DEVICE void fill_bucket(const Insertion& insertion, int t, int64_t bucket, uint32_t empty) {
  const int32_t member = next_members(insertion, bucket, -1);
  const int assignable = slots_per_round(__popc(empty));
  const bool gets_slot = lane_in_warp() < assignable && member != INT32_MAX;
  for (int k = lane_in_warp(); gets_slot && k > 0; --k) empty &= empty - 1;
  if (gets_slot) {
    const int way = __ffs(static_cast<int>(empty)) - 1;  // the lane-th empty slot
    write_entry(insertion, t, bucket, way, new_entry(insertion, member, t), InsertStatus::kNew);
  }
}

// Do what fill_bucket does, with this lane alone, and return true, if the chain has at most
// kLaneMembers members and all get a slot. Otherwise change nothing and return false.
EMB_DEVICE bool fill_by_lane(const Insertion& insertion, int t, int64_t bucket, uint32_t empty) {
  constexpr int kLaneMembers = 4;  // members that are kept in registers, sorted
  int32_t members[kLaneMembers] = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};
  for (int32_t added = insertion.last_in_chain[bucket]; added >= 0;
       added = insertion.previous_in_chain[added]) {
    int32_t member = added;
#pragma unroll
    for (int k = 0; k < kLaneMembers; ++k) {
      const int32_t greater = member < members[k] ? members[k] : member;
      members[k] = member < members[k] ? member : members[k];
      member = greater;
    }
    if (member != INT32_MAX) return false;
  }
  const int assignable = slots_per_round(__popc(empty));
#pragma unroll
  for (int k = 0; k < kLaneMembers; ++k) {
    if (k >= assignable && members[k] != INT32_MAX) return false;
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

// Replace entries of a full bucket by the members of its chain in order, up to slots_per_round. The
// entry of the lowest rank is replaced first. `lane_candidate` is the result of load_candidate for
// the bucket. Return whether the bucket has no entry left that this batch may evict. All 32 lanes
// must call this.
EMB_DEVICE bool replace_in_bucket(const Insertion& insertion, int t, int64_t bucket,
                                  Candidate lane_candidate) {
  Candidate candidate = lowest_over_warp(insertion.order, lane_candidate);
  int assignable = slots_per_round(__popc(__ballot_sync(simt::kFullMask, lane_candidate.way >= 0)));
  for (int32_t last_member = -1; assignable > 0;) {
    const int32_t member = next_members(insertion, bucket, last_member);
    const int num_members = __popc(__ballot_sync(simt::kFullMask, member != INT32_MAX));
    for (int k = 0; k < num_members && assignable > 0; ++k) {
      const NewEntry entry = new_entry(insertion, __shfl_sync(simt::kFullMask, member, k), t);
      if (!can_evict(insertion, candidate, entry)) continue;
      if (lane_in_warp() == candidate.way) {
        write_entry(insertion, t, bucket, candidate.way, entry, InsertStatus::kEvicting);
        lane_candidate.way = -1;  // the slot belongs to this batch now
      }
      --assignable;
      candidate = lowest_over_warp(insertion.order, lane_candidate);
    }
    if (num_members < kWarpLanes) break;
    last_member = __shfl_sync(simt::kFullMask, member, kWarpLanes - 1);
  }
  return candidate.way < 0;
}

// Give the only member of the chain of a bucket the slot that it chose.
EMB_DEVICE void serve_single_member(const Insertion& insertion, int64_t miss, int t, int64_t bucket,
                                    ChosenSlot slot) {
  write_entry(insertion, t, bucket, slot.way, new_entry(insertion, miss, t),
              slot.evicts ? InsertStatus::kEvicting : InsertStatus::kNew);
  insertion.last_in_chain[bucket] = slot.exhausts ? kExhaustedBucket : kEmptyChain;
}

// Serve the chains whose founders are misses of this warp, and empty the chains: write tags,
// entries, and the results of the misses that get a slot. `miss`, of table t, is this lane's miss
// if `is_active`. All 32 lanes must call this. A barrier, of the block or by the end of a kernel,
// must separate it from choose_bucket, so that all chains are complete.
EMB_DEVICE void serve_buckets(const Insertion& insertion, int64_t miss, int t, bool is_active) {
  const bool is_founder =
      is_active && insertion.is_pending(miss) && insertion.previous_in_chain[miss] < 0;
  const int32_t chosen_bucket = is_founder ? insertion.chosen_bucket[miss] : 0;
  bool fills = false, replaces = false;
  if (is_founder) {
    const ChosenSlot slot = insertion.chosen_slot[miss];
    if (insertion.last_in_chain[chosen_bucket] == miss) {
      serve_single_member(insertion, miss, t, chosen_bucket, slot);
    } else if (slot.evicts) {
      replaces = true;
    } else {
      fills = !fill_by_lane(insertion, t, chosen_bucket, empty_slots(insertion, chosen_bucket));
      if (!fills) insertion.last_in_chain[chosen_bucket] = kEmptyChain;
    }
  }
  unsigned filling_lanes = __ballot_sync(simt::kFullMask, fills);
  for (; filling_lanes != 0; filling_lanes &= filling_lanes - 1) {
    const int lane = __ffs(static_cast<int>(filling_lanes)) - 1;
    const int32_t bucket = __shfl_sync(simt::kFullMask, chosen_bucket, lane);
    const int table = __shfl_sync(simt::kFullMask, t, lane);
    const uint32_t empty = empty_slots(insertion, bucket);
    __syncwarp();  // all lanes have read the tags before any lane writes one
    fill_bucket(insertion, table, bucket, empty);
    __syncwarp();
    if (lane_in_warp() == 0) insertion.last_in_chain[bucket] = kEmptyChain;
  }
  unsigned replacing_lanes = __ballot_sync(simt::kFullMask, replaces);
  const int64_t stamp = *insertion.index.clock;
  const auto entry_of_lowest_lane = [&](unsigned lanes) {
    const int lane = __ffs(static_cast<int>(lanes)) - 1;
    return load_candidate(insertion, __shfl_sync(simt::kFullMask, chosen_bucket, lane), stamp);
  };
  Candidate next_candidate{};
  if (replacing_lanes != 0) next_candidate = entry_of_lowest_lane(replacing_lanes);
  while (replacing_lanes != 0) {
    const Candidate lane_candidate = next_candidate;
    const int lane = __ffs(static_cast<int>(replacing_lanes)) - 1;
    const int32_t bucket = __shfl_sync(simt::kFullMask, chosen_bucket, lane);
    const int table = __shfl_sync(simt::kFullMask, t, lane);
    replacing_lanes &= replacing_lanes - 1;
    // In flight during the work on this bucket. No other warp changes the next bucket.
    if (replacing_lanes != 0) next_candidate = entry_of_lowest_lane(replacing_lanes);
    const bool exhausts = replace_in_bucket(insertion, table, bucket, lane_candidate);
    __syncwarp();
    if (lane_in_warp() == 0) {
      insertion.last_in_chain[bucket] = exhausts ? kExhaustedBucket : kEmptyChain;
    }
  }
}

inline constexpr int kMaxWideRounds = 5;  // rounds on all multiprocessors
// If the index has more buckets per position of the batch than this, only the chains of buckets
// that a miss may choose are cleared. This writes two sectors of 32 bytes per miss instead of 4
// bytes per bucket. The two costs are equal for 16 buckets per miss.
inline constexpr int64_t kSparseBucketsPerPosition = 16;

// Clear the chains of all `num_buckets` buckets if `clears_all`, otherwise of the two buckets of
// each miss. All threads of the grid must call this. `shared` is shared memory for two ints.
EMB_DEVICE void clear_chains(const Insertion& insertion, int64_t num_buckets, bool clears_all,
                             int* shared) {
  if (clears_all) {
    for (int64_t i = simt::global_thread(); i < num_buckets; i += simt::threads_in_grid()) {
      insertion.last_in_chain[i] = kEmptyChain;
    }
    return;
  }
  const int num_tables = insertion.index.num_tables;
  const auto start = [&](int t) { return insertion.misses.offsets[t]; };
  for_each_in_intervals(start, num_tables, start(num_tables), shared, [&](int64_t miss, int t) {
    if (t < 0) return;
    const HashTable table = insertion.index.table(t);
    int32_t* chains =
        insertion.last_in_chain + insertion.index.field(t, HashTableColumn::kFirstBucket);
    const uint64_t full_hash = table.hash(insertion.ids[insertion.first_positions[miss]]);
    chains[table.first_bucket(full_hash)] = chains[table.second_bucket(full_hash)] = kEmptyChain;
  });
}

// Initialise slots and statuses [n], and the scratch memory for `num_buckets` buckets of all
// tables. `evicted` stays uninitialised, because it is unspecified for misses that evict nothing.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_begin_kernel(Insertion insertion, int64_t n, int64_t num_buckets, bool clears_all) {
  __shared__ int range[2];
  const DeviceMisses& misses = insertion.misses;
  const int64_t step = simt::threads_in_grid();
  const int64_t num_misses = misses.offsets[insertion.index.num_tables];
  clear_chains(insertion, num_buckets, clears_all, range);
  if (simt::global_thread() == 0) *insertion.next_block = *insertion.num_finished_blocks = 0;
  for (int64_t t = simt::global_thread(); t < insertion.index.num_tables; t += step) {
    insertion.num_pending[t] = 0;
  }
  for (int64_t i = simt::global_thread(); i < n; i += step) {
    const bool is_rejected = i < num_misses && misses.admitted != nullptr && !misses.admitted[i];
    insertion.slots[i] = kNoSlot;
    insertion.status[i] =
        static_cast<uint8_t>(is_rejected ? InsertStatus::kNotAdmitted : InsertStatus::kMiss);
  }
}

// Call `body(miss, table, is_active)` for the misses of the batch; `is_active` says whether
// max_choosers lets the miss choose in this round. All threads of the grid must call this. Whole
// warps call `body`; lanes without a miss get table -1 and are not active. A bucket may occupy a
// warp for the miss of one lane, so few misses are distributed over all warps. `shared` is shared
// memory for two ints.
template <class Body>
EMB_DEVICE void for_each_chooser(const Insertion& insertion, int round, int* shared,
                                 const Body& body) {
  const int num_tables = insertion.index.num_tables;
  const int64_t* offsets = insertion.misses.offsets;
  const auto start = [&](int t) { return offsets[t]; };
  const int64_t num_misses = offsets[num_tables], num_warps = simt::warps_in_grid();
  const int64_t misses_per_warp = (num_misses + num_warps - 1) / num_warps;
  // Lanes of a warp that have a miss.
  const int num_lanes =
      misses_per_warp < kWarpLanes ? static_cast<int>(misses_per_warp) : kWarpLanes;
  const int64_t tile_size = int64_t{num_lanes} * kBlockWarps;
  const int64_t index_in_tile = threadIdx.x / simt::kWarpLanes * num_lanes + lane_in_warp();
  for (int64_t tile = blockIdx.x * tile_size; tile < num_misses; tile += gridDim.x * tile_size) {
    const int64_t end = tile + tile_size < num_misses ? tile + tile_size : num_misses;
    const int64_t miss = tile + index_in_tile;
    const TileSearch search(start, num_tables, tile, end, shared);
    const int t = lane_in_warp() < num_lanes && miss < end ? search.find(start, miss) : -1;
    body(miss, t,
         t >= 0 && miss - offsets[t] <
                       max_choosers(insertion.index.field(t, HashTableColumn::kBuckets), round));
  }
}

// Append this lane's miss to the list of pending misses of its table t, if `is_listed`. The order
// of a list depends on the order of warps, but no result does. All 32 lanes must call this.
EMB_DEVICE void list_pending(const Insertion& insertion, int64_t miss, int t, bool is_listed) {
  unsigned lanes_left = __ballot_sync(simt::kFullMask, is_listed);
  while (lanes_left != 0) {
    const int leader = __ffs(static_cast<int>(lanes_left)) - 1;
    const int table = __shfl_sync(simt::kFullMask, t, leader);
    const bool is_of_table = is_listed && t == table;
    const unsigned lanes_of_table = __ballot_sync(simt::kFullMask, is_of_table);
    int32_t first_index = 0;  // on the list, of the first miss that is added
    if (lane_in_warp() == leader) {
      first_index =
          atomicAdd(insertion.num_pending + table, static_cast<int32_t>(__popc(lanes_of_table)));
    }
    first_index = __shfl_sync(simt::kFullMask, first_index, leader);
    if (is_of_table) {
      const int num_lower = __popc(lanes_of_table & ((1u << lane_in_warp()) - 1));
      insertion.pending[insertion.misses.offsets[table] + first_index + num_lower] =
          static_cast<int32_t>(miss);
    }
    lanes_left &= ~lanes_of_table;
  }
}

// The first kernel of a round: pending misses choose buckets. With `lists_pending`, also list the
// misses that are in a chain, for the last kernel; the host passes it in the last round that uses
// all multiprocessors.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_choose_kernel(Insertion insertion, int round, bool lists_pending) {
  __shared__ int range[2];
  for_each_chooser(insertion, round, range, [&](int64_t miss, int t, bool is_active) {
    is_active = is_active && insertion.is_pending(miss);
    if (!__any_sync(simt::kFullMask, is_active)) return;
    const bool chooses = choose_bucket(insertion, miss, t, is_active);
    if (lists_pending) list_pending(insertion, miss, t, chooses);
  });
}

// Blocks per multiprocessor that the registers of a thread must allow. With three,
// hash_outcome_kernel spills registers on sm_80. With four, hash_serve_kernel does not spill (nvcc
// 13.0), but its speed has not been measured.
inline constexpr int kServeBlocksPerSm = 3, kOutcomeBlocksPerSm = 2;

// The second kernel of a round: serve all chains.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads, kServeBlocksPerSm)
    hash_serve_kernel(Insertion insertion, int round) {
  __shared__ int range[2];
  for_each_chooser(insertion, round, range, [&](int64_t miss, int t, bool is_active) {
    serve_buckets(insertion, miss, t, is_active);
  });
}

// The list of pending misses of a table, in the block that finishes it.
struct PendingList {
  int32_t* misses;  // in scratch memory, with room for all misses of the table
  int size;         // number of misses on the list, the same in every thread

  // Return miss number i of the list, -1 beyond its end.
  EMB_DEVICE int64_t at(int i) const { return i < size ? misses[i] : -1; }

  // Remove misses that are no longer pending; the order of the others may change. All threads of
  // the block must call this. `new_size` is shared memory for one int.
  EMB_DEVICE void compact(const Insertion& insertion, int* new_size) {
    if (threadIdx.x == 0) *new_size = 0;
    for (int tile = 0; tile < size; tile += kTileThreads) {
      const int64_t miss = at(tile + static_cast<int>(threadIdx.x));
      const bool stays = miss >= 0 && insertion.is_pending(miss);
      __syncthreads();  // writes reach only the part of the list that all threads have read
      if (stays) misses[atomicAdd(new_size, 1)] = static_cast<int32_t>(miss);
    }
    __syncthreads();
    size = *new_size;
    __syncthreads();
  }
};

// Run the remaining rounds, from `first_round` >= 1 on, for the tables block, block + num_blocks,
// and so on. The rounds of a table end when none of its misses is pending, including the misses
// that may choose in later rounds only. Neighbours on a list are assigned to different warps. All
// threads of the block must call this; it contains barriers. `list_size` is shared memory for one
// int.
EMB_DEVICE void finish_tables(const Insertion& insertion, int first_round, int block,
                              int num_blocks, int* list_size) {
  const auto index_in_tile =
      static_cast<int>(threadIdx.x / simt::kWarpLanes) + lane_in_warp() * kBlockWarps;
  const int64_t* offsets = insertion.misses.offsets;
  for (int t = block; t < insertion.index.num_tables; t += num_blocks) {
    const auto first = static_cast<int>(offsets[t]);
    const int num_misses = static_cast<int>(offsets[t + 1]) - first;
    const int64_t buckets = insertion.index.field(t, HashTableColumn::kBuckets);
    PendingList list{insertion.pending + first, insertion.num_pending[t]};
    const auto choosers_in_round = [&](int round) {
      const int64_t max_misses = max_choosers(buckets, round);
      return max_misses < num_misses ? static_cast<int>(max_misses) : num_misses;
    };
    int num_choosers = choosers_in_round(first_round - 1);  // misses that may have chosen so far
    list.compact(insertion, list_size);
    for (int round = first_round; list.size > 0 || num_choosers < num_misses; ++round) {
      const int end = choosers_in_round(round);
      for (int i = num_choosers + static_cast<int>(threadIdx.x); i < end; i += kTileThreads) {
        list.misses[list.size + i - num_choosers] = first + i;
      }
      list.size += end - num_choosers;
      num_choosers = end;
      __syncthreads();
      for (int tile = 0; tile < list.size; tile += kTileThreads) {
        const int64_t miss = list.at(tile + index_in_tile);
        const bool is_active = miss >= 0 && insertion.is_pending(miss);
        if (__any_sync(simt::kFullMask, is_active)) choose_bucket(insertion, miss, t, is_active);
      }
      __syncthreads();
      for (int tile = 0; tile < list.size; tile += kTileThreads) {
        const int64_t miss = list.at(tile + index_in_tile);
        serve_buckets(insertion, miss, t, miss >= 0);
      }
      __syncthreads();
      list.compact(insertion, list_size);
    }
    __syncthreads();
  }
}

// The slots and statuses of the positions of a batch.
struct BatchSlots {
  const int64_t* slots;   // [n], the slot before the insertion, as hash_touch_ returns it
  const int32_t* groups;  // [n], the miss of the position, -1 for a hit
  int64_t n;              // positions; 0 if these results are not wanted
  int64_t* new_slots;     // [n] output: the slot after the insertion, -1 for none
  uint8_t* status;        // [n] output: InsertStatus
};

// Write the slot and the status of each position in this block's slice. A position whose key was
// missing gets the slot and status of its miss. Any other position keeps its slot from before the
// insertion and gets the status kHit. The loads of kLoads positions are in flight at once.
EMB_DEVICE void fill_positions(const Insertion& insertion, const BatchSlots& batch,
                               const GridSlice& slice) {
  constexpr int kLoads = 4;
  const int64_t step = slice.num_blocks * kTileThreads;
  for (int64_t i = slice.block * kTileThreads + threadIdx.x; i < batch.n; i += kLoads * step) {
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
      batch.new_slots[i + k * step] = slot[k];
      batch.status[i + k * step] = status[k];
    }
  }
}

// Add the results of this block's slice of the misses to the counters and the sizes of the tables.
// `shared` is shared memory for two ints.
EMB_DEVICE void count_statuses(const Insertion& insertion, const GridSlice& slice, int* shared) {
  const DeviceIndex& index = insertion.index;
  TableTally inserted = counter_tally(index, HashCounter::kInserted),
             evicted = counter_tally(index, HashCounter::kEvicted);
  TableTally refused = counter_tally(index, HashCounter::kRefused);
  TableTally not_admitted = counter_tally(index, HashCounter::kNotAdmitted);
  TableTally sizes = size_tally(index);
  const auto start = [&](int t) { return insertion.misses.offsets[t]; };
  const int64_t num_misses = insertion.misses.offsets[index.num_tables];
  for_each_in_intervals(
      slice, start, index.num_tables, num_misses, shared, [&](int64_t miss, int t) {
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

// The last kernel, after `num_rounds` rounds. The first `num_finishers` blocks to begin finish the
// tables. The other blocks, of which there must be at least one, wait until the tables are
// finished. Then they count the results of the misses in the index, and write the results of all
// positions. A block waits only for blocks that began before it, so every wait ends.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads, kOutcomeBlocksPerSm)
    hash_outcome_kernel(Insertion insertion, BatchSlots batch, int num_rounds, int num_finishers) {
  __shared__ int range[2];
  __shared__ int shared_int;  // the number of this block, then memory for finish_tables
  if (threadIdx.x == 0) shared_int = atomicAdd(insertion.next_block, 1);
  __syncthreads();
  const int block = shared_int;
  __syncthreads();
  if (block < num_finishers) {
    finish_tables(insertion, num_rounds, block, num_finishers, &shared_int);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(insertion.num_finished_blocks, 1);
    return;
  }
  if (threadIdx.x == 0) {
    // Volatile: memory is read at every iteration. The fences order the tables and results that the
    // finishing blocks wrote before their count, and what this block reads after it.
    while (*static_cast<const volatile int32_t*>(insertion.num_finished_blocks) < num_finishers)
      continue;
    __threadfence();
  }
  __syncthreads();
  const GridSlice slice{block - num_finishers, static_cast<int>(gridDim.x) - num_finishers};
  count_statuses(insertion, slice, range);
  fill_positions(insertion, batch, slice);
}

// Return the number of rounds on all multiprocessors for a batch of n positions, 2 to
// kMaxWideRounds. `num_buckets` is the number of buckets in the memory of all tables. These are the
// rounds until all misses may choose, if all tables use all their buckets and misses are
// distributed evenly, and one more for misses whose bucket had no slot left.
inline int num_wide_rounds(int64_t n, int64_t num_buckets) {
  int rounds = 1;
  while (rounds < kMaxWideRounds - 1 && max_choosers(num_buckets, rounds - 1) < n) ++rounds;
  return rounds + 1;
}

// Launch `hash_insert_` for a batch of n positions. `num_buckets` is the number of buckets in the
// memory of the index. The scratch pointers of `insertion` are set here, from `work`.
template <class Work>
void launch_insert(Work& work, Insertion insertion, const BatchSlots& batch, int64_t n,
                   int64_t num_buckets) {
  if (n == 0) return;
  const auto& launcher = work.launcher();
  const int num_tables = insertion.index.num_tables;
  allocate_arrays(work, [&](const auto& take) {
    take(insertion.last_in_chain, num_buckets);
    take(insertion.previous_in_chain, n);
    take(insertion.chosen_bucket, n);
    take(insertion.pending, n);
    take(insertion.num_pending, num_tables);
    take(insertion.next_block, 1);
    take(insertion.num_finished_blocks, 1);
    take(insertion.chosen_slot, n);
  });
  const unsigned blocks = key_blocks(launcher, n);
  const bool clears_all = num_buckets <= kSparseBucketsPerPosition * n;
  launcher(hash_begin_kernel, key_blocks(launcher, clears_all ? n + num_buckets : n), kTileThreads,
           insertion, n, num_buckets, clears_all);
  const int num_rounds = num_wide_rounds(n, num_buckets);
  for (int round = 0; round < num_rounds; ++round) {
    const bool lists_pending = round + 1 == num_rounds;
    launcher(hash_choose_kernel, blocks, kTileThreads, insertion, round, lists_pending);
    launcher(hash_serve_kernel, blocks, kTileThreads, insertion, round);
  }
  const unsigned num_finishers =
      blocks_for(num_tables, 1, launcher.max_grid_blocks(kOutcomeBlocksPerSm));
  launcher(hash_outcome_kernel, num_finishers + blocks, kTileThreads, insertion, batch, num_rounds,
           static_cast<int>(num_finishers));
}

}  // namespace emb::cuda
