// Scratch memory of the CPU ops. A thread keeps the blocks that it freed last, up to
// kMaxFreeScratchBytes, and reuses them for later scratch. Without this, glibc would return blocks
// of a megabyte to the system, which clears every page again before its first use. That took a
// fifth of the time of a training step of tensor trains (reports/LOG.md, "Tensor trains: one op per
// pass, and memory that stays"). `output_memory.h` keeps blocks of outputs, one store per process.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "core/portability.h"

namespace emb {

// The maximum number of bytes that a thread keeps. A larger block is returned to the system when it
// is freed.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr int64_t kMaxFreeScratchBytes = 0;  // the sanitizer finds accesses to freed blocks
#else
inline constexpr int64_t kMaxFreeScratchBytes = int64_t{16} << 20;
#endif

// A store of free blocks of memory, oldest first, of at most `max_bytes` bytes together. The store
// owns the blocks, which are from std::aligned_alloc or std::malloc, and returns them to the system
// with std::free. It is not synchronised.
class FreeBlocks {
 public:
  explicit FreeBlocks(int64_t max_bytes) : max_bytes_(max_bytes) {}
  FreeBlocks(const FreeBlocks&) = delete;
  FreeBlocks& operator=(const FreeBlocks&) = delete;
  ~FreeBlocks() {
    for (const Block& block : blocks_) std::free(block.data);
  }

  // Return the store of this thread's scratch, which is destroyed with the thread.
  static FreeBlocks& of_this_thread() {
    thread_local FreeBlocks blocks(kMaxFreeScratchBytes);
    return blocks;
  }

  // Remove the smallest fitting block, return it, and set `*bytes` to its size. A block fits if it
  // has at least `*bytes` bytes and at most about four times as many; larger blocks are left for
  // larger requests. If no block fits, return null and leave `*bytes` unchanged.
  void* take(int64_t* bytes) {
    size_t best_index = blocks_.size();
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const int64_t size = blocks_[i].bytes;
      const bool is_fitting = size >= *bytes && size / 4 <= *bytes;
      if (is_fitting && (best_index == blocks_.size() || size < blocks_[best_index].bytes))
        best_index = i;
    }
    if (best_index == blocks_.size()) return nullptr;
    void* data = blocks_[best_index].data;
    *bytes = blocks_[best_index].bytes;
    remove(best_index);
    return data;
  }

  // Take ownership of a block of `bytes` bytes. Free the oldest blocks until all blocks together
  // have at most `max_bytes` bytes. The new block itself is freed if it is larger than that, or if
  // there is no memory for its entry in the list. Deleters call this, so it does not throw.
  void give_back(void* data, int64_t bytes) noexcept {
    if (bytes > max_bytes_) return std::free(data);
    while (bytes_ + bytes > max_bytes_) {
      std::free(blocks_.front().data);
      remove(0);
    }
    try {
      blocks_.push_back({data, bytes});
      bytes_ += bytes;
    } catch (const std::bad_alloc&) {
      std::free(data);
    }
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
  const int64_t max_bytes_;
  int64_t bytes_ = 0;  // of all blocks
};

// The deleter of Scratch. It gives the block to the store of the thread that destroys the Scratch,
// which need not be the thread that allocated the block.
struct ScratchDeleter {
  int64_t bytes = 0;
  void operator()(void* data) const { FreeBlocks::of_this_thread().give_back(data, bytes); }
};

// Scratch memory with its owner.
template <class T>
using Scratch = std::unique_ptr<T[], ScratchDeleter>;
using Floats = Scratch<float>;

// Return uninitialised memory for n values, aligned to a cache line. n must be 0 or more, and the
// values must have fewer than 2^63 bytes; not checked. No constructors and no destructors run.
// Throws std::bad_alloc.
template <class T>
Scratch<T> new_scratch(int64_t n) {
  static_assert(std::is_trivially_destructible_v<T>);
  int64_t bytes = n * int64_t{sizeof(T)};
  bytes = bytes < kCacheLineBytes
              ? kCacheLineBytes
              : (bytes + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes;
  void* data = FreeBlocks::of_this_thread().take(&bytes);
  if (data == nullptr) data = std::aligned_alloc(kCacheLineBytes, static_cast<size_t>(bytes));
  if (data == nullptr) throw std::bad_alloc();
  return Scratch<T>(static_cast<T*>(data), ScratchDeleter{bytes});
}

// Return uninitialised memory for n floats, as new_scratch does.
inline Floats new_floats(int64_t n) { return new_scratch<float>(n); }

}  // namespace emb
