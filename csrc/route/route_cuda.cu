// The routing ops on the GPU: check dtypes, shapes and devices, allocate, launch. Nothing waits for
// the device. Contents of layouts are not checked: entries that lie outside the tensors are
// skipped. For valid layouts the results are those of the CPU; for others, output elements that
// nothing writes are 0 where a comment below says so, else unspecified.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "core/launch.h"
#include "route/check.h"
#include "route/combine.cuh"
#include "route/route.cuh"
#include "route/segments.cuh"

namespace emb::cuda {
namespace {

// Return the arguments that both routing ops share; the outputs are set afterwards.
DeviceRoute device_route(const RouteInputs& in, int64_t num_output_bags) {
  DeviceRoute route{};
  route.routing = in.routing;
  route.ids = in.ids.const_data_ptr();
  route.bags = in.bags();
  route.num_output_bags = num_output_bags;
  return route;
}

// Return the number of ids in each output bag, [num_bags] of the dtype of `ids`, 0 for bags that
// the layout does not reach. `ids` is int32 or int64 [L], `offsets` int32 or int64 [bags + 1]; the
// next five tensors are the Routing. num_bags should be the last entry of `units`.
Tensor route_lengths(const Tensor& ids, const Tensor& offsets, const Tensor& first_bags,
                     const Tensor& features, const Tensor& blocks, const Tensor& copies,
                     const Tensor& units, int64_t num_bags) {
  const char* op = "route_lengths";
  const RouteInputs in(op, ids, offsets, first_bags, features, blocks, copies, units);
  check_not_negative(op, "num_bags", num_bags);
  const CudaLauncher launcher(in.ids);
  Tensor out = allocate(in.ids, {num_bags});
  torch::stable::zero_(out);
  DeviceRoute route = device_route(in, num_bags);
  route.out = out.mutable_data_ptr();
  launch_route_count(launcher, route, in.id_array().is_int64);
  return out;
}

// Return the ids of all units, unit by unit and bag by bag: (ids [total], positions int64 [total],
// weights float32 [total]). Output i is the id at position positions[i] of `ids`, in the numbering
// of its rank. The argument `weights` is float32 [L] or null; if it is null, the returned weights
// are empty. `starts`, int32 or int64 [output bags + 1], should be the sums of the lengths that
// route_lengths returned, and `total` the last of them.
std::tuple<Tensor, Tensor, Tensor> route_ids(const Tensor& ids, const Tensor& offsets,
                                             const Tensor& first_bags, const Tensor& features,
                                             const Tensor& blocks, const Tensor& copies,
                                             const Tensor& units, const Tensor& starts,
                                             int64_t total, std::optional<Tensor> weights) {
  const char* op = "route_ids";
  const RouteInputs in(op, ids, offsets, first_bags, features, blocks, copies, units);
  const Tensor start_tensor = as_contiguous(starts);
  const RouteWeights route_weights(op, in, start_tensor, total, weights);
  STD_TORCH_CHECK(start_tensor.numel() >= 1, op,
                  ": starts must have one entry more than units have bags, got none");
  const CudaLauncher launcher(in.ids);
  Tensor out = allocate(in.ids, {total});
  Tensor positions = allocate(in.ids, {total}, ScalarType::Long);
  Tensor out_weights =
      allocate(in.ids, {route_weights.data != nullptr ? total : 0}, ScalarType::Float);
  const int64_t num_output_bags = start_tensor.numel() - 1;
  Tensor moved_counts = allocate(in.ids, {num_output_bags}, ScalarType::Int);
  torch::stable::zero_(moved_counts);
  DeviceRoute route = device_route(in, num_output_bags);
  route.out = out.mutable_data_ptr();
  route.starts = index_array(start_tensor);
  route.num_output_ids = total;
  route.positions = positions.mutable_data_ptr<int64_t>();
  route.weights = route_weights.data;
  route.out_weights = out_weights.mutable_data_ptr<float>();
  route.moved_counts = moved_counts.mutable_data_ptr<int32_t>();
  launch_route_move(launcher, route, in.id_array().is_int64);
  return {out, positions, out_weights};
}

// Return the segments values[starts[s]:starts[s + 1]] for s in `order`, one after the other:
// [total, ..] of the dtype of `values`, which may be any. SegmentInputs has the shapes. `total`
// should be the number of rows of these segments: rows after the first `total` are left out, and
// missing rows are 0.
Tensor gather_segments(const Tensor& values, const Tensor& starts, const Tensor& order,
                       int64_t total) {
  const char* op = "gather_segments";
  const SegmentInputs in(op, values, starts, order, total);
  const int64_t num_output_segments = in.order.numel(),
                num_tiles = num_scan_tiles(num_output_segments);
  STD_TORCH_CHECK(num_output_segments <= kMaxLookups, op, ": at most ", kMaxLookups,
                  " segments per call, got ", num_output_segments);
  const CudaLauncher launcher(in.values);
  Tensor out = in.new_output(total);
  Tensor scratch = allocate(in.values, {num_output_segments + num_tiles + 1}, ScalarType::Long);
  int64_t* sums_in_tile = scratch.mutable_data_ptr<int64_t>();
  const Segments segments{index_array(in.starts),
                          in.order.const_data_ptr<int64_t>(),
                          in.starts.numel() - 1,
                          num_output_segments,
                          in.values.size(0),
                          sums_in_tile,
                          sums_in_tile + num_output_segments};
  launch_gather_segments(launcher, segments, in.values.const_data_ptr(), out.mutable_data_ptr(),
                         total, in.row_bytes);
  return out;
}

// Return the arguments of both directions; the sizes of source and output are set afterwards.
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
          in.local,
          0,
          0};
}

// Return the flat output, [out_numel] of `dtype`: each target is the sum of its pieces in `source`,
// divided by lengths if it has a first_bag, times `scale`.
//   source              flat; its dtype and `dtype` are float32, float16 or bfloat16 each
//   targets, pieces     int64 [T, 7] and [P, 3], rows of Target and SourcePiece
//   rows, lengths       int32, and int32 or int64; null if no piece or target names them
//   local, local_begin  the elements of the source in a separate tensor and the position of the
//                       first of them, see LocalPart; null and 0 if there are none
Tensor combine(const Tensor& source, const Tensor& targets, const Tensor& pieces,
               std::optional<Tensor> rows, std::optional<Tensor> lengths, int64_t out_numel,
               ScalarType dtype, double scale, std::optional<Tensor> local, int64_t local_begin) {
  const char* op = "combine";
  CombineInputs in(op, "source", source, targets, pieces, rows, lengths);
  in.set_local(op, local, local_begin, in.flat.numel(), in.flat.scalar_type());
  const Dtype in_type = float_dtype(op, "source", in.flat.scalar_type());
  const Dtype out_type = float_dtype(op, "dtype", dtype);
  check_not_negative(op, "out_numel", out_numel);
  const CudaLauncher launcher(in.flat);
  Tensor out = allocate(in.flat, {out_numel}, dtype);
  DeviceCombine args = device_combine(in, out, scale);
  args.source_numel = in.flat.numel() + in.local.size();
  args.out_numel = out_numel;
  launch_combine<CombineDirection::kForward>(launcher, args, in_type, out_type);
  return out;
}

// Compute the gradient of the source of `combine` from the gradient of its output, in.flat. Return
// the elements outside of `local`, of `dtype`; write the others to `local`, if there is one. The
// gradient of an element in no piece is 0. Pieces must not overlap, and `rows` must not name a row
// of a piece twice; neither is checked.
Tensor source_gradient(const char* op, CombineInputs& in, int64_t source_numel, ScalarType dtype,
                       double scale, std::optional<Tensor> local, int64_t local_begin) {
  const Dtype in_type = float_dtype(op, "grad", in.flat.scalar_type());
  const Dtype out_type = float_dtype(op, "dtype", dtype);
  const int64_t num_outside = in.set_local_of_source(op, local, local_begin, source_numel, dtype);
  const CudaLauncher launcher(in.flat);
  Tensor out = allocate(in.flat, {num_outside}, dtype);
  torch::stable::zero_(out);
  if (local) torch::stable::zero_(*local);
  DeviceCombine args = device_combine(in, out, scale);
  args.source_numel = source_numel;
  args.out_numel = in.flat.numel();
  launch_combine<CombineDirection::kBackward>(launcher, args, in_type, out_type);
  return out;
}

// Return the gradient of a source without local part, [source_numel] of `dtype`; the other
// arguments are as in `combine`.
Tensor combine_backward(const Tensor& grad, const Tensor& targets, const Tensor& pieces,
                        std::optional<Tensor> rows, std::optional<Tensor> lengths,
                        int64_t source_numel, ScalarType dtype, double scale) {
  const char* op = "combine_backward";
  CombineInputs in(op, "grad", grad, targets, pieces, rows, lengths);
  return source_gradient(op, in, source_numel, dtype, scale, std::nullopt, 0);
}

// Compute the gradient of a source of source_numel elements in all. Write its local part to
// `local`, and return the other elements, of the dtype of `local`. The other arguments are as in
// `combine`.
Tensor combine_backward_(const Tensor& grad, const Tensor& targets, const Tensor& pieces,
                         std::optional<Tensor> rows, std::optional<Tensor> lengths,
                         int64_t source_numel, double scale, Tensor local, int64_t local_begin) {
  const char* op = "combine_backward_";
  CombineInputs in(op, "grad", grad, targets, pieces, rows, lengths);
  return source_gradient(op, in, source_numel, local.scalar_type(), scale, local, local_begin);
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, route_lengths);
  EMB_IMPL(m, emb::cuda, route_ids);
  EMB_IMPL(m, emb::cuda, gather_segments);
  EMB_IMPL(m, emb::cuda, combine);
  EMB_IMPL(m, emb::cuda, combine_backward);
  EMB_IMPL(m, emb::cuda, combine_backward_);
}
