// The sort of `group` on the host, in place of CUB: the same buffers in, the same buffers out.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "group/segments.cuh"

namespace emb::cuda {

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

  void run() {
    const int64_t n = buffers.n;
    std::vector<int32_t> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return keys_[a] < keys_[b]; });
    runs_ = 0;
    for (int64_t j = 0; j < n; ++j) {
      sorted_keys_[j] = keys_[order[j]];
      buffers.sorted_positions[j] = positions_[order[j]];
      if (j == 0 || sorted_keys_[j] != sorted_keys_[j - 1]) {
        run_keys_[runs_] = sorted_keys_[j];
        run_starts_[runs_++] = static_cast<int32_t>(j);
      }
    }
  }

  SortBuffers<Key> buffers;

 private:
  std::vector<Key> keys_, sorted_keys_, run_keys_;
  std::vector<int32_t> positions_, run_starts_;
  int32_t runs_ = 0;
};

}  // namespace emb::cuda
