// Quantises rows on the GPU, a warp a row.
#pragma once

#include "core/dtype.h"
#include "core/half.h"
#include "core/simt.cuh"
#include "quant/quant.h"

namespace emb::cuda {

inline constexpr int kQuantizeThreads = 256;

struct QuantizeRows {
  const void* weights;  // [rows, dim]
  uint8_t* values;
  RowScale* scales;
  int64_t rows, dim;
  int bits;
};

template <class T>
__global__ void quantize_kernel(QuantizeRows args) {
  const auto lane = static_cast<int64_t>(threadIdx.x % simt::kWarp);
  const int64_t nbytes = packed_bytes(args.dim, args.bits);
  for (int64_t r = simt::global_warp(); r < args.rows; r += simt::warps_in_grid()) {
    const T* row = static_cast<const T*>(args.weights) + r * args.dim;
    float low = to_float(row[0]), high = low;
    for (int64_t d = lane; d < args.dim; d += simt::kWarp) {
      const float value = to_float(row[d]);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    for (int offset = simt::kWarp / 2; offset > 0; offset /= 2) {
      const float other_low = __shfl_xor_sync(simt::kFullMask, low, offset);
      const float other_high = __shfl_xor_sync(simt::kFullMask, high, offset);
      low = other_low < low ? other_low : low;
      high = other_high > high ? other_high : high;
    }
    const RowScale scale = row_scale(low, high, args.bits);
    if (lane == 0) args.scales[r] = scale;
    uint8_t* out = args.values + r * nbytes;
    for (int64_t b = lane; b < nbytes; b += simt::kWarp) {
      if (args.bits == 8) {
        out[b] = quantized(to_float(row[b]), scale, 8);
        continue;
      }
      const unsigned even = quantized(to_float(row[2 * b]), scale, 4);
      const unsigned odd =
          2 * b + 1 < args.dim ? quantized(to_float(row[2 * b + 1]), scale, 4) : 0u;
      out[b] = static_cast<uint8_t>(even | odd << 4);
    }
  }
}

template <class Launcher>
void launch_quantize(const Launcher& launcher, const QuantizeRows& args, Dtype type) {
  if (args.rows == 0) return;
  constexpr int kWarps = kQuantizeThreads / static_cast<int>(simt::kWarp);
  const int64_t wanted = (args.rows + kWarps - 1) / kWarps, most = launcher.blocks(32);
  const auto blocks = static_cast<unsigned>(wanted < most ? wanted : most);
  if (type == Dtype::kFloat) {
    launcher(quantize_kernel<float>, blocks, kQuantizeThreads, args);
  } else if (type == Dtype::kHalf) {
    launcher(quantize_kernel<half16>, blocks, kQuantizeThreads, args);
  } else {
    launcher(quantize_kernel<bfloat16>, blocks, kQuantizeThreads, args);
  }
}

}  // namespace emb::cuda
