// The initial values of one row on a CPU thread: 16 Philox counters advance side by side, and 64
// words become values side by side, so that both loops vectorise.
#include "core/vec.h"
#include "hash/initial.h"

namespace emb::EMB_ISA {
namespace {

constexpr int kCounters = 16;
constexpr int kValues = 4 * kCounters;

template <class T>
void initial_row(const InitialRow& row, const InitialRule& given) {
  const InitialRule rule = given;  // a copy in registers: loads inside a condition do not vectorise
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
