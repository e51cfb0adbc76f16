// From the arguments of `cache_move_` and `cache_flush_` to the memory they work on.
#pragma once

#include <vector>

#include "cache/check_cache.h"
#include "cache/move.h"

namespace emb {

// `states` are tier-major, as many for every tier as `weights` has tensors. Whether a state has one
// entry an element or a row shows in the cache, whose rows have at least four elements.
inline CacheMemory cache_memory(const char* op, std::vector<Tensor>& weights,
                                std::vector<Tensor>& states, const Tensor& hyper,
                                const Tensor& tables) {
  STD_TORCH_CHECK(weights.size() == kTiers, op, ": weights must be a list of ", kTiers,
                  " tensors (device, host, disk, cache), got ", weights.size());
  const auto num_states = static_cast<int>(states.size() / kTiers);
  STD_TORCH_CHECK(states.size() % kTiers == 0 && num_states < kMostTensors, op,
                  ": states must be a list of ", kTiers, " times at most ", kMostTensors - 1,
                  " tensors, all of one tier after the other, got ", states.size());
  check_dtype(op, "hyper", hyper, ScalarType::Double, "float64");
  STD_TORCH_CHECK(hyper.is_contiguous() && hyper.numel() >= 5, op,
                  ": hyper must have at least 5 entries (see emblib.optim), got ", hyper.numel());
  check_features(op, tables);
  CacheMemory memory{};
  memory.tables = feature_array(tables);
  memory.num_tables = static_cast<int>(tables.size(0));
  memory.num_tensors = 1 + num_states;
  memory.cache_elements = weights[kCacheTier].numel();
  memory.cache_rows = INT64_MAX;
  memory.hyper = hyper.const_data_ptr<double>();
  for (int tier = 0; tier < kTiers; ++tier) {
    for (int k = 0; k <= num_states; ++k) {
      Tensor& tensor = k == 0 ? weights[tier] : states[tier * num_states + k - 1];
      const char* name = k == 0 ? "weights" : "a state";
      STD_TORCH_CHECK(tensor.is_contiguous(), op, ": ", name, " must be contiguous");
      memory.tensors[k][tier] = {tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr(),
                                 float_dtype(op, name, tensor.scalar_type())};
      if (tier != kCacheTier || k == 0 || tensor.numel() == memory.cache_elements) continue;
      STD_TORCH_CHECK(tensor.numel() < memory.cache_elements, op,
                      ": a state in the cache must be as long as the weights there = ",
                      memory.cache_elements, " or have one entry a slot, got ", tensor.numel());
      memory.by_row |= 1u << k;
      memory.cache_rows = tensor.numel() < memory.cache_rows ? tensor.numel() : memory.cache_rows;
    }
  }
  return memory;
}

}  // namespace emb
