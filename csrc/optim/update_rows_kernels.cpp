// An optimizer over rows of a matrix on one CPU thread. A row whose gradient is all zero was not
// part of the batch and keeps its weights and states.
#include "optim/args.h"
#include "optim/optimizer_step_cpu.h"
#include "optim/optimizers.h"

namespace emb::EMB_ISA {
namespace {

// Almost every nonzero row is detected at its first elements.
EMB_HD bool is_zero(const float* g, int64_t width) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    const auto differs = load(g + d) != Vec{};
    for (int i = 0; i < kLanes; ++i) {
      if (differs[i] != 0) return false;
    }
  }
  for (; d < width; ++d) {
    if (g[d] != 0.0f) return false;
  }
  return true;
}

template <class Opt>
EMB_HD void update_row(const Opt& opt, const WeightDecay& decay, const UpdateRowsArgs& args,
                       float* scratch, int64_t number) {
  const int64_t row = args.rows != nullptr ? args.rows[number] : number;
  const int64_t width = args.width, start = row * width;
  const float* grad = args.grads + number * width;
  RowViews views{static_cast<float*>(args.tier.weights) + start, scratch, nullptr, nullptr};
  if constexpr (Opt::kSteppedStates > 0) {
    views.first = static_cast<float*>(args.tier.element_states[0]) + start;
  }
  if constexpr (Opt::kSteppedStates > 1) {
    views.second = static_cast<float*>(args.tier.element_states[1]) + start;
  }
  for (int64_t d = 0; d < width; ++d) scratch[d] = grad[d];
  float sums[kMaxRowSums], states[kMaxRowStates];
  add_penalty(decay, width, views);
  row_sums(opt, width, views, sums);
  for (int s = 0; s < Opt::kRowStates; ++s) states[s] = args.tier.row_states[s][row];
  const RowFactors scale = opt.begin_row(states, sums, static_cast<float>(width));
  for (int s = 0; s < Opt::kRowStates; ++s) args.tier.row_states[s][row] = states[s];
  decay_row(decay, width, views);
  step_row(opt, width, scale, views);
}

template <class Opt>
void update(const UpdateRowsArgs& args, float* scratch, int64_t begin, int64_t end) {
  const Opt opt(args.hyper);
  const WeightDecay decay(args.hyper);
  for (int64_t row = begin; row < end; ++row) {
    if (!is_zero(args.grads + row * args.width, args.width)) {
      update_row(opt, decay, args, scratch, row);
    }
  }
}

UpdateRowsFn find(int optimizer) {
  UpdateRowsFn found = nullptr;
  Optimizers::visit(optimizer, [&](auto tag) { found = update<typename decltype(tag)::type>; });
  return found;
}

}  // namespace

extern const UpdateRowsTable kUpdateRowsTable;
const UpdateRowsTable kUpdateRowsTable = {find};

}  // namespace emb::EMB_ISA
