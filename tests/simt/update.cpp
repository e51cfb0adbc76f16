// Emulated backward: the fused update, gradients of unique rows, and optimizers over a matrix.
#include "tbe/update.cuh"

#include <vector>

#include "driver.h"
#include "optim/update_rows.cuh"

namespace emb::cuda {
namespace {

// number of the optimizer or -1, hyper; then for each tier: weights, dtype, elements, element
// states (2) each with its dtype, row states (3), rows
OptimizerStepArgs read_step(Words* words) {
  OptimizerStepArgs step;
  const auto rule = static_cast<int>(words->number());
  if (rule != kNoOptimizer && !find_optimizer(rule, &step))
    throw std::runtime_error("no such optimizer");
  step.hyper = words->pointer<const double>();
  for (TierMemory& tier : step.tiers) {
    tier.weights = words->pointer<void>();
    tier.weight_type = words->dtype();
    tier.num_elements = words->number();
    for (int s = 0; s < kMaxElementStates; ++s) {
      tier.element_states[s] = words->pointer<void>();
      tier.state_types[s] = words->dtype();
    }
    for (float*& state : tier.row_states) state = words->pointer<float>();
    tier.num_rows = words->number();
  }
  return step;
}

// grad, dtype, stride, features, bag layout, batch, columns, offsets, is_int64, bags, L, pooling,
// columns of a chunk sum, sample weights, rows, segments, sorted lookups, sorted bags, number of
// groups, row slots, result stride
DeviceGradArgs read_grads(Words* words) {
  DeviceGradArgs args{};
  args.grad = words->pointer<const void>();
  args.grad_type = words->dtype();
  args.grad_stride = words->number();
  args.features = words->pointer<const emb::Feature>();
  args.map.layout = words->pointer<const emb::BagLayout>();
  args.map.batch_size = static_cast<uint32_t>(words->number());
  args.map.stride = words->number();
  args.bags.offsets = words->indices();
  args.bags.num_bags = words->number();
  args.num_lookups = args.bags.num_lookups = words->number();
  args.pooling = static_cast<emb::Pooling>(words->number());
  args.chunk_sum_stride = chunk_sum_stride(words->number());
  args.sample_weights = words->pointer<const float>();
  args.rows = words->pointer<const int64_t>();
  args.segments = words->pointer<const int32_t>();
  args.sorted_lookups = words->pointer<const int32_t>();
  args.sorted_bags = words->pointer<const int32_t>();
  args.num_groups = words->pointer<const int32_t>();
  args.row_slots = words->pointer<const int32_t>();
  args.result_stride = words->number();
  return args;
}

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

// mean_dim, read_step's, read_grads'
extern "C" const char* simt_update(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const int64_t mean_dim = words.number();
    const OptimizerStepArgs step = read_step(&words);
    DeviceGradArgs args = read_grads(&words);
    const int64_t chunks = num_chunk_slots(args.num_lookups);
    std::vector<ChunkTask> tasks(chunks, {1 << 30, 0});  // what no kernel sets is not a segment
    std::vector<float> partials(chunks * args.chunk_sum_stride);
    args.chunk_tasks = tasks.data();
    args.chunk_sums = partials.data();
    launch_update(launcher, args, step, mean_dim);
  });
}

// read_step's, grads, rows, width, first row
extern "C" const char* simt_update_rows(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const OptimizerStepArgs step = read_step(&words);
    const auto* grads = words.pointer<const float>();
    const int64_t rows = words.number(), width = words.number(), first_row = words.number();
    launch_update_rows(launcher, MatrixGrad{grads, rows, width, first_row}, step);
  });
}
