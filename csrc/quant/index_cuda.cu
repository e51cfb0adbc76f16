// `map_ids` on the GPU: check the arguments, allocate, launch. The contract is that of
// index_cpu.cpp, except that the contents of `tables` and `bag_layout` are trusted.
#include <torch/csrc/stable/library.h>

#include <optional>

#include "core/launch.h"
#include "quant/check.h"
#include "quant/index.cuh"

namespace emb::cuda {
namespace {

// Return the row that is stored for each id in `indices`, int64 [L], as stored_row defines it; the
// id itself for lookups of no bag. MapCall describes the arguments.
Tensor map_ids(const Tensor& index, const Tensor& tables, const Tensor& features,
               const Tensor& indices, const Tensor& offsets, std::optional<Tensor> bag_layout) {
  const MapCall call("map_ids", index, tables, features, indices, offsets, bag_layout);
  Tensor rows = allocate(call.indices, {call.indices.numel()}, ScalarType::Long);
  launch_map_ids(CudaLauncher(call.indices), call.args(&rows));
  return rows;
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) { EMB_IMPL(m, emb::cuda, map_ids); }
