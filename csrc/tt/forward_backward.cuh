// The forward and the backward pass of tensor-train tables on the GPU as sequences of kernels, for
// any launcher: tests/simt runs the same code on an emulated machine. tt/args.h explains halves,
// pairs, values and plans. The numbers of distinct rows and halves are known on the device only, so
// grids and buffers have the size of the largest case.
//
// A launch serves all tables, so that the number of launches depends on the kinds of shapes among
// the tables (TtKernelFlags), not on the number of tables. What differs between tables is in arrays
// of arguments in device memory (TtTableArgs, TtPair and others). core/upload.cuh copies them
// there, with a launch per kLargeUploadWords words.
#pragma once

#include <algorithm>
#include <vector>

#include "core/upload.cuh"
#include "optim/update_rows.cuh"
#include "tt/args.h"
#include "tt/pair.cuh"
#include "tt/right_grads.cuh"
#include "tt/rows.cuh"

namespace emb::cuda {

// An op builds a TtDeviceBatch (shapes, cores and plan), a TtMemory (the buffers) and, from both, a
// TtPass. It calls TtPass::upload, then make_values (unless the buffers have the values of an
// earlier pass), and then make_rows (forward) or make_grads and, in an update, update (backward).
// The memory belongs to the op, which must keep it until the kernels have run.

// One table of a batch; its addresses are of device memory.
struct TtDeviceTable {
  TtShape shape;
  int64_t first_left_id, first_right_id;  // first ids of its halves, over all tables
  const void* cores[kMaxCores];           // of dtype TtDeviceBatch::type
  // Outer core and, for a pair, inner core of the left half as floats: the cores, or copies.
  const float* left_cores[2];
  float* mirrored_cores[2];  // copies of outer and inner core of a right pair with axes reversed
  float* grads[kMaxCores];   // gradients of the cores; null in a forward pass
  float* mirrored_grads[2];  // gradients of mirrored_cores, in a backward pass
};

// All tables of a batch. Strides are in floats and hold for all tables: left_stride for the values
// of left halves, right_stride for those of right halves, row_stride for rows and their gradients.
struct TtDeviceBatch {
  std::vector<TtDeviceTable> tables;
  Dtype type;  // dtype of the cores
  TtPlan plan;
  MatmulPrecision precision;
  int64_t num_left_ids = 0, num_right_ids = 0;  // numbers of ids of halves of all tables
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
      for (int k = 0; k < shape.num_cores; ++k) table.cores[k] = *core++;
      for (int k = 0; k < 2; ++k) table.left_cores[k] = static_cast<const float*>(table.cores[k]);
      tables.push_back(table);
      const TtHalf left = shape.left(), right = shape.right();
      num_left_ids += left.num_ids();
      num_right_ids += right.num_ids();
      left_stride = std::max(left_stride, left.value_size());
      right_stride = std::max(right_stride, right.value_size());
      row_stride = std::max<int64_t>(row_stride, shape.dim());
      has_left_pairs |= left.is_pair;
      has_right_pairs |= right.is_pair;
    }
  }

  // Return the maximum number of distinct halves, and the number of floats of their values.
  int64_t max_lefts() const { return std::min(plan.capacity, num_left_ids); }
  int64_t max_rights() const { return std::min(plan.capacity, num_right_ids); }
  int64_t left_floats() const { return max_lefts() * left_stride; }
  int64_t right_floats() const { return max_rights() * right_stride; }

  // Return the maximum number of floats of a row of the outer core of a pair; 0 without pairs.
  // half_of is &TtShape::left or &TtShape::right.
  int64_t max_outer_floats(TtHalf (TtShape::*half_of)() const) const {
    int64_t floats = 0;
    for (const TtDeviceTable& table : tables) {
      const TtHalf half = (table.shape.*half_of)();
      if (half.is_pair) floats = std::max(floats, half.outer_size());
    }
    return floats;
  }
};

// The buffers of a pass in device memory; members without a buffer are null. The functions assign_*
// get the buffers from allocate(n), which must return the address of n floats, at a multiple of 16
// bytes for vectors, or null for n = 0. Buffers need no initial values.
struct TtMemory {
  float* right_values = nullptr;       // [max_rights, right_stride]
  const float* left_values = nullptr;  // [max_lefts, left_stride] of pairs
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
        table.mirrored_cores[0] = allocate(right.num_outer_rows * right.outer_size());
        table.mirrored_cores[1] = allocate(right.num_inner_rows * right.inner_size());
      }
      if (batch->type != Dtype::kFloat) {
        table.left_cores[0] = allocate(left.num_outer_rows * left.outer_size());
        if (left.is_pair) table.left_cores[1] = allocate(left.num_inner_rows * left.inner_size());
      }
    }
  }

  // Assign the other buffers of a backward pass, and the gradients of mirrored cores in `batch`.
  template <class Allocate>
  void assign_backward(TtDeviceBatch* batch, Allocate& allocate) {
    left_grads = allocate(batch->has_left_pairs ? batch->left_floats() : 0);
    right_grads = allocate(batch->has_right_pairs ? batch->right_floats() : 0);
    partials = allocate(num_partial_slots(batch->plan.capacity) * batch->right_stride);
    left_outer_grads = allocate(batch->max_lefts() * batch->max_outer_floats(&TtShape::left));
    right_outer_grads = allocate(batch->max_rights() * batch->max_outer_floats(&TtShape::right));
    for (TtDeviceTable& table : batch->tables) {
      const TtHalf right = table.shape.right();
      if (!right.is_pair) continue;
      table.mirrored_grads[0] = allocate(right.num_outer_rows * right.outer_size());
      table.mirrored_grads[1] = allocate(right.num_inner_rows * right.inner_size());
    }
  }
};

// A forward or backward pass: its arrays of arguments, and its launches. The constructor builds the
// arrays on the host; `upload` copies them to the device, and must be called before the other
// launches. No function waits for the device. `launcher` is a CudaLauncher or, in tests, a
// simt::HostLauncher. Refers to `batch`, which must outlive it. The gradients of cores
// (TtDeviceTable::grads) must be set before.
class TtPass {
 public:
  TtPass(const TtDeviceBatch& batch, const TtMemory& memory) : batch_(batch) {
    const auto num_tables = static_cast<int64_t>(batch.tables.size());
    for (int64_t t = 0; t < num_tables; ++t) {
      add_table(batch.tables[t], memory);
      add_copies(batch.tables[t], t);
      add_left_pair(batch.tables[t], memory, t);
    }
    num_left_pairs_ = count_of(pairs_);
    for (int64_t t = 0; t < num_tables; ++t) add_right_pair(batch.tables[t], memory, t);
    args_.plan = batch.plan;
    args_.right_values = memory.right_values;
    args_.right_stride = batch.right_stride;
    args_.row_stride = batch.row_stride;
  }

  // Add an optimizer step on the rows of a core, before `upload`. first_block of `step` is ignored.
  void add_step(MatrixStep step) {
    step.first_block = num_update_blocks_;
    num_update_blocks_ += step.gradient.num_blocks();
    steps_.push_back(step);
  }

  // Return the maximum number of 8-byte words that `upload` writes.
  static int64_t max_words(const TtDeviceBatch& batch) {
    int64_t bytes = 0;
    for (const TtDeviceTable& table : batch.tables) {
      bytes += sizeof(TtTableArgs) + 2 * sizeof(TtPair) + 2 * sizeof(WidenedCore) +
               4 * sizeof(TtReverse) + table.shape.num_cores * sizeof(MatrixStep);
    }
    return bytes / static_cast<int64_t>(sizeof(uint64_t));
  }

  // Copy the arrays to `words`, device memory for max_words() words, and do the work of
  // `step_start`: fill gradients with zeros, count the step of an update. Its first_update_word is
  // ignored.
  template <class Launcher>
  void upload(const Launcher& launcher, uint64_t* words, StepStart step_start = {}) {
    Upload upload;
    const int64_t tables = upload.add(tables_), pairs = upload.add(pairs_),
                  widened_cores = upload.add(widened_cores_),
                  mirrored_cores = upload.add(mirrored_cores_),
                  unmirrored_grads = upload.add(unmirrored_grads_);
    step_start.first_update_word = upload.add(steps_);
    upload.start(launcher, words, step_start);
    args_.tables = reinterpret_cast<const TtTableArgs*>(words + tables);
    device_pairs_ = reinterpret_cast<const TtPair*>(words + pairs);
    device_widened_cores_ = reinterpret_cast<const WidenedCore*>(words + widened_cores);
    device_mirrored_cores_ = reinterpret_cast<const TtReverse*>(words + mirrored_cores);
    device_unmirrored_grads_ = reinterpret_cast<const TtReverse*>(words + unmirrored_grads);
    device_steps_ = reinterpret_cast<const MatrixStep*>(words + step_start.first_update_word);
  }

  // Write the copies of cores, the values of right halves, and, if memory.new_left_values is not
  // null, the values of left pairs. `memory` is that of the constructor.
  template <class Launcher>
  void make_values(const Launcher& launcher, const TtMemory& memory) const {
    if (!widened_cores_.empty()) {
      launcher(widen_cores_kernel,
               blocks_for(num_widened_rows_, 1, launcher.max_grid_blocks(2 * kResidentBlocksPerSm)),
               kPairThreads, device_widened_cores_, count_of(widened_cores_), num_widened_rows_,
               batch_.type);
    }
    if (has_last_cores_) {
      launch_right_values(launcher, batch_.max_rights(), args_, batch_.type, memory.right_values);
    }
    reverse(launcher, device_mirrored_cores_, count_of(mirrored_cores_), batch_.type);
    const int first_pair = memory.new_left_values != nullptr ? 0 : num_left_pairs_;
    launch_expand(launcher, batch_.precision, pairs_from(first_pair));
  }

  // Write the distinct rows to `rows`, [capacity, row_stride]. Rows and columns that do not exist
  // are not written.
  template <class Launcher>
  void make_rows(const Launcher& launcher, float* rows) const {
    launch_tt_rows(launcher, batch_.precision, kernels_, batch_.max_lefts(), args_, rows);
  }

  // Write the gradients of all cores from the gradients of the rows, [capacity, row_stride]. In the
  // gradient of a core that is not part of a pair, rows that the batch does not use are not
  // written: the caller fills them with zeros (StepStart::zeros).
  template <class Launcher>
  void make_grads(const Launcher& launcher, const TtMemory& memory, const float* row_grads) const {
    launch_left_grads(launcher, batch_.precision, kernels_, batch_.max_lefts(), args_, row_grads);
    const RightGradBuffers buffers{row_grads, has_row_vectors(row_grads), memory.partials,
                                   memory.right_grads, max_right_tiles_};
    launch_right_grads(launcher, kernels_.needs_right_vectors && buffers.has_vectors,
                       kernels_.needs_right_scalars || !buffers.has_vectors, batch_.max_rights(),
                       args_, buffers);
    launch_contract(launcher, batch_.precision, pairs_from(0));
    reverse(launcher, device_unmirrored_grads_, count_of(unmirrored_grads_), Dtype::kFloat);
  }

  // Apply the steps of add_step. Of `step`, only the optimizer and the hyperparameters are read;
  // they hold for all cores.
  template <class Launcher>
  void update(const Launcher& launcher, const OptimizerStepArgs& step) const {
    launch_update_matrices(launcher, device_steps_, count_of(steps_), num_update_blocks_, step);
  }

 private:
  template <class T>
  static int count_of(const std::vector<T>& items) {
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
            table.left_cores[0],
            table.left_cores[1],
            plan.lefts,
            plan.left_starts() + table_index,
            table.first_left_id,
            batch_.left_stride,
            false};
  }
  TtHalves right_halves(const TtDeviceTable& table, int64_t table_index) const {
    const TtPlan& plan = batch_.plan;
    return {table.shape.right(),
            table.mirrored_cores[0],
            table.mirrored_cores[1],
            plan.rights,
            plan.right_starts() + table_index,
            table.first_right_id,
            batch_.right_stride,
            true};
  }

  // Add the arguments of `table`, table number table_index of the batch, to the arrays.
  void add_table(const TtDeviceTable& table, const TtMemory& memory);
  void add_copies(const TtDeviceTable& table, int64_t table_index);
  void add_left_pair(const TtDeviceTable& table, const TtMemory& memory, int64_t table_index);
  void add_right_pair(const TtDeviceTable& table, const TtMemory& memory, int64_t table_index);

  void add_pair(TtPair pair) {
    pair.first_inner_row = num_pair_inner_rows_;
    pair.first_outer_row = num_pair_outer_rows_;
    num_pair_inner_rows_ += pair.halves.half.num_inner_rows;
    num_pair_outer_rows_ += pair.halves.half.num_outer_rows;
    pairs_.push_back(pair);
  }

  // Return the pairs from pair `first` on; right pairs follow the left pairs.
  TtPairs pairs_from(int first) const {
    TtPairs result;
    result.pairs = device_pairs_ + first;
    result.num_pairs = count_of(pairs_) - first;
    if (result.num_pairs > 0) result.first_inner_row = pairs_[first].first_inner_row;
    for (int i = first; i < count_of(pairs_); ++i) {
      const TtHalf& half = pairs_[i].halves.half;
      result.inner_rows_per_pair =
          i == first || result.inner_rows_per_pair == half.num_inner_rows ? half.num_inner_rows : 0;
      result.num_inner_rows += half.num_inner_rows;
      result.num_outer_rows += half.num_outer_rows;
      result.max_width = std::max(result.max_width, half.q_inner * half.rank);
      result.max_inner_rank = std::max(result.max_inner_rank, half.inner_rank);
    }
    return result;
  }

  // Reverse the axes of the rows of `num_matrices` matrices of dtype `type`.
  template <class Launcher>
  void reverse(const Launcher& launcher, const TtReverse* matrices, int num_matrices,
               Dtype type) const {
    if (num_matrices == 0) return;
    launcher(reverse_kernel,
             blocks_for(num_mirrored_rows_, 1, launcher.max_grid_blocks(2 * kResidentBlocksPerSm)),
             kRowThreads, matrices, num_matrices, num_mirrored_rows_, type);
  }

  const TtDeviceBatch& batch_;
  TtBatchArgs args_{};
  TtKernelFlags kernels_;
  bool has_last_cores_ = false;
  int num_left_pairs_ = 0, max_right_tiles_ = 0;
  int64_t max_left_floats_ = 0;  // maximum size, in floats, of the array TtTableArgs::left
  // Totals: core rows of pairs, rows of widened cores, rows of mirrored cores, blocks of the
  // update.
  int64_t num_pair_inner_rows_ = 0, num_pair_outer_rows_ = 0;
  int64_t num_widened_rows_ = 0, num_mirrored_rows_ = 0, num_update_blocks_ = 0;
  std::vector<TtTableArgs> tables_;
  std::vector<TtPair> pairs_;
  std::vector<WidenedCore> widened_cores_;
  // The copies of cores to mirrored cores, and of the gradients of mirrored cores to those of
  // cores.
  std::vector<TtReverse> mirrored_cores_, unmirrored_grads_;
  std::vector<MatrixStep> steps_;
  const TtPair* device_pairs_ = nullptr;
  const WidenedCore* device_widened_cores_ = nullptr;
  const TtReverse *device_mirrored_cores_ = nullptr, *device_unmirrored_grads_ = nullptr;
  const MatrixStep* device_steps_ = nullptr;
};

inline void TtPass::add_table(const TtDeviceTable& table, const TtMemory& memory) {
  const TtHalf left = table.shape.left(), right = table.shape.right();
  const int last = table.shape.num_cores - 1;
  TtTableArgs args{};
  args.left_columns = left.columns();
  args.right_columns = right.columns();
  args.rank = left.rank;
  args.has_left_pair = left.is_pair;
  args.first_left_id = static_cast<int32_t>(table.first_left_id);
  args.first_right_id = static_cast<int32_t>(table.first_right_id);
  args.left = left.is_pair ? memory.left_values : table.left_cores[0];
  args.left_grads = left.is_pair ? memory.left_grads : table.grads[0];
  args.left_stride = left.is_pair ? batch_.left_stride : left.value_size();
  args.last_core = right.is_pair ? nullptr : table.cores[last];
  args.last_grads = right.is_pair ? nullptr : table.grads[last];
  args.has_vectors = args.rank % 4 == 0 && args.left_stride % 4 == 0 &&
                     batch_.right_stride % 4 == 0 && is_aligned(args.left, 16) &&
                     is_aligned(memory.right_values, 16);
  tables_.push_back(args);
  has_last_cores_ |= !right.is_pair;
  args_.max_column_groups = std::max(args_.max_column_groups, num_column_groups(args.left_columns));
  args_.max_rank_groups = std::max(args_.max_rank_groups, (args.rank + 31) / 32);
  max_right_tiles_ = std::max(max_right_tiles_, num_right_tiles(args.right_columns, args.rank));
  max_left_floats_ =
      std::max(max_left_floats_,
               left.is_pair ? batch_.left_floats() : left.num_outer_rows * left.value_size());
  (args.has_mma_rows() ? kernels_.needs_mma_rows : kernels_.needs_plain_rows) = true;
  (args.has_mma_grads() ? kernels_.needs_mma_grads : kernels_.needs_plain_grads) = true;
  (args.has_right_vectors() ? kernels_.needs_right_vectors : kernels_.needs_right_scalars) = true;
}

// Add the copies of 16-bit left cores as floats, of the cores of a right pair with reversed axes,
// and, back again, of the gradients of these cores.
inline void TtPass::add_copies(const TtDeviceTable& table, int64_t table_index) {
  const TtHalf left = table.shape.left(), right = table.shape.right();
  const int last = table.shape.num_cores - 1;
  const auto widen = [&](int k, int64_t rows, int64_t width, int64_t ids_per_row) {
    widened_cores_.push_back({left_halves(table, table_index), table.cores[k],
                              const_cast<float*>(table.left_cores[k]), num_widened_rows_, width,
                              ids_per_row});
    num_widened_rows_ += rows;
  };
  if (batch_.type != Dtype::kFloat) {
    // Copy all rows of the outer core of a pair: the halves that use a row are not a range of
    // halves.
    widen(0, left.num_outer_rows, left.outer_size(), left.is_pair ? 0 : 1);
    if (left.is_pair) widen(1, left.num_inner_rows, left.inner_size(), left.num_outer_rows);
  }
  if (!right.is_pair) return;
  // Core k, of `rows` rows [a, q, b], has mirrored_cores[i] as its copy.
  const auto mirror = [&](int k, int i, int64_t rows, int64_t a, int64_t q, int64_t b) {
    mirrored_cores_.push_back(
        {table.cores[k], table.mirrored_cores[i], num_mirrored_rows_, a, q, b});
    if (table.grads[k] != nullptr) {
      unmirrored_grads_.push_back(
          {table.mirrored_grads[i], table.grads[k], num_mirrored_rows_, b, q, a});
    }
    num_mirrored_rows_ += rows;
  };
  mirror(last, 0, right.num_outer_rows, right.inner_rank, right.q_outer, 1);
  mirror(last - 1, 1, right.num_inner_rows, right.rank, right.q_inner, right.inner_rank);
}

inline void TtPass::add_left_pair(const TtDeviceTable& table, const TtMemory& memory,
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

inline void TtPass::add_right_pair(const TtDeviceTable& table, const TtMemory& memory,
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
