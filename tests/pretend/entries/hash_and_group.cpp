// Entries of csrc as one translation unit: their headers take most of the time of compiling.
#include "group/group_cuda.cu"
#include "hash/hash_cuda.cu"
#include "random/uniform_cuda.cu"
