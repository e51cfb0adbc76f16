// Entries of csrc as one translation unit: their headers take most of the time of compiling.
#include "cache/cache_cuda.cu"
#include "quant/index_cuda.cu"
#include "quant/quant_cuda.cu"
