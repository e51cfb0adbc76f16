// Inserts missing keys and splits buckets on one CPU thread: the steps of a round of `hash_insert_`
// and of `hash_grow_` (hash_cpu.cpp). In a round every pending miss chooses a bucket, and all see
// the same state of the table. Then the choices are executed in the order of misses. A bucket
// assigns at most its share of slots (`slots_of_round`); a miss that comes too late stays pending.
// HashInsertKernels in args.h describes the functions and their arguments.

#include <cstring>

#include "hash/match.h"

namespace emb::EMB_ISA {
namespace {

constexpr int kKeysAhead = 8;  // keys between a prefetch and the read

// Reduce a set of slots of a bucket to those whose entry has the minimum of word number `word`.
// `alive` [kSlots] is the set: -1 for a member, else 0. `entries` are those of the bucket, `words`
// words each. The loops over all slots have no branch, so that they vectorise.
EMB_HD void keep_minimum(const int64_t* entries, int64_t words, int word, int64_t* alive) {
  int64_t values[kSlots], min_value = INT64_MAX;
  for (int way = 0; way < kSlots; ++way) {
    values[way] = entries[way * words + word];
    const int64_t value = alive[way] != 0 ? values[way] : INT64_MAX;
    min_value = value < min_value ? value : min_value;
  }
  for (int way = 0; way < kSlots; ++way) alive[way] &= -int64_t{values[way] == min_value};
}

// Return the entry of a full bucket that is evicted first: the one of the lowest rank among those
// that this batch does not use.
EMB_HD EvictionCandidate min_value(const HashInsertion& insertion, int64_t bucket) {
  if (insertion.order == Order::kNone) return {};
  const HashTable& table = insertion.table;
  const int64_t* entries = table.entry(bucket * kSlots);
  int64_t alive[kSlots], count = 0;
  for (int way = 0; way < kSlots; ++way) {
    alive[way] = -int64_t{entries[way * table.words + kStamp] < insertion.stamp};
    count -= alive[way];
  }
  if (count == 0) return {};
  const bool scored = has_scores(insertion.order);
  if (scored) keep_minimum(entries, table.words, kScore, alive);
  if (insertion.order != Order::kLfu) keep_minimum(entries, table.words, kStamp, alive);
  keep_minimum(entries, table.words, kKey, alive);
  int way = 0;
  while (alive[way] == 0) ++way;
  const int64_t* entry = entries + way * table.words;
  return {bucket * kSlots + way,
          entry_rank(insertion.order, entry[kKey], entry[kStamp], scored ? entry[kScore] : 0),
          static_cast<int>(count)};
}

// Return whether a miss may replace an entry, of which there may be none.
EMB_HD bool can_evict(const HashInsertion& insertion, int64_t miss,
                      const EvictionCandidate& candidate) {
  if (candidate.slot == kNoSlot) return false;
  if (!insertion.competes) return true;
  return !less(
      entry_rank(insertion.order, insertion.key(miss), insertion.stamp, insertion.score(miss)),
      candidate.rank);
}

// The two buckets of a key.
struct Buckets {
  int64_t first, second;
};

EMB_HD Buckets buckets_of(const HashInsertion& insertion, int64_t miss) {
  const uint64_t mixed = insertion.table.hash(insertion.key(miss));
  return {insertion.table.first(mixed), insertion.table.second(mixed)};
}

EMB_HD int free_slots(const HashTable& table, int64_t bucket) {
  return __builtin_popcount(match(table.tags + bucket * kSlots, kEmptyTag));
}

// The functions above for `states`, the states of all buckets, or for the table if that is null.
EMB_HD int free_slots(const HashInsertion& insertion, const BucketState* states, int64_t bucket) {
  return states == nullptr ? free_slots(insertion.table, bucket) : states[bucket].free;
}

EMB_HD EvictionCandidate min_value(const HashInsertion& insertion, const BucketState* states,
                                   int64_t bucket) {
  return states == nullptr ? min_value(insertion, bucket) : states[bucket].candidate;
}

void read_states(const HashInsertion& insertion, int64_t begin, int64_t end, BucketState* states) {
  for (int64_t bucket = begin; bucket < end; ++bucket) {
    BucketState state{free_slots(insertion.table, bucket), 0, {}};
    if (state.free == 0) state.candidate = min_value(insertion, bucket);
    state.share = slots_of_round(state.free == 0 ? state.candidate.count : state.free);
    states[bucket] = state;
  }
}

// Return the choice of a slot in a bucket with `room` usable slots: empty ones, or those of entries
// that may be evicted.
EMB_HD Choice choice_of(int64_t slot, Choice::Mode mode, int room) {
  return {slot, mode, room - slots_of_round(room)};
}

// Return the choice of a miss: the bucket with more empty slots (the first one if it has more than
// kPreferredFreeSlots, or as many), or in two full buckets the entry of the lowest rank.
EMB_HD Choice choose_one(const HashInsertion& insertion, const BucketState* states, int64_t miss) {
  const auto [first, second] = buckets_of(insertion, miss);
  const int in_first = free_slots(insertion, states, first);
  if (in_first > kPreferredFreeSlots) return choice_of(first * kSlots, Choice::kFree, in_first);
  const int in_second = free_slots(insertion, states, second);
  if (in_first + in_second > 0) {
    if (in_first >= in_second) return choice_of(first * kSlots, Choice::kFree, in_first);
    return choice_of(second * kSlots, Choice::kFree, in_second);
  }
  const EvictionCandidate a = min_value(insertion, states, first);
  const EvictionCandidate b = min_value(insertion, states, second);
  const bool take_second = b.slot != kNoSlot && (a.slot == kNoSlot || less(b.rank, a.rank));
  const EvictionCandidate& candidate = take_second ? b : a;
  if (!can_evict(insertion, miss, candidate)) return {0, Choice::kRefused, 0};
  return choice_of(candidate.slot, Choice::kEvict, candidate.count);
}

EMB_HD void prefetch_tags(const HashInsertion& insertion, int64_t miss) {
  const auto [first, second] = buckets_of(insertion, miss);
  __builtin_prefetch(insertion.table.tags + first * kSlots);
  __builtin_prefetch(insertion.table.tags + second * kSlots);
}

// Prefetch all entries of a bucket.
EMB_HD void prefetch_entries(const HashTable& table, int64_t bucket) {
  constexpr int64_t kLine = 64 / sizeof(int64_t);
  const int64_t* entries = table.entry(bucket * kSlots);
  for (int64_t w = 0; w < kSlots * table.words; w += kLine) __builtin_prefetch(entries + w);
}

// Prefetch all entries of both buckets if both are full.
EMB_HD void prefetch_if_full(const HashInsertion& insertion, int64_t miss) {
  const auto [first, second] = buckets_of(insertion, miss);
  if (free_slots(insertion.table, first) + free_slots(insertion.table, second) > 0) return;
  prefetch_entries(insertion.table, first);
  prefetch_entries(insertion.table, second);
}

void choose(const HashInsertion& insertion, const BucketState* states, const int64_t* pending,
            int64_t n, Choice* choices) {
  if (states != nullptr) {
    for (int64_t i = 0; i < n; ++i) choices[i] = choose_one(insertion, states, pending[i]);
    return;
  }
  for (int64_t i = -2 * kKeysAhead; i < n; ++i) {
    if (i + 2 * kKeysAhead < n) prefetch_tags(insertion, pending[i + 2 * kKeysAhead]);
    if (i + kKeysAhead >= 0 && i + kKeysAhead < n)
      prefetch_if_full(insertion, pending[i + kKeysAhead]);
    if (i >= 0) choices[i] = choose_one(insertion, nullptr, pending[i]);
  }
}

// Write the entry of a miss into a slot, with its results. For the status kEvicting, first copy the
// entry that is in the slot to `insertion.evicted`.
EMB_HD void fill(const HashInsertion& insertion, int64_t miss, int64_t slot, InsertStatus status) {
  const HashTable& table = insertion.table;
  int64_t* entry = table.entry(slot);
  if (status == InsertStatus::kEvicting) {
    int64_t* evicted = insertion.evicted + 3 * miss;
    evicted[kKey] = entry[kKey];
    evicted[kStamp] = entry[kStamp];
    evicted[kScore] = has_scores(insertion.order) ? entry[kScore] : 0;
  }
  table.tags[slot] = tag_of(table.hash(insertion.key(miss)));
  entry[kKey] = insertion.key(miss);
  entry[kStamp] = insertion.stamp;
  if (has_scores(insertion.order)) entry[kScore] = insertion.score(miss);
  insertion.slots[miss] = slot;
  insertion.status[miss] = static_cast<uint8_t>(status);
}

// Execute a choice that is not kRefused, unless the bucket has assigned its share of the round.
EMB_HD void commit_one(const HashInsertion& insertion, int64_t miss, const Choice& choice) {
  const HashTable& table = insertion.table;
  const int64_t bucket = choice.slot / kSlots;
  if (choice.mode == Choice::kFree) {
    const uint32_t empty = match(table.tags + bucket * kSlots, kEmptyTag);
    if (__builtin_popcount(empty) > choice.left) {
      fill(insertion, miss, bucket * kSlots + lowest(empty), InsertStatus::kNew);
    }
    return;
  }
  // If the chosen entry has not been replaced in this round, it is still the one of lowest rank.
  if (table.entry(choice.slot)[kStamp] < insertion.stamp) {
    return fill(insertion, miss, choice.slot, InsertStatus::kEvicting);
  }
  const EvictionCandidate candidate = min_value(insertion, bucket);
  if (candidate.count > choice.left && can_evict(insertion, miss, candidate)) {
    fill(insertion, miss, candidate.slot, InsertStatus::kEvicting);
  }
}

void commit(const HashInsertion& insertion, BucketState* states, const int64_t* pending, int64_t n,
            const Choice* choices, int64_t begin, int64_t end) {
  const auto is_mine = [&](const Choice& choice) {
    return choice.mode != Choice::kRefused && choice.slot >= begin * kSlots &&
           choice.slot < end * kSlots;
  };
  for (int64_t i = 0; i < n; ++i) {
    if (i + kKeysAhead < n && is_mine(choices[i + kKeysAhead])) {
      __builtin_prefetch(insertion.table.entry(choices[i + kKeysAhead].slot), 1);
      __builtin_prefetch(insertion.table.tags + choices[i + kKeysAhead].slot, 1);
    }
    if (!is_mine(choices[i])) continue;
    BucketState* state = states == nullptr ? nullptr : states + choices[i].slot / kSlots;
    if (state != nullptr && state->share == 0) continue;
    commit_one(insertion, pending[i], choices[i]);
    if (state != nullptr) state->share -= insertion.slots[pending[i]] != kNoSlot;
  }
}

// Return whether bucket `child` is the first one that is split off bucket `parent` when a table of
// `old` buckets grows; `old_mask` is address_mask(old).
EMB_HD bool is_first_child(int64_t child, int64_t parent, int64_t old, uint64_t old_mask) {
  const int64_t half = static_cast<int64_t>(old_mask >> 1) + 1;
  const bool undivided = parent < half && parent + half >= old && old > 1;
  return child == parent + (undivided ? half : static_cast<int64_t>(old_mask) + 1);
}

// Move an entry and its rows from slot `from` to the empty slot `to` of the same table.
EMB_HD void move_entry(const HashTable& table, int64_t from, int64_t to, const RowBuffer* buffers,
                       int num_buffers) {
  table.tags[to] = table.tags[from];
  table.tags[from] = kEmptyTag;
  for (int64_t w = 0; w < table.words; ++w) table.entry(to)[w] = table.entry(from)[w];
  for (int p = 0; p < num_buffers; ++p) {
    const int64_t bytes = buffers[p].bytes;
    std::memcpy(buffers[p].data + to * bytes, buffers[p].data + from * bytes, bytes);
  }
}

// Move the entries of a bucket that no longer belong there, now that the table `before` has become
// `table`.
EMB_HD void split_bucket(const HashTable& table, const HashTable& before, int64_t bucket,
                         const RowBuffer* buffers, int num_buffers) {
  uint32_t used = ~match(table.tags + bucket * kSlots, kEmptyTag);
  for (; used != 0; used &= used - 1) {
    const int64_t slot = bucket * kSlots + lowest(used);
    const uint64_t mixed = table.hash(table.entry(slot)[kKey]);
    const bool is_first = before.first(mixed) == bucket;
    const int64_t target = is_first ? table.first(mixed) : table.second(mixed);
    if (target == bucket) continue;
    const uint32_t empty = match(table.tags + target * kSlots, kEmptyTag);
    // New buckets are empty unless the caller erred; even then, never write beyond the bucket.
    if (empty == 0) continue;
    move_entry(table, slot, target * kSlots + lowest(empty), buffers, num_buffers);
  }
}

// A parent may have several children, also in other ranges. The call that has the first child moves
// all entries of the parent, so that no two threads work on one parent.
void split(const HashTable& table, int64_t old, const RowBuffer* buffers, int num_buffers,
           int64_t begin, int64_t end) {
  HashTable before = table;
  before.buckets = old;
  before.mask = address_mask(old);
  for (int64_t child = begin; child < end; ++child) {
    const int64_t parent = address(static_cast<uint64_t>(child), old, before.mask);
    if (is_first_child(child, parent, old, before.mask)) {
      split_bucket(table, before, parent, buffers, num_buffers);
    }
  }
}

}  // namespace

extern const HashInsertKernels kHashInsertKernels;
const HashInsertKernels kHashInsertKernels = {read_states, choose, commit, split};

}  // namespace emb::EMB_ISA
