// Emulated tensor-train ops: keys, plan, and the forward and backward pass.
#include <vector>

#include "driver.h"
#include "host_sort.h"
#include "tt/forward_backward.cuh"
#include "tt/plan.cuh"

namespace emb::cuda {
namespace {

// Words: cores d, d row factors, d dim factors, d + 1 ranks.
TtShape read_shape(Words* words) {
  TtShape shape{};
  shape.cores = static_cast<int>(words->number());
  for (int k = 0; k < shape.cores; ++k) shape.p[k] = words->number();
  for (int k = 0; k < shape.cores; ++k) shape.q[k] = static_cast<int>(words->number());
  for (int k = 0; k <= shape.cores; ++k) shape.ranks[k] = static_cast<int>(words->number());
  return shape;
}

// Words: shape, capacity, d cores, eight plan tensors.
TtBatch read_batch(Words* words) {
  TtBatch batch{read_shape(words), {}, {}};
  batch.plan.capacity = words->number();
  for (int k = 0; k < batch.shape.cores; ++k) batch.cores[k] = words->pointer<const float>();
  const auto next = [&] { return words->pointer<const int32_t>(); };
  TtPlan& plan = batch.plan;
  plan.lefts = next();
  plan.left_segments = next();
  plan.row_lefts = next();
  plan.rights = next();
  plan.right_segments = next();
  plan.row_rights = next();
  plan.right_rows = next();
  plan.counts = next();
  return batch;
}

// Memory of exactly the requested size, so that the sanitizer detects every access outside.
class Memory {
 public:
  float* operator()(int64_t floats) {
    held_.emplace_back(floats, 1e30f);
    return held_.back().data();
  }
  TtRightMemory right(const TtBatch& batch) {
    return {(*this)(TtRightMemory::value_floats(batch)),
            (*this)(TtRightMemory::outer_floats(batch)),
            (*this)(TtRightMemory::inner_floats(batch))};
  }

 private:
  std::vector<std::vector<float>> held_;
};

void group_halves(const simt::HostLauncher& launcher, HostSort<uint32_t>* sort,
                  const GroupOutput& out, int32_t* row_halves) {
  if (sort->buffers.n > 0) sort->run();
  launch_groups(launcher, sort->buffers, out);
  launch_inverse(launcher, out.segments, sort->buffers.sorted_positions, out.count, sort->buffers.n,
                 row_halves);
}

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

// shape, ids, is_int64, n, rows, keys
extern "C" const char* simt_tt_keys(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const emb::TtShape shape = read_shape(&words);
    TtKeysArgs args{};
    args.ids = words.indices();
    args.n = words.number();
    args.rows = words.number();
    args.key_of = shape.key_map();
    args.keys = words.pointer<int64_t>();
    launch_tt_keys(launcher, args);
  });
}

// shape, keys, count, n, eight plan tensors
extern "C" const char* simt_tt_plan(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const emb::TtShape shape = read_shape(&words);
    const auto* keys = words.pointer<const int64_t>();
    const auto* count = words.pointer<const int32_t>();
    const int64_t n = words.number();
    int32_t* plan[emb::kTtPlanTensors];
    for (int32_t*& tensor : plan) tensor = words.pointer<int32_t>();
    std::vector<int32_t> left_rows(n);
    HostSort<uint32_t> left(n, shape.left().ids(), left_rows.data());
    HostSort<uint32_t> right(n, shape.right().ids(), plan[6]);
    launch_tt_split(launcher,
                    {keys, count, shape.right().ids(), left.buffers, right.buffers, plan[7]});
    group_halves(launcher, &left, {plan[0], false, plan[1], plan[7] + 1, nullptr, nullptr},
                 plan[2]);
    group_halves(launcher, &right, {plan[3], false, plan[4], plan[7] + 2, nullptr, nullptr},
                 plan[5]);
  });
}

// batch, left values, rows
extern "C" const char* simt_tt_rows(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const TtBatch batch = read_batch(&words);
    auto* left_values = words.pointer<float>();
    Memory memory;
    forward_pass(launcher, batch, memory.right(batch), left_values, words.pointer<float>());
  });
}

// batch, left values, row gradients, d core gradients
extern "C" const char* simt_tt_core_grads(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const TtBatch batch = read_batch(&words);
    const auto* left_values = words.pointer<const float>();
    const auto* row_grads = words.pointer<const float>();
    float* grads[emb::kMaxCores] = {};
    for (int k = 0; k < batch.shape.cores; ++k) grads[k] = words.pointer<float>();
    Memory memory;
    const TtRightMemory right = memory.right(batch);
    const TtBackwardMemory scratch{memory(TtBackwardMemory::left_floats(batch)),
                                   memory(batch.rights() * batch.shape.right().value_size()),
                                   memory(TtBackwardMemory::partial_floats(batch)),
                                   memory(TtBackwardMemory::outer_value_floats(batch)),
                                   memory(TtRightMemory::outer_floats(batch)),
                                   memory(TtRightMemory::inner_floats(batch))};
    backward_pass(launcher, batch, right, scratch, left_values, row_grads, grads);
  });
}
