// `hash_grow_` and `hash_place_` on the GPU: checks and launch.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "group/device_work.h"
#include "hash/check_device.h"
#include "hash/check_misses.h"
#include "hash/grow.cuh"
#include "hash/place.cuh"

namespace emb::cuda {
namespace {

DevicePlanes device_planes(const char* op, const HashIndex& index, std::vector<Tensor>& rows,
                           const Tensor& row_layout, const Tensor& like) {
  RowPlanes::check_form(op, index, rows, row_layout);
  check_same_device(op, "row_layout", row_layout, like);
  STD_TORCH_CHECK(rows.size() <= kMostPlanes, op, ": at most ", kMostPlanes,
                  " planes of rows on a GPU, got ", rows.size());
  DevicePlanes planes{};
  planes.count = static_cast<int>(rows.size());
  planes.layout = row_layout.const_data_ptr<int64_t>();
  for (int p = 0; p < planes.count; ++p) {
    planes.data[p] = static_cast<uint8_t*>(kernel_address(op, rows[p], like));
  }
  return planes;
}

void hash_grow_(std::vector<Tensor> tensors, std::vector<Tensor> rows, const Tensor& row_layout,
                const Tensor& ids, const Tensor& starts, const Tensor& tables, Tensor slots,
                const Tensor& ends, std::optional<Tensor> admitted) {
  const HashCall call("hash_grow_", tensors, ids, starts, tables);
  optional_longs(call.op, "slots", slots, call.batch.n, ids);
  const Misses misses(call.op, call.index, ids, ends, admitted);
  DeviceWork work(ids);
  Growth growth{};
  growth.index = device_index(call);
  growth.planes = device_planes(call.op, call.index, rows, row_layout, ids);
  growth.ends = misses.ends();
  growth.admitted = misses.admitted();
  launch_grow(work, growth, key_batch(call), slots.mutable_data_ptr<int64_t>(),
              call.index.slots / kSlots);
}

std::tuple<Tensor, Tensor, Tensor> hash_place_(std::vector<Tensor> tensors, const Tensor& ids,
                                               const Tensor& first, const Tensor& totals,
                                               const Tensor& ends, std::optional<Tensor> admitted,
                                               std::optional<Tensor> given, int64_t order,
                                               int64_t newcomer) {
  const char* op = "hash_place_";
  const HashIndex index(op, tensors);
  check_same_device(op, "ids", ids, tensors[0]);
  const HashScoring scoring(op, index, order, given, ids);
  const int64_t n = ids.numel();
  check_num_keys(op, n);
  Tensor slots = allocate(ids, {n});
  Tensor status = allocate(ids, {n}, ScalarType::Byte);
  Tensor evicted = allocate(ids, {n, 3});
  Placing placing{};
  placing.index = device_index(op, index);
  placing.order = scoring.order;
  placing.given = scoring.given;
  placing.competes = competes(op, newcomer);
  placing.ids = optional_longs(op, "ids", ids, n, ids);
  placing.first = optional_longs(op, "first", first, n, ids);
  placing.totals = optional_longs(op, "totals", totals, n, ids);
  const Misses misses(op, index, ids, ends, admitted);
  placing.slots = slots.mutable_data_ptr<int64_t>();
  placing.status = static_cast<uint8_t*>(status.mutable_data_ptr());
  placing.evicted = evicted.mutable_data_ptr<int64_t>();
  DeviceWork work(ids);
  launch_place(work, placing, MissQueue{misses.ends(), misses.admitted()}, n, index.slots / kSlots);
  return {slots, status, evicted};
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, hash_grow_);
  EMB_IMPL(m, emb::cuda, hash_place_);
}
