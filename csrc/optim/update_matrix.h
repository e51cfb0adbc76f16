// The kernel that updates matrices (update_rows.cuh), for the entries that launch it. It is
// compiled with update_rows_cuda.cu alone: a copy is a hundred kilobytes of code.
#pragma once

#include "core/launch.h"
#include "optim/update_rows.cuh"

namespace emb::cuda {

extern template void launch_update_matrices(const CudaLauncher&, const MatrixStep*, int, int64_t,
                                            const OptimizerStepArgs&);

}  // namespace emb::cuda
