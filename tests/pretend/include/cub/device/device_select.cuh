// cub::DeviceSelect on the pretend GPU; see device_radix_sort.cuh.
#pragma once

#include "cub/device/device_radix_sort.cuh"

namespace cub {

struct DeviceSelect {
  template <class Key, class Values, class Value, class Count, class N>
  static cudaError_t UniqueByKey(void* scratch, size_t& bytes, const Key* keys, Values values,
                                 Key* keys_out, Value* values_out, Count* selected, N n,
                                 cudaStream_t stream) {
    if (scratch == nullptr) {
      bytes = pretend_scratch(n);
      return cudaSuccess;
    }
    if (const cudaError_t error = check_scratch(bytes, n)) return error;
    const size_t size = bytes;
    return pretend::enqueue(stream, "cub::DeviceSelect::UniqueByKey", [=] {
      pretend::note_read(keys, n * sizeof(Key));
      pretend::note_write(scratch, size);
      const std::vector<Key> k(keys, keys + n);
      std::memset(scratch, 0xc5, size);
      Count found = 0;
      for (long long i = 0; i < n; ++i) {
        if (i > 0 && k[i] == k[i - 1]) continue;
        keys_out[found] = k[i];
        values_out[found++] = values[i];
      }
      *selected = found;
    });
  }
};

}  // namespace cub
