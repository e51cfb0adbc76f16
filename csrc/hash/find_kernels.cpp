// Finds keys on one CPU thread; HashFindKernels in args.h describes `find` and `refresh`. Most
// searches read two cache lines at unpredictable addresses: the tags of a bucket, and an entry. To
// hide the latency of these reads, each key is processed in four steps, and many other keys are
// processed between two steps of a key:
//   prefetch_tags  prefetches the tags of the first bucket,
//   probe_first    compares them and prefetches a candidate entry, or the tags of the second bucket
//                  if there is none,
//   probe_chosen   compares the tags of the chosen bucket and prefetches the candidate entry,
//   compare        compares the key with that entry.
// No step branches on its result. After the last step, a key is found, known to be missing, or
// *unresolved*. Unresolved keys are collected, and the rest of their search follows once per chunk
// of keys (resolve).
#include "hash/match.h"

namespace emb::EMB_ISA {
namespace {

// These sizes were chosen by hand; others were not measured.
constexpr int kChunkKeys = 64;  // keys per chunk, which are hashed together
// The number of keys by which a step follows prefetch_tags: while the latter processes the key at
// position i, the step processes the key at position i minus this number.
constexpr int kKeysToProbeFirst = 16;                           // of probe_first
constexpr int kKeysToProbeChosen = kKeysToProbeFirst + 24;      // of probe_chosen
constexpr int kKeysToCompare = kKeysToProbeFirst + kChunkKeys;  // of compare
// The number of keys whose state is kept: from the hash of the chunk of a key until the key is
// resolved, at most two chunks after `compare`.
constexpr int kRingKeys = 4 * kChunkKeys;

// The state of the keys in flight. The key at position i has the index ring_index(i). A *candidate*
// is a slot of a bucket whose tag is the tag of the key.
struct Probes {
  int64_t first_bucket[kRingKeys], second_bucket[kRingKeys];  // the two buckets of the key
  int64_t slot[kRingKeys];         // the lowest candidate of the chosen bucket, or any slot of it
  uint32_t candidates[kRingKeys];  // the candidates of the chosen bucket, a bit each
  uint8_t tag[kRingKeys];          // the tag of the key

  static int ring_index(int64_t i) { return static_cast<int>(i & (kRingKeys - 1)); }
};

// The positions of the keys that one iteration of find_all has compared with their lowest candidate
// without finding them, and that may be in another slot.
struct Unresolved {
  int64_t positions[kChunkKeys];
  int count = 0;
};

// Return the slot of the lowest bit of `candidates` in a bucket, its last slot if no bit is set.
EMB_HD int64_t lowest_slot(int64_t bucket, uint32_t candidates) {
  return bucket * kBucketSlots + lowest_bit(candidates | (uint32_t{1} << (kBucketSlots - 1)));
}

// Prefetch the tags of a bucket into the L1 cache, because they are read soon.
EMB_HD void prefetch_tags(const HashTable& table, int64_t bucket) {
  __builtin_prefetch(table.tags + bucket * kBucketSlots);
}

// Prefetch the entry in a slot if `wants_entry`, otherwise the tags of a bucket. The target is the
// L2 cache, because too many entries are in flight for L1. The choice uses bit operations, because
// the compiler would turn `?:` into a branch, and a misprediction takes as long as the remaining
// steps.
EMB_HD void prefetch_either(bool wants_entry, const HashTable& table, int64_t slot,
                            int64_t bucket) {
  const auto entry = reinterpret_cast<uintptr_t>(table.entry(slot));
  const auto tags = reinterpret_cast<uintptr_t>(table.tags + bucket * kBucketSlots);
  const uintptr_t chosen = tags ^ ((entry ^ tags) & -uintptr_t{wants_entry});
  __builtin_prefetch(reinterpret_cast<const void*>(chosen), 0, 2);
}

// Write the buckets and tags of the chunk of keys that begins at position `begin`, of n keys in
// all.
EMB_HD void hash_keys(const HashTable& table, const int64_t* ids, int64_t begin, int64_t n,
                      Probes* probes) {
  const int64_t buckets = table.num_buckets;
  const uint64_t mask = table.mask;
  const int size = static_cast<int>(n - begin < kChunkKeys ? n - begin : kChunkKeys);
  const int ring_begin = Probes::ring_index(begin);  // a chunk does not wrap around in the ring
  for (int i = 0; i < size; ++i) {
    const uint64_t full_hash = table.hash(ids[begin + i]);
    probes->first_bucket[ring_begin + i] = bucket_address(first_hash(full_hash), buckets, mask);
    probes->second_bucket[ring_begin + i] = bucket_address(second_hash(full_hash), buckets, mask);
    probes->tag[ring_begin + i] = tag_of(full_hash);
  }
}

// Choose the first bucket of a key if it has a candidate, otherwise the second bucket. Prefetch the
// candidate entry, or the tags of the second bucket.
EMB_HD void probe_first(const HashTable& table, int64_t position, Probes* probes) {
  const int i = Probes::ring_index(position);
  const uint32_t candidates =
      match_tags(table.tags + probes->first_bucket[i] * kBucketSlots, probes->tag[i]);
  const int64_t slot = lowest_slot(probes->first_bucket[i], candidates);
  const int64_t second = probes->second_bucket[i] * kBucketSlots;
  probes->slot[i] = second ^ ((slot ^ second) & -int64_t{candidates != 0});
  prefetch_either(candidates != 0, table, slot, probes->second_bucket[i]);
}

// Return the slot whose entry is read: `slot` if there are candidates, otherwise slot 0. Its entry
// is usually in the cache, and reading another entry would be a useless cache miss.
EMB_HD int64_t slot_to_read(int64_t slot, uint32_t candidates) {
  return slot & -int64_t{candidates != 0};
}

// Compare the tags of the chosen bucket and prefetch the entry of the lowest candidate. Most keys
// have chosen their first bucket, whose tags are still in the cache and are compared again. The
// last word of an entry is used only if hits are touched; a quarter of the entries of three words
// have it in another cache line than the first.
template <bool kTouches>
EMB_HD void probe_chosen(const HashTable& table, int64_t position, Probes* probes) {
  const int i = Probes::ring_index(position);
  const int64_t bucket = probes->slot[i] / kBucketSlots;
  probes->candidates[i] = match_tags(table.tags + bucket * kBucketSlots, probes->tag[i]);
  probes->slot[i] = lowest_slot(bucket, probes->candidates[i]);
  const int64_t* entry = table.entry(slot_to_read(probes->slot[i], probes->candidates[i]));
  __builtin_prefetch(entry, 0, 2);
  if (kTouches) __builtin_prefetch(entry + table.entry_words - 1, 0, 2);
}

// Return the slot of the lowest candidate if it has the key, else -1. If the result is -1, the key
// may still be in another candidate, or in the second bucket if the first was chosen. If one of
// these is possible, add the position to `unresolved`.
EMB_HD int64_t compare(const HashTable& table, int64_t position, int64_t key, const Probes& probes,
                       Unresolved* unresolved) {
  const int i = Probes::ring_index(position);
  const int64_t slot = probes.slot[i];
  const uint32_t candidates = probes.candidates[i];
  const int64_t* entry = table.entry(slot_to_read(slot, candidates));
  const bool is_miss = (static_cast<uint64_t>(entry[HashEntry::kKey] ^ key) |
                        static_cast<uint64_t>(candidates == 0)) != 0;
  const bool may_be_elsewhere =
      ((candidates & (candidates - 1)) |
       static_cast<uint32_t>(slot / kBucketSlots == probes.first_bucket[i])) != 0;
  unresolved->positions[unresolved->count & (kChunkKeys - 1)] = position;
  unresolved->count += static_cast<int>(is_miss) & static_cast<int>(may_be_elsewhere);
  return slot | -static_cast<int64_t>(is_miss);
}

// Empty the eviction queue of the bucket of a slot, because the rank of the entry in it falls.
EMB_HD void empty_queue(const HashTouch& touch, int64_t slot) {
  if (touch.queues == nullptr) return;
  __atomic_store_n(&touch.queues[slot / kBucketSlots].size, uint8_t{0}, __ATOMIC_RELAXED);
}

// Update the entry of a hit at a position. Other threads may update the same entry: all store the
// same stamp and assigned score, and counts add up in any order.
EMB_HD void touch_entry(const HashTouch& touch, int64_t slot, int64_t* entry, int64_t position) {
  __atomic_store_n(entry + HashEntry::kStamp, touch.stamp, __ATOMIC_RELAXED);
  if (!has_scores(touch.order)) return;
  if (!order_counts_uses(touch.order)) {
    if (__atomic_load_n(entry + HashEntry::kScore, __ATOMIC_RELAXED) > touch.batch_score) {
      empty_queue(touch, slot);
    }
    return __atomic_store_n(entry + HashEntry::kScore, touch.batch_score, __ATOMIC_RELAXED);
  }
  const int64_t count = touch.counts == nullptr ? 1 : touch.counts[position];
  if (count < 0) empty_queue(touch, slot);
  // The thread whose addition makes the sum wrap around sets it to the maximum afterwards.
  const int64_t old_uses = __atomic_fetch_add(entry + HashEntry::kScore, count, __ATOMIC_RELAXED);
  if (count_overflows(old_uses, count)) {
    __atomic_store_n(entry + HashEntry::kScore, INT64_MAX, __ATOMIC_RELAXED);
  }
}

// Prefetch the line that `resolve` reads first for each unresolved key.
EMB_HD void prefetch_unresolved(const HashTable& table, const Unresolved& unresolved,
                                const Probes& probes) {
  for (int k = 0; k < unresolved.count; ++k) {
    const int i = Probes::ring_index(unresolved.positions[k]);
    const uint32_t other_candidates = probes.candidates[i] & (probes.candidates[i] - 1);
    prefetch_either(other_candidates != 0, table,
                    lowest_slot(probes.slot[i] / kBucketSlots, other_candidates),
                    probes.second_bucket[i]);
  }
}

// Return the slot of an unresolved key, -1 if it has none: compare its other candidates, then
// search its second bucket if the first was chosen.
EMB_HD int64_t resolve(const HashTable& table, int64_t position, int64_t key,
                       const Probes& probes) {
  const int i = Probes::ring_index(position);
  const int64_t bucket = probes.slot[i] / kBucketSlots;
  const uint32_t other_candidates = probes.candidates[i] & (probes.candidates[i] - 1);
  const int64_t slot = find_in_candidates(table, bucket, other_candidates, key);
  if (slot != kNoSlot || bucket != probes.first_bucket[i]) return slot;
  return find_in_bucket(table, probes.second_bucket[i], probes.tag[i], key);
}

// Find keys, see HashFindKernels::find. kTouches must be true if `touch` is not null. Keys that are
// unresolved after a chunk are resolved after the next chunk, when the lines that they need have
// been prefetched.
template <bool kTouches>
int64_t find_all(const HashTable& table_, const int64_t* ids, int64_t n, const HashTouch* touch,
                 int64_t* slots) {
  const HashTable table = table_;  // a local copy, which no store through a pointer can change
  Probes probes;
  Unresolved unresolved[2];
  int64_t num_hits = 0;
  const auto record = [&](int64_t position, int64_t slot) {
    slots[position] = slot;
    num_hits += slot != kNoSlot;
    if (kTouches && slot != kNoSlot) touch_entry(*touch, slot, table.entry(slot), position);
  };
  const auto is_position = [&](int64_t position) { return position >= 0 && position < n; };
  for (int64_t begin = 0; begin < n + kKeysToCompare + kChunkKeys; begin += kChunkKeys) {
    Unresolved& current = unresolved[begin / kChunkKeys % 2];
    current.count = 0;
    if (begin < n) hash_keys(table, ids, begin, n, &probes);
    // Whether all steps of this iteration have keys to process, so that no position is checked.
    const bool has_all_keys = begin >= kKeysToCompare && begin + kChunkKeys <= n;
    for (int64_t i = begin; i < begin + kChunkKeys; ++i) {
      if (has_all_keys || is_position(i))
        prefetch_tags(table, probes.first_bucket[Probes::ring_index(i)]);
      if (has_all_keys || is_position(i - kKeysToProbeFirst))
        probe_first(table, i - kKeysToProbeFirst, &probes);
      if (has_all_keys || is_position(i - kKeysToProbeChosen))
        probe_chosen<kTouches>(table, i - kKeysToProbeChosen, &probes);
      const int64_t compared = i - kKeysToCompare;
      if (has_all_keys || is_position(compared))
        record(compared, compare(table, compared, ids[compared], probes, &current));
    }
    prefetch_unresolved(table, current, probes);
    const Unresolved& previous = unresolved[(begin / kChunkKeys + 1) % 2];
    for (int k = 0; k < previous.count; ++k) {
      const int64_t position = previous.positions[k];
      record(position, resolve(table, position, ids[position], probes));
    }
  }
  return num_hits;
}

int64_t find(const HashTable& table, const int64_t* ids, int64_t n, const HashTouch* touch,
             int64_t* slots) {
  return touch == nullptr ? find_all<false>(table, ids, n, touch, slots)
                          : find_all<true>(table, ids, n, touch, slots);
}

void refresh(const HashTable& table, const int64_t* ids, int64_t n, int64_t* slots) {
  for (int64_t i = 0; i < n; ++i) {
    if (slots[i] < 0) continue;
    const bool is_in_slot = slots[i] < table.num_buckets * kBucketSlots &&
                            table.tags[slots[i]] != kEmptyTag &&
                            table.entry(slots[i])[HashEntry::kKey] == ids[i];
    if (!is_in_slot) slots[i] = find_slot(table, ids[i]);
  }
}

}  // namespace

extern const HashFindKernels kHashFindKernels;
const HashFindKernels kHashFindKernels = {find, refresh};

}  // namespace emb::EMB_ISA
