// GPU entries of `tbe_lookup`, `tbe_lookup_checked_` (a lookup with a bounds check in one op),
// `bounds_check`, `bounds_check_` and `tbe_sample_weight_grad`. Each checks its arguments,
// allocates and launches. The contents of device tensors (`features`, `bag_layout`, offsets) are
// not read here, so that the host does not wait for the GPU.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/device_arrays.h"
#include "core/launch.h"
#include "tbe/bounds.cuh"
#include "tbe/check_batch.cuh"
#include "tbe/entries.h"
#include "tbe/lookup.cuh"
#include "tbe/sample_weights.cuh"

namespace emb::cuda {

// The kernel that `launch_bounds_check` launches is compiled in group_cuda.cu only.
extern template void launch_lookup_keys(const CudaLauncher&, const KeySource&, const BatchCheck&,
                                        const SortBuffers<uint32_t>&);

namespace {

// The checked arguments of a lookup. `args` points into the tensors of this object, and into
// `features`, `slots`, `bag_layout` and the weights, which the op's caller keeps alive. For a
// lookup, call set_sample_weights and new_output too, which set the sample weights, the output and
// its dtype.
struct LookupCall {
  Tensor indices, offsets;
  std::optional<Tensor> sample_weights;
  DeviceLookupArgs args{};

  LookupCall(const char* op, const std::vector<Tensor>& weights, const Tensor& features,
             const Tensor& indices_in, const Tensor& offsets_in, const std::optional<Tensor>& slots,
             const std::optional<Tensor>& bag_layout, int64_t pooling, int64_t output_dim)
      : indices(as_contiguous(indices_in)), offsets(as_contiguous(offsets_in)) {
    args.pooling = parse_pooling(op, pooling);
    check_not_negative(op, "output_dim", output_dim);
    check_features(op, features);
    check_lookups(op, indices, offsets);
    check_same_device(op, "features", features, indices);
    check_slots(op, slots, indices);
    set_weights(op, weights);
    const int64_t num_features = features.size(0);
    args.map = bag_map(op, num_features, offsets, bag_layout, output_dim);
    STD_TORCH_CHECK(bag_layout || args.pooling == Pooling::kNone || output_dim >= num_features, op,
                    ": ", num_features, " features need as many columns at least, got ",
                    output_dim);
    args.features = feature_array(features);
    args.num_features = static_cast<int>(num_features);
    args.output_dim = output_dim;
    args.indices = index_array(indices);
    args.bags = Bags{index_array(offsets), offsets.numel() - 1, indices.numel()};
    if (slots && args.num_cache_elements > 0) args.slots = slots->const_data_ptr<int32_t>();
  }

  int64_t batch_size() const {
    return args.num_features > 0 ? args.bags.num_bags / args.num_features : 0;
  }

 private:
  void set_weights(const char* op, const std::vector<Tensor>& weights) {
    const TierWeights tiers(op, weights);
    args.weight_type = tiers.type;
    args.cache_type = tiers.cache_type;
    const void* data[kTiers] = {};
    for (size_t tier = 0; tier < weights.size(); ++tier) {
      if (tiers.elements[tier] > 0) data[tier] = kernel_address(op, weights[tier], indices);
    }
    set_tiers(data, tiers.elements, &args);
  }
};

// Set the sample weights of a lookup, if any. Throws unless they are float32 [L] on the device of
// the indices, and the pooling is sum or mean.
void set_sample_weights(const char* op, const std::optional<Tensor>& sample_weights,
                        LookupCall* lookup) {
  check_sample_weights(op, sample_weights, lookup->indices);
  STD_TORCH_CHECK(lookup->args.pooling != Pooling::kNone || !sample_weights, op,
                  ": sample_weights need sum or mean pooling; with none, scale the output");
  if (!sample_weights) return;
  lookup->sample_weights = as_contiguous(*sample_weights);
  lookup->args.sample_weights = lookup->sample_weights->const_data_ptr<float>();
}

// Allocate the output of a lookup, of `dtype`, and set it in the lookup. Its shape is [B,
// output_dim], [output_dim] for a variable batch, or [L, output_dim] without pooling. The elements
// are not initialised.
Tensor new_output(const char* op, ScalarType dtype, bool is_variable, LookupCall* lookup) {
  DeviceLookupArgs& args = lookup->args;
  const bool is_unpooled = args.pooling == Pooling::kNone;
  args.output_type = float_dtype(op, "output_dtype", dtype);
  const int64_t num_rows = is_unpooled ? lookup->indices.numel() : lookup->batch_size();
  Tensor out = is_variable && !is_unpooled
                   ? allocate(lookup->indices, {args.output_dim}, dtype)
                   : allocate(lookup->indices, {num_rows, args.output_dim}, dtype);
  args.output = out.mutable_data_ptr();
  return out;
}

// Launch a lookup into `out`, whose memory is args.output. Without bags, fill `out` with zeros.
void look_up(const CudaLauncher& launcher, const DeviceLookupArgs& args, Tensor* out) {
  if (args.bags.num_bags == 0) {
    torch::stable::zero_(*out);
  } else if (out->numel() > 0) {
    launch_lookup(launcher, args);
  }
}

}  // namespace

// The contract is in tbe/entries.h.
Tensor tbe_lookup(std::vector<Tensor> weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> slots,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, int64_t output_dim, ScalarType output_dtype) {
  const char* op = "tbe_lookup";
  LookupCall lookup(op, weights, features, indices, offsets, slots, bag_layout, pooling,
                    output_dim);
  set_sample_weights(op, sample_weights, &lookup);
  Tensor out = new_output(op, output_dtype, bag_layout.has_value(), &lookup);
  look_up(CudaLauncher(indices), lookup.args, &out);
  return out;
}

namespace {

// Launch the check of a batch and return its repaired offsets, int32 [bags + 1]. The caller sets
// the members of `args` that describe the batch (up to `map`); the others are set here. `like` is a
// tensor on the device. In the mode "warning" violations are added to `violations`, int64 [2]; in
// the mode "fatal" the kernel traps at them.
Tensor check_batch(const CudaLauncher& launcher, const Tensor& like, BoundsArgs args,
                   BoundsMode mode, Tensor* violations) {
  Tensor repaired = allocate(like, {args.num_bags + 1}, ScalarType::Int);
  DeviceArrays scratch;
  if (!is_small_batch(args)) {
    scratch.add(&args.progress, 2);
    scratch.allocate(like);
  }
  args.is_fatal = mode == BoundsMode::kFatal;
  args.repaired_offsets = repaired.mutable_data_ptr<int32_t>();
  if (mode == BoundsMode::kWarning) {
    args.violations = static_cast<unsigned long long*>(violations->mutable_data_ptr());
  }
  launch_check_batch(launcher, args);
  return repaired;
}

}  // namespace

// The contract is in tbe/entries.h.
Tensor bounds_check_(const Tensor& indices, const Tensor& offsets, const Tensor& features,
                     std::optional<Tensor> bag_layout, int64_t check_mode, Tensor violations) {
  const char* op = "bounds_check_";
  const BoundsMode mode = *check_bounds_arguments(op, check_mode, violations);
  check_features(op, features);
  check_lookups(op, indices, offsets);
  check_same_device(op, "features", features, indices);
  check_same_device(op, "violations", violations, indices);
  const BagMap map = bag_map(op, features.size(0), offsets, bag_layout, 0);
  const Tensor contiguous_indices = as_contiguous(indices),
               contiguous_offsets = as_contiguous(offsets);
  const BoundsArgs args{index_array(contiguous_indices),
                        index_array(contiguous_offsets),
                        feature_array(features),
                        indices.numel(),
                        offsets.numel() - 1,
                        map};
  return check_batch(CudaLauncher(indices), offsets, args, mode, &violations);
}

namespace {

// Look up a batch of B bags per feature. Without a `check_mode` return [output]. With one, check
// the batch first, as `bounds_check_` does, and return [output, repaired offsets]. Unlike on the
// CPU, an invalid batch has a complete output too (unless the mode "fatal" traps), because the
// kernels repair what is invalid. So the host need not wait to learn whether the batch is valid.
std::vector<Tensor> tbe_lookup_checked_(std::vector<Tensor> weights, const Tensor& features,
                                        const Tensor& indices, const Tensor& offsets,
                                        std::optional<Tensor> sample_weights, int64_t pooling,
                                        int64_t output_dim, ScalarType output_dtype,
                                        std::optional<int64_t> check_mode, Tensor violations,
                                        std::optional<Tensor> slots) {
  const char* op = "tbe_lookup_checked_";
  const std::optional<BoundsMode> mode = check_bounds_arguments(op, check_mode, violations);
  check_same_device(op, "violations", violations, indices);
  LookupCall lookup(op, weights, features, indices, offsets, slots, std::nullopt, pooling,
                    output_dim);
  set_sample_weights(op, sample_weights, &lookup);
  Tensor out = new_output(op, output_dtype, false, &lookup);
  const CudaLauncher launcher(indices);
  std::vector<Tensor> results{out};
  if (mode) {
    const DeviceLookupArgs& lookup_args = lookup.args;
    const BoundsArgs bounds{lookup_args.indices,       lookup_args.bags.offsets,
                            lookup_args.features,      lookup_args.bags.num_lookups,
                            lookup_args.bags.num_bags, lookup_args.map};
    results.push_back(check_batch(launcher, offsets, bounds, *mode, &violations));
    lookup.args.bags.offsets = index_array(results.back());
  }
  look_up(launcher, lookup.args, &out);
  return results;
}

// The contract is that of the CPU, in sample_weights_cpu.cpp.
Tensor tbe_sample_weight_grad(const Tensor& grad, std::vector<Tensor> weights,
                              const Tensor& features, const Tensor& indices, const Tensor& offsets,
                              std::optional<Tensor> slots, std::optional<Tensor> bag_layout,
                              int64_t pooling) {
  const char* op = "tbe_sample_weight_grad";
  const int64_t output_dim = check_pooled_grad(op, grad, bag_layout.has_value());
  LookupCall lookup(op, weights, features, indices, offsets, slots, bag_layout, pooling,
                    output_dim);
  STD_TORCH_CHECK(lookup.args.pooling != Pooling::kNone, op, ": needs sum or mean pooling");
  STD_TORCH_CHECK(bag_layout || grad.size(0) == lookup.batch_size(), op,
                  ": grad must have B = ", lookup.batch_size(), " rows, got ", grad.size(0));
  check_same_device(op, "grad", grad, indices);
  const Tensor grad_tensor = with_adjacent_columns(grad);
  // The gradient may be a view whose rows are not adjacent: a kernel steps by its row stride.
  lookup.args.map.stride = row_stride(grad_tensor);
  Tensor out = allocate_zeros(grad, {indices.numel()}, ScalarType::Float);
  const DeviceSampleWeightArgs args{lookup.args, grad_tensor.const_data_ptr(),
                                    float_dtype(op, "grad", grad.scalar_type()),
                                    out.mutable_data_ptr<float>()};
  launch_sample_weights(CudaLauncher(indices), args);
  return out;
}

// The contract is that of emb::bounds_check in tbe/entries.h. Unlike check_batch it overwrites
// `violations`, which the kernel of small batches cannot.
std::tuple<Tensor, Tensor> bounds_check(const Tensor& indices, const Tensor& offsets,
                                        const Tensor& features, std::optional<Tensor> bag_layout,
                                        int64_t check_mode) {
  const char* op = "bounds_check";
  const auto mode = parse_choice<BoundsMode>(op, "mode", check_mode, kBoundsModes);
  check_features(op, features);
  check_lookups(op, indices, offsets);
  check_same_device(op, "features", features, indices);
  const CudaLauncher launcher(indices);
  const BagMap map = bag_map(op, features.size(0), offsets, bag_layout, 0);
  const int64_t num_bags = offsets.numel() - 1;
  const Tensor contiguous_indices = as_contiguous(indices);
  const Tensor contiguous_offsets = as_contiguous(offsets);
  Tensor repaired = allocate(offsets, {num_bags + 1}, ScalarType::Int);
  Tensor violations = allocate(offsets, {2}, ScalarType::Long);
  std::optional<Tensor> progress;
  if (!checks_with_one_block(indices.numel(), num_bags)) {
    progress = allocate(offsets, {2}, ScalarType::Long);
  }
  const auto counter_address = [](const std::optional<Tensor>& tensor) {
    return static_cast<unsigned long long*>(tensor ? tensor->mutable_data_ptr() : nullptr);
  };
  const BoundsArgs args{.indices = index_array(contiguous_indices),
                        .offsets = index_array(contiguous_offsets),
                        .features = feature_array(features),
                        .num_lookups = indices.numel(),
                        .num_bags = num_bags,
                        .map = map,
                        .is_fatal = mode == BoundsMode::kFatal,
                        .progress = counter_address(progress),
                        .repaired_offsets = repaired.mutable_data_ptr<int32_t>(),
                        .violations = counter_address(violations),
                        .adds_violations = false};
  launch_bounds_check(launcher, args);
  return {repaired, violations};
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, tbe_lookup);
  EMB_IMPL(m, emb::cuda, tbe_lookup_checked_);
  EMB_IMPL(m, emb::cuda, tbe_sample_weight_grad);
  EMB_IMPL(m, emb::cuda, bounds_check);
  EMB_IMPL(m, emb::cuda, bounds_check_);
}
