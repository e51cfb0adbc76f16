// Quantised tables on one CPU thread: quantise rows (QuantizeTable), and look up bags
// (QuantLookupTable), both declared in quant/args.h. Quantising takes two passes over a row: one
// finds the range of its values, one writes its numbers.
#include <type_traits>
#include <utility>

#include "core/half.h"
#include "core/pool_bag.h"
#include "core/vec.h"
#include "quant/args.h"

namespace emb::EMB_ISA {
namespace {

// Return the header of a row of `dim` values, at least one.
template <int kFormat, class T>
RowHeader header_of(const T* row, int64_t dim) {
  float minimum = to_float(row[0]), maximum = minimum;
  for (int64_t d = 1; d < dim; ++d) {
    const float value = to_float(row[d]);
    minimum = value < minimum ? value : minimum;
    maximum = value > maximum ? value : maximum;
  }
  return row_header(minimum, maximum, kFormat);
}

// Write the numbers (or values) of a row of `dim` columns to `out`, packed; the unused bits of the
// last byte are 0.
template <int kFormat, class T>
EMB_HD void encode_row(const T* row, int64_t dim, InverseHeader header, uint8_t* out) {
  constexpr int kBits = bits_per_column(kFormat), kNumbersPerByte = kBits < 8 ? 8 / kBits : 1;
  constexpr int64_t kBytes = kBits < 8 ? 1 : kBits / 8;
  for (int64_t b = 0; b * kNumbersPerByte < dim; ++b) {
    uint32_t bits = 0;
    for (int i = 0; i < kNumbersPerByte && b * kNumbersPerByte + i < dim; ++i) {
      bits |= encode(to_float(row[b * kNumbersPerByte + i]), header, kFormat) << (i * kBits);
    }
    for (int i = 0; i < kBytes; ++i) out[b * kBytes + i] = static_cast<uint8_t>(bits >> (8 * i));
  }
}

// The QuantizeFn of a format, for rows of dtype T.
template <int kFormat, class T>
void quantize(const QuantizeArgs& args, int64_t first_row, int64_t last_row) {
  const int64_t dim = args.dim, stride = row_bytes(dim, kFormat);
  const int64_t nbytes = header_bytes(kFormat) + packed_bytes(dim, kFormat);
  for (int64_t r = first_row; r < last_row; ++r) {
    const T* row = static_cast<const T*>(args.weights) + r * dim;
    uint8_t* out = args.packed + r * stride;
    RowHeader header = {};
    if constexpr (has_scale(kFormat)) {
      header = header_of<kFormat>(row, dim);
      __builtin_memcpy(out, &header, kHeaderBytes);
    }
    encode_row<kFormat>(row, dim, InverseHeader(header), out + header_bytes(kFormat));
    for (int64_t b = nbytes; b < stride; ++b) out[b] = 0;
  }
}

// Call `body.template operator()<format>(index)` for every format and its position in kRowFormats.
template <class Body, int... kIndex>
constexpr void for_each_format(const Body& body, std::integer_sequence<int, kIndex...>) {
  (body.template operator()<kRowFormats[kIndex]>(kIndex), ...);
}

// The positions of all formats in kRowFormats, for for_each_format.
using FormatIndices = std::make_integer_sequence<int, kNumRowFormats>;

constexpr QuantizeTable make_quantize_table() {
  QuantizeTable table = {};
  for_each_format(
      [&]<int kFormat>(int format) {
        for_each_dtype([&]<class T>(TypeTag<T>, int type) {
          table.kernels[format][type] = quantize<kFormat, T>;
        });
      },
      FormatIndices());
  return table;
}

}  // namespace

extern const QuantizeTable kQuantizeTable;
const QuantizeTable kQuantizeTable = make_quantize_table();

// Registers of floats from packed numbers, `kLanes` at a time.

// Bytes of kLanes columns.
template <int kFormat>
inline constexpr int kBytesPerVector = kLanes * bits_per_column(kFormat) / 8;

typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));

#if defined(__AVX2__)

// Return the two numbers of 4 bits of each of 8 bytes, in order.
EMB_HD __m128i unpack_nibbles(__m128i bytes) {
  const __m128i mask = _mm_set1_epi8(15);
  const __m128i high = _mm_and_si128(_mm_srli_epi16(bytes, 4), mask);
  return _mm_unpacklo_epi8(_mm_and_si128(bytes, mask), high);
}

#endif

// Load `kLanes` numbers of 2, 4 or 8 bits from `p`, which need not be aligned.
template <int kBits>
EMB_HD Ints load_numbers(const uint8_t* p) {
#if defined(__AVX2__)
  if constexpr (kBits == 2) {
    uint32_t word = 0;
    __builtin_memcpy(&word, p, kLanes / 4);
    Ints shifts;
    for (int i = 0; i < kLanes; ++i) shifts[i] = 2 * i;
    typedef uint32_t Words __attribute__((vector_size(kLanes * sizeof(uint32_t))));
    return reinterpret_cast<Ints>((Words{} + word) >> reinterpret_cast<Words>(shifts)) & 3;
  } else {
    __m128i bytes;
    if constexpr (kBits == 8 && kLanes == 16) {
      bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    } else if constexpr (kBits == 8 || kLanes == 16) {
      bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    } else {
      int32_t word;
      __builtin_memcpy(&word, p, sizeof(word));
      bytes = _mm_cvtsi32_si128(word);
    }
    if constexpr (kBits == 4) bytes = unpack_nibbles(bytes);
#if defined(__AVX512F__)
    return reinterpret_cast<Ints>(_mm512_cvtepu8_epi32(bytes));
#else
    return reinterpret_cast<Ints>(_mm256_cvtepu8_epi32(bytes));
#endif
  }
#else
  constexpr int kNumbersPerByte = 8 / kBits;
  Ints numbers;
  for (int i = 0; i < kLanes; ++i) {
    numbers[i] = p[i / kNumbersPerByte] >> (i % kNumbersPerByte * kBits) & ((1 << kBits) - 1);
  }
  return numbers;
#endif
}

// Load `kLanes` columns from `p`: values, or, in formats with a header, numbers.
template <int kFormat>
EMB_HD Vec load_packed(const uint8_t* p) {
  if constexpr (kFormat == kFp16) {
    return load(reinterpret_cast<const half16*>(p));
  } else if constexpr (kFormat == kBf16) {
    return load(reinterpret_cast<const bfloat16*>(p));
  } else if constexpr (kFormat == kFp32) {
    return load(reinterpret_cast<const float*>(p));
  } else {
    const Ints numbers = load_numbers<bits_per_column(kFormat)>(p);
    if constexpr (is_integer(kFormat)) return __builtin_convertvector(numbers, Vec);
    const Ints magnitude = (numbers & 0x7f) << (23 - mantissa_bits(kFormat));
    const Vec value = reinterpret_cast<Vec>(magnitude) * float8_factor(kFormat);
    return reinterpret_cast<Vec>(reinterpret_cast<Ints>(value) | (numbers & 0x80) << 24);
  }
}

namespace {

// The lookup. Each row is converted to values before it is added. Separate sums of scaled numbers
// and of offsets would need fewer operations, but they could cancel each other in long bags, and
// lose precision.

// Lookups between the prefetch of a row and its use. A row is one cache line, or a few. The number
// is not measured.
constexpr int64_t kRowsAhead = 16;

// The scale and the offset of a row times the weight of its lookup, in all lanes.
struct ScaleFactors {
  Vec scale, offset;

  EMB_HD ScaleFactors(const uint8_t* row, float weight) {
    int32_t header;
    __builtin_memcpy(&header, row, kHeaderBytes);
#if defined(__AVX512F__)
    const __m512 pairs = _mm512_cvtph_ps(_mm256_broadcastd_epi32(_mm_cvtsi32_si128(header))) *
                         _mm512_set1_ps(weight);
    scale = _mm512_moveldup_ps(pairs);
    offset = _mm512_movehdup_ps(pairs);
#elif defined(__AVX2__)
    const __m256 pairs =
        _mm256_cvtph_ps(_mm_broadcastd_epi32(_mm_cvtsi32_si128(header))) * _mm256_set1_ps(weight);
    scale = _mm256_moveldup_ps(pairs);
    offset = _mm256_movehdup_ps(pairs);
#else
    // The same as to_float of two finite halves, both at once.
    const Ints halves = {header & 0xffff, header >> 16};
    const Vec magnitude = reinterpret_cast<Vec>((halves & 0x7fff) << 13) * 0x1p112f;
    const Ints sign = (halves & 0x8000) << 16;
    const Vec pair = reinterpret_cast<Vec>(reinterpret_cast<Ints>(magnitude) | sign);
    scale = broadcast(weight * pair[0]);
    offset = broadcast(weight * pair[1]);
#endif
  }
};

// The factor of a row without a header, the weight of its lookup, in all lanes.
struct WeightFactor {
  Vec scale;

  EMB_HD WeightFactor(const uint8_t*, float weight) : scale(broadcast(weight)) {}
};

#if defined(__AVX512F__)

// The values of all possible numbers of 2 or 4 bits in a row, times the weight of its lookup. A
// permutation selects values by the lowest 4 bits of each lane, so that numbers need no conversion
// and no multiplication.
template <int kFormat>
struct ValueTable {
  Vec values;

  EMB_HD ValueTable(const uint8_t* row, float weight) {
    const ScaleFactors factors(row, weight);
    Vec numbers;
    for (int i = 0; i < kLanes; ++i) numbers[i] = static_cast<float>(i & ((1 << kFormat) - 1));
    values = factors.scale * numbers + factors.offset;
  }
  EMB_HD Vec vector(const uint8_t* p) const {
    if constexpr (kFormat == kInt2) {
      int32_t word;
      __builtin_memcpy(&word, p, sizeof(word));
      const __m512i shifts =
          _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
      return _mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi32(word), shifts), values);
    }
    // Each byte is in the lower half of a word of 64 bits; copy its high bits to the upper half.
    const __m512i bytes =
        _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    return _mm512_permutexvar_ps(_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28)), values);
  }
};

template <int kFormat>
inline constexpr bool kHasValueTable = kFormat == kInt2 || kFormat == kInt4;

#else

template <int>
using ValueTable = ScaleFactors;
template <int>
inline constexpr bool kHasValueTable = false;

#endif

// The lookups of one feature as `pool_bags` reads them (core/pool_bag.h). I is the integer type of
// the indices. at() returns the address of a row plus skipped_bytes: the first column that is not
// skipped is header_bytes() after it.
template <int kFormat, class I>
struct PackedRows {
  const QuantLookupArgs& args;
  int64_t stride;             // bytes per row
  int64_t prefetch_end;       // lookups from here on are not prefetched
  int64_t skipped_bytes = 0;  // bytes of the columns that are skipped

  struct Values {
    const uint8_t* numbers;
    std::conditional_t<kHasValueTable<kFormat>, ValueTable<kFormat>,
                       std::conditional_t<has_scale(kFormat), ScaleFactors, WeightFactor>>
        factors;

    // Return vector number v of the columns.
    EMB_HD Vec vector(int v) const { return at(numbers + v * kBytesPerVector<kFormat>); }
    // Read the first `n` columns (0 < n < kLanes), and no byte beyond them; other lanes are
    // undefined.
    EMB_HD Vec first(int n) const {
      uint8_t buffer[kBytesPerVector<kFormat>] = {};
      const int bytes = (n * bits_per_column(kFormat) + 7) / 8;
      for (int i = 0; i < bytes; ++i) buffer[i] = numbers[i];
      return at(buffer);
    }
    EMB_HD Vec at(const uint8_t* p) const {
      if constexpr (kHasValueTable<kFormat>) {
        return factors.vector(p);
      } else if constexpr (has_scale(kFormat)) {
        return factors.scale * load_packed<kFormat>(p) + factors.offset;
      } else {
        return factors.scale * load_packed<kFormat>(p);
      }
    }
  };

  EMB_HD int64_t dim() const { return args.dim; }
  EMB_HD static int64_t prefetch_distance() { return kRowsAhead; }
  EMB_HD void skip_columns(int64_t count) { skipped_bytes += count * bits_per_column(kFormat) / 8; }
  EMB_HD const uint8_t* at(int64_t i) const {
    const int64_t row = repair_index(static_cast<const I*>(args.indices)[i], args.num_rows);
    return row < 0 ? nullptr : args.packed + row * stride + skipped_bytes;
  }
  EMB_HD Values values(const uint8_t* address, int64_t i) const {
    const float weight = args.sample_weights != nullptr ? args.sample_weights[i] : 1.0f;
    return {address + header_bytes(kFormat), {address - skipped_bytes, weight}};
  }
  EMB_HD void prefetch(int64_t i, int64_t count) const {
    if (i >= prefetch_end) return;
    // A row may begin at any word of a cache line, so its last byte may be in one more line than
    // the loop prefetches.
    const uint8_t* address = at(i);
    if (address == nullptr) return;
    const int64_t nbytes = header_bytes(kFormat) + packed_bytes(count, kFormat);
    for (int64_t line = 0; line < nbytes - kWordBytes; line += 64) {
      __builtin_prefetch(address + line, 0, 3);
    }
    __builtin_prefetch(address + nbytes - 1, 0, 3);
  }
};

// The QuantLookupFn of a format, for an output of dtype O and indices of dtype I.
template <int kFormat, class O, class I>
void lookup(const QuantLookupArgs& args, int64_t first_bag, int64_t last_bag) {
  const PackedRows<kFormat, I> rows{args, row_bytes(args.dim, kFormat),
                                    args.bags.end_lookup(last_bag)};
  pool_bags(args.bags, rows, first_bag, last_bag, static_cast<O*>(args.out));
}

constexpr QuantLookupTable make_lookup_table() {
  QuantLookupTable table = {};
  for_each_format(
      [&]<int kFormat>(int format) {
        for_each_dtype([&]<class O>(TypeTag<O>, int output) {
          table.kernels[format][output][0] = lookup<kFormat, O, int32_t>;
          table.kernels[format][output][1] = lookup<kFormat, O, int64_t>;
        });
      },
      FormatIndices());
  return table;
}

}  // namespace

extern const QuantLookupTable kQuantLookupTable;
const QuantLookupTable kQuantLookupTable = make_lookup_table();

}  // namespace emb::EMB_ISA
