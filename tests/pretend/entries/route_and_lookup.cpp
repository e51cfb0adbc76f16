// Entries of csrc as one translation unit: their headers take most of the time of compiling.
#include "route/route_cuda.cu"
#include "tbe/lookup_cuda.cu"
