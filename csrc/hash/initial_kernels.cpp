// Writes the initial values of one row on a CPU thread, a block of random words at a time.
// initial.h describes the arguments.
#include "core/random_block.h"
#include "hash/initial.h"

namespace emb::EMB_ISA {
namespace {

// Return the values of kLanes elements with the random words `words`. The values are not collected
// in an array of the whole row, because GCC would copy that by `rep movs`, which takes longer than
// all the arithmetic.
EMB_HD Vec uniform_values(const InitialRule& rule, const uint32_t* words) {
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = uniform_value(rule, words[i]);
  return load(values);
}
EMB_HD Vec normal_values(const InitialRule& rule, const uint32_t* words) {
  float values[kLanes];
  for (int i = 0; i < kLanes; ++i) values[i] = normal_value(rule, words[i]);
  return load(values);
}

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
    const int num_vecs = (count + kLanes - 1) / kLanes;
    const Counter4 counter = row_counter(row.stream, row.key, static_cast<uint32_t>(first / 4));
    philox_block<kRowBlockWord>(row.seed, counter, num_vecs * kLanes / 4, words);
    for (int i = 0; i < count; i += kLanes) {
      const Vec values = kind == InitialKind::kUniform ? uniform_values(rule, words + i)
                                                       : normal_values(rule, words + i);
      if (count - i >= kLanes) {
        store(out + first + i, values);
      } else {
        store_first(out + first + i, values, count - i);
      }
    }
  }
}

}  // namespace

extern const InitialTable kInitialTable;
const InitialTable kInitialTable = {
    {initial_row<float>, initial_row<half16>, initial_row<bfloat16>}};

}  // namespace emb::EMB_ISA
