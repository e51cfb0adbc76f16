// The kernels of dynamic tables in which a training step spends its time, see hot_kernels.cu.
#include "hash/find.cuh"
#include "hash/grow.cuh"
#include "hash/initial.cuh"
#include "hash/insert.cuh"
#include "hash/misses.cuh"
#include "hash/rows.cuh"

namespace emb::cuda {

// Not templates: a reference makes the compiler emit them.
[[maybe_unused]] void* const kHashKernels[] = {
    reinterpret_cast<void*>(hash_find_kernel),       reinterpret_cast<void*>(hash_touch_kernel),
    reinterpret_cast<void*>(hash_number_kernel),     reinterpret_cast<void*>(hash_outcome_kernel),
    reinterpret_cast<void*>(hash_choose_kernel),     reinterpret_cast<void*>(hash_serve_kernel),
    reinterpret_cast<void*>(hash_split_kernel),      reinterpret_cast<void*>(initial_rows_kernel),
    reinterpret_cast<void*>(hash_claim_last_kernel),
};

template __global__ void hash_find_rows_kernel(DeviceIndex, KeyBatch, RowArray<const Unit16>,
                                               RowUnits, uint32_t, Unit16*, bool*);
template __global__ void hash_read_rows_kernel(RowArray<Unit16>, const int64_t*, int64_t,
                                               StartingRows<Unit16>, RowUnits, uint32_t, Unit16*);
template __global__ void hash_write_rows_kernel(RowArray<Unit16>, const int64_t*, int64_t,
                                                SlotCells, RowUnits, const Unit16*);
template __global__ void hash_add_rows_kernel(RowArray<float>, SlotGroups, int64_t, int,
                                              const float*);
template __global__ void hash_add_rows_kernel(RowArray<half16>, SlotGroups, int64_t, int,
                                              const half16*);
template __global__ void hash_evicted_rows_kernel(RowArray<const Unit16>, EvictedKeys, RowUnits,
                                                  EvictedEntries, Unit16*);

}  // namespace emb::cuda
