// The backward kernels of table-batched embeddings on the CPU: what they take and how they are
// reached. They work on a range of unique rows (or of bags, for the gradient of sample weights).
#pragma once

#include "core/divide.h"
#include "core/dtype.h"

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
  int64_t batch;
  Divider by_batch;
  const int32_t *segments, *lookups, *bags;
  const float* bag_scale;       // [F * B] 1 / length for MEAN, else null
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
  const int64_t* rows = nullptr;  // [U] linear row ids
  void* weights = nullptr;
  float* element_states[2] = {nullptr, nullptr};
  float* row_state = nullptr;
  const double* hyper = nullptr;

  explicit UpdateArgs(const GradArgs& gradients) : grads(gradients) {}
};

struct SampleWeightArgs {
  const void* table;
  int64_t rows, dim;
  IndexArray indices;
  Bags bags;
  Pooling pooling;
  const void* grad;  // row of bag `first_bag`
  int64_t grad_stride, first_bag;
  float* out;  // [L]
};

// Adds up the gradients of sorted lookups [begin, end).
using SumFn = void (*)(const GradArgs&, int64_t begin, int64_t end, int64_t dim, float* sum);
// Unique rows worked on at a time, while the next ones are on their way. Four rows of 256 to 512
// bytes with their gradients fill the miss buffers; eight made the update 1.1-1.4x slower (Zen 4).
inline constexpr int kRowBatch = 4;
// Updates unique rows [begin, end); `scratch` has room for kRowBatch + 1 rows.
using UpdateFn = void (*)(const UpdateArgs&, SumFn, float* scratch, int64_t begin, int64_t end);
using SampleWeightFn = void (*)(const SampleWeightArgs&, int64_t first_bag, int64_t last_bag);

struct UpdateTable {
  SumFn sum[3];                                              // [gradient dtype]
  UpdateFn (*update)(const char* optimizer, Dtype weights);  // null if there is no such optimizer
  void (*segment_sum)(const UpdateArgs&, SumFn, int64_t group, int64_t dim, float* sum);
  SampleWeightFn sample_weight[3][3];  // [weights dtype][gradient dtype]
};

}  // namespace emb
