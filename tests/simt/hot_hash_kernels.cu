// The kernels of dynamic tables in which a training step spends its time, see hot_kernels.cu.
#include "hash/find.cuh"
#include "hash/grow.cuh"
#include "hash/initial.cuh"
#include "hash/insert.cuh"
#include "hash/misses.cuh"

namespace emb::cuda {

// Not templates: a reference makes the compiler emit them.
[[maybe_unused]] void* const kHashKernels[] = {
    reinterpret_cast<void*>(hash_find_kernel),    reinterpret_cast<void*>(hash_touch_kernel),
    reinterpret_cast<void*>(hash_claim_kernel),   reinterpret_cast<void*>(hash_total_kernel),
    reinterpret_cast<void*>(hash_choose_kernel),  reinterpret_cast<void*>(hash_serve_kernel),
    reinterpret_cast<void*>(hash_finish_kernel),  reinterpret_cast<void*>(hash_split_kernel),
    reinterpret_cast<void*>(initial_rows_kernel),
};

}  // namespace emb::cuda
