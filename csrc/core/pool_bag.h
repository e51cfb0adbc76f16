// Pooling on one CPU thread: sums of the rows of bags, for rows of any format (floats, packed
// numbers, rows of other tensors). Sums over random rows are bound by cache misses. So every row is
// prefetched Rows::prefetch_distance() rows before its use, also across the ends of bags. Columns
// are processed in blocks of up to 8 registers: the sums of a block stay in registers while the
// block's columns of all rows are read. Only `*_kernels.cpp` may include this header.
#pragma once

#include "core/layout.h"
#include "core/vec.h"

namespace emb::EMB_ISA {

// `Rows` is a sequence of rows, one per lookup, with the members
//
//   dim()                   number of columns of a row
//   skip_columns(n)         make every row begin n columns later; called on a copy
//   at(i)                   the address of row i that `values` takes, null if the row is skipped
//   values(address, i)      the columns to be added for that row, as an object with
//                             vector(v)   Vec of columns [v * kLanes, (v + 1) * kLanes)
//                             first(n)    Vec whose first n lanes are the first n < kLanes columns;
//                                         the other lanes are ignored
//   prefetch(i, n)          prefetch the first n columns of row i; i may be beyond the last row
//   prefetch_distance()     number of rows between a prefetch and the use of the row
//
// `finish(sum)` maps a Vec of sums to the Vec that is stored, for example by the factor of a mean.
// Outputs of type O (float, half16 or bfloat16) are rounded to nearest.

// Write columns [column, column + kVectors * kLanes) of the output row `out`: `finish` of the sum
// of rows [begin, end). The block prefetches its own columns of later rows, so that the number of
// cache lines per row is a compile-time constant.
template <int kVectors, class Rows, class Finish, class O>
EMB_HD void pool_block(Rows rows, int64_t column, int64_t begin, int64_t end, const Finish& finish,
                       O* out) {
  rows.skip_columns(column);
  Vec sums[kVectors] = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + rows.prefetch_distance(), kVectors * kLanes);
    const auto* address = rows.at(i);
    if (address == nullptr) continue;
    const auto values = rows.values(address, i);
    for (int v = 0; v < kVectors; ++v) sums[v] += values.vector(v);
  }
  for (int v = 0; v < kVectors; ++v) store(out + column + v * kLanes, finish(sums[v]));
}

// Write the columns from `column` to the end of the row, fewer than kLanes.
template <class Rows, class Finish, class O>
EMB_HD void pool_tail(Rows rows, int64_t column, int64_t begin, int64_t end, const Finish& finish,
                      O* out) {
  const int num_columns = static_cast<int>(rows.dim() - column);
  rows.skip_columns(column);
  Vec sum = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + rows.prefetch_distance(), num_columns);
    const auto* address = rows.at(i);
    if (address == nullptr) continue;
    sum += rows.values(address, i).first(num_columns);
  }
  store_first(out + column, finish(sum), num_columns);
}

// Write the output row of a bag, [dim()] at `out`: `finish` of the sum of rows [begin, end), added
// in this order. The sum of no rows is 0.
template <class Rows, class Finish, class O>
EMB_HD void pool_bag(const Rows& rows, int64_t begin, int64_t end, const Finish& finish, O* out) {
  const int64_t dim = rows.dim();
  int64_t column = 0;
  for (; dim - column >= 8 * kLanes; column += 8 * kLanes) {
    pool_block<8>(rows, column, begin, end, finish, out);
  }
  if (dim - column >= 4 * kLanes) {
    pool_block<4>(rows, column, begin, end, finish, out);
    column += 4 * kLanes;
  }
  if (dim - column >= 2 * kLanes) {
    pool_block<2>(rows, column, begin, end, finish, out);
    column += 2 * kLanes;
  }
  if (dim - column >= kLanes) {
    pool_block<1>(rows, column, begin, end, finish, out);
    column += kLanes;
  }
  if (column < dim) pool_tail(rows, column, begin, end, finish, out);
}

// Write the output rows of bags [first_bag, last_bag), at least one, of one feature; without
// pooling, the output rows of their lookups. Row i of `rows` is the row of lookup i. A mean divides
// by the lookups of the bag, skipped ones included. `out` is the base element of the output, see
// BagItems.
template <class Rows, class O>
EMB_HD void pool_bags(const BagItems& bags, const Rows& rows, int64_t first_bag, int64_t last_bag,
                      O* out) {
  const int64_t first = bags.first_lookup(first_bag);
  for (int64_t i = first; i < first + rows.prefetch_distance(); ++i) rows.prefetch(i, rows.dim());
  const int64_t num_items = bags.num_items(first_bag, last_bag);
  for (int64_t k = 0; k < num_items; ++k) {
    const BagItem bag = bags.item(first_bag, k);
    const Vec factor = broadcast(mean_factor(bags.pooling, bag.end - bag.begin));
    const auto scaled = [&](Vec sum) { return sum * factor; };
    pool_bag(rows, bag.begin, bag.end, scaled, out + bag.output_offset);
  }
}

}  // namespace emb::EMB_ISA
