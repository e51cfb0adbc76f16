// `tt_rows`, `tt_core_grads` and `tt_update_` on the CPU: compute rows from cores, compute the
// gradients of cores from the gradients of rows, and update cores.
//
// tt/args.h defines halves, pairs, values and plans. To *expand* a pair is to compute its value
// from its cores. The right halves of a table are expanded first, all of them; left halves are
// expanded when they are needed. Core rows that the batch does not use are not read and not
// updated. Tables are processed one after another, each by all threads, or several at once, each by
// one thread (for_tables). All arithmetic is float32, which every `matmul_precision` allows.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "core/isa.h"
#include "core/output_memory.h"
#include "core/parallel.h"
#include "core/scratch.h"
#include "optim/args.h"
#include "optim/check.h"
#include "tt/args.h"
#include "tt/check.h"
#include "tt/entries.h"
#include "tt/pair_rows.h"

namespace emb {

EMB_SELECT_KERNELS(TtCpuKernels, kTtCpuKernels, tt_kernels)
EMB_SELECT_KERNELS(UpdateRowsTable, kUpdateRowsTable, tt_update_table)

namespace {

// Grains of parallel_balanced: in multiplications, and in elements for updates and for reversals.
constexpr int64_t kTtGrain = 1 << 21;
constexpr int64_t kUpdateGrain = 1 << 15, kReverseGrain = 1 << 17;
// Grain of parallel_balanced over whole tables, and work of a row besides its product, both in
// multiplications.
constexpr int64_t kTableGrain = 1 << 19, kRowWork = 256;
// Tables get a thread each only if the work of the largest is at most this many percent of a
// thread's share (not measured).
constexpr int64_t kMaxSharePercent = 150;

// Reverse the axes of `num_rows` rows, in parallel.
void tt_reverse(const TtReverseArgs& args, int64_t num_rows) {
  const int64_t size = args.a * args.q * args.b;
  parallel_balanced(
      num_rows, kReverseGrain, [&](int64_t row) { return row * size; },
      [&](int64_t begin, int64_t end) { tt_kernels().reverse(args, begin, end); });
}

// Float copies of the core rows of a table that a batch uses, for cores stored in 16 bits.
struct UsedCores {
  std::vector<int32_t> rows[kMaxCores];      // the used rows of each core, ascending
  Floats values[kMaxCores];                  // copies of these rows
  std::vector<int32_t> left_ids, right_ids;  // ids of the halves in a table of these rows alone
};

// One table of a batch, and its part of the plan. A table with 16-bit cores is replaced by a
// smaller one, of float32 copies of the core rows that the batch uses. Halves keep their order, so
// that results have the bits that float32 cores of equal values would yield.
struct TtTableBatch {
  TtShape shape;
  int64_t first_core;  // index of the first core in the list of the cores of all tables
  // Its arrays by half (ids and segments) begin with the table's first left or right half. The rows
  // and halves that they name are numbered over all tables, from first_row, first_left and
  // first_right on for this table.
  TtPlan plan;
  int64_t first_row, first_left, first_right;
  int64_t num_rows, num_lefts, num_rights;  // distinct rows and halves of the table
  int64_t first_left_id, first_right_id;    // first ids of the table's halves in the plan
  TtHalf left, right;
  // The cores, or the copies in `used`. Empty for a table of 16-bit cores without rows in the
  // batch.
  std::vector<const float*> cores;
  UsedCores used;  // empty for float32 cores

  TtTableBatch(const TtTables& tables, const TtPlan& batch_plan, int64_t t)
      : shape(tables.shapes[t]),
        first_core(tables.first_cores[t]),
        plan(batch_plan),
        first_row(plan.row_starts()[t]),
        first_left(plan.left_starts()[t]),
        first_right(plan.right_starts()[t]),
        num_rows(plan.row_starts()[t + 1] - first_row),
        num_lefts(plan.left_starts()[t + 1] - first_left),
        num_rights(plan.right_starts()[t + 1] - first_right),
        first_left_id(tables.first_left_ids[t]),
        first_right_id(tables.first_right_ids[t]),
        left(shape.left()),
        right(shape.right()) {
    plan.lefts += first_left;
    plan.left_segments += first_left;
    plan.rights += first_right;
    plan.right_segments += first_right;
    if (tables.type != Dtype::kFloat) {
      if (num_rows > 0) widen(tables.cores[t], tables.type);
      return;
    }
    for (const Tensor& core : tables.cores[t]) cores.push_back(core.const_data_ptr<float>());
  }

  // Return the row of the table's whole core k that is row `row` of cores[k].
  int64_t core_row(int64_t k, int64_t row) const {
    return used.rows[k].empty() ? row : used.rows[k][row];
  }

  TtHalfCores left_cores() const {
    return {left, cores[0], cores[1], plan.lefts, first_left_id, false};
  }

  // Return the number of multiplications to expand the left halves [0, u) and compute their rows.
  int64_t cost(int64_t u) const {
    const int64_t per_left = left.is_pair ? left.q_outer * left.inner_size() : 0;
    return u * per_left + (plan.left_segments[u] - first_row) * shape.dim() * left.rank;
  }

  // Return scratch for one call of a kernel on left halves.
  Floats new_scratch() const { return new_floats(tt_scratch_floats(left, shape.dim())); }

 private:
  void widen(const std::vector<Tensor>& narrow, Dtype type);
};

// Replace the table by one of float32 copies of the core rows that the batch uses.
void TtTableBatch::widen(const std::vector<Tensor>& narrow, Dtype type) {
  const int last = shape.num_cores - 1;
  used.left_ids = compact_ids({left, nullptr, nullptr, plan.lefts, first_left_id, false}, num_lefts,
                              &used.rows[0], &used.rows[1]);
  used.right_ids = compact_ids({right, nullptr, nullptr, plan.rights, first_right_id, true},
                               num_rights, &used.rows[last], &used.rows[last - 1]);
  for (int k = 0; k <= last; ++k) {
    const auto num_used_rows = static_cast<int64_t>(used.rows[k].size());
    const int64_t width = narrow[k].size(1);
    used.values[k] = new_floats(num_used_rows * width);
    const WidenRowsArgs args{narrow[k].const_data_ptr(), type, used.rows[k].data(), width,
                             used.values[k].get()};
    parallel_balanced(
        num_used_rows, kUpdateGrain, [&](int64_t row) { return row * width; },
        [&](int64_t begin, int64_t end) { tt_update_table().widen(args, begin, end); });
    shape.p[k] = num_used_rows;
    cores.push_back(used.values[k].get());
  }
  left = shape.left();
  right = shape.right();
  plan.lefts = used.left_ids.data();
  plan.rights = used.right_ids.data();
  first_left_id = first_right_id = 0;
}

// The values of the right halves of a table of a batch. Refers to `batch`, which must outlive it.
struct TtRightHalves {
  // For pairs: the core rows that the batch uses, and these rows with their axes reversed.
  std::optional<PairRows> pair_rows;
  Floats mirrored_outer, mirrored_inner;
  Floats values;      // [V][columns, rank]
  TtHalfCores cores;  // for pairs: of the mirrored rows

  explicit TtRightHalves(const TtTableBatch& batch)
      : values(new_floats(batch.num_rights * batch.right.value_size())),
        cores{batch.right, nullptr, nullptr, batch.plan.rights, batch.first_right_id, true} {
    const TtHalf& half = batch.right;
    const int last = batch.shape.num_cores - 1;
    if (!half.is_pair) {
      tt_reverse({.from = batch.cores[last],
                  .to = values.get(),
                  .ids = batch.plan.rights,
                  .first_id = batch.first_right_id,
                  .a = half.rank,
                  .q = half.q_outer,
                  .b = 1},
                 batch.num_rights);
      return;
    }
    pair_rows.emplace(cores, batch.num_rights);
    mirrored_outer = new_floats(pair_rows->num_outer() * half.outer_size());
    mirrored_inner = new_floats(pair_rows->num_inner() * half.inner_size());
    tt_reverse({.from = batch.cores[last],
                .to = mirrored_outer.get(),
                .ids = pair_rows->outer_rows.data(),
                .a = half.inner_rank,
                .q = half.q_outer,
                .b = 1},
               pair_rows->num_outer());
    tt_reverse({.from = batch.cores[last - 1],
                .to = mirrored_inner.get(),
                .ids = pair_rows->inner_rows.data(),
                .a = half.rank,
                .q = half.q_inner,
                .b = half.inner_rank},
               pair_rows->num_inner());
    cores.outer = mirrored_outer.get();
    cores.inner = mirrored_inner.get();
    cores.outer_positions = pair_rows->outer_positions.data();
    cores.inner_positions = pair_rows->inner_positions.data();
    const int64_t per_half = half.q_outer * half.inner_size();
    parallel_balanced(
        batch.num_rights, kTtGrain, [&](int64_t v) { return v * per_half; },
        [&](int64_t begin, int64_t end) {
          const Floats scratch = new_floats(tt_scratch_floats(half, batch.shape.dim()));
          tt_kernels().expand(cores, values.get() + begin * half.value_size(), scratch.get(), begin,
                              end);
        });
  }
};

// The values of the first left halves of a table: a part of a tensor `left_values`, [num_saved,
// left_value_size], of the first left halves of all tables. Within this part the values follow each
// other without gaps, even if they are smaller than left_value_size.
struct LeftValues {
  float* values = nullptr;  // null if there are none
  int64_t num_values;       // 0 if the left halves are not pairs

  LeftValues(const Tensor& left_values, const TtTableBatch& batch)
      : num_values(batch.left.is_pair ? std::clamp<int64_t>(left_values.size(0) - batch.first_left,
                                                            0, batch.num_lefts)
                                      : 0) {
    if (num_values == 0) return;
    values = const_cast<float*>(left_values.const_data_ptr<float>()) +
             batch.first_left * left_values.size(1);
  }
};

// Write the distinct rows of one table to `rows`, [M][row_stride] of all tables, and the values of
// its first left halves to `left_values`, as many as it has room for. Runs in parallel; each left
// half is expanded once.
void make_rows(const TtTableBatch& batch, const LeftValues& left_values, float* rows,
               int64_t row_stride) {
  const TtHalf& right = batch.right;
  const TtRightHalves rights(batch);
  TtRowsArgs args{.left = batch.left_cores(),
                  .right_columns = right.columns(),
                  .right_values = rights.values.get(),
                  .transposed_right_values = {.unsaved_values = batch.cores.back(),
                                              .ids = batch.plan.rights,
                                              .first_id = batch.first_right_id,
                                              .size = right.value_size()},
                  .left_segments = batch.plan.left_segments,
                  .row_rights = batch.plan.row_rights,
                  .first_right = batch.first_right,
                  .left_values = left_values.values,
                  .num_left_values = left_values.num_values,
                  .rows = rows,
                  .row_stride = row_stride};
  Floats transposed;
  if (right.is_pair && args.has_lanes_along_right()) {
    transposed = new_floats(batch.num_rights * right.value_size());
    tt_reverse({.from = rights.values.get(),
                .to = transposed.get(),
                .a = right.columns(),
                .q = 1,
                .b = right.rank},
               batch.num_rights);
    args.transposed_right_values = {.unsaved_values = transposed.get(), .size = right.value_size()};
  }
  parallel_balanced(
      batch.num_lefts, kTtGrain, [&](int64_t u) { return batch.cost(u); },
      [&](int64_t begin, int64_t end) {
        const Floats scratch = batch.new_scratch();
        tt_kernels().write_rows(args, scratch.get(), begin, end);
      });
}

// Return the tables that have rows in the batch.
std::vector<TtTableBatch> used_tables(const TtTables& tables, const TtPlan& plan) {
  std::vector<TtTableBatch> used;
  for (int64_t t = 0; t < tables.size(); ++t) {
    TtTableBatch batch(tables, plan, t);
    if (batch.num_rows > 0) used.push_back(std::move(batch));
  }
  return used;
}

// Call body(table, is_single_threaded) for each table: for several tables at once, on one thread
// each, if that keeps all threads busy; otherwise for one table after another, each on all threads.
// is_single_threaded says that one thread processes the table.
template <class Body>
void for_tables(const std::vector<TtTableBatch>& tables, const Body& body) {
  // Work of all tables before each table, in multiplications.
  std::vector<int64_t> work_before = {0};
  int64_t max_work = 0;
  for (const TtTableBatch& table : tables) {
    const int64_t table_work = table.cost(table.num_lefts) + kRowWork * table.num_rows;
    work_before.push_back(work_before.back() + table_work);
    max_work = std::max(max_work, table_work);
  }
  const auto count = static_cast<int64_t>(tables.size());
  if (100 * max_work * num_threads() > kMaxSharePercent * work_before.back()) {
    for (const TtTableBatch& table : tables) body(table, num_threads() == 1);
    return;
  }
  parallel_balanced(
      count, kTableGrain, [&](int64_t t) { return work_before[t]; },
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) body(tables[t], true);
      });
}

}  // namespace

// The contract is in tt/entries.h.
void tt_make_rows(const TtTables& tables, const TtPlan& plan, const Tensor& left_values,
                  float* rows) {
  for_tables(used_tables(tables, plan), [&](const TtTableBatch& batch, bool) {
    make_rows(batch, LeftValues(left_values, batch), rows, tables.max_dim);
  });
}

namespace {

// Return the distinct rows of all tables in key order, float32 [L, max_dim], and
// the left values, those of the first `num_saved` left halves, float32 [num_saved,
// left_value_size] (see TtTables). Rows after the last one, columns beyond the dim of a table, and
// values of halves that are not pairs or do not exist are unspecified. The left values serve
// tt_core_grads and tt_update_ alone: see LeftValues. `plan_tensors` must be the result of tt_plan;
// their contents are checked. The lists are the arguments of TtTables.
std::tuple<Tensor, Tensor> tt_rows(std::vector<Tensor> cores, std::vector<Tensor> plan_tensors,
                                   std::vector<int64_t> row_factors,
                                   std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                   int64_t num_saved, int64_t matmul_precision) {
  const char* op = "tt_rows";
  parse_matmul_precision(op, matmul_precision);
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  const TtPlan plan = tt_plan_of(op, plan_tensors, tables.size());
  check_plan_contents(op, plan, tables);
  check_not_negative(op, "num_saved", num_saved);
  Tensor rows = allocate_output(cores[0], {plan.capacity, tables.max_dim}, ScalarType::Float);
  const Tensor left_values =
      allocate_output(cores[0], {num_saved, tables.left_value_size}, ScalarType::Float);
  tt_make_rows(tables, plan, left_values, rows.mutable_data_ptr<float>());
  return {rows, left_values};
}

// The backward pass. The left halves of pairs are processed in waves, first those whose values the
// forward pass saved, then the others. A wave expands values that were not saved again, so that the
// memory for them does not grow with the batch. A wave has two parallel regions. The first computes
// the gradients of inner rows, and one gradient of an outer row per half. The second adds the
// wave's contributions to the gradients of right halves and of outer rows. In an update, if no
// inner row has more halves than a wave, the optimizer runs inside the first region, on inner rows
// whose gradients are complete: no other half reads these rows. One thread computes a sum, in an
// order that depends neither on the number of threads nor on the size of the waves.

// Floats of left values in a wave that expands them, if all threads run the wave, and if a single
// thread runs it. A single thread does not wait for others between waves, so its waves can be small
// enough for its second-level cache.
constexpr int64_t kWaveFloats = 1 << 20, kSingleThreadWaveFloats = 1 << 18;
constexpr int64_t kMinWaveHalves = 4 * kTtBlockHalves;  // minimum number of left halves in a wave

// The halves [begin, end) of `rows`, sorted by outer row, to add their gradients of outer rows,
// `outer_grads_by_half`, [end - begin][size], to those of the batch, `grads`, [used outer
// rows][size]. Refers to both arrays, which must outlive it.
class OuterRowSums {
 public:
  OuterRowSums(const PairRows& rows, int64_t size, int64_t begin, int64_t end,
               const float* outer_grads_by_half, float* grads)
      : num_rows_(rows.num_outer()), starts_(num_rows_ + 1, 0), halves_(end - begin) {
    const std::vector<int32_t>& row_of_half = rows.outer_positions;
    for (int64_t u = begin; u < end; ++u) ++starts_[row_of_half[u] + 1];
    for (int64_t i = 0; i < num_rows_; ++i) starts_[i + 1] += starts_[i];
    std::vector<int32_t> cursors(starts_.begin(), starts_.end() - 1);
    for (int64_t u = begin; u < end; ++u) {
      halves_[cursors[row_of_half[u]]++] = static_cast<int32_t>(u - begin);
    }
    args_ = {outer_grads_by_half, size, starts_.data(), halves_.data(), grads};
  }

  int64_t num_rows() const { return num_rows_; }
  // Return the number of additions for the outer rows [0, row), plus `size` per row for other work.
  int64_t cost(int64_t row) const { return (row + starts_[row]) * args_.size; }
  // Add the gradients of the outer rows [begin, end).
  void run(int64_t begin, int64_t end) const { tt_kernels().sum_outer(args_, begin, end); }

 private:
  int64_t num_rows_;
  std::vector<int32_t> starts_, halves_;
  TtOuterSumArgs args_;
};

// An optimizer step on the rows of a core.
struct CoreStep {
  UpdateRowsFn update;
  TierMemory tier;  // the core and its states
  const double* hyper;
  int64_t first_row;  // number of the core's first row among the rows of all cores

  // Return the arguments for gradients `grads`, [.., width], of the core rows `rows`.
  UpdateRowsArgs args(const float* grads, int64_t width, const int32_t* rows) const {
    return {tier, grads, width, hyper, rows, first_row};
  }
};

// Floats of gradients of inner rows that are collected before the optimizer is applied to them: so
// few that they are still in the first two levels of the cache.
constexpr int64_t kStepFloats = 1 << 13;

// The gradients of the rows of one core that the batch uses.
struct CoreGrads {
  std::vector<int32_t> rows;  // core rows, ascending
  Floats values;              // [rows][width], their gradients
  int64_t width = 0;

  int64_t size() const { return static_cast<int64_t>(rows.size()); }
};

// The backward pass of one table of a batch: call compute_left_half, then compute_right_half.
class TtTableBackward {
 public:
  // `row_grads`, [M][row_stride], has the gradients of the rows of all tables.
  // `is_single_threaded`: run on this thread alone (see for_tables). `batch`, `rights`,
  // `row_grads` and the memory of `left_values` must outlive it.
  TtTableBackward(const TtTableBatch& batch, const TtRightHalves& rights,
                  const LeftValues& left_values, const float* row_grads, int64_t row_stride,
                  bool is_single_threaded)
      : batch_(batch),
        rights_(rights),
        row_grads_(row_grads),
        row_stride_(row_stride),
        is_single_threaded_(is_single_threaded),
        added_rows_end_(batch.first_row),
        right_grads_(new_floats(batch.num_rights * batch.right.value_size())),
        cursors_(batch.plan.right_segments, batch.plan.right_segments + batch.num_rights),
        left_values_{.saved_values = left_values.values,
                     .num_saved = left_values.num_values,
                     .ids = batch.plan.lefts,
                     .first_id = batch.first_left_id,
                     .size = batch.left.value_size()} {}

  // Compute the gradients of the core or cores of the left half, and the gradients of the values of
  // right halves. `inner` is not touched if the half is not a pair. If `step`, a step of the inner
  // core, is not null, that core may be updated here; `inner` then gets no rows. Call this once.
  void compute_left_half(CoreGrads* outer, CoreGrads* inner, const CoreStep* step) {
    const TtHalf& left = batch_.left;
    const int64_t num_lefts = batch_.num_lefts;
    outer->width = left.outer_size();
    if (!left.is_pair) {
      outer->rows = core_rows(batch_.plan.lefts, num_lefts, batch_.first_left_id);
      outer->values = new_floats(num_lefts * outer->width);
      left_values_.unsaved_values = batch_.cores[0];
      compute_left_grads({nullptr, nullptr, outer->values.get(), 0}, 0, num_lefts);
      return add_right_grads(num_lefts, nullptr);
    }
    left_values_.ids = nullptr;
    const PairRows rows(batch_.left_cores(), num_lefts);
    outer->rows = rows.outer_rows;
    outer->values = new_floats(rows.num_outer() * outer->width);
    std::fill_n(outer->values.get(), rows.num_outer() * outer->width, 0.0f);
    inner->width = left.inner_size();
    const int64_t num_saved = left_values_.num_saved;
    const int64_t max_wave_halves =
        (is_single_threaded_ ? kSingleThreadWaveFloats : kWaveFloats) / left_values_.size;
    const int64_t wave_halves = std::max(std::min(max_wave_halves, num_lefts), kMinWaveHalves);
    // Saved values need no buffer, so that several threads process all of them in one wave.
    const int64_t saved_wave_halves =
        is_single_threaded_ ? wave_halves : std::max(wave_halves, num_saved);
    // If no inner row has more halves than a wave, waves end with an inner row. Then the gradient
    // of every inner row is complete within a wave, and the step is applied there.
    const bool steps_in_waves = step != nullptr && rows.max_halves_per_inner_row() <= wave_halves;
    const auto wave_end = [&](int64_t max_end) {
      return steps_in_waves ? rows.first_half_of_inner_row(max_end) : max_end;
    };
    if (steps_in_waves) {
      step_ = step;
      for (const int32_t row : rows.inner_rows) {
        step_rows_.push_back(static_cast<int32_t>(batch_.core_row(1, row)));
      }
    } else {
      inner->rows = rows.inner_rows;
      inner->values = new_floats(rows.num_inner() * inner->width);
    }
    const int64_t saved_end = wave_end(num_saved);
    expanded_ = new_floats(num_saved < num_lefts ? wave_halves * left_values_.size : 0);
    const Floats outer_grads_by_half = new_floats(saved_wave_halves * left.outer_size());
    left_values_.unsaved_values = expanded_.get();
    for (int64_t begin = 0, end; begin < num_lefts; begin = end) {
      end = wave_end(begin < saved_end ? std::min(begin + saved_wave_halves, saved_end)
                                       : std::min(begin + wave_halves, num_lefts));
      left_values_.first_unsaved = begin;
      compute_left_grads(
          {inner->values.get(), rows.inner_positions.data(), outer_grads_by_half.get(), begin},
          begin, end);
      const OuterRowSums sums(rows, outer->width, begin, end, outer_grads_by_half.get(),
                              outer->values.get());
      add_right_grads(end, &sums);
    }
  }

  // Compute the gradients of the core or cores of the right half, after compute_left_half.
  // `inner_core` is not touched if the half is not a pair.
  void compute_right_half(CoreGrads* outer_core, CoreGrads* inner_core) const {
    const TtHalf& half = batch_.right;
    outer_core->width = half.outer_size();
    if (!half.is_pair) {
      outer_core->rows = core_rows(batch_.plan.rights, batch_.num_rights, batch_.first_right_id);
      outer_core->values = new_floats(batch_.num_rights * outer_core->width);
      return tt_reverse({.from = right_grads_.get(),
                         .to = outer_core->values.get(),
                         .a = half.q_outer,
                         .q = half.rank,
                         .b = 1},
                        batch_.num_rights);
    }
    const PairRows& rows = *rights_.pair_rows;
    const int64_t num_outer = rows.num_outer(), num_inner = rows.num_inner();
    const Floats outer = new_floats(num_outer * half.outer_size());
    const Floats inner = new_floats(num_inner * half.inner_size());
    const Floats outer_grads_by_half = new_floats(batch_.num_rights * half.outer_size());
    std::fill_n(outer.get(), num_outer * half.outer_size(), 0.0f);
    const std::vector<int64_t> group_starts = inner_row_groups(rights_.cores, 0, batch_.num_rights);
    const TtHalfGrads grads{inner.get(), rows.inner_positions.data(), outer_grads_by_half.get(), 0};
    const int64_t per_half = 2 * half.q_outer * half.inner_size();
    parallel_balanced(
        static_cast<int64_t>(group_starts.size()) - 1, kTtGrain,
        [&](int64_t i) { return group_starts[i] * per_half; },
        [&](int64_t begin, int64_t end) {
          const Floats scratch = new_floats(tt_scratch_floats(half, batch_.shape.dim()));
          tt_kernels().contract(rights_.cores, grads,
                                right_grads_.get() + group_starts[begin] * half.value_size(),
                                scratch.get(), group_starts[begin], group_starts[end]);
        });
    const OuterRowSums sums(rows, half.outer_size(), 0, batch_.num_rights,
                            outer_grads_by_half.get(), outer.get());
    parallel_balanced(
        sums.num_rows(), kTtGrain, [&](int64_t row) { return sums.cost(row); },
        [&](int64_t begin, int64_t end) { sums.run(begin, end); });
    outer_core->rows = rows.outer_rows;
    outer_core->values = new_floats(num_outer * outer_core->width);
    inner_core->rows = rows.inner_rows;
    inner_core->width = half.inner_size();
    inner_core->values = new_floats(num_inner * inner_core->width);
    tt_reverse({.from = outer.get(),
                .to = outer_core->values.get(),
                .a = half.q_outer,
                .q = half.inner_rank,
                .b = 1},
               num_outer);
    tt_reverse({.from = inner.get(),
                .to = inner_core->values.get(),
                .a = half.inner_rank,
                .q = half.q_inner,
                .b = half.rank},
               num_inner);
  }

 private:
  // Compute the gradients of the inner core, or apply step_ to it, and the gradients of outer rows
  // per half, for left halves [begin, end), which are a wave. Expand the values that are not saved.
  void compute_left_grads(const TtHalfGrads& grads, int64_t begin, int64_t end) {
    const TtLeftGradsArgs args{.left = batch_.left_cores(),
                               .right_columns = batch_.right.columns(),
                               .right_values = rights_.values.get(),
                               .left_segments = batch_.plan.left_segments,
                               .row_rights = batch_.plan.row_rights,
                               .first_right = batch_.first_right,
                               .row_grads = row_grads_,
                               .row_stride = row_stride_,
                               .grads = grads};
    std::vector<int64_t> group_starts;
    if (batch_.left.is_pair) {
      group_starts = inner_row_groups(args.left, begin, end);
    } else {
      for (int64_t u = begin; u <= end; ++u) group_starts.push_back(u);
    }
    const int64_t cost_before = batch_.cost(begin);
    parallel_balanced(
        static_cast<int64_t>(group_starts.size()) - 1, kTtGrain,
        [&](int64_t i) { return batch_.cost(group_starts[i]) - cost_before; },
        [&](int64_t first, int64_t last) {
          const Floats scratch = batch_.new_scratch();
          const int64_t from = group_starts[first], to = group_starts[last];
          const int64_t first_unsaved = std::max(from, left_values_.num_saved);
          if (batch_.left.is_pair && first_unsaved < to) {
            float* values = expanded_.get() + (first_unsaved - begin) * left_values_.size;
            tt_kernels().expand(args.left, values, scratch.get(), first_unsaved, to);
          }
          if (step_ == nullptr) return tt_kernels().write_left_grads(args, scratch.get(), from, to);
          const int64_t width = batch_.left.inner_size();
          const int64_t max_rows = std::max<int64_t>(kStepFloats / width, 1);
          const Floats inner_grads = new_floats((max_rows + kMatrixScratchRows) * width);
          TtLeftGradsArgs step_args = args;
          step_args.grads.inner_grads = inner_grads.get();
          step_args.step = {step_->update, step_->args(nullptr, width, step_rows_.data()), max_rows,
                            inner_grads.get() + max_rows * width};
          tt_kernels().write_left_grads(step_args, scratch.get(), from, to);
        });
  }

  // Add the rows of the left halves below `end` to the gradients of right halves, except rows that
  // an earlier call added. Also run `sums`, if it is not null, in the same parallel region. If
  // is_single_threaded_, take the rows in their order: see add_right_grads_by_row.
  void add_right_grads(int64_t end, const OuterRowSums* sums) {
    const TtPlan& plan = batch_.plan;
    const TtRightGradsArgs args{.left_values = left_values_,
                                .left_columns = batch_.left.columns(),
                                .right_columns = batch_.right.columns(),
                                .rank = batch_.left.rank,
                                .right_segments = plan.right_segments,
                                .right_rows = plan.right_rows,
                                .row_lefts = plan.row_lefts,
                                .row_rights = plan.row_rights,
                                .first_left = batch_.first_left,
                                .first_right = batch_.first_right,
                                .cursors = cursors_.data(),
                                .row_end = plan.left_segments[end],
                                .row_grads = row_grads_,
                                .row_stride = row_stride_,
                                .grads = right_grads_.get()};
    const int64_t num_rights = batch_.num_rights;
    const int64_t num_outer_rows = sums != nullptr ? sums->num_rows() : 0;
    if (is_single_threaded_) {
      tt_kernels().add_right_grads_by_row(args, added_rows_end_, args.row_end);
      added_rows_end_ = args.row_end;
      if (sums != nullptr) sums->run(0, num_outer_rows);
      return;
    }
    const int64_t per_row = int64_t{1} * batch_.shape.dim() * batch_.left.rank;
    const auto cost = [&](int64_t i) {
      const int64_t v = std::min(i, num_rights);
      return (plan.right_segments[v] - batch_.first_row) * per_row +
             (i > num_rights ? sums->cost(i - num_rights) : 0);
    };
    parallel_balanced(num_rights + num_outer_rows, kTtGrain, cost,
                      [&](int64_t first, int64_t last) {
                        if (first < num_rights)
                          tt_kernels().add_right_grads(args, first, std::min(last, num_rights));
                        if (last > num_rights)
                          sums->run(std::max(first, num_rights) - num_rights, last - num_rights);
                      });
  }

  const TtTableBatch& batch_;
  const TtRightHalves& rights_;
  const float* row_grads_;
  int64_t row_stride_;
  bool is_single_threaded_;
  int64_t added_rows_end_;  // if is_single_threaded_: end of the rows that add_right_grads added
  Floats right_grads_;
  Floats expanded_;                 // values of the left halves of a wave that were not saved
  const CoreStep* step_ = nullptr;  // the step of the inner core, if waves apply it
  std::vector<int32_t> step_rows_;  // row of the inner core at each position, for step_
  std::vector<int32_t> cursors_;    // TtRightGradsArgs::cursors
  TtValues left_values_;
};

// The checked arguments of an op that computes the gradients of cores.
struct GradInputs {
  const TtTables& tables;
  TtPlan plan;
  const Tensor& left_values;
  const Tensor row_grads;  // contiguous

  GradInputs(const char* op, const TtTables& op_tables, const std::vector<Tensor>& plan_tensors,
             const Tensor& op_left_values, const Tensor& op_row_grads)
      : tables(op_tables),
        plan(tt_plan_of(op, plan_tensors, tables.size())),
        left_values(op_left_values),
        row_grads(torch::stable::contiguous(op_row_grads)) {
    check_plan_contents(op, plan, tables);
    check_core_grad_inputs(op, tables, plan.row_starts()[tables.size()], left_values, row_grads);
  }

  // Return the gradients of the cores of a table that has rows in the batch. If `inner_step`, the
  // step of the second core, is not null, this function may apply it; the second core then has no
  // rows in the result.
  std::vector<CoreGrads> grads_of(const TtTableBatch& batch, const CoreStep* inner_step,
                                  bool is_single_threaded) const {
    const TtRightHalves rights(batch);
    TtTableBackward backward(batch, rights, LeftValues(left_values, batch),
                             row_grads.const_data_ptr<float>(), tables.max_dim, is_single_threaded);
    std::vector<CoreGrads> grads(batch.shape.num_cores);
    const size_t last = grads.size() - 1;
    backward.compute_left_half(&grads[0], &grads[1], inner_step);
    backward.compute_right_half(&grads[last], &grads[last - 1]);
    for (size_t k = 0; k <= last; ++k) {
      for (int32_t& row : grads[k].rows) row = static_cast<int32_t>(batch.core_row(k, row));
    }
    return grads;
  }
};

// Return the gradients of all cores, float32 of the cores' shapes, zeros for rows that the batch
// does not use. `left_values` must be what tt_rows returned for this batch and these cores, with
// any num_saved; values are not checked. `row_grads`, float32 [distinct rows or more, dim of the
// widest table], is the gradient of the rows of tt_rows. The lists are the arguments of TtTables.
std::vector<Tensor> tt_core_grads(std::vector<Tensor> cores, std::vector<Tensor> plan_tensors,
                                  const Tensor& left_values, const Tensor& row_grads,
                                  std::vector<int64_t> row_factors,
                                  std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                  int64_t matmul_precision) {
  const char* op = "tt_core_grads";
  parse_matmul_precision(op, matmul_precision);
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  const GradInputs inputs(op, tables, plan_tensors, left_values, row_grads);
  std::vector<Tensor> grads;
  for (const Tensor& core : cores) {
    grads.push_back(allocate_zeros(core, {core.size(0), core.size(1)}, ScalarType::Float));
  }
  const std::vector<TtTableBatch> batches = used_tables(inputs.tables, inputs.plan);
  for_tables(batches, [&](const TtTableBatch& batch, bool is_single_threaded) {
    const std::vector<CoreGrads> grads_of_cores =
        inputs.grads_of(batch, nullptr, is_single_threaded);
    for (size_t k = 0; k < grads_of_cores.size(); ++k) {
      const CoreGrads& core = grads_of_cores[k];
      float* out = grads[batch.first_core + k].mutable_data_ptr<float>();
      for (int64_t i = 0; i < core.size(); ++i) {
        std::copy_n(core.values.get() + i * core.width, core.width,
                    out + core.rows[i] * core.width);
      }
    }
  });
  return grads;
}

}  // namespace

// The contract is in tt/entries.h.
void tt_update_rows(const char* op, const TtTables& tables, const std::vector<Tensor>& cores,
                    const std::vector<Tensor>& states, const Tensor& hyper, int64_t optimizer,
                    const std::vector<Tensor>& plan_tensors, const Tensor& left_values,
                    const Tensor& row_grads) {
  const GradInputs inputs(op, tables, plan_tensors, left_values, row_grads);
  const std::vector<std::vector<Tensor>> core_states = states_by_core(op, states, cores.size());
  std::vector<TierMemory> tiers;  // the memory of the weights and states of each core
  for (size_t k = 0; k < cores.size(); ++k) {
    tiers.push_back(check_matrix_states(op, optimizer, cores[k], core_states[k], hyper));
  }
  const UpdateRowsFn update = tt_update_table().find(static_cast<int>(optimizer));
  std::vector<int64_t> first_rows = {0};  // first row of each core among the rows of all cores
  for (const Tensor& core : cores) first_rows.push_back(first_rows.back() + core.size(0));
  const std::vector<TtTableBatch> batches = used_tables(inputs.tables, inputs.plan);
  for_tables(batches, [&](const TtTableBatch& batch, bool is_single_threaded) {
    const auto step_of = [&](size_t k) {
      const size_t core = batch.first_core + k;  // among the cores of all tables
      return CoreStep{update, tiers[core], hyper.const_data_ptr<double>(), first_rows[core]};
    };
    const CoreStep inner_step = step_of(1);
    const std::vector<CoreGrads> grads_of_cores =
        inputs.grads_of(batch, &inner_step, is_single_threaded);
    for (size_t k = 0; k < grads_of_cores.size(); ++k) {
      const CoreGrads& core = grads_of_cores[k];
      const UpdateRowsArgs args = step_of(k).args(core.values.get(), core.width, core.rows.data());
      parallel_balanced(
          core.size(), kUpdateGrain, [&](int64_t i) { return i * core.width; },
          [&](int64_t begin, int64_t end) {
            const Floats scratch = new_floats(kMatrixScratchRows * core.width);
            update(args, scratch.get(), begin, end);
          });
    }
  });
}

namespace {

// Apply the optimizer, in place, to the core rows whose gradient is not zero throughout, as
// `update_rows_` does with the gradients of tt_core_grads. The caller must have counted the step in
// `hyper`; this is not checked. `states` has all states of the first core, then all states of the
// second core, and so on. The other arguments are those of tt_core_grads.
void tt_update_(std::vector<Tensor> cores, std::vector<Tensor> states, const Tensor& hyper,
                int64_t optimizer, std::vector<Tensor> plan_tensors, const Tensor& left_values,
                const Tensor& row_grads, std::vector<int64_t> row_factors,
                std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                int64_t matmul_precision) {
  const char* op = "tt_update_";
  parse_matmul_precision(op, matmul_precision);
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  tt_update_rows(op, tables, cores, states, hyper, optimizer, plan_tensors, left_values, row_grads);
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tt_rows);
  EMB_IMPL(m, emb, tt_core_grads);
  EMB_IMPL(m, emb, tt_update_);
}
