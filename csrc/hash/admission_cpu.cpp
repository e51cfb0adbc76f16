// The counts of missing keys for an admission on the CPU: exact ones in a hash index
// (`hash_count_`), or count-min sketches (`sketch_count_`). emblib/dynamic/admission.py has the
// rules, emblib/ops/hash.py the arguments.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <vector>

#include "core/check.h"
#include "core/parallel.h"
#include "core/random.h"
#include "hash/args.h"
#include "hash/entries.h"

namespace emb {
namespace {

constexpr int64_t kGrain = 1024;    // grain of parallel_balanced, in keys
constexpr int64_t kKeysAhead = 16;  // keys between the prefetch of counters and their use

// The keys of a call, checked but for their tables; the tensors own the memory.
struct KeysToCount {
  const int64_t* keys;    // [L]
  const int64_t* uses;    // [L], uses of each key
  const int64_t* tables;  // [L], the table of each key
  int64_t num_keys;       // L

  KeysToCount(const char* op, const Tensor& keys_, const Tensor& uses_, const Tensor& tables_)
      : num_keys(keys_.numel()) {
    const auto int64_vector = [&](const char* name, const Tensor& tensor) {
      check_dtype(op, name, tensor, ScalarType::Long, "int64");
      STD_TORCH_CHECK(tensor.dim() == 1 && tensor.numel() == num_keys && tensor.is_contiguous(), op,
                      ": ", name, " must be a contiguous vector of one number per key");
      return tensor.const_data_ptr<int64_t>();
    };
    keys = int64_vector("keys", keys_);
    uses = int64_vector("counts", uses_);
    tables = int64_vector("tables", tables_);
  }
};

// The keys of a call that an index counts, table by table, in the order of the call.
struct CountedKeys {
  std::vector<int64_t> offsets;    // [T + 1]: table t has the keys offsets[t] to offsets[t + 1] - 1
  std::vector<int64_t> positions;  // [n], position in the call
  std::vector<int64_t> keys;       // [n]

  // Throws unless tables are below `num_tables`; a negative one means that the key is not counted.
  CountedKeys(const char* op, const KeysToCount& call, int64_t num_tables)
      : offsets(num_tables + 1, 0) {
    for (int64_t i = 0; i < call.num_keys; ++i) {
      const int64_t t = call.tables[i];
      STD_TORCH_CHECK(t < num_tables, op, ": tables must be below ", num_tables, ", got ", t);
      if (t >= 0) ++offsets[t + 1];
    }
    std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
    positions.resize(offsets.back());
    keys.resize(offsets.back());
    std::vector<int64_t> next(offsets.begin(), offsets.end() - 1);  // by table
    for (int64_t i = 0; i < call.num_keys; ++i) {
      if (call.tables[i] < 0) continue;
      const int64_t k = next[call.tables[i]]++;
      positions[k] = i;
      keys[k] = call.keys[i];
    }
  }

  // Write the slot of each key to `slots` [n], kNoSlot for a key that the index does not have.
  void find(const HashIndex& index, int64_t* slots) const {
    std::vector<int64_t> tables(index.num_tables);
    std::iota(tables.begin(), tables.end(), int64_t{0});
    find_keys(index, HashBatch(keys.data(), offsets.data(), tables.data(), index.num_tables),
              slots);
  }
};

// The counted keys that an index does not have; all arrays are by miss.
struct UncountedKeys {
  std::vector<int64_t> offsets;      // [T + 1], see Misses
  std::vector<int64_t> key_indices;  // the index of the key in CountedKeys
  // The results of insert_misses.
  std::vector<int64_t> slots;
  std::vector<uint8_t> status;

  UncountedKeys(const CountedKeys& counted, const int64_t* key_slots)
      : offsets(counted.offsets.size(), 0) {
    for (size_t t = 0; t + 1 < offsets.size(); ++t) {
      for (int64_t k = counted.offsets[t]; k < counted.offsets[t + 1]; ++k) {
        if (key_slots[k] == kNoSlot) key_indices.push_back(k);
      }
      offsets[t + 1] = static_cast<int64_t>(key_indices.size());
    }
    slots.resize(key_indices.size());
    status.resize(key_indices.size());
  }

  // Return whether a table would have to grow for its keys.
  bool need_growth(const HashIndex& index) const {
    for (int64_t t = 0; t < index.num_tables; ++t) {
      if (must_grow(index, t, offsets[t + 1] - offsets[t])) return true;
    }
    return false;
  }
};

// Count keys in an index whose entries have a score, the count, but are evicted in the order
// "lru". Return the count of each key so far, int64 [L], 0 for keys that are not counted. A key
// that finds no slot has its uses in this call.
//
// The op declines a call for which a table would have to grow: it changes nothing, and returns an
// empty list. `counts` must not be negative; this is not checked. If memory is short in the
// insertion, keys that had an entry are counted already.
std::vector<Tensor> hash_count_(std::vector<Tensor> tensors, const Tensor& keys,
                                const Tensor& counts, const Tensor& tables) {
  const char* op = "hash_count_";
  const HashIndex index(op, tensors);
  index.check_tables(op);
  STD_TORCH_CHECK(index.entry_words == 3, op, ": entries must have scores, [S, 3]");
  const KeysToCount call(op, keys, counts, tables);
  check_same_device(op, "keys", keys, tensors[0]);
  const HashScoring scoring(op, index, static_cast<int64_t>(HashOrder::kLru), std::nullopt, keys);
  const CountedKeys counted(op, call, index.num_tables);
  std::vector<int64_t> slots(counted.keys.size());
  counted.find(index, slots.data());
  UncountedKeys uncounted(counted, slots.data());
  if (uncounted.need_growth(index)) return {};
  Tensor results = allocate_zeros(keys, {call.num_keys}, ScalarType::Long);

  const int64_t stamp = ++*index.clock;
  // Write the count of key k in its entry, and the result; `is_new` says that it had no entry.
  auto* const result = results.mutable_data_ptr<int64_t>();
  const auto count_key = [&](const HashTable& table, int64_t k, bool is_new) {
    const int64_t uses = call.uses[counted.positions[k]];
    result[counted.positions[k]] = uses;
    if (slots[k] == kNoSlot) return;
    int64_t* entry = table.entry(slots[k]);
    entry[HashEntry::kStamp] = stamp;
    if (!is_new) result[counted.positions[k]] = add_uses(entry[HashEntry::kScore], uses);
    entry[HashEntry::kScore] = result[counted.positions[k]];
  };
  for (int64_t t = 0; t < index.num_tables; ++t) {
    const int64_t num_keys = counted.offsets[t + 1] - counted.offsets[t];
    index.counter(t, HashCounter::kLookups) += num_keys;
    index.counter(t, HashCounter::kHits) +=
        num_keys - (uncounted.offsets[t + 1] - uncounted.offsets[t]);
    const HashTable table = index.table(t);
    for (int64_t k = counted.offsets[t]; k < counted.offsets[t + 1]; ++k) {
      if (slots[k] != kNoSlot) count_key(table, k, /*is_new=*/false);
    }
  }
  // All hits have the stamp of this call now, so that no new key evicts them. The order "lru" reads
  // no totals.
  insert_misses(index, scoring, /*must_compete=*/false,
                Misses(index.num_tables, uncounted.offsets.data(), /*admitted=*/nullptr),
                {counted.keys.data(), uncounted.key_indices.data(), /*totals=*/nullptr,
                 uncounted.slots.data(), uncounted.status.data(), /*evicted=*/nullptr});
  for (int64_t t = 0; t < index.num_tables; ++t) {
    const HashTable table = index.table(t);
    for (int64_t miss = uncounted.offsets[t]; miss < uncounted.offsets[t + 1]; ++miss) {
      const int64_t k = uncounted.key_indices[miss];
      slots[k] = uncounted.slots[miss];
      count_key(table, k, /*is_new=*/true);
    }
  }
  return {results};
}

// The arguments of sketch_count_, checked; the tensors own the memory.
struct SketchInputs : KeysToCount {
  const SketchLayout* layout;  // [T]

  SketchInputs(const char* op, const Tensor& counters, const Tensor& layout_, const Tensor& keys_,
               const Tensor& uses_, const Tensor& tables_)
      : KeysToCount(op, keys_, uses_, tables_) {
    STD_TORCH_CHECK(counters.dim() == 1 && counters.is_contiguous(), op,
                    ": counters must be a contiguous vector");
    check_dtype(op, "layout", layout_, ScalarType::Long, "int64");
    STD_TORCH_CHECK(
        layout_.dim() == 2 && layout_.size(1) == kSketchColumns && layout_.is_contiguous(), op,
        ": layout must be a contiguous [T, ", kSketchColumns, "] tensor");
    layout = static_cast<const SketchLayout*>(layout_.const_data_ptr());
    for (int64_t t = 0; t < layout_.size(0); ++t) check_sketch(op, t, counters.numel());
    for (int64_t i = 0; i < num_keys; ++i) {
      STD_TORCH_CHECK(tables[i] >= 0 && tables[i] < layout_.size(0), op,
                      ": tables must hold rows of layout, in [0, ", layout_.size(0), "), got ",
                      tables[i]);
    }
  }

  // Check that a sketch lies inside the counters.
  void check_sketch(const char* op, int64_t table, int64_t num_counters) const {
    const SketchLayout& sketch = layout[table];
    STD_TORCH_CHECK(sketch.depth == 0 ||
                        (sketch.depth > 0 && sketch.begin >= 0 && sketch.begin <= num_counters &&
                         sketch.width >= 1 && sketch.width <= INT32_MAX &&
                         sketch.depth <= (num_counters - sketch.begin) / sketch.width),
                    op, ": layout must place the sketch of table ", table, " inside the ",
                    num_counters, " counters");
  }
};

// Call `visit(counter)` with the counter of key i in each row of its sketch.
template <class C, class Visit>
void for_each_counter(const SketchInputs& inputs, C* counters, int64_t i, const Visit& visit) {
  constexpr uint64_t kLow31Bits = 0x7FFFFFFF;
  const SketchLayout& sketch = inputs.layout[inputs.tables[i]];
  const uint64_t hash =
      mix(static_cast<uint64_t>(inputs.keys[i]) ^ static_cast<uint64_t>(sketch.hash_key));
  const uint64_t first = hash & kLow31Bits, step = (hash >> 33) | 1;
  C* row_counters = counters + sketch.begin;
  for (int64_t row = 0; row < sketch.depth; ++row, row_counters += sketch.width) {
    const uint64_t fraction = (first + static_cast<uint64_t>(row) * step) & kLow31Bits;
    visit(row_counters[(fraction * static_cast<uint64_t>(sketch.width)) >> 31]);
  }
}

// Write the new count of each key to `counts`, then raise the counters: all keys are counted by
// the state before the batch.
template <class C>
void count_keys(const SketchInputs& inputs, C* counters, int64_t* counts) {
  parallel_balanced(inputs.num_keys, kGrain, kUnitCost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kKeysAhead < end) {
        for_each_counter(inputs, counters, i + kKeysAhead,
                         [](const C& counter) { __builtin_prefetch(&counter, 1); });
      }
      const int64_t threshold = inputs.layout[inputs.tables[i]].threshold;
      int64_t seen = threshold;
      for_each_counter(inputs, counters, i, [&](const C& counter) {
        seen = std::min(seen, static_cast<int64_t>(counter));
      });
      // The minimum is taken before the sum, which could exceed int64 without it. Unsigned numbers
      // wrap where negative counters or thresholds, which are not checked, would overflow.
      const uint64_t room = static_cast<uint64_t>(threshold) - static_cast<uint64_t>(seen);
      const int64_t added = std::min(inputs.uses[i], static_cast<int64_t>(room));
      counts[i] = static_cast<int64_t>(static_cast<uint64_t>(seen) + static_cast<uint64_t>(added));
    }
  });
  for (int64_t i = 0; i < inputs.num_keys; ++i) {
    const C count = static_cast<C>(counts[i]);
    for_each_counter(inputs, counters, i, [&](C& counter) { counter = std::max(counter, count); });
  }
}

// Count keys, and return their counts so far, int64 [L], at most the threshold of their table,
// which is the count of all keys of a table of depth 0. Counters, uses and thresholds must be
// >= 0 and thresholds numbers of the dtype of `counters`; neither is checked. emblib/ops/hash.py
// has the other arguments.
Tensor sketch_count_(Tensor counters, const Tensor& layout, const Tensor& keys, const Tensor& uses,
                     const Tensor& tables) {
  const char* op = "sketch_count_";
  const SketchInputs inputs(op, counters, layout, keys, uses, tables);
  const ScalarType type = counters.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Byte || type == ScalarType::Int || type == ScalarType::Long,
                  op, ": counters must be uint8, int32 or int64, got ", dtype_name(type));
  Tensor counts = allocate(keys, {inputs.num_keys}, ScalarType::Long);
  auto* const results = counts.mutable_data_ptr<int64_t>();
  if (type == ScalarType::Byte) {
    count_keys(inputs, static_cast<uint8_t*>(counters.mutable_data_ptr()), results);
  } else if (type == ScalarType::Int) {
    count_keys(inputs, counters.mutable_data_ptr<int32_t>(), results);
  } else {
    count_keys(inputs, counters.mutable_data_ptr<int64_t>(), results);
  }
  return counts;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, hash_count_);
  EMB_IMPL(m, emb, sketch_count_);
}
