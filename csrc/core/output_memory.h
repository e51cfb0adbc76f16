// Memory of the outputs of CPU ops, kept for the next step when the tensor dies. glibc gives memory
// of this size back to the system, always or depending on what else is in the heap, and the system
// clears each page when it is first written again: with 26 tables of D 64 and a batch of 2,048 up
// to 5,100 page faults per step, which took longer than the step.
//
// Blocks are of the process, as a tensor may die in another thread than the one that made it. A
// tensor over a block cannot be resized, and torch's memory profiler does not see it. torch 2.10
// cannot make one. There, and with EMBLIB_KEEP_OUTPUTS=0 in the environment, outputs have torch's
// memory, in huge pages.
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

// Smaller tensors are in memory that glibc keeps (its smallest mmap and trim thresholds).
inline constexpr int64_t kMinOutputBlock = int64_t{128} << 10;

// Bytes of all blocks that no tensor uses, at most; larger blocks go back to the system at once.
#if defined(__SANITIZE_ADDRESS__)
inline constexpr int64_t kKeptOutputBytes = 0;  // so that accesses to freed blocks are found
#else
inline constexpr int64_t kKeptOutputBytes = int64_t{256} << 20;
#endif

// The blocks that no tensor uses.
class OutputBlocks {
 public:
  // Never destroyed: tensors may die after static objects.
  static OutputBlocks& of_process() {
    static auto* const blocks = new OutputBlocks;
    return *blocks;
  }

  // Return memory for at least `bytes`, in huge pages where that is possible; set `bytes` to its
  // size.
  void* take(int64_t* bytes) {
    const int64_t wanted = *bytes;
    // Sizes in steps of an eighth, so that batches whose sizes differ a little use the same block.
    const int64_t step = static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(wanted))) / 8;
    *bytes = (wanted + step - 1) / step * step;
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

  void give(void* data, int64_t bytes) {
    const std::lock_guard lock(mutex_);
    blocks_.give(data, bytes);
  }

 private:
  static constexpr int64_t kPageBytes = 4096;

  // A thread of the parent may hold the mutex while another forks.
  OutputBlocks() : blocks_(kKeptOutputBytes) {
    pthread_atfork([] { of_process().mutex_.lock(); }, [] { of_process().mutex_.unlock(); },
                   [] { of_process().mutex_.unlock(); });
  }

  std::mutex mutex_;
  KeptBlocks blocks_;
};

// `torch_from_blob` of torch's shim, since 2.11: a tensor over memory that `deleter` takes back.
using FromBlob = AOTITorchError (*)(void* data, int64_t ndim, const int64_t* sizes,
                                    const int64_t* strides, int64_t storage_offset, int32_t dtype,
                                    int32_t device_type, int32_t device_index,
                                    AtenTensorHandle* result, int32_t layout, const uint8_t* opaque,
                                    int64_t opaque_size, void (*deleter)(void* data, void* context),
                                    void* context);

// Return null where outputs have torch's memory.
inline FromBlob from_blob_with_deleter() {
  static const FromBlob function = [] {
    const char* const keep = std::getenv("EMBLIB_KEEP_OUTPUTS");
    if (keep != nullptr && std::string(keep) == "0") return FromBlob{nullptr};
    return reinterpret_cast<FromBlob>(dlsym(RTLD_DEFAULT, "torch_from_blob"));
  }();
  return function;
}

constexpr int64_t element_bytes(torch::headeronly::ScalarType type) {
  using torch::headeronly::ScalarType;
  if (type == ScalarType::Long) return 8;
  return type == ScalarType::Int || type == ScalarType::Float ? 4 : 2;
}

// Return an uninitialized tensor on the CPU for the output of an op: of int32, int64 or a
// float type of 16 or 32 bits.
inline torch::stable::Tensor allocate_output(const torch::stable::Tensor& like,
                                             const std::vector<int64_t>& sizes,
                                             torch::headeronly::ScalarType type) {
  int64_t numel = 1;
  for (const int64_t size : sizes) numel *= size;
  int64_t bytes = numel * element_bytes(type);
  if (bytes < kMinOutputBlock) return allocate(like, sizes, type);
  const FromBlob from_blob = from_blob_with_deleter();
  void* const data = from_blob == nullptr ? nullptr : OutputBlocks::of_process().take(&bytes);
  if (data == nullptr) {
    torch::stable::Tensor tensor = allocate(like, sizes, type);
    if (bytes >= kHugePageBytes) advise_huge_pages(tensor.mutable_data_ptr(), bytes);
    return tensor;
  }
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t d = sizes.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * sizes[d];
  const auto give = [](void* block, void* size) {
    OutputBlocks::of_process().give(block, reinterpret_cast<int64_t>(size));
  };
  AtenTensorHandle handle = nullptr;
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  const AOTITorchError error =
      from_blob(data, static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), 0, code,
                aoti_torch_device_type_cpu(), -1, &handle, aoti_torch_layout_strided(), nullptr, 0,
                give, reinterpret_cast<void*>(bytes));
  if (error != 0) {
    OutputBlocks::of_process().give(data, bytes);
    return allocate(like, sizes, type);
  }
  return torch::stable::Tensor(handle);
}

}  // namespace emb
