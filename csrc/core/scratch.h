// Scratch memory of the CPU ops. A thread keeps freed blocks for its next call: glibc returns
// blocks of a megabyte to the system, which clears every page again when it is first written. A
// fifth of the samples of a training step of seven tensor trains were there (reports/LOG.md).
// `output_memory.h` keeps the memory of outputs in the same way.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

namespace emb {

// Bytes that a thread keeps at most. Larger blocks go back to the system at once.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr int64_t kKeptScratchBytes = 0;  // so that accesses to freed blocks are found
#else
inline constexpr int64_t kKeptScratchBytes = int64_t{16} << 20;
#endif

// Freed blocks of memory, oldest first, of at most `limit` bytes in all. Not synchronised.
class KeptBlocks {
 public:
  explicit KeptBlocks(int64_t limit) : limit_(limit) {}
  KeptBlocks(const KeptBlocks&) = delete;
  KeptBlocks& operator=(const KeptBlocks&) = delete;
  ~KeptBlocks() {
    for (const Block& block : blocks_) std::free(block.data);
  }

  static KeptBlocks& of_this_thread() {
    thread_local KeptBlocks blocks(kKeptScratchBytes);
    return blocks;
  }

  // Return the smallest kept block of at least `bytes`, and set `bytes` to its size; null if there
  // is none, or only one that is several times as large.
  void* take(int64_t* bytes) {
    size_t best = blocks_.size();
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const int64_t size = blocks_[i].bytes;
      const bool fits = size >= *bytes && size / 4 <= *bytes;
      if (fits && (best == blocks_.size() || size < blocks_[best].bytes)) best = i;
    }
    if (best == blocks_.size()) return nullptr;
    void* data = blocks_[best].data;
    *bytes = blocks_[best].bytes;
    remove(best);
    return data;
  }

  void give(void* data, int64_t bytes) {
    if (bytes > limit_) return std::free(data);
    while (bytes_ + bytes > limit_) {
      std::free(blocks_.front().data);
      remove(0);
    }
    blocks_.push_back({data, bytes});
    bytes_ += bytes;
  }

 private:
  struct Block {
    void* data;
    int64_t bytes;
  };

  void remove(size_t i) {
    bytes_ -= blocks_[i].bytes;
    blocks_.erase(blocks_.begin() + static_cast<std::ptrdiff_t>(i));
  }

  std::vector<Block> blocks_;
  const int64_t limit_;
  int64_t bytes_ = 0;
};

struct ReturnScratch {
  int64_t bytes = 0;
  void operator()(void* data) const { KeptBlocks::of_this_thread().give(data, bytes); }
};

template <class T>
using Scratch = std::unique_ptr<T[], ReturnScratch>;
using Floats = Scratch<float>;

// Return uninitialized memory for n trivial values, aligned to cache lines.
template <class T>
Scratch<T> new_scratch(int64_t n) {
  static_assert(std::is_trivially_destructible_v<T>);
  constexpr int64_t kLine = 64;
  int64_t bytes = n * int64_t{sizeof(T)};
  bytes = bytes < kLine ? kLine : (bytes + kLine - 1) / kLine * kLine;
  void* data = KeptBlocks::of_this_thread().take(&bytes);
  if (data == nullptr) data = std::aligned_alloc(kLine, static_cast<size_t>(bytes));
  if (data == nullptr) throw std::bad_alloc();
  return Scratch<T>(static_cast<T*>(data), ReturnScratch{bytes});
}

inline Floats new_floats(int64_t n) { return new_scratch<float>(n); }

}  // namespace emb
