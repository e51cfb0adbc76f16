// Counting and moving the ids of a range of bags of one feature on one CPU thread: the functions of
// RouteTable (route/args.h), count_ids and move_ids.
//
// Most of the work is to find the block of each id. With few blocks, an id is compared with the
// start of every block, which vectorises. With many blocks of equal size, of which the last may be
// smaller, an id is multiplied by the reciprocal of the size. Otherwise route_id finds the block of
// one id after the other, by a binary search or a hash.
//
// Counting processes long bags one by one, with a loop over the ids per block, and short bags in
// chunks of ids. Moving writes the ids of each block at the block's cursor, and then copies them
// for further copies of the block.
#include <cstdint>

#include "route/args.h"

namespace emb::EMB_ISA {
namespace {

// Up to this number of blocks, ids are compared with the start of every block, which vectorises.
constexpr int64_t kFewBlocks = 12;
// Up to this number of rows, products of doubles find the block of a row (see
// find_in_equal_blocks).
constexpr int64_t kMaxExactRows = int64_t{1} << 52;
constexpr int64_t kLongBag = 8;  // mean ids per bag from which bags are counted one by one
constexpr int64_t kChunk = 512;  // ids whose blocks are found before they are counted or moved

// Return whether an id of type I can be as large as `bound`, which must not be negative.
template <class I>
bool can_reach(int64_t bound) {
  return sizeof(I) == 8 || bound <= INT32_MAX;
}

// Return how many of n ids are at least `bound`.
template <class I>
int64_t count_at_least(const I* ids, int64_t n, int64_t bound) {
  if (!can_reach<I>(bound)) return 0;
  const auto typed_bound = static_cast<I>(bound);
  I count = 0;
  for (int64_t i = 0; i < n; ++i) count += ids[i] >= typed_bound;
  return count;
}

// A feature, its blocks, and a range of its bags.
struct FeatureRoute {
  const RouteFeature& feature;
  const RouteBlock* blocks;
  const Routing& routing;
  int64_t first_bag, end_bag;  // of the range, counted from the first bag of the feature
  // The number of rows per block if all blocks have equal size and find_in_equal_blocks is used;
  // else 0.
  int64_t rows_per_block;

  // The range is bags [begin, end) of the batch, all of feature f.
  FeatureRoute(const Routing& batch_routing, int64_t f, int64_t begin, int64_t end)
      : feature(batch_routing.features[f]),
        blocks(batch_routing.blocks + feature.first_block),
        routing(batch_routing),
        first_bag(begin - batch_routing.first_bags[f]),
        end_bag(end - batch_routing.first_bags[f]),
        rows_per_block(has_few_blocks() || feature.rule == RouteRule::kByKey ||
                               feature.num_rows > kMaxExactRows
                           ? 0
                           : blocks[1].first_row) {
    for (int64_t k = 2; k < feature.num_blocks && rows_per_block > 0; ++k) {
      const int64_t start = k * rows_per_block;
      if (blocks[k].first_row != (start < feature.num_rows ? start : feature.num_rows))
        rows_per_block = 0;
    }
    if (rows_per_block > 0 && (feature.num_rows - 1) / rows_per_block >= feature.num_blocks) {
      rows_per_block = 0;  // the last block is larger
    }
  }

  // Return whether ids are compared with the start of every block.
  bool has_few_blocks() const {
    return feature.rule != RouteRule::kByKey && feature.num_blocks <= kFewBlocks;
  }
  // Return the output bag of the range's first bag, for copy `copy` of block k.
  int64_t output_bag(int64_t k, int64_t copy) const {
    return routing.units[routing.copies[blocks[k].first_copy + copy]] + first_bag;
  }
};

// Return how many of n ids repair_index does not skip, for a table of num_rows rows.
template <class I>
int64_t count_not_skipped(const I* ids, int64_t n, int64_t num_rows) {
  if (num_rows == 0) return 0;
  I count = 0;
  for (int64_t i = 0; i < n; ++i) count += ids[i] != -1;
  return count;
}

// Write how many of n ids go to each block to `counts`, [num_blocks], for a feature with few blocks
// and the rule kByRange.
template <class I>
void count_in_few_blocks(const FeatureRoute& route, const I* ids, int64_t n, int64_t* counts) {
  const int64_t num_blocks = route.feature.num_blocks;
  const int64_t num_beyond = count_at_least(ids, n, route.feature.num_rows);
  int64_t num_after_block = 0;  // ids of the blocks after this one
  for (int64_t k = num_blocks - 1; k > 0; --k) {
    const int64_t first = route.blocks[k].first_row;
    const int64_t num_from_block =  // ids of this block and of later blocks
        first > 0 ? count_at_least(ids, n, first) - num_beyond
                  : count_not_skipped(ids, n, route.feature.num_rows);
    counts[k] = num_from_block - num_after_block;
    num_after_block = num_from_block;
  }
  counts[0] = n - num_after_block;
}

// The functions find_*() write the block of each of n ids to `block`, [n], and the id in the
// numbering of the block's rank to `rank_id`, [n]. The results are those of route_id.

// Find the blocks of ids of a feature with at most kMaxBlocks blocks. The rule must be kByRange, or
// kByRangeElseSpread without ids beyond the rows.
template <class I, int kMaxBlocks>
void find_in_max_blocks(const FeatureRoute& route, const I* ids, int64_t n, I* block, I* rank_id) {
  const int64_t rows = route.feature.num_rows;
  const I typed_rows = can_reach<I>(rows) ? static_cast<I>(rows) : INT32_MAX;
  const bool is_never_beyond = !can_reach<I>(rows);  // no id is too large
  const bool is_empty = rows == 0;
  const I row_of_invalid = is_empty ? -1 : 0;
  I first_row[kMaxBlocks] = {};
  bool exists[kMaxBlocks] = {};  // whether block k exists and an id of type I can reach it
  for (int64_t k = 0; k < kMaxBlocks && k < route.feature.num_blocks; ++k) {
    exists[k] = can_reach<I>(route.blocks[k].first_row);
    if (exists[k]) first_row[k] = static_cast<I>(route.blocks[k].first_row);
  }
  for (int64_t i = 0; i < n; ++i) {
    const I id = ids[i];
    const bool is_row = (id >= 0) & (is_never_beyond | (id < typed_rows));
    const I row = is_row ? id : (id == -1 ? I{-1} : row_of_invalid);
    I block_number = 0, begin = 0;
    for (int k = 1; k < kMaxBlocks; ++k) {
      const bool is_reached = exists[k] & (row >= first_row[k]);
      block_number = is_reached ? I{k} : block_number;
      begin = is_reached ? first_row[k] : begin;
    }
    block[i] = block_number;
    rank_id[i] = (is_row | is_empty) ? static_cast<I>(row - begin) : id;
  }
}

// Find the blocks of ids of a feature with at most kFewBlocks blocks; the rule as above.
template <class I>
void find_in_few_blocks(const FeatureRoute& route, const I* ids, int64_t n, I* block, I* rank_id) {
  static_assert(kFewBlocks == 12);
  const int64_t num_blocks = route.feature.num_blocks;
  const auto find = num_blocks <= 1   ? find_in_max_blocks<I, 1>
                    : num_blocks <= 4 ? find_in_max_blocks<I, 4>
                    : num_blocks <= 8 ? find_in_max_blocks<I, 8>
                                      : find_in_max_blocks<I, 12>;
  find(route, ids, n, block, rank_id);
}

// Find the blocks of ids of any feature.
template <class I>
void find_one_by_one(const FeatureRoute& route, const I* ids, int64_t n, I* block, I* rank_id) {
  for (int64_t i = 0; i < n; ++i) {
    const RoutedId routed = route_id(route.feature, route.blocks, ids[i]);
    block[i] = static_cast<I>(routed.block);
    rank_id[i] = static_cast<I>(routed.id);
  }
}

// Find the blocks of ids of a feature with many blocks of equal size
// (FeatureRoute::rows_per_block); the rule as above. The product of a row with the reciprocal of
// the size, rounded down, is the block or off by one, which is corrected. Ids that are no rows go
// unchanged to block 0.
template <class I>
void find_in_equal_blocks(const FeatureRoute& route, const I* ids, int64_t n, I* block,
                          I* rank_id) {
  const int64_t rows_per_block = route.rows_per_block, rows = route.feature.num_rows;
  const double blocks_per_row = 1.0 / static_cast<double>(rows_per_block);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = ids[i];
    const bool is_row = (id >= 0) & (id < rows);
    const int64_t row = is_row ? id : 0;
    int64_t block_number = static_cast<int64_t>(static_cast<double>(row) * blocks_per_row);
    block_number -= block_number * rows_per_block > row;
    block_number += (block_number + 1) * rows_per_block <= row;
    block[i] = static_cast<I>(block_number);
    rank_id[i] = static_cast<I>(is_row ? row - block_number * rows_per_block : id);
  }
}

// Find the blocks of n ids with the fastest of these functions.
template <class I>
void find_blocks(const FeatureRoute& route, const I* ids, int64_t n, I* block, I* rank_id) {
  const RouteFeature& feature = route.feature;
  if (feature.rule == RouteRule::kByRangeElseSpread &&
      count_at_least(ids, n, feature.num_rows) > 0) {
    find_one_by_one(route, ids, n, block, rank_id);
  } else if (route.has_few_blocks()) {
    find_in_few_blocks(route, ids, n, block, rank_id);
  } else if (route.rows_per_block > 0) {
    find_in_equal_blocks(route, ids, n, block, rank_id);
  } else {
    find_one_by_one(route, ids, n, block, rank_id);
  }
}

// Count the ids of `num_bags` bags from bag `begin` of the batch on, one after the other: add each
// to the length of its bag in its block. The lengths of block k begin at out[output_bags[k]] and
// must be 0 before; output_bags[k] is negative for a block without copies. Return false for offsets
// that descend.
template <class I>
bool count_one_by_one(const RouteArgs& args, const FeatureRoute& route, const int64_t* output_bags,
                      int64_t begin, int64_t num_bags) {
  I* out = static_cast<I*>(args.out);
  const I* ids = static_cast<const I*>(args.ids);
  const int64_t first_id = args.bags.offsets[begin], end_id = args.bags.offsets[begin + num_bags];
  if (first_id < 0 || end_id < first_id || end_id > args.bags.num_lookups) return false;
  I block[kChunk], rank_id[kChunk];
  int64_t bag = 0, bag_end = first_id;  // ids before `bag_end` belong to the first `bag` bags
  for (int64_t i = first_id; i < end_id; i += kChunk) {
    const int64_t n = end_id - i < kChunk ? end_id - i : kChunk;
    find_blocks(route, ids + i, n, block, rank_id);
    for (int64_t j = 0; j < n; ++j) {
      while (i + j >= bag_end && bag < num_bags) {
        const int64_t next_end = args.bags.offsets[begin + ++bag];
        if (next_end < bag_end) return false;
        bag_end = next_end;
      }
      const int64_t output_bag = output_bags[block[j]];
      if (output_bag >= 0) ++out[output_bag + bag - 1];
    }
  }
  for (; bag < num_bags; ++bag) {
    const int64_t next_end = args.bags.offsets[begin + bag + 1];
    if (next_end < bag_end) return false;
    bag_end = next_end;
  }
  return true;
}

// Do what count_one_by_one does, bag by bag. The lengths need not be 0 before. The feature must
// have one block, or few blocks and the rule kByRange.
template <class I>
bool count_bag_by_bag(const RouteArgs& args, const FeatureRoute& route, const int64_t* output_bags,
                      int64_t begin, int64_t num_bags) {
  const int64_t num_blocks = route.feature.num_blocks;
  const I* ids = static_cast<const I*>(args.ids);
  I* out = static_cast<I*>(args.out);
  int64_t counts[kFewBlocks];
  int64_t bag_begin = args.bags.offsets[begin];
  for (int64_t bag = 0; bag < num_bags; ++bag) {
    const int64_t bag_end = args.bags.offsets[begin + bag + 1], n = bag_end - bag_begin;
    if (bag_begin < 0 || n < 0 || bag_end > args.bags.num_lookups) return false;
    if (num_blocks == 1) {
      counts[0] = n;
    } else {
      count_in_few_blocks(route, ids + bag_begin, n, counts);
    }
    for (int64_t k = 0; k < num_blocks; ++k) {
      if (output_bags[k] >= 0) out[output_bags[k] + bag] = static_cast<I>(counts[k]);
    }
    bag_begin = bag_end;
  }
  return true;
}

// The RouteFn that counts; I is the dtype of ids and lengths.
template <class I>
bool count_ids(const RouteArgs& args, int64_t f, int64_t begin, int64_t end) {
  const FeatureRoute route(args.routing, f, begin, end);
  const int64_t num_blocks = route.feature.num_blocks, num_bags = end - begin;
  if (num_blocks == 0) return true;
  I* out = static_cast<I*>(args.out);
  int64_t* output_bags = args.scratch;  // of the first copy of each block
  for (int64_t k = 0; k < num_blocks; ++k) {
    output_bags[k] = route.blocks[k].num_copies > 0 ? route.output_bag(k, 0) : -1;
  }
  const int64_t n = args.bags.offsets[end] - args.bags.offsets[begin];
  const bool is_bag_by_bag =
      num_blocks == 1 || (route.has_few_blocks() && route.feature.rule == RouteRule::kByRange &&
                          n >= kLongBag * num_bags);
  if (!is_bag_by_bag) {
    for (int64_t k = 0; k < num_blocks; ++k) {
      if (output_bags[k] >= 0) __builtin_memset(out + output_bags[k], 0, num_bags * sizeof(I));
    }
  }
  const auto kernel = is_bag_by_bag ? count_bag_by_bag<I> : count_one_by_one<I>;
  if (!kernel(args, route, output_bags, begin, num_bags)) return false;
  for (int64_t k = 0; k < num_blocks; ++k) {
    for (int64_t copy = 1; copy < route.blocks[k].num_copies; ++copy) {
      __builtin_memcpy(out + route.output_bag(k, copy), out + output_bags[k], num_bags * sizeof(I));
    }
  }
  return true;
}

// Where the ids of each block's first copy are written in the outputs: block k to positions
// [start[k], end[k]), its next id to cursor[k]. The arrays, [num_blocks] of the feature, are in
// args.scratch; kRouteScratchPerBlock is their number.
struct WriteCursors {
  int64_t *cursor, *end, *start;

  // Set the cursors from args.starts. Return false if the starts lie outside the outputs, or give
  // copies of a block different lengths.
  bool set(const RouteArgs& args, const FeatureRoute& route) {
    const int64_t num_blocks = route.feature.num_blocks;
    cursor = args.scratch;
    end = cursor + num_blocks;
    start = end + num_blocks;
    for (int64_t k = 0; k < num_blocks; ++k) {
      start[k] = cursor[k] = end[k] = 0;
      for (int64_t copy = 0; copy < route.blocks[k].num_copies; ++copy) {
        const int64_t output_bag = route.output_bag(k, copy);
        const int64_t first = args.starts[output_bag];
        const int64_t last = args.starts[output_bag + route.end_bag - route.first_bag];
        if (first < 0 || last < first || last > args.num_output_ids) return false;
        if (copy > 0 && last - first != end[k] - start[k]) return false;
        if (copy == 0) {
          start[k] = cursor[k] = first;
          end[k] = last;
        }
      }
    }
    return true;
  }
};

// Move n ids, at most kChunk, from position `first` of args.ids on. Return false if the output of a
// block with copies is full before all of its ids are written.
template <class I>
bool move_chunk(const RouteArgs& args, const FeatureRoute& route, const WriteCursors& cursors,
                int64_t first, int64_t n) {
  I block[kChunk], rank_id[kChunk];
  const I* ids = static_cast<const I*>(args.ids) + first;
  I* out = static_cast<I*>(args.out);
  find_blocks(route, ids, n, block, rank_id);
  bool has_room = true;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t k = block[i], target = cursors.cursor[k];
    if (target >= cursors.end[k]) {
      has_room = has_room && route.blocks[k].num_copies == 0;
      continue;
    }
    cursors.cursor[k] = target + 1;
    out[target] = rank_id[i];
    args.positions[target] = first + i;
    if (args.weights != nullptr) args.out_weights[target] = args.weights[first + i];
  }
  return has_room;
}

// Move all n ids, from position `first` of args.ids on, of a feature with one block, in which ids
// stay in order. Return false if the block has copies, but not room for exactly n ids.
template <class I>
bool move_all(const RouteArgs& args, const FeatureRoute& route, const WriteCursors& cursors,
              int64_t first, int64_t n) {
  if (route.blocks[0].num_copies == 0) return true;
  if (cursors.end[0] - cursors.cursor[0] != n) return false;
  if (n == 0) return true;  // the output may be null, which memcpy must not get
  const int64_t target = cursors.cursor[0];
  const I* ids = static_cast<const I*>(args.ids) + first;
  I* out = static_cast<I*>(args.out) + target;
  if (route.feature.rule == RouteRule::kByKey) {
    __builtin_memcpy(out, ids, n * sizeof(I));
  } else {
    I block[kChunk];
    for (int64_t i = 0; i < n; i += kChunk) {
      find_blocks(route, ids + i, n - i < kChunk ? n - i : kChunk, block, out + i);
    }
  }
  for (int64_t i = 0; i < n; ++i) args.positions[target + i] = first + i;
  if (args.weights != nullptr) {
    __builtin_memcpy(args.out_weights + target, args.weights + first, n * sizeof(float));
  }
  cursors.cursor[0] = target + n;
  return true;
}

// The RouteFn that moves; I is the dtype of ids.
template <class I>
bool move_ids(const RouteArgs& args, int64_t f, int64_t begin, int64_t end) {
  const FeatureRoute route(args.routing, f, begin, end);
  const int64_t num_blocks = route.feature.num_blocks;
  if (num_blocks == 0) return true;
  const int64_t first_id = args.bags.offsets[begin], end_id = args.bags.offsets[end];
  if (first_id < 0 || end_id < first_id || end_id > args.bags.num_lookups) return false;
  WriteCursors cursors{};
  if (!cursors.set(args, route)) return false;
  bool is_consistent = true;
  if (num_blocks == 1) {
    is_consistent = move_all<I>(args, route, cursors, first_id, end_id - first_id);
  } else {
    for (int64_t i = first_id; i < end_id; i += kChunk) {
      is_consistent =
          move_chunk<I>(args, route, cursors, i, end_id - i < kChunk ? end_id - i : kChunk) &&
          is_consistent;
    }
  }
  I* out = static_cast<I*>(args.out);
  for (int64_t k = 0; k < num_blocks; ++k) {
    is_consistent = is_consistent && cursors.cursor[k] == cursors.end[k];
    const int64_t first = cursors.start[k], n = cursors.end[k] - first;
    if (n == 0) continue;  // the output may be null, which memcpy must not get
    for (int64_t copy = 1; copy < route.blocks[k].num_copies && is_consistent; ++copy) {
      const int64_t copy_begin = args.starts[route.output_bag(k, copy)];
      __builtin_memcpy(out + copy_begin, out + first, n * sizeof(I));
      __builtin_memcpy(args.positions + copy_begin, args.positions + first, n * sizeof(int64_t));
      if (args.weights != nullptr) {
        __builtin_memcpy(args.out_weights + copy_begin, args.out_weights + first,
                         n * sizeof(float));
      }
    }
  }
  return is_consistent;
}

}  // namespace

extern const RouteTable kRouteTable;
const RouteTable kRouteTable = {{count_ids<int32_t>, count_ids<int64_t>},
                                {move_ids<int32_t>, move_ids<int64_t>}};

}  // namespace emb::EMB_ISA
