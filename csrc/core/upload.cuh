// Copies of small arrays to the device through the parameters of a kernel. They are in stream order
// and part of a captured graph, need no pinned memory, and the array may be freed at once: the
// driver has copied the parameters when the launch returns.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/row_slice.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kUploadThreads = 128;
// Words of 8 bytes of a launch: parameters have 4 KB everywhere, 32,764 bytes from CUDA 12.1 on.
inline constexpr int kFewWords = 480, kManyWords = 4000;

template <int kWords>
struct UploadWords {
  uint64_t word[kWords];
};

// What the first launch does besides, for an update that begins with it: fill a gradient with zeros
// and count the step. Without a finite gradient there is no step: it is not counted, and words from
// `first_of_step` on, the arguments of the update, are 0.
struct BeginStep {
  float* zeros = nullptr;  // aligned to 16 bytes
  int64_t num_zeros = 0;   // a multiple of 4
  double* step = nullptr;
  const bool* is_finite = nullptr;  // null for a gradient that is
  int64_t first_of_step = 0;
};

template <int kWords>
__global__ void __launch_bounds__(kUploadThreads)
    upload_kernel(const EMB_GRID_CONSTANT UploadWords<kWords> words, int count, uint64_t* to,
                  BeginStep begin) {
  const int64_t i = simt::global_thread();
  const bool is_finite = begin.is_finite == nullptr || *begin.is_finite;
  if (i < count) to[i] = is_finite || i < begin.first_of_step ? words.word[i] : 0;
  for (int64_t j = 4 * i; j < begin.num_zeros; j += 4 * simt::threads_in_grid()) {
    *reinterpret_cast<simt::Pack16*>(begin.zeros + j) = {};
  }
  if (i == 0 && begin.step != nullptr && is_finite) *begin.step += 1.0;
}

template <int kWords, class Launcher>
void upload_words(const Launcher& launcher, const uint64_t* from, int count, uint64_t* to,
                  const BeginStep& begin) {
  UploadWords<kWords> words;
  std::memcpy(words.word, from, static_cast<size_t>(count) * sizeof(uint64_t));
  const unsigned of_words = blocks_for(count, kUploadThreads, kWords);
  const unsigned of_zeros = blocks_for(begin.num_zeros / 4, kUploadThreads, launcher.blocks(16));
  launcher(upload_kernel<kWords>, of_words > of_zeros ? of_words : of_zeros, kUploadThreads, words,
           count, to, begin);
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

  // Start the copy to `to`, which has room for `words()`; at least one launch if `begin` has work.
  template <class Launcher>
  void start(const Launcher& launcher, uint64_t* to, BeginStep begin = {}) const {
    int64_t first = 0;
    while (first < words() || begin.step != nullptr || begin.num_zeros > 0) {
      const int64_t rest = words() - first;
      const int count = static_cast<int>(rest < kManyWords ? rest : kManyWords);
      if (count <= kFewWords) {
        upload_words<kFewWords>(launcher, words_.data() + first, count, to + first, begin);
      } else {
        upload_words<kManyWords>(launcher, words_.data() + first, count, to + first, begin);
      }
      first += count;
      begin = {nullptr, 0, nullptr, begin.is_finite, begin.first_of_step - count};
    }
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace emb::cuda
