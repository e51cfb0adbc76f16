// Products of small matrices on tensor cores: sum += a b, with a [16, 8], b [8, 8] and a sum
// [16, 8] that are distributed over the lanes of a warp as `mma.sync.m16n8k8` has them. All lanes
// of the warp call `multiply_add` together.
//
// With row = lane / 4 and column = lane % 4 a lane has of
//   a: (row, column), (row + 8, column), (row, column + 4), (row + 8, column + 4)
//   b: (column, row), (column + 4, row)
//   sum: (row, 2 column), (row, 2 column + 1), (row + 8, 2 column), (row + 8, 2 column + 1)
// The order of k is free as long as a and b agree, so kernels choose it such that loads are wide.
//
// A type chooses how exact the products are:
//   * Tf32x3: each operand is the sum of two TF32 values: big, x rounded to 11 bits, and small, the
//     rest truncated to 11 bits; a b is big big + big small + small big. Against the exact product
//     this misses at most 2^-21 of it: the last bit of either operand (2^-23), and small small
//     (2^-22). The tensor core adds the products of one call only; sums of many calls are added in
//     float32, rounded to nearest, since the tensor core truncates its sums, which in a long sum
//     would add up. So a product alone has the error of a few roundings to float32, and a sum of
//     eight or more is as exact as one in float32 (tests/simt/test_mma.py).
//   * Tf32: operands are rounded to 11 bits, ties away from zero: 2^-11 each.
//   * Bf16: operands are rounded to 8 bits, ties to even: 2^-8 each.
// An infinite operand, or one that rounds to infinity (|x| >= 2^128 - 2^116 in TF32), gives NaN or
// infinity; NaN gives NaN.
//
// On the host, operands have the same bits as on a GPU. The products of a call are exact and their
// sum is truncated to float32. A GPU may add them in another order and with fewer bits, which PTX
// leaves open, so that last bits differ between GPUs and from the host. On one GPU the same
// operands give the same bits.
#pragma once

#include "core/codes.h"
#include "core/half.h"
#include "core/simt.cuh"

namespace emb::cuda {

// Round to TF32, to nearest with ties away from zero; the lower 13 bits of the result are zero.
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

// Round two floats to BF16, to nearest even; the first in the lower half.
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

// sum += a b. Of TF32 operands the instruction reads the upper 19 bits.
EMB_DEVICE void mma_tf32(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

EMB_DEVICE void mma_bf16(float (&sum)[4], const uint32_t (&a)[2], const uint32_t (&b)[1]) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

#else

// What a lane brings to a product.
struct MmaLane {
  const uint32_t *a, *b;
  float* sum;
  bool done = false;
};

// Return part `part` of a word, which has one value of TF32, or two of BF16.
template <int kParts>
__attribute__((no_sanitize("thread"))) inline double part_of(uint32_t word, int part) {
  const uint32_t bits = kParts == 1 ? word & ~0x1fffu : part == 0 ? word << 16 : word >> 16 << 16;
  float x;
  __builtin_memcpy(&x, &bits, sizeof(x));
  return static_cast<double>(x);
}

// Write the sums of all lanes. Their operands are on stacks, which the race detector does not
// watch.
template <int kParts>
__attribute__((no_sanitize("thread"))) void multiply_lanes(MmaLane* const (&lanes)[32]) {
  double a[16][8], b[8][8];
  for (int row = 0; row < 8; ++row) {
    for (int k = 0; k < 8; ++k) {
      const MmaLane& lane = *lanes[row * 4 + k % 4];
      const int word = kParts == 1 ? k / 4 : 0, part = kParts == 1 ? 0 : k / 4;
      a[row][k] = part_of<kParts>(lane.a[word * 2], part);
      a[row + 8][k] = part_of<kParts>(lane.a[word * 2 + 1], part);
      b[k][row] = part_of<kParts>(lane.b[word], part);
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
  for (MmaLane* lane : lanes) lane->done = true;
}

template <int kParts>
void emulate_mma(const char* name, MmaLane* own, simt::Where where) {
  const simt::WarpValues& values =
      simt::Machine::get().meet_warp(name, simt::kFullMask, simt::to_word(own), where);
  if (own->done) return;  // by the first lane that goes on
  MmaLane* lanes[32];
  for (int i = 0; i < 32; ++i) lanes[i] = simt::from_word<MmaLane*>(values.word[i]);
  multiply_lanes<kParts>(lanes);
}

inline void mma_tf32(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                     simt::Where where = simt::Where::current()) {
  MmaLane own{a, b, sum};
  emulate_mma<1>("mma_tf32", &own, where);
}

inline void mma_bf16(float (&sum)[4], const uint32_t (&a)[2], const uint32_t (&b)[1],
                     simt::Where where = simt::Where::current()) {
  MmaLane own{a, b, sum};
  emulate_mma<2>("mma_bf16", &own, where);
}

#endif

struct Tf32x3 {
  template <int kWords>
  struct Operand {
    uint32_t big[kWords], small[kWords];

    EMB_DEVICE explicit Operand(const float (&x)[kWords]) {
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        // As tf32_bits, in fewer instructions; it may lose a NaN, which `small` then has.
        big[i] = (float_bits(x[i]) + 0x1000u) & ~0x1fffu;
        small[i] = float_bits(x[i] - bits_float(big[i]));
      }
    }
  };
  using A = Operand<4>;
  using B = Operand<2>;

  EMB_DEVICE static void multiply_add(float (&sum)[4], const A& a, const B& b) {
    float part[4] = {};
    mma_tf32(part, a.small, b.big);
    mma_tf32(part, a.big, b.small);
    mma_tf32(part, a.big, b.big);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += part[i];
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

// Call `use` with the products of a precision, to launch the kernel that has them.
template <class Use>
void with_products(MatmulPrecision precision, const Use& use) {
  switch (precision) {
    case MatmulPrecision::kFloat32:
      return use(Tf32x3{});
    case MatmulPrecision::kTf32:
      return use(Tf32{});
    case MatmulPrecision::kBf16:
      return use(Bf16{});
  }
}

}  // namespace emb::cuda
