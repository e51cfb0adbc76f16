// Gradients of the values of right halves on the GPU, for all tables at once:
//   grads[v][jr, r] = sum over the rows j of v and over jl of row_grads[j][jl, jr] * left_j[jl, r],
// where left_j is the value of the left half of row j. tt/args.h explains halves and values.
//
// The rows of a half are divided into chunks of 64, counted from its first row, so that the sums do
// not depend on the rest of the batch. There are two phases.
//   1. right_partials_kernel: a block of four warps sums a chunk for a tile of 128 ranks and four
//      right columns, over lanes and warps in a fixed order. If a half has one chunk, the sum is
//      its gradient.
//   2. right_sums_kernel adds up the chunks of the other halves, in order.
// The first kernel has two instantiations: with vectors, and without for tables whose shape or
// stride allows none. Both sum in the same order, so that they yield the same bits.
#pragma once

#include "tt/rows.cuh"

namespace emb::cuda {

// A *line* is a left column jl of a row j. A *quad* is four neighbouring floats: of ranks in a left
// value, of right columns in row_grads.

inline constexpr int kChunkRows = 64;   // rows per chunk
inline constexpr int kTileQuads = 32;   // quads of ranks per tile
inline constexpr int kTileColumns = 4;  // right columns per tile
// Blocks per multiprocessor of right_partials_kernel, which bound its registers. With vectors, 7
// blocks leave 72 registers, enough for four lines in flight; with 8 blocks, ptxas adds the first
// lines before it loads the others. Without vectors, 5 blocks leave 96 registers.
template <bool kVectors>
inline constexpr int kPartialBlocksPerSm = kVectors ? 7 : 5;
inline constexpr int kSumBlocksPerSm = 8;  // of right_sums_kernel: they leave 64 registers

// Return the number of work items for `num_rights` halves with `num_rows` rows in all. Chunk c of
// half v is item v + begin / kChunkRows + c, where `begin` is the half's first entry in right_rows.
// So no two chunks have the same item, and no prefix sum of chunk counts is needed. Some items have
// no chunk.
EMB_HD int64_t num_chunk_items(int64_t num_rights, int64_t num_rows) {
  return num_rights + num_rows / kChunkRows + 1;
}

// Return the slot for the sum of the first chunk of a half whose first entry in right_rows is
// `begin`; the other chunks have the next slots. Only halves with several chunks have slots. They
// have more than kChunkRows rows, so no two of them have a slot in common.
EMB_HD int64_t first_partial_slot(int begin) { return 2 * int64_t{begin / kChunkRows}; }

// Return the number of slots for `num_rows` rows.
EMB_HD int64_t num_partial_slots(int64_t num_rows) { return 2 * (num_rows / kChunkRows) + 2; }

// The arguments of the kernels besides TtBatchArgs. All arrays are in device memory; none needs
// initial values.
struct RightGradBuffers {
  const float* row_grads;  // [M][row_stride] gradients of the rows
  bool has_vectors;        // row_grads allows vectors, and 32 bits hold all offsets in quads
  float* partials;         // [num_partial_slots][right_stride], scratch
  float* value_grads;      // [V][right_stride], an output: gradients of the values of pairs
  int max_tiles;           // maximum of num_right_tiles over the tables
};

// Return the number of tiles of the value of a right half: tiles of ranks times tiles of columns.
EMB_HD int num_right_tiles(int right_columns, int rank) {
  const int quads = (rank + 3) / 4;
  return (quads + kTileQuads - 1) / kTileQuads * ((right_columns + 3) / 4);
}

// Return whether a table runs on the instantiation that reads vectors.
EMB_DEVICE bool runs_with_vectors(const TtTableArgs& table, const RightGradBuffers& buffers) {
  return buffers.has_vectors && table.has_right_vectors();
}

// A chunk: rows of one right half that a block adds.
struct RowChunk {
  int64_t half;
  int index, num_chunks;      // index of this chunk among the chunks of the half, and their number
  int first_entry, num_rows;  // first entry in right_rows, and number of entries

  // Find the chunk of a work item; there is none if index >= num_chunks. All lanes of a warp call
  // this with the same item.
  EMB_DEVICE RowChunk(const int32_t* right_segments, int num_rights, int64_t item) {
    const auto first_item = [&](int v) { return int64_t{v} + right_segments[v] / kChunkRows; };
    half = warp_search(first_item, num_rights, item);
    const int begin = right_segments[half], end = right_segments[half + 1];
    index = static_cast<int>(item - half - begin / kChunkRows);
    num_chunks = (end - begin + kChunkRows - 1) / kChunkRows;
    first_entry = begin + index * kChunkRows;
    num_rows = end - first_entry < kChunkRows ? end - first_entry : kChunkRows;
  }
};

// Where the gradient of the value of a right half is written: element (jr, r) is data[jr *
// column_stride + r * rank_stride]. It is in the gradient of the last core or, for a pair, in
// RightGradBuffers::value_grads.
struct RightGradDestination {
  float* data;
  int64_t column_stride, rank_stride;

  EMB_DEVICE RightGradDestination(const TtBatchArgs& args, const TtTableArgs& table,
                                  const RightGradBuffers& buffers, int64_t half) {
    if (table.last_grads != nullptr) {  // the last core has [rank, right columns]
      const int64_t id = int64_t{args.plan.rights[half]} - table.first_right_id;
      data = table.last_grads + id * table.right_size();
      column_stride = 1;
      rank_stride = table.right_columns;
    } else {
      data = buffers.value_grads + half * args.right_stride;
      column_stride = table.rank;
      rank_stride = 1;
    }
  }
};

// An iterator over the lines that a lane adds, of up to 32 rows; each lane of a warp looks up one
// of these rows. A warp has groups of num_quads lanes. The groups of the block's four warps take
// the lines in turn, and each lane of a group adds another quad of its line. Lanes after the last
// whole group of a warp have no lines.
class LineIterator {
 public:
  EMB_DEVICE LineIterator(int num_quads, int left_columns)
      : left_columns_(left_columns),
        groups_per_warp_(kWarpLanes / num_quads),
        group_in_warp_(lane_in_warp() / num_quads) {
    const int num_groups = groups_per_warp_ * kRowWarps;
    step_rows_ = num_groups / left_columns;
    step_columns_ = num_groups - step_rows_ * left_columns;
  }

  // Go to the lane's first line of `num_rows` rows. Return the number of lines that every lane must
  // visit, with a call of advance() between them. A lane whose has_line() is false must still take
  // part in shuffles.
  EMB_DEVICE int start(int num_rows) {
    const int line =
        static_cast<int>(threadIdx.x / simt::kWarpLanes) * groups_per_warp_ + group_in_warp_;
    num_rows_ = group_in_warp_ < groups_per_warp_ ? num_rows : 0;
    row_index_ = line / left_columns_;
    column_ = line - row_index_ * left_columns_;
    const int num_groups = groups_per_warp_ * kRowWarps;
    return (num_rows * left_columns_ + num_groups - 1) / num_groups;
  }
  // Return, for the lane's line: whether it exists; the lane that has looked up its row; its left
  // column.
  EMB_DEVICE bool has_line() const { return row_index_ < num_rows_; }
  EMB_DEVICE int source_lane() const { return row_index_ & static_cast<int>(simt::kWarpLanes - 1); }
  EMB_DEVICE int column() const { return column_; }
  // Go to the lane's next line.
  EMB_DEVICE void advance() {
    row_index_ += step_rows_;
    column_ += step_columns_;
    if (column_ >= left_columns_) {
      column_ -= left_columns_;
      ++row_index_;
    }
  }

 private:
  int left_columns_, groups_per_warp_, group_in_warp_, step_rows_, step_columns_;
  int num_rows_ = 0, row_index_ = 0, column_ = 0;
};

// Sums of four right columns by four ranks: sum[4 j + r] is of column j and rank r.
struct QuadSums {
  float sum[16] = {};

  // Add the outer product of the ranks `x` and the right columns `g`.
  EMB_DEVICE void add(const float (&x)[4], const float (&g)[4]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int r = 0; r < 4; ++r) sum[j * 4 + r] += g[j] * x[r];
    }
  }

  // Add the first 2 kHalf sums of two lanes, whose numbers differ in the bit `offset`: each of the
  // two lanes keeps one half of the totals, in sum[0], ..., sum[kHalf - 1]. The upper lane, in
  // which the bit is 1, keeps the upper half, and adds kHalf to *first_index, the index of the
  // first sum that it keeps. All lanes of the warp call this.
  template <int kHalf>
  EMB_DEVICE void fold(unsigned offset, int* first_index) {
    const bool is_upper = (threadIdx.x & offset) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float sum_to_send = is_upper ? sum[i] : sum[i + kHalf];
      const float sum_to_keep = is_upper ? sum[i + kHalf] : sum[i];
      sum[i] =
          sum_to_keep + __shfl_xor_sync(simt::kFullMask, sum_to_send, static_cast<int>(offset));
    }
    if (is_upper) *first_index += kHalf;
  }
};

// The sums of a tile, [4 right columns, num_quads * 4 ranks], over the lanes of the block's four
// warps, in shared memory of kFloats floats. Lane i of a warp must have summed the quad with index
// i % num_quads.
class TileSums {
 public:
  static constexpr int kStride = 17;  // floats between the sums of two lanes, in different banks

  // Write the sums of this lane, and change `sums`. If num_quads is a power of two, the lanes of a
  // warp with the same quad are added up first (is_folded_). All threads of the block call this; it
  // ends with a barrier.
  EMB_DEVICE void store(QuadSums* sums, int num_quads) {
    const int lane = lane_in_warp();
    const int warp = static_cast<int>(threadIdx.x / simt::kWarpLanes);
    is_folded_ = (num_quads & (num_quads - 1)) == 0;
    num_quads_ = num_quads;
    if (!is_folded_) {
      float* to = sums_of_warp(warp) + lane * kStride;
#pragma unroll
      for (int i = 0; i < 16; ++i) to[i] = sums->sum[i];
    } else {
      int first = 0, count = 16;  // sums->sum[i], i < count, are sums first + i of the warp
      if (num_quads <= 16) sums->fold<8>(16, &first), count = 8;
      if (num_quads <= 8) sums->fold<4>(8, &first), count = 4;
      if (num_quads <= 4) sums->fold<2>(4, &first), count = 2;
      if (num_quads <= 2) sums->fold<1>(2, &first), count = 1;
      if (num_quads == 1) sums->sum[0] += __shfl_xor_sync(simt::kFullMask, sums->sum[0], 1);
      float* to = sums_of_warp(warp) + lane % num_quads * 4;
      const bool has_own_sums = num_quads > 1 || lane % 2 == 0;  // else lane - 1 has the same
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const int column = (first + i) / 4, rank = (first + i) % 4;
        if (has_own_sums && i < count) to[column * num_quads * 4 + rank] = sums->sum[i];
      }
    }
    __syncthreads();
  }

  // Return element (right column j, rank r) of the tile, after `store`.
  EMB_DEVICE float at(int j, int r) const {
    float sum = 0.0f;
    if (is_folded_) {
#pragma unroll
      for (int w = 0; w < kRowWarps; ++w) sum += sums_of_warp(w)[j * num_quads_ * 4 + r];
      return sum;
    }
    const int num_groups = kWarpLanes / num_quads_;
    for (int w = 0; w < kRowWarps; ++w) {
      for (int i = 0; i < num_groups; ++i) {
        sum += sums_of_warp(w)[(i * num_quads_ + r / 4) * kStride + j * 4 + r % 4];
      }
    }
    return sum;
  }

  EMB_DEVICE explicit TileSums(float* shared) : shared_(shared) {}

  static constexpr int kFloats = kRowWarps * kWarpLanes * kStride;

 private:
  EMB_DEVICE float* sums_of_warp(int warp) const { return shared_ + warp * kWarpLanes * kStride; }

  float* shared_;
  bool is_folded_ = false;
  int num_quads_ = 0;
};

// Add this lane's lines of a chunk to `sums`, for four ranks from `first_rank` on and four right
// columns from `first_column` on. num_quads is the number of quads of the block's tile. All threads
// of the block call this.
//
// Lane i of a warp looks up row i of 32 once (its number and that of its left half), and passes
// both to the other lanes by shuffles. A lane adds some of the lines, for one quad. A line adds an
// outer product of four ranks and four right columns: with vectors, 16 multiply-adds for two loads
// of 16 bytes.
template <bool kVectors>
EMB_DEVICE void add_lines(const TtBatchArgs& args, const TtTableArgs& table, const float* row_grads,
                          const RowChunk& chunk, int num_quads, int first_rank, int first_column,
                          QuadSums* sums) {
  constexpr int kLinesInFlight = kVectors ? 4 : 2;  // lines that a lane loads before it adds them
  const int lane = lane_in_warp();
  const int ranks = table.rank, columns = table.right_columns;
  const auto left = args.left_values_of(table);
  LineIterator line(num_quads, table.left_columns);
  for (int first = 0; first < chunk.num_rows; first += kWarpLanes) {
    const int num_remaining = chunk.num_rows - first;
    const int num_rows = num_remaining < kWarpLanes ? num_remaining : kWarpLanes;
    // The row that this lane looks up and its left half: with vectors as offsets in quads, else as
    // indices of rows.
    uint32_t lane_left = 0, lane_row = 0;
    if (lane < num_rows) {
      const int64_t j = args.plan.right_rows[chunk.first_entry + first + lane];
      const int64_t u = args.plan.row_lefts[j];
      const int64_t left_row = left.ids != nullptr ? left.ids[u] - left.first_id : u;
      lane_left = static_cast<uint32_t>(kVectors ? left_row * (left.stride / 4) : left_row);
      lane_row = static_cast<uint32_t>(kVectors ? j * (args.row_stride / 4) : j);
    }
    const int num_steps = line.start(num_rows);
#pragma unroll 1
    for (int step = 0; step < num_steps; step += kLinesInFlight) {
      float x[kLinesInFlight][4], g[kLinesInFlight][4];
#pragma unroll
      for (int i = 0; i < kLinesInFlight; ++i) {
        const uint32_t shuffled_left = __shfl_sync(simt::kFullMask, lane_left, line.source_lane());
        const uint32_t shuffled_row = __shfl_sync(simt::kFullMask, lane_row, line.source_lane());
        const bool has_line = line.has_line();
        const int jl = line.column();
        if constexpr (kVectors) {
          const uint32_t a = shuffled_left + static_cast<uint32_t>(jl * (ranks / 4));
          const uint32_t b = shuffled_row + static_cast<uint32_t>(jl * (columns / 4));
          load_four(left.data + first_rank + uint64_t{a} * 4, has_line, true, x[i]);
          load_four(row_grads + first_column + uint64_t{b} * 4, has_line, true, g[i]);
        } else {
          RowSlice<float, 4> x_slice, g_slice;
          if (has_line) {
            x_slice.load_scalar(
                left.data + shuffled_left * left.stride + int64_t{1} * jl * ranks + first_rank,
                ranks - first_rank);
            g_slice.load_scalar(row_grads + shuffled_row * args.row_stride +
                                    int64_t{1} * jl * columns + first_column,
                                columns - first_column);
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            x[i][k] = x_slice[k];
            g[i][k] = g_slice[k];
          }
        }
        line.advance();
      }
#pragma unroll
      for (int i = 0; i < kLinesInFlight; ++i) sums->add(x[i], g[i]);
    }
  }
}

// Sum each chunk, and write the sum to buffers.partials or, if it is the half's only chunk, to the
// gradient. Tables of the other instantiation (runs_with_vectors) are skipped. A block processes a
// tile of a work item, grid-stride.
template <bool kVectors>
__global__ void __launch_bounds__(kRowThreads, kPartialBlocksPerSm<kVectors>)
    right_partials_kernel(TtBatchArgs args, RightGradBuffers buffers) {
  __shared__ float shared[TileSums::kFloats];
  const int num_rights = static_cast<int>(args.num_rights());
  const int64_t num_item_tiles =
      num_rights == 0 ? 0 : num_chunk_items(num_rights, args.num_rows()) * buffers.max_tiles;
  for (int64_t w = blockIdx.x; w < num_item_tiles; w += gridDim.x) {
    const int64_t item = w / buffers.max_tiles;
    const RowChunk chunk(args.plan.right_segments, num_rights, item);
    if (chunk.index >= chunk.num_chunks) continue;
    const TtTableArgs& table = args.table_of_right(chunk.half);
    const int tile = static_cast<int>(w - item * buffers.max_tiles);
    if (tile >= num_right_tiles(table.right_columns, table.rank)) continue;
    if (runs_with_vectors(table, buffers) != kVectors) continue;
    const int table_quads = (table.rank + 3) / 4;
    const int rank_tiles = (table_quads + kTileQuads - 1) / kTileQuads;
    const int column = tile / rank_tiles * kTileColumns;
    const int first_quad = tile % rank_tiles * kTileQuads;
    const int num_quads =
        table_quads - first_quad < kTileQuads ? table_quads - first_quad : kTileQuads;
    const int lane_quad = lane_in_warp() % num_quads;
    QuadSums sums;
    add_lines<kVectors>(args, table, buffers.row_grads, chunk, num_quads,
                        (first_quad + lane_quad) * 4, column, &sums);
    TileSums total(shared);
    total.store(&sums, num_quads);
    RightGradDestination destination(args, table, buffers, chunk.half);
    if (chunk.num_chunks > 1) {  // write to a slot of partials instead, in the layout of a value
      const int64_t slot = first_partial_slot(args.plan.right_segments[chunk.half]) + chunk.index;
      destination.data = buffers.partials + slot * args.right_stride;
      destination.column_stride = table.rank;
      destination.rank_stride = 1;
    }
    const int width = num_quads * 4;
    for (int e = static_cast<int>(threadIdx.x); e < kTileColumns * width; e += kRowThreads) {
      const int j = e / width, r = e - j * width;
      if (column + j >= table.right_columns || first_quad * 4 + r >= table.rank) continue;
      destination.data[(column + j) * destination.column_stride +
                       (first_quad * 4 + r) * destination.rank_stride] = total.at(j, r);
    }
    __syncthreads();  // before the next tile uses the shared memory
  }
}

// Write the gradients of halves of several chunks: the sums of their chunks, in order. A warp
// processes a half, grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kRowThreads, kSumBlocksPerSm)
    right_sums_kernel(TtBatchArgs args, RightGradBuffers buffers) {
  const int lane = lane_in_warp();
  const int64_t num_rights = args.num_rights();
  const int32_t* segments = args.plan.right_segments;
  for (int64_t v = simt::global_warp(); v < num_rights; v += simt::warps_in_grid()) {
    const int begin = segments[v],
              num_chunks = (segments[v + 1] - begin + kChunkRows - 1) / kChunkRows;
    if (num_chunks <= 1) continue;
    const TtTableArgs& table = args.table_of_right(v);
    const RightGradDestination destination(args, table, buffers, v);
    const float* from = buffers.partials + first_partial_slot(begin) * args.right_stride;
    const int size = static_cast<int>(table.right_size());
    for (int e = lane; e < size; e += kWarpLanes) {
      float sum = 0.0f;
#pragma unroll 4
      for (int c = 0; c < num_chunks; ++c) sum += from[c * args.right_stride + e];
      const int column = e / table.rank;
      destination.data[column * destination.column_stride +
                       (e - column * table.rank) * destination.rank_stride] = sum;
    }
  }
}

// Write the gradients of the values of all right halves: of pairs to buffers.value_grads, of other
// halves to the gradient of the last core, of which only rows that the batch uses are written.
// max_rights is the maximum number of right halves. has_vector_tables and has_scalar_tables say
// whether there are tables for either instantiation. Does not wait for the device.
template <class Launcher>
void launch_right_grads(const Launcher& launcher, bool has_vector_tables, bool has_scalar_tables,
                        int64_t max_rights, const TtBatchArgs& args,
                        const RightGradBuffers& buffers) {
  const int64_t work = num_chunk_items(max_rights, args.plan.capacity) * buffers.max_tiles;
  const unsigned grid = blocks_for(work, 1, launcher.max_grid_blocks(2 * kResidentBlocksPerSm));
  if (has_vector_tables) launcher(right_partials_kernel<true>, grid, kRowThreads, args, buffers);
  if (has_scalar_tables) launcher(right_partials_kernel<false>, grid, kRowThreads, args, buffers);
  launcher(right_sums_kernel,
           blocks_for(max_rights, kRowWarps, launcher.max_grid_blocks(kResidentBlocksPerSm)),
           kRowThreads, args, buffers);
}

}  // namespace emb::cuda
