// Entries of table-batched embeddings that other entries call, on the CPU and on the GPU. Shapes
// and dtypes of the arguments that all ops share (features, indices, offsets, bag_layout, slots,
// weights, sample_weights) are in emblib/ops/tbe.py. All tensors of a call are on one device, but
// on a GPU weights may also be in pinned host memory. An entry checks shapes, dtypes and devices,
// and throws before anything is written; on the GPU it does not read the contents of tensors and
// does not wait for the device.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "core/check.h"
#include "core/feature_bags.h"

namespace emb {

// The order in which `tbe_group` returns the tensors of a grouping.
enum GroupTensor : int {
  kGroupRows,
  kGroupSegments,
  kGroupLookups,
  kGroupBags,
  kGroupCount,
  kGroupTensors
};

// A grouping as tbe_group returns it: references to tensors of the caller, who keeps them alive.
struct Grouping {
  const Tensor &rows, &segments, &sorted_lookups, &sorted_bags, &num_groups;
};

// Check indices and offsets of a batch; `mode` is a code of BoundsMode. Return the repaired
// offsets, int32 [bags + 1], and two numbers of violations, int64 [2]. The first counts invalid
// indices. The second counts offsets that the repair changed, plus lost indices (tbe/check.h).
// Indices are not changed, because every kernel repairs the indices that it reads. In the mode
// "fatal" the CPU throws for a violation, and a GPU traps. In the mode "warning" the CPU throws for
// some offsets (tbe/check.h).
std::tuple<Tensor, Tensor> bounds_check(const Tensor& indices, const Tensor& offsets,
                                        const Tensor& features, std::optional<Tensor> bag_layout,
                                        int64_t mode);

// Sort the lookups of a batch by linear row id, stably. Ids must be below `total_rows`. The CPU
// throws for a table that ends beyond `total_rows`; a GPU skips lookups of larger ids. Return
//   rows      int64 [L]: the distinct ids, ascending; elements from U on are 0
//   segments  int32 [L + 1]: group g is sorted lookups [segments[g], segments[g + 1]), which is
//             empty from group U on
//   lookups   int32 [L]: the position of each sorted lookup in `indices`
//   bags      int32 [L]: the bag of each sorted lookup
//   count     int32 [1]: the number of groups U
// Skipped lookups are in no group and come last. If `repaired` is true, `offsets` must be a result
// of `bounds_check`; not checked. If it is false, offsets are repaired without a report.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(const Tensor& features,
                                                             const Tensor& indices,
                                                             const Tensor& offsets,
                                                             std::optional<Tensor> bag_layout,
                                                             int64_t total_rows, bool repaired);

// Pool the rows of every bag; `pooling` is a code of Pooling. Return [B, columns], in a variable
// batch [columns], without pooling [L, columns], of output_dtype. The output row of an empty bag
// is zeros. A skipped lookup counts as a row of zeros. With pooling the columns of the features, or
// the rows in bag_layout, must cover the output exactly once.
Tensor tbe_lookup(std::vector<Tensor> weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> slots,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, int64_t columns, ScalarType output_dtype);

// Return the mode of a bounds check, or nothing if `mode` is null, which means no check. Throws if
// `mode` is no code of BoundsMode, or if `violations`, to which the check adds its counts, is not
// int64 [2].
inline std::optional<BoundsMode> check_bounds_arguments(const char* op,
                                                        const std::optional<int64_t>& mode,
                                                        const Tensor& violations) {
  check_dtype(op, "violations", violations, ScalarType::Long, "int64");
  STD_TORCH_CHECK(violations.numel() == 2 && violations.is_contiguous(), op,
                  ": violations must be 2 contiguous numbers, got ", violations.numel());
  if (!mode) return std::nullopt;
  return parse_choice<BoundsMode>(op, "mode", *mode, kBoundsModes);
}

// Return whether a batch needs neither a repair nor a report: the offsets begin with 0, do not
// decrease and end with the number of lookups, and all indices are rows of their table or -1. All
// tensors must be on the CPU; several threads check the indices. `features`, int64 [F, 8], must
// have been checked.
bool is_valid_batch(const Tensor& features, IndexArray indices, const Bags& bags,
                    const FeatureBags& feature_bags);

// Write the sum of the gradients of the lookups of each group g < U to row g of `out`, float32
// [L, dim] of host memory. Rows from U on are not written, nor are columns beyond the dim of a
// group's table. No table may have more than `dim` columns. `op` is the op's name for messages.
void sum_row_grads(const char* op, const Tensor& grad, const Tensor& features,
                   const Grouping& groups, const Tensor& offsets,
                   const std::optional<Tensor>& bag_layout,
                   const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t dim,
                   float* out);

namespace cuda {

// The device memory of a grouping of n lookups, as `tbe_group` returns it. It must live until the
// kernels that use it have run.
struct GroupArrays {
  int64_t* rows;                          // [n]
  int32_t* segments;                      // [n + 1]
  int32_t *sorted_lookups, *sorted_bags;  // [n]
  int32_t* num_groups;                    // [1]
};

// Do what `bounds_check` does, but return the repaired offsets only. In the mode "warning" add the
// violations to `violations`, int64 [2]; other modes count nothing. In the mode "fatal" the kernel
// traps.
Tensor bounds_check_(const Tensor& indices, const Tensor& offsets, const Tensor& features,
                     std::optional<Tensor> bag_layout, int64_t mode_code, Tensor violations);

// Do what `tbe_group` does, but write the grouping to `out`. `op` is the name of the calling op,
// for messages.
void group_lookups(const char* op, const Tensor& features, const Tensor& indices,
                   const Tensor& offsets, const std::optional<Tensor>& bag_layout,
                   int64_t total_rows, bool repaired, const GroupArrays& out);

// The counterpart of emb::tbe_lookup. It does not check that rows cover the output. If there are
// bags, elements that no bag has are unspecified.
Tensor tbe_lookup(std::vector<Tensor> weights, const Tensor& features, const Tensor& indices,
                  const Tensor& offsets, std::optional<Tensor> slots,
                  std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights,
                  int64_t pooling, int64_t columns, ScalarType output_dtype);

// The counterpart of emb::sum_row_grads. `groups` and `out` are in device memory; of `indices` only
// the number and the device matter. It does not check that no dim exceeds `dim`.
void sum_row_grads(const char* op, const Tensor& grad, const Tensor& features,
                   const Tensor& indices, const GroupArrays& groups, const Tensor& offsets,
                   const std::optional<Tensor>& bag_layout,
                   const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t dim,
                   float* out);

// The counterpart of emb::tbe_group.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> tbe_group(const Tensor& features,
                                                             const Tensor& indices,
                                                             const Tensor& offsets,
                                                             std::optional<Tensor> bag_layout,
                                                             int64_t total_rows, bool repaired);

}  // namespace cuda
}  // namespace emb
