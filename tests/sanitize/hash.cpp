// Random calls of the hash ops, on one thread and on several: the results must be the same bytes,
// and the sanitizer that this program is built with must report nothing. Prints the number of
// plans.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <tuple>

#include "hash/args.h"
#include "stable_torch.h"

using torch::stable::ScalarType;
using torch::stable::Tensor;
using Tensors = std::vector<Tensor>;
using Optional = std::optional<Tensor>;

namespace {

constexpr int64_t kTables = 2;
constexpr int64_t kWidths[] = {12, 3};  // bytes per row, by array
template <class Function>
auto op(const char* name) {
  return reinterpret_cast<Function*>(torch::stable::registered_ops().at(name));
}

const auto find = op<Tensor(Tensors, const Tensor&, const Tensor&, const Tensor&)>;
const auto erase = op<Tensor(Tensors, const Tensor&, const Tensor&, const Tensor&)>;
using Five = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;
const auto use =
    op<Five(Tensors, const Tensor&, const Tensor&, const Tensor&, Optional, Optional, int64_t)>;
const auto grow = op<void(Tensors, Tensors, const Tensor&, const Tensor&, const Tensor&,
                          const Tensor&, Tensor, const Tensor&, Optional)>;
const auto place = op<Five(Tensors, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                           Optional, Optional, int64_t, int64_t, Optional, Optional)>;
const auto expire = op<Tensor(Tensors, int64_t, int64_t, int64_t, int64_t)>;

Tensor longs(const std::vector<int64_t>& values) {
  Tensor tensor({static_cast<int64_t>(values.size())}, ScalarType::Long);
  std::copy(values.begin(), values.end(), tensor.mutable_data_ptr<int64_t>());
  return tensor;
}

Tensor filled(std::vector<int64_t> sizes, ScalarType type, int byte) {
  Tensor tensor(std::move(sizes), type);
  std::memset(tensor.mutable_data_ptr(), byte, tensor.nbytes());
  return tensor;
}

// A step, drawn once and run with any number of threads.
struct Step {
  Tensor ids, starts, tables, counts, batch_scores, admitted;
  int kind;
};

struct Plan {
  int64_t buckets[kTables], most[kTables];
  emb::HashOrder order;
  int64_t insert_policy;
  std::vector<Step> steps;
};

Plan draw(std::mt19937_64& random, int64_t most_buckets, int64_t most_keys, int64_t steps) {
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  Plan plan;
  for (int64_t t = 0; t < kTables; ++t) {
    plan.most[t] = 1 + below(most_buckets);
    plan.buckets[t] = 1 + below(below(2) != 0 ? plan.most[t] : 1);
  }
  plan.order = static_cast<emb::HashOrder>(below(5));
  plan.insert_policy = below(2);
  const int64_t pool = most_buckets * 48;
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t n = below(3) != 0 ? below(most_keys + 1) : most_keys;
    const int64_t cut = below(n + 1);
    Step drawn{Tensor({n}, ScalarType::Long), longs({0, cut, cut, n}),
               longs({1, 0, below(2)}),       Tensor({n}, ScalarType::Long),
               longs({below(9), below(9)}),   Tensor({n}, ScalarType::Bool),
               static_cast<int>(below(8))};
    for (int64_t i = 0; i < n; ++i) {
      const auto key = static_cast<uint64_t>(below(pool) - 4);
      drawn.ids.mutable_data_ptr<int64_t>()[i] =
          static_cast<int64_t>(key % 3 != 0 ? key : key * 0x9E3779B97F4A7C15u);
      drawn.counts.mutable_data_ptr<int64_t>()[i] = 1 + below(4);
      drawn.admitted.mutable_data_ptr<bool>()[i] = below(4) != 0;
    }
    plan.steps.push_back(drawn);
  }
  return plan;
}

// All results and the final state, as bytes.
class Record {
 public:
  void add(const Tensor& tensor) {
    const auto* data = tensor.const_data_ptr<uint8_t>();
    bytes_.insert(bytes_.end(), data, data + tensor.nbytes());
  }
  template <class... More>
  void add(const std::tuple<More...>& tensors) {
    std::apply([&](const auto&... each) { (add(each), ...); }, tensors);
  }
  bool operator==(const Record&) const = default;

 private:
  std::vector<uint8_t> bytes_;
};

struct World {
  Tensors index, rows;
  Tensor layout{{kTables, 2, 2}, ScalarType::Long};

  explicit World(const Plan& plan) {
    const int64_t slots = (plan.most[0] + plan.most[1]) * emb::kBucketSlots;
    const bool scored = emb::has_scores(plan.order);
    index = {filled({slots}, ScalarType::Byte, 0),
             filled({slots, scored ? 3 : 2}, ScalarType::Long, 0x5a),
             Tensor({kTables, emb::kHashTableColumns}, ScalarType::Long),
             longs({0}),
             filled({kTables, emb::kHashCounters}, ScalarType::Long, 0),
             filled({slots / emb::kBucketSlots, emb::kQueueWords}, ScalarType::Long, 0)};
    int64_t first = 0;
    for (int64_t t = 0; t < kTables; ++t) {
      const int64_t row[] = {first, plan.buckets[t], plan.most[t],
                             0,     600 + 200 * t,   0x5DEECE66D * t};
      std::copy_n(row, emb::kHashTableColumns,
                  index[2].mutable_data_ptr<int64_t>() + t * emb::kHashTableColumns);
      for (int64_t p = 0; p < 2; ++p) {
        int64_t* place = layout.mutable_data_ptr<int64_t>() + 4 * t + 2 * p;
        place[0] = first * emb::kBucketSlots * kWidths[p];
        place[1] = kWidths[p];
      }
      first += plan.most[t];
    }
    for (int64_t width : kWidths) rows.push_back(filled({slots * width}, ScalarType::Byte, 1));
  }

  int64_t buckets(int64_t t) const {
    return index[2].const_data_ptr<int64_t>()[t * emb::kHashTableColumns +
                                              static_cast<int>(emb::HashTableColumn::kBuckets)];
  }
};

void train(World& world, const Plan& plan, const Step& step, Record* record) {
  const auto& [ids, starts, tables, counts, batch_scores, chosen, kind] = step;
  const Optional uses = kind % 2 != 0 ? Optional(counts) : std::nullopt;
  const Optional admitted = kind % 3 != 0 ? Optional(chosen) : std::nullopt;
  const auto found = use("hash_touch_")(world.index, ids, starts, tables, uses, batch_scores,
                                        static_cast<int64_t>(plan.order));
  const auto& [slots, first, groups, totals, offsets] = found;
  record->add(found);
  grow("hash_grow_")(world.index, world.rows, world.layout, ids, starts, tables, slots, offsets,
                     admitted);
  const auto placed =
      place("hash_insert_")(world.index, ids, first, totals, offsets, admitted, batch_scores,
                            static_cast<int64_t>(plan.order), plan.insert_policy, slots, groups);
  record->add(slots);
  record->add(placed);
}

Record play(const Plan& plan, int threads) {
  torch::stable::thread_count() = threads;
  World world(plan);
  Record record;
  for (const Step& step : plan.steps) {
    if (step.kind < 6) {
      train(world, plan, step, &record);
    } else if (step.kind == 6) {
      record.add(erase("hash_erase_")(world.index, step.ids, step.starts, step.tables));
    } else {
      const int64_t t = step.ids.numel() % kTables,
                    clock = *world.index[3].const_data_ptr<int64_t>();
      record.add(expire("hash_expire_")(world.index, t, world.buckets(t) / 3, world.buckets(t) / 2,
                                        clock - 2));
    }
    record.add(find("hash_find")(world.index, step.ids, step.starts, step.tables));
  }
  world.index.pop_back();  // queues may differ
  for (const Tensor& tensor : world.index) record.add(tensor);
  for (const Tensor& tensor : world.rows) record.add(tensor);
  return record;
}

}  // namespace

int main(int count, char** words) {
  if (count != 3) {
    std::fprintf(stderr, "usage: %s <small plans> <large plans>\n", words[0]);
    return 2;
  }
  std::mt19937_64 random(7);
  const int small = std::atoi(words[1]), large = std::atoi(words[2]);
  for (int i = 0; i < small + large; ++i) {
    const bool is_small = i < small;
    const Plan plan = is_small ? draw(random, 6, 200, 20) : draw(random, 9000, 80'000, 6);
    const Record one = play(plan, 1);
    for (int threads : {2, 5}) {
      if (play(plan, threads) == one) continue;
      std::printf("plan %d: other bytes on %d threads\n", i, threads);
      return 1;
    }
  }
  std::printf("%d plans\n", small + large);
  return 0;
}
