// Emulated `fill_uniform_`.
#include <bit>

#include "driver.h"
#include "random/uniform.cuh"

using namespace emb::cuda;

// out, numel, dtype, low and high (bits of doubles), seed
extern "C" const char* simt_fill_uniform(const int64_t* call) {
  return return_errors([&](const auto& launcher) {
    Words words(call);
    auto* out = words.pointer<void>();
    const int64_t numel = words.number();
    const emb::Dtype type = words.dtype();
    const auto low = std::bit_cast<double>(words.number());
    const auto high = std::bit_cast<double>(words.number());
    const emb::UniformArgs fill{out, numel, static_cast<float>(low), static_cast<float>(high - low),
                                static_cast<uint64_t>(words.number())};
    launch_fill_uniform(launcher, fill, type);
  });
}
