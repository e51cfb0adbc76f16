// Parallel loops on torch's intra-op threads. Kernels split work by cost, not by count, and no
// result depends on where it is split.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace emb {

inline int num_threads() { return static_cast<int>(torch::stable::get_num_threads()); }

// Call `task(i)` for i in [0, count) on several threads; `task` must not throw.
template <class Task>
void parallel_tasks(int64_t count, const Task& task) {
  if (count == 1) return task(int64_t{0});
  torch::stable::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) task(i);
  });
}

// Return the first i in [0, n] with cost(i) >= part/parts of cost(n); `cost` never decreases.
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

// Split [0, n) into ranges of equal cost, at most one per thread and of at least `grain` cost each,
// and call `body(begin, end)` for every range.
template <class Cost, class Body>
void parallel_balanced(int64_t n, int64_t grain, const Cost& cost, const Body& body) {
  if (n == 0) return;
  const int64_t max_parts = cost(n) / grain + 1;
  const int64_t parts = max_parts < num_threads() ? max_parts : num_threads();
  parallel_tasks(parts, [&](int64_t part) {
    const int64_t begin = split_point(n, part, parts, cost);
    const int64_t end = split_point(n, part + 1, parts, cost);
    if (begin < end) body(begin, end);
  });
}

}  // namespace emb
