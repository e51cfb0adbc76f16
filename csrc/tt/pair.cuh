// A pair of cores on the GPU: the values of its distinct halves, and the gradients of both cores.
// Ids are sorted by the inner core, the large one. A block takes one inner row and a tile of
// columns, finds the halves that share the row, and runs one tiled product over all of them in
// shared memory. The gradient of an inner row is complete in registers, so there are no atomics and
// no partial sums.
#pragma once

#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "tt/args.h"

namespace emb::cuda {

// The distinct halves of one kind of a table, [range[0], range[1]) of those of all tables; the
// range is known on the device only.
struct TtHalves {
  TtHalf half;
  const float* outer;  // [outer_rows][q_outer, inner_rank]
  const float* inner;  // [inner_rows][inner_rank, q_inner, rank]
  const int32_t *ids, *range;
  int64_t first_id;      // of the table
  int64_t value_stride;  // floats between the values of halves
  bool mirrored;         // columns of a value come as (inner, outer)

  EMB_DEVICE int64_t width() const { return int64_t{1} * half.q_inner * half.rank; }
  // Return the offset in the values of line (half u, outer column); add element_offset(n) for
  // element n of the inner core's row.
  EMB_DEVICE int64_t line_offset(int64_t u, int outer_column) const {
    return u * value_stride + outer_column * (mirrored ? half.rank : width());
  }
  EMB_DEVICE int64_t element_offset(int64_t n) const {
    if (!mirrored) return n;
    return n / half.rank * half.rank * half.q_outer + n % half.rank;
  }
  // Return the first of the table's distinct halves whose id within the table is >= id.
  EMB_DEVICE int lower_bound(int64_t id) const {
    int low = range[0], high = range[1];
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (ids[middle] - first_id < id) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }
};

inline constexpr int kPairThreads = 128;
inline constexpr int kDepth = 16;  // of the tiles in shared memory
inline constexpr int kPad = 4;     // keeps rows 16-byte aligned and spreads them over the banks

template <int kM, int kN>
struct PairTiles {
  alignas(16) float a[kDepth][kM + kPad];
  alignas(16) float b[kDepth][kN + kPad];
  int64_t first_offset[kM > kDepth ? kM : kDepth];  // of the lines of a tile, see each kernel
  int64_t second_offset[kM > kDepth ? kM : kDepth];
  int64_t element[kN > kDepth ? kN : kDepth];
  int range[2];
};

// Each thread owns 4 x 4 elements of the kM x kN tile.
struct PairThread {
  int m, n;

  template <int kM, int kN>
  EMB_DEVICE static PairThread of(const PairTiles<kM, kN>&) {
    static_assert(kM / 4 * (kN / 4) == kPairThreads);
    return {static_cast<int>(threadIdx.x) / (kN / 4) * 4,
            static_cast<int>(threadIdx.x) % (kN / 4) * 4};
  }
};

template <int kM, int kN>
EMB_DEVICE void multiply_tiles(const PairTiles<kM, kN>& tiles, const PairThread& thread,
                               float (&sums)[4][4]) {
#pragma unroll 4
  for (int k = 0; k < kDepth; ++k) {
    float a[4], b[4];
    read_columns(&tiles.a[k][thread.m], 4, a);
    read_columns(&tiles.b[k][thread.n], 4, b);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] += a[i] * b[j];
    }
  }
}

// Find the halves [begin, end) that share inner row `inner`; called by all threads of the block.
template <class Tiles>
EMB_DEVICE void find_group(const TtHalves& halves, int64_t inner, Tiles* tiles, int64_t* begin,
                           int64_t* end) {
  __syncthreads();
  if (threadIdx.x < 2) {
    tiles->range[threadIdx.x] =
        halves.lower_bound((inner + static_cast<int64_t>(threadIdx.x)) * halves.half.outer_rows);
  }
  __syncthreads();
  *begin = tiles->range[0];
  *end = tiles->range[1];
}

// Compute the offsets of lines [first, first + count) of a group: of their outer rows, and in the
// values.
template <class Tiles>
EMB_DEVICE void locate_lines(const TtHalves& halves, int64_t inner, int64_t begin, int64_t first,
                             int count, int64_t lines, Tiles* tiles) {
  const int q = halves.half.q_outer;
  for (int i = threadIdx.x; i < count; i += kPairThreads) {
    const int64_t line = first + i < lines ? first + i : 0;
    const int64_t u = begin + line / q;
    const int column = static_cast<int>(line % q);
    const int64_t row = halves.ids[u] - halves.first_id - inner * halves.half.outer_rows;
    tiles->first_offset[i] = row * halves.half.outer_size() + column * halves.half.inner_rank;
    tiles->second_offset[i] = halves.line_offset(u, column);
  }
}

// values[line, n] = sum over k of outer[line, k] * inner[k, n].
[[maybe_unused]] static __global__ void __launch_bounds__(kPairThreads, 5)
    expand_kernel(TtHalves halves, float* values) {
  constexpr int kM = 32, kN = 64;
  __shared__ PairTiles<kM, kN> tiles;
  const PairThread thread = PairThread::of(tiles);
  const int64_t depth = halves.half.inner_rank, width = halves.width();
  const int64_t inner = blockIdx.x, column = static_cast<int64_t>(blockIdx.y) * kN;
  const float* row = halves.inner + inner * halves.half.inner_size();
  int64_t begin, end;
  find_group(halves, inner, &tiles, &begin, &end);
  const int64_t lines = (end - begin) * halves.half.q_outer;
  for (int64_t first = 0; first < lines; first += kM) {
    locate_lines(halves, inner, begin, first, kM, lines, &tiles);
    float sums[4][4] = {};
    for (int64_t k0 = 0; k0 < depth; k0 += kDepth) {
      __syncthreads();
      for (int e = threadIdx.x; e < kM * kDepth; e += kPairThreads) {
        const int m = e / kDepth, k = e % kDepth;
        const bool inside = first + m < lines && k0 + k < depth;
        tiles.a[k][m] = inside ? halves.outer[tiles.first_offset[m] + k0 + k] : 0.0f;
      }
      for (int e = threadIdx.x; e < kN * kDepth; e += kPairThreads) {
        const int k = e / kN, n = e % kN;
        const bool inside = k0 + k < depth && column + n < width;
        tiles.b[k][n] = inside ? row[(k0 + k) * width + column + n] : 0.0f;
      }
      __syncthreads();
      multiply_tiles(tiles, thread, sums);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t n = column + thread.n + j;
        if (first + thread.m + i >= lines || n >= width) continue;
        values[tiles.second_offset[thread.m + i] + halves.element_offset(n)] = sums[i][j];
      }
    }
    __syncthreads();
  }
}

// grads[inner][m, n] = sum over lines of outer[line, m] * value_grads[line, n]; zero if no half
// uses the row.
[[maybe_unused]] static __global__ void __launch_bounds__(kPairThreads, 5)
    inner_grads_kernel(TtHalves halves, const float* value_grads, float* grads) {
  constexpr int kM = 32, kN = 64;
  __shared__ PairTiles<kM, kN> tiles;
  const PairThread thread = PairThread::of(tiles);
  const int64_t height = halves.half.inner_rank, width = halves.width();
  const int64_t inner = blockIdx.x, column = static_cast<int64_t>(blockIdx.y) * kN;
  const int64_t line_of_tile = static_cast<int64_t>(blockIdx.z) * kM;
  int64_t begin, end;
  find_group(halves, inner, &tiles, &begin, &end);
  const int64_t lines = (end - begin) * halves.half.q_outer;
  for (int n = threadIdx.x; n < kN; n += kPairThreads) {
    tiles.element[n] = halves.element_offset(column + n < width ? column + n : 0);
  }
  float sums[4][4] = {};
  for (int64_t k0 = 0; k0 < lines; k0 += kDepth) {
    __syncthreads();
    locate_lines(halves, inner, begin, k0, kDepth, lines, &tiles);
    __syncthreads();
    for (int e = threadIdx.x; e < kM * kDepth; e += kPairThreads) {
      const int k = e / kM, m = e % kM;
      const bool inside = k0 + k < lines && line_of_tile + m < height;
      tiles.a[k][m] = inside ? halves.outer[tiles.first_offset[k] + line_of_tile + m] : 0.0f;
    }
    for (int e = threadIdx.x; e < kN * kDepth; e += kPairThreads) {
      const int k = e / kN, n = e % kN;
      const bool inside = k0 + k < lines && column + n < width;
      tiles.b[k][n] = inside ? value_grads[tiles.second_offset[k] + tiles.element[n]] : 0.0f;
    }
    __syncthreads();
    multiply_tiles(tiles, thread, sums);
  }
  float* row = grads + inner * halves.half.inner_size();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t m = line_of_tile + thread.m + i;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int64_t n = column + thread.n + j;
      if (m < height && n < width) row[m * width + n] = sums[i][j];
    }
  }
}

// outer_values[u - range[0]][jo, m] = sum over n of value_grads[line, n] * inner[m, n].
[[maybe_unused]] static __global__ void __launch_bounds__(kPairThreads, 5)
    outer_values_kernel(TtHalves halves, const float* value_grads, float* outer_values) {
  constexpr int kM = 64, kN = 32;
  __shared__ PairTiles<kM, kN> tiles;
  const PairThread thread = PairThread::of(tiles);
  const int64_t height = halves.half.inner_rank, width = halves.width();
  const int64_t inner = blockIdx.x, column = static_cast<int64_t>(blockIdx.y) * kN;
  const float* row = halves.inner + inner * halves.half.inner_size();
  int64_t begin, end;
  find_group(halves, inner, &tiles, &begin, &end);
  const int64_t lines = (end - begin) * halves.half.q_outer;
  for (int64_t first = 0; first < lines; first += kM) {
    locate_lines(halves, inner, begin, first, kM, lines, &tiles);
    float sums[4][4] = {};
    for (int64_t k0 = 0; k0 < width; k0 += kDepth) {
      __syncthreads();
      for (int e = threadIdx.x; e < kM * kDepth; e += kPairThreads) {
        const int m = e / kDepth, k = e % kDepth;
        const bool inside = first + m < lines && k0 + k < width;
        tiles.a[k][m] =
            inside ? value_grads[tiles.second_offset[m] + halves.element_offset(k0 + k)] : 0.0f;
      }
      for (int e = threadIdx.x; e < kN * kDepth; e += kPairThreads) {
        const int n = e / kDepth, k = e % kDepth;
        const bool inside = k0 + k < width && column + n < height;
        tiles.b[k][n] = inside ? row[(column + n) * width + k0 + k] : 0.0f;
      }
      __syncthreads();
      multiply_tiles(tiles, thread, sums);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t line = first + thread.m + i;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int64_t n = column + thread.n + j;
        if (line >= lines || n >= height) continue;
        const int64_t first_half = (begin - halves.range[0]) * halves.half.outer_size();
        outer_values[first_half + line * height + n] = sums[i][j];
      }
    }
    __syncthreads();
  }
}

// grads[outer row] = sum, in order, of the outer values of the halves that use it. A block takes an
// outer row and searches its halves 128 inner rows at a time.
[[maybe_unused]] static __global__ void __launch_bounds__(kPairThreads, 5)
    sum_outer_kernel(TtHalves halves, const float* outer_values, float* grads) {
  __shared__ int found[kPairThreads];
  const int64_t size = halves.half.outer_size(), rows = halves.half.outer_rows;
  const int first_half = halves.range[0], halves_end = halves.range[1];
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int64_t first = 0; first < halves.half.inner_rows; first += kPairThreads) {
      const int64_t inner = first + threadIdx.x, id = inner * rows + row;
      const int u = inner < halves.half.inner_rows ? halves.lower_bound(id) : halves_end;
      __syncthreads();
      const bool exists = u < halves_end && halves.ids[u] - halves.first_id == id;
      found[threadIdx.x] = exists ? u - first_half : -1;
      __syncthreads();
      for (int64_t d = threadIdx.x; d < size; d += kPairThreads) {
        float sum = first > 0 ? grads[row * size + d] : 0.0f;
        for (int i = 0; i < kPairThreads; ++i) {
          if (found[i] >= 0) sum += outer_values[found[i] * size + d];
        }
        grads[row * size + d] = sum;
      }
    }
  }
}

// Copies rows of a core stored in 16 bits as floats: those that halves of the batch use.
struct TtWidenArgs {
  TtHalves halves;
  const void* from;  // [rows][width]
  Dtype type;
  float* to;
  int64_t rows, width;
  int64_t unit;  // ids of halves that share a row; 0: all rows are copied
};

// A block per row.
[[maybe_unused]] static __global__ void __launch_bounds__(kPairThreads)
    widen_core_kernel(TtWidenArgs args) {
  __shared__ int range[2];
  for (int64_t row = blockIdx.x; row < args.rows; row += gridDim.x) {
    __syncthreads();
    if (threadIdx.x < 2) {
      const int64_t end = row + static_cast<int64_t>(threadIdx.x);
      range[threadIdx.x] =
          args.unit > 0 ? args.halves.lower_bound(end * args.unit) : static_cast<int>(threadIdx.x);
    }
    __syncthreads();
    if (range[0] == range[1]) continue;
    for (int64_t d = threadIdx.x; d < args.width; d += kPairThreads) {
      const int64_t i = row * args.width + d;
      args.to[i] = args.type == Dtype::kHalf ? to_float(static_cast<const half16*>(args.from)[i])
                                             : to_float(static_cast<const bfloat16*>(args.from)[i]);
    }
  }
}

template <class Launcher>
void launch_widen_core(const Launcher& launcher, const TtWidenArgs& args) {
  launcher(widen_core_kernel, blocks_for(args.rows, 1, launcher.blocks(64)), kPairThreads, args);
}

inline unsigned tiles_of(int64_t n, int64_t tile) {
  return static_cast<unsigned>((n + tile - 1) / tile);
}

template <class Launcher>
void launch_expand(const Launcher& launcher, const TtHalves& halves, float* values) {
  const TtHalf& half = halves.half;
  const simt::Dim3 grid(static_cast<unsigned>(half.inner_rows),
                        tiles_of(int64_t{1} * half.q_inner * half.rank, 64));
  launcher(expand_kernel, grid, kPairThreads, halves, values);
}

// `outer_values` is scratch: one outer row per half.
template <class Launcher>
void launch_contract(const Launcher& launcher, const TtHalves& halves, const float* value_grads,
                     float* outer_values, float* outer_grads, float* inner_grads) {
  const TtHalf& half = halves.half;
  const auto inner_rows = static_cast<unsigned>(half.inner_rows);
  const int64_t width = int64_t{1} * half.q_inner * half.rank;
  launcher(inner_grads_kernel,
           simt::Dim3(inner_rows, tiles_of(width, 64), tiles_of(half.inner_rank, 32)), kPairThreads,
           halves, value_grads, inner_grads);
  launcher(outer_values_kernel, simt::Dim3(inner_rows, tiles_of(half.inner_rank, 32)), kPairThreads,
           halves, value_grads, outer_values);
  launcher(sum_outer_kernel, blocks_for(half.outer_rows, 1, launcher.blocks(64)), kPairThreads,
           halves, static_cast<const float*>(outer_values), outer_grads);
}

}  // namespace emb::cuda
