// Tensor-train tables on the GPU: check the arguments, take memory from torch's allocator, launch.
// Nothing waits for the device. The contracts of the ops are those of the CPU (plan_cpu.cpp,
// forward_backward_cpu.cpp, batch_cpu.cpp), except that contents of device tensors are trusted.
//
// `tt_lookup_checked_` and `tt_backward_` are whole passes. The first stores what the second needs
// too in one tensor (`ForwardState`): the grouping of the lookups, the plan, copies of cores and
// the values of halves. The scratch of a pass is one more allocation; the sorts, sums and lookups
// of tbe/ and group/ that it calls allocate their own. The other ops are parts of these passes, for
// compiled graphs, and for gradients of sample weights and of whole cores.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "core/launch.h"
#include "group/device_sort.h"
#include "optim/device_states.h"
#include "optim/update_matrix.h"
#include "tbe/entries.h"
#include "tt/check.h"
#include "tt/forward_backward.cuh"
#include "tt/plan.cuh"

namespace emb::cuda {
namespace {

// Buffers in one allocation, which torch frees in stream order after the object's end.
// `take_all(memory)` takes the buffers, by calling `memory` for each, in the same order at every
// call: the first call adds up the sizes and gets null addresses, the second gets the addresses (no
// second call if all sizes are 0).
class PackedBuffers {
 public:
  template <class TakeAll>
  PackedBuffers(const Tensor& like, const TakeAll& take_all) {
    take_all(*this);
    tensor_ = allocate(like, {floats_}, ScalarType::Float);
    assign_addresses(take_all);
  }

  // Take the buffers from `tensor`, which another object allocated for the same sizes. Throws
  // unless it is float32 of this size, contiguous, aligned, and on the device of `like`.
  template <class TakeAll>
  PackedBuffers(const char* op, const Tensor& like, const Tensor& tensor, const TakeAll& take_all)
      : tensor_(tensor) {
    take_all(*this);
    check_dtype(op, "kept", tensor, ScalarType::Float, "float32");
    check_same_device(op, "kept", tensor, like);
    STD_TORCH_CHECK(tensor.numel() == floats_ && tensor.is_contiguous(), op,
                    ": kept must be what tt_lookup_checked_ returned for these tables and indices");
    // The kernels read some buffers as words of 8 bytes without asking.
    STD_TORCH_CHECK(is_aligned(tensor.const_data_ptr(), 16), op,
                    ": kept must be aligned to 16 bytes, as the tensor of tt_lookup_checked_ is");
    assign_addresses(take_all);
  }

  const Tensor& tensor() const { return *tensor_; }

  // Take a buffer of n floats, aligned to 256 bytes within the allocation; null for none.
  float* operator()(int64_t n) {
    constexpr int64_t kAlignedFloats = 64;
    if (n == 0) return nullptr;
    const int64_t rounded = (n + kAlignedFloats - 1) / kAlignedFloats * kAlignedFloats;
    floats_ += rounded;
    float* const buffer = next_;
    if (buffer != nullptr) next_ += rounded;
    return buffer;
  }

  // Take a buffer of n int32, or of n numbers of 8 bytes.
  int32_t* ints(int64_t n) { return reinterpret_cast<int32_t*>((*this)(n)); }
  template <class T>
  T* words(int64_t n) {
    static_assert(sizeof(T) == 8);
    return reinterpret_cast<T*>((*this)(2 * n));
  }

 private:
  template <class TakeAll>
  void assign_addresses(const TakeAll& take_all) {
    next_ = const_cast<float*>(tensor_->const_data_ptr<float>());
    if (floats_ > 0) take_all(*this);
    next_ = nullptr;
  }

  std::optional<Tensor> tensor_;
  float* next_ = nullptr;  // the next buffer, null while sizes are added up
  int64_t floats_ = 0;
};

// Write the keys of a batch to `keys`, [L] of device memory. The op must have called check_lookups.
void make_keys(const char* op, const CudaLauncher& launcher, const Tensor& indices,
               const Tensor& offsets, const std::optional<Tensor>& bag_layout,
               const Tensor& feature_tables, int64_t* keys) {
  const TtTableIds* tables = tt_table_ids(op, "feature_tables", feature_tables);
  check_same_device(op, "feature_tables", feature_tables, indices);
  const Tensor input = as_contiguous(indices), input_offsets = as_contiguous(offsets);
  const int64_t n = indices.numel(), features = feature_tables.size(0);
  STD_TORCH_CHECK(n == 0 || features > 0, op,
                  ": feature_tables must have a row per feature, got none for ", n, " indices");
  const Bags bags{index_array(input_offsets), offsets.numel() - 1, n};
  launch_tt_keys(launcher, {index_array(input), n, tables, static_cast<int>(features), bags,
                            bag_map(op, features, input_offsets, bag_layout, 0), keys});
}

// Return the key of each lookup within its table, int64 [L]: see emb::tt_keys in tt/entries.h.
Tensor tt_keys(const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout,
               const Tensor& feature_tables) {
  const char* op = "tt_keys";
  check_lookups(op, indices, offsets);
  const CudaLauncher launcher(indices);
  Tensor keys = allocate(indices, {indices.numel()}, ScalarType::Long);
  make_keys(op, launcher, indices, offsets, bag_layout, feature_tables,
            keys.mutable_data_ptr<int64_t>());
  return keys;
}

// The tensors of a plan, in the order of TtPlanTensor, in device memory.
struct PlanArrays {
  int32_t* arrays[kTtPlanTensors];

  int32_t* operator[](TtPlanTensor i) const { return arrays[i]; }

  TtPlan plan(int64_t capacity, int64_t tables) const {
    return {capacity,
            tables,
            arrays[kTtLefts],
            arrays[kTtLeftSegments],
            arrays[kTtRowLefts],
            arrays[kTtRights],
            arrays[kTtRightSegments],
            arrays[kTtRowRights],
            arrays[kTtRightRows],
            arrays[kTtStarts]};
  }
};

// The scratch of `make_plan`.
struct PlanScratch {
  int32_t* left_of_row = nullptr;  // [n] left id of each row, then [kTtRanges] counts per range
  SortBuffers<uint32_t> right_buffers{};  // the sort of the rows by right id

  void take(PackedBuffers& memory, int64_t n, int64_t right_ids) {
    left_of_row = memory.ints(n + kTtRanges);
    right_buffers.keys = reinterpret_cast<uint32_t*>(memory.ints(n));
    right_buffers.sorted_keys = reinterpret_cast<uint32_t*>(memory.ints(n));
    right_buffers.positions = memory.ints(n);
    right_buffers.range_counts = memory.ints(2 * kMaxRanges);
    right_buffers.n = n;
    right_buffers.no_group_key = static_cast<uint32_t>(right_ids);
  }
};

// Write the plan of the distinct rows of `keys` to `plan`, and the row of each lookup to
// lookups.inverse, if that is not null. All pointers are to device memory; `like` is a tensor
// there.
void make_plan(const CudaLauncher& launcher, const Tensor& like, const int64_t* keys,
               const int32_t* count, const TtTableIds* table, int64_t num_tables,
               PlanScratch* scratch, const PlanArrays& plan, const InverseArgs& lookups) {
  SortBuffers<uint32_t>& right_buffers = scratch->right_buffers;
  right_buffers.sorted_positions = plan[kTtRightRows];
  const int64_t n = right_buffers.n;
  const int tables = static_cast<int>(num_tables);
  int32_t *starts = plan[kTtStarts], *range_counts = scratch->left_of_row + n;
  int32_t* num_rights = starts + TtPlan::total_index(2, num_tables);
  launch_tt_split(
      launcher,
      {keys, count, table, tables, right_buffers, scratch->left_of_row, range_counts, starts},
      {count, scratch->left_of_row, range_counts, n, plan[kTtLefts], plan[kTtLeftSegments],
       plan[kTtRowLefts], starts + TtPlan::total_index(1, num_tables)});
  sort_and_group(launcher, like, right_buffers,
                 {.unique = plan[kTtRights],
                  .unique_is_int64 = false,
                  .segments = plan[kTtRightSegments],
                  .num_groups = num_rights});
  const InverseArgs rights{plan[kTtRightSegments], plan[kTtRightRows], num_rights, n,
                           plan[kTtRowRights]};
  launch_tt_finish(launcher,
                   {rights, lookups, keys, plan[kTtLefts], plan[kTtRights], table, tables, starts});
}

// The contract is that of emb::tt_plan in tt/entries.h.
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
                  op, ": tables must not be empty, and left_ids and right_ids in [1, 2^31), got ",
                  left_ids, " and ", right_ids);
  const CudaLauncher launcher(keys);
  const int64_t n = keys.numel(), num_tables = tables.size(0);
  std::vector<Tensor> plan;
  PlanArrays arrays{};
  for (const int64_t size : tt_plan_sizes(n, num_tables)) {
    plan.push_back(allocate(keys, {size}, ScalarType::Int));
    arrays.arrays[plan.size() - 1] = plan.back().mutable_data_ptr<int32_t>();
  }
  PlanScratch scratch;
  const PackedBuffers memory(keys, [&](PackedBuffers& take) { scratch.take(take, n, right_ids); });
  make_plan(launcher, keys, keys.const_data_ptr<int64_t>(), count.const_data_ptr<int32_t>(), table,
            num_tables, &scratch, arrays, {});
  return plan;
}

// Check the plan of a batch and return the batch.
TtDeviceBatch make_batch(const char* op, const TtTables& tables, const std::vector<Tensor>& cores,
                         const std::vector<Tensor>& plan_tensors, int64_t matmul_precision) {
  const MatmulPrecision precision = parse_matmul_precision(op, matmul_precision);
  const TtPlan plan = tt_plan_of(op, plan_tensors, tables.size());
  check_same_device(op, "the plan", plan_tensors[0], cores[0]);
  std::vector<const void*> data;
  for (const Tensor& core : cores) data.push_back(core.const_data_ptr());
  return {tables.shapes, data, tables.type, plan, precision};
}

// Return the distinct rows of a plan, float32 [L, widest dim], and the values of its first
// num_saved left halves, float32 [num_saved, value_size]. Rows and halves that do not exist,
// columns beyond the dim of a table, and values of halves that are no pair are unspecified.
std::tuple<Tensor, Tensor> tt_rows(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                   std::vector<int64_t> row_factors,
                                   std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                   int64_t num_saved, int64_t matmul_precision) {
  const char* op = "tt_rows";
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  TtDeviceBatch batch = make_batch(op, tables, cores, plan, matmul_precision);
  STD_TORCH_CHECK(num_saved >= 0, op, ": num_saved must be >= 0, got ", num_saved);
  const CudaLauncher launcher(cores[0]);
  Tensor rows = allocate(cores[0], {batch.plan.capacity, tables.dim}, ScalarType::Float);
  Tensor prefixes = allocate(cores[0], {num_saved, tables.value_size}, ScalarType::Float);
  if (batch.plan.capacity == 0) return {rows, prefixes};
  TtMemory memory;
  float* const saved = prefixes.mutable_data_ptr<float>();
  const bool saves_all = num_saved >= batch.lefts();
  uint64_t* words = nullptr;
  const PackedBuffers scratch(cores[0], [&](PackedBuffers& take) {
    memory.add_forward(&batch, take);
    if (batch.has_left_pairs) memory.set_left_values(saves_all ? saved : take(batch.left_floats()));
    words = take.words<uint64_t>(TtArrays::max_words(batch));
  });
  TtArrays arrays(batch, memory);
  arrays.upload(launcher, words);
  arrays.make_values(launcher, memory);
  arrays.make_rows(launcher, rows.mutable_data_ptr<float>());
  if (batch.has_left_pairs && !saves_all && num_saved > 0) {
    check_cuda(cudaMemcpyAsync(saved, memory.left_values, prefixes.numel() * sizeof(float),
                               cudaMemcpyDeviceToDevice, launcher.stream()),
               "copying the kept values");
  }
  return {rows, prefixes};
}

// The layout of one tensor with the gradients of all cores. Cores that are no part of a pair come
// first: only rows that the batch uses are written there, so they must be zeros before.
struct GradMemory {
  std::vector<int64_t> offsets;   // first float of each core
  int64_t zeros = 0, floats = 0;  // floats that must be zeros, floats of the tensor

  explicit GradMemory(const TtTables& tables) {
    for (const bool in_pair : {false, true}) {
      size_t core = 0;  // among the cores of all tables
      for (const TtShape& shape : tables.shapes) {
        for (int k = 0; k < shape.cores; ++k, ++core) {
          if (offsets.size() <= core) offsets.push_back(0);
          if (is_in_pair(shape, k) != in_pair) continue;
          offsets[core] = floats;
          const int64_t width = int64_t{shape.ranks[k]} * shape.q[k] * shape.ranks[k + 1];
          floats += (shape.p[k] * width + 3) / 4 * 4;
        }
      }
      if (!in_pair) zeros = floats;
    }
  }

 private:
  static bool is_in_pair(const TtShape& shape, int k) {
    return k < (shape.cores / 2) + (shape.cores % 2) ? shape.left().is_pair : shape.right().is_pair;
  }
};

// Return the matrix [rows, columns] that begins at element `first` of a flat tensor and shares its
// memory. Not `torch::stable::view`: it fails in the schema check of opcheck on the pretend GPU.
Tensor matrix_within(const Tensor& memory, int64_t first, int64_t rows, int64_t columns) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  AtenTensorHandle matrix = nullptr;
  STD_TORCH_CHECK(
      aoti_torch__reinterpret_tensor(memory.get(), 2, sizes, strides, first, &matrix) == 0,
      "emblib: can't make a view: ", torch_error_message());
  return Tensor(matrix);
}

// Point the tables of a batch to the gradients of their cores.
void set_grads(const GradMemory& grad_memory, float* grads, TtDeviceBatch* batch) {
  size_t core = 0;  // among the cores of all tables
  for (TtDeviceTable& table : batch->tables) {
    for (int k = 0; k < table.shape.cores; ++k)
      table.grads[k] = grads + grad_memory.offsets[core++];
  }
}

// Take the buffers of a forward pass, and set the values of left pairs: `left_values`, if it is not
// null, else a buffer that this pass fills.
void take_values(const float* left_values, TtDeviceBatch* batch, PackedBuffers& take,
                 TtMemory* memory) {
  memory->add_forward(batch, take);
  memory->left_values = left_values;
  if (left_values == nullptr && batch->has_left_pairs) {
    memory->set_left_values(take(batch->left_floats()));
  }
}

// Add an optimizer step per core to `arrays`; `grads` is the memory that `grad_memory` describes.
void add_steps(const std::vector<Tensor>& cores, const std::vector<OptimizerStepArgs>& steps,
               const GradMemory& grad_memory, const float* grads, TtArrays* arrays) {
  int64_t first_row = 0;  // first row of a core among the rows of all cores
  for (size_t k = 0; k < cores.size(); ++k) {
    const MatrixGrad in{grads + grad_memory.offsets[k], cores[k].size(0), cores[k].size(1),
                        first_row};
    arrays->add_step({in, steps[k].tiers[0], 0});
    first_row += cores[k].size(0);
  }
}

// Write the gradients of the cores to `grads`, the memory that `grad_memory` describes, and apply
// the optimizer to the cores, if `steps` (one per core) is not empty.
void run_backward(TtDeviceBatch batch, const std::vector<Tensor>& cores, const Tensor& prefixes,
                  const Tensor& row_grads, const GradMemory& grad_memory, float* grads,
                  const CudaLauncher& launcher, const std::vector<OptimizerStepArgs>& steps) {
  const Tensor gradient = as_contiguous(row_grads);
  set_grads(grad_memory, grads, &batch);
  TtMemory memory;
  const bool has_values = !batch.has_left_pairs || prefixes.size(0) >= batch.lefts();
  uint64_t* words = nullptr;
  const PackedBuffers scratch(gradient, [&](PackedBuffers& take) {
    take_values(has_values ? prefixes.const_data_ptr<float>() : nullptr, &batch, take, &memory);
    memory.add_backward(&batch, take);
    words = take.words<uint64_t>(TtArrays::max_words(batch));
  });
  TtArrays arrays(batch, memory);
  if (!steps.empty()) add_steps(cores, steps, grad_memory, grads, &arrays);
  arrays.upload(launcher, words, StepStart{grads, grad_memory.zeros});
  arrays.make_values(launcher, memory);
  arrays.make_grads(launcher, memory, gradient.const_data_ptr<float>());
  if (!steps.empty()) arrays.update(launcher, steps[0]);
}

// Return the gradient of each core, float32 of its shape, from `row_grads`, float32 [L, dim], the
// gradients of the rows of the plan. The results are views of one tensor. `prefixes` are the values
// that tt_rows returned; if they are fewer than the left halves that L lookups can have, all values
// are computed again.
std::vector<Tensor> tt_core_grads(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                  const Tensor& prefixes, const Tensor& row_grads,
                                  std::vector<int64_t> row_factors,
                                  std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                  int64_t matmul_precision) {
  const char* op = "tt_core_grads";
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  const TtDeviceBatch batch = make_batch(op, tables, cores, plan, matmul_precision);
  check_core_grad_inputs(op, tables, batch.plan.capacity, prefixes, row_grads);
  check_same_device(op, "row_grads", row_grads, cores[0]);
  check_same_device(op, "prefixes", prefixes, cores[0]);
  const CudaLauncher launcher(cores[0]);
  const GradMemory grad_memory(tables);
  Tensor memory = allocate(cores[0], {grad_memory.floats}, ScalarType::Float);
  auto* data = memory.mutable_data_ptr<float>();
  if (batch.plan.capacity == 0) {
    torch::stable::zero_(memory);
  } else {
    run_backward(batch, cores, prefixes, row_grads, grad_memory, data, launcher, {});
  }
  std::vector<Tensor> grads;
  for (size_t k = 0; k < cores.size(); ++k) {
    grads.push_back(
        matrix_within(memory, grad_memory.offsets[k], cores[k].size(0), cores[k].size(1)));
  }
  return grads;
}

// Check `hyper` and the states of an optimizer: all states of the first core, then all of the
// second, and so on. Return a step per core.
std::vector<OptimizerStepArgs> core_steps(const char* op, const std::vector<Tensor>& cores,
                                          const std::vector<Tensor>& states, const Tensor& hyper,
                                          int64_t optimizer) {
  const size_t per_core = cores.empty() ? 0 : states.size() / cores.size();
  STD_TORCH_CHECK(states.size() == per_core * cores.size(), op,
                  ": states must have the same number of tensors for each of ", cores.size(),
                  " cores, got ", states.size());
  check_same_device(op, "hyper", hyper, cores[0]);
  std::vector<OptimizerStepArgs> steps;
  for (size_t k = 0; k < cores.size(); ++k) {
    const std::vector<Tensor> core_states(states.begin() + k * per_core,
                                          states.begin() + (k + 1) * per_core);
    steps.push_back(
        optimizer_step_args(op, {cores[k]}, optimizer, core_states, hyper, cores[k].size(0)));
  }
  return steps;
}

// Apply the optimizer to the core rows whose gradient is not zero throughout, in place in `cores`
// and `states` (see core_steps); the other arguments are those of tt_core_grads. Does not count the
// step.
void tt_update_(std::vector<Tensor> cores, std::vector<Tensor> states, const Tensor& hyper,
                int64_t optimizer, std::vector<Tensor> plan, const Tensor& prefixes,
                const Tensor& row_grads, std::vector<int64_t> row_factors,
                std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                int64_t matmul_precision) {
  const char* op = "tt_update_";
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  const TtDeviceBatch batch = make_batch(op, tables, cores, plan, matmul_precision);
  check_core_grad_inputs(op, tables, batch.plan.capacity, prefixes, row_grads);
  check_same_device(op, "row_grads", row_grads, cores[0]);
  check_same_device(op, "prefixes", prefixes, cores[0]);
  const std::vector<OptimizerStepArgs> steps = core_steps(op, cores, states, hyper, optimizer);
  if (batch.plan.capacity == 0) return;
  const CudaLauncher launcher(cores[0]);
  const GradMemory grad_memory(tables);
  const Tensor memory = allocate(cores[0], {grad_memory.floats}, ScalarType::Float);
  auto* grads = static_cast<float*>(memory.mutable_data_ptr());
  run_backward(batch, cores, prefixes, row_grads, grad_memory, grads, launcher, steps);
}

// The memory that a forward pass keeps for its backward pass, in one tensor.
struct ForwardState {
  GroupArrays groups{};
  PlanArrays plan{};
  TtMemory values;  // right values, copies of cores, left values

  // Take the buffers from `memory`, and set the plan of `batch` to them.
  void take(TtDeviceBatch* batch, PackedBuffers& memory) {
    const int64_t n = batch->plan.capacity;
    groups.rows = memory.words<int64_t>(n);
    groups.segments = memory.ints(n + 1);
    groups.sorted_lookups = memory.ints(n);
    groups.sorted_bags = memory.ints(n);
    groups.num_groups = memory.ints(1);
    int i = 0;
    for (const int64_t size : tt_plan_sizes(n, batch->plan.tables))
      plan.arrays[i++] = memory.ints(size);
    take_values(nullptr, batch, memory, &values);
    batch->plan = plan.plan(n, batch->plan.tables);
  }
};

// Check the lookups of a pass, and return its batch with the sizes of the plan but no memory.
TtDeviceBatch new_batch(const char* op, const TtTables& tables, const std::vector<Tensor>& cores,
                        const Tensor& features, const Tensor& indices, const Tensor& offsets,
                        int64_t matmul_precision) {
  check_features(op, features);
  check_lookups(op, indices, offsets);
  const Tensor* other_inputs[] = {&features, &indices, &offsets};
  for (const Tensor* tensor : other_inputs) check_same_device(op, "each core", *tensor, cores[0]);
  std::vector<const void*> data;
  for (const Tensor& core : cores) data.push_back(core.const_data_ptr());
  TtPlan plan{};
  plan.capacity = indices.numel();
  plan.tables = tables.size();
  return {tables.shapes, data, tables.type, plan, parse_matmul_precision(op, matmul_precision)};
}

// Return the pooled output of a batch. `rows` are its distinct rows, [L, row_stride]; `inverse`,
// [L], has the row of each lookup. `has_one_dim`: all tables have one dim.
Tensor pool_rows(const TtDeviceBatch& batch, bool has_one_dim, float* rows, int32_t* inverse,
                 const Tensor& features, const Tensor& offsets,
                 const std::optional<Tensor>& bag_layout,
                 const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t output_dim,
                 ScalarType output_dtype) {
  const auto tensor = [&](void* data, int64_t n, ScalarType type) {
    return torch::stable::from_blob(data, {n}, {1}, features.device(), type);
  };
  const int64_t n = batch.plan.capacity;
  const Tensor row_tensor = tensor(rows, n * batch.row_stride, ScalarType::Float);
  const Tensor row_of_lookup = tensor(inverse, n, ScalarType::Int);
  std::vector<Tensor> weights{row_tensor};
  std::optional<Tensor> slots;
  if (!has_one_dim) {  // rows have the stride of the widest, which only rows of a cache have
    const Tensor empty_tier = tensor(rows, 0, ScalarType::Float);
    weights = {row_tensor, empty_tier, empty_tier, row_tensor};
    slots = row_of_lookup;
  }
  return tbe_lookup(weights, tt_features("tt_lookup_checked_", features, kTtOfRows), row_of_lookup,
                    offsets, slots, bag_layout, sample_weights, pooling, output_dim, output_dtype);
}

// Return [output], then, if num_saved >= 0, the tensor for tt_backward_, then, with `check`, the
// repaired offsets. Violations are added to `violations` in the mode "warning"; in the mode "fatal"
// the kernel traps. The arguments are as on the CPU, see batch_cpu.cpp.
std::vector<Tensor> tt_lookup_checked_(
    std::vector<Tensor> cores, const Tensor& tables, const Tensor& feature_tables,
    const Tensor& features, const Tensor& indices, const Tensor& offsets,
    std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights, int64_t pooling,
    int64_t output_dim, ScalarType output_dtype, std::vector<int64_t> row_factors,
    std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores, int64_t num_saved,
    std::optional<int64_t> check, Tensor violations, int64_t matmul_precision) {
  const char* op = "tt_lookup_checked_";
  const TtTables shapes(op, cores, row_factors, dim_factors, num_cores);
  TtDeviceBatch batch = new_batch(op, shapes, cores, features, indices, offsets, matmul_precision);
  const TtTableIds* table = tt_table_ids(op, "tables", tables);
  check_same_device(op, "tables", tables, indices);
  const Tensor key_features = tt_features(op, features, kTtOfKeys);
  STD_TORCH_CHECK(tables.size(0) == shapes.size() && feature_tables.size(0) == key_features.size(0),
                  op, ": tables and feature_tables must have a row per table and per feature");
  check_sample_weights(op, sample_weights, indices);
  const int64_t n = indices.numel();
  const CudaLauncher launcher(indices);
  ForwardState state;
  const PackedBuffers memory(indices, [&](PackedBuffers& take) { state.take(&batch, take); });
  PlanScratch plan_scratch;
  int64_t* keys = nullptr;
  int32_t* inverse = nullptr;
  float* rows = nullptr;
  uint64_t* words = nullptr;
  const PackedBuffers scratch(indices, [&](PackedBuffers& take) {
    plan_scratch.take(take, n, batch.right_ids);
    keys = take.words<int64_t>(n);
    inverse = take.ints(n);
    rows = take(n * batch.row_stride);
    words = take.words<uint64_t>(TtArrays::max_words(batch));
  });
  std::vector<Tensor> results;
  Tensor checked = offsets;
  if (check) {
    checked = bounds_check_(indices, offsets, tt_features(op, features, kTtOfIds), bag_layout,
                            *check, violations);
  }
  make_keys(op, launcher, indices, checked, bag_layout, feature_tables, keys);
  group_lookups(op, key_features,
                torch::stable::from_blob(keys, {n}, {1}, indices.device(), ScalarType::Long),
                checked, bag_layout, shapes.first_keys.back(), check.has_value(), state.groups);
  const GroupArrays& groups = state.groups;
  make_plan(launcher, indices, groups.rows, groups.num_groups, table, shapes.size(), &plan_scratch,
            state.plan, {groups.segments, groups.sorted_lookups, groups.num_groups, n, inverse});
  if (n > 0) {
    TtArrays arrays(batch, state.values);
    arrays.upload(launcher, words);
    arrays.make_values(launcher, state.values);
    arrays.make_rows(launcher, rows);
  }
  bool has_one_dim = true;
  for (const TtShape& shape : shapes.shapes) has_one_dim &= shape.dim() == shapes.dim;
  results.push_back(pool_rows(batch, has_one_dim, rows, inverse, features, checked, bag_layout,
                              sample_weights, pooling, output_dim, output_dtype));
  if (num_saved >= 0) results.push_back(memory.tensor());
  if (check) results.push_back(checked);
  return results;
}

// Update as on the CPU; `kept` is the one tensor that tt_lookup_checked_ returned. With `is_stale`
// the values of halves are computed again. Everything is checked and allocated before the launch
// that counts the step, so that a call that throws does not count it.
void tt_backward_(std::vector<Tensor> cores, std::vector<Tensor> states, Tensor hyper,
                  int64_t optimizer, const Tensor& grad, const Tensor& features,
                  const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout,
                  std::optional<Tensor> sample_weights, int64_t pooling, std::vector<Tensor> kept,
                  std::vector<int64_t> row_factors, std::vector<int64_t> dim_factors,
                  std::vector<int64_t> num_cores, bool is_stale, int64_t matmul_precision,
                  std::optional<Tensor> is_finite) {
  const char* op = "tt_backward_";
  const TtTables shapes(op, cores, row_factors, dim_factors, num_cores);
  TtDeviceBatch batch = new_batch(op, shapes, cores, features, indices, offsets, matmul_precision);
  check_has_step(op, hyper);
  check_is_finite(op, is_finite);
  if (is_finite) check_same_device(op, "is_finite", *is_finite, grad);
  STD_TORCH_CHECK(kept.size() == 1, op,
                  ": kept must be the tensor that tt_lookup_checked_ returned");
  const std::vector<OptimizerStepArgs> steps = core_steps(op, cores, states, hyper, optimizer);
  const int64_t n = indices.numel();
  const CudaLauncher launcher(indices);
  const GradMemory grad_memory(shapes);
  ForwardState from_forward;
  const PackedBuffers memory(op, indices, kept[0],
                             [&](PackedBuffers& take) { from_forward.take(&batch, take); });
  TtMemory values = from_forward.values;
  values.new_left_values = nullptr;
  float *row_grads = nullptr, *grads = nullptr;
  uint64_t* words = nullptr;
  const PackedBuffers scratch(indices, [&](PackedBuffers& take) {
    row_grads = take(n * batch.row_stride);
    grads = take(grad_memory.floats);
    if (is_stale) take_values(nullptr, &batch, take, &values);
    values.add_backward(&batch, take);
    words = take.words<uint64_t>(TtArrays::max_words(batch));
  });
  set_grads(grad_memory, grads, &batch);
  TtArrays arrays(batch, values);
  add_steps(cores, steps, grad_memory, grads, &arrays);
  sum_row_grads(op, grad, tt_features(op, features, kTtOfKeys), indices, from_forward.groups,
                offsets, bag_layout, sample_weights, pooling, batch.row_stride, row_grads);
  StepStart begin{grads, grad_memory.zeros,
                  static_cast<double*>(hyper.mutable_data_ptr()) + Hyper::kStep,
                  is_finite ? is_finite->const_data_ptr<bool>() : nullptr};
  if (n == 0) begin.num_zeros = 0;
  arrays.upload(launcher, words, begin);
  if (n == 0) return;
  if (is_stale) arrays.make_values(launcher, values);
  arrays.make_grads(launcher, values, row_grads);
  arrays.update(launcher, steps[0]);
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, tt_keys);
  EMB_IMPL(m, emb::cuda, tt_plan);
  EMB_IMPL(m, emb::cuda, tt_rows);
  EMB_IMPL(m, emb::cuda, tt_core_grads);
  EMB_IMPL(m, emb::cuda, tt_update_);
  EMB_IMPL(m, emb::cuda, tt_lookup_checked_);
  EMB_IMPL(m, emb::cuda, tt_backward_);
}
