// The forward and the backward pass of tensor-train tables on the GPU as sequences of kernels, for
// any launcher: tests/simt runs the same code on an emulated machine. Sizes that only the device
// knows (distinct rows and halves) stay there; grids and buffers have the maximum size.
#pragma once

#include <vector>

#include "tt/args.h"
#include "tt/pair.cuh"
#include "tt/rows.cuh"

namespace emb::cuda {

// One table of a batch. Values of halves are rows of `left_stride` and `right_stride` floats, the
// same for all tables of the batch; so are rows and their gradients.
struct TtBatch {
  TtShape shape;
  TtPlan plan;
  int64_t table, first_left_id, first_right_id;
  int64_t left_stride, right_stride, row_stride;
  const void* cores[kMaxCores];
  Dtype type;  // of the cores
  MatmulPrecision precision;
  const float* left[2];  // the cores of the left half as floats, of 16-bit ones copies

  int64_t lefts() const { return min(plan.capacity, shape.left().ids()); }
  int64_t rights() const { return min(plan.capacity, shape.right().ids()); }
  const int32_t* left_range() const { return plan.left_starts() + table; }
  const int32_t* right_range() const { return plan.right_starts() + table; }

  TtHalves left_halves() const {
    return {shape.left(), left[0],       left[1],     plan.lefts,
            left_range(), first_left_id, left_stride, false};
  }

  static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
};

// All tables of a batch.
struct TtBatches {
  std::vector<TtBatch> tables;

  TtBatches(const std::vector<TtShape>& shapes, const std::vector<const void*>& cores, Dtype type,
            const TtPlan& plan, MatmulPrecision precision) {
    const void* const* core = cores.data();
    for (const TtShape& shape : shapes) {
      TtBatch batch{shape, plan, static_cast<int64_t>(tables.size()), left_ids_, right_ids_};
      for (int k = 0; k < shape.cores; ++k) batch.cores[k] = *core++;
      batch.type = type;
      batch.precision = precision;
      for (int k = 0; k < 2; ++k) batch.left[k] = static_cast<const float*>(batch.cores[k]);
      tables.push_back(batch);
      const TtHalf left = shape.left(), right = shape.right();
      left_ids_ += left.ids();
      right_ids_ += right.ids();
      left_stride_ = max(left_stride_, left.value_size());
      right_stride_ = max(right_stride_, right.value_size());
      dim_ = max(dim_, shape.dim());
    }
    for (TtBatch& batch : tables) {
      batch.left_stride = left_stride_;
      batch.right_stride = right_stride_;
      batch.row_stride = dim_;
    }
  }

  // Floats of the values of all left halves, and of all right ones.
  int64_t left_floats() const { return lefts() * left_stride_; }
  int64_t right_floats() const { return TtBatch::min(capacity(), right_ids_) * right_stride_; }
  int64_t lefts() const { return TtBatch::min(capacity(), left_ids_); }
  int64_t capacity() const { return tables.empty() ? 0 : tables[0].plan.capacity; }
  bool has_pairs() const {
    return most([](const TtBatch& b) { return b.shape.left().pair; }) > 0;
  }

  // Return the maximum over the tables.
  template <class Size>
  int64_t most(const Size& size) const {
    int64_t found = 0;
    for (const TtBatch& batch : tables) found = max(found, size(batch));
    return found;
  }

 private:
  static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

  int64_t left_ids_ = 0, right_ids_ = 0, left_stride_ = 0, right_stride_ = 0, dim_ = 0;
};

// Device memory of the right halves, in floats; buffers of length 0 are not used. Tables share the
// mirrored cores one after the other.
struct TtRightMemory {
  float* values;
  float *mirrored_outer, *mirrored_inner;  // a pair's cores with their axes reversed

  static int64_t outer_floats(const TtBatch& batch) {
    const TtHalf half = batch.shape.right();
    return half.pair ? half.outer_rows * half.outer_size() : 0;
  }
  static int64_t inner_floats(const TtBatch& batch) {
    const TtHalf half = batch.shape.right();
    return half.pair ? half.inner_rows * half.inner_size() : 0;
  }

  template <class Allocate>
  TtRightMemory(const TtBatches& batches, Allocate& allocate)
      : values(allocate(batches.right_floats())),
        mirrored_outer(allocate(batches.most(outer_floats))),
        mirrored_inner(allocate(batches.most(inner_floats))) {}
};

inline TtHalves right_halves(const TtBatch& batch, const TtRightMemory& memory) {
  return {batch.shape.right(), memory.mirrored_outer, memory.mirrored_inner, batch.plan.rights,
          batch.right_range(), batch.first_right_id,  batch.right_stride,    true};
}

inline TtRowsArgs tt_rows_args(const TtBatch& batch, const float* left_values,
                               const float* right_values) {
  const TtHalf left = batch.shape.left(), right = batch.shape.right();
  const TtPlan& plan = batch.plan;
  TtRowsArgs args{};
  args.left_columns = left.columns();
  args.right_columns = right.columns();
  args.rank = left.rank;
  args.left = left.pair ? TtHalfRows<const float>{left_values, nullptr, 0, batch.left_stride}
                        : TtHalfRows<const float>{batch.left[0], plan.lefts, batch.first_left_id,
                                                  left.value_size()};
  args.right = right_values;
  args.right_stride = batch.right_stride;
  args.row_stride = batch.row_stride;
  args.left_segments = plan.left_segments;
  args.row_lefts = plan.row_lefts;
  args.row_rights = plan.row_rights;
  args.left_range = batch.left_range();
  args.right_range = batch.right_range();
  args.right_segments = plan.right_segments;
  args.right_rows = plan.right_rows;
  args.left_capacity = batch.lefts();
  args.right_capacity = batch.rights();
  args.row_capacity = plan.capacity;
  return args;
}

// Return the arguments that reverse all rows of a matrix.
inline TtReverseArgs reverse_all(const void* from, Dtype type, float* to, int64_t rows, int64_t a,
                                 int64_t q, int64_t b) {
  const int64_t size = a * q * b;
  return {{from, type, nullptr, 0, size}, {to, nullptr, 0, size}, nullptr, rows, a, q, b};
}

inline TtReverseArgs reverse_all(const float* from, float* to, int64_t rows, int64_t a, int64_t q,
                                 int64_t b) {
  return reverse_all(from, Dtype::kFloat, to, rows, a, q, b);
}

// Copy the core rows of left halves as floats where they are stored in 16 bits. `allocate` returns
// memory that lives as long as the pass.
template <class Launcher, class Allocate>
void widen_left(const Launcher& launcher, TtBatches* batches, Allocate& allocate) {
  for (TtBatch& batch : batches->tables) {
    if (batch.type == Dtype::kFloat) continue;
    const TtHalf half = batch.shape.left();
    const TtHalves halves = batch.left_halves();
    const auto widen = [&](int k, int64_t rows, int64_t width, int64_t unit) {
      float* copy = allocate(rows * width);
      launch_widen_core(launcher, {halves, batch.cores[k], batch.type, copy, rows, width, unit});
      batch.left[k] = copy;
    };
    // The rows of an outer core are few and spread over all halves of a pair.
    widen(0, half.outer_rows, half.outer_size(), half.pair ? 0 : 1);
    if (half.pair) widen(1, half.inner_rows, half.inner_size(), half.outer_rows);
  }
}

template <class Launcher>
void expand_right(const Launcher& launcher, const TtBatch& batch, const TtRightMemory& memory) {
  const TtHalf half = batch.shape.right();
  const int last = batch.shape.cores - 1;
  if (!half.pair) {
    launch_reverse(launcher, {{batch.cores[last], batch.type, batch.plan.rights,
                               batch.first_right_id, half.value_size()},
                              {memory.values, nullptr, 0, batch.right_stride},
                              batch.right_range(),
                              batch.rights(),
                              half.rank,
                              half.q_outer,
                              1});
    return;
  }
  launch_reverse(launcher, reverse_all(batch.cores[last], batch.type, memory.mirrored_outer,
                                       half.outer_rows, half.inner_rank, half.q_outer, 1));
  launch_reverse(launcher, reverse_all(batch.cores[last - 1], batch.type, memory.mirrored_inner,
                                       half.inner_rows, half.rank, half.q_inner, half.inner_rank));
  launch_expand(launcher, batch.precision, right_halves(batch, memory), memory.values);
}

// Make the values of all left halves of a table. `left_values` has room for those of all tables.
template <class Launcher>
void expand_left(const Launcher& launcher, const TtBatch& batch, float* left_values) {
  if (!batch.shape.left().pair) return;  // they are the rows of the first core
  launch_expand(launcher, batch.precision, batch.left_halves(), left_values);
}

// `left_values` has room for all left halves; it is unused for two cores.
template <class Launcher>
void forward_pass(const Launcher& launcher, const TtBatches& batches, const TtRightMemory& memory,
                  float* left_values, float* rows) {
  for (const TtBatch& batch : batches.tables) {
    expand_right(launcher, batch, memory);
    expand_left(launcher, batch, left_values);
    launch_tt_rows(launcher, batch.precision, tt_rows_args(batch, left_values, memory.values),
                   rows);
  }
}

// Scratch of the backward pass besides TtRightMemory; tables share what is for one table.
struct TtBackwardMemory {
  float *left_grads, *right_grads;  // of the values, of all tables
  float* partials;
  float* outer_values;                     // of either pair, one after the other
  float *mirrored_outer, *mirrored_inner;  // gradients of a right pair's mirrored cores

  static int64_t partial_floats(const TtBatch& batch) {
    return tt_slots(batch.rights(), batch.plan.capacity) * batch.shape.right().value_size();
  }
  static int64_t outer_value_floats(const TtBatch& batch) {
    const TtHalf left = batch.shape.left(), right = batch.shape.right();
    const int64_t a = left.pair ? batch.lefts() * left.outer_size() : 0;
    const int64_t b = right.pair ? batch.rights() * right.outer_size() : 0;
    return a > b ? a : b;
  }

  template <class Allocate>
  TtBackwardMemory(const TtBatches& batches, Allocate& allocate)
      : left_grads(allocate(batches.has_pairs() ? batches.left_floats() : 0)),
        right_grads(allocate(batches.right_floats())),
        partials(allocate(batches.most(partial_floats))),
        outer_values(allocate(batches.most(outer_value_floats))),
        mirrored_outer(allocate(batches.most(TtRightMemory::outer_floats))),
        mirrored_inner(allocate(batches.most(TtRightMemory::inner_floats))) {}
};

// Compute the gradients of all cores of a table. All but the inner cores of pairs must be zero on
// entry.
template <class Launcher>
void backward_pass(const Launcher& launcher, const TtBatch& batch, const TtRightMemory& right,
                   const TtBackwardMemory& memory, const float* left_values, const float* row_grads,
                   float* const* grads) {
  const TtHalf left_half = batch.shape.left(), half = batch.shape.right();
  const int last = batch.shape.cores - 1;
  const TtHalfRows<float> left_grads =
      left_half.pair ? TtHalfRows<float>{memory.left_grads, nullptr, 0, batch.left_stride}
                     : TtHalfRows<float>{grads[0], batch.plan.lefts, batch.first_left_id,
                                         left_half.value_size()};
  expand_right(launcher, batch, right);
  const TtRowsArgs args = tt_rows_args(batch, left_values, right.values);
  launch_left_grads(launcher, batch.precision, args, row_grads, left_grads);
  launch_right_grads(launcher, args, row_grads, memory.partials, memory.right_grads);
  if (left_half.pair) {
    launch_contract(launcher, batch.precision, batch.left_halves(),
                    static_cast<const float*>(memory.left_grads), memory.outer_values, grads[0],
                    grads[1]);
  }
  if (!half.pair) {
    launch_reverse(launcher,
                   {{memory.right_grads, Dtype::kFloat, nullptr, 0, batch.right_stride},
                    {grads[last], batch.plan.rights, batch.first_right_id, half.value_size()},
                    batch.right_range(),
                    batch.rights(),
                    half.q_outer,
                    half.rank,
                    1});
    return;
  }
  launch_contract(launcher, batch.precision, right_halves(batch, right),
                  static_cast<const float*>(memory.right_grads), memory.outer_values,
                  memory.mirrored_outer, memory.mirrored_inner);
  launch_reverse(launcher, reverse_all(memory.mirrored_outer, grads[last], half.outer_rows,
                                       half.q_outer, half.inner_rank, 1));
  launch_reverse(launcher, reverse_all(memory.mirrored_inner, grads[last - 1], half.inner_rows,
                                       half.inner_rank, half.q_inner, half.rank));
}

}  // namespace emb::cuda
