// Checks of quantised tables, shared by both backends.
#pragma once

#include <optional>

#include "core/check.h"
#include "quant/args.h"

namespace emb {

// Check the memory of all tables of a module.
inline void check_packed(const char* op, const Tensor& values, const Tensor& scales, int64_t bits) {
  STD_TORCH_CHECK(bits == 8 || bits == 4, op, ": bits must be 8 or 4, got ", bits);
  check_dtype(op, "values", values, ScalarType::Byte, "uint8");
  check_dtype(op, "scales", scales, ScalarType::Float, "float32");
  STD_TORCH_CHECK(scales.dim() == 2 && scales.size(1) == 2, op,
                  ": scales must be [rows, 2] of (scale, offset)");
  STD_TORCH_CHECK(values.is_contiguous() && scales.is_contiguous(), op,
                  ": values and scales must be contiguous");
  check_same_device(op, "scales", scales, values);
}

inline Dtype check_quantize(const char* op, const Tensor& values, const Tensor& scales,
                            const Tensor& weights, int64_t bits) {
  check_packed(op, values, scales, bits);
  const Dtype type = float_dtype(op, "weights", weights.scalar_type());
  STD_TORCH_CHECK(weights.dim() == 2 && weights.is_contiguous() && weights.size(1) > 0, op,
                  ": weights must be a contiguous [R, D] tensor with D >= 1");
  check_same_device(op, "weights", weights, values);
  const int64_t nbytes = packed_bytes(weights.size(1), static_cast<int>(bits));
  STD_TORCH_CHECK(values.dim() == 2 && values.size(0) == weights.size(0) &&
                      values.size(1) == nbytes && scales.size(0) == weights.size(0),
                  op, ": values must be [R, ", nbytes, "] and scales [R, 2] for the ",
                  weights.size(0), " rows of weights");
  return type;
}

// Check a batch of lookups. The contents of `features` are on the device and are not checked.
inline Pooling check_quant_lookup(const char* op, const Tensor& values, const Tensor& features,
                                  const Tensor& indices, const Tensor& offsets,
                                  const std::optional<Tensor>& sample_weights,
                                  int64_t pooling_code) {
  const Pooling pooling = parse_pooling(op, pooling_code);
  check_features(op, features);
  check_lookups(op, indices, offsets);
  check_same_device(op, "features", features, indices);
  check_same_device(op, "values", values, indices);
  check_sample_weights(op, sample_weights, indices);
  STD_TORCH_CHECK(pooling != Pooling::kNone || !sample_weights, op,
                  ": sample_weights need sum or mean pooling; with none, scale the output");
  return pooling;
}

// Allocate [L, columns] without pooling, [columns] in a variable batch, otherwise [B, columns].
inline Tensor new_quant_output(const Tensor& features, const Tensor& indices, const Tensor& offsets,
                               bool variable, Pooling pooling, int64_t columns, ScalarType dtype) {
  if (pooling == Pooling::kNone) {
    return allocate(indices, {indices.numel(), columns}, dtype);
  }
  if (variable) return allocate(indices, {columns}, dtype);
  const int64_t num_features = features.size(0);
  const int64_t batch = num_features > 0 ? (offsets.numel() - 1) / num_features : 0;
  return allocate(indices, {batch, columns}, dtype);
}

}  // namespace emb
