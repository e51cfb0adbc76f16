// `gather_segments` on the GPU: the concatenation of segments of rows, in three kernels. A scan
// over the sizes of the segments gives the first output row of each: segment_sums_kernel scans the
// sizes within tiles of kScanThreads segments, and segment_tiles_kernel scans the sizes of the
// tiles. Then segment_copy_kernel adds both results, and copies the rows in the widest words that
// the alignment allows.
#pragma once

#include "core/dtype.h"
#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kScanThreads = 256;           // threads of a block, and segments of a tile
inline constexpr int kSegmentCopyBlocksPerSm = 4;  // so that a thread may have 64 registers

// The output segments: values[starts[s]:starts[s + 1]] for s in `order`, in device memory. Contents
// need not be valid: starts are clamped to the rows of the values, and a segment that does not
// exist, or whose starts descend, is empty.
struct Segments {
  IndexArray starts;            // [num_segments + 1]
  const int64_t* order;         // [num_output_segments], the number s of each output segment
  int64_t num_segments;         // number of segments of the values
  int64_t num_output_segments;  // below 2^31
  int64_t num_rows;             // number of rows of the values
  // Scratch, uninitialised. sums_in_tile is [num_output_segments]: the number of rows of the output
  // segment and of those before it in its tile. rows_before_tile is [num_scan_tiles + 1]: the
  // number of rows of all earlier tiles.
  int64_t* sums_in_tile;
  int64_t* rows_before_tile;

  // Return the first row, in the values, of the m-th output segment.
  EMB_DEVICE int64_t begin(int64_t m) const {
    const int64_t s = order[m];
    return s < 0 || s >= num_segments ? 0 : clamp(starts[s], 0);
  }
  // Return the number of rows of the m-th output segment.
  EMB_DEVICE int64_t size(int64_t m) const {
    const int64_t s = order[m];
    if (s < 0 || s >= num_segments) return 0;
    const int64_t first = clamp(starts[s], 0);
    return clamp(starts[s + 1], first) - first;
  }
  // Return the first output row of the m-th output segment, after the scan.
  EMB_DEVICE int64_t first_output_row(int64_t m) const {
    return (m % kScanThreads == 0 ? 0 : sums_in_tile[m - 1]) + rows_before_tile[m / kScanThreads];
  }

 private:
  EMB_DEVICE int64_t clamp(int64_t x, int64_t low) const {
    return x < low ? low : (x > num_rows ? num_rows : x);
  }
};

// Return the number of tiles of kScanThreads segments that num_segments segments make.
inline int64_t num_scan_tiles(int64_t num_segments) {
  return (num_segments + kScanThreads - 1) / kScanThreads;
}

// Return the sum of `value` over this thread and the earlier threads of the block. All threads of
// the block must call this; it has barriers. `warp_sums` is shared memory for one number per warp.
EMB_DEVICE int64_t block_scan(int64_t value, int64_t* warp_sums) {
  const unsigned lane = threadIdx.x % simt::kWarpLanes, warp = threadIdx.x / simt::kWarpLanes;
  for (unsigned step = 1; step < simt::kWarpLanes; step *= 2) {
    const int64_t lower_sum = __shfl_up_sync(simt::kFullMask, value, step);
    if (lane >= step) value += lower_sum;
  }
  if (lane == simt::kWarpLanes - 1) warp_sums[warp] = value;
  __syncthreads();
  for (unsigned w = 0; w < warp; ++w) value += warp_sums[w];
  __syncthreads();
  return value;
}

// Write in.sums_in_tile, and the number of rows of each tile t to in.rows_before_tile[t + 1].
[[maybe_unused]] static __global__ void __launch_bounds__(kScanThreads)
    segment_sums_kernel(Segments in, int64_t num_tiles) {
  __shared__ int64_t warp_sums[kScanThreads / simt::kWarpLanes];
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const int64_t m = tile * kScanThreads + threadIdx.x;
    const int64_t sum = block_scan(m < in.num_output_segments ? in.size(m) : 0, warp_sums);
    if (m < in.num_output_segments) in.sums_in_tile[m] = sum;
    if (threadIdx.x == kScanThreads - 1) in.rows_before_tile[tile + 1] = sum;
  }
}

// Replace the number of rows of each tile, in in.rows_before_tile[t + 1], by the number of rows of
// the tiles up to it. The grid must be one block.
[[maybe_unused]] static __global__ void __launch_bounds__(kScanThreads)
    segment_tiles_kernel(Segments in, int64_t num_tiles) {
  __shared__ int64_t warp_sums[kScanThreads / simt::kWarpLanes];
  __shared__ int64_t rows_so_far;
  if (threadIdx.x == 0) {
    rows_so_far = 0;
    in.rows_before_tile[0] = 0;
  }
  __syncthreads();
  for (int64_t tile = 0; tile < num_tiles; tile += kScanThreads) {
    const int64_t entry = tile + threadIdx.x + 1;
    const int64_t rows_before = rows_so_far;
    const int64_t sum =
        rows_before + block_scan(entry <= num_tiles ? in.rows_before_tile[entry] : 0, warp_sums);
    if (entry <= num_tiles) in.rows_before_tile[entry] = sum;
    if (threadIdx.x == kScanThreads - 1) rows_so_far = sum;
    __syncthreads();
  }
}

// Copy the output segments, as rows of Word, to `out`, [num_output_rows, words_per_row]. Rows that
// no segment fills become 0.
template <class Word>
__global__ void __launch_bounds__(kTileThreads, kSegmentCopyBlocksPerSm)
    segment_copy_kernel(Segments in, const Word* values, Word* out, int64_t num_output_rows,
                        int64_t words_per_row) {
  __shared__ int search_range[2];
  const auto start = [&](int m) { return in.first_output_row(m) * words_per_row; };
  const int64_t n = num_output_rows * words_per_row;
  for (int64_t tile = static_cast<int64_t>(blockIdx.x) * kTileSize; tile < n;
       tile += static_cast<int64_t>(gridDim.x) * kTileSize) {
    const int64_t end = tile + kTileSize < n ? tile + kTileSize : n;
    const TileSearch search(start, static_cast<int>(in.num_output_segments), tile, end,
                            search_range);
    for (int64_t i = tile + threadIdx.x; i < end; i += kTileThreads) {
      const int m = search.find(start, i);
      const int64_t word_in_segment = m < 0 ? 0 : i - start(m);
      const bool is_filled = m >= 0 && word_in_segment < in.size(m) * words_per_row;
      out[i] = is_filled ? values[in.begin(m) * words_per_row + word_in_segment] : Word{};
    }
  }
}

// Launch segment_copy_kernel; row_bytes and both addresses must be multiples of the size of Word.
template <class Word, class Launcher>
void launch_segment_copy(const Launcher& launcher, const Segments& in, const void* values,
                         void* out, int64_t num_output_rows, int64_t row_bytes) {
  const int64_t words_per_row = row_bytes / static_cast<int64_t>(sizeof(Word));
  launcher(segment_copy_kernel<Word>,
           blocks_for(num_output_rows * words_per_row, kTileSize,
                      launcher.max_grid_blocks(kResidentBlocksPerSm / 2)),
           kTileThreads, in, static_cast<const Word*>(values), static_cast<Word*>(out),
           num_output_rows, words_per_row);
}

// Write the output segments of `values`, in.num_rows rows, one after the other to `out`,
// num_output_rows rows, of row_bytes bytes each. Output rows after the last segment become 0; rows
// of segments that do not fit are left out. All arrays are in device memory and must live until the
// kernels have run. Does not wait for the device.
template <class Launcher>
void launch_gather_segments(const Launcher& launcher, const Segments& in, const void* values,
                            void* out, int64_t num_output_rows, int64_t row_bytes) {
  if (num_output_rows * row_bytes == 0) return;
  const int64_t num_tiles = num_scan_tiles(in.num_output_segments);
  launcher(segment_sums_kernel,
           blocks_for(num_tiles, 1, launcher.max_grid_blocks(kResidentBlocksPerSm / 2)),
           kScanThreads, in, num_tiles);
  launcher(segment_tiles_kernel, 1, kScanThreads, in, num_tiles);
  const auto alignment_bits = reinterpret_cast<uintptr_t>(values) |
                              reinterpret_cast<uintptr_t>(out) | static_cast<uintptr_t>(row_bytes);
  if (alignment_bits % 16 == 0) {
    launch_segment_copy<simt::Pack16>(launcher, in, values, out, num_output_rows, row_bytes);
  } else if (alignment_bits % 8 == 0) {
    launch_segment_copy<uint64_t>(launcher, in, values, out, num_output_rows, row_bytes);
  } else if (alignment_bits % 4 == 0) {
    launch_segment_copy<uint32_t>(launcher, in, values, out, num_output_rows, row_bytes);
  } else if (alignment_bits % 2 == 0) {
    launch_segment_copy<uint16_t>(launcher, in, values, out, num_output_rows, row_bytes);
  } else {
    launch_segment_copy<uint8_t>(launcher, in, values, out, num_output_rows, row_bytes);
  }
}

}  // namespace emb::cuda
