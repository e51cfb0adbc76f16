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
// Throws if dtypes or shapes are wrong, if segments[0 ... count] do not begin with 0 or decrease,
// or if entries of `permutation` are out of range. It is not checked that `permutation` has every
// position once: the result is unspecified for positions that are missing.
Tensor group_inverse(const Tensor& segments, const Tensor& permutation, const Tensor& count);

}  // namespace emb
