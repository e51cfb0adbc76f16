// The initial values of rows of new keys. They depend on seed, table, key and element only, so that
// a row is the same to the last bit on any device, on any rank and for any order of batches. The
// arithmetic is in double, with explicit fused operations, which leaves compilers no freedom.
#pragma once

#include <cmath>
#include <cstring>

#include "core/dtype.h"
#include "core/half.h"
#include "core/random.h"

namespace emb {

enum class InitialKind : int { kUniform, kNormal, kConstant, kKeyModulo };

// A row of the tensor `rules`, float64.
struct InitialRule {
  double kind;
  double base,
      scale;  // lower bound and span of a uniform number, or mean and deviation of a normal one
  double first, span;  // range of probabilities that the normal distribution is truncated to
  double low, high;    // values at the ends of that range
};

inline constexpr int kInitialRuleColumns = 7;
static_assert(sizeof(InitialRule) == kInitialRuleColumns * sizeof(double));

// The location of the rows of a table in an array: a row of the tensor `layout`, int64. `stream`
// distinguishes tables that have keys in common.
struct InitialLayout {
  int64_t offset;  // elements before row 0
  int64_t stride;
  int64_t rows;
  int64_t dim;
  int64_t stream;
};

inline constexpr int kInitialLayoutColumns = 5;
static_assert(sizeof(InitialLayout) == kInitialLayoutColumns * sizeof(int64_t));

// Return the random words of elements 4 * block to 4 * block + 3 of the row of a key.
EMB_HD Random4 row_words(uint64_t seed, int64_t stream, int64_t key, uint32_t block) {
  const auto bits = static_cast<uint64_t>(key);
  return philox(seed, static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32),
                static_cast<uint32_t>(stream), block);
}

// Return the natural logarithm of a normal number in (0, 1), to about 1e-13.
EMB_HD double log_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  auto exponent = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  bits = (bits & 0xfffffffffffffu) | uint64_t{1023} << 52;
  double m;
  memcpy(&m, &bits, sizeof(m));
  const bool large = m > 1.4142135623730951;
  m = large ? m * 0.5 : m;
  exponent = large ? exponent + 1.0 : exponent;
  const double s = (m - 1.0) / (m + 1.0), square = s * s;
  double sum = 1.0 / 17.0;
  sum = fma(sum, square, 1.0 / 15.0);
  sum = fma(sum, square, 1.0 / 13.0);
  sum = fma(sum, square, 1.0 / 11.0);
  sum = fma(sum, square, 1.0 / 9.0);
  sum = fma(sum, square, 1.0 / 7.0);
  sum = fma(sum, square, 1.0 / 5.0);
  sum = fma(sum, square, 1.0 / 3.0);
  sum = fma(sum, square, 1.0);
  return fma(exponent, 0.6931471805599453, s * 2.0 * sum);
}

// Return the value below which the normal distribution has probability p, to a relative 1e-7: PPND7
// of Wichura, "Algorithm AS 241: the percentage points of the normal distribution", 1988.
EMB_HD double normal_quantile(double p) {
  const double q = p - 0.5;
  const double r = fma(-q, q, 0.180625);
  const double top = fma(fma(fma(59.109374720, r, 159.29113202), r, 50.434271938), r, 3.3871327179);
  const double bottom = fma(fma(fma(67.187563600, r, 78.757757664), r, 17.895169469), r, 1.0);
  const double central = q * top / bottom;
  const double tail = q < 0.0 ? p : 1.0 - p;
  const double t = sqrt(-log_of(tail < 1e-300 ? 1e-300 : tail));
  const double near = t - 1.6, far = t - 5.0;
  const double near_value =
      fma(fma(fma(0.17023821103, near, 1.3067284816), near, 2.7568153900), near, 1.4234372777) /
      fma(fma(0.12021132975, near, 0.73700164250), near, 1.0);
  const double far_value =
      fma(fma(fma(0.017337203997, far, 0.42868294337), far, 3.0812263860), far, 6.6579051150) /
      fma(fma(0.012258202635, far, 0.24197894225), far, 1.0);
  const double outer = t <= 5.0 ? near_value : far_value;
  return r >= 0.0 ? central : q < 0.0 ? -outer : outer;
}

EMB_HD float uniform_value(const InitialRule& rule, uint32_t word) {
  const double u = static_cast<double>(word >> 8) * 0x1p-24;
  return static_cast<float>(fma(rule.scale, u, rule.base));
}

EMB_HD float normal_value(const InitialRule& rule, uint32_t word) {
  const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
  const double x = fma(rule.scale, normal_quantile(fma(rule.span, u, rule.first)), rule.base);
  return static_cast<float>(x < rule.low ? rule.low : x > rule.high ? rule.high : x);
}

// Return the value of every element of a row for rules without random numbers.
EMB_HD float plain_value(const InitialRule& rule, int64_t key) {
  if (static_cast<InitialKind>(static_cast<int>(rule.kind)) == InitialKind::kConstant) {
    return static_cast<float>(rule.base);
  }
  return static_cast<float>(static_cast<uint64_t>(key) % 100000);
}

// The CPU kernel: writes the initial values of one row.

struct InitialRow {
  void* out;
  int64_t dim;
  int64_t key, stream;
  uint64_t seed;
};

using InitialFn = void (*)(const InitialRow& row, const InitialRule& rule);

struct InitialTable {
  InitialFn at[kDtypes];  // [dtype]
};

}  // namespace emb
