// Writes the initial values of one row on a CPU thread. A block of 16 Philox counters is computed
// at a time, and then its 64 random words become values, so that both loops vectorise. initial.h
// describes the arguments.
#include "core/vec.h"
#include "hash/initial.h"

namespace emb::EMB_ISA {
namespace {

constexpr int kCounters = 16;           // counters per block
constexpr int kValues = 4 * kCounters;  // values per block

template <class T>
void initial_row(const InitialRow& row, const InitialRule& given) {
  // A copy in registers: a loop with a load inside a condition does not vectorise.
  const InitialRule rule = given;
  T* out = static_cast<T*>(row.out);
  const auto kind = static_cast<InitialKind>(static_cast<int>(rule.kind));
  if (kind == InitialKind::kConstant || kind == InitialKind::kKeyModulo) {
    const T value = from_float<T>(plain_value(rule, row.key));
    for (int64_t d = 0; d < row.dim; ++d) out[d] = value;
    return;
  }
  for (int64_t first = 0; first < row.dim; first += kValues) {
    const int64_t left = row.dim - first;
    const int count = left < kValues ? static_cast<int>(left) : kValues;
    const int counters = (count + 3) / 4;
    uint32_t words[kValues];
    for (int i = 0; i < counters; ++i) {
      const Random4 random =
          row_words(row.seed, row.stream, row.key, static_cast<uint32_t>(first / 4 + i));
      for (int w = 0; w < 4; ++w) words[4 * i + w] = random.word[w];
    }
    float values[kValues];
    if (kind == InitialKind::kUniform) {
      for (int i = 0; i < 4 * counters; ++i) values[i] = uniform_value(rule, words[i]);
    } else {
      for (int i = 0; i < 4 * counters; ++i) values[i] = normal_value(rule, words[i]);
    }
    for (int i = 0; i < count; ++i) out[first + i] = from_float<T>(values[i]);
  }
}

}  // namespace

extern const InitialTable kInitialTable;
const InitialTable kInitialTable = {
    {initial_row<float>, initial_row<half16>, initial_row<bfloat16>}};

}  // namespace emb::EMB_ISA
