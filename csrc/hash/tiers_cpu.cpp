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
#include "hash/check.h"
#include "hash/rows.h"

namespace emb {
namespace {

constexpr int64_t kCacheLine = 64;
constexpr int64_t kMaxPrefetch = 16 * kCacheLine;  // the hardware prefetches the rest of a long row
constexpr int64_t kRowsAhead = 8;                  // rows between a prefetch and the copy
constexpr int64_t kBytesPerTask = 1 << 16;         // minimum number of bytes that a thread copies

void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t at = 0; at < std::min(bytes, kMaxPrefetch); at += kCacheLine) {
    __builtin_prefetch(row + at);
  }
  if (bytes > 0) __builtin_prefetch(row + std::min(bytes, kMaxPrefetch) - 1);
}

// Return an uninitialised int64 tensor of these sizes on the CPU.
Tensor allocate_words(const Tensor& like, const std::vector<int64_t>& sizes) {
  return allocate(like, sizes, ScalarType::Long);
}

// Return the bytes of a contiguous uint8 matrix [n, bytes], which `name` is.
char* byte_rows(const char* op, const char* name, const Tensor& rows, int64_t n, int64_t bytes) {
  check_dtype(op, name, rows, ScalarType::Byte, "uint8");
  STD_TORCH_CHECK(
      rows.dim() == 2 && rows.size(0) == n && rows.size(1) == bytes && rows.is_contiguous(), op,
      ": ", name, " must be contiguous of shape [", n, ", ", bytes, "]");
  return static_cast<char*>(rows.mutable_data_ptr());
}

// The row buffers of a table, each a matrix by slot, and where a packed row has the bytes of each.
struct PackedRows {
  std::vector<RowBytes> buffers;
  int64_t row_bytes = 0;             // of a packed row
  int64_t slots = int64_t{1} << 62;  // slots that all buffers have

  PackedRows(const char* op, const std::vector<Tensor>& matrices, const Tensor& like) {
    for (const Tensor& matrix : matrices) {
      buffers.push_back(RowMatrix(op, matrix, like).as_bytes({}));
      row_bytes += buffers.back().bytes;
      slots = std::min(slots, buffers.back().count);
    }
  }

  void prefetch(int64_t slot) const {
    for (const RowBytes& buffer : buffers) prefetch_row(row(buffer, slot), buffer.bytes);
  }

  void read(int64_t slot, char* packed) const {
    for (const RowBytes& buffer : buffers) {
      std::memcpy(packed, row(buffer, slot), buffer.bytes);
      packed += buffer.bytes;
    }
  }

  void write(int64_t slot, const char* packed) const {
    for (const RowBytes& buffer : buffers) {
      std::memcpy(row(buffer, slot), packed, buffer.bytes);
      packed += buffer.bytes;
    }
  }

 private:
  static char* row(const RowBytes& buffer, int64_t slot) {
    return static_cast<char*>(buffer.data) + slot * buffer.stride;
  }
};

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

// The records of a store, uint8 [S, stride]: some words of 64 bits, then the bytes of a row, which
// may be none. They are in memory or in a mapped file.
struct Records {
  char* data;
  int64_t count, stride, num_words;

  Records(const char* op, const Tensor& records, int64_t row_bytes) {
    count = records.dim() == 2 ? records.size(0) : 0;
    stride = records.dim() == 2 ? records.size(1) : 0;
    data = byte_rows(op, "records", records, count, stride);
    STD_TORCH_CHECK(row_bytes >= 0 && row_bytes <= stride, op, ": records must have a row of ",
                    row_bytes, " bytes, got ", stride);
    num_words = (stride - row_bytes) / kWordBytes;
  }

  static constexpr int64_t kWordBytes = sizeof(int64_t);

  char* at(int64_t slot) const { return data + slot * stride; }
  int64_t head_bytes() const { return num_words * kWordBytes; }

  void check_slot(const char* op, int64_t slot) const {
    STD_TORCH_CHECK(slot >= -1 && slot < count, op, ": slots must be records in [0, ", count,
                    "), or -1 for none, got ", slot);
  }
};

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

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tier_swap_);
  EMB_IMPL(m, emb, tier_read);
  EMB_IMPL(m, emb, tier_write_);
}
