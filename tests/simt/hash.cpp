// Emulated hash index: find, touch, misses, grow, insert, erase, expire and initial values of rows.
#include "hash/find.cuh"
#include "hash/grow.cuh"
#include "hash/initial.cuh"
#include "hash/insert.cuh"
#include "hash/misses.cuh"
#include "hash/remove.cuh"
#include "host_work.h"

namespace emb::cuda {
namespace {

// tags, entries, tables, clock, counters, words per entry, number of tables, slots
DeviceIndex read_index(Words* words, int64_t* buckets) {
  DeviceIndex index{};
  index.tags = words->pointer<uint8_t>();
  index.entries = words->pointer<int64_t>();
  index.tables = words->pointer<int64_t>();
  index.clock = words->pointer<int64_t>();
  index.counters = words->pointer<int64_t>();
  index.words = words->number();
  index.num_tables = static_cast<int>(words->number());
  *buckets = words->number() / kSlots;
  return index;
}

// ids, starts, tables, n, segments
KeyBatch read_batch(Words* words) {
  KeyBatch batch{};
  batch.ids = words->pointer<const int64_t>();
  batch.starts = words->pointer<const int64_t>();
  batch.tables = words->pointer<const int64_t>();
  batch.n = words->number();
  batch.segments = static_cast<int>(words->number());
  return batch;
}

// Call `body(work, words)`.
template <class Body>
const char* worked(const int64_t* call, const Body& body) {
  return return_errors([&](const auto&) {
    HostWork work;
    Words words(call);
    body(work, words);
  });
}

}  // namespace
}  // namespace emb::cuda

using namespace emb::cuda;

// index, batch, slots
extern "C" const char* simt_hash_find(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    int64_t buckets;
    const DeviceIndex index = read_index(&words, &buckets);
    const KeyBatch batch = read_batch(&words);
    launch_hash_find(work.launcher(), index, batch, words.pointer<int64_t>());
  });
}

// index, batch, slots, counts, batch_scores, order
extern "C" const char* simt_hash_touch(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    int64_t buckets;
    const DeviceIndex index = read_index(&words, &buckets);
    const KeyBatch batch = read_batch(&words);
    auto* slots = words.pointer<int64_t>();
    const auto* counts = words.pointer<const int64_t>();
    const auto* batch_scores = words.pointer<const int64_t>();
    const KeyTouch use{static_cast<emb::Order>(words.number()), counts, batch_scores};
    launch_hash_touch(work.launcher(), index, batch, use, slots);
  });
}

// batch, number of tables, slots, counts, first, groups, totals, offsets
extern "C" const char* simt_hash_misses(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    const KeyBatch batch = read_batch(&words);
    const int num_tables = static_cast<int>(words.number());
    const auto* slots = words.pointer<const int64_t>();
    const auto* counts = words.pointer<const int64_t>();
    MissOutput out{};
    out.first = words.pointer<int64_t>();
    out.groups = words.pointer<int32_t>();
    out.totals = words.pointer<int64_t>();
    out.offsets = words.pointer<int64_t>();
    launch_misses(work, batch, num_tables, slots, counts, out);
  });
}

// index, batch, slots, offsets, admitted, row_layout, number of arrays, arrays
extern "C" const char* simt_hash_grow(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    int64_t buckets;
    Growth growth{};
    growth.index = read_index(&words, &buckets);
    const KeyBatch batch = read_batch(&words);
    auto* slots = words.pointer<int64_t>();
    growth.misses.offsets = words.pointer<const int64_t>();
    growth.misses.admitted = words.pointer<const bool>();
    growth.buffers.layout = words.pointer<const int64_t>();
    growth.buffers.count = static_cast<int>(words.number());
    for (int p = 0; p < growth.buffers.count; ++p)
      growth.buffers.data[p] = words.pointer<uint8_t>();
    launch_grow(work, growth, batch, slots, buckets);
  });
}

// index, ids, n, first, totals, offsets, admitted, batch_scores, order, competes, slots, status,
// evicted
extern "C" const char* simt_hash_insert(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    int64_t buckets;
    Insertion insertion{};
    insertion.index = read_index(&words, &buckets);
    insertion.ids = words.pointer<const int64_t>();
    const int64_t n = words.number();
    insertion.first = words.pointer<const int64_t>();
    insertion.totals = words.pointer<const int64_t>();
    insertion.misses.offsets = words.pointer<const int64_t>();
    insertion.misses.admitted = words.pointer<const bool>();
    insertion.batch_scores = words.pointer<const int64_t>();
    insertion.order = static_cast<emb::Order>(words.number());
    insertion.competes = words.number() != 0;
    insertion.slots = words.pointer<int64_t>();
    insertion.status = words.pointer<uint8_t>();
    insertion.evicted = words.pointer<int64_t>();
    launch_insert(work, insertion, n, buckets);
  });
}

// slots, inserted, groups, number of inserted, of slots, result
extern "C" const char* simt_hash_fill_slots(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    const auto* slots = words.pointer<const int64_t>();
    const auto* inserted = words.pointer<const int64_t>();
    const auto* groups = words.pointer<const int32_t>();
    const int64_t num_inserted = words.number(), n = words.number();
    launch_fill_slots(work.launcher(), slots, inserted, num_inserted, groups, n,
                      words.pointer<int64_t>());
  });
}

// index, batch, slots
extern "C" const char* simt_hash_erase(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    int64_t buckets;
    const DeviceIndex index = read_index(&words, &buckets);
    const KeyBatch batch = read_batch(&words);
    launch_erase(work, index, batch, words.pointer<int64_t>());
  });
}

// index, table, first bucket, number of buckets, before, removed
extern "C" const char* simt_hash_expire(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    int64_t buckets;
    const DeviceIndex index = read_index(&words, &buckets);
    ExpireWindow window{};
    window.table = static_cast<int>(words.number());
    window.first_bucket = words.number();
    window.num_buckets = words.number();
    window.before = words.number();
    launch_expire(work.launcher(), index, window, words.pointer<bool>());
  });
}

// layout, rules, ids, first, offsets, slots, seed, number of tables, of arrays, of misses; then
// address and dtype of every array
extern "C" const char* simt_hash_initial_rows(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    InitialRows rows{};
    rows.layout = words.pointer<const emb::InitialLayout>();
    rows.rules = words.pointer<const emb::InitialRule>();
    rows.ids = words.pointer<const int64_t>();
    rows.first = words.pointer<const int64_t>();
    rows.offsets = words.pointer<const int64_t>();
    rows.slots = words.pointer<const int64_t>();
    rows.seed = static_cast<uint64_t>(words.number());
    rows.num_tables = static_cast<int>(words.number());
    rows.num_buffers = static_cast<int>(words.number());
    const int64_t n = words.number();
    for (int p = 0; p < rows.num_buffers; ++p) {
      void* data = words.pointer<void>();
      rows.buffers[p] = {data, words.dtype()};
    }
    launch_initial_rows(work.launcher(), rows, n);
  });
}
