// `hash_erase_` and `hash_expire_` on the CPU.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "core/parallel.h"
#include "hash/check_index.h"
#include "hash/isa_cpu.h"

namespace emb {
namespace {

Tensor hash_erase_(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                   const Tensor& tables) {
  const HashCall call("hash_erase_", tensors, ids, starts, tables);
  call.check_contents();
  const HashIndex& index = call.index;
  const HashBatch& batch = call.batch;
  Tensor slots = allocate(ids, {batch.n});
  int64_t* out = slots.mutable_data_ptr<int64_t>();
  for (int64_t f = 0; f < batch.segments; ++f) {
    const int64_t t = batch.tables[f], begin = batch.starts[f], n = batch.starts[f + 1] - begin;
    const HashTable table = index.table(t);
    hash_find_kernels().find(table, batch.ids + begin, n, nullptr, out + begin);
    int64_t erased = 0;
    for (int64_t i = begin; i < begin + n; ++i) {
      if (out[i] == kNoSlot) continue;
      if (table.tags[out[i]] == kEmptyTag) {  // by an earlier position
        out[i] = kNoSlot;
        continue;
      }
      table.tags[out[i]] = kEmptyTag;
      ++erased;
    }
    index.field(t, kSize) -= erased;
    index.counter(t, kErased) += erased;
  }
  return slots;
}

Tensor hash_expire_(std::vector<Tensor> tensors, int64_t t, int64_t first_bucket,
                    int64_t num_buckets, int64_t before) {
  const char* op = "hash_expire_";
  const HashIndex index(op, tensors);
  index.check_tables(op);
  index.check_table(op, t);
  check_window(op, index.field(t, kMostBuckets), first_bucket, num_buckets);
  Tensor removed = allocate_zeros(tensors[0], {num_buckets * kSlots}, ScalarType::Bool);
  bool* out = static_cast<bool*>(removed.mutable_data_ptr());
  const HashTable table = index.table(t);
  const int64_t begin = first_bucket * kSlots;
  const int64_t end = std::min(first_bucket + num_buckets, table.buckets) * kSlots;
  int64_t expired = 0;
  for (int64_t slot = begin; slot < end; ++slot) {
    if (table.tags[slot] == kEmptyTag || table.entry(slot)[kStamp] >= before) continue;
    table.tags[slot] = kEmptyTag;
    out[slot - begin] = true;
    ++expired;
  }
  index.field(t, kSize) -= expired;
  index.counter(t, kExpired) += expired;
  return removed;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, hash_erase_);
  EMB_IMPL(m, emb, hash_expire_);
}
