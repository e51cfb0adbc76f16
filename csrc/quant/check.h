// Checks of quantised tables, shared by both backends.
#pragma once

#include <optional>

#include "core/check.h"
#include "quant/args.h"

namespace emb {

// Check the memory of all tables of a module, or of the rows to write.
inline void check_packed(const char* op, const Tensor& packed, int64_t bits) {
  STD_TORCH_CHECK(bits == 8 || bits == 4, op, ": bits must be 8 or 4, got ", bits);
  check_dtype(op, "packed", packed, ScalarType::Byte, "uint8");
  STD_TORCH_CHECK(packed.is_contiguous(), op, ": packed must be contiguous");
  const auto address = reinterpret_cast<uintptr_t>(packed.const_data_ptr());
  STD_TORCH_CHECK(address % kWordBytes == 0, op, ": packed must begin at a multiple of ",
                  kWordBytes, " bytes; give it a copy, packed.clone()");
}

inline Dtype check_quantize(const char* op, const Tensor& packed, const Tensor& weights,
                            int64_t bits) {
  check_packed(op, packed, bits);
  const Dtype type = float_dtype(op, "weights", weights.scalar_type());
  STD_TORCH_CHECK(weights.dim() == 2 && weights.is_contiguous() && weights.size(1) > 0, op,
                  ": weights must be a contiguous [R, D] tensor with D >= 1");
  check_same_device(op, "weights", weights, packed);
  const int64_t nbytes = row_bytes(weights.size(1), static_cast<int>(bits));
  STD_TORCH_CHECK(
      packed.dim() == 2 && packed.size(0) == weights.size(0) && packed.size(1) == nbytes, op,
      ": packed must be [", weights.size(0), ", ", nbytes, "], the rows of weights");
  return type;
}

// Check a batch of lookups. The contents of `features` are on the device and are not checked.
inline Pooling check_quant_lookup(const char* op, const Tensor& packed, const Tensor& features,
                                  const Tensor& indices, const Tensor& offsets,
                                  const std::optional<Tensor>& sample_weights,
                                  int64_t pooling_code) {
  const Pooling pooling = parse_pooling(op, pooling_code);
  check_features(op, features);
  check_lookups(op, indices, offsets);
  check_same_device(op, "features", features, indices);
  check_same_device(op, "packed", packed, indices);
  check_sample_weights(op, sample_weights, indices);
  STD_TORCH_CHECK(pooling != Pooling::kNone || !sample_weights, op,
                  ": sample_weights need sum or mean pooling; with none, scale the output");
  return pooling;
}

// Return [L, columns] without pooling, [columns] in a variable batch, otherwise [B, columns].
inline std::vector<int64_t> quant_output_sizes(const Tensor& features, const Tensor& indices,
                                               const Tensor& offsets, bool variable,
                                               Pooling pooling, int64_t columns) {
  if (pooling == Pooling::kNone) return {indices.numel(), columns};
  if (variable) return {columns};
  const int64_t num_features = features.size(0);
  const int64_t batch = num_features > 0 ? (offsets.numel() - 1) / num_features : 0;
  return {batch, columns};
}

}  // namespace emb
