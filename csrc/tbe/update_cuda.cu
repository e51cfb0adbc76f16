// `tbe_update_` and `tbe_row_grads` on the GPU: checks, scratch memory, launch. How many unique
// rows there are is known on the device only, so grids and scratch are sized by the number of
// lookups.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "core/check.h"
#include "core/launch.h"
#include "optim/device_states.h"
#include "tbe/update.cuh"

namespace emb::cuda {
namespace {

// What `tbe_group` returned.
struct Grouping {
  const Tensor &rows, &segments, &lookups, &bags, &count;
};

// The arguments of a backward op, checked, with the contiguous copies and scratch they point into.
class Backward {
 public:
  Backward(const char* op, const Tensor& grad, const Tensor& features, const Grouping& groups,
           const Tensor& offsets, const std::optional<Tensor>& sample_weights,
           const std::string& pooling)
      : grad_(torch::stable::contiguous(grad)), offsets_(torch::stable::contiguous(offsets)) {
    STD_TORCH_CHECK(grad.dim() == 2, op, ": grad must be [B, columns] or, for none, [L, D], got ",
                    grad.dim(), " dimensions");
    args_.grad_type = float_dtype(op, "grad", grad.scalar_type());
    args_.pooling = parse_pooling(op, pooling);
    check_features(op, features);
    check_index_dtype(op, "offsets", offsets);
    check_groups(op, groups);
    const Tensor* elsewhere[] = {&features, &groups.lookups, &offsets};
    for (const Tensor* tensor : elsewhere) check_same_device(op, "grad", grad, *tensor);
    check_sample_weights(op, sample_weights, groups.lookups);
    const int64_t num_features = features.size(0), batch = batch_size(op, num_features, offsets);
    const int64_t num_lookups = groups.lookups.numel();
    const bool pooled = args_.pooling != Pooling::kNone;
    STD_TORCH_CHECK(grad.size(0) == (pooled ? batch : num_lookups), op, ": grad must have ",
                    pooled ? batch : num_lookups, " rows for pooling ", pooling, ", got ",
                    grad.size(0));
    mean_dim_ = pooled && num_features > 0 ? (grad.size(1) + num_features - 1) / num_features
                                           : grad.size(1);
    args_.grad = grad_.const_data_ptr();
    args_.stride = grad.size(1);
    args_.features = feature_array(features);
    args_.batch = static_cast<uint32_t>(std::max<int64_t>(batch, 1));
    args_.bags_in = Bags{index_array(offsets_), num_features * batch, num_lookups};
    args_.num_lookups = num_lookups;
    if (sample_weights) {
      sample_weights_ = torch::stable::contiguous(*sample_weights);
      args_.sample_weights = sample_weights_->const_data_ptr<float>();
    }
    args_.rows = groups.rows.const_data_ptr<int64_t>();
    args_.segments = groups.segments.const_data_ptr<int32_t>();
    args_.lookups = groups.lookups.const_data_ptr<int32_t>();
    args_.bags = groups.bags.const_data_ptr<int32_t>();
    args_.count = groups.count.const_data_ptr<int32_t>();
  }

  void run(const CudaLauncher& launcher, const RowStepArgs& step) {
    const int64_t chunks = most_chunks(args_.num_lookups);
    if (chunks > 0) {
      partials_ = torch::stable::new_empty(grad_, {chunks, partial_stride(args_.stride)},
                                           ScalarType::Float);
      first_chunk_ = torch::stable::new_empty(grad_, {args_.num_lookups}, ScalarType::Int);
      // The tasks, two words each, and their number.
      tasks_ = torch::stable::new_empty(grad_, {2 * chunks + 1}, ScalarType::Int);
      args_.partials = partials_->mutable_data_ptr<float>();
      args_.partial_stride = partial_stride(args_.stride);
      args_.first_chunk = first_chunk_->mutable_data_ptr<int32_t>();
      args_.tasks = static_cast<ChunkTask*>(tasks_->mutable_data_ptr());
      args_.num_tasks = tasks_->mutable_data_ptr<int32_t>() + 2 * chunks;
      launcher.zero(args_.num_tasks, sizeof(int32_t));
    }
    launch_update(launcher, args_, step, mean_dim_);
  }

 private:
  static void check_groups(const char* op, const Grouping& groups) {
    check_dtype(op, "rows", groups.rows, ScalarType::Long, "int64, as tbe_group returns it");
    const Tensor* parts[] = {&groups.segments, &groups.lookups, &groups.bags, &groups.count};
    for (const Tensor* part : parts) {
      check_dtype(op, "a grouping tensor", *part, ScalarType::Int,
                  "int32, as tbe_group returns it");
      STD_TORCH_CHECK(part->is_contiguous(), op, ": grouping tensors must be contiguous");
      check_same_device(op, "a grouping tensor", *part, groups.rows);
    }
    const int64_t n = groups.lookups.numel();
    STD_TORCH_CHECK(groups.segments.numel() == n + 1 && groups.bags.numel() == n &&
                        groups.rows.numel() == n && groups.count.numel() == 1,
                    op,
                    ": rows, segments, lookups, bags and count must come from one call of "
                    "tbe_group");
  }

  Tensor grad_, offsets_;
  std::optional<Tensor> sample_weights_, partials_, first_chunk_, tasks_;
  GradArgs args_{};
  int64_t mean_dim_ = 0;
};

void tbe_update_(Tensor weights, std::vector<Tensor> states, const Tensor& hyper,
                 std::string optimizer, const Tensor& grad, const Tensor& features,
                 const Tensor& rows, const Tensor& segments, const Tensor& lookups,
                 const Tensor& bags, const Tensor& count, const Tensor& offsets,
                 std::optional<Tensor> sample_weights, std::string pooling) {
  const char* op = "tbe_update_";
  const Dtype weight_type = float_dtype(op, "weights", weights.scalar_type());
  STD_TORCH_CHECK(weights.is_contiguous(), op, ": weights must be contiguous");
  check_same_device(op, "grad", grad, weights);
  Backward backward(op, grad, features, {rows, segments, lookups, bags, count}, offsets,
                    sample_weights, pooling);
  // How many rows the tables have is on the device; that the state is long enough is the module's
  // care.
  const RowStepArgs step = row_step_args(op, weights, weight_type, optimizer, states, hyper, 0);
  backward.run(CudaLauncher(grad), step);
}

Tensor tbe_row_grads(const Tensor& grad, const Tensor& features, const Tensor& rows,
                     const Tensor& segments, const Tensor& lookups, const Tensor& bags,
                     const Tensor& count, const Tensor& offsets,
                     std::optional<Tensor> sample_weights, std::string pooling, int64_t dim) {
  const char* op = "tbe_row_grads";
  STD_TORCH_CHECK(dim > 0, op, ": dim must be positive, got ", dim);
  Backward backward(op, grad, features, {rows, segments, lookups, bags, count}, offsets,
                    sample_weights, pooling);
  Tensor out = torch::stable::new_zeros(grad, {lookups.numel(), dim}, ScalarType::Float);
  RowStepArgs step{};
  step.rule = Rule::kNone;
  step.weights = out.mutable_data_ptr();
  backward.run(CudaLauncher(grad), step);
  return out;
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  m.impl("tbe_update_", TORCH_BOX(&emb::cuda::tbe_update_));
  m.impl("tbe_row_grads", TORCH_BOX(&emb::cuda::tbe_row_grads));
}
