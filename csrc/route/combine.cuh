// `combine` on the GPU, and its adjoint `combine_backward`, which *spreads* gradients. blockIdx.y
// iterates over targets, blockIdx.x over their rows. A group of 4 to 32 lanes processes a row, four
// columns per lane at a time. Layouts are on the device and have not been checked: rows of targets
// and pieces that lie outside the tensors are skipped.
#pragma once

#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "route/args.h"

namespace emb::cuda {

inline constexpr int kCombineThreads = 256;
inline constexpr int kCombineBlocksPerSm = 4;      // so that a thread may have 64 registers
inline constexpr int kCombineColumns = 4;          // columns per lane and access
inline constexpr int64_t kMaxGridTargets = 65535;  // the maximum of gridDim.y

// The arguments of the kernels. Pointers are to device memory that must live until the kernels have
// run. "Source" and "output" mean the source and output of `combine`: backward, `in` is the
// gradient of the output and `out` is the gradient of the source.
struct DeviceCombine {
  const Target* targets;      // [num_targets]
  const SourcePiece* pieces;  // [num_pieces]
  int64_t num_targets, num_pieces;
  IndexArray lengths;  // [num_lengths], read for targets with a first_bag
  int64_t num_lengths;
  const int32_t* rows;  // [num_rows], read for pieces with a first_row
  int64_t num_rows;
  float scale;  // factor of all sums
  const void* in;
  void* out;
  LocalPart local;                  // of the source
  int64_t source_numel, out_numel;  // elements of the source (`local` included) and of the output
};

// Return whether elements [offset, offset + width) are inside [0, numel).
EMB_DEVICE bool lies_inside(int64_t offset, int64_t width, int64_t numel) {
  return offset >= 0 && width <= numel && offset <= numel - width;
}

// Return the divisor of a row of a target: the length of its bag, at least 1; 1 without lengths.
EMB_DEVICE float combine_divisor(const DeviceCombine& in, const Target& target, int64_t row) {
  if (target.first_bag < 0 || row >= in.num_lengths - target.first_bag) return 1.0f;
  const int64_t length = in.lengths[target.first_bag + row];
  return length > 1 ? static_cast<float>(length) : 1.0f;
}

// Return the first element, in the source, of the row of a piece for row `row` of its target; -1
// if there is none, or if it does not lie in one section of the source.
EMB_DEVICE int64_t piece_begin(const DeviceCombine& in, const SourcePiece& piece,
                               const Target& target, int64_t row) {
  if (piece.first_row >= 0) {
    if (row >= in.num_rows - piece.first_row) return -1;
    row = in.rows[piece.first_row + row];
    if (row < 0) return -1;
  }
  const int64_t begin = piece.offset + row * piece.stride;
  if (!lies_inside(begin, target.width, in.source_numel)) return -1;
  const bool is_in_one_section =
      in.local.section(begin) == in.local.section(begin + target.width - 1);
  return is_in_one_section ? begin : -1;
}

// Call `body(target, row, group)` for the rows of all targets that lie inside the output. `group`
// is the lanes that process the row.
template <class Body>
EMB_DEVICE void for_rows(const DeviceCombine& in, const Body& body) {
  for (int64_t t = blockIdx.y; t < in.num_targets; t += gridDim.y) {
    const Target target = in.targets[t];
    if (target.first_piece < 0 || target.end_piece > in.num_pieces || target.width <= 0 ||
        target.width > in.out_numel) {
      continue;
    }
    int lanes = 4;
    while (lanes < 32 && int64_t{lanes} * kCombineColumns < target.width) lanes *= 2;
    const LaneGroup group(lanes);
    const int num_groups = kCombineThreads / lanes;
    const int group_in_block = static_cast<int>(threadIdx.x) / lanes;
    // Rows do not overlap, which bounds their number.
    for (int64_t row = int64_t{blockIdx.x} * num_groups + group_in_block;
         row < target.rows && row * target.width < in.out_numel;
         row += int64_t{gridDim.x} * num_groups) {
      if (!lies_inside(target.offset + row * target.stride, target.width, in.out_numel)) continue;
      body(target, row, group);
    }
  }
}

// Write the rows of all targets: the sums of their pieces, divided by lengths and scaled. S and O
// are the dtypes of in.in and in.out.
template <class S, class O>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocksPerSm)
    combine_kernel(DeviceCombine in) {
  for_rows(in, [&](const Target& target, int64_t row, const LaneGroup& group) {
    const float divisor = combine_divisor(in, target, row);
    const S* source = static_cast<const S*>(in.in);
    O* out = static_cast<O*>(in.out) + target.offset + row * target.stride;
    for (int64_t c = group.rank * kCombineColumns; c < target.width;
         c += group.lanes * kCombineColumns) {
      const int num_valid =
          static_cast<int>(target.width - c < kCombineColumns ? target.width - c : kCombineColumns);
      float sum[kCombineColumns] = {};
      for (int64_t p = target.first_piece; p < target.end_piece; ++p) {
        const int64_t begin = piece_begin(in, in.pieces[p], target, row);
        if (begin < 0) continue;
        float values[kCombineColumns];
        read_columns(in.local.address(source, begin) + c, num_valid, values);
#pragma unroll
        for (int k = 0; k < kCombineColumns; ++k) sum[k] += values[k];
      }
#pragma unroll
      for (int k = 0; k < kCombineColumns; ++k) sum[k] = sum[k] / divisor * in.scale;
      write_columns(out + c, num_valid, sum);
    }
  });
}

// Write the gradients of all pieces: the gradients of their targets, divided by lengths and scaled.
// Other elements of in.out are not written.
template <class S, class O>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocksPerSm)
    spread_kernel(DeviceCombine in) {
  for_rows(in, [&](const Target& target, int64_t row, const LaneGroup& group) {
    const float divisor = combine_divisor(in, target, row);
    const S* grad = static_cast<const S*>(in.in) + target.offset + row * target.stride;
    O* out = static_cast<O*>(in.out);
    for (int64_t c = group.rank * kCombineColumns; c < target.width;
         c += group.lanes * kCombineColumns) {
      const int num_valid =
          static_cast<int>(target.width - c < kCombineColumns ? target.width - c : kCombineColumns);
      float values[kCombineColumns];
      read_columns(grad + c, num_valid, values);
#pragma unroll
      for (int k = 0; k < kCombineColumns; ++k) values[k] = values[k] / divisor * in.scale;
      for (int64_t p = target.first_piece; p < target.end_piece; ++p) {
        const int64_t begin = piece_begin(in, in.pieces[p], target, row);
        if (begin >= 0) write_columns(in.local.address(out, begin) + c, num_valid, values);
      }
    }
  });
}

// `combine`, or its adjoint.
enum class Direction { kCombine, kSpread };

// Launch for an input of dtype S; `out_type` is the dtype of in.out.
template <Direction kDirection, class S, class Launcher>
void launch_combine_from(const Launcher& launcher, const DeviceCombine& in, Dtype out_type) {
  // A thread has about four accesses, so that a block is worth its start (not measured).
  constexpr int64_t kElementsPerBlock = kCombineThreads * kCombineColumns * 4;
  const auto grid_targets =
      static_cast<unsigned>(in.num_targets < kMaxGridTargets ? in.num_targets : kMaxGridTargets);
  const int64_t elements_per_target = in.out_numel / in.num_targets + 1;
  const int64_t max_blocks = launcher.blocks(kResidentBlocksPerSm) / grid_targets + 1;
  simt::Dim3 grid{};
  grid.x = blocks_for(elements_per_target, kElementsPerBlock, max_blocks);
  grid.y = grid_targets;
  grid.z = 1;
  constexpr bool kForward = kDirection == Direction::kCombine;
  if (out_type == Dtype::kFloat) {
    launcher(kForward ? combine_kernel<S, float> : spread_kernel<S, float>, grid, kCombineThreads,
             in);
  } else if (out_type == Dtype::kHalf) {
    launcher(kForward ? combine_kernel<S, half16> : spread_kernel<S, half16>, grid, kCombineThreads,
             in);
  } else {
    launcher(kForward ? combine_kernel<S, bfloat16> : spread_kernel<S, bfloat16>, grid,
             kCombineThreads, in);
  }
}

// Launch `combine`, or its adjoint. `in_type` and `out_type` are the dtypes of in.in and in.out.
// For the adjoint, in.out and in.local must be zeros before, unless pieces name every element of
// the source.
template <Direction kDirection, class Launcher>
void launch_combine(const Launcher& launcher, const DeviceCombine& in, Dtype in_type,
                    Dtype out_type) {
  if (in.num_targets == 0) return;
  if (in_type == Dtype::kFloat) {
    launch_combine_from<kDirection, float>(launcher, in, out_type);
  } else if (in_type == Dtype::kHalf) {
    launch_combine_from<kDirection, half16>(launcher, in, out_type);
  } else {
    launch_combine_from<kDirection, bfloat16>(launcher, in, out_type);
  }
}

}  // namespace emb::cuda
