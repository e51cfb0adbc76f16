// The op `group_inverse` on the CPU, for other ops that call it.
#pragma once

#include "core/check.h"

namespace emb {

// Return the group of every position, int32 [n], -1 for a position whose key belongs to no group:
// the inverse of `group`. The arguments are the results of one call of `group` or `tbe_group` for n
// keys, contiguous int32 CPU tensors:
//   segments     [n + 1], group g has the sorted positions [segments[g], segments[g + 1])
//   permutation  [n], permutation[j] is the position whose key is number j in sorted order
//   count        [1], the number of groups
// Throws if a tensor is not such a tensor, if `count` is not in [0, n], if segments[0 ... count]
// decrease or do not begin with 0 and end with at most n, or if entries of `permutation` are not in
// [0, n). It is not checked that `permutation` has every position once: otherwise the result is
// unspecified for the positions that are missing or repeated. Uses several threads.
Tensor group_inverse(const Tensor& segments, const Tensor& permutation, const Tensor& count);

}  // namespace emb
