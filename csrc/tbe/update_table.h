// The backward kernels of table-batched embeddings on the CPU: what they take and how they are
// reached. They work on a range of unique rows.
#pragma once

#include "core/bag_map.h"
#include "core/divide.h"
#include "optim/tiers.h"

namespace emb {

// Lookups of one unique row summed in one go; longer segments are cut into chunks of this length,
// whose partial sums are added in order. Fixed, so that the sum never depends on the thread count.
inline constexpr int64_t kChunk = 1024;

// Where the gradient of every sorted lookup is and how much it counts.
struct GradArgs {
  const void* grad;
  int64_t grad_stride;  // elements of `element_size` bytes
  int64_t element_size;
  const Feature* features;
  const BagPlace* places;  // of the bags of a variable batch; null in a fixed one
  int64_t batch;           // bags a feature of a fixed batch
  Divider by_batch;
  const int32_t *segments, *lookups, *bags;
  const float* bag_scale;       // [bags] 1 / length for MEAN, else null
  const float* sample_weights;  // [L] or null
  bool per_lookup;              // NONE: row i of grad belongs to lookup i
  bool fetch_ahead;             // the gradient is too large to be in the cache already
};

// Segments longer than kChunk, ascending; the chunk sums of segment i are rows first_chunk[i] to
// first_chunk[i + 1] of `partials`, each `stride` floats.
struct LongSegments {
  const int64_t *groups, *first_chunk;
  int64_t count;
  const float* partials;
  int64_t stride;
};

struct UpdateArgs {
  GradArgs grads;
  LongSegments longs = {};
  const int64_t* rows = nullptr;       // [U] linear row ids
  const int32_t* row_slots = nullptr;  // [U] where the cache holds them, or null
  TierRows tiers[kTiers] = {};
  const double* hyper = nullptr;

  explicit UpdateArgs(const GradArgs& gradients) : grads(gradients) {}
};

// Adds up the gradients of sorted lookups [begin, end).
using SumFn = void (*)(const GradArgs&, int64_t begin, int64_t end, int64_t dim, float* sum);
// Unique rows worked on at a time, while the next ones are on their way. Four rows of 256 to 512
// bytes with their gradients fill the miss buffers; eight made the update 1.1-1.4x slower (Zen 4).
inline constexpr int kRowBatch = 4;
// Rows of scratch that a unique row may take: its gradient, and weights and states stored in 16
// bits.
inline constexpr int kScratchRows = 2 + kMostElementStates;
// Updates unique rows [begin, end), none longer than `widest`; `scratch` has room for kRowBatch *
// kScratchRows such rows.
using UpdateFn = void (*)(const UpdateArgs&, SumFn, float* scratch, int64_t widest, int64_t begin,
                          int64_t end);

struct UpdateTable {
  SumFn sum[3];                       // [gradient dtype]
  UpdateFn (*update)(int optimizer);  // null if there is no such optimizer
  void (*segment_sum)(const UpdateArgs&, SumFn, int64_t group, int64_t dim, float* sum);
};

}  // namespace emb
