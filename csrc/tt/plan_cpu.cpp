// `tt_keys` and `tt_plan` on the CPU: find the halves that the rows of a batch share. The rows are
// sorted by key, so left halves are runs; the shared sort groups the right halves.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <vector>

#include "core/parallel.h"
#include "group/group_items.h"
#include "tt/check.h"

namespace emb {
namespace {

constexpr int64_t kGrain = 1 << 14;

Tensor tt_keys(const Tensor& indices, int64_t rows, std::vector<int64_t> row_factors) {
  const TtKeyMap key_of = tt_table_shape("tt_keys", indices, rows, row_factors).key_map();
  const Tensor input = torch::stable::contiguous(indices);
  const int64_t n = indices.numel();
  Tensor keys = allocate(indices, {n}, ScalarType::Long);
  const IndexArray ids = index_array(input);
  int64_t* out = keys.mutable_data_ptr<int64_t>();
  const auto cost = [](int64_t i) { return i; };
  parallel_balanced(n, kGrain, cost, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t id = repair_index(ids[i], rows);
      out[i] = id < 0 ? -1 : key_of(id);
    }
  });
  return keys;
}

struct PlanTensors {
  std::vector<Tensor> tensors;
  int32_t* data[kTtPlanTensors];

  explicit PlanTensors(const Tensor& like) {
    const int64_t n = like.numel();
    for (const int64_t size : {n, n + 1, n, n, n + 1, n, n, int64_t{3}}) {
      tensors.push_back(allocate(like, {size}, ScalarType::Int));
    }
    for (int i = 0; i < kTtPlanTensors; ++i) data[i] = tensors[i].mutable_data_ptr<int32_t>();
  }
};

// Find runs of equal left halves among rows [0, m); return their number.
int64_t find_lefts(const int64_t* keys, int64_t m, int64_t rights, const PlanTensors& plan) {
  int32_t *lefts = plan.data[kTtLefts], *segments = plan.data[kTtLeftSegments],
          *row_lefts = plan.data[kTtRowLefts];
  int64_t count = 0, limit = 0;  // the current run contains keys below `limit`
  for (int64_t j = 0; j < m; ++j) {
    if (keys[j] >= limit) {
      const int64_t left = keys[j] / rights;
      limit = (left + 1) * rights;
      lefts[count] = static_cast<int32_t>(left);
      segments[count++] = static_cast<int32_t>(j);
    }
    row_lefts[j] = static_cast<int32_t>(count - 1);
  }
  segments[count] = static_cast<int32_t>(m);
  return count;
}

// Group rows [0, m), whose left halves are known, by their right half; return the number of groups.
int64_t find_rights(const int64_t* keys, int64_t m, int64_t rights, const PlanTensors& plan) {
  const int32_t *lefts = plan.data[kTtLefts], *row_lefts = plan.data[kTtRowLefts];
  std::vector<int64_t> firsts(group_parts(m) + 1);
  const int64_t parts = static_cast<int64_t>(firsts.size()) - 1;
  for (int64_t part = 0; part <= parts; ++part) firsts[part] = m * part / parts;
  const auto fill = [&](int64_t part, const auto& put) {
    for (int64_t j = firsts[part]; j < firsts[part + 1]; ++j) {
      put(j, keys[j] - lefts[row_lefts[j]] * rights);
    }
  };
  int32_t count = 0;
  const GroupOutput out{plan.data[kTtRights], false, plan.data[kTtRightSegments],
                        plan.data[kTtRightRows], &count};
  group_items<Item32>(m, rights, firsts, fill, out, [](int64_t, int64_t) {});
  const int32_t *segments = plan.data[kTtRightSegments], *rows = plan.data[kTtRightRows];
  for (int32_t v = 0; v < count; ++v) {
    for (int32_t t = segments[v]; t < segments[v + 1]; ++t) plan.data[kTtRowRights][rows[t]] = v;
  }
  return count;
}

std::vector<Tensor> tt_plan(const Tensor& keys, const Tensor& count,
                            std::vector<int64_t> row_factors) {
  const char* op = "tt_plan";
  check_dtype(op, "keys", keys, ScalarType::Long, "int64");
  check_dtype(op, "count", count, ScalarType::Int, "int32");
  const TtShape shape = tt_row_shape(op, row_factors);
  const int64_t n = keys.numel(), m = count.numel() > 0 ? *count.const_data_ptr<int32_t>() : 0;
  STD_TORCH_CHECK(m >= 0 && m <= n && keys.is_contiguous(), op,
                  ": count must be the number of distinct keys, in [0, ", n, "], got ", m);
  PlanTensors plan(keys);
  const int64_t rights = shape.right().ids();
  const int64_t* key = keys.const_data_ptr<int64_t>();
  bool ascending = true;
  for (int64_t j = 1; j < m; ++j) ascending &= key[j - 1] < key[j];
  STD_TORCH_CHECK(
      m == 0 || (ascending && key[0] >= 0 && key[m - 1] / rights < shape.left().ids()), op,
      ": keys must be distinct and ascending, as tbe_group returns them, and below the product of "
      "row_factors");
  const int64_t lefts = find_lefts(key, m, rights, plan);
  const int64_t distinct_rights = find_rights(key, m, rights, plan);
  const int64_t used[] = {lefts, lefts + 1, m, distinct_rights, distinct_rights + 1, m, m};
  for (int i = 0; i < kTtCounts; ++i) {
    std::fill(plan.data[i] + used[i], plan.data[i] + plan.tensors[i].numel(), 0);
  }
  const int64_t counts[] = {m, lefts, distinct_rights};
  for (int i = 0; i < 3; ++i) plan.data[kTtCounts][i] = static_cast<int32_t>(counts[i]);
  return plan.tensors;
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) {
  EMB_IMPL(m, emb, tt_keys);
  EMB_IMPL(m, emb, tt_plan);
}
