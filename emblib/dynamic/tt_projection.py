"""Rows of a tensor train, and the projection of given rows into its cores.

`RowEviction.PROJECT` calls `project` for the rows that leave a cache: a few steps of gradient
descent move the cores towards these rows. Cores and rows are float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.reference import tt as reference
from emblib.specs import TTSpec

_MAX_STEPS = 8  # gradient steps of a projection; not measured
_MIN_STEP_LENGTH = 1e-8  # a step that is halved below this ends the projection
_ROWS_PER_CHUNK = 1 << 14  # rows computed at a time
_MAX_ROWS_IN_INT64 = 1 << 31  # up to here row id times multiplier fits into int64


def compute_rows(spec: TTSpec, cores: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Compute the rows `[n, dim]` of valid ids, int64 `[n]`, from the cores."""
    return torch.cat(
        [_rows_at(spec, cores, _train_rows_of(spec, chunk)) for chunk in ids.split(_ROWS_PER_CHUNK)]
    )


def project(spec: TTSpec, cores: Sequence[Tensor], ids: Tensor, values: Tensor) -> Sequence[Tensor]:
    """Return cores whose rows of `ids` are closer to `values`.

    Each step goes along the gradient of the squared error. Its length is optimal if the rows are
    linear in the cores; since they are not, it is halved until the error falls.

    Args:
        spec: spec of the table.
        cores: cores of the table; they do not change.
        ids: int64 `[n]`, valid ids of the table.
        values: float32 `[n, dim]`, the row wanted for each id.

    Returns:
        New cores, or `cores` themselves if no step comes closer. The host waits for a GPU.
    """
    train_rows = _train_rows_of(spec, ids)
    squared_error = float((_rows_at(spec, cores, train_rows) - values).square().sum())
    for _ in range(_MAX_STEPS):
        residual = values - _rows_at(spec, cores, train_rows)
        grads = reference.core_grads(
            cores, train_rows, residual, spec.row_factors, spec.dim_factors
        )
        direction = _row_derivative(spec, cores, grads, train_rows)
        squared_norm = float(direction.square().sum())
        step_length = float((direction * residual).sum()) / squared_norm if squared_norm else 0.0
        while step_length > _MIN_STEP_LENGTH:
            new_cores = [core + step_length * grad for core, grad in zip(cores, grads, strict=True)]
            new_squared_error = float(
                (_rows_at(spec, new_cores, train_rows) - values).square().sum()
            )
            if new_squared_error < squared_error:
                break
            step_length /= 2
        else:
            break
        cores, squared_error = new_cores, new_squared_error
    return cores


def _train_rows_of(spec: TTSpec, ids: Tensor) -> Tensor:
    """Map ids to rows of the tensor train, int64 `[n]`, by the permutation of the spec."""
    multiplier, offset = spec.permutation
    if spec.rows > _MAX_ROWS_IN_INT64:
        return reference.permuted(ids, spec.rows, spec.permutation)
    return (ids * multiplier + offset) % spec.rows


def _rows_at(spec: TTSpec, cores: Sequence[Tensor], train_rows: Tensor) -> Tensor:
    """Return rows of a tensor train, `[n, dim]`."""
    return reference.rows(cores, train_rows, spec.row_factors, spec.dim_factors)


def _row_derivative(
    spec: TTSpec, cores: Sequence[Tensor], grads: Sequence[Tensor], train_rows: Tensor
) -> Tensor:
    """Return the derivative of the rows, `[n, dim]`, along the gradients of the cores."""

    def rows_of_cores(*moving_cores: Tensor) -> Tensor:
        return _rows_at(spec, moving_cores, train_rows)

    derivative: Tensor = torch.func.jvp(rows_of_cores, tuple(cores), tuple(grads))[1]
    return derivative
