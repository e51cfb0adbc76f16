// What the layouts of the routing ops say, looked at where it costs nothing: on the CPU.
#pragma once

#include <algorithm>
#include <vector>

#include "route/check_route.h"

namespace emb {

inline void check_blocks(const char* op, const Routing& routing, const RouteFeature& feature,
                         int64_t f) {
  STD_TORCH_CHECK(feature.first_block >= 0 && feature.num_blocks >= 0 && feature.rows >= 0 &&
                      feature.num_blocks <= routing.num_blocks &&
                      feature.first_block <= routing.num_blocks - feature.num_blocks &&
                      (feature.rule == kByRange || feature.rule == kByKey),
                  op, ": feature ", f, " must name blocks in [0, ", routing.num_blocks,
                  "), rows >= 0 and rule 0 or 1");
  const RouteBlock* blocks = routing.blocks + feature.first_block;
  for (int64_t k = 0; k < feature.num_blocks; ++k) {
    STD_TORCH_CHECK(blocks[k].first_copy >= 0 && blocks[k].num_copies >= 0 &&
                        blocks[k].num_copies <= routing.num_copies &&
                        blocks[k].first_copy <= routing.num_copies - blocks[k].num_copies,
                    op, ": block ", feature.first_block + k, " must name copies in [0, ",
                    routing.num_copies, ")");
    const int64_t before = k == 0 ? 0 : blocks[k - 1].first_row;
    STD_TORCH_CHECK(feature.rule == kByKey ||
                        (blocks[k].first_row >= before && blocks[k].first_row <= feature.rows &&
                         (k > 0 || blocks[k].first_row == 0)),
                    op, ": the blocks of feature ", f,
                    " must begin at row 0 and ascend to at most ", feature.rows,
                    " rows, but block ", k, " of it begins at ", blocks[k].first_row);
  }
}

// That units have the bags of their features and each is named once.
inline void check_units(const char* op, const Routing& routing) {
  std::vector<bool> named(routing.num_units, false);
  STD_TORCH_CHECK(routing.units[0] == 0, op, ": units must begin at bag 0, got ", routing.units[0]);
  for (int64_t f = 0; f < routing.num_features; ++f) {
    const RouteFeature& feature = routing.features[f];
    const int64_t bags = routing.first_bags[f + 1] - routing.first_bags[f];
    for (int64_t k = feature.first_block; k < feature.first_block + feature.num_blocks; ++k) {
      const RouteBlock& block = routing.blocks[k];
      for (int64_t c = block.first_copy; c < block.first_copy + block.num_copies; ++c) {
        const int64_t unit = routing.copies[c];
        STD_TORCH_CHECK(unit >= 0 && unit < routing.num_units && !named[unit], op,
                        ": copies must name each unit in [0, ", routing.num_units,
                        ") once, but block ", k, " names ", unit);
        named[unit] = true;
        STD_TORCH_CHECK(routing.units[unit + 1] - routing.units[unit] == bags, op, ": unit ", unit,
                        " must have the ", bags, " bags of feature ", f, ", got ",
                        routing.units[unit + 1] - routing.units[unit]);
      }
    }
  }
  for (int64_t unit = 0; unit < routing.num_units; ++unit) {
    STD_TORCH_CHECK(named[unit], op, ": unit ", unit, " is not named in copies by any block");
  }
}

inline void check_routing(const char* op, const RouteInputs& in) {
  const Routing& routing = in.routing;
  const Bags bags = in.bags();
  const int64_t* first_bags = routing.first_bags;
  STD_TORCH_CHECK(bags.offsets[0] == 0 && bags.offsets[bags.count] == bags.num_lookups, op,
                  ": offsets must run from 0 to the number of ids, ", bags.num_lookups,
                  ", but run from ", bags.offsets[0], " to ", bags.offsets[bags.count],
                  " (lengths instead of offsets?)");
  STD_TORCH_CHECK(first_bags[0] >= 0 && first_bags[routing.num_features] <= bags.count, op,
                  ": first_bags must lie in [0, ", bags.count, "], the bags of offsets");
  for (int64_t f = 0; f < routing.num_features; ++f) {
    STD_TORCH_CHECK(first_bags[f] <= first_bags[f + 1], op,
                    ": first_bags must ascend, but feature ", f, " begins at ", first_bags[f],
                    " and the next at ", first_bags[f + 1]);
    check_blocks(op, routing, routing.features[f], f);
  }
  check_units(op, routing);
}

// Whether `rows` rows of `width` from `offset` on, `stride` apart, are inside [0, numel).
inline bool rows_fit(int64_t offset, int64_t stride, int64_t rows, int64_t width, int64_t numel) {
  if (offset < 0 || rows < 0 || width < 0) return false;
  if (rows == 0 || width == 0) return true;
  if (width > numel || offset > numel - width) return false;
  return rows == 1 || (stride >= width && (numel - width - offset) / stride >= rows - 1);
}

inline bool piece_fits(const CombineInputs& in, const SourcePiece& piece, const Target& target,
                       int64_t source_numel) {
  if (piece.first_row < 0) {
    return rows_fit(piece.offset, piece.stride, target.rows, target.width, source_numel);
  }
  if (piece.first_row > in.num_rows() || target.rows > in.num_rows() - piece.first_row)
    return false;
  // Asking a tensor for its memory is a call into torch: not for every row.
  const int32_t* rows = in.row_data() + piece.first_row;
  int32_t last = -1;
  for (int64_t i = 0; i < target.rows; ++i) last = std::max(last, rows[i]);
  return rows_fit(piece.offset, piece.stride, last + int64_t{1}, target.width, source_numel);
}

// `out_numel` and `source_numel` as of `combine`.
inline void check_targets(const char* op, const CombineInputs& in, int64_t out_numel,
                          int64_t source_numel) {
  int64_t covered = 0;
  for (int64_t t = 0; t < in.num_targets; ++t) {
    const Target& x = in.targets[t];
    STD_TORCH_CHECK(rows_fit(x.offset, x.stride, x.rows, x.width, out_numel), op, ": target ", t,
                    " of ", x.rows, " rows of ", x.width, " from ", x.offset, ", ", x.stride,
                    " apart, does not lie in the ", out_numel, " elements of the output");
    STD_TORCH_CHECK(
        x.first_piece >= 0 && x.first_piece <= x.end_piece && x.end_piece <= in.num_pieces, op,
        ": target ", t, " must name pieces in [0, ", in.num_pieces, ")");
    STD_TORCH_CHECK(x.first_bag < 0 || (x.first_bag <= in.num_lengths() &&
                                        x.rows <= in.num_lengths() - x.first_bag),
                    op, ": target ", t, " divides by lengths from ", x.first_bag, " on, of ",
                    in.num_lengths(), "; first_bag is -1 where nothing is divided");
    for (int64_t p = x.first_piece; p < x.end_piece; ++p) {
      STD_TORCH_CHECK(piece_fits(in, in.pieces[p], x, source_numel), op, ": piece ", p,
                      " of target ", t, " does not lie in the ", source_numel,
                      " elements of the source, or names entries that rows does not have");
    }
    covered += x.rows * x.width;
  }
  STD_TORCH_CHECK(covered == out_numel, op, ": targets must cover the output of ", out_numel,
                  " elements, but have ", covered);
}

}  // namespace emb
