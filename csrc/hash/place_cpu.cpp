// `hash_grow_` and `hash_place_` on the CPU.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <numeric>
#include <tuple>
#include <vector>

#include "core/parallel.h"
#include "hash/check_index.h"
#include "hash/check_misses.h"
#include "hash/isa_cpu.h"

namespace emb {
namespace {

constexpr int64_t kKeyGrain = 1024, kBucketGrain = 256;

// Buckets that `table` gains for its admitted misses; their number was `old`.
void grow_table(const HashIndex& index, int64_t t, int64_t old, const RowPlane* planes,
                int num_planes) {
  const HashTable table = index.table(t);
  const HashPlaceKernels& kernels = hash_place_kernels();
  parallel_balanced(
      table.buckets - old, kBucketGrain, [](int64_t i) { return i; },
      [&](int64_t begin, int64_t end) {
        kernels.split(table, old, planes, num_planes, old + begin, old + end);
      });
}

void hash_grow_(std::vector<Tensor> tensors, std::vector<Tensor> rows, const Tensor& row_layout,
                const Tensor& ids, const Tensor& starts, const Tensor& tables, Tensor slots,
                const Tensor& ends, std::optional<Tensor> admitted) {
  const HashCall call("hash_grow_", tensors, ids, starts, tables);
  call.check_contents();
  const char* op = call.op;
  const HashIndex& index = call.index;
  const HashBatch& batch = call.batch;
  optional_longs(op, "slots", slots, batch.n, ids);
  const Misses misses(op, index, ids, ends, admitted);
  misses.check_ends(op);
  const RowPlanes planes(op, index, rows, row_layout);
  int64_t* places = slots.mutable_data_ptr<int64_t>();
  std::vector<bool> grown(index.num_tables, false);
  for (int64_t t = 0; t < index.num_tables; ++t) {
    const int64_t old = index.field(t, kBuckets);
    const int64_t wanted = wanted_buckets(index.field(t, kSize) + misses.admitted_of(t), old,
                                          index.field(t, kMostBuckets), index.field(t, kMostLoad));
    if (wanted == old) continue;
    grown[t] = true;
    index.field(t, kBuckets) = wanted;
    grow_table(index, t, old, planes.of(t), planes.count);
  }
  for (int64_t f = 0; f < batch.segments; ++f) {
    if (!grown[batch.tables[f]]) continue;
    const int64_t begin = batch.starts[f];
    hash_find_kernels().refresh(index.table(batch.tables[f]), batch.ids + begin,
                                batch.starts[f + 1] - begin, places + begin);
  }
}

// One round: `pending` [0, n) choose, then buckets take in parallel whom they can.
void play_round(const HashPlacing& placing, const int64_t* pending, int64_t n, Choice* choices) {
  const HashPlaceKernels& kernels = hash_place_kernels();
  const auto each = [](int64_t i) { return i; };
  parallel_balanced(n, kKeyGrain, each, [&](int64_t begin, int64_t end) {
    kernels.choose(placing, pending + begin, end - begin, choices + begin);
  });
  const int64_t parts = std::clamp<int64_t>(n / kKeyGrain, 1, num_threads());
  const int64_t buckets = placing.table.buckets;
  parallel_tasks(parts, [&](int64_t part) {
    kernels.settle(placing, pending, n, choices, buckets * part / parts,
                   buckets * (part + 1) / parts);
  });
}

// Places `pending`, the admitted misses of a table, in rounds.
void place_all(const HashPlacing& placing, std::vector<int64_t> pending) {
  const int64_t round = round_size(placing.table.buckets);
  std::vector<Choice> choices(std::min<int64_t>(round, pending.size()));
  size_t begin = 0;  // those before have their answer
  while (begin < pending.size()) {
    const int64_t n = std::min<int64_t>(round, pending.size() - begin);
    play_round(placing, pending.data() + begin, n, choices.data());
    // Those that got nothing stay in front of the others, in order.
    int64_t left = n;
    for (int64_t i = n - 1; i >= 0; --i) {
      const int64_t miss = pending[begin + i];
      if (choices[i].mode == Choice::kRefused) {
        placing.status[miss] = static_cast<uint8_t>(PlaceStatus::kRefused);
      } else if (placing.slots[miss] == kNoSlot) {
        pending[begin + --left] = miss;
      }
    }
    begin += left;
  }
}

void count_statuses(const HashIndex& index, int64_t t, const uint8_t* status, int64_t n) {
  int64_t counts[8] = {};
  for (int64_t i = 0; i < n; ++i) ++counts[status[i] & 7];
  const auto of = [&](PlaceStatus s) { return counts[static_cast<int>(s)]; };
  index.counter(t, kInserted) += of(PlaceStatus::kNew) + of(PlaceStatus::kEvicting);
  index.counter(t, kEvicted) += of(PlaceStatus::kEvicting);
  index.counter(t, kRefused) += of(PlaceStatus::kRefused);
  index.counter(t, kNotAdmitted) += of(PlaceStatus::kNotAdmitted);
  index.field(t, kSize) += of(PlaceStatus::kNew);
}

std::tuple<Tensor, Tensor, Tensor> hash_place_(std::vector<Tensor> tensors, const Tensor& ids,
                                               const Tensor& first, const Tensor& totals,
                                               const Tensor& ends, std::optional<Tensor> admitted,
                                               std::optional<Tensor> given, int64_t order,
                                               int64_t newcomer) {
  const char* op = "hash_place_";
  const HashIndex index(op, tensors);
  index.check_tables(op);
  const HashScoring scoring(op, index, order, given, ids);
  const bool must_compete = competes(op, newcomer);
  const int64_t n = ids.numel();
  check_num_keys(op, n);
  const int64_t* keys = optional_longs(op, "ids", ids, n, ids);
  const int64_t* firsts = optional_longs(op, "first", first, n, ids);
  const int64_t* sums = optional_longs(op, "totals", totals, n, ids);
  const Misses misses(op, index, ids, ends, admitted);
  misses.check_ends(op);
  for (int64_t i = 0; i < misses.count(); ++i) {
    STD_TORCH_CHECK(firsts[i] >= 0 && firsts[i] < n, op, ": first must be positions in ids, got ",
                    firsts[i], " for ", n, " ids");
  }
  Tensor slots = allocate(ids, {n});
  Tensor status = allocate_zeros(ids, {n}, ScalarType::Byte);
  Tensor evicted = allocate_zeros(ids, {n, 3});
  int64_t* places = slots.mutable_data_ptr<int64_t>();
  auto* statuses = static_cast<uint8_t*>(status.mutable_data_ptr());
  std::fill(places, places + n, kNoSlot);
  for (int64_t t = 0; t < index.num_tables; ++t) {
    std::vector<int64_t> pending;
    for (int64_t i = misses.begin(t); i < misses.end(t); ++i) {
      if (misses.is_admitted(i)) {
        pending.push_back(i);
      } else {
        statuses[i] = static_cast<uint8_t>(PlaceStatus::kNotAdmitted);
      }
    }
    const HashPlacing placing{index.table(t),
                              scoring.order,
                              must_compete,
                              *index.clock,
                              scoring.of(t),
                              keys,
                              firsts,
                              sums,
                              places,
                              statuses,
                              evicted.mutable_data_ptr<int64_t>()};
    place_all(placing, std::move(pending));
    count_statuses(index, t, statuses + misses.begin(t), misses.end(t) - misses.begin(t));
  }
  return {slots, status, evicted};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, hash_grow_);
  EMB_IMPL(m, emb, hash_place_);
}
