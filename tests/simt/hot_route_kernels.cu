// The routing kernels of a training step, compiled on their own to inspect the compiler's output
// (test_compile.py): none may spill registers.
#include "route/combine.cuh"
#include "route/route.cuh"
#include "route/segments.cuh"

namespace emb::cuda {

template __global__ void route_count_kernel<int32_t>(DeviceRoute, int);
template __global__ void route_count_kernel<int64_t>(DeviceRoute, int);
template __global__ void route_move_kernel<int32_t>(DeviceRoute, int);
template __global__ void route_move_kernel<int64_t>(DeviceRoute, int);
template __global__ void combine_kernel<float, float>(DeviceCombine);
template __global__ void combine_kernel<half16, float>(DeviceCombine);
template __global__ void combine_kernel<bfloat16, float>(DeviceCombine);
template __global__ void combine_backward_kernel<float, float>(DeviceCombine);
template __global__ void combine_backward_kernel<float, half16>(DeviceCombine);
template __global__ void segment_copy_kernel<simt::Pack16>(Segments, const simt::Pack16*,
                                                           simt::Pack16*, int64_t, int64_t);
template __global__ void segment_copy_kernel<uint64_t>(Segments, const uint64_t*, uint64_t*,
                                                       int64_t, int64_t);

// Not templates: a reference makes the compiler emit them.
[[maybe_unused]] void* const kRouteKernels[] = {
    reinterpret_cast<void*>(segment_sums_kernel),
    reinterpret_cast<void*>(segment_tiles_kernel),
};

}  // namespace emb::cuda
