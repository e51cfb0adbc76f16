// Gradients of the values of right halves on the GPU, of all tables in one launch:
// grads[v][jr, r] = sum over the rows j of v and over jl of row_grads[j][jl, jr] * left_j[jl, r],
// where left_j is the left half of row j.
//
// The rows of a half are divided into chunks of 64, counted from its first row, so that the sums do
// not depend on the rest of the batch. A block of four warps sums a chunk for a tile of 128 ranks
// and four right columns. Lanes and warps are summed in a fixed order. Most halves have one chunk,
// whose sum is written at once; a second kernel sums the chunks of other halves in order. Ranks and
// columns beyond the end of a table count as zeros, so that all shapes have one order of sums.
// Shapes or strides that allow no vectors run on the second instantiation, with the same bits.
#pragma once

#include "tt/rows.cuh"

namespace emb::cuda {

// A *line* is a left column jl of a row. A *quad* is four neighbours: along the rank in a left
// half, along the right columns in row_grads.

inline constexpr int kChunkRows = 64;   // rows per chunk
inline constexpr int kTileQuads = 32;   // quads of ranks per tile
inline constexpr int kTileColumns = 4;  // right columns of a tile
// Blocks per multiprocessor of right_partials_kernel: with vectors 7 leave the registers for four
// lines in flight (72); with 8, ptxas adds the first lines before it loads the others. Without
// vectors 5 leave 96.
template <bool kVectors>
inline constexpr int kPartialBlocksPerSm = kVectors ? 7 : 5;
inline constexpr int kSumBlocksPerSm = 8;  // of right_sums_kernel: they leave 64 registers

// Return the number of work items for `rights` halves of `rows` rows in all. Chunk c of half v is
// item v + begin / 64 + c, where `begin` is the first entry of the half in right_rows: this needs
// no scan, and no two chunks have the same item. Some items have no chunk.
EMB_HD int64_t chunk_items(int64_t rights, int64_t rows) { return rights + rows / kChunkRows + 1; }

// Return the number of slots for the sums of chunks. Chunk c of a half of several chunks has slot
// 2 (begin / 64) + c: such a half has more than 64 rows, so no other half has the same slots.
EMB_HD int64_t chunk_slots(int64_t rows) { return 2 * (rows / kChunkRows) + 2; }

// The arguments of the kernels besides TtDeviceRowsArgs; all arrays are in device memory.
struct TtRightGrads {
  const float* row_grads;  // [M][row_stride] gradients of the rows
  bool has_vectors;        // row_grads allows vectors, and 32 bits hold all offsets in quads
  float* partials;         // [chunk_slots][right_stride], scratch
  float* values;           // [V][right_stride], an output: gradients of the values of pairs
  int max_tiles;           // maximum of right_tiles over the tables
};

// Return the number of tiles of a right value.
EMB_HD int right_tiles(int right_columns, int rank) {
  const int quads = (rank + 3) / 4;
  return (quads + kTileQuads - 1) / kTileQuads * ((right_columns + 3) / 4);
}

// Return whether a table runs on the instantiation that reads vectors.
EMB_DEVICE bool has_right_vectors(const TtTableRows& table, const TtRightGrads& out) {
  return out.has_vectors && table.has_vectors && table.right_columns % 4 == 0;
}

// A chunk: rows of one right half that a block adds.
struct RowChunk {
  int64_t half;
  int index, num_chunks;  // index of this chunk among the chunks of the half, and their number
  int first, rows;        // first entry in right_rows, and number of entries

  // Find the chunk of a work item; there is none if index >= num_chunks. All lanes of a warp call
  // this.
  EMB_DEVICE RowChunk(const int32_t* segments, int rights, int64_t item) {
    const auto first_item = [&](int v) { return int64_t{v} + segments[v] / kChunkRows; };
    half = warp_search(first_item, rights, item);
    const int begin = segments[half], end = segments[half + 1];
    index = static_cast<int>(item - half - begin / kChunkRows);
    num_chunks = (end - begin + kChunkRows - 1) / kChunkRows;
    first = begin + index * kChunkRows;
    rows = end - first < kChunkRows ? end - first : kChunkRows;
  }
};

// The destination of the gradient of a right half: element (jr, r) is data[jr * column_stride + r *
// rank_stride], in the gradient of the last core or, for a pair, in TtRightGrads::values.
struct RightGradDestination {
  float* data;
  int64_t column_stride, rank_stride;

  EMB_DEVICE RightGradDestination(const TtDeviceRowsArgs& args, const TtTableRows& table,
                                  const TtRightGrads& out, int64_t half) {
    if (table.last_grads != nullptr) {  // the last core has [rank, right columns]
      const int64_t id = int64_t{args.plan.rights[half]} - table.first_right;
      data = table.last_grads + id * table.right_size();
      column_stride = 1;
      rank_stride = table.right_columns;
    } else {
      data = out.values + half * args.right_stride;
      column_stride = table.rank;
      rank_stride = 1;
    }
  }
};

// Iterator over the lines of a lane. Each lane of a warp has looked up one of up to 32 rows; the
// lines of these rows are divided among groups of `quads` lanes of the block's four warps.
class LineWalk {
 public:
  EMB_DEVICE LineWalk(int quads, int left_columns)
      : left_columns_(left_columns),
        lines_of_warp_(kWarpLanes / quads),
        line_in_warp_(static_cast<int>(threadIdx.x % simt::kWarpLanes) / quads) {
    const int lines = lines_of_warp_ * kRowWarps;
    step_rows_ = lines / left_columns;
    step_columns_ = lines - step_rows_ * left_columns;
  }

  // Go to the lane's first line of `rows` rows; return the number of lines that each lane visits.
  // Visit those too for which `has_line` is false.
  EMB_DEVICE int begin(int rows) {
    const int line =
        static_cast<int>(threadIdx.x / simt::kWarpLanes) * lines_of_warp_ + line_in_warp_;
    rows_ = line_in_warp_ < lines_of_warp_ ? rows : 0;
    row_ = line / left_columns_;
    column_ = line - row_ * left_columns_;
    const int lines = lines_of_warp_ * kRowWarps;
    return (rows * left_columns_ + lines - 1) / lines;
  }
  // Return, for the lane's line: whether it exists; the lane that has looked up its row; its left
  // column.
  EMB_DEVICE bool has_line() const { return row_ < rows_; }
  EMB_DEVICE int source_lane() const { return row_ & static_cast<int>(simt::kWarpLanes - 1); }
  EMB_DEVICE int column() const { return column_; }
  // Go to the lane's next line.
  EMB_DEVICE void next() {
    row_ += step_rows_;
    column_ += step_columns_;
    if (column_ >= left_columns_) {
      column_ -= left_columns_;
      ++row_;
    }
  }

 private:
  int left_columns_, lines_of_warp_, line_in_warp_, step_rows_, step_columns_;
  int rows_ = 0, row_ = 0, column_ = 0;
};

// Sums of four right columns by four ranks.
struct QuadSums {
  float sum[16] = {};

  EMB_DEVICE void add(const float (&x)[4], const float (&g)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[j * 4 + r] += g[j] * x[r];
    }
  }

  // Exchange sums with the lane whose number differs in bit `offset`. Of 2 kHalf sums each of the
  // two lanes keeps one half, to which it adds the sums of the other lane. `first` becomes the
  // index of the first sum that this lane keeps.
  template <int kHalf>
  EMB_DEVICE void fold(unsigned offset, int* first) {
    const bool upper = (threadIdx.x & offset) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float send = upper ? sum[i] : sum[i + kHalf];
      const float keep = upper ? sum[i + kHalf] : sum[i];
      sum[i] = keep + __shfl_xor_sync(simt::kFullMask, send, static_cast<int>(offset));
    }
    if (upper) *first += kHalf;
  }
};

// The sums of a tile, [4 right columns, quads * 4 ranks], added up from the sums of the lanes of
// four warps, in shared memory of kFloats floats.
class TileSums {
 public:
  static constexpr int kStride = 17;  // floats between the sums of two lanes, in different banks

  // Write the sums of this lane, `sums`, which change; all threads of the block call this. If the
  // number of quads is a power of two, lanes with the same quad are added before (`folded_`). Ends
  // with a barrier.
  EMB_DEVICE void store(QuadSums* sums, int quads) {
    const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
    const int warp = static_cast<int>(threadIdx.x / simt::kWarpLanes);
    folded_ = (quads & (quads - 1)) == 0;
    quads_ = quads;
    if (!folded_) {
      float* to = value_of(warp) + lane * kStride;
#pragma unroll
      for (int i = 0; i < 16; ++i) to[i] = sums->sum[i];
    } else {
      int first = 0, count = 16;
      if (quads <= 16) sums->fold<8>(16, &first), count = 8;
      if (quads <= 8) sums->fold<4>(8, &first), count = 4;
      if (quads <= 4) sums->fold<2>(4, &first), count = 2;
      if (quads <= 2) sums->fold<1>(2, &first), count = 1;
      if (quads == 1) sums->sum[0] += __shfl_xor_sync(simt::kFullMask, sums->sum[0], 1);
      // Value i is (right column (first + i) / 4, rank (first + i) % 4 of the quad).
      float* to = value_of(warp) + lane % quads * 4;
      const bool writes = quads > 1 || lane % 2 == 0;
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (writes && i < count) to[(first + i) / 4 * quads * 4 + (first + i) % 4] = sums->sum[i];
      }
    }
    __syncthreads();
  }

  // Return element (right column j, rank r) of the tile, after `store`.
  EMB_DEVICE float at(int j, int r) const {
    float sum = 0.0f;
    if (folded_) {
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) sum += value_of(w)[j * quads_ * 4 + r];
      return sum;
    }
    const int parts = kWarpLanes / quads_;
    for (int w = 0; w < kRowWarps; ++w) {
      for (int i = 0; i < parts; ++i) {
        sum += value_of(w)[(i * quads_ + r / 4) * kStride + j * 4 + r % 4];
      }
    }
    return sum;
  }

  EMB_DEVICE explicit TileSums(float* memory) : memory_(memory) {}

  static constexpr int kFloats = kRowWarps * kWarpLanes * kStride;

 private:
  EMB_DEVICE float* value_of(int warp) const { return memory_ + warp * kWarpLanes * kStride; }

  float* memory_;
  bool folded_ = false;
  int quads_ = 0;
};

// Add this lane's lines of a chunk to `sums`: four ranks from `rank` on, four right columns from
// `column` on. `quads` is the number of quads of the block's tile.
//
// Lane i of a warp looks up row i of 32 once (its number and that of its left half), and passes
// both to the other lanes by shuffles. Each lane takes some of the lines and one quad. A line is an
// outer product of four ranks and four right columns: with vectors 16 multiply-adds for two loads
// of 16 bytes.
template <bool kVectors>
EMB_DEVICE void add_lines(const TtDeviceRowsArgs& args, const TtTableRows& table,
                          const float* row_grads, const RowChunk& chunk, int quads, int rank,
                          int column, QuadSums* sums) {
  constexpr int kLinesInFlight = kVectors ? 4 : 2;  // lines that a lane has in flight
  const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
  const int ranks = table.rank, columns = table.right_columns;
  const auto left = args.left_of(table);
  LineWalk walk(quads, table.left_columns);
  for (int done = 0; done < chunk.rows; done += kWarpLanes) {
    const int remaining = chunk.rows - done;
    const int rows = remaining < kWarpLanes ? remaining : kWarpLanes;
    // The row that this lane looks up and its left half: with vectors as offsets in quads, else as
    // indices of rows.
    uint32_t lane_left = 0, lane_row = 0;
    if (lane < rows) {
      const int64_t j = args.plan.right_rows[chunk.first + done + lane];
      const int64_t u = args.plan.row_lefts[j];
      const int64_t left_row = left.ids != nullptr ? left.ids[u] - left.first_id : u;
      lane_left = static_cast<uint32_t>(kVectors ? left_row * (left.stride / 4) : left_row);
      lane_row = static_cast<uint32_t>(kVectors ? j * (args.row_stride / 4) : j);
    }
    const int passes = walk.begin(rows);
#pragma unroll 1
    for (int pass = 0; pass < passes; pass += kLinesInFlight) {
      float x[kLinesInFlight][4], g[kLinesInFlight][4];
#pragma unroll
      for (int i = 0; i < kLinesInFlight; ++i) {
        const uint32_t shuffled_left = __shfl_sync(simt::kFullMask, lane_left, walk.source_lane());
        const uint32_t shuffled_row = __shfl_sync(simt::kFullMask, lane_row, walk.source_lane());
        const bool has_line = walk.has_line();
        const int jl = walk.column();
        if constexpr (kVectors) {
          const uint32_t a = shuffled_left + static_cast<uint32_t>(jl * (ranks / 4));
          const uint32_t b = shuffled_row + static_cast<uint32_t>(jl * (columns / 4));
          load_four(left.data + rank + uint64_t{a} * 4, has_line, true, x[i]);
          load_four(row_grads + column + uint64_t{b} * 4, has_line, true, g[i]);
        } else {
          RowSlice<float, 4> of_x, of_g;
          if (has_line) {
            of_x.load_scalar(
                left.data + shuffled_left * left.stride + int64_t{1} * jl * ranks + rank,
                ranks - rank);
            of_g.load_scalar(
                row_grads + shuffled_row * args.row_stride + int64_t{1} * jl * columns + column,
                columns - column);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            x[i][k] = of_x[k];
            g[i][k] = of_g[k];
          }
        }
        walk.next();
      }
#pragma unroll
      for (int i = 0; i < kLinesInFlight; ++i) sums->add(x[i], g[i]);
    }
  }
}

// Sum each chunk, and write the sum to `partials`, or to the gradient if the half has one chunk.
// Tables of the other instantiation (has_right_vectors) are skipped. A block takes an item and a
// tile, grid-stride.
template <bool kVectors>
__global__ void __launch_bounds__(kRowThreads, kPartialBlocksPerSm<kVectors>)
    right_partials_kernel(TtDeviceRowsArgs args, TtRightGrads out) {
  __shared__ float memory[TileSums::kFloats];
  const int rights = static_cast<int>(args.rights());
  const int64_t work = rights == 0 ? 0 : chunk_items(rights, args.rows()) * out.max_tiles;
  for (int64_t w = blockIdx.x; w < work; w += gridDim.x) {
    const int64_t item = w / out.max_tiles;
    const RowChunk chunk(args.plan.right_segments, rights, item);
    if (chunk.index >= chunk.num_chunks) continue;
    const TtTableRows& table = args.table_of_right(chunk.half);
    const int tile = static_cast<int>(w - item * out.max_tiles);
    if (tile >= right_tiles(table.right_columns, table.rank)) continue;
    if (has_right_vectors(table, out) != kVectors) continue;
    const int all_quads = (table.rank + 3) / 4;
    const int rank_tiles = (all_quads + kTileQuads - 1) / kTileQuads;
    const int column = tile / rank_tiles * kTileColumns;
    const int first_quad = tile % rank_tiles * kTileQuads;
    const int quads = all_quads - first_quad < kTileQuads ? all_quads - first_quad : kTileQuads;
    const int lane_quad = static_cast<int>(threadIdx.x % simt::kWarpLanes) % quads;
    QuadSums sums;
    add_lines<kVectors>(args, table, out.row_grads, chunk, quads, (first_quad + lane_quad) * 4,
                        column, &sums);
    TileSums total(memory);
    total.store(&sums, quads);
    RightGradDestination destination(args, table, out, chunk.half);
    if (chunk.num_chunks > 1) {
      const int64_t slot = 2 * int64_t{args.plan.right_segments[chunk.half] / kChunkRows};
      destination.data = out.partials + (slot + chunk.index) * args.right_stride;
      destination.column_stride = table.rank;
      destination.rank_stride = 1;
    }
    const int width = quads * 4;
    for (int e = static_cast<int>(threadIdx.x); e < kTileColumns * width; e += kRowThreads) {
      const int j = e / width, r = e - j * width;
      if (column + j >= table.right_columns || first_quad * 4 + r >= table.rank) continue;
      destination.data[(column + j) * destination.column_stride +
                       (first_quad * 4 + r) * destination.rank_stride] = total.at(j, r);
    }
    __syncthreads();
  }
}

// Write the gradients of halves of several chunks: the sums of their chunks, in order. A warp takes
// a half, grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads, kSumBlocksPerSm)
    right_sums_kernel(TtDeviceRowsArgs args, TtRightGrads out) {
  const int lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
  const int64_t rights = args.rights();
  const int32_t* segments = args.plan.right_segments;
  for (int64_t v = simt::global_warp(); v < rights; v += simt::warps_in_grid()) {
    const int begin = segments[v], chunks = (segments[v + 1] - begin + kChunkRows - 1) / kChunkRows;
    if (chunks <= 1) continue;
    const TtTableRows& table = args.table_of_right(v);
    const RightGradDestination destination(args, table, out, v);
    const float* from = out.partials + 2 * int64_t{begin / kChunkRows} * args.right_stride;
    const int size = static_cast<int>(table.right_size());
    for (int e = lane; e < size; e += kWarpLanes) {
      float sum = 0.0f;
#pragma unroll 4
      for (int c = 0; c < chunks; ++c) sum += from[c * args.right_stride + e];
      const int column = e / table.rank;
      destination.data[column * destination.column_stride +
                       (e - column * table.rank) * destination.rank_stride] = sum;
    }
  }
}

// Write the gradients of the values of all right halves: of pairs to out.values, of other halves
// directly to the gradient of the last core. `rights` is the maximum number of right halves.
// any_vectors and any_scalars: whether there are tables for either instantiation.
template <class Launcher>
void launch_right_grads(const Launcher& launcher, bool any_vectors, bool any_scalars,
                        int64_t rights, const TtDeviceRowsArgs& args, const TtRightGrads& out) {
  const int64_t work = chunk_items(rights, args.plan.capacity) * out.max_tiles;
  const unsigned grid = blocks_for(work, 1, launcher.blocks(2 * kResidentBlocksPerSm));
  if (any_vectors) launcher(right_partials_kernel<true>, grid, kRowThreads, args, out);
  if (any_scalars) launcher(right_partials_kernel<false>, grid, kRowThreads, args, out);
  launcher(right_sums_kernel, blocks_for(rights, kRowWarps, launcher.blocks(kResidentBlocksPerSm)),
           kRowThreads, args, out);
}

}  // namespace emb::cuda
