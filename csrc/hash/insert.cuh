// `hash_insert_` on the GPU: insert the admitted misses of a batch.
//
// Keys choose buckets, one lane per key; then every chosen bucket serves its keys in order, as far
// as its share of the round goes. The keys that chose a bucket form a chain in scratch memory, in
// no order; the founder of the chain handles the bucket. One lane assigns empty slots to a few
// keys; for more keys, or if entries are evicted, the whole warp works on the bucket, one lane per
// slot.
#pragma once

#include "hash/device_index.cuh"

namespace emb::cuda {

// What `chains` has for a bucket: a miss, or one of these.
enum Chain : int32_t {
  kNoChain = -1,
  kExhausted = -2,  // nor has it an entry that this batch may still evict
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
  // Scratch. By bucket: the last member of its chain, or what `Chain` says. By miss: the previous
  // member of the chain, negative for its founder, and the chosen bucket. By table: the last round
  // that left a key of a chain without a slot.
  int32_t *chains, *before, *wanted, *left_over;

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
          counts_uses(insertion.order) ? insertion.totals[miss] : batch_score};
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

// Return the lowest candidate of all lanes, in every lane.
EMB_DEVICE Candidate min_over_warp(Candidate candidate) {
#pragma unroll
  for (int offset = kSlots / 2; offset > 0; offset /= 2) {
    Candidate other;
    other.rank.score = __shfl_xor_sync(simt::kFullMask, candidate.rank.score, offset);
    other.rank.stamp = __shfl_xor_sync(simt::kFullMask, candidate.rank.stamp, offset);
    other.rank.key = __shfl_xor_sync(simt::kFullMask, candidate.rank.key, offset);
    other.way = __shfl_xor_sync(simt::kFullMask, candidate.way, offset);
    if (comes_before(other, candidate)) candidate = other;
  }
  return candidate;
}

EMB_DEVICE bool can_evict(const Insertion& insertion, const Candidate& candidate,
                          const NewEntry& to) {
  if (candidate.way < 0 || !insertion.competes) return candidate.way >= 0;
  return !less(entry_rank(insertion.order, to.key, to.stamp, to.score), candidate.rank);
}

EMB_DEVICE bool is_exhausted(const Insertion& insertion, int64_t bucket) {
  return insertion.order == Order::kNone || insertion.chains[bucket] == kExhausted;
}

// Return which of two full buckets has an entry that can be evicted, -1 for neither. The whole warp
// calls it for the key of one lane: only that lane passes `to` and uses the result.
EMB_DEVICE int64_t full_choice(const Insertion& insertion, int64_t first, int64_t second,
                               const NewEntry& to) {
  const int64_t stamp = *insertion.index.clock;
  Candidate a = min_over_warp(lane_entry(insertion, first, stamp));
  const Candidate b = min_over_warp(lane_entry(insertion, second, stamp));
  const bool take_second = comes_before(b, a);
  if (take_second) a = b;
  if (!can_evict(insertion, a, to)) return -1;
  return take_second ? second : first;
}

EMB_DEVICE int free_slots(const Insertion& insertion, int64_t bucket) {
  return __popc(match_tags(insertion.index.tags + bucket * kSlots, kEmptyTag));
}

// Choose a bucket for this lane's miss if it is active: afterwards the miss is refused, or in the
// chain of a bucket. Called by the whole warp.
EMB_DEVICE void choose_bucket(const Insertion& insertion, int64_t miss, int t, bool active) {
  NewEntry self{};
  int64_t first = 0, second = 0, wanted = -1;  // buckets of all tables together
  bool searches = false;
  if (active) {
    self = new_entry(insertion, miss, t);
    const HashTable table = insertion.index.table(t);
    const int64_t base = insertion.index.field(t, kFirstBucket);
    const uint64_t mixed = table.hash(self.key);
    first = base + table.first(mixed);
    second = base + table.second(mixed);
    const int in_first = free_slots(insertion, first);
    const int in_second = in_first > kPreferFirstBucket ? 0 : free_slots(insertion, second);
    if (in_first + in_second > 0) wanted = in_first >= in_second ? first : second;
    searches = wanted < 0 && !(is_exhausted(insertion, first) && is_exhausted(insertion, second));
  }
  unsigned left = __ballot_sync(simt::kFullMask, searches);
  for (; left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const int64_t found = full_choice(insertion, __shfl_sync(simt::kFullMask, first, lane),
                                      __shfl_sync(simt::kFullMask, second, lane), self);
    if (lane_in_warp() == lane) wanted = found;
  }
  if (!active) return;
  if (wanted < 0) {
    insertion.status[miss] = static_cast<uint8_t>(InsertStatus::kRefused);
    return;
  }
  insertion.wanted[miss] = static_cast<int32_t>(wanted);
  insertion.before[miss] = atomicExch(insertion.chains + wanted, static_cast<int32_t>(miss));
}

// Return the first 32 members of a chain that come after `last`, one per lane, in order; INT32_MAX
// in lanes beyond them.
EMB_DEVICE int32_t next_members(const Insertion& insertion, int64_t bucket, int32_t last) {
  int32_t of_lane = INT32_MAX;
  for (int32_t member = insertion.chains[bucket]; member >= 0; member = insertion.before[member]) {
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
// Return whether they are all.
EMB_DEVICE bool fill_bucket(const Insertion& insertion, int t, int64_t bucket, uint32_t empty) {
  const int32_t member = next_members(insertion, bucket, -1);
  const int share = slots_of_round(__popc(empty));
  const bool gets_slot = lane_in_warp() < share && member != INT32_MAX;
  for (int k = lane_in_warp(); gets_slot && k > 0; --k) empty &= empty - 1;
  if (gets_slot) {
    const int way = __ffs(static_cast<int>(empty)) - 1;  // the lane-th empty slot
    write_entry(insertion, t, bucket, way, new_entry(insertion, member, t), InsertStatus::kNew);
  }
  return !__any_sync(simt::kFullMask, member != INT32_MAX && !gets_slot);
}

// The same by one lane, for a chain of up to kFew members that all get a slot; otherwise do nothing
// and return false.
EMB_DEVICE bool fill_by_lane(const Insertion& insertion, int t, int64_t bucket, uint32_t empty) {
  constexpr int kFew = 4;
  int32_t members[kFew] = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};  // in order
  for (int32_t next = insertion.chains[bucket]; next >= 0; next = insertion.before[next]) {
    int32_t member = next;
#pragma unroll
    for (int k = 0; k < kFew; ++k) {
      const int32_t greater = member < members[k] ? members[k] : member;
      members[k] = member < members[k] ? member : members[k];
      member = greater;
    }
    if (member != INT32_MAX) return false;
  }
  const int share = slots_of_round(__popc(empty));
#pragma unroll
  for (int k = 0; k < kFew; ++k) {
    if (k >= share && members[k] != INT32_MAX) return false;
  }
#pragma unroll
  for (int k = 0; k < kFew; ++k) {
    if (members[k] == INT32_MAX) break;
    const int way = __ffs(static_cast<int>(empty)) - 1;
    write_entry(insertion, t, bucket, way, new_entry(insertion, members[k], t), InsertStatus::kNew);
    empty &= empty - 1;
  }
  return true;
}

// What became of a chain: whether all members got a slot, and whether the bucket has no entry left
// that this batch may evict.
struct Service {
  bool is_complete, exhausts;
};

// Replace the share of a round of the entries of a full bucket by members in order, the lowest
// entry first.
EMB_DEVICE Service replace_in_bucket(const Insertion& insertion, int t, int64_t bucket) {
  Candidate self = lane_entry(insertion, bucket, *insertion.index.clock);
  Candidate candidate = min_over_warp(self);
  int share = slots_of_round(__popc(__ballot_sync(simt::kFullMask, self.way >= 0)));
  bool is_complete = false;
  for (int32_t last = -1; share > 0;) {
    const int32_t member = next_members(insertion, bucket, last);
    const int members = __popc(__ballot_sync(simt::kFullMask, member != INT32_MAX));
    int served = 0;
    for (int k = 0; k < members && share > 0; ++k) {
      const NewEntry to = new_entry(insertion, __shfl_sync(simt::kFullMask, member, k), t);
      if (!can_evict(insertion, candidate, to)) continue;
      if (lane_in_warp() == candidate.way) {
        write_entry(insertion, t, bucket, candidate.way, to, InsertStatus::kEvicting);
        self.way = -1;  // belongs to this batch now
      }
      ++served;
      --share;
      candidate = min_over_warp(self);
    }
    is_complete = last < 0 && members < kSlots && served == members;
    if (members < kSlots) break;
    last = __shfl_sync(simt::kFullMask, member, kSlots - 1);
  }
  return {is_complete, candidate.way < 0};
}

// Serve the chains that this warp's lanes founded. Called by the whole warp.
EMB_DEVICE void serve_buckets(const Insertion& insertion, int64_t miss, int t, bool active,
                              int round) {
  const bool founds = active && insertion.is_pending(miss) && insertion.before[miss] < 0;
  const int32_t wanted = founds ? insertion.wanted[miss] : 0;
  bool served = false;
  if (founds) {
    const uint32_t empty = match_tags(insertion.index.tags + int64_t{wanted} * kSlots, kEmptyTag);
    served = empty != 0 && fill_by_lane(insertion, t, wanted, empty);
    if (served) insertion.chains[wanted] = kNoChain;
  }
  unsigned left = __ballot_sync(simt::kFullMask, founds && !served);
  for (; left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const int64_t bucket = __shfl_sync(simt::kFullMask, wanted, lane);
    const int table = __shfl_sync(simt::kFullMask, t, lane);
    const uint32_t empty = match_tags(insertion.index.tags + bucket * kSlots, kEmptyTag);
    __syncwarp();  // all lanes have read the tags before any lane writes one
    Service service{false, false};
    if (empty != 0) {
      service.is_complete = fill_bucket(insertion, table, bucket, empty);
    } else {
      service = replace_in_bucket(insertion, table, bucket);
    }
    __syncwarp();
    if (lane_in_warp() != 0) continue;
    insertion.chains[bucket] = service.exhausts ? kExhausted : kNoChain;
    if (!service.is_complete) insertion.left_over[table] = round;
  }
}

// The rounds. Nothing waits for the device, and only the device knows how many rounds are needed.
// The first rounds, in which almost all keys get a slot, use all multiprocessors; the host
// estimates their number. A last kernel, one block per table, continues until no key is pending.

inline constexpr int kFinishThreads = 512;
inline constexpr int kMaxWideRounds = 5;

// Initialise the results and the chains.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_begin_kernel(Insertion insertion, int64_t n, int64_t buckets) {
  const DeviceMisses& misses = insertion.misses;
  const int64_t step = simt::threads_in_grid(), count = misses.offsets[insertion.index.num_tables];
  for (int64_t i = simt::global_thread(); i < buckets; i += step) insertion.chains[i] = kNoChain;
  for (int64_t t = simt::global_thread(); t < insertion.index.num_tables; t += step) {
    insertion.left_over[t] = -1;
  }
  for (int64_t i = simt::global_thread(); i < n; i += step) {
    const bool kept_out = i < count && misses.admitted != nullptr && !misses.admitted[i];
    insertion.slots[i] = kNoSlot;
    insertion.status[i] =
        static_cast<uint8_t>(kept_out ? InsertStatus::kNotAdmitted : InsertStatus::kMiss);
    for (int w = 0; w < 3; ++w) insertion.evicted[3 * i + w] = 0;
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

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_choose_kernel(Insertion insertion, int round) {
  __shared__ int range[2];
  for_each_chooser(insertion, round, range, [&](int64_t miss, int t, bool active) {
    active = active && insertion.is_pending(miss);
    if (__any_sync(simt::kFullMask, active)) choose_bucket(insertion, miss, t, active);
  });
}

// Four blocks per multiprocessor: for more, the compiler would spill registers.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads, 4)
    hash_serve_kernel(Insertion insertion, int round) {
  __shared__ int range[2];
  for_each_chooser(insertion, round, range, [&](int64_t miss, int t, bool active) {
    serve_buckets(insertion, miss, t, active, round);
  });
}

// Run the remaining rounds of one table in one block until no key is pending. Keys before `low`,
// the first that was pending one round ago, are skipped. Neighbouring keys go to different warps.
[[maybe_unused]] static __global__ void __launch_bounds__(kFinishThreads)
    hash_finish_kernel(Insertion insertion, int first_round) {
  __shared__ int low, next_low;
  constexpr int kWarps = kFinishThreads / kSlots;
  const auto self = static_cast<int>(threadIdx.x / simt::kWarp) + lane_in_warp() * kWarps;
  const int64_t* offsets = insertion.misses.offsets;
  for (int t = static_cast<int>(blockIdx.x); t < insertion.index.num_tables;
       t += static_cast<int>(gridDim.x)) {
    const int64_t first = offsets[t], last = offsets[t + 1];
    const int64_t buckets = insertion.index.field(t, kBuckets);
    const bool is_done = insertion.left_over[t] < first_round - 1 &&
                         choosers(buckets, first_round - 1) >= last - first;
    if (threadIdx.x == 0) low = static_cast<int>(is_done ? last : first);
    __syncthreads();
    for (int round = first_round; low < last; ++round) {
      const int64_t begin = low, choose = choosers(buckets, round);
      const int64_t end = choose < last - first ? first + choose : last;
      if (threadIdx.x == 0) next_low = static_cast<int>(end);
      __syncthreads();
      for (int64_t tile = begin; tile < end; tile += kFinishThreads) {
        const int64_t miss = tile + self;
        const bool active = miss < end && insertion.is_pending(miss);
        if (!__any_sync(simt::kFullMask, active)) continue;
        if (active) atomicMin(&next_low, static_cast<int>(miss));
        choose_bucket(insertion, miss, t, active);
      }
      __syncthreads();
      for (int64_t tile = begin; tile < end; tile += kFinishThreads) {
        serve_buckets(insertion, tile + self, t, tile + self < end, round);
      }
      if (threadIdx.x == 0) low = next_low;
      __syncthreads();
    }
    __syncthreads();
  }
}

// Count what became of the misses.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_outcome_kernel(Insertion insertion) {
  __shared__ int range[2];
  const DeviceIndex& index = insertion.index;
  TableTally inserted = counter_tally(index, kInserted), evicted = counter_tally(index, kEvicted);
  TableTally refused = counter_tally(index, kRefused);
  TableTally not_admitted = counter_tally(index, kNotAdmitted);
  TableTally sizes(index.tables + kSize, kHashTableColumns);
  const auto start = [&](int t) { return insertion.misses.offsets[t]; };
  const int64_t count = insertion.misses.offsets[index.num_tables];
  for_each_of(start, index.num_tables, count, range, [&](int64_t miss, int t) {
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
void launch_insert(Work& work, Insertion insertion, int64_t n, int64_t buckets) {
  if (n == 0) return;
  const auto& launcher = work.launcher();
  insertion.chains = work.template scratch<int32_t>(buckets);
  insertion.before = work.template scratch<int32_t>(n);
  insertion.wanted = work.template scratch<int32_t>(n);
  insertion.left_over = work.template scratch<int32_t>(insertion.index.num_tables);
  const unsigned blocks = key_blocks(launcher, n);
  launcher(hash_begin_kernel, key_blocks(launcher, n + buckets), kTileThreads, insertion, n,
           buckets);
  const int rounds = wide_rounds(n, buckets);
  for (int round = 0; round < rounds; ++round) {
    launcher(hash_choose_kernel, blocks, kTileThreads, insertion, round);
    launcher(hash_serve_kernel, blocks, kTileThreads, insertion, round);
  }
  launcher(hash_finish_kernel, blocks_for(insertion.index.num_tables, 1, launcher.blocks(2)),
           kFinishThreads, insertion, rounds);
  launcher(hash_outcome_kernel, blocks, kTileThreads, insertion);
}

// Write the slot of every position: that of its miss, where it has one.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_fill_slots_kernel(const int64_t* slots, const int64_t* inserted, int64_t num_inserted,
                           const int32_t* groups, int64_t n, int64_t* out) {
  for (int64_t i = simt::global_thread(); i < n; i += simt::threads_in_grid()) {
    const int32_t group = groups[i];
    out[i] = group >= 0 && group < num_inserted ? inserted[group] : slots[i];
  }
}

template <class Launcher>
void launch_fill_slots(const Launcher& launcher, const int64_t* slots, const int64_t* inserted,
                       int64_t num_inserted, const int32_t* groups, int64_t n, int64_t* out) {
  if (n == 0) return;
  launcher(hash_fill_slots_kernel, key_blocks(launcher, n), kTileThreads, slots, inserted,
           num_inserted, groups, n, out);
}

}  // namespace emb::cuda
