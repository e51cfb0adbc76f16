// Placing missing keys and splitting buckets on one CPU thread; see hash_place_ and hash_grow_.

#include <cstring>

#include "hash/match.h"

namespace emb::EMB_ISA {
namespace {

constexpr int kAhead = 8;  // keys between asking for memory and reading it

struct Victim {
  int64_t slot = kNoSlot;
  Rank rank = {};
};

// Narrows `alive` (-1 or 0, by way) to the entries in which a word is least. Loops over all ways
// without a branch, so that they become vector code.
EMB_HD void keep_least(const int64_t* entries, int64_t words, int word, int64_t* alive) {
  int64_t values[kSlots], least = INT64_MAX;
  for (int way = 0; way < kSlots; ++way) {
    values[way] = entries[way * words + word];
    const int64_t value = alive[way] != 0 ? values[way] : INT64_MAX;
    least = value < least ? value : least;
  }
  for (int way = 0; way < kSlots; ++way) alive[way] &= -int64_t{values[way] == least};
}

// The entry of a full bucket that gives way: the least of those that this batch has not used.
EMB_HD Victim least(const HashPlacing& placing, int64_t bucket) {
  if (placing.order == Order::kNone) return {};
  const HashTable& table = placing.table;
  const int64_t* entries = table.entry(bucket * kSlots);
  int64_t alive[kSlots], any = 0;
  for (int way = 0; way < kSlots; ++way) {
    alive[way] = -int64_t{entries[way * table.words + kStamp] < placing.stamp};
    any |= alive[way];
  }
  if (any == 0) return {};
  const bool scored = has_scores(placing.order);
  if (scored) keep_least(entries, table.words, kScore, alive);
  if (placing.order != Order::kLfu) keep_least(entries, table.words, kStamp, alive);
  keep_least(entries, table.words, kKey, alive);
  int way = 0;
  while (alive[way] == 0) ++way;
  const int64_t* entry = entries + way * table.words;
  return {bucket * kSlots + way,
          rank_of(placing.order, entry[kKey], entry[kStamp], scored ? entry[kScore] : 0)};
}

EMB_HD bool yields(const HashPlacing& placing, int64_t miss, const Victim& victim) {
  if (victim.slot == kNoSlot) return false;
  if (!placing.competes) return true;
  return !less(rank_of(placing.order, placing.key(miss), placing.stamp, placing.score(miss)),
               victim.rank);
}

struct Buckets {
  int64_t first, second;
};

EMB_HD Buckets buckets_of(const HashPlacing& placing, int64_t miss) {
  const uint64_t mixed = placing.table.hash(placing.key(miss));
  return {placing.table.first(mixed), placing.table.second(mixed)};
}

EMB_HD int free_slots(const HashTable& table, int64_t bucket) {
  return __builtin_popcount(match(table.tags + bucket * kSlots, kEmptyTag));
}

EMB_HD Choice choose_one(const HashPlacing& placing, int64_t miss) {
  const auto [first, second] = buckets_of(placing, miss);
  const int in_first = free_slots(placing.table, first);
  if (in_first > kPreferFirst) return {first * kSlots, Choice::kFree};
  const int in_second = free_slots(placing.table, second);
  if (in_first + in_second > 0) {
    return {(in_first >= in_second ? first : second) * kSlots, Choice::kFree};
  }
  const Victim a = least(placing, first), b = least(placing, second);
  const bool take_second = b.slot != kNoSlot && (a.slot == kNoSlot || less(b.rank, a.rank));
  const Victim& victim = take_second ? b : a;
  if (!yields(placing, miss, victim)) return {0, Choice::kRefused};
  return {victim.slot, Choice::kEvict};
}

EMB_HD void ask_for_tags(const HashPlacing& placing, int64_t miss) {
  const auto [first, second] = buckets_of(placing, miss);
  __builtin_prefetch(placing.table.tags + first * kSlots);
  __builtin_prefetch(placing.table.tags + second * kSlots);
}

EMB_HD void ask_for_entries(const HashTable& table, int64_t bucket) {
  constexpr int64_t kLine = 64 / sizeof(int64_t);
  const int64_t* entries = table.entry(bucket * kSlots);
  for (int64_t w = 0; w < kSlots * table.words; w += kLine) __builtin_prefetch(entries + w);
}

// All entries of both buckets are read where both are full.
EMB_HD void ask_if_full(const HashPlacing& placing, int64_t miss) {
  const auto [first, second] = buckets_of(placing, miss);
  if (free_slots(placing.table, first) + free_slots(placing.table, second) > 0) return;
  ask_for_entries(placing.table, first);
  ask_for_entries(placing.table, second);
}

void choose(const HashPlacing& placing, const int64_t* pending, int64_t n, Choice* choices) {
  for (int64_t i = -2 * kAhead; i < n; ++i) {
    if (i + 2 * kAhead < n) ask_for_tags(placing, pending[i + 2 * kAhead]);
    if (i + kAhead >= 0 && i + kAhead < n) ask_if_full(placing, pending[i + kAhead]);
    if (i >= 0) choices[i] = choose_one(placing, pending[i]);
  }
}

EMB_HD void fill(const HashPlacing& placing, int64_t miss, int64_t slot, PlaceStatus status) {
  const HashTable& table = placing.table;
  int64_t* entry = table.entry(slot);
  if (status == PlaceStatus::kEvicting) {
    int64_t* evicted = placing.evicted + 3 * miss;
    evicted[kKey] = entry[kKey];
    evicted[kStamp] = entry[kStamp];
    evicted[kScore] = has_scores(placing.order) ? entry[kScore] : 0;
  }
  table.tags[slot] = tag_of(table.hash(placing.key(miss)));
  entry[kKey] = placing.key(miss);
  entry[kStamp] = placing.stamp;
  if (has_scores(placing.order)) entry[kScore] = placing.score(miss);
  placing.slots[miss] = slot;
  placing.status[miss] = static_cast<uint8_t>(status);
}

EMB_HD void settle_one(const HashPlacing& placing, int64_t miss, const Choice& choice) {
  const HashTable& table = placing.table;
  const int64_t bucket = choice.slot / kSlots;
  if (choice.mode == Choice::kFree) {
    const uint32_t empty = match(table.tags + bucket * kSlots, kEmptyTag);
    if (empty != 0) fill(placing, miss, bucket * kSlots + lowest(empty), PlaceStatus::kNew);
    return;
  }
  // The least entry of the bucket stays it until it is replaced.
  if (table.entry(choice.slot)[kStamp] < placing.stamp) {
    return fill(placing, miss, choice.slot, PlaceStatus::kEvicting);
  }
  const Victim victim = least(placing, bucket);
  if (yields(placing, miss, victim)) fill(placing, miss, victim.slot, PlaceStatus::kEvicting);
}

void settle(const HashPlacing& placing, const int64_t* pending, int64_t n, const Choice* choices,
            int64_t begin, int64_t end) {
  const auto is_mine = [&](const Choice& choice) {
    return choice.mode != Choice::kRefused && choice.slot >= begin * kSlots &&
           choice.slot < end * kSlots;
  };
  for (int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n && is_mine(choices[i + kAhead])) {
      __builtin_prefetch(placing.table.entry(choices[i + kAhead].slot), 1);
      __builtin_prefetch(placing.table.tags + choices[i + kAhead].slot, 1);
    }
    if (is_mine(choices[i])) settle_one(placing, pending[i], choices[i]);
  }
}

// Whether bucket `child` is the first that was split off bucket `parent` of a table of `old`.
EMB_HD bool is_first_child(int64_t child, int64_t parent, int64_t old, uint64_t old_mask) {
  const int64_t half = static_cast<int64_t>(old_mask >> 1) + 1;
  const bool undivided = parent < half && parent + half >= old && old > 1;
  return child == parent + (undivided ? half : static_cast<int64_t>(old_mask) + 1);
}

EMB_HD void move_entry(const HashTable& table, int64_t from, int64_t to, const RowPlane* planes,
                       int num_planes) {
  table.tags[to] = table.tags[from];
  table.tags[from] = kEmptyTag;
  for (int64_t w = 0; w < table.words; ++w) table.entry(to)[w] = table.entry(from)[w];
  for (int p = 0; p < num_planes; ++p) {
    const int64_t bytes = planes[p].bytes;
    std::memcpy(planes[p].data + to * bytes, planes[p].data + from * bytes, bytes);
  }
}

EMB_HD void split_bucket(const HashTable& table, const HashTable& before, int64_t bucket,
                         const RowPlane* planes, int num_planes) {
  uint32_t used = ~match(table.tags + bucket * kSlots, kEmptyTag);
  for (; used != 0; used &= used - 1) {
    const int64_t slot = bucket * kSlots + lowest(used);
    const uint64_t mixed = table.hash(table.entry(slot)[kKey]);
    const bool is_first = before.first(mixed) == bucket;
    const int64_t target = is_first ? table.first(mixed) : table.second(mixed);
    if (target == bucket) continue;
    const uint32_t empty = match(table.tags + target * kSlots, kEmptyTag);
    if (empty == 0) continue;  // only if new buckets were not empty: the caller's, but no overrun
    move_entry(table, slot, target * kSlots + lowest(empty), planes, num_planes);
  }
}

void split(const HashTable& table, int64_t old, const RowPlane* planes, int num_planes,
           int64_t begin, int64_t end) {
  HashTable before = table;
  before.buckets = old;
  before.mask = address_mask(old);
  for (int64_t child = begin; child < end; ++child) {
    const int64_t parent = address(static_cast<uint64_t>(child), old, before.mask);
    if (is_first_child(child, parent, old, before.mask)) {
      split_bucket(table, before, parent, planes, num_planes);
    }
  }
}

}  // namespace

extern const HashPlaceKernels kHashPlaceKernels;
const HashPlaceKernels kHashPlaceKernels = {choose, settle, split};

}  // namespace emb::EMB_ISA
