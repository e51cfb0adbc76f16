// `hash_find`, `hash_use_` and `hash_misses` on the GPU: checks and launch.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "group/device_work.h"
#include "hash/check_device.h"
#include "hash/check_misses.h"
#include "hash/find.cuh"
#include "hash/misses.cuh"

namespace emb::cuda {
namespace {

Tensor hash_find(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                 const Tensor& tables) {
  const HashCall call("hash_find", tensors, ids, starts, tables);
  Tensor slots = allocate(ids, {call.batch.n});
  launch_hash_find(CudaLauncher(ids), device_index(call), key_batch(call),
                   slots.mutable_data_ptr<int64_t>());
  return slots;
}

Tensor hash_use_(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                 const Tensor& tables, std::optional<Tensor> counts, std::optional<Tensor> given,
                 int64_t order) {
  const HashCall call("hash_use_", tensors, ids, starts, tables);
  const HashScoring scoring(call.op, call.index, order, given, ids);
  const int64_t n = call.batch.n;
  const KeyUse use{scoring.order, optional_longs(call.op, "counts", counts, n, ids), scoring.given};
  Tensor slots = allocate(ids, {n});
  launch_hash_use(CudaLauncher(ids), device_index(call), key_batch(call), use,
                  slots.mutable_data_ptr<int64_t>());
  return slots;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> hash_misses(const Tensor& ids, const Tensor& starts,
                                                       const Tensor& tables, const Tensor& slots,
                                                       std::optional<Tensor> counts,
                                                       int64_t num_tables) {
  const char* op = "hash_misses";
  const HashBatch batch(op, ids, starts, tables);
  check_num_tables(op, num_tables);
  const int64_t* places = optional_longs(op, "slots", slots, batch.n, ids);
  const int64_t* uses = optional_longs(op, "counts", counts, batch.n, ids);
  MissTensors found(ids, num_tables);
  const MissOutput out{
      found.first.mutable_data_ptr<int64_t>(), found.totals.mutable_data_ptr<int64_t>(),
      found.ends.mutable_data_ptr<int64_t>(), found.groups.mutable_data_ptr<int32_t>()};
  DeviceWork work(ids);
  launch_misses(work, key_batch(op, batch), static_cast<int>(num_tables), places, uses, out);
  return found.all();
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, hash_find);
  EMB_IMPL(m, emb::cuda, hash_use_);
  EMB_IMPL(m, emb::cuda, hash_misses);
}
