// `tt_stored` and `tt_count_` on the GPU, one launch each, without waiting for the device.
// tt/cached.h describes the arguments by their names.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "core/launch.h"
#include "tt/cached.cuh"
#include "tt/check.h"

namespace emb::cuda {
namespace {

// Return (cold, rows, counted), int64 [n] each, see TtStoredArgs; `cold` and `rows` are empty if
// `slots` is null. `indices` is int32 or int64 [n]; `ids`, `keys` and `slots`, int64 [n], and
// row_of_slot, int64 [num_slots], must be contiguous and on the device of `indices`. Throw for
// other arguments.
std::tuple<Tensor, Tensor, Tensor> tt_stored(const Tensor& indices, const Tensor& ids,
                                             const Tensor& keys, std::optional<Tensor> slots,
                                             const Tensor& row_of_slot) {
  const Tensor input = as_contiguous(indices);
  const TtStoredCall call("tt_stored", input, ids, keys, slots, row_of_slot);
  launch_tt_stored(CudaLauncher(indices), call.args);
  return {call.cold, call.rows, call.counted};
}

// Add the numbers of lookups and hits of a batch to `counters`, int64 [T, 2 or more]. `counted` and
// `rows` are results of tt_stored, or `rows` is empty if no rows are stored. `first_lookups` and
// `table_of_feature`, int64, are those of TtCountArgs. All arguments must be contiguous and on one
// device. Throw for other dtypes, sizes and devices. Lookups and tables that do not exist are
// skipped; it is not checked that `first_lookups` ascends.
void tt_count_(const Tensor& counted, const Tensor& rows, const Tensor& first_lookups,
               const Tensor& table_of_feature, Tensor counters) {
  const TtCountArgs args =
      tt_count_args("tt_count_", counted, rows, first_lookups, table_of_feature, &counters);
  launch_tt_count(CudaLauncher(counted), args);
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, tt_stored);
  EMB_IMPL(m, emb::cuda, tt_count_);
}
