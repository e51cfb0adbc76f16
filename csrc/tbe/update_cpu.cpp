// The backward ops of table-batched embeddings on the CPU: `tbe_update_` (fused optimizer),
// `tbe_row_grads` (gradients handed out) and `tbe_sample_weight_grad`.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "core/check.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "optim/check_states.h"
#include "tbe/feature_bags.h"
#include "tbe/update_table.h"

namespace emb {

namespace baseline {
extern const UpdateTable kUpdateTable;
}
#if defined(EMB_X86)
namespace avx2 {
extern const UpdateTable kUpdateTable;
}
namespace avx512 {
extern const UpdateTable kUpdateTable;
}
#endif

namespace {

const UpdateTable& update_table() {
#if defined(EMB_X86)
  return pick_isa(baseline::kUpdateTable, avx2::kUpdateTable, avx512::kUpdateTable);
#else
  return baseline::kUpdateTable;
#endif
}

constexpr int64_t kGrain = 512;

// Gradients up to this size are found in the caches without asking, most of them in the core's
// own: a gradient row comes back with every lookup of its bag. Asking for those costs time (8 % of
// the update at 1.3 MB with 20 lookups a bag).
constexpr int64_t kCacheBytes = int64_t{2} << 20;

// The tensors of a grouping and of the gradient, held contiguous for the time of a call.
struct Gradient {
  Tensor grad, features, segments, lookups, bags, offsets;
  std::optional<Tensor> sample_weights;
  std::vector<float> bag_scale;
  int64_t num_groups, num_lookups, batch;
  Dtype type;
  Pooling pooling;

  Gradient(const char* op, const Tensor& grad_in, const Tensor& features_in, const Tensor& rows,
           const Tensor& segments_in, const Tensor& lookups_in, const Tensor& bags_in,
           const Tensor& count, const Tensor& offsets_in)
      : grad(torch::stable::contiguous(grad_in)),
        features(features_in),
        segments(segments_in),
        lookups(lookups_in),
        bags(bags_in),
        offsets(torch::stable::contiguous(offsets_in)) {
    check_features(op, features);
    type = float_dtype(op, "grad", grad.scalar_type());
    STD_TORCH_CHECK(grad.dim() == 2, op, ": grad must be [B, columns] or, for none, [L, D], got ",
                    grad.dim(), " dimensions");
    for (const Tensor* tensor : {&segments_in, &lookups_in, &bags_in, &count}) {
      check_dtype(op, "a grouping tensor", *tensor, ScalarType::Int,
                  "int32, as tbe_group returns it");
      STD_TORCH_CHECK(tensor->is_contiguous(), op, ": grouping tensors must be contiguous");
    }
    check_index_dtype(op, "offsets", offsets);
    num_lookups = lookups.numel();
    batch = batch_size(op, features.size(0), offsets);
    check_grouping(op, rows, count);
  }

  // The kernels trust a grouping, so one that tbe_group did not make must not get to them: 12 bytes
  // a lookup, read once, beside rows of hundreds.
  void check_grouping(const char* op, const Tensor& rows, const Tensor& count) {
    bool valid = rows.numel() == num_lookups && segments.numel() == num_lookups + 1 &&
                 bags.numel() == num_lookups && count.numel() == 1;
    num_groups = valid ? *count.const_data_ptr<int32_t>() : 0;
    valid = valid && num_groups >= 0 && num_groups <= num_lookups;
    if (valid) {
      const auto num_bags = static_cast<int32_t>(features.size(0) * batch);
      const int32_t *segment = segments.const_data_ptr<int32_t>(),
                    *bag = bags.const_data_ptr<int32_t>(),
                    *lookup = lookups.const_data_ptr<int32_t>();
      const auto n = static_cast<int32_t>(num_lookups), grouped = segment[num_groups];
      int32_t signs = segment[0] | (n - grouped);
      for (int64_t i = 0; i < num_groups; ++i) {
        signs |= segment[i] | (segment[i + 1] - segment[i] - 1);
      }
      valid = signs >= 0;
      for (int32_t j = 0; valid && j < grouped; ++j) {
        signs |= bag[j] | (num_bags - 1 - bag[j]) | lookup[j] | (n - 1 - lookup[j]);
      }
      valid = valid && signs >= 0;
    }
    STD_TORCH_CHECK(valid, op,
                    ": rows, segments, lookups, bags and count must come from one call of "
                    "tbe_group for these features and offsets");
  }

  void set_pooling(const char* op, const std::string& name, const std::optional<Tensor>& weights) {
    pooling = parse_pooling(op, name);
    check_sample_weights(op, weights, lookups);
    if (weights) sample_weights = torch::stable::contiguous(*weights);
    const int64_t lines = pooling == Pooling::kNone ? num_lookups : batch;
    STD_TORCH_CHECK(grad.size(0) == lines, op, ": grad must have ", lines, " rows for pooling ",
                    name, ", got ", grad.size(0));
    if (pooling == Pooling::kMean) {
      const Bags ranges{index_array(offsets), features.size(0) * batch, num_lookups};
      bag_scale.resize(ranges.count);
      for (int64_t bag = 0; bag < ranges.count; ++bag) {
        const int64_t length = ranges.end(bag) - ranges.begin(bag);
        bag_scale[bag] = length > 0 ? 1.0f / static_cast<float>(length) : 0.0f;
      }
    }
  }

  GradArgs args() const {
    return {grad.const_data_ptr(),
            grad.size(1),
            static_cast<int64_t>(grad.element_size()),
            feature_array(features),
            std::max<int64_t>(batch, 1),
            Divider(static_cast<uint32_t>(std::max<int64_t>(batch, 1))),
            segments.const_data_ptr<int32_t>(),
            lookups.const_data_ptr<int32_t>(),
            bags.const_data_ptr<int32_t>(),
            bag_scale.empty() ? nullptr : bag_scale.data(),
            sample_weights ? sample_weights->const_data_ptr<float>() : nullptr,
            pooling == Pooling::kNone,
            grad.numel() * static_cast<int64_t>(grad.element_size()) > kCacheBytes};
  }

  int64_t max_dim() const {
    int64_t dim = 0;
    const Feature* feature = feature_array(features);
    for (int64_t f = 0; f < features.size(0); ++f) dim = std::max(dim, feature[f].dim);
    return dim;
  }
};

// The chunk sums of all segments longer than kChunk, so that one hot row keeps every thread busy.
struct ChunkSums {
  std::vector<int64_t> groups, first_chunk = {0};
  std::unique_ptr<float[]> partials;
  int64_t stride = 0;

  ChunkSums(const GradArgs& args, int64_t num_groups, int64_t dim, SumFn sum) : stride(dim) {
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t length = args.segments[group + 1] - args.segments[group];
      if (length <= kChunk) continue;
      groups.push_back(group);
      first_chunk.push_back(first_chunk.back() + (length + kChunk - 1) / kChunk);
    }
    if (groups.empty()) return;
    partials.reset(new float[first_chunk.back() * stride]);
    parallel_tasks(first_chunk.back(), [&](int64_t chunk) {
      const int64_t i =
          std::upper_bound(first_chunk.begin(), first_chunk.end(), chunk) - first_chunk.begin() - 1;
      const int64_t begin = args.segments[groups[i]] + (chunk - first_chunk[i]) * kChunk;
      const int64_t end = std::min<int64_t>(begin + kChunk, args.segments[groups[i] + 1]);
      const int64_t bag = args.bags[begin];
      sum(args, begin, end, args.features[bag / args.batch].dim, partials.get() + chunk * stride);
    });
  }

  LongSegments view() const {
    return {groups.data(), first_chunk.data(), static_cast<int64_t>(groups.size()), partials.get(),
            stride};
  }
};

// A group costs its row, about four lookups' worth, and every lookup of it.
template <class Body>
void for_groups(const GradArgs& args, int64_t num_groups, const Body& body) {
  const auto cost = [&](int64_t group) { return args.segments[group] + 4 * group; };
  parallel_balanced(num_groups, kGrain, cost, body);
}

Tensor tbe_row_grads(const Tensor& grad, const Tensor& features, const Tensor& rows,
                     const Tensor& segments, const Tensor& lookups, const Tensor& bags,
                     const Tensor& count, const Tensor& offsets,
                     std::optional<Tensor> sample_weights, std::string pooling, int64_t dim) {
  const char* op = "tbe_row_grads";
  Gradient gradient(op, grad, features, rows, segments, lookups, bags, count, offsets);
  gradient.set_pooling(op, pooling, sample_weights);
  check_layout(op, features, kAnyNumber, grad.size(1), kAnyNumber, gradient.pooling);
  const Feature* feature = feature_array(features);
  for (int64_t f = 0; f < features.size(0); ++f) {
    STD_TORCH_CHECK(feature[f].dim == dim, op, ": all features must have dim ", dim, ", feature ",
                    f, " has ", feature[f].dim);
  }
  Tensor out = torch::stable::new_empty(grad, {gradient.num_lookups, dim}, ScalarType::Float);
  float* result = out.mutable_data_ptr<float>();
  UpdateArgs args(gradient.args());
  const SumFn sum = update_table().sum[static_cast<int>(gradient.type)];
  const ChunkSums chunks(args.grads, gradient.num_groups, dim, sum);
  args.longs = chunks.view();
  for_groups(args.grads, gradient.num_groups, [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      update_table().segment_sum(args, sum, group, dim, result + group * dim);
    }
  });
  return out;
}

void tbe_update_(Tensor weights, std::vector<Tensor> states, const Tensor& hyper,
                 std::string optimizer, const Tensor& grad, const Tensor& features,
                 const Tensor& rows, const Tensor& segments, const Tensor& lookups,
                 const Tensor& bags, const Tensor& count, const Tensor& offsets,
                 std::optional<Tensor> sample_weights, std::string pooling) {
  const char* op = "tbe_update_";
  const Dtype weight_type = float_dtype(op, "weights", weights.scalar_type());
  STD_TORCH_CHECK(weights.is_contiguous(), op, ": weights must be contiguous");
  Gradient gradient(op, grad, features, rows, segments, lookups, bags, count, offsets);
  gradient.set_pooling(op, pooling, sample_weights);
  check_layout(op, features, weights.numel(), grad.size(1), kAnyNumber, gradient.pooling);
  check_dtype(op, "rows", rows, ScalarType::Long, "int64");
  const UpdateFn update = update_table().update(optimizer.c_str(), weight_type);
  const Feature* feature = feature_array(features);
  int64_t total_rows = 0;
  for (int64_t f = 0; f < features.size(0); ++f) {
    total_rows = std::max(total_rows, feature[f].row_base + feature[f].rows);
  }
  const States state = check_states(op, optimizer, states, hyper, weights.numel(), total_rows);
  UpdateArgs args(gradient.args());
  args.rows = rows.const_data_ptr<int64_t>();
  args.weights = weights.mutable_data_ptr();
  args.element_states[0] = state.element[0];
  args.element_states[1] = state.element[1];
  args.row_state = state.row;
  args.hyper = hyper.const_data_ptr<double>();
  const int64_t dim = gradient.max_dim();
  const SumFn sum = update_table().sum[static_cast<int>(gradient.type)];
  const ChunkSums chunks(args.grads, gradient.num_groups, dim, sum);
  args.longs = chunks.view();
  for_groups(args.grads, gradient.num_groups, [&](int64_t begin, int64_t end) {
    const std::unique_ptr<float[]> scratch(new float[(kRowBatch + 1) * dim]);
    update(args, sum, scratch.get(), begin, end);
  });
}

Tensor tbe_sample_weight_grad(const Tensor& grad, const Tensor& weights, const Tensor& features,
                              const Tensor& indices, const Tensor& offsets, std::string pooling) {
  const char* op = "tbe_sample_weight_grad";
  const Dtype weight_type = float_dtype(op, "weights", weights.scalar_type());
  const Dtype grad_type = float_dtype(op, "grad", grad.scalar_type());
  const Pooling mode = parse_pooling(op, pooling);
  STD_TORCH_CHECK(mode != Pooling::kNone, op, ": needs sum or mean pooling");
  check_features(op, features);
  check_lookups(op, indices, offsets);
  const int64_t batch = batch_size(op, features.size(0), offsets);
  STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == batch, op, ": grad must have B = ", batch,
                  " rows");
  STD_TORCH_CHECK(weights.is_contiguous(), op, ": weights must be contiguous");
  check_layout(op, features, weights.numel(), grad.size(1), kAnyNumber, mode);
  const Tensor grad_tensor = torch::stable::contiguous(grad);
  const Tensor index_tensor = torch::stable::contiguous(indices);
  const Tensor offset_tensor = torch::stable::contiguous(offsets);
  const Bags bags{index_array(offset_tensor), features.size(0) * batch, indices.numel()};
  Tensor out = torch::stable::new_zeros(grad, {indices.numel()}, ScalarType::Float);
  const Feature* feature = feature_array(features);
  const SampleWeightFn kernel =
      update_table().sample_weight[static_cast<int>(weight_type)][static_cast<int>(grad_type)];
  for_feature_bags(bags, batch, [&](int64_t f, int64_t begin, int64_t end) {
    const SampleWeightArgs args{
        static_cast<const char*>(weights.const_data_ptr()) +
            feature[f].weight_offset * weights.element_size(),
        feature[f].rows,
        feature[f].dim,
        index_array(index_tensor),
        bags,
        mode,
        static_cast<const char*>(grad_tensor.const_data_ptr()) +
            (begin % batch * grad.size(1) + feature[f].column) * grad.element_size(),
        grad.size(1),
        begin,
        out.mutable_data_ptr<float>()};
    kernel(args, begin, end);
  });
  return out;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  m.impl("tbe_row_grads", TORCH_BOX(&emb::tbe_row_grads));
  m.impl("tbe_update_", TORCH_BOX(&emb::tbe_update_));
  m.impl("tbe_sample_weight_grad", TORCH_BOX(&emb::tbe_sample_weight_grad));
}
