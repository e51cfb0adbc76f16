// Forward of table-batched embeddings on one CPU thread: the functions of LookupKernels
// (tbe/args.h). Most of its time is cache misses on random rows, so it must keep enough of them in
// flight. Rows are prefetched some lookups ahead, also across bags; how many depends on the size of
// a row.
//
// There are two paths, whose results have the same bits. `pool_valid` is for the usual case: the
// offsets of the range of bags ascend, all its indices are rows of the table, and there is no
// cache. It needs few instructions per lookup, because it repairs no index and prefetches whole
// rows, so more cache misses overlap. `pool` is for all other cases. It uses `pool_bags` of
// core/pool_bag.h and repairs every index as it reads it.
#include <type_traits>

#include "core/pool_bag.h"
#include "tbe/args.h"
#include "tbe/read_rows.h"

namespace emb::EMB_ISA {
namespace {

// Bytes of rows in flight; more did not help (measured, reports/LOG.md). The limit is in bytes, not
// rows, because a row of 512 bytes is 8 requests.
constexpr int64_t kPrefetchBytes = 4096;

// Return how many lookups ahead to prefetch rows of `row_bytes` bytes.
int64_t prefetch_distance(int64_t row_bytes) {
  const int64_t num_rows =
      kPrefetchBytes / (row_bytes < kCacheLineBytes ? kCacheLineBytes : row_bytes);
  constexpr int64_t kMinRows = 2, kMaxRows = 32;
  return num_rows < kMinRows ? kMinRows : (num_rows > kMaxRows ? kMaxRows : num_rows);
}

// The lookups of one feature as an argument of `pool_bags`. core/pool_bag.h has the contract of the
// members. `Reader` is a reader of tbe/read_rows.h.
template <class Reader>
struct WeightedRows {
  using Element = typename Reader::Element;
  Reader reader;
  const float* sample_weights;  // [L], or null for weights of 1
  int64_t prefetch_end;         // lookups from here on are not prefetched
  int64_t lookups_ahead;        // between the prefetch of a row and its use

  struct Values {
    const Element* columns;
    Vec weight;
    EMB_HD Vec vector(int v) const { return weight * load(columns + v * kLanes); }
    EMB_HD Vec first(int n) const { return weight * load_first(columns, n); }
  };

  EMB_HD int64_t dim() const { return reader.dim; }
  EMB_HD int64_t prefetch_distance() const { return lookups_ahead; }
  EMB_HD void skip_columns(int64_t count) { reader.skip_columns(count); }
  EMB_HD const Element* at(int64_t i) const { return reader.at(i); }
  EMB_HD Values values(const Element* columns, int64_t i) const {
    return {columns, broadcast(sample_weights != nullptr ? sample_weights[i] : 1.0f)};
  }
  EMB_HD void prefetch(int64_t i, int64_t count) const {
    if (i < prefetch_end) reader.prefetch(i, count);
  }
};

// Pool bags [first_bag, last_bag) with any offsets and indices; O is the dtype of the output.
template <class O, class Reader>
EMB_HD void pool(const LookupArgs& args, const Reader& reader, int64_t first_bag,
                 int64_t last_bag) {
  const int64_t distance = prefetch_distance(args.rows.dim * sizeof(typename Reader::Element));
  const WeightedRows<Reader> rows{reader, args.sample_weights, args.bags.end_lookup(last_bag),
                                  distance};
  pool_bags(args.bags, rows, first_bag, last_bag, static_cast<O*>(args.out));
}

// The path for valid offsets and indices.

// The rows of lookups whose indices are all valid. A row has kVectors vector registers, or any
// length if kVectors is 0.
template <int kVectors, class W, class I>
struct ValidRows {
  const W* table;
  const I* indices;       // [L]
  int64_t runtime_dim;    // columns of a row, used if kVectors is 0
  int64_t end;            // end of the range of lookups
  int64_t lookups_ahead;  // between the prefetch of a row and its use

  ValidRows(const LookupArgs& args, const I* range_indices, int64_t end_lookup)
      : table(static_cast<const W*>(args.rows.table)),
        indices(range_indices),
        runtime_dim(args.rows.dim),
        end(end_lookup),
        lookups_ahead(prefetch_distance(row_bytes())) {}

  EMB_HD int64_t dim() const { return kVectors > 0 ? kVectors * kLanes : runtime_dim; }
  EMB_HD int64_t row_bytes() const { return dim() * static_cast<int64_t>(sizeof(W)); }
  EMB_HD const W* at(int64_t i) const { return table + static_cast<int64_t>(indices[i]) * dim(); }
  // Prefetch the row of the lookup `lookups_ahead` after lookup i. Near the end, where there is
  // none, prefetch the last row again.
  EMB_HD void prefetch_after(int64_t i) const {
    prefetch_row<false>(at(i + lookups_ahead < end ? i + lookups_ahead : end - 1), row_bytes());
  }
  // Prefetch the rows of the first `lookups_ahead` lookups from `first` on.
  EMB_HD void prefetch_first(int64_t first) const {
    const int64_t prefetch_end = first + lookups_ahead < end ? first + lookups_ahead : end;
    for (int64_t i = first; i < prefetch_end; ++i) prefetch_row<false>(at(i), row_bytes());
  }
};

// Store a vector of the output. With kStream, which only float outputs use, the store bypasses the
// caches, and `out` must be aligned to a vector; without AVX2 it is an ordinary store.
template <bool kStream, class O>
EMB_HD void store_output(O* out, Vec values) {
  store(out, values);
}

template <bool kStream>
EMB_HD void store_output(float* out, Vec values) {
#if defined(__AVX512F__)
  if constexpr (kStream) return _mm512_stream_ps(out, values);
#elif defined(__AVX2__)
  if constexpr (kStream) return _mm256_stream_ps(out, values);
#endif
  store(out, values);
}

// Make stores that bypass the caches visible to other threads before any later store. Each thread
// must call it after such stores.
EMB_HD void fence_streaming_stores() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// Write the output of a bag of one lookup, or of a lookup without pooling: its row times `weight`.
// Zero is added, as in the sum of a longer bag, because this turns -0 into 0.
template <int kVectors, bool kStream, class W, class O>
EMB_HD void write_one_row(const W* row, int64_t dim, float weight, O* out) {
  const Vec factor = broadcast(weight);
  if constexpr (kVectors > 0) {
    for (int v = 0; v < kVectors; ++v) {
      store_output<kStream>(out + v * kLanes, load(row + v * kLanes) * factor + Vec{});
    }
  } else {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes)
      store_output<kStream>(out + d, load(row + d) * factor + Vec{});
    const int remaining = static_cast<int>(dim - d);
    if (remaining > 0)
      store_first(out + d, load_first(row + d, remaining) * factor + Vec{}, remaining);
  }
}

// Write columns [column, column + kVectors * kLanes) of the output of a bag: `scale` times the sum
// of the rows of lookups [begin, end), each times its sample weight in `weights` ([L]; null: 1).
// With kPrefetches, for the first block of a bag, also prefetch the rows of later lookups.
template <int kVectors, bool kPrefetches, bool kStream, class Rows, class O>
EMB_HD void sum_block(const Rows& rows, const float* weights, int64_t column, int64_t begin,
                      int64_t end, float scale, O* out) {
  Vec sums[kVectors] = {};
  if (weights == nullptr) {
    for (int64_t i = begin; i < end; ++i) {
      if constexpr (kPrefetches) rows.prefetch_after(i);
      const auto* block = rows.at(i) + column;
      for (int v = 0; v < kVectors; ++v) sums[v] += load(block + v * kLanes);
    }
  } else {
    for (int64_t i = begin; i < end; ++i) {
      if constexpr (kPrefetches) rows.prefetch_after(i);
      const auto* block = rows.at(i) + column;
      const Vec weight = broadcast(weights[i]);
      for (int v = 0; v < kVectors; ++v) sums[v] += weight * load(block + v * kLanes);
    }
  }
  const Vec factor = broadcast(scale);
  for (int v = 0; v < kVectors; ++v)
    store_output<kStream>(out + column + v * kLanes, sums[v] * factor);
}

// Write the output of a bag as sum_block does, for rows of any length. Rows are prefetched whole:
// by the first block, or by a separate loop if a row has less than two registers.
template <class Rows, class O>
EMB_HD void sum_bag(const Rows& rows, const float* weights, int64_t begin, int64_t end, float scale,
                    O* out) {
  const int64_t dim = rows.dim();
  int64_t column = 0;
  if (dim >= 8 * kLanes) {
    sum_block<8, true, false>(rows, weights, 0, begin, end, scale, out);
    column = 8 * kLanes;
    for (; dim - column >= 8 * kLanes; column += 8 * kLanes) {
      sum_block<8, false, false>(rows, weights, column, begin, end, scale, out);
    }
  } else if (dim >= 2 * kLanes) {
    sum_block<2, true, false>(rows, weights, 0, begin, end, scale, out);
    column = 2 * kLanes;
  } else {
    for (int64_t i = begin; i < end; ++i) rows.prefetch_after(i);
  }
  for (; dim - column >= 2 * kLanes; column += 2 * kLanes) {
    sum_block<2, false, false>(rows, weights, column, begin, end, scale, out);
  }
  if (dim - column >= kLanes) {
    sum_block<1, false, false>(rows, weights, column, begin, end, scale, out);
    column += kLanes;
  }
  if (column == dim) return;
  const int remaining = static_cast<int>(dim - column);
  Vec total = {};
  for (int64_t i = begin; i < end; ++i) {
    const Vec weight = broadcast(weights != nullptr ? weights[i] : 1.0f);
    total += weight * load_first(rows.at(i) + column, remaining);
  }
  store_first(out + column, total * broadcast(scale), remaining);
}

// Return whether every bag of [first_bag, last_bag) has exactly one lookup, if offsets[last_bag] is
// the end of the last bag. The loop collects differing bits, because a loop with a bool result
// would not vectorise.
template <class Offset>
bool all_have_one_lookup(const Offset* offsets, int64_t first_bag, int64_t last_bag) {
  const auto first = static_cast<uint64_t>(offsets[first_bag]);
  uint64_t differences = 0;
  for (int64_t k = 0; k <= last_bag - first_bag; ++k) {
    differences |=
        static_cast<uint64_t>(offsets[first_bag + k]) ^ (first + static_cast<uint64_t>(k));
  }
  return differences == 0;
}

bool all_have_one_lookup(const Bags& bags, int64_t first_bag, int64_t last_bag) {
  if (bags.end(last_bag - 1) - bags.begin(first_bag) != last_bag - first_bag) return false;
  const IndexArray offsets = bags.offsets;
  return offsets.is_int64
             ? all_have_one_lookup(static_cast<const int64_t*>(offsets.data), first_bag, last_bag)
             : all_have_one_lookup(static_cast<const int32_t*>(offsets.data), first_bag, last_bag);
}

// Pool bags [first_bag, last_bag). The caller must have checked that their offsets ascend and that
// their indices are valid. Rows have kVectors vector registers, or any length if kVectors is 0.
// With kStream, which needs kVectors > 0, the output bypasses the caches.
template <int kVectors, bool kStream, class O, class W, class I>
void pool_valid(const LookupArgs& args, const I* indices, int64_t first_bag, int64_t last_bag) {
  static_assert(kVectors <= 8 || kVectors % 8 == 0, "sum_block takes 8 vectors of longer rows");
  const BagItems& bags = args.bags;
  const int64_t first = bags.first_lookup(first_bag), end = bags.end_lookup(last_bag);
  const ValidRows<kVectors, W, I> rows(args, indices, end);
  rows.prefetch_first(first);
  const float* weights = args.sample_weights;
  O* const out = static_cast<O*>(args.out);
  if (bags.pooling == Pooling::kNone) {
    for (int64_t i = first; i < end; ++i) {
      rows.prefetch_after(i);
      write_one_row<kVectors, kStream>(rows.at(i), rows.dim(), 1.0f, out + i * bags.stride);
    }
    return;
  }
  const auto output_row = [&](int64_t bag) { return out + bags.output_offset(first_bag, bag); };
  if (all_have_one_lookup(bags.bags, first_bag, last_bag)) {
    for (int64_t bag = first_bag, i = first; bag < last_bag; ++bag, ++i) {
      rows.prefetch_after(i);
      const float weight = weights != nullptr ? weights[i] : 1.0f;
      write_one_row<kVectors, kStream>(rows.at(i), rows.dim(), weight, output_row(bag));
    }
    return;
  }
  int64_t begin = first;
  for (int64_t bag = first_bag; bag < last_bag; ++bag) {
    const int64_t bag_end = bags.bags.end(bag);
    const float scale = mean_factor(bags.pooling, bag_end - begin);
    if constexpr (kVectors == 0) {
      sum_bag(rows, weights, begin, bag_end, scale, output_row(bag));
    } else if constexpr (kVectors <= 8) {
      sum_block<kVectors, true, kStream>(rows, weights, 0, begin, bag_end, scale, output_row(bag));
    } else {
      sum_block<8, true, kStream>(rows, weights, 0, begin, bag_end, scale, output_row(bag));
      for (int column = 8; column < kVectors; column += 8) {
        sum_block<8, false, kStream>(rows, weights, column * kLanes, begin, bag_end, scale,
                                     output_row(bag));
      }
    }
    begin = bag_end;
  }
}

// Pool with the instance of pool_valid for the dim of the table. Rows of another length do not
// bypass the caches.
template <bool kStream, class O, class W, class I>
void pool_valid_of_dim(const LookupArgs& args, const I* indices, int64_t first_bag,
                       int64_t last_bag) {
#if defined(__x86_64__) && !defined(__AVX2__)
  // Nearly every x86 processor runs the code for AVX2 or AVX-512. The code for older processors
  // keeps the general loop, which gives the same bits and compiles in less time.
  return pool_valid<0, false, O, W>(args, indices, first_bag, last_bag);
#else
  switch (args.rows.dim % kLanes == 0 ? args.rows.dim / kLanes : 0) {
    case 1:
      return pool_valid<1, kStream, O, W>(args, indices, first_bag, last_bag);
    case 2:
      return pool_valid<2, kStream, O, W>(args, indices, first_bag, last_bag);
    case 3:
      return pool_valid<3, kStream, O, W>(args, indices, first_bag, last_bag);
    case 4:
      return pool_valid<4, kStream, O, W>(args, indices, first_bag, last_bag);
    case 6:
      return pool_valid<6, kStream, O, W>(args, indices, first_bag, last_bag);
    case 8:
      return pool_valid<8, kStream, O, W>(args, indices, first_bag, last_bag);
    case 16:
      return pool_valid<16, kStream, O, W>(args, indices, first_bag, last_bag);
    default:
      return pool_valid<0, false, O, W>(args, indices, first_bag, last_bag);
  }
#endif
}

// Return whether indices [begin, end) are all rows of a table of num_rows rows. Unlike for
// indices_are_valid of tbe/check.h, -1 is not.
template <class I>
bool are_valid_rows(const I* indices, int64_t begin, int64_t end, int64_t num_rows) {
  // The loop collects signs of 64-bit differences, because with a bool result it would not
  // vectorise.
  uint64_t sign_bits = 0;
  for (int64_t i = begin; i < end; ++i) {
    const auto index = static_cast<uint64_t>(static_cast<int64_t>(indices[i]));
    sign_bits |= index | (static_cast<uint64_t>(num_rows) - 1 - index);
  }
  return static_cast<int64_t>(sign_bits) >= 0;
}

// Return whether the offsets of bags [first_bag, last_bag) are not negative and never decrease.
// Then every bag begins where the previous bag ends. A violation sets the sign of `sign_bits`.
template <class Offset>
bool offsets_ascend(const Offset* offsets, int64_t first_bag, int64_t last_bag) {
  using U = std::make_unsigned_t<Offset>;
  auto sign_bits = static_cast<U>(offsets[first_bag]);
  for (int64_t bag = first_bag + 1; bag < last_bag; ++bag) {
    sign_bits |= static_cast<U>(offsets[bag]) |
                 (static_cast<U>(offsets[bag]) - static_cast<U>(offsets[bag - 1]));
  }
  return static_cast<Offset>(sign_bits) >= 0;
}

bool offsets_ascend(IndexArray offsets, int64_t first_bag, int64_t last_bag) {
  return offsets.is_int64
             ? offsets_ascend(static_cast<const int64_t*>(offsets.data), first_bag, last_bag)
             : offsets_ascend(static_cast<const int32_t*>(offsets.data), first_bag, last_bag);
}

// The LookupFn for tables without a cache.
template <class W, class O, class I>
void lookup(const LookupArgs& args, int64_t first_bag, int64_t last_bag) {
  const auto* indices = static_cast<const I*>(args.rows.indices.data);
  const int64_t begin = args.bags.first_lookup(first_bag), end = args.bags.end_lookup(last_bag);
  if (!offsets_ascend(args.bags.bags.offsets, first_bag, last_bag) ||
      !are_valid_rows(indices, begin, end, args.rows.num_rows)) {
    return pool<O>(args, PlainRows<W, const I*>(args.rows, indices), first_bag, last_bag);
  }
  if constexpr (std::is_same_v<O, float>) {
    if (args.bypasses_caches) {
      pool_valid_of_dim<true, O, W>(args, indices, first_bag, last_bag);
      return fence_streaming_stores();
    }
  }
  pool_valid_of_dim<false, O, W>(args, indices, first_bag, last_bag);
}

// The LookupFn for tables with a cache of their dtype.
template <class W, class O, class I>
void cached_lookup(const LookupArgs& args, int64_t first_bag, int64_t last_bag) {
  const auto* indices = static_cast<const I*>(args.rows.indices.data);
  pool<O>(args, CachedRows<W, const I*>(args.rows, indices), first_bag, last_bag);
}

// The LookupFn for tables with a cache of another dtype.
template <class O>
void mixed_lookup(const LookupArgs& args, int64_t first_bag, int64_t last_bag) {
  pool<O>(args, MixedRows(args.rows, args.scratch), first_bag, last_bag);
}

constexpr LookupKernels make_kernels() {
  LookupKernels kernels = {};
  for_each_dtype([&]<class O>(TypeTag<O>, int output) {
    kernels.mixed[output] = mixed_lookup<O>;
    for_each_dtype([&]<class W>(TypeTag<W>, int weights) {
      kernels.uniform[0][weights][output][0] = lookup<W, O, int32_t>;
      kernels.uniform[0][weights][output][1] = lookup<W, O, int64_t>;
      kernels.uniform[1][weights][output][0] = cached_lookup<W, O, int32_t>;
      kernels.uniform[1][weights][output][1] = cached_lookup<W, O, int64_t>;
    });
  });
  return kernels;
}

}  // namespace

extern const LookupKernels kLookupKernels;
const LookupKernels kLookupKernels = make_kernels();

}  // namespace emb::EMB_ISA
