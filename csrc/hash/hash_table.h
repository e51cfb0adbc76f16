// The hash kernels of the CPU: what they take and how they are reached.
#pragma once

#include "hash/hash.h"

namespace emb {

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

}  // namespace emb
