// One optimizer step on a piece of a row, on the GPU: the functors of optimizers.h, chosen at run
// time. A row is read and written once, so the choice is a uniform branch a row and costs nothing,
// while one kernel serves all optimizers, dtypes and memory tiers.
#pragma once

#include <new>

#include "core/rounding.h"
#include "core/row_piece.cuh"
#include "core/simt.cuh"
#include "optim/args.h"
#include "optim/optimizers.h"

namespace emb::cuda {

// There is no optimizer: the summed gradient itself is stored (float32) as the weights of tier 0.
inline constexpr int kNoRule = -1;

// Columns a lane owns in the backward pass: as many as a counter of random numbers serves.
inline constexpr int kColumns = 4;

struct RowStepArgs {
  int rule = kNoRule;      // number in Optimizers
  int stepped_states = 0;  // element-wise states that the rule works on
  int row_states = 0;
  int sums = 0;                   // what the rule wants summed over a row,
  bool sums_of_gradient = true;   // and whether that is the square of the gradient alone
  const double* hyper = nullptr;  // on the device, so that a captured graph sees it change
  TierRows tiers[kTiers] = {};

  // Whether a row must be seen whole before its first step.
  EMB_HD bool by_row() const { return sums > 0 || row_states > 0; }
};

// False if there is no optimizer of that number.
inline bool find_rule(int rule, RowStepArgs* args) {
  args->rule = rule;
  return Optimizers::visit(rule, [args](auto tag) {
    using Opt = typename decltype(tag)::type;
    args->stepped_states = Opt::kSteppedStates;
    args->row_states = Opt::kRowStates;
    args->sums = Opt::kSums;
    args->sums_of_gradient = Opt::kSumsOfGradient;
  });
}

// What a block keeps of the arguments: in shared memory the tiers can be indexed, and the numbers
// of the optimizer are formed once (Adam's bias corrections take two powers in double).
struct Step {
  WeightDecay decay;
  Rounding rounding;
  TierRows tiers[kTiers];
  alignas(16) unsigned char optimizer[Optimizers::most_bytes()];
};

// Memory for a Step in shared memory, where constructors do not run.
struct alignas(16) StepStorage {
  unsigned char bytes[sizeof(Step)];

  EMB_DEVICE const Step& get() const { return *reinterpret_cast<const Step*>(bytes); }
};

// Calls `visit` with the optimizer of the block.
template <class Visitor, class... Opts>
EMB_DEVICE void visit_rule(OptimizerList<Opts...>, int rule, const unsigned char* bytes,
                           const Visitor& visit) {
  int i = 0;
  (void)((rule == i++ ? (visit(*reinterpret_cast<const Opts*>(bytes)), true) : false) || ...);
}

template <class Visitor>
EMB_DEVICE void visit_rule(const RowStepArgs& args, const Step& step, const Visitor& visit) {
  visit_rule(Optimizers{}, args.rule, step.optimizer, visit);
}

template <class... Opts>
EMB_DEVICE void build_rule(OptimizerList<Opts...>, int rule, const double* hyper,
                           unsigned char* bytes) {
  int i = 0;
  (void)((rule == i++ ? (new (bytes) Opts(hyper), true) : false) || ...);
}

// All threads of the block call it once; ends with a barrier.
EMB_DEVICE void build_step(const RowStepArgs& args, StepStorage* storage) {
  if (threadIdx.x == 0) {
    Step* step = reinterpret_cast<Step*>(storage->bytes);
    if (args.rule != kNoRule) {
      new (&step->decay) WeightDecay(args.hyper);
      new (&step->rounding) Rounding(args.hyper);
      build_rule(Optimizers{}, args.rule, args.hyper, step->optimizer);
    }
#pragma unroll
    for (int t = 0; t < kTiers; ++t) step->tiers[t] = args.tiers[t];
  }
  __syncthreads();
}

// This lane's columns of a row and its element-wise states.
struct Columns {
  float w[kColumns] = {}, first[kColumns] = {}, second[kColumns] = {};
};

// Columns [0, valid) at `element` of the tier; none where valid <= 0.
EMB_DEVICE void load_columns(const RowStepArgs& args, const TierRows& tier, int64_t element,
                             int valid, Columns* x) {
  if (valid <= 0) return;
  read_columns(tier.weights, tier.weight_type, element, valid, x->w);
  if (args.stepped_states > 0) {
    read_columns(tier.element_states[0], tier.state_types[0], element, valid, x->first);
  }
  if (args.stepped_states > 1) {
    read_columns(tier.element_states[1], tier.state_types[1], element, valid, x->second);
  }
}

// The gradient with its L2 penalty, and its part in the row's sums. Columns past the end are zeros,
// which add nothing to any sum.
EMB_DEVICE void sum_columns(const RowStepArgs& args, const Step& step, const Columns& x,
                            const float (&gradient)[kColumns], float (&sums)[kMostSums]) {
  if (args.sums_of_gradient) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) sums[0] += gradient[k] * gradient[k];
    return;
  }
  visit_rule(args, step, [&](const auto& opt) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      opt.template add_sums<ScalarMath>(x.w[k], gradient[k], x.first[k], x.second[k], sums);
    }
  });
}

EMB_DEVICE void add_penalty(const Step& step, const Columns& x, float (&gradient)[kColumns]) {
#pragma unroll
  for (int k = 0; k < kColumns; ++k) gradient[k] += step.decay.l2 * x.w[k];
}

// Where a lane's columns go when they have been stepped.
struct StepPlace {
  int64_t element;  // of the tier
  int64_t row;      // linear row id
  int column, valid;
};

EMB_DEVICE void store_columns(const Rounding& rounding, const StepPlace& place, uint32_t tensor,
                              void* data, Dtype type, float (&values)[kColumns]) {
  if (rounding.stochastic && type != Dtype::kFloat) {
    // Rounded here, so that what is stored to nearest is exact.
    const Random4 random =
        rounding.words(place.row, static_cast<uint32_t>(place.column) / kColumns, tensor);
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      values[k] = type == Dtype::kHalf
                      ? to_float(round_randomly<half16>(values[k], random.word[k]))
                      : to_float(round_randomly<bfloat16>(values[k], random.word[k]));
    }
  }
  write_columns(data, type, place.element, place.valid, values);
}

// Steps the columns and writes them and their states.
EMB_DEVICE void step_columns(const RowStepArgs& args, const Step& step, const TierRows& tier,
                             const StepPlace& place, const float (&gradient)[kColumns],
                             RowScale scale, Columns* x) {
  visit_rule(args, step, [&](const auto& opt) {
#pragma unroll
    for (int k = 0; k < kColumns; ++k) {
      x->w[k] =
          opt.step(step.decay.keep * x->w[k], gradient[k], &x->first[k], &x->second[k], scale);
    }
  });
  store_columns(step.rounding, place, kRoundWeights, tier.weights, tier.weight_type, x->w);
  if (args.stepped_states > 0) {
    store_columns(step.rounding, place, kRoundState, tier.element_states[0], tier.state_types[0],
                  x->first);
  }
  if (args.stepped_states > 1) {
    store_columns(step.rounding, place, kRoundState + 1, tier.element_states[1],
                  tier.state_types[1], x->second);
  }
}

// From the sums of a row and its own states `states` to what step wants to know; the new states
// stay in `states`.
EMB_DEVICE RowScale begin_row(const RowStepArgs& args, const Step& step,
                              float (&states)[kMostRowStates], const float (&sums)[kMostSums],
                              int dim) {
  RowScale scale;
  visit_rule(args, step, [&](const auto& opt) {
    scale = opt.begin_row(states, sums, static_cast<float>(dim));
  });
  return scale;
}

// Asks for what a step will touch at `element`, one request a lane.
EMB_DEVICE void prefetch_columns(const RowStepArgs& args, const TierRows& tier, int64_t element) {
  const auto ask = [element](const void* data, Dtype type) {
    simt::prefetch(static_cast<const char*>(data) + element * size_of(type));
  };
  ask(tier.weights, tier.weight_type);
  if (args.stepped_states > 0) ask(tier.element_states[0], tier.state_types[0]);
  if (args.stepped_states > 1) ask(tier.element_states[1], tier.state_types[1]);
}

}  // namespace emb::cuda
