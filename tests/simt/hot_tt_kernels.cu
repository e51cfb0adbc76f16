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
template __global__ void mma_rows_kernel<Tf32x3>(TtBatchArgs, int, float*);
template __global__ void mma_rows_kernel<Tf32>(TtBatchArgs, int, float*);
template __global__ void mma_rows_kernel<Bf16>(TtBatchArgs, int, float*);
template __global__ void mma_left_grads_kernel<Tf32x3>(TtBatchArgs, const float*);
template __global__ void mma_left_grads_kernel<Tf32>(TtBatchArgs, const float*);
template __global__ void mma_left_grads_kernel<Bf16>(TtBatchArgs, const float*);
template __global__ void right_partials_kernel<true>(TtBatchArgs, RightGradBuffers);
template __global__ void right_partials_kernel<false>(TtBatchArgs, RightGradBuffers);

}  // namespace emb::cuda
