// The ops of the hash index on the CPU: find and touch keys, list the misses of a batch, grow
// tables, insert new keys, erase and expire keys, and read, write and add rows by slot. The ops
// throw for wrong arguments before they change anything; check.h describes arguments, checks and
// results. No result depends on the number of threads. The kernels are in find_kernels.cpp and
// insert_kernels.cpp.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <numeric>
#include <tuple>
#include <vector>

#include "core/isa.h"
#include "core/parallel.h"
#include "core/scratch.h"
#include "hash/args.h"
#include "hash/entries.h"

namespace emb {

EMB_SELECT_KERNELS(HashInsertKernels, kHashInsertKernels, hash_insert_kernels)

namespace {

// Return the slot of each key, int64 [n], -1 for a missing key. Changes nothing.
Tensor hash_find(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                 const Tensor& tables) {
  const HashCall call("hash_find", tensors, ids, starts, tables);
  call.check_contents();
  Tensor slots = allocate(ids, {call.batch.n});
  find_keys(call.index, call.batch, slots.mutable_data_ptr<int64_t>());
  return slots;
}

// A scratch hash table, with open addressing, of the misses of one table. A cell has the number of
// a miss, or -1; the key of miss m is ids[first_positions[m]].
class MissSet {
 public:
  // The caller may add at most `max_keys` keys.
  MissSet(const int64_t* ids, const int64_t* first_positions, int64_t max_keys)
      : ids_(ids),
        first_positions_(first_positions),
        mask_(std::bit_ceil(static_cast<uint64_t>(2 * max_keys + 1)) - 1),
        hash_key_(batch_hash_key()),
        cells_(new int32_t[mask_ + 1]) {
    std::memset(cells_.get(), 0xff, (mask_ + 1) * sizeof(int32_t));
  }

  void prefetch(int64_t key) const { __builtin_prefetch(&cells_[cell_of(key)], 1); }

  // Return the miss of `key`. A new key becomes the miss `new_miss`, whose first position the
  // caller must have written.
  int32_t find_or_add(int64_t key, int32_t new_miss) {
    for (uint64_t cell = cell_of(key);; cell = (cell + 1) & mask_) {
      if (cells_[cell] < 0) return cells_[cell] = new_miss;
      if (ids_[first_positions_[cells_[cell]]] == key) return cells_[cell];
    }
  }

 private:
  uint64_t cell_of(int64_t key) const {
    return mix(static_cast<uint64_t>(key) ^ hash_key_) & mask_;
  }

  const int64_t* ids_;
  const int64_t* first_positions_;
  uint64_t mask_, hash_key_;
  std::unique_ptr<int32_t[]> cells_;
};

// The data of three results of hash_touch_, see TouchCall.
struct MissOutput {
  int64_t* first_positions;
  int32_t* groups;
  int64_t* totals;
};

// Add the misses of a segment to `out`, which has `num_misses` misses so far. Return the new number
// of misses. `slots` and `counts` are by position; null `counts` are 1 each. `set` has the misses
// of the segment's table that are in `out`.
int64_t add_misses(const HashBatch& batch, int64_t segment, const int64_t* slots,
                   const int64_t* counts, int64_t num_misses, const MissOutput& out, MissSet* set) {
  constexpr int64_t kKeysAhead = 16;  // keys between a prefetch and the read
  const int64_t end = batch.starts[segment + 1];
  for (int64_t i = batch.starts[segment]; i < end; ++i) {
    if (i + kKeysAhead < end && slots[i + kKeysAhead] < 0) set->prefetch(batch.ids[i + kKeysAhead]);
    if (slots[i] >= 0) {
      out.groups[i] = -1;
      continue;
    }
    out.first_positions[num_misses] = i;  // replaced later unless the key is new
    const int32_t miss = set->find_or_add(batch.ids[i], static_cast<int32_t>(num_misses));
    if (miss == num_misses) out.totals[num_misses++] = 0;
    out.groups[i] = miss;
    out.totals[miss] = add_uses(out.totals[miss], counts == nullptr ? 1 : counts[i]);
  }
  return num_misses;
}

// Write the results of `call` about misses, all except `slots`, which has the slot of each
// position, [n].
void list_misses(const TouchCall& call, const int64_t* slots) {
  const HashBatch& batch = call.batch;
  const int64_t num_tables = call.index.num_tables;
  const MissOutput out{call.first_positions.mutable_data_ptr<int64_t>(),
                       call.groups.mutable_data_ptr<int32_t>(),
                       call.totals.mutable_data_ptr<int64_t>()};
  int64_t* offsets = call.offsets.mutable_data_ptr<int64_t>();
  std::vector<int64_t> num_missing(num_tables, 0);  // by table: positions without a slot
  for (int64_t f = 0; f < batch.num_segments; ++f) {
    num_missing[batch.tables[f]] +=
        std::count_if(slots + batch.starts[f], slots + batch.starts[f + 1],
                      [](int64_t slot) { return slot < 0; });
  }
  int64_t num_misses = offsets[0] = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    MissSet set(batch.ids, out.first_positions, num_missing[t]);
    // This visits all segments for every table. A batch has about as many segments as features, few
    // compared with the keys.
    for (int64_t f = 0; f < batch.num_segments; ++f) {
      if (batch.tables[f] != t) continue;
      num_misses = add_misses(batch, f, slots, call.counts, num_misses, out, &set);
    }
    offsets[t + 1] = num_misses;
  }
  std::fill(out.first_positions + num_misses, out.first_positions + batch.n, 0);
  std::fill(out.totals + num_misses, out.totals + batch.n, 0);
}

// Begin a training step: advance the clock, find the keys, update the entries of hits, count
// lookups and hits, and list the misses. TouchCall describes the arguments and results.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_touch_(
    std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts, const Tensor& tables,
    std::optional<Tensor> counts, std::optional<Tensor> batch_scores, int64_t order) {
  const TouchCall call(tensors, ids, starts, tables, counts, batch_scores, order);
  call.check_contents();
  const HashIndex& index = call.index;
  const HashBatch& batch = call.batch;
  int64_t* out = call.slots.mutable_data_ptr<int64_t>();
  const int64_t stamp = ++*index.clock;
  const HashFindKernels& kernels = hash_find_kernels();
  parallel_segments(batch, [&](int64_t f, int64_t begin, int64_t end) {
    const int64_t t = batch.tables[f];
    const HashTouch touch{call.scoring.order, stamp, call.scoring.score_of(t),
                          call.counts == nullptr ? nullptr : call.counts + begin,
                          index.queues_of(t)};
    const int64_t hits =
        kernels.find(index.table(t), batch.ids + begin, end - begin, &touch, out + begin);
    __atomic_fetch_add(&index.counter(t, HashCounter::kLookups), end - begin, __ATOMIC_RELAXED);
    __atomic_fetch_add(&index.counter(t, HashCounter::kHits), hits, __ATOMIC_RELAXED);
  });
  list_misses(call, out);
  return call.results();
}

// Grains of parallel_balanced, for misses that choose in a round and for new buckets.
constexpr int64_t kChooserGrain = 1024, kBucketGrain = 256;

// Fill the new buckets of table t, which had `old_buckets` buckets, from the old buckets that are
// split, and empty the eviction queues of both. kBuckets must have the new number already.
void grow_table(const HashIndex& index, int64_t t, int64_t old_buckets, const RowBuffer* buffers,
                int num_buffers) {
  const HashTable table = index.table(t);
  const HashInsertKernels& kernels = hash_insert_kernels();
  parallel_balanced(table.num_buckets - old_buckets, kBucketGrain, kUnitCost,
                    [&](int64_t begin, int64_t end) {
                      kernels.split(table, old_buckets, buffers, num_buffers, old_buckets + begin,
                                    old_buckets + end);
                    });
  EvictionQueue* queues = index.queues_of(t);
  if (queues == nullptr) return;
  const uint64_t old_mask = address_mask(old_buckets);
  for (int64_t bucket = old_buckets; bucket < table.num_buckets; ++bucket) {
    queues[bucket] = {};
    queues[bucket_address(static_cast<uint64_t>(bucket), old_buckets, old_mask)] = {};
  }
}

// Split as many buckets of every table as it needs for its keys and its admitted misses
// (wanted_buckets), move rows with their entries, and correct the `slots` of the batch's positions.
// GrowCall describes the arguments.
void hash_grow_(std::vector<Tensor> tensors, std::vector<Tensor> row_buffers,
                const Tensor& row_layout, const Tensor& ids, const Tensor& starts,
                const Tensor& tables, Tensor slots, const Tensor& offsets,
                std::optional<Tensor> admitted) {
  const GrowCall call(tensors, row_buffers, row_layout, ids, starts, tables, slots, offsets,
                      admitted);
  call.check_contents();
  const HashIndex& index = call.index;
  const HashBatch& batch = call.batch;
  const Misses& misses = call.misses;
  const RowBuffers buffers(call.op, index, row_buffers, row_layout);
  std::vector<bool> has_grown(index.num_tables, false);
  for (int64_t t = 0; t < index.num_tables; ++t) {
    const int64_t old_buckets = index.field(t, HashTableColumn::kBuckets);
    const int64_t wanted = wanted_buckets(
        index.field(t, HashTableColumn::kSize) + misses.num_admitted(t), old_buckets,
        index.field(t, HashTableColumn::kMaxBuckets), index.field(t, HashTableColumn::kMaxLoad));
    if (wanted == old_buckets) continue;
    has_grown[t] = true;
    index.field(t, HashTableColumn::kBuckets) = wanted;
    grow_table(index, t, old_buckets, buffers.buffers_of(t), buffers.num_buffers);
  }
  for (int64_t f = 0; f < batch.num_segments; ++f) {
    if (!has_grown[batch.tables[f]]) continue;
    const int64_t begin = batch.starts[f];
    hash_find_kernels().refresh(index.table(batch.tables[f]), batch.ids + begin,
                                batch.starts[f + 1] - begin, call.slots + begin);
  }
}

// Run one round of an insertion: the n misses in `pending`, in ascending order, choose, then the
// choices are executed, both in parallel. Write `choices` [n] and the results in `insertion`.
void run_round(const HashInsertion& insertion, const int64_t* pending, int64_t n, Choice* choices) {
  const HashInsertKernels& kernels = hash_insert_kernels();
  const int64_t buckets = insertion.table.num_buckets;
  parallel_balanced(n, kChooserGrain, kUnitCost, [&](int64_t begin, int64_t end) {
    const bool is_shared = end - begin < n;  // other threads choose too
    kernels.choose(insertion, is_shared, pending + begin, end - begin, choices + begin);
  });
  const int64_t num_parts = std::clamp<int64_t>(n / kChooserGrain, 1, num_threads());
  parallel_tasks(num_parts, [&](int64_t part) {
    kernels.commit(insertion, pending, n, choices, buckets * part / num_parts,
                   buckets * (part + 1) / num_parts);
  });
}

// Insert the admitted misses of a table, which has the misses [begin, end). In every round more
// misses may choose (max_choosers), and misses that got no slot in earlier rounds choose again. The
// rounds end when every admitted miss has a slot or is refused. `pending` and `choices` are scratch
// memory, [end - begin] each.
void insert_into_table(const HashInsertion& insertion, const Misses& misses, int64_t begin,
                       int64_t end, int64_t* pending, Choice* choices) {
  int64_t n = 0;  // number of pending misses
  int64_t next_miss = begin;
  for (int round = 0; next_miss < end || n > 0; ++round) {
    const int64_t num_choosers =
        std::min(max_choosers(insertion.table.num_buckets, round), end - begin);
    for (; next_miss < begin + num_choosers; ++next_miss) {
      if (misses.is_admitted(next_miss)) pending[n++] = next_miss;
    }
    run_round(insertion, pending, n, choices);
    int64_t num_pending = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t miss = pending[i];
      if (choices[i].mode == Choice::kRefused) {
        insertion.status[miss] = static_cast<uint8_t>(InsertStatus::kRefused);
      } else if (insertion.slots[miss] == kNoSlot) {
        pending[num_pending++] = miss;
      }
    }
    n = num_pending;
  }
}

// Add the results of an insertion to the counters and the size of table t. `status` has the
// statuses of its n misses.
void count_statuses(const HashIndex& index, int64_t t, const uint8_t* status, int64_t n) {
  constexpr int kStatuses = 8;  // a power of two, so that any masked byte is an index
  static_assert(static_cast<int>(InsertStatus::kNotAdmitted) < kStatuses);
  int64_t counts[kStatuses] = {};
  for (int64_t i = 0; i < n; ++i) ++counts[status[i] & (kStatuses - 1)];
  const auto count_of = [&](InsertStatus s) { return counts[static_cast<int>(s)]; };
  index.counter(t, HashCounter::kInserted) +=
      count_of(InsertStatus::kNew) + count_of(InsertStatus::kEvicting);
  index.counter(t, HashCounter::kEvicted) += count_of(InsertStatus::kEvicting);
  index.counter(t, HashCounter::kRefused) += count_of(InsertStatus::kRefused);
  index.counter(t, HashCounter::kNotAdmitted) += count_of(InsertStatus::kNotAdmitted);
  index.field(t, HashTableColumn::kSize) += count_of(InsertStatus::kNew);
}

}  // namespace

// The contract is in hash/entries.h.
void insert_misses(const HashIndex& index, const HashScoring& scoring, bool must_compete,
                   const Misses& misses, const MissArrays& arrays) {
  int64_t max_misses = 0, max_buckets = 0;  // of a table with misses
  for (int64_t t = 0; t < index.num_tables; ++t) {
    if (misses.begin(t) == misses.end(t)) continue;
    max_misses = std::max(max_misses, misses.end(t) - misses.begin(t));
    max_buckets = std::max(max_buckets, index.field(t, HashTableColumn::kBuckets));
  }
  const Scratch<int64_t> pending = new_scratch<int64_t>(max_misses);
  const Scratch<Choice> choices = new_scratch<Choice>(max_misses);
  const Scratch<EvictionQueue> scratch_queues =  // for an index without queues
      new_scratch<EvictionQueue>(index.queues == nullptr ? max_buckets : 0);
  std::fill(arrays.slots, arrays.slots + misses.count(), kNoSlot);
  std::fill(arrays.status, arrays.status + misses.count(),
            static_cast<uint8_t>(InsertStatus::kMiss));
  for (int64_t t = 0; t < index.num_tables; ++t) {
    const int64_t begin = misses.begin(t), end = misses.end(t);
    if (begin == end) continue;
    EvictionQueue* queues = index.queues_of(t);
    if (queues == nullptr) {
      queues = scratch_queues.get();
      std::fill_n(queues, index.field(t, HashTableColumn::kBuckets), EvictionQueue{});
    }
    for (int64_t i = begin; i < end; ++i) {
      if (!misses.is_admitted(i)) {
        arrays.status[i] = static_cast<uint8_t>(InsertStatus::kNotAdmitted);
      }
    }
    const HashInsertion insertion{.table = index.table(t),
                                  .order = scoring.order,
                                  .must_compete = must_compete,
                                  .stamp = *index.clock,
                                  .batch_score = scoring.score_of(t),
                                  .ids = arrays.ids,
                                  .first_positions = arrays.first_positions,
                                  .totals = arrays.totals,
                                  .slots = arrays.slots,
                                  .status = arrays.status,
                                  .evicted = arrays.evicted,
                                  .queues = queues};
    insert_into_table(insertion, misses, begin, end, pending.get(), choices.get());
    count_statuses(index, t, arrays.status + begin, end - begin);
  }
}

namespace {

// Write the slot and the status of every position of the batch if the caller wants them. A position
// whose key was missing gets the slot and status of its miss. Any other position keeps its slot
// from before the insertion and gets the status kHit.
void fill_positions(const InsertCall& call) {
  const auto* inserted = call.inserted.const_data_ptr<int64_t>();
  const auto* status = static_cast<const uint8_t*>(call.status.const_data_ptr());
  int64_t* key_slots = call.key_slots.mutable_data_ptr<int64_t>();
  auto* key_status = static_cast<uint8_t*>(call.key_status.mutable_data_ptr());
  parallel_balanced(call.num_positions, kKeyGrain, kUnitCost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int32_t group = call.groups[i];
      key_slots[i] = group < 0 ? call.slots[i] : inserted[group];
      key_status[i] = group < 0 ? static_cast<uint8_t>(InsertStatus::kHit) : status[group];
    }
  });
}

// Insert the admitted misses of a batch. Each gets an empty slot or the slot of an entry that the
// batch does not use, which is evicted; otherwise it is refused. InsertCall describes the arguments
// and results.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_insert_(
    std::vector<Tensor> tensors, const Tensor& ids, const Tensor& first_positions,
    const Tensor& totals, const Tensor& offsets, std::optional<Tensor> admitted,
    std::optional<Tensor> batch_scores, int64_t order, int64_t insert_policy,
    std::optional<Tensor> slots, std::optional<Tensor> groups) {
  const InsertCall call(tensors, ids, first_positions, totals, offsets, admitted, batch_scores,
                        order, insert_policy, slots, groups);
  call.check_contents();
  const HashIndex& index = call.index;
  const Misses& misses = call.misses;
  int64_t* inserted = call.inserted.mutable_data_ptr<int64_t>();
  auto* status = static_cast<uint8_t*>(call.status.mutable_data_ptr());
  std::fill(inserted + misses.count(), inserted + call.n, kNoSlot);
  std::fill(status + misses.count(), status + call.n, static_cast<uint8_t>(InsertStatus::kMiss));
  int64_t* evicted = call.evicted.mutable_data_ptr<int64_t>();
  std::fill(evicted, evicted + 3 * call.n, 0);  // makes unspecified entries reproducible
  insert_misses(index, call.scoring, call.must_compete, misses,
                {call.ids, call.first_positions, call.totals, inserted, status, evicted});
  fill_positions(call);
  return call.results();
}

// Remove keys. Return the slot that each position emptied, int64 [n], or -1 if its key is missing
// or an earlier position removed it.
Tensor hash_erase_(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                   const Tensor& tables) {
  const HashCall call("hash_erase_", tensors, ids, starts, tables);
  call.check_contents();
  const HashIndex& index = call.index;
  const HashBatch& batch = call.batch;
  Tensor slots = allocate(ids, {batch.n});
  int64_t* out = slots.mutable_data_ptr<int64_t>();
  for (int64_t f = 0; f < batch.num_segments; ++f) {
    const int64_t t = batch.tables[f], begin = batch.starts[f], n = batch.starts[f + 1] - begin;
    const HashTable table = index.table(t);
    EvictionQueue* queues = index.queues_of(t);
    hash_find_kernels().find(table, batch.ids + begin, n, nullptr, out + begin);
    int64_t num_erased = 0;
    for (int64_t i = begin; i < begin + n; ++i) {
      if (out[i] == kNoSlot) continue;
      if (table.tags[out[i]] == kEmptyTag) {  // erased by an earlier position
        out[i] = kNoSlot;
        continue;
      }
      remove_entry(table, queues, out[i]);
      ++num_erased;
    }
    index.field(t, HashTableColumn::kSize) -= num_erased;
    index.counter(t, HashCounter::kErased) += num_erased;
  }
  return slots;
}

// Remove the keys of table `table_number` whose stamp is less than `min_stamp` from its buckets
// [first_bucket, first_bucket + num_buckets), which must lie below its kMaxBuckets. Return whether
// each slot of these buckets was emptied, bool [num_buckets * 32]; false in buckets that are not in
// use.
Tensor hash_expire_(std::vector<Tensor> tensors, int64_t table_number, int64_t first_bucket,
                    int64_t num_buckets, int64_t min_stamp) {
  const char* op = "hash_expire_";
  const HashIndex index(op, tensors);
  index.check_tables(op);
  index.check_table(op, table_number);
  check_window(op, index.field(table_number, HashTableColumn::kMaxBuckets), first_bucket,
               num_buckets);
  Tensor removed = allocate_zeros(tensors[0], {num_buckets * kBucketSlots}, ScalarType::Bool);
  bool* is_removed = static_cast<bool*>(removed.mutable_data_ptr());
  const HashTable table = index.table(table_number);
  EvictionQueue* queues = index.queues_of(table_number);
  const int64_t begin = first_bucket * kBucketSlots;
  const int64_t end = std::min(first_bucket + num_buckets, table.num_buckets) * kBucketSlots;
  int64_t num_expired = 0;
  for (int64_t slot = begin; slot < end; ++slot) {
    if (table.tags[slot] == kEmptyTag || table.entry(slot)[HashEntry::kStamp] >= min_stamp)
      continue;
    remove_entry(table, queues, slot);
    is_removed[slot - begin] = true;
    ++num_expired;
  }
  index.field(table_number, HashTableColumn::kSize) -= num_expired;
  index.counter(table_number, HashCounter::kExpired) += num_expired;
  return removed;
}

// Copy a row of `bytes` bytes, an even number, from `from`. If that is null, write `default_word`
// (RowMatrix) repeatedly.
void copy_row(char* to, const char* from, int64_t bytes, uint32_t default_word) {
  if (from != nullptr) {
    std::memcpy(to, from, bytes);
    return;
  }
  for (int64_t i = 0; i < bytes; i += 2)
    std::memcpy(to + i, reinterpret_cast<char*>(&default_word) + i % 4, 2);
}

// Return the row in a slot, null if the matrix has no such slot.
char* row_in_slot(const RowBytes& rows, int64_t slot) {
  if (slot < 0 || slot >= rows.num_rows) return nullptr;
  return static_cast<char*>(rows.data) + slot * rows.stride;
}

constexpr int64_t kRowGrain = 1 << 15;  // grain of parallel_balanced for rows, in bytes
constexpr int64_t kCopyCost = 16;       // fixed cost of the copy of a row, in bytes

// Divide n copies of rows into ranges, and call `body(begin, end)` for all ranges in parallel.
template <class Body>
void parallel_rows(int64_t n, const RowBytes& rows, const Body& body) {
  parallel_balanced(
      n, kRowGrain, [&](int64_t i) { return i * (rows.row_bytes + kCopyCost); }, body);
}

// Copy the row in slots[i] to row i of `out`, for i in [begin, end). For a slot without a row,
// write `default_word` repeatedly.
void read_rows(const RowBytes& rows, const int64_t* slots, int64_t begin, int64_t end,
               uint32_t default_word, char* out) {
  for (int64_t i = begin; i < end; ++i) {
    if (i + kRowsAhead < end) __builtin_prefetch(row_in_slot(rows, slots[i + kRowsAhead]));
    copy_row(out + i * rows.row_bytes, row_in_slot(rows, slots[i]), rows.row_bytes, default_word);
  }
}

// Find keys and read their rows. FindRowsCall describes the arguments and results.
std::tuple<Tensor, Tensor> hash_find_rows(std::vector<Tensor> tensors, const Tensor& ids,
                                          const Tensor& starts, const Tensor& tables,
                                          const Tensor& values, double default_value) {
  const FindRowsCall call(tensors, ids, starts, tables, values, default_value);
  call.check_contents();
  const HashIndex& index = call.index;
  const HashBatch& batch = call.batch;
  const RowBytes source = call.matrix.as_bytes({});
  auto* out = static_cast<char*>(call.rows.mutable_data_ptr());
  bool* is_found = static_cast<bool*>(call.found.mutable_data_ptr());
  const HashFindKernels& kernels = hash_find_kernels();
  parallel_segments(batch, [&](int64_t f, int64_t begin, int64_t end) {
    constexpr int64_t kBlockKeys = 512;  // keys whose slots are on the stack
    int64_t slots[kBlockKeys];
    const int64_t t = batch.tables[f],
                  first_slot = index.field(t, HashTableColumn::kFirstBucket) * kBucketSlots;
    for (; begin < end; begin += kBlockKeys) {
      const int64_t n = std::min(kBlockKeys, end - begin);
      kernels.find(index.table(t), batch.ids + begin, n, nullptr, slots);
      for (int64_t i = 0; i < n; ++i) {
        is_found[begin + i] = slots[i] >= 0;
        if (slots[i] >= 0) slots[i] += first_slot;
      }
      read_rows(source, slots, 0, n, call.default_word, out + begin * source.row_bytes);
    }
  });
  return {call.rows, call.found};
}

// Read the row in each slot. ReadRowsCall describes the arguments and the result.
Tensor hash_read_rows(const Tensor& values, const Tensor& slots, double default_value) {
  const ReadRowsCall call("hash_read_rows", values, slots, default_value);
  const RowBytes source = call.matrix.as_bytes({});
  auto* out = static_cast<char*>(call.rows.mutable_data_ptr());
  parallel_rows(call.n, source, [&](int64_t begin, int64_t end) {
    read_rows(source, call.slots, begin, end, call.default_word, out);
  });
  return call.rows;
}

// Write the starting rows of new keys, and read the row of every position if `returns_rows`.
// StartRowsCall describes the arguments and the result.
Tensor hash_start_rows_(Tensor values, const Tensor& slots, const Tensor& groups,
                        const Tensor& first_positions, const Tensor& starting, double default_value,
                        bool returns_rows) {
  const StartRowsCall call(values, slots, groups, first_positions, starting, default_value,
                           returns_rows);
  call.check_contents();
  const RowBytes target = call.matrix.as_bytes({});
  const auto* starting_rows = static_cast<const char*>(call.starting);
  auto* out = static_cast<char*>(call.rows.mutable_data_ptr());
  parallel_rows(call.n, target, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < end) __builtin_prefetch(row_in_slot(target, call.slots[i + kRowsAhead]));
      char* row = row_in_slot(target, call.slots[i]);
      const char* source = row;
      if (row != nullptr && call.groups[i] >= 0) {
        const int64_t first_position = call.first_positions[call.groups[i]];
        source = starting_rows + first_position * target.row_bytes;
        if (first_position == i) copy_row(row, source, target.row_bytes, 0);
      }
      if (returns_rows)
        copy_row(out + i * target.row_bytes, source, target.row_bytes, call.default_word);
    }
  });
  return call.rows;
}

// Write a row to each slot. If a slot is repeated, its last row remains. Slots outside the matrix
// are skipped. A hash of the slot assigns it to one part of the work. Every part visits all
// positions in order, so the rows of a slot are written in order.
void hash_write_rows_(Tensor values, const Tensor& slots, const Tensor& rows) {
  const WriteRowsCall call("hash_write_rows_", values, slots, rows);
  const RowBytes target = call.matrix.as_bytes({});
  const auto* source = static_cast<const char*>(call.rows);
  const int64_t num_parts =
      std::clamp<int64_t>(call.n * (target.row_bytes + kCopyCost) / kRowGrain, 1, num_threads());
  parallel_tasks(num_parts, [&](int64_t part) {
    for (int64_t i = 0; i < call.n; ++i) {
      char* row = row_in_slot(target, call.slots[i]);
      const bool is_in_part =
          num_parts == 1 || static_cast<int64_t>(mix(static_cast<uint64_t>(call.slots[i])) %
                                                 static_cast<uint64_t>(num_parts)) == part;
      if (row != nullptr && is_in_part)
        std::memcpy(row, source + i * target.row_bytes, target.row_bytes);
    }
  });
}

// Add the rows of group g to the row in its slot, one after the other. Round every sum to T.
template <class T>
void add_group(const AddRowsCall& call, const RowBytes& target, int64_t g) {
  auto* row = reinterpret_cast<T*>(row_in_slot(target, call.slots[g]));
  if (row == nullptr) return;
  for (int64_t j = call.segments[g]; j < call.segments[g + 1]; ++j) {
    const T* addend = static_cast<const T*>(call.rows) + call.permutation[j] * call.matrix.dim;
    for (int64_t k = 0; k < call.matrix.dim; ++k) {
      row[k] = from_float<T>(to_float(row[k]) + to_float(addend[k]));
    }
  }
}

// Add rows to the rows in slots; groups whose slot has no row are skipped. AddRowsCall describes
// the arguments.
void hash_add_rows_(Tensor values, const Tensor& slots, const Tensor& segments,
                    const Tensor& permutation, const Tensor& count, const Tensor& rows) {
  const AddRowsCall call(values, slots, segments, permutation, count, rows);
  call.check_contents();
  const RowBytes target = call.matrix.as_bytes({});
  const auto cost = [&](int64_t g) {
    return (call.segments[g] + g) * (target.row_bytes + kCopyCost);
  };
  parallel_balanced(*call.count, kRowGrain, cost, [&](int64_t begin, int64_t end) {
    for (int64_t g = begin; g < end; ++g) {
      with_dtype(call.dtype,
                 [&](auto tag) { add_group<typename decltype(tag)::type>(call, target, g); });
    }
  });
}

// Gather the keys that an insertion evicted, with their stamps, scores and rows, and count them.
// Elements after the last evicted key are 0. EvictedRowsCall describes the arguments and results.
std::tuple<Tensor, std::vector<Tensor>, Tensor, Tensor, Tensor> hash_evicted_rows(
    std::vector<Tensor> values, const Tensor& slots, const Tensor& status, const Tensor& evicted) {
  EvictedRowsCall call(values, slots, status, evicted);
  std::vector<int64_t> misses;
  for (int64_t i = 0; i < call.n; ++i) {
    if (call.status[i] == static_cast<uint8_t>(InsertStatus::kEvicting)) misses.push_back(i);
  }
  const auto count = static_cast<int64_t>(misses.size());
  *call.count.mutable_data_ptr<int64_t>() = count;
  for (Tensor* tensor : {&call.keys, &call.stamps, &call.scores}) torch::stable::zero_(*tensor);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t* words = call.evicted_words + 3 * misses[i];
    call.keys.mutable_data_ptr<int64_t>()[i] = words[HashEntry::kKey];
    call.stamps.mutable_data_ptr<int64_t>()[i] = words[HashEntry::kStamp];
    call.scores.mutable_data_ptr<int64_t>()[i] = words[HashEntry::kScore];
  }
  for (size_t p = 0; p < call.rows.size(); ++p) {
    torch::stable::zero_(call.rows[p]);
    const RowBytes source = call.matrices[p].as_bytes({});
    auto* out = static_cast<char*>(call.rows[p].mutable_data_ptr());
    parallel_rows(count, source, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        copy_row(out + i * source.row_bytes, row_in_slot(source, call.slots[misses[i]]),
                 source.row_bytes, 0);
      }
    });
  }
  return call.results();
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, hash_find_rows);
  EMB_IMPL(m, emb, hash_read_rows);
  EMB_IMPL(m, emb, hash_start_rows_);
  EMB_IMPL(m, emb, hash_write_rows_);
  EMB_IMPL(m, emb, hash_add_rows_);
  EMB_IMPL(m, emb, hash_evicted_rows);
  EMB_IMPL(m, emb, hash_find);
  EMB_IMPL(m, emb, hash_touch_);
  EMB_IMPL(m, emb, hash_grow_);
  EMB_IMPL(m, emb, hash_insert_);
  EMB_IMPL(m, emb, hash_erase_);
  EMB_IMPL(m, emb, hash_expire_);
}
