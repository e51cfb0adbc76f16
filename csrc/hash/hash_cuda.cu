// The ops of the hash index on the GPU: checks and launches. check.h describes arguments and
// results, and the `*.cuh` files have the kernels. The results are those of the CPU, except
// elements that are unspecified. No function here waits for the device. So the contents of tensors
// are not checked: the tensors of the index and the segments must come from the module that owns
// the index.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>
#include <vector>

#include "core/device_arrays.h"
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

// The maximum number of slots of all tables. Kernels number buckets with 32 bits, so their maximum
// is that of lookups.
inline constexpr int64_t kMaxSlots = int64_t{kMaxLookups} * kBucketSlots;

// Return the index as an argument of kernels. Throws if the tags are not aligned to 16 bytes, or if
// there are too many buckets or tables for 32 bits.
inline DeviceIndex device_index(const char* op, const HashIndex& index) {
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(index.tags) % 16 == 0, op,
                  ": tags must begin at a multiple of 16 bytes; do not slice them");
  STD_TORCH_CHECK(index.num_slots <= kMaxSlots && index.num_tables <= kMaxLookups, op, ": at most ",
                  kMaxLookups, " buckets and tables, got ", index.num_slots / kBucketSlots, " and ",
                  index.num_tables);
  return {index.tags,
          index.entries,
          index.tables,
          index.clock,
          index.counters,
          index.entry_words,
          static_cast<int>(index.num_tables)};
}

// Return the batch as an argument of kernels. Throws if there are too many segments for 32 bits.
inline KeyBatch key_batch(const char* op, const HashBatch& batch) {
  STD_TORCH_CHECK(batch.num_segments <= kMaxLookups, op, ": at most ", kMaxLookups,
                  " segments, got ", batch.num_segments);
  return {batch.ids, batch.starts, batch.tables, batch.n, static_cast<int>(batch.num_segments)};
}

inline DeviceIndex device_index(const HashCall& call) { return device_index(call.op, call.index); }
inline KeyBatch key_batch(const HashCall& call) { return key_batch(call.op, call.batch); }

namespace {

// Return the slot of each key, int64 [n], -1 for a missing key. Changes nothing.
Tensor hash_find(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                 const Tensor& tables) {
  const HashCall call("hash_find", tensors, ids, starts, tables);
  Tensor slots = allocate(ids, {call.batch.n});
  launch_hash_find(CudaLauncher(ids), device_index(call), key_batch(call),
                   slots.mutable_data_ptr<int64_t>());
  return slots;
}

// Begin a training step: advance the clock, find the keys, update the entries of hits, count
// lookups and hits, and list the misses. Return TouchCall::results().
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_touch_(
    std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts, const Tensor& tables,
    std::optional<Tensor> counts, std::optional<Tensor> batch_scores, int64_t order) {
  const TouchCall call(tensors, ids, starts, tables, counts, batch_scores, order);
  const KeyTouch touch{call.scoring.order, call.counts, call.scoring.batch_scores};
  const MissOutput miss_output{
      call.first_positions.mutable_data_ptr<int64_t>(), call.totals.mutable_data_ptr<int64_t>(),
      call.offsets.mutable_data_ptr<int64_t>(), call.groups.mutable_data_ptr<int32_t>()};
  DeviceWork work(ids);
  launch_hash_touch(work, device_index(call), key_batch(call), touch,
                    call.slots.mutable_data_ptr<int64_t>(), miss_output);
  return call.results();
}

// Return the row buffers as an argument of kernels. Throws for more than kMaxRowBuffers, or for a
// buffer that is neither on the device of `like` nor in pinned host memory. The result points into
// the tensors.
DeviceRowBuffers device_buffers(const char* op, std::vector<Tensor>& row_buffers,
                                const Tensor& row_layout, const Tensor& like) {
  STD_TORCH_CHECK(row_buffers.size() <= kMaxRowBuffers, op, ": at most ", kMaxRowBuffers,
                  " row buffers on a GPU, got ", row_buffers.size());
  DeviceRowBuffers buffers{};
  buffers.num_buffers = static_cast<int>(row_buffers.size());
  buffers.layout = row_layout.const_data_ptr<int64_t>();
  for (int i = 0; i < buffers.num_buffers; ++i) {
    buffers.data[i] = static_cast<uint8_t*>(kernel_address(op, row_buffers[i], like));
  }
  return buffers;
}

// Split as many buckets of every table as it needs for its keys and its admitted misses
// (wanted_buckets), move rows with their entries, and correct the `slots` of the batch's positions.
// At most kMaxRowBuffers row buffers, on the device or in pinned host memory; see GrowCall.
void hash_grow_(std::vector<Tensor> tensors, std::vector<Tensor> row_buffers,
                const Tensor& row_layout, const Tensor& ids, const Tensor& starts,
                const Tensor& tables, Tensor slots, const Tensor& offsets,
                std::optional<Tensor> admitted) {
  const GrowCall call(tensors, row_buffers, row_layout, ids, starts, tables, slots, offsets,
                      admitted);
  DeviceWork work(ids);
  Growth growth{};
  growth.index = device_index(call);
  growth.buffers = device_buffers(call.op, row_buffers, row_layout, ids);
  growth.misses = {call.misses.offsets(), call.misses.admitted()};
  launch_grow(work, growth, key_batch(call), call.slots, call.index.num_slots / kBucketSlots);
}

// Insert the admitted misses of a batch. Each gets an empty slot or the slot of an entry that the
// batch does not use, which is evicted; otherwise it is refused. Return InsertCall::results().
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> hash_insert_(
    std::vector<Tensor> tensors, const Tensor& ids, const Tensor& first_positions,
    const Tensor& totals, const Tensor& offsets, std::optional<Tensor> admitted,
    std::optional<Tensor> batch_scores, int64_t order, int64_t insert_policy,
    std::optional<Tensor> slots, std::optional<Tensor> groups) {
  const InsertCall call(tensors, ids, first_positions, totals, offsets, admitted, batch_scores,
                        order, insert_policy, slots, groups);
  Insertion insertion{};
  insertion.index = device_index(call.op, call.index);
  insertion.order = call.scoring.order;
  insertion.batch_scores = call.scoring.batch_scores;
  insertion.must_compete = call.must_compete;
  insertion.ids = call.ids;
  insertion.first_positions = call.first_positions;
  insertion.totals = call.totals;
  insertion.misses = {call.misses.offsets(), call.misses.admitted()};
  insertion.slots = call.inserted.mutable_data_ptr<int64_t>();
  insertion.status = static_cast<uint8_t*>(call.status.mutable_data_ptr());
  insertion.evicted = call.evicted.mutable_data_ptr<int64_t>();
  const BatchSlots batch{call.slots, call.groups, call.num_positions,
                         call.key_slots.mutable_data_ptr<int64_t>(),
                         static_cast<uint8_t*>(call.key_status.mutable_data_ptr())};
  DeviceWork work(ids);
  launch_insert(work, insertion, batch, call.n, call.index.num_slots / kBucketSlots);
  return call.results();
}

// Remove keys. Return the slot that each position emptied, int64 [n], or -1 if its key is missing
// or an earlier position removed it.
Tensor hash_erase_(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                   const Tensor& tables) {
  const HashCall call("hash_erase_", tensors, ids, starts, tables);
  Tensor slots = allocate(ids, {call.batch.n});
  DeviceWork work(ids);
  launch_erase(work, device_index(call), key_batch(call), slots.mutable_data_ptr<int64_t>());
  return slots;
}

// Remove the keys of table `table_number` whose stamp is less than `min_stamp` from its buckets
// [first_bucket, first_bucket + num_buckets). Return whether each slot of these buckets was
// emptied, bool [num_buckets * 32]; false in buckets that the table does not use.
Tensor hash_expire_(std::vector<Tensor> tensors, int64_t table_number, int64_t first_bucket,
                    int64_t num_buckets, int64_t min_stamp) {
  const char* op = "hash_expire_";
  const HashIndex index(op, tensors);
  index.check_table(op, table_number);
  // Only the device knows the number of buckets of the table.
  check_window(op, index.num_slots / kBucketSlots, first_bucket, num_buckets);
  Tensor removed = allocate(tensors[0], {num_buckets * kBucketSlots}, ScalarType::Bool);
  const ExpireWindow window{static_cast<int>(table_number), first_bucket, num_buckets, min_stamp};
  launch_expire(CudaLauncher(tensors[0]), device_index(op, index), window,
                static_cast<bool*>(removed.mutable_data_ptr()));
  return removed;
}

// Write the initial row of every miss i: row slots[i] of each row buffer. A row buffer that has no
// row for the slot is skipped; a miss with slot -1 has no row. There are at most kMaxInitialBuffers
// row buffers; InitialInputs describes the tensors. `seed` selects the random numbers.
void hash_initial_rows_(std::vector<Tensor> row_buffers, const Tensor& layout, const Tensor& rules,
                        const Tensor& ids, const Tensor& first_positions, const Tensor& offsets,
                        const Tensor& slots, int64_t seed) {
  const char* op = "hash_initial_rows_";
  const InitialInputs inputs{row_buffers, layout, rules, ids, first_positions, offsets, slots};
  inputs.check(op);
  STD_TORCH_CHECK(row_buffers.size() <= kMaxInitialBuffers, op, ": at most ", kMaxInitialBuffers,
                  " row buffers on a GPU, got ", row_buffers.size());
  DeviceInitialRows rows{};
  for (const Tensor& buffer : row_buffers) {
    rows.buffers[rows.num_buffers++] = {buffer.mutable_data_ptr(),
                                        float_dtype(op, "each row buffer", buffer.scalar_type())};
  }
  rows.num_tables = static_cast<int>(inputs.num_tables());
  rows.layout = static_cast<const InitialLayout*>(layout.const_data_ptr());
  rows.rules = static_cast<const InitialRule*>(rules.const_data_ptr());
  rows.ids = ids.const_data_ptr<int64_t>();
  rows.first_positions = first_positions.const_data_ptr<int64_t>();
  rows.offsets = offsets.const_data_ptr<int64_t>();
  rows.slots = slots.const_data_ptr<int64_t>();
  rows.seed = static_cast<uint64_t>(seed);
  launch_initial_rows(CudaLauncher(ids), rows, first_positions.numel());
}

// Find keys and read their rows. Return `rows` and `found` of FindRowsCall.
std::tuple<Tensor, Tensor> hash_find_rows(std::vector<Tensor> tensors, const Tensor& ids,
                                          const Tensor& starts, const Tensor& tables,
                                          const Tensor& values, double default_value) {
  const FindRowsCall call(tensors, ids, starts, tables, values, default_value);
  void* out = call.rows.mutable_data_ptr();
  launch_find_rows(CudaLauncher(ids), device_index(call), key_batch(call),
                   call.matrix.as_bytes({out}), call.default_word, out,
                   static_cast<bool*>(call.found.mutable_data_ptr()));
  return {call.rows, call.found};
}

// Return the row in each slot, as ReadRowsCall describes it.
Tensor hash_read_rows(const Tensor& values, const Tensor& slots, double default_value) {
  const ReadRowsCall call("hash_read_rows", values, slots, default_value);
  void* out = call.rows.mutable_data_ptr();
  launch_read_rows(CudaLauncher(values), call.matrix.as_bytes({out}), call.slots, call.n, {},
                   call.default_word, out);
  return call.rows;
}

// Write the starting rows of new keys; StartRowsCall describes the arguments. Return the row of
// every position if `returns_rows`, else [0, dim].
Tensor hash_start_rows_(Tensor values, const Tensor& slots, const Tensor& groups,
                        const Tensor& first_positions, const Tensor& starting, double default_value,
                        bool returns_rows) {
  const StartRowsCall call(values, slots, groups, first_positions, starting, default_value,
                           returns_rows);
  void* out = returns_rows ? call.rows.mutable_data_ptr() : nullptr;
  launch_read_rows(CudaLauncher(values), call.matrix.as_bytes({out, call.starting}), call.slots,
                   call.n, {call.starting, call.groups, call.first_positions}, call.default_word,
                   out);
  return call.rows;
}

// Write a row to each slot. If a slot is repeated, its last row remains. Slots outside the matrix
// are skipped.
void hash_write_rows_(Tensor values, const Tensor& slots, const Tensor& rows) {
  const WriteRowsCall call("hash_write_rows_", values, slots, rows);
  DeviceWork work(values);
  launch_write_rows(work, call.matrix.as_bytes({call.rows}), call.slots, call.n, call.rows);
}

// Add rows to the rows in slots, in the order of positions, and round every sum to the dtype of the
// matrix. AddRowsCall describes the arguments.
void hash_add_rows_(Tensor values, const Tensor& slots, const Tensor& segments,
                    const Tensor& permutation, const Tensor& count, const Tensor& rows) {
  const AddRowsCall call(values, slots, segments, permutation, count, rows);
  launch_add_rows(CudaLauncher(values), call.matrix.as_bytes({}), call.dtype,
                  {call.slots, call.segments, call.permutation, call.count, call.n}, call.rows);
}

// Gather the keys that an insertion evicted, with their stamps, scores and rows, and count them.
// Unlike on the CPU, elements after the last evicted key are unspecified.
std::tuple<Tensor, std::vector<Tensor>, Tensor, Tensor, Tensor> hash_evicted_rows(
    std::vector<Tensor> values, const Tensor& slots, const Tensor& status, const Tensor& evicted) {
  const EvictedRowsCall call(values, slots, status, evicted);
  const EvictedEntries entries{
      call.keys.mutable_data_ptr<int64_t>(), call.stamps.mutable_data_ptr<int64_t>(),
      call.scores.mutable_data_ptr<int64_t>(), call.count.mutable_data_ptr<int64_t>()};
  std::vector<EvictedMatrix> matrices;
  for (size_t p = 0; p < call.rows.size(); ++p) {
    void* out = call.rows[p].mutable_data_ptr();
    matrices.push_back({call.matrices[p].as_bytes({out}), out});
  }
  DeviceWork work(slots);
  launch_evicted_rows(work, {call.slots, call.status, call.evicted_words, call.n, nullptr}, entries,
                      matrices.data(), static_cast<int>(matrices.size()));
  return call.results();
}

}  // namespace
}  // namespace emb::cuda

STABLE_TORCH_LIBRARY_IMPL(emblib, CUDA, m) {
  EMB_IMPL(m, emb::cuda, hash_find_rows);
  EMB_IMPL(m, emb::cuda, hash_read_rows);
  EMB_IMPL(m, emb::cuda, hash_start_rows_);
  EMB_IMPL(m, emb::cuda, hash_write_rows_);
  EMB_IMPL(m, emb::cuda, hash_add_rows_);
  EMB_IMPL(m, emb::cuda, hash_evicted_rows);
  EMB_IMPL(m, emb::cuda, hash_find);
  EMB_IMPL(m, emb::cuda, hash_touch_);
  EMB_IMPL(m, emb::cuda, hash_grow_);
  EMB_IMPL(m, emb::cuda, hash_insert_);
  EMB_IMPL(m, emb::cuda, hash_erase_);
  EMB_IMPL(m, emb::cuda, hash_expire_);
  EMB_IMPL(m, emb::cuda, hash_initial_rows_);
}
