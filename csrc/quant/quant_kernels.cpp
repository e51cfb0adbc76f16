// Quantised tables on one CPU thread: quantise rows (one pass for the range of a row, one for its
// numbers), look up bags.

#include "core/half.h"
#include "core/vec.h"
#include "quant/args.h"

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
  const int64_t stride = row_bytes(dim, args.bits);
  for (int64_t r = first_row; r < last_row; ++r) {
    const T* row = static_cast<const T*>(args.rows) + r * dim;
    const RowScale scale = scale_of(row, dim, args.bits);
    const RowStep step(scale);
    uint8_t* out = args.packed + r * stride;
    __builtin_memcpy(out, &scale, kHeaderBytes);
    out += kHeaderBytes;
    if (args.bits == 8) {
      for (int64_t d = 0; d < dim; ++d) out[d] = quantized(to_float(row[d]), step, 8);
    } else {
      for (int64_t b = 0; b < nbytes; ++b) {
        const uint8_t low = quantized(to_float(row[2 * b]), step, 4);
        const uint8_t high =
            2 * b + 1 < dim ? quantized(to_float(row[2 * b + 1]), step, 4) : uint8_t{0};
        out[b] = static_cast<uint8_t>(low | high << 4);
      }
    }
    for (int64_t b = nbytes; b < stride - kHeaderBytes; ++b) out[b] = 0;
  }
}

}  // namespace

extern const QuantizeTable kQuantizeTable;
const QuantizeTable kQuantizeTable = {{quantize<float>, quantize<half16>, quantize<bfloat16>}};

// Registers of floats from packed numbers, `kLanes` at a time.

template <int kBits>
inline constexpr int kPackedBytes = kLanes * kBits / 8;

#if defined(__AVX2__)

// Return the two numbers of each of 8 bytes, in order.
EMB_HD __m128i unpack_halves(__m128i bytes) {
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
  return _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), high);
}

#endif

// Load `kLanes` numbers from `p`, which need not be aligned.
template <int kBits>
EMB_HD Vec load_packed(const uint8_t* p) {
#if defined(__AVX512F__)
  __m128i bytes;
  if constexpr (kBits == 8) {
    bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  } else {
    bytes = unpack_halves(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  }
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
#elif defined(__AVX2__)
  __m128i bytes;
  if constexpr (kBits == 8) {
    bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  } else {
    int32_t word;
    __builtin_memcpy(&word, p, sizeof(word));
    bytes = unpack_halves(_mm_cvtsi32_si128(word));
  }
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
#else
  Vec v;
  for (int i = 0; i < kLanes; ++i) {
    v[i] = static_cast<float>(kBits == 8 ? p[i] : p[i / 2] >> (i % 2 * 4) & 15);
  }
  return v;
#endif
}

// Load the first `n` numbers (0 < n < kLanes) without reading a byte beyond them; the other lanes
// are undefined.
template <int kBits>
EMB_HD Vec load_packed_first(const uint8_t* p, int n) {
  uint8_t buffer[kPackedBytes<kBits>] = {};
  const int bytes = (n * kBits + 7) / 8;
  for (int i = 0; i < bytes; ++i) buffer[i] = p[i];
  return load_packed<kBits>(buffer);
}

namespace {

// The lookup. As for plain tables, cache misses on random rows dominate: the rows of the next
// lookups are prefetched, across bags, and a bag's sum stays in registers. Rows are converted to
// floats before they are added: separate sums of their offsets would cancel in long bags.

// How many lookups ahead rows are prefetched: a row is one line, or a few.
constexpr int64_t kAhead = 16;

// The scale and offset of a row times its weight, in all lanes.
struct RowFactors {
  Vec by, plus;

  EMB_HD RowFactors(const uint8_t* row, float weight) {
    int32_t header;
    __builtin_memcpy(&header, row, kHeaderBytes);
#if defined(__AVX512F__)
    const __m512 pairs = _mm512_cvtph_ps(_mm256_broadcastd_epi32(_mm_cvtsi32_si128(header))) *
                         _mm512_set1_ps(weight);
    by = _mm512_moveldup_ps(pairs);
    plus = _mm512_movehdup_ps(pairs);
#elif defined(__AVX2__)
    const __m256 pairs =
        _mm256_cvtph_ps(_mm_broadcastd_epi32(_mm_cvtsi32_si128(header))) * _mm256_set1_ps(weight);
    by = _mm256_moveldup_ps(pairs);
    plus = _mm256_movehdup_ps(pairs);
#else
    // As to_float of finite halves, of both at once.
    typedef int32_t Bits __attribute__((vector_size(kLanes * sizeof(int32_t))));
    const Bits halves = {header & 0xffff, header >> 16};
    const Vec magnitude = reinterpret_cast<Vec>((halves & 0x7fff) << 13) * 0x1p112f;
    const Bits sign = (halves & 0x8000) << 16;
    const Vec pair = reinterpret_cast<Vec>(reinterpret_cast<Bits>(magnitude) | sign);
    by = broadcast(weight * pair[0]);
    plus = broadcast(weight * pair[1]);
#endif
  }
};

template <int kBits, class I>
struct PackedRows {
  const QuantLookupArgs& args;
  int64_t stride, last;

  EMB_HD int64_t row(int64_t i) const {
    return repair_index(static_cast<const I*>(args.indices)[i], args.rows);
  }
  // Return the address `kHeaderBytes` before the numbers of the columns from `column` on.
  EMB_HD const uint8_t* at(int64_t row, int64_t column) const {
    return args.packed + row * stride + column * kBits / 8;
  }
  EMB_HD RowFactors factors(int64_t row, int64_t i) const {
    return {at(row, 0), args.sample_weights ? args.sample_weights[i] : 1.0f};
  }
  // Prefetch columns [column, column + count) of the row of lookup i, if there is such a lookup.
  EMB_HD void prefetch(int64_t i, int64_t column, int64_t count) const {
    if (i >= last) return;
    const int64_t r = row(i);
    if (r < 0) return;
    // A row begins at any word of a line: the last line is not a multiple of 64 bytes away.
    const uint8_t* p = at(r, column);
    const int64_t end = kHeaderBytes + packed_bytes(count, kBits);
    for (int64_t line = 0; line < end - kWordBytes; line += 64) __builtin_prefetch(p + line, 0, 3);
    __builtin_prefetch(p + end - 1, 0, 3);
  }
};

// Pool columns [column, column + kVectors * kLanes) of one bag.
template <int kVectors, int kBits, class I, class O>
EMB_HD void pool_block(const PackedRows<kBits, I>& rows, int64_t column, int64_t begin, int64_t end,
                       float factor, O* out) {
  Vec sums[kVectors] = {};
  for (int64_t i = begin; i < end; ++i) {
    rows.prefetch(i + kAhead, column, kVectors * kLanes);
    const int64_t row = rows.row(i);
    if (row < 0) continue;
    const RowFactors factors = rows.factors(row, i);
    const uint8_t* source = rows.at(row, column);
    for (int v = 0; v < kVectors; ++v) {
      const Vec numbers = load_packed<kBits>(source + kHeaderBytes + v * kPackedBytes<kBits>);
      sums[v] += factors.by * numbers + factors.plus;
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
    const RowFactors factors = rows.factors(row, i);
    const uint8_t* source = rows.at(row, column);
    total += factors.by * load_packed_first<kBits>(source + kHeaderBytes, rest) + factors.plus;
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
  const PackedRows<kBits, I> rows{args, row_bytes(args.dim, kBits), last};
  for (int64_t i = first; i < first + kAhead; ++i) rows.prefetch(i, 0, args.dim);
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
    const float factor = mean ? 1.0f / static_cast<float>(end - begin) : 1.0f;
    const int64_t offset =
        args.bag_layout ? args.bag_layout[bag].element : (bag - args.first_bag) * args.out_stride;
    pool_bag(rows, begin, end, factor, out + offset);
  }
}

constexpr QuantLookupTable make_table() {
  QuantLookupTable table = {};
  for_each_dtype([&]<class O>(TypeTag<O>, int output) {
    table.at[0][output][0] = lookup<8, O, int32_t>;
    table.at[0][output][1] = lookup<8, O, int64_t>;
    table.at[1][output][0] = lookup<4, O, int32_t>;
    table.at[1][output][1] = lookup<4, O, int64_t>;
  });
  return table;
}

}  // namespace

extern const QuantLookupTable kQuantLookupTable;
const QuantLookupTable kQuantLookupTable = make_table();

}  // namespace emb::EMB_ISA
