// `tt_keys` and `tt_plan` on the GPU: the sort under `group` groups right halves. Nothing waits for
// the device.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <vector>

#include "group/device_sort.h"
#include "tt/check.h"
#include "tt/plan.cuh"

namespace emb::cuda {
namespace {

Tensor tt_keys(const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout,
               const Tensor& feature_tables) {
  const char* op = "tt_keys";
  check_lookups(op, indices, offsets);
  const TtTableIds* tables = tt_table_ids(op, "feature_tables", feature_tables);
  check_same_device(op, "feature_tables", feature_tables, indices);
  const CudaLauncher launcher(indices);
  const Tensor input = torch::stable::contiguous(indices);
  const Tensor input_offsets = torch::stable::contiguous(offsets);
  const int64_t n = indices.numel(), features = feature_tables.size(0);
  STD_TORCH_CHECK(n == 0 || features > 0, op,
                  ": feature_tables must have a row per feature, got none for ", n, " indices");
  Tensor keys = allocate(indices, {n}, ScalarType::Long);
  const Bags bags{index_array(input_offsets), offsets.numel() - 1, n};
  launch_tt_keys(launcher, {index_array(input), n, tables, static_cast<int>(features), bags,
                            bag_map(op, features, input_offsets, bag_layout, 0),
                            keys.mutable_data_ptr<int64_t>()});
  return keys;
}

// Group rows by the keys in `sort`: distinct ids, where their rows start, and the id of each row.
void group_halves(const CudaLauncher& launcher, const Tensor& like,
                  const SortBuffers<uint32_t>& sort, const GroupOutput& out, int32_t* row_halves) {
  sort_and_group(launcher, like, sort, out);
  launch_inverse(launcher, out.segments, sort.sorted_positions, out.count, sort.n, row_halves);
}

std::vector<Tensor> tt_plan(const Tensor& keys, const Tensor& count, const Tensor& tables,
                            int64_t left_ids, int64_t right_ids) {
  const char* op = "tt_plan";
  check_dtype(op, "keys", keys, ScalarType::Long, "int64");
  check_dtype(op, "count", count, ScalarType::Int, "int32");
  check_same_device(op, "count", count, keys);
  const TtTableIds* table = tt_table_ids(op, "tables", tables);
  check_same_device(op, "tables", tables, keys);
  STD_TORCH_CHECK(count.numel() == 1 && keys.is_contiguous(), op,
                  ": keys and count must come from one call of tbe_group");
  STD_TORCH_CHECK(tables.size(0) > 0 && left_ids > 0 && left_ids <= kMaxTtIds && right_ids > 0 &&
                      right_ids <= kMaxTtIds,
                  op, ": the halves of all tables must be fewer than 2^31, got ", left_ids, " and ",
                  right_ids);
  const CudaLauncher launcher(keys);
  const int64_t n = keys.numel(), num_tables = tables.size(0);
  std::vector<Tensor> plan;
  for (const int64_t size : {n, n + 1, n, n, n + 1, n, n, 3 * (num_tables + 1)}) {
    plan.push_back(allocate(keys, {size}, ScalarType::Int));
  }
  const auto data = [&](TtPlanTensor i) { return plan[i].mutable_data_ptr<int32_t>(); };
  const Tensor scratch = allocate(keys, {n + kTtRanges}, ScalarType::Int);
  auto* left_of_row = scratch.mutable_data_ptr<int32_t>();
  const DeviceSort<uint32_t> right(keys, n, right_ids, data(kTtRightRows));
  const auto* key = keys.const_data_ptr<int64_t>();
  const int tables_ = static_cast<int>(num_tables);
  int32_t* starts = data(kTtStarts);
  const auto* rows = count.const_data_ptr<int32_t>();
  launch_tt_split(
      launcher, {key, rows, table, tables_, right.buffers(), left_of_row, left_of_row + n, starts},
      {rows, left_of_row, left_of_row + n, n, data(kTtLefts), data(kTtLeftSegments),
       data(kTtRowLefts), starts + 2 * num_tables + 1});
  group_halves(launcher, keys, right.buffers(),
               {data(kTtRights), false, data(kTtRightSegments), starts + 3 * num_tables + 2,
                nullptr, nullptr},
               data(kTtRowRights));
  launch_tt_starts(launcher, {key, data(kTtLefts), data(kTtRights), table, tables_, starts});
  return plan;
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, tt_keys);
  EMB_IMPL(m, emb::cuda, tt_plan);
}
