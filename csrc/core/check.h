// Argument checks shared by the entry points of all ops. Every message states the rule, the value
// that was passed and, where there is one, the remedy. All checks run before anything is written.
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

inline constexpr int64_t kMaxLookups = (int64_t{1} << 31) - 1;

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

// The functions below raise unless an argument is what they are named after. `op` and `name` are
// the names of the op and of its argument, for the message.

inline void check_same_device(const char* op, const char* name, const Tensor& tensor,
                              const Tensor& like) {
  STD_TORCH_CHECK(
      tensor.device() == like.device(), op, ": ", name,
      " must be on the device of the other arguments (one is on the CPU, one is not, or "
      "they are on two GPUs); move it with .to(device)");
}

inline void check_index_dtype(const char* op, const char* name, const Tensor& tensor) {
  const ScalarType type = tensor.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Int || type == ScalarType::Long, op, ": ", name,
                  " must be int32 or int64, got ", dtype_name(type));
  STD_TORCH_CHECK(tensor.dim() == 1, op, ": ", name, " must have 1 dimension, got ", tensor.dim(),
                  "; bags are given by offsets, so flatten the indices and pass where they start");
}

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

// Return a list of codes for a message: "0 (sum), 1 (mean), 2 (none)".
inline std::string list_codes(const char* const* names, size_t count) {
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += (i == 0 ? "" : ", ") + std::to_string(i) + " (" + names[i] + ")";
  }
  return text;
}

// Return the enumerator of `code`; `names` are those of core/codes.h.
template <class Choice, size_t n>
Choice parse_choice(const char* op, const char* argument, int64_t code,
                    const char* const (&names)[n]) {
  STD_TORCH_CHECK(code >= 0 && code < static_cast<int64_t>(n), op, ": ", argument,
                  " must be one of ", list_codes(names, n), ", got ", code);
  return static_cast<Choice>(code);
}

inline Pooling parse_pooling(const char* op, int64_t code) {
  return parse_choice<Pooling>(op, "pooling", code, kPoolings);
}

// Check the `features` tensor of a group of tables: int64 [F, 8], contiguous; see Feature.
inline void check_features(const char* op, const Tensor& features) {
  check_dtype(op, "features", features, ScalarType::Long, "int64");
  STD_TORCH_CHECK(
      features.dim() == 2 && features.size(1) == kFeatureColumns && features.is_contiguous(), op,
      ": features must be a contiguous [F, ", kFeatureColumns, "] tensor");
}

// A size for checks against which nothing is too large, with room for sums of two.
inline constexpr int64_t kUnlimited = int64_t{1} << 62;

// The weights of a module: one tensor per memory tier, in the order of `Tier`. Unused tiers are
// empty; trailing ones may be left out.
struct TierWeights {
  const void* data[kTiers] = {};
  int64_t elements[kTiers] = {};
  Dtype type = Dtype::kFloat;  // dtype of the tables of all tiers
  Dtype cache_type = Dtype::kFloat;

  TierWeights(const char* op, const std::vector<Tensor>& weights) {
    STD_TORCH_CHECK(!weights.empty() && weights.size() <= kTiers, op,
                    ": weights must be a list of 1 to ", kTiers,
                    " tensors (device, host, disk, cache), got ", weights.size());
    bool typed = false;
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
      STD_TORCH_CHECK(!typed || dtype == type, op,
                      ": all tables must have one dtype, but the weights of tier ", tier, " are ",
                      dtype_name(tensor.scalar_type()), "; only the cache may have another");
      type = dtype;
      typed = true;
    }
    if (elements[kCacheTier] == 0) cache_type = type;
  }
};

// The number of elements of the tables of each tier; a single number applies to all tiers.
struct TierSizes {
  int64_t elements[kCacheTier];

  TierSizes(int64_t every) : elements{every, every, every} {}
  TierSizes(const TierWeights& weights)
      : elements{weights.elements[0], weights.elements[1], weights.elements[2]} {}
};

// Check that every feature lies inside the weights of its tier, the linear rows, and the columns of
// the output or gradient: this makes reads and writes safe whatever the caller passes. Without
// pooling all features share one set of columns; in a variable batch `bag_layout` says where the
// output rows are.
inline void check_layout(const char* op, const Tensor& features, const TierSizes& sizes,
                         int64_t num_columns, int64_t total_rows, Pooling pooling) {
  const auto* feature = static_cast<const Feature*>(features.const_data_ptr());
  for (int64_t f = 0; f < features.size(0); ++f) {
    const Feature& x = feature[f];
    const int64_t column = pooling == Pooling::kNone ? 0 : x.column;
    STD_TORCH_CHECK(x.tier >= 0 && x.tier < kCacheTier && x.state_base >= 0 &&
                        x.state_base <= kUnlimited &&
                        (x.cache_stride == 0 || x.cache_stride >= x.dim),
                    op, ": feature ", f,
                    " must name a memory tier of 0 to 2 and rows of the cache that hold its own; "
                    "features must come from the module that owns the weights");
    const int64_t num_weights = sizes.elements[x.tier];
    STD_TORCH_CHECK(
        x.dim > 0 && x.rows >= 0 && x.weight_offset >= 0 && x.row_base >= 0 &&
            x.weight_offset <= num_weights && x.rows <= (num_weights - x.weight_offset) / x.dim &&
            x.row_base <= total_rows && x.rows <= total_rows - x.row_base && column >= 0 &&
            x.dim <= num_columns && column <= num_columns - x.dim,
        op, ": feature ", f, " lies outside the weights, the rows, or the columns of output or ",
        "gradient; features must come from the module that owns the weights");
  }
}

// Check the shape and dtype of `bag_layout`. Its contents are on the device and are not checked.
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
  static constexpr BagLayout kNone = {};
  return bag_layout.numel() == 0 ? &kNone
                                 : static_cast<const BagLayout*>(bag_layout.const_data_ptr());
}

// Return the bags per feature, B, of F*B + 1 offsets.
inline int64_t batch_size(const char* op, int64_t num_features, const Tensor& offsets) {
  STD_TORCH_CHECK(offsets.numel() >= 1, op, ": offsets must have F*B + 1 entries, got none");
  const int64_t bags = offsets.numel() - 1;
  STD_TORCH_CHECK(num_features > 0 ? bags % num_features == 0 : bags == 0, op,
                  ": offsets must have F*B + 1 entries for F = ", num_features, " features, got ",
                  offsets.numel(),
                  " (lengths instead of offsets? use emblib.jagged.offsets_from_lengths)");
  return num_features > 0 ? bags / num_features : 0;
}

inline void check_lookups(const char* op, const Tensor& indices, const Tensor& offsets) {
  check_index_dtype(op, "indices", indices);
  check_index_dtype(op, "offsets", offsets);
  check_same_device(op, "offsets", offsets, indices);
  STD_TORCH_CHECK(indices.numel() <= kMaxLookups && offsets.numel() <= kMaxLookups, op,
                  ": at most 2^31 - 1 lookups and bags a call, got ", indices.numel(), " and ",
                  offsets.numel() - 1, "; split the batch");
  STD_TORCH_CHECK(offsets.numel() > 1 || indices.numel() == 0, op, ": ", indices.numel(),
                  " indices but no bags: offsets must have F*B + 1 entries, got ", offsets.numel());
}

// Return the BagMap of a batch; `columns` is the width of the pooled output of a fixed batch. The
// contents of `bag_layout` are not checked.
inline BagMap bag_map(const char* op, int64_t num_features, const Tensor& offsets,
                      const std::optional<Tensor>& bag_layout, int64_t columns) {
  if (bag_layout) return {check_bag_layout(op, *bag_layout, offsets), 1, 0};
  const int64_t batch = batch_size(op, num_features, offsets);
  return {nullptr, static_cast<uint32_t>(batch > 0 ? batch : 1), columns};
}

inline void check_slots(const char* op, const std::optional<Tensor>& slots, const Tensor& indices) {
  if (!slots) return;
  check_dtype(op, "slots", *slots, ScalarType::Int, "int32");
  STD_TORCH_CHECK(slots->dim() == 1 && slots->numel() == indices.numel() && slots->is_contiguous(),
                  op,
                  ": slots must be a contiguous vector with one entry a lookup = ", indices.numel(),
                  ", got ", slots->numel());
  check_same_device(op, "slots", *slots, indices);
}

inline void check_sample_weights(const char* op, const std::optional<Tensor>& sample_weights,
                                 const Tensor& indices_or_lookups) {
  if (!sample_weights) return;
  check_dtype(op, "sample_weights", *sample_weights, ScalarType::Float, "float32");
  STD_TORCH_CHECK(
      sample_weights->dim() == 1 && sample_weights->numel() == indices_or_lookups.numel(), op,
      ": sample_weights must be a vector with one entry a lookup = ", indices_or_lookups.numel(),
      ", got ", sample_weights->numel(), " in ", sample_weights->dim(), " dimensions");
  check_same_device(op, "sample_weights", *sample_weights, indices_or_lookups);
}

// Return the columns of the gradient of a pooled output: of one row, or in a variable batch of all
// rows together.
inline int64_t check_pooled_grad(const char* op, const Tensor& grad, bool variable) {
  STD_TORCH_CHECK(grad.dim() == (variable ? 1 : 2), op,
                  ": grad must be [B, columns], or a vector with bag_layout, got ", grad.dim(),
                  " dimensions");
  return grad.size(grad.dim() - 1);
}

// Return the tensor itself where it is contiguous: torch's function asks the dispatcher even then.
inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// Return the tensor itself where the columns of its rows are adjacent, else a contiguous copy. The
// gradient of one part of a concatenation is such a view: its rows are a whole row of the
// concatenation apart.
inline Tensor with_adjacent_columns(const Tensor& rows) {
  const bool adjacent = rows.dim() == 2 && rows.stride(1) == 1 && rows.stride(0) >= 0;
  return adjacent ? rows : as_contiguous(rows);
}

// Return the elements between two rows of what `with_adjacent_columns` returns.
inline int64_t row_stride(const Tensor& rows) {
  return rows.dim() == 2 ? rows.stride(0) : rows.numel();
}

inline IndexArray index_array(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.scalar_type() == ScalarType::Long};
}

inline const Feature* feature_array(const Tensor& features) {
  return static_cast<const Feature*>(features.const_data_ptr());
}

}  // namespace emb
