// `hash_erase_` and `hash_expire_` on the GPU: checks and launch.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "group/device_work.h"
#include "hash/check_device.h"
#include "hash/remove.cuh"

namespace emb::cuda {
namespace {

Tensor hash_erase_(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                   const Tensor& tables) {
  const HashCall call("hash_erase_", tensors, ids, starts, tables);
  Tensor slots = allocate(ids, {call.batch.n});
  DeviceWork work(ids);
  launch_erase(work, device_index(call), key_batch(call), slots.mutable_data_ptr<int64_t>());
  return slots;
}

Tensor hash_expire_(std::vector<Tensor> tensors, int64_t t, int64_t first_bucket,
                    int64_t num_buckets, int64_t before) {
  const char* op = "hash_expire_";
  const HashIndex index(op, tensors);
  index.check_table(op, t);
  // How many buckets the table has is known on the device.
  check_window(op, index.slots / kSlots, first_bucket, num_buckets);
  Tensor removed = allocate(tensors[0], {num_buckets * kSlots}, ScalarType::Bool);
  const ExpireWindow window{static_cast<int>(t), first_bucket, num_buckets, before};
  launch_expire(CudaLauncher(tensors[0]), device_index(op, index), window,
                static_cast<bool*>(removed.mutable_data_ptr()));
  return removed;
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, hash_erase_);
  EMB_IMPL(m, emb::cuda, hash_expire_);
}
