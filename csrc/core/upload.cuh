// Copies of small arrays to the device through the parameters of a kernel. They are in stream order
// and part of a captured graph, need no pinned memory, and the array may be freed at once: the
// driver has copied the parameters when the launch returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kUploadThreads = 128;
// Words of 8 bytes of a launch: parameters have 4 KB everywhere, 32,764 bytes from CUDA 12.1 on.
inline constexpr int kFewWords = 480, kManyWords = 4000;

template <int kWords>
struct UploadWords {
  uint64_t word[kWords];
};

template <int kWords>
__global__ void __launch_bounds__(kUploadThreads)
    upload_kernel(const EMB_GRID_CONSTANT UploadWords<kWords> words, int count, uint64_t* to) {
  const int64_t i = simt::global_thread();
  if (i < count) to[i] = words.word[i];
}

template <int kWords, class Launcher>
void upload_words(const Launcher& launcher, const uint64_t* from, int count, uint64_t* to) {
  UploadWords<kWords> words;
  std::memcpy(words.word, from, static_cast<size_t>(count) * sizeof(uint64_t));
  const auto blocks = static_cast<unsigned>((count + kUploadThreads - 1) / kUploadThreads);
  launcher(upload_kernel<kWords>, blocks, kUploadThreads, words, count, to);
}

// Arrays of arguments that one launch, or one per `kManyWords` words, copies to the device.
class Upload {
 public:
  // Append an array; return where it will be, in words.
  template <class T>
  int64_t add(const std::vector<T>& items) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
    const auto first = static_cast<int64_t>(words_.size());
    words_.resize(words_.size() + items.size() * sizeof(T) / sizeof(uint64_t));
    if (!items.empty()) std::memcpy(words_.data() + first, items.data(), items.size() * sizeof(T));
    return first;
  }

  int64_t words() const { return static_cast<int64_t>(words_.size()); }

  // Start the copy to `to`, which has room for `words()`.
  template <class Launcher>
  void start(const Launcher& launcher, uint64_t* to) const {
    for (int64_t first = 0; first < words(); first += kManyWords) {
      const int64_t rest = words() - first;
      const int count = static_cast<int>(rest < kManyWords ? rest : kManyWords);
      if (count <= kFewWords) {
        upload_words<kFewWords>(launcher, words_.data() + first, count, to + first);
      } else {
        upload_words<kManyWords>(launcher, words_.data() + first, count, to + first);
      }
    }
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace emb::cuda
