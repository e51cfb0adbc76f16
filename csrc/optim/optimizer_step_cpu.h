// The step of an optimizer on one row of floats, with the functors of optimizers.h, and the
// rounding of rows that are stored in 16 bits. For the CPU kernels of all ops that update weights;
// only `*_kernels.cpp` may include this header. The update of a row calls, in this order:
// add_penalty, row_sums, Opt::begin_row, decay_row and step_row.
#pragma once

#include "core/dtype.h"
#include "core/random_block.h"
#include "optim/functor.h"

namespace emb::EMB_ISA {

// The arithmetic of `add_sums` and `step` on registers of floats.
struct VecMath {
  EMB_HD static Vec root(Vec x) {
#if defined(__AVX512F__)
    return _mm512_sqrt_ps(x);
#elif defined(__AVX2__)
    return _mm256_sqrt_ps(x);
#else
    for (int i = 0; i < kLanes; ++i) x[i] = sqrtf(x[i]);
    return x;
#endif
  }
  // Return a / b, and 0 in the lanes where b is 0.
  EMB_HD static Vec ratio(Vec a, Vec b) {
    const auto is_zero = b == Vec{};
    return is_zero ? Vec{} : a / (is_zero ? broadcast(1.0f) : b);
  }
};

// The rows of floats, [dim], on which an optimizer works: weights, gradient, and the element-wise
// states that it updates, null for none. They must not overlap; not checked.
struct RowViews {
  float* __restrict weights;
  float* __restrict gradient;
  float* __restrict state0;
  float* __restrict state1;
};

// The columns of a row from `first_column` on that fill a register.
struct FullRegister {
  int64_t first_column;

  EMB_HD Vec read(const float* row) const { return load(row + first_column); }
  EMB_HD void write(float* row, Vec values) const { store(row + first_column, values); }
};

// The last `num_columns` columns of a row, from `first_column` on, fewer than a register has. The
// other lanes are zeros where they are read.
struct PartialRegister {
  int64_t first_column;
  int num_columns;

  EMB_HD Vec read(const float* row) const { return load_first(row + first_column, num_columns); }
  EMB_HD void write(float* row, Vec values) const {
    store_first(row + first_column, values, num_columns);
  }
};

// Call `body` with each FullRegister and the PartialRegister of a row of `dim` columns. They are
// explicit, because GCC compiles a loop over a known number of columns to single elements.
template <class Body>
EMB_HD void for_registers(int64_t dim, const Body& body) {
  int64_t first_column = 0;
  for (; first_column + kLanes <= dim; first_column += kLanes) body(FullRegister{first_column});
  if (first_column < dim) body(PartialRegister{first_column, static_cast<int>(dim - first_column)});
}

// Write the sums over a row that `begin_row` needs to `sums`, [kNumRowSums]. The lanes of a
// PartialRegister beyond the row are zeros, which add nothing to any sum.
template <class Opt>
EMB_HD void row_sums(const Opt& opt, int64_t dim, const RowViews& row, float* sums) {
  if constexpr (Opt::kNumRowSums > 0) {
    Vec totals[Opt::kNumRowSums] = {};
    constexpr int kStates = Opt::kSumsNeedGradientOnly ? 0 : Opt::kSteppedStates;
    for_registers(dim, [&](const auto& columns) {
      const Vec w = Opt::kSumsNeedGradientOnly ? Vec{} : columns.read(row.weights);
      const Vec m = kStates > 0 ? columns.read(row.state0) : Vec{};
      const Vec v = kStates > 1 ? columns.read(row.state1) : Vec{};
      opt.template add_sums<VecMath>(w, columns.read(row.gradient), m, v, totals);
    });
    for (int k = 0; k < Opt::kNumRowSums; ++k) sums[k] = sum(totals[k]);
  }
}

// Update the weights and states of a row. `factors` is the result of Opt::begin_row.
template <class Opt>
EMB_HD void step_row(const Opt& opt, int64_t dim, RowFactors factors, const RowViews& row) {
  for_registers(dim, [&](const auto& columns) {
    const Vec w = columns.read(row.weights), g = columns.read(row.gradient);
    Vec m = Opt::kSteppedStates > 0 ? columns.read(row.state0) : Vec{};
    Vec v = Opt::kSteppedStates > 1 ? columns.read(row.state1) : Vec{};
    columns.write(row.weights, opt.template step<VecMath>(w, g, &m, &v, factors));
    if constexpr (Opt::kSteppedStates > 0) columns.write(row.state0, m);
    if constexpr (Opt::kSteppedStates > 1) columns.write(row.state1, v);
  });
}

// Add the L2 penalty to row.gradient. Without a penalty nothing is written, so that the gradient
// may be in memory of the caller that must not change.
EMB_HD void add_penalty(const WeightDecay& decay, int64_t dim, const RowViews& row) {
  if (decay.l2 == 0.0f) return;
  for_registers(dim, [&](const auto& columns) {
    const Vec penalty = decay.l2 * columns.read(row.weights);
    columns.write(row.gradient, columns.read(row.gradient) + penalty);
  });
}

// Apply the decoupled decay to the weights.
EMB_HD void decay_row(const WeightDecay& decay, int64_t dim, const RowViews& row) {
  if (decay.factor == 1.0f) return;
  for_registers(dim, [&](const auto& columns) {
    columns.write(row.weights, decay.factor * columns.read(row.weights));
  });
}

// Store a row from element `element` on of `data`, of 16-bit dtype `type`, rounded as `rounding`
// says. Linear row `row_id` and `tensor`, one of its tensors (RoundedTensor), select the random
// numbers.
[[gnu::noinline]] inline void narrow_row(const float* values, int64_t dim, void* data, Dtype type,
                                         int64_t element, const Rounding& rounding, int64_t row_id,
                                         uint32_t tensor) {
  const auto store_as = [&](auto* row) {
    if (rounding.is_stochastic) {
      round_row_randomly(values, dim, rounding, row_id, tensor, row + element);
    } else {
      convert_row(values, dim, row + element);
    }
  };
  if (type == Dtype::kHalf) {
    store_as(static_cast<half16*>(data));
  } else {
    store_as(static_cast<bfloat16*>(data));
  }
}

}  // namespace emb::EMB_ISA
