// `quantize_rows_` on the CPU: checks, then rows in parallel.
#include <torch/csrc/stable/library.h>

#include "core/isa.h"
#include "core/parallel.h"
#include "quant/check_quant.h"
#include "quant/quantize_table.h"

namespace emb {

namespace baseline {
extern const QuantizeTable kQuantizeTable;
}
#if defined(EMB_X86)
namespace avx2 {
extern const QuantizeTable kQuantizeTable;
}
namespace avx512 {
extern const QuantizeTable kQuantizeTable;
}
#endif

namespace {

const QuantizeTable& quantize_table() {
#if defined(EMB_X86)
  return pick_isa(baseline::kQuantizeTable, avx2::kQuantizeTable, avx512::kQuantizeTable);
#else
  return baseline::kQuantizeTable;
#endif
}

constexpr int64_t kGrain = 4096;  // elements

void quantize_rows_(Tensor values, Tensor scales, const Tensor& weights, int64_t bits) {
  const Dtype type = check_quantize("quantize_rows_", values, scales, weights, bits);
  const int64_t dim = weights.size(1);
  const QuantizeArgs args{
      weights.const_data_ptr(), static_cast<uint8_t*>(values.mutable_data_ptr()),
      static_cast<RowScale*>(scales.mutable_data_ptr()), dim, static_cast<int>(bits)};
  const QuantizeFn quantize = quantize_table().at[static_cast<int>(type)];
  parallel_balanced(
      weights.size(0), kGrain, [&](int64_t row) { return row * dim; },
      [&](int64_t begin, int64_t end) { quantize(args, begin, end); });
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, quantize_rows_); }
