// Lookup in quantised tables on one CPU thread. As for plain tables, random rows are all that
// costs: those of the next lookups are fetched ahead, across bags, and a bag's sum stays in
// registers. Rows become floats before they are added: their offsets added up apart would cancel in
// long bags.
#include "quant/lookup_table.h"
#include "quant/packed.h"

namespace emb::EMB_ISA {
namespace {

// How far ahead rows are fetched: a row is few lines, and its scale another one.
constexpr int64_t kAhead = 16;

template <int kBits, class I>
struct PackedRows {
  const QuantLookupArgs& args;
  int64_t row_bytes, last;

  EMB_HD int64_t row(int64_t i) const {
    return repair_index(static_cast<const I*>(args.indices)[i], args.rows);
  }
  EMB_HD float weight(int64_t i) const {
    return args.sample_weights ? args.sample_weights[i] : 1.0f;
  }
  EMB_HD const uint8_t* at(int64_t row, int64_t column) const {
    return args.values + row * row_bytes + column * kBits / 8;
  }
  // Asks for columns [column, column + count) of the row of lookup i, if there is such a lookup.
  EMB_HD void prefetch(int64_t i, int64_t column, int64_t count) const {
    if (i >= last) return;
    const int64_t r = row(i);
    if (r < 0) return;
    prefetch_row<false>(at(r, column), packed_bytes(count, kBits));
    __builtin_prefetch(args.scales + r, 0, 3);
  }
};

// Columns [column, column + kVectors * kLanes) of one bag.
template <int kVectors, int kBits, class I, class O>
EMB_HD void pool_block(const PackedRows<kBits, I>& rows, int64_t column, int64_t begin, int64_t end,
                       float factor, O* out) {
  Vec sums[kVectors] = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + kAhead, column, kVectors * kLanes);
    const int64_t row = rows.row(i);
    if (row < 0) continue;
    const RowScale scale = rows.args.scales[row];
    const float weight = rows.weight(i);
    const Vec by = broadcast(weight * scale.scale), plus = broadcast(weight * scale.offset);
    const uint8_t* source = rows.at(row, column);
    for (int v = 0; v < kVectors; ++v) {
      sums[v] += by * load_packed<kBits>(source + v * kPackedBytes<kBits>) + plus;
    }
  }
  for (int v = 0; v < kVectors; ++v) {
    store(out + column + v * kLanes, sums[v] * broadcast(factor));
  }
}

template <int kBits, class I, class O>
EMB_HD void pool_tail(const PackedRows<kBits, I>& rows, int64_t column, int64_t begin, int64_t end,
                      float factor, O* out) {
  const int rest = static_cast<int>(rows.args.dim - column);
  Vec total = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + kAhead, column, rest);
    const int64_t row = rows.row(i);
    if (row < 0) continue;
    const RowScale scale = rows.args.scales[row];
    const float weight = rows.weight(i);
    const Vec by = broadcast(weight * scale.scale), plus = broadcast(weight * scale.offset);
    total += by * load_packed_first<kBits>(rows.at(row, column), rest) + plus;
  }
  store_first(out + column, total * broadcast(factor), rest);
}

template <int kBits, class I, class O>
EMB_HD void pool_bag(const PackedRows<kBits, I>& rows, int64_t begin, int64_t end, float factor,
                     O* out) {
  const int64_t dim = rows.args.dim;
  int64_t column = 0;
  for (; dim - column >= 8 * kLanes; column += 8 * kLanes) {
    pool_block<8>(rows, column, begin, end, factor, out);
  }
  if (dim - column >= 4 * kLanes) {
    pool_block<4>(rows, column, begin, end, factor, out);
    column += 4 * kLanes;
  }
  if (dim - column >= 2 * kLanes) {
    pool_block<2>(rows, column, begin, end, factor, out);
    column += 2 * kLanes;
  }
  if (dim - column >= kLanes) {
    pool_block<1>(rows, column, begin, end, factor, out);
    column += kLanes;
  }
  if (column < dim) pool_tail(rows, column, begin, end, factor, out);
}

template <int kBits, class O, class I>
void lookup(const QuantLookupArgs& args, int64_t first_bag, int64_t last_bag) {
  const int64_t first = args.bags.begin(first_bag), last = args.bags.end(last_bag - 1);
  const PackedRows<kBits, I> rows{args, packed_bytes(args.dim, kBits), last};
  for (int64_t i = first; i < first + kAhead; ++i) rows.prefetch(i, 0, args.dim);
  O* out = static_cast<O*>(args.out);
  if (args.pooling == Pooling::kNone) {  // every lookup is a bag of its own
    for (int64_t i = first; i < last; ++i) {
      pool_bag(rows, i, i + 1, 1.0f, out + i * args.out_stride);
    }
    return;
  }
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    const int64_t begin = args.bags.begin(bag), end = args.bags.end(bag);
    const bool mean = args.pooling == Pooling::kMean && end > begin;
    const float factor = mean ? 1.0f / static_cast<float>(end - begin) : 1.0f;
    const int64_t place =
        args.places ? args.places[bag].element : (bag - args.first_bag) * args.out_stride;
    pool_bag(rows, begin, end, factor, out + place);
  }
}

template <int kBits, class O>
constexpr void fill(QuantLookupTable* table, int bits, int output) {
  table->at[bits][output][0] = lookup<kBits, O, int32_t>;
  table->at[bits][output][1] = lookup<kBits, O, int64_t>;
}

constexpr QuantLookupTable make_table() {
  QuantLookupTable table = {};
  fill<8, float>(&table, 0, 0);
  fill<8, half16>(&table, 0, 1);
  fill<8, bfloat16>(&table, 0, 2);
  fill<4, float>(&table, 1, 0);
  fill<4, half16>(&table, 1, 1);
  fill<4, bfloat16>(&table, 1, 2);
  return table;
}

}  // namespace

extern const QuantLookupTable kQuantLookupTable;
const QuantLookupTable kQuantLookupTable = make_table();

}  // namespace emb::EMB_ISA
