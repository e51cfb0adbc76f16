// `advise_huge_pages_`: ask the system to back the memory of a table with 2 MiB pages.
#include <torch/csrc/stable/library.h>

#include "core/check.h"
#include "core/huge_pages.h"

namespace emb {
namespace {

// Advise the system to use huge pages for the memory of `tensor`; the system may ignore the advice
// (core/huge_pages.h). `tensor` must be contiguous, which is not checked, and should not have been
// written yet. Its values do not change.
void advise_huge_pages_(Tensor tensor) {
  advise_huge_pages(tensor.mutable_data_ptr(),
                    tensor.numel() * static_cast<int64_t>(tensor.element_size()));
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, advise_huge_pages_); }
