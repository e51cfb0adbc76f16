// One optimizer step on some columns of a row on the GPU, with the functors of optimizers.h.
//
// A kernel is a template of its *Selection*: AtRunTime serves all optimizers, Compiled<Opt> serves
// one of them, and GradientOnly has no optimizer, so that the summed gradient is the result. A
// block builds a BlockStep, its copy of the arguments in shared memory (build_step). Then
// update_rows.cuh updates a row in two passes over its columns: load_columns, add_penalty and
// sum_columns compute the sums for begin_row; then load_columns, add_penalty and step_columns
// update the row. tbe/update.cuh calls only begin_row of these; row_batch.cuh has the other parts
// for it.
#pragma once

#include <new>
#include <type_traits>

#include "core/rounding.h"
#include "core/row_slice.cuh"
#include "core/simt.cuh"
#include "optim/args.h"
#include "optim/optimizers.h"

namespace emb::cuda {

// In place of the number of an optimizer: the summed gradient (float32) is stored as the weights of
// tier 0.
inline constexpr int kNoOptimizer = -1;

// The number of columns that a lane updates together. It is also the number of words of a Random4,
// so that stochastic rounding uses a word per column.
inline constexpr int kColumns = 4;

// The arguments of a kernel that updates weights. Pointers are to memory that the device can access
// (the host tier is pinned), and that must live until the kernel has run.
struct OptimizerStepArgs {
  int optimizer = kNoOptimizer;  // number in Optimizers
  // Constants of the functor (functor.h), set by find_optimizer.
  int num_stepped_states = 0;
  int num_row_states = 0;
  int num_row_sums = 0;
  bool sums_need_gradient_only = true;
  const double* hyper = nullptr;  // read on the device: a captured graph sees its current values
  TierMemory tiers[kTiers] = {};  // weights and states, which kernels write

  // Return whether the factors of a row depend on all of its columns or on a row-wise state.
  EMB_HD bool has_row_factors() const { return num_row_sums > 0 || num_row_states > 0; }
};

// Set the number of the optimizer in `args`, and the constants of its functor. If there is no
// optimizer of that number, return false; then `args` must not be used.
inline bool find_optimizer(int optimizer, OptimizerStepArgs* args) {
  args->optimizer = optimizer;
  return Optimizers::visit(optimizer, [args](auto tag) {
    using Opt = typename decltype(tag)::type;
    args->num_stepped_states = Opt::kSteppedStates;
    args->num_row_states = Opt::kRowStates;
    args->num_row_sums = Opt::kNumRowSums;
    args->sums_need_gradient_only = Opt::kSumsNeedGradientOnly;
  });
}

// What a block needs of the arguments to update rows, in shared memory: there the tiers can be
// indexed at run time, and the functor is built once per block (Adam's bias corrections take powers
// in double). Without an optimizer only `tiers` and `is_aligned` are set.
struct BlockStep {
  WeightDecay decay;
  Rounding rounding;
  TierMemory tiers[kTiers];
  bool is_aligned[kTiers];  // TierMemory::is_aligned(kColumns) of each tier
  // The functor, an object of the type of the optimizer; see Selection::visit_functor.
  alignas(16) unsigned char functor_bytes[Optimizers::max_bytes()];
};

// Memory for a BlockStep in shared memory, where CUDA allows no constructors. build_step builds the
// BlockStep in it; `get` is valid after that.
struct alignas(16) BlockStepStorage {
  unsigned char bytes[sizeof(BlockStep)];

  EMB_DEVICE const BlockStep& get() const { return *reinterpret_cast<const BlockStep*>(bytes); }
};

// The members of a Selection. GradientOnly has only those that kernels without an optimizer use.
//   kHasOptimizer            whether there is an optimizer
//   kHasSums                 whether there may be sums over a row
//   kScalesWeights           whether RowFactors::weight is used; if not, it must be 1
//   num_stepped_states(args), num_row_states(args), num_row_sums(args),
//   sums_need_gradient_only(args)
//                            return the constants of the functor (functor.h)
//   has_row_factors(args)    return OptimizerStepArgs::has_row_factors
//   build_functor(args, bytes)
//                            build the functor of args.optimizer in `bytes`, which have room for
//                            the largest one
//   visit_functor(args, step, visitor)
//                            call `visitor` with the functor that build_functor built in `step`

// The Selection for an optimizer that is known only when the kernel runs.
struct AtRunTime {
  static constexpr bool kHasOptimizer = true, kHasSums = true, kScalesWeights = true;
  EMB_DEVICE static int num_stepped_states(const OptimizerStepArgs& args) {
    return args.num_stepped_states;
  }
  EMB_DEVICE static int num_row_states(const OptimizerStepArgs& args) {
    return args.num_row_states;
  }
  EMB_DEVICE static int num_row_sums(const OptimizerStepArgs& args) { return args.num_row_sums; }
  EMB_DEVICE static bool sums_need_gradient_only(const OptimizerStepArgs& args) {
    return args.sums_need_gradient_only;
  }
  EMB_DEVICE static bool has_row_factors(const OptimizerStepArgs& args) {
    return args.has_row_factors();
  }

  template <class Visitor>
  EMB_DEVICE static void visit_functor(const OptimizerStepArgs& args, const BlockStep& step,
                                       const Visitor& visitor) {
    visit_one_of(Optimizers{}, args.optimizer, step.functor_bytes, visitor);
  }

  EMB_DEVICE static void build_functor(const OptimizerStepArgs& args, unsigned char* bytes) {
    build_one_of(Optimizers{}, args.optimizer, args.hyper, bytes);
  }

 private:
  template <class Visitor, class... Opts>
  EMB_DEVICE static void visit_one_of(OptimizerList<Opts...>, int optimizer,
                                      const unsigned char* bytes, const Visitor& visitor) {
    int i = 0;
    (void)((optimizer == i++ ? (visitor(*reinterpret_cast<const Opts*>(bytes)), true) : false) ||
           ...);
  }

  template <class... Opts>
  EMB_DEVICE static void build_one_of(OptimizerList<Opts...>, int optimizer, const double* hyper,
                                      unsigned char* bytes) {
    int i = 0;
    (void)((optimizer == i++ ? (new (bytes) Opts(hyper), true) : false) || ...);
  }
};

// The Selection for the optimizer Opt, over weights and states of any dtype.
template <class Opt>
struct Compiled {
  static constexpr bool kHasOptimizer = true, kHasSums = Opt::kNumRowSums > 0;
  static constexpr bool kScalesWeights = false;
  EMB_DEVICE static constexpr int num_stepped_states(const OptimizerStepArgs&) {
    return Opt::kSteppedStates;
  }
  EMB_DEVICE static constexpr int num_row_states(const OptimizerStepArgs&) {
    return Opt::kRowStates;
  }
  EMB_DEVICE static constexpr int num_row_sums(const OptimizerStepArgs&) {
    return Opt::kNumRowSums;
  }
  EMB_DEVICE static constexpr bool sums_need_gradient_only(const OptimizerStepArgs&) {
    return Opt::kSumsNeedGradientOnly;
  }
  EMB_DEVICE static constexpr bool has_row_factors(const OptimizerStepArgs&) {
    return Opt::kNumRowSums > 0 || Opt::kRowStates > 0;
  }

  template <class Visitor>
  EMB_DEVICE static void visit_functor(const OptimizerStepArgs&, const BlockStep& step,
                                       const Visitor& visitor) {
    visitor(*reinterpret_cast<const Opt*>(step.functor_bytes));
  }

  EMB_DEVICE static void build_functor(const OptimizerStepArgs& args, unsigned char* bytes) {
    new (bytes) Opt(args.hyper);
  }
};

// The Selection without an optimizer.
struct GradientOnly {
  static constexpr bool kHasOptimizer = false, kHasSums = false;
  EMB_DEVICE static constexpr int num_row_sums(const OptimizerStepArgs&) { return 0; }
  EMB_DEVICE static void build_functor(const OptimizerStepArgs&, unsigned char*) {}
};

// Whether Compiled<Opt> is used, for the optimizers that most models use. Their functors must leave
// RowFactors::weight at 1, which Compiled does not read.
template <class Opt>
inline constexpr bool kIsCommon = std::is_same_v<Opt, Sgd> || std::is_same_v<Opt, Adagrad> ||
                                  std::is_same_v<Opt, RowwiseAdagrad> || std::is_same_v<Opt, Adam>;

// The optimizer Opt, as the name of a separate kernel for rows of at most kNarrowRow columns on
// average. The update of a narrow row mostly waits for several loads, one after the other, that
// locate the row. So more warps help more than more slices per lane, which take registers.
template <class Opt>
struct Narrow : Opt {
  using Opt::Opt;
};
inline constexpr int64_t kNarrowRow = 16;

// Call `visit` with the type tag of the Selection for these arguments. `is_narrow`: whether rows
// have at most kNarrowRow columns on average. Only Sgd has a kernel for narrow rows.
template <class Visitor>
void visit_selection(const OptimizerStepArgs& args, bool is_narrow, const Visitor& visit) {
  if (args.optimizer == kNoOptimizer) {
    visit(TypeTag<GradientOnly>{});
    return;
  }
  bool has_kernel = false;
  Optimizers::visit(args.optimizer, [&](auto tag) {
    using Opt = typename decltype(tag)::type;
    if constexpr (std::is_same_v<Opt, Sgd>) {
      if (is_narrow) {
        visit(TypeTag<Compiled<Narrow<Opt>>>{});
        has_kernel = true;
        return;
      }
    }
    if constexpr (kIsCommon<Opt>) {
      visit(TypeTag<Compiled<Opt>>{});
      has_kernel = true;
    }
  });
  if (!has_kernel) visit(TypeTag<AtRunTime>{});
}

// Build the BlockStep of the block in `storage`, which is in shared memory. All threads of the
// block must call this, once; it ends with a barrier.
template <class Selection>
EMB_DEVICE void build_step(const OptimizerStepArgs& args, BlockStepStorage* storage) {
  if (threadIdx.x == 0) {
    BlockStep* step = reinterpret_cast<BlockStep*>(storage->bytes);
    if constexpr (Selection::kHasOptimizer) {
      new (&step->decay) WeightDecay(args.hyper);
      new (&step->rounding) Rounding(args.hyper);
      Selection::build_functor(args, step->functor_bytes);
    }
#pragma unroll
    for (int t = 0; t < kTiers; ++t) {
      step->tiers[t] = args.tiers[t];
      step->is_aligned[t] = args.tiers[t].is_aligned(kColumns);
    }
  }
  __syncthreads();
}

// A lane's columns of a row and of its element-wise states, as floats; 0 where the row has no
// column and where the optimizer does not update a state.
struct LaneColumns {
  float weights[kColumns] = {}, state0[kColumns] = {}, state1[kColumns] = {};
};

// Load the first `num_valid` of a lane's columns, at most kColumns, from element `element` on of
// the weights and of the states that the optimizer updates. If num_valid <= 0, nothing is loaded.
// `columns` must be 0 before.
template <class Selection>
EMB_DEVICE void load_columns(const OptimizerStepArgs& args, const TierMemory& tier, int64_t element,
                             int num_valid, LaneColumns* columns) {
  if (num_valid <= 0) return;
  read_columns(tier.weights, tier.weight_type, element, num_valid, columns->weights);
  if (Selection::num_stepped_states(args) > 0) {
    read_columns(tier.element_states[0], tier.state_types[0], element, num_valid, columns->state0);
  }
  if (Selection::num_stepped_states(args) > 1) {
    read_columns(tier.element_states[1], tier.state_types[1], element, num_valid, columns->state1);
  }
}

// Add the terms of a lane's columns to the sums of the row. `gradient` includes the L2 penalty.
// Columns beyond the end of the row must be 0: then they add nothing to any sum.
template <class Selection>
EMB_DEVICE void sum_columns(const OptimizerStepArgs& args, const BlockStep& step,
                            const LaneColumns& columns, const float (&gradient)[kColumns],
                            float (&sums)[kMaxRowSums]) {
  if (Selection::sums_need_gradient_only(args)) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) sums[0] += gradient[k] * gradient[k];
    return;
  }
  Selection::visit_functor(args, step, [&](const auto& opt) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      opt.template add_sums<ScalarMath>(columns.weights[k], gradient[k], columns.state0[k],
                                        columns.state1[k], sums);
    }
  });
}

// Add the L2 penalty to the gradient of a lane's columns. Without a penalty nothing is added: 0
// times an infinite weight would be NaN.
EMB_DEVICE void add_penalty(const BlockStep& step, const LaneColumns& columns,
                            float (&gradient)[kColumns]) {
  if (step.decay.l2 == 0.0f) return;
#pragma unroll
  for (int k = 0; k < kColumns; ++k) gradient[k] += step.decay.l2 * columns.weights[k];
}

// The location of a lane's columns, at most kColumns of one row.
struct ColumnLocation {
  int64_t element;  // element of the tier's weights and states that is the first column
  int64_t row;      // linear row id, for random words
  int column;       // first column, a multiple of kColumns
  int num_valid;    // columns from there to the end of the row
};

// Write a lane's columns to the tensor at `data`, of dtype `type`, rounded as `rounding` says. The
// location and `tensor` (RoundedTensor) select the random words. May round `values` in place.
EMB_DEVICE void store_columns(const Rounding& rounding, const ColumnLocation& location,
                              uint32_t tensor, void* data, Dtype type, float (&values)[kColumns]) {
  if (rounding.is_stochastic && type != Dtype::kFloat) {
    // write_columns rounds to nearest, which does not change values that are rounded already.
    const Random4 random =
        rounding.words(location.row, static_cast<uint32_t>(location.column) / kColumns, tensor);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      values[k] = type == Dtype::kHalf
                      ? to_float(round_randomly<half16>(values[k], random.word[k]))
                      : to_float(round_randomly<bfloat16>(values[k], random.word[k]));
    }
  }
  write_columns(data, type, location.element, location.num_valid, values);
}

// Update a lane's columns and their states, in `columns` and in memory. `gradient` includes the L2
// penalty, and `factors` is the result of begin_row.
template <class Selection>
EMB_DEVICE void step_columns(const OptimizerStepArgs& args, const BlockStep& step,
                             const TierMemory& tier, const ColumnLocation& location,
                             const float (&gradient)[kColumns], RowFactors factors,
                             LaneColumns* columns) {
  Selection::visit_functor(args, step, [&](const auto& opt) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      columns->weights[k] =
          opt.template step<ScalarMath>(step.decay.factor * columns->weights[k], gradient[k],
                                        &columns->state0[k], &columns->state1[k], factors);
    }
  });
  store_columns(step.rounding, location, kRoundWeights, tier.weights, tier.weight_type,
                columns->weights);
  if (Selection::num_stepped_states(args) > 0) {
    store_columns(step.rounding, location, kRoundState, tier.element_states[0], tier.state_types[0],
                  columns->state0);
  }
  if (Selection::num_stepped_states(args) > 1) {
    store_columns(step.rounding, location, kRoundState + 1, tier.element_states[1],
                  tier.state_types[1], columns->state1);
  }
}

// Return the factors of a row of `dim` columns from its sums and its row-wise states, and update
// `states`, which the caller loads before and stores after the call.
template <class Selection>
EMB_DEVICE RowFactors begin_row(const OptimizerStepArgs& args, const BlockStep& step,
                                float (&states)[kMaxRowStates], const float (&sums)[kMaxRowSums],
                                int dim) {
  RowFactors factors;
  Selection::visit_functor(args, step, [&](const auto& opt) {
    factors = opt.begin_row(states, sums, static_cast<float>(dim));
  });
  return factors;
}

}  // namespace emb::cuda
