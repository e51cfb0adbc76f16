// Products and transpositions of small matrices in registers, on one CPU thread. In a product, the
// lanes of a vector run along the columns of b and c, and elements of a are broadcast, so that a
// may have any strides. Columns are covered by vectors of decreasing width, so that no size needs
// padding. Only `*_kernels.cpp` may include this file.
#pragma once

#include <utility>

#include "core/vec.h"

namespace emb::EMB_ISA {

// Whether a product replaces the values of c, or adds to them.
enum class Store { kSet, kAdd };

// The product c[m, n] = (kSet) or += (kAdd) the sum over k of a[m, k] * b[k, n]. Sizes may be 0.
// Strides are in elements; columns of b and c are contiguous. c must not overlap a or b.
struct Product {
  int64_t m, n, k;
  const float* a;
  int64_t a_row_stride, a_column_stride;
  const float* b;
  int64_t b_row_stride;
  float* c;
  int64_t c_row_stride;
  Store store;
};

// A vector of kWidth floats.
template <int kWidth>
struct VecOf {
  typedef float type __attribute__((vector_size(kWidth * sizeof(float))));
};
template <>
struct VecOf<1> {
  typedef float type;
};

// Compute a tile of kRows x (kVectors * kWidth) of c at (m, n) in registers. The sum runs over k in
// order, and starts from c for kAdd, so that a division of k into several calls does not change the
// bits.
template <int kWidth, int kRows, int kVectors>
EMB_HD void multiply_tile(const Product& p, int64_t m, int64_t n) {
  using V = typename VecOf<kWidth>::type;
  V sums[kRows][kVectors];
  // Copies: as far as the compiler knows, stores to c may change p.
  const int64_t depth = p.k, a_row_stride = p.a_row_stride, a_column_stride = p.a_column_stride,
                b_row_stride = p.b_row_stride, c_row_stride = p.c_row_stride;
  const float* a = p.a + m * a_row_stride;
  const float* b = p.b + n;
  float* c = p.c + m * c_row_stride + n;
  if (p.store == Store::kAdd) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        __builtin_memcpy(&sums[i][v], c + i * c_row_stride + v * kWidth, sizeof(V));
      }
    }
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[i][v] = V{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    V row[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) __builtin_memcpy(&row[v], b + v * kWidth, sizeof(V));
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const float x = a[i * a_row_stride];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[i][v] += x * row[v];
    }
    a += a_column_stride;
    b += b_row_stride;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      __builtin_memcpy(c + i * c_row_stride + v * kWidth, &sums[i][v], sizeof(V));
    }
  }
}

// Compute the columns [n, n + kVectors * kWidth) of all rows of c.
template <int kWidth, int kVectors>
void multiply_columns(const Product& p, int64_t n) {
  int64_t m = 0;
  if constexpr (kVectors <= 2 && kLanes == 16) {
    for (; m + 8 <= p.m; m += 8) multiply_tile<kWidth, 8, kVectors>(p, m, n);
  }
  if constexpr (kVectors == 2 && kLanes == 8) {  // 12 sums in 16 registers; 8 hide less latency
    for (; m + 6 <= p.m; m += 6) multiply_tile<kWidth, 6, kVectors>(p, m, n);
  }
  for (; m + 4 <= p.m; m += 4) multiply_tile<kWidth, 4, kVectors>(p, m, n);
  if (m + 2 <= p.m) {
    multiply_tile<kWidth, 2, kVectors>(p, m, n);
    m += 2;
  }
  if (m < p.m) multiply_tile<kWidth, 1, kVectors>(p, m, n);
}

// Compute the product: write c.
inline void multiply(const Product& p) {
  int64_t n = 0;
  if constexpr (kLanes == 16) {
    for (; n + 4 * kLanes <= p.n; n += 4 * kLanes) multiply_columns<kLanes, 4>(p, n);
  }
  for (; n + 2 * kLanes <= p.n; n += 2 * kLanes) multiply_columns<kLanes, 2>(p, n);
  for (; n + kLanes <= p.n; n += kLanes) multiply_columns<kLanes, 1>(p, n);
  if constexpr (kLanes > 8) {
    for (; n + 8 <= p.n; n += 8) multiply_columns<8, 1>(p, n);
  }
  if constexpr (kLanes > 4) {
    for (; n + 4 <= p.n; n += 4) multiply_columns<4, 1>(p, n);
  }
  for (; n < p.n; ++n) multiply_columns<1, 1>(p, n);
}

// Exchange blocks of kSpan lanes between two registers, one round of a transposition. Return the
// new first register (kHigh: the second).
template <int kSpan, bool kHigh, typename V, int... kLanes>
EMB_HD V exchange_blocks(V a, V b, std::integer_sequence<int, kLanes...>) {
  constexpr int kWidth = sizeof...(kLanes), kFrom = kHigh ? kSpan : 0;
  return shuffle<((kLanes & kSpan) != 0 ? kWidth - kSpan : 0) + kFrom + kLanes...>(a, b);
}

// Do the rounds of a transposition for blocks of kSpan lanes, kSpan / 2 lanes, and so on to one.
template <int kWidth, int kSpan>
EMB_HD void exchange(typename VecOf<kWidth>::type (&rows)[kWidth]) {
  if constexpr (kSpan > 0) {
    constexpr std::make_integer_sequence<int, kWidth> lanes;
#pragma GCC unroll 16
    for (int i = 0; i < kWidth; ++i) {
      if ((i & kSpan) != 0) continue;
      const auto a = rows[i], b = rows[i + kSpan];
      rows[i] = exchange_blocks<kSpan, false>(a, b, lanes);
      rows[i + kSpan] = exchange_blocks<kSpan, true>(a, b, lanes);
    }
    exchange<kWidth, kSpan / 2>(rows);
  }
}

// Transpose a kWidth x kWidth block in log2(kWidth) rounds, each of which exchanges lanes between
// pairs of registers.
template <int kWidth>
EMB_HD void transpose_block(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  using V = typename VecOf<kWidth>::type;
  V rows[kWidth];
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) __builtin_memcpy(&rows[i], from + i * from_stride, sizeof(V));
  exchange<kWidth, kWidth / 2>(rows);
#pragma GCC unroll 16
  for (int i = 0; i < kWidth; ++i) __builtin_memcpy(to + i * to_stride, &rows[i], sizeof(V));
}

// A row-major matrix; `stride` is the number of elements from a row to the next.
struct Matrix {
  const float* data;
  int64_t rows, columns, stride;
};

// Transpose a matrix in blocks of kWidth x kWidth, and the elements outside whole blocks one by
// one.
template <int kWidth>
EMB_HD void transpose_blocks(const Matrix& from, float* to, int64_t to_stride) {
  const int64_t rows = from.rows / kWidth * kWidth, columns = from.columns / kWidth * kWidth;
  for (int64_t i = 0; i < rows; i += kWidth) {
    for (int64_t j = 0; j < columns; j += kWidth) {
      transpose_block<kWidth>(from.data + i * from.stride + j, from.stride, to + j * to_stride + i,
                              to_stride);
    }
  }
  for (int64_t i = 0; i < from.rows; ++i) {
    for (int64_t j = i < rows ? columns : 0; j < from.columns; ++j) {
      to[j * to_stride + i] = from.data[i * from.stride + j];
    }
  }
}

// Transpose a matrix: to[j, i] = from[i, j]. `to_stride` is the number of elements from a row of
// `to` to the next. `to` must not overlap `from`.
inline void transpose(const Matrix& from, float* to, int64_t to_stride) {
  const int64_t smaller = from.rows < from.columns ? from.rows : from.columns;
  if constexpr (kLanes >= 16) {
    if (smaller >= 16) return transpose_blocks<16>(from, to, to_stride);
  }
  if constexpr (kLanes >= 8) {
    if (smaller >= 8) return transpose_blocks<8>(from, to, to_stride);
  }
  transpose_blocks<4>(from, to, to_stride);
}

}  // namespace emb::EMB_ISA
