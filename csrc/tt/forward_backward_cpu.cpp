// `tt_rows`, `tt_core_grads` and `tt_update_` on the CPU: compute rows from cores, compute the
// gradients of cores from the gradients of rows, and update cores.
//
// To *expand* a half is to compute its value from its cores. The right halves of a batch are few
// and are all expanded first; left halves are expanded when they are needed. Only core rows that
// the batch uses are read, and only these have gradients and are updated. Tables are processed one
// after another by all threads, or several at once by a thread each (for_tables). All arithmetic is
// float32, which every `matmul_precision` allows.
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

EMB_SELECT_KERNELS(TtTable, kTtTable, tt_table)
EMB_SELECT_KERNELS(UpdateRowsTable, kUpdateRowsTable, tt_update_table)

namespace {

// Grains of parallel_balanced: in multiplications, and in elements for updates and for reversals.
constexpr int64_t kTtGrain = 1 << 21;
constexpr int64_t kUpdateGrain = 1 << 15, kReverseGrain = 1 << 17;
// The grain of parallel_balanced over whole tables, and the work of a row apart from its product,
// both in multiplications.
constexpr int64_t kTableGrain = 1 << 19, kRowWork = 256;
// Tables get a thread each only if the work of the largest is at most this many percent of a
// thread's share (not measured).
constexpr int64_t kMaxSharePercent = 150;

// Reverse the axes of `rows` rows, in parallel.
void tt_reverse(const TtReverseArgs& args, int64_t rows) {
  const int64_t size = args.a * args.q * args.b;
  parallel_balanced(
      rows, kReverseGrain, [&](int64_t row) { return row * size; },
      [&](int64_t begin, int64_t end) { tt_table().reverse(args, begin, end); });
}

// Float copies of the core rows that a batch uses, for cores stored in 16 bits.
struct UsedCores {
  std::vector<int32_t> rows[kMaxCores];  // the rows of each core that are used, ascending
  Floats values[kMaxCores];              // copies of these rows
  std::vector<int32_t> lefts, rights;    // ids of the halves in a table of only these rows
};

// One table of a batch, and its part of the plan. `plan` points to the table's first left and right
// half; numbers of rows and halves in it count those of all tables, so first_row, first_left and
// first_right must be subtracted. For 16-bit cores the table is replaced by a smaller one of
// float32 copies of the core rows that the batch uses. Halves keep their order, so that all results
// have the bits of float32 cores of equal values.
struct TtTableBatch {
  TtShape shape;
  int64_t first_core;  // number of the first core in the list of the cores of all tables
  TtPlan plan;
  int64_t first_row, first_left, first_right;
  int64_t num_rows, num_lefts, num_rights;  // distinct rows and halves of the table
  int64_t first_left_id, first_right_id;
  TtHalf left, right;
  // The cores, or the copies in `used`; empty for 16-bit cores of which the batch has no row.
  std::vector<const float*> cores;
  UsedCores used;  // empty for float32 cores

  TtTableBatch(const TtTables& tables, const TtPlan& all, int64_t t)
      : shape(tables.shapes[t]),
        first_core(tables.first_cores[t]),
        plan(all),
        first_row(all.row_starts()[t]),
        first_left(all.left_starts()[t]),
        first_right(all.right_starts()[t]),
        num_rows(all.row_starts()[t + 1] - first_row),
        num_lefts(all.left_starts()[t + 1] - first_left),
        num_rights(all.right_starts()[t + 1] - first_right),
        first_left_id(tables.first_lefts[t]),
        first_right_id(tables.first_rights[t]),
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

  // Return the row of core k of the whole table that is row `row` of cores[k].
  int64_t core_row(int64_t k, int64_t row) const {
    return used.rows[k].empty() ? row : used.rows[k][row];
  }

  TtHalfCores left_cores() const {
    return {left, cores[0], cores[1], plan.lefts, first_left_id, false};
  }

  // Return the number of multiplications for the left halves [0, u) and their rows.
  int64_t cost(int64_t u) const {
    const int64_t per_left = left.is_pair ? left.q_outer * left.inner_size() : 0;
    return u * per_left + (plan.left_segments[u] - first_row) * shape.dim() * left.rank;
  }

  Floats scratch() const { return new_floats(tt_scratch_size(left, shape.dim())); }

 private:
  void widen(const std::vector<Tensor>& narrow, Dtype type);
};

// Replace the table by one of float32 copies of the core rows that the batch uses.
void TtTableBatch::widen(const std::vector<Tensor>& narrow, Dtype type) {
  const int last = shape.cores - 1;
  used.lefts = compact_ids({left, nullptr, nullptr, plan.lefts, first_left_id, false}, num_lefts,
                           &used.rows[0], &used.rows[1]);
  used.rights = compact_ids({right, nullptr, nullptr, plan.rights, first_right_id, true},
                            num_rights, &used.rows[last], &used.rows[last - 1]);
  for (int k = 0; k <= last; ++k) {
    const auto rows = static_cast<int64_t>(used.rows[k].size());
    const int64_t width = narrow[k].size(1);
    used.values[k] = new_floats(rows * width);
    const WidenRowsArgs args{narrow[k].const_data_ptr(), type, used.rows[k].data(), width,
                             used.values[k].get()};
    parallel_balanced(
        rows, kUpdateGrain, [&](int64_t row) { return row * width; },
        [&](int64_t begin, int64_t end) { tt_update_table().widen(args, begin, end); });
    shape.p[k] = rows;
    cores.push_back(used.values[k].get());
  }
  left = shape.left();
  right = shape.right();
  plan.lefts = used.lefts.data();
  plan.rights = used.rights.data();
  first_left_id = first_right_id = 0;
}

// The right halves of a table of a batch, expanded. Refers to `batch`, which must outlive it.
struct TtRights {
  std::optional<PairRows> rows;           // of a pair: the core rows that are used
  Floats mirrored_outer, mirrored_inner;  // these rows with their axes reversed
  Floats values;                          // [V][columns, rank]
  TtHalfCores cores;

  explicit TtRights(const TtTableBatch& batch)
      : values(new_floats(batch.num_rights * batch.right.value_size())),
        cores{batch.right, nullptr, nullptr, batch.plan.rights, batch.first_right_id, true} {
    const TtHalf& half = batch.right;
    const int last = batch.shape.cores - 1;
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
    rows.emplace(cores, batch.num_rights);
    mirrored_outer = new_floats(rows->num_outer() * half.outer_size());
    mirrored_inner = new_floats(rows->num_inner() * half.inner_size());
    tt_reverse({.from = batch.cores[last],
                .to = mirrored_outer.get(),
                .ids = rows->outer.data(),
                .a = half.inner_rank,
                .q = half.q_outer,
                .b = 1},
               rows->num_outer());
    tt_reverse({.from = batch.cores[last - 1],
                .to = mirrored_inner.get(),
                .ids = rows->inner.data(),
                .a = half.rank,
                .q = half.q_inner,
                .b = half.inner_rank},
               rows->num_inner());
    cores.outer = mirrored_outer.get();
    cores.inner = mirrored_inner.get();
    cores.outer_positions = rows->outer_positions.data();
    cores.inner_positions = rows->inner_positions.data();
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

// The output of `tt_rows`: the rows of all tables, and the values of their first left halves.
struct TtRowsOutput {
  float *rows, *saved;  // [capacity][stride], [num_saved][value_stride]
  int64_t stride, num_saved, value_stride;

  // Return where the values of a table are saved, one after the other without gaps, and how many
  // are.
  float* saved_of(const TtTableBatch& batch) const {
    return saved + batch.first_left * value_stride;
  }
  int64_t num_saved_of(const TtTableBatch& batch) const {
    return std::clamp<int64_t>(num_saved - batch.first_left, 0, batch.num_lefts);
  }
};

// Write the distinct rows of one table, in parallel; each left half is expanded once.
void make_rows(const TtTableBatch& batch, const TtRowsOutput& out) {
  const TtHalf &left = batch.left, &right = batch.right;
  const TtRights rights(batch);
  const int64_t num_saved = left.is_pair ? out.num_saved_of(batch) : 0;
  TtRowsArgs args{.left = batch.left_cores(),
                  .right_columns = right.columns(),
                  .right = rights.values.get(),
                  .right_natural = {.unsaved = batch.cores.back(),
                                    .ids = batch.plan.rights,
                                    .first_id = batch.first_right_id,
                                    .size = right.value_size()},
                  .left_segments = batch.plan.left_segments,
                  .row_rights = batch.plan.row_rights,
                  .first_right = batch.first_right,
                  .saved = num_saved > 0 ? out.saved_of(batch) : nullptr,
                  .num_saved = num_saved,
                  .rows = out.rows,
                  .row_stride = out.stride};
  Floats natural;
  if (right.is_pair && args.lanes_along_right()) {
    natural = new_floats(batch.num_rights * right.value_size());
    tt_reverse({.from = rights.values.get(),
                .to = natural.get(),
                .a = right.columns(),
                .q = 1,
                .b = right.rank},
               batch.num_rights);
    args.right_natural = {
        .saved = natural.get(), .num_saved = batch.num_rights, .size = right.value_size()};
  }
  parallel_balanced(
      batch.num_lefts, kTtGrain, [&](int64_t u) { return batch.cost(u); },
      [&](int64_t begin, int64_t end) {
        const Floats scratch = batch.scratch();
        tt_table().rows(args, scratch.get(), begin, end);
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

// Call body(table, is_alone) for each table: for several tables at once, on one thread each
// (is_alone), if that keeps all threads busy; otherwise for one table after another, each on all
// threads. With a single thread is_alone is true.
template <class Body>
void for_tables(const std::vector<TtTableBatch>& tables, const Body& body) {
  std::vector<int64_t> work = {0};  // of the tables before each, in multiplications
  int64_t max_work = 0;
  for (const TtTableBatch& table : tables) {
    const int64_t table_work = table.cost(table.num_lefts) + kRowWork * table.num_rows;
    work.push_back(work.back() + table_work);
    max_work = std::max(max_work, table_work);
  }
  const auto count = static_cast<int64_t>(tables.size());
  if (100 * max_work * num_threads() > kMaxSharePercent * work.back()) {
    for (const TtTableBatch& table : tables) body(table, num_threads() == 1);
    return;
  }
  parallel_balanced(
      count, kTableGrain, [&](int64_t t) { return work[t]; },
      [&](int64_t begin, int64_t end) {
        for (int64_t t = begin; t < end; ++t) body(tables[t], true);
      });
}

}  // namespace

// The contract is in tt/entries.h.
void tt_make_rows(const TtTables& tables, const TtPlan& plan, const Tensor& prefixes, float* rows) {
  const TtRowsOutput out{rows, prefixes.mutable_data_ptr<float>(), tables.dim, prefixes.size(0),
                         tables.value_size};
  for_tables(used_tables(tables, plan),
             [&](const TtTableBatch& batch, bool) { make_rows(batch, out); });
}

namespace {

// Return the distinct rows of all tables in key order, float32 [L, dim of the widest table], and
// the values of the first num_saved left halves, float32 [num_saved, value_size]. Rows after the
// last one, columns beyond the dim of a table, and values of halves that are no pair or do not
// exist are unspecified. `plan_tensors` must be the result of tt_plan, and their contents are
// checked; the lists are the arguments of TtTables.
std::tuple<Tensor, Tensor> tt_rows(std::vector<Tensor> cores, std::vector<Tensor> plan_tensors,
                                   std::vector<int64_t> row_factors,
                                   std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                   int64_t num_saved, int64_t matmul_precision) {
  const char* op = "tt_rows";
  parse_matmul_precision(op, matmul_precision);
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  const TtPlan plan = tt_plan_of(op, plan_tensors, tables.size());
  check_plan_contents(op, plan, tables);
  STD_TORCH_CHECK(num_saved >= 0, op, ": num_saved must be >= 0, got ", num_saved);
  Tensor rows = allocate_output(cores[0], {plan.capacity, tables.dim}, ScalarType::Float);
  const Tensor prefixes =
      allocate_output(cores[0], {num_saved, tables.value_size}, ScalarType::Float);
  tt_make_rows(tables, plan, prefixes, rows.mutable_data_ptr<float>());
  return {rows, prefixes};
}

// The backward pass. The left halves of pairs are processed in waves, so that the memory for values
// that are expanded again does not grow with the batch: first those whose values the forward pass
// saved, then the others, whose values the wave expands again. A wave has two parallel regions. The
// first computes the gradient of every inner row of the wave, and one gradient of an outer row per
// half. The second adds the wave's contributions to the gradients of right halves and of outer
// rows. In an update, if no inner row has more halves than a wave, the optimizer runs inside the
// first region, on inner rows whose gradients are complete: no other half reads these rows. Each
// sum is computed by one thread in a fixed order, whatever the number of threads and the size of
// the waves.

// Floats of left values in a wave that expands them again, if all threads run the wave, and if one
// thread runs it alone. A thread alone does not wait for others between waves, so its waves can be
// small enough for its second-level cache.
constexpr int64_t kWaveFloats = 1 << 20, kWaveFloatsAlone = 1 << 18;
constexpr int64_t kMinWave = 4 * kTtBlock;  // minimum number of left halves in a wave

// The halves [begin, end) sorted by outer row, to sum their `outer_values`, [halves, size], into
// the gradients of the outer rows of the batch, `grads` [outer rows, size].
class OuterRowSums {
 public:
  OuterRowSums(const PairRows& rows, int64_t size, int64_t begin, int64_t end,
               const float* outer_values, float* grads)
      : num_rows_(rows.num_outer()), starts_(num_rows_ + 1, 0), members_(end - begin) {
    const std::vector<int32_t>& row_of_half = rows.outer_positions;
    for (int64_t u = begin; u < end; ++u) ++starts_[row_of_half[u] + 1];
    for (int64_t i = 0; i < num_rows_; ++i) starts_[i + 1] += starts_[i];
    std::vector<int32_t> cursor(starts_.begin(), starts_.end() - 1);
    for (int64_t u = begin; u < end; ++u) {
      members_[cursor[row_of_half[u]]++] = static_cast<int32_t>(u - begin);
    }
    args_ = {outer_values, size, starts_.data(), members_.data(), grads};
  }

  int64_t num_rows() const { return num_rows_; }
  int64_t cost(int64_t row) const { return (row + starts_[row]) * args_.size; }
  void run(int64_t begin, int64_t end) const { tt_table().sum_outer(args_, begin, end); }

 private:
  int64_t num_rows_;
  std::vector<int32_t> starts_, members_;
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

// Floats of gradients of inner rows that are collected before the optimizer is applied to them: few
// enough to be still in the first two levels of the cache.
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
  // `saved` has the values of the first `num_saved` left halves of the table; `row_grads` has the
  // gradients of the rows of all tables, `stride` floats each. `is_alone`: run on this thread only,
  // because other threads process other tables. Refers to all arguments.
  TtTableBackward(const TtTableBatch& batch, const TtRights& rights, const float* saved,
                  int64_t num_saved, const float* row_grads, int64_t stride, bool is_alone)
      : batch_(batch),
        rights_(rights),
        row_grads_(row_grads),
        stride_(stride),
        is_alone_(is_alone),
        rows_done_(batch.first_row),
        right_grads_(new_floats(batch.num_rights * batch.right.value_size())),
        cursors_(batch.plan.right_segments, batch.plan.right_segments + batch.num_rights),
        left_{.saved = saved,
              .num_saved = batch.left.is_pair ? num_saved : 0,
              .ids = batch.plan.lefts,
              .first_id = batch.first_left_id,
              .size = batch.left.value_size()} {}

  // Compute the gradients of the core or cores of the left half, and the gradients of the values of
  // right halves. `inner` is not touched if the half is no pair. If `step` is not null, the inner
  // core may be updated at once; `inner` then gets no rows.
  void compute_left_half(CoreGrads* outer, CoreGrads* inner, const CoreStep* step) {
    const TtHalf& left = batch_.left;
    const int64_t lefts = batch_.num_lefts;
    outer->width = left.outer_size();
    if (!left.is_pair) {
      outer->rows = core_rows(batch_.plan.lefts, lefts, batch_.first_left_id);
      outer->values = new_floats(lefts * outer->width);
      left_.unsaved = batch_.cores[0];
      add_left_grads({nullptr, nullptr, outer->values.get(), 0}, 0, lefts);
      return add_right_grads(lefts, nullptr);
    }
    left_.ids = nullptr;
    const PairRows rows(batch_.left_cores(), lefts);
    outer->rows = rows.outer;
    outer->values = new_floats(rows.num_outer() * outer->width);
    std::fill_n(outer->values.get(), rows.num_outer() * outer->width, 0.0f);
    inner->width = left.inner_size();
    const int64_t num_saved = left_.num_saved;
    const int64_t max_wave = (is_alone_ ? kWaveFloatsAlone : kWaveFloats) / left_.size;  // halves
    const int64_t wave = std::max(std::min(max_wave, lefts), kMinWave);
    // Saved values need no scratch, so that several threads process them all in one wave.
    const int64_t saved_wave = is_alone_ ? wave : std::max(wave, num_saved);
    // If no inner row has more halves than a wave, waves end with an inner row. Then the gradient
    // of every inner row is complete within a wave, and the step is applied there.
    const bool is_stepped = step != nullptr && rows.max_halves_of_inner() <= wave;
    const auto wave_end = [&](int64_t max_end) {
      return is_stepped ? rows.first_of_inner(max_end) : max_end;
    };
    if (is_stepped) {
      step_ = step;
      for (const int32_t row : rows.inner) {
        step_rows_.push_back(static_cast<int32_t>(batch_.core_row(1, row)));
      }
    } else {
      inner->rows = rows.inner;
      inner->values = new_floats(rows.num_inner() * inner->width);
    }
    const int64_t saved_end = wave_end(num_saved);
    recomputed_ = new_floats(num_saved < lefts ? wave * left_.size : 0);
    const Floats outer_values = new_floats(saved_wave * left.outer_size());
    left_.unsaved = recomputed_.get();
    for (int64_t begin = 0, end; begin < lefts; begin = end) {
      end = wave_end(begin < saved_end ? std::min(begin + saved_wave, saved_end)
                                       : std::min(begin + wave, lefts));
      left_.first_unsaved = begin;
      add_left_grads({inner->values.get(), rows.inner_positions.data(), outer_values.get(), begin},
                     begin, end);
      const OuterRowSums sums(rows, outer->width, begin, end, outer_values.get(),
                              outer->values.get());
      add_right_grads(end, &sums);
    }
  }

  // Compute the gradients of the core or cores of the right half. `inner_core` is not touched if
  // the half is no pair.
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
    const PairRows& rows = *rights_.rows;
    const int64_t num_outer = rows.num_outer(), num_inner = rows.num_inner();
    const Floats outer = new_floats(num_outer * half.outer_size());
    const Floats inner = new_floats(num_inner * half.inner_size());
    const Floats outer_values = new_floats(batch_.num_rights * half.outer_size());
    std::fill_n(outer.get(), num_outer * half.outer_size(), 0.0f);
    const std::vector<int64_t> groups = inner_groups(rights_.cores, 0, batch_.num_rights);
    const TtHalfGrads grads{inner.get(), rows.inner_positions.data(), outer_values.get(), 0};
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
    const OuterRowSums sums(rows, half.outer_size(), 0, batch_.num_rights, outer_values.get(),
                            outer.get());
    parallel_balanced(
        sums.num_rows(), kTtGrain, [&](int64_t row) { return sums.cost(row); },
        [&](int64_t begin, int64_t end) { sums.run(begin, end); });
    outer_core->rows = rows.outer;
    outer_core->values = new_floats(num_outer * outer_core->width);
    inner_core->rows = rows.inner;
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
  // Compute the gradients of the inner core, and the gradients of outer rows per half, for left
  // halves [begin, end).
  void add_left_grads(const TtHalfGrads& grads, int64_t begin, int64_t end) {
    const TtLeftGradsArgs args{.left = batch_.left_cores(),
                               .right_columns = batch_.right.columns(),
                               .right = rights_.values.get(),
                               .left_segments = batch_.plan.left_segments,
                               .row_rights = batch_.plan.row_rights,
                               .first_right = batch_.first_right,
                               .row_grads = row_grads_,
                               .row_stride = stride_,
                               .grads = grads};
    std::vector<int64_t> groups;
    if (batch_.left.is_pair) {
      groups = inner_groups(args.left, begin, end);
    } else {
      for (int64_t u = begin; u <= end; ++u) groups.push_back(u);
    }
    const int64_t base = batch_.cost(begin);
    parallel_balanced(
        static_cast<int64_t>(groups.size()) - 1, kTtGrain,
        [&](int64_t i) { return batch_.cost(groups[i]) - base; },
        [&](int64_t first, int64_t last) {
          const Floats scratch = batch_.scratch();
          const int64_t from = groups[first], to = groups[last];
          const int64_t unsaved = std::max(from, left_.num_saved);
          if (batch_.left.is_pair && unsaved < to) {
            float* values = recomputed_.get() + (unsaved - begin) * left_.size;
            tt_table().expand(args.left, values, scratch.get(), unsaved, to);
          }
          if (step_ == nullptr) return tt_table().left_grads(args, scratch.get(), from, to);
          const int64_t width = batch_.left.inner_size();
          const int64_t capacity = std::max<int64_t>(kStepFloats / width, 1);
          const Floats inner = new_floats((capacity + kMatrixScratchRows) * width);
          TtLeftGradsArgs stepping = args;
          stepping.grads.inner = inner.get();
          stepping.step = {step_->update, step_->args(nullptr, width, step_rows_.data()), capacity,
                           inner.get() + capacity * width};
          tt_table().left_grads(stepping, scratch.get(), from, to);
        });
  }

  // Add the rows of left halves below `end`, except rows that an earlier call added, to the
  // gradients of right halves. Also run `sums`, if it is not null, in the same parallel region. If
  // is_alone_, this thread takes the rows in their order.
  void add_right_grads(int64_t end, const OuterRowSums* sums) {
    const TtPlan& plan = batch_.plan;
    const TtRightGradsArgs args{.left = left_,
                                .left_columns = batch_.left.columns(),
                                .right_columns = batch_.right.columns(),
                                .rank = batch_.left.rank,
                                .segments = plan.right_segments,
                                .rows = plan.right_rows,
                                .row_lefts = plan.row_lefts,
                                .row_rights = plan.row_rights,
                                .first_left = batch_.first_left,
                                .first_right = batch_.first_right,
                                .cursors = cursors_.data(),
                                .row_end = plan.left_segments[end],
                                .row_grads = row_grads_,
                                .row_stride = stride_,
                                .grads = right_grads_.get()};
    const int64_t rights = batch_.num_rights, outer_rows = sums != nullptr ? sums->num_rows() : 0;
    if (is_alone_) {
      tt_table().right_grads_by_row(args, rows_done_, args.row_end);
      rows_done_ = args.row_end;
      if (sums != nullptr) sums->run(0, outer_rows);
      return;
    }
    const int64_t per_row = int64_t{1} * batch_.shape.dim() * batch_.left.rank;
    const auto cost = [&](int64_t i) {
      const int64_t v = std::min(i, rights);
      return (plan.right_segments[v] - batch_.first_row) * per_row +
             (i > rights ? sums->cost(i - rights) : 0);
    };
    parallel_balanced(rights + outer_rows, kTtGrain, cost, [&](int64_t first, int64_t last) {
      if (first < rights) tt_table().right_grads(args, first, std::min(last, rights));
      if (last > rights) sums->run(std::max(first, rights) - rights, last - rights);
    });
  }

  const TtTableBatch& batch_;
  const TtRights& rights_;
  const float* row_grads_;
  int64_t stride_;
  bool is_alone_;      // on one thread
  int64_t rows_done_;  // rows that add_right_grads has added, if is_alone_
  Floats right_grads_;
  Floats recomputed_;               // values of left halves that the forward pass did not save
  const CoreStep* step_ = nullptr;  // the step of the inner core, if it is updated at once
  std::vector<int32_t> step_rows_;  // row of the inner core at each position
  std::vector<int32_t> cursors_;
  TtValues left_;
};

// The checked arguments of an op that computes the gradients of cores.
struct GradInputs {
  const TtTables& tables;
  TtPlan plan;
  const Tensor& prefixes;
  const Tensor gradient;  // row_grads, contiguous

  GradInputs(const char* op, const TtTables& all, const std::vector<Tensor>& plan_tensors,
             const Tensor& prefixes_in, const Tensor& row_grads)
      : tables(all),
        plan(tt_plan_of(op, plan_tensors, tables.size())),
        prefixes(prefixes_in),
        gradient(torch::stable::contiguous(row_grads)) {
    check_plan_contents(op, plan, tables);
    check_core_grad_inputs(op, tables, plan.row_starts()[tables.size()], prefixes, row_grads);
  }

  // Return the gradients of the cores of a table that has rows in the batch. If `inner_step`, the
  // step of the second core, is not null, that core may have been updated already: then it has no
  // gradients here.
  std::vector<CoreGrads> grads_of(const TtTableBatch& batch, const CoreStep* inner_step,
                                  bool is_alone) const {
    const TtRights rights(batch);
    const TtRowsOutput saved{nullptr, const_cast<float*>(prefixes.const_data_ptr<float>()), 0,
                             prefixes.size(0), tables.value_size};
    const int64_t num_saved = saved.num_saved_of(batch);
    TtTableBackward backward(batch, rights, num_saved > 0 ? saved.saved_of(batch) : nullptr,
                             num_saved, gradient.const_data_ptr<float>(), tables.dim, is_alone);
    std::vector<CoreGrads> grads(batch.shape.cores);
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
// does not use. `prefixes` are the values that tt_rows saved for this batch, `row_grads` is float32
// [rows or more, dim], the gradient of the rows that tt_rows returned.
std::vector<Tensor> tt_core_grads(std::vector<Tensor> cores, std::vector<Tensor> plan_tensors,
                                  const Tensor& prefixes, const Tensor& row_grads,
                                  std::vector<int64_t> row_factors,
                                  std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                  int64_t matmul_precision) {
  const char* op = "tt_core_grads";
  parse_matmul_precision(op, matmul_precision);
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  const GradInputs inputs(op, tables, plan_tensors, prefixes, row_grads);
  std::vector<Tensor> grads;
  for (const Tensor& core : cores) {
    grads.push_back(allocate_zeros(core, {core.size(0), core.size(1)}, ScalarType::Float));
  }
  const std::vector<TtTableBatch> batches = used_tables(inputs.tables, inputs.plan);
  for_tables(batches, [&](const TtTableBatch& batch, bool is_alone) {
    const std::vector<CoreGrads> grads_of_cores = inputs.grads_of(batch, nullptr, is_alone);
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
                    const std::vector<Tensor>& plan_tensors, const Tensor& prefixes,
                    const Tensor& row_grads) {
  const GradInputs inputs(op, tables, plan_tensors, prefixes, row_grads);
  const std::vector<TierMemory> tiers = check_core_states(op, optimizer, cores, states, hyper);
  const UpdateRowsFn update = tt_update_table().find(static_cast<int>(optimizer));
  std::vector<int64_t> first_rows = {0};  // first row of each core among the rows of all cores
  for (const Tensor& core : cores) first_rows.push_back(first_rows.back() + core.size(0));
  const std::vector<TtTableBatch> batches = used_tables(inputs.tables, inputs.plan);
  for_tables(batches, [&](const TtTableBatch& batch, bool is_alone) {
    const auto step_of = [&](size_t k) {
      const size_t core = batch.first_core + k;  // among the cores of all tables
      return CoreStep{update, tiers[core], hyper.const_data_ptr<double>(), first_rows[core]};
    };
    const CoreStep inner_step = step_of(1);
    const std::vector<CoreGrads> grads_of_cores = inputs.grads_of(batch, &inner_step, is_alone);
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
// `hyper`; not checked. `states` are all states of the first core, then all states of the second
// core, and so on.
void tt_update_(std::vector<Tensor> cores, std::vector<Tensor> states, const Tensor& hyper,
                int64_t optimizer, std::vector<Tensor> plan_tensors, const Tensor& prefixes,
                const Tensor& row_grads, std::vector<int64_t> row_factors,
                std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                int64_t matmul_precision) {
  const char* op = "tt_update_";
  parse_matmul_precision(op, matmul_precision);
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  tt_update_rows(op, tables, cores, states, hyper, optimizer, plan_tensors, prefixes, row_grads);
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tt_rows);
  EMB_IMPL(m, emb, tt_core_grads);
  EMB_IMPL(m, emb, tt_update_);
}
