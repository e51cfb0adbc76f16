// Forward of table-batched embeddings on one CPU thread. The kernel is bound by cache misses on
// random rows, so it must keep enough of them in flight (software prefetch a fixed number of
// lookups ahead, across bags) and touch every line once: a bag's sum stays in registers, in blocks
// of up to 8 vectors.
#include "tbe/args.h"
#include "tbe/read_rows.h"

namespace emb::EMB_ISA {
namespace {

// Bytes of rows to prefetch: enough to cover the latency of memory without exceeding the fill
// buffers; in bytes because a row of 512 B is 8 requests.
constexpr int64_t kPrefetchBytes = 4096;

int64_t prefetch_distance(int64_t row_bytes) {
  const int64_t rows = kPrefetchBytes / (row_bytes < 64 ? 64 : row_bytes);
  return rows < 2 ? 2 : rows > 32 ? 32 : rows;
}

// The lookups of one feature, in order, with prefetch of the next rows.
template <class Reader>
struct Rows {
  Reader reader;
  const float* sample_weights;
  int64_t last, distance;

  EMB_HD float weight(int64_t i) const { return sample_weights ? sample_weights[i] : 1.0f; }
  EMB_HD void prefetch(int64_t i, int64_t count) const {
    if (i < last) reader.prefetch(i, count);
  }
};

// Pool columns [column, column + kVectors * kLanes) of one bag. Every block prefetches its columns
// of the next rows, so that the number of lines is a compile-time constant.
template <int kVectors, class Reader, class O>
EMB_HD void pool_block(Rows<Reader> rows, int64_t column, int64_t begin, int64_t end, float scale,
                       O* out) {
  rows.reader.skip_columns(column);
  Vec sums[kVectors] = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + rows.distance, kVectors * kLanes);
    const auto* source = rows.reader.at(i);
    if (source == nullptr) continue;
    const Vec weight = broadcast(rows.weight(i));
    for (int v = 0; v < kVectors; ++v) sums[v] += weight * load(source + v * kLanes);
  }
  const Vec factor = broadcast(scale);
  for (int v = 0; v < kVectors; ++v) store(out + column + v * kLanes, sums[v] * factor);
}

template <class Reader, class O>
EMB_HD void pool_tail(Rows<Reader> rows, int64_t column, int64_t begin, int64_t end, float scale,
                      O* out) {
  const int rest = static_cast<int>(rows.reader.dim - column);
  rows.reader.skip_columns(column);
  Vec total = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + rows.distance, rest);
    const auto* source = rows.reader.at(i);
    if (source == nullptr) continue;
    total += broadcast(rows.weight(i)) * load_first(source, rest);
  }
  store_first(out + column, total * broadcast(scale), rest);
}

template <class Reader, class O>
EMB_HD void pool_bag(const Rows<Reader>& rows, int64_t begin, int64_t end, float scale, O* out) {
  const int64_t dim = rows.reader.dim;
  int64_t column = 0;
  for (; dim - column >= 8 * kLanes; column += 8 * kLanes) {
    pool_block<8>(rows, column, begin, end, scale, out);
  }
  if (dim - column >= 4 * kLanes) {
    pool_block<4>(rows, column, begin, end, scale, out);
    column += 4 * kLanes;
  }
  if (dim - column >= 2 * kLanes) {
    pool_block<2>(rows, column, begin, end, scale, out);
    column += 2 * kLanes;
  }
  if (dim - column >= kLanes) {
    pool_block<1>(rows, column, begin, end, scale, out);
    column += kLanes;
  }
  if (column < dim) pool_tail(rows, column, begin, end, scale, out);
}

template <class O, class Reader>
EMB_HD void pool(const LookupArgs& args, const Reader& reader, int64_t first_bag,
                 int64_t last_bag) {
  const int64_t first = args.bags.begin(first_bag), last = args.bags.end(last_bag - 1);
  const int64_t distance = prefetch_distance(args.rows.dim * sizeof(typename Reader::Element));
  const Rows<Reader> rows{reader, args.sample_weights, last, distance};
  for (int64_t i = first; i < first + distance; ++i) rows.prefetch(i, args.rows.dim);
  O* out = static_cast<O*>(args.out);
  if (args.pooling == Pooling::kNone) {  // every lookup is a bag
    for (int64_t i = first; i < last; ++i) {
      pool_bag(rows, i, i + 1, 1.0f, out + i * args.out_stride);
    }
    return;
  }
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    const int64_t begin = args.bags.begin(bag), end = args.bags.end(bag);
    const bool mean = args.pooling == Pooling::kMean && end > begin;
    const int64_t offset =
        args.bag_layout ? args.bag_layout[bag].element : (bag - args.first_bag) * args.out_stride;
    pool_bag(rows, begin, end, mean ? 1.0f / static_cast<float>(end - begin) : 1.0f, out + offset);
  }
}

template <class W, class O, class I>
void lookup(const LookupArgs& args, int64_t first_bag, int64_t last_bag) {
  const auto* ids = static_cast<const I*>(args.rows.indices.data);
  pool<O>(args, PlainRows<W, const I*>(args.rows, ids), first_bag, last_bag);
}

template <class W, class O, class I>
void cached_lookup(const LookupArgs& args, int64_t first_bag, int64_t last_bag) {
  const auto* ids = static_cast<const I*>(args.rows.indices.data);
  pool<O>(args, CachedRows<W, const I*>(args.rows, ids), first_bag, last_bag);
}

template <class O>
void mixed_lookup(const LookupArgs& args, int64_t first_bag, int64_t last_bag) {
  pool<O>(args, MixedRows(args.rows, args.scratch), first_bag, last_bag);
}

constexpr LookupTable make_table() {
  LookupTable table = {};
  for_each_dtype([&]<class O>(TypeTag<O>, int output) {
    table.mixed[output] = mixed_lookup<O>;
    for_each_dtype([&]<class W>(TypeTag<W>, int weights) {
      table.at[0][weights][output][0] = lookup<W, O, int32_t>;
      table.at[0][weights][output][1] = lookup<W, O, int64_t>;
      table.at[1][weights][output][0] = cached_lookup<W, O, int32_t>;
      table.at[1][weights][output][1] = cached_lookup<W, O, int64_t>;
    });
  });
  return table;
}

}  // namespace

extern const LookupTable kLookupTable;
const LookupTable kLookupTable = make_table();

}  // namespace emb::EMB_ISA
