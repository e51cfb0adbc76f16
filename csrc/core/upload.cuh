// Copies small arrays from the host to the device through the parameters of a kernel. Such a copy
// runs in stream order, can be captured in a CUDA graph (whose replays copy the same words), and
// needs no pinned memory. The arrays may be freed as soon as the launch returns, because the driver
// has copied the parameters by then.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "core/row_slice.cuh"
#include "core/simt.cuh"

namespace emb::cuda {

inline constexpr int kUploadThreads = 128;
// Words of 8 bytes that one launch copies, at most. Kernel parameters may have 4 KB on every GPU
// and driver, and 32,764 bytes from CUDA 12.1 on.
inline constexpr int kFewWords = 480, kManyWords = 4000;

// The words of one launch, as a kernel parameter.
template <int kWords>
struct UploadWords {
  uint64_t word[kWords];
};

// Extra work of an upload before a backward pass or an update step; all pointers are to device
// memory. It fills `zeros` and counts the step. If the gradient of the batch is not finite, the
// step is skipped: it is not counted, and the uploaded words from `first_of_step` on, the arguments
// of the update, are written as 0. `zeros` is filled in any case.
struct BeginStep {
  float* zeros = nullptr;           // [num_zeros], filled with 0; aligned to 16 bytes
  int64_t num_zeros = 0;            // a multiple of 4; 0 if there is nothing to fill
  double* step = nullptr;           // [1], incremented unless skipped; null to count nothing
  const bool* is_finite = nullptr;  // [1]; null if the gradient is known to be finite
  int64_t first_of_step = 0;        // position among the uploaded words; <= 0: all of them
};

// Copy `num_words` words to device memory `to`, and do the work of `begin`. There may be at most
// kWords words, and at most as many as threads of the grid.
template <int kWords>
__global__ void __launch_bounds__(kUploadThreads)
    upload_kernel(const EMB_GRID_CONSTANT UploadWords<kWords> words, int num_words, uint64_t* to,
                  BeginStep begin) {
  const int64_t i = simt::global_thread();
  const bool is_finite = begin.is_finite == nullptr || *begin.is_finite;
  if (i < num_words) to[i] = is_finite || i < begin.first_of_step ? words.word[i] : 0;
  for (int64_t j = 4 * i; j < begin.num_zeros; j += 4 * simt::threads_in_grid()) {
    *reinterpret_cast<simt::Pack16*>(begin.zeros + j) = {};
  }
  if (i == 0 && begin.step != nullptr && is_finite) *begin.step += 1.0;
}

// Launch one upload of `num_words` <= kWords words from host memory `from` to device memory `to`.
template <int kWords, class Launcher>
void upload_words(const Launcher& launcher, const uint64_t* from, int num_words, uint64_t* to,
                  const BeginStep& begin) {
  UploadWords<kWords> words;
  std::copy_n(from, num_words, words.word);  // `from` may be null if there are none
  const unsigned word_blocks = blocks_for(num_words, kUploadThreads, kWords);
  const unsigned zero_blocks =
      blocks_for(begin.num_zeros / 4, kUploadThreads, launcher.blocks(kResidentBlocksPerSm / 2));
  launcher(upload_kernel<kWords>, word_blocks > zero_blocks ? word_blocks : zero_blocks,
           kUploadThreads, words, num_words, to, begin);
}

// A list of arrays that are copied to the device together: `add` every array, allocate `words()`
// words of device memory, then `start` the copy.
class Upload {
 public:
  // Append a copy of an array, which may be empty; its elements are whole words of 8 bytes. Return
  // its position in the device memory, in words.
  template <class T>
  int64_t add(const std::vector<T>& items) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
    const auto first = static_cast<int64_t>(words_.size());
    words_.resize(words_.size() + items.size() * sizeof(T) / sizeof(uint64_t));
    if (!items.empty()) std::memcpy(words_.data() + first, items.data(), items.size() * sizeof(T));
    return first;
  }

  // Return the number of words of all arrays.
  int64_t words() const { return static_cast<int64_t>(words_.size()); }

  // Start the copy to `to`, [words()] in device memory: one launch per kManyWords words; one if
  // there are no words but `begin` counts or fills; else none. The first launch does that work.
  // This object may be destroyed afterwards. `to` and the memory that `begin` points to must live
  // until the kernels have run.
  template <class Launcher>
  void start(const Launcher& launcher, uint64_t* to, BeginStep begin = {}) const {
    int64_t done = 0;  // words whose copy has been launched
    while (done < words() || begin.step != nullptr || begin.num_zeros > 0) {
      const int64_t rest = words() - done;
      const int num_words = static_cast<int>(rest < kManyWords ? rest : kManyWords);
      if (num_words <= kFewWords) {
        upload_words<kFewWords>(launcher, words_.data() + done, num_words, to + done, begin);
      } else {
        upload_words<kManyWords>(launcher, words_.data() + done, num_words, to + done, begin);
      }
      done += num_words;
      begin = {.is_finite = begin.is_finite, .first_of_step = begin.first_of_step - num_words};
    }
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace emb::cuda
