// `group` on the CPU: keys become items, see group_items.h.
#include <torch/csrc/stable/library.h>

#include <tuple>

#include "core/check.h"
#include "group/group_items.h"
#include "group/outputs.h"

namespace emb {
namespace {

template <class Item>
void group_keys(IndexArray keys, int64_t n, int64_t num_keys, const GroupOutput& out) {
  std::vector<int64_t> firsts(group_parts(n) + 1);
  const int64_t parts = static_cast<int64_t>(firsts.size()) - 1;
  for (int64_t part = 0; part <= parts; ++part) firsts[part] = n * part / parts;
  const auto fill = [&](int64_t part, const auto& put) {
    for (int64_t i = firsts[part]; i < firsts[part + 1]; ++i) {
      put(i, keys[i] >= 0 && keys[i] < num_keys ? keys[i] : num_keys);
    }
  };
  group_items<Item>(n, num_keys, firsts, fill, out, [](int64_t, int64_t) {});
}

std::tuple<Tensor, Tensor, Tensor, Tensor> group(const Tensor& keys, int64_t num_keys) {
  check_index_dtype("group", "keys", keys);
  STD_TORCH_CHECK(num_keys >= 0, "group: num_keys must be >= 0, got ", num_keys);
  STD_TORCH_CHECK(keys.numel() <= kMaxLookups, "group: at most 2^31 - 1 keys a call, got ",
                  keys.numel());
  const Tensor input = torch::stable::contiguous(keys);
  const int64_t n = keys.numel();
  GroupTensors result(keys, n, keys.scalar_type());
  if (num_keys < int64_t{1} << 32) {
    group_keys<Item32>(index_array(input), n, num_keys, result.output());
  } else {
    group_keys<Item64>(index_array(input), n, num_keys, result.output());
  }
  return {result.unique, result.segments, result.permutation, result.count};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, group); }
