// The forward and the backward pass of tensor-train tables on the GPU as sequences of kernels, for
// any launcher: tests/simt runs the same code on an emulated machine. tt/args.h explains halves,
// pairs, values and plans. The numbers of distinct rows and halves are known on the device only, so
// grids and buffers have the size of the largest case.
//
// A launch serves all tables, so that the number of launches of a pass depends on the kinds of
// shapes among the tables (TtKernels), not on the number of tables. What differs between tables is
// in arrays of arguments in device memory (TtTableRows, TtPair and others), which core/upload.cuh
// copies there.
#pragma once

#include <vector>

#include "core/upload.cuh"
#include "optim/update_rows.cuh"
#include "tt/args.h"
#include "tt/pair.cuh"
#include "tt/right_grads.cuh"
#include "tt/rows.cuh"

namespace emb::cuda {

// A pass builds a TtDeviceBatch (shapes, cores and plan), a TtMemory (the buffers) and, from both,
// a TtArrays. It calls TtArrays::upload, then make_values (unless the buffers have the values of an
// earlier pass), and then make_rows (forward) or make_grads and update (backward). The memory
// belongs to the caller, who must keep it until the kernels have run.

inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t max_of(int64_t a, int64_t b) { return a > b ? a : b; }

// One table of a batch; its addresses are of device memory.
struct TtDeviceTable {
  TtShape shape;
  int64_t first_left, first_right;  // first ids of its halves
  const void* cores[kMaxCores];
  // Outer core and, for a pair, inner core of the left half as floats: the cores, or copies.
  const float* left[2];
  float* mirrored[2];        // copies of outer and inner core of a right pair with axes reversed
  float* grads[kMaxCores];   // gradients of the cores; null in a forward pass
  float* mirrored_grads[2];  // gradients of `mirrored`, in a backward pass
};

// All tables of a batch. Strides are in floats and hold for all tables: left_stride for the values
// of left halves, right_stride for those of right halves, row_stride for rows and their gradients.
struct TtDeviceBatch {
  std::vector<TtDeviceTable> tables;
  Dtype type;  // dtype of the cores
  TtPlan plan;
  MatmulPrecision precision;
  int64_t num_left_ids = 0, num_right_ids = 0;  // ids of halves of all tables
  int64_t left_stride = 0, right_stride = 0, row_stride = 0;
  bool has_left_pairs = false, has_right_pairs = false;

  // `cores` has the device addresses of the cores, table after table. The copies and gradients of
  // cores are set later, by TtMemory and by the caller.
  TtDeviceBatch(const std::vector<TtShape>& shapes, const std::vector<const void*>& cores,
                Dtype core_type, const TtPlan& batch_plan, MatmulPrecision matmul_precision)
      : type(core_type), plan(batch_plan), precision(matmul_precision) {
    const void* const* core = cores.data();
    for (const TtShape& shape : shapes) {
      TtDeviceTable table{shape, num_left_ids, num_right_ids, {}, {}, {}, {}, {}};
      for (int k = 0; k < shape.cores; ++k) table.cores[k] = *core++;
      for (int k = 0; k < 2; ++k) table.left[k] = static_cast<const float*>(table.cores[k]);
      tables.push_back(table);
      const TtHalf left = shape.left(), right = shape.right();
      num_left_ids += left.num_ids();
      num_right_ids += right.num_ids();
      left_stride = max_of(left_stride, left.value_size());
      right_stride = max_of(right_stride, right.value_size());
      row_stride = max_of(row_stride, shape.dim());
      has_left_pairs |= left.is_pair;
      has_right_pairs |= right.is_pair;
    }
  }

  // Return the maximum number of distinct halves, and the floats of their values.
  int64_t max_lefts() const { return min_of(plan.capacity, num_left_ids); }
  int64_t max_rights() const { return min_of(plan.capacity, num_right_ids); }
  int64_t left_floats() const { return max_lefts() * left_stride; }
  int64_t right_floats() const { return max_rights() * right_stride; }

  // Return the maximum floats of a row of the outer core of a pair; 0 if there is no pair. half_of
  // is &TtShape::left or &TtShape::right.
  int64_t max_outer_floats(TtHalf (TtShape::*half_of)() const) const {
    int64_t floats = 0;
    for (const TtDeviceTable& table : tables) {
      const TtHalf half = (table.shape.*half_of)();
      if (half.is_pair) floats = max_of(floats, half.outer_size());
    }
    return floats;
  }
};

// The buffers of a pass in device memory. The functions assign_* get them from allocate(n), which
// must return an address for n floats, valid as long as the pass; null for n = 0.
struct TtMemory {
  float* right_values = nullptr;       // [rights, right_stride]
  const float* left_values = nullptr;  // [lefts, left_stride] of pairs
  float* new_left_values = nullptr;    // left_values if this pass computes them, else null
  // The other buffers serve the backward pass only.
  float *left_grads = nullptr, *right_grads = nullptr;  // gradients of the values of pairs
  float* partials = nullptr;                            // RightGradBuffers::partials
  float *left_outer_grads = nullptr, *right_outer_grads = nullptr;  // TtPair::outer_grads_by_half

  // Let this pass write the values of left pairs to `values`, memory for left_floats() floats.
  void set_left_values(float* values) { left_values = new_left_values = values; }

  // Assign the buffers that both passes need, except left_values, and the copies of cores in
  // `batch`.
  template <class Allocate>
  void assign_forward(TtDeviceBatch* batch, Allocate& allocate) {
    right_values = allocate(batch->right_floats());
    for (TtDeviceTable& table : batch->tables) {
      const TtHalf left = table.shape.left(), right = table.shape.right();
      if (right.is_pair) {
        table.mirrored[0] = allocate(right.outer_rows * right.outer_size());
        table.mirrored[1] = allocate(right.inner_rows * right.inner_size());
      }
      if (batch->type != Dtype::kFloat) {
        table.left[0] = allocate(left.outer_rows * left.outer_size());
        if (left.is_pair) table.left[1] = allocate(left.inner_rows * left.inner_size());
      }
    }
  }

  // Assign the other buffers of a backward pass, and the gradients of mirrored cores in `batch`.
  template <class Allocate>
  void assign_backward(TtDeviceBatch* batch, Allocate& allocate) {
    left_grads = allocate(batch->has_left_pairs ? batch->left_floats() : 0);
    right_grads = allocate(batch->has_right_pairs ? batch->right_floats() : 0);
    partials = allocate(num_chunk_slots(batch->plan.capacity) * batch->right_stride);
    left_outer_grads = allocate(batch->max_lefts() * batch->max_outer_floats(&TtShape::left));
    right_outer_grads = allocate(batch->max_rights() * batch->max_outer_floats(&TtShape::right));
    for (TtDeviceTable& table : batch->tables) {
      const TtHalf right = table.shape.right();
      if (!right.is_pair) continue;
      table.mirrored_grads[0] = allocate(right.outer_rows * right.outer_size());
      table.mirrored_grads[1] = allocate(right.inner_rows * right.inner_size());
    }
  }
};

// The arrays of arguments of a pass, and its launches. The constructor builds the arrays on the
// host; `upload` copies them to the device, and must be called before the other launches. No
// function waits for the device. Refers to `batch`, which must outlive it.
class TtArrays {
 public:
  TtArrays(const TtDeviceBatch& batch, const TtMemory& memory) : batch_(batch) {
    const auto num_tables = static_cast<int64_t>(batch.tables.size());
    for (int64_t t = 0; t < num_tables; ++t) {
      add_rows(batch.tables[t], memory);
      add_copies(batch.tables[t], t);
      add_left_pair(batch.tables[t], memory, t);
    }
    num_left_pairs_ = size_of(pairs_);
    for (int64_t t = 0; t < num_tables; ++t) add_right_pair(batch.tables[t], memory, t);
    args_.plan = batch.plan;
    args_.right_values = memory.right_values;
    args_.right_stride = batch.right_stride;
    args_.row_stride = batch.row_stride;
  }

  // Add an optimizer step on the rows of a core, before `upload`. first_block of `step` is ignored.
  void add_step(MatrixStep step) {
    step.first_block = update_blocks_;
    update_blocks_ += step.gradient.num_blocks();
    steps_.push_back(step);
  }

  // Return the maximum number of 8-byte words that `upload` writes.
  static int64_t max_words(const TtDeviceBatch& batch) {
    int64_t bytes = 0;
    for (const TtDeviceTable& table : batch.tables) {
      bytes += sizeof(TtTableRows) + 2 * sizeof(TtPair) + 2 * sizeof(WidenedCore) +
               4 * sizeof(TtReverse) + table.shape.cores * sizeof(MatrixStep);
    }
    return bytes / static_cast<int64_t>(sizeof(uint64_t));
  }

  // Copy the arrays to `words`, device memory for max_words, and do the work of `step_start`: fill
  // gradients with zeros, count the step of an update. Its first_update_word is ignored.
  template <class Launcher>
  void upload(const Launcher& launcher, uint64_t* words, StepStart step_start = {}) {
    Upload upload;
    const int64_t rows = upload.add(rows_), pairs = upload.add(pairs_), widen = upload.add(widen_),
                  mirror = upload.add(mirror_), mirror_back = upload.add(mirror_back_);
    step_start.first_update_word = upload.add(steps_);
    upload.start(launcher, words, step_start);
    args_.tables = reinterpret_cast<const TtTableRows*>(words + rows);
    device_pairs_ = reinterpret_cast<const TtPair*>(words + pairs);
    device_widen_ = reinterpret_cast<const WidenedCore*>(words + widen);
    device_mirror_ = reinterpret_cast<const TtReverse*>(words + mirror);
    device_mirror_back_ = reinterpret_cast<const TtReverse*>(words + mirror_back);
    device_steps_ = reinterpret_cast<const MatrixStep*>(words + step_start.first_update_word);
  }

  // Write the copies of cores, the values of right halves, and, if memory.new_left_values is not
  // null, the values of left pairs. `memory` is that of the constructor.
  template <class Launcher>
  void make_values(const Launcher& launcher, const TtMemory& memory) const {
    if (!widen_.empty()) {
      launcher(widen_cores_kernel,
               blocks_for(widen_rows_, 1, launcher.max_grid_blocks(2 * kResidentBlocksPerSm)),
               kPairThreads, device_widen_, size_of(widen_), widen_rows_, batch_.type);
    }
    if (has_last_cores_) {
      launch_right_values(launcher, batch_.max_rights(), args_, batch_.type, memory.right_values);
    }
    reverse(launcher, device_mirror_, size_of(mirror_), batch_.type);
    const int first_pair = memory.new_left_values != nullptr ? 0 : num_left_pairs_;
    launch_expand(launcher, batch_.precision, pairs_from(first_pair));
  }

  // Write the distinct rows to `rows`, [capacity, row_stride]. Rows and columns that do not exist
  // are not written.
  template <class Launcher>
  void make_rows(const Launcher& launcher, float* rows) const {
    launch_tt_rows(launcher, batch_.precision, kernels_, batch_.max_lefts(), args_, rows);
  }

  // Write the gradients of all cores from the gradients of the rows, [capacity, row_stride]. Of a
  // core that is in no pair, rows that the batch does not use are not written.
  template <class Launcher>
  void make_grads(const Launcher& launcher, const TtMemory& memory, const float* row_grads) const {
    launch_left_grads(launcher, batch_.precision, kernels_, batch_.max_lefts(), args_, row_grads);
    const RightGradBuffers buffers{row_grads, has_row_vectors(row_grads), memory.partials,
                                   memory.right_grads, max_right_tiles_};
    launch_right_grads(launcher, kernels_.right_vectors && buffers.has_vectors,
                       kernels_.right_scalars || !buffers.has_vectors, batch_.max_rights(), args_,
                       buffers);
    launch_contract(launcher, batch_.precision, pairs_from(0));
    reverse(launcher, device_mirror_back_, size_of(mirror_back_), Dtype::kFloat);
  }

  // Apply the optimizer to the cores of add_step. Of `step`, only the optimizer and the
  // hyperparameters are read; they hold for all cores.
  template <class Launcher>
  void update(const Launcher& launcher, const OptimizerStepArgs& step) const {
    launch_update_matrices(launcher, device_steps_, size_of(steps_), update_blocks_, step);
  }

 private:
  template <class T>
  static int size_of(const std::vector<T>& items) {
    return static_cast<int>(items.size());
  }

  // Return whether right_grads.cuh may read row gradients in vectors of four floats: 32 bits must
  // hold the offsets of row gradients and left values in vectors.
  bool has_row_vectors(const float* row_grads) const {
    constexpr int64_t kMaxFloats = int64_t{1} << 34;
    return batch_.row_stride % 4 == 0 && is_aligned(row_grads, 16) &&
           max_left_floats_ < kMaxFloats && batch_.plan.capacity * batch_.row_stride < kMaxFloats;
  }

  // Return the left halves of `table`, table number table_index of the batch, or its right halves,
  // which must be pairs.
  TtHalves left_halves(const TtDeviceTable& table, int64_t table_index) const {
    const TtPlan& plan = batch_.plan;
    return {table.shape.left(),
            table.left[0],
            table.left[1],
            plan.lefts,
            plan.left_starts() + table_index,
            table.first_left,
            batch_.left_stride,
            false};
  }
  TtHalves right_halves(const TtDeviceTable& table, int64_t table_index) const {
    const TtPlan& plan = batch_.plan;
    return {table.shape.right(),
            table.mirrored[0],
            table.mirrored[1],
            plan.rights,
            plan.right_starts() + table_index,
            table.first_right,
            batch_.right_stride,
            true};
  }

  // Add to the arrays what `table`, table number table_index of the batch, needs.
  void add_rows(const TtDeviceTable& table, const TtMemory& memory);
  void add_copies(const TtDeviceTable& table, int64_t table_index);
  void add_left_pair(const TtDeviceTable& table, const TtMemory& memory, int64_t table_index);
  void add_right_pair(const TtDeviceTable& table, const TtMemory& memory, int64_t table_index);

  void add_pair(TtPair pair) {
    pair.first_inner = pair_inner_rows_;
    pair.first_outer = pair_outer_rows_;
    pair_inner_rows_ += pair.halves.half.inner_rows;
    pair_outer_rows_ += pair.halves.half.outer_rows;
    pairs_.push_back(pair);
  }

  // Return the pairs from pair `first` on; right pairs follow the left pairs.
  TtPairs pairs_from(int first) const {
    TtPairs result;
    result.pairs = device_pairs_ + first;
    result.num_pairs = size_of(pairs_) - first;
    if (result.num_pairs > 0) result.first_inner = pairs_[first].first_inner;
    for (int i = first; i < size_of(pairs_); ++i) {
      const TtHalf& half = pairs_[i].halves.half;
      result.inner_rows_per_pair =
          i == first || result.inner_rows_per_pair == half.inner_rows ? half.inner_rows : 0;
      result.inner_rows += half.inner_rows;
      result.outer_rows += half.outer_rows;
      result.max_width = static_cast<int>(max_of(result.max_width, half.q_inner * half.rank));
      result.max_inner_rank = static_cast<int>(max_of(result.max_inner_rank, half.inner_rank));
    }
    return result;
  }

  // Reverse the axes of the rows of `num_matrices` matrices of dtype `type`.
  template <class Launcher>
  void reverse(const Launcher& launcher, const TtReverse* matrices, int num_matrices,
               Dtype type) const {
    if (num_matrices == 0) return;
    launcher(reverse_kernel,
             blocks_for(mirror_rows_, 1, launcher.max_grid_blocks(2 * kResidentBlocksPerSm)),
             kRowThreads, matrices, num_matrices, mirror_rows_, type);
  }

  const TtDeviceBatch& batch_;
  TtDeviceRowsArgs args_{};
  TtKernels kernels_;
  bool has_last_cores_ = false;
  int num_left_pairs_ = 0, max_right_tiles_ = 0;
  int64_t max_left_floats_ = 0;  // maximum size, in floats, of the array TtTableRows::left
  // Totals: core rows of pairs, rows of float copies, rows of mirrored cores, blocks of the update.
  int64_t pair_inner_rows_ = 0, pair_outer_rows_ = 0;
  int64_t widen_rows_ = 0, mirror_rows_ = 0, update_blocks_ = 0;
  std::vector<TtTableRows> rows_;
  std::vector<TtPair> pairs_;
  std::vector<WidenedCore> widen_;
  std::vector<TtReverse> mirror_, mirror_back_;  // cores to mirrored cores; their gradients back
  std::vector<MatrixStep> steps_;
  const TtPair* device_pairs_ = nullptr;
  const WidenedCore* device_widen_ = nullptr;
  const TtReverse *device_mirror_ = nullptr, *device_mirror_back_ = nullptr;
  const MatrixStep* device_steps_ = nullptr;
};

inline void TtArrays::add_rows(const TtDeviceTable& table, const TtMemory& memory) {
  const TtHalf left = table.shape.left(), right = table.shape.right();
  const int last = table.shape.cores - 1;
  TtTableRows rows{};
  rows.left_columns = left.columns();
  rows.right_columns = right.columns();
  rows.rank = left.rank;
  rows.has_left_pair = left.is_pair;
  rows.first_left = static_cast<int32_t>(table.first_left);
  rows.first_right = static_cast<int32_t>(table.first_right);
  rows.left = left.is_pair ? memory.left_values : table.left[0];
  rows.left_grads = left.is_pair ? memory.left_grads : table.grads[0];
  rows.left_stride = left.is_pair ? batch_.left_stride : left.value_size();
  rows.last_core = right.is_pair ? nullptr : table.cores[last];
  rows.last_grads = right.is_pair ? nullptr : table.grads[last];
  rows.has_vectors = rows.rank % 4 == 0 && rows.left_stride % 4 == 0 &&
                     batch_.right_stride % 4 == 0 && is_aligned(rows.left, 16) &&
                     is_aligned(memory.right_values, 16);
  rows_.push_back(rows);
  has_last_cores_ |= !right.is_pair;
  args_.max_column_groups =
      static_cast<int>(max_of(args_.max_column_groups, num_column_groups(rows.left_columns)));
  args_.max_rank_groups = static_cast<int>(max_of(args_.max_rank_groups, (rows.rank + 31) / 32));
  max_right_tiles_ =
      static_cast<int>(max_of(max_right_tiles_, num_right_tiles(rows.right_columns, rows.rank)));
  max_left_floats_ = max_of(
      max_left_floats_, left.is_pair ? batch_.left_floats() : left.outer_rows * left.value_size());
  (rows.has_mma_rows() ? kernels_.mma_rows : kernels_.plain_rows) = true;
  (rows.has_mma_grads() ? kernels_.mma_grads : kernels_.plain_grads) = true;
  const bool has_right_vectors = rows.has_vectors && rows.right_columns % 4 == 0;
  (has_right_vectors ? kernels_.right_vectors : kernels_.right_scalars) = true;
}

// Add the copies of 16-bit left cores as floats, of the cores of a right pair with reversed axes,
// and, back again, of the gradients of these cores.
inline void TtArrays::add_copies(const TtDeviceTable& table, int64_t table_index) {
  const TtHalf left = table.shape.left(), right = table.shape.right();
  const int last = table.shape.cores - 1;
  const auto widen = [&](int k, int64_t rows, int64_t width, int64_t ids_per_row) {
    widen_.push_back({left_halves(table, table_index), table.cores[k],
                      const_cast<float*>(table.left[k]), widen_rows_, width, ids_per_row});
    widen_rows_ += rows;
  };
  if (batch_.type != Dtype::kFloat) {
    // Copy all rows of the outer core of a pair: the halves that use a row are no range of halves.
    widen(0, left.outer_rows, left.outer_size(), left.is_pair ? 0 : 1);
    if (left.is_pair) widen(1, left.inner_rows, left.inner_size(), left.outer_rows);
  }
  if (!right.is_pair) return;
  // Core k, of `rows` rows [a, q, b], has mirrored[i] as its copy.
  const auto mirror = [&](int k, int i, int64_t rows, int64_t a, int64_t q, int64_t b) {
    mirror_.push_back({table.cores[k], table.mirrored[i], mirror_rows_, a, q, b});
    if (table.grads[k] != nullptr) {
      mirror_back_.push_back({table.mirrored_grads[i], table.grads[k], mirror_rows_, b, q, a});
    }
    mirror_rows_ += rows;
  };
  mirror(last, 0, right.outer_rows, right.inner_rank, right.q_outer, 1);
  mirror(last - 1, 1, right.inner_rows, right.rank, right.q_inner, right.inner_rank);
}

inline void TtArrays::add_left_pair(const TtDeviceTable& table, const TtMemory& memory,
                                    int64_t table_index) {
  if (!table.shape.left().is_pair) return;
  TtPair pair{};
  pair.halves = left_halves(table, table_index);
  pair.values = memory.new_left_values;
  pair.value_grads = memory.left_grads;
  pair.outer_grads_by_half = memory.left_outer_grads;
  pair.outer_stride = batch_.max_outer_floats(&TtShape::left);
  pair.outer_grads = table.grads[0];
  pair.inner_grads = table.grads[1];
  add_pair(pair);
}

inline void TtArrays::add_right_pair(const TtDeviceTable& table, const TtMemory& memory,
                                     int64_t table_index) {
  if (!table.shape.right().is_pair) return;
  TtPair pair{};
  pair.halves = right_halves(table, table_index);
  pair.values = memory.right_values;
  pair.value_grads = memory.right_grads;
  pair.outer_grads_by_half = memory.right_outer_grads;
  pair.outer_stride = batch_.max_outer_floats(&TtShape::right);
  pair.outer_grads = table.mirrored_grads[0];
  pair.inner_grads = table.mirrored_grads[1];
  add_pair(pair);
}

}  // namespace emb::cuda
