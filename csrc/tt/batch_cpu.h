// What forward and backward of tensor-train tables share on the CPU: the kernels of this machine,
// and the halves of a batch. Right halves are few and always expanded up front; left halves are
// expanded as they are needed.
#pragma once

#include <memory>
#include <vector>

#include "core/isa.h"
#include "core/parallel.h"
#include "tt/check_cores.h"
#include "tt/tt_table.h"

namespace emb {

namespace baseline {
extern const TtTable kTtTable;
}
#if defined(EMB_X86)
namespace avx2 {
extern const TtTable kTtTable;
}
namespace avx512 {
extern const TtTable kTtTable;
}
#endif

inline const TtTable& tt_table() {
#if defined(EMB_X86)
  return pick_isa(baseline::kTtTable, avx2::kTtTable, avx512::kTtTable);
#else
  return baseline::kTtTable;
#endif
}

// A part of the work with fewer multiplications than this is not worth waking a thread for.
inline constexpr int64_t kTtGrain = 1 << 21;

using Floats = std::unique_ptr<float[]>;

inline Floats new_floats(int64_t n) { return Floats(new float[n > 0 ? n : 1]); }

// The axes of every row of a core reversed, in parallel.
inline void tt_reverse(const TtReverseArgs& args, int64_t rows) {
  const int64_t size = args.a * args.q * args.b;
  parallel_balanced(
      rows, kTtGrain / 16, [&](int64_t row) { return row * size; },
      [&](int64_t begin, int64_t end) { tt_table().reverse(args, begin, end); });
}

struct TtBatch {
  TtShape shape;
  TtPlan plan;
  int64_t num_rows, num_lefts, num_rights;
  TtHalf left, right;
  std::vector<const float*> cores;

  TtBatch(const char* op, const std::vector<Tensor>& core_tensors,
          const std::vector<Tensor>& plan_tensors, const std::vector<int64_t>& row_factors,
          const std::vector<int64_t>& dim_factors)
      : shape(tt_shape(op, core_tensors, row_factors, dim_factors)),
        plan(tt_plan_of(op, plan_tensors)),
        num_rows(plan.counts[0]),
        num_lefts(plan.counts[1]),
        num_rights(plan.counts[2]),
        left(shape.left()),
        right(shape.right()) {
    check_plan_contents(op, plan, shape);
    for (const Tensor& core : core_tensors) cores.push_back(core.const_data_ptr<float>());
  }

  TtHalfCores left_cores() const { return {left, cores[0], cores[1], plan.lefts, false}; }

  // Multiplications for the left halves [0, u) and their rows.
  int64_t cost(int64_t u) const {
    const int64_t per_left = left.pair ? left.q_outer * left.inner_size() : 0;
    return u * per_left + plan.left_segments[u] * int64_t{1} * shape.dim() * left.rank;
  }

  Floats scratch() const { return new_floats(tt_scratch_size(left, shape.dim())); }
};

// The right halves of a batch, expanded: [V][columns, rank].
struct TtRights {
  Floats mirrored_outer, mirrored_inner;  // a pair's cores with their axes reversed
  Floats values;
  TtHalfCores cores;

  explicit TtRights(const TtBatch& batch)
      : values(new_floats(batch.num_rights * batch.right.value_size())),
        cores{batch.right, nullptr, nullptr, batch.plan.rights, true} {
    const TtHalf& half = batch.right;
    const int last = batch.shape.cores - 1;
    if (!half.pair) {
      tt_reverse(
          {batch.cores[last], values.get(), batch.plan.rights, nullptr, half.rank, half.q_outer, 1},
          batch.num_rights);
      return;
    }
    mirrored_outer = new_floats(half.outer_rows * half.outer_size());
    mirrored_inner = new_floats(half.inner_rows * half.inner_size());
    tt_reverse({batch.cores[last], mirrored_outer.get(), nullptr, nullptr, half.inner_rank,
                half.q_outer, 1},
               half.outer_rows);
    tt_reverse({batch.cores[last - 1], mirrored_inner.get(), nullptr, nullptr, half.rank,
                half.q_inner, half.inner_rank},
               half.inner_rows);
    cores.outer = mirrored_outer.get();
    cores.inner = mirrored_inner.get();
    const int64_t per_half = half.q_outer * half.inner_size();
    parallel_balanced(
        batch.num_rights, kTtGrain, [&](int64_t v) { return v * per_half; },
        [&](int64_t begin, int64_t end) {
          const Floats scratch = new_floats(tt_scratch_size(half, batch.shape.dim()));
          tt_table().expand(cores, values.get() + begin * half.value_size(), scratch.get(), begin,
                            end);
        });
  }
};

}  // namespace emb
