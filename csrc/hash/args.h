// Where the keys of a dynamic table are: the arithmetic that CPU and CUDA share.
//
// A table is a run of buckets of 32 slots. A key may be in either of two buckets, both found from
// one 64-bit mix of it. A tag byte for every slot says whether it is empty (0) or else holds 8 bits
// of that mix, so every one of the 2^64 keys is a key like any other: none marks empty slots. Rows
// of values are numbered as the slots are.
//
// Buckets are addressed as in linear hashing (Litwin, 1980): a table has any number of them and
// grows by splitting one at a time. The new bucket gets entries of one old bucket alone, and those
// that stay keep their slots.
#pragma once

#include <cstdint>
#include <random>

#include "core/codes.h"
#include "core/portability.h"
#include "core/random.h"

namespace emb {

inline constexpr int kSlots = 32;  // of a bucket
inline constexpr uint8_t kEmptyTag = 0;
inline constexpr int kPreferFirst = 16;  // with more free slots than these a first bucket is taken
inline constexpr int64_t kNoSlot = -1;

// A row of the tensor `tables`: where the buckets of a table begin, how many it has and may have,
// its keys, the load, in 1024ths of its slots, beyond which it grows, and the number that its hash
// depends on.
enum TableField : int {
  kFirstBucket,
  kBuckets,
  kMostBuckets,
  kSize,
  kMostLoad,
  kHashKey,
  kTableFields
};

// A row of the tensor `entries`, int64: the third word is there where the order needs it.
enum EntryField : int { kKey, kStamp, kScore };

// A row of the tensor `counters`.
enum HashCounter : int {
  kLookups,      // positions of batches that were used
  kHits,         // those whose key was there
  kInserted,     // keys that found a place
  kEvicted,      // keys that gave way to them
  kRefused,      // keys that found no place
  kNotAdmitted,  // keys that were kept out by admission
  kExpired,
  kErased,
  kHashCounters
};

// What became of a missing key.
enum class PlaceStatus : uint8_t { kMiss, kHit, kNew, kEvicting, kRefused, kNotAdmitted };

EMB_HD constexpr bool has_scores(Order order) {
  return order != Order::kNone && order != Order::kLru;
}
EMB_HD constexpr bool counts_uses(Order order) {
  return order == Order::kLfu || order == Order::kLruLfu;
}

// Counts of uses stop at the largest number: one that wrapped would make the hottest key the first
// to be evicted. `more` is >= 0; what else a caller passes wraps.
EMB_HD bool count_overflows(int64_t count, int64_t more) {
  return more > 0 && count > INT64_MAX - more;
}
EMB_HD int64_t add_uses(int64_t count, int64_t more) {
  if (count_overflows(count, more)) return INT64_MAX;
  return static_cast<int64_t>(static_cast<uint64_t>(count) + static_cast<uint64_t>(more));
}

// The smallest mask of ones that covers [0, buckets).
EMB_HD uint64_t address_mask(int64_t buckets) {
  uint64_t mask = static_cast<uint64_t>(buckets) - 1;
  for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
  return mask;
}

// The bucket of `hash` in a table of `buckets`, whose `mask` is address_mask(buckets).
EMB_HD int64_t address(uint64_t hash, int64_t buckets, uint64_t mask) {
  const auto beyond = uint64_t{(hash & mask) >= static_cast<uint64_t>(buckets)};
  return static_cast<int64_t>(hash & mask >> beyond);  // no branch, which nothing would foresee
}

// Bits for the two addresses of a mix and its tag. Tables have fewer than 2^31 buckets, so the
// first address (low bits) shares none with the tag (bits 40 to 55).
EMB_HD uint64_t first_hash(uint64_t mixed) { return mixed & 0x7fffffffu; }
EMB_HD uint64_t second_hash(uint64_t mixed) { return mixed * 0x9E3779B97F4A7C15u >> 33; }
EMB_HD uint8_t tag_of(uint64_t mixed) {
  return static_cast<uint8_t>(1 + ((mixed >> 40 & 0xffff) * 255 >> 16));
}

// What orders entries of a bucket; see Order.
struct Rank {
  int64_t score, stamp, key;
};

EMB_HD Rank rank_of(Order order, int64_t key, int64_t stamp, int64_t score) {
  return {has_scores(order) ? score : 0, order == Order::kLfu ? 0 : stamp, key};
}

EMB_HD bool less(const Rank& a, const Rank& b) {
  if (a.score != b.score) return a.score < b.score;
  if (a.stamp != b.stamp) return a.stamp < b.stamp;
  return a.key < b.key;
}

// How many missing keys choose their buckets by one state of the table, see `hash_place_`.
EMB_HD int64_t round_size(int64_t buckets) { return buckets < 2 ? 1 : buckets / 2; }

// How many buckets a table of `buckets` must have for `keys` keys; never fewer, at most `most`.
//
// Buckets that are not yet split get twice the keys of those that are. They would be full long
// before the table is if buckets were added at the rate of keys. So all buckets of a level, which
// are a power of two, are split while the keys that filled them to `load` become a quarter more;
// then there is room until twice as many are filled so far. The last level ends at `most`.
EMB_HD int64_t wanted_buckets(int64_t keys, int64_t buckets, int64_t most, int64_t load) {
  const int64_t per_bucket = kSlots * load;  // in 1024ths
  int64_t level = 1;
  while (4 * level <= most && 2 * level * per_bucket < keys * 1024) level *= 2;
  const int64_t limit = 4 * level <= most ? 2 * level : most;
  const int64_t over = keys * 1024 - level * per_bucket;
  const int64_t wanted = level + (over > 0 ? (4 * over + per_bucket - 1) / per_bucket : 0);
  const int64_t allowed = wanted < limit ? wanted : limit;
  return allowed < buckets ? buckets : allowed;
}

// The hash kernels of the CPU: what they take and how they are reached.

// One table, from its first bucket on.
struct HashTable {
  uint8_t* tags;
  int64_t* entries;
  int64_t words;  // of an entry
  int64_t buckets;
  uint64_t mask;
  uint64_t hash_key;

  // Random to those who do not know the key of the table; its buckets and tag follow from this.
  EMB_HD uint64_t hash(int64_t key) const { return mix(static_cast<uint64_t>(key) ^ hash_key); }
  EMB_HD int64_t* entry(int64_t slot) const { return entries + slot * words; }
  EMB_HD int64_t first(uint64_t mixed) const { return address(first_hash(mixed), buckets, mask); }
  EMB_HD int64_t second(uint64_t mixed) const { return address(second_hash(mixed), buckets, mask); }
};

// What a hit does to its entry.
struct HashUse {
  Order order;
  int64_t stamp;
  int64_t given;
  const int64_t* counts;  // of the ids, null for 1 each
};

// Missing keys on their way into one table; arrays by miss.
struct HashPlacing {
  HashTable table;
  Order order;
  bool competes;
  int64_t stamp, given;
  const int64_t* ids;    // of the batch
  const int64_t* first;  // where in `ids` the key is
  const int64_t* totals;
  int64_t* slots;
  uint8_t* status;
  int64_t* evicted;  // three words each

  EMB_HD int64_t key(int64_t miss) const { return ids[first[miss]]; }
  EMB_HD int64_t score(int64_t miss) const { return counts_uses(order) ? totals[miss] : given; }
};

// What a pending key chose: the entry that gives way, or any slot of the bucket where it wants a
// free one.
struct Choice {
  enum Mode : int32_t { kFree, kEvict, kRefused };
  int64_t slot;
  Mode mode;
};

// Arrays of values by slot that move with their entries: where row 0 is, and bytes a row.
struct RowPlane {
  uint8_t* data;
  int64_t bytes;
};

struct HashFindKernels {
  // The slots of ids [0, n), -1 for none; how many are there. Without `use` nothing is written.
  int64_t (*find)(const HashTable&, const int64_t* ids, int64_t n, const HashUse* use,
                  int64_t* slots);
  // Finds again the ids that are no longer in their slots; what was -1 stays so.
  void (*refresh)(const HashTable&, const int64_t* ids, int64_t n, int64_t* slots);
};

struct HashPlaceKernels {
  // The choices of `pending` [0, n), by the table as it is.
  void (*choose)(const HashPlacing&, const int64_t* pending, int64_t n, Choice* choices);
  // Carries out, in order, the choices whose bucket is in [begin, end).
  void (*settle)(const HashPlacing&, const int64_t* pending, int64_t n, const Choice* choices,
                 int64_t begin, int64_t end);
  // Moves into buckets [begin, end), the new ones of a table that had `old`, what belongs there.
  void (*split)(const HashTable&, int64_t old, const RowPlane* planes, int num_planes,
                int64_t begin, int64_t end);
};

// The number that the scratch tables of a batch are hashed with.

// Drawn once per process, so that nobody can choose keys that all hash alike; no result depends on
// it, only where scratch tables keep what.
inline uint64_t batch_hash_key() {
  static const uint64_t key = [] {
    std::random_device source;
    return uint64_t{source()} << 32 | source();
  }();
  return key;
}

}  // namespace emb
