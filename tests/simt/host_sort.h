// The sort under `group` on the host, in place of CUB: the same input and output buffers.
#pragma once

#include <algorithm>
#include <numeric>
#include <vector>

#include "group/segments.cuh"

namespace emb::cuda {

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
  HostSort(int64_t n, uint64_t no_group_key, int32_t* sorted_positions)
      : keys_(n), sorted_keys_(n), positions_(n), range_counts_(2 * kMaxRanges) {
    buffers = {{keys_.data(), sorted_keys_.data(), positions_.data(), sorted_positions, n,
                static_cast<Key>(no_group_key)},
               range_counts_.data()};
  }

  void run() { host_sort<Key>(buffers); }

  SortBuffers<Key> buffers;

 private:
  std::vector<Key> keys_, sorted_keys_;
  std::vector<int32_t> positions_, range_counts_;
};

}  // namespace emb::cuda
