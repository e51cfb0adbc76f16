"""Parts of some optimizers that run outside of kernels: before a step, or when rows are read.

They are plain tensor code, which is fast enough for rare steps on whole tables, or for the rows of
a batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.columns import Hyper
from emblib.ops import autograd, primitives, tbe
from emblib.optim import (
    EnsembleRowwiseAdagrad,
    GlobalDecay,
    Optimizer,
    RowwiseAdagrad,
    count_largest_,
    ensemble_,
)
from emblib.optim.adagrad import Counter
from emblib.specs import Placement, Pooling, TableSpec


class KnownRows:
    """The update hooks of a batch whose rows were grouped before its lookup."""

    lock = None

    def __init__(self, groups: tbe.Groups) -> None:
        self.groups = groups

    def before_update(self) -> autograd.RowLocations:
        """Return the rows."""
        return autograd.RowLocations(self.groups)

    def after_update(self) -> None:
        """Do nothing."""


def global_decay(optimizer: Optimizer) -> GlobalDecay | None:
    """Return the decay that applies to rows as they are read, if the optimizer has one."""
    return optimizer.global_decay if isinstance(optimizer, RowwiseAdagrad) else None


def is_periodic(optimizer: Optimizer) -> bool:
    """Return whether `before_forward` does anything for this optimizer."""
    counts_rows = isinstance(optimizer, RowwiseAdagrad) and isinstance(optimizer.counter, Counter)
    return counts_rows or isinstance(optimizer, EnsembleRowwiseAdagrad)


def check(optimizer: Optimizer, tables: Sequence[TableSpec], pooling: Pooling) -> None:
    """Raise ValueError for tables or a pooling that the optimizer's parts here do not support."""
    for spec in tables:
        is_in_memory = spec.placement in (Placement.DEVICE, Placement.HOST)
        if global_decay(optimizer) is not None and not is_in_memory:
            raise ValueError(
                "GlobalDecay looks at the state of every row that is read, so all tables must be "
                f"on the device, got placement {spec.placement.value}"
            )
        if isinstance(optimizer, EnsembleRowwiseAdagrad) and spec.placement.cached:
            raise ValueError(
                "EnsembleRowwiseAdagrad rewrites whole tables, so none may be cached, got "
                f"placement {spec.placement.value}; MANAGED may be"
            )
    if global_decay(optimizer) is not None and pooling is Pooling.NONE:
        raise ValueError("GlobalDecay scales rows as they are pooled; use pooling SUM or MEAN")


def before_forward(
    optimizer: Optimizer, step: int, tiers: autograd.Tiers, views: Sequence[dict[str, Tensor]]
) -> None:
    """Update moving averages or the largest row count before the first forward of a step, in place.

    Call it only if `is_periodic`. `step` counts from 1. `views` has the weight and states of each
    table, `tiers` their memory and the hyperparameters, which have the largest row count.
    """
    if isinstance(optimizer, EnsembleRowwiseAdagrad):
        weights = [tensors["weight"] for tensors in views]
        ensemble_(optimizer, step, weights, [tensors["sparse_ema"] for tensors in views])
    elif isinstance(optimizer, RowwiseAdagrad):
        names = [state.name for state in optimizer.states]
        counters = tiers.states[names.index("row_counter") :: len(names)]
        count_largest_(optimizer, step, tiers.hyperparams, counters)


def decay_rows(
    decay: GlobalDecay, batch: autograd.Lookup, hyper: Tensor, prev_iter: Tensor
) -> tuple[autograd.Lookup, Tensor]:
    """Group the rows of a batch and return the decay factor of each lookup.

    `prev_iter` is float32 `[R]`, the last step that updated each linear row, `hyper` the
    hyperparameters (`Hyper`). The returned batch has hooks that pass the groups to its update,
    unless the tables have no rows. Factors are float32 `[L]`; skipped lookups have 1. The host does
    not wait for a GPU.
    """
    if prev_iter.numel() == 0:  # tables without rows
        return batch, prev_iter.new_ones(batch.indices.numel())
    groups = autograd.groups_of(batch)
    inverse = primitives.group_inverse(groups.segments, groups.lookups, groups.count)
    scale = decay.scale(prev_iter[groups.rows], hyper[Hyper.STEP] + 1, hyper[Hyper.LEARNING_RATE])
    factors = torch.where(inverse >= 0, scale[inverse.clamp(min=0)], 1.0)
    return batch._replace(hooks=KnownRows(groups)), factors.to(torch.float32)
