// Declares the launch of the kernel that updates matrices (update_rows.cuh), for the entries that
// need it. The kernel is compiled in update_rows_cuda.cu only, since a copy is a hundred kilobytes
// of code.
#pragma once

#include "core/launch.h"
#include "optim/update_rows.cuh"

namespace emb::cuda {

extern template void launch_update_matrices(const CudaLauncher&, const MatrixStep*, int, int64_t,
                                            const OptimizerStepArgs&);

}  // namespace emb::cuda
