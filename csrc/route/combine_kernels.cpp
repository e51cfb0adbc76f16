// Rows of one target on one CPU thread: the sum of its pieces, or its gradient to each of them.
// Where values stay as they are it is a copy.
#include <type_traits>

#include "core/vec.h"
#include "route/combine_table.h"

namespace emb::EMB_ISA {
namespace {

EMB_HD float divisor(const CombineArgs& args, const Target& target, int64_t row) {
  if (target.first_bag < 0) return 1.0f;
  const int64_t length = args.lengths[target.first_bag + row];
  return length > 1 ? static_cast<float>(length) : 1.0f;
}

// The first element of what a piece has for a row of its target; null if it has nothing.
template <class T>
EMB_HD T* row_of(const CombineArgs& args, const SourcePiece& piece, T* data, int64_t row) {
  if (piece.first_row >= 0) row = args.rows[piece.first_row + row];
  return row < 0 ? nullptr : data + piece.offset + row * piece.stride;
}

// Whether pieces are copied as they are.
EMB_HD bool keeps_values(const CombineArgs& args, const Target& target) {
  return target.first_bag < 0 && args.scale == 1.0f;
}

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

// Columns [c, c + kVectors * kLanes) of a row; `load_at(p)` is those of a source from p on.
template <int kVectors, class S, class O>
EMB_HD void add_columns(const CombineArgs& args, const Target& target, int64_t row, int64_t c,
                        float length, O* out) {
  Vec sum[kVectors] = {};
  for (int64_t p = target.first_piece; p < target.end_piece; ++p) {
    const S* piece = row_of(args, args.pieces[p], static_cast<const S*>(args.in), row);
    if (piece == nullptr) continue;
    for (int v = 0; v < kVectors; ++v) sum[v] += load(piece + c + v * kLanes);
  }
  for (int v = 0; v < kVectors; ++v) {
    if (length != 1.0f) sum[v] /= broadcast(length);
    if (args.scale != 1.0f) sum[v] *= broadcast(args.scale);
    store(out + c + v * kLanes, sum[v]);
  }
}

template <class S, class O>
void combine_rows(const CombineArgs& args, const Target& target, int64_t begin, int64_t end) {
  O* out = static_cast<O*>(args.out) + target.offset;
  const int64_t width = target.width;
  if constexpr (std::is_same_v<S, O>) {
    if (target.end_piece - target.first_piece == 1 && keeps_values(args, target) &&
        args.pieces[target.first_piece].first_row < 0) {
      const SourcePiece& piece = args.pieces[target.first_piece];
      const S* source = static_cast<const S*>(args.in) + piece.offset;
      copy_rows(source + begin * piece.stride, piece.stride, out + begin * target.stride,
                target.stride, end - begin, width);
      return;
    }
  }
  for (int64_t row = begin; row < end; ++row) {
    const float length = divisor(args, target, row);
    O* line = out + row * target.stride;
    int64_t c = 0;
    for (; c + 4 * kLanes <= width; c += 4 * kLanes) {
      add_columns<4, S>(args, target, row, c, length, line);
    }
    for (; c + kLanes <= width; c += kLanes) add_columns<1, S>(args, target, row, c, length, line);
    if (c == width) continue;
    const int rest = static_cast<int>(width - c);
    Vec sum{};
    for (int64_t p = target.first_piece; p < target.end_piece; ++p) {
      const S* source = row_of(args, args.pieces[p], static_cast<const S*>(args.in), row);
      if (source != nullptr) sum += load_first(source + c, rest);
    }
    if (length != 1.0f) sum /= broadcast(length);
    if (args.scale != 1.0f) sum *= broadcast(args.scale);
    store_first(line + c, sum, rest);
  }
}

template <class S, class O>
void spread_rows(const CombineArgs& args, const Target& target, int64_t begin, int64_t end) {
  const S* grad = static_cast<const S*>(args.in) + target.offset;
  const int64_t width = target.width;
  for (int64_t p = target.first_piece; p < target.end_piece; ++p) {
    const SourcePiece& piece = args.pieces[p];
    O* out = static_cast<O*>(args.out);
    if constexpr (std::is_same_v<S, O>) {
      if (piece.first_row < 0 && keeps_values(args, target)) {
        copy_rows(grad + begin * target.stride, target.stride,
                  out + piece.offset + begin * piece.stride, piece.stride, end - begin, width);
        continue;
      }
    }
    for (int64_t row = begin; row < end; ++row) {
      O* line = row_of(args, piece, out, row);
      if (line == nullptr) continue;
      const S* in = grad + row * target.stride;
      const Vec length = broadcast(divisor(args, target, row)), scale = broadcast(args.scale);
      int64_t c = 0;
      for (; c + kLanes <= width; c += kLanes) store(line + c, load(in + c) / length * scale);
      const int rest = static_cast<int>(width - c);
      if (rest > 0) store_first(line + c, load_first(in + c, rest) / length * scale, rest);
    }
  }
}

}  // namespace

extern const CombineTable kCombineTable;
const CombineTable kCombineTable = {
    {{combine_rows<float, float>, combine_rows<float, half16>, combine_rows<float, bfloat16>},
     {combine_rows<half16, float>, combine_rows<half16, half16>, combine_rows<half16, bfloat16>},
     {combine_rows<bfloat16, float>, combine_rows<bfloat16, half16>,
      combine_rows<bfloat16, bfloat16>}},
    {{spread_rows<float, float>, spread_rows<float, half16>, spread_rows<float, bfloat16>},
     {spread_rows<half16, float>, spread_rows<half16, half16>, spread_rows<half16, bfloat16>},
     {spread_rows<bfloat16, float>, spread_rows<bfloat16, half16>,
      spread_rows<bfloat16, bfloat16>}}};

}  // namespace emb::EMB_ISA
