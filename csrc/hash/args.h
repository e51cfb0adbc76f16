// The hash index of dynamic tables: the arithmetic that CPU and CUDA share, and the arguments and
// function tables of the CPU kernels. emblib/ops/hash.py describes the ops and their tensors.
//
// A table is an array of buckets of 32 slots. A key may be in either of two buckets. Both are
// computed from one 64-bit hash of the key, called `full_hash`. A slot has a tag of one byte and an
// entry of two or three words: key, stamp (the clock at the last use) and, for some orders, a
// score. The tag is 0 if the slot is empty, otherwise 1 to 255 (tag_of). So no key value is
// reserved to mark empty slots. The row of a key has the number of its slot. `way` is the number of
// a slot in its bucket, 0 to 31.
//
// Buckets are addressed as in linear hashing (Litwin, 1980). A table may have any number of buckets
// and grows by splitting one bucket at a time. A new bucket receives entries of one old bucket
// only, and entries that are not moved keep their slots.
//
// The ids of a batch are its keys, in an array `ids`. A *position* is an index into `ids`. A *miss*
// is the number of a distinct missing key of the batch: misses are numbered by table and, within a
// table, by the first position of the key.
#pragma once

#include <cstdint>
#include <random>

#include "core/codes.h"
#include "core/portability.h"
#include "core/random.h"

namespace emb {

inline constexpr int kBucketSlots = 32;  // slots per bucket
inline constexpr uint8_t kEmptyTag = 0;
// If the first bucket of a new key has more empty slots than this, the key is inserted there, and
// the second bucket is not read. Source: simulated, reports/LOG.md, "Dynamic tables".
inline constexpr int kPreferredFreeSlots = 16;
inline constexpr int64_t kNoSlot = -1;
inline constexpr int64_t kLoadUnits = 1024;  // HashTableColumn::kMaxLoad of a full table
// The number of misses per bucket that may choose in round 0 of an insertion, see max_choosers.
// Source: hit rates of emulated streams, reports/LOG.md, "Gradients that are views, and the rest of
// the list for CUDA kernels".
inline constexpr int64_t kChoosersPerBucket = 8;
inline constexpr int kChooserGrowthLog2 = 2;  // four times as many misses in each later round

// Columns of the tensor `tables`, int64 [T, 6].
enum class HashTableColumn : int {
  kFirstBucket,  // number of the table's first bucket among those of all tables
  kBuckets,      // buckets in use
  kMaxBuckets,   // buckets up to which the table may grow; it has memory for at least as many
  kSize,         // keys in the table
  // The load to which a level of buckets is filled before they are split, see wanted_buckets: keys
  // per kLoadUnits slots.
  kMaxLoad,
  kHashKey  // random number that the hash of the table's keys depends on
};

inline constexpr int kHashTableColumns = static_cast<int>(HashTableColumn::kHashKey) + 1;

// Where the count-min sketch of a table is in the counters of sketch_count_: a row of `layout`,
// int64 [T, 5].
struct SketchLayout {
  int64_t begin;      // first counter
  int64_t width;      // counters per row of the sketch
  int64_t depth;      // rows; 0 for a table without a sketch
  int64_t threshold;  // the largest of the table, at which counters stop
  int64_t hash_key;   // random number that the counters of a key depend on
};

inline constexpr int kSketchColumns = 5;
static_assert(sizeof(SketchLayout) == kSketchColumns * sizeof(int64_t));

// Columns of the tensor `entries`, int64 [S, 2] or [S, 3]. kScore exists if has_scores(order).
struct HashEntry {
  enum Column : int { kKey, kStamp, kScore };
};

// Columns of the tensor `counters`, int64 [T, 8]: totals since the table was created or cleared, or
// its statistics were reset.
enum class HashCounter : int {
  kLookups,      // positions of training batches
  kHits,         // positions whose key was in the table
  kInserted,     // missing keys that got a slot
  kEvicted,      // keys that new ones replaced, or that had no slot when the table shrank
  kRefused,      // missing keys that got no slot
  kNotAdmitted,  // missing keys that the admission policy rejected
  kExpired,      // keys removed because of their age
  kErased        // keys removed for another reason than eviction and age
};

inline constexpr int kHashCounters = static_cast<int>(HashCounter::kErased) + 1;

// The result of an insertion for a miss, or for the key of a position.
enum class InsertStatus : uint8_t {
  kMiss,  // not decided yet; in arrays by miss, also the value after the last miss
  // By position: the key had a slot before the insertion. By miss: tier_swap_ has found the row of
  // the key in the store; insertions do not write this.
  kHit,
  kNew,          // the key got an empty slot, or an overflow row if the table has a store
  kEvicting,     // the key got the slot of an evicted key
  kRefused,      // the key got no slot
  kNotAdmitted,  // the admission policy rejected the key
  kStored        // of tier_insert_batch_: the row of the key came from the store
};

// Return whether an order ranks entries by a score, so that entries have a third word.
EMB_HD constexpr bool has_scores(HashOrder order) {
  return order != HashOrder::kNone && order != HashOrder::kLru;
}
// Return whether the score of an entry counts its uses. The scores of other orders are assigned by
// the caller.
EMB_HD constexpr bool order_counts_uses(HashOrder order) {
  return order == HashOrder::kLfu || order == HashOrder::kLruLfu;
}

// Return whether count + more overflows, for counts of uses. Counts saturate at INT64_MAX, because
// a count that wrapped around would make the most used key the first to be evicted. A negative
// `more` is not checked and may wrap.
EMB_HD bool count_overflows(int64_t count, int64_t more) {
  return more > 0 && count > INT64_MAX - more;
}
// Return count + more, or INT64_MAX if count_overflows(count, more).
EMB_HD int64_t add_uses(int64_t count, int64_t more) {
  if (count_overflows(count, more)) return INT64_MAX;
  return static_cast<int64_t>(static_cast<uint64_t>(count) + static_cast<uint64_t>(more));
}

// Return the smallest mask of low ones that covers [0, buckets), for buckets >= 1.
EMB_HD uint64_t address_mask(int64_t buckets) {
  uint64_t mask = static_cast<uint64_t>(buckets) - 1;
  for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
  return mask;
}

// Return the bucket that `hash` addresses in a table of `buckets` buckets; `mask` is
// address_mask(buckets).
EMB_HD int64_t bucket_address(uint64_t hash, int64_t buckets, uint64_t mask) {
  // No branch, because it would be unpredictable.
  const auto is_beyond = uint64_t{(hash & mask) >= static_cast<uint64_t>(buckets)};
  return static_cast<int64_t>(hash & (mask >> is_beyond));
}

// Return the hash for the address of the first bucket: the low 31 bits of `full_hash`. Tables have
// fewer than 2^31 buckets.
EMB_HD uint64_t first_hash(uint64_t full_hash) { return full_hash & 0x7fffffffu; }
// Return the hash for the address of the second bucket: 31 bits of another hash of `full_hash`.
EMB_HD uint64_t second_hash(uint64_t full_hash) { return (full_hash * 0x9E3779B97F4A7C15u) >> 33; }
// Return the tag of a key, 1 to 255. It is computed from the bits 40 to 55 of `full_hash`, which
// first_hash does not use.
EMB_HD uint8_t tag_of(uint64_t full_hash) {
  return static_cast<uint8_t>(1 + ((((full_hash >> 40) & 0xffff) * 255) >> 16));
}

// The rank of an entry in its bucket, compared in the order of the members; see HashOrder.
struct EntryRank {
  int64_t score, stamp, key;
};

// Return the rank of an entry; words that the order does not compare become 0.
EMB_HD EntryRank entry_rank(HashOrder order, int64_t key, int64_t stamp, int64_t score) {
  return {has_scores(order) ? score : 0, order == HashOrder::kLfu ? 0 : stamp, key};
}

// Return whether an entry of rank `a` is evicted before one of rank `b`.
EMB_HD bool ranks_below(const EntryRank& a, const EntryRank& b) {
  if (a.score != b.score) return a.score < b.score;
  if (a.stamp != b.stamp) return a.stamp < b.stamp;
  return a.key < b.key;
}

// Return how many misses of a table with `buckets` buckets may choose a bucket in a round of an
// insertion (hash_cpu.cpp, insert.cuh), for rounds from 0. These are the first misses of the table.
// All misses that choose in a round see the table as it was at the beginning of the round.
EMB_HD int64_t max_choosers(int64_t buckets, int round) {
  constexpr int kMaxRound = 14;  // 2^31 keys or more may choose then; a larger shift may overflow
  return (kChoosersPerBucket * buckets)
         << (kChooserGrowthLog2 * (round < kMaxRound ? round : kMaxRound));
}

// Return how many slots a bucket may assign in one round. `usable_slots` are empty or have entries
// that may be evicted. Keys that choose in the same round do not see each other, so without this
// limit they would fill some buckets while others stay empty.
EMB_HD int slots_per_round(int usable_slots) { return (usable_slots + 1) / 2; }

// Return how many buckets a table with `buckets` buckets should have for `num_keys` keys: at least
// `buckets`, at most `max_buckets`. `max_load` is HashTableColumn::kMaxLoad.
//
// A bucket that is not split yet receives twice as many keys as a split bucket. If buckets were
// added at the rate of keys, the unsplit buckets would be full long before the table is. So tables
// grow by levels, powers of two of buckets. Once the buckets of a level are filled to `max_load`,
// all of them are split while the keys grow by a quarter. Then no bucket is split until the next
// level, twice as many buckets, is filled to `max_load`. The last level ends at `max_buckets`.
EMB_HD int64_t wanted_buckets(int64_t num_keys, int64_t buckets, int64_t max_buckets,
                              int64_t max_load) {
  // Numbers of keys are in units of 1/kLoadUnits: keys per bucket at this load, and the keys that
  // exceed the load of the level.
  const int64_t bucket_keys = kBucketSlots * max_load;
  int64_t level = 1;
  while (4 * level <= max_buckets && 2 * level * bucket_keys < num_keys * kLoadUnits) level *= 2;
  const int64_t next_level = 4 * level <= max_buckets ? 2 * level : max_buckets;
  const int64_t excess_keys = num_keys * kLoadUnits - level * bucket_keys;
  const int64_t num_splits =
      excess_keys > 0 ? (4 * excess_keys + bucket_keys - 1) / bucket_keys : 0;
  const int64_t wanted = level + num_splits < next_level ? level + num_splits : next_level;
  return wanted < buckets ? buckets : wanted;
}

// One table, for kernels on the CPU and on the GPU: a view of the tensors of the index. Buckets and
// slots are numbered from the table's first bucket and slot.
struct HashTable {
  uint8_t* tags;        // [buckets * kBucketSlots]
  int64_t* entries;     // [buckets * kBucketSlots, entry_words]
  int64_t entry_words;  // words per entry, 2 or 3
  int64_t num_buckets;  // buckets in use
  uint64_t mask;        // address_mask(num_buckets)
  uint64_t hash_key;    // HashTableColumn::kHashKey

  // Return `full_hash`, the hash of a key, which cannot be predicted without the table's hash_key.
  EMB_HD uint64_t hash(int64_t key) const { return mix(static_cast<uint64_t>(key) ^ hash_key); }
  // Return the words of the entry in a slot.
  EMB_HD int64_t* entry(int64_t slot) const { return entries + slot * entry_words; }
  // Return the two buckets of a key with the hash `full_hash`; they may be equal.
  EMB_HD int64_t first_bucket(uint64_t full_hash) const {
    return bucket_address(first_hash(full_hash), num_buckets, mask);
  }
  EMB_HD int64_t second_bucket(uint64_t full_hash) const {
    return bucket_address(second_hash(full_hash), num_buckets, mask);
  }
};

// The CPU kernels. All pointers are to host memory of the caller and are used during the call only.

inline constexpr int kAgeCodes = 6;  // an EvictionQueue has the age codes 1 to 6, in addition to 0
// EvictionQueue::assignable_slots before the bucket's second assignment of the round.
inline constexpr uint8_t kUnknownAssignable = 255;

// The eviction order that a bucket had at some time. With it most evictions read the queue, one
// cache line, and the evicted entry, but not all entries of the bucket. The queue is a cache: it
// changes no result, and an empty queue (all zeros) is valid for any bucket. insert_kernels.cpp
// describes its use.
//
// An element refers to an entry. Its low five bits are the `way` of the entry's slot, and its high
// three bits are an *age code*. The *known rank* of an element is the rank that the entry had when
// the element was added. The *time* of an element is `sorted_at` for age code 0, and sorted_at +
// ages[c - 1] for age code c. It is at least the stamp that the entry had when the element was
// added. These always hold:
//   - Known ranks ascend in the queue. Entries without an element rank above the last known rank.
//   - An entry whose stamp is at most the time of its element has the known rank. Any other entry
//     has been used since, and ranks at least as high.
//   - A bucket with empty slots has an empty queue.
//   - If the bucket is full and the clock is `exhausted_at`, the batch uses all entries.
// Code that breaks a rule, because it writes tags or entries or lowers a rank, must empty the
// queue. If it lowers a stamp, it must also reset `exhausted_at`.
//
// Threads: `find` writes nothing but the value 0 to `size`, atomically. If several threads run
// `choose`, a thread sets `is_locked` before it uses the other members. In `commit` a bucket is
// used by one thread only, which needs no lock.
struct EvictionQueue {
  int64_t sorted_at;         // the clock at which the elements were sorted
  uint8_t size;              // number of elements
  uint8_t order;             // the HashOrder of the elements
  uint8_t assignable_slots;  // `commit`: slots that the bucket may still assign in this round, or
                             // kUnknownAssignable
  uint8_t is_locked;  // 1 while a thread of `choose` uses the queue; set by an atomic exchange
  // By age code - 1: the age, at least 1; 0 if the code was not used since the sort.
  uint16_t ages[kAgeCodes];
  uint8_t elements[kBucketSlots];  // in ascending order of known ranks
  // The clock of a batch that cannot evict any entry, because it uses all of them; 0 if unknown.
  int64_t exhausted_at;
};
inline constexpr int64_t kQueueWords = sizeof(EvictionQueue) / sizeof(int64_t);
static_assert(kQueueWords == 8);  // one cache line

// How a hit updates its entry.
struct HashTouch {
  HashOrder order;
  int64_t stamp;          // the clock of the batch
  int64_t batch_score;    // the new score, if the caller assigns scores
  const int64_t* counts;  // [n] for the n keys of the call: uses of each; null for 1 each
  EvictionQueue* queues;  // by bucket of the table; null if the index has none
};

// The insertion of misses into one table. All arrays except `ids` and `queues` have an element per
// miss of the batch, including misses of other tables. Slots are numbered within the table.
struct HashInsertion {
  HashTable table;
  HashOrder order;
  bool must_compete;    // whether a new key must rank at least as high as the entry that it evicts
  int64_t stamp;        // the clock of the batch; entries with this stamp are not evicted
  int64_t batch_score;  // the score of new entries, if the caller assigns scores
  const int64_t* ids;   // keys, the missing ones among them
  const int64_t* first_positions;  // an index of the key in `ids`
  const int64_t* totals;  // uses of the key in the batch, plus those that a store has recorded
  int64_t* slots;         // output: the slot of the key; the caller writes kNoSlot before
  uint8_t* status;        // output: InsertStatus; the caller writes kMiss before
  // Output, three words each: key, stamp and score of the evicted entry, written if the status is
  // kEvicting. Null if not wanted.
  int64_t* evicted;
  EvictionQueue* queues;  // by bucket of the table; never null

  EMB_HD int64_t key(int64_t miss) const { return ids[first_positions[miss]]; }
  // Return the score of the new entry of a miss.
  EMB_HD int64_t score(int64_t miss) const {
    return order_counts_uses(order) ? totals[miss] : batch_score;
  }
};

// The entry of a full bucket that is evicted before its other entries.
struct EvictionCandidate {
  int64_t slot = kNoSlot;  // kNoSlot if no entry may be evicted
  EntryRank rank = {};
};

// What a pending miss chose in a round.
struct Choice {
  enum Mode : int32_t {
    kFree,    // a bucket with empty slots; `commit` decides which of them the miss gets
    kEvict,   // an entry to evict
    kRefused  // nothing: the miss gets no slot
  };
  int64_t slot;  // kFree: the first slot of the bucket; kEvict: the slot of the entry; else 0
  Mode mode;
  int32_t min_empty;  // kFree: number of empty slots that the bucket must still have afterwards
};

// A row buffer of a table: one row per slot, which moves with the entry of the slot.
struct RowBuffer {
  uint8_t* data;  // row 0
  int64_t row_bytes;
};

// The functions of find_kernels.cpp for one instruction set.
struct HashFindKernels {
  // Write the slot of each of n keys to `slots` [n], -1 if the table does not have the key. Return
  // the number of hits, counting repeated keys. If `touch` is not null, update the entries of hits,
  // and empty the eviction queues of buckets in which the rank of an entry falls. Several threads
  // may call this at once for one table.
  int64_t (*find)(const HashTable&, const int64_t* ids, int64_t n, const HashTouch* touch,
                  int64_t* slots);
  // Correct `slots` [n] after entries have moved: find each key again that is no longer in its
  // slot. Slots of -1 stay.
  void (*refresh)(const HashTable&, const int64_t* ids, int64_t n, int64_t* slots);
};

// The functions of insert_kernels.cpp for one instruction set.
struct HashInsertKernels {
  // Choose a bucket or an entry for each of the n misses in `pending`; write `choices` [n]. This
  // changes queues of the table, but neither tags nor entries. `is_shared` must be true if other
  // threads choose in the same table at the same time.
  void (*choose)(const HashInsertion&, bool is_shared, const int64_t* pending, int64_t n,
                 Choice* choices);
  // Execute the choices whose bucket is in [begin, end), in the order of `choices`. Write tags,
  // entries and queues of the table, and slots, status and evicted of the insertion. `pending` and
  // `choices`, [n], are those of `choose`. A miss keeps kNoSlot and the status kMiss if its choice
  // is kRefused, if the bucket has already assigned slots_per_round slots, or if the bucket has no
  // entry left that the miss may evict. Several threads may work on different buckets.
  void (*commit)(const HashInsertion&, const int64_t* pending, int64_t n, const Choice* choices,
                 int64_t begin, int64_t end);
  // Split old buckets of a table that has grown from `old_buckets` buckets. A call splits the old
  // buckets whose first new bucket is in [begin, end). It moves entries, and their rows in the
  // `num_buffers` row buffers, to new buckets, which may lie outside this range. The new buckets
  // must be empty before the first call. Several threads may work on different ranges.
  void (*split)(const HashTable&, int64_t old_buckets, const RowBuffer* buffers, int num_buffers,
                int64_t begin, int64_t end);
};

// Return the random number for the hashes of the scratch tables that list misses (MissSet in
// hash_cpu.cpp, KeyCells in misses.cuh). It is drawn once per process, so that an adversary cannot
// choose keys that have the same cells. It affects no result.
inline uint64_t batch_hash_key() {
  static const uint64_t key = [] {
    std::random_device source;
    return (uint64_t{source()} << 32) | source();
  }();
  return key;
}

}  // namespace emb
