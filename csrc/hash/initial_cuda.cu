// `hash_initial_rows_` on the GPU: checks and launch.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "core/launch.h"
#include "hash/check_initial.h"
#include "hash/initial.cuh"

namespace emb::cuda {
namespace {

void hash_initial_rows_(std::vector<Tensor> planes, const Tensor& layout, const Tensor& rules,
                        const Tensor& ids, const Tensor& first, const Tensor& ends,
                        const Tensor& slots, int64_t seed) {
  const char* op = "hash_initial_rows_";
  const InitialInputs in{planes, layout, rules, ids, first, ends, slots};
  in.check(op);
  STD_TORCH_CHECK(planes.size() <= kMostInitialPlanes, op, ": at most ", kMostInitialPlanes,
                  " planes on a GPU, got ", planes.size());
  InitialRows rows{};
  for (const Tensor& plane : planes) {
    rows.planes[rows.num_planes++] = {plane.mutable_data_ptr(),
                                      float_dtype(op, "each plane", plane.scalar_type())};
  }
  rows.num_tables = static_cast<int>(in.num_tables());
  rows.layout = static_cast<const RowLayout*>(layout.const_data_ptr());
  rows.rules = static_cast<const InitialRule*>(rules.const_data_ptr());
  rows.ids = ids.const_data_ptr<int64_t>();
  rows.first = first.const_data_ptr<int64_t>();
  rows.ends = ends.const_data_ptr<int64_t>();
  rows.slots = slots.const_data_ptr<int64_t>();
  rows.seed = static_cast<uint64_t>(seed);
  launch_initial_rows(CudaLauncher(ids), rows, first.numel());
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) { EMB_IMPL(m, emb::cuda, hash_initial_rows_); }
