// Quantises rows on one CPU thread: one pass for the ends of a row, one for its numbers.
#include "core/half.h"
#include "quant/quantize_table.h"

namespace emb::EMB_ISA {
namespace {

template <class T>
RowScale scale_of(const T* row, int64_t dim, int bits) {
  float low = to_float(row[0]), high = low;
  for (int64_t d = 1; d < dim; ++d) {
    const float value = to_float(row[d]);
    low = value < low ? value : low;
    high = value > high ? value : high;
  }
  return row_scale(low, high, bits);
}

template <class T>
void quantize(const QuantizeArgs& args, int64_t first_row, int64_t last_row) {
  const int64_t dim = args.dim, nbytes = packed_bytes(dim, args.bits);
  for (int64_t r = first_row; r < last_row; ++r) {
    const T* row = static_cast<const T*>(args.rows) + r * dim;
    uint8_t* out = args.values + r * nbytes;
    const RowScale scale = scale_of(row, dim, args.bits);
    args.scales[r] = scale;
    if (args.bits == 8) {
      for (int64_t d = 0; d < dim; ++d) out[d] = quantized(to_float(row[d]), scale, 8);
      continue;
    }
    for (int64_t b = 0; b < nbytes; ++b) {
      const uint8_t low = quantized(to_float(row[2 * b]), scale, 4);
      const uint8_t high =
          2 * b + 1 < dim ? quantized(to_float(row[2 * b + 1]), scale, 4) : uint8_t{0};
      out[b] = static_cast<uint8_t>(low | high << 4);
    }
  }
}

}  // namespace

extern const QuantizeTable kQuantizeTable;
const QuantizeTable kQuantizeTable = {{quantize<float>, quantize<half16>, quantize<bfloat16>}};

}  // namespace emb::EMB_ISA
