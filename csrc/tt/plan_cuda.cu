// `tt_keys` and `tt_plan` on the GPU: the sort under `group` groups both halves. Nothing waits for
// the device.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "group/device_sort.h"
#include "tt/check.h"
#include "tt/plan.cuh"

namespace emb::cuda {
namespace {

Tensor tt_keys(const Tensor& indices, int64_t rows, std::vector<int64_t> row_factors) {
  const TtShape shape = tt_table_shape("tt_keys", indices, rows, row_factors);
  const CudaLauncher launcher(indices);
  const Tensor input = torch::stable::contiguous(indices);
  const int64_t n = indices.numel();
  Tensor keys = allocate(indices, {n}, ScalarType::Long);
  launch_tt_keys(launcher,
                 {index_array(input), n, rows, shape.key_map(), keys.mutable_data_ptr<int64_t>()});
  return keys;
}

// Group rows by the keys in `sort`: distinct ids, where their rows start, and the id of each row.
void group_halves(const CudaLauncher& launcher, const Tensor& like,
                  const SortBuffers<uint32_t>& sort, const GroupOutput& out, int32_t* row_halves) {
  if (sort.n > 0) sort_keys(launcher, like, sort);
  launch_groups(launcher, sort, out);
  launch_inverse(launcher, out.segments, sort.sorted_positions, out.count, sort.n, row_halves);
}

std::vector<Tensor> tt_plan(const Tensor& keys, const Tensor& count,
                            std::vector<int64_t> row_factors) {
  const char* op = "tt_plan";
  check_dtype(op, "keys", keys, ScalarType::Long, "int64");
  check_dtype(op, "count", count, ScalarType::Int, "int32");
  check_same_device(op, "count", count, keys);
  const TtShape shape = tt_row_shape(op, row_factors);
  STD_TORCH_CHECK(count.numel() == 1 && keys.is_contiguous(), op,
                  ": keys and count must come from one call of tbe_group");
  const CudaLauncher launcher(keys);
  const int64_t n = keys.numel();
  std::vector<Tensor> plan;
  for (const int64_t size : {n, n + 1, n, n, n + 1, n, n, int64_t{3}}) {
    plan.push_back(allocate(keys, {size}, ScalarType::Int));
  }
  const auto data = [&](TtPlanTensor i) { return plan[i].mutable_data_ptr<int32_t>(); };
  const Tensor left_rows = allocate(keys, {n}, ScalarType::Int);
  const DeviceSort<uint32_t> left(keys, n, shape.left().ids(),
                                  left_rows.mutable_data_ptr<int32_t>());
  const DeviceSort<uint32_t> right(keys, n, shape.right().ids(), data(kTtRightRows));
  int32_t* counts = data(kTtCounts);
  launch_tt_split(launcher, {keys.const_data_ptr<int64_t>(), count.const_data_ptr<int32_t>(),
                             shape.right().ids(), left.buffers(), right.buffers(), counts});
  group_halves(launcher, keys, left.buffers(),
               {data(kTtLefts), false, data(kTtLeftSegments), counts + 1, nullptr, nullptr},
               data(kTtRowLefts));
  group_halves(launcher, keys, right.buffers(),
               {data(kTtRights), false, data(kTtRightSegments), counts + 2, nullptr, nullptr},
               data(kTtRowRights));
  return plan;
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, tt_keys);
  EMB_IMPL(m, emb::cuda, tt_plan);
}
