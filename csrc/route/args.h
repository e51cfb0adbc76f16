// Routing sends each id of a batch to the ranks that store its row. Combining adds the rows that
// the ranks return. This file has the layouts of both as structs (emblib/ops/route.py documents
// their tensors), then the arguments and function tables of the CPU kernels. Pointers are to memory
// of the op's device, which the caller owns.
//
// A table is divided into *blocks* of rows. A block is stored by one rank, or copies of it by
// several ranks. A *unit* is the part of a batch that one rank looks up for one feature in one copy
// of a block. It has as many bags as the feature, its *output bags*: output bag b of a unit has the
// ids of bag b of the feature that fall into the block, in their order.
#pragma once

#include "core/layout.h"
#include "core/random.h"

namespace emb {

// The rule that selects the block of an id; route_id applies it.
struct RouteRule {
  enum Code : int64_t {
    kByRange = 0,           // the block whose rows contain the id
    kByKey = 1,             // a hash of the id (range_of_key)
    kByRangeElseSpread = 2  // kByRange for ids up to the last row, a remainder for larger ids
  };
};

// A row of the tensor `features`: a table of `num_rows` rows, in the blocks [first_block,
// first_block + num_blocks). `rule` is a RouteRule::Code. The ids of a feature without blocks are
// dropped.
struct RouteFeature {
  int64_t first_block, num_blocks, num_rows, rule;
};

// A row of the tensor `blocks`: the first row of a block in its table (not read by kByKey), and the
// units copies[first_copy], ..., copies[first_copy + num_copies - 1] that get its ids.
struct RouteBlock {
  int64_t first_row, first_copy, num_copies;
};

// The five tensors that describe a routing. Feature f has the bags [first_bags[f],
// first_bags[f + 1]) of the batch. Unit u has the output bags [units[u], units[u + 1]).
struct Routing {
  const int64_t* first_bags;     // [num_features + 1], ascending
  const RouteFeature* features;  // [num_features]
  const RouteBlock* blocks;      // [num_blocks]
  const int64_t* copies;         // [num_copies]: the unit of each copy; each unit occurs once
  const int64_t* units;          // [num_units + 1]: first output bag of each unit, from 0
  int64_t num_features, num_blocks, num_copies, num_units;
};

// Return the position of the last of `blocks`, [num_blocks], that begins at or before `row`; 0 if
// there is none. The blocks must ascend.
EMB_HD int64_t block_of_row(const RouteBlock* blocks, int64_t num_blocks, int64_t row) {
  int64_t first = 0, num_left = num_blocks;  // search in [first, first + num_left)
  while (num_left > 1) {
    const int64_t half = num_left / 2;
    // A bit mask instead of a branch, which would be unpredictable.
    first += half & -int64_t{blocks[first + half].first_row <= row};
    num_left -= half;
  }
  return first;
}

// The destination of an id.
struct RoutedId {
  int64_t block;  // position of the block among the blocks of the feature
  int64_t id;     // the id by which the rank with the block looks it up
};

// Return the destination of an id of a feature; `blocks` are the blocks of the feature, at least
// one. With kByKey an id is unchanged. With kByRangeElseSpread an id of num_rows or more goes to
// block id % num_blocks as id / num_blocks. Any other id is counted from the first row of its
// block, but -1, and any id of an empty table, goes to block 0 as -1.
EMB_HD RoutedId route_id(const RouteFeature& feature, const RouteBlock* blocks, int64_t id) {
  if (feature.rule == RouteRule::kByKey) return {range_of_key(id, feature.num_blocks), id};
  if (feature.rule == RouteRule::kByRangeElseSpread && id >= feature.num_rows) {
    return {id % feature.num_blocks, id / feature.num_blocks};
  }
  const int64_t row = repair_index(id, feature.num_rows);
  if (row < 0) return {0, -1};
  const int64_t block = block_of_row(blocks, feature.num_blocks, row);
  // An id out of range goes unchanged to the rank with row 0, whose lookup repairs and reports it.
  return {block, row == id ? row - blocks[block].first_row : id};
}

// A row of the tensor `targets`: a matrix [num_rows, width] in the flat output. It is the sum of
// pieces [first_piece, end_piece), 0 if there are none.
struct Target {
  int64_t offset;                  // first element in the output
  int64_t stride;                  // number of elements between rows
  int64_t num_rows, width;         // number of rows, and of columns
  int64_t first_piece, end_piece;  // in the tensor `pieces`
  int64_t first_bag;  // row i is divided by max(lengths[first_bag + i], 1); negative: not divided
};

// A row of the tensor `pieces`: a matrix in the flat source, as wide as its target.
struct SourcePiece {
  int64_t offset;  // first element in the source
  int64_t stride;  // number of elements between rows
  // Row i of the target adds row rows[first_row + i] of the piece, nothing if that number is
  // negative. If first_row itself is negative, it adds row i of the piece.
  int64_t first_row;
};

// Numbers of columns of the tensors whose rows are the structs above.
inline constexpr int kRouteFeatureColumns = 4, kRouteBlockColumns = 3, kTargetColumns = 7,
                     kPieceColumns = 3;
static_assert(sizeof(RouteFeature) == kRouteFeatureColumns * sizeof(int64_t));
static_assert(sizeof(RouteBlock) == kRouteBlockColumns * sizeof(int64_t));
static_assert(sizeof(Target) == kTargetColumns * sizeof(int64_t));
static_assert(sizeof(SourcePiece) == kPieceColumns * sizeof(int64_t));

// Entries of RouteArgs::scratch per block: the three arrays of WriteCursors (route_kernels.cpp).
inline constexpr int64_t kRouteScratchPerBlock = 3;

// The arguments of the CPU kernels of `route_lengths` and `route_ids`, which count and move the ids
// of a range of bags.
struct RouteArgs {
  Routing routing;  // its contents have been checked
  const void* ids;  // [L]
  Bags bags;        // of the batch
  // An output of the dtype of `ids`, uninitialised. `count` writes the number of ids of each output
  // bag, [units[num_units]], and `move` the ids, [num_output_ids].
  void* out;
  // Memory for this call alone: kRouteScratchPerBlock entries per block of the feature with the
  // most blocks.
  int64_t* scratch;
  // The members below are used by `move` only.
  IndexArray starts;       // [output bags + 1] sums of the lengths that `count` wrote
  int64_t num_output_ids;  // the last of `starts`
  int64_t* positions;      // [num_output_ids], an output: the position of each output id in `ids`
  const float* weights;    // [L], or null
  float* out_weights;      // [num_output_ids], an output; not used if `weights` is null
};

// Count or move the ids of bags [begin, end) of the batch, all of feature f. Return false if
// `count` finds offsets that descend, or if `move` finds more or fewer ids of a block than its
// starts at bags `begin` and `end` say. Then the outputs are incomplete, but nothing outside of
// them is written.
using RouteFn = bool (*)(const RouteArgs&, int64_t f, int64_t begin, int64_t end);

// The CPU kernels: `count` of route_lengths, `move` of route_ids. Calls for disjoint ranges may run
// at once.
struct RouteTable {
  RouteFn count[2], move[2];  // the index is 1 if ids are int64, 0 if they are int32
};

// The part of a flat source that is in a separate tensor, `local`: elements [begin, end) of the
// source, none if begin = end. The tensor of the source has the other elements, without a gap.
struct LocalPart {
  void* data;  // the memory of `local`, of the dtype of the source
  int64_t begin, end;

  EMB_HD int64_t size() const { return end - begin; }

  // Return the section of an element: 0 before the local part, 1 in it, 2 after it. Return 0 if the
  // local part is empty.
  EMB_HD int section(int64_t offset) const {
    return size() == 0 ? 0 : int{offset >= begin} + int{offset >= end};
  }

  // Return the address of element `offset` of the source. `source` is the memory of the tensor of
  // the source, which has the elements outside of `local`.
  template <class T>
  EMB_HD T* address(T* source, int64_t offset) const {
    const int offset_section = section(offset);
    if (offset_section == 1) return static_cast<T*>(data) + (offset - begin);
    return source + (offset_section == 0 ? offset : offset - size());
  }
};

// The arguments of the CPU kernels of `combine` and `combine_backward`. The contents of all layouts
// have been checked.
struct CombineArgs {
  const void* in;             // combine: the source; combine_backward: the gradient of the output
  void* out;                  // combine: the output; combine_backward: the gradient of the source
  LocalPart local;            // the local part of the source, or of its gradient
  const SourcePiece* pieces;  // of all targets
  IndexArray lengths;         // of bags, read for targets with a first_bag
  const int32_t* rows;        // row numbers, read for pieces with a first_row
  float scale;                // factor of every sum, or of every gradient
};

// combine: write rows [begin, end) of a target. combine_backward: write the gradient of each piece
// row that these rows add. Calls for disjoint rows may run at once.
using CombineFn = void (*)(const CombineArgs&, const Target&, int64_t begin, int64_t end);

// The CPU kernels of `combine` and `combine_backward`.
struct CombineTable {
  CombineFn combine[kNumDtypes][kNumDtypes];           // [dtype of in][dtype of out]
  CombineFn combine_backward[kNumDtypes][kNumDtypes];  // [dtype of in][dtype of out]
};

}  // namespace emb
