// Entries of grouping on the CPU that other entries call.
#pragma once

#include "core/check.h"

namespace emb {

Tensor group_inverse(const Tensor& segments, const Tensor& permutation, const Tensor& count);

}  // namespace emb
