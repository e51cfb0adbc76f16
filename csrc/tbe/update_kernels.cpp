// Backward of table-batched embeddings on one CPU thread: the gradients of a unique row are summed
// in registers, then the optimizer reads and writes the row once. As in the forward the cost is
// cache misses on random rows, so the rows of the next groups are fetched ahead, ready for writing.
#include "optim/optimizers.h"
#include "optim/step_row.h"
#include "tbe/update_table.h"

namespace emb::EMB_ISA {
namespace {

// Lookups of a group whose gradients are fetched ahead; the hardware follows longer groups.
constexpr int64_t kGradsAhead = 4;
constexpr int64_t kSampleRowsAhead = 8;

// The first element, counted from `grad`, of the gradient of sorted lookup j.
EMB_HD int64_t grad_offset(const GradArgs& args, int64_t j) {
  if (args.per_lookup) return args.lookups[j] * args.grad_stride;
  const int64_t bag = args.bags[j], feature = args.by_batch(static_cast<uint32_t>(bag));
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

// A row on its way through the update.
struct Target {
  int64_t row, offset, dim;
  float* row_state;
  float scale;
};

// Where the row of a group lives: any of its lookups tells the feature, hence the table.
EMB_HD Target locate(const UpdateArgs& args, int64_t group) {
  const auto bag = static_cast<uint32_t>(args.grads.bags[args.grads.segments[group]]);
  const Feature& feature = args.grads.features[args.grads.by_batch(bag)];
  // Rows that are not of this feature come from no grouping of ours; they must not leave its table.
  const int64_t given = args.rows[group] - feature.row_base;
  const int64_t row = given >= 0 && given < feature.rows ? given : 0;
  return {feature.row_base + row, feature.weight_offset + row * feature.dim, feature.dim, nullptr,
          0.0f};
}

template <class W>
EMB_HD void load_row(const W* row, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(out + d, load(row + d));
  for (; d < dim; ++d) out[d] = to_float(row[d]);
}

template <class W>
EMB_HD void store_row(const float* values, int64_t dim, W* row) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(row + d, load(values + d));
  for (; d < dim; ++d) row[d] = from_float<W>(values[d]);
}

// Rows go through in batches: a row-wise optimizer has a chain of reduction, square root and
// division before it can write, and a few such chains side by side cost little more than one.
template <class Opt, class W>
void update(const UpdateArgs& args, SumFn sum_fn, float* scratch, int64_t begin, int64_t end) {
  const Opt opt(args.hyper);
  W* weights = static_cast<W*>(args.weights);
  Target targets[2][kRowBatch];
  const auto fetch = [&](int64_t base, Target* batch) {
    const int64_t count = end - base < kRowBatch ? end - base : kRowBatch;
    for (int64_t i = 0; i < count; ++i) {
      Target& target = batch[i] = locate(args, base + i);
      if (args.grads.fetch_ahead) prefetch_grads(args.grads, base + i, target.dim);
      prefetch_row<true>(weights + target.offset, target.dim * static_cast<int64_t>(sizeof(W)));
      for (int s = 0; s < Opt::kElementStates; ++s) {
        prefetch_row<true>(args.element_states[s] + target.offset, target.dim * 4);
      }
      if constexpr (Opt::kRowStates > 0) {
        target.row_state = args.row_state + target.row;
        prefetch_row<true>(target.row_state, 4);
      }
    }
  };
  fetch(begin, targets[0]);
  for (int64_t base = begin, turn = 0; base < end; base += kRowBatch, turn ^= 1) {
    fetch(base + kRowBatch, targets[turn ^ 1]);
    Target* batch = targets[turn];
    const int64_t count = end - base < kRowBatch ? end - base : kRowBatch;
    float* gradient = scratch;
    for (int64_t i = 0; i < count; ++i, gradient += batch[i - 1].dim) {
      segment_sum(args, sum_fn, base + i, batch[i].dim, gradient);
      if constexpr (Opt::kRowStates > 0) batch[i].scale = mean_square(gradient, batch[i].dim);
    }
    for (int64_t i = 0; i < count; ++i) {
      batch[i].scale = opt.begin_row(batch[i].row_state, batch[i].scale);
    }
    float* values = gradient;
    gradient = scratch;
    for (int64_t i = 0; i < count; ++i, gradient += batch[i - 1].dim) {
      const Target& target = batch[i];
      W* row = weights + target.offset;
      float* first = Opt::kElementStates > 0 ? args.element_states[0] + target.offset : nullptr;
      float* second = Opt::kElementStates > 1 ? args.element_states[1] + target.offset : nullptr;
      if constexpr (sizeof(W) == sizeof(float)) {
        step_row(opt, target.dim, target.scale, row, gradient, first, second);
      } else {
        load_row(row, target.dim, values);
        step_row(opt, target.dim, target.scale, values, gradient, first, second);
        store_row(values, target.dim, row);
      }
    }
  }
}

UpdateFn find_update(const char* optimizer, Dtype weights) {
  UpdateFn found = nullptr;
  visit_optimizer(optimizer, [&](auto tag) {
    using Opt = typename decltype(tag)::type;
    found = weights == Dtype::kFloat  ? update<Opt, float>
            : weights == Dtype::kHalf ? update<Opt, half16>
                                      : update<Opt, bfloat16>;
  });
  return found;
}

// d(out)/d(sample weight) of a lookup is the dot product of its row and its bag's gradient.
template <class W, class G>
void sample_weight_grads(const SampleWeightArgs& args, int64_t first_bag, int64_t last_bag) {
  const W* table = static_cast<const W*>(args.table);
  const int64_t last = args.bags.end(last_bag - 1);
  const int64_t row_bytes = args.dim * static_cast<int64_t>(sizeof(W));
  const auto row_of = [&](int64_t i) { return repair_index(args.indices[i], args.rows); };
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    const int64_t begin = args.bags.begin(bag), end = args.bags.end(bag);
    const bool mean = args.pooling == Pooling::kMean && end > begin;
    const float scale = mean ? 1.0f / static_cast<float>(end - begin) : 1.0f;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t next = i + kSampleRowsAhead;
      if (next < last && row_of(next) >= 0) {
        prefetch_row<false>(table + row_of(next) * args.dim, row_bytes);
      }
      const int64_t row = row_of(i);
      const G* grad = static_cast<const G*>(args.grad) + (bag - args.first_bag) * args.grad_stride;
      float total = 0.0f;
      if (row >= 0) {
        Vec products = {};
        int64_t d = 0;
        for (; d + kLanes <= args.dim; d += kLanes) {
          products += load(grad + d) * load(table + row * args.dim + d);
        }
        total = sum(products);
        for (; d < args.dim; ++d) total += to_float(grad[d]) * to_float(table[row * args.dim + d]);
      }
      args.out[i] = total * scale;
    }
  }
}

constexpr UpdateTable make_table() {
  return {{sum_lookups<float>, sum_lookups<half16>, sum_lookups<bfloat16>},
          find_update,
          segment_sum,
          {{sample_weight_grads<float, float>, sample_weight_grads<float, half16>,
            sample_weight_grads<float, bfloat16>},
           {sample_weight_grads<half16, float>, sample_weight_grads<half16, half16>,
            sample_weight_grads<half16, bfloat16>},
           {sample_weight_grads<bfloat16, float>, sample_weight_grads<bfloat16, half16>,
            sample_weight_grads<bfloat16, bfloat16>}}};
}

}  // namespace

extern const UpdateTable kUpdateTable;
const UpdateTable kUpdateTable = make_table();

}  // namespace emb::EMB_ISA
