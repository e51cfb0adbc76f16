// Rows stored in 16 bits: to floats and back, rounded to nearest or stochastically. Only
// `*_kernels.cpp` may include it.
#pragma once

#include "core/dtype.h"
#include "core/rounding.h"
#include "core/vec.h"

namespace emb::EMB_ISA {

template <class T>
EMB_HD void widen_row(const T* row, int64_t dim, float* out) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(out + d, load(row + d));
  for (; d < dim; ++d) out[d] = to_float(row[d]);
}

template <class T>
EMB_HD void narrow_row(const float* values, int64_t dim, T* row) {
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) store(row + d, load(values + d));
  for (; d < dim; ++d) row[d] = from_float<T>(values[d]);
}

// 16 counters go through Philox side by side, one a lane, for 64 columns.
template <class T>
inline void round_row(const float* __restrict values, int64_t dim, T* __restrict row,
                      const Rounding& rounding, int64_t id, uint32_t tensor) {
  constexpr int kCounters = 16, kColumns = 4 * kCounters;
  const Rounding draw = rounding;  // of this function alone, so that stores leave it in registers
  for (int64_t begin = 0; begin < dim; begin += kColumns) {
    uint32_t words[4][kCounters], word[kColumns];
    const auto block = static_cast<uint32_t>(begin / 4);
    for (int i = 0; i < kCounters; ++i) {
      const Random4 random = draw.words(id, block + static_cast<uint32_t>(i), tensor);
      for (int w = 0; w < 4; ++w) words[w][i] = random.word[w];
    }
    for (int i = 0; i < kCounters; ++i) {
      for (int w = 0; w < 4; ++w) word[4 * i + w] = words[w][i];
    }
    const auto round = [&](int64_t count) {
      for (int64_t k = 0; k < count; ++k) {
        row[begin + k] = round_randomly<T>(values[begin + k], word[k]);
      }
    };
    // A length that is known vectorises without a remainder.
    if (dim - begin >= kColumns) {
      round(kColumns);
    } else {
      round(dim - begin);
    }
  }
}

[[gnu::noinline]] inline void widen_row(const void* data, Dtype type, int64_t element, int64_t dim,
                                        float* out) {
  if (type == Dtype::kHalf) {
    widen_row(static_cast<const half16*>(data) + element, dim, out);
  } else {
    widen_row(static_cast<const bfloat16*>(data) + element, dim, out);
  }
}

// `id` is the linear row and `tensor` which of its tensors it is (RoundedTensor).
[[gnu::noinline]] inline void narrow_row(const float* values, int64_t dim, void* data, Dtype type,
                                         int64_t element, const Rounding& rounding, int64_t id,
                                         uint32_t tensor) {
  const auto store_as = [&](auto* row) {
    if (rounding.stochastic) {
      round_row(values, dim, row + element, rounding, id, tensor);
    } else {
      narrow_row(values, dim, row + element);
    }
  };
  if (type == Dtype::kHalf) {
    store_as(static_cast<half16*>(data));
  } else {
    store_as(static_cast<bfloat16*>(data));
  }
}

}  // namespace emb::EMB_ISA
