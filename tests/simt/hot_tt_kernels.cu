// The kernels of tensor trains, as hot_kernels.cu.
#include "tt/forward_backward.cuh"

namespace emb::cuda {

template __global__ void expand_kernel<Tf32x3>(TtPairs);
template __global__ void expand_kernel<Tf32>(TtPairs);
template __global__ void expand_kernel<Bf16>(TtPairs);
template __global__ void inner_grads_kernel<Tf32x3>(TtPairs);
template __global__ void inner_grads_kernel<Tf32>(TtPairs);
template __global__ void inner_grads_kernel<Bf16>(TtPairs);
template __global__ void outer_grads_kernel<Tf32x3>(TtPairs);
template __global__ void outer_grads_kernel<Tf32>(TtPairs);
template __global__ void outer_grads_kernel<Bf16>(TtPairs);
template __global__ void mma_rows_kernel<Tf32x3>(TtDeviceRowsArgs, int, float*);
template __global__ void mma_rows_kernel<Tf32>(TtDeviceRowsArgs, int, float*);
template __global__ void mma_rows_kernel<Bf16>(TtDeviceRowsArgs, int, float*);
template __global__ void mma_left_grads_kernel<Tf32x3>(TtDeviceRowsArgs, const float*);
template __global__ void mma_left_grads_kernel<Tf32>(TtDeviceRowsArgs, const float*);
template __global__ void mma_left_grads_kernel<Bf16>(TtDeviceRowsArgs, const float*);
template __global__ void right_partials_kernel<true>(TtDeviceRowsArgs, RightGradBuffers);
template __global__ void right_partials_kernel<false>(TtDeviceRowsArgs, RightGradBuffers);

}  // namespace emb::cuda
