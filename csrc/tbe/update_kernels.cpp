// Backward of table-batched embeddings on one CPU thread: the functions of UpdateKernels
// (tbe/args.h). The gradients of a unique row are summed in registers, then the optimizer reads and
// writes the row once. As in the forward, most of the time is cache misses on random rows, so the
// rows of the next groups are prefetched for writing.
//
// A group is the lookups of one unique row. There are two kernels with the same results. `update`
// locates each row by its first lookup, and works for any tables. `update_by_table` processes the
// groups table by table, which needs less computation per row. It requires args.tables: tables
// without a cache, for which all features agree about the memory.
#include "optim/optimizer_step_cpu.h"
#include "optim/optimizers.h"
#include "tbe/args.h"

namespace emb::EMB_ISA {
namespace {

// The number of lookups at the beginning of a group whose gradients `update` prefetches before it
// sums the group.
constexpr int64_t kFirstGradsAhead = 4;
// Cache lines of gradients in flight while a group is summed.
constexpr int64_t kGradLinesAhead = 32;

// Return the feature of a bag.
EMB_HD int64_t feature_of(const GradArgs& args, int64_t bag) {
  return args.bag_layout != nullptr ? args.bag_layout[bag].feature
                                    : args.bags_per_feature.quotient(static_cast<uint32_t>(bag));
}

// Return the index in args.grad of the first element of the gradient of sorted lookup j.
EMB_HD int64_t grad_offset(const GradArgs& args, int64_t j) {
  if (args.is_unpooled) return args.sorted_lookups[j] * args.grad_stride;
  const int64_t bag = args.sorted_bags[j];
  if (args.bag_layout != nullptr) return args.bag_layout[bag].element;
  const int64_t feature = args.bags_per_feature.quotient(static_cast<uint32_t>(bag));
  return (bag - feature * args.bags_per_feature.value()) * args.grad_stride +
         args.features[feature].column;
}

// Return the factor of the gradient of sorted lookup j: its sample weight (1 without sample
// weights), for MEAN times 1 / length of its bag.
EMB_HD float grad_scale(const GradArgs& args, int64_t j) {
  const float scale = args.bag_scale ? args.bag_scale[args.sorted_bags[j]] : 1.0f;
  return args.sample_weights ? scale * args.sample_weights[args.sorted_lookups[j]] : scale;
}

// Write columns [column, column + kVectors * kLanes) of the sum of the gradients of sorted lookups
// [begin, end), times their factors, to `sum`, which begins with column 0.
template <int kVectors, class G>
EMB_HD void sum_block(const GradArgs& args, int64_t begin, int64_t end, int64_t column,
                      float* sum) {
  constexpr int64_t kBytes = kVectors * kLanes * static_cast<int64_t>(sizeof(G));
  constexpr int64_t kLookupsAhead =
      kGradLinesAhead / ((kBytes + kCacheLineBytes - 1) / kCacheLineBytes);
  Vec sums[kVectors] = {};
  for (int64_t j = begin; j < end; ++j) {
    if (args.prefetches_grads && j + kLookupsAhead < end) {
      const int64_t offset_ahead = grad_offset(args, j + kLookupsAhead) + column;
      prefetch_row<false>(static_cast<const G*>(args.grad) + offset_ahead, kBytes);
    }
    const G* row = static_cast<const G*>(args.grad) + grad_offset(args, j) + column;
    const Vec scale = broadcast(grad_scale(args, j));
    for (int v = 0; v < kVectors; ++v) sums[v] += scale * load(row + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) store(sum + column + v * kLanes, sums[v]);
}

// The SumFn of gradients of dtype G.
template <class G>
void sum_lookups(const GradArgs& args, int64_t begin, int64_t end, int64_t dim, float* sum) {
  int64_t column = 0;
  for (; dim - column >= 8 * kLanes; column += 8 * kLanes) {
    sum_block<8, G>(args, begin, end, column, sum);
  }
  for (; dim - column >= 4 * kLanes; column += 4 * kLanes) {
    sum_block<4, G>(args, begin, end, column, sum);
  }
  for (; dim - column >= 2 * kLanes; column += 2 * kLanes) {
    sum_block<2, G>(args, begin, end, column, sum);
  }
  for (; dim - column >= kLanes; column += kLanes) sum_block<1, G>(args, begin, end, column, sum);
  if (column == dim) return;
  const int remaining = static_cast<int>(dim - column);
  Vec total = {};
  for (int64_t j = begin; j < end; ++j) {
    const G* row = static_cast<const G*>(args.grad) + grad_offset(args, j) + column;
    total += broadcast(grad_scale(args, j)) * load_first(row, remaining);
  }
  store_first(sum + column, total, remaining);
}

// UpdateKernels::segment_sum.
void segment_sum(const UpdateArgs& args, SumFn sum_fn, int64_t group, int64_t dim, float* sum) {
  const int64_t begin = args.grads.segments[group], end = args.grads.segments[group + 1];
  if (end - begin <= kChunkLookups) return sum_fn(args.grads, begin, end, dim, sum);
  int64_t i = 0;  // position of `group` in long_segments.groups
  for (int64_t step = args.long_segments.num_groups; step > 0; step /= 2) {
    while (i + step < args.long_segments.num_groups && args.long_segments.groups[i + step] <= group)
      i += step;
  }
  const float* chunk_sum = args.long_segments.chunk_sums +
                           args.long_segments.first_chunks[i] * args.long_segments.stride;
  for (int64_t d = 0; d < dim; ++d) sum[d] = chunk_sum[d];
  for (int64_t chunk = args.long_segments.first_chunks[i] + 1;
       chunk < args.long_segments.first_chunks[i + 1]; ++chunk) {
    chunk_sum = args.long_segments.chunk_sums + chunk * args.long_segments.stride;
    for (int64_t d = 0; d < dim; ++d) sum[d] += chunk_sum[d];
  }
}

// Prefetch the gradients, `dim` columns each, of the first lookups of a group.
EMB_HD void prefetch_grads(const GradArgs& args, int64_t group, int64_t dim) {
  const int64_t begin = args.segments[group], end = args.segments[group + 1];
  const int64_t stop = end - begin < kFirstGradsAhead ? end : begin + kFirstGradsAhead;
  for (int64_t j = begin; j < stop; ++j) {
    const int64_t offset = grad_offset(args, j) * args.element_size();
    prefetch_row<false>(static_cast<const char*>(args.grad) + offset, dim * args.element_size());
  }
}

// A row during its update by `update`.
struct RowUpdate {
  const TierMemory* tier;  // its memory tier
  RowLocation location;
  int64_t id, dim;          // linear row id, columns
  RowViews views;           // gradient, weights and states as floats
  float sums[kMaxRowSums];  // the optimizer's sums over the row
  RowFactors factors;       // from Opt::begin_row
};

// Set tier, location, id and dim of the row of a group. The features of its lookups must read the
// same table; this uses the feature of the first lookup.
EMB_HD void locate(const UpdateArgs& args, int64_t group, RowUpdate* target) {
  const int64_t bag = args.grads.sorted_bags[args.grads.segments[group]];
  const Feature& feature = args.grads.features[feature_of(args.grads, bag)];
  // tbe_group makes no row outside the table. Row 0 is used instead of one, so that no memory
  // outside the table is written.
  const int64_t row_in_table = args.rows[group] - feature.row_base;
  const int64_t row = row_in_table >= 0 && row_in_table < feature.rows ? row_in_table : 0;
  const int64_t slot = args.row_slots != nullptr ? args.row_slots[group] : -1;
  target->location = locate_update(feature, row, slot, args.tiers[kCacheTier]);
  target->tier = &args.tiers[target->location.tier];
  target->id = feature.row_base + row;
  target->dim = feature.dim;
}

// Prefetch all parts of a row that Opt updates, for writing: weights, element-wise states and
// row-wise states.
template <class Opt>
EMB_HD void prefetch_target(const RowUpdate& target) {
  const auto prefetch_tensor = [&](const void* data, Dtype type) {
    const int64_t size = element_bytes(type);
    prefetch_row<true>(static_cast<const char*>(data) + target.location.element * size,
                       target.dim * size);
  };
  prefetch_tensor(target.tier->weights, target.tier->weight_type);
  for (int s = 0; s < Opt::kSteppedStates; ++s) {
    prefetch_tensor(target.tier->element_states[s], target.tier->state_types[s]);
  }
  for (int s = 0; s < Opt::kRowStates; ++s) {
    prefetch_row<true>(target.tier->row_states[s] + target.location.state_row, 4);
  }
}

// Return the row in `data`, weights or an element-wise state of dtype `type`, as floats: in place,
// or as a copy in `scratch`, [dim], if it is stored in 16 bits.
EMB_HD float* row_as_floats(void* data, Dtype type, const RowUpdate& target, float* scratch) {
  if (type == Dtype::kFloat) return static_cast<float*>(data) + target.location.element;
  widen_row(data, type, target.location.element, target.dim, scratch);
  return scratch;
}

// Store the copy that row_as_floats made, or do nothing for a row in place. `tensor`
// (RoundedTensor) selects the random numbers of stochastic rounding.
EMB_HD void store_copy(const float* values, void* data, Dtype type, const RowUpdate& target,
                       const Rounding& rounding, uint32_t tensor) {
  if (type == Dtype::kFloat) return;
  narrow_row(values, target.dim, data, type, target.location.element, rounding, target.id, tensor);
}

// Set the views of weights and states of a row. `scratch` has room for 1 + kSteppedStates rows of
// floats, since all of them may be stored in 16 bits.
template <class Opt>
EMB_HD void set_views(RowUpdate* target, float* scratch) {
  const TierMemory& tier = *target->tier;
  target->views.weights = row_as_floats(tier.weights, tier.weight_type, *target, scratch);
  if constexpr (Opt::kSteppedStates > 0) {
    scratch += target->dim;
    target->views.state0 =
        row_as_floats(tier.element_states[0], tier.state_types[0], *target, scratch);
  }
  if constexpr (Opt::kSteppedStates > 1) {
    scratch += target->dim;
    target->views.state1 =
        row_as_floats(tier.element_states[1], tier.state_types[1], *target, scratch);
  }
}

// Store the weights and states of an updated row that set_views copied.
template <class Opt>
EMB_HD void store_copies(const RowUpdate& target, const Rounding& rounding) {
  const TierMemory& tier = *target.tier;
  store_copy(target.views.weights, tier.weights, tier.weight_type, target, rounding, kRoundWeights);
  if constexpr (Opt::kSteppedStates > 0) {
    store_copy(target.views.state0, tier.element_states[0], tier.state_types[0], target, rounding,
               kRoundState);
  }
  if constexpr (Opt::kSteppedStates > 1) {
    store_copy(target.views.state1, tier.element_states[1], tier.state_types[1], target, rounding,
               kRoundState + 1);
  }
}

// Update the row-wise states of a row from target->sums, and set target->factors.
template <class Opt>
EMB_HD void begin_target(const Opt& opt, RowUpdate* target) {
  float states[kMaxRowStates];
  for (int s = 0; s < Opt::kRowStates; ++s) {
    states[s] = target->tier->row_states[s][target->location.state_row];
  }
  target->factors = opt.begin_row(states, target->sums, static_cast<float>(target->dim));
  for (int s = 0; s < Opt::kRowStates; ++s) {
    target->tier->row_states[s][target->location.state_row] = states[s];
  }
}

// The UpdateFn for any tables. Rows are processed in batches of kRowBatch: a row-wise optimizer has
// a chain of reduction, square root and division before it can write, and a few independent chains
// take little longer than one. The rows of the next batch are prefetched meanwhile.
template <class Opt>
void update(const UpdateArgs& args, SumFn sum_fn, float* scratch, int64_t max_dim, int64_t begin,
            int64_t end) {
  const Opt opt(args.hyper);
  const WeightDecay decay(args.hyper);
  const Rounding rounding(args.hyper);
  RowUpdate targets[2][kRowBatch];
  const auto prefetch = [&](int64_t base, RowUpdate* batch) {
    const int64_t num_rows = end - base < kRowBatch ? end - base : kRowBatch;
    for (int64_t i = 0; i < num_rows; ++i) {
      locate(args, base + i, &batch[i]);
      if (args.grads.prefetches_grads) prefetch_grads(args.grads, base + i, batch[i].dim);
      prefetch_target<Opt>(batch[i]);
    }
  };
  prefetch(begin, targets[0]);
  for (int64_t base = begin, parity = 0; base < end; base += kRowBatch, parity ^= 1) {
    prefetch(base + kRowBatch, targets[parity ^ 1]);
    RowUpdate* batch = targets[parity];
    const int64_t num_rows = end - base < kRowBatch ? end - base : kRowBatch;
    float* gradient = scratch;
    float* row_copies = scratch + kRowBatch * max_dim;
    for (int64_t i = 0; i < num_rows; ++i) {
      RowUpdate& target = batch[i];
      target.views.gradient = gradient;
      segment_sum(args, sum_fn, base + i, target.dim, gradient);
      set_views<Opt>(&target, row_copies);
      add_penalty(decay, target.dim, target.views);
      row_sums(opt, target.dim, target.views, target.sums);
      gradient += target.dim;
      row_copies += (kScratchRows - 1) * target.dim;
    }
    for (int64_t i = 0; i < num_rows; ++i) begin_target(opt, &batch[i]);
    for (int64_t i = 0; i < num_rows; ++i) {
      decay_row(decay, batch[i].dim, batch[i].views);
      step_row(opt, batch[i].dim, batch[i].factors, batch[i].views);
      store_copies<Opt>(batch[i], rounding);
    }
  }
}

// The update table by table. All rows of a table without a cache have one dim and one memory tier,
// and usually one feature reads the table. So little is left to compute per row.

// Cache lines of rows and states in flight.
constexpr int64_t kLinesAhead = 32;

// The update of the groups of one table. kDim is the table's dim if it is known when compiling,
// else 0. kNarrow says that weights or states of Opt may be stored in 16 bits.
template <class Opt, int kDim, bool kNarrow>
struct TableUpdate {
  const UpdateArgs& args;
  const TableSpan& table;
  const TierMemory& tier;
  Opt opt;
  WeightDecay decay;
  Rounding rounding;
  int64_t groups_ahead;  // groups between the prefetch of a row and its update
  int64_t end;           // end of the range of groups to update
  int64_t grads_ahead;   // lookups between the prefetch of a gradient and its use
  int64_t last_lookup;   // last sorted lookup of the groups
  // If one feature reads the table, in a fixed batch with pooling: the gradient of bag first_bag +
  // b is at `grad + b * stride`. The stride is in bytes. Otherwise `grad` is null.
  const char* grad;
  int64_t stride, first_bag;
  bool is_unscaled;     // gradients have no factors
  bool reads_in_place;  // the gradient of a group of one lookup is read where it is, not copied

  // `span` is the table; the groups of this call end before end_group.
  TableUpdate(const UpdateArgs& args_, const TableSpan& span, int64_t end_group)
      : args(args_),
        table(span),
        tier(args_.tiers[span.tier]),
        opt(args_.hyper),
        decay(args_.hyper),
        rounding(args_.hyper),
        end(end_group) {
    const GradArgs& grads = args.grads;
    constexpr int64_t kMinGroupsAhead = 4, kMinGradsAhead = 2;
    int64_t num_lines = num_lines_of(tier.weight_type);  // of weights, then also of states
    for (int s = 0; s < Opt::kSteppedStates; ++s) num_lines += num_lines_of(tier.state_types[s]);
    const int64_t num_groups = kLinesAhead / num_lines,
                  num_lookups = kGradLinesAhead / num_lines_of(grads.grad_type);
    groups_ahead = num_groups < kMinGroupsAhead ? kMinGroupsAhead : num_groups;
    grads_ahead = num_lookups < kMinGradsAhead ? kMinGradsAhead : num_lookups;
    last_lookup = grads.segments[end] - 1;
    is_unscaled = grads.bag_scale == nullptr && grads.sample_weights == nullptr;
    reads_in_place = is_unscaled && grads.grad_type == Dtype::kFloat && decay.l2 == 0.0f;
    grad = nullptr;
    if (table.feature >= 0 && !grads.is_unpooled && grads.bag_layout == nullptr) {
      first_bag = table.feature * grads.bags_per_feature.value();
      stride = grads.grad_stride * grads.element_size();
      grad = static_cast<const char*>(grads.grad) +
             grads.features[table.feature].column * grads.element_size();
    }
  }

  EMB_HD int64_t dim() const { return kDim > 0 ? kDim : table.dim; }
  // Return the number of cache lines of a row that begins at a line.
  EMB_HD int64_t num_lines_of(Dtype type) const {
    return (dim() * element_bytes(type) + kCacheLineBytes - 1) / kCacheLineBytes;
  }

  // Return the linear row id of a group; the table's first row instead of a row outside the table,
  // which tbe_group does not make.
  EMB_HD int64_t row_of(int64_t group) const {
    const int64_t row = args.rows[group];
    const auto row_in_table = static_cast<uint64_t>(row - table.first_row);
    return row_in_table < static_cast<uint64_t>(table.num_rows) ? row : table.first_row;
  }

  // Return the address of the gradient of sorted lookup j. If one feature reads the table, but the
  // bag is of another one, return the address for the feature's first bag; a result of tbe_group
  // has no such lookup.
  EMB_HD const char* grad_of(int64_t j) const {
    if (grad != nullptr) {
      const int64_t bag = args.grads.sorted_bags[j] - first_bag;
      const bool is_in_feature =
          static_cast<uint64_t>(bag) < static_cast<uint64_t>(args.grads.bags_per_feature.value());
      return grad + (is_in_feature ? bag : 0) * stride;
    }
    const int64_t offset = grad_offset(args.grads, j);
    return static_cast<const char*>(args.grads.grad) + offset * args.grads.element_size();
  }

  // Prefetch weights and states of the row of a group for writing, unless the group is `end` or
  // later.
  EMB_HD void prefetch(int64_t group) const {
    if (group >= end) return;
    const int64_t row = row_of(group), element = table.element_base + row * dim();
    const auto prefetch_tensor = [&](const void* data, Dtype type) {
      const int64_t size = kNarrow ? element_bytes(type) : 4;
      prefetch_row<true>(static_cast<const char*>(data) + element * size, dim() * size);
    };
    prefetch_tensor(tier.weights, tier.weight_type);
    for (int s = 0; s < Opt::kSteppedStates; ++s)
      prefetch_tensor(tier.element_states[s], tier.state_types[s]);
    for (int s = 0; s < Opt::kRowStates; ++s) {
      prefetch_row<true>(tier.row_states[s] + table.state_base + row, 4);
    }
  }

  // Prefetch the gradient of sorted lookup j, which may be of a later group, unless j is after
  // last_lookup.
  EMB_HD void prefetch_grad(int64_t j) const {
    if (args.grads.prefetches_grads && j <= last_lookup) {
      prefetch_row<false>(grad_of(j), dim() * args.grads.element_size());
    }
  }

  // Do what `sum_lookups` does for sorted lookups [begin, stop), for unscaled gradients of kDim
  // floats.
  EMB_HD void sum_unscaled(int64_t begin, int64_t stop, float* sum) const {
    constexpr int kVectors = kDim / kLanes > 0 ? kDim / kLanes : 1;
    Vec sums[kVectors] = {};
    for (int64_t j = begin; j < stop; ++j) {
      prefetch_grad(j + grads_ahead);
      const auto* row = reinterpret_cast<const float*>(grad_of(j));
      for (int v = 0; v < kVectors; ++v) sums[v] += load(row + v * kLanes);
    }
    for (int v = 0; v < kVectors; ++v) store(sum + v * kLanes, sums[v]);
  }

  // Return the gradient, weights and states of a group's row as floats. Weights and states are in
  // place if they are stored as floats. All else is in `scratch`, which has room for kScratchRows
  // rows, except the gradient of one lookup with reads_in_place, which must not be written.
  EMB_HD RowViews make_views(int64_t group, int64_t row, SumFn sum_fn, float* scratch) const {
    const int64_t element = table.element_base + row * dim();
    const int32_t begin = args.grads.segments[group], stop = args.grads.segments[group + 1];
    RowViews views{};
    if (reads_in_place && stop - begin == 1) {
      prefetch_grad(begin + grads_ahead);
      views.gradient = reinterpret_cast<float*>(const_cast<char*>(grad_of(begin)));  // only read
    } else {
      const Dtype type = args.grads.grad_type;
      if (kDim > 0 && is_unscaled && type == Dtype::kFloat && stop - begin <= kChunkLookups) {
        sum_unscaled(begin, stop, scratch);
      } else if (is_unscaled && type != Dtype::kFloat && stop - begin == 1) {
        prefetch_grad(begin + grads_ahead);
        widen_row(grad_of(begin), type, 0, dim(), scratch);
      } else {
        for (int64_t j = begin; j < stop && j < begin + grads_ahead; ++j) {
          prefetch_grad(j + grads_ahead);
        }
        segment_sum(args, sum_fn, group, dim(), scratch);
      }
      views.gradient = scratch;
    }
    const auto row_as_floats = [&](void* data, Dtype type) {
      if (!kNarrow || type == Dtype::kFloat) return static_cast<float*>(data) + element;
      scratch += dim();
      widen_row(data, type, element, dim(), scratch);
      return scratch;
    };
    views.weights = row_as_floats(tier.weights, tier.weight_type);
    if constexpr (Opt::kSteppedStates > 0) {
      views.state0 = row_as_floats(tier.element_states[0], tier.state_types[0]);
    }
    if constexpr (Opt::kSteppedStates > 1) {
      views.state1 = row_as_floats(tier.element_states[1], tier.state_types[1]);
    }
    return views;
  }

  // Store the weights and states that `make_views` copied to scratch.
  EMB_HD void store_copies(int64_t row, const RowViews& views) const {
    if constexpr (!kNarrow) return;
    const int64_t element = table.element_base + row * dim();
    const auto store_copy = [&](const float* values, void* data, Dtype type, uint32_t tensor) {
      if (type == Dtype::kFloat) return;
      narrow_row(values, dim(), data, type, element, rounding, row, tensor);
    };
    store_copy(views.weights, tier.weights, tier.weight_type, kRoundWeights);
    if constexpr (Opt::kSteppedStates > 0) {
      store_copy(views.state0, tier.element_states[0], tier.state_types[0], kRoundState);
    }
    if constexpr (Opt::kSteppedStates > 1) {
      store_copy(views.state1, tier.element_states[1], tier.state_types[1], kRoundState + 1);
    }
  }

  // Update groups [begin, end), at least one.
  void run(SumFn sum_fn, float* scratch, int64_t begin) const {
    for (int64_t group = begin; group < begin + groups_ahead; ++group) prefetch(group);
    for (int64_t j = 0; j < grads_ahead; ++j) prefetch_grad(args.grads.segments[begin] + j);
    for (int64_t group = begin; group < end; ++group) {
      prefetch(group + groups_ahead);
      const int64_t row = row_of(group);
      const RowViews views = make_views(group, row, sum_fn, scratch);
      float sums[kMaxRowSums];
      add_penalty(decay, dim(), views);
      row_sums(opt, dim(), views, sums);
      const RowFactors factors = begin_row(row, sums);
      decay_row(decay, dim(), views);
      step_row(opt, dim(), factors, views);
      store_copies(row, views);
    }
  }

  // Update the row-wise states of a row from its sums, and return its factors.
  EMB_HD RowFactors begin_row(int64_t row, const float* sums) const {
    float states[kMaxRowStates];
    for (int s = 0; s < Opt::kRowStates; ++s)
      states[s] = tier.row_states[s][table.state_base + row];
    const RowFactors factors = opt.begin_row(states, sums, static_cast<float>(dim()));
    for (int s = 0; s < Opt::kRowStates; ++s)
      tier.row_states[s][table.state_base + row] = states[s];
    return factors;
  }
};

// Update groups [begin, end), all of one table, with the TableUpdate for its dim and dtypes.
template <class Opt>
void update_table(const UpdateArgs& args, const TableSpan& table, SumFn sum_fn, float* scratch,
                  int64_t begin, int64_t end) {
  const TierMemory& tier = args.tiers[table.tier];
  bool is_narrow = tier.weight_type != Dtype::kFloat;
  for (int s = 0; s < Opt::kSteppedStates; ++s) {
    is_narrow = is_narrow || tier.state_types[s] != Dtype::kFloat;
  }
  if (is_narrow) {
    return TableUpdate<Opt, 0, true>(args, table, end).run(sum_fn, scratch, begin);
  }
  switch (table.dim) {
    case 16:
      return TableUpdate<Opt, 16, false>(args, table, end).run(sum_fn, scratch, begin);
    case 32:
      return TableUpdate<Opt, 32, false>(args, table, end).run(sum_fn, scratch, begin);
    case 64:
      return TableUpdate<Opt, 64, false>(args, table, end).run(sum_fn, scratch, begin);
    case 128:
      return TableUpdate<Opt, 128, false>(args, table, end).run(sum_fn, scratch, begin);
    default:
      return TableUpdate<Opt, 0, false>(args, table, end).run(sum_fn, scratch, begin);
  }
}

// The UpdateFn for args.tables: update groups [begin, end) table by table. Each group must belong
// to a table, and the groups must follow the order of the tables. Within a table they may have any
// order, as those of hash_insert_batch_ do.
template <class Opt>
void update_by_table(const UpdateArgs& args, SumFn sum_fn, float* scratch, int64_t, int64_t begin,
                     int64_t end) {
  while (begin < end) {
    const int64_t row = args.rows[begin];
    int64_t t = 0;  // the last table that does not begin after the row
    for (int64_t step = args.num_tables; step > 0; step /= 2) {
      while (t + step < args.num_tables && args.tables[t + step].first_row <= row) t += step;
    }
    const TableSpan& table = args.tables[t];
    int64_t low = begin + 1, high = end;  // the first group after the table
    while (low < high) {
      const int64_t middle = low + (high - low) / 2;
      if (args.rows[middle] < table.first_row + table.num_rows) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    update_table<Opt>(args, table, sum_fn, scratch, begin, low);
    begin = low;
  }
}

// Return the instance of update_by_table, or of update, for an optimizer; null if no optimizer has
// this number.
UpdateFn find_update_by_table(int optimizer) {
  UpdateFn kernel = nullptr;
  Optimizers::visit(optimizer,
                    [&](auto tag) { kernel = update_by_table<typename decltype(tag)::type>; });
  return kernel;
}

UpdateFn find_update(int optimizer) {
  UpdateFn kernel = nullptr;
  Optimizers::visit(optimizer, [&](auto tag) { kernel = update<typename decltype(tag)::type>; });
  return kernel;
}

}  // namespace

extern const UpdateKernels kUpdateKernels;
const UpdateKernels kUpdateKernels = {
    .sum = {sum_lookups<float>, sum_lookups<half16>, sum_lookups<bfloat16>},
    .find_update = find_update,
    .find_update_by_table = find_update_by_table,
    .segment_sum = segment_sum,
};

}  // namespace emb::EMB_ISA
