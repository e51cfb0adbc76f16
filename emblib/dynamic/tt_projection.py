"""Rows that the cores of a tensor train make, and steps of the cores towards given rows.

`project` is what `RowEviction.PROJECT` does with the rows that leave a cache. Cores and rows are
float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.reference import tt as reference
from emblib.specs import TTSpec

_STEPS = 8  # along the gradient, by which the changes of rows go into the cores
_SHORTEST_STEP = 1e-8
_CHUNK = 1 << 14  # rows made at a time
_MOST_ROWS_IN_INT64 = 1 << 31  # whose product with a multiplier fits


def rows(spec: TTSpec, cores: Sequence[Tensor], ids: Tensor) -> Tensor:
    """Return the rows `[n, dim]` that the cores of a table make of ids, int64 `[n]`."""
    return torch.cat([_rows_at(spec, cores, _digits(spec, some)) for some in ids.split(_CHUNK)])


def project(spec: TTSpec, cores: Sequence[Tensor], ids: Tensor, values: Tensor) -> Sequence[Tensor]:
    """Return cores whose rows of `ids` are closer to `values`.

    Each step is along the gradient of the squared error, as long as is best where rows are
    linear in the cores, and half that until the error falls.

    Args:
        spec: spec of the table.
        cores: cores of the table; they do not change.
        ids: int64 `[n]`.
        values: float32 `[n, dim]`.
    """
    digits = _digits(spec, ids)
    error = float((_rows_at(spec, cores, digits) - values).square().sum())
    for _ in range(_STEPS):
        residual = values - _rows_at(spec, cores, digits)
        grads = reference.core_grads(cores, digits, residual, spec.row_factors, spec.dim_factors)
        moved = _moved(spec, cores, grads, digits)
        size = float(moved.square().sum())
        step = float((moved * residual).sum()) / size if size else 0.0
        while step > _SHORTEST_STEP:
            tried = [c + step * g for c, g in zip(cores, grads, strict=True)]
            squared_error = float((_rows_at(spec, tried, digits) - values).square().sum())
            if squared_error < error:
                break
            step /= 2
        else:
            break
        cores, error = tried, squared_error
    return cores


def _digits(spec: TTSpec, ids: Tensor) -> Tensor:
    """Return the rows of the train that ids stand for."""
    multiplier, offset = spec.permutation
    if spec.rows > _MOST_ROWS_IN_INT64:
        return reference.permuted(ids, spec.rows, spec.permutation)
    return (ids * multiplier + offset) % spec.rows


def _rows_at(spec: TTSpec, cores: Sequence[Tensor], digits: Tensor) -> Tensor:
    return reference.rows(cores, digits, spec.row_factors, spec.dim_factors)


def _moved(
    spec: TTSpec, cores: Sequence[Tensor], grads: Sequence[Tensor], digits: Tensor
) -> Tensor:
    """Return the derivative of rows as the cores move along their gradients."""

    def rows_of_cores(*moving: Tensor) -> Tensor:
        return _rows_at(spec, moving, digits)

    change: Tensor = torch.func.jvp(rows_of_cores, tuple(cores), tuple(grads))[1]
    return change
