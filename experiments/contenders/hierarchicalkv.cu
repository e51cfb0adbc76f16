// A C interface of HierarchicalKV's table of 64-bit keys and float rows, which hierarchicalkv.py
// calls. The library itself is not part of this repository; docs/peers.md says how to build both.
//   nvcc -O3 -std=c++17 -arch=native -shared -Xcompiler -fPIC -I HierarchicalKV/include
//        -o libhierarchicalkv.so experiments/contenders/hierarchicalkv.cu
// All pointers are to device memory, except those to one size, which are to host memory. Every call
// goes to the given stream. Keys of a call may repeat; equal keys then have equal values. Functions
// that return int return 0, or 1 after an exception, whose message hkv_error returns in this
// thread.

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>

#include "merlin_hashtable.cuh"

namespace {

using Table =
    nv::merlin::HashTable<std::uint64_t, float, std::uint64_t, nv::merlin::EvictStrategy::kLru>;

thread_local std::string error_message;

template <typename Function>
int catch_exceptions(Function function) {
  try {
    function();
    return 0;
  } catch (const std::exception& error) {
    error_message = error.what();
    return 1;
  }
}

}  // namespace

extern "C" {

const char* hkv_error() { return error_message.c_str(); }

// Returns a table of `slots` slots, a power of two, all in device memory; null after an error.
void* hkv_create(std::size_t slots, std::size_t dim, int device) {
  Table* table = nullptr;
  const int failed = catch_exceptions([&] {
    nv::merlin::HashTableOptions options;
    options.init_capacity = slots;
    options.max_capacity = slots;
    options.max_hbm_for_vectors = slots * dim * sizeof(float);
    options.dim = dim;
    options.max_load_factor = 1.0f;
    options.device_id = device;
    table = new Table();
    table->init(options);
  });
  if (failed) {
    delete table;
    return nullptr;
  }
  return table;
}

void hkv_destroy(void* table) { delete static_cast<Table*>(table); }

int hkv_size(void* table, std::size_t* size, cudaStream_t stream) {
  return catch_exceptions([&] { *size = static_cast<Table*>(table)->size(stream); });
}

int hkv_insert_or_assign(void* table, std::size_t n, const std::uint64_t* keys, const float* values,
                         cudaStream_t stream) {
  return catch_exceptions(
      [&] { static_cast<Table*>(table)->insert_or_assign(n, keys, values, nullptr, stream); });
}

int hkv_find(void* table, std::size_t n, const std::uint64_t* keys, float* values, bool* found,
             cudaStream_t stream) {
  return catch_exceptions(
      [&] { static_cast<Table*>(table)->find(n, keys, values, found, nullptr, stream); });
}

// Like hkv_find, but writes the addresses of the rows instead of their values.
int hkv_find_rows(void* table, std::size_t n, const std::uint64_t* keys, float** rows, bool* found,
                  cudaStream_t stream) {
  return catch_exceptions(
      [&] { static_cast<Table*>(table)->find(n, keys, rows, found, nullptr, stream); });
}

// On entry `values` holds the initial rows of absent keys; on return, the rows of all keys.
int hkv_find_or_insert(void* table, std::size_t n, const std::uint64_t* keys, float* values,
                       cudaStream_t stream) {
  return catch_exceptions(
      [&] { static_cast<Table*>(table)->find_or_insert(n, keys, values, nullptr, stream); });
}

int hkv_find_or_insert_rows(void* table, std::size_t n, const std::uint64_t* keys, float** rows,
                            bool* found, cudaStream_t stream) {
  return catch_exceptions(
      [&] { static_cast<Table*>(table)->find_or_insert(n, keys, rows, found, nullptr, stream); });
}

// `evicted`, `evicted_values` and `evicted_scores` have room for n entries; `count` are written.
int hkv_insert_and_evict(void* table, std::size_t n, const std::uint64_t* keys, const float* values,
                         std::uint64_t* evicted, float* evicted_values,
                         std::uint64_t* evicted_scores, std::size_t* count, cudaStream_t stream) {
  return catch_exceptions([&] {
    *count = static_cast<Table*>(table)->insert_and_evict(n, keys, values, nullptr, evicted,
                                                          evicted_values, evicted_scores, stream);
  });
}

int hkv_erase(void* table, std::size_t n, const std::uint64_t* keys, cudaStream_t stream) {
  return catch_exceptions([&] { static_cast<Table*>(table)->erase(n, keys, stream); });
}

}  // extern "C"
