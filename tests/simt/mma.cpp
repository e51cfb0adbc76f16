// Products on tensor cores and copies to shared memory, on the emulated machine.
#include "core/mma.cuh"

#include "driver.h"

namespace emb::cuda {
namespace {

// out[16, 8] = a[16, depth] b[depth, 8], by one warp.
template <class Products>
__global__ void product_kernel(const float* a, const float* b, int depth, float* out) {
  const int row = static_cast<int>(threadIdx.x) / 4, column = static_cast<int>(threadIdx.x) % 4;
  const auto at_a = [&](int m, int k) { return k < depth ? a[m * depth + k] : 0.0f; };
  const auto at_b = [&](int k, int n) { return k < depth ? b[k * 8 + n] : 0.0f; };
  float sum[4] = {};
  for (int k = column; k - column < depth; k += 8) {
    const float x[4] = {at_a(row, k), at_a(row + 8, k), at_a(row, k + 4), at_a(row + 8, k + 4)};
    const float y[2] = {at_b(k, row), at_b(k + 4, row)};
    Products::multiply_add(sum, typename Products::A(x), typename Products::B(y));
  }
  for (int i = 0; i < 4; ++i) out[(row + i / 2 * 8) * 8 + column * 2 + i % 2] = sum[i];
}

// out[i] = the bits of x[i] in TF32; in BF16 where `is_bf16`.
__global__ void round_kernel(const float* x, int64_t n, int is_bf16, int32_t* out) {
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
    out[i] = static_cast<int32_t>(is_bf16 != 0 ? bf16_bits(0.0f, x[i]) : tf32_bits(x[i]));
  }
}

// Add up blocks of 32 floats of x[n], n a multiple of 4, two blocks of which are under way at once.
// With kGroups = 1 too few are waited for at the end.
template <int kGroups>
__global__ void pipeline_kernel(const float* x, int n, float* out) {
  alignas(16) __shared__ float stage[2][32];
  const int lane = static_cast<int>(threadIdx.x), blocks = (n + 31) / 32;
  const auto start = [&](int block) {
    const int first = block * 32 + lane * 4;
    if (lane < 8) {
      simt::copy_async<16>(&stage[block % 2][lane * 4], x + (first < n ? first : 0), first < n);
    }
    simt::commit_copies();
  };
  float sum = 0.0f;
  start(0);
  for (int block = 0; block < blocks; ++block) {
    if (block + 1 < blocks) {
      start(block + 1);
      simt::wait_for_copies<1>();
    } else {
      simt::wait_for_copies<kGroups>();
    }
    __syncthreads();
    sum += stage[block % 2][lane];
    __syncthreads();
  }
  out[lane] = sum;
}

__global__ void misaligned_copy_kernel(const float* x) {
  alignas(16) __shared__ float stage[8];
  simt::copy_async<16>(stage + 1, x, true);
}

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

// precision, a, b, depth, out
extern "C" const char* simt_product(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto precision = static_cast<emb::MatmulPrecision>(words.number());
    const auto* a = words.pointer<const float>();
    const auto* b = words.pointer<const float>();
    const int depth = static_cast<int>(words.number());
    auto* out = words.pointer<float>();
    with_product_type(precision, [&](auto products) {
      launcher(product_kernel<decltype(products)>, 1, 32, a, b, depth, out);
    });
  });
}

// x, n, is_bf16, out
extern "C" const char* simt_round(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto* x = words.pointer<const float>();
    const int64_t n = words.number();
    const int is_bf16 = static_cast<int>(words.number());
    launcher(round_kernel, 1, 32, x, n, is_bf16, words.pointer<int32_t>());
  });
}

// x, n, whether all copies are waited for, out
extern "C" const char* simt_pipeline(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto* x = words.pointer<const float>();
    const int n = static_cast<int>(words.number());
    const bool waits = words.number() != 0;
    launcher(waits ? pipeline_kernel<0> : pipeline_kernel<1>, 1, 32, x, n, words.pointer<float>());
  });
}

// x
extern "C" const char* simt_misaligned_copy(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    launcher(misaligned_copy_kernel, 1, 32, Words(call).pointer<const float>());
  });
}
