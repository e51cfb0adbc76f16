// Checks of the ops of quantised tables, shared by the CPU and the GPU. A check raises with the
// name `op`.
#pragma once

#include <optional>
#include <vector>

#include "core/check.h"
#include "quant/args.h"

namespace emb {

// Check the memory of packed rows: uint8, contiguous, at a multiple of kWordBytes, of 8 or 4 bits.
inline void check_packed(const char* op, const Tensor& packed, int64_t bits) {
  STD_TORCH_CHECK(bits == 8 || bits == 4, op, ": bits must be 8 or 4, got ", bits);
  check_dtype(op, "packed", packed, ScalarType::Byte, "uint8");
  STD_TORCH_CHECK(packed.is_contiguous(), op, ": packed must be contiguous");
  const auto address = reinterpret_cast<uintptr_t>(packed.const_data_ptr());
  STD_TORCH_CHECK(address % kWordBytes == 0, op, ": packed must begin at a multiple of ",
                  kWordBytes, " bytes; give it a copy, packed.clone()");
}

// Check the arguments of `quantize_rows_` and return the dtype of `weights`.
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

// The arguments of a lookup on any device. Shapes, dtypes and devices are checked; the contents of
// `features` and `bag_layout` are not, because they may be on a device. The object keeps the
// (contiguous) tensors alive that `map`, `bags` and weights() refer to.
struct QuantCall {
  Tensor packed, features, indices, offsets;
  std::optional<Tensor> bag_layout, sample_weights;
  Pooling pooling;
  int bits;
  int64_t columns;
  ScalarType output_dtype;
  Dtype output_type;
  BagMap map;
  Bags bags;

  QuantCall(const char* op, const Tensor& packed, const Tensor& features, const Tensor& indices_in,
            const Tensor& offsets_in, const std::optional<Tensor>& bag_layout,
            const std::optional<Tensor>& weights, int64_t pooling_code, int64_t num_bits,
            int64_t columns, ScalarType output_dtype)
      : packed(packed),
        features(features),
        indices(as_contiguous(indices_in)),
        offsets(as_contiguous(offsets_in)),
        bag_layout(bag_layout),
        pooling(parse_pooling(op, pooling_code)),
        bits(static_cast<int>(num_bits)),
        columns(columns),
        output_dtype(output_dtype),
        output_type(float_dtype(op, "output_dtype", output_dtype)) {
    check_packed(op, packed, num_bits);
    check_features(op, features);
    check_lookups(op, indices, offsets);
    check_same_device(op, "features", features, indices);
    check_same_device(op, "packed", packed, indices);
    check_sample_weights(op, weights, indices);
    STD_TORCH_CHECK(pooling != Pooling::kNone || !weights, op,
                    ": sample_weights need sum or mean pooling; with none, scale the output");
    if (weights) sample_weights = as_contiguous(*weights);
    map = bag_map(op, features.size(0), offsets, bag_layout, columns);
    bags = Bags{index_array(offsets), offsets.numel() - 1, indices.numel()};
  }

  bool is_variable() const { return bag_layout.has_value() && pooling != Pooling::kNone; }
  // Return the sample weights, [L], null if there are none.
  const float* weights() const {
    return sample_weights ? sample_weights->const_data_ptr<float>() : nullptr;
  }
  // Return [L, columns] without pooling, [columns] in a variable batch, otherwise [B, columns].
  std::vector<int64_t> output_sizes() const {
    if (pooling == Pooling::kNone) return {indices.numel(), columns};
    if (is_variable()) return {columns};
    const int64_t num_features = features.size(0);
    return {num_features > 0 ? bags.count / num_features : 0, columns};
  }
};

}  // namespace emb
