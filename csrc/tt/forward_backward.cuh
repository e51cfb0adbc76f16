// The forward and the backward pass of tensor-train tables on the GPU as sequences of kernels, for
// any launcher: tests/simt runs the same code on an emulated machine. Sizes that only the device
// knows (distinct rows and halves) stay there; grids and buffers have the maximum size.
#pragma once

#include "tt/args.h"
#include "tt/pair.cuh"
#include "tt/rows.cuh"

namespace emb::cuda {

struct TtBatch {
  TtShape shape;
  TtPlan plan;
  const float* cores[kMaxCores];

  int64_t lefts() const { return min(plan.capacity, shape.left().ids()); }
  int64_t rights() const { return min(plan.capacity, shape.right().ids()); }
  const int32_t* left_count() const { return plan.counts + 1; }
  const int32_t* right_count() const { return plan.counts + 2; }

  TtHalves left_halves() const {
    return {shape.left(), cores[0], cores[1], plan.lefts, left_count(), false};
  }

 private:
  static int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
};

// Device memory of the right halves, in floats; buffers of length 0 are not used.
struct TtRightMemory {
  float* values;                           // [rights()][value_size]
  float *mirrored_outer, *mirrored_inner;  // a pair's cores with their axes reversed

  static int64_t value_floats(const TtBatch& batch) {
    return batch.rights() * batch.shape.right().value_size();
  }
  static int64_t outer_floats(const TtBatch& batch) {
    const TtHalf half = batch.shape.right();
    return half.pair ? half.outer_rows * half.outer_size() : 0;
  }
  static int64_t inner_floats(const TtBatch& batch) {
    const TtHalf half = batch.shape.right();
    return half.pair ? half.inner_rows * half.inner_size() : 0;
  }
};

inline TtHalves right_halves(const TtBatch& batch, const TtRightMemory& memory) {
  return {batch.shape.right(), memory.mirrored_outer, memory.mirrored_inner,
          batch.plan.rights,   batch.right_count(),   true};
}

inline TtRowsArgs tt_rows_args(const TtBatch& batch, const float* left_values,
                               const float* right_values) {
  const TtHalf left = batch.shape.left(), right = batch.shape.right();
  const TtPlan& plan = batch.plan;
  TtRowsArgs args{};
  args.left_columns = left.columns();
  args.right_columns = right.columns();
  args.rank = left.rank;
  args.left = {left.pair ? left_values : batch.cores[0], left.pair ? nullptr : plan.lefts};
  args.right = right_values;
  args.left_segments = plan.left_segments;
  args.row_lefts = plan.row_lefts;
  args.row_rights = plan.row_rights;
  args.right_segments = plan.right_segments;
  args.right_rows = plan.right_rows;
  args.left_count = batch.left_count();
  args.right_count = batch.right_count();
  args.left_capacity = batch.lefts();
  args.right_capacity = batch.rights();
  args.row_capacity = plan.capacity;
  return args;
}

template <class Launcher>
void expand_right(const Launcher& launcher, const TtBatch& batch, const TtRightMemory& memory) {
  const TtHalf half = batch.shape.right();
  const int last = batch.shape.cores - 1;
  if (!half.pair) {
    launch_reverse(launcher, {batch.cores[last], memory.values, batch.plan.rights, nullptr,
                              batch.right_count(), batch.rights(), half.rank, half.q_outer, 1});
    return;
  }
  launch_reverse(launcher, {batch.cores[last], memory.mirrored_outer, nullptr, nullptr, nullptr,
                            half.outer_rows, half.inner_rank, half.q_outer, 1});
  launch_reverse(launcher, {batch.cores[last - 1], memory.mirrored_inner, nullptr, nullptr, nullptr,
                            half.inner_rows, half.rank, half.q_inner, half.inner_rank});
  launch_expand(launcher, right_halves(batch, memory), memory.values);
}

// `left_values` has room for all left halves, [lefts()][value_size]; it is unused for two cores.
template <class Launcher>
void forward_pass(const Launcher& launcher, const TtBatch& batch, const TtRightMemory& memory,
                  float* left_values, float* rows) {
  expand_right(launcher, batch, memory);
  if (batch.shape.left().pair) launch_expand(launcher, batch.left_halves(), left_values);
  launch_tt_rows(launcher, tt_rows_args(batch, left_values, memory.values), rows);
}

// Scratch of the backward pass besides TtRightMemory, in floats.
struct TtBackwardMemory {
  float *left_grads, *right_grads;  // of the values
  float* partials;
  float* outer_values;                     // of either pair, one after the other
  float *mirrored_outer, *mirrored_inner;  // gradients of a right pair's mirrored cores

  static int64_t left_floats(const TtBatch& batch) {
    return batch.shape.left().pair ? batch.lefts() * batch.shape.left().value_size() : 0;
  }
  static int64_t partial_floats(const TtBatch& batch) {
    return tt_slots(batch.rights(), batch.plan.capacity) * batch.shape.right().value_size();
  }
  static int64_t outer_value_floats(const TtBatch& batch) {
    const TtHalf left = batch.shape.left(), right = batch.shape.right();
    const int64_t a = left.pair ? batch.lefts() * left.outer_size() : 0;
    const int64_t b = right.pair ? batch.rights() * right.outer_size() : 0;
    return a > b ? a : b;
  }
};

// Compute the gradients of all cores. All but the inner cores of pairs must be zero on entry.
template <class Launcher>
void backward_pass(const Launcher& launcher, const TtBatch& batch, const TtRightMemory& right,
                   const TtBackwardMemory& memory, const float* left_values, const float* row_grads,
                   float* const* grads) {
  const TtHalf left_half = batch.shape.left(), half = batch.shape.right();
  const int last = batch.shape.cores - 1;
  expand_right(launcher, batch, right);
  launch_value_grads(launcher, tt_rows_args(batch, left_values, right.values), row_grads,
                     left_half.pair ? memory.left_grads : grads[0],
                     left_half.pair ? nullptr : batch.plan.lefts, memory.partials,
                     memory.right_grads);
  if (left_half.pair) {
    launch_contract(launcher, batch.left_halves(), static_cast<const float*>(memory.left_grads),
                    memory.outer_values, grads[0], grads[1]);
  }
  if (!half.pair) {
    launch_reverse(launcher, {memory.right_grads, grads[last], nullptr, batch.plan.rights,
                              batch.right_count(), batch.rights(), half.q_outer, half.rank, 1});
    return;
  }
  launch_contract(launcher, right_halves(batch, right),
                  static_cast<const float*>(memory.right_grads), memory.outer_values,
                  memory.mirrored_outer, memory.mirrored_inner);
  launch_reverse(launcher, {memory.mirrored_outer, grads[last], nullptr, nullptr, nullptr,
                            half.outer_rows, half.q_outer, half.inner_rank, 1});
  launch_reverse(launcher, {memory.mirrored_inner, grads[last - 1], nullptr, nullptr, nullptr,
                            half.inner_rows, half.inner_rank, half.q_inner, half.rank});
}

}  // namespace emb::cuda
