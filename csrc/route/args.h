// The layouts of emblib/ops/route.py as structs, the arithmetic that CPU and CUDA share, and the
// CPU's tables of kernels. A *unit* is what one rank looks up for one feature.
#pragma once

#include "core/layout.h"
#include "core/random.h"

namespace emb {

enum RouteRule : int64_t { kByRange = 0, kByKey = 1, kByRangeElseSpread = 2 };

// A row of `features`.
struct RouteFeature {
  int64_t first_block, num_blocks, rows, rule;
};

// A row of `blocks`.
struct RouteBlock {
  int64_t first_row, first_copy, num_copies;
};

struct Routing {
  const int64_t* first_bags;
  const RouteFeature* features;
  const RouteBlock* blocks;
  const int64_t* copies;
  const int64_t* units;
  int64_t num_features, num_blocks, num_copies, num_units;
};

// Return the block in [0, blocks) that stores a key; emblib/dynamic/keys.py has the same function.
EMB_HD int64_t owner(int64_t key, int64_t blocks) {
  const uint64_t route = mix(mix(static_cast<uint64_t>(key)));
  return static_cast<int64_t>((route >> 32) * static_cast<uint64_t>(blocks) >> 32);
}

// Return the last block in [0, count) that begins at or before `row`; the first one if none does.
EMB_HD int64_t block_of_row(const RouteBlock* blocks, int64_t count, int64_t row) {
  int64_t first = 0;
  while (count > 1) {
    const int64_t half = count / 2;
    // No branch: it would be unpredictable.
    first += half & -int64_t{blocks[first + half].first_row <= row};
    count -= half;
  }
  return first;
}

struct RoutedId {
  int64_t block;  // block among those of its feature
  int64_t id;     // row of the id as the rank with the block numbers it
};

EMB_HD RoutedId route_id(const RouteFeature& feature, const RouteBlock* blocks, int64_t id) {
  if (feature.rule == kByKey) return {owner(id, feature.num_blocks), id};
  if (feature.rule == kByRangeElseSpread && id >= feature.rows) {
    return {id % feature.num_blocks, id / feature.num_blocks};
  }
  const int64_t row = repair_index(id, feature.rows);
  if (row < 0) return {0, -1};
  const int64_t block = block_of_row(blocks, feature.num_blocks, row);
  // An id out of range goes unchanged to the rank with row 0, whose lookup repairs and reports it
  // like any other.
  return {block, row == id ? row - blocks[block].first_row : id};
}

// A row of `targets`: [rows, width] elements of the output, rows `stride` apart.
struct Target {
  int64_t offset, stride, rows, width, first_piece, end_piece, first_bag;
};

// A row of `pieces`: the elements of the source for a target. If `first_row` is not negative, entry
// `first_row + i` of `rows` is the row of the piece for row i of the target, -1 for none.
struct SourcePiece {
  int64_t offset, stride, first_row;
};

inline constexpr int kRouteFeatureColumns = 4, kRouteBlockColumns = 3, kTargetColumns = 7,
                     kPieceColumns = 3;

// The CPU kernels that count and move the ids of a range of bags.

struct RouteArgs {
  Routing routing;
  const void* ids;
  Bags bags;
  void* out;  // lengths or ids, of the dtype of the ids
  // For `move` only.
  IndexArray starts;
  int64_t total;
  int64_t* positions;
  const float* weights;
  float* out_weights;
  int64_t* scratch;  // three numbers per block, for the feature with the most blocks
};

// Process bags [begin, end) of feature f. Return false if the arguments contradict each other:
// offsets that descend, or starts that do not match the ids.
using RouteFn = bool (*)(const RouteArgs&, int64_t f, int64_t begin, int64_t end);

struct RouteTable {
  RouteFn count[2], move[2];  // [ids are int64]
};

// The elements of a source that are in a tensor of their own, `local`: the part [begin, end). The
// others follow one another in the tensor of the source.
struct LocalPart {
  void* data;
  int64_t begin, end;

  EMB_HD int64_t size() const { return end - begin; }

  // Return the number of parts before an element: 0, 1 or 2.
  EMB_HD int section(int64_t offset) const {
    return size() == 0 ? 0 : int{offset >= begin} + int{offset >= end};
  }

  // Return the address of an element.
  template <class T>
  EMB_HD T* at(T* data_of_others, int64_t offset) const {
    const int number = section(offset);
    if (number == 1) return static_cast<T*>(data) + (offset - begin);
    return data_of_others + (number == 0 ? offset : offset - size());
  }
};

// The CPU kernels of `combine` and `combine_backward`.

struct CombineArgs {
  const void* in;
  void* out;
  LocalPart local;  // the local part of `in` for `combine`, of `out` for `combine_backward`
  const SourcePiece* pieces;
  IndexArray lengths;
  const int32_t* rows;
  float scale;
};

// Process rows [begin, end) of a target.
using CombineFn = void (*)(const CombineArgs&, const Target&, int64_t begin, int64_t end);

struct CombineTable {
  CombineFn combine[kDtypes][kDtypes],
      combine_backward[kDtypes][kDtypes];  // [dtype of in][dtype of out]
};

}  // namespace emb
