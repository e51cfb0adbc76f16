// Quantised tables on one CPU thread. Quantising a row takes one pass for its minimum and maximum
// and one for its numbers. Lookups pool rows with core/pool_bag.h; a row is converted to floats as
// it is added.
#include "core/half.h"
#include "core/pool_bag.h"
#include "core/vec.h"
#include "quant/args.h"

namespace emb::EMB_ISA {
namespace {

// Return the header of a row of `dim` columns, at least one.
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

// The QuantizeFn of rows of dtype T.
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

// Vectors of floats from packed numbers, kLanes at a time.

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

// Load kLanes numbers as floats from `p`, which need not be aligned.
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

// The lookup. Values are computed before they are added: sums of numbers and sums of offsets, if
// added separately, would cancel in long bags.

// Lookups between the prefetch of a row, which is a cache line or a few, and its use.
constexpr int64_t kAhead = 16;

// The factor and the summand of a row's numbers, in all lanes: its scale and its offset, both times
// the weight of the lookup.
struct RowFactors {
  Vec by, plus;

  // `row` is the address of the row's header.
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

// The lookups of one feature in the form that `pool_bags` takes: core/pool_bag.h has the contract
// of the members. The address of a row is kHeaderBytes before the numbers of the first column that
// is not skipped.
template <int kBits, class I>
struct PackedRows {
  const QuantLookupArgs& args;
  int64_t stride, last;  // bytes per row; end of the lookups that may be prefetched
  int64_t skipped = 0;   // bytes of the columns that are skipped

  struct Values {
    const uint8_t* numbers;
    RowFactors factors;
    EMB_HD Vec vector(int v) const {
      return factors.by * load_packed<kBits>(numbers + v * kPackedBytes<kBits>) + factors.plus;
    }
    EMB_HD Vec first(int n) const {
      return factors.by * load_packed_first<kBits>(numbers, n) + factors.plus;
    }
  };

  EMB_HD int64_t dim() const { return args.dim; }
  EMB_HD static int64_t distance() { return kAhead; }
  EMB_HD void skip_columns(int64_t count) { skipped += count * kBits / 8; }
  EMB_HD const uint8_t* at(int64_t i) const {
    const int64_t row = repair_index(static_cast<const I*>(args.indices)[i], args.rows);
    return row < 0 ? nullptr : args.packed + row * stride + skipped;
  }
  EMB_HD Values values(const uint8_t* address, int64_t i) const {
    const float weight = args.sample_weights != nullptr ? args.sample_weights[i] : 1.0f;
    return {address + kHeaderBytes, {address - skipped, weight}};
  }
  EMB_HD void prefetch(int64_t i, int64_t count) const {
    if (i >= last) return;
    // A row begins at any word of a line: the last line is not a multiple of 64 bytes away.
    const uint8_t* address = at(i);
    if (address == nullptr) return;
    const int64_t end = kHeaderBytes + packed_bytes(count, kBits);
    for (int64_t line = 0; line < end - kWordBytes; line += 64) {
      __builtin_prefetch(address + line, 0, 3);
    }
    __builtin_prefetch(address + end - 1, 0, 3);
  }
};

// The QuantLookupFn of kBits bits, outputs of dtype O and indices of dtype I.
template <int kBits, class O, class I>
void lookup(const QuantLookupArgs& args, int64_t first_bag, int64_t last_bag) {
  const PackedRows<kBits, I> rows{args, row_bytes(args.dim, kBits), args.bags.end_lookup(last_bag)};
  pool_bags(args.bags, rows, first_bag, last_bag, static_cast<O*>(args.out));
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
