// An optimizer over rows of a matrix on one CPU thread: the functions of UpdateRowsTable
// (optim/args.h). A row whose gradient is zero throughout was not part of the batch and keeps its
// weights and states.
#include "optim/args.h"
#include "optim/optimizer_step_cpu.h"
#include "optim/optimizers.h"

namespace emb::EMB_ISA {
namespace {

// Return whether all elements are zero. For nearly every other row the first elements decide.
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

// Update the row of gradient `number`.
template <class Opt>
EMB_HD void update_row(const Opt& opt, const WeightDecay& decay, const Rounding& rounding,
                       const UpdateRowsArgs& args, float* scratch, int64_t number) {
  const int64_t row = args.rows != nullptr ? args.rows[number] : number;
  const int64_t width = args.width;
  const float* grad = args.grads + number * width;
  const RowAccess<Opt> access{&args.tier, row * width, row, args.first_row + row, width};
  RowViews views{nullptr, scratch, nullptr, nullptr};
  access.open(scratch + width, &views);
  for (int64_t d = 0; d < width; ++d) views.gradient[d] = grad[d];
  float sums[kMaxRowSums];
  add_penalty(decay, width, views);
  row_sums(opt, width, views, sums);
  const RowFactors factors = access.begin(opt, sums);
  decay_row(decay, width, views);
  step_row(opt, width, factors, views);
  access.close(views, rounding);
}

// The UpdateRowsFn of an optimizer.
template <class Opt>
void update(const UpdateRowsArgs& args, float* scratch, int64_t begin, int64_t end) {
  const Opt opt(args.hyper);
  const WeightDecay decay(args.hyper);
  const Rounding rounding(args.hyper);
  for (int64_t row = begin; row < end; ++row) {
    if (!is_zero(args.grads + row * args.width, args.width)) {
      update_row(opt, decay, rounding, args, scratch, row);
    }
  }
}

// UpdateRowsTable::find.
UpdateRowsFn find(int optimizer) {
  UpdateRowsFn found = nullptr;
  Optimizers::visit(optimizer, [&](auto tag) { found = update<typename decltype(tag)::type>; });
  return found;
}

// UpdateRowsTable::widen.
void widen(const WidenRowsArgs& args, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    widen_row(args.from, args.type, args.rows[i] * args.width, args.width,
              args.to + i * args.width);
  }
}

}  // namespace

extern const UpdateRowsTable kUpdateRowsTable;
const UpdateRowsTable kUpdateRowsTable = {find, widen};

}  // namespace emb::EMB_ISA
