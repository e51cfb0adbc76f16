// Parts of the hash ops on the CPU that the whole insertion of a batch (batch_cpu.cpp) shares with
// them. They check nothing: their arguments have been checked.
#pragma once

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "core/parallel.h"
#include "hash/check.h"
#include "hash/rows.h"

namespace emb {

inline constexpr int64_t kKeysPerTask = 2048;  // minimum number of keys that a thread looks up

// Call `body(segment, begin, end)` for ranges of positions that together are the whole batch; each
// is a non-empty range of one segment. Several threads call it at once.
template <class Body>
void parallel_segments(const HashBatch& batch, const Body& body) {
  parallel_balanced(batch.n, kKeysPerTask, kUnitCost, [&](int64_t begin, int64_t end) {
    const int64_t* after = std::upper_bound(batch.starts, batch.starts + batch.segments, begin);
    for (int64_t f = after - batch.starts - 1; begin < end; ++f) {
      const int64_t stop = std::min(end, batch.starts[f + 1]);
      if (begin < stop) body(f, begin, stop);
      begin = std::max(begin, stop);
    }
  });
}

// The arrays of the misses of all tables, see HashInsertion.
struct MissArrays {
  const int64_t *ids, *first, *totals;
  int64_t* slots;
  uint8_t* status;
  int64_t* evicted;  // null where evicted entries are not needed
};

// Insert the admitted misses of every table, and count them. Writes slots and status of all misses.
void insert_misses(const HashIndex& index, const HashScoring& scoring, bool competes,
                   const Misses& misses, const MissArrays& arrays);

// The ops of these names, which `tier_put_` calls.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_touch_(
    std::vector<Tensor> index, const Tensor& ids, const Tensor& starts, const Tensor& tables,
    std::optional<Tensor> counts, std::optional<Tensor> batch_scores, int64_t order);
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_insert_(
    std::vector<Tensor> index, const Tensor& ids, const Tensor& first, const Tensor& totals,
    const Tensor& offsets, std::optional<Tensor> admitted, std::optional<Tensor> batch_scores,
    int64_t order, int64_t insert_policy, std::optional<Tensor> slots,
    std::optional<Tensor> groups);
Tensor hash_erase_(std::vector<Tensor> index, const Tensor& ids, const Tensor& starts,
                   const Tensor& tables);

// The row buffers of all tables, and how their new rows begin. The tensors own the memory.
class InitialRows {
 public:
  // Check, after in.check(op), that the rows in `layout` lie inside their row buffers.
  InitialRows(const char* op, const InitialInputs& in);

  // Write row slots[i] of each row buffer of table t for its misses i, [offsets[t],
  // offsets[t + 1]), in parallel, unless the slot is -1. The key of a miss is ids[first[i]].
  void write(const int64_t* ids, const int64_t* first, const int64_t* offsets, const int64_t* slots,
             int64_t seed) const;

  // Return the rows of a table by slot, one matrix per row buffer.
  std::vector<RowBytes> rows_of(int64_t table) const;

 private:
  struct Buffer {
    char* data;
    Dtype type;
    int64_t numel;
  };

  std::vector<Buffer> buffers_;
  const InitialLayout* layout_;  // [T, P]
  const InitialRule* rules_;     // [T, P]
  int64_t num_tables_;
};

}  // namespace emb
