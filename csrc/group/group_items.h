// Grouping on the CPU, in four parallel regions whatever the number of key bits: (1) every part of
// the input makes its items and counts them by the top bits of the key, (2) it scatters them into
// buckets, (3) every bucket is radix-sorted on the remaining bits inside the cache and its groups are
// counted, (4) every bucket writes its groups.
// Every step is stable, so the result does not depend on the number of threads.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
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

// Counters of all passes of a bucket: at most 64 bits in digits of 6 to 11 bits.
inline constexpr int kMaxDigits = 6 << 11;

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
  const int passes = (bits + widest - 1) / widest, width = passes > 0 ? (bits + passes - 1) / passes : 0;
  const uint32_t mask = (1u << width) - 1u;
  uint32_t counts[kMaxDigits];  // of all passes, from one reading of the keys
  std::memset(counts, 0, sizeof(uint32_t) * passes << width);
  for (int64_t i = 0; i < n; ++i) {
    for (int pass = 0; pass < passes; ++pass) {
      ++counts[pass << width | (items[i].key >> pass * width & mask)];
    }
  }
  Item *from = items, *to = scratch;
  for (int pass = 0; pass < passes; ++pass) {
    uint32_t* cursor = counts + (pass << width);
    const int shift = pass * width;
    if (cursor[from[0].key >> shift & mask] == n) continue;
    uint32_t sum = 0;
    for (uint32_t digit = 0; digit <= mask; ++digit) sum += std::exchange(cursor[digit], sum);
    for (int64_t i = 0; i < n; ++i) to[cursor[from[i].key >> shift & mask]++] = from[i];
    std::swap(from, to);
  }
  if (from != items) std::memcpy(items, from, n * sizeof(Item));
}

template <class Item>
int64_t count_groups(const Item* items, int64_t n, uint64_t limit) {
  while (n > 0 && items[n - 1].key >= limit) --n;
  int64_t groups = n > 0;
  for (int64_t i = 1; i < n; ++i) groups += items[i].key != items[i - 1].key;
  return groups;
}

// Counts of items by the top bits of their key, one row of counters for each part of the input.
template <class Item>
struct Histogram {
  int shift;
  std::vector<int64_t> firsts;  // part p makes items [firsts[p], firsts[p + 1])
  int64_t buckets;
  std::vector<uint32_t> counts;

  Histogram(int64_t n, uint64_t limit, std::vector<int64_t> part_firsts)
      : firsts(std::move(part_firsts)) {
    const int bits = std::bit_width(limit);
    const int wanted = static_cast<int>(std::bit_width(static_cast<uint64_t>(n))) - 7;
    const int bucket_bits = std::clamp(wanted, 0, std::min(bits, 11));
    shift = bits - bucket_bits;
    buckets = int64_t{1} << bucket_bits;
    counts.resize(parts() * buckets, 0);
  }

  int64_t parts() const { return static_cast<int64_t>(firsts.size()) - 1; }
  uint32_t* of(int64_t part) { return counts.data() + part * buckets; }
};

// Groups n items; keys are <= limit, and `limit` itself means "no group". `fill(part, put)` makes the
// items of a part by calling `put(position, key)` once for each of its positions, in any order.
// `emit(sorted, position)` is called for every item in its final place. Both run in parallel.
template <class Item, class Fill, class Emit>
void group_items(int64_t n, uint64_t limit, std::vector<int64_t> firsts, const Fill& fill,
                 const GroupOutput& out, const Emit& emit) {
  const std::unique_ptr<Item[]> items(new Item[n]), sorted(new Item[n]);
  Histogram<Item> histogram(n, limit, std::move(firsts));
  const int shift = histogram.shift;
  parallel_tasks(histogram.parts(), [&](int64_t part) {
    uint32_t* counts = histogram.of(part);
    fill(part, [&](int64_t position, uint64_t key) {
      using Word = decltype(Item::key);
      items[position] = {static_cast<Word>(key), static_cast<Word>(position)};
      ++counts[key >> shift];
    });
  });

  // counts[part][bucket] becomes the place where that part writes its next item of that bucket.
  const int64_t buckets = histogram.buckets, parts = histogram.parts();
  std::vector<int64_t> starts(buckets + 1, n);
  uint32_t sum = 0;
  for (int64_t bucket = 0; bucket < buckets; ++bucket) {
    starts[bucket] = sum;
    for (int64_t part = 0; part < parts; ++part) {
      sum += std::exchange(histogram.of(part)[bucket], sum);
    }
  }
  parallel_tasks(parts, [&](int64_t part) {
    uint32_t* cursor = histogram.of(part);
    for (int64_t i = histogram.firsts[part]; i < histogram.firsts[part + 1]; ++i) {
      sorted[cursor[items[i].key >> shift]++] = items[i];
    }
  });

  const auto cost = [&](int64_t bucket) { return starts[bucket] + bucket; };
  std::vector<int64_t> groups(buckets + 1, 0);
  parallel_balanced(buckets, 8192, cost, [&](int64_t begin, int64_t end) {
    for (int64_t bucket = begin; bucket < end; ++bucket) {
      const int64_t start = starts[bucket], length = starts[bucket + 1] - start;
      sort_bucket(sorted.get() + start, items.get() + start, length, shift);
      groups[bucket + 1] = count_groups(sorted.get() + start, length, limit);
    }
  });
  for (int64_t bucket = 0; bucket < buckets; ++bucket) groups[bucket + 1] += groups[bucket];

  const int64_t total = groups[buckets];
  int64_t grouped = n;  // items that belong to a group
  while (grouped > 0 && sorted[grouped - 1].key >= limit) --grouped;
  parallel_balanced(buckets, 8192, cost, [&](int64_t begin, int64_t end) {
    // Every item writes the end of its group and the last one stands: whether an item starts a new
    // group is a coin toss, and a branch on it would be mispredicted as often.
    int64_t group = groups[begin] - 1;
    uint64_t previous = ~uint64_t{0};
    for (int64_t j = starts[begin]; j < starts[end]; ++j) {
      const Item item = sorted[j];
      out.permutation[j] = static_cast<int32_t>(item.position);
      emit(j, static_cast<int64_t>(item.position));
      if (item.key >= limit) continue;
      group += item.key != previous;
      previous = item.key;
      out.write_unique(group, item.key);
      out.segments[group + 1] = static_cast<int32_t>(j + 1);
    }
  });
  out.segments[0] = 0;
  for (int64_t i = total; i < n; ++i) out.write_unique(i, 0);
  for (int64_t i = total + 1; i <= n; ++i) out.segments[i] = static_cast<int32_t>(grouped);
  *out.count = static_cast<int32_t>(total);
}

// How many parts n items are worth.
inline int64_t group_parts(int64_t n) {
  return std::clamp<int64_t>(n / 8192, 1, num_threads());
}

}  // namespace emb
