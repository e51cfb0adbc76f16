// Lookup and gradient of the sample weights where the cache keeps rows in another dtype than the
// tables. A warp takes a bag, row by row, and finds out the dtype of each as it reads it: correct
// for every pair of dtypes, without the rows in flight that the other kernels have.
#pragma once

#include "tbe/lookup.cuh"

namespace emb::cuda {

struct SampleWeightArgs {
  LookupArgs lookup;  // its output is not used
  const void* grad;   // [B, columns], or [columns] in a variable batch
  Dtype grad_type;
  float* out;  // [L], zeroed
};

inline bool has_mixed_rows(const LookupArgs& args) {
  return args.slots != nullptr && args.cache_type != args.weight_type;
}

inline constexpr int kMixedColumns = 4;  // of a lane

// The row of lookup i; `data` is null for a lookup to skip.
struct MixedRow {
  const void* data = nullptr;
  Dtype type = Dtype::kFloat;
  int64_t element = 0;

  EMB_DEVICE MixedRow(const LookupArgs& args, const Feature& feature, int64_t i) {
    const int64_t row = repair_index(args.indices[i], feature.rows);
    if (row < 0 || row >= feature.rows) return;
    const RowPlace place = place_row(feature, row, valid_slot(args, feature, args.slots[i]));
    const bool cached = place.tier == kCacheTier;
    data = cached ? args.cache : args.weights;
    type = cached ? args.cache_type : args.weight_type;
    element = cached ? place.element : args.distance[place.tier] + place.element;
  }

  EMB_DEVICE void read(int column, int valid, float (&values)[kMixedColumns]) const {
    read_columns(data, type, element + column, valid, values);
  }
};

// Every lookup is a bag of its own where there is no pooling.
EMB_DEVICE BagTask mixed_task(const LookupArgs& args, int64_t bag) {
  if (args.pooling != Pooling::kNone) return BagTask(args, static_cast<uint32_t>(bag));
  BagTask task(args, static_cast<uint32_t>(args.bags.count));
  task.begin = static_cast<int>(bag);
  task.dim = static_cast<int>(args.columns);
  if (args.bags.count > 0 && bag >= args.bags.begin(0)) {
    task.feature = args.features + feature_of_lookup(args.map, args.bags, args.num_features, bag);
    task.length = 1;
  }
  return task;
}

[[maybe_unused]] static __global__ void __launch_bounds__(kLookupThreads)
    mixed_lookup_kernel(LookupArgs args, int64_t bags) {
  constexpr int N = kMixedColumns, kStripe = N * static_cast<int>(simt::kWarp);
  const bool none = args.pooling == Pooling::kNone;
  for (int64_t bag = simt::global_warp(); bag < bags; bag += simt::warps_in_grid()) {
    const BagTask task = mixed_task(args, bag);
    const int first = static_cast<int>(threadIdx.x % simt::kWarp) * N;
    const int64_t place = none ? bag * args.columns
                               : args.map.element(static_cast<uint32_t>(bag), task.feature->column);
    const bool mean = args.pooling == Pooling::kMean && task.length > 0;
    const float scale = mean ? 1.0f / static_cast<float>(task.length) : 1.0f;
    for (int column = first; column < task.dim; column += kStripe) {
      float sum[N] = {};
      for (int64_t i = task.begin; i < task.begin + task.length; ++i) {
        const MixedRow row(args, *task.feature, i);
        if (row.data == nullptr) continue;
        float values[N];
        row.read(column, task.dim - column, values);
        const float weight = args.sample_weights != nullptr ? args.sample_weights[i] : 1.0f;
#pragma unroll
        for (int e = 0; e < N; ++e) sum[e] += weight * values[e];
      }
#pragma unroll
      for (int e = 0; e < N; ++e) sum[e] *= scale;
      write_columns(args.output, args.output_type, place + column, task.dim - column, sum);
    }
  }
}

[[maybe_unused]] static __global__ void __launch_bounds__(kLookupThreads)
    mixed_sample_weight_kernel(SampleWeightArgs args) {
  constexpr int N = kMixedColumns, kStripe = N * static_cast<int>(simt::kWarp);
  const LookupArgs& in = args.lookup;
  for (int64_t bag = simt::global_warp(); bag < in.bags.count; bag += simt::warps_in_grid()) {
    const BagTask task(in, static_cast<uint32_t>(bag));
    const int first = static_cast<int>(threadIdx.x % simt::kWarp) * N;
    const int64_t place = in.map.element(static_cast<uint32_t>(bag), task.feature->column);
    const bool mean = in.pooling == Pooling::kMean && task.length > 0;
    const float scale = mean ? 1.0f / static_cast<float>(task.length) : 1.0f;
    for (int64_t i = task.begin; i < task.begin + task.length; ++i) {
      const MixedRow row(in, *task.feature, i);
      float dot = 0.0f;
      for (int column = first; row.data != nullptr && column < task.dim; column += kStripe) {
        float values[N], grad[N];
        row.read(column, task.dim - column, values);
        read_columns(args.grad, args.grad_type, place + column, task.dim - column, grad);
#pragma unroll
        for (int e = 0; e < N; ++e) dot += values[e] * grad[e];
      }
      dot = simt::group_sum(dot, static_cast<int>(simt::kWarp));
      if (threadIdx.x % simt::kWarp == 0) args.out[i] = dot * scale;
    }
  }
}

template <class Launcher>
void launch_mixed_lookup(const Launcher& launcher, const LookupArgs& args) {
  const int64_t bags = args.pooling == Pooling::kNone ? args.bags.num_lookups : args.bags.count;
  const int64_t warps = kLookupThreads / simt::kWarp;
  launcher(mixed_lookup_kernel, blocks_for(bags, warps, launcher.blocks(256)), kLookupThreads, args,
           bags);
}

template <class Launcher>
void launch_mixed_sample_weights(const Launcher& launcher, const SampleWeightArgs& args) {
  const int64_t warps = kLookupThreads / simt::kWarp;
  launcher(mixed_sample_weight_kernel,
           blocks_for(args.lookup.bags.count, warps, launcher.blocks(256)), kLookupThreads, args);
}

}  // namespace emb::cuda
