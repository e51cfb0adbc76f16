// cub::DeviceRadixSort on the pretend GPU, as strict as its contract: a null scratch asks for the
// size, less scratch than that is an error, and the scratch holds garbage afterwards. Inputs are
// read when the stream reaches the sort.
#pragma once

#include <algorithm>
#include <cstring>
#include <numeric>
#include <type_traits>
#include <vector>

#include "cuda_runtime.h"

namespace cub {

inline size_t pretend_scratch(long long n) { return 512 + static_cast<size_t>(n) * 8; }

inline cudaError_t check_scratch(size_t bytes, long long n) {
  if (bytes >= pretend_scratch(n)) return cudaSuccess;
  return pretend::fail(cudaErrorInvalidValue, "CUB got " + std::to_string(bytes) +
                                                  " bytes of scratch and needs " +
                                                  std::to_string(pretend_scratch(n)));
}

struct DeviceRadixSort {
  template <class Key, class Value, class N>
  static cudaError_t SortPairs(void* scratch, size_t& bytes, const Key* keys, Key* sorted_keys,
                               const Value* values, Value* sorted_values, N n, int begin_bit,
                               int end_bit, cudaStream_t stream) {
    if (scratch == nullptr) {
      bytes = pretend_scratch(n);
      return cudaSuccess;
    }
    if (begin_bit < 0 || end_bit > static_cast<int>(sizeof(Key) * 8) || begin_bit > end_bit) {
      return pretend::fail(cudaErrorInvalidValue, "CUB cannot sort by these bits");
    }
    if (const cudaError_t error = check_scratch(bytes, n)) return error;
    const size_t size = bytes;
    return pretend::enqueue(stream, "cub::DeviceRadixSort::SortPairs", [=] {
      pretend::note_read(keys, n * sizeof(Key));
      pretend::note_read(values, n * sizeof(Value));
      pretend::note_write(scratch, size);
      const std::vector<Key> k(keys, keys + n);
      const std::vector<Value> v(values, values + n);
      std::memset(scratch, 0xc5, size);  // needs `size` bytes that may be written
      std::vector<long long> order(n);
      std::iota(order.begin(), order.end(), 0);
      const int width = end_bit - begin_bit;
      const auto mask =
          width >= static_cast<int>(sizeof(Key) * 8) ? ~Key{0} : Key((Key{1} << width) - 1);
      const auto digit = [&](long long i) { return Key(k[i] >> begin_bit & mask); };
      std::stable_sort(order.begin(), order.end(),
                       [&](long long a, long long b) { return digit(a) < digit(b); });
      for (long long j = 0; j < n; ++j) {
        sorted_keys[j] = k[order[j]];
        sorted_values[j] = v[order[j]];
      }
    });
  }
};

}  // namespace cub
