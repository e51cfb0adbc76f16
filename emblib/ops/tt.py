"""Tensor-train tables: a provider of rows for the table-batched ops.

The ops of `emblib.ops.tbe` group and pool the lookups of T tables; the ops here compute the keys,
and each distinct row once. The chain of cores of a table is divided into two halves, see
csrc/tt/args.h. With L lookups, D the dim of the widest table, d cores, M distinct rows, and `Q_l`,
`Q_r` the columns of the halves (`Q_l * Q_r = dim`):

- `tables`, `feature_tables`: int64 `[T, 10]` and `[F, 10]`, see `emblib.columns.TTTableColumn`; the
  second has the row of the table of each feature. `layout_of` makes them
- `cores`, `row_factors`, `dim_factors`: lists for all tables, table after table; table t has
  `num_cores[t]` elements in each
- `tt_keys(indices, offsets, bag_layout, feature_tables)` int64 `[L]`: sort keys within the table,
  whose neighbours share cores; -1 stays, any other id outside the table gets the key of id 0
- `tt_plan(keys, count, tables, left_ids, right_ids)`: eight int32 tensors, `TTPlan`: which halves
  the distinct rows share. Here `keys` has the distinct keys of all tables, one table after the
  other; `left_ids` and `right_ids` are those of `TTLayout`
- `tt_rows(cores, plan, row_factors, dim_factors, num_cores, num_saved, matmul_precision=0)`: the
  distinct rows `[L, D]` in key order; rows from M on and columns beyond the dim of their table are
  unspecified. Also the values of the first `num_saved` left halves, `[num_saved, largest Q_l *
  rank]`, for backward
- `tt_core_grads(cores, plan, left_values, row_grads, row_factors, dim_factors, num_cores,
  matmul_precision=0)`: gradients of all cores
- `tt_update_(cores, states, hyper, optimizer, plan, ...)`, then as `tt_core_grads`: computes these
  gradients and applies the optimizer to the core rows that the batch uses, as `update_rows_`;
  `states` has all states of the first core, then all states of the second, ...
- `update_rows_(weights, states, hyper, optimizer, grads, first_row)`: applies the optimizer, a
  number of `emblib.ops.codes`, to the rows of a matrix whose gradient is not all zero; `first_row`
  is the id of its first row in the random numbers of stochastic rounding

`matmul_precision`, a number of `emblib.ops.codes`, is the minimum precision of products on a GPU's
tensor cores; all other products are float32.

Cores are `[p_k, R_k * q_k * R_{k+1}]`, all float32, all float16 or all bfloat16; rows and gradients
are float32. Core rows in 16 bits are converted as they are read. An update rounds the rows that it
writes, to nearest or stochastically as `hyper` selects; the number of a core row among the rows of
all cores selects its random numbers. So before rounding, results equal, bit for bit, the results of
float32 cores with the same values. For 16-bit cores the CPU makes float32 copies of the core rows
that the batch uses, a GPU copies of the cores of left halves. The gradient of the large middle core
is computed by one product per core row, not per lookup. No sum uses atomics: the same input has the
same results, bit for bit, on any number of threads, and a table the same as in a batch of its own.

Sources: TT-Rec (Yin et al., MLSys 2021) for the table; sharing of prefixes and sums per distinct
row as in EL-Rec (Wang et al., SC 2022); grouping by the middle core is emblib's. The definition
is `emblib.reference.tt`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from emblib.columns import FeatureColumn, Hyper
from emblib.ops import autograd, codes, tbe
from emblib.ops.derivatives import once_differentiable
from emblib.ops.one_call import c_function, count_step
from emblib.ops.scaled_gradients import scale_of_backward, step_increment_if_unscaled, unscale
from emblib.ops.tt_fakes import left_value_size
from emblib.ops.tt_layout import Chunk, chunks_of, is_chunked
from emblib.ops.tt_layout import TTLayout as TTLayout
from emblib.ops.tt_layout import TTLookup as TTLookup
from emblib.ops.tt_layout import layout_of as layout_of
from emblib.ops.tt_layout import max_lookups_at_once as max_lookups_at_once
from emblib.ops.tt_layout import row_feature as row_feature
from emblib.specs import Pooling

_ops = torch.ops.emblib
tt_lookup_checked_ = _ops.tt_lookup_checked_.default
tt_backward_ = _ops.tt_backward_.default

# Maximum size of the left halves that are saved for backward on the CPU. Computing a half again
# costs about as much as reading it from memory, so this small limit loses nothing.
_SAVED_BYTES_CPU = 6 << 20


class TTPlan(NamedTuple):
    """The halves that the distinct rows of a batch share.

    All tensors are int32, and all but `starts` are padded to their size for L rows.

    Rows are numbered in the order of their keys, which is also the order of their left halves.

    Attributes:
        lefts: `[L]`, ids of the distinct left halves.
        left_segments: `[L + 1]`; rows `[left_segments[i], left_segments[i + 1])` have left half i.
        row_lefts: `[L]`, index in `lefts` of the left half of each row.
        rights: `[L]`, ids of the distinct right halves.
        right_segments: `[L + 1]`, segments of `right_rows` by right half.
        row_rights: `[L]`, index in `rights` of the right half of each row.
        right_rows: `[L]`, the rows ordered by right half.
        starts: `[3 * (T + 1)]`, where rows, left halves and right halves of each table begin.
    """

    lefts: Tensor
    left_segments: Tensor
    row_lefts: Tensor
    rights: Tensor
    right_segments: Tensor
    row_rights: Tensor
    right_rows: Tensor
    starts: Tensor


_NUM_GROUP_TENSORS, _NUM_PLAN_TENSORS = len(tbe.Groups._fields), len(TTPlan._fields)


class ShareGradients(Protocol):
    """Function that sums the gradients of cores which several slices of one table share.

    It calls `apply_gradients` once with the summed gradients, as soon as these are known. That may
    be after the backward passes of other slices.
    """

    def __call__(
        self, grads: list[Tensor], apply_gradients: Callable[[list[Tensor]], None]
    ) -> None:
        """Add `grads`, the gradients of this slice, and pass the sums to `apply_gradients`."""
        ...


class ComputedRows(NamedTuple):
    """The results of a forward pass that its backward needs.

    Attributes:
        groups: distinct rows and their lookups, as `tbe_group` returns them.
        plan: halves that the distinct rows share.
        left_values: float32 `[num_saved, largest Q_l * rank]`, values of the first left halves.
        rows: float32 `[L, D]`, the distinct rows; None if backward does not read them.
        inverse: int32 `[L]`, the row of each lookup; None without `rows`.
    """

    groups: tbe.Groups
    plan: TTPlan
    left_values: Tensor
    rows: Tensor | None = None
    inverse: Tensor | None = None


def _group_lookups(batch: TTLookup) -> tuple[tbe.Groups, TTPlan]:
    """Group the lookups by row, and the rows by the halves that they share."""
    layout = batch.layout
    keys = _ops.tt_keys(batch.indices, batch.offsets, batch.bag_layout, batch.feature_tables)
    groups = tbe.group(
        batch.key_features(),
        keys,
        batch.offsets,
        layout.num_keys,
        batch.bag_layout,
        repaired=batch.repaired,
    )
    plan = TTPlan(
        *_ops.tt_plan(groups.rows, groups.count, batch.tables, layout.left_ids, layout.right_ids)
    )
    return groups, plan


def compute_rows(cores: Sequence[Tensor], batch: TTLookup, num_saved: int) -> ComputedRows:
    """Group the lookups and compute the distinct rows, saving `num_saved` left halves.

    `cores` are the cores of all tables, table after table.
    """
    groups, plan = _group_lookups(batch)
    rows, left_values = _ops.tt_rows(
        cores, plan, *batch.layout.op_arguments(), num_saved, batch.matmul_code()
    )
    inverse = _ops.group_inverse(groups.segments, groups.lookups, groups.count)
    return ComputedRows(groups, plan, left_values, rows, inverse)


def lookup_for_backward(
    cores: Sequence[Tensor],
    batch: TTLookup,
    sample_weights: Tensor | None,
    num_saved: int = 0,
    *,
    keeps_rows: bool = False,
) -> tuple[Tensor, ComputedRows]:
    """Pool each bag; return the output of `pool`, and the values that backward needs.

    The values have the computed rows only if `keeps_rows`, and the first `num_saved` left halves;
    backward computes the other halves again.
    """
    if keeps_rows or not _has_one_op_per_pass(batch):
        computed = compute_rows(cores, batch, num_saved)
        out = pool(computed, batch, sample_weights)
        return out, computed if keeps_rows else computed._replace(rows=None, inverse=None)
    layout = batch.layout
    out, *saved_tensors = tt_lookup_checked_(
        cores,
        batch.tables,
        batch.feature_tables,
        batch.features,
        batch.indices,
        batch.offsets,
        batch.bag_layout,
        sample_weights,
        codes.POOLING[batch.pooling.value],
        batch.output_dim,
        batch.output_dtype,
        layout.row_factors,
        layout.dim_factors,
        layout.num_cores,
        num_saved,
        None,
        batch.tables.new_empty(2),  # violations, which a call without a check does not count
        batch.matmul_code(),
    )
    groups = tbe.Groups(*saved_tensors[:_NUM_GROUP_TENSORS])
    plan = TTPlan(*saved_tensors[_NUM_GROUP_TENSORS:-1])
    return out, ComputedRows(groups, plan, saved_tensors[-1])


def _has_one_op_per_pass(batch: TTLookup) -> bool:
    """Return whether one op serves a whole pass: on the CPU, outside compiled graphs."""
    return batch.indices.device.type == "cpu" and not torch.compiler.is_compiling()


def pool(computed: ComputedRows, batch: TTLookup, sample_weights: Tensor | None) -> Tensor:
    """Pool the computed rows of a batch: `[B, output_dim]`, or `[L, D]` for NONE.

    With a `bag_layout` the output is flat, `[output_dim]`. NONE needs tables of one dim.
    """
    weights, features, slots = _row_memory(computed, batch)
    return _ops.tbe_lookup(
        weights,
        features,
        computed.inverse,
        batch.offsets,
        slots,
        batch.bag_layout,
        sample_weights,
        codes.POOLING[batch.pooling.value],
        batch.output_dim,
        batch.output_dtype,
    )


def lookup(
    cores: Sequence[Tensor], batch: TTLookup, sample_weights: Tensor | None = None
) -> Tensor:
    """Pool each bag; no gradients.

    `cores` are the cores of all tables, `sample_weights` is float32 `[L]`; the output is as in
    `pool`.
    """
    if is_chunked(batch, sample_weights):
        return lookup_chunks(cores, batch, sample_weights)
    return lookup_for_backward(cores, batch, sample_weights)[0]


def lookup_chunks(
    cores: Sequence[Tensor], batch: TTLookup, sample_weights: Tensor | None
) -> Tensor:
    """Pool each bag chunk by chunk.

    Arguments and output are those of `lookup`; a chunk bounds the scratch memory.
    """
    pooling = codes.POOLING[batch.pooling.value]
    is_flat = batch.bag_layout is not None
    shape = tbe.output_shape(
        batch.key_features(),
        batch.indices,
        batch.offsets,
        pooling,
        batch.output_dim,
        is_flat=is_flat,
    )
    out = torch.zeros(shape, dtype=torch.float32, device=batch.indices.device)
    for chunk in chunks_of(batch, sample_weights):
        _pool_chunk(chunk, cores, batch, sample_weights, out)
    return out.to(batch.output_dtype)


def _pool_chunk(
    chunk: Chunk,
    cores: Sequence[Tensor],
    batch: TTLookup,
    sample_weights: Tensor | None,
    out: Tensor,
) -> None:
    """Write the output of a chunk to `out`. With pooling, a chunk with a part of a bag adds to it.

    `out`, float32, has the shape of the output of the whole `batch`.
    """
    weights = None if sample_weights is None else sample_weights[chunk.lookups]
    pooled, _ = lookup_for_backward(cores[chunk.cores], chunk.batch, weights)
    out_elements = chunk.elements(out, batch)
    if chunk.bag_fraction < 1.0 and batch.pooling is not Pooling.NONE:
        out[out_elements] += pooled * (chunk.bag_fraction if batch.pooling is Pooling.MEAN else 1.0)
    else:
        out[out_elements] = pooled


def chunk_gradients(
    grad: Tensor,
    cores: Sequence[Tensor],
    batch: TTLookup,
    sample_weights: Tensor | None,
    *,
    needs_sample_grad: bool,
) -> tuple[list[Tensor], Tensor | None]:
    """Return the gradients of whole cores, summed over chunks, and of the sample weights.

    `grad` has the shape of the output. The gradients are float32, in the shapes of the cores. That
    of the sample weights is float32 `[L]`; None without `needs_sample_grad`.
    """
    core_grads = [torch.zeros_like(core, dtype=torch.float32) for core in cores]
    ids = batch.indices
    sample_grad = torch.zeros(ids.numel(), device=ids.device) if needs_sample_grad else None
    for chunk in chunks_of(batch, sample_weights):
        _add_chunk_gradients(chunk, grad, cores, batch, sample_weights, (core_grads, sample_grad))
    return core_grads, sample_grad


def _add_chunk_gradients(
    chunk: Chunk,
    grad: Tensor,
    cores: Sequence[Tensor],
    batch: TTLookup,
    sample_weights: Tensor | None,
    sums: tuple[list[Tensor], Tensor | None],
) -> None:
    """Add the gradients of a chunk to `sums`: those of all cores and of the sample weights."""
    core_grads, sample_grad = sums
    chunk_batch, chunk_cores = chunk.batch, cores[chunk.cores]
    weights = None if sample_weights is None else sample_weights[chunk.lookups]
    chunk_grad = grad[chunk.elements(grad, batch)].contiguous()
    if batch.pooling is Pooling.MEAN and chunk.bag_fraction < 1.0:
        chunk_grad = chunk_grad * chunk.bag_fraction
    if sample_grad is not None:
        chunk_rows = compute_rows(chunk_cores, chunk_batch, 0)
        sample_grad[chunk.lookups] = _sample_weight_grad(chunk_grad, chunk_rows, chunk_batch)
        chunk_rows = chunk_rows._replace(rows=None, inverse=None)
    else:
        left_value_size = _left_value_size(chunk_cores, chunk_batch.layout)
        empty = chunk_cores[0].new_empty(0, left_value_size, dtype=torch.float32)
        chunk_rows = ComputedRows(*_group_lookups(chunk_batch), empty)
    row_grads = _row_grads(chunk_grad, chunk_rows, chunk_batch, weights)
    chunk_grads = _core_grads(row_grads, chunk_rows, chunk_batch, chunk_cores)
    for total, core_grad in zip(core_grads[chunk.cores], chunk_grads, strict=True):
        total += core_grad


def _left_value_size(cores: Sequence[Tensor], layout: TTLayout) -> int:
    return left_value_size(cores, layout.dim_factors, layout.num_cores)


def num_saved_left_halves(batch: TTLookup, cores: Sequence[Tensor]) -> int:
    """Return the number of left halves that a forward of this batch saves for backward."""
    return min(batch.indices.numel(), max_saved_left_halves(batch.layout, cores))


def max_saved_left_halves(layout: TTLayout, cores: Sequence[Tensor]) -> int:
    """Return the maximum number of left halves that a forward saves for backward."""
    if max(layout.num_cores) == 2:
        return 0  # the left half is the first core itself
    if cores[0].device.type != "cpu":
        return layout.left_ids
    max_left_halves = _SAVED_BYTES_CPU // (torch.float32.itemsize * _left_value_size(cores, layout))
    return min(layout.left_ids, max_left_halves)


class DenseTTLookup(torch.autograd.Function):
    """Look up; backward returns a dense gradient per core."""

    @staticmethod
    def forward(
        ctx: Any,
        batch: TTLookup,
        sample_weights: Tensor | None,
        rule: autograd.UpdateRule,
        share_functions: Mapping[int, ShareGradients],
        *cores: Tensor,
    ) -> Tensor:
        """Return the output of `pool`."""
        ctx.batch, ctx.rule, ctx.share_functions = batch, rule, share_functions
        ctx.is_chunked = is_chunked(batch, sample_weights)
        if ctx.is_chunked:
            ctx.save_for_backward(batch.indices, batch.offsets, sample_weights, *cores)
            return lookup_chunks(cores, batch, sample_weights)
        keeps_rows = sample_weights is not None and sample_weights.requires_grad
        num_saved = num_saved_left_halves(batch, cores)
        out, computed = lookup_for_backward(
            cores, batch, sample_weights, num_saved, keeps_rows=keeps_rows
        )
        _save(ctx, computed, sample_weights, cores)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of cores and, if required, of `sample_weights`."""
        _, needs_sample_grad, _, _, *needs_core_grads = ctx.needs_input_grad
        if ctx.rule.max_gradient is not None:
            grad = autograd.clip_gradient(grad, ctx.rule, scale_of_backward())
        core_grads: list[Any]
        if ctx.is_chunked:
            _, _, sample_weights, *cores = ctx.saved_tensors
            core_grads, sample_grad = chunk_gradients(
                grad,
                cores,
                ctx.batch,
                sample_weights,
                needs_sample_grad=needs_sample_grad,
            )
            if not any(needs_core_grads):
                return None, sample_grad, None, None, *(None for _ in cores)
            for table, share_gradients in ctx.share_functions.items():
                _sum_shared_grads(core_grads, ctx.batch.layout.cores_of(table), share_gradients)
            return None, sample_grad, None, None, *core_grads
        computed, sample_weights, cores = _unpack_saved(ctx)
        core_grads = [None] * len(cores)
        if any(needs_core_grads):
            row_grads = _row_grads(grad, computed, ctx.batch, sample_weights)
            core_grads = _core_grads(row_grads, computed, ctx.batch, cores)
            for table, share_gradients in ctx.share_functions.items():
                _sum_shared_grads(core_grads, ctx.batch.layout.cores_of(table), share_gradients)
        sample_grad = None
        if needs_sample_grad:
            sample_grad = _sample_weight_grad(grad, computed, ctx.batch)
        return None, sample_grad, None, None, *core_grads


class FusedTTLookup(torch.autograd.Function):
    """Look up; backward updates `cores` and `states` in place, usually without a core gradient.

    Gradients of whole cores are formed for scaled gradients, for shared or frozen cores, and for
    batches that are processed in chunks.

    `grad_anchor` is a scalar that requires grad, unless all tables are frozen: autograd sees it as
    the input, in place of the cores, which backward mutates. Gradients of cores are computed from
    the cores at the time of backward. The gradient of sample weights is computed from the rows that
    forward read; for batches in chunks from those at the time of backward.
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
        share_functions: Mapping[int, ShareGradients],
        frozen_cores: frozenset[int],
    ) -> Tensor:
        """Return the output of `pool`."""
        is_compiling = torch.compiler.is_compiling()  # a compiled graph cannot compare versions
        ctx.cores = cores
        ctx.is_chunked = is_chunked(batch, sample_weights)
        ctx.core_versions = [] if is_compiling else [core._version for core in cores]
        ctx.states, ctx.hyperparams, ctx.rule, ctx.batch = states, hyper, rule, batch
        ctx.share_functions, ctx.frozen_cores = share_functions, frozen_cores
        if ctx.is_chunked:
            ctx.save_for_backward(batch.indices, batch.offsets, sample_weights)
            return lookup_chunks(cores, batch, sample_weights)
        keeps_rows = sample_weights is not None and sample_weights.requires_grad
        num_saved = 0 if is_compiling else num_saved_left_halves(batch, cores)
        out, computed = lookup_for_backward(
            cores, batch, sample_weights, num_saved, keeps_rows=keeps_rows
        )
        _save(ctx, computed, sample_weights, ())
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Apply the optimizer to the trained cores; return the gradients of the inputs."""
        cores, batch = ctx.cores, ctx.batch
        if ctx.is_chunked:
            return _fused_backward_chunked(ctx, grad, ctx.saved_tensors[2])
        computed, sample_weights, _ = _unpack_saved(ctx)
        trains, _, _, _, _, _, needs_sample_grad, _, _ = ctx.needs_input_grad
        grad, scale, is_finite, overflow = _unscale_and_clip(grad, ctx.rule, trains=trains)
        sample_grad = None
        if needs_sample_grad:
            sample_grad = _sample_weight_grad(grad, computed, batch)
            if scale is not None:
                sample_grad = sample_grad * scale.to(sample_grad.device)
        if not trains:
            return None, None, None, None, None, None, sample_grad, None, None
        if ctx.core_versions and ctx.core_versions != [core._version for core in cores]:
            # Another backward has updated the cores, so values saved in forward are out of date.
            num_saved = computed.left_values.size(0)
            _, left_values = _ops.tt_rows(
                cores, computed.plan, *batch.layout.op_arguments(), num_saved, batch.matmul_code()
            )
            computed = computed._replace(left_values=left_values)
        if scale is None and not ctx.share_functions and not ctx.frozen_cores:
            _update(
                cores, ctx.states, ctx.hyperparams, ctx.rule, computed, batch, grad, sample_weights
            )
            return overflow, None, None, None, None, None, sample_grad, None, None
        row_grads = _row_grads(grad, computed, batch, sample_weights)
        core_grads = _core_grads(row_grads, computed, batch, cores)
        _apply_core_grads(ctx, core_grads, is_finite)
        return overflow, None, None, None, None, None, sample_grad, None, None


class _ClippedGradient(NamedTuple):
    """The gradient of an output, clipped, and divided by the factor of a `GradScaler`.

    Attributes:
        grad: the gradient.
        scale: factor of the `GradScaler`. It, `is_finite` and `overflow` are None if there is none,
            or if it was not read, see `_unscale_and_clip`.
        is_finite: whether the gradient is finite, on all ranks; a bool scalar.
        overflow: gradient of the anchor, 0 or infinity.
    """

    grad: Tensor
    scale: Tensor | None
    is_finite: Tensor | None
    overflow: Tensor | None


def _unscale_and_clip(grad: Tensor, rule: autograd.UpdateRule, *, trains: bool) -> _ClippedGradient:
    """Divide a gradient by its scale, and clip it.

    A gradient that neither trains cores nor is clipped stays scaled, and its scale is not read.
    """
    scale = scale_of_backward() if trains or rule.max_gradient is not None else None
    if scale is None:
        return _ClippedGradient(autograd.clip_gradient(grad, rule), None, None, None)
    unscaled = unscale(grad, scale)
    clipped = autograd.clip_gradient(unscaled.gradient, rule)
    return _ClippedGradient(clipped, scale, unscaled.is_finite, unscaled.overflow())


def _fused_backward_chunked(
    ctx: Any, grad: Tensor, sample_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Apply one step with gradients summed over the chunks of a large batch."""
    trains, _, _, _, _, _, needs_sample_grad, _, _ = ctx.needs_input_grad
    grad, scale, is_finite, overflow = _unscale_and_clip(grad, ctx.rule, trains=trains)
    core_grads, sample_grad = chunk_gradients(
        grad,
        ctx.cores,
        ctx.batch,
        sample_weights,
        needs_sample_grad=needs_sample_grad,
    )
    if sample_grad is not None and scale is not None:
        sample_grad = sample_grad * scale.to(sample_grad.device)
    if trains:
        _apply_core_grads(ctx, core_grads, is_finite)
    return overflow, None, None, None, None, None, sample_grad, None, None


def _apply_core_grads(ctx: Any, core_grads: list[Tensor], is_finite: Tensor | None) -> None:
    """Apply one step to the trained cores, from gradients of whole cores.

    `is_finite`: whether the scaled gradients of the batch are finite on all ranks; None if they are
    not scaled.
    """
    if is_finite is not None:  # also for cores that no row of the batch uses, and shared ones
        core_grads = [torch.where(is_finite, grad, torch.nan) for grad in core_grads]
    trained_cores = [k for k in range(len(ctx.cores)) if k not in ctx.frozen_cores]
    first_rows = ctx.batch.layout.first_core_rows()

    def update(grads: list[Tensor]) -> None:
        update_cores(
            [ctx.cores[k] for k in trained_cores],
            [ctx.states[k] for k in trained_cores],
            ctx.hyperparams,
            ctx.rule,
            [grads[k] for k in trained_cores],
            [first_rows[k] for k in trained_cores],
            skips_overflow=is_finite is not None,
        )

    layout = ctx.batch.layout
    if len(layout.num_cores) == 1 and ctx.share_functions:
        ctx.share_functions[0](core_grads, update)
    else:
        for table, share_gradients in ctx.share_functions.items():
            _sum_shared_grads(core_grads, layout.cores_of(table), share_gradients)
        update(core_grads)


def _update(
    cores: Sequence[Tensor],
    states: Sequence[list[Tensor]],
    hyper: Tensor,
    rule: autograd.UpdateRule,
    computed: ComputedRows,
    batch: TTLookup,
    grad: Tensor,
    sample_weights: Tensor | None,
) -> None:
    """Apply one step of the optimizer to the core rows that the batch uses, in place.

    `grad` has the shape of the output; `states` are the optimizer states of each core.
    """
    all_states = [state for core_states in states for state in core_states]
    optimizer, grad = codes.OPTIMIZER[rule.name], rule.descent(grad)
    if _has_one_op_per_pass(batch):
        torch.autograd.graph.increment_version(cores)  # first: an interrupt must not omit it
        tt_backward_(
            cores,
            all_states,
            hyper,
            optimizer,
            grad,
            batch.features,
            batch.indices,
            batch.offsets,
            batch.bag_layout,
            sample_weights,
            codes.POOLING[batch.pooling.value],
            [*computed.groups, *computed.plan, computed.left_values],
            *batch.layout.op_arguments(),
            False,  # the saved left halves are those of the current cores
            batch.matmul_code(),
        )
        return
    row_grads = _row_grads(grad, computed, batch, sample_weights)
    arguments = (
        cores,
        all_states,
        hyper,
        optimizer,
        computed.plan,
        computed.left_values,
        row_grads,
        *batch.layout.op_arguments(),
        batch.matmul_code(),
    )
    _make_step(cores, hyper, row_grads, [partial(_ops.tt_update_.default, *arguments)])


def _sum_shared_grads(core_grads: list[Any], cores: slice, share_gradients: ShareGradients) -> None:
    """Replace the gradients of one table's cores by the sums over all of its slices."""
    summed_grads: list[Tensor] = []
    share_gradients(core_grads[cores], summed_grads.extend)
    if not summed_grads:
        raise RuntimeError(
            "slices of one tensor train on one rank need modules of their own, since their "
            "gradients are summed one after another"
        )
    core_grads[cores] = summed_grads


def update_cores(
    cores: Sequence[Tensor],
    states: Sequence[list[Tensor]],
    hyper: Tensor,
    rule: autograd.UpdateRule,
    grads: Sequence[Tensor],
    first_rows: Sequence[int],
    *,
    skips_overflow: bool = False,
) -> None:
    """Apply one step of the optimizer to every core, in place.

    `grads` have the shapes of the cores, at least one. `states` are the optimizer states of each
    core, `hyper` the float64 entries of `emblib.columns.Hyper`. `first_rows` has the number of the
    first row of each core, see `TTLayout.first_core_rows`. With `skips_overflow` a step whose
    gradients are not all finite changes nothing, and is not counted.
    """
    is_finite = None
    if skips_overflow:
        is_finite = torch.stack([grad.isfinite().all() for grad in grads]).all()
        grads = [torch.where(is_finite, grad, 0.0) for grad in grads]  # zeros update no row
    optimizer = codes.OPTIMIZER[rule.name]
    updates = [
        partial(
            _ops.update_rows_.default, core, state, hyper, optimizer, rule.descent(grad), first_row
        )
        for core, state, grad, first_row in zip(cores, states, grads, first_rows, strict=True)
    ]
    _make_step(cores, hyper, grads[0], updates, is_finite)


def _make_step(
    cores: Sequence[Tensor],
    hyper: Tensor,
    grad: Tensor,
    updates: Sequence[partial[Any]],
    is_finite: Tensor | None = None,
) -> None:
    """Count a step and update cores; an interrupt leaves all of it done or nothing.

    A step that is not finite is not counted; its `updates` change nothing.
    """
    step_increment = step_increment_if_unscaled(hyper, grad)
    if torch.compiler.is_compiling():
        hyper[Hyper.STEP].add_(step_increment)
        for update in updates:
            update()
        torch.autograd.graph.increment_version(cores)
        return
    if is_finite is not None:
        step_increment = is_finite.to(hyper.dtype)
    torch.autograd.graph.increment_version(cores)  # first: an interrupt must not omit it
    count_step(
        hyper[Hyper.STEP],
        step_increment,
        *(partial(c_function(update.func), *update.args) for update in updates),
    )


def _row_grads(
    grad: Tensor, computed: ComputedRows, batch: TTLookup, sample_weights: Tensor | None
) -> Tensor:
    """Return the gradients of the distinct rows.

    The result is float32 `[L, D]`; rows from the number of distinct rows on are unspecified.
    """
    return _ops.tbe_row_grads(
        grad,
        batch.key_features(),
        *computed.groups,
        batch.offsets,
        batch.bag_layout,
        sample_weights,
        codes.POOLING[batch.pooling.value],
        batch.layout.dim,
    )


def _core_grads(
    row_grads: Tensor, computed: ComputedRows, batch: TTLookup, cores: Sequence[Tensor]
) -> list[Tensor]:
    """Return the gradient of each core, float32 of its shape, from `row_grads` `[L, D]`."""
    return _ops.tt_core_grads(
        cores,
        computed.plan,
        computed.left_values,
        row_grads,
        *batch.layout.op_arguments(),
        batch.matmul_code(),
    )


def _sample_weight_grad(grad: Tensor, computed: ComputedRows, batch: TTLookup) -> Tensor:
    """Return the gradient of sample weights, float32 `[L]`."""
    weights, features, slots = _row_memory(computed, batch)
    return _ops.tbe_sample_weight_grad(
        grad,
        weights,
        features,
        computed.inverse,
        batch.offsets,
        slots,
        batch.bag_layout,
        codes.POOLING[batch.pooling.value],
    )


def _save(
    ctx: Any, computed: ComputedRows, sample_weights: Tensor | None, cores: Sequence[Tensor]
) -> None:
    """Save the tensors that backward reads."""
    results = (computed.left_values, computed.rows, computed.inverse)
    ctx.save_for_backward(*computed.groups, *computed.plan, *results, sample_weights, *cores)


def _unpack_saved(ctx: Any) -> tuple[ComputedRows, Tensor | None, Sequence[Tensor]]:
    """Return the computed rows, the sample weights and the other saved tensors."""
    tensors = ctx.saved_tensors
    groups = tbe.Groups(*tensors[:_NUM_GROUP_TENSORS])
    plan = TTPlan(*tensors[_NUM_GROUP_TENSORS : _NUM_GROUP_TENSORS + _NUM_PLAN_TENSORS])
    results = tensors[_NUM_GROUP_TENSORS + _NUM_PLAN_TENSORS :]
    left_values, row_values, inverse, sample_weights, *cores = results
    return ComputedRows(groups, plan, left_values, row_values, inverse), sample_weights, cores


def _row_memory(
    computed: ComputedRows, batch: TTLookup
) -> tuple[list[Tensor], Tensor, Tensor | None]:
    """Return weights, features and slots of a lookup that reads the computed rows as dense tables.

    If dims differ, all rows have the stride of the widest table, as only rows of a cache can: the
    computed rows are then the cache.
    """
    features = batch.features[2 * batch.num_features() :]
    if features.device.type == "cpu":  # ops on the CPU check that a table has its ROWS
        features = features.clone()
        features[:, FeatureColumn.ROWS] = batch.indices.numel()
    assert computed.rows is not None
    assert computed.inverse is not None
    rows = computed.rows.view(-1)
    if batch.layout.has_one_dim:
        return [rows], features, None
    no_rows = rows[:0]
    return [rows, no_rows, no_rows, rows], features, computed.inverse
