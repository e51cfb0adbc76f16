// Checks of the routing ops, shared by both backends: the form of their tensors. What layouts say
// is looked at on the CPU only, see check_layouts.h.
#pragma once

#include "core/check.h"
#include "route/route.h"

namespace emb {

inline void check_words(const char* op, const char* name, const Tensor& tensor, int64_t words,
                        const Tensor& like) {
  check_dtype(op, name, tensor, ScalarType::Long, "int64");
  const bool fits = words == 1 ? tensor.dim() == 1 : tensor.dim() == 2 && tensor.size(1) == words;
  STD_TORCH_CHECK(fits && tensor.is_contiguous(), op, ": ", name, " must be a contiguous ",
                  words == 1 ? "vector" : "matrix", " of ", words, " numbers a row");
  check_same_device(op, name, tensor, like);
}

struct RouteInputs {
  Tensor ids, offsets;
  Routing routing;

  RouteInputs(const char* op, const Tensor& ids_in, const Tensor& offsets_in,
              const Tensor& first_bags, const Tensor& features, const Tensor& blocks,
              const Tensor& copies, const Tensor& units)
      : ids(torch::stable::contiguous(ids_in)), offsets(torch::stable::contiguous(offsets_in)) {
    check_index_dtype(op, "ids", ids);
    check_index_dtype(op, "offsets", offsets);
    check_same_device(op, "offsets", offsets, ids);
    STD_TORCH_CHECK(ids.numel() <= kMaxLookups && offsets.numel() <= kMaxLookups, op,
                    ": at most 2^31 - 1 lookups and bags a call, got ", ids.numel(), " and ",
                    offsets.numel() - 1, "; split the batch");
    check_words(op, "first_bags", first_bags, 1, ids);
    check_words(op, "features", features, kFeatureWords, ids);
    check_words(op, "blocks", blocks, kBlockWords, ids);
    check_words(op, "copies", copies, 1, ids);
    check_words(op, "units", units, 1, ids);
    STD_TORCH_CHECK(first_bags.numel() == features.size(0) + 1 && units.numel() >= 1 &&
                        offsets.numel() >= 1 && copies.numel() == units.numel() - 1,
                    op, ": first_bags, units and offsets have one entry more than there are ",
                    "features, units and bags, and each unit is named once in copies; got ",
                    first_bags.numel(), " for ", features.size(0), " features, ", units.numel(),
                    " for ", copies.numel(), " copies");
    routing = {first_bags.const_data_ptr<int64_t>(),
               static_cast<const RouteFeature*>(features.const_data_ptr()),
               static_cast<const RouteBlock*>(blocks.const_data_ptr()),
               copies.const_data_ptr<int64_t>(),
               units.const_data_ptr<int64_t>(),
               features.size(0),
               blocks.size(0),
               copies.numel(),
               units.numel() - 1};
  }

  IndexArray id_array() const { return index_array(ids); }
  Bags bags() const { return {index_array(offsets), offsets.numel() - 1, ids.numel()}; }
};

// The weights that ids take along, null where there are none; and the form of `starts`.
struct RouteWeights {
  Tensor tensor;
  const float* data = nullptr;

  RouteWeights(const char* op, const RouteInputs& in, const Tensor& starts, int64_t total,
               const std::optional<Tensor>& weights)
      : tensor(weights ? torch::stable::contiguous(*weights) : in.ids) {
    check_index_dtype(op, "starts", starts);
    check_same_device(op, "starts", starts, in.ids);
    STD_TORCH_CHECK(total >= 0, op, ": total must not be negative, got ", total);
    if (!weights) return;
    check_sample_weights(op, tensor, in.ids);
    static constexpr float kNone = 0.0f;
    data = tensor.numel() == 0 ? &kNone : tensor.const_data_ptr<float>();
  }
};

// The tensors of `gather_segments`.
struct SegmentInputs {
  Tensor values, starts, order;
  int64_t row_nbytes = 0;

  SegmentInputs(const char* op, const Tensor& values_in, const Tensor& starts_in,
                const Tensor& order_in, int64_t total)
      : values(torch::stable::contiguous(values_in)),
        starts(torch::stable::contiguous(starts_in)),
        order(torch::stable::contiguous(order_in)) {
    STD_TORCH_CHECK(values.dim() >= 1, op, ": values must have rows, got a scalar");
    check_index_dtype(op, "starts", starts);
    check_words(op, "order", order, 1, values);
    check_same_device(op, "starts", starts, values);
    STD_TORCH_CHECK(starts.numel() >= 1, op,
                    ": starts must have one entry more than there are segments, got none");
    STD_TORCH_CHECK(total >= 0, op, ": total must not be negative, got ", total);
    row_nbytes = static_cast<int64_t>(values.element_size());
    for (int64_t d = 1; d < values.dim(); ++d) row_nbytes *= values.size(d);
  }

  Tensor new_output(int64_t total) const {
    std::vector<int64_t> sizes{total};
    for (int64_t d = 1; d < values.dim(); ++d) sizes.push_back(values.size(d));
    return allocate(values, sizes);
  }
};

// The tensors of `combine` and `spread`.
struct CombineInputs {
  Tensor flat;
  std::optional<Tensor> rows, lengths;
  const Target* targets;
  const SourcePiece* pieces;
  int64_t num_targets, num_pieces;

  CombineInputs(const char* op, const char* name, const Tensor& flat_in, const Tensor& target_rows,
                const Tensor& piece_rows, const std::optional<Tensor>& rows_in,
                const std::optional<Tensor>& lengths_in)
      : flat(torch::stable::contiguous(flat_in)) {
    STD_TORCH_CHECK(flat.dim() == 1, op, ": ", name, " must be flat, got ", flat.dim(),
                    " dimensions; use .view(-1)");
    check_words(op, "targets", target_rows, kTargetWords, flat);
    check_words(op, "pieces", piece_rows, kPieceWords, flat);
    if (rows_in) {
      rows = torch::stable::contiguous(*rows_in);
      check_dtype(op, "rows", *rows, ScalarType::Int, "int32");
      check_same_device(op, "rows", *rows, flat);
    }
    if (lengths_in) {
      lengths = torch::stable::contiguous(*lengths_in);
      check_index_dtype(op, "lengths", *lengths);
      check_same_device(op, "lengths", *lengths, flat);
    }
    targets = static_cast<const Target*>(target_rows.const_data_ptr());
    pieces = static_cast<const SourcePiece*>(piece_rows.const_data_ptr());
    num_targets = target_rows.size(0);
    num_pieces = piece_rows.size(0);
  }

  int64_t num_rows() const { return rows ? rows->numel() : 0; }
  const int32_t* row_data() const {
    return num_rows() > 0 ? rows->const_data_ptr<int32_t>() : nullptr;
  }
  int64_t num_lengths() const { return lengths ? lengths->numel() : 0; }
  IndexArray length_array() const { return lengths ? index_array(*lengths) : IndexArray{}; }
};

}  // namespace emb
