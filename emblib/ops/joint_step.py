"""Joint steps: one update per backward for a table that several lookups read.

The backward of a `FusedLookup` updates its rows immediately, so two lookups of one table in a loss
would be two steps. A lookup whose batch has a `JointStep` records its gradient there instead. All
such lookups depend on one scalar, the anchor. Autograd accumulates the gradient of a leaf after all
of its consumers, so the hook of the anchor runs when every gradient of this backward is known, and
makes one step with their sum.

If a backward makes lookups itself, for a backward nested in it, these add their gradients to the
joint step of the outer backward (`with_steps_of`).
"""

from __future__ import annotations

import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from emblib.columns import FeatureColumn
from emblib.context_values import with_value
from emblib.grad_mode import in_grad_mode
from emblib.ops import autograd, codes, tbe
from emblib.ops.scaled_gradients import unscale
from emblib.optim import Optimizer
from emblib.specs import Pooling

# Maximum number of backwards with recorded gradients: nested ones, those of other threads, and
# failed ones. A further one drops the oldest. Not measured.
_MAX_BACKWARDS = 16


class JointTable(Protocol):
    """A module with one table, which makes the joint steps."""

    def apply_joint(self, contributions: Sequence[autograd.Contribution]) -> None:
        """Apply one optimizer step with the summed gradients of several lookups."""


class JointStep:
    """The recorded gradients of a table, and the anchor whose hook makes the step.

    Backwards of several threads may record at the same time: each has a step of its own.

    A deep copy or pickle is the joint step of the copied module, without gradients.
    """

    def __init__(self, table: JointTable) -> None:
        self._table = weakref.ref(table)
        self._anchor: Tensor | None = None
        # Recorded gradients by the id of the graph task, which identifies a backward.
        self._contributions: OrderedDict[int, list[autograd.Contribution]] = OrderedDict()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._table(),)

    def anchor(self, device: torch.device) -> Tensor:
        """Return the scalar that lookups on a device depend on, a float32 leaf."""
        if self._anchor is None or self._anchor.device != device:
            anchor = torch.zeros((), device=device, requires_grad=True)
            self_reference = weakref.ref(self)

            def complete(leaf: Tensor) -> None:
                leaf.grad = None
                step = self_reference()
                if step is not None:
                    step.complete()

            anchor.register_post_accumulate_grad_hook(complete)
            self._anchor = anchor
        return self._anchor

    def gradient_sum(self) -> GradientSum:
        """Return the sum to which a lookup adds its gradient.

        It is this step or, within `with_steps_of`, the step of the outer backward.
        """
        task_id = _outer_task_id.get()
        return self if task_id is None else _OuterStep(self, task_id)

    def add(self, contribution: autograd.Contribution, task_id: int | None = None) -> Tensor:
        """Record a gradient of the backward with graph task `task_id`; None is the running one.

        If too many backwards have not ended, the gradients of the oldest are dropped with a
        warning.

        Returns:
            The gradient of the anchor, a float32 0.
        """
        if task_id is None:
            task_id = torch._C._current_graph_task_id()
        self._contributions.setdefault(task_id, []).append(contribution)
        while len(self._contributions) > _MAX_BACKWARDS:
            self._contributions.popitem(last=False)
            warnings.warn(
                "emblib: dropped the gradients of a backward pass of a shared table that did not "
                f"end while {_MAX_BACKWARDS} later ones began: if it has not failed, train with "
                "fewer threads at a time",
                stacklevel=2,
            )
        return contribution.grad.new_zeros((), dtype=torch.float32)

    def complete(self) -> None:
        """Make the step of the running backward, if it has recorded gradients."""
        contributions = self._contributions.pop(torch._C._current_graph_task_id(), None)
        table = self._table()
        if contributions and table is not None:
            in_grad_mode(table.apply_joint, enabled=False)(contributions)


class GradientSum(Protocol):
    """The sum of the gradients of a table: a `JointStep`, or the step of an outer backward."""

    def anchor(self, device: torch.device) -> Tensor:
        """Return the scalar that lookups depend on, a float32 leaf that requires a gradient."""

    def add(self, contribution: autograd.Contribution) -> Tensor:
        """Record a gradient of the running or outer backward; return the anchor's gradient, 0."""


class _OuterStep(NamedTuple):
    """The joint step of an outer backward, for lookups of a backward nested in it.

    The anchor that completes the step is that of the outer backward's own lookups. `task_id` is the
    graph task id of the outer backward.
    """

    step: JointStep
    task_id: int

    def anchor(self, device: torch.device) -> Tensor:
        """Return a scalar that completes nothing."""
        return torch.zeros((), device=device, requires_grad=True)

    def add(self, contribution: autograd.Contribution) -> Tensor:
        """Record a gradient of the outer backward."""
        return self.step.add(contribution, self.task_id)


_P = ParamSpec("_P")
_R = TypeVar("_R")

_outer_task_id: ContextVar[int | None] = ContextVar("outer_task_id", default=None)


def with_steps_of(task_id: int, function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function whose lookups add their gradients to the joint steps of another backward.

    `task_id` is the graph task id of that backward, whose graph must contain the anchors of the
    tables.
    """
    return with_value(_outer_task_id, task_id, function)


def apply_contributions(
    tiers: autograd.Tiers,
    optimizer: Optimizer,
    contributions: Sequence[autograd.Contribution],
    feature: tuple[int, ...],
    locate: Callable[[tbe.Groups], autograd.RowLocations],
) -> Tensor | None:
    """Apply one optimizer step with the summed gradients of several lookups of one table.

    The gradients of a row are added in the order of the backward. The result of a single lookup has
    the same bits as without a joint step.

    Args:
        tiers: the memory of the table, updated in place.
        optimizer: optimizer of the table.
        contributions: lookups with their gradients, at least one.
        feature: a row of `features` of the table, which is the only one of its module.
        locate: function that returns the current locations of rows.

    Returns:
        0, or infinity for scaled gradients that are not finite; None if they are not scaled.
    """
    rule = autograd.UpdateRule.from_optimizer(optimizer)
    if len(contributions) == 1:
        (contribution,) = contributions
        required = autograd.RequiredResults()
        batch, weights = contribution.batch, contribution.row_weights
        return autograd.update_in_backward(
            tiers, rule, batch, weights, contribution.grad, contribution.scale, required
        )[0]
    row_gradients = [
        _row_gradients(contribution, rule, feature[FeatureColumn.DIM])
        for contribution in contributions
    ]
    rows, values, is_finite_by_lookup = zip(*row_gradients, strict=True)
    batch = autograd.lookup_of_rows([feature], [torch.cat(rows)], feature[FeatureColumn.ROWS])
    groups = autograd.groups_of(batch)
    scaled_flags = [flag for flag in is_finite_by_lookup if flag is not None]
    is_finite = torch.stack(scaled_flags).all() if scaled_flags else None
    if is_finite is not None:  # without rows nothing is updated
        groups = groups._replace(count=groups.count * is_finite)
    step_increment = 1 if is_finite is None else is_finite.to(tiers.hyperparams.dtype)
    locations = locate(groups)
    autograd.apply_row_gradients(
        tiers, optimizer, batch, locations, torch.cat(values), step_increment=step_increment
    )
    for contribution in contributions:
        if contribution.batch.hooks is not None:
            contribution.batch.hooks.after_update()
    return None if is_finite is None else torch.where(is_finite, 0.0, torch.inf)


def _row_gradients(
    contribution: autograd.Contribution, rule: autograd.UpdateRule, dim: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return rows `[L]` (-1: none), gradients `[L, dim]`, and whether all gradients are finite.

    The last is None for gradients that are not scaled. The host does not wait for the device.
    """
    batch, grad, is_finite = contribution.batch, contribution.grad, None
    if contribution.scale is not None:
        grad, is_finite = unscale(grad, contribution.scale)
    if batch.pooling is Pooling.NONE and contribution.row_weights is None:  # already one per lookup
        return batch.indices.long(), autograd.clip_gradient(grad, rule).float(), is_finite
    locations = None if batch.hooks is None else batch.hooks.before_update()
    groups = autograd.groups_of(batch) if locations is None else locations.groups
    values = tbe.tbe_row_grads(
        autograd.clip_gradient(grad, rule),
        batch.features,
        *groups,
        batch.offsets,
        batch.bag_layout,
        contribution.row_weights,
        codes.POOLING[batch.pooling.value],
        dim,
    )
    positions = torch.arange(groups.rows.numel(), device=groups.rows.device)
    return torch.where(positions < groups.count, groups.rows, -1), values, is_finite
