// Rows that move between the slots of a dynamic table and its backing store, on the CPU:
// `tier_swap_` for the table's side, `tier_read` and `tier_write_` for the records of a store, and
// `tier_put_` for a store with an index in host memory. emblib/ops/tiers.py describes the arguments
// and results.
//
// Between the tiers a row is packed: the concatenation of its bytes in all row buffers, weights
// then optimizer states. These ops copy each row twice: out of one tier into a packed matrix, and
// from there into the other tier. A swap visits each miss of a batch once. It copies the row of the
// evicted key out of the slot, and the stored row into the slot while the slot is in the cache. The
// addresses are random, so rows are prefetched some rows ahead.
//
// The slots that an op writes must be distinct, except -1; not checked. Then no result depends on
// the number of threads.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "core/output_memory.h"
#include "core/parallel.h"
#include "hash/args.h"
#include "hash/entries.h"
#include "hash/host_store.h"

namespace emb {
namespace {

// The slot of a miss, and the rows that a swap copies out of it and into it.
struct SlotSwap {
  int64_t slot;         // in the row buffers; -1 for none: then no row is copied
  int64_t demoted_row;  // number of the demoted row that leaves the slot, -1 for none
  int64_t stored_row;   // number of the stored row that enters the slot, -1 for none
};

// The arguments of `tier_swap_`, checked, and its results. `demoted` and `demoted_rows` are
// allocated but not written.
struct SwapCall {
  static constexpr const char* kOp = "tier_swap_";

  PackedRows table;             // the rows of the table, by slot
  int64_t n;                    // number of misses
  int64_t num_found;            // number of misses whose row is in the store
  const int64_t* evicted;       // [n, 3], by miss: key, stamp and score of the evicted entry;
                                // read only where the status is kEvicting
  const int64_t* found;         // [num_found], the misses whose row is in the store
  const char* rows;             // [num_found, row_bytes], the stored rows of these misses
  std::vector<SlotSwap> swaps;  // by miss
  std::vector<int64_t> evicting_misses;  // the misses that evict a key, ascending
  // Results for k evicted keys and r refused misses.
  Tensor slots;         // int64 [n], by miss: the slot, or the overflow row of a refused miss
  Tensor status;        // uint8 [n], by miss: kHit if the row is in the store, even if the miss
                        // has no slot, else kNew if it was refused, else the argument `status`
  Tensor demoted;       // int64 [3, k]: keys, stamps and scores of the evicted entries
  Tensor demoted_rows;  // uint8 [k, row_bytes], their rows
  Tensor refused;       // int64 [r]: the refused misses
  Tensor found_slots;   // int64 [num_found]: the entries of `slots` for the misses `found`

  SwapCall(const std::vector<Tensor>& buffers, const Tensor& slots_in, const Tensor& status_in,
           const Tensor& evicted_in, const Tensor& found_in, const Tensor& rows_in,
           int64_t first_overflow)
      : table(kOp, buffers, slots_in),
        n(slots_in.numel()),
        num_found(found_in.numel()),
        evicted(required_array<int64_t>(kOp, "evicted", evicted_in, 3 * n, slots_in)),
        found(required_array<int64_t>(kOp, "found", found_in, num_found, slots_in)),
        rows(byte_rows(kOp, "rows", rows_in, num_found, table.row_bytes)) {
    const auto* miss_slots = required_array<int64_t>(kOp, "slots", slots_in, n, slots_in);
    check_dtype(kOp, "status", status_in, ScalarType::Byte, "uint8");
    STD_TORCH_CHECK(status_in.numel() == n && status_in.is_contiguous(), kOp,
                    ": status must be contiguous with ", n, " entries");
    STD_TORCH_CHECK(first_overflow >= 0 && first_overflow <= table.num_slots, kOp,
                    ": first_overflow must be in [0, ", table.num_slots, "], got ", first_overflow);
    slots = allocate_words(slots_in, {n});
    status = allocate(status_in, {n});
    assign_slots(miss_slots, static_cast<const uint8_t*>(status_in.const_data_ptr()),
                 first_overflow);
    add_stored_rows();
    for (SlotSwap& swap : swaps) {
      if (swap.demoted_row >= 0) evicting_misses.push_back(&swap - swaps.data());
    }
    const auto count = static_cast<int64_t>(evicting_misses.size());
    demoted = allocate_words(slots_in, {3, count});
    demoted_rows = allocate_output(slots_in, {count, table.row_bytes}, ScalarType::Byte);
  }

 private:
  // Write `slots`, `status` and `refused`, and all of `swaps` except stored rows. Refused misses
  // get overflow rows in order. `miss_slots` and `miss_status` are the results of the insertion.
  // Throws for a slot outside the buffers, and for an evicting miss with slot -1.
  void assign_slots(const int64_t* miss_slots, const uint8_t* miss_status, int64_t first_overflow) {
    int64_t* slot = slots.mutable_data_ptr<int64_t>();
    auto* new_status = static_cast<uint8_t*>(status.mutable_data_ptr());
    std::vector<int64_t> refused_misses;
    swaps.resize(n);
    int64_t num_evicting = 0;
    for (int64_t i = 0; i < n; ++i) {
      const auto old_status = static_cast<InsertStatus>(miss_status[i]);
      const bool is_refused = old_status == InsertStatus::kRefused;
      const bool is_evicting = old_status == InsertStatus::kEvicting;
      if (is_refused) refused_misses.push_back(i);
      slot[i] = is_refused ? first_overflow + static_cast<int64_t>(refused_misses.size()) - 1
                           : miss_slots[i];
      new_status[i] = is_refused ? static_cast<uint8_t>(InsertStatus::kNew) : miss_status[i];
      STD_TORCH_CHECK(slot[i] >= (is_evicting || is_refused ? 0 : -1) && slot[i] < table.num_slots,
                      kOp, ": slots of misses must be rows of the buffers, in [0, ",
                      table.num_slots, "), or -1 for none, got ", slot[i]);
      swaps[i] = {slot[i], is_evicting ? num_evicting++ : -1, -1};
    }
    const auto count = static_cast<int64_t>(refused_misses.size());
    refused = allocate_words(slots, {count});
    std::copy(refused_misses.begin(), refused_misses.end(), refused.mutable_data_ptr<int64_t>());
  }

  // Add the rows that are in the store to `swaps`, and write `found_slots`. Their misses get the
  // status kHit.
  void add_stored_rows() {
    found_slots = allocate_words(slots, {num_found});
    int64_t* found_slot = found_slots.mutable_data_ptr<int64_t>();
    auto* new_status = static_cast<uint8_t*>(status.mutable_data_ptr());
    for (int64_t j = 0; j < num_found; ++j) {
      STD_TORCH_CHECK(found[j] >= 0 && found[j] < n && swaps[found[j]].stored_row < 0, kOp,
                      ": found must be distinct misses in [0, ", n, "), got ", found[j]);
      SlotSwap& swap = swaps[found[j]];
      found_slot[j] = swap.slot;
      new_status[found[j]] = static_cast<uint8_t>(InsertStatus::kHit);
      swap.stored_row = j;
    }
  }
};

// Copy the rows of evicted keys out of their slots, and write rows of the store to the slots of
// their keys. SwapCall describes the results.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> tier_swap_(
    std::vector<Tensor> buffers, const Tensor& slots, const Tensor& status, const Tensor& evicted,
    const Tensor& found, const Tensor& rows, int64_t first_overflow) {
  SwapCall call(buffers, slots, status, evicted, found, rows, first_overflow);
  const auto count = static_cast<int64_t>(call.evicting_misses.size());
  int64_t* words = call.demoted.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t word = 0; word < 3; ++word) {
      words[word * count + i] = call.evicted[3 * call.evicting_misses[i] + word];
    }
  }
  auto* out = static_cast<char*>(call.demoted_rows.mutable_data_ptr());
  const int64_t row_bytes = call.table.row_bytes;
  const auto has_rows = [&](const SlotSwap& swap) {
    return swap.demoted_row >= 0 || swap.stored_row >= 0;
  };
  const auto cost = [&](int64_t i) { return 2 * row_bytes * i; };
  parallel_balanced(call.n, kCopyGrain, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const SlotSwap& swap = call.swaps[i];
      if (i + kRowsAhead < end) {
        const SlotSwap& next_swap = call.swaps[i + kRowsAhead];
        if (has_rows(next_swap) && next_swap.slot >= 0) call.table.prefetch(next_swap.slot);
        if (next_swap.stored_row >= 0)
          prefetch_row(call.rows + next_swap.stored_row * row_bytes, row_bytes);
      }
      if (swap.demoted_row >= 0) call.table.read(swap.slot, out + swap.demoted_row * row_bytes);
      if (swap.stored_row >= 0 && swap.slot >= 0) {
        call.table.write(swap.slot, call.rows + swap.stored_row * row_bytes);
      }
    }
  });
  return {call.slots, call.status, call.demoted, call.demoted_rows, call.refused, call.found_slots};
}

// Read the records in all `slots`, int64 [n], except -1; slots may repeat. Return the positions in
// `slots` that were read, int64 [m], ascending, their words, int64 [num_words, m], and rows, uint8
// [m, row_bytes].
std::tuple<Tensor, Tensor, Tensor> tier_read(const Tensor& records_in, const Tensor& slots_in,
                                             int64_t row_bytes) {
  const char* op = "tier_read";
  const Records records(op, records_in, row_bytes);
  const int64_t n = slots_in.numel();
  const auto* slots = required_array<int64_t>(op, "slots", slots_in, n, records_in);
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    records.check_slot(op, slots[i]);
    count += slots[i] >= 0;
  }
  Tensor positions = allocate_words(slots_in, {count});
  Tensor words_out = allocate_words(slots_in, {records.num_words, count});
  Tensor values = allocate_output(slots_in, {count, row_bytes}, ScalarType::Byte);
  int64_t* position = positions.mutable_data_ptr<int64_t>();
  for (int64_t i = 0, k = 0; i < n; ++i) {
    if (slots[i] >= 0) position[k++] = i;
  }
  int64_t* words = words_out.mutable_data_ptr<int64_t>();
  auto* out = static_cast<char*>(values.mutable_data_ptr());
  const auto cost = [&](int64_t i) { return records.record_bytes * i; };
  parallel_balanced(count, kCopyGrain, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < end) {
        prefetch_row(records.at(slots[position[i + kRowsAhead]]), records.record_bytes);
      }
      const char* record = records.at(slots[position[i]]);
      for (int64_t word = 0; word < records.num_words; ++word) {
        std::memcpy(words + word * count + i, record + word * Records::kWordBytes,
                    Records::kWordBytes);
      }
      std::memcpy(out + i * row_bytes, record + records.head_bytes(), row_bytes);
    }
  });
  return {positions, words_out, values};
}

// Write records to `slots`, int64 [n]. A slot is -1 for no record; the others must be distinct,
// which is not checked. `words` is int64 [num_words, n], and `values`, the rows, uint8 [n,
// row_bytes].
void tier_write_(Tensor records_in, const Tensor& slots_in, const Tensor& words_in,
                 const Tensor& values_in) {
  const char* op = "tier_write_";
  const int64_t n = slots_in.numel(), row_bytes = values_in.dim() == 2 ? values_in.size(1) : 0;
  const Records records(op, records_in, row_bytes);
  const auto* slots = required_array<int64_t>(op, "slots", slots_in, n, records_in);
  const auto* words =
      required_array<int64_t>(op, "words", words_in, records.num_words * n, records_in);
  const char* values = byte_rows(op, "values", values_in, n, row_bytes);
  for (int64_t i = 0; i < n; ++i) records.check_slot(op, slots[i]);
  const auto cost = [&](int64_t i) { return records.record_bytes * i; };
  parallel_balanced(n, kCopyGrain, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < end && slots[i + kRowsAhead] >= 0) {
        prefetch_row(records.at(slots[i + kRowsAhead]), records.record_bytes);
      }
      if (slots[i] < 0) continue;
      char* record = records.at(slots[i]);
      std::memcpy(record + records.head_bytes(), values + i * row_bytes, row_bytes);
      for (int64_t word = 0; word < records.num_words; ++word) {
        std::memcpy(record + word * Records::kWordBytes, words + word * n + i, Records::kWordBytes);
      }
    }
  });
}

// Copy the rows that `put` drops: rows that it evicted from `store`, then those of `entries` and
// `rows` that got no slot. Write their entries to `dropped`, int64 [n, 3], and the rows to
// `dropped_rows`, uint8 [n, row_bytes], for n put rows, which drop at most n. Return the number of
// dropped rows. put.write must not have been called yet.
int64_t copy_dropped(const HostStore& store, const StorePut& put, const int64_t* entries,
                     const char* rows, Tensor dropped, Tensor dropped_rows) {
  int64_t count = 0;
  auto* entry = dropped.mutable_data_ptr<int64_t>();
  auto* row = static_cast<char*>(dropped_rows.mutable_data_ptr());
  const auto append = [&](int64_t key, const void* head, const char* packed_row) {
    entry[HashEntry::kKey] = key;
    std::memcpy(entry + HashEntry::kStamp, head, store.records.head_bytes());
    std::memcpy(row, packed_row, store.row_bytes);
    entry += 3;
    row += store.row_bytes;
    ++count;
  };
  put.for_each_dropped(
      [&](int64_t slot, const int64_t* evicted) {
        append(evicted[HashEntry::kKey], store.records.at(slot), store.row(slot));
      },
      [&](int64_t i) {
        const int64_t* refused = entries + 3 * i;
        append(refused[HashEntry::kKey], refused + HashEntry::kStamp, rows + i * store.row_bytes);
      });
  return count;
}

// Remove the keys `lifted`, int64 [m], from a store; keys that it does not have are ignored. Then
// put rows into it. `entries`, int64 [n, 3], has the keys, stamps and scores of the rows, `rows` is
// uint8 [n, row_bytes]. The keys of `entries` must be distinct; not checked. A row replaces the
// stored row of its key. A new key whose buckets are full evicts the row of the lowest rank in them
// that the same call did not put; if there is none, the new row is dropped. If n > 0, the clock of
// the store advances beyond the stamps of `entries`. Return the entries, int64 [k, 3], and rows,
// uint8 [k, row_bytes], that were evicted or dropped.
//
// The results are allocated first, with room for n rows. So if memory is short, the op throws
// before any row is inserted, evicted or replaced; the keys `lifted` may have been removed, and the
// clock and the stamps of stored keys of `entries` may have advanced.
std::tuple<Tensor, Tensor> tier_put_(std::vector<Tensor> index, Tensor records,
                                     const Tensor& lifted, const Tensor& entries_in,
                                     const Tensor& rows_in, int64_t order_code) {
  const char* op = "tier_put_";
  STD_TORCH_CHECK(lifted.dim() == 1 && entries_in.dim() == 2, op,
                  ": lifted must be [m] and entries [n, 3]");
  const int64_t n = entries_in.size(0);
  const int64_t row_bytes = rows_in.dim() == 2 ? rows_in.size(1) : 0;
  const HostStore store(op, index, records, row_bytes, order_code);
  const auto* entries = required_array<int64_t>(op, "entries", entries_in, 3 * n, lifted);
  const char* rows = byte_rows(op, "rows", rows_in, n, row_bytes);
  required_array<int64_t>(op, "lifted", lifted, lifted.numel(), entries_in);
  check_num_keys(op, n);
  check_num_keys(op, lifted.numel());
  const auto lifted_slots = new_scratch<int64_t>(lifted.numel());
  store.find(lifted.const_data_ptr<int64_t>(), lifted.numel(), lifted_slots.get());
  StorePut put(store, n);
  const Tensor dropped = allocate_words(lifted, {n, 3});
  const Tensor dropped_rows = allocate_output(lifted, {n, row_bytes}, ScalarType::Byte);
  store.erase(lifted_slots.get(), lifted.numel());
  put.insert(entries, n);
  const int64_t count = copy_dropped(store, put, entries, rows, dropped, dropped_rows);
  put.write(rows);
  return {first_rows(dropped, count), first_rows(dropped_rows, count)};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tier_swap_);
  EMB_IMPL(m, emb, tier_put_);
  EMB_IMPL(m, emb, tier_read);
  EMB_IMPL(m, emb, tier_write_);
}
