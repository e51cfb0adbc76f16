// Scores a batch with a package of export.py: no Python, only libtorch and emblib's library.
//
//   serve ranker.pt2 libemblib_cpu.so 5
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fprintf(stderr, "usage: serve PACKAGE EMBLIB_LIBRARY EXAMPLES\n");
    return 2;
  }
  // Loading the library registers emblib's operators with libtorch, for the package to call.
  if (dlopen(argv[2], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  const int64_t examples = std::atoll(argv[3]);
  const torch::Tensor ids = torch::arange(4 * examples) * 7919 % 10000;
  const torch::Tensor offsets = torch::arange(0, 4 * examples + 1, 2);
  try {
    torch::inductor::AOTIModelPackageLoader model(argv[1]);
    const torch::Tensor scores = model.run({ids, offsets})[0].contiguous();
    for (int64_t i = 0; i < examples; ++i) {
      std::printf("%s%.6f", i == 0 ? "" : " ", scores.data_ptr<float>()[i]);
    }
    std::printf("\n");
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "%s: %s\n", argv[1], error.what_without_backtrace());
    return 1;
  }
  return 0;
}
