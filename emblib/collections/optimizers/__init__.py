"""Optimizers of models with collections: fused in backward, of torch.optim, and combined.

`FusedOptimizer.of(model)` stands for the updates that tables make in backward,
`KeyedOptimizerWrapper` wraps an optimizer of `torch.optim` for the other parameters, and
`CombinedOptimizer` combines both. All are optimizers of torch, so that learning-rate schedulers
work on them; their state dicts have parameter names.
"""

from emblib.collections.optimizers.conversions import FusedParams, from_fused_params, from_torch
from emblib.collections.optimizers.fused import FusedOptimizer, FusedTableEntry, HasFusedTables
from emblib.collections.optimizers.in_backward import (
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from emblib.collections.optimizers.keyed import (
    CombinedOptimizer,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)
from emblib.collections.optimizers.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "CombinedOptimizer",
    "FusedOptimizer",
    "FusedParams",
    "FusedTableEntry",
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
