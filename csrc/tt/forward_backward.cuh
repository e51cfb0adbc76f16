// The forward and the backward pass of tensor-train tables on the GPU as sequences of kernels, for
// any launcher: tests/simt runs the same code on an emulated machine. Sizes that only the device
// knows (distinct rows and halves) stay there; grids and buffers have the maximum size.
//
// Every kernel serves all tables in one launch, so a pass takes the same number of launches for any
// number of tables. What differs between tables is in arrays in device memory (TtTableRows, TtPair
// and others), which one launch writes before the others (core/upload.cuh).
#pragma once

#include <vector>

#include "core/upload.cuh"
#include "optim/update_rows.cuh"
#include "tt/args.h"
#include "tt/pair.cuh"
#include "tt/right_grads.cuh"
#include "tt/rows.cuh"

namespace emb::cuda {

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// One table of a batch.
struct TtBatchTable {
  TtShape shape;
  int64_t first_left, first_right;  // ids
  const void* cores[kMaxCores];
  const float* left[2];     // the cores of the left half as floats, of 16-bit ones copies
  float* mirrored[2];       // the outer and the inner core of a right pair, axes reversed
  float* grads[kMaxCores];  // gradients of the cores; null in a forward pass
  float* mirrored_grads[2];
};

// All tables of a batch. Values of halves are rows of `left_stride` and `right_stride` floats, the
// same for all tables; rows and their gradients have `row_stride`.
struct TtBatch {
  std::vector<TtBatchTable> tables;
  Dtype type;  // dtype of the cores
  TtPlan plan;
  MatmulPrecision precision;
  int64_t left_ids = 0, right_ids = 0, left_stride = 0, right_stride = 0, row_stride = 0;
  bool has_left_pairs = false, has_right_pairs = false;

  TtBatch(const std::vector<TtShape>& shapes, const std::vector<const void*>& cores, Dtype dtype,
          const TtPlan& batch_plan, MatmulPrecision matmul)
      : type(dtype), plan(batch_plan), precision(matmul) {
    const void* const* core = cores.data();
    for (const TtShape& shape : shapes) {
      TtBatchTable table{shape, left_ids, right_ids, {}, {}, {}, {}, {}};
      for (int k = 0; k < shape.cores; ++k) table.cores[k] = *core++;
      for (int k = 0; k < 2; ++k) table.left[k] = static_cast<const float*>(table.cores[k]);
      tables.push_back(table);
      const TtHalf left = shape.left(), right = shape.right();
      left_ids += left.ids();
      right_ids += right.ids();
      left_stride = max_of(left_stride, left.value_size());
      right_stride = max_of(right_stride, right.value_size());
      row_stride = max_of(row_stride, shape.dim());
      has_left_pairs |= left.pair;
      has_right_pairs |= right.pair;
    }
  }

  // The most distinct halves that there may be, and the floats of their values.
  int64_t lefts() const { return min_of(plan.capacity, left_ids); }
  int64_t rights() const { return min_of(plan.capacity, right_ids); }
  int64_t left_floats() const { return lefts() * left_stride; }
  int64_t right_floats() const { return rights() * right_stride; }

  // Return the most floats of an outer row of pairs, left or right ones; 0 if there are none.
  int64_t most_outer_floats(TtHalf (TtShape::*half_of)() const) const {
    int64_t found = 0;
    for (const TtBatchTable& table : tables) {
      const TtHalf half = (table.shape.*half_of)();
      if (half.pair) found = max_of(found, half.outer_size());
    }
    return found;
  }
};

// The buffers of a pass. Those of length 0 are null.
struct TtMemory {
  float* right_values = nullptr;
  const float* left_values = nullptr;  // left values from the forward pass, or made by `expand`
  float* made_left_values = nullptr;   // left values that `expand` writes; null if it need not
  // Of a backward pass.
  float *left_grads = nullptr, *right_grads = nullptr;  // gradients of the values of pairs
  float* partials = nullptr;
  float *left_outer_values = nullptr, *right_outer_values = nullptr;

  // Make the values of left pairs, in memory of so many floats.
  void set_left_values(float* values) { left_values = made_left_values = values; }

  // `allocate` returns memory of so many floats that lives as long as the pass.
  template <class Allocate>
  void add_forward(TtBatch* batch, Allocate& allocate) {
    right_values = allocate(batch->right_floats());
    for (TtBatchTable& table : batch->tables) {
      const TtHalf left = table.shape.left(), right = table.shape.right();
      if (right.pair) {
        table.mirrored[0] = allocate(right.outer_rows * right.outer_size());
        table.mirrored[1] = allocate(right.inner_rows * right.inner_size());
      }
      if (batch->type != Dtype::kFloat) {
        table.left[0] = allocate(left.outer_rows * left.outer_size());
        if (left.pair) table.left[1] = allocate(left.inner_rows * left.inner_size());
      }
    }
  }

  template <class Allocate>
  void add_backward(TtBatch* batch, Allocate& allocate) {
    left_grads = allocate(batch->has_left_pairs ? batch->left_floats() : 0);
    right_grads = allocate(batch->has_right_pairs ? batch->right_floats() : 0);
    partials = allocate(chunk_slots(batch->plan.capacity) * batch->right_stride);
    left_outer_values = allocate(batch->lefts() * batch->most_outer_floats(&TtShape::left));
    right_outer_values = allocate(batch->rights() * batch->most_outer_floats(&TtShape::right));
    for (TtBatchTable& table : batch->tables) {
      const TtHalf right = table.shape.right();
      if (!right.pair) continue;
      table.mirrored_grads[0] = allocate(right.outer_rows * right.outer_size());
      table.mirrored_grads[1] = allocate(right.inner_rows * right.inner_size());
    }
  }
};

// The arrays of arguments of a pass, and in the end where they are on the device.
class TtArrays {
 public:
  TtArrays(const TtBatch& batch, const TtMemory& memory) : batch_(batch) {
    const auto tables = static_cast<int64_t>(batch.tables.size());
    for (int64_t t = 0; t < tables; ++t) {
      add_rows(batch.tables[t], memory);
      add_copies(batch.tables[t], t);
      add_left_pair(batch.tables[t], memory, t);
    }
    num_left_pairs_ = size_of(pairs_);
    for (int64_t t = 0; t < tables; ++t) add_right_pair(batch.tables[t], memory, t);
    args_.plan = batch.plan;
    args_.right = memory.right_values;
    args_.right_stride = batch.right_stride;
    args_.row_stride = batch.row_stride;
  }

  // Add an optimizer step on the rows of a core.
  void add_step(MatrixStep step) {
    step.first_block = update_blocks_;
    update_blocks_ += step.in.blocks();
    steps_.push_back(step);
  }

  // Return the most words that `upload` writes.
  static int64_t max_words(const TtBatch& batch) {
    int64_t bytes = 0;
    for (const TtBatchTable& table : batch.tables) {
      bytes += sizeof(TtTableRows) + 2 * sizeof(TtPair) + 2 * sizeof(TtWiden) +
               4 * sizeof(TtReverse) + table.shape.cores * sizeof(MatrixStep);
    }
    return bytes / static_cast<int64_t>(sizeof(uint64_t));
  }

  // Copy the arrays to the device, to memory for `max_words`, and begin the step of an update.
  template <class Launcher>
  void upload(const Launcher& launcher, uint64_t* words, BeginStep begin = {}) {
    Upload upload;
    const int64_t rows = upload.add(rows_), pairs = upload.add(pairs_), widen = upload.add(widen_),
                  mirror = upload.add(mirror_), mirror_back = upload.add(mirror_back_);
    begin.first_of_step = upload.add(steps_);
    upload.start(launcher, words, begin);
    args_.tables = reinterpret_cast<const TtTableRows*>(words + rows);
    device_pairs_ = reinterpret_cast<const TtPair*>(words + pairs);
    device_widen_ = reinterpret_cast<const TtWiden*>(words + widen);
    device_mirror_ = reinterpret_cast<const TtReverse*>(words + mirror);
    device_mirror_back_ = reinterpret_cast<const TtReverse*>(words + mirror_back);
    device_steps_ = reinterpret_cast<const MatrixStep*>(words + begin.first_of_step);
  }

  // Make the values of right halves, and of left pairs where `memory` does not have them.
  template <class Launcher>
  void make_values(const Launcher& launcher, const TtMemory& memory) const {
    if (!widen_.empty()) {
      launcher(widen_cores_kernel, blocks_for(widen_rows_, 1, launcher.blocks(64)), kPairThreads,
               device_widen_, size_of(widen_), widen_rows_, batch_.type);
    }
    if (has_last_cores_) {
      launch_right_values(launcher, batch_.rights(), args_, batch_.type, memory.right_values);
    }
    reverse(launcher, device_mirror_, size_of(mirror_), batch_.type);
    const bool makes_left = memory.made_left_values != nullptr;
    launch_expand(launcher, batch_.precision, pairs_from(makes_left ? 0 : num_left_pairs_));
  }

  template <class Launcher>
  void make_rows(const Launcher& launcher, float* rows) const {
    launch_tt_rows(launcher, batch_.precision, kernels_, batch_.lefts(), args_, rows);
  }

  template <class Launcher>
  void make_grads(const Launcher& launcher, const TtMemory& memory, const float* row_grads) const {
    launch_left_grads(launcher, batch_.precision, kernels_, batch_.lefts(), args_, row_grads);
    const TtRightGrads right{row_grads, has_row_vectors(row_grads), memory.partials,
                             memory.right_grads, max_right_tiles_};
    launch_right_grads(launcher, kernels_.right_vectors && right.has_vectors,
                       kernels_.right_scalars || !right.has_vectors, batch_.rights(), args_, right);
    launch_contract(launcher, batch_.precision, pairs_from(0));
    reverse(launcher, device_mirror_back_, size_of(mirror_back_), Dtype::kFloat);
  }

  template <class Launcher>
  void update(const Launcher& launcher, const OptimizerStepArgs& step) const {
    launch_update_matrices(launcher, device_steps_, size_of(steps_), update_blocks_, step);
  }

 private:
  template <class T>
  static int size_of(const std::vector<T>& items) {
    return static_cast<int>(items.size());
  }

  // 32 bits hold the offsets of values and gradients in units of four floats.
  bool has_row_vectors(const float* row_grads) const {
    constexpr int64_t kMost = int64_t{1} << 34;
    return batch_.row_stride % 4 == 0 && is_aligned(row_grads, 16) && max_left_floats_ < kMost &&
           batch_.plan.capacity * batch_.row_stride < kMost;
  }

  TtHalves left_halves(const TtBatchTable& table, int64_t number) const {
    const TtPlan& plan = batch_.plan;
    return {table.shape.left(),          table.left[0],    table.left[1],      plan.lefts,
            plan.left_starts() + number, table.first_left, batch_.left_stride, false};
  }
  TtHalves right_halves(const TtBatchTable& table, int64_t number) const {
    const TtPlan& plan = batch_.plan;
    return {table.shape.right(),          table.mirrored[0], table.mirrored[1],   plan.rights,
            plan.right_starts() + number, table.first_right, batch_.right_stride, true};
  }

  void add_rows(const TtBatchTable& table, const TtMemory& memory);
  void add_copies(const TtBatchTable& table, int64_t number);
  void add_left_pair(const TtBatchTable& table, const TtMemory& memory, int64_t number);
  void add_right_pair(const TtBatchTable& table, const TtMemory& memory, int64_t number);

  void add_pair(TtPair pair) {
    pair.first_inner = pair_inner_rows_;
    pair.first_outer = pair_outer_rows_;
    pair_inner_rows_ += pair.halves.half.inner_rows;
    pair_outer_rows_ += pair.halves.half.outer_rows;
    pairs_.push_back(pair);
  }

  // Return the pairs from a number on.
  TtPairs pairs_from(int first) const {
    TtPairs found;
    found.pairs = device_pairs_ + first;
    found.count = size_of(pairs_) - first;
    if (found.count > 0) found.first_inner = pairs_[first].first_inner;
    for (int i = first; i < size_of(pairs_); ++i) {
      const TtHalf& half = pairs_[i].halves.half;
      found.equal_inner_rows =
          i == first || found.equal_inner_rows == half.inner_rows ? half.inner_rows : 0;
      found.inner_rows += half.inner_rows;
      found.outer_rows += half.outer_rows;
      found.max_width = static_cast<int>(max_of(found.max_width, half.q_inner * half.rank));
      found.max_inner_rank = static_cast<int>(max_of(found.max_inner_rank, half.inner_rank));
    }
    return found;
  }

  template <class Launcher>
  void reverse(const Launcher& launcher, const TtReverse* matrices, int count, Dtype type) const {
    if (count == 0) return;
    launcher(reverse_kernel, blocks_for(mirror_rows_, 1, launcher.blocks(64)), kRowThreads,
             matrices, count, mirror_rows_, type);
  }

  const TtBatch& batch_;
  TtRowsArgs args_{};
  TtKernels kernels_;
  bool has_last_cores_ = false;
  int num_left_pairs_ = 0, max_right_tiles_ = 0;
  int64_t max_left_floats_ = 0;  // most floats that TtTableRows::left points to
  int64_t pair_inner_rows_ = 0, pair_outer_rows_ = 0;
  int64_t widen_rows_ = 0, mirror_rows_ = 0, update_blocks_ = 0;
  std::vector<TtTableRows> rows_;
  std::vector<TtPair> pairs_;
  std::vector<TtWiden> widen_;
  std::vector<TtReverse> mirror_, mirror_back_;
  std::vector<MatrixStep> steps_;
  const TtPair* device_pairs_ = nullptr;
  const TtWiden* device_widen_ = nullptr;
  const TtReverse *device_mirror_ = nullptr, *device_mirror_back_ = nullptr;
  const MatrixStep* device_steps_ = nullptr;
};

inline void TtArrays::add_rows(const TtBatchTable& table, const TtMemory& memory) {
  const TtHalf left = table.shape.left(), right = table.shape.right();
  const int last = table.shape.cores - 1;
  TtTableRows rows{};
  rows.left_columns = left.columns();
  rows.right_columns = right.columns();
  rows.rank = left.rank;
  rows.has_pair = left.pair;
  rows.first_left = static_cast<int32_t>(table.first_left);
  rows.first_right = static_cast<int32_t>(table.first_right);
  rows.left = left.pair ? memory.left_values : table.left[0];
  rows.left_grads = left.pair ? memory.left_grads : table.grads[0];
  rows.left_stride = left.pair ? batch_.left_stride : left.value_size();
  rows.last_core = right.pair ? nullptr : table.cores[last];
  rows.last_grads = right.pair ? nullptr : table.grads[last];
  rows.has_vectors = rows.rank % 4 == 0 && rows.left_stride % 4 == 0 &&
                     batch_.right_stride % 4 == 0 && is_aligned(rows.left, 16) &&
                     is_aligned(memory.right_values, 16);
  rows_.push_back(rows);
  has_last_cores_ |= !right.pair;
  args_.max_fragments =
      static_cast<int>(max_of(args_.max_fragments, fragments_of(rows.left_columns)));
  args_.max_parts = static_cast<int>(max_of(args_.max_parts, (rows.rank + 31) / 32));
  max_right_tiles_ =
      static_cast<int>(max_of(max_right_tiles_, right_tiles(rows.right_columns, rows.rank)));
  max_left_floats_ = max_of(max_left_floats_,
                            left.pair ? batch_.left_floats() : left.outer_rows * left.value_size());
  (rows.has_mma_rows() ? kernels_.mma_rows : kernels_.plain_rows) = true;
  (rows.has_mma_grads() ? kernels_.mma_grads : kernels_.plain_grads) = true;
  const bool has_right_vectors = rows.has_vectors && rows.right_columns % 4 == 0;
  (has_right_vectors ? kernels_.right_vectors : kernels_.right_scalars) = true;
}

// Copies of cores before and after the products: as floats, and with their axes reversed.
inline void TtArrays::add_copies(const TtBatchTable& table, int64_t number) {
  const TtHalf left = table.shape.left(), right = table.shape.right();
  const int last = table.shape.cores - 1;
  const auto widen = [&](int k, int64_t rows, int64_t width, int64_t unit) {
    widen_.push_back({left_halves(table, number), table.cores[k], const_cast<float*>(table.left[k]),
                      widen_rows_, width, unit});
    widen_rows_ += rows;
  };
  if (batch_.type != Dtype::kFloat) {
    // The rows of an outer core are few and spread over all halves of a pair.
    widen(0, left.outer_rows, left.outer_size(), left.pair ? 0 : 1);
    if (left.pair) widen(1, left.inner_rows, left.inner_size(), left.outer_rows);
  }
  if (!right.pair) return;
  const auto mirror = [&](int k, int mirrored, int64_t rows, int64_t a, int64_t q, int64_t b) {
    mirror_.push_back({table.cores[k], table.mirrored[mirrored], mirror_rows_, a, q, b});
    if (table.grads[k] != nullptr) {
      mirror_back_.push_back(
          {table.mirrored_grads[mirrored], table.grads[k], mirror_rows_, b, q, a});
    }
    mirror_rows_ += rows;
  };
  mirror(last, 0, right.outer_rows, right.inner_rank, right.q_outer, 1);
  mirror(last - 1, 1, right.inner_rows, right.rank, right.q_inner, right.inner_rank);
}

inline void TtArrays::add_left_pair(const TtBatchTable& table, const TtMemory& memory,
                                    int64_t number) {
  if (!table.shape.left().pair) return;
  TtPair pair{};
  pair.halves = left_halves(table, number);
  pair.values = memory.made_left_values;
  pair.value_grads = memory.left_grads;
  pair.outer_values = memory.left_outer_values;
  pair.outer_stride = batch_.most_outer_floats(&TtShape::left);
  pair.outer_grads = table.grads[0];
  pair.inner_grads = table.grads[1];
  add_pair(pair);
}

inline void TtArrays::add_right_pair(const TtBatchTable& table, const TtMemory& memory,
                                     int64_t number) {
  if (!table.shape.right().pair) return;
  TtPair pair{};
  pair.halves = right_halves(table, number);
  pair.values = memory.right_values;
  pair.value_grads = memory.right_grads;
  pair.outer_values = memory.right_outer_values;
  pair.outer_stride = batch_.most_outer_floats(&TtShape::right);
  pair.outer_grads = table.mirrored_grads[0];
  pair.inner_grads = table.mirrored_grads[1];
  add_pair(pair);
}

}  // namespace emb::cuda
