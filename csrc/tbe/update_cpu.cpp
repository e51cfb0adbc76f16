// The backward ops of table-batched embeddings on the CPU: `tbe_update_` sums the gradients of each
// unique row and updates the row; `tbe_backward_` also groups the lookups and counts the step;
// `tbe_row_grads` returns the sums.
//
// The steps: (1) Check the arguments, including the grouping, because the kernels of
// update_kernels.cpp trust them (GroupedGradient). (2) Sum segments longer than kChunkLookups in
// chunks, in parallel (ChunkSums). (3) Process ranges of groups of equal cost, in parallel.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "core/check.h"
#include "core/feature_bags.h"
#include "core/isa.h"
#include "core/output_memory.h"
#include "core/parallel.h"
#include "optim/check.h"
#include "tbe/args.h"
#include "tbe/entries.h"

namespace emb {

EMB_SELECT_KERNELS(UpdateKernels, kUpdateKernels, update_kernels)

namespace {

constexpr int64_t kGroupGrain = 512;  // grain of parallel_balanced, in the cost of parallel_groups
// Groups of sum_row_grads between the prefetch of a gradient and its use.
constexpr int64_t kGroupsAhead = 16;

// The unit of scratch memory. It is aligned to cache lines, so that no vector of 64 bytes touches
// two lines.
constexpr int64_t kLineFloats = kCacheLineBytes / sizeof(float);
struct alignas(kCacheLineBytes) CacheLine {
  float values[kLineFloats];
};

// If the gradient of a batch has at most this many bytes (1.5 MiB), an update does not prefetch it.
// It is in the caches anyway, most of it in the core's private caches, because every lookup of a
// bag uses the bag's gradient. Prefetching cost 8 % of the time of an update at 1.3 MB with 20
// lookups per bag, and saved 2 to 7 % at 2 MB.
constexpr int64_t kMaxUnprefetchedBytes = int64_t{3} << 19;

// Return the feature of sorted lookup j.
const Feature& feature_of(const GradArgs& args, int64_t j) {
  const int32_t bag = args.sorted_bags[j];
  return args.features[args.bag_layout != nullptr
                           ? args.bag_layout[bag].feature
                           : args.bags_per_feature.quotient(static_cast<uint32_t>(bag))];
}

// The gradient and the grouping of a batch, checked and converted for the kernels. Use: construct,
// which checks the grouping; set_pooling, which checks what depends on the pooling; then the other
// functions. The result of `args` points into the tensors of this object and into `bag_layout`,
// which the op's caller keeps alive.
struct GroupedGradient {
  Tensor grad, features, segments, sorted_lookups, sorted_bags, offsets;
  std::optional<Tensor> sample_weights;
  Floats bag_scale;         // [bags] for the mean, else null: see GradArgs
  const BagLayout* layout;  // [bags] of a variable batch; null for a fixed one
  int64_t num_groups, num_lookups, num_bags;
  int64_t bags_per_feature;  // 0 in a variable batch
  int64_t output_dim;        // columns of `grad`; with pooling in a variable batch its elements
  Dtype grad_type;
  Pooling pooling;

  GroupedGradient(const char* op, const Tensor& grad_in, const Tensor& features_in,
                  const Grouping& groups, const Tensor& offsets_in,
                  const std::optional<Tensor>& bag_layout)
      : grad(with_adjacent_columns(grad_in)),
        features(features_in),
        segments(groups.segments),
        sorted_lookups(groups.sorted_lookups),
        sorted_bags(groups.sorted_bags),
        offsets(as_contiguous(offsets_in)) {
    check_features(op, features);
    grad_type = float_dtype(op, "grad", grad.scalar_type());
    for (const Tensor* tensor :
         {&groups.segments, &groups.sorted_lookups, &groups.sorted_bags, &groups.num_groups}) {
      check_dtype(op, "a grouping tensor", *tensor, ScalarType::Int,
                  "int32, as tbe_group returns it");
      STD_TORCH_CHECK(tensor->is_contiguous(), op, ": grouping tensors must be contiguous");
    }
    check_index_vector(op, "offsets", offsets);
    num_lookups = sorted_lookups.numel();
    layout = bag_layout ? check_bag_layout(op, *bag_layout, offsets) : nullptr;
    bags_per_feature = layout != nullptr ? 0 : batch_size(op, features.size(0), offsets);
    num_bags = std::max<int64_t>(offsets.numel() - 1, 0);
    check_grouping(op, groups.rows, groups.num_groups);
  }

  // Set num_groups. Throws unless the sizes of the tensors match, segments ascend and are not
  // empty, and sorted lookups and bags are in range: the kernels trust these. The values of `rows`
  // are not read. This costs little: it reads up to 12 bytes per lookup, compared to gradients of
  // hundreds of bytes.
  void check_grouping(const char* op, const Tensor& rows, const Tensor& count) {
    bool is_valid = rows.numel() == num_lookups && segments.numel() == num_lookups + 1 &&
                    sorted_bags.numel() == num_lookups && count.numel() == 1;
    num_groups = is_valid ? *count.const_data_ptr<int32_t>() : 0;
    is_valid = is_valid && num_groups >= 0 && num_groups <= num_lookups;
    if (is_valid) {
      const auto last_bag = static_cast<uint32_t>(num_bags) - 1;
      const int32_t *segment = segments.const_data_ptr<int32_t>(),
                    *bag = sorted_bags.const_data_ptr<int32_t>(),
                    *lookup = sorted_lookups.const_data_ptr<int32_t>();
      const auto n = static_cast<uint32_t>(num_lookups);
      const int32_t num_grouped = segment[num_groups];
      // A number that is out of range sets bit 31. Unsigned, because differences may overflow.
      uint32_t sign_bits = segment[0] | num_grouped | (n - num_grouped);
      for (int64_t i = 0; i < num_groups; ++i) {
        const auto begin = static_cast<uint32_t>(segment[i]);
        sign_bits |= begin | (segment[i + 1] - begin - 1);
      }
      is_valid = sign_bits >> 31 == 0;
      for (int32_t j = 0; is_valid && j < num_grouped; ++j) {
        sign_bits |= bag[j] | (last_bag - bag[j]) | lookup[j] | (n - 1 - lookup[j]);
      }
      is_valid = is_valid && sign_bits >> 31 == 0;
    }
    STD_TORCH_CHECK(is_valid, op,
                    ": rows, segments, lookups, bags and count must come from one call of "
                    "tbe_group for these features and offsets");
  }

  // Set `pooling`, sample_weights, bag_scale and output_dim. Throws unless `code` is a code of
  // Pooling, `weights` are float32 [L] or null, the gradient has the shape of the output, and in a
  // variable batch the output rows of `bag_layout` lie inside it.
  void set_pooling(const char* op, int64_t code, const std::optional<Tensor>& weights,
                   const std::optional<Tensor>& bag_layout) {
    pooling = parse_pooling(op, code);
    check_sample_weights(op, weights, sorted_lookups);
    if (weights) sample_weights = as_contiguous(*weights);
    check_shape(op);
    if (layout != nullptr) FeatureBags(op, features, offsets, bag_layout, pooling, output_dim);
    if (pooling == Pooling::kMean) {
      const Bags ranges{index_array(offsets), num_bags, num_lookups};
      bag_scale = new_floats(ranges.num_bags);
      for (int64_t bag = 0; bag < ranges.num_bags; ++bag) {
        const int64_t length = ranges.end(bag) - ranges.begin(bag);
        bag_scale[bag] = length > 0 ? 1.0f / static_cast<float>(length) : 0.0f;
      }
    }
  }

  // Check the shape of the gradient and set output_dim.
  void check_shape(const char* op) {
    if (layout != nullptr && pooling != Pooling::kNone) {
      output_dim = check_pooled_grad(op, grad, true);
      return;
    }
    STD_TORCH_CHECK(grad.dim() == 2, op,
                    ": grad must be [B, output_dim] or, for none, [L, D], got ", grad.dim(),
                    " dimensions");
    const int64_t num_rows = pooling == Pooling::kNone ? num_lookups : bags_per_feature;
    STD_TORCH_CHECK(grad.size(0) == num_rows, op, ": grad must have ", num_rows,
                    " rows for pooling ", kPoolings[static_cast<int>(pooling)], ", got ",
                    grad.size(0));
    output_dim = grad.size(1);
  }

  // Return the number of columns within which the columns of each feature must lie, for
  // check_feature_ranges; unlimited in a variable batch, because set_pooling has checked
  // bag_layout.
  int64_t feature_columns() const {
    return layout != nullptr && pooling != Pooling::kNone ? kUnlimited : output_dim;
  }

  GradArgs args() const {
    return {grad.const_data_ptr(),
            row_stride(grad),
            grad_type,
            feature_array(features),
            layout,
            static_cast<uint32_t>(std::max<int64_t>(bags_per_feature, 1)),
            segments.const_data_ptr<int32_t>(),
            sorted_lookups.const_data_ptr<int32_t>(),
            sorted_bags.const_data_ptr<int32_t>(),
            bag_scale.get(),
            sample_weights ? sample_weights->const_data_ptr<float>() : nullptr,
            pooling == Pooling::kNone,
            grad.numel() * static_cast<int64_t>(grad.element_size()) > kMaxUnprefetchedBytes};
  }

  // Throws unless the lookups of each group are of tables of one dim, and the table of the first
  // lookup has rows and, if `rows`, [num_groups], is not null, row rows[group]. If all tables have
  // rows and one dim, nothing is checked, because then no access can be outside a table: kernels
  // use the table's first row instead of a row outside the table.
  void check_groups(const char* op, const GradArgs& args, const int64_t* rows) const {
    const Feature* feature = feature_array(features);
    bool has_one_dim = true;  // all tables have rows, and one dim
    for (int64_t f = 0; f < features.size(0); ++f) {
      has_one_dim = has_one_dim && feature[f].rows > 0 && feature[f].dim == feature[0].dim;
    }
    for (int64_t group = 0; !has_one_dim && group < num_groups; ++group) {
      const int32_t begin = args.segments[group], end = args.segments[group + 1];
      const Feature& first = feature_of(args, begin);
      const bool has_row = rows == nullptr || (rows[group] >= first.row_base &&
                                               rows[group] - first.row_base < first.rows);
      bool is_valid = first.rows > 0 && has_row;
      for (int32_t j = begin + 1; j < end; ++j)
        is_valid = is_valid && feature_of(args, j).dim == first.dim;
      STD_TORCH_CHECK(is_valid, op, ": group ", group,
                      " has lookups of an empty table, of another table ",
                      "than its row, or of tables of several dims; pass what tbe_group returns for "
                      "these features");
    }
  }

  // Return the maximum dim of the tables that have rows; others are never updated.
  int64_t max_dim() const {
    int64_t dim = 0;
    const Feature* feature = feature_array(features);
    for (int64_t f = 0; f < features.size(0); ++f) {
      if (feature[f].rows > 0) dim = std::max(dim, feature[f].dim);
    }
    return dim;
  }
};

// The chunk sums of all segments longer than kChunkLookups. The constructor computes them with all
// threads, so that one hot row is not the work of a single thread; no group may have more than
// `dim` columns.
struct ChunkSums {
  std::vector<int64_t> groups, first_chunks = {0};
  Floats sums;
  int64_t stride = 0;

  ChunkSums(const GradArgs& args, int64_t num_groups, int64_t dim, SumFn sum) : stride(dim) {
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t length = args.segments[group + 1] - args.segments[group];
      if (length <= kChunkLookups) continue;
      groups.push_back(group);
      first_chunks.push_back(first_chunks.back() + (length + kChunkLookups - 1) / kChunkLookups);
    }
    if (groups.empty()) return;
    sums = new_floats(first_chunks.back() * stride);
    parallel_tasks(first_chunks.back(), [&](int64_t chunk) {
      const int64_t i = std::upper_bound(first_chunks.begin(), first_chunks.end(), chunk) -
                        first_chunks.begin() - 1;
      const int64_t begin = args.segments[groups[i]] + (chunk - first_chunks[i]) * kChunkLookups;
      const int64_t end = std::min<int64_t>(begin + kChunkLookups, args.segments[groups[i] + 1]);
      sum(args, begin, end, feature_of(args, begin).dim, sums.get() + chunk * stride);
    });
  }

  // Return the sums as kernels read them, valid as long as this object.
  LongSegments view() const {
    return {groups.data(), first_chunks.data(), static_cast<int64_t>(groups.size()), sums.get(),
            stride};
  }
};

// Call `body(begin, end)` for ranges of groups, in parallel. The cost of a group is the number of
// its lookups plus kRowCost for its row, which costs about as much as four lookups.
template <class Body>
void parallel_groups(const GradArgs& args, int64_t num_groups, const Body& body) {
  constexpr int64_t kRowCost = 4;
  const auto cost = [&](int64_t group) { return args.segments[group] + kRowCost * group; };
  parallel_balanced(num_groups, kGroupGrain, cost, body);
}

// Prefetch the gradient, `dim` columns, of the first lookup of a group of a fixed batch. The
// function is EMB_HD, and so inlined, because the compiler drops calls of functions that only
// prefetch.
EMB_HD void prefetch_first_grad(const GradArgs& args, int64_t group, int64_t dim) {
  const int64_t j = args.segments[group];
  int64_t element = 0;
  if (args.is_unpooled) {
    element = args.sorted_lookups[j] * args.grad_stride;
  } else {
    const int64_t bag = args.sorted_bags[j];
    const int64_t feature = args.bags_per_feature.quotient(static_cast<uint32_t>(bag));
    element = (bag - feature * args.bags_per_feature.value()) * args.grad_stride +
              args.features[feature].column;
  }
  const char* row = static_cast<const char*>(args.grad) + element * args.element_size();
  for (int64_t i = 0; i < dim * args.element_size(); i += kCacheLineBytes)
    __builtin_prefetch(row + i);
}

}  // namespace

// The contract is in tbe/entries.h.
void sum_row_grads(const char* op, const Tensor& grad, const Tensor& features,
                   const Grouping& groups, const Tensor& offsets,
                   const std::optional<Tensor>& bag_layout,
                   const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t dim,
                   float* out) {
  GroupedGradient gradient(op, grad, features, groups, offsets, bag_layout);
  gradient.set_pooling(op, pooling, sample_weights, bag_layout);
  check_feature_ranges(op, features, kUnlimited, gradient.feature_columns(), kUnlimited,
                       gradient.pooling);
  const Feature* feature = feature_array(features);
  for (int64_t f = 0; f < features.size(0); ++f) {
    STD_TORCH_CHECK(feature[f].dim <= dim, op, ": features must have a dim of at most ", dim,
                    ", feature ", f, " has ", feature[f].dim);
  }
  UpdateArgs args(gradient.args());
  gradient.check_groups(op, args.grads, nullptr);
  const SumFn sum = update_kernels().sum[static_cast<int>(gradient.grad_type)];
  const ChunkSums chunks(args.grads, gradient.num_groups, dim, sum);
  args.long_segments = chunks.view();
  // With at most two lookups per bag a gradient is read once or twice, so that it is not yet in the
  // core's private caches.
  const bool prefetches = !bag_layout && gradient.num_lookups <= 2 * gradient.num_bags;
  parallel_groups(args.grads, gradient.num_groups, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      const int64_t row_dim = feature_of(args.grads, args.grads.segments[group]).dim;
      if (prefetches && group + kGroupsAhead < end) {
        prefetch_first_grad(args.grads, group + kGroupsAhead, row_dim);
      }
      update_kernels().segment_sum(args, sum, group, row_dim, out + group * dim);
    }
  });
}

namespace {

// Return the gradient of each unique row, float32 [L, dim]: row g is that of group g. Rows after
// the last group, and columns beyond the dim of a group's table, are unspecified. `rows` to `count`
// are the grouping that tbe_group returned for these features and offsets. `grad` is
// [B, output_dim], with pooling and bag_layout [output_dim], without pooling [L, D].
Tensor tbe_row_grads(const Tensor& grad, const Tensor& features, const Tensor& rows,
                     const Tensor& segments, const Tensor& lookups, const Tensor& bags,
                     const Tensor& count, const Tensor& offsets, std::optional<Tensor> bag_layout,
                     std::optional<Tensor> sample_weights, int64_t pooling, int64_t dim) {
  const char* op = "tbe_row_grads";
  check_not_negative(op, "dim", dim);
  Tensor out = allocate_output(grad, {lookups.numel(), dim}, ScalarType::Float);
  sum_row_grads(op, grad, features, {rows, segments, lookups, bags, count}, offsets, bag_layout,
                sample_weights, pooling, dim, out.mutable_data_ptr<float>());
  return out;
}

// Set args->tiers to the weights and states. Throws unless they fit the optimizer, and those of
// each tier have room for the rows of all features in the tier.
void check_memory(const char* op, int64_t optimizer, const std::vector<Tensor>& weights,
                  const std::vector<Tensor>& states, const GroupedGradient& gradient,
                  UpdateArgs* args) {
  check_feature_ranges(op, gradient.features, TierWeights(op, weights), gradient.feature_columns(),
                       kUnlimited, gradient.pooling);
  const Feature* feature = feature_array(gradient.features);
  int64_t num_rows[kTiers] = {};
  for (int64_t f = 0; f < gradient.features.size(0); ++f) {
    int64_t& tier_rows = num_rows[feature[f].tier];
    tier_rows = std::max(tier_rows, feature[f].state_base + feature[f].rows);
  }
  check_tiers(op, optimizer, weights, states, num_rows, args->tiers);
}

// Return the tables that have rows, by ascending rows, each once. Return none if rows may be in a
// cache (`has_cache`), or if features disagree about the memory of a table: then a kernel of
// UpdateKernels::find_update must locate every row by its first lookup.
std::vector<TableSpan> table_spans(const GroupedGradient& gradient, bool has_cache) {
  std::vector<TableSpan> spans;
  if (has_cache) return spans;
  const Feature* feature = feature_array(gradient.features);
  for (int64_t f = 0; f < gradient.features.size(0); ++f) {
    const Feature& table = feature[f];
    if (table.rows == 0) continue;
    spans.push_back({table.row_base, table.rows, table.dim, table.tier,
                     table.weight_offset - table.row_base * table.dim,
                     table.state_base - table.row_base, f});
  }
  const auto precedes = [](const TableSpan& a, const TableSpan& b) {
    return a.first_row < b.first_row;
  };
  if (!std::is_sorted(spans.begin(), spans.end(), precedes)) {
    std::stable_sort(spans.begin(), spans.end(), precedes);
  }
  size_t num_spans = 0;
  for (const TableSpan& span : spans) {
    TableSpan* last = num_spans > 0 ? &spans[num_spans - 1] : nullptr;
    if (last == nullptr || span.first_row >= last->first_row + last->num_rows) {
      spans[num_spans++] = span;
      continue;
    }
    const bool is_same_table = span.first_row == last->first_row &&
                               span.num_rows == last->num_rows && span.dim == last->dim &&
                               span.tier == last->tier && span.element_base == last->element_base &&
                               span.state_base == last->state_base;
    if (!is_same_table) return {};
    last->feature = -1;
  }
  spans.resize(num_spans);
  return spans;
}

// Return whether each of `rows`, the row of each group, [num_groups], is in one of `tables`, and
// the groups follow the order of the tables. Within a table they may have any order.
bool groups_follow_tables(const int64_t* rows, int64_t num_groups,
                          const std::vector<TableSpan>& tables) {
  size_t t = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    while (t < tables.size() && rows[group] >= tables[t].first_row + tables[t].num_rows) ++t;
    if (t == tables.size() || rows[group] < tables[t].first_row) return false;
  }
  return true;
}

// Update the rows of a grouping in place: sum the gradients of each unique row, and apply the
// optimizer to it.
//   weights, states  one tensor per memory tier, and the optimizer's states of all tiers; written
//   hyper            float64, see Hyper; read only: the caller has counted the step
//   optimizer        the number of an optimizer, see optim/optimizers.h
//   rows..count      the grouping that tbe_group returned for these features and offsets
//   row_slots        int32 [U or more] cache slot of each unique row; null: nothing is cached
//   grad             [B, output_dim], with pooling and bag_layout [output_dim], without pooling
//                    [L, D]
// Throws for a grouping that does not fit the other arguments. A wrong grouping that passes the
// checks updates wrong rows, but leads to no access outside the tensors.
void tbe_update_(std::vector<Tensor> weights, std::vector<Tensor> states, const Tensor& hyper,
                 int64_t optimizer, const Tensor& grad, const Tensor& features, const Tensor& rows,
                 const Tensor& segments, const Tensor& lookups, const Tensor& bags,
                 const Tensor& count, const Tensor& offsets, std::optional<Tensor> row_slots,
                 std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                 int64_t pooling) {
  const char* op = "tbe_update_";
  check_dtype(op, "rows", rows, ScalarType::Long, "int64");
  STD_TORCH_CHECK(rows.is_contiguous(), op, ": grouping tensors must be contiguous");
  check_hyper(op, optimizer_shape(op, optimizer), hyper);
  GroupedGradient gradient(op, grad, features, {rows, segments, lookups, bags, count}, offsets,
                           bag_layout);
  gradient.set_pooling(op, pooling, sample_weights, bag_layout);
  UpdateArgs args(gradient.args());
  check_memory(op, optimizer, weights, states, gradient, &args);
  gradient.check_groups(op, args.grads, rows.const_data_ptr<int64_t>());
  if (row_slots) {
    check_row_slots(op, *row_slots, gradient.num_groups);
    args.row_slots = row_slots->const_data_ptr<int32_t>();
  }
  args.rows = rows.const_data_ptr<int64_t>();
  args.hyper = hyper.const_data_ptr<double>();
  const int64_t dim = gradient.max_dim();
  std::vector<TableSpan> tables = table_spans(gradient, row_slots.has_value());
  if (!groups_follow_tables(args.rows, gradient.num_groups, tables)) tables.clear();
  args.tables = tables.data();
  args.num_tables = static_cast<int64_t>(tables.size());
  const UpdateKernels& kernels = update_kernels();
  const auto find = tables.empty() ? kernels.find_update : kernels.find_update_by_table;
  const UpdateFn update = find(static_cast<int>(optimizer));
  const SumFn sum = kernels.sum[static_cast<int>(gradient.grad_type)];
  const ChunkSums chunks(args.grads, gradient.num_groups, dim, sum);
  args.long_segments = chunks.view();
  parallel_groups(args.grads, gradient.num_groups, [&](int64_t begin, int64_t end) {
    const int64_t num_lines = (kRowBatch * kScratchRows * dim + kLineFloats - 1) / kLineFloats;
    const std::unique_ptr<CacheLine[]> scratch(new CacheLine[num_lines]);
    update(args, sum, scratch[0].values, dim, begin, end);
  });
}

// Count the step in `hyper`, and update a fixed batch: group its lookups, or use the grouping
// `located`, and then do what tbe_update_ does. `located` is [rows, segments, lookups, bags, count,
// row_slots] from a cache's prefetch, or the same without row_slots from the insertion of a batch
// of keys. If `is_finite`, bool [1] or null, is false, do nothing. `indices`, `total_rows` and
// `has_valid_offsets` are the arguments of tbe_group, which are not used with `located`, though
// total_rows must not be negative. If the update throws, the step is not counted.
void tbe_backward_(std::vector<Tensor> weights, std::vector<Tensor> states, Tensor hyper,
                   int64_t optimizer, const Tensor& grad, const Tensor& features,
                   const Tensor& indices, const Tensor& offsets,
                   std::optional<Tensor> sample_weights, int64_t pooling, int64_t total_rows,
                   bool has_valid_offsets, std::optional<Tensor> is_finite,
                   std::optional<std::vector<Tensor>> located) {
  const char* op = "tbe_backward_";
  check_not_negative(op, "total_rows", total_rows);
  check_has_step(op, hyper);
  check_is_finite(op, is_finite);
  if (located) check_located(op, *located, /*needs_slots=*/false);
  if (is_finite && !*is_finite->const_data_ptr<bool>()) return;
  std::optional<Tensor> row_slots;
  if (located) {
    if (located->size() > kLocatedRowSlots) row_slots = (*located)[kLocatedRowSlots];
  } else {
    const auto [rows, segments, lookups, bags, count] =
        tbe_group(features, indices, offsets, std::nullopt, total_rows, has_valid_offsets);
    located = {rows, segments, lookups, bags, count};
  }
  count_step(hyper, [&] {
    const std::vector<Tensor>& groups = *located;
    tbe_update_(weights, states, hyper, optimizer, grad, features, groups[kGroupRows],
                groups[kGroupSegments], groups[kGroupLookups], groups[kGroupBags],
                groups[kGroupCount], offsets, row_slots, std::nullopt, sample_weights, pooling);
  });
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tbe_row_grads);
  EMB_IMPL(m, emb, tbe_update_);
  EMB_IMPL(m, emb, tbe_backward_);
}
