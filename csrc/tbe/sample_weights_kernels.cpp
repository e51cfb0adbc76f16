// Gradient of the sample weights on one CPU thread, the functions of SampleWeightKernels
// (tbe/args.h): for each lookup the dot product of its row with the gradient of its bag's output
// row, for MEAN divided by the length of the bag. Rows are prefetched across bags.
#include "tbe/args.h"
#include "tbe/read_rows.h"

namespace emb::EMB_ISA {
namespace {

constexpr int64_t kRowsAhead = 8;  // lookups between the prefetch of a row and its use

// Return the dot product of a row and a gradient, both of `dim` columns.
template <class T, class G>
EMB_HD float dot(const T* row, const G* grad, int64_t dim) {
  Vec products = {};
  int64_t d = 0;
  for (; d + kLanes <= dim; d += kLanes) products += load(grad + d) * load(row + d);
  const int remaining = static_cast<int>(dim - d);
  if (remaining > 0) products += load_first(grad + d, remaining) * load_first(row + d, remaining);
  return sum(products);
}

// Write args.out for the lookups of bags [first_bag, last_bag), 0 for lookups to skip. `Reader` is
// a reader of tbe/read_rows.h, G the dtype of the gradient.
template <class G, class Reader>
EMB_HD void dot_bags(const SampleWeightArgs& args, const Reader& rows, int64_t first_bag,
                     int64_t last_bag) {
  const int64_t prefetch_end = args.bags.end_lookup(last_bag),
                num_items = args.bags.num_items(first_bag, last_bag);
  for (int64_t k = 0; k < num_items; ++k) {
    const BagItem bag = args.bags.item(first_bag, k);
    const float scale = mean_factor(args.bags.pooling, bag.end - bag.begin);
    const G* grad = static_cast<const G*>(args.grad) + bag.output_offset;
    for (int64_t i = bag.begin; i < bag.end; ++i) {
      if (i + kRowsAhead < prefetch_end) rows.prefetch(i + kRowsAhead, rows.dim);
      const auto* row = rows.at(i);
      args.out[i] = row == nullptr ? 0.0f : dot(row, grad, rows.dim) * scale;
    }
  }
}

// The SampleWeightFn for tables without a cache.
template <class W, class G>
void plain_grads(const SampleWeightArgs& args, int64_t first_bag, int64_t last_bag) {
  const PlainRows<W, IndexArray> rows(args.rows, args.rows.indices);
  dot_bags<G>(args, rows, first_bag, last_bag);
}

// The SampleWeightFn for tables with a cache of their dtype.
template <class W, class G>
void cached_grads(const SampleWeightArgs& args, int64_t first_bag, int64_t last_bag) {
  const CachedRows<W, IndexArray> rows(args.rows, args.rows.indices);
  dot_bags<G>(args, rows, first_bag, last_bag);
}

// The SampleWeightFn for tables with a cache of another dtype.
template <class G>
void mixed_grads(const SampleWeightArgs& args, int64_t first_bag, int64_t last_bag) {
  dot_bags<G>(args, MixedRows(args.rows, args.scratch), first_bag, last_bag);
}

constexpr SampleWeightKernels make_kernels() {
  SampleWeightKernels kernels = {};
  for_each_dtype([&]<class G>(TypeTag<G>, int grad) {
    kernels.mixed[grad] = mixed_grads<G>;
    for_each_dtype([&]<class W>(TypeTag<W>, int weights) {
      kernels.uniform[0][weights][grad] = plain_grads<W, G>;
      kernels.uniform[1][weights][grad] = cached_grads<W, G>;
    });
  });
  return kernels;
}

}  // namespace

extern const SampleWeightKernels kSampleWeightKernels;
const SampleWeightKernels kSampleWeightKernels = make_kernels();

}  // namespace emb::EMB_ISA
