// `advise_huge_pages_`: asks the operating system to back a CPU tensor with 2 MiB pages. With 4 KiB
// pages random row reads of a large table miss the TLB at almost every lookup; huge pages make bare
// gathers 1.1-1.6x faster (Zen 4 VM). The advice must precede the first access to the memory, and
// the system may ignore it.
#include <torch/csrc/stable/library.h>

#include <cstdint>

#include "core/check.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace emb {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

void advise_huge_pages_(Tensor tensor) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const auto begin = reinterpret_cast<uintptr_t>(tensor.mutable_data_ptr());
  const uintptr_t end = begin + tensor.numel() * tensor.element_size();
  const uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t last = end / kHugePage * kHugePage;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
#else
  (void)tensor;
#endif
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, advise_huge_pages_); }
