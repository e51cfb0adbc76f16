// `cache_move_` and `cache_flush_` on the GPU: checks and launch. The host tier is pinned memory,
// which kernels read and write in place.
#include <torch/csrc/stable/library.h>

#include <vector>

#include "cache/check_memory.h"
#include "cache/move.cuh"
#include "core/launch.h"

namespace emb::cuda {
namespace {

CacheMemory device_memory(const char* op, std::vector<Tensor>& weights, std::vector<Tensor>& states,
                          const Tensor& hyper, const Tensor& tables) {
  CacheMemory memory = cache_memory(op, weights, states, hyper, tables);
  check_same_device(op, "hyper", hyper, tables);
  for (int tier = 0; tier < kTiers; ++tier) {
    for (int k = 0; k < memory.num_tensors; ++k) {
      const Tensor& tensor =
          k == 0 ? weights[tier] : states[tier * (memory.num_tensors - 1) + k - 1];
      void*& data = memory.tensors[k][tier].data;
      if (data != nullptr) data = kernel_address(op, tensor, tables);
    }
  }
  return memory;
}

void cache_move_(std::vector<Tensor> weights, std::vector<Tensor> states, const Tensor& hyper,
                 const Tensor& tables, const Tensor& rows, const Tensor& count,
                 const Tensor& row_slots, const Tensor& evicted) {
  const char* op = "cache_move_";
  const CacheMemory memory = device_memory(op, weights, states, hyper, tables);
  check_rows(op, rows, count, tables);
  check_one(op, "row_slots", row_slots, ScalarType::Int, rows.numel(), tables);
  check_one(op, "evicted", evicted, ScalarType::Long, rows.numel(), tables);
  const CacheMoves moves{rows.const_data_ptr<int64_t>(), row_slots.const_data_ptr<int32_t>(),
                         evicted.const_data_ptr<int64_t>()};
  launch_move(CudaLauncher(tables), memory, moves, count.const_data_ptr<int32_t>(), rows.numel());
}

void cache_flush_(std::vector<Tensor> weights, std::vector<Tensor> states, const Tensor& hyper,
                  const Tensor& tables, const Tensor& tags) {
  const char* op = "cache_flush_";
  const CacheMemory memory = device_memory(op, weights, states, hyper, tables);
  check_tags(op, tags);
  check_same_device(op, "tags", tags, tables);
  launch_flush(CudaLauncher(tables), memory, tags.const_data_ptr<int64_t>(), tags.numel());
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, cache_move_);
  EMB_IMPL(m, emb::cuda, cache_flush_);
}
