// Quantised tables on the GPU: quantise rows, look up bags.
#pragma once

#include "core/dtype.h"
#include "core/half.h"
#include "core/layout.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "quant/args.h"

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
  const int64_t wanted = (args.rows + kWarps - 1) / kWarps, max_blocks = launcher.blocks(32);
  const auto blocks = static_cast<unsigned>(wanted < max_blocks ? wanted : max_blocks);
  if (type == Dtype::kFloat) {
    launcher(quantize_kernel<float>, blocks, kQuantizeThreads, args);
  } else if (type == Dtype::kHalf) {
    launcher(quantize_kernel<half16>, blocks, kQuantizeThreads, args);
  } else {
    launcher(quantize_kernel<bfloat16>, blocks, kQuantizeThreads, args);
  }
}

// A lookup: a group of 4 to 32 lanes takes a bag, or without pooling one lookup. Each lane owns 8
// bytes of the row, 8 or 16 columns, and four rows of each bag are in flight before the first is
// used. Every lane reads index, scale and weight of one lookup of its bag and shares them by
// shuffles. The groups of a warp run in lockstep, so all collectives name the full warp. Sums are
// in the order of the lookups.

inline constexpr int kQuantThreads = 256;
inline constexpr int kQuantRowsInFlight = 4;

struct QuantArgs {
  const uint8_t* values;
  const RowScale* scales;
  void* output;  // [B, columns], [columns] in a variable batch, or [L, columns] for NONE
  Dtype output_type;
  const Feature* features;
  int num_features;
  IndexArray indices;
  Bags bags;
  BagMap map;
  int64_t columns;
  Pooling pooling;
  const float* sample_weights;  // [L] or null

  // Return the rows of the output: bags, or lookups without pooling.
  EMB_HD int64_t items() const { return pooling == Pooling::kNone ? bags.num_lookups : bags.count; }
};

// 8 bytes of a row.
template <int kBits>
struct PackedSlice {
  static constexpr int kColumns = 64 / kBits;
  uint32_t word[2] = {};

  EMB_DEVICE float operator[](int k) const {
    constexpr int kOfWord = kColumns / 2;
    const uint32_t bits = word[k / kOfWord] >> (k % kOfWord * kBits);
    return static_cast<float>(bits & ((1u << kBits) - 1));
  }
  // Load from `address`, of which `valid` columns belong to the row; a vector load needs a multiple
  // of 8.
  EMB_DEVICE void load(const uint8_t* address, int valid, bool vector) {
    if (vector) {
      const simt::Pack8 pack = simt::load(reinterpret_cast<const simt::Pack8*>(address));
      word[0] = pack.word[0];
      word[1] = pack.word[1];
      return;
    }
    const int nbytes = (valid * kBits + 7) / 8;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < nbytes) word[i / 4] |= static_cast<uint32_t>(address[i]) << (i % 4 * 8);
    }
  }
};

// The work of one group of lanes.
struct QuantTask {
  const Feature* feature;
  int64_t begin = 0, output_offset = 0;
  int length = 0, dim = 0;

  EMB_DEVICE QuantTask(const QuantArgs& args, int64_t item) : feature(args.features) {
    if (item >= args.items()) return;
    if (args.pooling == Pooling::kNone) {
      begin = item;
      output_offset = item * args.columns;
      dim = static_cast<int>(args.columns);
      // Lookups before the first bag have no feature; their output is zero.
      if (item < args.bags.begin(0)) return;
      feature += feature_of_lookup(args.map, args.bags, args.num_features, item);
      length = 1;
      return;
    }
    const auto bag = static_cast<uint32_t>(item);
    feature += args.map.feature(bag);
    begin = args.bags.begin(bag);
    length = static_cast<int>(args.bags.end(bag) - begin);
    output_offset = args.map.element(bag, feature->column);
    dim = static_cast<int>(feature->dim);
  }
};

// Where the row of a lookup begins (negative: none), and its scale and offset times the weight.
struct QuantRow {
  int64_t offset = -1;
  float scale = 0.0f, shift = 0.0f;

  template <int kBits>
  EMB_DEVICE void find(const QuantArgs& args, const QuantTask& task, int i) {
    if (i >= task.length) return;
    const Feature& feature = *task.feature;
    const int64_t row = repair_index(args.indices[task.begin + i], feature.rows);
    if (row < 0) return;
    const RowScale of_row = args.scales[feature.row_base + row];
    const float weight = args.sample_weights ? args.sample_weights[task.begin + i] : 1.0f;
    offset = feature.weight_offset + row * packed_bytes(feature.dim, kBits);
    scale = weight * of_row.scale;
    shift = weight * of_row.offset;
  }
};

// Sum columns [column, column + N) of a bag.
template <int kBits, int N>
EMB_DEVICE void sum_packed(const QuantArgs& args, const QuantTask& task, const LaneGroup& lane,
                           int column, int longest, bool vector, float (&sum)[N]) {
  const uint8_t* values = args.values + column * kBits / 8;
  const int valid = task.dim - column;
  for (int tile = 0; tile < longest; tile += lane.lanes) {
    QuantRow row_of_lane;
    row_of_lane.find<kBits>(args, task, tile + lane.rank);
    const int steps = longest - tile < lane.lanes ? longest - tile : lane.lanes;
    for (int k = 0; k < steps; k += kQuantRowsInFlight) {
      PackedSlice<kBits> slice[kQuantRowsInFlight];
#pragma unroll
      for (int u = 0; u < kQuantRowsInFlight; ++u) {
        const int64_t row = __shfl_sync(simt::kFullMask, row_of_lane.offset, k + u, lane.lanes);
        if (row >= 0 && valid > 0) slice[u].load(values + row, valid, vector);
      }
#pragma unroll
      for (int u = 0; u < kQuantRowsInFlight; ++u) {
        const float scale = __shfl_sync(simt::kFullMask, row_of_lane.scale, k + u, lane.lanes);
        const float shift = __shfl_sync(simt::kFullMask, row_of_lane.shift, k + u, lane.lanes);
#pragma unroll
        for (int e = 0; e < N; ++e) sum[e] += scale * slice[u][e] + shift;
      }
    }
  }
}

// The grid's second dimension divides the columns of rows wider than a warp.
template <int kBits>
__global__ void __launch_bounds__(kQuantThreads, 4) quant_lookup_kernel(QuantArgs args, int lanes) {
  constexpr int N = PackedSlice<kBits>::kColumns;
  const LaneGroup lane(lanes);
  const int64_t items = args.items(), groups = lane.groups_in_warp();
  for (int64_t first = simt::global_warp() * groups; first < items;
       first += simt::warps_in_grid() * groups) {
    const QuantTask task(args, first + lane.group);
    const int longest = __reduce_max_sync(simt::kFullMask, task.length);
    const int widest = __reduce_max_sync(simt::kFullMask, task.dim);
    const bool whole = packed_bytes(task.feature->dim, kBits) % 8 == 0 &&
                       is_aligned(args.values + task.feature->weight_offset, 8);
    const bool vector = __all_sync(simt::kFullMask, whole);
    for (int base = static_cast<int>(blockIdx.y) * lanes * N; base < widest;
         base += static_cast<int>(gridDim.y) * lanes * N) {
      const int column = base + lane.rank * N;
      float sum[N] = {};
      sum_packed<kBits>(args, task, lane, column, longest, vector, sum);
      if (column >= task.dim) continue;
      if (args.pooling == Pooling::kMean && task.length > 0) {
        const float scale = 1.0f / static_cast<float>(task.length);
#pragma unroll
        for (int e = 0; e < N; ++e) sum[e] *= scale;
      }
      write_columns(args.output, args.output_type, task.output_offset + column, task.dim - column,
                    sum);
    }
  }
}

// Return the mean columns per output row; the width of each feature is known on the device only.
inline int64_t quant_mean_width(const QuantArgs& args) {
  const int64_t rows = args.map.layout != nullptr ? args.bags.count : args.num_features;
  if (args.pooling == Pooling::kNone || rows == 0) return args.columns;
  return (args.columns + rows - 1) / rows;
}

template <int kBits, class Launcher>
void launch_quant_lookup_of(const Launcher& launcher, const QuantArgs& args) {
  constexpr int N = PackedSlice<kBits>::kColumns;
  const int64_t width = quant_mean_width(args);
  const int lanes = lanes_for(width, N), groups = static_cast<int>(simt::kWarp) / lanes;
  const int64_t items_of_block = groups * (kQuantThreads / static_cast<int>(simt::kWarp));
  const unsigned blocks = blocks_for(args.items(), items_of_block, launcher.blocks(256));
  const unsigned stripes = blocks_for(width, lanes * N, 64);
  launcher(quant_lookup_kernel<kBits>, simt::Dim3(blocks, stripes), simt::Dim3(kQuantThreads), args,
           lanes);
}

template <class Launcher>
void launch_quant_lookup(const Launcher& launcher, const QuantArgs& args, int bits) {
  if (args.columns == 0 || args.items() == 0) return;
  if (bits == 8) {
    launch_quant_lookup_of<8>(launcher, args);
  } else {
    launch_quant_lookup_of<4>(launcher, args);
  }
}

}  // namespace emb::cuda
