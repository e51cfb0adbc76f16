// Products of small matrices on tensor cores: sum += a b, where a is [16, 8], b is [8, 8] and sum
// is [16, 8]. Callers pass float32; the products are in TF32 or BF16. The matrices are distributed
// over the registers of the 32 lanes of a warp in the layout of the instruction `mma.sync.m16n8k8`.
// All 32 lanes must call `multiply_add` together.
//
// A lane with row = lane / 4 and column = lane % 4 holds these elements, in this order:
//   a[4]:   (row, column), (row + 8, column), (row, column + 4), (row + 8, column + 4)
//   b[2]:   (column, row), (column + 4, row)
//   sum[4]: (row, 2 column), (row, 2 column + 1), (row + 8, 2 column), (row + 8, 2 column + 1)
// The eight columns of a and rows of b may be permuted together, which does not change the sum:
// kernels choose the permutation that makes their loads wide. Tf32x3, Tf32 and Bf16 below offer
// three accuracies.
#pragma once

#include "core/codes.h"
#include "core/half.h"
#include "core/simt.cuh"

namespace emb::cuda {

// Return the bits of x rounded to TF32, to nearest with ties away from zero. The lower 13 bits are
// zero.
EMB_HD uint32_t tf32_bits(float x) {
#if defined(__CUDA_ARCH__)
  uint32_t bits;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(bits) : "f"(x));
  return bits;
#else
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffffffu & ~0x1fffu;
  return (bits + 0x1000u) & ~0x1fffu;
#endif
}

// Return the bits of two floats rounded to BF16, to nearest even: `low` in the lower half of the
// word, `high` in the upper half.
EMB_HD uint32_t bf16_bits(float low, float high) {
#if defined(__CUDA_ARCH__)
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
  return bits;
#else
  return static_cast<uint32_t>(from_float<bfloat16>(high).bits) << 16 |
         from_float<bfloat16>(low).bits;
#endif
}

#if defined(__CUDACC__)

// The operands are packed in words. A word of mma_tf32 holds one TF32 value, of which the
// instruction reads the upper 19 bits. A word of mma_bf16 holds two BF16 values: columns k and
// k + 4 of a, or rows k and k + 4 of b.

// sum += a b with operands in TF32, one instruction.
EMB_DEVICE void mma_tf32(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// sum += a b with operands in BF16, one instruction.
EMB_DEVICE void mma_bf16(float (&sum)[4], const uint32_t (&a)[2], const uint32_t (&b)[1]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

#else

// The emulation rounds operands to the same bits as a GPU. It adds the products of a call to the
// sum in float64 and truncates the result to float32. A GPU may add them in another order and with
// fewer bits, which PTX leaves open, so the last bits of sums can differ between GPU models and
// from the host. On one GPU the same operands give the same bits.

// The operands of one lane in the emulation, on the stack of its fiber.
struct MmaLane {
  const uint32_t *a_words, *b_words;  // as the instruction takes them
  float* sum;                         // [4], read and written
  bool is_done = false;               // whether the product has been added to `sum`
};

// Return value `index` of a word. kValuesPerWord is the number of values per word: one in TF32, two
// in BF16.
template <int kValuesPerWord>
__attribute__((no_sanitize("thread"))) inline double unpack_value(uint32_t word, int index) {
  const uint32_t bits = kValuesPerWord == 1 ? word & ~0x1fffu
                        : index == 0        ? word << 16
                                            : word >> 16 << 16;
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return static_cast<double>(x);
}

// Compute the product of a whole warp and update the sums of all lanes. Operands and sums are on
// the stacks of fibers, which the race detector (tests/pretend) does not watch, so accesses are not
// recorded.
template <int kValuesPerWord>
__attribute__((no_sanitize("thread"))) void multiply_lanes(MmaLane* const (&lanes)[32]) {
  double a[16][8], b[8][8];
  for (int row = 0; row < 8; ++row) {
    for (int k = 0; k < 8; ++k) {
      const MmaLane& lane = *lanes[row * 4 + k % 4];
      const int word = kValuesPerWord == 1 ? k / 4 : 0, index = kValuesPerWord == 1 ? 0 : k / 4;
      a[row][k] = unpack_value<kValuesPerWord>(lane.a_words[word * 2], index);
      a[row + 8][k] = unpack_value<kValuesPerWord>(lane.a_words[word * 2 + 1], index);
      b[k][row] = unpack_value<kValuesPerWord>(lane.b_words[word], index);
    }
  }
  for (int m = 0; m < 16; ++m) {
    for (int n = 0; n < 8; ++n) {
      float* sum = lanes[m % 8 * 4 + n / 2]->sum + m / 8 * 2 + n % 2;
      double total = *sum;
      for (int k = 0; k < 8; ++k) total += a[m][k] * b[k][n];
      auto rounded = static_cast<float>(total);
      const bool is_finite = __builtin_isfinite(rounded);
      if (is_finite && __builtin_fabs(rounded) > __builtin_fabs(total)) {  // towards zero
        uint32_t bits;
        __builtin_memcpy(&bits, &rounded, sizeof(bits));
        --bits;
        __builtin_memcpy(&rounded, &bits, sizeof(bits));
      }
      *sum = rounded;
    }
  }
  for (MmaLane* lane : lanes) lane->is_done = true;
}

// Wait for all lanes of the warp, then add the product to the sums. The first lane that continues
// computes it for all lanes; the others return.
template <int kValuesPerWord>
void emulate_mma(const char* name, MmaLane* self, simt::Where where) {
  const simt::WarpValues& values =
      simt::Machine::get().meet_warp(name, simt::kFullMask, simt::to_word(self), where);
  if (self->is_done) return;
  MmaLane* lanes[32];
  for (int i = 0; i < 32; ++i) lanes[i] = simt::from_word<MmaLane*>(values.word[i]);
  multiply_lanes<kValuesPerWord>(lanes);
}

inline void mma_tf32(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                     simt::Where where = simt::Where::current()) {
  MmaLane self{a, b, sum};
  emulate_mma<1>("mma_tf32", &self, where);
}

inline void mma_bf16(float (&sum)[4], const uint32_t (&a)[2], const uint32_t (&b)[1],
                     simt::Where where = simt::Where::current()) {
  MmaLane self{a, b, sum};
  emulate_mma<2>("mma_bf16", &self, where);
}

#endif

// Three types, one per accuracy, each with operand types A and B and a function `multiply_add`. The
// constructors of A and B take this lane's elements of the matrix in the order at the top of this
// file.
//   * Tf32x3 is nearly as exact as float32. Each operand x is split into two TF32 values: `big` is
//     x rounded to 11 significant bits, and `small` is x - big truncated to 11 bits. The product
//     is big big + big small + small big. Unless an operand, its `small` or a product is subnormal,
//     the relative error is at most 2^-21: 2^-23 for the truncated last bit of each operand, and
//     2^-22 for the product small small, which is omitted. The tensor core truncates its sums, and
//     in a long sum these errors would add up. So it adds up the products of one call only, and the
//     sums of calls are added in float32, rounded to nearest. In tests/simt/test_mma.py a sum of
//     eight products or more has at most twice the error of one in float32, plus 2^-22.
//   * Tf32 rounds operands to 11 significant bits, ties away from zero: a relative error of up to
//     2^-11 per operand.
//   * Bf16 rounds operands to 8 significant bits, ties to even: up to 2^-8 per operand.
// The relative errors of operands are those of normal numbers. An operand that is infinite or
// rounds to infinity (|x| >= 2^128 - 2^116 in TF32) gives infinity or NaN; a NaN gives NaN.

struct Tf32x3 {
  template <int kWords>
  struct Operand {
    uint32_t big[kWords], small[kWords];

    EMB_DEVICE explicit Operand(const float (&x)[kWords]) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        // As tf32_bits, in fewer instructions. A NaN may become a number here, but then `small` is
        // NaN, and so is the product.
        big[i] = (float_bits(x[i]) + 0x1000u) & ~0x1fffu;
        small[i] = float_bits(x[i] - float_from_bits(big[i]));
      }
    }
  };
  using A = Operand<4>;
  using B = Operand<2>;

  EMB_DEVICE static void multiply_add(float (&sum)[4], const A& a, const B& b) {
    float product[4] = {};
    mma_tf32(product, a.small, b.big);
    mma_tf32(product, a.big, b.small);
    mma_tf32(product, a.big, b.big);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += product[i];
  }
};

struct Tf32 {
  template <int kWords>
  struct Operand {
    uint32_t word[kWords];

    EMB_DEVICE explicit Operand(const float (&x)[kWords]) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) word[i] = tf32_bits(x[i]);
    }
  };
  using A = Operand<4>;
  using B = Operand<2>;

  EMB_DEVICE static void multiply_add(float (&sum)[4], const A& a, const B& b) {
    mma_tf32(sum, a.word, b.word);
  }
};

struct Bf16 {
  struct A {
    uint32_t word[2];

    EMB_DEVICE explicit A(const float (&x)[4])
        : word{bf16_bits(x[0], x[2]), bf16_bits(x[1], x[3])} {}
  };
  struct B {
    uint32_t word[1];

    EMB_DEVICE explicit B(const float (&x)[2]) : word{bf16_bits(x[0], x[1])} {}
  };

  EMB_DEVICE static void multiply_add(float (&sum)[4], const A& a, const B& b) {
    mma_bf16(sum, a.word, b.word);
  }
};

// Call `body` with an object of the type above for `precision`, for example to launch a kernel
// template with that type.
template <class Body>
void with_product_type(MatmulPrecision precision, const Body& body) {
  switch (precision) {
    case MatmulPrecision::kFloat32:
      return body(Tf32x3{});
    case MatmulPrecision::kTf32:
      return body(Tf32{});
    case MatmulPrecision::kBf16:
      return body(Bf16{});
  }
}

}  // namespace emb::cuda
