// Parallel loops on torch's intra-op threads. Work is divided by cost, not by the number of items,
// and no result may depend on where it is divided. The functions return when all calls have
// returned. Several threads may call a `task` or `body` at once. It should not throw. After an
// exception, its thread makes no more calls; other threads make all of theirs. Then the loop
// throws: that exception if there was one task, else torch's std::runtime_error.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace emb {

// Return the number of threads that a loop may use, at least 1.
inline int num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

// Call `task(i)` for every i in [0, count). The calls may run on different threads. A thread that
// is already in a parallel loop makes all calls itself.
template <class Task>
void parallel_tasks(int64_t count, const Task& task) {
  if (count == 1) return task(int64_t{0});
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) task(i);
  });
}

// Return where part `part` of `parts` of [0, n) begins: 0 for part 0, n for part `parts`, else the
// first i with cost(i) >= floor(cost(n) * part / parts). `cost(i)` is the cost of [0, i). If it
// decreases but cost(n) >= 0, parts are still disjoint and complete, but not balanced.
template <class Cost>
int64_t split_point(int64_t n, int64_t part, int64_t parts, const Cost& cost) {
  if (part == 0) return 0;
  if (part == parts) return n;
  const int64_t target = cost(n) / parts * part + cost(n) % parts * part / parts;
  int64_t low = 0, high = n;
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (cost(middle) < target) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// The cost of parallel_balanced for items of equal cost, in items.
inline constexpr auto kUnitCost = [](int64_t i) { return i; };

// Divide [0, n) into ranges of about equal cost and call `body(begin, end)` for every range that is
// not empty. There is at most one range per thread, and at most one per `grain` of cost plus one.
// `cost(i)` is the cost of [0, i); if it decreases, as in offsets that are not checked yet, the
// ranges are still disjoint and complete.
template <class Cost, class Body>
void parallel_balanced(int64_t n, int64_t grain, const Cost& cost, const Body& body) {
  if (n == 0) return;
  const int64_t max_parts = cost(n) < 0 ? 1 : cost(n) / grain + 1;
  const int64_t parts = max_parts < num_threads() ? max_parts : num_threads();
  parallel_tasks(parts, [&](int64_t part) {
    const int64_t begin = split_point(n, part, parts, cost);
    const int64_t end = split_point(n, part + 1, parts, cost);
    if (begin < end) body(begin, end);
  });
}

}  // namespace emb
