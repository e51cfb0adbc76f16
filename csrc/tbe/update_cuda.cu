// `tbe_update_`, `tbe_row_grads` and `tbe_backward_` on the GPU: check the arguments, allocate
// scratch memory, launch. The number of unique rows is known on the device only, so grids and
// scratch are sized by the number of lookups. The contracts are those of update_cpu.cpp, with these
// differences: the contents of device tensors are trusted, row_slots must be [L], `located` must
// have row_slots and as many lookups as `indices`, `is_finite` is read on the device, and `dim` of
// tbe_row_grads must be positive. No op waits for the device. L is the number of lookups.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "core/device_arrays.h"
#include "core/launch.h"
#include "optim/device_states.h"
#include "tbe/entries.h"
#include "tbe/grouping.h"
#include "tbe/update.cuh"

namespace emb::cuda {
namespace {

// The checked arguments of a backward op. `args_` points into tensors of this object and of the
// op's caller. Use: construct; set_groups; set_slots if rows may be in a cache, or
// set_result_stride without an optimizer; then launch_and_count, allocate_and_launch, or
// add_scratch and launch.
class BackwardCall {
 public:
  // Check the arguments and set all members except those of the groups. `lookups` has one entry per
  // lookup: the sorted lookups of the grouping, or the indices. Only its size and device are used.
  BackwardCall(const char* op, const Tensor& grad, const Tensor& features, const Tensor& lookups,
               const Tensor& offsets, const std::optional<Tensor>& bag_layout,
               const std::optional<Tensor>& sample_weights, int64_t pooling)
      : grad_(with_adjacent_columns(grad)), offsets_(as_contiguous(offsets)) {
    args_.grad_type = float_dtype(op, "grad", grad.scalar_type());
    args_.pooling = parse_pooling(op, pooling);
    check_features(op, features);
    check_index_vector(op, "offsets", offsets);
    const Tensor* other_inputs[] = {&features, &lookups, &offsets};
    for (const Tensor* tensor : other_inputs) check_same_device(op, "grad", grad, *tensor);
    check_sample_weights(op, sample_weights, lookups);
    const int64_t num_lookups = lookups.numel();
    const int64_t columns = check_grad(op, grad, num_lookups, bag_layout.has_value());
    args_.map = bag_map(op, features.size(0), offsets_, bag_layout, row_stride(grad_));
    const int64_t num_bags = std::max<int64_t>(offsets.numel() - 1, 0);
    if (args_.pooling != Pooling::kNone && !bag_layout) {
      const int64_t batch = batch_size(op, features.size(0), offsets);
      STD_TORCH_CHECK(grad.size(0) == batch, op, ": grad must have ", batch, " rows for pooling ",
                      kPoolings[pooling], ", got ", grad.size(0));
    }
    set_widths(features.size(0), num_bags, columns, bag_layout.has_value());
    args_.grad = grad_.const_data_ptr();
    args_.grad_stride = row_stride(grad_);
    args_.features = feature_array(features);
    args_.bags = Bags{index_array(offsets_), num_bags, num_lookups};
    args_.num_lookups = num_lookups;
    if (sample_weights) {
      sample_weights_ = as_contiguous(*sample_weights);
      args_.sample_weights = sample_weights_->const_data_ptr<float>();
    }
  }

  // Set the groups. Throws unless the tensors have the dtypes and sizes of a grouping of as many
  // lookups as this object has, and are on one device. The second overload checks nothing.
  void set_groups(const char* op, const Grouping& groups) {
    check_groups(op, groups);
    STD_TORCH_CHECK(groups.sorted_lookups.numel() == args_.num_lookups, op,
                    ": the grouping must have one entry per lookup = ", args_.num_lookups, ", got ",
                    groups.sorted_lookups.numel());
    args_.rows = groups.rows.const_data_ptr<int64_t>();
    args_.segments = groups.segments.const_data_ptr<int32_t>();
    args_.sorted_lookups = groups.sorted_lookups.const_data_ptr<int32_t>();
    args_.sorted_bags = groups.sorted_bags.const_data_ptr<int32_t>();
    args_.num_groups = groups.num_groups.const_data_ptr<int32_t>();
  }

  void set_groups(const DeviceGrouping& groups) {
    args_.rows = groups.rows;
    args_.segments = groups.segments;
    args_.sorted_lookups = groups.sorted_lookups;
    args_.sorted_bags = groups.sorted_bags;
    args_.num_groups = groups.num_groups;
  }

  // Set the cache slots of the unique rows, int32 [L]; null if nothing is cached.
  void set_slots(const char* op, const std::optional<Tensor>& row_slots) {
    if (!row_slots) return;
    check_row_slots(op, *row_slots, 0);
    check_same_device(op, "row_slots", *row_slots, grad_);
    STD_TORCH_CHECK(row_slots->numel() == args_.num_lookups, op,
                    ": row_slots must have one entry per lookup = ", args_.num_lookups, ", got ",
                    row_slots->numel());
    args_.row_slots = row_slots->const_data_ptr<int32_t>();
  }

  // Without an optimizer: set the number of floats from one gradient of a row to the next.
  void set_result_stride(int64_t stride) { args_.result_stride = stride; }

  // Reserve the scratch of `launch`. Then call scratch->allocate(), which writes the addresses into
  // this object: the object must not move in between. Without chunk slots nothing is reserved.
  void add_scratch(DeviceArrays* scratch) {
    const int64_t num_slots = num_chunk_slots(args_.num_lookups);
    if (num_slots == 0) return;
    scratch->add(&args_.chunk_sums, num_slots * args_.chunk_sum_stride);
    scratch->add(&args_.chunk_tasks, num_slots);
  }

  // Launch the update, in scratch that add_scratch reserved. The grouping must have counted the
  // step.
  void launch(const CudaLauncher& launcher, const OptimizerStepArgs& optimizer) {
    launch_update(launcher, args_, optimizer, mean_dim_);
  }

  // Allocate scratch and launch the update, which does not count the step.
  void allocate_and_launch(const CudaLauncher& launcher, const OptimizerStepArgs& optimizer) {
    DeviceArrays scratch;
    add_scratch(&scratch);
    if (num_chunk_slots(args_.num_lookups) > 0) scratch.allocate(grad_);
    launch(launcher, optimizer);
  }

  // Allocate scratch, launch the update, and count the step; the grouping must not have counted it.
  void launch_and_count(const CudaLauncher& launcher, const OptimizerStepArgs& optimizer,
                        const StepCount& count) {
    int32_t* num_groups_to_update = nullptr;
    DeviceArrays scratch;
    scratch.add(&num_groups_to_update, 1);
    add_scratch(&scratch);
    scratch.allocate(grad_);
    launch_update(launcher, args_, optimizer, mean_dim_, count, num_groups_to_update);
  }

 private:
  // Check the shape of the gradient and return its columns: of one row, or in a variable batch of
  // all rows together.
  int64_t check_grad(const char* op, const Tensor& grad, int64_t num_lookups,
                     bool is_variable) const {
    if (args_.pooling != Pooling::kNone) return check_pooled_grad(op, grad, is_variable);
    STD_TORCH_CHECK(grad.dim() == 2 && grad.size(0) == num_lookups, op,
                    ": grad must be [L, D] with L = ", num_lookups, " for pooling none");
    return grad.size(1);
  }

  // Set the mean width of a row, and chunk_sum_stride from the width of the widest row whose
  // lookups are summed in chunks.
  void set_widths(int64_t num_features, int64_t num_bags, int64_t columns, bool is_variable) {
    const bool is_pooled = args_.pooling != Pooling::kNone;
    // The gradients of rows among which `columns` are divided.
    const int64_t num_pooled_rows = is_variable ? num_bags : num_features;
    const int64_t num_rows = is_pooled ? num_pooled_rows : 1;
    mean_dim_ = num_rows > 0 ? (columns + num_rows - 1) / num_rows : columns;
    const int64_t max_dim =
        is_pooled && is_variable ? std::min(columns, kMaxVariableColumns) : columns;
    args_.chunk_sum_stride = chunk_sum_stride(max_dim);
  }

  static constexpr const char* kMustBeContiguous = ": grouping tensors must be contiguous";

  // Check the dtypes, sizes and devices of a grouping; its contents are trusted.
  static void check_groups(const char* op, const Grouping& groups) {
    check_dtype(op, "rows", groups.rows, ScalarType::Long, "int64, as tbe_group returns it");
    STD_TORCH_CHECK(groups.rows.is_contiguous(), op, kMustBeContiguous);
    const Tensor* tensors[] = {&groups.segments, &groups.sorted_lookups, &groups.sorted_bags,
                               &groups.num_groups};
    for (const Tensor* tensor : tensors) {
      check_dtype(op, "a grouping tensor", *tensor, ScalarType::Int,
                  "int32, as tbe_group returns it");
      STD_TORCH_CHECK(tensor->is_contiguous(), op, kMustBeContiguous);
      check_same_device(op, "a grouping tensor", *tensor, groups.rows);
    }
    const int64_t n = groups.sorted_lookups.numel();
    STD_TORCH_CHECK(groups.segments.numel() == n + 1 && groups.sorted_bags.numel() == n &&
                        groups.rows.numel() == n && groups.num_groups.numel() == 1,
                    op,
                    ": rows, segments, lookups, bags and count must come from one call of "
                    "tbe_group");
  }

  Tensor grad_, offsets_;
  std::optional<Tensor> sample_weights_;
  DeviceGradArgs args_{};
  int64_t mean_dim_ = 0;
};

// Update the rows of a grouping in place: sum the gradients of each unique row, and apply the
// optimizer to it.
//   weights, states  one tensor per memory tier, and the optimizer's states of all tiers; written
//   hyper            float64, see Hyper; read only: the caller has counted the step
//   rows..count      the grouping that tbe_group returned for these features and offsets
//   row_slots        int32 [L] cache slot of each unique row; null: nothing is cached
//   grad             [B, output_dim], with pooling and bag_layout [output_dim], without pooling
//                    [L, D]
void tbe_update_(std::vector<Tensor> weights, std::vector<Tensor> states, const Tensor& hyper,
                 int64_t optimizer, const Tensor& grad, const Tensor& features, const Tensor& rows,
                 const Tensor& segments, const Tensor& lookups, const Tensor& bags,
                 const Tensor& count, const Tensor& offsets, std::optional<Tensor> row_slots,
                 std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                 int64_t pooling) {
  const char* op = "tbe_update_";
  check_same_device(op, "hyper", hyper, grad);
  BackwardCall backward(op, grad, features, lookups, offsets, bag_layout, sample_weights, pooling);
  backward.set_groups(op, {rows, segments, lookups, bags, count});
  backward.set_slots(op, row_slots);
  const OptimizerStepArgs step = optimizer_step_args(op, weights, optimizer, states, hyper, 0);
  backward.allocate_and_launch(CudaLauncher(grad), step);
}

// Count the step in `hyper`, and update a fixed batch: group its lookups, or use the grouping
// `located` (check_located), and then do what tbe_update_ does. If `is_finite`, bool [1] or null,
// is false, nothing is counted or updated. All checks and allocations come before the kernel that
// counts the step, so that a call that fails one of them counts no step.
void tbe_backward_(std::vector<Tensor> weights, std::vector<Tensor> states, Tensor hyper,
                   int64_t optimizer, const Tensor& grad, const Tensor& features,
                   const Tensor& indices, const Tensor& offsets,
                   std::optional<Tensor> sample_weights, int64_t pooling, int64_t total_rows,
                   bool has_valid_offsets, std::optional<Tensor> is_finite,
                   std::optional<std::vector<Tensor>> located) {
  const char* op = "tbe_backward_";
  check_lookups(op, indices, offsets);
  check_same_device(op, "hyper", hyper, grad);
  check_not_negative(op, "total_rows", total_rows);
  check_has_step(op, hyper);
  check_is_finite(op, is_finite);
  if (is_finite) check_same_device(op, "is_finite", *is_finite, grad);
  const StepCount step_count{static_cast<double*>(hyper.mutable_data_ptr()) + Hyper::kStep,
                             is_finite ? is_finite->const_data_ptr<bool>() : nullptr};
  BackwardCall backward(op, grad, features, indices, offsets, std::nullopt, sample_weights,
                        pooling);
  const OptimizerStepArgs step = optimizer_step_args(op, weights, optimizer, states, hyper, 0);
  const CudaLauncher launcher(grad);
  if (located) {
    check_located(op, *located, /*needs_slots=*/true);
    const std::vector<Tensor>& groups = *located;
    backward.set_groups(op, {groups[kGroupRows], groups[kGroupSegments], groups[kGroupLookups],
                             groups[kGroupBags], groups[kGroupCount]});
    backward.set_slots(op, groups[kLocatedRowSlots]);
    return backward.launch_and_count(launcher, step, step_count);
  }
  const Tensor index_tensor = as_contiguous(indices), offset_tensor = as_contiguous(offsets);
  const int64_t n = indices.numel();
  DeviceGrouping groups{};
  DeviceArrays scratch;
  scratch.add(&groups.rows, n);
  scratch.add(&groups.segments, n + 1);
  scratch.add(&groups.sorted_lookups, n);
  scratch.add(&groups.sorted_bags, n);
  scratch.add(&groups.num_groups, 1);
  backward.add_scratch(&scratch);
  scratch.allocate(grad);
  backward.set_groups(groups);
  const GroupInput batch{
      feature_array(features),
      index_array(index_tensor),
      Bags{index_array(offset_tensor), std::max<int64_t>(offsets.numel() - 1, 0), n},
      bag_map(op, features.size(0), offset_tensor, std::nullopt, 0),
      total_rows,
      has_valid_offsets};
  group_lookups(launcher, grad, batch, groups, step_count);
  backward.launch(launcher, step);
}

// Write the gradient of each group's row to `out`, float32 [L, dim] of device memory. Rows after
// the last group and columns beyond the dim of a row are not written. The groups must be set.
void sum_row_grads(BackwardCall* backward, const Tensor& grad, int64_t dim, float* out) {
  backward->set_result_stride(dim);
  OptimizerStepArgs step;
  step.tiers[0].weights = out;
  backward->allocate_and_launch(CudaLauncher(grad), step);
}

// Return the gradient of each unique row, float32 [L, dim]: row g is that of group g. Other rows,
// and columns beyond the dim of a group's table, are 0. No feature may have more than `dim`
// columns; not checked.
Tensor tbe_row_grads(const Tensor& grad, const Tensor& features, const Tensor& rows,
                     const Tensor& segments, const Tensor& lookups, const Tensor& bags,
                     const Tensor& count, const Tensor& offsets, std::optional<Tensor> bag_layout,
                     std::optional<Tensor> sample_weights, int64_t pooling, int64_t dim) {
  const char* op = "tbe_row_grads";
  STD_TORCH_CHECK(dim > 0, op, ": dim must be positive, got ", dim);
  BackwardCall backward(op, grad, features, lookups, offsets, bag_layout, sample_weights, pooling);
  backward.set_groups(op, {rows, segments, lookups, bags, count});
  Tensor out = allocate_zeros(grad, {lookups.numel(), dim}, ScalarType::Float);
  sum_row_grads(&backward, grad, dim, out.mutable_data_ptr<float>());
  return out;
}

}  // namespace

// The contract is in tbe/entries.h.
void sum_row_grads(const char* op, const Tensor& grad, const Tensor& features,
                   const Tensor& indices, const DeviceGrouping& groups, const Tensor& offsets,
                   const std::optional<Tensor>& bag_layout,
                   const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t dim,
                   float* out) {
  BackwardCall backward(op, grad, features, indices, offsets, bag_layout, sample_weights, pooling);
  backward.set_groups(groups);
  sum_row_grads(&backward, grad, dim, out);
}

}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, tbe_update_);
  EMB_IMPL(m, emb::cuda, tbe_backward_);
  EMB_IMPL(m, emb::cuda, tbe_row_grads);
}
