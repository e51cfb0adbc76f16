// Checks of the routing ops, in two parts. The structs, for the CPU and the GPU, have constructors
// that throw unless the dtypes, shapes and devices of tensors are right; they do not read contents.
// The functions after them, for the CPU only, check the contents of layouts; GPU kernels skip
// entries that lie outside the tensors instead. `op` is the name of the op, for the message of the
// error.
#pragma once

#include <algorithm>
#include <vector>

#include "core/check.h"
#include "route/args.h"

namespace emb {

// Check that a tensor is int64, contiguous and [n, columns], or [n] if `columns` is 1, and on the
// device of `like`.
inline void check_int64_rows(const char* op, const char* name, const Tensor& tensor,
                             int64_t columns, const Tensor& like) {
  check_dtype(op, name, tensor, ScalarType::Long, "int64");
  if (columns == 1) {
    STD_TORCH_CHECK(tensor.dim() == 1 && tensor.is_contiguous(), op, ": ", name,
                    " must be a contiguous vector");
  } else {
    STD_TORCH_CHECK(tensor.dim() == 2 && tensor.size(1) == columns && tensor.is_contiguous(), op,
                    ": ", name, " must be a contiguous matrix of ", columns, " numbers per row");
  }
  check_same_device(op, name, tensor, like);
}

// The ids, bags and layout of a routing op. `routing` points into tensors of the op's caller, who
// must keep them alive.
struct RouteInputs {
  // int32 or int64 [L] and [bags + 1], contiguous, with at most kMaxLookups entries each.
  Tensor ids, offsets;
  Routing routing;

  RouteInputs(const char* op, const Tensor& ids_in, const Tensor& offsets_in,
              const Tensor& first_bags, const Tensor& features, const Tensor& blocks,
              const Tensor& copies, const Tensor& units)
      : ids(as_contiguous(ids_in)), offsets(as_contiguous(offsets_in)) {
    check_index_vector(op, "ids", ids, kFlattenLookups);
    check_index_vector(op, "offsets", offsets);
    check_same_device(op, "offsets", offsets, ids);
    STD_TORCH_CHECK(ids.numel() <= kMaxLookups && offsets.numel() <= kMaxLookups, op, ": at most ",
                    kMaxLookups, " ids and offsets per call, got ", ids.numel(), " and ",
                    offsets.numel(), "; split the batch");
    check_int64_rows(op, "first_bags", first_bags, 1, ids);
    check_int64_rows(op, "features", features, kRouteFeatureColumns, ids);
    check_int64_rows(op, "blocks", blocks, kRouteBlockColumns, ids);
    check_int64_rows(op, "copies", copies, 1, ids);
    check_int64_rows(op, "units", units, 1, ids);
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

// The weights of ids, if there are any. The constructor also checks the dtype and device of
// `starts`, and that `total` is not negative.
struct RouteWeights {
  Tensor tensor;                // owns the memory of `data`; without weights it is the ids
  const float* data = nullptr;  // [L], null only without weights

  RouteWeights(const char* op, const RouteInputs& in, const Tensor& starts, int64_t total,
               const std::optional<Tensor>& weights)
      : tensor(weights ? as_contiguous(*weights) : in.ids) {
    check_index_vector(op, "starts", starts);
    check_same_device(op, "starts", starts, in.ids);
    check_not_negative(op, "total", total);
    if (!weights) return;
    check_sample_weights(op, tensor, in.ids);
    static constexpr float kEmpty = 0.0f;  // an empty tensor may have a null address
    data = tensor.numel() == 0 ? &kEmpty : tensor.const_data_ptr<float>();
  }
};

// The tensors of `gather_segments`, contiguous: values [N, ..] of 1 to 4 dimensions and any dtype,
// starts int32 or int64 [segments + 1], order int64 [M].
struct SegmentInputs {
  Tensor values, starts, order;
  int64_t row_bytes = 0;  // bytes per row of `values`

  SegmentInputs(const char* op, const Tensor& values_in, const Tensor& starts_in,
                const Tensor& order_in, int64_t total)
      : values(as_contiguous(values_in)),
        starts(as_contiguous(starts_in)),
        order(as_contiguous(order_in)) {
    STD_TORCH_CHECK(values.dim() >= 1 && values.dim() <= 4, op,
                    ": values must have 1 to 4 dimensions, got ", values.dim(),
                    "; flatten those after the first");
    check_index_vector(op, "starts", starts);
    check_int64_rows(op, "order", order, 1, values);
    check_same_device(op, "starts", starts, values);
    STD_TORCH_CHECK(starts.numel() >= 1, op,
                    ": starts must have one entry more than there are segments, got none");
    check_not_negative(op, "total", total);
    row_bytes = static_cast<int64_t>(values.element_size());
    for (int64_t d = 1; d < values.dim(); ++d) row_bytes *= values.size(d);
  }

  // Allocate the output, [total, ..] of the dtype of `values`.
  Tensor new_output(int64_t total) const {
    std::vector<int64_t> sizes{total};
    for (int64_t d = 1; d < values.dim(); ++d) sizes.push_back(values.size(d));
    return allocate(values, sizes);
  }
};

// The tensors of `combine`, `combine_backward` and `combine_backward_`. `targets`, `pieces` and
// `local` point into tensors of the op's caller, who must keep them alive. The constructor does not
// check the dtype of `flat`.
struct CombineInputs {
  Tensor flat;                          // contiguous: the source, or the gradient of the output
  std::optional<Tensor> rows, lengths;  // contiguous: int32; int32 or int64
  const Target* targets;                // [num_targets]
  const SourcePiece* pieces;            // [num_pieces]
  int64_t num_targets, num_pieces;
  LocalPart local{};  // set by set_local or set_local_of_source

  CombineInputs(const char* op, const char* name, const Tensor& flat_in, const Tensor& target_rows,
                const Tensor& piece_rows, const std::optional<Tensor>& rows_in,
                const std::optional<Tensor>& lengths_in)
      : flat(as_contiguous(flat_in)) {
    STD_TORCH_CHECK(flat.dim() == 1, op, ": ", name, " must be flat, got ", flat.dim(),
                    " dimensions; use .view(-1)");
    check_int64_rows(op, "targets", target_rows, kTargetColumns, flat);
    check_int64_rows(op, "pieces", piece_rows, kPieceColumns, flat);
    if (rows_in) {
      rows = as_contiguous(*rows_in);
      check_dtype(op, "rows", *rows, ScalarType::Int, "int32");
      check_same_device(op, "rows", *rows, flat);
    }
    if (lengths_in) {
      lengths = as_contiguous(*lengths_in);
      check_index_vector(op, "lengths", *lengths);
      check_same_device(op, "lengths", *lengths, flat);
    }
    targets = static_cast<const Target*>(target_rows.const_data_ptr());
    pieces = static_cast<const SourcePiece*>(piece_rows.const_data_ptr());
    num_targets = target_rows.size(0);
    num_pieces = piece_rows.size(0);
  }

  // Set `local`: `tensor`, flat and contiguous, has the elements of the source from `begin` on.
  // num_outside is the number of elements of the source outside of it, and `dtype` is the dtype of
  // the source. Without a tensor no element is local, and `begin` must be 0.
  void set_local(const char* op, const std::optional<Tensor>& tensor, int64_t begin,
                 int64_t num_outside, ScalarType dtype) {
    if (!tensor) {
      STD_TORCH_CHECK(begin == 0, op, ": local_begin needs local, got ", begin, " without it");
      return;
    }
    STD_TORCH_CHECK(tensor->dim() == 1 && tensor->is_contiguous(), op,
                    ": local must be flat and contiguous, got ", tensor->dim(),
                    " dimensions; use .view(-1)");
    STD_TORCH_CHECK(tensor->scalar_type() == dtype, op,
                    ": local must have the dtype of the source, ", dtype_name(dtype), ", got ",
                    dtype_name(tensor->scalar_type()));
    check_same_device(op, "local", *tensor, flat);
    STD_TORCH_CHECK(begin >= 0 && begin <= num_outside, op, ": local_begin must lie in [0, ",
                    num_outside, "], the elements of the source outside of local, got ", begin);
    void* data = tensor->numel() == 0 ? nullptr : const_cast<void*>(tensor->const_data_ptr());
    local = {data, begin, begin + tensor->numel()};
  }

  // Do what set_local does; source_numel is the number of elements of the source with its local
  // part. Return the number of elements outside of the local part.
  int64_t set_local_of_source(const char* op, const std::optional<Tensor>& tensor, int64_t begin,
                              int64_t source_numel, ScalarType dtype) {
    check_not_negative(op, "source_numel", source_numel);
    const int64_t num_outside = source_numel - (tensor ? tensor->numel() : 0);
    STD_TORCH_CHECK(num_outside >= 0, op, ": local must be part of the ", source_numel,
                    " elements of the source, got ", source_numel - num_outside);
    set_local(op, tensor, begin, num_outside, dtype);
    return num_outside;
  }

  int64_t num_rows() const { return rows ? rows->numel() : 0; }
  const int32_t* row_data() const {
    return num_rows() > 0 ? rows->const_data_ptr<int32_t>() : nullptr;
  }
  int64_t num_lengths() const { return lengths ? lengths->numel() : 0; }
  IndexArray length_array() const { return lengths ? index_array(*lengths) : IndexArray{}; }
};

// Checks of contents, on the CPU only.

// Check feature f: its rule exists, its blocks and their copies are in range, and its blocks ascend
// from row 0 unless its rule is kByKey.
inline void check_blocks(const char* op, const Routing& routing, const RouteFeature& feature,
                         int64_t f) {
  STD_TORCH_CHECK(feature.first_block >= 0 && feature.num_blocks >= 0 && feature.num_rows >= 0 &&
                      feature.num_blocks <= routing.num_blocks &&
                      feature.first_block <= routing.num_blocks - feature.num_blocks &&
                      (feature.rule == RouteRule::kByRange || feature.rule == RouteRule::kByKey ||
                       feature.rule == RouteRule::kByRangeElseSpread),
                  op, ": feature ", f, " must name blocks in [0, ", routing.num_blocks,
                  "), rows >= 0 and rule 0, 1 or 2");
  const RouteBlock* blocks = routing.blocks + feature.first_block;
  for (int64_t k = 0; k < feature.num_blocks; ++k) {
    STD_TORCH_CHECK(blocks[k].first_copy >= 0 && blocks[k].num_copies >= 0 &&
                        blocks[k].num_copies <= routing.num_copies &&
                        blocks[k].first_copy <= routing.num_copies - blocks[k].num_copies,
                    op, ": block ", feature.first_block + k, " must name copies in [0, ",
                    routing.num_copies, ")");
    const int64_t previous_row = k == 0 ? 0 : blocks[k - 1].first_row;
    STD_TORCH_CHECK(feature.rule == RouteRule::kByKey || (blocks[k].first_row >= previous_row &&
                                                          blocks[k].first_row <= feature.num_rows &&
                                                          (k > 0 || blocks[k].first_row == 0)),
                    op, ": the blocks of feature ", f,
                    " must begin at row 0 and ascend to at most ", feature.num_rows,
                    " rows, but block ", k, " of it begins at ", blocks[k].first_row);
  }
}

// Check that the copies of all blocks name each unit once, and that a unit has as many bags as the
// feature of its block. The blocks must have been checked (check_blocks).
inline void check_units(const char* op, const Routing& routing) {
  std::vector<bool> is_named(routing.num_units, false);
  STD_TORCH_CHECK(routing.units[0] == 0, op, ": units must begin at bag 0, got ", routing.units[0]);
  for (int64_t f = 0; f < routing.num_features; ++f) {
    const RouteFeature& feature = routing.features[f];
    const int64_t bags = routing.first_bags[f + 1] - routing.first_bags[f];
    for (int64_t k = feature.first_block; k < feature.first_block + feature.num_blocks; ++k) {
      const RouteBlock& block = routing.blocks[k];
      for (int64_t c = block.first_copy; c < block.first_copy + block.num_copies; ++c) {
        const int64_t unit = routing.copies[c];
        STD_TORCH_CHECK(unit >= 0 && unit < routing.num_units && !is_named[unit], op,
                        ": copies must name each unit in [0, ", routing.num_units,
                        ") once, but block ", k, " names ", unit);
        is_named[unit] = true;
        STD_TORCH_CHECK(routing.units[unit + 1] - routing.units[unit] == bags, op, ": unit ", unit,
                        " must have the ", bags, " bags of feature ", f, ", got ",
                        routing.units[unit + 1] - routing.units[unit]);
      }
    }
  }
  for (int64_t unit = 0; unit < routing.num_units; ++unit) {
    STD_TORCH_CHECK(is_named[unit], op, ": unit ", unit, " is not named in copies by any block");
  }
}

// Check the contents of a routing, and that the first offset is 0 and the last the number of ids.
// The kernels check that offsets do not descend.
inline void check_routing(const char* op, const RouteInputs& in) {
  const Routing& routing = in.routing;
  const Bags bags = in.bags();
  const int64_t* first_bags = routing.first_bags;
  STD_TORCH_CHECK(bags.offsets[0] == 0 && bags.offsets[bags.num_bags] == bags.num_lookups, op,
                  ": offsets must run from 0 to the number of ids, ", bags.num_lookups,
                  ", but run from ", bags.offsets[0], " to ", bags.offsets[bags.num_bags],
                  " (lengths instead of offsets?)");
  STD_TORCH_CHECK(first_bags[0] >= 0 && first_bags[routing.num_features] <= bags.num_bags, op,
                  ": first_bags must lie in [0, ", bags.num_bags, "], the bags of offsets");
  for (int64_t f = 0; f < routing.num_features; ++f) {
    STD_TORCH_CHECK(first_bags[f] <= first_bags[f + 1], op,
                    ": first_bags must ascend, but feature ", f, " begins at ", first_bags[f],
                    " and the next at ", first_bags[f + 1]);
    check_blocks(op, routing, routing.features[f], f);
  }
  check_units(op, routing);
}

// Return whether `num_rows` rows of `width` elements, from `offset` on and `stride` apart, are
// inside [0, numel) and do not overlap. Rows without elements fit if no argument but `stride` is
// negative.
inline bool rows_fit(int64_t offset, int64_t stride, int64_t num_rows, int64_t width,
                     int64_t numel) {
  if (offset < 0 || num_rows < 0 || width < 0) return false;
  if (num_rows == 0 || width == 0) return true;
  if (width > numel || offset > numel - width) return false;
  return num_rows == 1 || (stride >= width && (numel - width - offset) / stride >= num_rows - 1);
}

// Return whether the first `num_rows` rows of a piece lie in the source, all in one section of
// LocalPart.
inline bool piece_rows_fit(const CombineInputs& in, const SourcePiece& piece, int64_t num_rows,
                           int64_t width, int64_t source_numel) {
  if (!rows_fit(piece.offset, piece.stride, num_rows, width, source_numel)) return false;
  if (num_rows == 0 || width == 0) return true;
  const int64_t last_element = piece.offset + (num_rows - 1) * piece.stride + width - 1;
  return in.local.section(piece.offset) == in.local.section(last_element);
}

// Return whether all rows of a piece that its target uses lie in the source.
inline bool piece_fits(const CombineInputs& in, const SourcePiece& piece, const Target& target,
                       int64_t source_numel) {
  if (piece.first_row < 0) {
    return piece_rows_fit(in, piece, target.num_rows, target.width, source_numel);
  }
  if (piece.first_row > in.num_rows() || target.num_rows > in.num_rows() - piece.first_row)
    return false;
  // The address of a tensor costs a call into torch, so it is not taken per row.
  const int32_t* rows = in.row_data() + piece.first_row;
  int32_t max_row = -1;
  for (int64_t i = 0; i < target.num_rows; ++i) max_row = std::max(max_row, rows[i]);
  return piece_rows_fit(in, piece, max_row + int64_t{1}, target.width, source_numel);
}

// Check the contents of targets and pieces: they must lie inside the output of `out_numel` elements
// and the source of `source_numel` elements, and targets must have as many elements as the output.
// It is not checked that targets, and in combine_backward pieces, do not overlap; overlaps would be
// data races.
inline void check_targets(const char* op, const CombineInputs& in, int64_t out_numel,
                          int64_t source_numel) {
  int64_t num_covered = 0;
  for (int64_t t = 0; t < in.num_targets; ++t) {
    const Target& target = in.targets[t];
    STD_TORCH_CHECK(
        rows_fit(target.offset, target.stride, target.num_rows, target.width, out_numel), op,
        ": target ", t, " of ", target.num_rows, " rows of ", target.width, " from ", target.offset,
        ", ", target.stride, " apart, does not lie in the ", out_numel, " elements of the output");
    STD_TORCH_CHECK(target.first_piece >= 0 && target.first_piece <= target.end_piece &&
                        target.end_piece <= in.num_pieces,
                    op, ": target ", t, " must name pieces in [0, ", in.num_pieces, ")");
    STD_TORCH_CHECK(
        target.first_bag < 0 || (target.first_bag <= in.num_lengths() &&
                                 target.num_rows <= in.num_lengths() - target.first_bag),
        op, ": target ", t, " divides by lengths from ", target.first_bag, " on, of ",
        in.num_lengths(), "; first_bag is -1 where nothing is divided");
    for (int64_t p = target.first_piece; p < target.end_piece; ++p) {
      STD_TORCH_CHECK(
          piece_fits(in, in.pieces[p], target, source_numel), op, ": piece ", p, " of target ", t,
          " does not lie in the ", source_numel,
          " elements of the source, crosses an end of local, or names entries that rows ",
          "does not have");
    }
    num_covered += target.num_rows * target.width;
  }
  STD_TORCH_CHECK(num_covered == out_numel, op, ": targets must cover the output of ", out_numel,
                  " elements, but have ", num_covered);
}

}  // namespace emb
