// Scratch memory on the host for an op of several steps: the counterpart of DeviceWork.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "driver.h"

namespace emb::cuda {

class HostWork {
 public:
  const simt::HostLauncher& launcher() const { return launcher_; }

  // Allocate exactly the requested size, for the sanitizer, filled with a value that no kernel
  // writes.
  template <class T>
  T* scratch(int64_t n) {
    const auto size = n * sizeof(T);
    kept_.push_back(std::make_unique<uint8_t[]>(size));
    uint8_t* bytes = kept_.back().get();
    std::fill(bytes, bytes + size, uint8_t{0xa5});
    return reinterpret_cast<T*>(bytes);
  }

 private:
  simt::HostLauncher launcher_;
  std::vector<std::unique_ptr<uint8_t[]>> kept_;
};

}  // namespace emb::cuda
