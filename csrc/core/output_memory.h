// Memory for the outputs of CPU ops (allocate_output). When a large output is destroyed, its block
// of memory is kept for later outputs of the process. Otherwise glibc would return it to the
// system, which must zero each page before it is used again. With `malloc_trim` before each step, a
// step over 26 tables (D 64, batch 2,048) caused some 3,800 page faults without these blocks, and 1
// with them (reports/LOG.md, "Kernels and a host path for GPUs, counted but not timed; page faults
// and row-wise Adagrad on the CPU").
//
// The blocks belong to the process, not to a thread, because a tensor may be destroyed by another
// thread than the one that allocated it. A tensor over a block cannot be resized, and torch's
// memory profiler does not see it.
//
// An output is allocated by torch instead
//   - if it has fewer than kMinOutputBlockBytes bytes,
//   - with torch 2.10, which cannot make a tensor over a block,
//   - if EMBLIB_KEEP_OUTPUTS=0 was in the environment at the first large output,
//   - if the system has no memory for a block, or torch cannot make the tensor over it.
#pragma once

#include <dlfcn.h>
#include <pthread.h>

#include <bit>
#include <cstdlib>
#include <mutex>
#include <string>

#include "core/entry.h"
#include "core/huge_pages.h"
#include "core/scratch.h"

namespace emb {

// The smallest output, in bytes, that uses a block. glibc keeps the memory of most smaller tensors:
// this is the initial value of its mmap and trim thresholds.
inline constexpr int64_t kMinOutputBlockBytes = int64_t{128} << 10;

// The maximum number of bytes of all unused blocks together. If the block of a destroyed tensor
// would exceed it, the oldest unused blocks are returned to the system. A block that is larger than
// this by itself is returned at once.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr int64_t kMaxFreeOutputBytes = 0;  // the sanitizer finds accesses to freed blocks
#else
inline constexpr int64_t kMaxFreeOutputBytes = int64_t{256} << 20;
#endif

// The blocks that no tensor uses. All functions may be called by several threads at once.
class FreeOutputBlocks {
 public:
  // Return the only object. It is not destroyed at exit, because tensors may be destroyed later.
  static FreeOutputBlocks& instance() {
    static auto* const blocks = new FreeOutputBlocks;
    return *blocks;
  }

  // Return a block of at least `*bytes` bytes, which must be at least kMinOutputBlockBytes, and set
  // `*bytes` to its size. The system is advised to put a new block in huge pages. The caller owns
  // the block until it calls `give_back`. If the system has no memory, return null; then `*bytes`
  // is unspecified.
  void* take(int64_t* bytes) {
    const int64_t requested = *bytes;
    // Round up to a multiple of `step`, an eighth of the power of two at or below the size, so that
    // outputs of slightly different sizes use the same block.
    const int64_t step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(requested))) / 8;
    *bytes = (requested + step - 1) / step * step;
    {
      const std::lock_guard lock(mutex_);
      if (void* const data = blocks_.take(bytes)) return data;
    }
    const int64_t alignment = *bytes >= kHugePageBytes ? kHugePageBytes : kPageBytes;
    *bytes = (*bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
    void* const data =
        std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(*bytes));
    if (data != nullptr) advise_huge_pages(data, *bytes);
    return data;
  }

  // Take back a block from `take`; `bytes` is the size that `take` reported.
  void give_back(void* data, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    blocks_.give_back(data, bytes);
  }

 private:
  static constexpr int64_t kPageBytes = 4096;

  // The handlers lock the mutex during a fork. Otherwise another thread of the parent
  // might hold it: the child, which does not have that thread, would wait for it for ever.
  FreeOutputBlocks() : blocks_(kMaxFreeOutputBytes) {
    pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                   [] { instance().mutex_.unlock(); });
  }

  std::mutex mutex_;
  FreeBlocks blocks_;
};

// The type of `torch_from_blob` in torch's C shim, available since torch 2.11. The function returns
// a tensor over existing memory. When the tensor's storage is destroyed, torch calls `deleter`.
using FromBlobFunction = AOTITorchError (*)(
    void* data, int64_t ndim, const int64_t* sizes, const int64_t* strides, int64_t storage_offset,
    int32_t dtype, int32_t device_type, int32_t device_index, AtenTensorHandle* result,
    int32_t layout, const uint8_t* opaque, int64_t opaque_size,
    void (*deleter)(void* data, void* context), void* context);

// Return torch's `torch_from_blob`. Return null if torch does not have it, or if the environment
// had EMBLIB_KEEP_OUTPUTS=0 at the first call.
inline FromBlobFunction find_from_blob() {
  static const FromBlobFunction function = [] {
    const char* const keep = std::getenv("EMBLIB_KEEP_OUTPUTS");
    if (keep != nullptr && std::string(keep) == "0") return FromBlobFunction{nullptr};
    return reinterpret_cast<FromBlobFunction>(dlsym(RTLD_DEFAULT, "torch_from_blob"));
  }();
  return function;
}

// Return the bytes of an element of `type`: uint8, int32, int64, float16, bfloat16 or float32.
// Throws std::logic_error for other types.
constexpr int64_t scalar_type_bytes(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  switch (type) {
    case ScalarType::Byte:
      return 1;
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Int:
    case ScalarType::Float:
      return 4;
    case ScalarType::Long:
      return 8;
    default:
      throw std::logic_error("allocate_output: no outputs of this dtype");
  }
}

// Return an uninitialised, contiguous CPU tensor of 1 to 4 dimensions for the output of an op.
// `type` is one of those of scalar_type_bytes, and `like` is any CPU tensor. Throws
// AllocationError.
inline torch::stable::Tensor allocate_output(const torch::stable::Tensor& like,
                                             const std::vector<int64_t>& sizes,
                                             torch::headeronly::ScalarType type) {
  int64_t needed_bytes = scalar_type_bytes(type);
  bool overflows = false;
  for (const int64_t size : sizes) {
    overflows |= __builtin_mul_overflow(needed_bytes, size, &needed_bytes);
  }
  // torch throws for sizes that overflow; torch_from_blob would end the process instead.
  if (overflows || needed_bytes < kMinOutputBlockBytes) return allocate(like, sizes, type);
  // The strides are allocated before the block, since an error would leak the block.
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * sizes[d];
  int64_t block_bytes = needed_bytes;
  const FromBlobFunction from_blob = find_from_blob();
  void* const data =
      from_blob == nullptr ? nullptr : FreeOutputBlocks::instance().take(&block_bytes);
  if (data == nullptr) {
    torch::stable::Tensor tensor = allocate(like, sizes, type);
    if (needed_bytes >= kHugePageBytes) {
      advise_huge_pages(tensor.mutable_data_ptr(), needed_bytes);
    }
    return tensor;
  }
  const auto give_back = [](void* block, void* bytes) {
    FreeOutputBlocks::instance().give_back(block, reinterpret_cast<int64_t>(bytes));
  };
  AtenTensorHandle handle = nullptr;
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  const AOTITorchError error =
      from_blob(data, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, code,
                aoti_torch_device_type_cpu(), -1, &handle, aoti_torch_layout_strided(), nullptr, 0,
                give_back, reinterpret_cast<void*>(block_bytes));
  if (error != 0) {
    FreeOutputBlocks::instance().give_back(data, block_bytes);
    return allocate(like, sizes, type);
  }
  return torch::stable::Tensor(handle);
}

}  // namespace emb
