// The arguments and tables of the CPU kernels of table-batched embeddings.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"
#include "core/portability.h"
#include "optim/args.h"

namespace emb {

// Divides 32-bit numbers by a number that is fixed for a whole call: one multiplication instead of
// a division. With magic = ceil(2^64 / d) the high half of n * magic is n / d for all n, d < 2^32
// (Lemire, Kaser & Kurz, 2019).
struct Divider {
  uint64_t magic;

  EMB_HD explicit Divider(uint32_t divisor) : magic(~uint64_t{0} / divisor + 1) {}

  // d = 1 has a magic of 2^64, which wraps to 0.
  EMB_HD uint32_t operator()(uint32_t n) const {
    if (magic == 0) return n;
#if defined(__CUDA_ARCH__)
    return static_cast<uint32_t>(__umul64hi(magic, n));
#else
    return static_cast<uint32_t>(static_cast<unsigned __int128>(magic) * n >> 64);
#endif
  }
};

// Whether a table has a cache in front of it, and whether the cache has another dtype.
enum class Caching : int { kNone = 0, kSame = 1, kMixed = 2 };

// The rows that the lookups of one feature read: those of its table, or of the cache in front of
// it.
struct TableRows {
  const void* table;  // row 0 of the feature's table
  int64_t rows, dim;
  IndexArray indices;
  Caching caching = Caching::kNone;
  // The other members are only set if there is a cache.
  Dtype type = Dtype::kFloat, cache_type = Dtype::kFloat;
  const void* cache = nullptr;
  const int32_t* slots = nullptr;  // [L]
  int64_t num_slots = 0, cache_stride = 0;
};

// The forward kernels, which work on a range of bags of one feature.

struct LookupArgs {
  TableRows rows;
  BagRows bags;
  const float* sample_weights;  // [L] or null
  void* out;                    // base of the rows of `bags`
  float* scratch = nullptr;     // one row, if the cache and the table differ in dtype
  bool stream = false;          // store past the caches; output rows are whole cache lines
};

using LookupFn = void (*)(const LookupArgs&, int64_t first_bag, int64_t last_bag);

struct LookupTable {
  LookupFn at[2][kDtypes][kDtypes][2];  // [cached][weights dtype][output dtype][indices are int64]
  LookupFn mixed[kDtypes];  // [output dtype], if the cache and the table differ in dtype
};

// The kernels for the gradient of sample weights, which work on a range of bags of one feature.

struct SampleWeightArgs {
  TableRows rows;
  BagRows bags;
  const void* grad;          // base of the rows of `bags`
  float* out;                // [L]
  float* scratch = nullptr;  // one row, if the cache and the table differ in dtype
};

using SampleWeightFn = void (*)(const SampleWeightArgs&, int64_t first_bag, int64_t last_bag);

struct SampleWeightTable {
  SampleWeightFn at[2][kDtypes][kDtypes];  // [cached][weights dtype][gradient dtype]
  SampleWeightFn mixed[kDtypes];  // [gradient dtype], if the cache and the table differ in dtype
};

// The backward kernels, which work on a range of unique rows.

// Lookups of one unique row that are summed at once; longer segments are divided into chunks of
// this length, whose partial sums are added in order. Fixed, so that the sum never depends on the
// number of threads.
inline constexpr int64_t kChunk = 1024;

// Where the gradient of every sorted lookup is, and its weight.
struct GradArgs {
  const void* grad;
  int64_t grad_stride;  // elements of `element_size` bytes
  int64_t element_size;
  const Feature* features;
  const BagLayout* bag_layout;  // the bags of a variable batch; null for a fixed one
  int64_t batch;                // bags per feature of a fixed batch
  Divider by_batch;
  const int32_t *segments, *lookups, *bags;
  const float* bag_scale;       // [bags] 1 / length for MEAN, else null
  const float* sample_weights;  // [L] or null
  bool per_lookup;              // NONE: row i of grad belongs to lookup i
  bool fetch_ahead;             // the gradient is too large for the caches
};

// Segments longer than kChunk, ascending; the chunk sums of segment i are rows first_chunk[i] to
// first_chunk[i + 1] of `partials`, each `stride` floats.
struct LongSegments {
  const int64_t *groups, *first_chunk;
  int64_t count;
  const float* partials;
  int64_t stride;
};

// The rows of one table without a cache. Row r, a linear row id, is at element `element + r * dim`
// and row-wise state `state + r` of its tier.
struct TableSpan {
  int64_t first_row, rows, dim, tier, element, state;
  int64_t feature;  // the one that reads the table, -1 if there are several
};

struct UpdateArgs {
  GradArgs grads;
  LongSegments longs = {};
  const TableSpan* tables = nullptr;  // tables by ascending rows; null if one of them has a cache
  int64_t num_tables = 0;
  const int64_t* rows = nullptr;       // [U] linear row ids
  const int32_t* row_slots = nullptr;  // [U] slots of rows in the cache, or null
  TierRows tiers[kTiers] = {};
  const double* hyper = nullptr;

  explicit UpdateArgs(const GradArgs& gradients) : grads(gradients) {}
};

// Add up the gradients of sorted lookups [begin, end).
using SumFn = void (*)(const GradArgs&, int64_t begin, int64_t end, int64_t dim, float* sum);
// Unique rows processed together while the next ones are prefetched. Four rows of 256 to 512 bytes
// with their gradients fill the miss buffers; eight made the update 1.1-1.4x slower (Zen 4).
inline constexpr int kRowBatch = 4;
// Rows of scratch per unique row: its gradient, and weights and states stored in 16 bits.
inline constexpr int kScratchRows = 2 + kMaxElementStates;
// Update unique rows [begin, end), none longer than `widest`; `scratch` has room for
// kRowBatch * kScratchRows such rows.
using UpdateFn = void (*)(const UpdateArgs&, SumFn, float* scratch, int64_t widest, int64_t begin,
                          int64_t end);

struct UpdateTable {
  SumFn sum[kDtypes];  // [gradient dtype]
  // Null if there is no such optimizer. The second one takes args.tables.
  UpdateFn (*update)(int optimizer);
  UpdateFn (*update_tables)(int optimizer);
  void (*segment_sum)(const UpdateArgs&, SumFn, int64_t group, int64_t dim, float* sum);
};

}  // namespace emb
