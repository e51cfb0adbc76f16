// Writes the initial values of one row on a CPU thread, a block of random words at a time.
// initial.h describes the arguments.
#include "core/random_block.h"
#include "hash/initial.h"

namespace emb::EMB_ISA {
namespace {

// InitialFn for row buffers of dtype T.
template <class T>
void initial_row(const InitialRow& row, const InitialRule& shared_rule) {
  // A copy in registers, because a loop with a load inside a condition is not vectorised.
  const InitialRule rule = shared_rule;
  T* out = static_cast<T*>(row.out);
  const auto kind = static_cast<InitialKind>(static_cast<int>(rule.kind));
  if (kind == InitialKind::kConstant || kind == InitialKind::kKeyModulo) {
    const T value = from_float<T>(plain_value(rule, row.key));
    for (int64_t d = 0; d < row.dim; ++d) out[d] = value;
    return;
  }
  for (int64_t first = 0; first < row.dim; first += kBlockWords) {
    const int64_t rest = row.dim - first;
    const int count = rest < kBlockWords ? static_cast<int>(rest) : kBlockWords;
    uint32_t words[kBlockWords];
    const int counters = (count + 3) / 4;
    const Counter4 counter = row_counter(row.stream, row.key, static_cast<uint32_t>(first / 4));
    philox_block<kRowBlockWord>(row.seed, counter, counters, words);
    float values[kBlockWords];  // values from 4 * counters on are loaded but not stored
    if (kind == InitialKind::kUniform) {
      for (int i = 0; i < 4 * counters; ++i) values[i] = uniform_value(rule, words[i]);
    } else {
      for (int i = 0; i < 4 * counters; ++i) values[i] = normal_value(rule, words[i]);
    }
    int i = 0;  // by vectors, because GCC turns a plain loop into `rep movs`, slow for one row
    for (; i + kLanes <= count; i += kLanes) store(out + first + i, load(values + i));
    if (i < count) store_first(out + first + i, load(values + i), count - i);
  }
}

}  // namespace

extern const InitialTable kInitialTable;
const InitialTable kInitialTable = {
    {initial_row<float>, initial_row<half16>, initial_row<bfloat16>}};

}  // namespace emb::EMB_ISA
