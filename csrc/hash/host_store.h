// The store of a table in host memory, on the CPU: an index of its keys and a record per slot. The
// ops that move rows between a dynamic table and its store share it (tier_batch_cpu.cpp,
// tiers_cpu.cpp).
#pragma once

#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "core/scratch.h"
#include "hash/entries.h"

namespace emb {

// Return the first `count` rows of a tensor, a view unless these are all.
inline Tensor first_rows(Tensor tensor, int64_t count) {
  return count == tensor.size(0) ? tensor : torch::stable::narrow(tensor, 0, 0, count);
}

// A store of one table: an index, and one record per slot of the index or more. A record has the
// words of RecordWord, then a packed row. `order` decides which keys are evicted: by their stamps
// or their uses. Functions check neither keys nor slots.
struct HostStore {
  enum RecordWord { kStampWord, kScoreWord, kNumRecordWords };

  HashIndex index;
  HashScoring scoring;
  Records records;
  int64_t row_bytes;

  // Throws unless the index has one table, the order with the number `order` ranks by stamps or
  // uses, and records are [S or more, words and row_bytes] for an index of S slots.
  HostStore(const char* op, const std::vector<Tensor>& index_, const Tensor& records_,
            int64_t row_bytes_, int64_t order)
      : index(op, index_),
        scoring(op, index, checked_order(op, order), std::nullopt, index_[0]),
        records(op, records_, row_bytes_),
        row_bytes(row_bytes_) {
    index.check_tables(op);
    STD_TORCH_CHECK(index.num_tables == 1, op, ": a store has one table, got ", index.num_tables);
    STD_TORCH_CHECK(records.record_bytes == kNumRecordWords * Records::kWordBytes + row_bytes &&
                        records.num_records >= index.num_slots,
                    op, ": records must have two words and a row of ", row_bytes,
                    " bytes for each of ", index.num_slots, " slots, got [", records.num_records,
                    ", ", records.record_bytes, "]");
  }

  // Return the score in the record in a slot.
  int64_t score(int64_t slot) const {
    int64_t score;
    std::memcpy(&score, records.at(slot) + kScoreWord * Records::kWordBytes, sizeof(score));
    return score;
  }
  // Return the row in the record in a slot.
  const char* row(int64_t slot) const { return records.at(slot) + records.head_bytes(); }

  // Write the slots of n keys to `slots`, kNoSlot for keys without a record.
  void find(const int64_t* keys, int64_t n, int64_t* slots) const {
    const HashTable table = index.table(0);
    parallel_balanced(n, kKeyGrain, kUnitCost, [&](int64_t begin, int64_t end) {
      hash_find_kernels().find(table, keys + begin, end - begin, nullptr, slots + begin);
    });
  }

  // Remove the keys in n slots; the records stay until other keys get the slots. Slots that are
  // empty or kNoSlot are ignored.
  void erase(const int64_t* slots, int64_t n) const {
    const HashTable table = index.table(0);
    EvictionQueue* const queues = index.queues_of(0);
    int64_t num_erased = 0;
    for (int64_t i = 0; i < n; ++i) {
      if (slots[i] == kNoSlot || table.tags[slots[i]] == kEmptyTag) continue;
      remove_entry(table, queues, slots[i]);
      ++num_erased;
    }
    index.field(0, HashTableColumn::kSize) -= num_erased;
    index.counter(0, HashCounter::kErased) += num_erased;
  }

 private:
  static int64_t checked_order(const char* op, int64_t order) {
    const auto parsed = parse_choice<HashOrder>(op, "order", order, kHashOrders);
    STD_TORCH_CHECK(parsed != HashOrder::kNone && parsed != HashOrder::kAssigned, op,
                    ": a store evicts by stamps or by counts of uses");
    return order;
  }
};

// Rows that enter a store, in three steps: `insert` finds slots for the keys, `for_each_dropped`
// tells which rows the store drops, and `write` writes the records. A row replaces the stored row
// of its key. A new key whose buckets are full evicts the row of the lowest rank in them that the
// same object did not put; if there is none, the new row is dropped.
class StorePut {
 public:
  // Allocates the memory for at most `max_rows` rows. `store` must outlive this object.
  StorePut(const HostStore& store, int64_t max_rows)
      : store_(store),
        keys_(new_scratch<int64_t>(max_rows)),
        zeros_(new_scratch<int64_t>(max_rows)),
        slots_(new_scratch<int64_t>(max_rows)),
        new_positions_(new_scratch<int64_t>(max_rows)),
        scores_(new_scratch<int64_t>(max_rows)),
        new_slots_(new_scratch<int64_t>(max_rows)),
        evicted_(new_scratch<int64_t>(3 * max_rows)),
        status_(new_scratch<uint8_t>(max_rows)) {}

  // Insert the keys of n <= max_rows entries, [n, 3]: key, stamp and score. Keys must be distinct;
  // not checked. `entries` must stay until `write` has returned. The clock of the store advances
  // beyond all stamps; nothing happens if n is 0. Memory for new keys is allocated before any of
  // them is inserted.
  void insert(const int64_t* entries, int64_t n) {
    entries_ = entries;
    n_ = n;
    if (n == 0) return;
    const HashIndex& index = store_.index;
    int64_t newest = *index.clock;
    for (int64_t i = 0; i < n; ++i) {
      keys_[i] = entries[3 * i + HashEntry::kKey];
      newest = std::max(newest, entries[3 * i + HashEntry::kStamp]);
    }
    // Only entries with stamps below the clock are evicted: every stored row but those that this
    // call replaces, which get the new clock as their stamp, and those that it adds.
    *index.clock = newest + 1;
    std::fill(zeros_.get(), zeros_.get() + n, 0);
    touch_stored_keys();
    num_new_ = 0;
    for (int64_t i = 0; i < n; ++i) {
      new_positions_[num_new_] = i;
      scores_[num_new_] = entries[3 * i + HashEntry::kScore];  // new rows rank by their scores
      num_new_ += slots_[i] == kNoSlot;
    }
    index.counter(0, HashCounter::kLookups) += n;
    index.counter(0, HashCounter::kHits) += n - num_new_;
    const int64_t offsets[2] = {0, num_new_};
    insert_misses(index, store_.scoring, /*must_compete=*/false,
                  Misses(1, offsets, /*admitted=*/nullptr),
                  {keys_.get(), new_positions_.get(), scores_.get(), new_slots_.get(),
                   status_.get(), evicted_.get()});
    for (int64_t i = 0; i < num_new_; ++i) slots_[new_positions_[i]] = new_slots_[i];
  }

  // Call `on_evicted(slot, entry)` for each entry that `insert` evicted, whose record is in its
  // slot until `write`, then `on_refused(position)` for each of the n entries that got no slot.
  template <class OnEvicted, class OnRefused>
  void for_each_dropped(const OnEvicted& on_evicted, const OnRefused& on_refused) const {
    for (int64_t i = 0; i < num_new_; ++i) {
      if (status_[i] == static_cast<uint8_t>(InsertStatus::kEvicting)) {
        on_evicted(new_slots_[i], evicted_.get() + 3 * i);
      }
    }
    for (int64_t i = 0; i < n_; ++i) {
      if (slots_[i] == kNoSlot) on_refused(i);
    }
  }

  // Write the records of the keys that got a slot: their stamps and scores, and `rows`, [n,
  // row_bytes].
  void write(const char* rows) const {
    const Records& records = store_.records;
    const int64_t bytes = store_.row_bytes;
    const auto cost = [&](int64_t i) { return records.record_bytes * i; };
    parallel_balanced(n_, kCopyGrain, cost, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (i + kRowsAhead < end && slots_[i + kRowsAhead] != kNoSlot) {
          prefetch_row(records.at(slots_[i + kRowsAhead]), records.record_bytes);
        }
        if (slots_[i] == kNoSlot) continue;
        char* const record = records.at(slots_[i]);
        std::memcpy(record, entries_ + 3 * i + HashEntry::kStamp, records.head_bytes());
        std::memcpy(record + records.head_bytes(), rows + i * bytes, bytes);
      }
    });
    for (int64_t i = 0; i < n_; ++i) {
      if (slots_[i] != kNoSlot) write_entry(slots_[i], entries_ + 3 * i);
    }
  }

 private:
  // Write the slots of the keys to `slots_`, and give stored keys the stamp of the clock.
  void touch_stored_keys() {
    const HashTable table = store_.index.table(0);
    const HashFindKernels& kernels = hash_find_kernels();
    parallel_balanced(n_, kKeyGrain, kUnitCost, [&](int64_t begin, int64_t end) {
      const HashTouch touch{store_.scoring.order, *store_.index.clock, 0, zeros_.get() + begin,
                            store_.index.queues_of(0)};
      kernels.find(table, keys_.get() + begin, end - begin, &touch, slots_.get() + begin);
    });
  }

  // Write stamp and score of `entry` to the entry in a slot. Its rank and stamp may fall, so
  // EvictionQueue demands to empty the queue of the bucket and to reset exhausted_at.
  void write_entry(int64_t slot, const int64_t* entry) const {
    int64_t* const words = store_.index.table(0).entry(slot);
    words[HashEntry::kStamp] = entry[HashEntry::kStamp];
    if (has_scores(store_.scoring.order)) words[HashEntry::kScore] = entry[HashEntry::kScore];
    EvictionQueue* const queues = store_.index.queues_of(0);
    if (queues == nullptr) return;
    queues[slot / kBucketSlots].size = 0;
    queues[slot / kBucketSlots].exhausted_at = 0;
  }

  const HostStore& store_;
  // By position of the entries: the key, 0 (so that touching adds no uses), and the slot, kNoSlot
  // for none.
  Scratch<int64_t> keys_, zeros_, slots_;
  // By number of a new key: its position, score, slot, evicted entry and InsertStatus.
  Scratch<int64_t> new_positions_, scores_, new_slots_, evicted_;
  Scratch<uint8_t> status_;
  const int64_t* entries_ = nullptr;
  int64_t n_ = 0, num_new_ = 0;
};

}  // namespace emb
