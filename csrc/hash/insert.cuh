// What a warp does to place missing keys: they choose buckets, a lane a key, and then every bucket
// that was chosen takes whom it can. Those who chose a bucket are a chain in scratch memory, in no
// order; whoever founded the chain answers for the bucket. A lane alone gives empty slots to a few
// keys; where many came, or entries give way, the whole warp works on the bucket, a lane a slot.
#pragma once

#include "hash/device_index.cuh"
#include "hash/misses.cuh"

namespace emb::cuda {

// How far the rounds of a table have come, as places in the queue of its admitted misses: those
// before `end` may choose, and `choosers` of them still had no answer when the round began. `done`
// get theirs in the round.
struct PlaceProgress {
  int64_t end, choosers, done;
};

struct Placing {
  DeviceIndex index;
  Order order;
  bool competes;
  const int64_t *ids, *first, *totals, *given;  // given: by table, null for 0
  const int32_t* queue;  // the admitted misses, table by table; null where all are
  const int64_t* ends;   // of the queue by table
  // By miss.
  int64_t* slots;
  uint8_t* status;
  int64_t* evicted;
  // Scratch: the last one of the chain of every bucket, -1 for none; by place in the queue the one
  // before in the chain, -1 for its founder, and the bucket.
  int32_t *chains, *before, *wanted;
  PlaceProgress* progress;

  EMB_DEVICE int64_t miss(int64_t place) const { return queue == nullptr ? place : queue[place]; }
  EMB_DEVICE bool is_pending(int64_t place) const {
    return status[miss(place)] == static_cast<uint8_t>(PlaceStatus::kMiss);
  }
};

// A missing key as the entry it would be.
struct Newcomer {
  int64_t miss, key, stamp, score;
};

EMB_DEVICE Newcomer newcomer(const Placing& placing, int64_t place, int t) {
  const int64_t miss = placing.miss(place);
  const int64_t given = placing.given == nullptr ? 0 : placing.given[t];
  return {miss, placing.ids[placing.first[miss]], *placing.index.clock,
          counts_uses(placing.order) ? placing.totals[miss] : given};
}

// An entry that may give way, and its way in the bucket; -1 for none.
struct Victim {
  Rank rank;
  int way;
};

// The entry of a full bucket that is this lane's.
EMB_DEVICE Victim lane_entry(const Placing& placing, int64_t bucket, int64_t stamp) {
  const int64_t slot = bucket * kSlots + lane_in_warp();
  const int64_t* entry = placing.index.entries + slot * placing.index.words;
  const int64_t score = has_scores(placing.order) ? entry[kScore] : 0;
  const bool yields = placing.order != Order::kNone && entry[kStamp] < stamp;
  return {rank_of(placing.order, entry[kKey], entry[kStamp], score), yields ? lane_in_warp() : -1};
}

EMB_DEVICE bool comes_before(const Victim& a, const Victim& b) {
  return a.way >= 0 && (b.way < 0 || less(a.rank, b.rank));
}

// The least of all lanes, in every lane.
EMB_DEVICE Victim least_of_warp(Victim victim) {
#pragma unroll
  for (int offset = kSlots / 2; offset > 0; offset /= 2) {
    Victim other;
    other.rank.score = __shfl_xor_sync(simt::kFullMask, victim.rank.score, offset);
    other.rank.stamp = __shfl_xor_sync(simt::kFullMask, victim.rank.stamp, offset);
    other.rank.key = __shfl_xor_sync(simt::kFullMask, victim.rank.key, offset);
    other.way = __shfl_xor_sync(simt::kFullMask, victim.way, offset);
    if (comes_before(other, victim)) victim = other;
  }
  return victim;
}

EMB_DEVICE bool gives_way(const Placing& placing, const Victim& victim, const Newcomer& to) {
  if (victim.way < 0 || !placing.competes) return victim.way >= 0;
  return !less(rank_of(placing.order, to.key, to.stamp, to.score), victim.rank);
}

// Of two full buckets the one whose victim gives way, -1 for neither. The whole warp calls it for
// the key of one lane, which alone brings `to` and gets an answer that counts.
EMB_DEVICE int64_t full_choice(const Placing& placing, int64_t first, int64_t second,
                               const Newcomer& to) {
  const int64_t stamp = *placing.index.clock;
  Victim a = least_of_warp(lane_entry(placing, first, stamp));
  const Victim b = least_of_warp(lane_entry(placing, second, stamp));
  const bool take_second = comes_before(b, a);
  if (take_second) a = b;
  if (!gives_way(placing, a, to)) return -1;
  return take_second ? second : first;
}

EMB_DEVICE int free_slots(const Placing& placing, int64_t bucket) {
  return __popc(match_tags(placing.index.tags + bucket * kSlots, kEmptyTag));
}

// The whole warp calls it, each lane for its own key if it is active. Whether the lane's key was
// refused; else it is in the chain of a bucket now.
EMB_DEVICE bool choose_bucket(const Placing& placing, int64_t place, int t, bool active) {
  Newcomer own{};
  int64_t first = 0, second = 0, wanted = -1;  // buckets of all tables
  if (active) {
    own = newcomer(placing, place, t);
    const HashTable table = placing.index.table(t);
    const int64_t base = placing.index.field(t, kFirstBucket);
    const uint64_t mixed = table.hash(own.key);
    first = base + table.first(mixed);
    second = base + table.second(mixed);
    const int in_first = free_slots(placing, first);
    const int in_second = in_first > kPreferFirst ? 0 : free_slots(placing, second);
    if (in_first + in_second > 0) wanted = in_first >= in_second ? first : second;
  }
  unsigned left = __ballot_sync(simt::kFullMask, active && wanted < 0);
  for (; left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const int64_t found = full_choice(placing, __shfl_sync(simt::kFullMask, first, lane),
                                      __shfl_sync(simt::kFullMask, second, lane), own);
    if (lane_in_warp() == lane) wanted = found;
  }
  if (!active) return false;
  if (wanted < 0) {
    placing.status[own.miss] = static_cast<uint8_t>(PlaceStatus::kRefused);
    return true;
  }
  placing.wanted[place] = static_cast<int32_t>(wanted);
  placing.before[place] = atomicExch(placing.chains + wanted, static_cast<int32_t>(place));
  return false;
}

// The first 32 members of a chain that come after `last` in the queue, one a lane, in order;
// INT32_MAX in lanes beyond them.
EMB_DEVICE int32_t next_members(const Placing& placing, int64_t bucket, int32_t last) {
  int32_t mine = INT32_MAX;
  for (int32_t member = placing.chains[bucket]; member >= 0; member = placing.before[member]) {
    if (member <= last) continue;
    const int lesser = __popc(__ballot_sync(simt::kFullMask, mine < member));
    const int32_t previous = __shfl_up_sync(simt::kFullMask, mine, 1u);
    if (lane_in_warp() > lesser) mine = previous;
    if (lane_in_warp() == lesser) mine = member;
  }
  return mine;
}

EMB_DEVICE void write_entry(const Placing& placing, int t, int64_t bucket, int way,
                            const Newcomer& of, PlaceStatus status) {
  const int64_t slot = bucket * kSlots + way;
  int64_t* entry = placing.index.entries + slot * placing.index.words;
  if (status == PlaceStatus::kEvicting) {
    int64_t* evicted = placing.evicted + 3 * of.miss;
    evicted[kKey] = entry[kKey];
    evicted[kStamp] = entry[kStamp];
    evicted[kScore] = has_scores(placing.order) ? entry[kScore] : 0;
  }
  placing.index.tags[slot] = tag_of(placing.index.table(t).hash(of.key));
  entry[kKey] = of.key;
  entry[kStamp] = of.stamp;
  if (has_scores(placing.order)) entry[kScore] = of.score;
  placing.slots[of.miss] = slot - placing.index.field(t, kFirstBucket) * kSlots;
  placing.status[of.miss] = static_cast<uint8_t>(status);
}

// The members of a chain, which come 32 at a time, take the empty slots of a bucket in order.
// Returns how many did.
EMB_DEVICE int fill_bucket(const Placing& placing, int t, int64_t bucket, uint32_t empty) {
  int placed = 0;
  for (int32_t last = -1; empty != 0;) {
    const int32_t mine = next_members(placing, bucket, last);
    const int members = __popc(__ballot_sync(simt::kFullMask, mine != INT32_MAX));
    int way = -1;  // the lane-th empty one
    for (int k = 0; k < members && empty != 0; ++k, empty &= empty - 1) {
      if (k == lane_in_warp()) way = __ffs(static_cast<int>(empty)) - 1;
      ++placed;
    }
    if (way >= 0) {
      write_entry(placing, t, bucket, way, newcomer(placing, mine, t), PlaceStatus::kNew);
    }
    if (members < kSlots) break;
    last = __shfl_sync(simt::kFullMask, mine, kSlots - 1);
  }
  return placed;
}

// The same by one lane for a chain of up to kFew members; -1, and nothing done, for longer ones.
EMB_DEVICE int fill_by_lane(const Placing& placing, int t, int64_t bucket, uint32_t empty) {
  constexpr int kFew = 4;
  int32_t members[kFew] = {INT32_MAX, INT32_MAX, INT32_MAX, INT32_MAX};  // in order
  for (int32_t next = placing.chains[bucket]; next >= 0; next = placing.before[next]) {
    int32_t member = next;
#pragma unroll
    for (int k = 0; k < kFew; ++k) {
      const int32_t greater = member < members[k] ? members[k] : member;
      members[k] = member < members[k] ? member : members[k];
      member = greater;
    }
    if (member != INT32_MAX) return -1;
  }
  int placed = 0;
#pragma unroll
  for (int k = 0; k < kFew; ++k) {
    if (members[k] == INT32_MAX || empty == 0) break;
    const int way = __ffs(static_cast<int>(empty)) - 1;
    write_entry(placing, t, bucket, way, newcomer(placing, members[k], t), PlaceStatus::kNew);
    empty &= empty - 1;
    ++placed;
  }
  return placed;
}

// The members replace the entries of a full bucket in order, the least one first.
EMB_DEVICE int replace_in_bucket(const Placing& placing, int t, int64_t bucket) {
  Victim own = lane_entry(placing, bucket, *placing.index.clock);
  Victim victim = least_of_warp(own);
  int placed = 0;
  for (int32_t last = -1; victim.way >= 0;) {
    const int32_t mine = next_members(placing, bucket, last);
    const int members = __popc(__ballot_sync(simt::kFullMask, mine != INT32_MAX));
    for (int k = 0; k < members && victim.way >= 0; ++k) {
      const Newcomer to = newcomer(placing, __shfl_sync(simt::kFullMask, mine, k), t);
      if (!gives_way(placing, victim, to)) continue;
      if (lane_in_warp() == victim.way) {
        write_entry(placing, t, bucket, victim.way, to, PlaceStatus::kEvicting);
        own.way = -1;  // is of this batch now
      }
      ++placed;
      victim = least_of_warp(own);
    }
    if (members < kSlots) break;
    last = __shfl_sync(simt::kFullMask, mine, kSlots - 1);
  }
  return placed;
}

// The whole warp calls it, for the chains that its lanes founded. Keys that found a place are added
// to `count`.
EMB_DEVICE void settle_buckets(const Placing& placing, int64_t place, int t, bool active,
                               TableTally* count) {
  const bool founds = active && placing.is_pending(place) && placing.before[place] < 0;
  const int32_t wanted = founds ? placing.wanted[place] : 0;
  int placed = -1;
  if (founds) {
    const uint32_t empty = match_tags(placing.index.tags + int64_t{wanted} * kSlots, kEmptyTag);
    if (empty != 0) placed = fill_by_lane(placing, t, wanted, empty);
    if (placed >= 0) placing.chains[wanted] = -1;
  }
  unsigned left = __ballot_sync(simt::kFullMask, founds && placed < 0);
  count->add_each(t, placed > 0 ? placed : 0);
  for (; left != 0; left &= left - 1) {
    const int lane = __ffs(static_cast<int>(left)) - 1;
    const int64_t bucket = __shfl_sync(simt::kFullMask, wanted, lane);
    const int table = __shfl_sync(simt::kFullMask, t, lane);
    const uint32_t empty = match_tags(placing.index.tags + bucket * kSlots, kEmptyTag);
    __syncwarp();  // tags were read by all before any lane writes one
    count->add_all(table, empty != 0 ? fill_bucket(placing, table, bucket, empty)
                                     : replace_in_bucket(placing, table, bucket));
    __syncwarp();
    if (lane_in_warp() == 0) placing.chains[bucket] = -1;
  }
}

// Begins the next round of a table.
EMB_DEVICE void next_round(const Placing& placing, int t, PlaceProgress* progress) {
  const int64_t size = round_size(placing.index.field(t, kBuckets));
  const int64_t left = progress->choosers - progress->done;
  const int64_t before = progress->end, wanted = before + size - left;
  const int64_t end = wanted < placing.ends[t + 1] ? wanted : placing.ends[t + 1];
  *progress = {end, left + end - before, 0};
}

// `hash_place_` on the GPU. Nothing waits for the device, which alone knows how many rounds there
// are: the first ones, in which almost all keys of a large table find their place, are launches of
// all multiprocessors, as many as the host deems worth it; a last kernel, a block a table, plays on
// until no key is pending.

inline constexpr int kFinishThreads = 512;

// The misses of a batch by table, and which of them are admitted; null for all.
struct MissQueue {
  const int64_t* ends;
  const bool* admitted;
};

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_admit_kernel(MissQueue misses, int num_tables, SortBuffers<uint32_t> sort) {
  __shared__ int range[2];
  const int64_t count = misses.ends[num_tables];
  const auto start = [&](int t) { return misses.ends[t]; };
  for_each_of(start, num_tables, sort.n, range, [&](int64_t miss, int t) {
    if (miss >= sort.n) return;
    const bool queues = miss < count && t >= 0 && misses.admitted[miss];
    sort.keys[miss] = queues ? static_cast<uint32_t>(t) : sort.limit;
    sort.positions[miss] = static_cast<int32_t>(miss);
  });
}

// The answers before there are any, and no chains.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_begin_kernel(Placing placing, MissQueue misses, int64_t n, int64_t buckets) {
  const int num_tables = placing.index.num_tables;
  const int64_t step = simt::threads_in_grid(), count = misses.ends[num_tables];
  for (int64_t i = simt::global_thread(); i < buckets; i += step) placing.chains[i] = -1;
  for (int64_t i = simt::global_thread(); i < n; i += step) {
    const bool kept_out = i < count && misses.admitted != nullptr && !misses.admitted[i];
    placing.slots[i] = kNoSlot;
    placing.status[i] =
        static_cast<uint8_t>(kept_out ? PlaceStatus::kNotAdmitted : PlaceStatus::kMiss);
    for (int w = 0; w < 3; ++w) placing.evicted[3 * i + w] = 0;
  }
  for (int64_t t = simt::global_thread(); t < num_tables; t += step) {
    placing.progress[t] = {placing.ends[t], 0, 0};
    next_round(placing, static_cast<int>(t), placing.progress + t);
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_next_round_kernel(Placing placing) {
  for (int64_t t = simt::global_thread(); t < placing.index.num_tables;
       t += simt::threads_in_grid()) {
    next_round(placing, static_cast<int>(t), placing.progress + t);
  }
}

EMB_DEVICE TableTally done_tally(const Placing& placing) {
  return {&placing.progress->done, sizeof(PlaceProgress) / sizeof(int64_t)};
}

// Calls `body(place, table, active)` for the queue, active where a key may choose in this round. A
// bucket may keep a warp busy for the key of one lane, so a short queue is dealt out to all warps,
// a few places each.
template <class Body>
EMB_DEVICE void for_each_chooser(const Placing& placing, int* shared, const Body& body) {
  const int num_tables = placing.index.num_tables;
  const auto start = [&](int t) { return placing.ends[t]; };
  const int64_t queued = placing.ends[num_tables], warps = simt::warps_in_grid();
  const int64_t share = (queued + warps - 1) / warps;
  const int lanes = share < kSlots ? static_cast<int>(share) : kSlots;
  const int64_t tile_size = int64_t{lanes} * (kTileThreads / kSlots);
  const int64_t own = threadIdx.x / simt::kWarp * lanes + lane_in_warp();
  for (int64_t tile = blockIdx.x * tile_size; tile < queued; tile += gridDim.x * tile_size) {
    const int64_t end = tile + tile_size < queued ? tile + tile_size : queued, place = tile + own;
    const TileSearch search(start, num_tables, tile, end, shared);
    const int t = lane_in_warp() < lanes && place < end ? search.find(start, place) : -1;
    body(place, t, t >= 0 && place < placing.progress[t].end);
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_choose_kernel(Placing placing) {
  __shared__ int range[2];
  TableTally refused = done_tally(placing);
  for_each_chooser(placing, range, [&](int64_t place, int t, bool active) {
    active = active && placing.is_pending(place);
    if (!__any_sync(simt::kFullMask, active)) return;
    refused.add(t, choose_bucket(placing, place, t, active));
  });
  refused.flush();
}

// Four blocks a multiprocessor: for more, the compiler would keep registers in memory.
[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads, 4)
    hash_settle_kernel(Placing placing) {
  __shared__ int range[2];
  TableTally placed = done_tally(placing);
  for_each_chooser(placing, range, [&](int64_t place, int t, bool active) {
    settle_buckets(placing, place, t, active, &placed);
  });
  placed.flush();
}

// Rounds of one table by one block, until none is pending. Keys before the first that was pending
// a round ago, at `low`, are not looked at again. Neighbours go to different warps.
[[maybe_unused]] static __global__ void __launch_bounds__(kFinishThreads)
    hash_finish_kernel(Placing placing) {
  __shared__ int low, next_low;
  constexpr int kWarps = kFinishThreads / kSlots;
  const auto own = static_cast<int>(threadIdx.x / simt::kWarp) + lane_in_warp() * kWarps;
  for (int t = static_cast<int>(blockIdx.x); t < placing.index.num_tables;
       t += static_cast<int>(gridDim.x)) {
    PlaceProgress* progress = placing.progress + t;
    TableTally done = done_tally(placing);
    if (threadIdx.x == 0) low = static_cast<int>(placing.ends[t]);
    __syncthreads();
    while (progress->choosers > 0) {
      const int64_t begin = low, end = progress->end;
      if (threadIdx.x == 0) next_low = static_cast<int>(end);
      __syncthreads();
      for (int64_t tile = begin; tile < end; tile += kFinishThreads) {
        const int64_t place = tile + own;
        const bool active = place < end && placing.is_pending(place);
        if (!__any_sync(simt::kFullMask, active)) continue;
        if (active) atomicMin(&next_low, static_cast<int>(place));
        done.add(t, choose_bucket(placing, place, t, active));
      }
      __syncthreads();
      for (int64_t tile = begin; tile < end; tile += kFinishThreads) {
        settle_buckets(placing, tile + own, t, tile + own < end, &done);
      }
      done.flush();
      __syncthreads();
      if (threadIdx.x == 0) {
        low = next_low;
        next_round(placing, t, progress);
      }
      __syncthreads();
    }
    __syncthreads();
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kTileThreads)
    hash_outcome_kernel(Placing placing, MissQueue misses) {
  __shared__ int range[2];
  const DeviceIndex& index = placing.index;
  TableTally inserted = counter_tally(index, kInserted), evicted = counter_tally(index, kEvicted);
  TableTally refused = counter_tally(index, kRefused);
  TableTally not_admitted = counter_tally(index, kNotAdmitted);
  TableTally sizes(index.tables + kSize, kTableFields);
  const auto start = [&](int t) { return misses.ends[t]; };
  const int64_t count = misses.ends[index.num_tables];
  for_each_of(start, index.num_tables, count, range, [&](int64_t miss, int t) {
    const auto status = t < 0 ? PlaceStatus::kMiss : static_cast<PlaceStatus>(placing.status[miss]);
    inserted.add(t, status == PlaceStatus::kNew || status == PlaceStatus::kEvicting);
    evicted.add(t, status == PlaceStatus::kEvicting);
    refused.add(t, status == PlaceStatus::kRefused);
    not_admitted.add(t, status == PlaceStatus::kNotAdmitted);
    sizes.add(t, status == PlaceStatus::kNew);
  });
  for (TableTally* tally : {&inserted, &evicted, &refused, &not_admitted, &sizes}) tally->flush();
}

// Rounds that all multiprocessors play, for n keys and tables of so many buckets altogether: as
// many as it takes if all tables are full-grown and the keys spread over them, and one for those
// who found their bucket taken.
inline int wide_rounds(int64_t n, int64_t buckets) {
  const int64_t rounds = n / round_size(buckets) + 2;
  return static_cast<int>(rounds < 16 ? rounds : 16);
}

// `placing` without its scratch.
template <class Work>
void launch_place(Work& work, Placing placing, const MissQueue& misses, int64_t n,
                  int64_t buckets) {
  if (n == 0) return;
  const auto& launcher = work.launcher();
  const int num_tables = placing.index.num_tables;
  placing.ends = misses.ends;
  if (misses.admitted != nullptr) {
    const SortBuffers<uint32_t> sort = sort_scratch(work, n, num_tables);
    auto* ends = work.template scratch<int64_t>(num_tables + 1);
    launcher(hash_admit_kernel, key_blocks(launcher, n), kTileThreads, misses, num_tables, sort);
    launch_ends(work, sort, ends);
    placing.queue = sort.sorted_positions;
    placing.ends = ends;
  }
  placing.chains = work.template scratch<int32_t>(buckets);
  placing.before = work.template scratch<int32_t>(n);
  placing.wanted = work.template scratch<int32_t>(n);
  placing.progress = work.template scratch<PlaceProgress>(num_tables);
  const unsigned of_tables = blocks_for(num_tables, kTileThreads, launcher.blocks(1));
  launcher(hash_begin_kernel, key_blocks(launcher, n + buckets), kTileThreads, placing, misses, n,
           buckets);
  for (int round = wide_rounds(n, buckets); round > 0; --round) {
    launcher(hash_choose_kernel, key_blocks(launcher, n), kTileThreads, placing);
    launcher(hash_settle_kernel, key_blocks(launcher, n), kTileThreads, placing);
    launcher(hash_next_round_kernel, of_tables, kTileThreads, placing);
  }
  launcher(hash_finish_kernel, blocks_for(num_tables, 1, launcher.blocks(2)), kFinishThreads,
           placing);
  launcher(hash_outcome_kernel, key_blocks(launcher, n), kTileThreads, placing, misses);
}

}  // namespace emb::cuda
