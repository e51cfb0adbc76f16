// Eviction queues on the CPU (EvictionQueue in args.h): which entry of a full bucket is evicted
// first. Mostly the first one of its queue is. If that was used since, it leaves the queue or moves
// to the place of its present rank; if the queue is empty or does not decide, the bucket is sorted
// again. The result is always the entry of the lowest rank, whatever the queue contained before.
// Only `*_kernels.cpp` may include this header.
#pragma once

#include <bit>
#include <cstring>

#include "hash/args.h"

#if !defined(EMB_ISA)
#error "eviction_queue.h needs EMB_ISA: include it from a *_kernels.cpp only"
#endif

namespace emb::EMB_ISA {

constexpr int kWayBits = 5;  // bits of the number of a slot in its bucket
constexpr int kWayMask = kSlots - 1;
static_assert(kSlots == 1 << kWayBits);

EMB_HD EntryRank rank_of(Order order, const int64_t* entry) {
  return entry_rank(order, entry[kKey], entry[kStamp], has_scores(order) ? entry[kScore] : 0);
}

// Return the distance of a value from a base.
EMB_HD uint64_t distance_of(int64_t value, int64_t base) {
  const uint64_t distance = static_cast<uint64_t>(value) - static_cast<uint64_t>(base);
  return value >= base ? distance : uint64_t{0} - distance;
}

// Return a code of 7 + kMantissaBits bits that ascends with `value`: its distance from `base` as a
// number with an exponent of 6 bits and that mantissa, and its direction.
template <int kMantissaBits>
EMB_HD uint32_t log_code(int64_t value, int64_t base) {
  const uint64_t distance = distance_of(value, base);
  const auto clipped = static_cast<int64_t>(distance < INT64_MAX ? distance : INT64_MAX);
  const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(clipped));
  constexpr uint32_t kBelowOne = (uint32_t{127} << kMantissaBits) - 1;
  const uint32_t number = bits >> (23 - kMantissaBits);
  const uint32_t code = number > kBelowOne ? number - kBelowOne : 0;
  constexpr uint32_t kHalf = uint32_t{64} << kMantissaBits;
  return value >= base ? kHalf + code : kHalf - code;
}

// Return whether no other value has the code of `value`.
template <int kMantissaBits>
EMB_HD bool is_exact(int64_t value, int64_t base) {
  return distance_of(value, base) < uint64_t{2} << kMantissaBits;
}

// The widths of the codes of scores, stamps and keys. By LFU, which has no stamps, keys have the
// bits of both.
constexpr int kScoreMantissaBits = 1, kScoreBits = 7 + kScoreMantissaBits;
constexpr int kStampMantissaBits = 3, kStampBits = 7 + kStampMantissaBits;
constexpr int kKeyMantissaBits = 2, kKeyBits = 7 + kKeyMantissaBits;
constexpr int kLfuKeyMantissaBits = kStampBits + kKeyBits - 7;
static_assert(kScoreBits + kStampBits + kKeyBits + kWayBits == 32);

// Return the code of the rank of an entry, of an order with scores. A word counts only if the code
// of the one before it is exact; so codes ascend with ranks.
EMB_HD uint32_t rank_code(Order order, const int64_t* bases, const int64_t* entry) {
  constexpr int kRestBits = kStampBits + kKeyBits;
  const int64_t score = entry[kScore], stamp = entry[kStamp], key = entry[kKey];
  const uint32_t code = log_code<kScoreMantissaBits>(score, bases[0]) << kRestBits;
  if (!is_exact<kScoreMantissaBits>(score, bases[0])) return code;
  if (order == Order::kLfu) return code | log_code<kLfuKeyMantissaBits>(key, bases[1]);
  const uint32_t longer = code | log_code<kStampMantissaBits>(stamp, bases[1]) << kKeyBits;
  return is_exact<kStampMantissaBits>(stamp, bases[1]) ? longer | log_code<kKeyMantissaBits>(key, 0)
                                                       : longer;
}

// A bucket whose eviction queue is used: all functions on queues have it as argument.
struct QueuedBucket {
  const HashInsertion& insertion;
  EvictionQueue* queue;
  int64_t first_slot;
  const int64_t* entries;

  QueuedBucket(const HashInsertion& insertion_, int64_t bucket, EvictionQueue* queue_)
      : insertion(insertion_),
        queue(queue_),
        first_slot(bucket * kSlots),
        entries(insertion_.table.entry(first_slot)) {}

  const int64_t* entry(int way) const { return entries + way * insertion.table.words; }
  EntryRank rank(int way) const { return rank_of(insertion.order, entry(way)); }
  EvictionCandidate candidate(int way) const { return {first_slot + way, rank(way)}; }
  // Return whether the batch of the insertion does not use an entry.
  bool is_evictable(int way) const { return entry(way)[kStamp] < insertion.stamp; }
  // Return the element of an entry.
  uint32_t element(int way) const {
    return rank_code(insertion.order, queue->bases, entry(way)) << kWayBits |
           static_cast<uint32_t>(way);
  }
};

// Sort values with the number of a slot in their low bits; write the `count` lowest ones.
EMB_HD void sort_lowest(const int32_t* values, int count, int32_t* sorted) {
  int32_t positions[kSlots] = {}, all[kSlots];
  for (int other = 0; other < kSlots; ++other) {
    for (int way = 0; way < kSlots; ++way) positions[way] += values[other] < values[way] ? 1 : 0;
  }
  for (int way = 0; way < kSlots; ++way) all[positions[way]] = values[way];
  std::memcpy(sorted, all, count * sizeof(int32_t));
}

// Return the slot number in the queue at place i.
EMB_HD int way_at(const EvictionQueue& queue, int i) {
  return queue.order == static_cast<uint8_t>(Order::kLru)
             ? queue.ways[i] & kWayMask
             : static_cast<int>(queue.elements[i] & kWayMask);
}
EMB_HD int first_way(const EvictionQueue& queue) { return way_at(queue, 0); }

// The queue by LRU.

// Sort the entries that the batch does not use into the queue: by stamps, as far as their distance
// from the minimum fits 26 bits, then those that are equal in that by their whole rank. Entries
// that it uses may rank above a new key of the batch.
EMB_HD void sort_ways(const QueuedBucket& bucket) {
  EvictionQueue& queue = *bucket.queue;
  constexpr uint64_t kMaxDistance = (uint64_t{1} << (31 - kWayBits)) - 1;
  int64_t stamps[kSlots], min_stamp = INT64_MAX;
  int num_evictable = 0;
  for (int way = 0; way < kSlots; ++way) {
    stamps[way] = bucket.entry(way)[kStamp];
    min_stamp = stamps[way] < min_stamp ? stamps[way] : min_stamp;
    num_evictable += stamps[way] < bucket.insertion.stamp ? 1 : 0;
  }
  int32_t values[kSlots], sorted[kSlots];
  for (int way = 0; way < kSlots; ++way) {
    const uint64_t distance = static_cast<uint64_t>(stamps[way]) - static_cast<uint64_t>(min_stamp);
    const uint64_t clipped = distance < kMaxDistance ? distance : kMaxDistance;
    values[way] = static_cast<int32_t>(clipped << kWayBits) | way;
  }
  sort_lowest(values, kSlots, sorted);
  for (int i = 0; i < kSlots; ++i) {
    const int way = sorted[i] & kWayMask;
    int at = i;
    while (at > 0 && sorted[at - 1] >> kWayBits == sorted[i] >> kWayBits &&
           less(bucket.rank(way), bucket.rank(queue.ways[at - 1]))) {
      queue.ways[at] = queue.ways[at - 1];
      --at;
    }
    queue.ways[at] = static_cast<uint8_t>(way);
  }
  queue.bases[0] = bucket.insertion.stamp;
  queue.size = static_cast<uint8_t>(num_evictable);
}

// Remove the first slot.
EMB_HD void remove_first_way(EvictionQueue* queue) {
  uint8_t rest[kSlots];
  std::memcpy(rest, queue->ways + 1, kSlots);
  std::memcpy(queue->ways, rest, kSlots);
  --queue->size;
}

// Remove a slot, which need not be in the queue.
EMB_HD void remove_way(EvictionQueue* queue, int way) {
  if (queue->size == 0) return;
  if (queue->ways[0] == way) return remove_first_way(queue);
  int i = 1;
  while (i < queue->size && queue->ways[i] != way) ++i;
  if (i == queue->size) return;
  for (--queue->size; i < queue->size; ++i) queue->ways[i] = queue->ways[i + 1];
}

// Return whether the entry of a slot in the queue was used since the sort.
EMB_HD bool was_used(const QueuedBucket& bucket, int way) {
  return bucket.entry(way)[kStamp] > bucket.queue->bases[0];
}

// Remove used entries from the front; return whether the queue is not empty then, so that its first
// entry is the candidate.
EMB_HD bool settle_ways(const QueuedBucket& bucket) {
  EvictionQueue& queue = *bucket.queue;
  while (queue.size > 0 && was_used(bucket, first_way(queue))) remove_first_way(&queue);
  return queue.size > 0;
}

// The queue by orders with scores.

// Remove element number i.
EMB_HD void remove_element(EvictionQueue* queue, int i) {
  --queue->size;
  for (; i < queue->size; ++i) queue->elements[i] = queue->elements[i + 1];
}

// Remove the elements whose codes are not below the limit.
EMB_HD void apply_limit(EvictionQueue* queue) {
  while (queue->size > 0 && queue->elements[queue->size - 1] >> kWayBits >= queue->limit) {
    --queue->size;
  }
}

// Add an element. If the queue is full, the highest one leaves it, with those of the same code.
EMB_HD void add_element(EvictionQueue* queue, uint32_t element) {
  if (element >> kWayBits >= queue->limit) return;
  int i = queue->size;
  if (i == kQueueElements) {
    const uint32_t last = queue->elements[--i];
    queue->limit = (last > element ? last : element) >> kWayBits;
    if (element > last) return apply_limit(queue);
  } else {
    ++queue->size;
  }
  for (; i > 0 && queue->elements[i - 1] > element; --i) {
    queue->elements[i] = queue->elements[i - 1];
  }
  queue->elements[i] = element;
  apply_limit(queue);
}

// Sort the entries of a bucket into its queue, as many as it has room for and as differ in their
// code from the others. Codes are the most exact for entries of about this score.
EMB_HD void sort_around(const QueuedBucket& bucket, int64_t score) {
  EvictionQueue& queue = *bucket.queue;
  const int word = bucket.insertion.order == Order::kLfu ? kKey : kStamp;
  queue.bases[0] = score;
  queue.bases[1] = INT64_MAX;
  for (int way = 0; way < kSlots; ++way) {
    const int64_t* entry = bucket.entry(way);
    const int64_t base = entry[kScore] == score ? entry[word] : INT64_MAX;
    queue.bases[1] = base < queue.bases[1] ? base : queue.bases[1];
  }
  constexpr uint32_t kSign = uint32_t{1} << 31;  // so that elements compare like signed numbers
  int32_t values[kSlots], sorted[kQueueElements + 1];
  for (int way = 0; way < kSlots; ++way) {
    values[way] = static_cast<int32_t>(bucket.element(way) ^ kSign);
  }
  sort_lowest(values, kQueueElements + 1, sorted);
  queue.limit = (static_cast<uint32_t>(sorted[kQueueElements]) ^ kSign) >> kWayBits;
  queue.size = 0;
  for (int i = 0; i < kQueueElements; ++i) {
    queue.elements[i] = static_cast<uint32_t>(sorted[i]) ^ kSign;
    queue.size += queue.elements[i] >> kWayBits < queue.limit ? 1 : 0;
  }
}

// Sort the entries of a bucket into its queue. A few entries may have much lower scores than the
// others, so the codes are the most exact for the score in the middle of the queue.
EMB_HD void sort_elements(const QueuedBucket& bucket) {
  int64_t lowest = INT64_MAX;
  for (int way = 0; way < kSlots; ++way) {
    const int64_t score = bucket.entry(way)[kScore];
    lowest = score < lowest ? score : lowest;
  }
  sort_around(bucket, lowest);
  const int64_t score = bucket.entry(way_at(*bucket.queue, kQueueElements / 2))[kScore];
  if (score != lowest) sort_around(bucket, score);
}

// Correct the code of element number i; return whether it was another one, so that now a different
// element may have this number.
EMB_HD bool settle_element(const QueuedBucket& bucket, int i) {
  EvictionQueue& queue = *bucket.queue;
  const uint32_t element = bucket.element(way_at(queue, i));
  if (element == queue.elements[i]) return false;
  remove_element(&queue, i);
  add_element(&queue, element);
  return true;
}

// Return whether all elements but the first ones up to number i have higher codes than `element`.
EMB_HD bool is_below_rest(const EvictionQueue& queue, int i, uint32_t element) {
  return i + 1 >= queue.size || queue.elements[i + 1] >> kWayBits > element >> kWayBits;
}

// Find the entry of the lowest rank that this batch does not use. Return whether the queue decides
// which one that is; then write it to `candidate`.
EMB_HD bool scan_elements(const QueuedBucket& bucket, EvictionCandidate* candidate) {
  EvictionQueue& queue = *bucket.queue;
  *candidate = {};
  for (int i = 0; i < queue.size; ++i) {
    while (i < queue.size && settle_element(bucket, i)) {
    }
    if (i == queue.size) break;
    const int way = way_at(queue, i);
    if (bucket.is_evictable(way)) {
      const EvictionCandidate other = bucket.candidate(way);
      if (candidate->slot == kNoSlot || less(other.rank, candidate->rank)) *candidate = other;
    }
    if (candidate->slot != kNoSlot && is_below_rest(queue, i, queue.elements[i])) return true;
  }
  return candidate->slot != kNoSlot;
}

// Return the candidate, from all entries of the bucket.
EMB_HD EvictionCandidate scan_entries(const QueuedBucket& bucket) {
  EvictionCandidate lowest;
  for (int way = 0; way < kSlots; ++way) {
    if (!bucket.is_evictable(way)) continue;
    const EvictionCandidate other = bucket.candidate(way);
    if (lowest.slot == kNoSlot || less(other.rank, lowest.rank)) lowest = other;
  }
  return lowest;
}

// The queue by any order.

// Empty a queue of another order.
EMB_HD void check_order(const QueuedBucket& bucket) {
  EvictionQueue& queue = *bucket.queue;
  const auto order = static_cast<uint8_t>(bucket.insertion.order);
  const int max_size = bucket.insertion.order == Order::kLru ? kSlots : kQueueElements;
  if (queue.order == order && queue.size <= max_size) return;
  queue.order = order;
  queue.size = 0;
}

// Return the entry of a full bucket that is evicted first: the one of the lowest rank among those
// that this batch does not use.
EMB_HD EvictionCandidate candidate_of(const QueuedBucket& bucket) {
  EvictionQueue& queue = *bucket.queue;
  if (bucket.insertion.order == Order::kNone) return {};
  check_order(bucket);
  if (bucket.insertion.order == Order::kLru) {
    if (!settle_ways(bucket)) sort_ways(bucket);
    return queue.size > 0 ? bucket.candidate(first_way(queue)) : EvictionCandidate{};
  }
  EvictionCandidate candidate;
  if (scan_elements(bucket, &candidate)) return candidate;
  sort_elements(bucket);
  return scan_elements(bucket, &candidate) ? candidate : scan_entries(bucket);
}

// Read the first entry of the queue of a bucket. Return whether it is the candidate; then write it
// to `candidate`. Otherwise write the slot number of the entry that is to be read next to `way`,
// if there is one in the queue.
EMB_HD bool settle_first(const QueuedBucket& bucket, EvictionCandidate* candidate, int* way) {
  EvictionQueue& queue = *bucket.queue;
  check_order(bucket);
  if (queue.size == 0) return false;
  *way = first_way(queue);
  if (bucket.insertion.order == Order::kLru) {
    if (was_used(bucket, *way)) {
      remove_first_way(&queue);
      *way = queue.size > 0 ? first_way(queue) : -1;
      return false;
    }
  } else {
    if (settle_element(bucket, 0)) {
      *way = queue.size > 0 ? first_way(queue) : -1;
      return false;
    }
    if (!bucket.is_evictable(*way) || !is_below_rest(queue, 0, queue.elements[0])) {
      *way = queue.size > 1 ? way_at(queue, 1) : *way;
      return false;
    }
  }
  *candidate = bucket.candidate(*way);
  return true;
}

// Bring the queue of a bucket up to date after the entry in a slot was replaced.
EMB_HD void renew_entry(const QueuedBucket& bucket, int way) {
  EvictionQueue& queue = *bucket.queue;
  if (bucket.insertion.order == Order::kLru) return remove_way(&queue, way);
  if (queue.size == 0) return;
  int i = 0;
  while (i < queue.size && way_at(queue, i) != way) ++i;
  if (i < queue.size) remove_element(&queue, i);
  add_element(&queue, bucket.element(way));
}

// Return whether at least `count` entries of a full bucket may be evicted. Those in the queue are
// read first: they mostly may.
EMB_HD bool has_evictable(const QueuedBucket& bucket, int count) {
  const EvictionQueue& queue = *bucket.queue;
  int in_queue = 0, all = 0;
  for (int i = 0; i < queue.size; ++i) {
    in_queue += bucket.is_evictable(way_at(queue, i)) ? 1 : 0;
    if (in_queue >= count) return true;
  }
  for (int way = 0; way < kSlots; ++way) all += bucket.is_evictable(way) ? 1 : 0;
  return all >= count;
}

}  // namespace emb::EMB_ISA
