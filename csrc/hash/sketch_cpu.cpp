// `sketch_count_` on the CPU: count-min sketches of missing keys. emblib/dynamic/admission.py has
// the rules, emblib/ops/hash.py the arguments.
#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "core/check.h"
#include "core/parallel.h"
#include "core/random.h"
#include "hash/args.h"

namespace emb {
namespace {

constexpr int64_t kGrain = 1024;    // grain of parallel_balanced, in keys
constexpr int64_t kKeysAhead = 16;  // keys between the prefetch of counters and their use

// The arguments of the op, checked; the tensors own the memory.
struct SketchInputs {
  const SketchLayout* layout;  // [T]
  const int64_t* keys;         // [L]
  const int64_t* key_counts;   // [L], uses of each key
  const int64_t* tables;       // [L], the table of each key
  int64_t num_keys;            // L

  SketchInputs(const char* op, const Tensor& counters, const Tensor& layout_, const Tensor& keys_,
               const Tensor& key_counts_, const Tensor& tables_) {
    STD_TORCH_CHECK(counters.dim() == 1 && counters.is_contiguous(), op,
                    ": counters must be a contiguous vector");
    check_dtype(op, "layout", layout_, ScalarType::Long, "int64");
    STD_TORCH_CHECK(
        layout_.dim() == 2 && layout_.size(1) == kSketchColumns && layout_.is_contiguous(), op,
        ": layout must be a contiguous [T, ", kSketchColumns, "] tensor");
    num_keys = keys_.numel();
    const auto int64_vector = [&](const char* name, const Tensor& tensor) {
      check_dtype(op, name, tensor, ScalarType::Long, "int64");
      STD_TORCH_CHECK(tensor.dim() == 1 && tensor.numel() == num_keys && tensor.is_contiguous(), op,
                      ": ", name, " must be a contiguous vector of one number per key");
      return tensor.const_data_ptr<int64_t>();
    };
    layout = static_cast<const SketchLayout*>(layout_.const_data_ptr());
    keys = int64_vector("keys", keys_);
    key_counts = int64_vector("counts", key_counts_);
    tables = int64_vector("tables", tables_);
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
      const int64_t added = std::min(inputs.key_counts[i], static_cast<int64_t>(room));
      counts[i] = static_cast<int64_t>(static_cast<uint64_t>(seen) + static_cast<uint64_t>(added));
    }
  });
  for (int64_t i = 0; i < inputs.num_keys; ++i) {
    const C count = static_cast<C>(counts[i]);
    for_each_counter(inputs, counters, i, [&](C& counter) { counter = std::max(counter, count); });
  }
}

// Count keys, and return their counts so far, int64 [L], at most the threshold of their table,
// which is the count of all keys of a table of depth 0. Counters, key_counts and thresholds must be
// >= 0 and thresholds numbers of the dtype of `counters`; neither is checked. emblib/ops/hash.py
// has the other arguments.
Tensor sketch_count_(Tensor counters, const Tensor& layout, const Tensor& keys,
                     const Tensor& key_counts, const Tensor& tables) {
  const char* op = "sketch_count_";
  const SketchInputs inputs(op, counters, layout, keys, key_counts, tables);
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

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, sketch_count_); }
