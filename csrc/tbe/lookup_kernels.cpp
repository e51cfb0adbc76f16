// Forward of table-batched embeddings on one CPU thread. The kernel is bound by cache misses on
// random rows, so all that matters is to keep enough of them in flight (software prefetch a fixed
// number of lookups ahead, across bags) and to touch every line once: a bag's sum stays in
// registers, in blocks of up to 8 vectors.
#include "core/vec.h"
#include "tbe/lookup_table.h"

namespace emb::EMB_ISA {
namespace {

// Rows to have on their way: enough to cover the latency of memory without overrunning the fill
// buffers, counted in bytes because a row of 512 B is 8 requests.
constexpr int64_t kPrefetchBytes = 4096;

int64_t prefetch_distance(int64_t row_bytes) {
  const int64_t rows = kPrefetchBytes / (row_bytes < 64 ? 64 : row_bytes);
  return rows < 2 ? 2 : rows > 32 ? 32 : rows;
}

// The lookups of one feature, in order, with the rows of the next ones on their way.
template <class W, class I>
struct Rows {
  const W* table;
  const I* indices;
  const float* sample_weights;
  int64_t rows, dim, last, distance;

  // Row of lookup i, or null for one to skip.
  EMB_HD const W* at(int64_t i) const {
    const int64_t row = repair_index(indices[i], rows);
    return row < 0 ? nullptr : table + row * dim;
  }
  EMB_HD float weight(int64_t i) const { return sample_weights ? sample_weights[i] : 1.0f; }
  // Asks for `count` values of the row of lookup i from `column` on.
  EMB_HD void prefetch(int64_t i, int64_t column, int64_t count) const {
    if (i >= last) return;
    const W* row = at(i);
    if (row == nullptr) return;
    prefetch_row<false>(row + column, count * static_cast<int64_t>(sizeof(W)));
  }
};

// Columns [column, column + kVectors * kLanes) of one bag. Every block fetches its own columns of
// the rows to come, so that the number of lines is known when compiling.
template <int kVectors, class W, class O, class I>
EMB_HD void pool_block(const Rows<W, I>& rows, int64_t column, int64_t begin, int64_t end,
                       float scale, O* out) {
  Vec sums[kVectors] = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + rows.distance, column, kVectors * kLanes);
    const W* source = rows.at(i);
    if (source == nullptr) continue;
    const Vec weight = broadcast(rows.weight(i));
    for (int v = 0; v < kVectors; ++v) sums[v] += weight * load(source + column + v * kLanes);
  }
  const Vec factor = broadcast(scale);
  for (int v = 0; v < kVectors; ++v) store(out + column + v * kLanes, sums[v] * factor);
}

template <class W, class O, class I>
EMB_HD void pool_tail(const Rows<W, I>& rows, int64_t column, int64_t begin, int64_t end,
                      float scale, O* out) {
  const int rest = static_cast<int>(rows.dim - column);
  Vec total = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + rows.distance, column, rest);
    const W* source = rows.at(i);
    if (source == nullptr) continue;
    total += broadcast(rows.weight(i)) * load_first(source + column, rest);
  }
  store_first(out + column, total * broadcast(scale), rest);
}

template <class W, class O, class I>
EMB_HD void pool_bag(const Rows<W, I>& rows, int64_t begin, int64_t end, float scale, O* out) {
  const int64_t dim = rows.dim;
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

template <class W, class O, class I>
void lookup(const LookupArgs& args, int64_t first_bag, int64_t last_bag) {
  const int64_t first = args.bags.begin(first_bag), last = args.bags.end(last_bag - 1);
  const int64_t distance = prefetch_distance(args.dim * static_cast<int64_t>(sizeof(W)));
  const Rows<W, I> rows{static_cast<const W*>(args.table),
                        static_cast<const I*>(args.indices.data),
                        args.sample_weights,
                        args.rows,
                        args.dim,
                        last,
                        distance};
  for (int64_t i = first; i < first + distance; ++i) rows.prefetch(i, 0, args.dim);
  O* out = static_cast<O*>(args.out);
  if (args.pooling == Pooling::kNone) {  // every lookup is a bag of its own
    for (int64_t i = first; i < last; ++i) {
      pool_bag(rows, i, i + 1, 1.0f, out + i * args.out_stride);
    }
    return;
  }
  out += (first_bag - args.first_bag) * args.out_stride;
  for (int64_t bag = first_bag; bag < last_bag; ++bag, out += args.out_stride) {
    const int64_t begin = args.bags.begin(bag), end = args.bags.end(bag);
    const bool mean = args.pooling == Pooling::kMean && end > begin;
    pool_bag(rows, begin, end, mean ? 1.0f / static_cast<float>(end - begin) : 1.0f, out);
  }
}

template <class W, class O>
constexpr void fill(LookupFn (&entry)[2]) {
  entry[0] = lookup<W, O, int32_t>;
  entry[1] = lookup<W, O, int64_t>;
}

constexpr LookupTable make_table() {
  LookupTable table = {};
  fill<float, float>(table.at[0][0]);
  fill<float, half16>(table.at[0][1]);
  fill<float, bfloat16>(table.at[0][2]);
  fill<half16, float>(table.at[1][0]);
  fill<half16, half16>(table.at[1][1]);
  fill<half16, bfloat16>(table.at[1][2]);
  fill<bfloat16, float>(table.at[2][0]);
  fill<bfloat16, half16>(table.at[2][1]);
  fill<bfloat16, bfloat16>(table.at[2][2]);
  return table;
}

}  // namespace

extern const LookupTable kLookupTable;
const LookupTable kLookupTable = make_table();

}  // namespace emb::EMB_ISA
