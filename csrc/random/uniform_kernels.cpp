// Uniform random numbers on one CPU thread: 16 Philox counters advance side by side, one per lane,
// so that the rounds vectorise. A counter makes four elements.
#include "core/random.h"
#include "core/vec.h"
#include "random/args.h"

namespace emb::EMB_ISA {
namespace {

// The UniformFn of a tensor of dtype T.
template <class T>
void fill(const UniformArgs& args, int64_t first_block, int64_t last_block) {
  constexpr int kCounters = kUniformBlock / 4;
  T* out = static_cast<T*>(args.out);
  for (int64_t block = first_block; block < last_block; ++block) {
    uint32_t words[4][kCounters];
    for (int i = 0; i < kCounters; ++i) {
      const Random4 random = philox(args.seed, static_cast<uint64_t>(block) * kCounters + i);
      for (int w = 0; w < 4; ++w) words[w][i] = random.word[w];
    }
    const int64_t begin = block * kUniformBlock;
    const int64_t end = begin + kUniformBlock < args.numel ? begin + kUniformBlock : args.numel;
    for (int64_t i = begin; i < end; ++i) {
      const float value = unit(words[i % 4][(i - begin) / 4]);
      out[i] = from_float<T>(args.low + args.span * value);
    }
  }
}

}  // namespace

extern const UniformTable kUniformTable;
const UniformTable kUniformTable = {{fill<float>, fill<half16>, fill<bfloat16>}};

}  // namespace emb::EMB_ISA
