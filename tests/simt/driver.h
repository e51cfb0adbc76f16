// Common code of the launchers of tests/simt. A launcher is an `extern "C"` function that takes one
// array of words (numbers and addresses, in the order of its Python wrapper), runs kernels on the
// emulated machine, and returns null or an error message. One small .cpp per feature.
#pragma once

#include <cstdint>
#include <exception>
#include <string>

#include "core/dtype.h"
#include "core/simt.cuh"

namespace emb::cuda {

// Reads the words of a call one by one.
class Words {
 public:
  explicit Words(const int64_t* words) : next_(words) {}

  int64_t number() { return *next_++; }
  template <class T>
  T* pointer() {
    return reinterpret_cast<T*>(number());
  }
  Dtype dtype() { return static_cast<Dtype>(number()); }
  // Read two words: address, and whether the numbers are int64.
  IndexArray indices() {
    const void* data = pointer<const void>();
    return {data, number() != 0};
  }

 private:
  const int64_t* next_;
};

// Run `body`; return the message of what it throws, or null.
template <class Body>
const char* return_errors(const Body& body) {
  static std::string message;
  try {
    body(simt::HostLauncher{});
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace emb::cuda
