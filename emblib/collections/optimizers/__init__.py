"""Optimizers of models with collections: those in backward, those beside it, and all as one.

`FusedOptimizer.of(model)` is what tables do in backward; `KeyedOptimizerWrapper` gives an optimizer
of `torch.optim` names for the rest, and `CombinedOptimizer` makes one of both. All are optimizers
of torch, so that learning-rate schedulers work on them, with state dicts by name.
"""

from emblib.collections.optimizers.fused import (
    FusedOptimizer,
    FusedParams,
    FusedTable,
    HasFusedTables,
    apply_optimizer_in_backward,
    from_fused_params,
    from_torch,
    in_backward_optimizer_filter,
)
from emblib.collections.optimizers.keyed import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)

__all__ = [
    "CombinedOptimizer",
    "FusedOptimizer",
    "FusedParams",
    "FusedTable",
    "GradientClipping",
    "GradientClippingOptimizer",
    "HasFusedTables",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerWrapper",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
    "from_fused_params",
    "from_torch",
    "in_backward_optimizer_filter",
]
