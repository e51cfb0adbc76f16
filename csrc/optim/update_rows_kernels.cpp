// An optimizer over all rows of a matrix whose gradient is dense, on one CPU thread. A row whose
// gradient is zero throughout took no part in the batch and keeps its weights and its state.
#include "core/vec.h"
#include "optim/optimizers.h"
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

EMB_HD float mean_square(const float* g, int64_t width) {
  Vec squares = {};
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) squares += load(g + d) * load(g + d);
  float total = sum(squares);
  for (; d < width; ++d) total += g[d] * g[d];
  return total / static_cast<float>(width);
}

template <class Opt>
EMB_HD void step_row(const Opt& opt, const UpdateRowsArgs& args, int64_t row) {
  const int64_t width = args.width, start = row * width;
  float* __restrict w = args.weights + start;
  const float* __restrict g = args.grads + start;
  float* __restrict first = args.element_states[0] + start;
  float* __restrict second = args.element_states[1] + start;
  float square = 0.0f;
  if constexpr (Opt::kRowStates > 0) square = mean_square(g, width);
  const float scale = opt.begin_row(args.row_state + row, square);
  for (int64_t d = 0; d < width; ++d) {
    float s1 = Opt::kElementStates > 0 ? first[d] : 0.0f;
    float s2 = Opt::kElementStates > 1 ? second[d] : 0.0f;
    w[d] = opt.step(w[d], g[d], &s1, &s2, scale);
    if constexpr (Opt::kElementStates > 0) first[d] = s1;
    if constexpr (Opt::kElementStates > 1) second[d] = s2;
  }
}

template <class Opt>
void update(const UpdateRowsArgs& args, int64_t begin, int64_t end) {
  const Opt opt(args.hyper);
  for (int64_t row = begin; row < end; ++row) {
    if (!is_zero(args.grads + row * args.width, args.width)) step_row(opt, args, row);
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
