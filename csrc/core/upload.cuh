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
// The maximum number of 8-byte words per launch, for a small and a large kernel. Every GPU and
// driver takes 4 KB of kernel parameters; 32,764 bytes need sm_70 or later, and CUDA 12.1 or newer.
inline constexpr int kSmallUploadWords = 480, kLargeUploadWords = 4000;

// The words of one launch, as a kernel parameter.
template <int kWords>
struct UploadWords {
  uint64_t word[kWords];
};

// Work that the first launch of an upload also does, to save a launch before a backward pass or an
// update step: fill `zeros` with 0, and add 1 to `step`. If the gradient of the batch is not
// finite, the step is skipped: it is not counted, and zeros replace the uploaded words from
// `first_update_word` on, which are the arguments of the update. `zeros` is filled in any case. All
// pointers are to device memory.
struct StepStart {
  float* zeros = nullptr;           // [num_zeros], filled with 0; aligned to 16 bytes
  int64_t num_zeros = 0;            // a multiple of 4; 0 if there is nothing to fill
  double* step = nullptr;           // [1], incremented unless skipped; null to count nothing
  const bool* is_finite = nullptr;  // [1]; null if the gradient is known to be finite
  int64_t first_update_word = 0;    // index among the uploaded words; <= 0: all are of the update
};

// Copy `num_words` words to device memory `target`, and do the work of `step_start`. `num_words` is
// at most kWords, and at most the number of threads of the grid.
template <int kWords>
__global__ void __launch_bounds__(kUploadThreads)
    upload_kernel(const EMB_GRID_CONSTANT UploadWords<kWords> words, int num_words,
                  uint64_t* target, StepStart step_start) {
  const int64_t i = simt::global_thread();
  const bool is_finite = step_start.is_finite == nullptr || *step_start.is_finite;
  if (i < num_words) target[i] = is_finite || i < step_start.first_update_word ? words.word[i] : 0;
  for (int64_t j = 4 * i; j < step_start.num_zeros; j += 4 * simt::threads_in_grid()) {
    *reinterpret_cast<simt::Pack16*>(step_start.zeros + j) = {};
  }
  if (i == 0 && step_start.step != nullptr && is_finite) *step_start.step += 1.0;
}

// Launch one upload of `num_words` <= kWords words from host memory `source` to device memory
// `target`.
template <int kWords, class Launcher>
void upload_words(const Launcher& launcher, const uint64_t* source, int num_words, uint64_t* target,
                  const StepStart& step_start) {
  UploadWords<kWords> words;
  std::copy_n(source, num_words, words.word);  // `source` may be null if there are none
  // The third argument, the maximum number of blocks, is never reached here.
  const unsigned word_blocks = blocks_for(num_words, kUploadThreads, kWords);
  const unsigned zero_blocks = blocks_for(step_start.num_zeros / 4, kUploadThreads,
                                          launcher.max_grid_blocks(kResidentBlocksPerSm / 2));
  launcher(upload_kernel<kWords>, word_blocks > zero_blocks ? word_blocks : zero_blocks,
           kUploadThreads, words, num_words, target, step_start);
}

// A list of arrays that are copied to the device together: `add` every array, allocate
// `num_words()` words of device memory, then `start` the copy.
class Upload {
 public:
  // Append a copy of an array, which may be empty; its elements are whole words of 8 bytes. Return
  // its position in the device memory, in words.
  template <class T>
  int64_t add(const std::vector<T>& items) {
    static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(uint64_t) == 0);
    const auto position = static_cast<int64_t>(words_.size());
    words_.resize(words_.size() + items.size() * sizeof(T) / sizeof(uint64_t));
    if (!items.empty()) {
      std::memcpy(words_.data() + position, items.data(), items.size() * sizeof(T));
    }
    return position;
  }

  // Return the number of words of all arrays.
  int64_t num_words() const { return static_cast<int64_t>(words_.size()); }

  // Start the copy to `target`, [num_words()] in device memory. A launch copies up to
  // kLargeUploadWords words, and the first launch also does the work of `step_start`. If there is
  // nothing to copy, fill or count, nothing is launched. `launcher` is a CudaLauncher or, in
  // emulation, a simt::HostLauncher. This object may be destroyed afterwards. `target` and the
  // memory that `step_start` points to must live until the kernels have run.
  template <class Launcher>
  void start(const Launcher& launcher, uint64_t* target, StepStart step_start = {}) const {
    int64_t num_done = 0;  // words whose copy has been launched
    while (num_done < num_words() || step_start.step != nullptr || step_start.num_zeros > 0) {
      const int64_t num_remaining = num_words() - num_done;
      const int launch_words =
          static_cast<int>(num_remaining < kLargeUploadWords ? num_remaining : kLargeUploadWords);
      if (launch_words <= kSmallUploadWords) {
        upload_words<kSmallUploadWords>(launcher, words_.data() + num_done, launch_words,
                                        target + num_done, step_start);
      } else {
        upload_words<kLargeUploadWords>(launcher, words_.data() + num_done, launch_words,
                                        target + num_done, step_start);
      }
      num_done += launch_words;
      step_start = {.is_finite = step_start.is_finite,
                    .first_update_word = step_start.first_update_word - launch_words};
    }
  }

 private:
  std::vector<uint64_t> words_;
};

}  // namespace emb::cuda
