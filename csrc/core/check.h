// Checks shared by the entry points of all ops. Every message states the rule, what came and, where
// there is one, the way out; all checks run before anything is written.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>

#include "core/dtype.h"

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

inline Pooling parse_pooling(const char* op, const std::string& name) {
  if (name == "sum") return Pooling::kSum;
  if (name == "mean") return Pooling::kMean;
  STD_TORCH_CHECK(name == "none", op, ": pooling must be sum, mean or none, got '", name, "'");
  return Pooling::kNone;
}

// The layout tensor of a group of tables: int64 [F, 5], contiguous.
inline void check_features(const char* op, const Tensor& features) {
  check_dtype(op, "features", features, ScalarType::Long, "int64");
  STD_TORCH_CHECK(
      features.dim() == 2 && features.size(1) == kFeatureFields && features.is_contiguous(), op,
      ": features must be a contiguous [F, ", kFeatureFields, "] tensor");
}

// That every feature lies inside the flat weights, the linear rows, and the columns of output or
// gradient, which is what makes reads and writes safe whatever the caller passes. Without pooling
// all features share one set of columns.
inline void check_layout(const char* op, const Tensor& features, int64_t num_weights,
                         int64_t num_columns, int64_t total_rows, Pooling pooling) {
  const auto* feature = static_cast<const Feature*>(features.const_data_ptr());
  for (int64_t f = 0; f < features.size(0); ++f) {
    const Feature& x = feature[f];
    const int64_t column = pooling == Pooling::kNone ? 0 : x.column;
    STD_TORCH_CHECK(
        x.dim > 0 && x.rows >= 0 && x.weight_offset >= 0 && x.row_base >= 0 &&
            x.weight_offset <= num_weights && x.rows <= (num_weights - x.weight_offset) / x.dim &&
            x.row_base <= total_rows && x.rows <= total_rows - x.row_base && column >= 0 &&
            x.dim <= num_columns && column <= num_columns - x.dim,
        op, ": feature ", f, " lies outside the weights, the rows, or the columns of output or ",
        "gradient; features must come from the module that owns the weights");
  }
}

inline constexpr int64_t kAnyNumber = int64_t{1} << 62;

// Bags per feature, B, from F*B + 1 offsets.
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

inline IndexArray index_array(const Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.scalar_type() == ScalarType::Long};
}

inline const Feature* feature_array(const Tensor& features) {
  return static_cast<const Feature*>(features.const_data_ptr());
}

}  // namespace emb
