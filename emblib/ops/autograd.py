"""Lookups with a backward: the fused update, or a gradient for an optimizer of `torch.optim`.

`fused_lookup` applies the optimizer in backward, `lookup` leaves a gradient on the weights, and
`lookup_no_grad` does neither. A `Lookup` is one batch of a module, `Tiers` the memory that it
reads; shapes and dtypes are those of `emblib.ops.tbe`.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from emblib.columns import FeatureColumn, Hyper, Tier
from emblib.context_values import with_value
from emblib.ops import codes, tbe
from emblib.ops.derivatives import once_differentiable
from emblib.ops.one_call import c_function, count_step
from emblib.ops.scaled_gradients import scale_of_backward, step_increment_if_unscaled, unscale
from emblib.optim import External, Gradient, Optimizer
from emblib.specs import Pooling


class RowLocations(NamedTuple):
    """Distinct rows of a batch, and where they are now.

    Attributes:
        groups: distinct rows and their lookups, as `tbe_group` returns them.
        row_slots: int32 `[L]`, cache slot per distinct row, -1 for none; None without a cache.
        slots: int32 `[L]`, cache slot per lookup, -1 for none; None without a cache.
        indices: current row of each lookup; None if the indices of the batch are current.
    """

    groups: tbe.Groups
    row_slots: Tensor | None = None
    slots: Tensor | None = None
    indices: Tensor | None = None


class UpdateHooks(Protocol):
    """Callbacks of a module around the update of one batch, all called under the module's lock.

    A lookup with a `GradientSum` calls `after_update` when it has added its gradient. The joint
    step calls `after_update` again later, with or without `before_update`.
    """

    @property
    def lock(self) -> AbstractContextManager[object] | None:
        """Return the lock to hold from `before_update` to `after_update`, if any."""

    def before_update(self) -> RowLocations | None:
        """Return the current locations of the rows; None if those of the batch are current."""

    def after_update(self) -> None:
        """Run after the rows have been written."""


class Lookup(NamedTuple):
    """One batch, with everything that its backward needs.

    Attributes:
        features: int64 `[F, 8]`, see `emblib.columns.FeatureColumn`.
        indices: int32 or int64 `[L]`.
        offsets: int32 or int64 `[F * B + 1]`, or `[bags + 1]` with a `bag_layout`.
        bag_layout: int64 `[bags, 2]`, feature and first output element of each bag; None if all
            features have B bags.
        pooling: pooling of the bags.
        total_rows: rows of all tables.
        output_dim: columns of the output; its elements with a `bag_layout`.
        slots: int32 `[L]`, slot of the row of each lookup in the cache or in `default_rows`, -1 for
            none; None if there are neither.
        trained_features: `features` without the rows of frozen tables, for the update; None if all
            tables are trained.
        hooks: callbacks around the update, e.g. of a cache or of dynamic tables; None if there are
            none.
        default_rows: rows that `slots` refer to if there is no cache, not updated; else None.
        repaired: whether `check_bounds` returned `offsets`.
        joint: sum of the gradients of a table that several lookups read, a
            `joint_step.GradientSum`; None updates the table in the backward of this lookup.
    """

    features: Tensor
    indices: Tensor
    offsets: Tensor
    bag_layout: Tensor | None
    pooling: Pooling
    total_rows: int
    output_dim: int
    slots: Tensor | None = None
    trained_features: Tensor | None = None
    hooks: UpdateHooks | None = None
    default_rows: Tensor | None = None
    repaired: bool = False
    joint: Any = None


class Tiers(NamedTuple):
    """Memory of a module.

    Attributes:
        weights: one to four flat tensors, one per memory tier.
        states: optimizer states, flat: all states of the first tier, then all of the second, ...
        hyperparams: float64, see `Optimizer.hyperparams`.
        output_dtype: dtype of the output of lookups.
    """

    weights: list[Tensor]
    states: list[Tensor]
    hyperparams: Tensor
    output_dtype: torch.dtype


_P = ParamSpec("_P")
_R = TypeVar("_R")

_for_update = ContextVar("for_update", default=False)


def for_update(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function that calls another one, whose lookups are needed for their backward only.

    In it `FusedLookup` and `GradientLookup` return zeros, which take no memory, except in compiled
    code.
    """
    return with_value(_for_update, True, function)


def with_values(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Return a function whose lookups return their values even within `for_update`."""
    return with_value(_for_update, False, function)


def is_for_update() -> bool:
    """Return whether the caller is inside `for_update`, and not `with_values`."""
    return _for_update.get()


def _output_shape(batch: Lookup) -> tuple[int, ...]:
    """Return the shape of the output of a lookup."""
    if batch.pooling is Pooling.NONE:
        return batch.indices.numel(), batch.output_dim
    if batch.bag_layout is not None:
        return (batch.output_dim,)
    return (batch.offsets.numel() - 1) // batch.features.shape[0], batch.output_dim


def _zero_output(batch: Lookup, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros in the shape of a lookup's output, which take no memory."""
    return torch.zeros((), dtype=dtype, device=device).expand(_output_shape(batch))


def groups_of(batch: Lookup) -> tbe.Groups:
    """Group the lookups of a batch by row."""
    return tbe.group(
        batch.features,
        batch.indices,
        batch.offsets,
        batch.total_rows,
        batch.bag_layout,
        repaired=batch.repaired,
    )


class UpdateRule(NamedTuple):
    """The fields of an optimizer that backward needs, as values that torch can trace.

    The optimizer itself cannot be traced: torch 2.10 reconstructs a dataclass argument of a
    Function from symbols, which the checks of the dataclass refuse.

    Attributes:
        name: name of the optimizer; in `codes.OPTIMIZER`, except that of `External`.
        max_gradient: bound to which gradients of the output are clamped; None clamps none.
        gradient: gradient that backward leaves on parameters; None if it updates the rows.
        maximize: whether the update ascends.
    """

    name: str
    max_gradient: float | None
    gradient: Gradient | None
    maximize: bool

    @classmethod
    def from_optimizer(cls, optimizer: Optimizer) -> "UpdateRule":
        """Return the rule of an optimizer."""
        gradient, maximize = optimizer.leaves_gradient, optimizer.maximize
        return cls(optimizer.name, optimizer.max_gradient, gradient, maximize)

    def descent(self, grad: Tensor) -> Tensor:
        """Return the gradient to descend along: negated to maximize."""
        return -grad if self.maximize else grad


class FusedLookup(torch.autograd.Function):
    """Function that looks up; its backward updates weights and states in place.

    `grad_anchor` is a scalar that requires grad, unless all tables are frozen: autograd sees it as
    the input, in place of the weights, which backward mutates. `row_weights` are the factors of
    the gradients of rows; they differ from `sample_weights` if rows decay before they are read.

    A gradient that a `torch.amp.GradScaler` has scaled is divided by the scale, and skipped if it
    is not finite; `grad_anchor` then gets the gradient 0 or infinity, which the scaler checks.

    The gradient of `sample_weights` is computed from the rows at the time of backward, before the
    update. Another backward may have updated these rows since forward (two lookups in one loss);
    then the gradient is computed from the updated rows, as in FBGEMM.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad_anchor: Tensor,
        tiers: Tiers,
        rule: UpdateRule,
        batch: Lookup,
        sample_weights: Tensor | None,
        row_weights: Tensor | None,
    ) -> Tensor:
        """Return `[B, output_dim]`, `[output_dim]` with a bag layout, `[L, dim]` for NONE."""
        _save(ctx, batch, sample_weights, row_weights)
        ctx.tiers, ctx.rule = tiers, rule
        if not torch.compiler.is_compiling() and is_for_update():
            return _zero_output(batch, tiers.output_dtype, grad_anchor.device)
        return lookup_no_grad(tiers.weights, batch, sample_weights, tiers.output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Update the trained rows, now or in a joint step; return the gradients of the inputs."""
        lock = None if ctx.batch.hooks is None else ctx.batch.hooks.lock
        if lock is None:
            return FusedLookup._update(ctx, grad)
        with lock:
            return FusedLookup._update(ctx, grad)

    @staticmethod
    def _update(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Update weights and states; return the gradients of the inputs of `forward`."""
        batch, _, row_weights = _unpack_saved(ctx)
        needs_update, _, _, _, needs_sample_grad, _ = ctx.needs_input_grad
        required = RequiredResults(needs_update, needs_sample_grad)
        needs_scale = required.update or ctx.rule.max_gradient is not None
        scale = scale_of_backward() if needs_scale else None
        anchor_grad = None
        if batch.joint is not None and required.update:
            anchor_grad = batch.joint.add(Contribution(batch, row_weights, grad, scale))
            if batch.hooks is not None:  # before the step, so that an interrupt leaves no step
                batch.hooks.after_update()
            if not required.sample_grad:
                return anchor_grad, None, None, None, None, None
            required = required._replace(update=False)
        overflow, sample_grad = update_in_backward(
            ctx.tiers, ctx.rule, batch, row_weights, grad, scale, required
        )
        anchor_grad = overflow if anchor_grad is None else anchor_grad
        return anchor_grad, None, None, None, sample_grad, None


class Contribution(NamedTuple):
    """The gradient of one lookup's output, and everything that its update needs.

    Attributes:
        batch: the lookup.
        row_weights: float32 `[L]`, the factor of the gradient of each row; None is 1 for all.
        grad: gradient of the output, in its shape.
        scale: scalar by which the gradient is scaled; None for an unscaled one.
    """

    batch: Lookup
    row_weights: Tensor | None
    grad: Tensor
    scale: Tensor | None


class RequiredResults(NamedTuple):
    """Results that a backward must produce.

    Attributes:
        update: whether rows are updated.
        sample_grad: whether the gradient of sample weights is computed.
    """

    update: bool = True
    sample_grad: bool = False


def update_in_backward(
    tiers: Tiers,
    rule: UpdateRule,
    batch: Lookup,
    row_weights: Tensor | None,
    grad: Tensor,
    scale: Tensor | None,
    required: RequiredResults,
) -> tuple[Tensor | None, Tensor | None]:
    """Update the rows of a batch; return the gradients of the anchor and of the sample weights.

    The first is None without a `scale`, the second unless it is required. Calls the hooks of the
    batch before and after the update.

    Args:
        tiers: memory of the module, updated in place.
        rule: update rule of the optimizer.
        batch: batch that forward looked up.
        row_weights: factors of the gradient, float32 `[L]`; None is 1.
        grad: gradient of the output, of its shape.
        scale: scale of a `GradScaler`, a scalar; None if the gradient is not scaled.
        required: results to produce.
    """
    is_finite = overflow = None
    if scale is not None:
        grad, is_finite = unscaled_gradient = unscale(grad, scale)
        overflow = unscaled_gradient.overflow()
    locations = None if batch.hooks is None else batch.hooks.before_update()
    if locations is None:
        # Slots of a batch without hooks do not refer to a cache, so they are still valid.
        slots = batch.slots if batch.hooks is None else None
        locations = RowLocations(groups_of(batch), slots=slots)
    grad = clip_gradient(grad, rule)
    sample_grad = None
    if required.sample_grad:
        sample_grad = _sample_weight_grad(grad, tiers.weights, _located(batch, locations))
        if scale is not None:
            sample_grad = sample_grad * scale.to(sample_grad.device)
    if required.update:
        if batch.trained_features is not None:
            locations = _trained_locations(batch, locations)
        step_increment = step_increment_if_unscaled(tiers.hyperparams, grad)
        if is_finite is not None:  # without rows nothing is updated
            count = locations.groups.count * is_finite
            locations = locations._replace(groups=locations.groups._replace(count=count))
            step_increment = is_finite.to(tiers.hyperparams.dtype)
        _make_step(tiers, rule, grad, batch, locations, row_weights, step_increment)
    if batch.hooks is not None:
        batch.hooks.after_update()
    return overflow, sample_grad


def _make_step(
    tiers: Tiers,
    rule: UpdateRule,
    grad: Tensor,
    batch: Lookup,
    locations: RowLocations,
    row_weights: Tensor | None,
    step_increment: Tensor | int = 1,
) -> None:
    """Count a step and update rows; outside compiled code an interrupt leaves both done or neither.

    `grad` has the shape of the output. `step_increment` is 1, or a float64 scalar on the device: 0
    for a step that is not counted, whose `locations` must have no rows.
    """
    step = tiers.hyperparams[Hyper.STEP]
    update = _update_call(tiers, rule.name, rule.descent(grad), batch, locations, row_weights)
    if torch.compiler.is_compiling():
        step.add_(step_increment)
        update()
        torch.autograd.graph.increment_version(tiers.weights)
        return
    if may_write_weights(tiers.hyperparams, codes.OPTIMIZER[rule.name]):  # before any interrupt
        torch.autograd.graph.increment_version(tiers.weights)
    count_step(step, step_increment, update)


def lookup_of_rows(
    features: Sequence[tuple[int, ...]], rows: Sequence[Tensor], total_rows: int
) -> Lookup:
    """Return a batch that looks up `rows[t]` in the table of `features[t]`.

    `features` are rows of 8 numbers (`FeatureColumn`) with the same DIM, at least one; `rows[t]` is
    int64 `[n]`, row numbers within the table, -1 for none. `total_rows` is the number of rows of
    all tables.
    """
    indices = torch.cat(list(rows))
    offsets = [0, *itertools.accumulate(r.numel() for r in rows)]  # one bag per table
    return Lookup(
        torch.tensor(features, device=indices.device),
        indices,
        torch.tensor(offsets, device=indices.device),
        None,
        Pooling.NONE,
        total_rows,
        features[0][FeatureColumn.DIM],
    )


def apply_row_gradients(
    tiers: Tiers,
    optimizer: Optimizer,
    batch: Lookup,
    locations: RowLocations,
    gradients: Tensor,
    *,
    step_increment: Tensor | int = 1,
) -> None:
    """Apply one optimizer step with gradients `[L, dim]` of a batch of `lookup_of_rows`.

    Gradients of a row that occurs several times are added up. `step_increment` is 1, or a float64
    scalar on the device: 0 if the gradients are not finite, when `locations` must have no rows.
    """
    rule = UpdateRule.from_optimizer(optimizer)
    _make_step(tiers, rule, gradients, batch, locations, None, step_increment)


def _trained_locations(batch: Lookup, locations: RowLocations) -> RowLocations:
    """Return the locations without the rows of frozen tables; the host does not wait."""
    assert batch.trained_features is not None
    all_groups, row_slots = locations.groups, locations.row_slots
    groups = groups_of(batch._replace(features=batch.trained_features))
    if row_slots is not None and row_slots.numel() > 0:
        positions = torch.arange(all_groups.rows.numel(), device=all_groups.rows.device)
        all_rows = torch.where(
            positions < all_groups.count, all_groups.rows, torch.iinfo(torch.int64).max
        )
        positions = torch.searchsorted(all_rows, groups.rows)
        row_slots = row_slots[positions.clamp(max=row_slots.numel() - 1)]
    return locations._replace(groups=groups, row_slots=row_slots)


def fused_lookup(
    grad_anchor: Tensor,
    tiers: Tiers,
    optimizer: Optimizer,
    batch: Lookup,
    sample_weights: Tensor | None = None,
    decay: Tensor | None = None,
) -> Tensor:
    """Look up a batch; backward applies `optimizer`, which leaves no gradients, to the rows.

    Output and `grad_anchor` are those of `FusedLookup`. `sample_weights` is float32 `[L]`. `decay`,
    float32 `[L]`, scales each row as it is read, not its gradient, see `optim.GlobalDecay`.
    """
    row_weights = None if sample_weights is None else sample_weights.detach()
    weights = multiply_weights(sample_weights, decay)
    rule = UpdateRule.from_optimizer(optimizer)
    return FusedLookup.apply(grad_anchor, tiers, rule, batch, weights, row_weights)


HAS_GRAD_DTYPE = hasattr(torch.Tensor, "grad_dtype")
"""Whether this torch allows gradients of another dtype than that of their parameter."""


class WeightOffset(NamedTuple):
    """Location of a table in the weights of a module.

    Attributes:
        begin: first element of the table in the flat weights of its tier.
        first_row: first row of the table in a sparse gradient of all weights.
        rows, dim: shape of the table.
    """

    begin: int
    first_row: int
    rows: int
    dim: int


class GradientLookup(torch.autograd.Function):
    """Function that looks up; its backward leaves sparse or dense gradients on parameters.

    Lookups read `memory`, the first tier, and `slower`, the other tiers. The parameters are views
    of these at `weight_offsets`; if that is None, the only parameter is `memory` itself. A sparse
    gradient has the distinct rows of the batch; a dense one requires that all tables are in
    `memory`. `dtypes` has the dtypes of output and gradients; `num_distinct` is as in `lookup`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        memory: Tensor,
        slower: Sequence[Tensor],
        weight_offsets: Sequence[WeightOffset] | None,
        batch: Lookup,
        sample_weights: Tensor | None,
        dtypes: tuple[torch.dtype, torch.dtype],
        rule: UpdateRule,
        num_distinct: int | None,
        *parameters: Tensor,
    ) -> Tensor:
        """Return `[B, output_dim]`, `[output_dim]` with a bag layout, `[L, dim]` for NONE."""
        # Only the gradient of sample weights needs the memory. If memory were saved in other cases
        # too, autograd would raise after an optimizer step between two backwards.
        needs_memory = sample_weights is not None and sample_weights.requires_grad
        _save(ctx, batch, sample_weights, memory if needs_memory else None)
        output_dtype, ctx.dtype = dtypes
        ctx.slower, ctx.shape, ctx.weight_offsets = slower, memory.shape, weight_offsets
        ctx.rule, ctx.num_distinct, ctx.devices = rule, num_distinct, [p.device for p in parameters]
        if not torch.compiler.is_compiling() and is_for_update():
            return _zero_output(batch, output_dtype, memory.device)
        return lookup_no_grad([memory.view(-1), *slower], batch, sample_weights, output_dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, each on the device of its parameter.

        The host waits for sparse gradients without `num_distinct` or with `weight_offsets`.
        """
        lock = None if ctx.batch.hooks is None else ctx.batch.hooks.lock
        if lock is None:
            return GradientLookup._gradients(ctx, grad)
        with lock:
            return GradientLookup._gradients(ctx, grad)

    @staticmethod
    def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs of `forward`; the parameters come last."""
        batch, sample_weights, memory = _unpack_saved(ctx)
        sample_grad = None
        if ctx.rule.max_gradient is not None:
            grad = clip_gradient(grad, ctx.rule, scale_of_backward())
        locations = None if batch.hooks is None else batch.hooks.before_update()
        if locations is not None:
            batch = _located(batch, locations)
        if ctx.needs_input_grad[4]:  # `sample_weights`
            sample_grad = _sample_weight_grad(grad, [memory.view(-1), *ctx.slower], batch)
        needs_grad = ctx.needs_input_grad[8:]  # of the parameters
        grads: list[Tensor | None] = [None] * len(needs_grad)
        if any(needs_grad):
            is_dense = ctx.rule.gradient is Gradient.DENSE
            groups = groups_of(batch) if locations is None else locations.groups
            compute_grad = _dense_grad if is_dense else _sparse_grad
            grad_of_all = compute_grad(ctx, grad, batch, groups, sample_weights)
            split = _split_dense if is_dense else _split_sparse
            offsets = ctx.weight_offsets
            gradients = [grad_of_all] if offsets is None else split(grad_of_all, offsets)
            grads_to_move = zip(gradients, ctx.devices, needs_grad, strict=True)
            grads = [g.to(device) if is_needed else None for g, device, is_needed in grads_to_move]
        if batch.hooks is not None:
            batch.hooks.after_update()
        return None, None, None, None, sample_grad, None, None, None, *grads


def _dense_grad(
    ctx: Any, grad: Tensor, batch: Lookup, groups: tbe.Groups, sample_weights: Tensor | None
) -> Tensor:
    """Compute the gradient of all weights, as one SGD step with learning rate -1 from zeros.

    The result has the shape of the memory, `[rows, dim]` or flat, and the dtype of the parameters.
    """
    result = grad.new_zeros(ctx.shape, dtype=ctx.dtype)
    hyper = grad.new_zeros(Hyper.OPTIMIZER_ARGS, dtype=torch.float64)
    for entry in (Hyper.LEARNING_RATE, Hyper.SEED):
        hyper[entry].fill_(-1.0)  # a copy from the host would wait for the GPU
    tiers = Tiers([result.view(-1)], [], hyper, grad.dtype)
    _update_call(tiers, "sgd", grad, batch, RowLocations(groups), sample_weights)()
    return result


def _sparse_grad(
    ctx: Any, grad: Tensor, batch: Lookup, groups: tbe.Groups, sample_weights: Tensor | None
) -> Tensor:
    """Return the gradient `[rows, dim]` as a sparse tensor of the distinct rows of the batch."""
    values = tbe.tbe_row_grads(
        grad,
        batch.features,
        *groups,
        batch.offsets,
        batch.bag_layout,
        sample_weights,
        codes.POOLING[batch.pooling.value],
        ctx.shape[1],
    )
    num_distinct = ctx.num_distinct
    if num_distinct is None:
        num_distinct = int(groups.count)
    elif not groups.count.is_cuda and num_distinct != int(groups.count):
        raise ValueError(
            "num_distinct_rows must be the number of distinct rows of the batch, "
            f"{int(groups.count)}, got {num_distinct}; with None they are counted"
        )
    rows, values = groups.rows[:num_distinct], values[:num_distinct]
    return _rows_of_gradient(rows, values.to(ctx.dtype), ctx.shape)


def _rows_of_gradient(rows: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a sparse gradient of `shape`, with `values` `[n, dim]` of distinct, ascending rows."""
    values = values if len(values) else torch.empty_like(values)  # grown in place by torch: no view
    return torch.sparse_coo_tensor(
        rows.unsqueeze(0), values, shape, is_coalesced=True, check_invariants=False
    )


def _split_dense(grad: Tensor, weight_offsets: Sequence[WeightOffset]) -> list[Tensor]:
    """Split the gradient of all weights into views by table."""
    flat = grad.reshape(-1)
    return [flat[t.begin : t.begin + t.rows * t.dim].view(t.rows, t.dim) for t in weight_offsets]


def _split_sparse(grad: Tensor, weight_offsets: Sequence[WeightOffset]) -> list[Tensor]:
    """Split a sparse gradient, whose rows ascend, by table; the host waits for the device."""
    rows, values = grad._indices()[0], grad._values()
    edges = [(t.first_row, t.first_row + t.rows) for t in weight_offsets]
    bounds = torch.searchsorted(rows, torch.tensor(edges, device=rows.device)).tolist()
    return [
        _rows_of_gradient(rows[begin:end] - t.first_row, values[begin:end], (t.rows, t.dim))
        for t, (begin, end) in zip(weight_offsets, bounds, strict=True)
    ]


def lookup(
    memory: Tensor,
    parameters: Sequence[Tensor],
    batch: Lookup,
    optimizer: Optimizer,
    sample_weights: Tensor | None = None,
    output_dtype: torch.dtype = torch.float32,
    num_distinct: int | None = None,
    weight_offsets: Sequence[WeightOffset] | None = None,
    slower: Sequence[Tensor] = (),
) -> Tensor:
    """Look up a batch; its parameters, views of `memory` or `slower`, get gradients.

    The output is as in `FusedLookup.forward`, in `output_dtype`. Gradients have the dtype of
    `memory`, but gradients for a deferred optimizer are float32 if `HAS_GRAD_DTYPE`. While
    gradients are disabled this is `lookup_no_grad`. On the CPU, backward raises ValueError for a
    wrong `num_distinct`.

    Args:
        memory: weights of the first tier, `[rows, dim]`; flat only for dense gradients.
        parameters: parameters that get gradients.
        batch: the lookups.
        optimizer: optimizer that leaves gradients; its `leaves_gradient` selects their form.
        sample_weights: float32 `[L]`; gets a gradient if it requires one.
        output_dtype: dtype of the output.
        num_distinct: number of distinct rows of the batch, for sparse gradients. With None,
            backward reads the number from the device, and the host waits.
        weight_offsets: location of each parameter; None: the only parameter is `memory` itself.
        slower: flat weights of the other tiers.
    """
    if not torch.is_grad_enabled():
        return lookup_no_grad([memory.view(-1), *slower], batch, sample_weights, output_dtype)
    gradient_dtype = torch.float32 if optimizer.deferred and HAS_GRAD_DTYPE else memory.dtype
    return GradientLookup.apply(
        memory.detach(),
        slower,
        weight_offsets,
        batch,
        sample_weights,
        (output_dtype, gradient_dtype),
        UpdateRule.from_optimizer(optimizer),
        num_distinct,
        *parameters,
    )


def lookup_no_grad(
    weights: Sequence[Tensor],
    batch: Lookup,
    sample_weights: Tensor | None,
    output_dtype: torch.dtype,
) -> Tensor:
    """Look up a batch, without gradients.

    `weights` are as in `Tiers`; the output is as in `FusedLookup.forward`, in `output_dtype`.
    """
    return tbe.tbe_lookup(
        with_default_rows(weights, batch.default_rows),
        batch.features,
        batch.indices,
        batch.offsets,
        batch.slots,
        batch.bag_layout,
        sample_weights,
        codes.POOLING[batch.pooling.value],
        batch.output_dim,
        output_dtype,
    )


def multiply_weights(sample_weights: Tensor | None, scales: Tensor | None) -> Tensor | None:
    """Multiply two optional weight tensors, float32 `[L]`; None counts as ones."""
    if sample_weights is None or scales is None:
        return scales if sample_weights is None else sample_weights
    return sample_weights * scales


def clip_gradient(grad: Tensor, rule: UpdateRule, scale: Tensor | None = None) -> Tensor:
    """Clamp the gradient of the output to the bounds of the optimizer, times `scale` if given.

    `grad` may have any shape; `scale` is a scalar. If the optimizer has no bounds, `grad` itself is
    returned.
    """
    if rule.max_gradient is None:
        return grad
    bound = largest_within(rule.max_gradient, grad.dtype)
    if scale is None:
        return grad.clamp(-bound, bound)
    bounds = (scale.to(grad.device) * bound).to(grad.dtype)
    return grad.clamp(-bounds, bounds)


def largest_within(bound: float, dtype: torch.dtype) -> float:
    """Return the largest number of `dtype` that is <= `bound` (>= 0).

    A clamp rounds its bounds to nearest; rounded up, it would pass values above `bound`.
    """
    limits = torch.finfo(dtype)
    _, exponent = math.frexp(bound)  # bound < 2 ** exponent
    spacing = max(limits.eps * 2.0 ** (exponent - 1), limits.smallest_normal * limits.eps)
    return min(math.floor(bound / spacing) * spacing, limits.max)


def is_fused(optimizer: Optimizer) -> bool:
    """Return whether tables have the states of `optimizer` and run its updates."""
    return not isinstance(optimizer, External)


def updates_in_backward(optimizer: Optimizer) -> bool:
    """Return whether backward applies `optimizer`, instead of leaving a gradient."""
    return optimizer.leaves_gradient is None


def may_write_weights(hyper: Tensor, optimizer_code: int) -> bool:
    """Return whether an update may write weights; at rate 0 only momentum and bounds of norms do.

    So `gradcheck`, at rate 0, finds the weights unchanged. Off the CPU the result is True, without
    a read of `hyper`.
    """
    if not hyper.is_cpu:  # faster than `hyper.device.type`, which makes two objects
        return True
    rate, *_, max_norm = hyper.tolist()[: Hyper.OPTIMIZER_ARGS + 2]  # costs as much as one number
    has_bound = optimizer_code in codes.WITH_MAX_NORM and max_norm > 0
    return bool(rate != 0 or has_bound or optimizer_code == codes.OPTIMIZER["lars"])


def with_default_rows(weights: Sequence[Tensor], default_rows: Tensor | None) -> Sequence[Tensor]:
    """Return the tiers that a lookup reads, with the default rows, if any, as the cache tier."""
    if default_rows is None:
        return weights
    no_values = default_rows.new_empty(0)
    empty_tiers = [no_values] * (Tier.CACHE - len(weights))
    return [*weights, *empty_tiers, default_rows]


def _update_call(
    tiers: Tiers,
    optimizer: str,
    grad: Tensor,
    batch: Lookup,
    locations: RowLocations,
    sample_weights: Tensor | None,
) -> partial[None]:
    """Return the call of the op that updates rows; `grad` has the shape of the output."""
    is_compiling = torch.compiler.is_compiling()
    return partial(
        tbe.tbe_update_ if is_compiling else c_function(tbe.tbe_update_),
        tiers.weights,
        tiers.states,
        tiers.hyperparams,
        codes.OPTIMIZER[optimizer],
        grad,
        batch.features,
        *locations.groups,
        batch.offsets,
        locations.row_slots,
        batch.bag_layout,
        sample_weights,
        codes.POOLING[batch.pooling.value],
    )


def _located(batch: Lookup, locations: RowLocations) -> Lookup:
    """Return a batch whose lookups read the rows where they are now."""
    indices = batch.indices if locations.indices is None else locations.indices
    return batch._replace(indices=indices, slots=locations.slots)


def _sample_weight_grad(grad: Tensor, weights: Sequence[Tensor], batch: Lookup) -> Tensor:
    """Return the gradients of sample weights, float32 `[L]`: row times gradient of its bag."""
    return tbe.tbe_sample_weight_grad(
        grad,
        with_default_rows(weights, batch.default_rows),
        batch.features,
        batch.indices,
        batch.offsets,
        batch.slots,
        batch.bag_layout,
        codes.POOLING[batch.pooling.value],
    )


def _save(ctx: Any, batch: Lookup, *tensors: Tensor | None) -> None:
    """Save tensors for backward; autograd raises if they are overwritten before it."""
    ctx.save_for_backward(batch.indices, batch.offsets, batch.bag_layout, batch.slots, *tensors)
    placeholder = batch.features
    ctx.batch = batch._replace(
        indices=placeholder, offsets=placeholder, bag_layout=None, slots=None
    )


def _unpack_saved(ctx: Any) -> tuple[Any, ...]:
    """Return the batch with its saved tensors, then the other saved tensors."""
    indices, offsets, bag_layout, slots, *tensors = ctx.saved_tensors
    batch = ctx.batch._replace(indices=indices, offsets=offsets, bag_layout=bag_layout, slots=slots)
    return batch, *tensors
