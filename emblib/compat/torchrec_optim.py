"""TorchRec's words for optimizers: those that run in backward, by its names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from emblib.collections import optimizers
from emblib.optim import (
    LAMB,
    LARS,
    Optimizer,
    PartialRowwiseAdam,
    PartialRowwiseLAMB,
    RowwiseAdagrad,
)

RowWiseAdagrad = RowwiseAdagrad
LarsSGD = LARS
PartialRowWiseAdam = PartialRowwiseAdam
PartialRowWiseLAMB = PartialRowwiseLAMB


class WarmupOptimizer(optimizers.WarmupOptimizer):
    """That of `emblib.collections.optimizers`, with TorchRec's rate of 0.1 where none is given."""

    def __init__(
        self,
        optimizer: optimizers.KeyedOptimizer,
        stages: Sequence[optimizers.WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
    ) -> None:
        super().__init__(optimizer, stages, lr, lr_param)


# Of FBGEMM's tables, and no question here: caches may always be prefetched, ids are always checked.
IDLE = {"prefetch_pipeline", "bounds_check_mode"}


def optimizer_of(fused_params: Mapping[str, Any] | None) -> Optimizer | None:
    """The optimizer of a sharder's `fused_params`; None where they name nothing of one.

    Raises:
        ValueError: something that would have no effect.
    """
    if not fused_params:
        return None
    found = optimizers.from_fused_params(fused_params)
    unknown = sorted(found.rest.keys() - IDLE)
    if unknown:
        raise ValueError(
            f"fused_params {unknown} have no effect here: say in the table's kind where its rows "
            "are and what cache is before them, e.g. kind=Plain(Placement.MANAGED_CACHING, Cache())"
        )
    return found.optimizer


def apply_optimizer_in_backward(
    optimizer_class: Any,
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> None:
    """Let backward update these parameters; see `emblib.collections.optimizers`."""
    optimizers.apply_optimizer_in_backward(optimizer_class, params, optimizer_kwargs)


__all__ = [
    "LAMB",
    "LarsSGD",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
    "WarmupOptimizer",
    "apply_optimizer_in_backward",
]
