// `combine` and `spread` on the GPU: checks, allocation and launch.
#include <torch/csrc/stable/library.h>

#include "core/launch.h"
#include "route/check_route.h"
#include "route/combine.cuh"

namespace emb::cuda {
namespace {

DeviceCombine device_combine(const CombineInputs& in, Tensor& out, double scale) {
  return {in.targets,
          in.pieces,
          in.num_targets,
          in.num_pieces,
          in.length_array(),
          in.num_lengths(),
          in.row_data(),
          in.num_rows(),
          static_cast<float>(scale),
          in.flat.const_data_ptr(),
          out.mutable_data_ptr(),
          0,
          0};
}

Tensor combine(const Tensor& source, const Tensor& targets, const Tensor& pieces,
               std::optional<Tensor> rows, std::optional<Tensor> lengths, int64_t out_numel,
               ScalarType dtype, double scale) {
  const char* op = "combine";
  const CombineInputs in(op, "source", source, targets, pieces, rows, lengths);
  const Dtype from = float_dtype(op, "source", in.flat.scalar_type());
  const Dtype to = float_dtype(op, "dtype", dtype);
  STD_TORCH_CHECK(out_numel >= 0, op, ": out_numel must not be negative, got ", out_numel);
  const CudaLauncher launcher(in.flat);
  Tensor out = allocate(in.flat, {out_numel}, dtype);
  DeviceCombine work = device_combine(in, out, scale);
  work.source_numel = in.flat.numel();
  work.out_numel = out_numel;
  launch_combine<Direction::kCombine>(launcher, work, from, to);
  return out;
}

Tensor spread(const Tensor& grad, const Tensor& targets, const Tensor& pieces,
              std::optional<Tensor> rows, std::optional<Tensor> lengths, int64_t source_numel,
              ScalarType dtype, double scale) {
  const char* op = "spread";
  const CombineInputs in(op, "grad", grad, targets, pieces, rows, lengths);
  const Dtype from = float_dtype(op, "grad", in.flat.scalar_type());
  const Dtype to = float_dtype(op, "dtype", dtype);
  STD_TORCH_CHECK(source_numel >= 0, op, ": source_numel must not be negative, got ", source_numel);
  const CudaLauncher launcher(in.flat);
  Tensor out = allocate(in.flat, {source_numel}, dtype);
  torch::stable::zero_(out);
  DeviceCombine work = device_combine(in, out, scale);
  work.source_numel = source_numel;
  work.out_numel = in.flat.numel();
  launch_combine<Direction::kSpread>(launcher, work, from, to);
  return out;
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, combine);
  EMB_IMPL(m, emb::cuda, spread);
}
