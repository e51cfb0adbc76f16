// The CPU kernels of table-batched embeddings: their arguments, and the lists of kernels by dtype
// or optimizer (`*Kernels`).
//
// An entry (`*_cpu.cpp`) checks its tensors and fills one of the structs `*Args`. Then several
// threads call a kernel (`*_kernels.cpp`), each for its own range of bags or of unique rows. The
// structs own nothing: their pointers are to host memory of the op's tensors or of the entry's
// scratch, which is valid until the op returns. The kernels of the forward and of the sample
// weights repair indices, clamp offsets, and treat a row without a valid slot as not cached. They
// check nothing else. F is the number of features, B the bags per feature of a fixed batch, L the
// number of lookups, D the dim of a table, and U the number of unique rows.
#pragma once

#include "core/dtype.h"
#include "core/layout.h"
#include "core/portability.h"
#include "optim/args.h"

namespace emb {

// The cache in front of a table: none, one of the table's dtype, or one of another dtype.
enum class Caching : int { kNone = 0, kSameDtype = 1, kMixedDtypes = 2 };

// The rows that the lookups of one feature read. A cached row is read from the cache in front of
// the feature's table, any other row from the table.
struct TableRows {
  const void* table;      // [num_rows, dim], row-major
  int64_t num_rows, dim;  // num_rows may be 0: then every lookup is skipped
  IndexArray indices;     // [L] of all features, unchecked: read them through repair_index
  Caching caching = Caching::kNone;
  // The other members are set only if `caching` is not kNone.
  Dtype table_type = Dtype::kFloat, cache_type = Dtype::kFloat;
  const void* cache = nullptr;              // [num_slots, cache_stride], row-major
  const int32_t* slots = nullptr;           // [L]; outside [0, num_slots) if the row is not cached
  int64_t num_slots = 0, cache_stride = 0;  // the stride is in elements, at least `dim`
};

// The arguments of the forward: pool a range of bags of one feature.
struct LookupArgs {
  TableRows rows;
  BagItems bags;
  const float* sample_weights;  // [L], or null for weights of 1; null with Pooling::kNone
  void* out;                    // the base of the output (see BagItems), of the output dtype
  float* scratch = nullptr;     // [dim], of this thread alone; null unless kMixedDtypes
  // Whether the kernel should store the output past the CPU's caches; a kernel that cannot do so
  // ignores it. If it is true, output rows must consist of whole, aligned cache lines.
  bool bypasses_caches = false;
};

// Write the output rows of bags [first_bag, last_bag), or without pooling of their lookups. There
// must be at least one bag, and all must be of one feature. Calls for disjoint ranges may run at
// once.
using LookupFn = void (*)(const LookupArgs&, int64_t first_bag, int64_t last_bag);

// The CPU kernels of the forward.
struct LookupKernels {
  // [has a cache][weights dtype][output dtype][indices are int64], for kNone and kSameDtype
  LookupFn uniform[2][kNumDtypes][kNumDtypes][2];
  LookupFn mixed[kNumDtypes];  // [output dtype], for kMixedDtypes
};

// The arguments of the gradient of the sample weights, for a range of bags of one feature.
struct SampleWeightArgs {
  TableRows rows;
  BagItems bags;             // with sum or mean pooling
  const void* grad;          // the base of the output's gradient (see BagItems)
  float* out;                // [L], an output
  float* scratch = nullptr;  // [dim], of this thread alone; null unless kMixedDtypes
};

// Write `out` for the lookups of bags [first_bag, last_bag), 0 for lookups to skip. There must be
// at least one bag, and all must be of one feature. Calls for disjoint ranges may run at once.
using SampleWeightFn = void (*)(const SampleWeightArgs&, int64_t first_bag, int64_t last_bag);

// The CPU kernels of the gradient of the sample weights.
struct SampleWeightKernels {
  // [has a cache][weights dtype][gradient dtype], for kNone and kSameDtype
  SampleWeightFn uniform[2][kNumDtypes][kNumDtypes];
  SampleWeightFn mixed[kNumDtypes];  // [gradient dtype], for kMixedDtypes
};

// The backward sums the gradients of each unique row and updates the row. A *group* is the lookups
// of one unique row; `tbe_group` sorts lookups by row, so that the lookups of a group are a
// *segment* of the sorted lookups.

// The maximum number of lookups that are summed at once. A longer segment is divided into chunks of
// this length (the last may be shorter), whose sums are added in order. The length is fixed, so
// that a sum does not depend on the number of threads.
inline constexpr int64_t kChunkLookups = 1024;

// The gradients of sorted lookups, and the factors by which they are multiplied.
struct GradArgs {
  // [B, output_dim]; [output_dim] with pooling in a variable batch; [L, D] without pooling
  const void* grad;
  int64_t grad_stride;  // elements between rows of `grad`
  Dtype grad_type;
  const Feature* features;      // [F]
  const BagLayout* bag_layout;  // [bags] of a variable batch; null for a fixed one
  Divisor bags_per_feature;     // of a fixed batch, at least 1
  // The grouping, as tbe_group returns it: group g has sorted lookups [segments[g],
  // segments[g + 1]); sorted lookup j is lookup sorted_lookups[j], of bag sorted_bags[j].
  const int32_t *segments, *sorted_lookups, *sorted_bags;
  const float* bag_scale;       // [bags] for the mean: 1 / length, 0 for an empty bag; else null
  const float* sample_weights;  // [L] by lookup, or null for weights of 1
  bool is_unpooled;             // no pooling: row i of `grad` belongs to lookup i
  bool prefetches_grads;        // kernels should prefetch gradients: `grad` exceeds the caches

  EMB_HD int64_t element_size() const { return element_bytes(grad_type); }
};

// The groups of more than kChunkLookups lookups. The chunk sums of groups[i] are rows
// [first_chunks[i], first_chunks[i + 1]) of `chunk_sums`.
struct LongSegments {
  const int64_t* groups;        // [num_groups], ascending
  const int64_t* first_chunks;  // [num_groups + 1]
  int64_t num_groups;
  const float* chunk_sums;  // [chunks, stride]
  int64_t stride;           // floats per chunk sum, at least the dim of every group
};

// The rows of one table without a cache: linear row ids [first_row, first_row + num_rows). The row
// with linear row id r is at element `element_base + r * dim` of the weights of `tier`, and at
// entry `state_base + r` of its row-wise states; both bases may be negative.
struct TableSpan {
  int64_t first_row, num_rows, dim, tier, element_base, state_base;
  int64_t feature;  // the only feature that reads the table, -1 if there are several
};

// The arguments of the update of unique rows. The caller must have checked all contents but those
// of `row_slots`: a slot outside the cache counts as none.
struct UpdateArgs {
  GradArgs grads;
  LongSegments long_segments = {};
  const TableSpan* tables = nullptr;   // [num_tables], by ascending rows and disjoint
  int64_t num_tables = 0;              // 0 for a kernel of UpdateKernels::find_update
  const int64_t* rows = nullptr;       // [U] linear row id of each group
  const int32_t* row_slots = nullptr;  // [U] cache slot of each row, -1 for none; null: no cache
  TierMemory tiers[kTiers] = {};       // weights and states, which the kernels write
  const double* hyper = nullptr;       // entries of the optimizer, see optim/functor.h

  explicit UpdateArgs(const GradArgs& gradients) : grads(gradients) {}
};

// Write the sum of the gradients of sorted lookups [begin, end), times their factors, to sum[0,
// dim). All must be of tables of `dim` columns.
using SumFn = void (*)(const GradArgs&, int64_t begin, int64_t end, int64_t dim, float* sum);

// Unique rows processed together while the next ones are prefetched. Four rows of 256 to 512 bytes
// with their gradients fill the miss buffers; eight made the update 1.1 to 1.4x slower
// (reports/LOG.md, "Table-batched embeddings on the CPU against FBGEMM and `nn.EmbeddingBag`").
inline constexpr int kRowBatch = 4;
// Rows of scratch per unique row: its gradient, and copies of weights and states that are stored in
// 16 bits.
inline constexpr int kScratchRows = 2 + kMaxElementStates;

// Update the rows of groups [begin, end), at least one; SumFn, the one for args.grads.grad_type,
// sums their gradients. No row may have more than `max_dim` columns. `scratch`, of this thread
// alone, has kRowBatch * kScratchRows * max_dim floats.
using UpdateFn = void (*)(const UpdateArgs&, SumFn, float* scratch, int64_t max_dim, int64_t begin,
                          int64_t end);

// The CPU kernels of the backward. Calls for disjoint ranges may run at once.
struct UpdateKernels {
  SumFn sum[kNumDtypes];  // [gradient dtype]
  // Return the kernel of an optimizer, by its number in optim/optimizers.h; null if no optimizer
  // has the number. The first locates every row by its first lookup. The second locates rows by
  // args.tables, which is faster: there must be a table, every group must belong to one, and the
  // groups must be in the order of their tables.
  UpdateFn (*find_update)(int optimizer);
  UpdateFn (*find_update_by_table)(int optimizer);
  // Write the sum of the gradients of a group, times their factors, to sum[0, dim). For a group of
  // more than kChunkLookups lookups, add its chunk sums in args.long_segments.
  void (*segment_sum)(const UpdateArgs&, SumFn, int64_t group, int64_t dim, float* sum);
};

}  // namespace emb
