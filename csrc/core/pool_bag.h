// Sums of rows on one CPU thread, for whatever rows are made of: floats, packed numbers, pieces of
// other tensors. Sums over random rows are bound by cache misses, so rows are prefetched a fixed
// number of rows ahead, across bags. The sums of a block of up to 8 registers of columns stay in
// registers while the block of all rows is read. Only for `*_kernels.cpp`.
//
// `Rows` is a sequence of rows to be added up:
//
//   dim()                   columns of a row
//   skip_columns(count)     make rows begin `count` columns later; called on a copy
//   at(i)                   address of the first column of row i, null for a row to skip
//   values(address, i)      what is added for that row: vector(v), columns [v * kLanes, + kLanes),
//                           and first(n), the first n < kLanes columns
//   prefetch(i, count)      request the first `count` columns of row i, if there is such a row
//   distance()              rows between a prefetch and its use; only for `pool_bags`
#pragma once

#include "core/layout.h"
#include "core/vec.h"

namespace emb::EMB_ISA {

// Write columns [column, column + kVectors * kLanes) of `finish` of the sum of rows [begin, end).
// Every block prefetches its columns of later rows, so that the number of cache lines is a
// compile-time constant.
template <int kVectors, class Rows, class Finish, class O>
EMB_HD void pool_block(Rows rows, int64_t column, int64_t begin, int64_t end, const Finish& finish,
                       O* out) {
  rows.skip_columns(column);
  Vec sums[kVectors] = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + rows.distance(), kVectors * kLanes);
    const auto* address = rows.at(i);
    if (address == nullptr) continue;
    const auto values = rows.values(address, i);
    for (int v = 0; v < kVectors; ++v) sums[v] += values.vector(v);
  }
  for (int v = 0; v < kVectors; ++v) store(out + column + v * kLanes, finish(sums[v]));
}

// The same for the last columns, fewer than kLanes.
template <class Rows, class Finish, class O>
EMB_HD void pool_tail(Rows rows, int64_t column, int64_t begin, int64_t end, const Finish& finish,
                      O* out) {
  const int rest = static_cast<int>(rows.dim() - column);
  rows.skip_columns(column);
  Vec sum = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + rows.distance(), rest);
    const auto* address = rows.at(i);
    if (address == nullptr) continue;
    sum += rows.values(address, i).first(rest);
  }
  store_first(out + column, finish(sum), rest);
}

// Write `finish(sum)` of the sum of rows [begin, end), in their order, to `out`.
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

// Write the rows of bags [first_bag, last_bag) of one feature, whose lookups are `rows`.
template <class Rows, class O>
EMB_HD void pool_bags(const BagRows& bags, const Rows& rows, int64_t first_bag, int64_t last_bag,
                      O* out) {
  const int64_t first = bags.first_lookup(first_bag), last = bags.end_lookup(last_bag);
  for (int64_t i = first; i < first + rows.distance(); ++i) rows.prefetch(i, rows.dim());
  const int64_t count = bags.count(first_bag, last_bag);
  for (int64_t k = 0; k < count; ++k) {
    const BagSpan bag = bags.span(first_bag, k);
    const Vec factor = broadcast(mean_factor(bags.pooling, bag.end - bag.begin));
    const auto scaled = [&](Vec sum) { return sum * factor; };
    pool_bag(rows, bag.begin, bag.end, scaled, out + bag.element);
  }
}

}  // namespace emb::EMB_ISA
