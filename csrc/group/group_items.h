// Grouping on the CPU: a parallel sort of items (key, position) by key, which also finds the groups
// of equal keys. group_items makes four parallel loops:
//   (1) for every part of the input, write its items and count them by the top bits of the key,
//   (2) scatter the items of every part into buckets, one bucket per value of the top bits,
//   (3) sort every bucket, which usually fits into the cache, by the remaining bits, and count its
//       groups,
//   (4) write the groups of every bucket.
// Every step is stable, so the result does not depend on the number of threads. Two kinds of input
// need no buckets. group_items sorts an input of one part and at most kSmallInput items directly.
// group_runs sorts runs of items one by one; the key ranges of consecutive runs must ascend and not
// overlap, such as one run per table. n, the number of items, must be below 2^31; not checked.
#pragma once

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/output_memory.h"
#include "core/parallel.h"

namespace emb {

// A key to be sorted and its position in the input, in 8 bytes, for keys below 2^32.
struct Item32 {
  uint32_t key;
  uint32_t position;
};

// A key to be sorted and its position in the input, in 16 bytes, for any key.
struct Item64 {
  uint64_t key;
  uint64_t position;
};

// The arrays that a grouping of n items writes, in host memory of the caller. Groups are in
// ascending order of their keys; items whose key is `no_group_key` belong to no group and come last
// in `permutation`.
struct GroupOutput {
  void* unique;  // [n], int64 or int32: the key of each group; entries after the last group are 0
  bool unique_is_int64;  // whether `unique` is int64
  int32_t* segments;     // [n + 1]: group g has the sorted items [segments[g], segments[g + 1]);
                         // entries after the last group repeat the number of items in groups
  int32_t* permutation;  // [n]: the positions of the sorted items
  int32_t* num_groups;   // [1]

  void write_unique(int64_t i, uint64_t key) const {
    if (unique_is_int64) {
      static_cast<int64_t*>(unique)[i] = static_cast<int64_t>(key);
    } else {
      static_cast<int32_t*>(unique)[i] = static_cast<int32_t>(key);
    }
  }
};

// One stable pass of a radix sort, in two steps: counting and scattering. The input is divided into
// kStreams equal streams (the last also has the remainder), and both steps take one item of each
// stream in turn. Each stream has separate counters, because increments of one counter, as for many
// keys with one digit, must wait for each other, but increments of different counters overlap.
// Stream s has the items [stream_begin(s), stream_begin(s + 1)). Counters are an array [kStreams,
// stride], of which the first `mask` + 1 columns are used.
template <int kStreams, class Item>
struct RadixPass {
  const Item* items;  // [n]
  int64_t n;
  int shift;      // the digit of a key is (key >> shift) & mask
  uint32_t mask;  // number of digits - 1, a mask of ones

  int64_t stream_begin(int stream) const { return stream == kStreams ? n : n / kStreams * stream; }
  // In 64 bits, because a shift of 32 bits by 32 is undefined.
  uint32_t digit_of(int64_t i) const { return (uint64_t{items[i].key} >> shift) & mask; }

  // Add the number of items of each digit in each stream to counters[stream * stride + digit].
  void count(uint32_t* counters, int64_t stride) const {
    for (int64_t i = 0; i < n / kStreams; ++i) {
      for (int s = 0; s < kStreams; ++s) ++counters[s * stride + digit_of(stream_begin(s) + i)];
    }
    uint32_t* last_counters = counters + (kStreams - 1) * stride;  // of the last stream
    for (int64_t i = n / kStreams * kStreams; i < n; ++i) ++last_counters[digit_of(i)];
  }

  // Copy the items to `sorted`. counters[stream * stride + digit] must be the offset in `sorted` of
  // the stream's first item of that digit. Every item increments its counter.
  void scatter(uint32_t* counters, int64_t stride, Item* sorted) const {
    for (int64_t i = 0; i < n / kStreams; ++i) {
      for (int s = 0; s < kStreams; ++s) {
        const int64_t item = stream_begin(s) + i;
        sorted[counters[s * stride + digit_of(item)]++] = items[item];
      }
    }
    uint32_t* last_counters = counters + (kStreams - 1) * stride;
    for (int64_t i = n / kStreams * kStreams; i < n; ++i)
      sorted[last_counters[digit_of(i)]++] = items[i];
  }
};

// Replace the counts in `counters` [num_streams, num_digits] by offsets: those at which each stream
// writes its first item of each digit. Items are ordered by digit, then by stream. Call
// `visit(digit, offset)` with the offset of the first item of each digit.
template <class Visitor>
void counts_to_offsets(uint32_t* counters, int64_t num_streams, int64_t num_digits,
                       const Visitor& visit) {
  uint32_t sum = 0;
  for (int64_t digit = 0; digit < num_digits; ++digit) {
    visit(digit, sum);
    for (int64_t s = 0; s < num_streams; ++s)
      sum += std::exchange(counters[s * num_digits + digit], sum);
  }
}

// Tuned constants: sizes are numbers of items, widths are bits of a digit. Few items are sorted by
// narrow digits, because clearing and adding up the counters must not take longer than the pass.
// Two of them were measured, see reports/LOG.md: kCounterStreams ("Table-batched embeddings on
// the CPU against FBGEMM") and kSmallInput ("Large batches"). For the others no comparison is
// recorded.
inline constexpr int64_t kInsertionSortItems = 24;  // maximum of an insertion sort
// Streams of counters (RadixPass): one for a bucket of at most kOneStreamItems, kCounterStreams for
// larger buckets and to fill the buckets, and kUnbucketedStreams for a sort without buckets.
inline constexpr int64_t kOneStreamItems = 2048;
inline constexpr int kCounterStreams = 4, kUnbucketedStreams = 2;
// Maximum size of an input of one part that group_items sorts without buckets. group_runs does not
// check the size of runs: tbe_group does, and calls it only if no run is longer.
inline constexpr int64_t kSmallInput = int64_t{1} << 19;
inline constexpr int kBucketDigitBits = 8;       // maximum width of a digit in a bucket
inline constexpr int kUnbucketedDigitBits = 11;  // maximum width of a digit without buckets
inline constexpr int kMaxBucketBits = 11;        // maximum number of top bits that select a bucket
inline constexpr int kBucketItemsLog2 = 6;       // log2 of the minimum mean size of a bucket
// Minimum mean size of the parts of an input, and grain of parallel_balanced for buckets.
inline constexpr int64_t kPartItems = 8192;
inline constexpr int64_t kRunGrain = 4096;  // grain of parallel_balanced for runs

// Sort `items` [n] by the low `bits` bits of the key, stable, in passes over digits of at most
// `max_width` bits, at most kMaxWidth. `scratch` is [n]; the result is in `items`.
template <int kStreams, int kMaxWidth = kBucketDigitBits, class Item>
void radix_sort(Item* items, Item* scratch, int64_t n, int bits, int max_width) {
  const int num_passes = (bits + max_width - 1) / max_width;
  Item *source = items, *target = scratch;
  uint32_t counters[kStreams << kMaxWidth];
  for (int pass = 0; pass < num_passes; ++pass) {
    const int shift = bits * pass / num_passes, width = bits * (pass + 1) / num_passes - shift;
    const int64_t num_digits = int64_t{1} << width;
    std::memset(counters, 0, (sizeof(uint32_t) * kStreams) << width);
    const RadixPass<kStreams, Item> digit_pass{source, n, shift,
                                               static_cast<uint32_t>(num_digits - 1)};
    digit_pass.count(counters, num_digits);
    counts_to_offsets(counters, kStreams, num_digits, [](int64_t, uint32_t) {});
    digit_pass.scatter(counters, num_digits, target);
    std::swap(source, target);
  }
  if (source != items) std::memcpy(items, source, n * sizeof(Item));
}

// Return the maximum width of the digits by which a bucket of n items is sorted.
constexpr int bucket_digit_bits(int64_t n) {
  if (n < 96) return 6;
  return n < 512 ? 7 : kBucketDigitBits;
}

// Return the maximum width of the digits by which n items are sorted without buckets: a run or a
// small input. It is kUnbucketedDigitBits from `min_wide_items` (>= 256) items on.
constexpr int unbucketed_digit_bits(int64_t n, int64_t min_wide_items) {
  if (n < 256) return 6;
  return n < min_wide_items ? 8 : kUnbucketedDigitBits;
}
// The `min_wide_items` of a run, and of a small input.
inline constexpr int64_t kWideRunItems = 2048, kWideInputItems = 8192;

// Sort a bucket, `items` [n], by key, stable. More than kInsertionSortItems items are sorted by the
// low `bits` bits only; the other bits of their keys must be equal. `scratch` is [n]; the result is
// in `items`.
template <class Item>
void sort_bucket(Item* items, Item* scratch, int64_t n, int bits) {
  if (n > kOneStreamItems) {
    return radix_sort<kCounterStreams>(items, scratch, n, bits, kBucketDigitBits);
  }
  if (n > kInsertionSortItems) {
    return radix_sort<1>(items, scratch, n, bits, bucket_digit_bits(n));
  }
  for (int64_t i = 1; i < n; ++i) {
    const Item item = items[i];
    int64_t j = i;
    for (; j > 0 && items[j - 1].key > item.key; --j) items[j] = items[j - 1];
    items[j] = item;
  }
}

// Return the number of groups of n sorted items: distinct keys below `no_group_key`.
template <class Item>
int64_t count_groups(const Item* items, int64_t n, uint64_t no_group_key) {
  while (n > 0 && items[n - 1].key >= no_group_key) --n;
  int64_t num_groups = n > 0;
  for (int64_t i = 1; i < n; ++i) num_groups += items[i].key != items[i - 1].key;
  return num_groups;
}

// Write the groups and the permutation of items [begin, end) of `sorted`, which has all items in
// order. No group may extend beyond the range; not checked. `last_group` is the number of the last
// group before the range, -1 for none. Return the same for the end of the range. `key_base` is
// added to the keys in `out.unique`. Call `emit(j, position)` for every item j, also for items
// without a group.
template <class Item, class Emit>
int64_t write_groups(const Item* sorted, int64_t begin, int64_t end, int64_t last_group,
                     uint64_t no_group_key, const GroupOutput& out, const Emit& emit,
                     uint64_t key_base = 0) {
  // Every item writes the end of its group, and the last write remains. A branch on whether an item
  // starts a new group would often be mispredicted.
  uint64_t previous_key = ~uint64_t{0};
  for (int64_t j = begin; j < end; ++j) {
    const Item item = sorted[j];
    out.permutation[j] = static_cast<int32_t>(item.position);
    emit(j, static_cast<int64_t>(item.position));
    if (item.key >= no_group_key) continue;
    last_group += item.key != previous_key;
    previous_key = item.key;
    out.write_unique(last_group, key_base + item.key);
    out.segments[last_group + 1] = static_cast<int32_t>(j + 1);
  }
  return last_group;
}

// Complete the output when all of its `num_groups` groups are written: write segments[0], fill
// `unique` and `segments` after the last group, and write the number of groups. `sorted` has all n
// items.
template <class Item>
void finish_groups(const Item* sorted, int64_t n, int64_t num_groups, uint64_t no_group_key,
                   const GroupOutput& out) {
  int64_t num_grouped = n;  // items that belong to a group
  while (num_grouped > 0 && sorted[num_grouped - 1].key >= no_group_key) --num_grouped;
  out.segments[0] = 0;
  for (int64_t i = num_groups; i < n; ++i) out.write_unique(i, 0);
  for (int64_t i = num_groups + 1; i <= n; ++i) out.segments[i] = static_cast<int32_t>(num_grouped);
  *out.num_groups = static_cast<int32_t>(num_groups);
}

// Group n items and write the result to `out`. Keys must be at most `no_group_key`, and `Item` must
// be Item64 if `no_group_key` is 2^32 or more; neither is checked. An item with the key
// `no_group_key` belongs to no group.
//
// The input comes in parts that threads read in parallel: part p has the positions [part_begins[p],
// part_begins[p + 1]), so `part_begins` begins with 0 and ends with n. `fill(p, put)` must call
// `put(position, key)` once for each position of part p. `emit(j, position)` is called once for
// every item, where j is the item's number in sorted order. Several threads may call both at once,
// `fill` for different parts and `emit` for different items. One thread makes all calls if
// num_threads() is 1, or if there is one part of at most kSmallInput items. Throws std::bad_alloc.
template <class Item, class Fill, class Emit>
void group_items(int64_t n, uint64_t no_group_key, const std::vector<int64_t>& part_begins,
                 const Fill& fill, const GroupOutput& out, const Emit& emit) {
  using ItemWord = decltype(Item::key);
  const Scratch<Item> items = new_scratch<Item>(n), sorted = new_scratch<Item>(n);
  const int bits = std::bit_width(no_group_key);
  const int ideal_bucket_bits =
      static_cast<int>(std::bit_width(static_cast<uint64_t>(n))) - kBucketItemsLog2 - 1;
  const int bucket_bits = std::clamp(ideal_bucket_bits, 0, std::min(bits, kMaxBucketBits));
  // The number of low bits, by which a bucket is sorted. RadixPass needs it to be below 64, so
  // fewer than 128 items of 64-bit keys must be one part; num_group_parts makes them one.
  const int low_bits = bits - bucket_bits;
  const int64_t num_buckets = int64_t{1} << bucket_bits;
  const int64_t num_parts = static_cast<int64_t>(part_begins.size()) - 1;
  if (num_parts == 1 && n <= kSmallInput) {
    fill(0, [&](int64_t position, uint64_t key) {
      items[position] = {static_cast<ItemWord>(key), static_cast<ItemWord>(position)};
    });
    radix_sort<kUnbucketedStreams, kUnbucketedDigitBits>(items.get(), sorted.get(), n, bits,
                                                         unbucketed_digit_bits(n, kWideInputItems));
    const int64_t last_group = write_groups(items.get(), 0, n, -1, no_group_key, out, emit);
    return finish_groups(items.get(), n, last_group + 1, no_group_key, out);
  }
  std::vector<uint32_t> counters(num_parts * kCounterStreams * num_buckets, 0);
  const auto bucket_pass = [&](int64_t part) {
    return RadixPass<kCounterStreams, Item>{items.get() + part_begins[part],
                                            part_begins[part + 1] - part_begins[part], low_bits,
                                            static_cast<uint32_t>(num_buckets - 1)};
  };
  parallel_tasks(num_parts, [&](int64_t part) {
    fill(part, [&](int64_t position, uint64_t key) {
      items[position] = {static_cast<ItemWord>(key), static_cast<ItemWord>(position)};
    });
    bucket_pass(part).count(counters.data() + part * kCounterStreams * num_buckets, num_buckets);
  });
  std::vector<int64_t> bucket_starts(num_buckets + 1, n);
  counts_to_offsets(counters.data(), num_parts * kCounterStreams, num_buckets,
                    [&](int64_t bucket, uint32_t offset) { bucket_starts[bucket] = offset; });
  parallel_tasks(num_parts, [&](int64_t part) {
    bucket_pass(part).scatter(counters.data() + part * kCounterStreams * num_buckets, num_buckets,
                              sorted.get());
  });

  const auto cost_before = [&](int64_t bucket) { return bucket_starts[bucket] + bucket; };
  std::vector<int64_t> groups_before(num_buckets + 1, 0);
  parallel_balanced(num_buckets, kPartItems, cost_before, [&](int64_t begin, int64_t end) {
    for (int64_t bucket = begin; bucket < end; ++bucket) {
      const int64_t start = bucket_starts[bucket], length = bucket_starts[bucket + 1] - start;
      sort_bucket(sorted.get() + start, items.get() + start, length, low_bits);
      groups_before[bucket + 1] = count_groups(sorted.get() + start, length, no_group_key);
    }
  });
  for (int64_t bucket = 0; bucket < num_buckets; ++bucket)
    groups_before[bucket + 1] += groups_before[bucket];

  parallel_balanced(num_buckets, kPartItems, cost_before, [&](int64_t begin, int64_t end) {
    write_groups(sorted.get(), bucket_starts[begin], bucket_starts[end], groups_before[begin] - 1,
                 no_group_key, out, emit);
  });
  finish_groups(sorted.get(), n, groups_before[num_buckets], no_group_key, out);
}

// A run of neighbouring items with keys in [key_base, key_base + key_range), in any order. It ends
// where the next run begins and may be empty.
struct KeyRun {
  int64_t begin;       // position of its first item
  uint64_t key_base;   // at least the end of the previous run's keys
  uint64_t key_range;  // at most 2^32
};

// Group n items of consecutive runs. `runs` must begin at position 0, and their key ranges must
// ascend and not overlap; neither is checked. Every item belongs to a group. Each run is sorted
// alone, by the bits of its key range, and usually in the cache of a core. `fill(r, put)` must call
// `put(position, key - key_base)` once for each position of run r. `emit(j, position)` is called
// once for every item, as by group_items. One thread makes all calls if num_threads() is 1;
// otherwise several threads may call `fill` and `emit` at once, for different runs. A thread sorts
// whole runs, so all threads wait for the longest run. Throws std::bad_alloc, before the first
// call.
template <class Fill, class Emit>
void group_runs(int64_t n, const std::vector<KeyRun>& runs, const Fill& fill,
                const GroupOutput& out, const Emit& emit) {
  // No item has this key, so every item belongs to a group.
  constexpr uint64_t kNoGroupKey = ~uint64_t{0};
  const int64_t num_runs = static_cast<int64_t>(runs.size());
  const auto run_begin = [&](int64_t run) { return run < num_runs ? runs[run].begin : n; };
  const Scratch<Item32> items = new_scratch<Item32>(n);
  int64_t longest_run = 0;
  for (int64_t run = 0; run < num_runs; ++run)
    longest_run = std::max(longest_run, run_begin(run + 1) - run_begin(run));
  const auto sort_run = [&](int64_t run, Item32* scratch) {
    fill(run, [&](int64_t position, uint64_t key) {
      items[position] = {static_cast<uint32_t>(key), static_cast<uint32_t>(position)};
    });
    Item32* begin = items.get() + runs[run].begin;
    const int64_t length = run_begin(run + 1) - runs[run].begin;
    if (length <= kInsertionSortItems) return sort_bucket(begin, scratch, length, 0);
    const int bits = std::bit_width(runs[run].key_range - 1);
    radix_sort<kUnbucketedStreams, kUnbucketedDigitBits>(
        begin, scratch, length, bits, unbucketed_digit_bits(length, kWideRunItems));
  };
  const auto write_run = [&](int64_t run, int64_t last_group) {
    return write_groups(items.get(), run_begin(run), run_begin(run + 1), last_group, kNoGroupKey,
                        out, emit, runs[run].key_base);
  };
  std::vector<int64_t> groups_before(num_runs + 1, 0);
  if (num_threads() == 1) {
    const Scratch<Item32> scratch = new_scratch<Item32>(longest_run);
    for (int64_t run = 0; run < num_runs; ++run) {
      sort_run(run, scratch.get());
      // Write the groups now, while the items of the run are in the cache.
      groups_before[run + 1] = write_run(run, groups_before[run] - 1) + 1;
    }
  } else {
    const auto cost_before = [&](int64_t run) { return run_begin(run) + run; };
    const Scratch<Item32> scratch = new_scratch<Item32>(n);
    parallel_balanced(num_runs, kRunGrain, cost_before, [&](int64_t begin, int64_t end) {
      // All runs of the range use the same memory, which has room for all of its items.
      Item32* const scratch_of_range = scratch.get() + run_begin(begin);
      for (int64_t run = begin; run < end; ++run) {
        sort_run(run, scratch_of_range);
        groups_before[run + 1] = count_groups(items.get() + run_begin(run),
                                              run_begin(run + 1) - run_begin(run), kNoGroupKey);
      }
    });
    for (int64_t run = 0; run < num_runs; ++run) groups_before[run + 1] += groups_before[run];
    parallel_balanced(num_runs, kRunGrain, cost_before, [&](int64_t begin, int64_t end) {
      for (int64_t run = begin; run < end; ++run) write_run(run, groups_before[run] - 1);
    });
  }
  finish_groups(items.get(), n, groups_before[num_runs], kNoGroupKey, out);
}

// Return the number of parts into which an input of n items should be divided: at least 1, at most
// one per thread.
inline int64_t num_group_parts(int64_t n) {
  return std::clamp<int64_t>(n / kPartItems, 1, num_threads());
}

// The tensors that `group` and `tbe_group` return on the CPU for n keys, uninitialised; see
// GroupOutput for their contents. `output()` points into them.
struct GroupTensors {
  Tensor unique, segments, permutation, num_groups;

  GroupTensors(const Tensor& like, int64_t n, ScalarType unique_type)
      : unique(allocate_output(like, {n}, unique_type)),
        segments(allocate_output(like, {n + 1}, ScalarType::Int)),
        permutation(allocate_output(like, {n}, ScalarType::Int)),
        num_groups(allocate(like, {1}, ScalarType::Int)) {}

  GroupOutput output() const {
    return {unique.mutable_data_ptr(), unique.scalar_type() == ScalarType::Long,
            segments.mutable_data_ptr<int32_t>(), permutation.mutable_data_ptr<int32_t>(),
            num_groups.mutable_data_ptr<int32_t>()};
  }
};

}  // namespace emb
