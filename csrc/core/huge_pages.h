// Advises the operating system to back memory with pages of 2 MiB. With pages of 4 KiB, random
// reads of rows of a large table miss the TLB at almost every lookup; huge pages made bare gathers
// 1.1 to 1.6 times as fast (measured on Zen 4; reports/LOG.md has no entry of it). The advice
// should precede the first access to the memory. The system may ignore it; errors are ignored too.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace emb {

// The size of a huge page where pages have 4 KiB, on x86-64 and ARM. Where huge pages are larger,
// the system ignores the advice about parts of a huge page.
inline constexpr int64_t kHugePageBytes = int64_t{2} << 20;

// Advise the system to use a huge page wherever an aligned one lies completely inside the `nbytes`
// bytes at `data`. `data` may be any address. Does nothing on systems other than Linux.
inline void advise_huge_pages(void* data, int64_t nbytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr auto kHugePage = static_cast<uintptr_t>(kHugePageBytes);
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first_page = (begin + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end_page = (begin + static_cast<uintptr_t>(nbytes)) / kHugePage * kHugePage;
  if (first_page < end_page) {
    madvise(reinterpret_cast<void*>(first_page), end_page - first_page, MADV_HUGEPAGE);
  }
#else
  (void)data;
  (void)nbytes;
#endif
}

}  // namespace emb
