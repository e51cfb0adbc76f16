// `combine` and `combine_backward` for rows of one target on one CPU thread: the functions of
// CombineTable (route/args.h). Rows whose values and dtype do not change are copied as bytes: those
// of a piece without row numbers (first_row) which, in `combine`, is the only piece of its target.
// A copy keeps -0.0 and the bits of a NaN; a sum, which the GPU always computes, turns -0.0 to 0.
#include <type_traits>

#include "core/pool_bag.h"
#include "core/vec.h"
#include "route/args.h"

namespace emb::EMB_ISA {
namespace {

// Return the divisor of a row of a target: the length of its bag, at least 1; 1 if the target has
// no first_bag.
EMB_HD float row_divisor(const CombineArgs& args, const Target& target, int64_t row) {
  if (target.first_bag < 0) return 1.0f;
  const int64_t length = args.lengths[target.first_bag + row];
  return length > 1 ? static_cast<float>(length) : 1.0f;
}

// Return the address of the row that a piece adds to row `row` of its target, null if it adds none.
// `data` is the source, or its gradient, without the local part.
template <class T>
EMB_HD T* piece_row(const CombineArgs& args, const SourcePiece& piece, T* data, int64_t row) {
  if (piece.first_row >= 0) row = args.rows[piece.first_row + row];
  return row < 0 ? nullptr : args.local.address(data, piece.offset) + row * piece.stride;
}

// Return whether the rows of a target are neither divided nor scaled.
EMB_HD bool keeps_values(const CombineArgs& args, const Target& target) {
  return target.first_bag < 0 && args.scale == 1.0f;
}

// Copy `rows` rows of `width` elements; strides are in elements.
template <class T>
void copy_rows(const T* in, int64_t in_stride, T* out, int64_t out_stride, int64_t rows,
               int64_t width) {
  if (in_stride == width && out_stride == width) {
    __builtin_memcpy(out, in, rows * width * sizeof(T));
    return;
  }
  for (int64_t i = 0; i < rows; ++i) {
    __builtin_memcpy(out + i * out_stride, in + i * in_stride, width * sizeof(T));
  }
}

// The rows that pieces add to row `row` of their target, as the `Rows` of pool_bag: its row i is of
// piece i. core/pool_bag.h has the contract of the members.
template <class In>
struct PieceRows {
  const CombineArgs& args;
  int64_t width, row;
  int64_t num_skipped_columns = 0;

  struct Values {
    const In* address;
    EMB_HD Vec vector(int v) const { return load(address + v * kLanes); }
    EMB_HD Vec first(int n) const { return load_first(address, n); }
  };

  EMB_HD int64_t dim() const { return width; }
  EMB_HD static int64_t prefetch_distance() { return 0; }
  EMB_HD void skip_columns(int64_t count) { num_skipped_columns += count; }
  EMB_HD const In* at(int64_t piece) const {
    const In* address = piece_row(args, args.pieces[piece], static_cast<const In*>(args.in), row);
    return address == nullptr ? nullptr : address + num_skipped_columns;
  }
  EMB_HD static Values values(const In* address, int64_t) { return {address}; }
  EMB_HD static void prefetch(int64_t, int64_t) {}  // pieces without row numbers are read in order
};

// Write row `row` of a target to `out`: the sum of its pieces, divided by `divisor`, times
// args.scale.
template <class In, class Out>
void add_pieces(const CombineArgs& args, const Target& target, int64_t row, float divisor,
                Out* out) {
  const auto scale_sum = [&](Vec sum) {
    if (divisor != 1.0f) sum /= broadcast(divisor);
    return args.scale != 1.0f ? sum * broadcast(args.scale) : sum;
  };
  const PieceRows<In> pieces{args, target.width, row};
  pool_bag(pieces, target.first_piece, target.end_piece, scale_sum, out);
}

// The CombineFn of `combine`.
template <class In, class Out>
void combine_rows(const CombineArgs& args, const Target& target, int64_t begin, int64_t end) {
  Out* out = static_cast<Out*>(args.out) + target.offset;
  const SourcePiece* pieces = args.pieces + target.first_piece;
  if constexpr (std::is_same_v<In, Out>) {
    if (target.end_piece - target.first_piece == 1 && keeps_values(args, target) &&
        pieces->first_row < 0) {
      const In* in = args.local.address(static_cast<const In*>(args.in), pieces->offset);
      copy_rows(in + begin * pieces->stride, pieces->stride, out + begin * target.stride,
                target.stride, end - begin, target.width);
      return;
    }
  }
  for (int64_t row = begin; row < end; ++row) {
    add_pieces<In>(args, target, row, row_divisor(args, target, row), out + row * target.stride);
  }
}

// Write scale(x) to `out` for the vectors x of a row of `width` elements.
template <class In, class Out, class Scale>
void scale_row(const In* in, Out* out, int64_t width, const Scale& scale) {
  int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) store(out + c, scale(load(in + c)));
  const int num_remaining = static_cast<int>(width - c);
  if (num_remaining > 0)
    store_first(out + c, scale(load_first(in + c, num_remaining)), num_remaining);
}

// The CombineFn of `combine_backward`.
template <class In, class Out>
void combine_backward_rows(const CombineArgs& args, const Target& target, int64_t begin,
                           int64_t end) {
  const In* grad = static_cast<const In*>(args.in) + target.offset;
  const int64_t width = target.width;
  for (int64_t p = target.first_piece; p < target.end_piece; ++p) {
    const SourcePiece& piece = args.pieces[p];
    Out* out = static_cast<Out*>(args.out);
    if constexpr (std::is_same_v<In, Out>) {
      if (piece.first_row < 0 && keeps_values(args, target)) {
        copy_rows(grad + begin * target.stride, target.stride,
                  args.local.address(out, piece.offset) + begin * piece.stride, piece.stride,
                  end - begin, width);
        continue;
      }
    }
    for (int64_t row = begin; row < end; ++row) {
      Out* out_row = piece_row(args, piece, out, row);
      if (out_row == nullptr) continue;
      const In* in = grad + row * target.stride;
      const float divisor = row_divisor(args, target, row);
      if (divisor == 1.0f) {
        scale_row(in, out_row, width, [&](Vec v) { return v * broadcast(args.scale); });
      } else {
        scale_row(in, out_row, width,
                  [&](Vec v) { return v / broadcast(divisor) * broadcast(args.scale); });
      }
    }
  }
}

constexpr CombineTable make_table() {
  CombineTable table = {};
  for_each_dtype([&]<class In>(TypeTag<In>, int in) {
    for_each_dtype([&]<class Out>(TypeTag<Out>, int out) {
      table.combine[in][out] = combine_rows<In, Out>;
      table.combine_backward[in][out] = combine_backward_rows<In, Out>;
    });
  });
  return table;
}

}  // namespace

extern const CombineTable kCombineTable;
const CombineTable kCombineTable = make_table();

}  // namespace emb::EMB_ISA
