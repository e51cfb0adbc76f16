// The hash index ops on the GPU: checks and launch. The contents of tensors stay on the device and
// are not checked: tables and segments must come from the module that owns them.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "core/launch.h"
#include "group/device_sort.h"
#include "hash/check.h"
#include "hash/device_index.cuh"
#include "hash/find.cuh"
#include "hash/grow.cuh"
#include "hash/initial.cuh"
#include "hash/insert.cuh"
#include "hash/misses.cuh"
#include "hash/remove.cuh"
#include "hash/rows.cuh"

namespace emb::cuda {

// The end of the last bucket, for any number of buckets that 32 bits count.
inline constexpr int64_t kMaxSlots = int64_t{kMaxLookups} * kSlots;

inline DeviceIndex device_index(const char* op, const HashIndex& index) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(index.tags) % 16 == 0, op,
                  ": tags must begin at a multiple of 16 bytes; do not slice them");
  STD_TORCH_CHECK(index.slots <= kMaxSlots && index.num_tables <= kMaxLookups, op,
                  ": at most 2^31 - 1 buckets and tables, got ", index.slots / kSlots, " and ",
                  index.num_tables);
  return {index.tags,
          index.entries,
          index.tables,
          index.clock,
          index.counters,
          index.words,
          static_cast<int>(index.num_tables)};
}

inline KeyBatch key_batch(const char* op, const HashBatch& batch) {
  STD_TORCH_CHECK(batch.segments <= kMaxLookups, op, ": at most 2^31 - 1 segments, got ",
                  batch.segments);
  return {batch.ids, batch.starts, batch.tables, batch.n, static_cast<int>(batch.segments)};
}

inline DeviceIndex device_index(const HashCall& call) { return device_index(call.op, call.index); }
inline KeyBatch key_batch(const HashCall& call) { return key_batch(call.op, call.batch); }

namespace {

Tensor hash_find(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                 const Tensor& tables) {
  const HashCall call("hash_find", tensors, ids, starts, tables);
  Tensor slots = allocate(ids, {call.batch.n});
  launch_hash_find(CudaLauncher(ids), device_index(call), key_batch(call),
                   slots.mutable_data_ptr<int64_t>());
  return slots;
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_touch_(
    std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts, const Tensor& tables,
    std::optional<Tensor> counts, std::optional<Tensor> batch_scores, int64_t order) {
  const HashCall call("hash_touch_", tensors, ids, starts, tables);
  const HashScoring scoring(call.op, call.index, order, batch_scores, ids);
  const int64_t n = call.batch.n;
  const KeyTouch use{scoring.order, optional_longs(call.op, "counts", counts, n, ids),
                     scoring.batch_scores};
  Tensor slots = allocate(ids, {n});
  MissTensors misses(ids, call.index.num_tables);
  const MissOutput out{
      misses.first.mutable_data_ptr<int64_t>(), misses.totals.mutable_data_ptr<int64_t>(),
      misses.offsets.mutable_data_ptr<int64_t>(), misses.groups.mutable_data_ptr<int32_t>()};
  DeviceWork work(ids);
  launch_hash_touch(work, device_index(call), key_batch(call), use,
                    slots.mutable_data_ptr<int64_t>(), out);
  return {slots, misses.first, misses.groups, misses.totals, misses.offsets};
}

DeviceRowBuffers device_buffers(const char* op, const HashIndex& index, std::vector<Tensor>& rows,
                                const Tensor& row_layout, const Tensor& like) {
  RowBuffers::check_form(op, index, rows, row_layout);
  check_same_device(op, "row_layout", row_layout, like);
  STD_TORCH_CHECK(rows.size() <= kMaxRowBuffers, op, ": at most ", kMaxRowBuffers,
                  " row buffers on a GPU, got ", rows.size());
  DeviceRowBuffers buffers{};
  buffers.count = static_cast<int>(rows.size());
  buffers.layout = row_layout.const_data_ptr<int64_t>();
  for (int p = 0; p < buffers.count; ++p) {
    buffers.data[p] = static_cast<uint8_t*>(kernel_address(op, rows[p], like));
  }
  return buffers;
}

void hash_grow_(std::vector<Tensor> tensors, std::vector<Tensor> rows, const Tensor& row_layout,
                const Tensor& ids, const Tensor& starts, const Tensor& tables, Tensor slots,
                const Tensor& offsets, std::optional<Tensor> admitted) {
  const HashCall call("hash_grow_", tensors, ids, starts, tables);
  optional_longs(call.op, "slots", slots, call.batch.n, ids);
  const Misses misses(call.op, call.index, ids, offsets, admitted);
  DeviceWork work(ids);
  Growth growth{};
  growth.index = device_index(call);
  growth.buffers = device_buffers(call.op, call.index, rows, row_layout, ids);
  growth.misses = {misses.offsets(), misses.admitted()};
  launch_grow(work, growth, key_batch(call), slots.mutable_data_ptr<int64_t>(),
              call.index.slots / kSlots);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_insert_(
    std::vector<Tensor> tensors, const Tensor& ids, const Tensor& first, const Tensor& totals,
    const Tensor& offsets, std::optional<Tensor> admitted, std::optional<Tensor> batch_scores,
    int64_t order, int64_t insert_policy, std::optional<Tensor> slots,
    std::optional<Tensor> groups) {
  const char* op = "hash_insert_";
  const HashIndex index(op, tensors);
  check_same_device(op, "ids", ids, tensors[0]);
  const HashScoring scoring(op, index, order, batch_scores, ids);
  const int64_t n = ids.numel();
  check_num_keys(op, n);
  InsertTensors results(op, ids, slots, groups);
  Insertion insertion{};
  insertion.index = device_index(op, index);
  insertion.order = scoring.order;
  insertion.batch_scores = scoring.batch_scores;
  insertion.competes = competes(op, insert_policy);
  insertion.ids = optional_longs(op, "ids", ids, n, ids);
  insertion.first = optional_longs(op, "first", first, n, ids);
  insertion.totals = optional_longs(op, "totals", totals, n, ids);
  const Misses misses(op, index, ids, offsets, admitted);
  insertion.misses = {misses.offsets(), misses.admitted()};
  insertion.slots = results.inserted.mutable_data_ptr<int64_t>();
  insertion.status = static_cast<uint8_t*>(results.status.mutable_data_ptr());
  insertion.evicted = results.evicted.mutable_data_ptr<int64_t>();
  const BatchSlots batch{results.slots, results.groups, results.positions,
                         results.filled.mutable_data_ptr<int64_t>(),
                         static_cast<uint8_t*>(results.key_status.mutable_data_ptr())};
  DeviceWork work(ids);
  launch_insert(work, insertion, batch, n, index.slots / kSlots);
  return results.all();
}

Tensor hash_erase_(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                   const Tensor& tables) {
  const HashCall call("hash_erase_", tensors, ids, starts, tables);
  Tensor slots = allocate(ids, {call.batch.n});
  DeviceWork work(ids);
  launch_erase(work, device_index(call), key_batch(call), slots.mutable_data_ptr<int64_t>());
  return slots;
}

Tensor hash_expire_(std::vector<Tensor> tensors, int64_t t, int64_t first_bucket,
                    int64_t num_buckets, int64_t before) {
  const char* op = "hash_expire_";
  const HashIndex index(op, tensors);
  index.check_table(op, t);
  // The number of buckets of the table is known on the device only.
  check_window(op, index.slots / kSlots, first_bucket, num_buckets);
  Tensor removed = allocate(tensors[0], {num_buckets * kSlots}, ScalarType::Bool);
  const ExpireWindow window{static_cast<int>(t), first_bucket, num_buckets, before};
  launch_expire(CudaLauncher(tensors[0]), device_index(op, index), window,
                static_cast<bool*>(removed.mutable_data_ptr()));
  return removed;
}

void hash_initial_rows_(std::vector<Tensor> buffers, const Tensor& layout, const Tensor& rules,
                        const Tensor& ids, const Tensor& first, const Tensor& offsets,
                        const Tensor& slots, int64_t seed) {
  const char* op = "hash_initial_rows_";
  const InitialInputs in{buffers, layout, rules, ids, first, offsets, slots};
  in.check(op);
  STD_TORCH_CHECK(buffers.size() <= kMaxInitialBuffers, op, ": at most ", kMaxInitialBuffers,
                  " row buffers on a GPU, got ", buffers.size());
  InitialRows rows{};
  for (const Tensor& buffer : buffers) {
    rows.buffers[rows.num_buffers++] = {buffer.mutable_data_ptr(),
                                        float_dtype(op, "each plane", buffer.scalar_type())};
  }
  rows.num_tables = static_cast<int>(in.num_tables());
  rows.layout = static_cast<const InitialLayout*>(layout.const_data_ptr());
  rows.rules = static_cast<const InitialRule*>(rules.const_data_ptr());
  rows.ids = ids.const_data_ptr<int64_t>();
  rows.first = first.const_data_ptr<int64_t>();
  rows.offsets = offsets.const_data_ptr<int64_t>();
  rows.slots = slots.const_data_ptr<int64_t>();
  rows.seed = static_cast<uint64_t>(seed);
  launch_initial_rows(CudaLauncher(ids), rows, first.numel());
}

std::tuple<Tensor, Tensor> hash_find_rows(std::vector<Tensor> tensors, const Tensor& ids,
                                          const Tensor& starts, const Tensor& tables,
                                          const Tensor& values, double default_value) {
  const HashCall call("hash_find_rows", tensors, ids, starts, tables);
  const RowMatrix matrix(call.op, values, ids);
  const uint32_t fill = matrix.fill(call.op, default_value);
  Tensor rows = allocate(values, {call.batch.n, matrix.dim});
  Tensor found = allocate(ids, {call.batch.n}, ScalarType::Bool);
  void* out = rows.mutable_data_ptr();
  launch_find_rows(CudaLauncher(ids), device_index(call), key_batch(call), matrix.bytes({out}),
                   fill, out, static_cast<bool*>(found.mutable_data_ptr()));
  return {rows, found};
}

Tensor hash_read_rows(const Tensor& values, const Tensor& slots, double default_value) {
  const char* op = "hash_read_rows";
  const RowMatrix matrix(op, values, slots);
  const uint32_t fill = matrix.fill(op, default_value);
  const int64_t n = slots.numel();
  Tensor rows = allocate(values, {n, matrix.dim});
  void* out = rows.mutable_data_ptr();
  launch_read_rows(CudaLauncher(values), matrix.bytes({out}),
                   optional_longs(op, "slots", slots, n, values), n, {}, fill, out);
  return rows;
}

Tensor hash_start_rows_(Tensor values, const Tensor& slots, const Tensor& groups,
                        const Tensor& first, const Tensor& starting, double default_value,
                        bool reads) {
  const char* op = "hash_start_rows_";
  const RowMatrix matrix(op, values, slots);
  const uint32_t fill = matrix.fill(op, default_value);
  const StartingArguments in(op, matrix, slots, groups, first, starting);
  Tensor rows = allocate(values, {reads ? in.n : 0, matrix.dim});
  void* out = reads ? rows.mutable_data_ptr() : nullptr;
  const void* from = starting.const_data_ptr();
  launch_read_rows(CudaLauncher(values), matrix.bytes({out, from}), in.slots, in.n,
                   {from, in.groups, in.first}, fill, out);
  return rows;
}

void hash_write_rows_(Tensor values, const Tensor& slots, const Tensor& rows) {
  const char* op = "hash_write_rows_";
  const RowMatrix matrix(op, values, slots);
  const int64_t n = slots.numel();
  check_num_keys(op, n);
  const int64_t* slot_data = optional_longs(op, "slots", slots, n, values);
  matrix.check_rows(op, "rows", rows, n);
  const void* from = rows.const_data_ptr();
  DeviceWork work(values);
  launch_write_rows(work, matrix.bytes({from}), slot_data, n, from);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_evicted_rows(const Tensor& values,
                                                                     const Tensor& slots,
                                                                     const Tensor& status,
                                                                     const Tensor& evicted) {
  const char* op = "hash_evicted_rows";
  const RowMatrix matrix(op, values, slots);
  const EvictedArguments in(op, matrix, slots, status, evicted);
  Tensor keys = allocate(slots, {in.n}), stamps = allocate(slots, {in.n});
  Tensor scores = allocate(slots, {in.n}), rows = allocate(values, {in.n, matrix.dim});
  Tensor number = allocate(slots, {1});
  const EvictedEntries entries{keys.mutable_data_ptr<int64_t>(), stamps.mutable_data_ptr<int64_t>(),
                               scores.mutable_data_ptr<int64_t>(),
                               number.mutable_data_ptr<int64_t>()};
  void* out = rows.mutable_data_ptr();
  DeviceWork work(values);
  launch_evicted_rows(work, matrix.bytes({out}), {in.slots, in.status, in.words, in.n, nullptr},
                      entries, out);
  return {keys, rows, stamps, scores, number};
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, hash_find_rows);
  EMB_IMPL(m, emb::cuda, hash_read_rows);
  EMB_IMPL(m, emb::cuda, hash_start_rows_);
  EMB_IMPL(m, emb::cuda, hash_write_rows_);
  EMB_IMPL(m, emb::cuda, hash_evicted_rows);
  EMB_IMPL(m, emb::cuda, hash_find);
  EMB_IMPL(m, emb::cuda, hash_touch_);
  EMB_IMPL(m, emb::cuda, hash_grow_);
  EMB_IMPL(m, emb::cuda, hash_insert_);
  EMB_IMPL(m, emb::cuda, hash_erase_);
  EMB_IMPL(m, emb::cuda, hash_expire_);
  EMB_IMPL(m, emb::cuda, hash_initial_rows_);
}
