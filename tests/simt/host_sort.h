// The sort of `group` on the host, in place of CUB: the same input and output buffers.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "group/segments.cuh"

namespace emb::cuda {

template <class Key>
void host_sort(const SortBuffers<Key>& in) {
  const std::vector<Key> keys(in.keys, in.keys + in.n);  // a copy: the runs may reuse the memory
  const std::vector<int32_t> positions(in.positions, in.positions + in.n);
  std::vector<int32_t> order(in.n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return keys[a] < keys[b]; });
  *in.runs = 0;
  for (int64_t j = 0; j < in.n; ++j) {
    in.sorted_keys[j] = keys[order[j]];
    in.sorted_positions[j] = positions[order[j]];
    if (j == 0 || in.sorted_keys[j] != in.sorted_keys[j - 1]) {
      in.run_keys[*in.runs] = in.sorted_keys[j];
      in.run_starts[(*in.runs)++] = static_cast<int32_t>(j);
    }
  }
}

template <class Key>
void host_sort(const SortPairs<Key>& in) {
  std::vector<int32_t> order(in.n);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return in.keys[a] < in.keys[b]; });
  for (int64_t j = 0; j < in.n; ++j) {
    in.sorted_keys[j] = in.keys[order[j]];
    in.sorted_positions[j] = in.positions[order[j]];
  }
}

template <class Key>
class HostSort {
 public:
  // `sorted_positions` is the op's output; everything else is scratch.
  HostSort(int64_t n, uint64_t limit, int32_t* sorted_positions)
      : keys_(n), sorted_keys_(n), run_keys_(n), positions_(n), run_starts_(n) {
    buffers = {keys_.data(),           sorted_keys_.data(), run_keys_.data(), positions_.data(),
               sorted_positions,       run_starts_.data(),  &runs_,           n,
               static_cast<Key>(limit)};
  }

  void run() { host_sort(buffers); }

  SortBuffers<Key> buffers;

 private:
  std::vector<Key> keys_, sorted_keys_, run_keys_;
  std::vector<int32_t> positions_, run_starts_;
  int32_t runs_ = 0;
};

}  // namespace emb::cuda
