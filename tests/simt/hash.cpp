// Emulated hash index: find, touch, grow, insert, erase, expire, rows by slot and their initial
// values.
#include "hash/find.cuh"
#include "hash/grow.cuh"
#include "hash/initial.cuh"
#include "hash/insert.cuh"
#include "hash/misses.cuh"
#include "hash/remove.cuh"
#include "hash/rows.cuh"
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
  index.entry_words = words->number();
  index.num_tables = static_cast<int>(words->number());
  *buckets = words->number() / kBucketSlots;
  return index;
}

// ids, starts, tables, n, segments
KeyBatch read_batch(Words* words) {
  KeyBatch batch{};
  batch.ids = words->pointer<const int64_t>();
  batch.starts = words->pointer<const int64_t>();
  batch.tables = words->pointer<const int64_t>();
  batch.n = words->number();
  batch.num_segments = static_cast<int>(words->number());
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

// address, bytes per row, stride in bytes, rows, alignment
emb::RowBytes read_rows(Words* words) {
  emb::RowBytes rows{};
  rows.data = words->pointer<void>();
  rows.row_bytes = words->number();
  rows.stride = words->number();
  rows.num_rows = words->number();
  rows.alignment = words->number();
  return rows;
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

// index, batch, slots, counts, batch_scores, order, first, groups, totals, offsets
extern "C" const char* simt_hash_touch(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    int64_t buckets;
    const DeviceIndex index = read_index(&words, &buckets);
    const KeyBatch batch = read_batch(&words);
    auto* slots = words.pointer<int64_t>();
    const auto* counts = words.pointer<const int64_t>();
    const auto* batch_scores = words.pointer<const int64_t>();
    const KeyTouch use{static_cast<emb::HashOrder>(words.number()), counts, batch_scores};
    MissOutput out{};
    out.first_positions = words.pointer<int64_t>();
    out.groups = words.pointer<int32_t>();
    out.totals = words.pointer<int64_t>();
    out.offsets = words.pointer<int64_t>();
    launch_hash_touch(work, index, batch, use, slots, out);
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
    growth.buffers.num_buffers = static_cast<int>(words.number());
    for (int p = 0; p < growth.buffers.num_buffers; ++p)
      growth.buffers.data[p] = words.pointer<uint8_t>();
    launch_grow(work, growth, batch, slots, buckets);
  });
}

// index, ids, n, first, totals, offsets, admitted, batch_scores, order, must_compete, slots of the
// batch, groups, number of positions, slots, status, evicted, slots and status by position
extern "C" const char* simt_hash_insert(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    int64_t buckets;
    Insertion insertion{};
    insertion.index = read_index(&words, &buckets);
    insertion.ids = words.pointer<const int64_t>();
    const int64_t n = words.number();
    insertion.first_positions = words.pointer<const int64_t>();
    insertion.totals = words.pointer<const int64_t>();
    insertion.misses.offsets = words.pointer<const int64_t>();
    insertion.misses.admitted = words.pointer<const bool>();
    insertion.batch_scores = words.pointer<const int64_t>();
    insertion.order = static_cast<emb::HashOrder>(words.number());
    insertion.must_compete = words.number() != 0;
    BatchSlots batch{};
    batch.slots = words.pointer<const int64_t>();
    batch.groups = words.pointer<const int32_t>();
    batch.n = words.number();
    insertion.slots = words.pointer<int64_t>();
    insertion.status = words.pointer<uint8_t>();
    insertion.evicted = words.pointer<int64_t>();
    batch.new_slots = words.pointer<int64_t>();
    batch.status = words.pointer<uint8_t>();
    launch_insert(work, insertion, batch, n, buckets);
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

// index, table, first bucket, number of buckets, minimum stamp, removed
extern "C" const char* simt_hash_expire(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    int64_t buckets;
    const DeviceIndex index = read_index(&words, &buckets);
    ExpireWindow window{};
    window.table = static_cast<int>(words.number());
    window.first_bucket = words.number();
    window.num_buckets = words.number();
    window.min_stamp = words.number();
    launch_expire(work.launcher(), index, window, words.pointer<bool>());
  });
}

// layout, rules, ids, first, offsets, slots, seed, number of tables, of arrays, of misses; then
// address and dtype of every array
extern "C" const char* simt_hash_initial_rows(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    DeviceInitialRows rows{};
    rows.layout = words.pointer<const emb::InitialLayout>();
    rows.rules = words.pointer<const emb::InitialRule>();
    rows.ids = words.pointer<const int64_t>();
    rows.first_positions = words.pointer<const int64_t>();
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

// index, batch, rows, default_word, out, found
extern "C" const char* simt_hash_find_rows(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    int64_t buckets;
    const DeviceIndex index = read_index(&words, &buckets);
    const KeyBatch batch = read_batch(&words);
    const emb::RowBytes rows = read_rows(&words);
    const auto default_word = static_cast<uint32_t>(words.number());
    void* out = words.pointer<void>();
    launch_find_rows(work.launcher(), index, batch, rows, default_word, out, words.pointer<bool>());
  });
}

// rows, slots, n, starting rows, groups, first, default_word, out
extern "C" const char* simt_hash_read_rows(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    const emb::RowBytes rows = read_rows(&words);
    const auto* slots = words.pointer<const int64_t>();
    const int64_t n = words.number();
    StartingRows<void> starting{};
    starting.data = words.pointer<const void>();
    starting.groups = words.pointer<const int32_t>();
    starting.first_positions = words.pointer<const int64_t>();
    const auto default_word = static_cast<uint32_t>(words.number());
    launch_read_rows(work.launcher(), rows, slots, n, starting, default_word,
                     words.pointer<void>());
  });
}

// rows, slots, n, rows to write
extern "C" const char* simt_hash_write_rows(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    const emb::RowBytes rows = read_rows(&words);
    const auto* slots = words.pointer<const int64_t>();
    const int64_t n = words.number();
    launch_write_rows(work, rows, slots, n, words.pointer<const void>());
  });
}

// rows, dtype, slots, segments, permutation, count, n, rows to add
extern "C" const char* simt_hash_add_rows(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    const emb::RowBytes rows = read_rows(&words);
    const auto dtype = words.dtype();
    SlotGroups groups{};
    groups.slots = words.pointer<const int64_t>();
    groups.segments = words.pointer<const int32_t>();
    groups.permutation = words.pointer<const int32_t>();
    groups.count = words.pointer<const int32_t>();
    groups.n = words.number();
    launch_add_rows(work.launcher(), rows, dtype, groups, words.pointer<const void>());
  });
}

// slots, status, evicted, n, keys, stamps, scores, count; then number of matrices, and of each rows
// and out
extern "C" const char* simt_hash_evicted_rows(const int64_t* call) {
  return worked(call, [](HostWork& work, Words& words) {
    EvictedKeys evicted{};
    evicted.slots = words.pointer<const int64_t>();
    evicted.status = words.pointer<const uint8_t>();
    evicted.words = words.pointer<const int64_t>();
    evicted.n = words.number();
    EvictedEntries entries{};
    entries.keys = words.pointer<int64_t>();
    entries.stamps = words.pointer<int64_t>();
    entries.scores = words.pointer<int64_t>();
    entries.count = words.pointer<int64_t>();
    std::vector<EvictedMatrix> matrices(static_cast<size_t>(words.number()));
    for (EvictedMatrix& matrix : matrices) {
      matrix.rows = read_rows(&words);
      matrix.out = words.pointer<void>();
    }
    launch_evicted_rows(work, evicted, entries, matrices.data(), static_cast<int>(matrices.size()));
  });
}
