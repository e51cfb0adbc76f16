// `tt_rows` and `tt_core_grads` on the GPU: checks, memory from torch's allocator, launch.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/launch.h"
#include "tt/check.h"
#include "tt/forward_backward.cuh"

namespace emb::cuda {
namespace {

TtBatch make_batch(const char* op, const std::vector<Tensor>& cores,
                   const std::vector<Tensor>& plan, const std::vector<int64_t>& row_factors,
                   const std::vector<int64_t>& dim_factors) {
  TtBatch batch{tt_shape(op, cores, row_factors, dim_factors), tt_plan_of(op, plan), {}};
  check_same_device(op, "the plan", plan[0], cores[0]);
  for (size_t k = 0; k < cores.size(); ++k) batch.cores[k] = cores[k].const_data_ptr<float>();
  return batch;
}

// Float scratch for the duration of a call; torch frees it in stream order.
class Scratch {
 public:
  explicit Scratch(const Tensor& like) : like_(like) {}

  float* operator()(int64_t floats) {
    if (floats == 0) return nullptr;
    tensors_.push_back(allocate(like_, {floats}, ScalarType::Float));
    return tensors_.back().mutable_data_ptr<float>();
  }
  TtRightMemory right(const TtBatch& batch) {
    return {(*this)(TtRightMemory::value_floats(batch)),
            (*this)(TtRightMemory::outer_floats(batch)),
            (*this)(TtRightMemory::inner_floats(batch))};
  }

 private:
  const Tensor& like_;
  std::vector<Tensor> tensors_;
};

std::tuple<Tensor, Tensor> tt_rows(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                   std::vector<int64_t> row_factors,
                                   std::vector<int64_t> dim_factors, int64_t num_saved) {
  const char* op = "tt_rows";
  const TtBatch batch = make_batch(op, cores, plan, row_factors, dim_factors);
  STD_TORCH_CHECK(num_saved >= 0, op, ": num_saved must be >= 0, got ", num_saved);
  const CudaLauncher launcher(cores[0]);
  const TtHalf left = batch.shape.left();
  Tensor rows = allocate(cores[0], {batch.plan.capacity, batch.shape.dim()});
  Tensor prefixes = allocate(cores[0], {num_saved, left.value_size()});
  if (batch.plan.capacity == 0) return {rows, prefixes};
  Scratch scratch(cores[0]);
  const TtRightMemory memory = scratch.right(batch);
  float* left_values = prefixes.mutable_data_ptr<float>();
  if (left.pair && num_saved < batch.lefts())
    left_values = scratch(batch.lefts() * left.value_size());
  forward_pass(launcher, batch, memory, left_values, rows.mutable_data_ptr<float>());
  if (float* first = prefixes.mutable_data_ptr<float>(); left.pair && first != left_values) {
    check_cuda(cudaMemcpyAsync(first, left_values, prefixes.numel() * sizeof(float),
                               cudaMemcpyDeviceToDevice, launcher.stream()),
               "copying the kept values");
  }
  return {rows, prefixes};
}

std::vector<Tensor> tt_core_grads(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                  const Tensor& prefixes, const Tensor& row_grads,
                                  std::vector<int64_t> row_factors,
                                  std::vector<int64_t> dim_factors) {
  const char* op = "tt_core_grads";
  const TtBatch batch = make_batch(op, cores, plan, row_factors, dim_factors);
  check_core_grad_inputs(op, batch.shape, batch.plan.capacity, prefixes, row_grads);
  check_same_device(op, "row_grads", row_grads, cores[0]);
  check_same_device(op, "prefixes", prefixes, cores[0]);
  const CudaLauncher launcher(cores[0]);
  const TtHalf left = batch.shape.left(), right = batch.shape.right();
  std::vector<Tensor> grads;
  float* data[kMaxCores] = {};
  for (size_t k = 0; k < cores.size(); ++k) {
    grads.push_back(allocate_zeros(cores[k], {cores[k].size(0), cores[k].size(1)}));
    data[k] = grads[k].mutable_data_ptr<float>();
  }
  if (batch.plan.capacity == 0) return grads;
  const Tensor gradient = torch::stable::contiguous(row_grads);
  Scratch scratch(cores[0]);
  const TtRightMemory right_memory = scratch.right(batch);
  const float* left_values = prefixes.const_data_ptr<float>();
  if (left.pair && prefixes.size(0) < batch.lefts()) {
    float* recomputed = scratch(batch.lefts() * left.value_size());
    launch_expand(launcher, batch.left_halves(), recomputed);
    left_values = recomputed;
  }
  const TtBackwardMemory memory{scratch(TtBackwardMemory::left_floats(batch)),
                                scratch(batch.rights() * right.value_size()),
                                scratch(TtBackwardMemory::partial_floats(batch)),
                                scratch(TtBackwardMemory::outer_value_floats(batch)),
                                scratch(TtRightMemory::outer_floats(batch)),
                                scratch(TtRightMemory::inner_floats(batch))};
  backward_pass(launcher, batch, right_memory, memory, left_values,
                gradient.const_data_ptr<float>(), data);
  return grads;
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, tt_rows);
  EMB_IMPL(m, emb::cuda, tt_core_grads);
}
