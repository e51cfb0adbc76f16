"""Tensor-train tables: a provider of rows for the table-batched ops.

A batch is keyed, grouped and pooled by the ops of `emblib.ops.tbe`; between them the ops here
make each distinct row once. With L lookups, D dim, d cores, M distinct rows and `Q_l`, `Q_r` the
columns of the two halves that the chain of cores is cut into (`Q_l * Q_r = D`, see
csrc/tt/args.h):

- `tt_keys(indices, rows, row_factors)` int64 `[L]`: sort keys whose neighbours share cores; -1
  stays, any other id outside the table becomes that of row 0
- `tt_plan(keys, count, row_factors)`: eight int32 tensors, `TTPlan`: which halves the rows share
- `tt_rows(cores, plan, row_factors, dim_factors, num_saved)`: rows `[L, D]` in key order, those
  from M on unspecified, and the values of the first `num_saved` left halves, `[num_saved, Q_l *
  rank]`, for backward
- `tt_core_grads(cores, plan, prefixes, row_grads, row_factors, dim_factors)`: gradients of all
  cores
- `update_rows_(weights, states, hyper, optimizer, grads)`: the optimizer, a number of
  `emblib.ops.codes`, on the rows of a matrix whose gradient is not zero throughout

Cores are float32 `[p_k, R_k * q_k * R_{k+1}]`. The gradient of the large middle core is formed by
one product per row of it, never per lookup; nothing is summed with atomics, so that the same
input gives the same bits on any number of threads.

Sources: TT-Rec (Yin et al., MLSys 2021) for the table; sharing of prefixes and sums per distinct
row as in EL-Rec (Wang et al., SC 2022); grouping by the middle core is emblib's. The definition
is `emblib.reference.tt`.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from emblib.columns import FeatureColumn, Hyper
from emblib.ops import autograd, codes, tbe
from emblib.ops.scaled_gradients import counted_step, scale_of_backward, unscaled
from emblib.specs import Pooling

_ops = torch.ops.emblib

# Left-half values kept for backward on the CPU, where making them again costs about as much as
# reading them back from memory; it bounds scratch memory whatever the batch.
_KEPT_BYTES_CPU = 6 << 20


class TTPlan(NamedTuple):
    """Distinct rows by their halves (int32; padded to L): see csrc/tt.

    `lefts`, `rights` distinct ids; `left_segments` over rows, `right_segments` over `right_rows`;
    `row_lefts`, `row_rights` the halves of each row; `counts` distinct rows, lefts and rights.
    """

    lefts: Tensor
    left_segments: Tensor
    row_lefts: Tensor
    rights: Tensor
    right_segments: Tensor
    row_rights: Tensor
    right_rows: Tensor
    counts: Tensor


class TTLookup(NamedTuple):
    """One batch for one table; `features` describe it as a dense one of prod(row_factors) rows."""

    rows: int
    row_factors: tuple[int, ...]
    dim_factors: tuple[int, ...]
    features: Tensor
    indices: Tensor
    offsets: Tensor
    pooling: Pooling
    output_dtype: torch.dtype


class ShareGradients(Protocol):
    """Sums the gradients of cores that several lookups, slices of one table, share.

    `use` is called once, with the gradients to update the cores of this slice with: when they are
    known, which may be after the backward passes of other slices.
    """

    def __call__(self, grads: list[Tensor], use: Callable[[list[Tensor]], None]) -> None:
        """Add `grads`, those of this slice, and pass the sums to `use`."""
        ...


class Made(NamedTuple):
    """The results of a forward pass: groups, rows, and the row of each lookup."""

    groups: tbe.Groups
    plan: TTPlan
    rows: Tensor
    prefixes: Tensor
    inverse: Tensor


def make_rows(cores: Sequence[Tensor], batch: TTLookup, num_saved: int) -> Made:
    """Group the lookups and make the distinct rows, keeping `num_saved` left-half values."""
    keys = _ops.tt_keys(batch.indices, batch.rows, batch.row_factors)
    total = math.prod(batch.row_factors)
    groups = tbe.group(batch.features, keys, batch.offsets, total)
    plan = TTPlan(*_ops.tt_plan(groups.rows, groups.count, batch.row_factors))
    rows, prefixes = _ops.tt_rows(cores, plan, batch.row_factors, batch.dim_factors, num_saved)
    inverse = _ops.group_inverse(groups.segments, groups.lookups, groups.count)
    return Made(groups, plan, rows, prefixes, inverse)


def pool(made: Made, batch: TTLookup, sample_weights: Tensor | None) -> Tensor:
    """Pool the rows made for a batch: `[B, D]`, or `[L, D]` for NONE."""
    return _ops.tbe_lookup(
        [made.rows.view(-1)],
        _row_features(batch),
        made.inverse,
        batch.offsets,
        None,
        None,
        sample_weights,
        codes.POOLING[batch.pooling.value],
        made.rows.size(1),
        batch.output_dtype,
    )


def lookup(
    cores: Sequence[Tensor], batch: TTLookup, sample_weights: Tensor | None = None
) -> Tensor:
    """Pool each bag; no gradients."""
    return pool(make_rows(cores, batch, 0), batch, sample_weights)


def kept_prefixes(batch: TTLookup, cores: Sequence[Tensor]) -> int:
    """Return how many left-half values a forward pass keeps for its backward pass."""
    if len(cores) == 2:
        return 0  # the left half is the first core itself
    most = min(batch.indices.numel(), math.prod(batch.row_factors[:2]))
    if cores[0].device.type != "cpu":
        return most
    return min(most, _KEPT_BYTES_CPU // (4 * _left_value_size(cores, batch.dim_factors)))


class DenseTTLookup(torch.autograd.Function):
    """Look up; backward returns a dense gradient per core."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: TTLookup,
        sample_weights: Tensor | None,
        rule: autograd.UpdateRule,
        share: ShareGradients | None,
        *cores: Tensor,
    ) -> Tensor:
        """Return `[B, D]`, or `[L, D]` for NONE."""
        made = make_rows(cores, batch, kept_prefixes(batch, cores))
        ctx.batch, ctx.rule, ctx.share = batch, rule, share
        _save(ctx, made, sample_weights, cores)
        return pool(made, batch, sample_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of cores and, if asked, of `sample_weights`."""
        made, sample_weights, cores = _saved(ctx)
        if ctx.rule.max_gradient is not None:
            grad = autograd.clip_gradient(grad, ctx.rule, scale_of_backward())
        core_grads: Sequence[Tensor | None] = [None] * len(cores)
        if any(ctx.needs_input_grad[4:]):
            core_grads = _core_grads(grad, made, ctx.batch, sample_weights, cores)
            if ctx.share is not None:
                shared: list[Tensor] = []
                ctx.share(core_grads, shared.extend)
                core_grads = shared
        sample_grad = None
        if ctx.needs_input_grad[1]:
            sample_grad = _sample_weight_grad(grad, made, ctx.batch)
        return None, sample_grad, None, None, *core_grads


class FusedTTLookup(torch.autograd.Function):
    """Look up; backward updates `cores` and `states` in place, without a core gradient.

    `grad_anchor` is a scalar that requires grad: it ties the output to autograd while the cores,
    which backward mutates, stay out of it. The gradient is taken at the cores as
    backward finds them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        grad_anchor: Tensor,
        cores: list[Tensor],
        states: list[list[Tensor]],
        hyper: Tensor,
        rule: autograd.UpdateRule,
        batch: TTLookup,
        sample_weights: Tensor | None,
        share: ShareGradients | None,
    ) -> Tensor:
        """Return `[B, D]`, or `[L, D]` for NONE."""
        compiling = torch.compiler.is_compiling()  # a compiled graph cannot compare versions
        made = make_rows(cores, batch, 0 if compiling else kept_prefixes(batch, cores))
        ctx.cores = cores
        ctx.versions = [] if compiling else [core._version for core in cores]
        ctx.states, ctx.hyperparams, ctx.rule, ctx.batch = states, hyper, rule, batch
        ctx.share = share
        _save(ctx, made, sample_weights, ())
        return pool(made, batch, sample_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Apply the optimizer to every core; gradient of `sample_weights` if asked."""
        made, sample_weights, _ = _saved(ctx)
        cores, batch = ctx.cores, ctx.batch
        scale = overflow = sample_grad = None
        if ctx.needs_input_grad[0]:
            scale = scale_of_backward()
        if scale is not None:
            found = unscaled(grad, scale)
            grad, overflow = found.gradient, found.overflow()
        if ctx.needs_input_grad[6]:
            sample_grad = _sample_weight_grad(grad, made, batch)
            if scale is not None:
                sample_grad = sample_grad * scale.to(sample_grad.device)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None, None, None, sample_grad, None
        if ctx.versions and ctx.versions != [core._version for core in cores]:
            # Another backward pass has moved the cores: values kept from forward no longer fit.
            _, prefixes = _ops.tt_rows(
                cores, made.plan, batch.row_factors, batch.dim_factors, made.prefixes.size(0)
            )
            made = made._replace(prefixes=prefixes)
        grad = autograd.clip_gradient(grad, ctx.rule)
        core_grads = _core_grads(grad, made, batch, sample_weights, cores)
        update = partial(update_cores, cores, ctx.states, ctx.hyperparams, ctx.rule)
        if scale is not None:
            update = partial(update, skips_overflow=True)
        if ctx.share is None:
            update(core_grads)
        else:
            ctx.share(core_grads, update)
        return overflow, None, None, None, None, None, sample_grad, None


def update_cores(
    cores: Sequence[Tensor],
    states: Sequence[list[Tensor]],
    hyper: Tensor,
    rule: autograd.UpdateRule,
    grads: Sequence[Tensor],
    *,
    skips_overflow: bool = False,
) -> None:
    """Apply one step of the optimizer to every core.

    With `skips_overflow` a step whose gradients are not all finite changes nothing.
    """
    is_finite = None
    if skips_overflow:
        is_finite = torch.stack([grad.isfinite().all() for grad in grads]).all()
        grads = [torch.where(is_finite, grad, 0.0) for grad in grads]  # zeros update no row
    hyper[Hyper.STEP].add_(counted_step(hyper, grads[0]))
    updated = 0
    try:
        for core, state, grad in zip(cores, states, grads, strict=True):
            _ops.update_rows_(core, state, hyper, codes.OPTIMIZER[rule.name], grad)
            updated += 1
    except BaseException:
        if not updated:  # else cores have taken this step
            hyper[Hyper.STEP].sub_(1)
        raise
    if is_finite is not None:
        hyper[Hyper.STEP].add_(is_finite).sub_(1)
    torch.autograd.graph.increment_version(cores)


def _core_grads(
    grad: Tensor,
    made: Made,
    batch: TTLookup,
    sample_weights: Tensor | None,
    cores: Sequence[Tensor],
) -> list[Tensor]:
    row_grads = _ops.tbe_row_grads(
        grad,
        batch.features,
        *made.groups,
        batch.offsets,
        None,
        sample_weights,
        codes.POOLING[batch.pooling.value],
        math.prod(batch.dim_factors),
    )
    return _ops.tt_core_grads(
        cores, made.plan, made.prefixes, row_grads, batch.row_factors, batch.dim_factors
    )


def _sample_weight_grad(grad: Tensor, made: Made, batch: TTLookup) -> Tensor:
    return _ops.tbe_sample_weight_grad(
        grad,
        [made.rows.view(-1)],
        _row_features(batch),
        made.inverse,
        batch.offsets,
        None,
        None,
        codes.POOLING[batch.pooling.value],
    )


def _save(ctx: Any, made: Made, sample_weights: Tensor | None, cores: Sequence[Tensor]) -> None:
    """Save what backward reads; rows and inverse only if sample weights need a gradient."""
    if sample_weights is None or not sample_weights.requires_grad:
        made = made._replace(rows=made.rows[:0], inverse=made.inverse[:0])
    ctx.save_for_backward(
        *made.groups, *made.plan, made.rows, made.prefixes, made.inverse, sample_weights, *cores
    )


def _saved(ctx: Any) -> tuple[Made, Tensor | None, Sequence[Tensor]]:
    groups, plan = len(tbe.Groups._fields), len(TTPlan._fields)
    tensors = ctx.saved_tensors
    rows, prefixes, inverse, sample_weights = tensors[groups + plan : groups + plan + 4]
    made = Made(
        tbe.Groups(*tensors[:groups]),
        TTPlan(*tensors[groups : groups + plan]),
        rows,
        prefixes,
        inverse,
    )
    return made, sample_weights, tensors[groups + plan + 4 :]


def _row_features(batch: TTLookup) -> Tensor:
    """Describe the made rows as a dense table of L rows, without a host-to-device copy."""
    features = batch.features.clone()
    features[:, FeatureColumn.ROWS] = batch.indices.numel()
    return features


def _left_value_size(cores: Sequence[Tensor], dim_factors: Sequence[int]) -> int:
    """Return the floats per left half: its columns times the rank at its end."""
    rank = cores[0].size(1) // dim_factors[0]
    if len(cores) == 2:
        return cores[0].size(1)
    return dim_factors[0] * cores[1].size(1) // rank


@torch.library.register_fake("emblib::tt_keys")
def _(indices: Tensor, rows: int, row_factors: Sequence[int]) -> Tensor:
    return indices.new_empty(indices.numel(), dtype=torch.int64)


@torch.library.register_fake("emblib::tt_plan")
def _(keys: Tensor, count: Tensor, row_factors: Sequence[int]) -> list[Tensor]:
    n = keys.numel()
    return [keys.new_empty(size, dtype=torch.int32) for size in (n, n + 1, n, n, n + 1, n, n, 3)]


@torch.library.register_fake("emblib::tt_rows")
def _(
    cores: Sequence[Tensor],
    plan: Sequence[Tensor],
    row_factors: Sequence[int],
    dim_factors: Sequence[int],
    num_saved: int,
) -> tuple[Tensor, Tensor]:
    rows = cores[0].new_empty(plan[2].numel(), math.prod(dim_factors))
    return rows, cores[0].new_empty(num_saved, _left_value_size(cores, dim_factors))


@torch.library.register_fake("emblib::tt_core_grads")
def _(cores: Sequence[Tensor], *rest: Any) -> list[Tensor]:
    return [torch.empty_like(core) for core in cores]


@torch.library.register_fake("emblib::update_rows_")
def _(*arguments: Any) -> None:
    return None
