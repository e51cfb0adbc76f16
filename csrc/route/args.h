// Routing: which rank gets which id of a batch, and how the rows that ranks return are combined.
// This file has the layouts, which emblib/ops/route.py documents, as structs; the arithmetic that
// CPU and GPU share; and the arguments and function tables of the CPU kernels.
//
// A table is divided into *blocks* of rows. One rank stores a block, or several ranks store copies
// of it. A *unit* is what one rank looks up in one copy of a block for one feature: for each bag of
// the feature, the ids that fall into the block, in their order. An *output bag* is a bag of a
// unit. Pointers are to memory of the device of the op, which the caller owns.
#pragma once

#include "core/layout.h"
#include "core/random.h"

namespace emb {

// The rule that chooses the block of an id: by the range of rows that contains the id, by a hash of
// the id, or by range for ids below the rows of the table and by remainder for the other ids.
struct RouteRule {
  enum Code : int64_t { kByRange = 0, kByKey = 1, kByRangeElseSpread = 2 };
};

// A row of `features`: blocks [first_block, first_block + num_blocks) of a table of `rows` rows;
// `rule` is a RouteRule::Code. The ids of a feature without blocks are dropped.
struct RouteFeature {
  int64_t first_block, num_blocks, rows, rule;
};

// A row of `blocks`: the first row of a block, which the rule kByKey does not read, and the units
// copies[first_copy], ..., copies[first_copy + num_copies - 1] that get its ids.
struct RouteBlock {
  int64_t first_row, first_copy, num_copies;
};

// The five tensors of a routing. Feature f has the bags [first_bags[f], first_bags[f + 1]) of the
// batch; unit u has the output bags [units[u], units[u + 1]).
struct Routing {
  const int64_t* first_bags;     // [num_features + 1], ascending
  const RouteFeature* features;  // [num_features]
  const RouteBlock* blocks;      // [num_blocks]
  const int64_t* copies;         // [num_copies] units, each named once
  const int64_t* units;          // [num_units + 1] first output bag of each unit, from 0
  int64_t num_features, num_blocks, num_copies, num_units;
};

// Return the block in [0, blocks) that stores a key. `owner` of emblib/dynamic/keys.py must return
// the same block.
EMB_HD int64_t block_of_key(int64_t key, int64_t blocks) {
  const uint64_t route = mix(mix(static_cast<uint64_t>(key)));
  return static_cast<int64_t>(((route >> 32) * static_cast<uint64_t>(blocks)) >> 32);
}

// Return the last block in [0, count) that begins at or before `row`; block 0 if none does.
// `blocks`, [count], must ascend.
EMB_HD int64_t block_of_row(const RouteBlock* blocks, int64_t count, int64_t row) {
  int64_t first = 0;
  while (count > 1) {
    const int64_t half = count / 2;
    // A product instead of a branch, which would be unpredictable.
    first += half & -int64_t{blocks[first + half].first_row <= row};
    count -= half;
  }
  return first;
}

// The destination of an id.
struct RoutedId {
  int64_t block;  // index of the block among those of its feature
  int64_t id;     // the id in the numbering of the rank that has the block
};

// Return the destination of an id of a feature; `blocks` are the blocks of the feature, at least
// one. By range, a pruned id (-1), and any other id that repair_index skips because the table has
// no rows, goes to block 0 as -1. By key, every id keeps its number.
EMB_HD RoutedId route_id(const RouteFeature& feature, const RouteBlock* blocks, int64_t id) {
  if (feature.rule == RouteRule::kByKey) return {block_of_key(id, feature.num_blocks), id};
  if (feature.rule == RouteRule::kByRangeElseSpread && id >= feature.rows) {
    return {id % feature.num_blocks, id / feature.num_blocks};
  }
  const int64_t row = repair_index(id, feature.rows);
  if (row < 0) return {0, -1};
  const int64_t block = block_of_row(blocks, feature.num_blocks, row);
  // An id out of range goes unchanged to the rank with row 0, whose lookup repairs and reports it
  // like any other.
  return {block, row == id ? row - blocks[block].first_row : id};
}

// A row of `targets`: a matrix [rows, width] in the flat output, which begins at element `offset`
// and has rows `stride` elements apart. It is the sum of pieces [first_piece, end_piece), 0 if
// there are none. If `first_bag` is not negative, row i is divided by max(lengths[first_bag + i],
// 1).
struct Target {
  int64_t offset, stride, rows, width, first_piece, end_piece, first_bag;
};

// A row of `pieces`: a matrix in the flat source, of the width of its target. Row i of the target
// adds row i of the piece, or, if `first_row` is not negative, row rows[first_row + i] of the
// piece; if that number is negative, it adds nothing.
struct SourcePiece {
  int64_t offset, stride, first_row;
};

// Columns of the tensors whose rows are the structs above.
inline constexpr int kRouteFeatureColumns = 4, kRouteBlockColumns = 3, kTargetColumns = 7,
                     kPieceColumns = 3;
static_assert(sizeof(RouteFeature) == kRouteFeatureColumns * sizeof(int64_t));
static_assert(sizeof(RouteBlock) == kRouteBlockColumns * sizeof(int64_t));
static_assert(sizeof(Target) == kTargetColumns * sizeof(int64_t));
static_assert(sizeof(SourcePiece) == kPieceColumns * sizeof(int64_t));

// Entries of RouteArgs::scratch per block: WriteCursors has three arrays there.
inline constexpr int64_t kRouteScratch = 3;

// The arguments of the CPU kernels that count and move the ids of a range of bags.
struct RouteArgs {
  Routing routing;  // its contents have been checked
  const void* ids;  // [L]
  Bags bags;        // of the batch
  void* out;        // count: [output bags] lengths; move: [total] ids; of the dtype of `ids`
  // The other members are read by `move` only.
  IndexArray starts;     // [output bags + 1] sums of the lengths that `count` wrote
  int64_t total;         // ids in the output
  int64_t* positions;    // [total], an output: the position in `ids` of each id of the output
  const float* weights;  // [L], or null
  float* out_weights;    // [total], an output: the weight of each id; not used without weights
  // `count` and `move` use this: kRouteScratch numbers per block of the feature with the most
  // blocks, of this thread alone.
  int64_t* scratch;
};

// Count or move the ids of bags [begin, end) of the batch, all of feature f. Return false if the
// arguments contradict each other: if `count` finds offsets that descend, or `move` finds that the
// starts of the range are not those of its ids. Nothing outside the outputs is written in any case.
using RouteFn = bool (*)(const RouteArgs&, int64_t f, int64_t begin, int64_t end);

// The CPU kernels of `route_lengths` and `route_ids`. Calls for disjoint ranges may run at once.
struct RouteTable {
  RouteFn count[2], move[2];  // [ids are int64]
};

// The elements [begin, end) of a flat source that are in a separate tensor, `local`. The tensor of
// the source has the other elements, without a gap. begin = end if no element is in `local`.
struct LocalPart {
  void* data;  // the memory of `local`, of the dtype of the source
  int64_t begin, end;

  EMB_HD int64_t size() const { return end - begin; }

  // Return the section of an element: 0 before the local part, 1 in it, 2 after it. Return 0 if the
  // local part is empty.
  EMB_HD int section(int64_t offset) const {
    return size() == 0 ? 0 : int{offset >= begin} + int{offset >= end};
  }

  // Return the address of element `offset` of the source; `source` is the tensor of the source.
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
  const int32_t* rows;        // rows of pieces, read for pieces with a first_row
  float scale;                // factor of all sums
};

// Write rows [begin, end) of a target or, backward, the rows of its pieces that belong to them.
// Calls for disjoint rows may run at once.
using CombineFn = void (*)(const CombineArgs&, const Target&, int64_t begin, int64_t end);

// The CPU kernels of `combine` and `combine_backward`.
struct CombineTable {
  CombineFn combine[kNumDtypes][kNumDtypes];           // [dtype of in][dtype of out]
  CombineFn combine_backward[kNumDtypes][kNumDtypes];  // [dtype of in][dtype of out]
};

}  // namespace emb
