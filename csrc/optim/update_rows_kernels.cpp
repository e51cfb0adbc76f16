// An optimizer over all rows of a matrix whose gradient is dense, on one CPU thread. A row whose
// gradient is zero throughout took no part in the batch and keeps its weights and its state.
#include "optim/optimizers.h"
#include "optim/step_row.h"
#include "optim/update_rows_table.h"

namespace emb::EMB_ISA {
namespace {

// Almost every row answers at its first elements.
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
EMB_HD void update_row(const Opt& opt, const UpdateRowsArgs& args, int64_t row) {
  const int64_t width = args.width, start = row * width;
  const float* g = args.grads + start;
  float square = 0.0f;
  if constexpr (Opt::kRowStates > 0) square = mean_square(g, width);
  float* row_state = Opt::kRowStates > 0 ? args.row_state + row : nullptr;
  float* first = Opt::kElementStates > 0 ? args.element_states[0] + start : nullptr;
  float* second = Opt::kElementStates > 1 ? args.element_states[1] + start : nullptr;
  const float scale = opt.begin_row(row_state, square);
  step_row(opt, width, scale, args.weights + start, g, first, second);
}

template <class Opt>
void update(const UpdateRowsArgs& args, int64_t begin, int64_t end) {
  const Opt opt(args.hyper);
  for (int64_t row = begin; row < end; ++row) {
    if (!is_zero(args.grads + row * args.width, args.width)) update_row(opt, args, row);
  }
}

UpdateRowsFn find(const char* optimizer) {
  UpdateRowsFn found = nullptr;
  visit_optimizer(optimizer, [&](auto tag) { found = update<typename decltype(tag)::type>; });
  return found;
}

}  // namespace

extern const UpdateRowsTable kUpdateRowsTable;
const UpdateRowsTable kUpdateRowsTable = {find};

}  // namespace emb::EMB_ISA
