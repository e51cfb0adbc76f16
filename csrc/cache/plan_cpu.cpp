// `cache_plan_`, `cache_evictions`, `cache_locate` and `cache_lookup_slots` on the CPU. A plan
// checks its input, probes the rows in parallel (probe_all), groups the misses by set, and admits
// them set by set in parallel (admit_all); plan_batch then adds the batch to the counters. The
// kernels are in plan_kernels.cpp.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <memory>
#include <tuple>
#include <vector>

#include "cache/args.h"
#include "cache/check.h"
#include "cache/entries.h"
#include "core/isa.h"
#include "core/parallel.h"
#include "group/group_items.h"

namespace emb {

EMB_SELECT_KERNELS(CachePlanKernels, kCachePlanKernels, plan_kernels)

namespace {

// The grains of parallel loops and the cost are not measured.
constexpr int64_t kPlanGrain = 2048;              // in rows or misses
constexpr int64_t kLookupGrain = 8 * kPlanGrain;  // in lookups, which copy one number each
constexpr int64_t kSetCost = 4;                   // cost of a set with misses, in misses

// The distinct rows of a batch, ascending. The rows from position `first_cacheable` on are
// cacheable.
struct BatchRows {
  const int64_t* rows;      // [num_rows]
  const int32_t* segments;  // [num_rows + 1]; null if lookups are not counted
  int64_t first_cacheable, num_rows;

  int64_t num_cacheable() const { return num_rows - first_cacheable; }
  // Return the number of chunks into which the cacheable rows are divided: one per thread, but
  // fewer if a chunk would have less than kPlanGrain rows, and at least one.
  int64_t num_chunks() const {
    return std::clamp<int64_t>(num_cacheable() / kPlanGrain, 1, num_threads());
  }

  // Return the position of the first row that is at least `row`.
  int64_t lower_bound(int64_t row) const {
    return std::lower_bound(rows, rows + num_rows, row) - rows;
  }
  // Divide the cacheable rows into num_chunks() chunks of about equal size. Return the positions at
  // which they begin, and then num_rows.
  std::vector<int64_t> chunk_bounds() const {
    const int64_t n = num_chunks();
    std::vector<int64_t> bounds(n + 1);
    for (int64_t c = 0; c <= n; ++c) bounds[c] = first_cacheable + num_cacheable() * c / n;
    return bounds;
  }
};

// Return the first `count` of the n rows of a batch after checking them. Throws unless `count` is
// in [0, n], these rows are distinct, ascending and in [0, end_of_rows), and their segments, if not
// null, are not negative and do not decrease. The caller must have checked `tables`.
BatchRows check_batch(const char* op, const Tensor& tables, const int64_t* rows,
                      const int32_t* segments, int64_t n, int64_t count) {
  const Feature* table = feature_array(tables);
  const int num_tables = static_cast<int>(tables.size(0));
  BatchRows batch{rows, segments, 0, count};
  STD_TORCH_CHECK(count >= 0 && count <= n, op, ": count must be in [0, entries of rows = ", n,
                  "], got ", count);
  // A negative number, or a negative difference of neighbours, sets the sign bit. So one check
  // after the loops suffices, and they have no branches. Unsigned, because differences may
  // overflow.
  uint64_t sign_bits = 0;
  uint32_t segment_sign_bits = 0;
  for (int64_t u = 1; u < batch.num_rows; ++u) {
    const auto row = static_cast<uint64_t>(batch.rows[u]);
    sign_bits |= row | (row - batch.rows[u - 1] - 1);
  }
  if (batch.segments != nullptr) {
    segment_sign_bits = batch.segments[0];
    for (int64_t u = 0; u < batch.num_rows; ++u) {
      const auto end = static_cast<uint32_t>(batch.segments[u + 1]);
      segment_sign_bits |= end | (end - batch.segments[u]);
    }
  }
  STD_TORCH_CHECK(
      sign_bits >> 63 == 0 && segment_sign_bits >> 31 == 0 &&
          (batch.num_rows == 0 ||
           (batch.rows[0] >= 0 && batch.rows[batch.num_rows - 1] < end_of_rows(table, num_tables))),
      op, ": rows must be distinct, ascending and of the tables, and segments must ",
      "not decrease: pass what tbe_group returns");
  batch.first_cacheable = batch.lower_bound(first_cacheable_row(table, num_tables));
  return batch;
}

// Write `value` to the entries of `out`, [n], of rows that are not cacheable, and to the entries
// after the last row.
template <class T>
void fill_uncacheable_and_tail(T* out, const BatchRows& batch, int64_t n, int64_t value) {
  std::fill(out, out + batch.first_cacheable, static_cast<T>(value));
  std::fill(out + batch.num_rows, out + n, static_cast<T>(value));
}

// Adds a batch to `counters`, [T + 1, kCacheCounters]: a row per table, then the totals. Call
// `reserve` before the plan changes anything: if a plan ran out of memory after it had changed
// tags, there would be tags whose rows are never fetched.
class BatchCounters {
 public:
  BatchCounters(int64_t* counters, const Feature* tables, int num_tables)
      : counters_(counters), tables_(tables), num_tables_(num_tables) {}

  // Allocate all memory that counting the batch takes. Call it once.
  void reserve(const BatchRows& batch) {
    max_chunks_ = batch.num_chunks();  // there are no more misses than cacheable rows
    partial_counters_.assign(max_chunks_ * (num_tables_ + 1) * kCacheCounters, 0);
  }

  // Count the call, and the distinct rows and the lookups of tables with a cache.
  void add_lookups(const BatchRows& batch) {
    add(num_tables_, CacheCounter::kCalls, 1);
    for (int t = first_cached_table(tables_, num_tables_); t < num_tables_; ++t) {
      const int64_t begin = batch.lower_bound(tables_[t].row_base);
      const int64_t end = batch.lower_bound(tables_[t].row_base + tables_[t].rows);
      if (begin == end) continue;
      add(t, CacheCounter::kCalls, 1);
      add_both(t, CacheCounter::kUnique, end - begin);
      add_both(t, CacheCounter::kLookups, batch.segments[end] - batch.segments[begin]);
    }
  }

  // Count the n misses of a plan, which ascend by row, and the rows that they evict. `reserve` must
  // have been called.
  void add_misses(const CachePlanArgs& args, const Miss* misses, int64_t n) {
    const int64_t num_chunks = std::clamp<int64_t>(n / kPlanGrain, 1, max_chunks_);
    const int64_t num_counters = (num_tables_ + 1) * kCacheCounters;
    parallel_tasks(num_chunks, [&](int64_t c) {
      BatchCounters partial(partial_counters_.data() + c * num_counters, tables_, num_tables_);
      partial.add_chunk(args, misses + n * c / num_chunks, misses + n * (c + 1) / num_chunks);
    });
    for (int64_t i = 0; i < num_chunks * num_counters; ++i)
      counters_[i % num_counters] += partial_counters_[i];
  }

 private:
  void add(int table, CacheCounter::Column counter, int64_t n) {
    counters_[table * kCacheCounters + counter] += n;
  }
  // Add to the counter of a table and to the total.
  void add_both(int table, CacheCounter::Column counter, int64_t n) {
    add(table, counter, n);
    add(num_tables_, counter, n);
  }

  // Count the misses [begin, end), which ascend by row.
  void add_chunk(const CachePlanArgs& args, const Miss* begin, const Miss* end) {
    int table = begin == end ? 0 : find_table(tables_, num_tables_, args.rows[begin->position]);
    for (const Miss* miss = begin; miss != end; ++miss) {
      const int64_t u = miss->position, num_lookups = args.segments[u + 1] - args.segments[u];
      while (args.rows[u] >= tables_[table].row_base + tables_[table].rows) ++table;
      const bool is_conflict = args.row_slots[u] < 0;
      add_both(table, CacheCounter::kUniqueMisses, 1);
      add_both(table, CacheCounter::kLookupMisses, num_lookups);
      add_both(table, CacheCounter::kConflictUniqueMisses, is_conflict);
      add_both(table, CacheCounter::kConflictMisses, is_conflict ? num_lookups : 0);
      if (args.evicted[u] == kNoRow || args.evicted[u] == kNoMove) continue;
      const int evicted_table = find_table(tables_, num_tables_, args.evicted[u]);
      if (evicted_table >= 0) add_both(evicted_table, CacheCounter::kWriteBacks, 1);
    }
  }

  int64_t* counters_;
  const Feature* tables_;
  int num_tables_;
  int64_t max_chunks_ = 1;
  // [max_chunks_, T + 1, kCacheCounters]: the counters of each chunk of misses.
  std::vector<int64_t> partial_counters_;
};

// A copy of the sets of a batch, made before its plan; `restore` undoes the plan. It saves all that
// CachePlanKernels::probe and admit write but their outputs: tags, stamps and, for LFU, counts.
// `args` and `batch` must live as long as the object.
class SavedSets {
 public:
  SavedSets(const CachePlanArgs& args, const BatchRows& batch) : args_(args), batch_(batch) {
    const CacheState& cache = args.cache;
    for (int64_t u = batch.first_cacheable; u < batch.num_rows; ++u) {
      sets_.push_back(set_of(batch.rows[u], cache.num_sets));
    }
    std::sort(sets_.begin(), sets_.end());
    sets_.erase(std::unique(sets_.begin(), sets_.end()), sets_.end());
    for (const int64_t set : sets_) {
      tags_.insert(tags_.end(), cache.tags + set * kWays, cache.tags + (set + 1) * kWays);
      usage_words_.insert(usage_words_.end(), cache.stamps + set * kWays,
                          cache.stamps + (set + 1) * kWays);
    }
    if (cache.policy != CachePolicy::kLfu) return;
    for (int64_t u = batch.first_cacheable; u < batch.num_rows; ++u) {
      counts_.push_back(cache.counts[batch.rows[u] - cache.first_row]);
    }
    for (const int64_t tag : tags_) {
      if (has_count(tag)) counts_.push_back(cache.counts[tag - cache.first_row]);
    }
  }

  // Write the saved values back to the cache.
  void restore() const {
    const CacheState& cache = args_.cache;
    for (size_t i = 0; i < sets_.size(); ++i) {
      std::copy_n(tags_.data() + i * kWays, kWays, cache.tags + sets_[i] * kWays);
      std::copy_n(usage_words_.data() + i * kWays, kWays, cache.stamps + sets_[i] * kWays);
    }
    if (cache.policy != CachePolicy::kLfu) return;
    const int32_t* next_count = counts_.data();
    for (int64_t u = batch_.first_cacheable; u < batch_.num_rows; ++u) {
      cache.counts[batch_.rows[u] - cache.first_row] = *next_count++;
    }
    for (const int64_t tag : tags_) {
      if (has_count(tag)) cache.counts[tag - cache.first_row] = *next_count++;
    }
  }

 private:
  // Return whether a tag is a cacheable row, and so has an entry in `counts`.
  bool has_count(int64_t tag) const { return tag >= args_.cache.first_row && tag < args_.end_row; }

  const CachePlanArgs& args_;
  const BatchRows& batch_;
  std::vector<int64_t> sets_, tags_, usage_words_;
  std::vector<int32_t> counts_;  // LFU: counts of the batch's rows, then of the rows in its sets
};

// Probe all cacheable rows, which stamps the hits. List the misses in `misses`, ascending by
// position; it must have room for all cacheable rows. Return, for each chunk of chunk_bounds, the
// index in `misses` at which its misses begin, and then the number of misses.
std::vector<int64_t> probe_all(const CachePlanArgs& args, const BatchRows& batch, Miss* misses) {
  const std::vector<int64_t> bounds = batch.chunk_bounds();
  const int64_t num_chunks = static_cast<int64_t>(bounds.size()) - 1;
  // In the first loop, element c + 1 is the number of misses of chunk c.
  std::vector<int64_t> miss_begins(num_chunks + 1, 0);
  parallel_tasks(num_chunks, [&](int64_t c) {
    miss_begins[c + 1] = plan_kernels().probe(args, bounds[c], bounds[c + 1],
                                              misses + bounds[c] - batch.first_cacheable);
  });
  for (int64_t c = 0; c < num_chunks; ++c) {
    std::copy_n(misses + bounds[c] - batch.first_cacheable, miss_begins[c + 1],
                misses + miss_begins[c]);
    miss_begins[c + 1] += miss_begins[c];
  }
  return miss_begins;
}

// Group the misses by set, and assign ways to the misses of every set; `miss_begins` is the result
// of probe_all. Throws std::bad_alloc before any way is assigned.
void admit_all(const CachePlanArgs& args, const Miss* misses,
               const std::vector<int64_t>& miss_begins) {
  const int64_t n = miss_begins.back();
  const std::unique_ptr<int32_t[]> sets(new int32_t[n]), permutation(new int32_t[n]);
  const std::unique_ptr<int32_t[]> segments(new int32_t[n + 1]);
  int32_t num_groups = 0;
  const auto put_sets = [&](int64_t chunk, const auto& put) {
    for (int64_t i = miss_begins[chunk]; i < miss_begins[chunk + 1]; ++i) put(i, misses[i].set);
  };
  const GroupOutput out{.unique = sets.get(),
                        .unique_is_int64 = false,
                        .segments = segments.get(),
                        .permutation = permutation.get(),
                        .num_groups = &num_groups};
  group_items<Item32>(n, args.cache.num_sets, miss_begins, put_sets, out, [](int64_t, int64_t) {});
  const MissGroups groups{misses, sets.get(), segments.get(), permutation.get()};
  parallel_balanced(
      num_groups, kPlanGrain, [&](int64_t g) { return kSetCost * g + segments[g]; },
      [&](int64_t begin, int64_t end) { plan_kernels().admit(args, groups, begin, end); });
}

// A plan, and its output: row_slots, int32 [L], and evicted, int64 [L]. The first U elements are
// those of CachePlanArgs; the others are -1 and kNoMove. The constructor checks the contents of
// tables, rows, segments and count, and throws if they are invalid; it changes nothing. The object
// points into the tensors of `call`.
struct HostPlan {
  BatchRows batch;
  Tensor row_slots, evicted;
  CachePlanArgs args;
  const Feature* tables;
  int num_tables;

  explicit HostPlan(const PlanCall& call)
      : batch(check_contents(call)),
        row_slots(allocate(call.tags, {call.n}, ScalarType::Int)),
        evicted(allocate(call.tags, {call.n}, ScalarType::Long)),
        tables(feature_array(call.tables)),
        num_tables(call.num_tables()) {
    const int64_t first_row = first_cacheable_row(tables, num_tables);
    STD_TORCH_CHECK(call.cache.policy == CachePolicy::kLru || first_row == INT64_MAX ||
                        call.num_counts >= end_of_rows(tables, num_tables) - first_row,
                    call.op, ": counts must have one entry per cached row = ",
                    end_of_rows(tables, num_tables) - first_row, ", got ", call.num_counts);
    STD_TORCH_CHECK(call.cache.num_sets > 0 || batch.first_cacheable == batch.num_rows, call.op,
                    ": a cache needs at least one set");
    args = {call.cache,
            call.clock[CacheClock::kNow],
            std::min(call.clock[CacheClock::kOldest], call.clock[CacheClock::kNow]),
            batch.rows,
            batch.segments,
            row_slots.mutable_data_ptr<int32_t>(),
            evicted.mutable_data_ptr<int64_t>(),
            end_of_rows(tables, num_tables)};
    args.cache.first_row = first_row;
    fill_uncacheable_and_tail(args.row_slots, batch, call.n, -1);
    fill_uncacheable_and_tail(args.evicted, batch, call.n, kNoMove);
  }

  // Check `tables` and the rows of a call; return the rows.
  static BatchRows check_contents(const PlanCall& call) {
    check_tables(call.op, call.tables);
    return check_batch(call.op, call.tables, call.rows, call.segments, call.n, *call.count);
  }

  // Plan, which changes the cache. List the misses in `misses`, which has room for all cacheable
  // rows, and return their number.
  int64_t run(Miss* misses) const {
    const std::vector<int64_t> miss_begins = probe_all(args, batch, misses);
    if (miss_begins.back() > 0) admit_all(args, misses, miss_begins);
    return miss_begins.back();
  }
};

}  // namespace

// The contract is in cache/entries.h.
std::tuple<Tensor, Tensor> plan_batch(const PlanCall& call) {
  const HostPlan plan(call);
  const std::unique_ptr<Miss[]> misses(new Miss[plan.batch.num_cacheable()]);
  BatchCounters counters(call.counters, plan.tables, plan.num_tables);
  counters.reserve(plan.batch);
  const int64_t num_misses = plan.run(misses.get());
  counters.add_lookups(plan.batch);
  counters.add_misses(plan.args, misses.get(), num_misses);
  return {plan.row_slots, plan.evicted};
}

namespace {

// Plan a batch: assign slots to its rows, and update tags, stamps, counts and counters in place.
// Return (row_slots, evicted), see plan_batch. No row moves: cache_move_ does that.
//   tags, stamps, counts   the cache, see CacheState; counts may be empty for LRU
//   counters               int64 [T + 1, kCacheCounters]
//   clock                  int64 [2], see CacheClock: the numbers of this batch and of the oldest
//                          batch in flight
//   tables                 int64 [T, 8], as check_tables requires
//   rows, segments, count  the distinct rows of the batch, as tbe_group returns them
//   policy                 a code of CachePolicy
std::tuple<Tensor, Tensor> cache_plan_(Tensor tags, Tensor stamps, Tensor counts, Tensor counters,
                                       const Tensor& clock, const Tensor& tables,
                                       const Tensor& rows, const Tensor& segments,
                                       const Tensor& count, int64_t policy) {
  PlanCall call("cache_plan_", tags, stamps, counts, counters, clock, tables, policy);
  call.set_rows(rows, segments, count);
  return plan_batch(call);
}

// Return `evicted`, int64 [L] as in HostPlan, of the plan that cache_plan_ would make for these
// arguments. After the op all arguments are unchanged. During the op the plan is made in place and
// undone, so no other op may use the cache meanwhile.
Tensor cache_evictions(Tensor tags, Tensor stamps, Tensor counts, Tensor counters,
                       const Tensor& clock, const Tensor& tables, const Tensor& rows,
                       const Tensor& segments, const Tensor& count, int64_t policy) {
  PlanCall call("cache_evictions", tags, stamps, counts, counters, clock, tables, policy);
  call.set_rows(rows, segments, count);
  const HostPlan plan(call);
  const std::unique_ptr<Miss[]> misses(new Miss[plan.batch.num_cacheable()]);
  const SavedSets saved_sets(plan.args, plan.batch);
  try {
    plan.run(misses.get());
  } catch (...) {  // e.g. std::bad_alloc
    saved_sets.restore();
    throw;
  }
  saved_sets.restore();
  return plan.evicted;
}

// Return the slot of each distinct row of a batch, int32 [L] as in HostPlan, -1 for a row that is
// not in the cache. Nothing changes. The arguments are as for cache_plan_.
Tensor cache_locate(const Tensor& tags, const Tensor& tables, const Tensor& rows,
                    const Tensor& count) {
  const char* op = "cache_locate";
  CachePlanArgs args{};
  args.cache.num_sets = check_tags(op, tags);
  check_rows(op, rows, count, tags);
  check_tables(op, tables);
  const BatchRows batch = check_batch(op, tables, rows.const_data_ptr<int64_t>(), nullptr,
                                      rows.numel(), *count.const_data_ptr<int32_t>());
  STD_TORCH_CHECK(args.cache.num_sets > 0 || batch.first_cacheable == batch.num_rows, op,
                  ": a cache needs at least one set");
  Tensor row_slots = allocate(rows, {rows.numel()}, ScalarType::Int);
  args.cache.tags = const_cast<int64_t*>(tags.const_data_ptr<int64_t>());  // read only
  args.rows = batch.rows;
  args.row_slots = row_slots.mutable_data_ptr<int32_t>();
  fill_uncacheable_and_tail(args.row_slots, batch, rows.numel(), -1);
  const std::vector<int64_t> bounds = batch.chunk_bounds();
  parallel_tasks(static_cast<int64_t>(bounds.size()) - 1, [&](int64_t c) {
    plan_kernels().locate(args, bounds[c], bounds[c + 1], nullptr);
  });
  return row_slots;
}

}  // namespace

// The contract is in cache/entries.h.
Tensor cache_lookup_slots(const Tensor& row_slots, const Tensor& segments, const Tensor& lookups,
                          const Tensor& count) {
  const char* op = "cache_lookup_slots";
  check_cache_tensor(op, "row_slots", row_slots, ScalarType::Int, row_slots);
  const int64_t n = lookups.numel();
  check_cache_numel(op, "segments", segments, ScalarType::Int, n + 1, row_slots);
  check_cache_numel(op, "lookups", lookups, ScalarType::Int, n, row_slots);
  check_cache_numel(op, "count", count, ScalarType::Int, 1, row_slots);
  const auto *segment = segments.const_data_ptr<int32_t>(),
             *position = lookups.const_data_ptr<int32_t>(),
             *slot = row_slots.const_data_ptr<int32_t>();
  const int64_t num_groups = *count.const_data_ptr<int32_t>();
  STD_TORCH_CHECK(num_groups >= 0 && num_groups <= n && num_groups <= row_slots.numel() &&
                      segment[num_groups] <= n,
                  op, ": count and segments must come from one call of tbe_group and row_slots ",
                  "must have an entry per row of it, got count ", num_groups);
  uint32_t sign_bits = segment[0];  // bit 31 is 1 if a number or difference below is negative
  for (int64_t g = 0; g < num_groups; ++g) {
    const auto end = static_cast<uint32_t>(segment[g + 1]);
    sign_bits |= end | (end - segment[g]);
  }
  for (int64_t j = 0; j < n; ++j) {
    sign_bits |= position[j] | (static_cast<uint32_t>(n) - 1 - position[j]);
  }
  STD_TORCH_CHECK(sign_bits >> 31 == 0, op,
                  ": segments and lookups must come from one call of tbe_group");
  Tensor slots = allocate(row_slots, {n}, ScalarType::Int);
  auto* out = slots.mutable_data_ptr<int32_t>();
  for (int64_t j = 0; j < segment[0]; ++j) out[position[j]] = -1;
  parallel_balanced(
      num_groups, kLookupGrain, [&](int64_t g) { return int64_t{segment[g]}; },
      [&](int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; ++g) {
          for (int32_t j = segment[g]; j < segment[g + 1]; ++j) out[position[j]] = slot[g];
        }
      });
  for (int64_t j = segment[num_groups]; j < n; ++j) out[position[j]] = -1;
  return slots;
}

}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, cache_plan_);
  EMB_IMPL(m, emb, cache_evictions);
  EMB_IMPL(m, emb, cache_locate);
  EMB_IMPL(m, emb, cache_lookup_slots);
}
