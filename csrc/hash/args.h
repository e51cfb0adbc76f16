// The hash index of dynamic tables: the arithmetic that CPU and CUDA share, the arguments of the
// kernels, and the CPU's tables of kernels.
//
// A table is a run of buckets of 32 slots. A key may be in either of two buckets, both derived from
// one 64-bit mix of it. The tag byte of a slot is 0 if the slot is empty, otherwise it holds 8 bits
// of that mix: no key value is reserved to mark empty slots. Rows of values have the numbers of the
// slots.
//
// Buckets are addressed as in linear hashing (Litwin, 1980): a table has any number of them and
// grows by splitting one at a time. A new bucket receives entries of one old bucket only, and the
// entries that stay keep their slots.
#pragma once

#include <cstdint>
#include <random>

#include "core/codes.h"
#include "core/portability.h"
#include "core/random.h"

namespace emb {

inline constexpr int kSlots = 32;  // slots per bucket
inline constexpr uint8_t kEmptyTag = 0;
// The free slots above which the first bucket is taken without looking at the second. Source:
// simulated, reports/LOG.md, 2026-11-21.
inline constexpr int kPreferredFreeSlots = 16;
inline constexpr int64_t kNoSlot = -1;
// The keys per bucket that may choose in round 0. Source: hit rates of emulated streams,
// reports/LOG.md, 2026-11-25.
inline constexpr int64_t kChoosersPerBucket = 8;
inline constexpr int kChooserGrowthLog2 = 2;  // each round has four times those of the one before

// Columns of the tensor `tables`: where the buckets of a table begin, their number and maximum
// number, its number of keys, the load (in 1024ths of its slots) above which it grows, and the
// random number that its hash depends on.
enum HashTableColumn : int { kFirstBucket, kBuckets, kMaxBuckets, kSize, kMaxLoad, kHashKey };

inline constexpr int kHashTableColumns = kHashKey + 1;

// Columns of the tensor `entries`, int64; the third exists if the order needs it.
enum HashEntryColumn : int { kKey, kStamp, kScore };

// Columns of the tensor `counters`.
enum HashCounter : int {
  kLookups,      // positions of training batches
  kHits,         // positions whose key was in the table
  kInserted,     // keys that got a slot
  kEvicted,      // keys that were replaced by new ones
  kRefused,      // keys that got no slot
  kNotAdmitted,  // keys that the admission policy rejected
  kExpired,
  kErased
};

inline constexpr int kHashCounters = kErased + 1;

// What became of a key: kMiss until an insertion has decided; kHit for positions of keys that had a
// slot; kEvicting for a new key that took the slot of another.
enum class InsertStatus : uint8_t { kMiss, kHit, kNew, kEvicting, kRefused, kNotAdmitted };

// Return whether entries have a score, the third word, by which the order ranks them.
EMB_HD constexpr bool has_scores(Order order) {
  return order != Order::kNone && order != Order::kLru;
}
// Return whether that score is a count of uses; else the caller assigns it.
EMB_HD constexpr bool order_counts_uses(Order order) {
  return order == Order::kLfu || order == Order::kLruLfu;
}

// Return whether adding `more` to a count of uses overflows. Counts saturate: a count that wrapped
// would make the most used key the first to be evicted. A negative `more` is not checked and may
// wrap.
EMB_HD bool count_overflows(int64_t count, int64_t more) {
  return more > 0 && count > INT64_MAX - more;
}
// Return the sum of a count and `more` uses, INT64_MAX if it overflows.
EMB_HD int64_t add_uses(int64_t count, int64_t more) {
  if (count_overflows(count, more)) return INT64_MAX;
  return static_cast<int64_t>(static_cast<uint64_t>(count) + static_cast<uint64_t>(more));
}

// Return the smallest mask of ones that covers [0, buckets).
EMB_HD uint64_t address_mask(int64_t buckets) {
  uint64_t mask = static_cast<uint64_t>(buckets) - 1;
  for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
  return mask;
}

// Return the bucket of `hash` in a table of `buckets`, whose `mask` is address_mask(buckets).
EMB_HD int64_t address(uint64_t hash, int64_t buckets, uint64_t mask) {
  const auto beyond = uint64_t{(hash & mask) >= static_cast<uint64_t>(buckets)};
  return static_cast<int64_t>(hash & mask >> beyond);  // no branch: it would be unpredictable
}

// Return the bits of a mix for its two addresses and its tag. Tables have fewer than 2^31 buckets,
// so the first address (low bits) shares no bits with the tag (bits 40 to 55).
EMB_HD uint64_t first_hash(uint64_t mixed) { return mixed & 0x7fffffffu; }
EMB_HD uint64_t second_hash(uint64_t mixed) { return mixed * 0x9E3779B97F4A7C15u >> 33; }
EMB_HD uint8_t tag_of(uint64_t mixed) {
  return static_cast<uint8_t>(1 + ((mixed >> 40 & 0xffff) * 255 >> 16));
}

// The rank of an entry in its bucket; see Order.
struct EntryRank {
  int64_t score, stamp, key;
};

EMB_HD EntryRank entry_rank(Order order, int64_t key, int64_t stamp, int64_t score) {
  return {has_scores(order) ? score : 0, order == Order::kLfu ? 0 : stamp, key};
}

// Return whether `a` is evicted before `b`.
EMB_HD bool less(const EntryRank& a, const EntryRank& b) {
  if (a.score != b.score) return a.score < b.score;
  if (a.stamp != b.stamp) return a.stamp < b.stamp;
  return a.key < b.key;
}

// Return how many missing keys of a table of `buckets` may choose their buckets in a round, the
// first of which is 0: all of them choose from the same state of the table; see `hash_insert_`.
EMB_HD int64_t choosers(int64_t buckets, int round) {
  constexpr int kMaxRound = 14;  // round by which more than 2^31 keys may choose
  return kChoosersPerBucket * buckets
         << kChooserGrowthLog2 * (round < kMaxRound ? round : kMaxRound);
}

// Return how many of `room` slots a bucket gives away in a round. Keys that choose at the same time
// do not see each other, so without a limit a bucket would be filled while its neighbours are not.
EMB_HD int slots_of_round(int room) { return (room + 1) / 2; }

// Return how many buckets a table of `buckets` must have for `keys` keys: never fewer, at most
// `max_buckets`.
//
// Buckets that are not yet split receive twice the keys of those that are. If buckets were added at
// the rate of keys, they would be full long before the table is. So all buckets of a level, which
// are a power of two, are split while the keys that filled them to `load` grow by a quarter; after
// that the table has room until twice as many buckets are filled to `load`. The last level ends at
// `max_buckets`.
EMB_HD int64_t wanted_buckets(int64_t keys, int64_t buckets, int64_t max_buckets, int64_t load) {
  const int64_t per_bucket = kSlots * load;  // keys per bucket at that load, in 1024ths
  int64_t level = 1;
  while (4 * level <= max_buckets && 2 * level * per_bucket < keys * 1024) level *= 2;
  const int64_t limit = 4 * level <= max_buckets ? 2 * level : max_buckets;
  const int64_t over = keys * 1024 - level * per_bucket;
  const int64_t wanted = level + (over > 0 ? (4 * over + per_bucket - 1) / per_bucket : 0);
  const int64_t allowed = wanted < limit ? wanted : limit;
  return allowed < buckets ? buckets : allowed;
}

// The CPU kernels.

// One table; the pointers are those of its first bucket.
struct HashTable {
  uint8_t* tags;
  int64_t* entries;
  int64_t words;  // words per entry
  int64_t buckets;
  uint64_t mask;
  uint64_t hash_key;

  // Return a hash that cannot be predicted without the hash key of the table. The buckets and the
  // tag follow from it.
  EMB_HD uint64_t hash(int64_t key) const { return mix(static_cast<uint64_t>(key) ^ hash_key); }
  EMB_HD int64_t* entry(int64_t slot) const { return entries + slot * words; }
  EMB_HD int64_t first(uint64_t mixed) const { return address(first_hash(mixed), buckets, mask); }
  EMB_HD int64_t second(uint64_t mixed) const { return address(second_hash(mixed), buckets, mask); }
};

// How a hit updates its entry.
struct HashTouch {
  Order order;
  int64_t stamp;
  int64_t batch_score;
  const int64_t* counts;  // uses of each id; null for 1 each
};

// Missing keys to be inserted into one table; arrays are by miss.
struct HashInsertion {
  HashTable table;
  Order order;
  bool competes;
  int64_t stamp, batch_score;
  const int64_t* ids;    // ids of the batch
  const int64_t* first;  // position of the key in `ids`
  const int64_t* totals;
  int64_t* slots;
  uint8_t* status;
  int64_t* evicted;  // three words each

  EMB_HD int64_t key(int64_t miss) const { return ids[first[miss]]; }
  EMB_HD int64_t score(int64_t miss) const {
    return order_counts_uses(order) ? totals[miss] : batch_score;
  }
};

// The entry of a bucket that is evicted first, and the number of those that can be evicted.
struct EvictionCandidate {
  int64_t slot = kNoSlot;
  EntryRank rank = {};
  int count = 0;
};

// A bucket at the beginning of a round; `candidate` is unset if a slot is free. `share` is how many
// slots it can still give away in the round.
struct BucketState {
  int free, share;
  EvictionCandidate candidate;
};

// The choice of a pending key: the slot of the entry to evict, or any slot of a bucket with a free
// one; and how many free slots, or entries that can be evicted, the bucket has left after the
// round.
struct Choice {
  enum Mode : int32_t { kFree, kEvict, kRefused };
  int64_t slot;
  Mode mode;
  int32_t left;
};

// A row buffer of a table: an array of values by slot that moves with the entries. `data` is the
// address of row 0, `bytes` the size of a row.
struct RowBuffer {
  uint8_t* data;
  int64_t bytes;
};

struct HashFindKernels {
  // Find the slots of ids [0, n), -1 for none; return the number of hits. With `touch`, also update
  // the entries of hits.
  int64_t (*find)(const HashTable&, const int64_t* ids, int64_t n, const HashTouch* touch,
                  int64_t* slots);
  // Find the ids again that are no longer in their slots; leave slots of -1.
  void (*refresh)(const HashTable&, const int64_t* ids, int64_t n, int64_t* slots);
};

struct HashInsertKernels {
  // Read the states of buckets [begin, end).
  void (*read_states)(const HashInsertion&, int64_t begin, int64_t end, BucketState* states);
  // Choose for `pending` [0, n), from the present state of the table: that in `states`, by bucket,
  // unless it is null.
  void (*choose)(const HashInsertion&, const BucketState* states, const int64_t* pending, int64_t n,
                 Choice* choices);
  // Carry out, in order, the choices whose bucket is in [begin, end); `states` is as above.
  void (*commit)(const HashInsertion&, BucketState* states, const int64_t* pending, int64_t n,
                 const Choice* choices, int64_t begin, int64_t end);
  // Fill buckets [begin, end), the new ones of a table that had `old`, from the buckets that they
  // are split from.
  void (*split)(const HashTable&, int64_t old, const RowBuffer* buffers, int num_buffers,
                int64_t begin, int64_t end);
};

// Return the random number that scratch tables of a batch are hashed with. It is drawn once per
// process, so that an adversary cannot choose keys that all hash alike. It affects only positions
// in scratch tables, no result.
inline uint64_t batch_hash_key() {
  static const uint64_t key = [] {
    std::random_device source;
    return uint64_t{source()} << 32 | source();
  }();
  return key;
}

}  // namespace emb
