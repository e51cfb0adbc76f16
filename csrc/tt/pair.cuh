// Pairs of cores on the GPU: the values of the distinct halves that are pairs (launch_expand), and
// the gradients of both cores from the gradients of these values (launch_contract). Shapes and
// names are those of TtHalf in tt/args.h.
//
// Halves are sorted by id, and so by inner row. A block processes one inner row and a tile of
// columns: it finds the halves that share the row, and computes one tiled product for all of them
// on tensor cores. Operands are in shared memory, into which the next tiles are copied during the
// product. One block sums a tile of the gradient of an inner row, so it needs no atomics and no
// partial sums. The gradient of an outer row is written per half, and summed by sum_outer_kernel.
#pragma once

#include "core/codes.h"
#include "core/mma.cuh"
#include "core/row_slice.cuh"
#include "core/search.cuh"
#include "core/simt.cuh"
#include "tt/args.h"

namespace emb::cuda {

// A *line* is one outer column of one half: a row of the products, with inner_rank floats in the
// outer core and width() = q_inner * rank floats in a value. In the products, m and n are the row
// and the column of the result, and k is the index over which they sum.

// The distinct left halves, or the distinct right halves, of a table: numbers [range[0], range[1])
// among the halves of all tables. All pointers are to device memory.
struct TtHalves {
  TtHalf half;
  const float* outer;    // [num_outer_rows][q_outer, inner_rank]
  const float* inner;    // [num_inner_rows][inner_rank, q_inner, rank]
  const int32_t* ids;    // ids of the distinct halves of all tables, ascending
  const int32_t* range;  // [2], in device memory, so not known to the host
  int64_t first_id;      // first id of the table
  int64_t value_stride;  // floats between the values of halves
  bool is_mirrored;      // right halves: columns of a value are (inner, outer)

  // Return the number of floats of a line in a value.
  EMB_DEVICE int width() const { return half.q_inner * half.rank; }
  // Return the offset of the line (half u, outer column) in the values of halves, in floats.
  EMB_DEVICE int64_t line_offset(int64_t u, int outer_column) const {
    return u * value_stride + int64_t{1} * outer_column * (is_mirrored ? half.rank : width());
  }
  // Return the offset of element n of a line from element 0, in floats.
  EMB_DEVICE int64_t element_offset(int n) const {
    if (!is_mirrored) return n;
    return n + int64_t{1} * (n / half.rank) * half.rank * (half.q_outer - 1);
  }
  // Return whether four neighbours, from a multiple of four on, can be copied at once, in the cores
  // and in `values`, the values of halves or their gradients.
  EMB_DEVICE bool has_vectors(const float* values) const {
    return half.inner_rank % 4 == 0 && half.rank % 4 == 0 && value_stride % 4 == 0 &&
           is_aligned(outer, 16) && is_aligned(inner, 16) && is_aligned(values, 16);
  }
  // Write element n of a line that begins at `line`, and element n + 1 if it exists. n must be
  // even.
  EMB_DEVICE void store_two_of_line(float* line, int n, bool uses_vectors, float first,
                                    float second) const;
  // Return the table's first half whose id within the table is at least `id`, numbered over all
  // tables; range[1] if there is none. All lanes of a warp call this with the same id.
  EMB_DEVICE int warp_lower_bound(int64_t id) const {
    const int first = range[0];
    const auto id_of = [&](int u) { return int64_t{ids[first + u]} - first_id; };
    return first + 1 + warp_search(id_of, range[1] - first, id - 1);
  }
  // Return the same half; each thread may call this with another id. It takes more steps.
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

// An int holds the number of elements of a core row or of a value, and of the lines of an inner row
// (tt_shape in tt/check.h checks this).

// A pair of cores of a batch, with its values and gradients, in device memory.
struct TtPair {
  TtHalves halves;
  int64_t first_inner_row, first_outer_row;  // its first rows, numbered over all pairs
  // [halves of all tables][value_stride], written by expand_kernel. Null for left halves whose
  // values an earlier pass has written: expand_kernel then does not get this pair.
  float* values;
  const float* value_grads;  // gradients of the values, of their shape; null in a forward pass
  // Scratch of a backward pass, for all tables: the gradient of an outer row, per half. For this
  // table these are [halves][outer_size] from outer_grads_of_table() on.
  float* outer_grads_by_half;
  int64_t outer_stride;              // maximum of outer_size over all tables
  float *outer_grads, *inner_grads;  // outputs: gradients of all rows of the cores of this pair

  EMB_DEVICE float* outer_grads_of_table() const {
    return outer_grads_by_half + halves.range[0] * outer_stride;
  }
};

// The pairs of a launch: the pairs of all tables, or only the right pairs. Inner and outer rows are
// numbered pair after pair. A block reads the arguments of its pair from device memory. Totals and
// maxima are over the pairs of the launch.
struct TtPairs {
  const TtPair* pairs = nullptr;  // [num_pairs], in device memory
  int num_pairs = 0;
  int64_t first_inner_row = 0;                     // number of the first inner row
  int64_t num_inner_rows = 0, num_outer_rows = 0;  // totals
  int64_t inner_rows_per_pair = 0;                 // 0 if pairs differ
  int max_width = 0, max_inner_rank = 0;

  // Return the pair of inner row `row`, numbered over all pairs. All lanes of a warp call this.
  EMB_DEVICE int pair_of_inner(int64_t row) const {
    if (inner_rows_per_pair > 0)
      return static_cast<int>((row - first_inner_row) / inner_rows_per_pair);
    return warp_search([&](int i) { return pairs[i].first_inner_row; }, num_pairs, row);
  }
  // Copy the pair of the block's inner row, row blockIdx.x of the launch, to `copy` in shared
  // memory, where it takes no registers. Return the number of that row within the pair. All threads
  // of the block call this.
  EMB_DEVICE int start_block(TtPair* copy) const {
    const int64_t row = first_inner_row + blockIdx.x;
    const auto* from = reinterpret_cast<const uint64_t*>(pairs + pair_of_inner(row));
    auto* to = reinterpret_cast<uint64_t*>(copy);
    for (unsigned i = threadIdx.x; i < sizeof(TtPair) / sizeof(uint64_t); i += blockDim.x) {
      to[i] = from[i];
    }
    __syncthreads();
    return static_cast<int>(row - copy->first_inner_row);
  }
  // Return the pair of outer row `row`, numbered over all pairs. The launch must have all pairs of
  // the batch. All lanes of a warp call this.
  EMB_DEVICE int pair_of_outer(int64_t row) const {
    return warp_search([&](int i) { return pairs[i].first_outer_row; }, num_pairs, row);
  }
};

inline constexpr int kPairThreads = 128;        // four warps, each of which computes 1/4 of a tile
inline constexpr int kPairBlocksPerSm = 5;      // blocks per multiprocessor; 5 leave 96 registers
inline constexpr int kTileK = 32;               // size, along k, of the tiles in shared memory
inline constexpr int kWarpM = 32, kWarpN = 16;  // rows and columns of a tile that a warp computes
// Rows and columns of the tile of a block, in expand_kernel and inner_grads_kernel, and in
// outer_grads_kernel.
inline constexpr int kTileM = 32, kTileN = 64;
inline constexpr int kOuterTileM = 64, kOuterTileN = 32;
// Tiles of an operand in shared memory: one in use, one that is being copied. An inner row of
// kStages chunks of kTileK or fewer stays there for all tiles.
inline constexpr int kStages = 2;

// A tile of one operand in shared memory: kCount indices of m or n by kTileK of k. A tile consists
// of *runs* of elements that are neighbours, here as in global memory: along k (kAlongK), or else
// along m or n. Runs are padded, so that the loads of a fragment touch all 32 banks.
template <int kCount, bool kAlongK>
struct OperandTile {
  static constexpr int kRuns = kAlongK ? kCount : kTileK;
  static constexpr int kRunLength = kAlongK ? kTileK : kCount;
  static constexpr int kStride = kRunLength + (kAlongK ? 4 : 8);
  alignas(16) float value[kRuns * kStride];

  // Return the element of index i, of m or n, and index k.
  EMB_DEVICE float at(int i, int k) const {
    return value[kAlongK ? i * kStride + k : k * kStride + i];
  }

  // Start to copy from global memory: element e of run i is data[run_offset(i) + offset(e)], or
  // zero if run_offset(i) or offset(e) is negative. If `uses_vectors`, four neighbours are copied
  // at once, and offset is called for multiples of four only. All threads of the block call this,
  // then simt::commit_copies; before at(), they wait for the copies and pass a barrier.
  template <class RunOffset, class Offset>
  EMB_DEVICE void start_copies(const float* data, bool uses_vectors, const RunOffset& run_offset,
                               const Offset& offset) {
    if (uses_vectors) {
      start_copies_of<4>(data, run_offset, offset);
    } else {
      start_copies_of<1>(data, run_offset, offset);
    }
  }

 private:
  // Start the copies of packs of kPack elements. A thread copies the same pack of several runs.
  template <int kPack, class RunOffset, class Offset>
  EMB_DEVICE void start_copies_of(const float* data, const RunOffset& run_offset,
                                  const Offset& offset) {
    constexpr int kPacksPerRun = kRunLength / kPack;
    [[maybe_unused]] constexpr int kUnroll = kPack == 4 ? 4 : 1;
    static_assert(kPairThreads % kPacksPerRun == 0);
    const int thread = static_cast<int>(threadIdx.x), element = thread % kPacksPerRun * kPack;
    const int64_t pack_offset = offset(element);
    float* to = value + thread / kPacksPerRun * kStride + element;
#pragma unroll kUnroll
    for (int i = thread / kPacksPerRun; i < kRuns; i += kPairThreads / kPacksPerRun) {
      const int64_t run_begin = run_offset(i);
      const bool exists = run_begin >= 0 && pack_offset >= 0;
      simt::copy_async<kPack * 4>(to, data + (exists ? run_begin + pack_offset : 0), exists);
      to += kPairThreads / kPacksPerRun * kStride;
    }
  }
};

// The offsets, in floats, of kLines lines of an inner row's halves, in shared memory; -1 after the
// last line. Tile t uses list t % 3, because up to three tiles are in work: one whose list is
// written, one whose copies start, and one whose results are written.
template <int kLines>
struct LineOffsets {
  int64_t outer[3][kLines];  // in the outer core
  int64_t value[3][kLines];  // in the values of halves
};

// The shared memory of a block: kStages tiles of both operands, and the offsets of lines.
template <class A, class B, int kLines>
struct PairMemory {
  A a[kStages];
  B b[kStages];
  LineOffsets<kLines> line_offsets;
  int range[2];  // for InnerGroup
};

// The position of a lane in the tile of kN columns that its block computes.
template <int kN>
struct PairLane {
  int row, column;  // this lane's row and column of a fragment, see core/mma.cuh
  int m, n;         // first row and column of its warp within the tile

  EMB_DEVICE PairLane() {
    const int lane = lane_in_warp();
    const int warp = static_cast<int>(threadIdx.x / simt::kWarpLanes);
    row = lane / 4;
    column = lane % 4;
    m = warp / (kN / kWarpN) * kWarpM;
    n = warp % (kN / kWarpN) * kWarpN;
  }
};

// A lane's share of the sums of a warp: two by two fragments of 16 x 8.
struct PairSums {
  float sum[2][2][4] = {};

  // Add the product of two tiles, of which the first `depth` indices of k are used, rounded up
  // to 8. (The tiles have zeros where there is no element.)
  template <class Products, class A, class B, class Lane>
  EMB_DEVICE void multiply_add(const A& a, const B& b, const Lane& lane, int depth) {
#pragma unroll 2
    for (int k = 0; k < depth; k += 8) {
      const auto load_a = [&](int i) {
        const int m = lane.m + i * 16 + lane.row, first = k + lane.column;
        const float x[4] = {a.at(m, first), a.at(m + 8, first), a.at(m, first + 4),
                            a.at(m + 8, first + 4)};
        return typename Products::A(x);
      };
      const auto load_b = [&](int j) {
        const int n = lane.n + j * 8 + lane.row, first = k + lane.column;
        const float x[2] = {b.at(n, first), b.at(n, first + 4)};
        return typename Products::B(x);
      };
      const typename Products::A left[2] = {load_a(0), load_a(1)};
      const typename Products::B right[2] = {load_b(0), load_b(1)};
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) Products::multiply_add(sum[i][j], left[i], right[j]);
      }
    }
  }

  // Call store(m, n, first, second) for each two neighbouring sums of this lane, elements (m, n)
  // and (m, n + 1) of the tile; n is even.
  template <class Lane, class Store>
  EMB_DEVICE void for_neighbours(const Lane& lane, const Store& store) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          store(lane.m + i * 16 + half * 8 + lane.row, lane.n + j * 8 + lane.column * 2,
                sum[i][j][half * 2], sum[i][j][half * 2 + 1]);
        }
      }
    }
  }
};

// Write the first num_existing of two neighbours; it may be negative, or more than 2. If
// `uses_vectors`, `address` must be a multiple of 8 bytes.
EMB_DEVICE void store_two(float* address, int num_existing, bool uses_vectors, float first,
                          float second) {
  if (uses_vectors && num_existing >= 2) {
    struct alignas(8) TwoFloats {
      float x, y;
    };
    *reinterpret_cast<TwoFloats*>(address) = {first, second};
    return;
  }
  if (num_existing >= 1) address[0] = first;
  if (num_existing >= 2) address[1] = second;
}

EMB_DEVICE void TtHalves::store_two_of_line(float* line, int n, bool uses_vectors, float first,
                                            float second) const {
  if (uses_vectors) return store_two(line + element_offset(n), width() - n, true, first, second);
  line[element_offset(n)] = first;
  if (n + 1 < width()) line[element_offset(n + 1)] = second;
}

// A step of a product: one chunk, of kTileK indices of k, of one tile of the result.
struct TileStep {
  int tile = 0, chunk = 0;

  // Return the next step, if tiles have num_chunks chunks.
  EMB_DEVICE TileStep next(int num_chunks) const {
    return chunk + 1 < num_chunks ? TileStep{tile, chunk + 1} : TileStep{tile + 1, 0};
  }
};

// Run the steps of num_tiles tiles of num_chunks chunks, in order. For each step, prepare(step)
// writes its line offsets; then, after a barrier, start(step, stage) starts its copies to shared
// memory; then, after the copies have arrived and another barrier, compute(step, stage) uses them,
// while the copies of the next step are in flight. All threads of the block call this.
template <class Prepare, class Start, class Compute>
EMB_DEVICE void run_steps(int num_tiles, int num_chunks, const Prepare& prepare, const Start& start,
                          const Compute& compute) {
  if (num_tiles == 0) return;
  TileStep step, next;
  prepare(step);
  __syncthreads();
  start(step, 0);
  simt::commit_copies();
  for (int stage = 0; step.tile < num_tiles; step = next, stage ^= 1) {
    next = step.next(num_chunks);
    const bool is_last = next.tile == num_tiles;
    if (!is_last) prepare(next);
    simt::wait_for_copies<0>();
    __syncthreads();
    if (!is_last) {
      start(next, stage ^ 1);
      simt::commit_copies();
    }
    compute(step, stage);
  }
}

// The halves that have an inner row.
struct InnerGroup {
  int inner_row;
  int first_half;
  int num_lines;  // q_outer for each half

  // Find the halves of inner row `inner` of the pair. All threads of the block call this; `range`
  // is shared memory. Contains a barrier.
  EMB_DEVICE InnerGroup(const TtHalves& halves, int inner, int (&range)[2]) : inner_row(inner) {
    const int warp = static_cast<int>(threadIdx.x / simt::kWarpLanes);
    if (warp < 2) {
      const int half =
          halves.warp_lower_bound((int64_t{inner_row} + warp) * halves.half.num_outer_rows);
      if (threadIdx.x % simt::kWarpLanes == 0) range[warp] = half;
    }
    __syncthreads();
    first_half = range[0];
    num_lines = (range[1] - first_half) * halves.half.q_outer;
  }

  // Write the offsets of the kLines lines from `first` on to list `list` of `offsets`. All threads
  // of the block call this.
  template <int kLines>
  EMB_DEVICE void write_offsets(const TtHalves& halves, int first, int list,
                                LineOffsets<kLines>* offsets) const {
    static_assert(kLines <= kPairThreads);
    const int i = static_cast<int>(threadIdx.x), line = first + i;
    if (i >= kLines) return;
    offsets->outer[list][i] = offsets->value[list][i] = -1;
    if (line >= num_lines) return;
    const int u = first_half + line / halves.half.q_outer, column = line % halves.half.q_outer;
    const int64_t row = halves.ids[u] - halves.first_id - inner_row * halves.half.num_outer_rows;
    offsets->outer[list][i] = row * halves.half.outer_size() + column * halves.half.inner_rank;
    offsets->value[list][i] = halves.line_offset(u, column);
  }
};

// Return the number of tiles of `tile_size` elements that cover n elements.
EMB_HD int num_tiles_of(int n, int tile_size) { return n / tile_size + (n % tile_size != 0); }

// Compute values[line, n] = sum over k of outer[line, k] * inner[k, n]. Block x processes inner row
// x of the launch, block y kTileN columns n.
template <class Products>
__global__ void __launch_bounds__(kPairThreads, kPairBlocksPerSm) expand_kernel(TtPairs pairs) {
  constexpr int kM = kTileM, kN = kTileN;
  __shared__ PairMemory<OperandTile<kM, true>, OperandTile<kN, false>, kM> memory;
  const PairLane<kN> lane;
  __shared__ TtPair pair;
  const int inner = pairs.start_block(&pair);
  const TtHalves& halves = pair.halves;
  const int depth = halves.half.inner_rank, width = halves.width();
  const int first_n = static_cast<int>(blockIdx.y) * kN;
  if (first_n >= width) return;  // tables differ in width
  float* const values = pair.values;
  const InnerGroup group(halves, inner, memory.range);
  const int num_chunks = num_tiles_of(depth, kTileK);
  const bool uses_vectors = halves.has_vectors(values);
  const float* row = halves.inner + group.inner_row * halves.half.inner_size();
  PairSums sums;
  run_steps(
      num_tiles_of(group.num_lines, kM), num_chunks,
      [&](TileStep step) {
        if (step.chunk > 0) return;
        group.write_offsets(halves, step.tile * kM, step.tile % 3, &memory.line_offsets);
      },
      [&](TileStep step, int stage) {
        const int k0 = step.chunk * kTileK;
        const int64_t* lines = memory.line_offsets.outer[step.tile % 3];
        memory.a[stage].start_copies(
            halves.outer, uses_vectors, [&](int m) { return lines[m]; },
            [&](int k) { return k0 + k < depth ? k0 + k : -1; });
        // If the inner row has kStages chunks or fewer, they stay in shared memory for all tiles.
        if (num_chunks <= kStages && step.tile * num_chunks + step.chunk >= kStages) return;
        memory.b[stage].start_copies(
            row, uses_vectors, [&](int k) { return k0 + k < depth ? (k0 + k) * width : -1; },
            [&](int n) { return first_n + n < width ? first_n + n : -1; });
      },
      [&](TileStep step, int stage) {
        const int remaining = depth - step.chunk * kTileK;
        sums.multiply_add<Products>(memory.a[stage], memory.b[stage], lane,
                                    remaining < kTileK ? remaining : kTileK);
        if (step.chunk + 1 < num_chunks) return;
        const int64_t* lines = memory.line_offsets.value[step.tile % 3];
        sums.for_neighbours(lane, [&](int m, int n, float first, float second) {
          if (lines[m] < 0 || first_n + n >= width) return;
          halves.store_two_of_line(values + lines[m], first_n + n, uses_vectors, first, second);
        });
        sums = {};
      });
}

// Compute inner_grads[inner][m, n] = sum over lines of outer[line, m] * value_grads[line, n], zeros
// if no half uses the row. Block x processes inner row x of the launch, block y kTileN columns n,
// block z kTileM rows m.
template <class Products>
__global__ void __launch_bounds__(kPairThreads, kPairBlocksPerSm)
    inner_grads_kernel(TtPairs pairs) {
  constexpr int kM = kTileM, kN = kTileN;
  __shared__ PairMemory<OperandTile<kM, false>, OperandTile<kN, false>, kTileK> memory;
  const PairLane<kN> lane;
  __shared__ TtPair pair;
  const int inner = pairs.start_block(&pair);
  const TtHalves& halves = pair.halves;
  const int height = halves.half.inner_rank, width = halves.width();
  const int first_n = static_cast<int>(blockIdx.y) * kN,
            first_m = static_cast<int>(blockIdx.z) * kM;
  if (first_n >= width || first_m >= height) return;
  const float* const value_grads = pair.value_grads;
  float* const grads = pair.inner_grads;
  const InnerGroup group(halves, inner, memory.range);
  const bool uses_vectors = halves.has_vectors(value_grads);
  PairSums sums;
  // k is the line: kTileK lines are a step, which run_steps calls a tile of one chunk.
  run_steps(
      num_tiles_of(group.num_lines, kTileK), 1,
      [&](TileStep step) {
        group.write_offsets(halves, step.tile * kTileK, step.tile % 3, &memory.line_offsets);
      },
      [&](TileStep step, int stage) {
        const int list = step.tile % 3;
        const int64_t *outer = memory.line_offsets.outer[list],
                      *value = memory.line_offsets.value[list];
        memory.a[stage].start_copies(
            halves.outer, uses_vectors, [&](int k) { return outer[k]; },
            [&](int m) { return first_m + m < height ? first_m + m : -1; });
        memory.b[stage].start_copies(
            value_grads, uses_vectors, [&](int k) { return value[k]; },
            [&](int n) -> int64_t {
              return first_n + n < width ? halves.element_offset(first_n + n) : -1;
            });
      },
      [&](TileStep step, int stage) {
        const int remaining = group.num_lines - step.tile * kTileK;
        sums.multiply_add<Products>(memory.a[stage], memory.b[stage], lane,
                                    remaining < kTileK ? remaining : kTileK);
      });
  float* row = grads + group.inner_row * halves.half.inner_size();
  const bool stores_two = uses_vectors && is_aligned(grads, 8);
  sums.for_neighbours(lane, [&](int m, int n, float first, float second) {
    if (first_m + m >= height) return;
    store_two(row + (first_m + m) * width + first_n + n, width - first_n - n, stores_two, first,
              second);
  });
}

// Compute outer_grads_by_half[u - range[0]][jo, m] = sum over n of value_grads[line, n] * inner[m,
// n], for each line (half u, outer column jo). Block x processes inner row x of the launch, block y
// kOuterTileN columns m.
template <class Products>
__global__ void __launch_bounds__(kPairThreads, kPairBlocksPerSm)
    outer_grads_kernel(TtPairs pairs) {
  constexpr int kM = kOuterTileM, kN = kOuterTileN;
  __shared__ PairMemory<OperandTile<kM, true>, OperandTile<kN, true>, kM> memory;
  const PairLane<kN> lane;
  __shared__ TtPair pair;
  const int inner = pairs.start_block(&pair);
  const TtHalves& halves = pair.halves;
  const int height = halves.half.inner_rank, width = halves.width();
  const int first_n = static_cast<int>(blockIdx.y) * kN;
  if (first_n >= height) return;
  const float* const value_grads = pair.value_grads;
  // The barrier of `group` publishes this.
  if (threadIdx.x == 0) pair.outer_grads_by_half = pair.outer_grads_of_table();
  const InnerGroup group(halves, inner, memory.range);
  const int num_chunks = num_tiles_of(width, kTileK);
  const bool uses_vectors = halves.has_vectors(value_grads);
  const float* row = halves.inner + group.inner_row * halves.half.inner_size();
  const int64_t first_line = int64_t{group.first_half - halves.range[0]} * halves.half.q_outer;
  const bool stores_two = uses_vectors && is_aligned(pair.outer_grads_by_half, 8);
  PairSums sums;
  run_steps(
      num_tiles_of(group.num_lines, kM), num_chunks,
      [&](TileStep step) {
        if (step.chunk > 0) return;
        group.write_offsets(halves, step.tile * kM, step.tile % 3, &memory.line_offsets);
      },
      [&](TileStep step, int stage) {
        const int k0 = step.chunk * kTileK;
        const int64_t* lines = memory.line_offsets.value[step.tile % 3];
        memory.a[stage].start_copies(
            value_grads, uses_vectors, [&](int m) { return lines[m]; },
            [&](int k) -> int64_t { return k0 + k < width ? halves.element_offset(k0 + k) : -1; });
        // The chunks of the inner row stay in shared memory, as in expand_kernel.
        if (num_chunks <= kStages && step.tile * num_chunks + step.chunk >= kStages) return;
        memory.b[stage].start_copies(
            row, uses_vectors,
            [&](int n) { return first_n + n < height ? (first_n + n) * width : -1; },
            [&](int k) { return k0 + k < width ? k0 + k : -1; });
      },
      [&](TileStep step, int stage) {
        const int remaining = width - step.chunk * kTileK;
        sums.multiply_add<Products>(memory.a[stage], memory.b[stage], lane,
                                    remaining < kTileK ? remaining : kTileK);
        if (step.chunk + 1 < num_chunks) return;
        sums.for_neighbours(lane, [&](int m, int n, float first, float second) {
          const int line = step.tile * kM + m;
          if (line >= group.num_lines) return;
          float* const out = pair.outer_grads_by_half + (first_line + line) * height;
          store_two(out + first_n + n, height - first_n - n, stores_two, first, second);
        });
        sums = {};
      });
}

// Write the gradients of outer rows: sums, in the order of the halves, of outer_grads_by_half over
// the halves that use the row. A block processes an outer row, grid-stride, and searches its halves
// kPairThreads inner rows at a time.
[[maybe_unused]] static __global__ void __launch_bounds__(kPairThreads, kPairBlocksPerSm)
    sum_outer_kernel(TtPairs pairs) {
  // The half with inner row first_inner_row + i, counted from the table's first half; -1 for none.
  __shared__ int half_of_inner[kPairThreads];
  for (int64_t global_row = blockIdx.x; global_row < pairs.num_outer_rows;
       global_row += gridDim.x) {
    const TtPair& pair = pairs.pairs[pairs.pair_of_outer(global_row)];
    const TtHalves halves = pair.halves;
    const float* const outer_grads_by_half = pair.outer_grads_of_table();
    float* const grads = pair.outer_grads;
    const int64_t size = halves.half.outer_size(), rows = halves.half.num_outer_rows;
    const int64_t row = global_row - pair.first_outer_row;
    const int first_half = halves.range[0], halves_end = halves.range[1];
    for (int64_t first_inner_row = 0; first_inner_row < halves.half.num_inner_rows;
         first_inner_row += kPairThreads) {
      const int64_t inner = first_inner_row + threadIdx.x, id = inner * rows + row;
      const int u = inner < halves.half.num_inner_rows ? halves.lower_bound(id) : halves_end;
      __syncthreads();
      const bool exists = u < halves_end && halves.ids[u] - halves.first_id == id;
      half_of_inner[threadIdx.x] = exists ? u - first_half : -1;
      __syncthreads();
      for (int64_t d = threadIdx.x; d < size; d += kPairThreads) {
        float sum = first_inner_row > 0 ? grads[row * size + d] : 0.0f;
        for (int i = 0; i < kPairThreads; ++i) {
          if (half_of_inner[i] >= 0) sum += outer_grads_by_half[half_of_inner[i] * size + d];
        }
        grads[row * size + d] = sum;
      }
    }
  }
}

// A core stored in 16 bits, of which all rows, or the rows that halves of the batch use, are copied
// as floats.
struct WidenedCore {
  TtHalves halves;    // the halves that use the core
  const void* from;   // [rows][width], the core
  float* to;          // [rows][width]; rows that are not copied are not written
  int64_t first_row;  // number of its first row, over all cores of the launch
  int64_t width;
  // 0: copy all rows. Else row r is used by the halves with ids [r, r + 1) * ids_per_row.
  int64_t ids_per_row;
};

// Copy the rows of num_cores cores of dtype `type`, num_rows in all. A block processes a row,
// grid-stride.
[[maybe_unused]] static __global__ void __launch_bounds__(kPairThreads)
    widen_cores_kernel(const WidenedCore* cores, int num_cores, int64_t num_rows, Dtype type) {
  __shared__ int range[2];
  for (int64_t global_row = blockIdx.x; global_row < num_rows; global_row += gridDim.x) {
    const WidenedCore& core =
        cores[warp_search([&](int i) { return cores[i].first_row; }, num_cores, global_row)];
    const int64_t row = global_row - core.first_row;
    const int warp = static_cast<int>(threadIdx.x / simt::kWarpLanes);
    __syncthreads();
    if (warp < 2) {
      const int half = core.ids_per_row > 0
                           ? core.halves.warp_lower_bound((row + warp) * core.ids_per_row)
                           : warp;
      if (threadIdx.x % simt::kWarpLanes == 0) range[warp] = half;
    }
    __syncthreads();
    if (range[0] == range[1]) continue;  // no half uses the row
    for (int64_t d = threadIdx.x; d < core.width; d += kPairThreads) {
      const int64_t i = row * core.width + d;
      core.to[i] = type == Dtype::kHalf ? to_float(static_cast<const half16*>(core.from)[i])
                                        : to_float(static_cast<const bfloat16*>(core.from)[i]);
    }
  }
}

// Write the values of the halves of `pairs`, which may be none. In both launches `launcher` is a
// CudaLauncher or, in tests, a simt::HostLauncher, and nothing waits for the device.
template <class Launcher>
void launch_expand(const Launcher& launcher, MatmulPrecision precision, const TtPairs& pairs) {
  if (pairs.num_pairs == 0) return;
  const simt::Dim3 grid(static_cast<unsigned>(pairs.num_inner_rows),
                        num_tiles_of(pairs.max_width, kTileN));
  with_product_type(precision, [&](auto products) {
    launcher(expand_kernel<decltype(products)>, grid, kPairThreads, pairs);
  });
}

// Write the gradients of both cores of `pairs` from the gradients of the values of halves. `pairs`
// must be all pairs of a batch; they may be none.
template <class Launcher>
void launch_contract(const Launcher& launcher, MatmulPrecision precision, const TtPairs& pairs) {
  if (pairs.num_pairs == 0) return;
  const auto inner_rows = static_cast<unsigned>(pairs.num_inner_rows);
  with_product_type(precision, [&](auto products) {
    using Products = decltype(products);
    launcher(inner_grads_kernel<Products>,
             simt::Dim3(inner_rows, num_tiles_of(pairs.max_width, kTileN),
                        num_tiles_of(pairs.max_inner_rank, kTileM)),
             kPairThreads, pairs);
    launcher(outer_grads_kernel<Products>,
             simt::Dim3(inner_rows, num_tiles_of(pairs.max_inner_rank, kOuterTileN)), kPairThreads,
             pairs);
  });
  launcher(sum_outer_kernel,
           blocks_for(pairs.num_outer_rows, 1, launcher.max_grid_blocks(2 * kResidentBlocksPerSm)),
           kPairThreads, pairs);
}

}  // namespace emb::cuda
