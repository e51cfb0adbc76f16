"""Parts of some optimizers that run outside of kernels: before a step, or when rows are read.

Periodic optimizers work on whole tables in some steps (`before_forward`): `EnsembleRowwiseAdagrad`,
and `RowwiseAdagrad` with a `Counter`. `RowwiseAdagrad` with a `GlobalDecay` scales rows as they are
read (`decay_rows`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

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


class GroupedRows:
    """The update hooks of a batch whose rows were grouped before its lookup."""

    lock = None

    def __init__(self, groups: tbe.Groups) -> None:
        self.groups = groups

    def before_update(self) -> autograd.RowLocations:
        """Return the grouped rows, which are where the lookup found them."""
        return autograd.RowLocations(self.groups)

    def after_update(self) -> None:
        """Do nothing."""


def find_global_decay(optimizer: Optimizer | None) -> GlobalDecay | None:
    """Return the decay that an optimizer applies to rows as they are read; None without one."""
    return optimizer.global_decay if isinstance(optimizer, RowwiseAdagrad) else None


def rows_as_read(module: Any, views: Mapping[str, Tensor], name: str = "weight") -> Tensor:
    """Return the rows of a table as lookups read them now, `[R, dim]`.

    They are the stored rows; with a `GlobalDecay` they are a copy, scaled by the missed steps.

    Args:
        module: the module of the table, with `optimizer` and `hyperparams`.
        views: rows and optimizer states of the table by name, as a handle's `views` returns them.
        name: name of the rows.
    """
    decay, rows = find_global_decay(module.optimizer), views[name]
    if decay is None:
        return rows
    prev_iter = views["prev_iter" if name == "weight" else f"prev_iter.{name}"]
    step, rate = module.hyperparams[Hyper.STEP] + 1, module.hyperparams[Hyper.LEARNING_RATE]
    factors = decay.scale(prev_iter, step, rate).to(torch.float32)
    return (rows.detach().float() * factors.view(-1, 1)).to(rows.dtype)


def copy_decayed(source: Any, target: Any) -> None:
    """Copy the rows that a `GlobalDecay` scales, as lookups read them, to a table for inference.

    Without a `GlobalDecay` nothing is copied.

    Args:
        source: handle of a trained table.
        target: handle of a table with the same rows.
    """
    if find_global_decay(getattr(source.module, "optimizer", None)) is not None:
        views = source.views()
        for name, rows in target.views().items():
            if name == "weight" or f"prev_iter.{name}" in views:
                rows.detach().copy_(rows_as_read(source.module, views, name))


def tables_as_read(module: Any) -> list[Tensor]:
    """Return the rows of all tables of a `TableBatchedEmbeddingBags` as lookups read them now.

    Without a `GlobalDecay` they share the memory of the tables.
    """
    module.table_weights()  # flushes a cache
    return [rows_as_read(module, views) for views in module.table_views()]


def is_periodic(optimizer: Optimizer) -> bool:
    """Return whether an optimizer has a periodic part, for which `before_forward` must be called.

    A `Counter` is one even if its `update_every` is <= 0, with which nothing is updated.
    """
    counts_rows = isinstance(optimizer, RowwiseAdagrad) and isinstance(optimizer.counter, Counter)
    return counts_rows or isinstance(optimizer, EnsembleRowwiseAdagrad)


def check_tables(optimizer: Optimizer, tables: Sequence[TableSpec], pooling: Pooling) -> None:
    """Raise ValueError for tables or a pooling that the parts of an optimizer here cannot serve."""
    has_decay = find_global_decay(optimizer) is not None
    for spec in tables:
        is_in_memory = spec.placement in (Placement.DEVICE, Placement.HOST)
        if has_decay and not is_in_memory:
            raise ValueError(
                "GlobalDecay looks at the state of every row that is read, so all tables must have "
                f"placement device or host, got {spec.placement.value}"
            )
        if isinstance(optimizer, EnsembleRowwiseAdagrad) and spec.placement.cached:
            raise ValueError(
                "EnsembleRowwiseAdagrad rewrites whole tables, so none may be cached, got "
                f"placement {spec.placement.value}; MANAGED may be"
            )
    if has_decay and pooling is Pooling.NONE:
        raise ValueError("GlobalDecay scales rows as they are pooled; use pooling SUM or MEAN")


def refuse_capture(optimizer: Optimizer, hyperparams: Tensor) -> None:
    """Raise RuntimeError during the capture of a CUDA graph: its replay would run no hook."""
    if hyperparams.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{type(optimizer).__name__} has a periodic part that counts forwards in Python, which "
            "the replay of a CUDA graph does not run; capture the rest of the model, or choose an "
            "optimizer without one"
        )


def before_forward(
    optimizer: Optimizer, step: int, tiers: autograd.Tiers, views: Sequence[dict[str, Tensor]]
) -> None:
    """Update moving averages or the largest row count in place, before the first forward of a step.

    Args:
        optimizer: optimizer for which `is_periodic` is true.
        step: number of the step, from 1.
        tiers: memory of the tables, tier by tier, and `hyperparams`, whose last entry is, for a
            `Counter`, the largest row count plus 1.
        views: weight and optimizer states of each table that is trained, by name.
    """
    if isinstance(optimizer, EnsembleRowwiseAdagrad):
        weights = [tensors["weight"] for tensors in views]
        ensemble_(optimizer, step, weights, [tensors["sparse_ema"] for tensors in views])
    elif isinstance(optimizer, RowwiseAdagrad):
        state_names = [state.name for state in optimizer.states]
        # `states` has all states of a tier, then those of the next: take one per tier.
        row_counters = tiers.states[state_names.index("row_counter") :: len(state_names)]
        count_largest_(optimizer, step, tiers.hyperparams, row_counters)


def decay_rows(
    decay: GlobalDecay, batch: autograd.Lookup, hyperparams: Tensor, prev_iter: Tensor
) -> tuple[autograd.Lookup, Tensor]:
    """Group the rows of a batch and compute the decay factor of each lookup.

    The host does not wait for a GPU.

    Args:
        decay: decay of the optimizer.
        batch: the batch, `[L]` lookups.
        hyperparams: hyperparameters of the module, float64 `[n]`, see `Hyper`.
        prev_iter: last step that updated each linear row, float32 `[R]`.

    Returns:
        The batch, with hooks that pass the groups to its update (unchanged if the tables have no
        rows), and the factors, float32 `[L]`. Skipped lookups have the factor 1.
    """
    if prev_iter.numel() == 0:  # tables without rows
        return batch, prev_iter.new_ones(batch.indices.numel())
    groups = autograd.groups_of(batch)
    group_of_lookup = primitives.group_inverse(groups.segments, groups.lookups, groups.count)
    step, rate = hyperparams[Hyper.STEP] + 1, hyperparams[Hyper.LEARNING_RATE]
    row_factors = decay.scale(prev_iter[groups.rows], step, rate)
    lookup_factors = torch.where(
        group_of_lookup >= 0, row_factors[group_of_lookup.clamp(min=0)], 1.0
    )
    return batch._replace(hooks=GroupedRows(groups)), lookup_factors.to(torch.float32)
