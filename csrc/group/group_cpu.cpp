// `group` and `group_inverse` on the CPU. `group` turns keys into items, which group_items.h sorts
// and divides into groups.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <tuple>

#include "core/parallel.h"
#include "group/check.h"
#include "group/entries.h"
#include "group/group_items.h"

namespace emb {
namespace {

// Group n keys with items of type `Item`; keys outside [0, num_keys) belong to no group. `Item`
// must be Item64 if num_keys is 2^32 or more.
template <class Item>
void group_keys(IndexArray keys, int64_t n, int64_t num_keys, const GroupOutput& out) {
  std::vector<int64_t> part_begins(num_group_parts(n) + 1);
  const int64_t num_parts = static_cast<int64_t>(part_begins.size()) - 1;
  for (int64_t part = 0; part <= num_parts; ++part) part_begins[part] = n * part / num_parts;
  const auto fill = [&](int64_t part, const auto& put) {
    for (int64_t i = part_begins[part]; i < part_begins[part + 1]; ++i) {
      put(i, keys[i] >= 0 && keys[i] < num_keys ? keys[i] : num_keys);
    }
  };
  group_items<Item>(n, num_keys, part_begins, fill, out, [](int64_t, int64_t) {});
}

// Group equal keys. `keys` is a vector of n int32 or int64 values; those outside [0, num_keys)
// belong to no group. Returns, for `count` groups in ascending order of their keys:
//   unique       [n], dtype of keys: the key of each group, then 0
//   segments     int32 [n + 1]: group g has the sorted positions [segments[g], segments[g + 1]);
//                entries after `count` repeat segments[count]
//   permutation  int32 [n]: positions in `keys` sorted by key, equal keys in their order; positions
//                of keys without a group at the end
//   count        int32 [1]: the number of groups
std::tuple<Tensor, Tensor, Tensor, Tensor> group(const Tensor& keys, int64_t num_keys) {
  check_group_keys(keys, num_keys);
  const Tensor input = as_contiguous(keys);
  const int64_t n = keys.numel();
  GroupTensors result(keys, n, keys.scalar_type());
  if (num_keys < int64_t{1} << 32) {
    group_keys<Item32>(index_array(input), n, num_keys, result.output());
  } else {
    group_keys<Item64>(index_array(input), n, num_keys, result.output());
  }
  return {result.unique, result.segments, result.permutation, result.num_groups};
}

constexpr int64_t kInverseGrain = 1 << 14;  // grain of parallel_balanced for group_inverse

}  // namespace

Tensor group_inverse(const Tensor& segments, const Tensor& permutation, const Tensor& count) {
  const char* op = "group_inverse";
  check_group_inverse(segments, permutation, count);
  const int64_t n = permutation.numel();
  Tensor inverse = allocate(permutation, {n});
  const int32_t *segment = segments.const_data_ptr<int32_t>(),
                *position = permutation.const_data_ptr<int32_t>();
  int32_t* out = inverse.mutable_data_ptr<int32_t>();
  const int64_t num_groups = *count.const_data_ptr<int32_t>();
  STD_TORCH_CHECK(num_groups >= 0 && num_groups <= n &&
                      (n == 0 || (segment[0] == 0 && segment[num_groups] <= n)),
                  op, ": count and segments must come from one call of group, got count ",
                  num_groups);
  // Bit 31 of `sign_bits` becomes 1 if a segment begins below 0 or has a negative length, or if a
  // position is not in [0, n). The numbers themselves are checked too, since their difference could
  // wrap to a positive number.
  uint32_t sign_bits = 0;
  const auto as_unsigned = [](int64_t value) { return static_cast<uint32_t>(value); };
  for (int64_t g = 0; g < num_groups; ++g)
    sign_bits |= as_unsigned(segment[g + 1]) | (as_unsigned(segment[g + 1]) - segment[g]);
  for (int64_t j = 0; j < n; ++j)
    sign_bits |= as_unsigned(position[j]) | (as_unsigned(n - 1) - position[j]);
  STD_TORCH_CHECK(sign_bits >> 31 == 0, op,
                  ": segments and permutation must come from one call of group");
  parallel_balanced(
      num_groups, kInverseGrain, [&](int64_t g) { return int64_t{segment[g]}; },
      [&](int64_t begin, int64_t end) {
        for (int64_t g = begin; g < end; ++g) {
          for (int32_t j = segment[g]; j < segment[g + 1]; ++j) {
            out[position[j]] = static_cast<int32_t>(g);
          }
        }
      });
  for (int64_t j = n == 0 ? 0 : segment[num_groups]; j < n; ++j) out[position[j]] = -1;
  return inverse;
}

}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, group);
  EMB_IMPL(m, emb, group_inverse);
}
