// `combine` on the GPU, and its adjoint `combine_backward`. Dimension y of the grid is over
// targets, dimension x over their rows. A group of 4 to 32 lanes processes a row, four columns per
// lane at a time. Layouts are on the device and have not been checked: rows of targets and pieces
// that lie outside the tensors are skipped.
#pragma once

#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "route/args.h"

namespace emb::cuda {

inline constexpr int kCombineThreads = 256;
inline constexpr int kCombineBlocksPerSm = 4;      // so that a thread may have 64 registers
inline constexpr int kCombineColumns = 4;          // columns per lane at a time
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
  float scale;      // factor of every sum, or of every gradient
  const void* in;   // forward: the source without `local`; backward: [out_numel]
  void* out;        // forward: [out_numel]; backward: the gradient of the source without `local`
  LocalPart local;  // the local part of the source, or of its gradient
  int64_t source_numel, out_numel;  // elements of the source (`local` included) and of the output
};

// Return whether elements [offset, offset + width) are inside [0, numel).
EMB_DEVICE bool lies_inside(int64_t offset, int64_t width, int64_t numel) {
  return offset >= 0 && width <= numel && offset <= numel - width;
}

// Return the divisor of a row of a target: the length of its bag, at least 1; 1 without lengths.
EMB_DEVICE float combine_divisor(const DeviceCombine& args, const Target& target, int64_t row) {
  if (target.first_bag < 0 || row >= args.num_lengths - target.first_bag) return 1.0f;
  const int64_t length = args.lengths[target.first_bag + row];
  return length > 1 ? static_cast<float>(length) : 1.0f;
}

// Return the first element, in the source, of the row of a piece for row `row` of its target; -1
// if there is none, or if it does not lie in one section of the source.
EMB_DEVICE int64_t piece_begin(const DeviceCombine& args, const SourcePiece& piece,
                               const Target& target, int64_t row) {
  if (piece.first_row >= 0) {
    if (row >= args.num_rows - piece.first_row) return -1;
    row = args.rows[piece.first_row + row];
    if (row < 0) return -1;
  }
  const int64_t begin = piece.offset + row * piece.stride;
  if (!lies_inside(begin, target.width, args.source_numel)) return -1;
  const bool is_in_one_section =
      args.local.section(begin) == args.local.section(begin + target.width - 1);
  return is_in_one_section ? begin : -1;
}

// Call `body(target, row, group)` for the rows of all targets that lie inside the output; `group`
// is the group of lanes that processes the row, each of which calls `body`. All threads of the
// grid, in blocks of kCombineThreads, must call this.
template <class Body>
EMB_DEVICE void for_target_rows(const DeviceCombine& args, const Body& body) {
  for (int64_t t = blockIdx.y; t < args.num_targets; t += gridDim.y) {
    const Target target = args.targets[t];
    if (target.first_piece < 0 || target.end_piece > args.num_pieces || target.width <= 0 ||
        target.width > args.out_numel) {
      continue;
    }
    const LaneGroup group(lanes_per_row(target.width, kCombineColumns));
    const int num_groups = kCombineThreads / group.lanes;
    const int group_in_block = static_cast<int>(threadIdx.x) / group.lanes;
    // Rows do not overlap, which bounds their number.
    for (int64_t row = int64_t{blockIdx.x} * num_groups + group_in_block;
         row < target.num_rows && row * target.width < args.out_numel;
         row += int64_t{gridDim.x} * num_groups) {
      if (!lies_inside(target.offset + row * target.stride, target.width, args.out_numel)) continue;
      body(target, row, group);
    }
  }
}

// Write the rows of all targets: the sums of their pieces, divided by lengths and scaled. In and
// Out are the dtypes of args.in and args.out.
template <class In, class Out>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocksPerSm)
    combine_kernel(DeviceCombine args) {
  for_target_rows(args, [&](const Target& target, int64_t row, const LaneGroup& group) {
    const float divisor = combine_divisor(args, target, row);
    const In* source = static_cast<const In*>(args.in);
    Out* out = static_cast<Out*>(args.out) + target.offset + row * target.stride;
    for (int64_t c = group.rank * kCombineColumns; c < target.width;
         c += group.lanes * kCombineColumns) {
      const int num_valid =
          static_cast<int>(target.width - c < kCombineColumns ? target.width - c : kCombineColumns);
      float sum[kCombineColumns] = {};
      for (int64_t p = target.first_piece; p < target.end_piece; ++p) {
        const int64_t begin = piece_begin(args, args.pieces[p], target, row);
        if (begin < 0) continue;
        float values[kCombineColumns];
        read_columns(args.local.address(source, begin) + c, num_valid, values);
#pragma unroll
        for (int k = 0; k < kCombineColumns; ++k) sum[k] += values[k];
      }
#pragma unroll
      for (int k = 0; k < kCombineColumns; ++k) sum[k] = sum[k] / divisor * args.scale;
      write_columns(out + c, num_valid, sum);
    }
  });
}

// Write the gradients of all pieces: the gradients of their targets, divided by lengths and scaled.
// Elements of the source that no piece names are not written.
template <class In, class Out>
__global__ void __launch_bounds__(kCombineThreads, kCombineBlocksPerSm)
    combine_backward_kernel(DeviceCombine args) {
  for_target_rows(args, [&](const Target& target, int64_t row, const LaneGroup& group) {
    const float divisor = combine_divisor(args, target, row);
    const In* grad = static_cast<const In*>(args.in) + target.offset + row * target.stride;
    Out* out = static_cast<Out*>(args.out);
    for (int64_t c = group.rank * kCombineColumns; c < target.width;
         c += group.lanes * kCombineColumns) {
      const int num_valid =
          static_cast<int>(target.width - c < kCombineColumns ? target.width - c : kCombineColumns);
      float values[kCombineColumns];
      read_columns(grad + c, num_valid, values);
#pragma unroll
      for (int k = 0; k < kCombineColumns; ++k) values[k] = values[k] / divisor * args.scale;
      for (int64_t p = target.first_piece; p < target.end_piece; ++p) {
        const int64_t begin = piece_begin(args, args.pieces[p], target, row);
        if (begin >= 0) write_columns(args.local.address(out, begin) + c, num_valid, values);
      }
    }
  });
}

// `combine`, or its adjoint.
enum class CombineDirection { kForward, kBackward };

// Launch the kernel for an input of dtype In; `out_type` is the dtype of args.out. There must be at
// least one target.
template <CombineDirection kDirection, class In, class Launcher>
void launch_combine_from(const Launcher& launcher, const DeviceCombine& args, Dtype out_type) {
  // A thread has about four accesses, so that a block is worth its start (not measured).
  constexpr int64_t kElementsPerBlock = kCombineThreads * kCombineColumns * 4;
  const auto grid_targets = static_cast<unsigned>(
      args.num_targets < kMaxGridTargets ? args.num_targets : kMaxGridTargets);
  const int64_t elements_per_target = args.out_numel / args.num_targets + 1;
  const int64_t max_blocks = launcher.max_grid_blocks(kResidentBlocksPerSm) / grid_targets + 1;
  simt::Dim3 grid{};
  grid.x = blocks_for(elements_per_target, kElementsPerBlock, max_blocks);
  grid.y = grid_targets;
  grid.z = 1;
  constexpr bool kIsForward = kDirection == CombineDirection::kForward;
  if (out_type == Dtype::kFloat) {
    launcher(kIsForward ? combine_kernel<In, float> : combine_backward_kernel<In, float>, grid,
             kCombineThreads, args);
  } else if (out_type == Dtype::kHalf) {
    launcher(kIsForward ? combine_kernel<In, half16> : combine_backward_kernel<In, half16>, grid,
             kCombineThreads, args);
  } else {
    launcher(kIsForward ? combine_kernel<In, bfloat16> : combine_backward_kernel<In, bfloat16>,
             grid, kCombineThreads, args);
  }
}

// Launch `combine`, or its adjoint. `in_type` and `out_type` are the dtypes of args.in and
// args.out. For the adjoint, the caller must fill args.out and args.local with zeros before, unless
// pieces name every element of the source. Does not wait for the device.
template <CombineDirection kDirection, class Launcher>
void launch_combine(const Launcher& launcher, const DeviceCombine& args, Dtype in_type,
                    Dtype out_type) {
  if (args.num_targets == 0) return;
  if (in_type == Dtype::kFloat) {
    launch_combine_from<kDirection, float>(launcher, args, out_type);
  } else if (in_type == Dtype::kHalf) {
    launch_combine_from<kDirection, half16>(launcher, args, out_type);
  } else {
    launch_combine_from<kDirection, bfloat16>(launcher, args, out_type);
  }
}

}  // namespace emb::cuda
