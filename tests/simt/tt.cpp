// Emulated tensor-train ops: keys, plan, and the forward and backward pass.
#include <vector>

#include "driver.h"
#include "host_sort.h"
#include "tt/forward_backward.cuh"
#include "tt/plan.cuh"

namespace emb::cuda {
namespace {

// Words: number of tables, and for each: cores d, d row factors, d dim factors, d + 1 ranks.
std::vector<TtShape> read_shapes(Words* words) {
  std::vector<TtShape> shapes(words->number());
  for (TtShape& shape : shapes) {
    shape.num_cores = static_cast<int>(words->number());
    for (int k = 0; k < shape.num_cores; ++k) shape.p[k] = words->number();
    for (int k = 0; k < shape.num_cores; ++k) shape.q[k] = static_cast<int>(words->number());
    for (int k = 0; k <= shape.num_cores; ++k) shape.ranks[k] = static_cast<int>(words->number());
  }
  return shapes;
}

// Words: shapes, capacity, precision of products, dtype and data of the cores of all tables, eight
// plan tensors.
TtDeviceBatch read_batch(Words* words) {
  const std::vector<TtShape> shapes = read_shapes(words);
  const int64_t capacity = words->number();
  const auto precision = static_cast<emb::MatmulPrecision>(words->number());
  const emb::Dtype type = words->dtype();
  std::vector<const void*> cores;
  for (const TtShape& shape : shapes) {
    for (int k = 0; k < shape.num_cores; ++k) cores.push_back(words->pointer<const void>());
  }
  const int32_t* plan[emb::kNumTtPlanTensors];
  for (const int32_t*& tensor : plan) tensor = words->pointer<const int32_t>();
  return {shapes, cores, type,
          emb::tt_plan_of_arrays(capacity, static_cast<int64_t>(shapes.size()), plan), precision};
}

// Memory of exactly the requested size, so that the sanitizer detects every access outside.
class Memory {
 public:
  float* operator()(int64_t floats) {
    if (floats == 0) return nullptr;
    held_.emplace_back(floats, 1e30f);
    return held_.back().data();
  }

 private:
  std::vector<std::vector<float>> held_;
};

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

// from, words, to, and what begins a step: zeros, their number, the step, whether it is finite or
// 0, the first word of the step
extern "C" const char* simt_upload(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto* from = words.pointer<const uint64_t>();
    const int64_t count = words.number();
    Upload upload;
    // Two arrays, of which the first may be empty.
    upload.add(std::vector<uint64_t>(from, from + count / 3));
    upload.add(std::vector<uint64_t>(from + count / 3, from + count));
    auto* to = words.pointer<uint64_t>();
    StepStart begin{words.pointer<float>(), words.number()};
    begin.step = words.pointer<double>();
    begin.is_finite = words.pointer<const bool>();
    begin.first_update_word = words.number();
    upload.start(launcher, to, begin);
  });
}

// feature tables, features, ids, is_int64, n, offsets, is_int64, bags, bag layout or 0, keys
extern "C" const char* simt_tt_keys(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    TtKeysArgs args{};
    args.tables = words.pointer<const emb::TtTableIds>();
    args.num_features = static_cast<int>(words.number());
    args.indices = words.indices();
    args.n = words.number();
    const emb::IndexArray offsets = words.indices();
    args.bags = {offsets, words.number(), args.n};
    const auto* layout = words.pointer<const emb::BagLayout>();
    const int64_t batch = args.bags.num_bags / args.num_features;
    args.map = {layout, static_cast<uint32_t>(batch > 0 ? batch : 1), 0};
    args.keys = words.pointer<int64_t>();
    launch_tt_keys(launcher, args);
  });
}

// tables, number of tables, left ids, right ids, keys, count, n, eight plan tensors
extern "C" const char* simt_tt_plan(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const auto* tables = words.pointer<const emb::TtTableIds>();
    const int num_tables = static_cast<int>(words.number());
    words.number();  // left ids
    const int64_t right_ids = words.number();
    const auto* keys = words.pointer<const int64_t>();
    const auto* count = words.pointer<const int32_t>();
    const int64_t n = words.number();
    int32_t* plan[emb::kNumTtPlanTensors];
    for (int32_t*& tensor : plan) tensor = words.pointer<int32_t>();
    std::vector<int32_t> left_id_of_row(n), range_counts(kMaxTtRanges);
    HostSort<uint32_t> right(n, right_ids, plan[6]);
    int32_t* starts = plan[7];
    launch_tt_split(launcher,
                    {keys, count, tables, num_tables, right.buffers, left_id_of_row.data(),
                     range_counts.data(), starts},
                    {count, left_id_of_row.data(), range_counts.data(), n, plan[0], plan[1],
                     plan[2], starts + emb::TtPlan::total_index(1, num_tables)});
    if (n > 0) right.run();
    int32_t* num_rights = starts + emb::TtPlan::total_index(2, num_tables);
    launch_groups(launcher, right.buffers, {plan[3], false, plan[4], num_rights, nullptr, nullptr});
    const InverseArgs rights{plan[4], plan[6], num_rights, n, plan[5]};
    launch_tt_finish(launcher, {rights, {}, keys, plan[0], plan[3], tables, num_tables, starts});
  });
}

// batches, left values, rows
extern "C" const char* simt_tt_rows(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    TtDeviceBatch batch = read_batch(&words);
    Memory memory;
    TtMemory buffers;
    buffers.assign_forward(&batch, memory);
    buffers.set_left_values(words.pointer<float>());
    TtPass pass(batch, buffers);
    pass.upload(launcher, reinterpret_cast<uint64_t*>(memory(2 * TtPass::max_words(batch))));
    pass.make_values(launcher, buffers);
    pass.make_rows(launcher, words.pointer<float>());
  });
}

// batches, left values, row gradients, gradients of the cores of all tables
extern "C" const char* simt_tt_core_grads(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    TtDeviceBatch batch = read_batch(&words);
    Memory memory;
    TtMemory buffers;
    buffers.left_values = words.pointer<const float>();
    const auto* row_grads = words.pointer<const float>();
    for (TtDeviceTable& table : batch.tables) {
      for (int k = 0; k < table.shape.num_cores; ++k) table.grads[k] = words.pointer<float>();
    }
    buffers.assign_forward(&batch, memory);
    buffers.assign_backward(&batch, memory);
    TtPass pass(batch, buffers);
    pass.upload(launcher, reinterpret_cast<uint64_t*>(memory(2 * TtPass::max_words(batch))));
    pass.make_values(launcher, buffers);
    pass.make_grads(launcher, buffers, row_grads);
  });
}

// first half, outer rows, outer columns, gradients of one value, inner cores [3], outer values of
// the halves from the first one on. A pair of rank 1, whose halves all exist up to one, the first
// half of inner row 2; all values of halves are one, in the same memory.
extern "C" const char* simt_outer_grads(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    const int64_t first = words.number(), outer_rows = words.number();
    const auto q_outer = static_cast<int>(words.number());
    const auto* value_grads = words.pointer<const float>();
    const auto* inner = words.pointer<const float>();
    auto* outer_grads_by_half = words.pointer<float>();
    std::vector<int32_t> ids(first + 1);
    for (size_t u = 0; u < ids.size(); ++u) ids[u] = static_cast<int32_t>(u);
    const int32_t range[] = {0, static_cast<int32_t>(ids.size())};
    TtPair pair{};
    pair.halves = {
        {true, outer_rows, 3, q_outer, 1, 1, 1}, nullptr, inner, ids.data(), range, 0, 0, false};
    pair.value_grads = value_grads;
    pair.outer_grads_by_half = outer_grads_by_half - first * q_outer;
    pair.outer_stride = q_outer;
    TtPairs pairs{&pair, 1};
    pairs.first_inner_row = 2;
    launcher(outer_grads_kernel<Tf32x3>, 1, kPairThreads, pairs);
  });
}
