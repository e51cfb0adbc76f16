// Declares launch_update_matrices (update_rows.cuh) for entries that call it. Its kernel is
// compiled in update_rows_cuda.cu only, because a copy is a hundred kilobytes of code.
#pragma once

#include "core/launch.h"
#include "optim/update_rows.cuh"

namespace emb::cuda {

extern template void launch_update_matrices(const CudaLauncher&, const MatrixStep*, int, int64_t,
                                            const OptimizerStepArgs&);

}  // namespace emb::cuda
