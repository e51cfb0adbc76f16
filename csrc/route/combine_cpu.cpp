// `combine`, `combine_backward` and `combine_backward_` on the CPU: check the arguments, allocate
// the output, merge targets whose columns and pieces continue each other, and divide the rows into
// ranges of equal cost, each of which writes neighbouring rows.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "core/isa.h"
#include "core/output_memory.h"
#include "core/parallel.h"
#include "route/args.h"
#include "route/check.h"

namespace emb {

EMB_SELECT_KERNELS(CombineTable, kCombineTable, combine_table)

namespace {

constexpr int64_t kRowsPerCall = 16;          // rows per call if all targets have equally many rows
constexpr int64_t kCombineGrain = 32 * 1024;  // grain of parallel_balanced, in elements

// Return whether the columns of `next_target` and of its pieces continue those of `target`, and
// neither is divided by lengths.
bool continues_target(const CombineInputs& in, const Target& target, const Target& next_target) {
  const SourcePiece* pieces = in.pieces;
  const int64_t num_pieces = target.end_piece - target.first_piece;
  if (target.num_rows != next_target.num_rows || target.stride != next_target.stride ||
      target.offset + target.width != next_target.offset || target.first_bag >= 0 ||
      next_target.first_bag >= 0 || next_target.end_piece - next_target.first_piece != num_pieces) {
    return false;
  }
  for (int64_t p = 0; p < num_pieces; ++p) {
    const SourcePiece &a = pieces[target.first_piece + p], &b = pieces[next_target.first_piece + p];
    if (a.stride != b.stride || a.first_row != b.first_row || a.offset + target.width != b.offset ||
        in.local.section(a.offset) != in.local.section(b.offset)) {
      return false;
    }
  }
  return true;
}

// Return the nonempty targets, with neighbours that continue each other merged.
std::vector<Target> merge_neighbours(const CombineInputs& in) {
  std::vector<Target> targets;
  targets.reserve(in.num_targets);
  for (int64_t t = 0; t < in.num_targets; ++t) {
    const Target& next_target = in.targets[t];
    if (next_target.num_rows == 0 || next_target.width == 0) continue;
    if (!targets.empty() && continues_target(in, targets.back(), next_target)) {
      targets.back().width += next_target.width;
    } else {
      targets.push_back(next_target);
    }
  }
  return targets;
}

// Return the number of rows that a piece adds to a target of `num_rows` rows.
int64_t count_added_rows(const CombineInputs& in, const SourcePiece& piece, int64_t num_rows) {
  if (piece.first_row < 0) return num_rows;
  const int32_t* rows = in.row_data() + piece.first_row;
  return std::count_if(rows, rows + num_rows, [](int32_t row) { return row >= 0; });
}

// Call `kernel` for all rows of all targets, in parallel.
void run_kernel(CombineFn kernel, const CombineArgs& args, const std::vector<Target>& targets) {
  const auto num_targets = static_cast<int64_t>(targets.size());
  bool has_equal_rows = true;
  int64_t total_width = 0;  // of all targets together
  for (const Target& target : targets) {
    has_equal_rows = has_equal_rows && target.num_rows == targets[0].num_rows;
    total_width += target.width;
  }
  if (has_equal_rows && num_targets > 0) {
    // Rows of all targets side by side: a thread writes one contiguous range of a [B, D] output.
    const auto cost = [&](int64_t row) { return row * total_width; };
    parallel_balanced(targets[0].num_rows, kCombineGrain, cost, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; row += kRowsPerCall) {
        for (const Target& target : targets)
          kernel(args, target, row, std::min(row + kRowsPerCall, end));
      }
    });
    return;
  }
  // first_elements[t] is the number of elements of all targets before target t.
  std::vector<int64_t> first_elements(num_targets + 1, 0);
  for (int64_t t = 0; t < num_targets; ++t)
    first_elements[t + 1] = first_elements[t] + targets[t].num_rows * targets[t].width;
  // Ranges may begin anywhere; a row belongs to the range of its first element.
  parallel_balanced(
      first_elements[num_targets], kCombineGrain, kUnitCost, [&](int64_t begin, int64_t end) {
        int64_t t = std::upper_bound(first_elements.begin(), first_elements.end(), begin) -
                    first_elements.begin() - 1;
        for (; t < num_targets && first_elements[t] < end; ++t) {
          const auto row_at_or_after = [&](int64_t element) {
            return (std::max(element - first_elements[t], int64_t{0}) + targets[t].width - 1) /
                   targets[t].width;
          };
          const int64_t end_row = std::min(row_at_or_after(end), targets[t].num_rows);
          const int64_t first_row = row_at_or_after(begin);
          if (first_row < end_row) kernel(args, targets[t], first_row, end_row);
        }
      });
}

// Return the flat output, [out_numel] of `dtype`: each target is the sum of its pieces in `source`
// in float32, divided by max(length, 1) if it has a first_bag, times `scale`. Throws for targets
// and pieces outside the tensors, and for targets with more or fewer elements than the output.
//   source              flat; its dtype and `dtype` are float32, float16 or bfloat16 each
//   targets, pieces     int64 [T, 7] and [P, 3], rows of Target and SourcePiece
//   rows, lengths       int32, and int32 or int64; null if no piece or target names them
//   local, local_begin  the elements of the source in a separate tensor and the position of the
//                       first of them, see LocalPart; null and 0 if there are none
Tensor combine(const Tensor& source, const Tensor& targets, const Tensor& pieces,
               std::optional<Tensor> rows, std::optional<Tensor> lengths, int64_t out_numel,
               ScalarType dtype, double scale, std::optional<Tensor> local, int64_t local_begin) {
  const char* op = "combine";
  CombineInputs in(op, "source", source, targets, pieces, rows, lengths);
  in.set_local(op, local, local_begin, in.flat.numel(), in.flat.scalar_type());
  const Dtype in_type = float_dtype(op, "source", in.flat.scalar_type());
  const Dtype out_type = float_dtype(op, "dtype", dtype);
  check_targets(op, in, out_numel, in.flat.numel() + in.local.size());
  Tensor out = allocate_output(in.flat, {out_numel}, dtype);
  const CombineArgs args{in.flat.const_data_ptr(),
                         out.mutable_data_ptr(),
                         in.local,
                         in.pieces,
                         in.length_array(),
                         in.row_data(),
                         static_cast<float>(scale)};
  run_kernel(combine_table().combine[static_cast<int>(in_type)][static_cast<int>(out_type)], args,
             merge_neighbours(in));
  return out;
}

// Compute the gradient of the source of `combine` from the gradient of its output, in.flat. Return
// the elements outside of `local`, of `dtype`; write the others to `local`, if there is one. Set
// in.local. The gradient of an element in no piece is 0. Pieces must not overlap, and `rows` must
// not name a row of a piece twice: its gradients would not be added up. Neither is checked.
Tensor source_gradient(const char* op, CombineInputs& in, int64_t source_numel, ScalarType dtype,
                       double scale, std::optional<Tensor> local, int64_t local_begin) {
  const Dtype in_type = float_dtype(op, "grad", in.flat.scalar_type());
  const Dtype out_type = float_dtype(op, "dtype", dtype);
  const int64_t num_outside = in.set_local_of_source(op, local, local_begin, source_numel, dtype);
  check_targets(op, in, in.flat.numel(), source_numel);
  Tensor out = allocate_output(in.flat, {num_outside}, dtype);
  int64_t num_written = 0;  // elements of the source: pieces and their rows do not overlap
  for (int64_t t = 0; t < in.num_targets; ++t) {
    const Target& target = in.targets[t];
    for (int64_t p = target.first_piece; p < target.end_piece; ++p) {
      num_written += count_added_rows(in, in.pieces[p], target.num_rows) * target.width;
    }
  }
  if (num_written != source_numel) {
    torch::stable::zero_(out);
    if (local) torch::stable::zero_(*local);
  }
  const CombineArgs args{in.flat.const_data_ptr(),
                         out.mutable_data_ptr(),
                         in.local,
                         in.pieces,
                         in.length_array(),
                         in.row_data(),
                         static_cast<float>(scale)};
  run_kernel(
      combine_table().combine_backward[static_cast<int>(in_type)][static_cast<int>(out_type)], args,
      merge_neighbours(in));
  return out;
}

// Return the gradient of a source without local part, [source_numel] of `dtype`. `grad` is that of
// the output, flat; the other arguments are as in `combine`.
Tensor combine_backward(const Tensor& grad, const Tensor& targets, const Tensor& pieces,
                        std::optional<Tensor> rows, std::optional<Tensor> lengths,
                        int64_t source_numel, ScalarType dtype, double scale) {
  const char* op = "combine_backward";
  CombineInputs in(op, "grad", grad, targets, pieces, rows, lengths);
  return source_gradient(op, in, source_numel, dtype, scale, std::nullopt, 0);
}

// Compute the gradient of a source of source_numel elements in all. Write its local part to
// `local`, and return the other elements, of the dtype of `local`. The other arguments are as in
// `combine`.
Tensor combine_backward_(const Tensor& grad, const Tensor& targets, const Tensor& pieces,
                         std::optional<Tensor> rows, std::optional<Tensor> lengths,
                         int64_t source_numel, double scale, Tensor local, int64_t local_begin) {
  const char* op = "combine_backward_";
  CombineInputs in(op, "grad", grad, targets, pieces, rows, lengths);
  return source_gradient(op, in, source_numel, local.scalar_type(), scale, local, local_begin);
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, combine);
  EMB_IMPL(m, emb, combine_backward);
  EMB_IMPL(m, emb, combine_backward_);
}
