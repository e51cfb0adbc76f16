// An optimizer over rows of a matrix on one CPU thread: the functions of UpdateRowsTable
// (optim/args.h). A row whose gradient is zero throughout keeps its weights and states, as if it
// were not part of the batch.
#include "optim/args.h"
#include "optim/optimizer_step_cpu.h"
#include "optim/optimizers.h"

namespace emb::EMB_ISA {
namespace {

// Return whether all elements of a gradient are zero. Few elements are read of most other
// gradients, because one of the first is not zero.
EMB_HD bool is_zero(const float* gradient, int64_t dim) {
  int64_t column = 0;
  for (; column + kLanes <= dim; column += kLanes) {
    const auto is_nonzero = load(gradient + column) != Vec{};
    for (int i = 0; i < kLanes; ++i) {
      if (is_nonzero[i] != 0) return false;
    }
  }
  for (; column < dim; ++column) {
    if (gradient[column] != 0.0f) return false;
  }
  return true;
}

// Return the views of the row that begins at element `start`: the gradient is in `scratch`, and the
// caller must write it; weights and states are in place, or copies in `scratch` if they are stored
// in 16 bits. `scratch` is that of UpdateRowsFn.
template <class Opt>
EMB_HD RowViews open_row(const TierMemory& tier, int64_t start, int64_t dim, float* scratch) {
  RowViews views{nullptr, scratch, nullptr, nullptr};
  const auto to_floats = [&](void* data, Dtype type) {
    if (type == Dtype::kFloat) return static_cast<float*>(data) + start;
    scratch += dim;
    widen_row(data, type, start, dim, scratch);
    return scratch;
  };
  views.weights = to_floats(tier.weights, tier.weight_type);
  if constexpr (Opt::kSteppedStates > 0) {
    views.state0 = to_floats(tier.element_states[0], tier.state_types[0]);
  }
  if constexpr (Opt::kSteppedStates > 1) {
    views.state1 = to_floats(tier.element_states[1], tier.state_types[1]);
  }
  return views;
}

// Store the copies that open_row made of rows in 16 bits. `row_id` is the id of the row in the
// random numbers.
template <class Opt>
EMB_HD void close_row(const TierMemory& tier, int64_t start, int64_t dim, const RowViews& views,
                      const Rounding& rounding, int64_t row_id) {
  const auto store = [&](const float* values, void* data, Dtype type, uint32_t tensor) {
    if (type == Dtype::kFloat) return;
    narrow_row(values, dim, data, type, start, rounding, row_id, tensor);
  };
  store(views.weights, tier.weights, tier.weight_type, kRoundWeights);
  if constexpr (Opt::kSteppedStates > 0) {
    store(views.state0, tier.element_states[0], tier.state_types[0], kRoundState);
  }
  if constexpr (Opt::kSteppedStates > 1) {
    store(views.state1, tier.element_states[1], tier.state_types[1], kRoundState + 1);
  }
}

// Update the row of gradient i: weights, states, and row-wise states.
template <class Opt>
EMB_HD void update_row(const Opt& opt, const WeightDecay& decay, const Rounding& rounding,
                       const UpdateRowsArgs& args, float* scratch, int64_t i) {
  const int64_t row = args.rows != nullptr ? args.rows[i] : i;
  const int64_t dim = args.dim, start = row * dim;
  const float* grad = args.grads + i * dim;
  const RowViews views = open_row<Opt>(args.tier, start, dim, scratch);
  for (int64_t d = 0; d < dim; ++d) views.gradient[d] = grad[d];
  float sums[kMaxRowSums], states[kMaxRowStates];
  add_penalty(decay, dim, views);
  row_sums(opt, dim, views, sums);
  for (int s = 0; s < Opt::kRowStates; ++s) states[s] = args.tier.row_states[s][row];
  const RowFactors factors = opt.begin_row(states, sums, static_cast<float>(dim));
  for (int s = 0; s < Opt::kRowStates; ++s) args.tier.row_states[s][row] = states[s];
  decay_row(decay, dim, views);
  step_row(opt, dim, factors, views);
  close_row<Opt>(args.tier, start, dim, views, rounding, args.first_row + row);
}

// The UpdateRowsFn of an optimizer.
template <class Opt>
void update(const UpdateRowsArgs& args, float* scratch, int64_t begin, int64_t end) {
  const Opt opt(args.hyper);
  const WeightDecay decay(args.hyper);
  const Rounding rounding(args.hyper);
  for (int64_t i = begin; i < end; ++i) {
    if (!is_zero(args.grads + i * args.dim, args.dim)) {
      update_row(opt, decay, rounding, args, scratch, i);
    }
  }
}

// UpdateRowsTable::find.
UpdateRowsFn find(int optimizer) {
  UpdateRowsFn kernel = nullptr;
  Optimizers::visit(optimizer, [&](auto tag) { kernel = update<typename decltype(tag)::type>; });
  return kernel;
}

// UpdateRowsTable::widen.
void widen(const WidenRowsArgs& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    widen_row(args.source, args.type, args.rows[i] * args.dim, args.dim,
              args.target + i * args.dim);
  }
}

}  // namespace

extern const UpdateRowsTable kUpdateRowsTable;
const UpdateRowsTable kUpdateRowsTable = {find, widen};

}  // namespace emb::EMB_ISA
