// `tt_rows` and `tt_core_grads` on the GPU: checks, memory from torch's allocator, launch.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "core/launch.h"
#include "optim/device_states.h"
#include "tt/check.h"
#include "tt/forward_backward.cuh"

namespace emb::cuda {
namespace {

TtBatch make_batch(const char* op, const TtTables& tables, const std::vector<Tensor>& cores,
                   const std::vector<Tensor>& plan_tensors, int64_t matmul_precision) {
  const MatmulPrecision precision = parse_matmul_precision(op, matmul_precision);
  const TtPlan plan = tt_plan_of(op, plan_tensors, tables.size());
  check_same_device(op, "the plan", plan_tensors[0], cores[0]);
  std::vector<const void*> data;
  for (const Tensor& core : cores) data.push_back(core.const_data_ptr());
  return {tables.shapes, data, tables.type, plan, precision};
}

// Float scratch for the duration of a call, which torch frees in stream order. One allocation has
// all buffers that `take_all(scratch)` takes: it is called twice, and gets null addresses at first.
class Scratch {
 public:
  template <class TakeAll>
  Scratch(const Tensor& like, const TakeAll& take_all) : like_(like) {
    take_all(*this);
    tensors_.push_back(allocate(like_, {floats_}, ScalarType::Float));
    next_ = tensors_.back().mutable_data_ptr<float>();
    take_all(*this);
    next_ = nullptr;
  }

  float* operator()(int64_t floats) {
    constexpr int64_t kAligned = 64;
    if (floats == 0) return nullptr;
    const int64_t rounded = (floats + kAligned - 1) / kAligned * kAligned;
    floats_ += rounded;
    float* const found = next_;
    if (found != nullptr) next_ += rounded;
    return found;
  }

  // Return more memory, of an allocation of its own.
  float* more(int64_t floats) {
    tensors_.push_back(allocate(like_, {floats}, ScalarType::Float));
    return tensors_.back().mutable_data_ptr<float>();
  }

 private:
  const Tensor& like_;
  std::vector<Tensor> tensors_;
  float* next_ = nullptr;
  int64_t floats_ = 0;
};

// Copy the arguments of kernels to the device.
void upload(const CudaLauncher& launcher, TtArrays* arrays, Scratch* scratch) {
  const auto more = [&](int64_t floats) { return scratch->more(floats); };
  arrays->upload(launcher, more);
}

std::tuple<Tensor, Tensor> tt_rows(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                   std::vector<int64_t> row_factors,
                                   std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                   int64_t num_saved, int64_t matmul_precision) {
  const char* op = "tt_rows";
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  TtBatch batch = make_batch(op, tables, cores, plan, matmul_precision);
  STD_TORCH_CHECK(num_saved >= 0, op, ": num_saved must be >= 0, got ", num_saved);
  const CudaLauncher launcher(cores[0]);
  Tensor rows = allocate(cores[0], {batch.plan.capacity, tables.dim}, ScalarType::Float);
  Tensor prefixes = allocate(cores[0], {num_saved, tables.value_size}, ScalarType::Float);
  if (batch.plan.capacity == 0) return {rows, prefixes};
  TtMemory memory;
  float* const saved = prefixes.mutable_data_ptr<float>();
  const bool saves_all = num_saved >= batch.lefts();
  Scratch scratch(cores[0], [&](Scratch& take) {
    memory.add_forward(&batch, take);
    if (batch.has_left_pairs) memory.set_left_values(saves_all ? saved : take(batch.left_floats()));
  });
  TtArrays arrays(batch, memory);
  upload(launcher, &arrays, &scratch);
  arrays.make_values(launcher, memory);
  arrays.make_rows(launcher, rows.mutable_data_ptr<float>());
  if (batch.has_left_pairs && !saves_all && num_saved > 0) {
    check_cuda(cudaMemcpyAsync(saved, memory.left_values, prefixes.numel() * sizeof(float),
                               cudaMemcpyDeviceToDevice, launcher.stream()),
               "copying the kept values");
  }
  return {rows, prefixes};
}

// The gradients of all cores in one tensor. Cores that are no part of a pair come first: only rows
// of the batch are written there, so they must be zero before.
struct GradMemory {
  std::vector<int64_t> offsets;  // by core
  int64_t zeros = 0, floats = 0;

  explicit GradMemory(const TtTables& tables) {
    for (const bool in_pair : {false, true}) {
      size_t number = 0;
      for (const TtShape& shape : tables.shapes) {
        for (int k = 0; k < shape.cores; ++k, ++number) {
          if (offsets.size() <= number) offsets.push_back(0);
          if (is_in_pair(shape, k) != in_pair) continue;
          offsets[number] = floats;
          const int64_t width = int64_t{shape.ranks[k]} * shape.q[k] * shape.ranks[k + 1];
          floats += (shape.p[k] * width + 3) / 4 * 4;
        }
      }
      if (!in_pair) zeros = floats;
    }
  }

 private:
  static bool is_in_pair(const TtShape& shape, int k) {
    return k < shape.cores / 2 + shape.cores % 2 ? shape.left().pair : shape.right().pair;
  }
};

// Compute the gradients of the cores in `memory`, and with `steps` the optimizer steps from them.
// `add_steps` adds these to the arrays of arguments.
template <class AddSteps>
void run_backward(TtBatch batch, const Tensor& prefixes, const Tensor& row_grads,
                  const GradMemory& places, float* grads, const CudaLauncher& launcher,
                  const OptimizerStepArgs* steps, const AddSteps& add_steps) {
  const Tensor gradient = torch::stable::contiguous(row_grads);
  size_t number = 0;
  for (TtBatchTable& table : batch.tables) {
    for (int k = 0; k < table.shape.cores; ++k) table.grads[k] = grads + places.offsets[number++];
  }
  TtMemory memory;
  const bool has_values = !batch.has_left_pairs || prefixes.size(0) >= batch.lefts();
  memory.left_values = prefixes.const_data_ptr<float>();
  Scratch scratch(gradient, [&](Scratch& take) {
    memory.add_forward(&batch, take);
    memory.add_backward(&batch, take);
    if (!has_values) memory.set_left_values(take(batch.left_floats()));
  });
  TtArrays arrays(batch, memory);
  add_steps(&arrays);
  upload(launcher, &arrays, &scratch);
  launcher.zero(grads, places.zeros * sizeof(float));
  arrays.make_values(launcher, memory);
  arrays.make_grads(launcher, memory, gradient.const_data_ptr<float>());
  if (steps != nullptr) arrays.update(launcher, *steps);
}

std::vector<Tensor> tt_core_grads(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                  const Tensor& prefixes, const Tensor& row_grads,
                                  std::vector<int64_t> row_factors,
                                  std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                  int64_t matmul_precision) {
  const char* op = "tt_core_grads";
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  const TtBatch batch = make_batch(op, tables, cores, plan, matmul_precision);
  check_core_grad_inputs(op, tables, batch.plan.capacity, prefixes, row_grads);
  check_same_device(op, "row_grads", row_grads, cores[0]);
  check_same_device(op, "prefixes", prefixes, cores[0]);
  const CudaLauncher launcher(cores[0]);
  const GradMemory places(tables);
  Tensor memory = allocate(cores[0], {places.floats}, ScalarType::Float);
  auto* data = memory.mutable_data_ptr<float>();
  if (batch.plan.capacity == 0) {
    torch::stable::zero_(memory);
  } else {
    run_backward(batch, prefixes, row_grads, places, data, launcher, nullptr, [](TtArrays*) {});
  }
  std::vector<Tensor> grads;
  for (size_t k = 0; k < cores.size(); ++k) {
    Tensor own = torch::stable::narrow(memory, 0, places.offsets[k], cores[k].numel());
    grads.push_back(torch::stable::view(own, {cores[k].size(0), cores[k].size(1)}));
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
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  const TtBatch batch = make_batch(op, tables, cores, plan, matmul_precision);
  check_core_grad_inputs(op, tables, batch.plan.capacity, prefixes, row_grads);
  check_same_device(op, "row_grads", row_grads, cores[0]);
  check_same_device(op, "prefixes", prefixes, cores[0]);
  check_same_device(op, "hyper", hyper, cores[0]);
  std::vector<OptimizerStepArgs> steps;
  for (size_t k = 0; k < cores.size(); ++k) {
    const std::vector<Tensor> own(states.begin() + k * each, states.begin() + (k + 1) * each);
    steps.push_back(optimizer_step_args(op, {cores[k]}, optimizer, own, hyper, cores[k].size(0)));
  }
  if (batch.plan.capacity == 0) return;
  const CudaLauncher launcher(cores[0]);
  const GradMemory places(tables);
  const Tensor memory = allocate(cores[0], {places.floats}, ScalarType::Float);
  auto* grads = static_cast<float*>(memory.mutable_data_ptr());
  run_backward(batch, prefixes, row_grads, places, grads, launcher, &steps[0],
               [&](TtArrays* arrays) {
                 int64_t first_row = 0;  // of each core, among the rows of all cores
                 for (size_t k = 0; k < cores.size(); ++k) {
                   const MatrixGrad in{grads + places.offsets[k], cores[k].size(0),
                                       cores[k].size(1), first_row};
                   arrays->add_step({in, steps[k].tiers[0], 0});
                   first_row += cores[k].size(0);
                 }
               });
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, tt_rows);
  EMB_IMPL(m, emb::cuda, tt_core_grads);
  EMB_IMPL(m, emb::cuda, tt_update_);
}
