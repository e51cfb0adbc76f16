// The initial values of the rows of new keys. A value depends only on the seed, the table's rule
// and stream, the key, the element and the dtype of the row buffer. So a row has the same bits on
// any device, on any rank and for any order of batches. The arithmetic is in double with explicit
// fused operations, so that no compiler can round differently.
#pragma once

#include <cmath>
#include <cstring>

#include "core/dtype.h"
#include "core/half.h"
#include "core/random.h"

namespace emb {

// The distribution of initial values. kKeyModulo is the key, as an unsigned number, modulo
// kKeyModulus, in every element; float16 rounds it, to infinity from 65,520 on.
enum class InitialKind : int { kUniform, kNormal, kConstant, kKeyModulo };
inline constexpr uint64_t kKeyModulus = 100000;  // as in DynamicEmb's DEBUG initialiser

// How the rows of a table in a row buffer are initialised: a row of the tensor `rules`, float64 [T,
// P, 7]. emblib.columns.InitialRuleColumn has the same columns.
struct InitialRule {
  double kind;   // an InitialKind
  double base;   // kUniform: lower bound; kNormal: mean; kConstant: the value
  double scale;  // kUniform: upper minus lower bound; kNormal: standard deviation
  // kNormal: values are truncated to [low, high], which are infinite if they are not. The normal
  // distribution before truncation has probability `first` below `low`, and `span` between both.
  double first, span;
  double low, high;
};

inline constexpr int kInitialRuleColumns = 7;
static_assert(sizeof(InitialRule) == kInitialRuleColumns * sizeof(double));

// Where the rows of a table are in a row buffer: a row of the tensor `layout`, int64 [T, P, 5].
struct InitialLayout {
  int64_t offset;  // elements before row 0
  int64_t stride;  // elements from one row to the next, at least `dim`
  int64_t rows;    // number of rows of the table; slots outside [0, rows) are ignored
  int64_t dim;     // elements to initialise per row
  int64_t stream;  // distinguishes tables that have keys in common; only the low 32 bits are used
};

inline constexpr int kInitialLayoutColumns = 5;
static_assert(sizeof(InitialLayout) == kInitialLayoutColumns * sizeof(int64_t));

// Return the Philox counter of the random words of elements [4 * block, 4 * block + 4) of the row
// of a key.
EMB_HD Counter4 row_counter(int64_t stream, int64_t key, uint32_t block) {
  const auto bits = static_cast<uint64_t>(key);
  return {{static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32),
           static_cast<uint32_t>(stream), block}};
}
inline constexpr int kRowBlockWord = 3;  // the word of a row_counter that has the block

// Return the natural logarithm of a normal (not subnormal) number in (0, 1), with a relative error
// of about 1e-15.
EMB_HD double log_of(double x) {
  uint64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  auto exponent = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
  bits = (bits & 0xfffffffffffffu) | uint64_t{1023} << 52;
  double m;
  memcpy(&m, &bits, sizeof(m));
  // The series below converges fast around 1, so m goes from sqrt(1/2) to sqrt(2).
  const bool is_large = m > 1.4142135623730951;
  m = is_large ? m * 0.5 : m;
  exponent = is_large ? exponent + 1.0 : exponent;
  // log(m) = 2 artanh(s), an odd power series.
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
  return fma(exponent, 0.6931471805599453, s * 2.0 * sum);  // log(2)
}

// Return the value below which the standard normal distribution has probability p in [0, 1], with a
// relative error of about 1e-7. A tail below 1e-300 is taken as 1e-300. This is PPND7 of Wichura,
// "Algorithm AS 241: the percentage points of the normal distribution", 1988.
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
  return r >= 0.0 ? central : (q < 0.0 ? -outer : outer);
}

// Return the value of an element for kUniform; `word` is 32 random bits.
EMB_HD float uniform_value(const InitialRule& rule, uint32_t word) {
  const double u = static_cast<double>(word >> 8) * 0x1p-24;
  return static_cast<float>(fma(rule.scale, u, rule.base));
}

// Return the value of an element for kNormal; `word` is 32 random bits.
EMB_HD float normal_value(const InitialRule& rule, uint32_t word) {
  const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
  const double x = fma(rule.scale, normal_quantile(fma(rule.span, u, rule.first)), rule.base);
  return static_cast<float>(x < rule.low ? rule.low : (x > rule.high ? rule.high : x));
}

// Return the value of every element of the row of a key, for kConstant and kKeyModulo.
EMB_HD float value_of_row(const InitialRule& rule, int64_t key) {
  if (static_cast<InitialKind>(static_cast<int>(rule.kind)) == InitialKind::kConstant) {
    return static_cast<float>(rule.base);
  }
  return static_cast<float>(static_cast<uint64_t>(key) % kKeyModulus);
}

// The row that a call of the CPU kernel writes.
struct InitialRow {
  void* out;            // [dim] of the kernel's dtype, in host memory of the caller
  int64_t dim;          // elements
  int64_t key, stream;  // the key of the row; see InitialLayout
  uint64_t seed;
};

// The CPU kernels for one instruction set. Several threads may call them at once.
struct InitialKernels {
  // By Dtype of the row buffer: write the initial values of one row.
  void (*write_row[kNumDtypes])(const InitialRow& row, const InitialRule& rule);
};

}  // namespace emb
