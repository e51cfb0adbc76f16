// `tt_rows` and `tt_core_grads` on the CPU. The right halves of a batch are few and are all
// expanded first; left halves are expanded when they are needed.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

#include "core/isa.h"
#include "core/parallel.h"
#include "tt/args.h"
#include "tt/check.h"

namespace emb {

EMB_SELECT_KERNELS(TtTable, kTtTable, tt_table)

// A range with fewer multiplications than this is not worth waking a thread for.
inline constexpr int64_t kTtGrain = 1 << 21;

using Floats = std::unique_ptr<float[]>;

inline Floats new_floats(int64_t n) { return Floats(new float[n > 0 ? n : 1]); }

// Reverse the axes of every row of a core, in parallel.
inline void tt_reverse(const TtReverseArgs& args, int64_t rows) {
  const int64_t size = args.a * args.q * args.b;
  parallel_balanced(
      rows, kTtGrain / 16, [&](int64_t row) { return row * size; },
      [&](int64_t begin, int64_t end) { tt_table().reverse(args, begin, end); });
}

struct TtBatch {
  TtShape shape;
  TtPlan plan;
  int64_t num_rows, num_lefts, num_rights;
  TtHalf left, right;
  std::vector<const float*> cores;

  TtBatch(const char* op, const std::vector<Tensor>& core_tensors,
          const std::vector<Tensor>& plan_tensors, const std::vector<int64_t>& row_factors,
          const std::vector<int64_t>& dim_factors)
      : shape(tt_shape(op, core_tensors, row_factors, dim_factors)),
        plan(tt_plan_of(op, plan_tensors)),
        num_rows(plan.counts[0]),
        num_lefts(plan.counts[1]),
        num_rights(plan.counts[2]),
        left(shape.left()),
        right(shape.right()) {
    check_plan_contents(op, plan, shape);
    for (const Tensor& core : core_tensors) cores.push_back(core.const_data_ptr<float>());
  }

  TtHalfCores left_cores() const { return {left, cores[0], cores[1], plan.lefts, false}; }

  // Return the multiplications for the left halves [0, u) and their rows.
  int64_t cost(int64_t u) const {
    const int64_t per_left = left.pair ? left.q_outer * left.inner_size() : 0;
    return u * per_left + plan.left_segments[u] * int64_t{1} * shape.dim() * left.rank;
  }

  Floats scratch() const { return new_floats(tt_scratch_size(left, shape.dim())); }
};

// The right halves of a batch, expanded: [V][columns, rank].
struct TtRights {
  Floats mirrored_outer, mirrored_inner;  // a pair's cores with their axes reversed
  Floats values;
  TtHalfCores cores;

  explicit TtRights(const TtBatch& batch)
      : values(new_floats(batch.num_rights * batch.right.value_size())),
        cores{batch.right, nullptr, nullptr, batch.plan.rights, true} {
    const TtHalf& half = batch.right;
    const int last = batch.shape.cores - 1;
    if (!half.pair) {
      tt_reverse(
          {batch.cores[last], values.get(), batch.plan.rights, nullptr, half.rank, half.q_outer, 1},
          batch.num_rights);
      return;
    }
    mirrored_outer = new_floats(half.outer_rows * half.outer_size());
    mirrored_inner = new_floats(half.inner_rows * half.inner_size());
    tt_reverse({batch.cores[last], mirrored_outer.get(), nullptr, nullptr, half.inner_rank,
                half.q_outer, 1},
               half.outer_rows);
    tt_reverse({batch.cores[last - 1], mirrored_inner.get(), nullptr, nullptr, half.rank,
                half.q_inner, half.inner_rank},
               half.inner_rows);
    cores.outer = mirrored_outer.get();
    cores.inner = mirrored_inner.get();
    const int64_t per_half = half.q_outer * half.inner_size();
    parallel_balanced(
        batch.num_rights, kTtGrain, [&](int64_t v) { return v * per_half; },
        [&](int64_t begin, int64_t end) {
          const Floats scratch = new_floats(tt_scratch_size(half, batch.shape.dim()));
          tt_table().expand(cores, values.get() + begin * half.value_size(), scratch.get(), begin,
                            end);
        });
  }
};

namespace {

// Make the distinct rows of a batch; each left half is expanded once.

std::tuple<Tensor, Tensor> tt_rows(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                   std::vector<int64_t> row_factors,
                                   std::vector<int64_t> dim_factors, int64_t num_saved) {
  const char* op = "tt_rows";
  const TtBatch batch(op, cores, plan, row_factors, dim_factors);
  STD_TORCH_CHECK(num_saved >= 0, op, ": num_saved must be >= 0, got ", num_saved);
  const TtHalf &left = batch.left, &right = batch.right;
  Tensor rows = allocate(cores[0], {batch.plan.capacity, batch.shape.dim()});
  Tensor prefixes = allocate(cores[0], {num_saved, left.value_size()});
  if (batch.num_rows == 0) return {rows, prefixes};

  const TtRights rights(batch);
  TtRowsArgs args{batch.left_cores(),
                  right.columns(),
                  rights.values.get(),
                  {nullptr, 0, batch.cores.back(), batch.plan.rights, 0, right.value_size()},
                  batch.plan.left_segments,
                  batch.plan.row_rights,
                  prefixes.mutable_data_ptr<float>(),
                  left.pair ? num_saved : 0,
                  rows.mutable_data_ptr<float>()};
  Floats natural;
  if (right.pair && args.lanes_along_right()) {
    natural = new_floats(batch.num_rights * right.value_size());
    tt_reverse(
        {rights.values.get(), natural.get(), nullptr, nullptr, right.columns(), 1, right.rank},
        batch.num_rights);
    args.right_natural = {natural.get(), batch.num_rights, nullptr, nullptr, 0, right.value_size()};
  }
  parallel_balanced(
      batch.num_lefts, kTtGrain, [&](int64_t u) { return batch.cost(u); },
      [&](int64_t begin, int64_t end) {
        const Floats scratch = batch.scratch();
        tt_table().rows(args, scratch.get(), begin, end);
      });
  return {rows, prefixes};
}

// The gradients. The left halves are processed in waves, so that scratch memory does not grow with
// the batch: first those whose values the forward pass saved, then the others. A wave computes the
// gradient of every inner row in it, from values that are expanded again just before if they were
// not saved; then it adds the contributions of the wave to right halves and outer rows. These are
// two parallel regions per wave. Each sum is computed by one thread in a fixed order, whatever the
// number of threads and the size of the waves.

// Floats of left values in a wave that expands them again. A single thread never waits between
// waves, so its waves fit its second-level cache.
constexpr int64_t kWaveFloats = 1 << 20, kWaveFloatsAlone = 1 << 18;

// Return ranges of halves with the same inner row: group i is [starts[i], starts[i + 1]).
std::vector<int64_t> inner_groups(const TtHalfCores& cores, int64_t begin, int64_t end) {
  std::vector<int64_t> starts;
  int64_t limit = 0;
  for (int64_t u = begin; u < end; ++u) {
    if (u > begin && cores.ids[u] < limit) continue;
    starts.push_back(u);
    limit = (cores.ids[u] / cores.half.outer_rows + 1) * cores.half.outer_rows;
  }
  starts.push_back(end);
  return starts;
}

// The halves [begin, end) by outer row, for the sum of their outer values into the gradient of the
// core.
class OuterSums {
 public:
  OuterSums(const TtHalfCores& cores, int64_t begin, int64_t end, const float* outer_values,
            float* grads)
      : rows_(cores.half.outer_rows), starts_(rows_ + 1, 0), members_(end - begin) {
    for (int64_t u = begin; u < end; ++u) ++starts_[cores.ids[u] % rows_ + 1];
    for (int64_t i = 0; i < rows_; ++i) starts_[i + 1] += starts_[i];
    std::vector<int32_t> cursor(starts_.begin(), starts_.end() - 1);
    for (int64_t u = begin; u < end; ++u) {
      members_[cursor[cores.ids[u] % rows_]++] = static_cast<int32_t>(u - begin);
    }
    args_ = {outer_values, cores.half.outer_size(), starts_.data(), members_.data(), grads};
  }

  int64_t rows() const { return rows_; }
  int64_t cost(int64_t row) const { return (row + starts_[row]) * args_.size; }
  void run(int64_t begin, int64_t end) const { tt_table().sum_outer(args_, begin, end); }

 private:
  int64_t rows_;
  std::vector<int32_t> starts_, members_;
  TtOuterSumArgs args_;
};

// Clear the gradients of the inner rows that no half of the batch uses.
void clear_unused(const TtHalfCores& cores, int64_t num_halves, float* inner_grads) {
  const int64_t size = cores.half.inner_size();
  int64_t next = 0;
  for (int64_t u = 0; u <= num_halves; ++u) {
    const int64_t inner =
        u < num_halves ? cores.ids[u] / cores.half.outer_rows : cores.half.inner_rows;
    if (inner >= next) std::fill(inner_grads + next * size, inner_grads + inner * size, 0.0f);
    next = inner + 1;
  }
}

class Backward {
 public:
  Backward(const TtBatch& batch, const TtRights& rights, const float* prefixes, int64_t num_saved,
           const float* row_grads)
      : batch_(batch),
        rights_(rights),
        row_grads_(row_grads),
        right_grads_(new_floats(batch.num_rights * batch.right.value_size())),
        cursors_(batch.plan.right_segments, batch.plan.right_segments + batch.num_rights),
        left_{prefixes, batch.left.pair ? std::min(num_saved, batch.num_lefts) : 0,
              nullptr,  batch.plan.lefts,
              0,        batch.left.value_size()} {}

  // Compute the gradients of the cores of the left half, and those of the right values.
  void left_half(float* outer, float* inner) {
    const TtHalf& left = batch_.left;
    if (!left.pair) {
      left_.rest = batch_.cores[0];
      left_groups({nullptr, outer, 0}, 0, batch_.num_lefts);
      return right_sums(batch_.num_lefts, nullptr);
    }
    left_.ids = nullptr;
    const int64_t num_saved = left_.num_saved, lefts = batch_.num_lefts;
    const bool alone = num_threads() == 1;
    const int64_t fit = (alone ? kWaveFloatsAlone : kWaveFloats) / left_.size;
    const int64_t wave = std::max(std::min(fit, lefts), 4 * kTtBlock);
    const int64_t saved_wave = alone ? wave : std::max(wave, num_saved);
    recomputed_ = new_floats(num_saved < lefts ? wave * left_.size : 0);
    const Floats outer_values = new_floats(saved_wave * left.outer_size());
    left_.rest = recomputed_.get();
    clear_unused(batch_.left_cores(), lefts, inner);
    for (int64_t begin = 0, end; begin < lefts; begin = end) {
      end = begin < num_saved ? std::min(begin + saved_wave, num_saved)
                              : std::min(begin + wave, lefts);
      left_.first = begin;
      left_groups({inner, outer_values.get(), begin}, begin, end);
      const OuterSums sums(batch_.left_cores(), begin, end, outer_values.get(), outer);
      right_sums(end, &sums);
    }
  }

  // Compute the gradients of the cores of the right half: [last core], or [third, last] of a pair.
  void right_half(float* last, float* third) const {
    const TtHalf& half = batch_.right;
    if (!half.pair) {
      return tt_reverse(
          {right_grads_.get(), last, nullptr, batch_.plan.rights, half.q_outer, half.rank, 1},
          batch_.num_rights);
    }
    const Floats outer = new_floats(half.outer_rows * half.outer_size());
    const Floats inner = new_floats(half.inner_rows * half.inner_size());
    const Floats outer_values = new_floats(batch_.num_rights * half.outer_size());
    std::fill_n(outer.get(), half.outer_rows * half.outer_size(), 0.0f);
    clear_unused(rights_.cores, batch_.num_rights, inner.get());
    const std::vector<int64_t> groups = inner_groups(rights_.cores, 0, batch_.num_rights);
    const TtHalfGrads grads{inner.get(), outer_values.get(), 0};
    const int64_t per_half = 2 * half.q_outer * half.inner_size();
    parallel_balanced(
        static_cast<int64_t>(groups.size()) - 1, kTtGrain,
        [&](int64_t i) { return groups[i] * per_half; },
        [&](int64_t begin, int64_t end) {
          const Floats scratch = new_floats(tt_scratch_size(half, batch_.shape.dim()));
          tt_table().contract(rights_.cores, grads,
                              right_grads_.get() + groups[begin] * half.value_size(), scratch.get(),
                              groups[begin], groups[end]);
        });
    const OuterSums sums(rights_.cores, 0, batch_.num_rights, outer_values.get(), outer.get());
    parallel_balanced(
        sums.rows(), kTtGrain, [&](int64_t row) { return sums.cost(row); },
        [&](int64_t begin, int64_t end) { sums.run(begin, end); });
    tt_reverse({outer.get(), last, nullptr, nullptr, half.q_outer, half.inner_rank, 1},
               half.outer_rows);
    tt_reverse({inner.get(), third, nullptr, nullptr, half.inner_rank, half.q_inner, half.rank},
               half.inner_rows);
  }

 private:
  // Compute the gradients of the inner core, and the values of the outer core, for left halves
  // [begin, end).
  void left_groups(const TtHalfGrads& grads, int64_t begin, int64_t end) {
    const TtLeftGradsArgs args{batch_.left_cores(),
                               batch_.right.columns(),
                               rights_.values.get(),
                               batch_.plan.left_segments,
                               batch_.plan.row_rights,
                               row_grads_,
                               grads};
    std::vector<int64_t> groups;
    if (batch_.left.pair) {
      groups = inner_groups(args.left, begin, end);
    } else {
      for (int64_t u = begin; u <= end; ++u) groups.push_back(u);
    }
    const bool expands = batch_.left.pair && begin >= left_.num_saved;
    const int64_t base = batch_.cost(begin);
    parallel_balanced(
        static_cast<int64_t>(groups.size()) - 1, kTtGrain,
        [&](int64_t i) { return batch_.cost(groups[i]) - base; },
        [&](int64_t first, int64_t last) {
          const Floats scratch = batch_.scratch();
          const int64_t from = groups[first], to = groups[last];
          if (expands) {
            float* values = recomputed_.get() + (from - begin) * left_.size;
            tt_table().expand(args.left, values, scratch.get(), from, to);
          }
          tt_table().left_grads(args, scratch.get(), from, to);
        });
  }

  // Add the rows of left halves below `end` that were not added before to the gradients of right
  // halves, and, in the same parallel region, the values of `sums` to outer rows.
  void right_sums(int64_t end, const OuterSums* sums) {
    const TtPlan& plan = batch_.plan;
    const TtRightGradsArgs args{left_,
                                batch_.left.columns(),
                                batch_.right.columns(),
                                batch_.left.rank,
                                plan.right_segments,
                                plan.right_rows,
                                plan.row_lefts,
                                cursors_.data(),
                                plan.left_segments[end],
                                row_grads_,
                                right_grads_.get()};
    const int64_t rights = batch_.num_rights, outer_rows = sums != nullptr ? sums->rows() : 0;
    const int64_t per_row = int64_t{1} * batch_.shape.dim() * batch_.left.rank;
    const auto cost = [&](int64_t i) {
      const int64_t v = std::min(i, rights);
      return plan.right_segments[v] * per_row + (i > rights ? sums->cost(i - rights) : 0);
    };
    parallel_balanced(rights + outer_rows, kTtGrain, cost, [&](int64_t first, int64_t last) {
      if (first < rights) tt_table().right_grads(args, first, std::min(last, rights));
      if (last > rights) sums->run(std::max(first, rights) - rights, last - rights);
    });
  }

  const TtBatch& batch_;
  const TtRights& rights_;
  const float* row_grads_;
  Floats right_grads_;
  Floats recomputed_;  // values of left halves that the forward pass did not save
  std::vector<int32_t> cursors_;
  TtValues left_;
};

std::vector<Tensor> tt_core_grads(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                  const Tensor& prefixes, const Tensor& row_grads,
                                  std::vector<int64_t> row_factors,
                                  std::vector<int64_t> dim_factors) {
  const char* op = "tt_core_grads";
  const TtBatch batch(op, cores, plan, row_factors, dim_factors);
  check_core_grad_inputs(op, batch.shape, batch.num_rows, prefixes, row_grads);
  const Tensor gradient = torch::stable::contiguous(row_grads);
  const size_t last = cores.size() - 1;
  std::vector<Tensor> grads;
  for (size_t k = 0; k <= last; ++k) {
    // The inner core of the left pair is overwritten; gradients of the others are accumulated.
    grads.push_back(k == 1 && batch.left.pair && batch.num_rows > 0
                        ? allocate(cores[k], {cores[k].size(0), cores[k].size(1)})
                        : allocate_zeros(cores[k], {cores[k].size(0), cores[k].size(1)}));
  }
  if (batch.num_rows == 0) return grads;
  const auto data = [&](size_t k) { return grads[k].mutable_data_ptr<float>(); };
  const TtRights rights(batch);
  Backward backward(batch, rights, prefixes.const_data_ptr<float>(), prefixes.size(0),
                    gradient.const_data_ptr<float>());
  backward.left_half(data(0), data(1));
  backward.right_half(data(last), data(last - 1));
  return grads;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tt_rows);
  EMB_IMPL(m, emb, tt_core_grads);
}
