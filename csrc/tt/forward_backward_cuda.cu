// `tt_rows` and `tt_core_grads` on the GPU: checks, memory from torch's allocator, launch.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "core/launch.h"
#include "optim/update_matrix.h"
#include "tt/check.h"
#include "tt/forward_backward.cuh"

namespace emb::cuda {
namespace {

TtBatches make_batches(const char* op, const TtTables& tables, const std::vector<Tensor>& cores,
                       const std::vector<Tensor>& plan_tensors, int64_t matmul_precision) {
  const MatmulPrecision precision = parse_matmul_precision(op, matmul_precision);
  const TtPlan plan = tt_plan_of(op, plan_tensors, tables.size());
  check_same_device(op, "the plan", plan_tensors[0], cores[0]);
  std::vector<const void*> data;
  for (const Tensor& core : cores) data.push_back(core.const_data_ptr());
  return {tables.shapes, data, tables.type, plan, precision};
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

 private:
  const Tensor& like_;
  std::vector<Tensor> tensors_;
};

std::tuple<Tensor, Tensor> tt_rows(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                   std::vector<int64_t> row_factors,
                                   std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                   int64_t num_saved, int64_t matmul_precision) {
  const char* op = "tt_rows";
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  TtBatches batches = make_batches(op, tables, cores, plan, matmul_precision);
  STD_TORCH_CHECK(num_saved >= 0, op, ": num_saved must be >= 0, got ", num_saved);
  const CudaLauncher launcher(cores[0]);
  Tensor rows = allocate(cores[0], {batches.capacity(), tables.dim}, ScalarType::Float);
  Tensor prefixes = allocate(cores[0], {num_saved, tables.value_size}, ScalarType::Float);
  if (batches.capacity() == 0) return {rows, prefixes};
  Scratch scratch(cores[0]);
  widen_left(launcher, &batches, scratch);
  const TtRightMemory memory(batches, scratch);
  float* left_values = prefixes.mutable_data_ptr<float>();
  const bool has_pairs = batches.has_pairs();
  if (has_pairs && num_saved < batches.lefts()) left_values = scratch(batches.left_floats());
  forward_pass(launcher, batches, memory, left_values, rows.mutable_data_ptr<float>());
  if (float* first = prefixes.mutable_data_ptr<float>(); has_pairs && first != left_values) {
    check_cuda(cudaMemcpyAsync(first, left_values, prefixes.numel() * sizeof(float),
                               cudaMemcpyDeviceToDevice, launcher.stream()),
               "copying the kept values");
  }
  return {rows, prefixes};
}

std::vector<Tensor> tt_core_grads(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                  const Tensor& prefixes, const Tensor& row_grads,
                                  std::vector<int64_t> row_factors,
                                  std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                  int64_t matmul_precision) {
  const char* op = "tt_core_grads";
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  TtBatches batches = make_batches(op, tables, cores, plan, matmul_precision);
  check_core_grad_inputs(op, tables, batches.capacity(), prefixes, row_grads);
  check_same_device(op, "row_grads", row_grads, cores[0]);
  check_same_device(op, "prefixes", prefixes, cores[0]);
  const CudaLauncher launcher(cores[0]);
  std::vector<Tensor> grads;
  std::vector<float*> data;
  for (const Tensor& core : cores) {
    grads.push_back(allocate_zeros(core, {core.size(0), core.size(1)}, ScalarType::Float));
    data.push_back(grads.back().mutable_data_ptr<float>());
  }
  if (batches.capacity() == 0) return grads;
  const Tensor gradient = torch::stable::contiguous(row_grads);
  Scratch scratch(cores[0]);
  widen_left(launcher, &batches, scratch);
  const TtRightMemory right_memory(batches, scratch);
  const float* left_values = prefixes.const_data_ptr<float>();
  if (batches.has_pairs() && prefixes.size(0) < batches.lefts()) {
    float* recomputed = scratch(batches.left_floats());
    for (const TtBatch& batch : batches.tables) expand_left(launcher, batch, recomputed);
    left_values = recomputed;
  }
  const TtBackwardMemory memory(batches, scratch);
  float* const* core_grads = data.data();
  for (const TtBatch& batch : batches.tables) {
    backward_pass(launcher, batch, right_memory, memory, left_values,
                  gradient.const_data_ptr<float>(), core_grads);
    core_grads += batch.shape.cores;
  }
  return grads;
}

void tt_update_(std::vector<Tensor> cores, std::vector<Tensor> states, const Tensor& hyper,
                int64_t optimizer, std::vector<Tensor> plan, const Tensor& prefixes,
                const Tensor& row_grads, std::vector<int64_t> row_factors,
                std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                int64_t matmul_precision) {
  const char* op = "tt_update_";
  const size_t each = cores.empty() ? 0 : states.size() / cores.size();
  STD_TORCH_CHECK(states.size() == each * cores.size(), op,
                  ": states must have the same number of tensors for each of ", cores.size(),
                  " cores, got ", states.size());
  const std::vector<Tensor> grads = tt_core_grads(cores, plan, prefixes, row_grads, row_factors,
                                                  dim_factors, num_cores, matmul_precision);
  const CudaLauncher launcher(cores[0]);
  int64_t first_row = 0;  // of each core, among the rows of all cores
  for (size_t k = 0; k < cores.size(); ++k) {
    const std::vector<Tensor> own(states.begin() + k * each, states.begin() + (k + 1) * each);
    update_matrix(op, launcher, cores[k], own, hyper, optimizer, grads[k], first_row);
    first_row += cores[k].size(0);
  }
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, tt_rows);
  EMB_IMPL(m, emb::cuda, tt_core_grads);
  EMB_IMPL(m, emb::cuda, tt_update_);
}
