// Signals between processes: words of memory that they share, set by one and awaited by others.
// What was written before a word is set is seen by who saw the word.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>

#include "core/check.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>
#endif

namespace emb {
namespace {

using Clock = std::chrono::steady_clock;
using Word = std::atomic<int64_t>;
static_assert(Word::is_always_lock_free && sizeof(Word) == 8);

// A process that waits for another on a free core gets its answer sooner than it could fall asleep.
constexpr std::chrono::microseconds kSpin{20};

Word* word_of(const char* op, const Tensor& words, int64_t at) {
  STD_TORCH_CHECK(words.scalar_type() == ScalarType::Long && words.dim() == 1 &&
                      (words.numel() < 2 || words.stride(0) == 1),
                  op, ": words must be int64 [N], contiguous; got ",
                  dtype_name(words.scalar_type()), " of ", words.dim(), " dimensions");
  STD_TORCH_CHECK(at >= 0 && at < words.numel(), op, ": at must be a word of the ", words.numel(),
                  " there are, got ", at);
  return reinterpret_cast<Word*>(static_cast<int64_t*>(words.mutable_data_ptr()) + at);
}

#if defined(__linux__)
// The half of a word that counting changes. The kernel compares 32 bits.
uint32_t* low_half(Word* word) {
  auto* halves = reinterpret_cast<uint32_t*>(word);
  constexpr uint64_t kOne = 1;
  return reinterpret_cast<const unsigned char&>(kOne) == 1 ? halves : halves + 1;
}

void sleep_until_changed(Word* word, int64_t seen, Clock::duration left) {
  const auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(left).count();
  const timespec wait{static_cast<time_t>(nanoseconds / 1'000'000'000),
                      static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, low_half(word), FUTEX_WAIT, static_cast<uint32_t>(seen), &wait, nullptr, 0);
}

void wake_all(Word* word) {
  syscall(SYS_futex, low_half(word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
#else
void sleep_until_changed(Word*, int64_t, Clock::duration left) {
  std::this_thread::sleep_for(std::min<Clock::duration>(left, std::chrono::microseconds(100)));
}

void wake_all(Word*) {}
#endif

void signal_set_(Tensor words, int64_t at, int64_t value) {
  Word* word = word_of("signal_set_", words, at);
  word->store(value, std::memory_order_release);
  wake_all(word);
}

int64_t signal_wait(const Tensor& words, int64_t at, int64_t least, double seconds) {
  Word* word = word_of("signal_wait", words, at);
  STD_TORCH_CHECK(seconds >= 0 && seconds <= 1e6,
                  "signal_wait: seconds must be 0 to a million, got ", seconds);
  int64_t value = word->load(std::memory_order_acquire);
  if (value >= least || seconds == 0) return value;
  const auto start = Clock::now();
  const auto end =
      start + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds));
  for (auto now = start; value < least && now < end; now = Clock::now()) {
    if (now - start >= kSpin) sleep_until_changed(word, value, end - now);
    value = word->load(std::memory_order_acquire);
  }
  return value;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, signal_set_);
  EMB_IMPL(m, emb, signal_wait);
}
