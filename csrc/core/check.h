// Checks of arguments that the entries of several ops share, and conversion of tensors to the
// structs that kernels take. Messages state the rule and, where it is short, the value that was
// passed and the remedy. An entry must run all checks before it writes anything.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>
#include <vector>

#include "core/dtype.h"
#include "core/entry.h"
#include "core/layout.h"

namespace emb {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Return the name of a dtype in torch, for messages; "another dtype" if it is not in this list.
inline const char* dtype_name(ScalarType type) {
  switch (type) {
    case ScalarType::Double:
      return "float64";
    case ScalarType::Float:
      return "float32";
    case ScalarType::Half:
      return "float16";
    case ScalarType::BFloat16:
      return "bfloat16";
    case ScalarType::Long:
      return "int64";
    case ScalarType::Int:
      return "int32";
    case ScalarType::Bool:
      return "bool";
    default:
      return "another dtype";
  }
}

// The check functions below throw unless an argument has the property in their name. `op` and
// `name` are the names of the op and of its argument, for the message. They look at dtype, shape,
// strides and device of tensors on any device. Only check_feature_ranges reads contents.

inline void check_same_device(const char* op, const char* name, const Tensor& tensor,
                              const Tensor& like) {
  STD_TORCH_CHECK(
      tensor.device() == like.device(), op, ": ", name,
      " must be on the device of the other arguments (one is on the CPU, one is not, or "
      "they are on two GPUs); move it with .to(device)");
}

// Check that a number, such as a size, is not negative.
inline void check_not_negative(const char* op, const char* name, int64_t number) {
  STD_TORCH_CHECK(number >= 0, op, ": ", name, " must be >= 0, got ", number);
}

// What to do with the ids of lookups in more than one dimension, for `check_index_vector`.
inline constexpr char kFlattenLookups[] =
    "; bags are given by offsets, so flatten them and pass where the bags start";

// Check that a tensor is a vector of int32 or int64. `remedy` ends the error for other dimensions.
inline void check_index_vector(const char* op, const char* name, const Tensor& tensor,
                               const char* remedy = "; use .view(-1)") {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, op, ": ", name,
                  " must be int32 or int64, got ", dtype_name(type));
  STD_TORCH_CHECK(tensor.dim() == 1, op, ": ", name, " must have 1 dimension, got ", tensor.dim(),
                  remedy);
}

// Return the Dtype of a float type of 16 or 32 bits. Throws for another dtype.
inline Dtype float_dtype(const char* op, const char* name, ScalarType type) {
  if (type == ScalarType::Float) return Dtype::kFloat;
  if (type == ScalarType::Half) return Dtype::kHalf;
  STD_TORCH_CHECK(type == ScalarType::BFloat16, op, ": ", name,
                  " must be float32, float16 or bfloat16, got ", dtype_name(type));
  return Dtype::kBfloat16;
}

inline void check_dtype(const char* op, const char* name, const Tensor& tensor, ScalarType type,
                        const char* type_name) {
  STD_TORCH_CHECK(tensor.scalar_type() == type, op, ": ", name, " must be ", type_name, ", got ",
                  dtype_name(tensor.scalar_type()));
}

// Return a list of the codes 0 to count - 1 for a message: "0 (sum), 1 (mean), 2 (none)".
inline std::string list_codes(const char* const* names, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(i) + " (" + names[i] + ")";
  }
  return text;
}

// Return the enumerator whose value is `code`. Throws if there is none. `names` are the names of
// the enumerators, see core/codes.h.
template <class Choice, size_t n>
Choice parse_choice(const char* op, const char* argument, int64_t code,
                    const char* const (&names)[n]) {
  STD_TORCH_CHECK(code >= 0 && code < static_cast<int64_t>(n), op, ": ", argument,
                  " must be one of ", list_codes(names, n), ", got ", code);
  return static_cast<Choice>(code);
}

// Return the Pooling whose value is `code`. Throws if there is none.
inline Pooling parse_pooling(const char* op, int64_t code) {
  return parse_choice<Pooling>(op, "pooling", code, kPoolings);
}

// Check that `features` is a contiguous int64 [F, 8], rows of Feature. Its contents are not read.
inline void check_features(const char* op, const Tensor& features) {
  check_dtype(op, "features", features, ScalarType::Long, "int64");
  STD_TORCH_CHECK(
      features.dim() == 2 && features.size(1) == kFeatureColumns && features.is_contiguous(), op,
      ": features must be a contiguous [F, ", kFeatureColumns, "] tensor");
}

// A size that means "no limit" in checks. The sum of two of them would overflow.
inline constexpr int64_t kUnlimited = int64_t{1} << 62;

// The weights of a module: the addresses of one tensor per memory tier, in the order of `Tier`.
// The tensors own the memory and must outlive this struct.
struct TierWeights {
  const void* data[kTiers] = {};     // null for tiers that are not in the list
  int64_t elements[kTiers] = {};     // number of elements; 0 for unused tiers
  Dtype type = Dtype::kFloat;        // dtype of the tables; of the first tensor without tables
  Dtype cache_type = Dtype::kFloat;  // dtype of the cache; `type` without a cache

  // Throws unless `weights` are 1 to 4 contiguous float tensors, and the tables have one dtype.
  // Unused tiers are empty, and trailing ones may be omitted. Devices are not checked.
  TierWeights(const char* op, const std::vector<Tensor>& weights) {
    STD_TORCH_CHECK(!weights.empty() && weights.size() <= kTiers, op,
                    ": weights must be a list of 1 to ", kTiers,
                    " tensors (device, host, disk, cache), got ", weights.size());
    bool has_tables = false;  // whether an earlier tier has tables, which determine `type`
    type = cache_type = float_dtype(op, "weights", weights[0].scalar_type());
    for (size_t tier = 0; tier < weights.size(); ++tier) {
      const Tensor& tensor = weights[tier];
      STD_TORCH_CHECK(tensor.is_contiguous(), op, ": weights must be contiguous");
      const Dtype dtype = float_dtype(op, "weights", tensor.scalar_type());
      data[tier] = tensor.const_data_ptr();
      elements[tier] = tensor.numel();
      if (tensor.numel() == 0) continue;
      if (tier == kCacheTier) {
        cache_type = dtype;
        continue;
      }
      STD_TORCH_CHECK(!has_tables || dtype == type, op,
                      ": all tables must have one dtype, but the weights of tier ", tier, " are ",
                      dtype_name(tensor.scalar_type()), "; only the cache may have another");
      type = dtype;
      has_tables = true;
    }
    if (elements[kCacheTier] == 0) cache_type = type;
  }
};

// The number of elements of the tables in each tier, without the cache.
struct TierSizes {
  int64_t elements[kCacheTier];

  // Every tier has `num_elements` elements, for example kUnlimited.
  TierSizes(int64_t num_elements) : elements{num_elements, num_elements, num_elements} {}
  TierSizes(const TierWeights& weights)
      : elements{weights.elements[0], weights.elements[1], weights.elements[2]} {}
};

// Check the contents of `features`, which check_features has accepted and which must be in host
// memory: every feature must lie inside the weights of its tier (`sizes`), inside the linear row
// ids [0, total_rows), and inside the `num_columns` columns of the output or gradient, and must
// have a valid tier and cache_stride. Kernels on the CPU rely on this, so that no caller can make
// them access other memory. Of `state_base` only the sign and a limit are checked. Without pooling,
// Feature::column is not read: all features begin at column 0. For a variable batch with pooling
// pass kUnlimited columns; FeatureBags checks its output rows.
inline void check_feature_ranges(const char* op, const Tensor& features, const TierSizes& sizes,
                                 int64_t num_columns, int64_t total_rows, Pooling pooling) {
  const auto* all_features = static_cast<const Feature*>(features.const_data_ptr());
  for (int64_t f = 0; f < features.size(0); ++f) {
    const Feature& feature = all_features[f];
    const int64_t column = pooling == Pooling::kNone ? 0 : feature.column;
    STD_TORCH_CHECK(feature.tier >= 0 && feature.tier < kCacheTier && feature.state_base >= 0 &&
                        feature.state_base <= kUnlimited &&
                        (feature.cache_stride == 0 || feature.cache_stride >= feature.dim),
                    op, ": feature ", f, " must have a tier of 0 to 2, got ", feature.tier,
                    ", a state_base in [0, 2^62], got ", feature.state_base,
                    ", and a cache_stride of 0 or at least its dim ", feature.dim, ", got ",
                    feature.cache_stride,
                    "; features must come from the module that owns the weights");
    const int64_t num_weights = sizes.elements[feature.tier];
    STD_TORCH_CHECK(
        feature.dim > 0 && feature.rows >= 0 && feature.weight_offset >= 0 &&
            feature.row_base >= 0 && feature.weight_offset <= num_weights &&
            feature.rows <= (num_weights - feature.weight_offset) / feature.dim &&
            feature.row_base <= total_rows && feature.rows <= total_rows - feature.row_base &&
            column >= 0 && feature.dim <= num_columns && column <= num_columns - feature.dim,
        op, ": feature ", f, " lies outside the weights, the rows, or the columns of output or ",
        "gradient; features must come from the module that owns the weights");
  }
}

// Check that `bag_layout` is a contiguous int64 [bags, 2] on the device of `offsets`, which has
// bags + 1 entries. Return its data, not null even for an empty batch. Its contents, which may be
// on a device, are not read.
inline const BagLayout* check_bag_layout(const char* op, const Tensor& bag_layout,
                                         const Tensor& offsets) {
  check_dtype(op, "bag_layout", bag_layout, ScalarType::Long, "int64");
  STD_TORCH_CHECK(offsets.numel() >= 1, op, ": offsets must have bags + 1 entries, got none");
  STD_TORCH_CHECK(bag_layout.dim() == 2 && bag_layout.size(0) == offsets.numel() - 1 &&
                      bag_layout.size(1) == 2 && bag_layout.is_contiguous(),
                  op, ": bag_layout must be a contiguous [bags, 2] tensor of (feature, element) ",
                  "for bags = ", offsets.numel() - 1, ", one less than offsets has entries");
  check_same_device(op, "bag_layout", bag_layout, offsets);
  // Not null for an empty batch: null means a fixed batch.
  static constexpr BagLayout kEmptyBatch = {};
  return bag_layout.numel() == 0 ? &kEmptyBatch
                                 : static_cast<const BagLayout*>(bag_layout.const_data_ptr());
}

// Return the number of bags per feature, B, of a fixed batch, for `offsets` of F * B + 1 entries;
// 0 without features.
inline int64_t batch_size(const char* op, int64_t num_features, const Tensor& offsets) {
  STD_TORCH_CHECK(offsets.numel() >= 1, op, ": offsets must have F*B + 1 entries, got none");
  const int64_t bags = offsets.numel() - 1;
  STD_TORCH_CHECK(num_features > 0 ? bags % num_features == 0 : bags == 0, op,
                  ": offsets must have F*B + 1 entries for F = ", num_features, " features, got ",
                  offsets.numel(),
                  " (lengths instead of offsets? use emblib.jagged.offsets_from_lengths)");
  return num_features > 0 ? bags / num_features : 0;
}

// Check that `indices` and `offsets` are vectors of int32 or int64 (not necessarily the same) on
// one device, with at most kMaxLookups entries each, and that there is a bag if there are indices.
// Without indices, `offsets` may be empty.
inline void check_lookups(const char* op, const Tensor& indices, const Tensor& offsets) {
  check_index_vector(op, "indices", indices, kFlattenLookups);
  check_index_vector(op, "offsets", offsets);
  check_same_device(op, "offsets", offsets, indices);
  STD_TORCH_CHECK(indices.numel() <= kMaxLookups && offsets.numel() <= kMaxLookups, op,
                  ": at most ", kMaxLookups, " lookups and offsets per call, got ", indices.numel(),
                  " and ", offsets.numel(), "; split the batch");
  STD_TORCH_CHECK(offsets.numel() > 1 || indices.numel() == 0, op, ": ", indices.numel(),
                  " indices but no bags: offsets must have F*B + 1 entries, got ", offsets.numel());
}

// Return the BagMap of a batch. If `bag_layout` is passed, it is the map of a variable batch and
// points into that tensor. `stride` is the number of elements between rows of the pooled output, or
// of its gradient, of a fixed batch; a variable batch ignores it. Throws as check_bag_layout, or as
// batch_size.
inline BagMap bag_map(const char* op, int64_t num_features, const Tensor& offsets,
                      const std::optional<Tensor>& bag_layout, int64_t stride) {
  if (bag_layout) return {check_bag_layout(op, *bag_layout, offsets), 1, 0};
  const int64_t batch = batch_size(op, num_features, offsets);
  return {nullptr, static_cast<uint32_t>(batch > 0 ? batch : 1), stride};
}

// Check that `slots`, if passed, are cache slots: a contiguous int32 vector with one entry per
// lookup, on the device of `indices`.
inline void check_slots(const char* op, const std::optional<Tensor>& slots, const Tensor& indices) {
  if (!slots) return;
  check_dtype(op, "slots", *slots, ScalarType::Int, "int32");
  STD_TORCH_CHECK(slots->dim() == 1 && slots->numel() == indices.numel() && slots->is_contiguous(),
                  op, ": slots must be a contiguous vector with one entry per lookup = ",
                  indices.numel(), ", got ", slots->numel());
  check_same_device(op, "slots", *slots, indices);
}

// Check that `sample_weights`, if passed, is a float32 vector with one entry per lookup, on the
// device of `indices_or_lookups`, which has as many entries.
inline void check_sample_weights(const char* op, const std::optional<Tensor>& sample_weights,
                                 const Tensor& indices_or_lookups) {
  if (!sample_weights) return;
  check_dtype(op, "sample_weights", *sample_weights, ScalarType::Float, "float32");
  STD_TORCH_CHECK(
      sample_weights->dim() == 1 && sample_weights->numel() == indices_or_lookups.numel(), op,
      ": sample_weights must be a vector with one entry per lookup = ", indices_or_lookups.numel(),
      ", got ", sample_weights->numel(), " in ", sample_weights->dim(), " dimensions");
  check_same_device(op, "sample_weights", *sample_weights, indices_or_lookups);
}

// Check the number of dimensions of the gradient of a pooled output: [B, output_dim], or
// [output_dim] for a variable batch, the elements of all output rows. Return its output_dim.
inline int64_t check_pooled_grad(const char* op, const Tensor& grad, bool is_variable) {
  STD_TORCH_CHECK(grad.dim() == (is_variable ? 1 : 2), op,
                  ": grad must be [B, columns], or a vector with bag_layout, got ", grad.dim(),
                  " dimensions");
  return grad.size(grad.dim() - 1);
}

// Return a contiguous tensor with the same values: the tensor itself if it is contiguous. Then
// torch's function is not called, which saves a call of the dispatcher.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Return a tensor with the same values in which the columns of a row are adjacent: the tensor
// itself if they are, otherwise a contiguous copy. So a view of some columns of a matrix, such as
// the gradient of an input of `torch.cat` by columns, needs no copy.
inline Tensor with_adjacent_columns(const Tensor& rows) {
  const bool is_adjacent = rows.dim() == 2 && rows.stride(1) == 1 && rows.stride(0) >= 0;
  return is_adjacent ? rows : as_contiguous(rows);
}

// Return the number of elements between rows of a result of `with_adjacent_columns`; for a vector,
// which is one row, the number of its elements.
inline int64_t row_stride(const Tensor& rows) {
  return rows.dim() == 2 ? rows.stride(0) : rows.numel();
}

// Return a view of a contiguous vector of int32 or int64, which must outlive the view.
inline IndexArray index_array(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.scalar_type() == ScalarType::Long};
}

// Return the rows of a `features` tensor that check_features has accepted. They are in the memory
// of the tensor.
inline const Feature* feature_array(const Tensor& features) {
  return static_cast<const Feature*>(features.const_data_ptr());
}

}  // namespace emb
