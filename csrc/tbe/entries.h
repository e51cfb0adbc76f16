// Entries of table-batched embeddings that other entries call, and the checks that CPU and GPU
// share: first those of the CPU, then those of the GPU (emb::cuda). emblib/ops/tbe.py has the
// shapes and dtypes of the arguments that the ops share: features, indices, offsets, bag_layout,
// slots, weights and sample_weights. All tensors of a call are on one device, but on a GPU weights
// may also be in pinned host memory. An entry checks shapes, dtypes and devices, and throws before
// it writes anything. On the GPU it does not read the contents of tensors and does not wait for the
// device. F is the number of features, B of bags per feature of a fixed batch, L of lookups, and U
// of distinct rows that they read.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/feature_bags.h"

namespace emb {

// The tensors that `tbe_group` returns, in its order; the caller keeps them alive.
struct Grouping {
  const Tensor &rows, &segments, &sorted_lookups, &sorted_bags, &num_groups;
};

// The positions of the tensors in the list `located` of `tbe_backward_`: those that `tbe_group`
// returns and, if a cache has prefetched the batch, the cache slot of each row.
enum LocatedTensor : int {
  kGroupRows,
  kGroupSegments,
  kGroupLookups,
  kGroupBags,
  kGroupCount,
  kNumGroupTensors,
  kLocatedRowSlots = kNumGroupTensors,
  kNumLocatedTensors
};

// Throw unless `located` has kNumLocatedTensors tensors or, if not `needs_slots`, only those of a
// grouping. The tensors themselves are not checked.
inline void check_located(const char* op, const std::vector<Tensor>& located, bool needs_slots) {
  STD_TORCH_CHECK(
      located.size() == kNumLocatedTensors || (!needs_slots && located.size() == kNumGroupTensors),
      op, ": located must be [rows, segments, lookups, bags, count, row_slots], got ",
      located.size(), " tensors");
}

// Check the indices and offsets of a batch; `check_mode` is a code of BoundsMode. Return the
// repaired offsets, int32 [bags + 1], and two numbers of violations, int64 [2]: that of invalid
// indices, and that of offsets that the repair changed plus that of lost indices (tbe/check.h).
// Indices are not changed, because kernels repair the indices that they read. In the mode "fatal"
// the CPU throws for a violation, and a GPU traps. In the mode "warning" the CPU throws for lost
// indices and for an omitted last offset (tbe/check.h).
std::tuple<Tensor, Tensor> bounds_check(const Tensor& indices, const Tensor& offsets,
                                        const Tensor& features, std::optional<Tensor> bag_layout,
                                        int64_t check_mode);

// Sort the lookups of a batch by linear row id, stably. The CPU throws for a table that ends beyond
// `total_rows`; a GPU skips lookups of ids from `total_rows` on. Return
//   rows      int64 [L]: the distinct linear row ids, ascending; elements from U on are 0
//   segments  int32 [L + 1]: group g is sorted lookups [segments[g], segments[g + 1]), which is
//             empty from group U on
//   lookups   int32 [L]: the position of each sorted lookup in `indices`
//   bags      int32 [L]: the bag of each sorted lookup
//   count     int32 [1]: the number of groups U
// Skipped lookups are in no group and come last. If `has_valid_offsets` (`repaired` in the schema),
// `offsets` must be a result of `bounds_check`; a GPU does not check this. Otherwise offsets are
// repaired without a report.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(
    const Tensor& features, const Tensor& indices, const Tensor& offsets,
    std::optional<Tensor> bag_layout, int64_t total_rows, bool has_valid_offsets);

// Pool the rows of every bag; `pooling` is a code of Pooling. Return a tensor of output_dtype:
// [B, output_dim], with pooling in a variable batch [output_dim], without pooling [L, output_dim].
// A skipped lookup counts as a row of zeros, and the output row of an empty bag is zeros. With
// pooling and bags, the columns of the features, or the rows in bag_layout, must cover the output
// exactly once.
Tensor tbe_lookup(std::vector<Tensor> weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> slots,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, int64_t output_dim, ScalarType output_dtype);

// Return the mode of a bounds check, or nothing if `check_mode` is null, which means no check.
// Throws if `check_mode` is not a code of BoundsMode, or if `violations`, to which the check adds
// its counts, is not contiguous int64 [2]. The device of `violations` is not checked.
inline std::optional<BoundsMode> check_bounds_arguments(const char* op,
                                                        const std::optional<int64_t>& check_mode,
                                                        const Tensor& violations) {
  check_dtype(op, "violations", violations, ScalarType::Long, "int64");
  STD_TORCH_CHECK(violations.numel() == 2 && violations.is_contiguous(), op,
                  ": violations must be 2 contiguous numbers, got ", violations.numel());
  if (!check_mode) return std::nullopt;
  return parse_choice<BoundsMode>(op, "mode", *check_mode, kBoundsModes);
}

// Return whether a batch needs neither a repair nor a report: its offsets begin with 0, do not
// decrease and end with the number of lookups, and its indices are rows of their table or -1. All
// arguments must be in host memory; several threads check the indices. `features`, int64 [F, 8],
// must have been checked (check_features), and `feature_bags` must be those of the batch.
bool is_valid_batch(const Tensor& features, IndexArray indices, const Bags& bags,
                    const FeatureBags& feature_bags);

// Write the gradient of the row of each group g < U, the sum over its lookups, to row g of `out`,
// float32 [L, dim] of host memory. Rows from U on and columns beyond the dim of a group's table are
// not written. `grad` is the gradient of the output of tbe_lookup. Throws if a feature has more
// than `dim` columns. `op` is the name of the calling op, for messages; `pooling` is a code of
// Pooling.
void sum_row_grads(const char* op, const Tensor& grad, const Tensor& features,
                   const Grouping& groups, const Tensor& offsets,
                   const std::optional<Tensor>& bag_layout,
                   const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t dim,
                   float* out);

namespace cuda {

// The tensors of a Grouping of n lookups as device memory, which must live until the kernels that
// use it have run.
struct DeviceGrouping {
  int64_t* rows;                          // [n]
  int32_t* segments;                      // [n + 1]
  int32_t *sorted_lookups, *sorted_bags;  // [n]
  int32_t* num_groups;                    // [1]
};

// Do what `bounds_check` does, but return only the repaired offsets. In the mode "warning" add the
// violations to `violations`, int64 [2]; the other modes do not write it.
Tensor bounds_check_(const Tensor& indices, const Tensor& offsets, const Tensor& features,
                     std::optional<Tensor> bag_layout, int64_t check_mode, Tensor violations);

// Do what `tbe_group` does, but write the grouping to `out`. `op` is the name of the calling op,
// for messages.
void group_lookups(const char* op, const Tensor& features, const Tensor& indices,
                   const Tensor& offsets, const std::optional<Tensor>& bag_layout,
                   int64_t total_rows, bool has_valid_offsets, const DeviceGrouping& out);

// Do what emb::tbe_lookup does, without a check that bags cover the output. With pooling and bags,
// output elements that no bag covers are unspecified.
Tensor tbe_lookup(std::vector<Tensor> weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> slots,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, int64_t output_dim, ScalarType output_dtype);

// Do what emb::sum_row_grads does, with `groups` and `out` in device memory. Of `indices` only the
// size and the device are used. That no feature has more than `dim` columns is not checked.
void sum_row_grads(const char* op, const Tensor& grad, const Tensor& features,
                   const Tensor& indices, const DeviceGrouping& groups, const Tensor& offsets,
                   const std::optional<Tensor>& bag_layout,
                   const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t dim,
                   float* out);

// Do what emb::tbe_group does.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(
    const Tensor& features, const Tensor& indices, const Tensor& offsets,
    std::optional<Tensor> bag_layout, int64_t total_rows, bool has_valid_offsets);

}  // namespace cuda
}  // namespace emb
