// The kernels of quantised tables, compiled on their own to inspect the compiler's output
// (test_compile.py): none may spill registers.
#include "quant/index.cuh"
#include "quant/quant.cuh"

namespace emb::cuda {

template __global__ void quant_pool_kernel<2>(QuantArgs, int);
template __global__ void quant_pool_kernel<4>(QuantArgs, int);
template __global__ void quant_pool_kernel<8>(QuantArgs, int);
template __global__ void quant_pool_kernel<9>(QuantArgs, int);
template __global__ void quant_pool_kernel<10>(QuantArgs, int);
template __global__ void quant_pool_kernel<16>(QuantArgs, int);
template __global__ void quant_pool_kernel<17>(QuantArgs, int);
template __global__ void quant_pool_kernel<32>(QuantArgs, int);
template __global__ void quant_short_bags_kernel<2>(QuantArgs, int);
template __global__ void quant_short_bags_kernel<4>(QuantArgs, int);
template __global__ void quant_short_bags_kernel<8>(QuantArgs, int);
template __global__ void quant_short_bags_kernel<9>(QuantArgs, int);
template __global__ void quant_short_bags_kernel<10>(QuantArgs, int);
template __global__ void quant_short_bags_kernel<16>(QuantArgs, int);
template __global__ void quant_short_bags_kernel<17>(QuantArgs, int);
template __global__ void quant_short_bags_kernel<32>(QuantArgs, int);
template __global__ void quantize_kernel<float>(QuantizeKernelArgs);
template __global__ void quantize_kernel<half16>(QuantizeKernelArgs);
template __global__ void quantize_kernel<bfloat16>(QuantizeKernelArgs);

}  // namespace emb::cuda
