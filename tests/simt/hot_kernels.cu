// The kernels in which a training step spends its time, compiled on their own to inspect the
// compiler's output (test_compile.py): none may spill registers.
#include "cache/move.cuh"
#include "cache/plan.cuh"
#include "group/segments.cuh"
#include "optim/update_rows.cuh"
#include "tbe/keys.cuh"
#include "tbe/lookup.cuh"
#include "tbe/sample_weights.cuh"
#include "tbe/update.cuh"
#include "tt/plan.cuh"

namespace emb::cuda {

template __global__ void pool_kernel<float>(DeviceLookupArgs, int);
template __global__ void pool_kernel<half16>(DeviceLookupArgs, int);
template __global__ void pool_kernel<bfloat16>(DeviceLookupArgs, int);
template __global__ void short_bags_kernel<float>(DeviceLookupArgs, int);
template __global__ void short_bags_kernel<half16>(DeviceLookupArgs, int);
template __global__ void short_bags_kernel<bfloat16>(DeviceLookupArgs, int);
template __global__ void long_bags_kernel<float>(DeviceLookupArgs, int);
template __global__ void long_bags_kernel<half16>(DeviceLookupArgs, int);
template __global__ void long_bags_kernel<bfloat16>(DeviceLookupArgs, int);
template __global__ void sequence_kernel<float>(DeviceLookupArgs, int);
template __global__ void sequence_kernel<half16>(DeviceLookupArgs, int);
template __global__ void sequence_kernel<bfloat16>(DeviceLookupArgs, int);
template __global__ void update_kernel<AtRunTime>(DeviceGradArgs, OptimizerStepArgs, TileShape);
template __global__ void update_kernel<GradientOnly>(DeviceGradArgs, OptimizerStepArgs, TileShape);
template __global__ void update_kernel<Compiled<Sgd>>(DeviceGradArgs, OptimizerStepArgs, TileShape);
template __global__ void update_kernel<Compiled<Narrow<Sgd>>>(DeviceGradArgs, OptimizerStepArgs,
                                                              TileShape);
template __global__ void update_kernel<Compiled<Adagrad>>(DeviceGradArgs, OptimizerStepArgs,
                                                          TileShape);
template __global__ void update_kernel<Compiled<RowwiseAdagrad>>(DeviceGradArgs, OptimizerStepArgs,
                                                                 TileShape);
template __global__ void update_kernel<Compiled<Adam>>(DeviceGradArgs, OptimizerStepArgs,
                                                       TileShape);
template __global__ void update_matrices_kernel<AtRunTime>(const __grid_constant__ MatrixSteps,
                                                           OptimizerStepArgs);
template __global__ void chunk_kernel<float>(DeviceGradArgs, int);
template __global__ void chunk_kernel<half16>(DeviceGradArgs, int);
template __global__ void chunk_kernel<bfloat16>(DeviceGradArgs, int);
template __global__ void sample_weight_kernel<float>(DeviceSampleWeightArgs, int);
template __global__ void sample_weight_kernel<half16>(DeviceSampleWeightArgs, int);
template __global__ void sample_weight_kernel<bfloat16>(DeviceSampleWeightArgs, int);
template __global__ void lookup_keys_kernel<uint32_t>(KeySource, BatchCheck, SortBuffers<uint32_t>);
template __global__ void count_groups_kernel<uint32_t>(SortBuffers<uint32_t>);
template __global__ void groups_kernel<uint32_t>(SortBuffers<uint32_t>, DeviceGroupOutput);
template __global__ void small_group_kernel<KeyArray, 1>(KeyArray, SmallGroupArgs);
template __global__ void small_group_kernel<KeyArray, 2>(KeyArray, SmallGroupArgs);
template __global__ void small_group_kernel<KeyArray, 4>(KeyArray, SmallGroupArgs);
template __global__ void small_group_kernel<SmallLookups, 1>(SmallLookups, SmallGroupArgs);
template __global__ void small_group_kernel<SmallLookups, 2>(SmallLookups, SmallGroupArgs);
template __global__ void small_group_kernel<SmallLookups, 4>(SmallLookups, SmallGroupArgs);

// Not templates: a reference makes the compiler emit them.
[[maybe_unused]] void* const kCacheKernels[] = {
    reinterpret_cast<void*>(probe_kernel), reinterpret_cast<void*>(locate_kernel),
    reinterpret_cast<void*>(admit_kernel), reinterpret_cast<void*>(finish_plan_kernel),
    reinterpret_cast<void*>(move_kernel),  reinterpret_cast<void*>(flush_kernel),
};

}  // namespace emb::cuda
