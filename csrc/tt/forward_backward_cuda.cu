// The ops of tensor-train tables on the GPU: check the arguments, allocate memory, launch kernels.
// tt/args.h explains keys, halves, values and plans. Nothing waits for the device, so the contents
// of device tensors are trusted, and arrays have the length of the largest case. Otherwise the
// contracts are those of the CPU (plan_cpu.cpp, forward_backward_cpu.cpp, batch_cpu.cpp).
//
// `tt_lookup_checked_` and `tt_backward_` are whole passes. The first packs into one tensor
// (`ForwardState`) what the second also needs: the grouping of the lookups, the plan, copies of
// cores and the values of halves. Each pass packs its other buffers into a second allocation,
// except those of the ops of dense tables and of CUB's sort. The other ops are parts of these
// passes, for compiled graphs, and for gradients of sample weights and whole cores.
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

// Uninitialised buffers in one tensor. `assign_all(buffers)` must assign every buffer, by calls of
// `buffers(n)`, `ints(n)` or `words(n)`. It is called twice and must ask for the same sizes in the
// same order: the first call adds up the sizes and assigns null; the second, omitted if all sizes
// are 0, assigns the addresses. The memory is freed, in the order of the stream, after the last
// owner of the tensor.
class PackedBuffers {
 public:
  // Allocate the tensor on the device of `like`.
  template <class AssignAll>
  PackedBuffers(const Tensor& like, const AssignAll& assign_all) {
    assign_all(*this);
    tensor_ = allocate(like, {num_floats_}, ScalarType::Float);
    assign_addresses(assign_all);
  }

  // Use `tensor`, which another object allocated for the same sizes. Throw unless it is float32 of
  // this size, contiguous, aligned, and on the device of `like`.
  template <class AssignAll>
  PackedBuffers(const char* op, const Tensor& like, const Tensor& tensor,
                const AssignAll& assign_all)
      : tensor_(tensor) {
    assign_all(*this);
    check_dtype(op, "kept", tensor, ScalarType::Float, "float32");
    check_same_device(op, "kept", tensor, like);
    STD_TORCH_CHECK(tensor.numel() == num_floats_ && tensor.is_contiguous(), op,
                    ": kept must be what tt_lookup_checked_ returned for these tables and indices");
    // Kernels read some buffers as words of 8 bytes, and do not check the alignment.
    STD_TORCH_CHECK(is_aligned(tensor.const_data_ptr(), 16), op,
                    ": kept must be aligned to 16 bytes, as the tensor of tt_lookup_checked_ is");
    assign_addresses(assign_all);
  }

  const Tensor& tensor() const { return *tensor_; }

  // Return the next buffer, of n floats, at a multiple of 256 bytes from the start of the tensor;
  // null if n is 0, and in the first call of assign_all.
  float* operator()(int64_t n) {
    constexpr int64_t kAlignedFloats = 64;
    if (n == 0) return nullptr;
    const int64_t rounded = (n + kAlignedFloats - 1) / kAlignedFloats * kAlignedFloats;
    num_floats_ += rounded;
    float* const buffer = next_;
    if (buffer != nullptr) next_ += rounded;
    return buffer;
  }

  // Return the next buffer, of n int32 or of n numbers of 8 bytes.
  int32_t* ints(int64_t n) { return reinterpret_cast<int32_t*>((*this)(n)); }
  template <class T>
  T* words(int64_t n) {
    static_assert(sizeof(T) == 8);
    return reinterpret_cast<T*>((*this)(2 * n));
  }

 private:
  template <class AssignAll>
  void assign_addresses(const AssignAll& assign_all) {
    next_ = const_cast<float*>(tensor_->const_data_ptr<float>());
    if (num_floats_ > 0) assign_all(*this);
    next_ = nullptr;
  }

  std::optional<Tensor> tensor_;
  float* next_ = nullptr;  // address of the next buffer, null while sizes are added up
  int64_t num_floats_ = 0;
};

// Check `feature_tables`, and write the key of each lookup within its table to `keys`, [L] of
// device memory: see emb::tt_keys in tt/entries.h. The caller must have called check_lookups.
void write_keys(const char* op, const CudaLauncher& launcher, const Tensor& indices,
                const Tensor& offsets, const std::optional<Tensor>& bag_layout,
                const Tensor& feature_tables, int64_t* keys) {
  const TtTableIds* table_ids = tt_table_ids(op, "feature_tables", feature_tables);
  check_same_device(op, "feature_tables", feature_tables, indices);
  const Tensor input = as_contiguous(indices), input_offsets = as_contiguous(offsets);
  const int64_t n = indices.numel(), num_features = feature_tables.size(0);
  STD_TORCH_CHECK(n == 0 || num_features > 0, op,
                  ": feature_tables must have a row per feature, got none for ", n, " indices");
  const Bags bags{index_array(input_offsets), offsets.numel() - 1, n};
  launch_tt_keys(launcher, {index_array(input), n, table_ids, static_cast<int>(num_features), bags,
                            bag_map(op, num_features, input_offsets, bag_layout, 0), keys});
}

// The contract is that of emb::tt_keys in tt/entries.h.
Tensor tt_keys(const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout,
               const Tensor& feature_tables) {
  const char* op = "tt_keys";
  check_lookups(op, indices, offsets);
  const CudaLauncher launcher(indices);
  Tensor keys = allocate(indices, {indices.numel()}, ScalarType::Long);
  write_keys(op, launcher, indices, offsets, bag_layout, feature_tables,
             keys.mutable_data_ptr<int64_t>());
  return keys;
}

// The data of the tensors of a plan, in the order of TtPlanTensor, in device memory.
struct PlanArrays {
  int32_t* arrays[kNumTtPlanTensors];

  int32_t* operator[](TtPlanTensor i) const { return arrays[i]; }

  TtPlan plan(int64_t capacity, int64_t num_tables) const {
    return tt_plan_of_arrays(capacity, num_tables, arrays);
  }
};

// The scratch of `write_plan`, for n lookups. Its contents need no initial values.
struct PlanScratch {
  // [n] the left id of each row, then [kMaxTtRanges] the number of left halves of each range.
  int32_t* left_id_of_row = nullptr;
  SortBuffers<uint32_t> right_buffers{};  // the sort of the rows by right id

  void assign(PackedBuffers& buffers, int64_t n, int64_t num_right_ids) {
    left_id_of_row = buffers.ints(n + kMaxTtRanges);
    right_buffers.keys = reinterpret_cast<uint32_t*>(buffers.ints(n));
    right_buffers.sorted_keys = reinterpret_cast<uint32_t*>(buffers.ints(n));
    right_buffers.positions = buffers.ints(n);
    right_buffers.range_counts = buffers.ints(2 * kMaxRanges);
    right_buffers.n = n;
    right_buffers.no_group_key = static_cast<uint32_t>(num_right_ids);
  }
};

// Write the plan of the rows of `keys`, the first *count of which are distinct and ascend, to
// `plan`, and the row of each lookup to lookup_inverse.inverse, if that is not null. All pointers
// are to device memory; `like` is a tensor there.
void write_plan(const CudaLauncher& launcher, const Tensor& like, const int64_t* keys,
                const int32_t* count, const TtTableIds* table_ids, int64_t num_tables,
                PlanScratch* scratch, const PlanArrays& plan, const InverseArgs& lookup_inverse) {
  SortBuffers<uint32_t>& right_buffers = scratch->right_buffers;
  right_buffers.sorted_positions = plan[kTtRightRows];
  const int64_t n = right_buffers.n;
  int32_t *starts = plan[kTtStarts], *range_counts = scratch->left_id_of_row + n;
  int32_t* num_rights = starts + TtPlan::total_index(2, num_tables);
  launch_tt_split(
      launcher,
      {keys, count, table_ids, static_cast<int>(num_tables), right_buffers, scratch->left_id_of_row,
       range_counts, starts},
      {count, scratch->left_id_of_row, range_counts, n, plan[kTtLefts], plan[kTtLeftSegments],
       plan[kTtRowLefts], starts + TtPlan::total_index(1, num_tables)});
  sort_and_group(launcher, like, right_buffers,
                 {.unique = plan[kTtRights],
                  .unique_is_int64 = false,
                  .segments = plan[kTtRightSegments],
                  .num_groups = num_rights});
  const InverseArgs right_inverse{plan[kTtRightSegments], plan[kTtRightRows], num_rights, n,
                                  plan[kTtRowRights]};
  launch_tt_finish(launcher, {right_inverse, lookup_inverse, keys, plan[kTtLefts], plan[kTtRights],
                              table_ids, static_cast<int>(num_tables), starts});
}

// The contract is that of emb::tt_plan in tt/entries.h.
std::vector<Tensor> tt_plan(const Tensor& keys, const Tensor& count, const Tensor& tables,
                            int64_t left_ids, int64_t right_ids) {
  const char* op = "tt_plan";
  check_dtype(op, "keys", keys, ScalarType::Long, "int64");
  check_dtype(op, "count", count, ScalarType::Int, "int32");
  check_same_device(op, "count", count, keys);
  const TtTableIds* table_ids = tt_table_ids(op, "tables", tables);
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
  const PackedBuffers scratch_memory(
      keys, [&](PackedBuffers& buffers) { scratch.assign(buffers, n, right_ids); });
  write_plan(launcher, keys, keys.const_data_ptr<int64_t>(), count.const_data_ptr<int32_t>(),
             table_ids, num_tables, &scratch, arrays, {});
  return plan;
}

// Return the device addresses of cores.
std::vector<const void*> core_addresses(const std::vector<Tensor>& cores) {
  std::vector<const void*> addresses;
  for (const Tensor& core : cores) addresses.push_back(core.const_data_ptr());
  return addresses;
}

// Return the batch of checked tables and a plan, whose sizes, dtypes and device are checked.
TtDeviceBatch planned_batch(const char* op, const TtTables& tables,
                            const std::vector<Tensor>& cores,
                            const std::vector<Tensor>& plan_tensors, int64_t matmul_precision) {
  const MatmulPrecision precision = parse_matmul_precision(op, matmul_precision);
  const TtPlan plan = tt_plan_of(op, plan_tensors, tables.size());
  check_same_device(op, "the plan", plan_tensors[0], cores[0]);
  return {tables.shapes, core_addresses(cores), tables.type, plan, precision};
}

// Return the distinct rows of a plan, float32 [L, max_dim], and the left values, those of its first
// `num_saved` left halves, float32 [num_saved, left_value_size] (see TtTables). Rows and halves
// that do not exist, columns beyond the dim of a table, and values of halves that are not pairs are
// unspecified.
std::tuple<Tensor, Tensor> tt_rows(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                   std::vector<int64_t> row_factors,
                                   std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                   int64_t num_saved, int64_t matmul_precision) {
  const char* op = "tt_rows";
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  TtDeviceBatch batch = planned_batch(op, tables, cores, plan, matmul_precision);
  check_not_negative(op, "num_saved", num_saved);
  const CudaLauncher launcher(cores[0]);
  Tensor rows = allocate(cores[0], {batch.plan.capacity, tables.max_dim}, ScalarType::Float);
  Tensor left_values = allocate(cores[0], {num_saved, tables.left_value_size}, ScalarType::Float);
  if (batch.plan.capacity == 0) return {rows, left_values};
  TtMemory memory;
  float* const returned_values = left_values.mutable_data_ptr<float>();
  // The kernels need room for the values of as many left halves as the batch can have.
  const bool has_room_for_all = num_saved >= batch.max_lefts();
  uint64_t* words = nullptr;
  const PackedBuffers scratch(cores[0], [&](PackedBuffers& buffers) {
    memory.assign_forward(&batch, buffers);
    if (batch.has_left_pairs) {
      memory.set_left_values(has_room_for_all ? returned_values : buffers(batch.left_floats()));
    }
    words = buffers.words<uint64_t>(TtPass::max_words(batch));
  });
  TtPass pass(batch, memory);
  pass.upload(launcher, words);
  pass.make_values(launcher, memory);
  pass.make_rows(launcher, rows.mutable_data_ptr<float>());
  if (batch.has_left_pairs && !has_room_for_all && num_saved > 0) {
    check_cuda(
        cudaMemcpyAsync(returned_values, memory.left_values, left_values.numel() * sizeof(float),
                        cudaMemcpyDeviceToDevice, launcher.stream()),
        "copying the left values");
  }
  return {rows, left_values};
}

// The layout of one tensor with the gradients of all cores. Cores that are not part of a pair come
// first, because they must be filled with zeros: the kernels write only the rows that the batch
// uses.
struct GradLayout {
  std::vector<int64_t> offsets;  // first float of each core
  // The number of floats, from the first on, to be filled with zeros, and of all floats.
  int64_t num_zeros = 0, num_floats = 0;

  explicit GradLayout(const TtTables& tables) {
    for (const bool in_pair : {false, true}) {
      size_t core = 0;  // among the cores of all tables
      for (const TtShape& shape : tables.shapes) {
        for (int k = 0; k < shape.num_cores; ++k, ++core) {
          if (offsets.size() <= core) offsets.push_back(0);
          if (is_in_pair(shape, k) != in_pair) continue;
          offsets[core] = num_floats;
          const int64_t width = int64_t{shape.ranks[k]} * shape.q[k] * shape.ranks[k + 1];
          num_floats += (shape.p[k] * width + 3) / 4 * 4;  // 16 bytes, for vectors
        }
      }
      if (!in_pair) num_zeros = num_floats;
    }
  }

 private:
  static bool is_in_pair(const TtShape& shape, int k) {
    return k < (shape.num_cores / 2) + (shape.num_cores % 2) ? shape.left().is_pair
                                                             : shape.right().is_pair;
  }
};

// Return the matrix [rows, columns] that begins at element `first` of the flat tensor `memory` and
// shares its memory. With `torch::stable::view` the schema check of opcheck fails on the pretend
// GPU.
Tensor matrix_at(const Tensor& memory, int64_t first, int64_t rows, int64_t columns) {
  const int64_t sizes[] = {rows, columns}, strides[] = {columns, 1};
  AtenTensorHandle matrix = nullptr;
  STD_TORCH_CHECK(
      aoti_torch__reinterpret_tensor(memory.get(), 2, sizes, strides, first, &matrix) == 0,
      "emblib: can't make a view: ", torch_error_message());
  return Tensor(matrix);
}

// Point the tables of a batch to the gradients of their cores.
void set_grads(const GradLayout& grad_layout, float* grads, TtDeviceBatch* batch) {
  size_t core = 0;  // among the cores of all tables
  for (TtDeviceTable& table : batch->tables) {
    for (int k = 0; k < table.shape.num_cores; ++k)
      table.grads[k] = grads + grad_layout.offsets[core++];
  }
}

// Assign the buffers of a forward pass to `memory` and `batch`. The values of left pairs are
// `left_values`, or, if that is null, a buffer that this pass fills.
void assign_values(const float* left_values, TtDeviceBatch* batch, PackedBuffers& buffers,
                   TtMemory* memory) {
  memory->assign_forward(batch, buffers);
  memory->left_values = left_values;
  if (left_values == nullptr && batch->has_left_pairs) {
    memory->set_left_values(buffers(batch->left_floats()));
  }
}

// Add an optimizer step per core to `pass`; `grads` is the memory that `grad_layout` describes.
void add_steps(const std::vector<Tensor>& cores, const std::vector<OptimizerStepArgs>& steps,
               const GradLayout& grad_layout, const float* grads, TtPass* pass) {
  int64_t first_row = 0;  // first row of a core among the rows of all cores
  for (size_t k = 0; k < cores.size(); ++k) {
    const MatrixGrad matrix_grad{grads + grad_layout.offsets[k], cores[k].size(0), cores[k].size(1),
                                 first_row};
    pass->add_step({matrix_grad, steps[k].tiers[0], 0});
    first_row += cores[k].size(0);
  }
}

// Write the gradients of the cores to `grads`, the memory that `grad_layout` describes, and apply
// `steps`, one per core, to the cores, unless it is empty. The capacity of the plan must not be 0.
void run_backward(TtDeviceBatch batch, const std::vector<Tensor>& cores, const Tensor& left_values,
                  const Tensor& row_grads, const GradLayout& grad_layout, float* grads,
                  const CudaLauncher& launcher, const std::vector<OptimizerStepArgs>& steps) {
  const Tensor gradient = as_contiguous(row_grads);
  set_grads(grad_layout, grads, &batch);
  TtMemory memory;
  // The number of left halves is known on the device only, so use the values if they are enough for
  // the largest case, and compute all values otherwise.
  const bool has_all_values = !batch.has_left_pairs || left_values.size(0) >= batch.max_lefts();
  uint64_t* words = nullptr;
  const PackedBuffers scratch(gradient, [&](PackedBuffers& buffers) {
    assign_values(has_all_values ? left_values.const_data_ptr<float>() : nullptr, &batch, buffers,
                  &memory);
    memory.assign_backward(&batch, buffers);
    words = buffers.words<uint64_t>(TtPass::max_words(batch));
  });
  TtPass pass(batch, memory);
  if (!steps.empty()) add_steps(cores, steps, grad_layout, grads, &pass);
  pass.upload(launcher, words, StepStart{grads, grad_layout.num_zeros});
  pass.make_values(launcher, memory);
  pass.make_grads(launcher, memory, gradient.const_data_ptr<float>());
  // The first step has the optimizer and the hyperparameters, which are the same for all cores.
  if (!steps.empty()) pass.update(launcher, steps[0]);
}

// Return the gradient of each core, float32 of its shape, from `row_grads`, float32 [L or more,
// max_dim], the gradients of the rows of tt_rows. The results are views of one tensor.
// `left_values` must be what tt_rows returned for this plan and these cores. If it has fewer rows
// than L lookups can have left halves, all values are computed again.
std::vector<Tensor> tt_core_grads(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                  const Tensor& left_values, const Tensor& row_grads,
                                  std::vector<int64_t> row_factors,
                                  std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                                  int64_t matmul_precision) {
  const char* op = "tt_core_grads";
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  const TtDeviceBatch batch = planned_batch(op, tables, cores, plan, matmul_precision);
  check_core_grad_inputs(op, tables, batch.plan.capacity, left_values, row_grads);
  const CudaLauncher launcher(cores[0]);
  const GradLayout grad_layout(tables);
  Tensor all_grads = allocate(cores[0], {grad_layout.num_floats}, ScalarType::Float);
  auto* data = all_grads.mutable_data_ptr<float>();
  if (batch.plan.capacity == 0) {  // no kernel writes the gradients of pairs
    torch::stable::zero_(all_grads);
  } else {
    run_backward(batch, cores, left_values, row_grads, grad_layout, data, launcher, {});
  }
  std::vector<Tensor> grads;
  for (size_t k = 0; k < cores.size(); ++k) {
    grads.push_back(
        matrix_at(all_grads, grad_layout.offsets[k], cores[k].size(0), cores[k].size(1)));
  }
  return grads;
}

// Check `hyper` and the states of an optimizer, see states_by_core. Return an optimizer step per
// core.
std::vector<OptimizerStepArgs> core_steps(const char* op, const std::vector<Tensor>& cores,
                                          const std::vector<Tensor>& states, const Tensor& hyper,
                                          int64_t optimizer) {
  const std::vector<std::vector<Tensor>> core_states = states_by_core(op, states, cores.size());
  check_same_device(op, "hyper", hyper, cores[0]);
  std::vector<OptimizerStepArgs> steps;
  for (size_t k = 0; k < cores.size(); ++k) {
    steps.push_back(
        optimizer_step_args(op, {cores[k]}, optimizer, core_states[k], hyper, cores[k].size(0)));
  }
  return steps;
}

// Apply the optimizer, in place in `cores` and `states`, to the core rows whose gradient is not
// zero throughout. states_by_core describes `states`; the other arguments are those of
// tt_core_grads. Does not count the step in `hyper`.
void tt_update_(std::vector<Tensor> cores, std::vector<Tensor> states, const Tensor& hyper,
                int64_t optimizer, std::vector<Tensor> plan, const Tensor& left_values,
                const Tensor& row_grads, std::vector<int64_t> row_factors,
                std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores,
                int64_t matmul_precision) {
  const char* op = "tt_update_";
  const TtTables tables(op, cores, row_factors, dim_factors, num_cores);
  const TtDeviceBatch batch = planned_batch(op, tables, cores, plan, matmul_precision);
  check_core_grad_inputs(op, tables, batch.plan.capacity, left_values, row_grads);
  const std::vector<OptimizerStepArgs> steps = core_steps(op, cores, states, hyper, optimizer);
  if (batch.plan.capacity == 0) return;
  const CudaLauncher launcher(cores[0]);
  const GradLayout grad_layout(tables);
  const Tensor all_grads = allocate(cores[0], {grad_layout.num_floats}, ScalarType::Float);
  auto* grads = static_cast<float*>(all_grads.mutable_data_ptr());
  run_backward(batch, cores, left_values, row_grads, grad_layout, grads, launcher, steps);
}

// The buffers that a forward pass returns, in one tensor, for its backward pass.
struct ForwardState {
  DeviceGrouping groups{};
  PlanArrays plan{};
  TtMemory memory;  // right and left values; the copies of cores are in the batch

  // Assign the buffers, and the plan and the copies of cores in `batch`.
  void assign(TtDeviceBatch* batch, PackedBuffers& buffers) {
    const int64_t n = batch->plan.capacity;
    groups.rows = buffers.words<int64_t>(n);
    groups.segments = buffers.ints(n + 1);
    groups.sorted_lookups = buffers.ints(n);
    groups.sorted_bags = buffers.ints(n);
    groups.num_groups = buffers.ints(1);
    int i = 0;
    for (const int64_t size : tt_plan_sizes(n, batch->plan.num_tables)) {
      plan.arrays[i++] = buffers.ints(size);
    }
    assign_values(nullptr, batch, buffers, &memory);
    batch->plan = plan.plan(n, batch->plan.num_tables);
  }
};

// Check the lookups and the precision of a pass. Return its batch, whose plan has sizes but no
// arrays yet: ForwardState::assign adds them.
TtDeviceBatch unplanned_batch(const char* op, const TtTables& tables,
                              const std::vector<Tensor>& cores, const Tensor& features,
                              const Tensor& indices, const Tensor& offsets,
                              int64_t matmul_precision) {
  check_features(op, features);
  check_lookups(op, indices, offsets);
  const Tensor* other_inputs[] = {&features, &indices, &offsets};
  for (const Tensor* tensor : other_inputs) check_same_device(op, "each core", *tensor, cores[0]);
  TtPlan plan{};
  plan.capacity = indices.numel();
  plan.num_tables = tables.size();
  return {tables.shapes, core_addresses(cores), tables.type, plan,
          parse_matmul_precision(op, matmul_precision)};
}

// Return the pooled output of a batch. `rows` are its distinct rows, [L, row_stride], and
// `row_of_lookup`, [L], is the row of each lookup. `has_one_dim`: all tables have the same dim.
Tensor pool_rows(const TtDeviceBatch& batch, bool has_one_dim, float* rows, int32_t* row_of_lookup,
                 const Tensor& features, const Tensor& offsets,
                 const std::optional<Tensor>& bag_layout,
                 const std::optional<Tensor>& sample_weights, int64_t pooling, int64_t output_dim,
                 ScalarType output_dtype) {
  const auto flat_tensor = [&](void* data, int64_t n, ScalarType type) {
    return torch::stable::from_blob(data, {n}, {1}, features.device(), type);
  };
  const int64_t n = batch.plan.capacity;
  const Tensor weight = flat_tensor(rows, n * batch.row_stride, ScalarType::Float);
  const Tensor lookup_rows = flat_tensor(row_of_lookup, n, ScalarType::Int);
  std::vector<Tensor> weights{weight};
  std::optional<Tensor> slots;
  if (!has_one_dim) {
    // Rows have the stride of the widest table. tbe_lookup takes a stride for cached rows alone, so
    // the rows are passed as rows of a cache, in which the slot of a lookup is its row.
    const Tensor empty_tier = flat_tensor(rows, 0, ScalarType::Float);
    weights = {weight, empty_tier, empty_tier, weight};
    slots = lookup_rows;
  }
  return tbe_lookup(weights, tt_features("tt_lookup_checked_", features, kTtRowFeatures),
                    lookup_rows, offsets, slots, bag_layout, sample_weights, pooling, output_dim,
                    output_dtype);
}

// Look up a batch. Return the output, then, if num_saved >= 0, one tensor for tt_backward_, which
// has the values of all left halves, then, with `check`, the repaired offsets. `check` acts as in
// bounds_check_: the mode "warning" adds to `violations`, before feature_tables and the arguments
// of tbe_lookup are checked, and the mode "fatal" traps. The other arguments are those of the CPU,
// see batch_cpu.cpp.
std::vector<Tensor> tt_lookup_checked_(
    std::vector<Tensor> cores, const Tensor& tables, const Tensor& feature_tables,
    const Tensor& features, const Tensor& indices, const Tensor& offsets,
    std::optional<Tensor> bag_layout, std::optional<Tensor> sample_weights, int64_t pooling,
    int64_t output_dim, ScalarType output_dtype, std::vector<int64_t> row_factors,
    std::vector<int64_t> dim_factors, std::vector<int64_t> num_cores, int64_t num_saved,
    std::optional<int64_t> check, Tensor violations, int64_t matmul_precision) {
  const char* op = "tt_lookup_checked_";
  const TtTables checked_tables(op, cores, row_factors, dim_factors, num_cores);
  TtDeviceBatch batch =
      unplanned_batch(op, checked_tables, cores, features, indices, offsets, matmul_precision);
  const TtTableIds* table_ids = tt_table_ids(op, "tables", tables);
  check_same_device(op, "tables", tables, indices);
  const Tensor key_features = tt_features(op, features, kTtKeyFeatures);
  STD_TORCH_CHECK(
      tables.size(0) == checked_tables.size() && feature_tables.size(0) == key_features.size(0), op,
      ": tables and feature_tables must have a row per table and per feature");
  check_sample_weights(op, sample_weights, indices);
  const int64_t n = indices.numel();
  const CudaLauncher launcher(indices);
  ForwardState state;
  const PackedBuffers state_memory(indices,
                                   [&](PackedBuffers& buffers) { state.assign(&batch, buffers); });
  PlanScratch plan_scratch;
  int64_t* keys = nullptr;
  int32_t* row_of_lookup = nullptr;
  float* rows = nullptr;
  uint64_t* words = nullptr;
  const PackedBuffers scratch(indices, [&](PackedBuffers& buffers) {
    plan_scratch.assign(buffers, n, batch.num_right_ids);
    keys = buffers.words<int64_t>(n);
    row_of_lookup = buffers.ints(n);
    rows = buffers(n * batch.row_stride);
    words = buffers.words<uint64_t>(TtPass::max_words(batch));
  });
  std::vector<Tensor> results;
  Tensor valid_offsets = offsets;
  if (check) {
    valid_offsets = bounds_check_(indices, offsets, tt_features(op, features, kTtIdFeatures),
                                  bag_layout, *check, violations);
  }
  write_keys(op, launcher, indices, valid_offsets, bag_layout, feature_tables, keys);
  group_lookups(op, key_features,
                torch::stable::from_blob(keys, {n}, {1}, indices.device(), ScalarType::Long),
                valid_offsets, bag_layout, checked_tables.first_keys.back(), check.has_value(),
                state.groups);
  const DeviceGrouping& groups = state.groups;
  write_plan(launcher, indices, groups.rows, groups.num_groups, table_ids, checked_tables.size(),
             &plan_scratch, state.plan,
             {groups.segments, groups.sorted_lookups, groups.num_groups, n, row_of_lookup});
  if (n > 0) {
    TtPass pass(batch, state.memory);
    pass.upload(launcher, words);
    pass.make_values(launcher, state.memory);
    pass.make_rows(launcher, rows);
  }
  results.push_back(pool_rows(batch, checked_tables.has_one_dim(), rows, row_of_lookup, features,
                              valid_offsets, bag_layout, sample_weights, pooling, output_dim,
                              output_dtype));
  if (num_saved >= 0) results.push_back(state_memory.tensor());
  if (check) results.push_back(valid_offsets);
  return results;
}

// Count the step in `hyper`, and update the cores and states in place: see batch_cpu.cpp. `kept` is
// the one tensor that tt_lookup_checked_ returned for the backward pass. With `is_stale` the values
// of halves are computed again. The launch that counts the step follows all checks and allocations,
// so that a call that throws does not count it, unless a later launch fails. `is_finite` is read on
// the device.
void tt_backward_(std::vector<Tensor> cores, std::vector<Tensor> states, Tensor hyper,
                  int64_t optimizer, const Tensor& grad, const Tensor& features,
                  const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout,
                  std::optional<Tensor> sample_weights, int64_t pooling, std::vector<Tensor> kept,
                  std::vector<int64_t> row_factors, std::vector<int64_t> dim_factors,
                  std::vector<int64_t> num_cores, bool is_stale, int64_t matmul_precision,
                  std::optional<Tensor> is_finite) {
  const char* op = "tt_backward_";
  const TtTables checked_tables(op, cores, row_factors, dim_factors, num_cores);
  TtDeviceBatch batch =
      unplanned_batch(op, checked_tables, cores, features, indices, offsets, matmul_precision);
  check_has_step(op, hyper);
  check_is_finite(op, is_finite);
  if (is_finite) check_same_device(op, "is_finite", *is_finite, grad);
  STD_TORCH_CHECK(kept.size() == 1, op,
                  ": kept must be the tensor that tt_lookup_checked_ returned");
  const std::vector<OptimizerStepArgs> steps = core_steps(op, cores, states, hyper, optimizer);
  const int64_t n = indices.numel();
  const CudaLauncher launcher(indices);
  const GradLayout grad_layout(checked_tables);
  ForwardState state;
  const PackedBuffers state_memory(op, indices, kept[0],
                                   [&](PackedBuffers& buffers) { state.assign(&batch, buffers); });
  TtMemory memory = state.memory;
  memory.new_left_values = nullptr;  // the forward pass has filled left_values
  float *row_grads = nullptr, *grads = nullptr;
  uint64_t* words = nullptr;
  const PackedBuffers scratch(indices, [&](PackedBuffers& buffers) {
    row_grads = buffers(n * batch.row_stride);
    grads = buffers(grad_layout.num_floats);
    // Assign new buffers for the values and the copies of cores: `kept` must not change.
    if (is_stale) assign_values(nullptr, &batch, buffers, &memory);
    memory.assign_backward(&batch, buffers);
    words = buffers.words<uint64_t>(TtPass::max_words(batch));
  });
  set_grads(grad_layout, grads, &batch);
  TtPass pass(batch, memory);
  add_steps(cores, steps, grad_layout, grads, &pass);
  sum_row_grads(op, grad, tt_features(op, features, kTtKeyFeatures), indices, state.groups, offsets,
                bag_layout, sample_weights, pooling, batch.row_stride, row_grads);
  StepStart step_start{grads, grad_layout.num_zeros,
                       static_cast<double*>(hyper.mutable_data_ptr()) + Hyper::kStep,
                       is_finite ? is_finite->const_data_ptr<bool>() : nullptr};
  if (n == 0) step_start.num_zeros = 0;  // nothing reads the gradients then
  // If *is_finite is false, this launch clears the steps of the optimizer, so that `update` does
  // nothing.
  pass.upload(launcher, words, step_start);
  if (n == 0) return;
  if (is_stale) pass.make_values(launcher, memory);
  pass.make_grads(launcher, memory, row_grads);
  pass.update(launcher, steps[0]);  // optimizer and hyperparameters, the same for all cores
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
