// Checks of the ops of quantised tables, shared by the CPU and the GPU. `op` is the name of the op,
// for the message of the error.
#pragma once

#include <optional>
#include <vector>

#include "core/check.h"
#include "quant/args.h"
#include "quant/index.h"

namespace emb {

// Check the memory of packed rows: uint8, contiguous, at an address that is a multiple of
// kWordBytes.
inline void check_packed(const char* op, const Tensor& packed) {
  check_dtype(op, "packed", packed, ScalarType::Byte, "uint8");
  STD_TORCH_CHECK(packed.is_contiguous(), op, ": packed must be contiguous");
  const auto address = reinterpret_cast<uintptr_t>(packed.const_data_ptr());
  STD_TORCH_CHECK(address % kWordBytes == 0, op, ": packed must begin at a multiple of ",
                  kWordBytes, " bytes; give it a copy, packed.clone()");
}

// Check the code of one format.
inline void check_format(const char* op, int64_t format) {
  STD_TORCH_CHECK(format_index(format) >= 0, op,
                  ": format must be the code of a RowFormat: 2, 4 or 8 (bits of integers), 9 or 10 "
                  "(fp8), 16, 17 or 32, got ",
                  format);
}

// The formats of the rows of a lookup. If there is one format, the argument `format` of an op is
// its code. Otherwise it is minus the sum of 2^code over the formats that occur, and column `tier`
// of a feature has the code of the feature's format.
struct RowFormats {
  bool is_mixed;  // the argument names formats by a mask, so that features may differ
  uint64_t mask;  // bit c: the format with code c occurs

  // Check the argument `format` of an op.
  RowFormats(const char* op, int64_t format)
      : is_mixed(format < 0), mask(is_mixed ? 0 - static_cast<uint64_t>(format) : 0) {
    if (!is_mixed) {
      check_format(op, format);
      mask = uint64_t{1} << format;
    }
    uint64_t all_formats = 0;
    for (const int code : kRowFormats) all_formats |= uint64_t{1} << code;
    STD_TORCH_CHECK((mask & ~all_formats) == 0, op, ": format names unknown formats, got ", format);
  }

  // Return whether the format with this code occurs.
  bool has(int64_t code) const { return code >= 0 && code < 64 && ((mask >> code) & 1) != 0; }
};

// Check the dtypes, shapes and devices of the arguments of `quantize_rows_`. Return the dtype of
// `weights`.
inline Dtype check_quantize(const char* op, const Tensor& packed, const Tensor& weights,
                            int64_t format) {
  check_format(op, format);
  check_packed(op, packed);
  const Dtype type = float_dtype(op, "weights", weights.scalar_type());
  STD_TORCH_CHECK(weights.dim() == 2 && weights.is_contiguous() && weights.size(1) > 0, op,
                  ": weights must be a contiguous [R, D] tensor with D >= 1");
  check_same_device(op, "weights", weights, packed);
  const int64_t nbytes = row_bytes(weights.size(1), static_cast<int>(format));
  STD_TORCH_CHECK(
      packed.dim() == 2 && packed.size(0) == weights.size(0) && packed.size(1) == nbytes, op,
      ": packed must be [", weights.size(0), ", ", nbytes, "], the rows of weights");
  return type;
}

// The arguments of a lookup on any device. The constructor checks shapes, dtypes and devices, but
// not the contents of `features` and `bag_layout`, which may be on a device. The object keeps the
// tensors alive to which `map`, `bags` and weights() point.
struct QuantCall {
  Tensor packed;    // uint8, the rows of all tables
  Tensor features;  // int64 [F, 8]: Feature, but weight_offset counts bytes of `packed`
  Tensor indices, offsets;
  std::optional<Tensor> bag_layout, sample_weights;
  Pooling pooling;
  RowFormats formats;
  int64_t output_dim;  // columns of an output row; with pooling in a variable batch, elements of
                       // the whole output
  ScalarType output_dtype;
  Dtype output_type;
  BagMap map;
  Bags bags;

  QuantCall(const char* op, const Tensor& packed, const Tensor& features, const Tensor& indices_in,
            const Tensor& offsets_in, const std::optional<Tensor>& bag_layout,
            const std::optional<Tensor>& weights, int64_t pooling_code, int64_t format,
            int64_t output_dim, ScalarType output_dtype)
      : packed(packed),
        features(features),
        indices(as_contiguous(indices_in)),
        offsets(as_contiguous(offsets_in)),
        bag_layout(bag_layout),
        pooling(parse_pooling(op, pooling_code)),
        formats(op, format),
        output_dim(output_dim),
        output_dtype(output_dtype),
        output_type(float_dtype(op, "output_dtype", output_dtype)) {
    check_not_negative(op, "output_dim", output_dim);
    check_packed(op, packed);
    check_features(op, features);
    check_lookups(op, indices, offsets);
    check_same_device(op, "features", features, indices);
    check_same_device(op, "packed", packed, indices);
    check_sample_weights(op, weights, indices);
    STD_TORCH_CHECK(pooling != Pooling::kNone || !weights, op,
                    ": sample_weights need sum or mean pooling; with none, scale the output");
    if (weights) sample_weights = as_contiguous(*weights);
    map = bag_map(op, features.size(0), offsets, bag_layout, output_dim);
    bags = Bags{index_array(offsets), offsets.numel() - 1, indices.numel()};
  }

  bool is_variable() const { return bag_layout.has_value() && pooling != Pooling::kNone; }
  // Return the sample weights, [L], null if there are none.
  const float* weights() const {
    return sample_weights ? sample_weights->const_data_ptr<float>() : nullptr;
  }
  // Return [L, output_dim] without pooling, [output_dim] in a variable batch, otherwise [B,
  // output_dim].
  std::vector<int64_t> output_sizes() const {
    if (pooling == Pooling::kNone) return {indices.numel(), output_dim};
    if (is_variable()) return {output_dim};
    const int64_t num_features = features.size(0);
    return {num_features > 0 ? bags.num_bags / num_features : 0, output_dim};
  }
};

// The arguments of `map_ids` on any device. The constructor checks shapes, dtypes and devices, but
// not the contents of `tables`, `features` and `bag_layout`. The object keeps the tensors alive to
// which args() points, except `bag_layout`, which the caller must keep alive.
struct MapCall {
  Tensor index;   // int64 [words], the memory of arrays and hash tables
  Tensor tables;  // int64 [F, 6], rows of IndexTable
  Tensor features, indices, offsets;
  BagMap map;

  MapCall(const char* op, const Tensor& index, const Tensor& tables, const Tensor& features,
          const Tensor& indices_in, const Tensor& offsets_in,
          const std::optional<Tensor>& bag_layout)
      : index(index),
        tables(tables),
        features(features),
        indices(as_contiguous(indices_in)),
        offsets(as_contiguous(offsets_in)) {
    check_features(op, features);
    check_lookups(op, indices, offsets);
    check_dtype(op, "index", index, ScalarType::Long, "int64");
    check_dtype(op, "tables", tables, ScalarType::Long, "int64");
    STD_TORCH_CHECK(index.dim() == 1 && index.is_contiguous(), op,
                    ": index must be a contiguous vector");
    STD_TORCH_CHECK(tables.dim() == 2 && tables.is_contiguous() &&
                        tables.size(0) == features.size(0) && tables.size(1) == kIndexColumns,
                    op, ": tables must be a contiguous [F, ", kIndexColumns,
                    "] tensor, with a row for each of ", features.size(0), " features");
    check_same_device(op, "index", index, indices);
    check_same_device(op, "tables", tables, indices);
    check_same_device(op, "features", features, indices);
    map = bag_map(op, features.size(0), offsets, bag_layout, kUnlimited);
  }

  // Return the arguments of the search, whose output is `rows`, int64 [L].
  IndexArgs args(Tensor* rows) const {
    return {static_cast<const int64_t*>(index.const_data_ptr()),
            static_cast<const IndexTable*>(tables.const_data_ptr()),
            static_cast<int>(features.size(0)),
            index_array(indices),
            Bags{index_array(offsets), offsets.numel() - 1, indices.numel()},
            map,
            static_cast<int64_t*>(rows->mutable_data_ptr())};
  }
};

}  // namespace emb
