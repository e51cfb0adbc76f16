// Grouping on the CPU, in three parallel regions whatever the number of key bits: (1) every part of
// the input counts its items by the top bits of the key, (2) it scatters them into buckets, (3) every
// bucket is radix-sorted on the remaining bits inside the cache; a last region writes the groups.
// Every step is stable, so the result does not depend on the number of threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "core/parallel.h"

namespace emb {

// One lookup on its way through the sort: 8 bytes as long as keys have 32 bits, which holds for
// fewer than 2^32 rows.
struct Item32 {
  uint32_t key;
  uint32_t position;
};

struct Item64 {
  uint64_t key;
  uint64_t position;
};

// Where the groups go. Items whose key is >= limit belong to no group and sort to the end.
struct GroupOutput {
  void* unique;  // [n], int64 or int32, entries from `count` on are 0
  bool unique_is_int64;
  int32_t* segments;     // [n + 1], entries after `count` repeat segments[count]
  int32_t* permutation;  // [n]
  int32_t* count;        // [1]

  void write_unique(int64_t i, uint64_t key) const {
    if (unique_is_int64) {
      static_cast<int64_t*>(unique)[i] = static_cast<int64_t>(key);
    } else {
      static_cast<int32_t*>(unique)[i] = static_cast<int32_t>(key);
    }
  }
};

// Sorts items by the low `bits` bits of the key; the result is in `items`.
template <class Item>
void sort_bucket(Item* items, Item* scratch, int64_t n, int bits) {
  if (n <= 24) {
    for (int64_t i = 1; i < n; ++i) {
      const Item item = items[i];
      int64_t j = i;
      for (; j > 0 && items[j - 1].key > item.key; --j) items[j] = items[j - 1];
      items[j] = item;
    }
    return;
  }
  // Few counters for a small bucket: clearing and scanning them must not cost more than the pass.
  const int widest = n < 96 ? 6 : n < 512 ? 7 : n < 16384 ? 8 : 11;
  const int passes = (bits + widest - 1) / widest;
  Item *from = items, *to = scratch;
  for (int pass = 0; pass < passes; ++pass) {
    const int shift = bits * pass / passes, width = bits * (pass + 1) / passes - shift;
    const uint32_t mask = (1u << width) - 1u;
    uint32_t counts[1u << 11];
    std::memset(counts, 0, sizeof(uint32_t) << width);
    for (int64_t i = 0; i < n; ++i) ++counts[from[i].key >> shift & mask];
    if (counts[from[0].key >> shift & mask] == n) continue;
    uint32_t sum = 0;
    for (uint32_t digit = 0; digit <= mask; ++digit) {
      const uint32_t c = counts[digit];
      counts[digit] = sum;
      sum += c;
    }
    for (int64_t i = 0; i < n; ++i) to[counts[from[i].key >> shift & mask]++] = from[i];
    std::swap(from, to);
  }
  if (from != items) std::memcpy(items, from, n * sizeof(Item));
}

template <class Item>
int64_t count_groups(const Item* items, int64_t n, uint64_t limit) {
  int64_t groups = 0;
  for (int64_t i = 0; i < n && items[i].key < limit; ++i) {
    groups += i == 0 || items[i].key != items[i - 1].key;
  }
  return groups;
}

// Groups `items[0, n)`; keys are <= limit, and `limit` itself means "no group". Uses `scratch[0, n)`;
// calls `emit(sorted, position)` for every item in its final place, in parallel.
template <class Item, class Emit>
void group_items(Item* items, Item* scratch, int64_t n, uint64_t limit, const GroupOutput& out,
                 const Emit& emit) {
  const int bits = std::bit_width(limit);
  const int bucket_bits = std::min({bits, 11, std::max(0, static_cast<int>(std::bit_width(
                                                              static_cast<uint64_t>(n))) - 8)});
  const int shift = bits - bucket_bits;
  const int64_t buckets = int64_t{1} << bucket_bits;
  const int64_t parts = std::max<int64_t>(1, std::min<int64_t>(num_threads(), n / 8192));

  // counts[part][bucket] becomes the place where that part writes its next item of that bucket.
  std::vector<uint32_t> counts(parts * buckets, 0);
  parallel_tasks(parts, [&](int64_t part) {
    uint32_t* local = counts.data() + part * buckets;
    for (int64_t i = n * part / parts; i < n * (part + 1) / parts; ++i) ++local[items[i].key >> shift];
  });
  std::vector<int64_t> starts(buckets + 1, 0);
  uint32_t sum = 0;
  for (int64_t bucket = 0; bucket < buckets; ++bucket) {
    starts[bucket] = sum;
    for (int64_t part = 0; part < parts; ++part) {
      const uint32_t c = counts[part * buckets + bucket];
      counts[part * buckets + bucket] = sum;
      sum += c;
    }
  }
  starts[buckets] = n;
  parallel_tasks(parts, [&](int64_t part) {
    uint32_t* cursor = counts.data() + part * buckets;
    for (int64_t i = n * part / parts; i < n * (part + 1) / parts; ++i) {
      scratch[cursor[items[i].key >> shift]++] = items[i];
    }
  });

  const auto cost = [&](int64_t bucket) { return starts[bucket] + bucket; };
  std::vector<int64_t> groups(buckets + 1, 0);
  parallel_balanced(buckets, 8192, cost, [&](int64_t begin, int64_t end) {
    for (int64_t bucket = begin; bucket < end; ++bucket) {
      const int64_t start = starts[bucket], length = starts[bucket + 1] - start;
      sort_bucket(scratch + start, items + start, length, shift);
      groups[bucket + 1] = count_groups(scratch + start, length, limit);
    }
  });
  for (int64_t bucket = 0; bucket < buckets; ++bucket) groups[bucket + 1] += groups[bucket];

  const int64_t total = groups[buckets];
  int64_t grouped = n;  // items that belong to a group
  while (grouped > 0 && scratch[grouped - 1].key >= limit) --grouped;
  parallel_balanced(buckets, 8192, cost, [&](int64_t begin, int64_t end) {
    int64_t group = groups[begin];
    for (int64_t j = starts[begin]; j < starts[end]; ++j) {
      const Item item = scratch[j];
      out.permutation[j] = static_cast<int32_t>(item.position);
      emit(j, static_cast<int64_t>(item.position));
      if (item.key < limit && (j == starts[begin] || item.key != scratch[j - 1].key)) {
        out.write_unique(group, item.key);
        out.segments[group++] = static_cast<int32_t>(j);
      }
    }
  });
  for (int64_t i = total; i < n; ++i) out.write_unique(i, 0);
  for (int64_t i = total; i <= n; ++i) out.segments[i] = static_cast<int32_t>(grouped);
  *out.count = static_cast<int32_t>(total);
}

}  // namespace emb
