// `hash_find`, `hash_use_` and `hash_misses` on the CPU.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <tuple>

#include "core/parallel.h"
#include "hash/batch_key.h"
#include "hash/check_misses.h"
#include "hash/isa_cpu.h"

namespace emb {
namespace {

constexpr int64_t kGrain = 2048;  // keys

// Calls `body(segment, begin, end)` for ranges of ids of one segment each, in parallel.
template <class Body>
void parallel_segments(const HashBatch& batch, const Body& body) {
  const auto cost = [](int64_t i) { return i; };
  parallel_balanced(batch.n, kGrain, cost, [&](int64_t begin, int64_t end) {
    const int64_t* after = std::upper_bound(batch.starts, batch.starts + batch.segments, begin);
    for (int64_t f = after - batch.starts - 1; begin < end; ++f) {
      const int64_t stop = std::min(end, batch.starts[f + 1]);
      if (begin < stop) body(f, begin, stop);
      begin = std::max(begin, stop);
    }
  });
}

Tensor hash_find(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                 const Tensor& tables) {
  const HashCall call("hash_find", tensors, ids, starts, tables);
  call.check_contents();
  const HashIndex& index = call.index;
  const HashBatch& batch = call.batch;
  Tensor slots = allocate(ids, {batch.n});
  int64_t* out = slots.mutable_data_ptr<int64_t>();
  const HashFindKernels& kernels = hash_find_kernels();
  parallel_segments(batch, [&](int64_t f, int64_t begin, int64_t end) {
    kernels.find(index.table(batch.tables[f]), batch.ids + begin, end - begin, nullptr,
                 out + begin);
  });
  return slots;
}

Tensor hash_use_(std::vector<Tensor> tensors, const Tensor& ids, const Tensor& starts,
                 const Tensor& tables, std::optional<Tensor> counts, std::optional<Tensor> given,
                 int64_t order) {
  const HashCall call("hash_use_", tensors, ids, starts, tables);
  call.check_contents();
  const HashIndex& index = call.index;
  const HashBatch& batch = call.batch;
  const HashScoring scoring(call.op, index, order, given, ids);
  const int64_t* uses = optional_longs(call.op, "counts", counts, batch.n, ids);
  Tensor slots = allocate(ids, {batch.n});
  int64_t* out = slots.mutable_data_ptr<int64_t>();
  const int64_t stamp = ++*index.clock;
  const HashFindKernels& kernels = hash_find_kernels();
  parallel_segments(batch, [&](int64_t f, int64_t begin, int64_t end) {
    const int64_t t = batch.tables[f];
    const HashUse use{scoring.order, stamp, scoring.of(t),
                      uses == nullptr ? nullptr : uses + begin};
    const int64_t hits =
        kernels.find(index.table(t), batch.ids + begin, end - begin, &use, out + begin);
    __atomic_fetch_add(&index.counter(t, kLookups), end - begin, __ATOMIC_RELAXED);
    __atomic_fetch_add(&index.counter(t, kHits), hits, __ATOMIC_RELAXED);
  });
  return slots;
}

// The distinct missing keys of one table as they come, by open addressing over their numbers.
class MissSet {
 public:
  MissSet(const int64_t* ids, const int64_t* first, int64_t most)
      : ids_(ids),
        first_(first),
        mask_(std::bit_ceil(static_cast<uint64_t>(2 * most + 1)) - 1),
        hash_key_(batch_hash_key()),
        numbers_(new int32_t[mask_ + 1]) {
    std::memset(numbers_.get(), 0xff, (mask_ + 1) * sizeof(int32_t));
  }

  void ask_for(int64_t key) const { __builtin_prefetch(&numbers_[place(key)], 1); }

  // The number of `key`; `next`, which then is its number, where it is new.
  int32_t find_or_add(int64_t key, int32_t next) {
    for (uint64_t i = place(key);; i = (i + 1) & mask_) {
      if (numbers_[i] < 0) return numbers_[i] = next;
      if (ids_[first_[numbers_[i]]] == key) return numbers_[i];
    }
  }

 private:
  uint64_t place(int64_t key) const { return mix(static_cast<uint64_t>(key) ^ hash_key_) & mask_; }

  const int64_t* ids_;
  const int64_t* first_;
  uint64_t mask_, hash_key_;
  std::unique_ptr<int32_t[]> numbers_;
};

struct MissOutput {
  int64_t* first;
  int32_t* groups;
  int64_t* totals;
};

// Adds the misses of a segment; `count` misses are there already. Returns how many there are then.
int64_t add_misses(const HashBatch& batch, int64_t segment, const int64_t* slots,
                   const int64_t* counts, int64_t count, const MissOutput& out, MissSet* set) {
  constexpr int64_t kAhead = 16;
  const int64_t end = batch.starts[segment + 1];
  for (int64_t i = batch.starts[segment]; i < end; ++i) {
    if (i + kAhead < end && slots[i + kAhead] < 0) set->ask_for(batch.ids[i + kAhead]);
    if (slots[i] >= 0) {
      out.groups[i] = -1;
      continue;
    }
    // Before it is compared with: a new number's key must be readable.
    out.first[count] = i;
    const int32_t number = set->find_or_add(batch.ids[i], static_cast<int32_t>(count));
    if (number == count) out.totals[count++] = 0;
    out.groups[i] = number;
    out.totals[number] = add_uses(out.totals[number], counts == nullptr ? 1 : counts[i]);
  }
  return count;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> hash_misses(const Tensor& ids, const Tensor& starts,
                                                       const Tensor& tables, const Tensor& slots,
                                                       std::optional<Tensor> counts,
                                                       int64_t num_tables) {
  const char* op = "hash_misses";
  const HashBatch batch(op, ids, starts, tables);
  check_num_tables(op, num_tables);
  batch.check_segments(op, num_tables);
  const int64_t* places = optional_longs(op, "slots", slots, batch.n, ids);
  const int64_t* uses = optional_longs(op, "counts", counts, batch.n, ids);
  MissTensors found(ids, num_tables);
  const MissOutput out{found.first.mutable_data_ptr<int64_t>(),
                       found.groups.mutable_data_ptr<int32_t>(),
                       found.totals.mutable_data_ptr<int64_t>()};
  int64_t* end = found.ends.mutable_data_ptr<int64_t>();
  std::vector<int64_t> missing(num_tables, 0);  // positions
  for (int64_t f = 0; f < batch.segments; ++f) {
    missing[batch.tables[f]] +=
        std::count_if(places + batch.starts[f], places + batch.starts[f + 1],
                      [](int64_t slot) { return slot < 0; });
  }
  int64_t count = end[0] = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    MissSet set(batch.ids, out.first, missing[t]);
    for (int64_t f = 0; f < batch.segments; ++f) {
      if (batch.tables[f] == t) count = add_misses(batch, f, places, uses, count, out, &set);
    }
    end[t + 1] = count;
  }
  std::fill(out.first + count, out.first + batch.n, 0);
  std::fill(out.totals + count, out.totals + batch.n, 0);
  return found.all();
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, hash_find);
  EMB_IMPL(m, emb, hash_use_);
  EMB_IMPL(m, emb, hash_misses);
}
