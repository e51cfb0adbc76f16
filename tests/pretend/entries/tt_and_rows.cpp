// Entries of csrc as one translation unit: their headers take most of the time of compiling.
#include "optim/update_rows_cuda.cu"
#include "tt/cached_cuda.cu"
#include "tt/forward_backward_cuda.cu"
