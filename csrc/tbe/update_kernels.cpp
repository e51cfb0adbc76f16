// Backward of table-batched embeddings on one CPU thread: the gradients of a unique row are summed
// in registers, then the optimizer reads and writes the row once. As in the forward the cost is
// cache misses on random rows, so the rows of the next groups are prefetched for writing.
#include "optim/optimizer_step_cpu.h"
#include "optim/optimizers.h"
#include "tbe/args.h"

namespace emb::EMB_ISA {
namespace {

// Lookups of a group whose gradients are prefetched; the hardware prefetches longer groups.
constexpr int64_t kGradsAhead = 4;

// Return the feature of a bag.
EMB_HD int64_t feature_of(const GradArgs& args, int64_t bag) {
  return args.bag_layout != nullptr ? args.bag_layout[bag].feature
                                    : args.by_batch(static_cast<uint32_t>(bag));
}

// Return the first element, relative to `grad`, of the gradient of sorted lookup j.
EMB_HD int64_t grad_offset(const GradArgs& args, int64_t j) {
  if (args.per_lookup) return args.lookups[j] * args.grad_stride;
  const int64_t bag = args.bags[j];
  if (args.bag_layout != nullptr) return args.bag_layout[bag].element;
  const int64_t feature = args.by_batch(static_cast<uint32_t>(bag));
  return (bag - feature * args.batch) * args.grad_stride + args.features[feature].column;
}

EMB_HD float grad_scale(const GradArgs& args, int64_t j) {
  const float scale = args.bag_scale ? args.bag_scale[args.bags[j]] : 1.0f;
  return args.sample_weights ? scale * args.sample_weights[args.lookups[j]] : scale;
}

template <int kVectors, class G>
EMB_HD void sum_block(const GradArgs& args, int64_t begin, int64_t end, int64_t column,
                      float* sum) {
  Vec sums[kVectors] = {};
  for (int64_t j = begin; j < end; ++j) {
    const G* row = static_cast<const G*>(args.grad) + grad_offset(args, j) + column;
    const Vec scale = broadcast(grad_scale(args, j));
    for (int v = 0; v < kVectors; ++v) sums[v] += scale * load(row + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) store(sum + column + v * kLanes, sums[v]);
}

template <class G>
void sum_lookups(const GradArgs& args, int64_t begin, int64_t end, int64_t dim, float* sum) {
  int64_t column = 0;
  for (; dim - column >= 8 * kLanes; column += 8 * kLanes) {
    sum_block<8, G>(args, begin, end, column, sum);
  }
  for (; dim - column >= 4 * kLanes; column += 4 * kLanes) {
    sum_block<4, G>(args, begin, end, column, sum);
  }
  for (; dim - column >= kLanes; column += kLanes) sum_block<1, G>(args, begin, end, column, sum);
  if (column == dim) return;
  const int rest = static_cast<int>(dim - column);
  Vec total = {};
  for (int64_t j = begin; j < end; ++j) {
    const G* row = static_cast<const G*>(args.grad) + grad_offset(args, j) + column;
    total += broadcast(grad_scale(args, j)) * load_first(row, rest);
  }
  store_first(sum + column, total, rest);
}

void segment_sum(const UpdateArgs& args, SumFn sum_fn, int64_t group, int64_t dim, float* sum) {
  const int64_t begin = args.grads.segments[group], end = args.grads.segments[group + 1];
  if (end - begin <= kChunk) return sum_fn(args.grads, begin, end, dim, sum);
  int64_t i = 0;  // the last long segment that is not after `group`
  for (int64_t step = args.longs.count; step > 0; step /= 2) {
    while (i + step < args.longs.count && args.longs.groups[i + step] <= group) i += step;
  }
  const float* partial = args.longs.partials + args.longs.first_chunk[i] * args.longs.stride;
  for (int64_t d = 0; d < dim; ++d) sum[d] = partial[d];
  for (int64_t chunk = args.longs.first_chunk[i] + 1; chunk < args.longs.first_chunk[i + 1];
       ++chunk) {
    partial = args.longs.partials + chunk * args.longs.stride;
    for (int64_t d = 0; d < dim; ++d) sum[d] += partial[d];
  }
}

EMB_HD void prefetch_grads(const GradArgs& args, int64_t group, int64_t dim) {
  const int64_t begin = args.segments[group], end = args.segments[group + 1];
  const int64_t stop = end - begin < kGradsAhead ? end : begin + kGradsAhead;
  for (int64_t j = begin; j < stop; ++j) {
    const int64_t offset = grad_offset(args, j) * args.element_size;
    prefetch_row<false>(static_cast<const char*>(args.grad) + offset, dim * args.element_size);
  }
}

// A row during its update.
struct RowUpdate {
  const TierRows* tier;
  RowLocation location;
  int64_t id, dim;
  RowViews views;
  float sums[kMaxRowSums];
  RowFactors scale;
};

// Set the location of the row of a group. Any of its lookups determines the feature, hence the
// table.
EMB_HD void locate(const UpdateArgs& args, int64_t group, RowUpdate* target) {
  const int64_t bag = args.grads.bags[args.grads.segments[group]];
  const Feature& feature = args.grads.features[feature_of(args.grads, bag)];
  // A row of another feature means that tbe_group did not make the grouping: it must not lead
  // outside the table.
  const int64_t row_of_table = args.rows[group] - feature.row_base;
  const int64_t row = row_of_table >= 0 && row_of_table < feature.rows ? row_of_table : 0;
  const int64_t slot = args.row_slots != nullptr ? args.row_slots[group] : -1;
  target->location = locate_update(feature, row, slot, args.tiers[kCacheTier]);
  target->tier = &args.tiers[target->location.tier];
  target->id = feature.row_base + row;
  target->dim = feature.dim;
}

// Prefetch all of the row that Opt updates, for writing.
template <class Opt>
EMB_HD void prefetch_target(const RowUpdate& target) {
  const auto ask = [&](const void* data, Dtype type) {
    const int64_t size = size_of(type);
    prefetch_row<true>(static_cast<const char*>(data) + target.location.element * size,
                       target.dim * size);
  };
  ask(target.tier->weights, target.tier->weight_type);
  for (int s = 0; s < Opt::kSteppedStates; ++s) {
    ask(target.tier->element_states[s], target.tier->state_types[s]);
  }
  for (int s = 0; s < Opt::kRowStates; ++s) {
    prefetch_row<true>(target.tier->row_states[s] + target.location.row, 4);
  }
}

// Return the row as floats: in place, or a copy in `scratch` if it is stored in 16 bits.
EMB_HD float* open_row(void* data, Dtype type, const RowUpdate& target, float* scratch) {
  if (type == Dtype::kFloat) return static_cast<float*>(data) + target.location.element;
  widen_row(data, type, target.location.element, target.dim, scratch);
  return scratch;
}

EMB_HD void close_row(const float* values, void* data, Dtype type, const RowUpdate& target,
                      const Rounding& rounding, uint32_t tensor) {
  if (type == Dtype::kFloat) return;
  narrow_row(values, target.dim, data, type, target.location.element, rounding, target.id, tensor);
}

// `scratch` has room for what is stored in 16 bits.
template <class Opt>
EMB_HD void open_target(RowUpdate* target, float* scratch) {
  const TierRows& tier = *target->tier;
  target->views.w = open_row(tier.weights, tier.weight_type, *target, scratch);
  if constexpr (Opt::kSteppedStates > 0) {
    scratch += target->dim;
    target->views.first = open_row(tier.element_states[0], tier.state_types[0], *target, scratch);
  }
  if constexpr (Opt::kSteppedStates > 1) {
    scratch += target->dim;
    target->views.second = open_row(tier.element_states[1], tier.state_types[1], *target, scratch);
  }
}

template <class Opt>
EMB_HD void close_target(const RowUpdate& target, const Rounding& rounding) {
  const TierRows& tier = *target.tier;
  close_row(target.views.w, tier.weights, tier.weight_type, target, rounding, kRoundWeights);
  if constexpr (Opt::kSteppedStates > 0) {
    close_row(target.views.first, tier.element_states[0], tier.state_types[0], target, rounding,
              kRoundState);
  }
  if constexpr (Opt::kSteppedStates > 1) {
    close_row(target.views.second, tier.element_states[1], tier.state_types[1], target, rounding,
              kRoundState + 1);
  }
}

template <class Opt>
EMB_HD void begin_target(const Opt& opt, RowUpdate* target) {
  float states[kMaxRowStates];
  for (int s = 0; s < Opt::kRowStates; ++s) {
    states[s] = target->tier->row_states[s][target->location.row];
  }
  target->scale = opt.begin_row(states, target->sums, static_cast<float>(target->dim));
  for (int s = 0; s < Opt::kRowStates; ++s) {
    target->tier->row_states[s][target->location.row] = states[s];
  }
}

// Rows are processed in batches: a row-wise optimizer has a chain of reduction, square root and
// division before it can write, and a few such chains side by side cost little more than one.
template <class Opt>
void update(const UpdateArgs& args, SumFn sum_fn, float* scratch, int64_t widest, int64_t begin,
            int64_t end) {
  const Opt opt(args.hyper);
  const WeightDecay decay(args.hyper);
  const Rounding rounding(args.hyper);
  RowUpdate targets[2][kRowBatch];
  const auto fetch = [&](int64_t base, RowUpdate* batch) {
    const int64_t count = end - base < kRowBatch ? end - base : kRowBatch;
    for (int64_t i = 0; i < count; ++i) {
      locate(args, base + i, &batch[i]);
      if (args.grads.fetch_ahead) prefetch_grads(args.grads, base + i, batch[i].dim);
      prefetch_target<Opt>(batch[i]);
    }
  };
  fetch(begin, targets[0]);
  for (int64_t base = begin, turn = 0; base < end; base += kRowBatch, turn ^= 1) {
    fetch(base + kRowBatch, targets[turn ^ 1]);
    RowUpdate* batch = targets[turn];
    const int64_t count = end - base < kRowBatch ? end - base : kRowBatch;
    float* gradient = scratch;
    float* narrow_rows = scratch + kRowBatch * widest;
    for (int64_t i = 0; i < count; ++i) {
      RowUpdate& target = batch[i];
      target.views.g = gradient;
      segment_sum(args, sum_fn, base + i, target.dim, gradient);
      open_target<Opt>(&target, narrow_rows);
      add_penalty(decay, target.dim, target.views);
      row_sums(opt, target.dim, target.views, target.sums);
      gradient += target.dim;
      narrow_rows += (kScratchRows - 1) * target.dim;
    }
    for (int64_t i = 0; i < count; ++i) begin_target(opt, &batch[i]);
    for (int64_t i = 0; i < count; ++i) {
      decay_row(decay, batch[i].dim, batch[i].views);
      step_row(opt, batch[i].dim, batch[i].scale, batch[i].views);
      close_target<Opt>(batch[i], rounding);
    }
  }
}

UpdateFn find_update(int optimizer) {
  UpdateFn found = nullptr;
  Optimizers::visit(optimizer, [&](auto tag) { found = update<typename decltype(tag)::type>; });
  return found;
}

constexpr UpdateTable make_table() {
  return {
      {sum_lookups<float>, sum_lookups<half16>, sum_lookups<bfloat16>}, find_update, segment_sum};
}

}  // namespace

extern const UpdateTable kUpdateTable;
const UpdateTable kUpdateTable = make_table();

}  // namespace emb::EMB_ISA
