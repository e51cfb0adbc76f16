// `tt_rows` on the CPU: the distinct rows of a batch, each left half expanded once.
#include <torch/csrc/stable/library.h>

#include <tuple>
#include <vector>

#include "tt/batch_cpu.h"

namespace emb {
namespace {

std::tuple<Tensor, Tensor> tt_rows(std::vector<Tensor> cores, std::vector<Tensor> plan,
                                   std::vector<int64_t> row_factors,
                                   std::vector<int64_t> dim_factors, int64_t kept) {
  const char* op = "tt_rows";
  const TtBatch batch(op, cores, plan, row_factors, dim_factors);
  STD_TORCH_CHECK(kept >= 0, op, ": kept must be >= 0, got ", kept);
  const TtHalf &left = batch.left, &right = batch.right;
  Tensor rows = allocate(cores[0], {batch.plan.capacity, batch.shape.dim()});
  Tensor prefixes = allocate(cores[0], {kept, left.value_size()});
  if (batch.num_rows == 0) return {rows, prefixes};

  const TtRights rights(batch);
  TtRowsArgs args{batch.left_cores(),
                  right.columns(),
                  rights.values.get(),
                  {nullptr, 0, batch.cores.back(), batch.plan.rights, 0, right.value_size()},
                  batch.plan.left_segments,
                  batch.plan.row_rights,
                  prefixes.mutable_data_ptr<float>(),
                  left.pair ? kept : 0,
                  rows.mutable_data_ptr<float>()};
  Floats natural;
  if (right.pair && args.lanes_along_right()) {
    natural = new_floats(batch.num_rights * right.value_size());
    tt_reverse(
        {rights.values.get(), natural.get(), nullptr, nullptr, right.columns(), 1, right.rank},
        batch.num_rights);
    args.right_natural = {natural.get(), batch.num_rights, nullptr, nullptr, 0, right.value_size()};
  }
  parallel_balanced(
      batch.num_lefts, kTtGrain, [&](int64_t u) { return batch.cost(u); },
      [&](int64_t begin, int64_t end) {
        const Floats scratch = batch.scratch();
        tt_table().rows(args, scratch.get(), begin, end);
      });
  return {rows, prefixes};
}

}  // namespace
}  // namespace emb

STABLE_TORCH_LIBRARY_IMPL(emblib, CPU, m) { EMB_IMPL(m, emb, tt_rows); }
