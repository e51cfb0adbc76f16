// Rows that move between the slots of a dynamic table and its backing store, on the CPU:
// `tier_swap_` for the table's side, `tier_read` and `tier_write_` for records of a store.
//
// Between the tiers a row is packed: its bytes in all row buffers, weights then optimizer states,
// one after the other. So it is copied twice, out of one tier into a packed matrix, and from there
// into the other tier. A swap goes through the misses of a batch once: for each it copies the row
// of the evicted key out of the slot and the stored row in, while the slot is in the cache. The
// addresses are random, so rows are prefetched some rows ahead.
//
// Slots are distinct, so threads need no order: a result is the same for any number of them.
// emblib/ops/tiers.py describes arguments and results.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <cstring>
#include <tuple>
#include <vector>

#include "core/output_memory.h"
#include "core/parallel.h"
#include "hash/args.h"
#include "hash/entries.h"
#include "hash/packed_rows.h"

namespace emb {
namespace {

// A miss whose slot takes part in a swap.
struct Move {
  int64_t slot;
  int64_t out, in;  // numbers of the demoted row and of the stored row, -1 for none
};

// The arguments of `tier_swap_`, checked, and its results.
struct SwapCall {
  static constexpr const char* kOp = "tier_swap_";

  PackedRows table;
  int64_t n, num_found;
  const int64_t *evicted, *found;
  const char* rows;
  std::vector<Move> moves;        // by miss
  std::vector<int64_t> evicting;  // misses
  Tensor slots, status, demoted, demoted_rows, refused, found_slots;

  SwapCall(const std::vector<Tensor>& buffers, const Tensor& slots_in, const Tensor& status_in,
           const Tensor& evicted_in, const Tensor& found_in, const Tensor& rows_in,
           int64_t first_overflow)
      : table(kOp, buffers, slots_in),
        n(slots_in.numel()),
        num_found(found_in.numel()),
        evicted(required_array<int64_t>(kOp, "evicted", evicted_in, 3 * n, slots_in)),
        found(required_array<int64_t>(kOp, "found", found_in, num_found, slots_in)),
        rows(byte_rows(kOp, "rows", rows_in, num_found, table.row_bytes)) {
    const auto* slot_of = required_array<int64_t>(kOp, "slots", slots_in, n, slots_in);
    check_dtype(kOp, "status", status_in, ScalarType::Byte, "uint8");
    STD_TORCH_CHECK(status_in.numel() == n && status_in.is_contiguous(), kOp,
                    ": status must be contiguous with ", n, " entries");
    STD_TORCH_CHECK(first_overflow >= 0 && first_overflow <= table.slots, kOp,
                    ": first_overflow must be in [0, ", table.slots, "], got ", first_overflow);
    slots = allocate_words(slots_in, {n});
    status = allocate(status_in, {n});
    place(slot_of, static_cast<const uint8_t*>(status_in.const_data_ptr()), first_overflow);
    add_found();
    for (Move& move : moves) {
      if (move.out >= 0) evicting.push_back(&move - moves.data());
    }
    const auto count = static_cast<int64_t>(evicting.size());
    demoted = allocate_words(slots_in, {3, count});
    demoted_rows = allocate_output(slots_in, {count, table.row_bytes}, ScalarType::Byte);
  }

 private:
  // Write slots and status of the misses; those that were refused get overflow rows in order.
  void place(const int64_t* slot_of, const uint8_t* status_of, int64_t first_overflow) {
    int64_t* slot = slots.mutable_data_ptr<int64_t>();
    auto* state = static_cast<uint8_t*>(status.mutable_data_ptr());
    std::vector<int64_t> without_slot;
    moves.resize(n);
    int64_t num_evicting = 0;
    for (int64_t i = 0; i < n; ++i) {
      const auto before = static_cast<InsertStatus>(status_of[i]);
      const bool is_refused = before == InsertStatus::kRefused;
      const bool is_evicting = before == InsertStatus::kEvicting;
      if (is_refused) without_slot.push_back(i);
      slot[i] =
          is_refused ? first_overflow + static_cast<int64_t>(without_slot.size()) - 1 : slot_of[i];
      state[i] = is_refused ? static_cast<uint8_t>(InsertStatus::kNew) : status_of[i];
      STD_TORCH_CHECK(slot[i] >= (is_evicting || is_refused ? 0 : -1) && slot[i] < table.slots, kOp,
                      ": slots of misses must be rows of the buffers, in [0, ", table.slots,
                      "), or -1 for none, got ", slot[i]);
      moves[i] = {slot[i], is_evicting ? num_evicting++ : -1, -1};
    }
    const auto count = static_cast<int64_t>(without_slot.size());
    refused = allocate_words(slots, {count});
    std::copy(without_slot.begin(), without_slot.end(), refused.mutable_data_ptr<int64_t>());
  }

  // Add the rows that are in the store: their misses count as hits.
  void add_found() {
    found_slots = allocate_words(slots, {num_found});
    int64_t* found_slot = found_slots.mutable_data_ptr<int64_t>();
    auto* state = static_cast<uint8_t*>(status.mutable_data_ptr());
    for (int64_t j = 0; j < num_found; ++j) {
      STD_TORCH_CHECK(found[j] >= 0 && found[j] < n && moves[found[j]].in < 0, kOp,
                      ": found must be distinct misses in [0, ", n, "), got ", found[j]);
      Move& move = moves[found[j]];
      found_slot[j] = move.slot;
      state[found[j]] = static_cast<uint8_t>(InsertStatus::kHit);
      move.in = j;
    }
  }
};

// Copy the rows of evicted keys out of their slots, and write rows of the store to theirs.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> tier_swap_(
    std::vector<Tensor> buffers, const Tensor& slots, const Tensor& status, const Tensor& evicted,
    const Tensor& found, const Tensor& rows, int64_t first_overflow) {
  SwapCall call(buffers, slots, status, evicted, found, rows, first_overflow);
  const auto count = static_cast<int64_t>(call.evicting.size());
  int64_t* words = call.demoted.mutable_data_ptr<int64_t>();
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t word = 0; word < 3; ++word) {
      words[word * count + i] = call.evicted[3 * call.evicting[i] + word];
    }
  }
  auto* out = static_cast<char*>(call.demoted_rows.mutable_data_ptr());
  const int64_t bytes = call.table.row_bytes;
  const auto moves = [&](const Move& move) { return move.out >= 0 || move.in >= 0; };
  const auto cost = [&](int64_t i) { return 2 * bytes * i; };
  parallel_balanced(call.n, kBytesPerTask, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Move& move = call.moves[i];
      if (i + kRowsAhead < end) {
        const Move& later = call.moves[i + kRowsAhead];
        if (moves(later) && later.slot >= 0) call.table.prefetch(later.slot);
        if (later.in >= 0) prefetch_row(call.rows + later.in * bytes, bytes);
      }
      if (move.out >= 0) call.table.read(move.slot, out + move.out * bytes);
      if (move.in >= 0 && move.slot >= 0) call.table.write(move.slot, call.rows + move.in * bytes);
    }
  });
  return {call.slots, call.status, call.demoted, call.demoted_rows, call.refused, call.found_slots};
}

// Read the records of those slots that are not -1.
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
  int64_t* at = positions.mutable_data_ptr<int64_t>();
  for (int64_t i = 0, k = 0; i < n; ++i) {
    if (slots[i] >= 0) at[k++] = i;
  }
  int64_t* words = words_out.mutable_data_ptr<int64_t>();
  auto* out = static_cast<char*>(values.mutable_data_ptr());
  const auto cost = [&](int64_t i) { return records.stride * i; };
  parallel_balanced(count, kBytesPerTask, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < end) prefetch_row(records.at(slots[at[i + kRowsAhead]]), records.stride);
      const char* record = records.at(slots[at[i]]);
      for (int64_t word = 0; word < records.num_words; ++word) {
        std::memcpy(words + word * count + i, record + word * Records::kWordBytes,
                    Records::kWordBytes);
      }
      std::memcpy(out + i * row_bytes, record + records.head_bytes(), row_bytes);
    }
  });
  return {positions, words_out, values};
}

// Write records to slots, which are distinct; -1 is none.
void tier_write_(Tensor records_in, const Tensor& slots_in, const Tensor& words_in,
                 const Tensor& values_in) {
  const char* op = "tier_write_";
  const int64_t n = slots_in.numel(), bytes = values_in.dim() == 2 ? values_in.size(1) : 0;
  const Records records(op, records_in, bytes);
  const auto* slots = required_array<int64_t>(op, "slots", slots_in, n, records_in);
  const auto* words =
      required_array<int64_t>(op, "words", words_in, records.num_words * n, records_in);
  const char* values = byte_rows(op, "values", values_in, n, bytes);
  for (int64_t i = 0; i < n; ++i) records.check_slot(op, slots[i]);
  const auto cost = [&](int64_t i) { return records.stride * i; };
  parallel_balanced(n, kBytesPerTask, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < end && slots[i + kRowsAhead] >= 0) {
        prefetch_row(records.at(slots[i + kRowsAhead]), records.stride);
      }
      if (slots[i] < 0) continue;
      char* record = records.at(slots[i]);
      std::memcpy(record + records.head_bytes(), values + i * bytes, bytes);
      for (int64_t word = 0; word < records.num_words; ++word) {
        std::memcpy(record + word * Records::kWordBytes, words + word * n + i, Records::kWordBytes);
      }
    }
  });
}

// Put rows into a store in host memory: an index of one table, and its records of stamp, score and
// row. The keys are int64 [n], distinct, with stamps and scores [n] and values uint8 [n, row_bytes].
// A row replaces that of its key; in a full store it evicts the row of the lowest rank. Return keys,
// stamps and scores [3, k] and values [k, row_bytes] of the rows that have no record any more: those
// of evicted keys, then those of `keys` without a slot.
std::tuple<Tensor, Tensor> tier_put_(std::vector<Tensor> store_index, Tensor records_in,
                                     const Tensor& keys, const Tensor& stamps_in,
                                     const Tensor& scores_in, const Tensor& values_in,
                                     int64_t order_code) {
  const char* op = "tier_put_";
  const HashIndex index(op, store_index);
  index.check_tables(op);
  STD_TORCH_CHECK(index.num_tables == 1, op, ": a store has one table, got ", index.num_tables);
  const int64_t n = keys.numel(), bytes = values_in.dim() == 2 ? values_in.size(1) : 0;
  const Records records(op, records_in, bytes);
  STD_TORCH_CHECK(records.num_words == 2 && records.count >= index.num_slots, op,
                  ": records must have two words and a row of ", bytes, " bytes for each of ",
                  index.num_slots, " slots, got [", records.count, ", ", records.stride, "]");
  const auto* key = required_array<int64_t>(op, "keys", keys, n, keys);
  const auto* stamps = required_array<int64_t>(op, "stamps", stamps_in, n, keys);
  const auto* scores = required_array<int64_t>(op, "scores", scores_in, n, keys);
  const char* values = byte_rows(op, "values", values_in, n, bytes);
  const Order order = parse_order(op, order_code, index.words);
  STD_TORCH_CHECK(order != Order::kNone && order != Order::kAssigned, op,
                  ": a store evicts by stamps or by counts of uses");
  if (n == 0) {
    return {allocate_words(keys, {3, 0}), allocate(keys, {0, bytes}, ScalarType::Byte)};
  }

  // Every row that is in the store must be older than this call, so that it can be evicted.
  *index.clock = std::max(*index.clock, *std::max_element(stamps, stamps + n));
  Tensor starts = allocate_words(keys, {2}), tables = allocate_zeros(keys, {1}, ScalarType::Long);
  starts.mutable_data_ptr<int64_t>()[0] = 0;
  starts.mutable_data_ptr<int64_t>()[1] = n;
  std::optional<Tensor> no_uses, none;
  if (order_counts_uses(order)) no_uses = allocate_zeros(keys, {n}, ScalarType::Long);
  auto [found, first, groups, totals, offsets] =
      hash_touch_(store_index, keys, starts, tables, no_uses, none, order_code);
  const int64_t num_misses = offsets.const_data_ptr<int64_t>()[1];
  const auto* at = first.const_data_ptr<int64_t>();
  if (order_counts_uses(order)) {  // new rows rank by their scores
    auto* uses = totals.mutable_data_ptr<int64_t>();
    for (int64_t miss = 0; miss < num_misses; ++miss) uses[miss] = scores[at[miss]];
  }
  const auto [miss_slots, status, evicted, slots, key_status] =
      hash_insert_(store_index, keys, first, totals, offsets, none, none, order_code,
                   static_cast<int64_t>(InsertPolicy::kWins), found, groups);

  const auto* slot = slots.const_data_ptr<int64_t>();
  const auto* miss_slot = miss_slots.const_data_ptr<int64_t>();
  const auto* evicted_words = evicted.const_data_ptr<int64_t>();
  const auto* states = static_cast<const uint8_t*>(status.const_data_ptr());
  std::vector<int64_t> evicting, refused;
  for (int64_t miss = 0; miss < num_misses; ++miss) {
    if (states[miss] == static_cast<uint8_t>(InsertStatus::kEvicting)) evicting.push_back(miss);
  }
  for (int64_t i = 0; i < n; ++i) {
    if (slot[i] < 0) refused.push_back(i);
  }
  const auto num_evicted = static_cast<int64_t>(evicting.size());
  const int64_t num_dropped = num_evicted + static_cast<int64_t>(refused.size());
  Tensor dropped = allocate_words(keys, {3, num_dropped});
  Tensor dropped_values = allocate_output(keys, {num_dropped, bytes}, ScalarType::Byte);
  auto* words = dropped.mutable_data_ptr<int64_t>();
  auto* out = static_cast<char*>(dropped_values.mutable_data_ptr());
  const auto drop = [&](int64_t k, int64_t id, int64_t stamp, int64_t score, const char* row) {
    words[k] = id;
    words[num_dropped + k] = stamp;
    words[2 * num_dropped + k] = score;
    std::memcpy(out + k * bytes, row, bytes);
  };
  for (int64_t k = 0; k < num_evicted; ++k) {
    const char* record = records.at(miss_slot[evicting[k]]);
    int64_t head[2];
    std::memcpy(head, record, sizeof(head));
    drop(k, evicted_words[3 * evicting[k]], head[0], head[1], record + sizeof(head));
  }
  for (int64_t k = num_evicted; k < num_dropped; ++k) {
    const int64_t i = refused[k - num_evicted];
    drop(k, key[i], stamps[i], scores[i], values + i * bytes);
  }

  // A record is whole before its entry ranks as the row does.
  const auto cost = [&](int64_t i) { return records.stride * i; };
  parallel_balanced(n, kBytesPerTask, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kRowsAhead < end && slot[i + kRowsAhead] >= 0) {
        prefetch_row(records.at(slot[i + kRowsAhead]), records.stride);
      }
      if (slot[i] < 0) continue;
      char* record = records.at(slot[i]);
      const int64_t head[2] = {stamps[i], scores[i]};
      std::memcpy(record, head, sizeof(head));
      std::memcpy(record + sizeof(head), values + i * bytes, bytes);
    }
  });
  const HashTable table = index.table(0);
  EvictionQueue* queues = index.queues_of(0);
  for (int64_t i = 0; i < n; ++i) {
    if (slot[i] < 0) continue;
    int64_t* entry = table.entry(slot[i]);
    entry[kStamp] = stamps[i];
    if (has_scores(order)) entry[kScore] = scores[i];
    // The rank of the entry fell; the queue of a bucket that is not full is empty.
    if (queues != nullptr) queues[slot[i] / kSlots].size = 0;
  }
  return {dropped, dropped_values};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tier_swap_);
  EMB_IMPL(m, emb, tier_put_);
  EMB_IMPL(m, emb, tier_read);
  EMB_IMPL(m, emb, tier_write_);
}
