// Uniform random numbers on one CPU thread, a block of random words at a time: the functions of
// UniformTable (random/args.h).
#include "core/random_block.h"
#include "core/vec.h"
#include "random/args.h"

namespace emb::EMB_ISA {
namespace {

// UniformFn for tensors of dtype T.
template <class T>
void fill_blocks(const UniformArgs& args, int64_t first_block, int64_t last_block) {
  static_assert(kUniformBlockElements == kBlockWords);
  T* out = static_cast<T*>(args.out);
  for (int64_t block = first_block; block < last_block; ++block) {
    uint32_t words[kBlockWords];
    // The block's first counter is a multiple of kBlockCounters, a power of two, so the low word of
    // the counters does not overflow within the block.
    philox_block<0>(args.seed, stream_counter(static_cast<uint64_t>(block) * kBlockCounters),
                    kBlockCounters, words);
    const int64_t begin = block * kUniformBlockElements;
    const int64_t end =
        begin + kUniformBlockElements < args.numel ? begin + kUniformBlockElements : args.numel;
    for (int64_t i = begin; i < end; ++i) {
      out[i] = from_float<T>(args.value(unit_float(words[i - begin])));
    }
  }
}

}  // namespace

extern const UniformTable kUniformTable;
const UniformTable kUniformTable = {
    {fill_blocks<float>, fill_blocks<half16>, fill_blocks<bfloat16>}};

}  // namespace emb::EMB_ISA
