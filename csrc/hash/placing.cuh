// What a warp does to place missing keys: they choose buckets, a lane a key, and then every bucket
// that was chosen takes whom it can. Those who chose a bucket are a chain in scratch memory, in no
// order; whoever founded the chain answers for the bucket. A lane alone gives empty slots to a few
// keys; where many came, or entries give way, the whole warp works on the bucket, a lane a slot.
#pragma once

#include "hash/device_index.cuh"

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

}  // namespace emb::cuda
