// The index of a read-only table: it maps ids to the rows that are stored for them. A pruned table
// has fewer rows than ids. Its index is an array with the row of each id, or a hash table with the
// rows of the ids that are stored. The index of a table of keys is a hash table.
//
// A hash table is built once (hash_entries in emblib/ops/quant.py) and then only read. Its entries
// are sorted by the hash of their key, and the entry of a key with hash h is at position h or after
// it, without an empty entry between. So a search begins at position h. It ends at its key, at the
// first empty entry, or at the end of the table. The key and the row of an entry are adjacent, so
// that most searches read one cache line.
#pragma once

#include <cstdint>

#include "core/layout.h"
#include "core/portability.h"

namespace emb {

// How ids become rows: unchanged, by an array, or by a hash table.
enum class IndexKind : int { kNone = 0, kArray = 1, kHash = 2 };

// The index of a feature's table: a row of the tensor `tables`. Its array or hash table lies in the
// tensor `index`, int64, which all features share. emblib/columns.py has the same names.
struct IndexTable {
  int64_t kind;       // an IndexKind; if it is kNone, the other members have no effect
  int64_t begin;      // element of `index` at which the array or hash table begins
  int64_t entries;    // number of entries: int32 rows of an array, or IndexEntry of a hash table
  int64_t hash_bits;  // bits of the hash of a key; a hash table has at least 2^hash_bits entries
  int64_t num_ids;    // ids in [0, num_ids) are mapped, other ids are not; -1: every id is mapped,
                      // which an array does not allow. An array has at least num_ids entries
  int64_t missing;    // the row of a mapped id for which none is stored; -1: lookups read zeros
};

inline constexpr int kIndexColumns = 6;
static_assert(sizeof(IndexTable) == kIndexColumns * sizeof(int64_t));

// An entry of a hash table; an empty one has row -1.
struct IndexEntry {
  int64_t key, row;
};

// Return the hash of a key, in [0, 2^bits); `bits` is in [0, 63].
EMB_HD int64_t index_hash(int64_t key, int64_t bits) {
  auto x = static_cast<uint64_t>(key);
  x = (x ^ (x >> 32)) * 0x9e3779b97f4a7c15u;
  return bits == 0 ? 0 : static_cast<int64_t>(x >> (64 - bits));
}

// Return the address at which the search for an id begins: the address of its row in the array, or
// of the IndexEntry at the position of its hash. Return null for an id that is not mapped. `index`
// is the memory of all indexes. The caller may prefetch the address.
EMB_HD const void* index_address(const int64_t* index, const IndexTable& table, int64_t id) {
  const bool is_in_range = table.num_ids < 0 || (id >= 0 && id < table.num_ids);
  if (!is_in_range || table.kind == static_cast<int>(IndexKind::kNone)) return nullptr;
  const int64_t* memory = index + table.begin;
  if (table.kind == static_cast<int>(IndexKind::kArray)) {
    return reinterpret_cast<const int32_t*>(memory) + id;
  }
  return reinterpret_cast<const IndexEntry*>(memory) + index_hash(id, table.hash_bits);
}

// Return the row of an id whose search begins at `address`, the result of index_address: the id
// itself if it is not mapped, table.missing if it is mapped and no row is stored for it.
EMB_HD int64_t stored_row(const int64_t* index, const IndexTable& table, int64_t id,
                          const void* address) {
  if (address == nullptr) return id;
  if (table.kind == static_cast<int>(IndexKind::kArray)) {
    const int64_t row = *static_cast<const int32_t*>(address);
    return row < 0 ? table.missing : row;
  }
  const auto* end = reinterpret_cast<const IndexEntry*>(index + table.begin) + table.entries;
  for (const auto* entry = static_cast<const IndexEntry*>(address); entry < end; ++entry) {
    if (entry->row < 0) break;
    if (entry->key == id) return entry->row;
  }
  return table.missing;
}

// The arguments of `map_ids`; pointers are to memory of the op's device.
struct IndexArgs {
  const int64_t* index;      // the memory of arrays and hash tables
  const IndexTable* tables;  // [num_features]
  int num_features;
  IndexArray ids;  // [L]
  Bags bags;
  BagMap map;
  int64_t* rows;  // [L], an output: the row of each id, the id itself for a lookup of no bag
};

}  // namespace emb
