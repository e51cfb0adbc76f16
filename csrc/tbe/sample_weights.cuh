// Gradient of the sample weights on the GPU: for each lookup the dot product of its row with the
// gradient of its bag's output row, for MEAN divided by the length of the bag. As in the forward
// (tbe/lookup.cuh), a group of lanes processes a bag with four rows in flight. The gradient of the
// output row stays in registers.
#pragma once

#include "tbe/lookup.cuh"

namespace emb::cuda {

// The arguments of the kernels. All pointers are to memory that the device can read, and that must
// live until the kernel has run.
struct DeviceSampleWeightArgs {
  // The lookup to whose sample weights the gradient belongs. `output` is not used; map.stride is
  // the row stride of `grad`.
  DeviceLookupArgs lookup;
  const void* grad;  // [B, output_dim], or [output_dim] of a variable batch
  Dtype grad_type;
  // [L], an output, which the caller must set to 0 before: dot products are added to it. Lookups
  // without a row or without a bag are not written.
  float* out;
};

// Blocks per multiprocessor. They bound the registers of a thread: 3 leave 80, 4 leave 64.
inline constexpr int kSampleWeightBlocksPerSm = 3, kMixedSampleWeightBlocksPerSm = 4;

// Return the dot product of the row of this lane with the gradient, over the columns that its group
// holds: N per lane in `grad`. The group multiplies the rows of its first `num_steps` lanes one
// after the other; the result of other lanes is unspecified. Each lane passes the `offset` of its
// row from `weights` in elements, -1 for zeros; `weights` begins with the first column of the lane.
// `columns_left` is the number of columns from the lane's first one to the end of the row. All
// lanes of a warp must call this.
template <class W, int N, bool kVector>
EMB_DEVICE float dot_rows(const W* weights, int64_t offset, int columns_left, const LaneGroup& lane,
                          int num_steps, const float (&grad)[N]) {
  float result = 0.0f;
  for (int k = 0; k < num_steps; k += kRowsInFlight) {
    RowSlice<W, N> slice[kRowsInFlight];
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      const int64_t row = __shfl_sync(simt::kFullMask, offset, k + u, lane.lanes);
      if (row >= 0 && columns_left > 0)
        slice[u].template load<kVector>(weights + row, columns_left);
    }
#pragma unroll
    for (int u = 0; u < kRowsInFlight; ++u) {
      float dot = 0.0f;
#pragma unroll
      for (int e = 0; e < N; ++e) dot += slice[u][e] * grad[e];
      dot = simt::group_sum(dot, lane.lanes);
      if (lane.rank == k + u) result = dot;
    }
  }
  return result;
}

// Add the dot products of `grad`, columns [column, column + N) of the gradient of a bag, with the
// rows of all its lookups to args.out. `max_length` is the maximum length of a bag in the warp.
// With kVector has_whole_vectors must be true for the features of all lanes. All lanes of a warp
// must call this.
template <class W, int N, bool kVector>
EMB_DEVICE void dot_bag(const DeviceSampleWeightArgs& args, const BagTask& task,
                        const LaneGroup& lane, int column, int max_length, const float (&grad)[N]) {
  const DeviceLookupArgs& in = args.lookup;
  const W* weights = static_cast<const W*>(in.weights) + column;
  for (int tile = 0; tile < max_length; tile += lane.lanes) {
    const int i = tile + lane.rank;
    const IndexAndSlot lookup = i < task.length ? IndexAndSlot(in, task.begin + i) : IndexAndSlot();
    const int64_t offset = row_offset(in, *task.feature, lookup);
    const int num_steps = max_length - tile < lane.lanes ? max_length - tile : lane.lanes;
    const int columns_left = task.dim - column;
    const float dot = dot_rows<W, N, kVector>(weights, offset, columns_left, lane, num_steps, grad);
    if (offset >= 0) args.out[task.begin + i] += dot;
  }
}

// Do what dot_bag does, for tables with a cache of another dtype.
EMB_DEVICE void dot_mixed_bag(const DeviceSampleWeightArgs& args, const BagTask& task,
                              const LaneGroup& lane, int column, int max_length,
                              const float (&grad)[kMixedColumns]) {
  for (int tile = 0; tile < max_length; tile += lane.lanes) {
    const int i = tile + lane.rank;
    const int64_t address =
        i < task.length ? mixed_address(args.lookup, *task.feature, task.begin + i) : 0;
    const int num_steps = max_length - tile < lane.lanes ? max_length - tile : lane.lanes;
    float result = 0.0f;
    const auto multiply = [&](int k, const MixedSlice& columns) {
      float dot = 0.0f;
#pragma unroll
      for (int e = 0; e < kMixedColumns; ++e) dot += columns[e] * grad[e];
      dot = simt::group_sum(dot, lane.lanes);
      if (lane.rank == k) result = dot;
    };
    read_mixed_rows(args.lookup, address, task.dim, column, lane.lanes, num_steps, multiply);
    if (address != 0) args.out[task.begin + i] += result;
  }
}

// Call `dot(task, column, max_length, grad)` for each bag and its columns [column, column + N), N
// per lane at a time. `grad` is these columns of the gradient of the bag's output row, for MEAN
// divided by the length of the bag. `max_length` is the maximum length of a bag in the warp. All
// lanes of the warp call `dot` together.
template <int N, class Dot>
EMB_DEVICE void for_each_bag_gradient(const DeviceSampleWeightArgs& args, const LaneGroup& lane,
                                      const Dot& dot) {
  const DeviceLookupArgs& in = args.lookup;
  const auto bags = static_cast<uint32_t>(in.bags.num_bags);
  const auto stride = static_cast<uint32_t>(simt::warps_in_grid()) * lane.groups_in_warp();
  for (uint32_t first = static_cast<uint32_t>(simt::global_warp()) * lane.groups_in_warp();
       first < bags; first += stride) {
    const BagTask task(in, first + lane.group);
    const int max_length = __reduce_max_sync(simt::kFullMask, task.length);
    const int max_dim = __reduce_max_sync(simt::kFullMask, task.dim);
    const float scale = mean_factor(in.pooling, task.length);
    const uint32_t bag = first + lane.group;
    const int64_t output = bag < bags ? in.map.output_element(bag, task.feature->column) : 0;
    for (int base = 0; base < max_dim; base += lane.lanes * N) {
      const int column = base + lane.rank * N;
      float grad[N] = {};
      if (column < task.dim) {
        read_columns(args.grad, args.grad_type, output + column, task.dim - column, grad);
      }
#pragma unroll
      for (int e = 0; e < N; ++e) grad[e] *= scale;
      dot(task, column, max_length, grad);
    }
  }
}

// Add the gradient of the sample weights to args.out, grid-stride over bags. `lanes` is the number
// of lanes per bag, W the dtype of all rows.
template <class W>
__global__ void __launch_bounds__(kLookupThreads, kSampleWeightBlocksPerSm)
    sample_weight_kernel(DeviceSampleWeightArgs args, int lanes) {
  constexpr int N = 16 / sizeof(W);
  const LaneGroup lane(lanes);
  const auto dot = [&](const BagTask& task, int column, int max_length, const float (&grad)[N]) {
    if (__all_sync(simt::kFullMask, has_whole_vectors<W>(args.lookup, *task.feature))) {
      dot_bag<W, N, true>(args, task, lane, column, max_length, grad);
    } else {
      dot_bag<W, N, false>(args, task, lane, column, max_length, grad);
    }
  };
  for_each_bag_gradient<N>(args, lane, dot);
}

// Do what sample_weight_kernel does, for tables with a cache of another dtype.
[[maybe_unused]] static __global__ void __launch_bounds__(kLookupThreads,
                                                          kMixedSampleWeightBlocksPerSm)
    mixed_sample_weight_kernel(DeviceSampleWeightArgs args, int lanes) {
  const LaneGroup lane(lanes);
  const auto dot = [&](const BagTask& task, int column, int max_length,
                       const float (&grad)[kMixedColumns]) {
    dot_mixed_bag(args, task, lane, column, max_length, grad);
  };
  for_each_bag_gradient<kMixedColumns>(args, lane, dot);
}

// Launch mixed_sample_weight_kernel.
template <class Launcher>
void launch_mixed_sample_weights(const Launcher& launcher, const DeviceSampleWeightArgs& args) {
  const int lanes = lanes_per_row(mean_output_columns(args.lookup), kMixedColumns);
  launcher(mixed_sample_weight_kernel,
           blocks_for(args.lookup.bags.num_bags, kLookupThreads / lanes,
                      launcher.max_grid_blocks(kLookupWaves * kResidentBlocksPerSm)),
           kLookupThreads, args, lanes);
}

// Launch sample_weight_kernel for rows of dtype W.
template <class W, class Launcher>
void launch_uniform_sample_weights(const Launcher& launcher, const DeviceSampleWeightArgs& args) {
  const int lanes = lanes_per_row(mean_output_columns(args.lookup), 16 / sizeof(W));
  const int64_t bags_per_block = kLookupThreads / lanes;
  launcher(sample_weight_kernel<W>,
           blocks_for(args.lookup.bags.num_bags, bags_per_block,
                      launcher.max_grid_blocks(kLookupWaves * kResidentBlocksPerSm)),
           kLookupThreads, args, lanes);
}

// Add the gradient of the sample weights to args.out. `launcher` is a CudaLauncher or, in tests, a
// simt::HostLauncher. Does not wait for the device.
template <class Launcher>
void launch_sample_weights(const Launcher& launcher, const DeviceSampleWeightArgs& args) {
  if (args.lookup.bags.num_bags == 0) return;
  if (has_mixed_rows(args.lookup)) {
    launch_mixed_sample_weights(launcher, args);
  } else if (args.lookup.weight_type == Dtype::kFloat) {
    launch_uniform_sample_weights<float>(launcher, args);
  } else if (args.lookup.weight_type == Dtype::kHalf) {
    launch_uniform_sample_weights<half16>(launcher, args);
  } else {
    launch_uniform_sample_weights<bfloat16>(launcher, args);
  }
}

}  // namespace emb::cuda
