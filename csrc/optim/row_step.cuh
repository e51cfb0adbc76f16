// One optimizer step on a piece of a row, on the GPU: the functors of optimizers.h, chosen at run
// time. A row is read and written once, so the choice is a uniform branch a row and costs nothing,
// while one kernel serves all optimizers and weight dtypes.
#pragma once

#include <new>

#include "core/row_piece.cuh"
#include "core/simt.cuh"
#include "optim/optimizers.h"

namespace emb::cuda {

// kNone: there is no optimizer, the summed gradient itself is stored (float32) as the weights.
enum class Rule : int { kNone, kSgd, kAdagrad, kRowwiseAdagrad, kAdam };

// Columns a lane owns in the backward pass.
inline constexpr int kColumns = 4;

struct RowStepArgs {
  Rule rule;
  const double* hyper;  // on the device, so that a captured graph sees it change
  void* weights;
  Dtype weight_type;
  float* element_states[2];  // laid out like the weights
  float* row_state;          // one a row
};

// False if there is no optimizer of that name.
inline bool find_rule(const char* name, Rule* rule) {
  return visit_optimizer(name, [rule](auto tag) {
    const char* found = decltype(tag)::type::kName;
    *rule = found == Sgd::kName              ? Rule::kSgd
            : found == Adagrad::kName        ? Rule::kAdagrad
            : found == RowwiseAdagrad::kName ? Rule::kRowwiseAdagrad
                                             : Rule::kAdam;
  });
}

// The optimizer of a kernel, built once a block: Adam's bias corrections take two powers in double.
union Optimizer {
  Sgd sgd;
  Adagrad adagrad;
  RowwiseAdagrad rowwise_adagrad;
  Adam adam;
};

// Memory for an Optimizer in shared memory, where constructors do not run.
struct alignas(16) OptimizerStorage {
  unsigned char bytes[sizeof(Optimizer)];

  EMB_DEVICE const Optimizer& get() const { return *reinterpret_cast<const Optimizer*>(bytes); }
};

// All threads of the block call it once; ends with a barrier.
EMB_DEVICE void build_optimizer(const RowStepArgs& args, OptimizerStorage* storage) {
  if (threadIdx.x == 0) {
    if (args.rule == Rule::kSgd) new (storage->bytes) Sgd(args.hyper);
    if (args.rule == Rule::kAdagrad) new (storage->bytes) Adagrad(args.hyper);
    if (args.rule == Rule::kRowwiseAdagrad) new (storage->bytes) RowwiseAdagrad(args.hyper);
    if (args.rule == Rule::kAdam) new (storage->bytes) Adam(args.hyper);
  }
  __syncthreads();
}

template <class Opt>
EMB_DEVICE void step_columns(const Opt& opt, const RowStepArgs& args, int64_t element, int valid,
                             const float (&gradient)[kColumns], float scale) {
  float w[kColumns], first[kColumns], second[kColumns];
  read_columns(args.weights, args.weight_type, element, valid, w);
  if constexpr (Opt::kElementStates > 0) {
    read_columns(args.element_states[0] + element, valid, first);
  }
  if constexpr (Opt::kElementStates > 1) {
    read_columns(args.element_states[1] + element, valid, second);
  }
#pragma unroll
  for (int k = 0; k < kColumns; ++k) {
    w[k] = opt.step(w[k], gradient[k], &first[k], &second[k], scale);
  }
  write_columns(args.weights, args.weight_type, element, valid, w);
  if constexpr (Opt::kElementStates > 0) {
    write_columns(args.element_states[0] + element, valid, first);
  }
  if constexpr (Opt::kElementStates > 1) {
    write_columns(args.element_states[1] + element, valid, second);
  }
}

// Applies the gradient to columns [0, valid) at `element`; `row_scale` as start_row returned it.
EMB_DEVICE void step_row(const Optimizer& optimizer, const RowStepArgs& args, int64_t element,
                         int valid, const float (&gradient)[kColumns], float row_scale) {
  switch (args.rule) {
    case Rule::kNone:
      write_columns(static_cast<float*>(args.weights) + element, valid, gradient);
      break;
    case Rule::kSgd:
      step_columns(optimizer.sgd, args, element, valid, gradient, optimizer.sgd.lr);
      break;
    case Rule::kAdagrad:
      step_columns(optimizer.adagrad, args, element, valid, gradient, optimizer.adagrad.lr);
      break;
    case Rule::kRowwiseAdagrad:
      step_columns(optimizer.rowwise_adagrad, args, element, valid, gradient, row_scale);
      break;
    case Rule::kAdam:
      step_columns(optimizer.adam, args, element, valid, gradient, optimizer.adam.lr);
      break;
  }
}

// For an optimizer with a row state: the row's step size from the state as it was. The new state
// goes to `place`, which only one lane of the row passes. The whole warp calls it.
EMB_DEVICE float start_row(const RowwiseAdagrad& opt, float state, float mean_square,
                           float* place) {
  const float scale = opt.begin_row(&state, mean_square);
  __syncwarp();  // no lane still has to read the old state
  if (place != nullptr) *place = state;
  return scale;
}

// Asks for what step_row will touch at `element`, one request a lane.
EMB_DEVICE void prefetch_columns(const RowStepArgs& args, int64_t element) {
  const int size = args.weight_type == Dtype::kFloat ? 4 : 2;
  simt::prefetch(static_cast<const char*>(args.weights) + element * size);
  if (args.element_states[0] != nullptr) simt::prefetch(args.element_states[0] + element);
  if (args.element_states[1] != nullptr) simt::prefetch(args.element_states[1] + element);
}

}  // namespace emb::cuda
