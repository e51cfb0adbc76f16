// Inserts missing keys and splits buckets on one CPU thread. HashInsertKernels in args.h describes
// the three functions, `choose`, `commit` and `split`, and their arguments.
//
// Keys are inserted in rounds (hash_cpu.cpp). In a round every pending miss chooses a bucket or an
// entry, and all misses see the same state of the table. Then the choices are executed in the order
// of misses. A bucket assigns at most slots_per_round slots; the later misses that chose it stay
// pending.
//
// The eviction queue of a full bucket (args.h) shows which entry the bucket evicts first: usually
// the entry of the first element. If that entry was used after its element was added, the element
// moves to the index that its present rank requires. If the queue is empty or its elements do not
// decide, all entries of the bucket are sorted again. With any valid queue the result is the same:
// the entry of the lowest rank that the batch does not use.
#include <cstring>

#include "hash/match.h"

namespace emb::EMB_ISA {
namespace {

// The number of keys that are hashed after a key before a step of its choice (ChoosingBucket), so
// that memory has time to answer a prefetch. Other numbers were not measured.
constexpr int kKeysToPrefetchElement = 10;
constexpr int kKeysToReadElement = kKeysToPrefetchElement + 10;
constexpr int kKeysToFinish = kKeysToReadElement + 8;
constexpr int kRingKeys = 32;  // keys whose buckets are kept, more than kKeysToFinish
// The number of choices that are executed between a prefetch for a choice and its execution:
// kChoicesAhead for the chosen entry, kChoicesToNeighbours for the entries that `add_element`
// compares.
constexpr int kChoicesAhead = 12, kChoicesToNeighbours = 6;
// Maximum number of elements, from the front of a queue, with which a new element is compared.
constexpr int kMaxComparisons = 8;
constexpr int kWayBits = 5;  // bits of a way
constexpr int kWayMask = kBucketSlots - 1;

// Return the rank of the entry with the words `entry`.
EMB_HD EntryRank rank_of(HashOrder order, const int64_t* entry) {
  return entry_rank(order, entry[HashEntry::kKey], entry[HashEntry::kStamp],
                    has_scores(order) ? entry[HashEntry::kScore] : 0);
}

// A bucket and an eviction queue for it, which this thread may use (see EvictionQueue). It is the
// argument of most functions on queues in this file.
struct QueuedBucket {
  const HashInsertion& insertion;
  EvictionQueue* queue;
  int64_t first_slot;      // number of the bucket's first slot in the table
  const int64_t* entries;  // [kBucketSlots, entry_words], the entries of the bucket

  QueuedBucket(const HashInsertion& insertion_, int64_t bucket, EvictionQueue* queue_)
      : insertion(insertion_),
        queue(queue_),
        first_slot(bucket * kBucketSlots),
        entries(insertion_.table.entry(first_slot)) {}

  // Return the entry of an element, and its present rank.
  const int64_t* entry(uint8_t element) const {
    return entries + (element & kWayMask) * insertion.table.entry_words;
  }
  EntryRank rank(uint8_t element) const { return rank_of(insertion.order, entry(element)); }
  // Return whether the stamp of an entry shows that it still has the known rank of its element. If
  // not, its rank may have risen.
  bool is_current(uint8_t element) const {
    const int code = element >> kWayBits;
    const int64_t age = code == 0 || code > kAgeCodes ? 0 : queue->ages[code - 1];
    return entry(element)[HashEntry::kStamp] <= queue->sorted_at + age;
  }
};

// Sort all entries of a bucket into its queue. For LRU the queue keeps only the entries that the
// batch does not use.
//
// The first sort compares 31 bits per entry, without branches. The *distance* of an entry is the
// first word that the order compares, minus the minimum of these words, clipped to 26 bits. The
// sort key of an entry is its distance, then its `way`. The index of an entry is the number of
// entries with lesser sort keys. Then entries with equal distances are sorted by their ranks.
EMB_HD void sort_queue(const QueuedBucket& bucket) {
  const HashInsertion& insertion = bucket.insertion;
  EvictionQueue& queue = *bucket.queue;
  const int64_t entry_words = insertion.table.entry_words;
  const int word = has_scores(insertion.order) ? HashEntry::kScore : HashEntry::kStamp;
  constexpr uint64_t kMaxDistance = (uint64_t{1} << (31 - kWayBits)) - 1;
  int64_t values[kBucketSlots], min_value = INT64_MAX;
  for (int way = 0; way < kBucketSlots; ++way) {
    values[way] = bucket.entries[way * entry_words + word];
    min_value = values[way] < min_value ? values[way] : min_value;
  }
  int32_t sort_keys[kBucketSlots], num_lesser[kBucketSlots] = {};
  for (int way = 0; way < kBucketSlots; ++way) {
    const uint64_t distance = static_cast<uint64_t>(values[way]) - static_cast<uint64_t>(min_value);
    const uint64_t clipped = distance < kMaxDistance ? distance : kMaxDistance;
    sort_keys[way] = static_cast<int32_t>(clipped << kWayBits) | way;
  }
  for (int other = 0; other < kBucketSlots; ++other) {
    for (int way = 0; way < kBucketSlots; ++way)
      num_lesser[way] += sort_keys[other] < sort_keys[way] ? 1 : 0;
  }
  int32_t sorted_keys[kBucketSlots];
  for (int way = 0; way < kBucketSlots; ++way) sorted_keys[num_lesser[way]] = sort_keys[way];
  queue.elements[0] = static_cast<uint8_t>(sorted_keys[0] & kWayMask);
  for (int i = 1; i < kBucketSlots; ++i) {
    const auto element = static_cast<uint8_t>(sorted_keys[i] & kWayMask);
    int index = i;
    while (index > 0 && sorted_keys[index - 1] >> kWayBits == sorted_keys[i] >> kWayBits &&
           ranks_below(bucket.rank(element), bucket.rank(queue.elements[index - 1]))) {
      queue.elements[index] = queue.elements[index - 1];
      --index;
    }
    queue.elements[index] = element;
  }
  queue.sorted_at = insertion.stamp;
  // In the order LRU a new key of this batch may rank below an entry that the batch uses, so the
  // queue must not have such entries.
  int num_evictable = 0;
  for (int way = 0; way < kBucketSlots; ++way)
    num_evictable += values[way] < insertion.stamp ? 1 : 0;
  queue.size =
      static_cast<uint8_t>(insertion.order == HashOrder::kLru ? num_evictable : kBucketSlots);
  queue.order = static_cast<uint8_t>(insertion.order);
  for (int i = 0; i < kAgeCodes; ++i) queue.ages[i] = 0;
}

// Remove element number i of a queue.
EMB_HD void remove_element(EvictionQueue* queue, int i) {
  --queue->size;
  for (; i < queue->size; ++i) queue->elements[i] = queue->elements[i + 1];
}

// Return an element for the entry in slot `way` of the bucket, which has the stamp `stamp`. This
// may assign an unused age code of the queue. Return -1 if no code can represent the stamp.
EMB_HD int make_element(EvictionQueue* queue, int way, int64_t stamp) {
  const int64_t age = stamp - queue->sorted_at;
  if (age <= 0) return way;
  if (age > UINT16_MAX) return -1;
  for (int i = 0; i < kAgeCodes; ++i) {
    if (queue->ages[i] != 0 && queue->ages[i] != age) continue;
    queue->ages[i] = static_cast<uint16_t>(age);
    return way | (i + 1) << kWayBits;
  }
  uint32_t used_codes = 0;  // a bit each
  for (int i = 0; i < queue->size; ++i) {
    used_codes |= uint32_t{1} << (queue->elements[i] >> kWayBits);
  }
  for (int i = 0; i < kAgeCodes; ++i) {
    if ((used_codes >> (i + 1) & 1) != 0) continue;
    queue->ages[i] = static_cast<uint16_t>(age);
    return way | (i + 1) << kWayBits;
  }
  return -1;
}

// Return whether the entry of an element is known to rank below `rank`: it still has its known
// rank, and this is lower.
EMB_HD bool is_below(const QueuedBucket& bucket, uint8_t element, const EntryRank& rank) {
  return bucket.is_current(element) && ranks_below(bucket.rank(element), rank);
}

// Add an element for the entry in slot `way`, which has no element because it is new or its rank
// rose. It is inserted before the first element of a higher known rank. If kMaxComparisons do not
// find that element, the rest of the queue is dropped, because entries without an element must rank
// above the last known rank. An empty queue and the queue of LRU do not change.
EMB_HD void add_element(const QueuedBucket& bucket, int way) {
  EvictionQueue& queue = *bucket.queue;
  const HashOrder order = bucket.insertion.order;
  // In the order LRU all elements have stamps below the stamps of all batches since the sort, so
  // this entry ranks above them.
  if (queue.size == 0 || order == HashOrder::kLru) return;
  const EntryRank rank = bucket.rank(static_cast<uint8_t>(way));
  // Orders that compare stamps rank a new key above entries with the same score, so it often ranks
  // above the last element and needs none.
  if (order != HashOrder::kLfu && is_below(bucket, queue.elements[queue.size - 1], rank)) return;
  int index = 0;
  while (index < queue.size && index < kMaxComparisons &&
         is_below(bucket, queue.elements[index], rank)) {
    ++index;
  }
  int element = -1;
  if (index < queue.size && bucket.is_current(queue.elements[index]) &&
      ranks_below(rank, bucket.rank(queue.elements[index]))) {
    element = make_element(&queue, way, bucket.entry(static_cast<uint8_t>(way))[HashEntry::kStamp]);
  }
  if (element < 0) {
    queue.size = static_cast<uint8_t>(index);
    return;
  }
  if (queue.size < kBucketSlots) ++queue.size;
  for (int i = queue.size - 1; i > index; --i) queue.elements[i] = queue.elements[i - 1];
  queue.elements[index] = static_cast<uint8_t>(element);
}

// Read the queue and the entries of its elements. Return whether they decide which entry has the
// lowest rank of those that this batch does not use. If so, write that entry to `candidate`, with
// slot kNoSlot if the batch uses all entries; otherwise `candidate` is unspecified.
EMB_HD bool scan_queue(const QueuedBucket& bucket, EvictionCandidate* candidate) {
  const EvictionQueue& queue = *bucket.queue;
  *candidate = {};
  for (int i = 0; i < queue.size; ++i) {
    const uint8_t element = queue.elements[i];
    const EntryRank rank = bucket.rank(element);
    const bool is_lowest = candidate->slot == kNoSlot || ranks_below(rank, candidate->rank);
    if (is_lowest && bucket.entry(element)[HashEntry::kStamp] < bucket.insertion.stamp) {
      *candidate = {bucket.first_slot + (element & kWayMask), rank};
    }
    // If this entry has its known rank, the entries of all later elements rank above it.
    if (bucket.is_current(element) && candidate->slot != kNoSlot &&
        !ranks_below(rank, candidate->rank)) {
      return true;
    }
  }
  return queue.size == kBucketSlots;
}

// Empty the queue if its order is not that of the insertion. If the entry of the first element may
// have changed its rank, move the element to the index that the present rank requires, or drop it,
// and return true. Otherwise return false.
EMB_HD bool update_first(const QueuedBucket& bucket) {
  EvictionQueue& queue = *bucket.queue;
  if (queue.order != static_cast<uint8_t>(bucket.insertion.order) || queue.size > kBucketSlots) {
    queue.size = 0;
  }
  if (queue.size == 0 || bucket.is_current(queue.elements[0])) return false;
  const int way = queue.elements[0] & kWayMask;
  remove_element(&queue, 0);
  add_element(bucket, way);
  return true;
}

// Return whether the queue of a full bucket has recorded that the batch uses all entries. A batch
// gives no entry an older stamp, so this stays true until the next batch.
EMB_HD bool is_exhausted(const HashInsertion& insertion, const EvictionQueue& queue) {
  return queue.exhausted_at == insertion.stamp;
}

// Return the entry of a full bucket that is evicted first: the entry of the lowest rank among the
// entries that this batch does not use. There is none for HashOrder::kNone. Updates the queue.
EMB_HD EvictionCandidate candidate_of(const QueuedBucket& bucket) {
  EvictionQueue& queue = *bucket.queue;
  if (bucket.insertion.order == HashOrder::kNone || is_exhausted(bucket.insertion, queue))
    return {};
  while (update_first(bucket)) {
  }
  EvictionCandidate candidate;
  if (queue.size == 0 || !scan_queue(bucket, &candidate)) {
    sort_queue(bucket);
    scan_queue(bucket, &candidate);
  }
  if (candidate.slot == kNoSlot) queue.exhausted_at = bucket.insertion.stamp;
  return candidate;
}

// Lock the queue of a bucket, call `body()` and return true. If another thread has locked it,
// return false without the call. If `is_shared` is false, no other thread may use the queue, and it
// is not locked.
template <class Body>
EMB_HD bool with_queue(EvictionQueue* queue, bool is_shared, const Body& body) {
  if (is_shared && __atomic_exchange_n(&queue->is_locked, uint8_t{1}, __ATOMIC_ACQUIRE) != 0) {
    return false;
  }
  body();
  if (is_shared) __atomic_store_n(&queue->is_locked, uint8_t{0}, __ATOMIC_RELEASE);
  return true;
}

// Return how many entries of a full bucket may be evicted: those that the batch does not use.
EMB_HD int count_evictable(const HashInsertion& insertion, int64_t bucket) {
  const int64_t* entries = insertion.table.entry(bucket * kBucketSlots);
  int count = 0;
  for (int way = 0; way < kBucketSlots; ++way) {
    count +=
        entries[way * insertion.table.entry_words + HashEntry::kStamp] < insertion.stamp ? 1 : 0;
  }
  return count;
}

// Return whether a miss may replace a candidate; false if there is no candidate.
EMB_HD bool can_evict(const HashInsertion& insertion, int64_t miss,
                      const EvictionCandidate& candidate) {
  if (candidate.slot == kNoSlot) return false;
  if (!insertion.must_compete) return true;
  return !ranks_below(
      entry_rank(insertion.order, insertion.key(miss), insertion.stamp, insertion.score(miss)),
      candidate.rank);
}

// One of the two buckets of a key that chooses, and what these steps have found out about it. Other
// keys are processed between two steps of a key.
//   begin             prefetches the queue.
//   prefetch_element  prefetches the entry of the first element, or the tags if the queue is empty.
//   read_element      reads that entry, which is usually the candidate. Else it prefetches the
//                     entry of the new first element, or all entries of a full bucket.
//   finish            determines the candidate of a full bucket, or the number of empty slots.
// A bucket whose queue is not empty is full, so its tags are not read.
struct ChoosingBucket {
  int64_t bucket;               // number of the bucket
  EvictionCandidate candidate;  // the entry that a full bucket evicts first
  int num_empty;                // empty slots, known after `finish`
  bool is_decided;              // whether `candidate` is known; false for a bucket with empty slots

  EMB_HD void begin(const HashInsertion& insertion, int64_t bucket_) {
    bucket = bucket_;
    is_decided = false;
    num_empty = 0;
    candidate = {};
    __builtin_prefetch(insertion.queues + bucket);
  }

  EMB_HD void prefetch_tags(const HashInsertion& insertion) const {
    __builtin_prefetch(insertion.table.tags + bucket * kBucketSlots);
  }
  EMB_HD int count_empty(const HashInsertion& insertion) const {
    const uint8_t* tags = insertion.table.tags + bucket * kBucketSlots;
    return __builtin_popcount(match_tags(tags, kEmptyTag));
  }

  // The prefetches are not in the lambdas, because the compiler would remove a lambda that only
  // prefetches.
  EMB_HD void prefetch_element(const HashInsertion& insertion, bool is_shared) const {
    EvictionQueue* queue = insertion.queues + bucket;
    int way = -1;
    with_queue(queue, is_shared, [&] {
      if (queue->size > 0) way = queue->elements[0] & kWayMask;
    });
    if (way < 0) return prefetch_tags(insertion);
    __builtin_prefetch(insertion.table.entry(bucket * kBucketSlots + way));
  }

  EMB_HD void read_element(const HashInsertion& insertion, bool is_shared) {
    EvictionQueue* queue = insertion.queues + bucket;
    const QueuedBucket queued(insertion, bucket, queue);
    int way = -1;
    bool has_no_candidate = false;
    with_queue(queue, is_shared, [&] {
      has_no_candidate = is_exhausted(insertion, *queue);
      if (has_no_candidate) return;
      const bool has_moved = update_first(queued);
      if (queue->size == 0) return;
      const uint8_t first = queue->elements[0];
      way = first & kWayMask;
      if (has_moved || queued.entry(first)[HashEntry::kStamp] >= insertion.stamp) return;
      candidate = {bucket * kBucketSlots + way, queued.rank(first)};
      is_decided = true;
    });
    if (is_decided) return;
    if (way >= 0) return __builtin_prefetch(queued.entries + way * insertion.table.entry_words);
    if (has_no_candidate || insertion.order == HashOrder::kNone || count_empty(insertion) > 0)
      return;
    constexpr int64_t kLineWords = kCacheLineBytes / sizeof(int64_t);
    for (int64_t w = 0; w < kBucketSlots * insertion.table.entry_words; w += kLineWords) {
      __builtin_prefetch(queued.entries + w);
    }
  }

  // If another thread uses the queue of the bucket, this thread works with an empty queue on its
  // stack. The result is the same.
  EMB_HD void finish(const HashInsertion& insertion, bool is_shared) {
    if (is_decided) return;
    num_empty = count_empty(insertion);
    if (num_empty > 0) return;
    EvictionQueue* queue = insertion.queues + bucket;
    is_decided = with_queue(queue, is_shared, [&] {
      candidate = candidate_of(QueuedBucket(insertion, bucket, queue));
    });
    if (is_decided) return;
    EvictionQueue scratch_queue = {};
    candidate = candidate_of(QueuedBucket(insertion, bucket, &scratch_queue));
  }
};

// Return the choice of a bucket with empty slots.
EMB_HD Choice free_choice(const ChoosingBucket& bucket) {
  return {bucket.bucket * kBucketSlots, Choice::kFree,
          bucket.num_empty - slots_per_round(bucket.num_empty)};
}

// Return the choice of a miss: the bucket with more empty slots. It is the first bucket if both
// have as many, or if the first has more than kPreferredFreeSlots. If both buckets are full, the
// choice is the entry of the lowest rank in them, or kRefused if the miss may not evict that entry.
EMB_HD Choice choose_one(const HashInsertion& insertion, bool is_shared, int64_t miss,
                         ChoosingBucket& first_bucket, ChoosingBucket& second_bucket) {
  first_bucket.finish(insertion, is_shared);
  if (first_bucket.num_empty > kPreferredFreeSlots) return free_choice(first_bucket);
  second_bucket.finish(insertion, is_shared);
  if (first_bucket.num_empty + second_bucket.num_empty > 0) {
    return free_choice(first_bucket.num_empty >= second_bucket.num_empty ? first_bucket
                                                                         : second_bucket);
  }
  const EvictionCandidate &a = first_bucket.candidate, &b = second_bucket.candidate;
  const bool takes_second = b.slot != kNoSlot && (a.slot == kNoSlot || ranks_below(b.rank, a.rank));
  const EvictionCandidate& candidate = takes_second ? b : a;
  if (!can_evict(insertion, miss, candidate)) return {0, Choice::kRefused, 0};
  return {candidate.slot, Choice::kEvict, 0};
}

// HashInsertKernels::choose.
void choose(const HashInsertion& insertion, bool is_shared, const int64_t* pending, int64_t n,
            Choice* choices) {
  ChoosingBucket first_buckets[kRingKeys], second_buckets[kRingKeys];
  static_assert(kKeysToFinish < kRingKeys);
  for (int64_t i = 0; i < n + kKeysToFinish; ++i) {
    if (i < n) {
      const uint64_t full_hash = insertion.table.hash(insertion.key(pending[i]));
      first_buckets[i % kRingKeys].begin(insertion, insertion.table.first_bucket(full_hash));
      second_buckets[i % kRingKeys].begin(insertion, insertion.table.second_bucket(full_hash));
    }
    if (const int64_t j = i - kKeysToPrefetchElement; j >= 0 && j < n) {
      first_buckets[j % kRingKeys].prefetch_element(insertion, is_shared);
      second_buckets[j % kRingKeys].prefetch_element(insertion, is_shared);
    }
    if (const int64_t j = i - kKeysToReadElement; j >= 0 && j < n) {
      first_buckets[j % kRingKeys].read_element(insertion, is_shared);
      second_buckets[j % kRingKeys].read_element(insertion, is_shared);
    }
    if (const int64_t j = i - kKeysToFinish; j >= 0) {
      choices[j] = choose_one(insertion, is_shared, pending[j], first_buckets[j % kRingKeys],
                              second_buckets[j % kRingKeys]);
    }
  }
}

// Write the entry of a miss into a slot, and the results of the miss. For the status kEvicting,
// first copy the entry that is in the slot to `insertion.evicted` unless that is null.
EMB_HD void write_entry(const HashInsertion& insertion, int64_t miss, int64_t slot,
                        InsertStatus status) {
  const HashTable& table = insertion.table;
  int64_t* entry = table.entry(slot);
  if (status == InsertStatus::kEvicting && insertion.evicted != nullptr) {
    int64_t* evicted = insertion.evicted + 3 * miss;
    evicted[HashEntry::kKey] = entry[HashEntry::kKey];
    evicted[HashEntry::kStamp] = entry[HashEntry::kStamp];
    evicted[HashEntry::kScore] = has_scores(insertion.order) ? entry[HashEntry::kScore] : 0;
  }
  table.tags[slot] = tag_of(table.hash(insertion.key(miss)));
  entry[HashEntry::kKey] = insertion.key(miss);
  entry[HashEntry::kStamp] = insertion.stamp;
  if (has_scores(insertion.order)) entry[HashEntry::kScore] = insertion.score(miss);
  insertion.slots[miss] = slot;
  insertion.status[miss] = static_cast<uint8_t>(status);
}

// Replace an entry of a full bucket by a miss, and update the queue of the bucket.
EMB_HD void replace_entry(const QueuedBucket& bucket, int64_t miss, int64_t slot) {
  write_entry(bucket.insertion, miss, slot, InsertStatus::kEvicting);
  const int way = static_cast<int>(slot & kWayMask);
  EvictionQueue& queue = *bucket.queue;
  int i = 0;
  while (i < queue.size && (queue.elements[i] & kWayMask) != way) ++i;
  if (i < queue.size) remove_element(&queue, i);
  add_element(bucket, way);
}

// Execute a choice that is not kRefused. Do nothing if the bucket has assigned all slots of the
// round, or has no entry left that the miss may evict.
EMB_HD void commit_one(const HashInsertion& insertion, int64_t miss, const Choice& choice) {
  const HashTable& table = insertion.table;
  const int64_t bucket = choice.slot / kBucketSlots;
  if (choice.mode == Choice::kFree) {
    const uint32_t empty = match_tags(table.tags + bucket * kBucketSlots, kEmptyTag);
    if (__builtin_popcount(empty) > choice.min_empty) {
      write_entry(insertion, miss, bucket * kBucketSlots + lowest_bit(empty), InsertStatus::kNew);
    }
    return;
  }
  const QueuedBucket queued(insertion, bucket, insertion.queues + bucket);
  EvictionQueue& queue = *queued.queue;
  // If the chosen entry has not been replaced in this round, it still has the lowest rank, and this
  // is the first choice of this bucket that is executed.
  if (table.entry(choice.slot)[HashEntry::kStamp] < insertion.stamp) {
    queue.assignable_slots = kUnknownAssignable;
    return replace_entry(queued, miss, choice.slot);
  }
  if (queue.assignable_slots == kUnknownAssignable) {
    queue.assignable_slots =
        static_cast<uint8_t>(slots_per_round(count_evictable(insertion, bucket) + 1) - 1);
  }
  if (queue.assignable_slots == 0) return;
  const EvictionCandidate candidate = candidate_of(queued);
  if (!can_evict(insertion, miss, candidate)) return;
  --queue.assignable_slots;
  replace_entry(queued, miss, candidate.slot);
}

// Prefetch the entries that `add_element` compares first after element 0 has been replaced.
EMB_HD void prefetch_neighbours(const HashInsertion& insertion, int64_t bucket) {
  const EvictionQueue& queue = insertion.queues[bucket];
  if (queue.size < 2 || queue.size > kBucketSlots || insertion.order == HashOrder::kLru) return;
  const QueuedBucket queued(insertion, bucket, insertion.queues + bucket);
  for (int i = 1; i < 3; ++i) __builtin_prefetch(queued.entry(queue.elements[i]));
  if (insertion.order != HashOrder::kLfu) {
    __builtin_prefetch(queued.entry(queue.elements[queue.size - 1]));
  }
}

// HashInsertKernels::commit.
void commit(const HashInsertion& insertion, const int64_t* pending, int64_t n,
            const Choice* choices, int64_t begin, int64_t end) {
  const auto is_in_range = [&](const Choice& choice) {
    return choice.mode != Choice::kRefused && choice.slot >= begin * kBucketSlots &&
           choice.slot < end * kBucketSlots;
  };
  for (int64_t i = 0; i < n; ++i) {
    if (i + kChoicesAhead < n && is_in_range(choices[i + kChoicesAhead])) {
      const int64_t slot = choices[i + kChoicesAhead].slot;
      __builtin_prefetch(insertion.table.entry(slot), 1);
      __builtin_prefetch(insertion.table.tags + slot, 1);
      __builtin_prefetch(insertion.queues + slot / kBucketSlots, 1);
    }
    if (i + kChoicesToNeighbours < n && is_in_range(choices[i + kChoicesToNeighbours])) {
      prefetch_neighbours(insertion, choices[i + kChoicesToNeighbours].slot / kBucketSlots);
    }
    if (is_in_range(choices[i])) commit_one(insertion, pending[i], choices[i]);
  }
}

// Return whether bucket `child` is the first one that is split off bucket `parent` when a table of
// `old_buckets` buckets grows; `old_mask` is address_mask(old_buckets). The number of the first
// child is that of the parent plus one address bit: the highest bit of the mask if the parent has
// not been split at this level of buckets, otherwise the next higher bit.
EMB_HD bool is_first_child(int64_t child, int64_t parent, int64_t old_buckets, uint64_t old_mask) {
  const int64_t half = static_cast<int64_t>(old_mask >> 1) + 1;
  const bool is_undivided = parent < half && parent + half >= old_buckets && old_buckets > 1;
  return child == parent + (is_undivided ? half : static_cast<int64_t>(old_mask) + 1);
}

// Move an entry and its rows from slot `from` to the empty slot `to` of the same table.
EMB_HD void move_entry(const HashTable& table, int64_t from, int64_t to, const RowBuffer* buffers,
                       int num_buffers) {
  table.tags[to] = table.tags[from];
  table.tags[from] = kEmptyTag;
  for (int64_t w = 0; w < table.entry_words; ++w) table.entry(to)[w] = table.entry(from)[w];
  for (int p = 0; p < num_buffers; ++p) {
    const int64_t bytes = buffers[p].row_bytes;
    std::memcpy(buffers[p].data + to * bytes, buffers[p].data + from * bytes, bytes);
  }
}

// Move the entries of a bucket that have a new bucket, with their rows, after the table has grown
// from `old_table` to `table`.
EMB_HD void split_bucket(const HashTable& table, const HashTable& old_table, int64_t bucket,
                         const RowBuffer* buffers, int num_buffers) {
  uint32_t occupied = ~match_tags(table.tags + bucket * kBucketSlots, kEmptyTag);
  for (; occupied != 0; occupied &= occupied - 1) {
    const int64_t slot = bucket * kBucketSlots + lowest_bit(occupied);
    const uint64_t full_hash = table.hash(table.entry(slot)[HashEntry::kKey]);
    const bool is_first = old_table.first_bucket(full_hash) == bucket;
    const int64_t target =
        is_first ? table.first_bucket(full_hash) : table.second_bucket(full_hash);
    if (target == bucket) continue;
    const uint32_t empty = match_tags(table.tags + target * kBucketSlots, kEmptyTag);
    // The caller must pass empty new buckets. If they are not, still never write beyond the bucket.
    if (empty == 0) continue;
    move_entry(table, slot, target * kBucketSlots + lowest_bit(empty), buffers, num_buffers);
  }
}

// HashInsertKernels::split. The children of a parent may be in the ranges of several calls. The
// call with the first child moves all entries of the parent, so that no two threads work on one
// parent.
void split(const HashTable& table, int64_t old_buckets, const RowBuffer* buffers, int num_buffers,
           int64_t begin, int64_t end) {
  HashTable old_table = table;
  old_table.num_buckets = old_buckets;
  old_table.mask = address_mask(old_buckets);
  for (int64_t child = begin; child < end; ++child) {
    const int64_t parent =
        bucket_address(static_cast<uint64_t>(child), old_buckets, old_table.mask);
    if (is_first_child(child, parent, old_buckets, old_table.mask)) {
      split_bucket(table, old_table, parent, buffers, num_buffers);
    }
  }
}

}  // namespace

extern const HashInsertKernels kHashInsertKernels;
const HashInsertKernels kHashInsertKernels = {choose, commit, split};

}  // namespace emb::EMB_ISA
