// Backward of table-batched embeddings on the GPU, fused with the optimizer.
//
// A warp updates a tile of up to 32 unique rows. In this file *group* means a group of 4 to 32
// lanes, and a *batch* is the few rows that a group updates at a time, whose weights, states and
// gradients are in registers together (row_batch.cuh). The steps of update_kernel for a tile:
//   (1) A lane *holds* at most one row of the tile: it reads the row's entry in the grouping and
//       its row-wise states into shared memory (TileRow), once per row instead of once per lane.
//   (2) The rows are updated in sets of one dim and memory tier (update_tile). In a set the rows
//       with one lookup come first: their gradient is read in place, unless it is not aligned like
//       the row.
//   (3) For other rows the group sums the gradients into shared memory before their batch starts
//       (sum_lookups); each lane sums the columns that it updates.
//   (4) The group updates the batch (update_batch). The lane that holds a row computes its factors
//       (begin_rows), so that the roots and divisions of a batch run in parallel.
// No kernel adds to weights or states with atomics. Without an optimizer (GradientOnly) the sums
// are stored as the result.
#pragma once

#include <algorithm>

#include "core/dtype.h"
#include "core/layout.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "optim/optimizer_step.cuh"
#include "optim/row_batch.cuh"
#include "tbe/row_gradients.cuh"

namespace emb::cuda {

inline constexpr int kUpdateThreads = 128;
inline constexpr int kUpdateWarps = kUpdateThreads / kWarpLanes;
inline constexpr int kLog2Columns = 2;
static_assert(1 << kLog2Columns == kColumns);

// Minimum numbers of blocks per multiprocessor, which bound the registers of a thread: 6 blocks
// leave 80, 5 leave 96, 4 leave 128. The compiler needs the most registers for Blackwell (1000).
// The host sizes grids by the numbers for Hopper, on any device.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
inline constexpr int kMaxBlocksPerSm = 4;
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kMaxBlocksPerSm = 5;
#else
inline constexpr int kMaxBlocksPerSm = 6;
#endif
// The shape of the update kernel of a selection of optimizers: kSlices, the number of slices (four
// columns of a row each) in the registers of a lane, and kBlocksPerSm.
struct DefaultUpdateShape {
  static constexpr int kSlices = 2, kBlocksPerSm = kMaxBlocksPerSm < 5 ? kMaxBlocksPerSm : 5;
};
template <class Selection>
struct UpdateShape : DefaultUpdateShape {};
template <>
struct UpdateShape<Compiled<Sgd>> : DefaultUpdateShape {
  static constexpr int kSlices = 4;
};
template <>
struct UpdateShape<Compiled<RowwiseAdagrad>> : DefaultUpdateShape {
  static constexpr int kSlices = 4;
};
template <>
struct UpdateShape<GradientOnly> : DefaultUpdateShape {
  static constexpr int kSlices = 4;
};
template <>
struct UpdateShape<Compiled<Narrow<Sgd>>> {
  static constexpr int kSlices = 2, kBlocksPerSm = kMaxBlocksPerSm;
};
// All optimizers in one kernel: twice the slices would take twice the code.
template <>
struct UpdateShape<AtRunTime> : DefaultUpdateShape {
  static constexpr int kSlices = 1;
};

// The maximum number of blocks of a grid, as a multiple of the blocks that run at once.
inline constexpr int kUpdateWaves = 8;
// The number of tiles, at least, for each warp that runs at once, if there are enough rows. With
// fewer tiles, the warps whose rows have the most lookups would end long after the others.
inline constexpr int kMinTilesPerWarp = 3;
// Lookups of a row that a lane locates at once. More than one would spill registers on Ampere.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kLookupsPerLane = 1;
#else
inline constexpr int kLookupsPerLane = 3;
#endif

// The shape of the tiles.
struct TileShape {
  int log2_lanes;      // 2^log2_lanes lanes form a group: enough for a row of mean width
  int log2_rows;       // a group holds 2^log2_rows rows: as many as lanes if there are many rows,
                       // else fewer, so that all warps are busy
  uint32_t num_warps;  // warps that run at once

  // Return the number of rows in a tile.
  EMB_HD uint32_t num_rows() const { return (simt::kWarpLanes >> log2_lanes) << log2_rows; }
  // Return the shape for `num_unique` unique rows, a number that the host does not know. Its tiles
  // have at most as many rows as those of this shape.
  EMB_DEVICE TileShape for_rows(uint32_t num_unique) const {
    TileShape shape = *this;
    while (shape.log2_rows > 0 && num_unique < kMinTilesPerWarp * num_warps * shape.num_rows())
      --shape.log2_rows;
    return shape;
  }
  // Return the number, in the tile, of the row that this lane holds; kWarpLanes, which is not below
  // num_rows(), if it holds none.
  EMB_DEVICE uint32_t row_of_lane() const {
    const unsigned lane = threadIdx.x % simt::kWarpLanes, rank = lane & ((1u << log2_lanes) - 1);
    return (rank >> log2_rows) == 0 ? ((lane >> log2_lanes) << log2_rows) + rank : simt::kWarpLanes;
  }
};

// Return whether gradients that begin at an element divisible by kColumns can be read in vectors.
EMB_DEVICE bool reads_vectors(const DeviceGradArgs& args) {
  return is_aligned(args.grad, kColumns * static_cast<int>(element_bytes(args.grad_type)));
}

// A row of a tile, in shared memory: a batch needs it for a few instructions only, and it would
// occupy registers all the time. Offsets are in *units*: four elements if the row is read in
// vectors, else one element.
struct TileRow {
  uint32_t row_offset_low;   // low word of the offset of the row in its tier
  uint32_t grad_offset_low;  // low word of the offset of its gradient, if it has one lookup
  // The high words of both offsets, 16 bits each: the row's in the lower half, then the gradient's.
  uint32_t offsets_high;
  float scale;        // factor of its gradient, if it has one lookup
  int begin, length;  // its sorted lookups [begin, begin + length); length 0: nothing to update
  // Whether its gradient is summed into shared memory first: it has several lookups, or its
  // gradient is not aligned like the row.
  bool is_summed;
  int64_t row_id;     // linear row id; 0 without an optimizer
  int64_t state_row;  // entry of the row in the row-wise states of its tier
  float states[kMaxRowStates];
  // Three fields in which the rows of one batch agree: kVectorBit is set if rows are read in
  // vectors, the tier begins with bit kTierShift, and dim with bit kDimShift. dim must be below
  // 2^29 (MAX_DIM in emblib/specs is less). `update_tile` unpacks them.
  uint32_t packed_layout;

  static constexpr int kVectorBit = 1, kTierShift = 1, kDimShift = 3;
  static_assert(kTiers <= 1 << (kDimShift - kTierShift));

  // Read unique row u of the grouping. Without an optimizer, the row to write is row u of the
  // result.
  template <class Selection>
  EMB_DEVICE void read(Selection, const DeviceGradArgs& args, const OptimizerStepArgs& optimizer,
                       const BlockStep& step, uint32_t u) {
    // Loads first: those on one line are independent of each other.
    const int segment_begin = args.segments[u], segment_end = args.segments[u + 1];
    const int64_t row = Selection::kHasOptimizer ? args.rows[u] : 0;
    const int slot = args.row_slots != nullptr ? args.row_slots[u] : -1;
    const uint32_t bag = bag_of(args, segment_begin);
    const Feature feature = args.features[args.map.feature(bag)];
    const int64_t grad_element =
        segment_end - segment_begin == 1 ? grad_offset(args, segment_begin, bag) : 0;
    RowLocation location{.tier = kDeviceTier,
                         .element = static_cast<int64_t>(u) * args.result_stride,
                         .state_row = 0};
    if constexpr (Selection::kHasOptimizer) {
      location = locate_update(feature, row - feature.row_base, slot, step.tiers[kCacheTier]);
#pragma unroll
      for (int s = 0; s < kMaxRowStates; ++s) {
        if (s < Selection::num_row_states(optimizer))
          states[s] = step.tiers[location.tier].row_states[s][location.state_row];
      }
    }
    // The row alone determines the columns of a lane, so that results are bitwise equal for aligned
    // and unaligned gradients.
    const bool uses_vectors =
        (feature.dim | location.element) % kColumns == 0 && step.is_aligned[location.tier];
    const int shift = uses_vectors ? kLog2Columns : 0;
    is_summed = segment_end - segment_begin > 1 ||
                (uses_vectors && !(grad_element % kColumns == 0 && reads_vectors(args)));
    const int64_t row_units = location.element >> shift, grad_units = grad_element >> shift;
    row_offset_low = static_cast<uint32_t>(row_units);
    grad_offset_low = static_cast<uint32_t>(grad_units);
    offsets_high =
        static_cast<uint32_t>(row_units >> 32) | (static_cast<uint32_t>(grad_units >> 32) << 16);
    scale = segment_end - segment_begin == 1 ? grad_scale(args, segment_begin, bag) : 1.0f;
    begin = segment_begin;
    length = segment_end - segment_begin;
    row_id = row;
    state_row = location.state_row;
    packed_layout = (static_cast<uint32_t>(feature.dim) << kDimShift) |
                    (static_cast<uint32_t>(location.tier) << kTierShift) |
                    (uses_vectors ? kVectorBit : 0);
  }
};

// The update of the rows of a tile that have one packed_layout. References are to the kernel's
// arguments or to shared memory, pointers to shared memory. All lanes of a warp must call members
// together if they use warp collectives: add_lookups, add_vectors, add_elements, sum_lookups,
// load_gradients, begin_rows, update_columns and update_batch.
template <class Selection>
struct TileUpdate {
  static constexpr int kSlices = UpdateShape<Selection>::kSlices;

  // The lane that holds the row of each slice of a batch, -1 if the slice has no row; a byte each.
  struct HoldersOfSlices {
    uint32_t bytes = 0;

    EMB_DEVICE int operator[](int s) const {
      return static_cast<int8_t>(static_cast<uint8_t>(bytes >> 8 * s));
    }
  };

  const DeviceGradArgs& args;
  const OptimizerStepArgs& optimizer;
  const BlockStep& step;
  const TierMemory& tier;  // the memory tier of all these rows
  const TileRow* rows;     // [32] rows of the tile, by the lane that holds them
  RowLayout layout;
  bool has_high_words;  // whether an offset of these rows has high words
  float (*row_gradient)[kUpdateThreads][kColumns];  // [kSlices], scratch
  // [kUpdateThreads], scratch; not used if the optimizer has no sums over a row.
  float (*row_sums)[kMaxRowSums];

  EMB_DEVICE static void copy_sums(const float (&from)[kMaxRowSums], float (&to)[kMaxRowSums]) {
#pragma unroll
    for (int k = 0; k < kMaxRowSums; ++k) to[k] = from[k];
  }

  // Assign the rows that the lowest lanes of `lane_mask` hold to the slices of a batch. `lane_mask`
  // has lanes of this group only.
  EMB_DEVICE HoldersOfSlices assign_slices(uint32_t lane_mask) const {
    HoldersOfSlices holders;
    int holder = -1;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      if (layout.is_first_slice(s)) {
        holder = __ffs(static_cast<int>(lane_mask)) - 1;
        lane_mask &= lane_mask - 1;
      }
      holders.bytes |= static_cast<uint32_t>(holder & 0xff) << 8 * s;
    }
    return holders;
  }

  // Return the row that lane `holder` holds, an arbitrary row for -1.
  EMB_DEVICE const TileRow& row_of(int holder) const { return rows[holder < 0 ? 0 : holder]; }

  // Return the number of columns from this lane's part of slice s to the end of the row that lane
  // `holder` holds; 0 or less if there are none. The slices of a row begin at column `base`.
  EMB_DEVICE int columns_left(int s, int holder, int base) const {
    return holder < 0 ? 0
                      : layout.dim - base - layout.slice_of_row(s) * layout.slice_columns() -
                            layout.lane_column();
  }

  // Return the element at `column` of a row. The row begins at an offset in units, whose low word
  // is `units`, and whose high word is the lower 16 bits of `high`.
  EMB_DEVICE int64_t first_element(uint32_t units, uint32_t high, int column) const {
    const uint64_t offset = has_high_words ? (uint64_t{high & 0xffffu} << 32) | units : units;
    return static_cast<int64_t>(offset << (layout.uses_vectors ? kLog2Columns : 0)) + column;
  }

  // Locate this lane's part of slice s, of the columns from `base` on: in the row, or in the
  // gradient of the row's only lookup.
  EMB_DEVICE SliceLocation locate_row(HoldersOfSlices holders, int s, int base) const {
    const TileRow& row = row_of(holders[s]);
    const int num_valid = columns_left(s, holders[s], base);
    return {first_element(row.row_offset_low, row.offsets_high, layout.dim - num_valid), num_valid};
  }
  EMB_DEVICE SliceLocation locate_gradient(HoldersOfSlices holders, int s, int base) const {
    const TileRow& row = row_of(holders[s]);
    const int num_valid = columns_left(s, holders[s], base);
    return {first_element(row.grad_offset_low, row.offsets_high >> 16, layout.dim - num_valid),
            num_valid};
  }

  // Add this lane's columns, from `column` on, of the gradients of sorted lookups [begin, begin +
  // length), times their factors, to `sum`. The lanes of a group pass the same row.
  EMB_DEVICE void add_lookups(int begin, int length, int column, float (&sum)[kColumns]) const {
    const int max_length = __reduce_max_sync(simt::kFullMask, length);
#pragma unroll 1
    for (int tile = 0; tile < max_length; tile += kLookupsPerLane * layout.lanes) {
      // The loads that lead to a gradient depend on each other, so a lane has the loads of several
      // lookups in flight.
      int64_t offsets[kLookupsPerLane];
      float scales[kLookupsPerLane];
      bool is_aligned = true;
#pragma unroll
      for (int q = 0; q < kLookupsPerLane; ++q) {
        const int j = tile + q * layout.lanes + layout.rank();
        offsets[q] = -1;
        scales[q] = 1.0f;
        if (j < length) {
          const uint32_t bag = bag_of(args, begin + j);
          offsets[q] = grad_offset(args, begin + j, bag);
          scales[q] = grad_scale(args, begin + j, bag);
          is_aligned &= offsets[q] % kColumns == 0;
        }
      }
      // A gradient that is not aligned is read by element, in the columns of the row.
      const bool uses_vectors =
          __all_sync(simt::kFullMask, is_aligned) && layout.uses_vectors && reads_vectors(args);
#pragma unroll 1
      for (int remaining = max_length - tile, q = 0; remaining > 0 && q < kLookupsPerLane;
           remaining -= layout.lanes, ++q) {
        const int num_steps = remaining < layout.lanes ? remaining : layout.lanes;
        if (!uses_vectors) {
          add_elements(offsets[0], scales[0], column, num_steps, sum);
        } else if (args.grad_type == Dtype::kFloat) {
          add_vectors<float>(offsets[0], scales[0], column, num_steps, sum);
        } else if (args.grad_type == Dtype::kHalf) {
          add_vectors<half16>(offsets[0], scales[0], column, num_steps, sum);
        } else {
          add_vectors<bfloat16>(offsets[0], scales[0], column, num_steps, sum);
        }
#pragma unroll
        for (int k = 1; k < kLookupsPerLane; ++k) {  // offsets[q] would put the arrays in memory
          offsets[k - 1] = offsets[k];
          scales[k - 1] = scales[k];
        }
      }
    }
  }

  // Each lane of a group passes the offset of a gradient, negative for none, and its factor
  // `scale`. Add the gradients of the first `num_steps` lanes, times their factors, to `sum`, in
  // the order of the lanes, four in flight. A lane without a gradient loads zeros, because the
  // compiler would wait for each conditional load.
  template <class G>
  EMB_DEVICE void add_vectors(int64_t offset, float scale, int column, int num_steps,
                              float (&sum)[kColumns]) const {
    const G* grad = static_cast<const G*>(args.grad);
    const G* zeros = reinterpret_cast<const G*>(&simt::kZeros);
#pragma unroll 1
    for (int i = 0; i < num_steps; i += kRowsInFlight) {
      RowSlice<G, kColumns> slice[kRowsInFlight];
#pragma unroll
      for (int q = 0; q < kRowsInFlight; ++q) {
        const int64_t start = __shfl_sync(simt::kFullMask, offset, i + q, layout.lanes);
        slice[q].load_vector(start >= 0 && column < layout.dim ? grad + start + column : zeros);
      }
#pragma unroll
      for (int q = 0; q < kRowsInFlight; ++q) {
        const float factor = __shfl_sync(simt::kFullMask, scale, i + q, layout.lanes);
#pragma unroll
        for (int k = 0; k < kColumns; ++k) sum[k] += factor * slice[q][k];
      }
    }
  }

  // Do what add_vectors does, element by element and one gradient at a time, for columns that are
  // not adjacent in a lane or not aligned.
  EMB_DEVICE void add_elements(int64_t offset, float scale, int column, int num_steps,
                               float (&sum)[kColumns]) const {
#pragma unroll 1
    for (int i = 0; i < num_steps; ++i) {
      const int64_t start = __shfl_sync(simt::kFullMask, offset, i, layout.lanes);
      const float factor = __shfl_sync(simt::kFullMask, scale, i, layout.lanes);
      Slices<1> values = {};
      load_slices<true, 1>(
          false, layout.column_distance(), args.grad, args.grad_type,
          [&](int) { return SliceLocation{start + column, start < 0 ? 0 : layout.dim - column}; },
          values);
      widen_slices<1>(args.grad_type, values);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) sum[k] += factor * values[0][k];
    }
  }

  // Add this lane's columns, from `column` on, of the chunk sums of a segment to `sum`, in order.
  EMB_DEVICE void add_chunk_sums(int begin, int length, int column, float (&sum)[kColumns]) const {
    const float* partial =
        args.chunk_sums + first_chunk_slot(begin) * args.chunk_sum_stride + column;
    const int num_sums = num_chunks(length);
#pragma unroll 4
    for (int c = 0; c < num_sums; ++c) {
      float values[kColumns] = {};
      const float* columns = partial + c * args.chunk_sum_stride;
      if (layout.uses_vectors) {
        load_adjacent_columns<float, true>(columns, layout.dim - column, values);
      } else {
        load_spaced_columns(layout.column_distance(), columns, layout.dim - column, values);
      }
#pragma unroll
      for (int k = 0; k < kColumns; ++k) sum[k] += values[k];
    }
  }

  // Sum the gradients of the rows of a batch, in the columns of one batch from `base` on, into
  // row_gradient.
  EMB_DEVICE void sum_lookups(HoldersOfSlices holders, int base) const {
#pragma unroll 1
    for (int s = 0; s < kSlices; ++s) {
      const int holder = holders[s];
      const TileRow& row = row_of(holder);
      float sum[kColumns] = {};
      const int column = layout.dim - columns_left(s, holder, base);
      const bool is_chunked = holder >= 0 && has_chunks(args, row.length, layout.dim);
      add_lookups(row.begin, holder < 0 || is_chunked ? 0 : row.length, column, sum);
      if (is_chunked) add_chunk_sums(row.begin, row.length, column, sum);
#pragma unroll
      for (int k = 0; k < kColumns; ++k) row_gradient[s][threadIdx.x][k] = sum[k];
    }
  }

  // Load the gradients of a batch: sums from row_gradient if `is_summed`, else the gradient of the
  // only lookup of each row.
  EMB_DEVICE void load_gradients(HoldersOfSlices holders, bool is_summed, int base,
                                 Slices<kSlices>& gradient) const {
    if (is_summed) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
#pragma unroll
        for (int k = 0; k < kColumns; ++k) gradient[s][k] = row_gradient[s][threadIdx.x][k];
      }
      return;
    }
    load_slices<true, kSlices>(
        layout.uses_vectors, layout.column_distance(), args.grad, args.grad_type,
        [&](int s) { return locate_gradient(holders, s, base); }, gradient);
  }

  // Turn the gradients of load_gradients into floats, and multiply them by their factors. Sums are
  // floats and have their factors already.
  EMB_DEVICE void convert_gradients(HoldersOfSlices holders, bool is_summed,
                                    Slices<kSlices>& gradient) const {
    if (is_summed) return;
    widen_slices<kSlices>(args.grad_type, gradient);
    if (args.pooling != Pooling::kMean && args.sample_weights == nullptr) return;
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      const float scale = row_of(holders[s]).scale;
#pragma unroll
      for (int k = 0; k < kColumns; ++k) gradient[s][k] *= scale;
    }
  }

  // Complete `sums`, of which each lane passes its part, over the lanes of the groups. If this lane
  // holds a row of the batch, update its row-wise states and return its factors, else return
  // factors that nothing uses.
  EMB_DEVICE RowFactors begin_rows(HoldersOfSlices holders, float (&sums)[kSlices][kMaxRowSums]) {
    const int this_lane = static_cast<int>(threadIdx.x % simt::kWarpLanes);
    float held_sums[kMaxRowSums] = {};  // the sums of the row that this lane holds
    bool holds_row = false;
    for (int offset = layout.lanes / 2; offset > 0; offset /= 2) {
#pragma unroll
      for (int s = 0; s < kSlices; ++s) {
#pragma unroll
        for (int k = 0; k < kMaxRowSums; ++k) {
          if (k < Selection::num_row_sums(optimizer))
            sums[s][k] += __shfl_xor_sync(simt::kFullMask, sums[s][k], offset);
        }
      }
    }
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
      if (!layout.is_last_slice(s) || holders[s] != this_lane) continue;
      holds_row = true;
#pragma unroll
      for (int k = 0; k < kMaxRowSums; ++k) held_sums[k] = sums[s][k];
    }
    const TileRow& row = rows[this_lane];
    float states[kMaxRowStates] = {};
#pragma unroll
    for (int s = 0; s < kMaxRowStates; ++s) {
      if (s < Selection::num_row_states(optimizer)) states[s] = row.states[s];
    }
    const RowFactors factors = begin_row<Selection>(optimizer, step, states, held_sums, layout.dim);
#pragma unroll
    for (int s = 0; s < kMaxRowStates; ++s) {
      if (s < Selection::num_row_states(optimizer) && holds_row)
        tier.row_states[s][row.state_row] = states[s];
    }
    return factors;
  }

  // Store the slices `values` in 16 bits with stochastic rounding, in `data` of dtype `type`.
  // Slices are stored one after the other, from shared memory, since random numbers take many
  // registers; the scratch is row_gradient, whose contents are lost. `tensor` selects the random
  // numbers (RoundedTensor).
  EMB_DEVICE void store_randomly(HoldersOfSlices holders, int base, uint32_t tensor, void* data,
                                 Dtype type, const Slices<kSlices>& values) const {
#pragma unroll
    for (int s = 0; s < kSlices; ++s) {
#pragma unroll
      for (int k = 0; k < kColumns; ++k) row_gradient[s][threadIdx.x][k] = values[s][k];
    }
#pragma unroll 1
    for (int s = 0; s < kSlices; ++s) {
      const TileRow& row = row_of(holders[s]);
      const int num_valid = columns_left(s, holders[s], base);
      const int64_t element =
          first_element(row.row_offset_low, row.offsets_high, layout.dim - num_valid);
      if (type == Dtype::kHalf) {
        store_slice_randomly(layout, step.rounding, tensor, row.row_id,
                             static_cast<half16*>(data) + element, num_valid,
                             row_gradient[s][threadIdx.x]);
      } else {
        store_slice_randomly(layout, step.rounding, tensor, row.row_id,
                             static_cast<bfloat16*>(data) + element, num_valid,
                             row_gradient[s][threadIdx.x]);
      }
    }
  }

  // What a pass over some columns of a batch does.
  struct Pass {
    bool adds_sums;         // add to the sums over each row
    bool computes_factors;  // complete these sums and compute the factors of each row
    bool updates_rows;      // update weights and states
    bool carries_sums;  // keep the sums in row_sums between the passes: a row has several of them
  };

  // Do `pass` for the columns of a batch from `base` on. `factors` are the factors of the row that
  // this lane holds: written if pass.computes_factors, else read. Without an optimizer, store the
  // gradients instead; `pass` and `factors` are then ignored.
  //
  // RowBatch::sum_rows writes the sums of a row to its last slice. A row that needs several passes
  // fills all slices, so its sums are carried in at slice 0 and out at the last slice.
  EMB_DEVICE void update_columns(HoldersOfSlices holders, bool is_summed, int base, Pass pass,
                                 RowFactors* factors) {
    const auto location_of = [&](int s) { return locate_row(holders, s, base); };
    Slices<kSlices> gradient = {};
    if constexpr (!Selection::kHasOptimizer) {
      load_gradients(holders, is_summed, base, gradient);
      convert_gradients(holders, is_summed, gradient);
      store_slices_as<float, kSlices>(layout, static_cast<float*>(tier.weights), location_of,
                                      gradient);
    } else {
      RowBatch<kSlices> batch;
      batch.load(Selection{}, optimizer, layout, tier, location_of);
      load_gradients(holders, is_summed, base, gradient);
      batch.convert(Selection{}, optimizer, tier);
      convert_gradients(holders, is_summed, gradient);
      if (step.decay.l2 != 0.0f) {  // 0 times an infinite weight would be NaN
#pragma unroll
        for (int s = 0; s < kSlices; ++s) {
#pragma unroll
          for (int k = 0; k < kColumns; ++k) gradient[s][k] += step.decay.l2 * batch.weights[s][k];
        }
      }
      if (pass.adds_sums || pass.computes_factors) {
        float sums[kSlices][kMaxRowSums] = {};
        if (pass.carries_sums && !pass.adds_sums)
          copy_sums(row_sums[threadIdx.x], sums[kSlices - 1]);
        if (pass.adds_sums) {
          if (pass.carries_sums) copy_sums(row_sums[threadIdx.x], sums[0]);
          batch.sum_rows(Selection{}, optimizer, step, layout, gradient, sums);
          if (pass.carries_sums) copy_sums(sums[kSlices - 1], row_sums[threadIdx.x]);
        }
        if (pass.computes_factors) *factors = begin_rows(holders, sums);
      }
      if (!pass.updates_rows) return;
      const RowFactors lane_factors = *factors;
      batch.apply(Selection{}, optimizer, step, gradient, [&](int s) {
        if (!Selection::has_row_factors(optimizer)) return lane_factors;
        const int holder = holders[s] < 0 ? 0 : holders[s];
        RowFactors factors_of_row{__shfl_sync(simt::kFullMask, lane_factors.gradient, holder),
                                  1.0f};
        if constexpr (Selection::kScalesWeights)
          factors_of_row.weight = __shfl_sync(simt::kFullMask, lane_factors.weight, holder);
        return factors_of_row;
      });
      batch.store(Selection{}, optimizer, tier,
                  [&](uint32_t tensor, void* data, Dtype type, const Slices<kSlices>& values) {
                    if (step.rounding.is_stochastic && type != Dtype::kFloat) {
                      store_randomly(holders, base, tensor, data, type, values);
                    } else {
                      store_slices<kSlices>(layout, data, type, location_of, values);
                    }
                  });
    }
  }

  // Update one batch of the rows that the lanes of `lane_mask` hold, and return the lanes whose
  // rows are left. Each lane passes the mask of its group. `is_summed` must be TileRow::is_summed
  // of all these rows. If the optimizer has sums over a row, they must be complete before the first
  // column is updated. So rows wider than a batch need two passes, of which the second reads from
  // the caches.
  EMB_DEVICE uint32_t update_batch(uint32_t lane_mask, bool is_summed) {
    const HoldersOfSlices holders = assign_slices(lane_mask);
    const bool has_sums = Selection::num_row_sums(optimizer) > 0;
    const bool has_two_passes = has_sums && layout.dim > layout.batch_columns();
    if (has_two_passes) {
#pragma unroll
      for (int k = 0; k < kMaxRowSums; ++k) row_sums[threadIdx.x][k] = 0.0f;
    }
    RowFactors factors;
    const int first = static_cast<int>(blockIdx.y) * layout.batch_columns();
    const int stride = static_cast<int>(gridDim.y) * layout.batch_columns();
#pragma unroll 1
    for (int pass = has_two_passes ? 0 : 1; pass < 2; ++pass) {
#pragma unroll 1
      for (int base = first; base < layout.dim; base += stride) {
        if (is_summed) sum_lookups(holders, base);
        const bool is_last = pass == 1;
        update_columns(holders, is_summed, base,
                       {.adds_sums = has_sums && is_last != has_two_passes,
                        .computes_factors = is_last && base == first,
                        .updates_rows = is_last,
                        .carries_sums = has_two_passes},
                       &factors);
      }
    }
    // The slices have the rows of the lowest lanes; those above the holder of the last slice are
    // left.
    const int last_holder = holders[kSlices - 1];
    return last_holder < 0 ? 0 : lane_mask & (~1u << last_holder);
  }
};

// Update the rows of a tile, `rows` [32] by the lane that holds them, one packed_layout after the
// other, and set the length of each row to 0. `rows`, row_gradient and row_sums are shared memory;
// the last two are the scratch of TileUpdate. All lanes of a warp must call this; it ends with a
// __syncwarp if there are rows.
template <class Selection>
EMB_DEVICE void update_tile(const DeviceGradArgs& args, const OptimizerStepArgs& optimizer,
                            const BlockStep& step, TileRow* rows,
                            float (*row_gradient)[kUpdateThreads][kColumns],
                            float (*row_sums)[kMaxRowSums]) {
  TileRow& lane_row = rows[threadIdx.x % simt::kWarpLanes];  // the row that this lane holds
  while (const uint32_t lanes_left = __ballot_sync(simt::kFullMask, lane_row.length > 0)) {
    const uint32_t packed = rows[__ffs(static_cast<int>(lanes_left)) - 1].packed_layout;
    const bool has_high_words =
        lane_row.length > 0 && lane_row.packed_layout == packed && lane_row.offsets_high != 0;
    TileUpdate<Selection> update{
        args,
        optimizer,
        step,
        step.tiers[(packed >> TileRow::kTierShift) & (kTiers - 1)],
        rows,
        RowLayout(static_cast<int>(packed >> TileRow::kDimShift),
                  (packed & TileRow::kVectorBit) != 0, UpdateShape<Selection>::kSlices),
        __any_sync(simt::kFullMask, has_high_words) != 0,
        row_gradient,
        row_sums};
#pragma unroll 1
    for (int is_summed = 0; is_summed < 2; ++is_summed) {
      const bool is_selected = lane_row.length > 0 && lane_row.packed_layout == packed &&
                               lane_row.is_summed == (is_summed != 0);
      uint32_t selected_lanes =
          __ballot_sync(simt::kFullMask, is_selected) & update.layout.lanes_of_group();
      while (__any_sync(simt::kFullMask, selected_lanes != 0))
        selected_lanes = update.update_batch(selected_lanes, is_summed != 0);
    }
    __syncwarp();  // no lane needs the rows any more
    if (lane_row.packed_layout == packed) lane_row.length = 0;
    __syncwarp();
  }
}

// Update all rows of the grouping, grid-stride over tiles. The grid's second dimension divides the
// columns of wide rows, only for optimizers without states or sums per row.
template <class Selection>
__global__ void __launch_bounds__(kUpdateThreads, UpdateShape<Selection>::kBlocksPerSm)
    update_kernel(DeviceGradArgs args, OptimizerStepArgs optimizer, TileShape max_shape) {
  __shared__ BlockStepStorage storage;
  __shared__ TileRow rows_of_warps[kUpdateThreads];
  __shared__ uint32_t num_rows;  // not a local: takes no register while rows are updated
  alignas(16)
      __shared__ float row_gradient[UpdateShape<Selection>::kSlices][kUpdateThreads][kColumns];
  __shared__ float row_sums[Selection::kHasSums ? kUpdateThreads : 1][kMaxRowSums];
  const auto count = static_cast<uint32_t>(*args.num_groups);
  const TileShape shape = max_shape.for_rows(count);
  // The grid is sized by lookups, so with repeated rows some blocks have no tile: they return
  // before they build their step.
  if (blockIdx.x * kUpdateWarps * shape.num_rows() >= count) return;
  if (threadIdx.x == 0) num_rows = count;
  build_step<Selection>(optimizer, &storage);
  const BlockStep& step = storage.get();
  const unsigned warp = threadIdx.x / simt::kWarpLanes;
  TileRow* const rows = rows_of_warps + warp * simt::kWarpLanes;
  for (uint32_t t = blockIdx.x * kUpdateWarps + warp; t * shape.num_rows() < num_rows;
       t += gridDim.x * kUpdateWarps) {
    __syncwarp();  // all lanes are done with the rows of the last tile
    TileRow* const lane_row = rows + threadIdx.x % simt::kWarpLanes;
    const uint32_t row = shape.row_of_lane(), u = t * shape.num_rows() + row;
    lane_row->length = 0;
    lane_row->packed_layout = 0;
    if (row < shape.num_rows() && u < num_rows)
      lane_row->read(Selection{}, args, optimizer, step, u);
    __syncwarp();
    update_tile<Selection>(args, optimizer, step, rows, row_gradient, row_sums);
  }
}

// Return the shape of the tiles for at most `num_rows` rows of `mean_dim` columns on average. A
// tile has up to 32 rows, but so few that each of the `num_warps` warps that run at once gets a
// tile, if there are enough rows.
inline TileShape max_tile_shape(int64_t num_rows, int64_t mean_dim, int64_t num_warps) {
  TileShape shape{2, 0, static_cast<uint32_t>(num_warps)};
  while ((1 << shape.log2_lanes) < lanes_per_row(mean_dim, kColumns)) ++shape.log2_lanes;
  shape.log2_rows = shape.log2_lanes;
  while (shape.log2_rows > 0 && num_rows < num_warps * shape.num_rows()) --shape.log2_rows;
  return shape;
}

// Blocks per multiprocessor of the kernels that plan and sum chunks, which are grid-stride.
inline constexpr int kChunkBlocksPerSm = 8;

// Launch the sums of the chunks of long segments, if there can be any; G is the dtype of the
// gradient. plan_chunks_kernel must have been launched.
template <class G, class Launcher>
void launch_chunks(const Launcher& launcher, const DeviceGradArgs& args, int64_t mean_dim) {
  const int64_t num_slots = num_chunk_slots(args.num_lookups);
  if (num_slots == 0) return;
  const int lanes = lanes_per_row(mean_dim, kColumns);
  const unsigned stripes = blocks_for(mean_dim, lanes * kColumns, kMaxStripes);
  launcher(
      chunk_kernel<G>,
      simt::Dim3(blocks_for(num_slots, 1, launcher.max_grid_blocks(kChunkBlocksPerSm)), stripes),
      kChunkThreads, args, lanes);
}

// Update all rows of the grouping in `args`; without an optimizer, write their gradients to the
// weights of tier 0 of `optimizer`. `mean_dim`, the mean width of the features, determines the
// lanes per row. The step is counted either here or before:
//   - If the grouping has not counted it, pass num_groups_to_update ([1], scratch on the device)
//     and `step`: the step is counted, also without lookups. If the gradient is not finite, nothing
//     is counted or updated.
//   - If num_groups_to_update is null, `step` is ignored: the step must have been counted, and
//     *args.num_groups must be 0 if the gradient is not finite.
// `launcher` is a CudaLauncher or, in tests, a simt::HostLauncher. Does not wait for the device.
template <class Launcher>
void launch_update(const Launcher& launcher, DeviceGradArgs args,
                   const OptimizerStepArgs& optimizer, int64_t mean_dim, const StepCount& step = {},
                   int32_t* num_groups_to_update = nullptr) {
  if (num_groups_to_update != nullptr || num_chunk_slots(args.num_lookups) > 0) {
    launcher(
        plan_chunks_kernel,
        blocks_for(args.num_lookups, kChunkThreads, launcher.max_grid_blocks(kChunkBlocksPerSm)),
        kChunkThreads, args, step, num_groups_to_update);
  }
  if (args.num_lookups == 0 || args.bags.num_bags == 0) return;
  if (num_groups_to_update != nullptr) args.num_groups = num_groups_to_update;
  if (args.grad_type == Dtype::kFloat) {
    launch_chunks<float>(launcher, args, mean_dim);
  } else if (args.grad_type == Dtype::kHalf) {
    launch_chunks<half16>(launcher, args, mean_dim);
  } else {
    launch_chunks<bfloat16>(launcher, args, mean_dim);
  }
  visit_selection(optimizer, mean_dim <= kNarrowRow, [&](auto tag) {
    using Selection = typename decltype(tag)::type;
    const int64_t num_resident = launcher.max_grid_blocks(UpdateShape<Selection>::kBlocksPerSm);
    const TileShape shape = max_tile_shape(args.num_lookups, mean_dim, num_resident * kUpdateWarps);
    const int64_t rows_per_block = int64_t{kUpdateWarps} * shape.num_rows();
    const unsigned num_blocks =
        blocks_for(args.num_lookups, rows_per_block, kUpdateWaves * num_resident);
    // Row-wise states are read and written once per row, so one stripe takes all columns.
    const int64_t max_stripes =
        optimizer.has_row_factors() ? 1 : std::max<int64_t>(num_resident / num_blocks, 1);
    const int64_t batch_columns =
        int64_t{UpdateShape<Selection>::kSlices} * simt::kWarpLanes * kColumns;
    launcher(update_kernel<Selection>,
             simt::Dim3(num_blocks, blocks_for(mean_dim, batch_columns, max_stripes)),
             kUpdateThreads, args, optimizer, shape);
  });
}

}  // namespace emb::cuda
