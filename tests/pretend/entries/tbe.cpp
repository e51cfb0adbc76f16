// Entries of csrc as one translation unit: their headers take most of the time of compiling.
#include "tbe/group_cuda.cu"
#include "tbe/update_cuda.cu"
