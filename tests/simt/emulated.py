"""The emulated kernels behind the names and arguments of `torch.ops.emblib`."""

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from tests.simt.library import Word, library

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
POOLINGS = {"sum": 0, "mean": 1, "none": 2}
# Above this many rows the sort needs 64-bit keys; tests lower it to run that path on small tables.
WIDE_FROM = 2**32 - 1


def _indices(tensor: Tensor) -> tuple[Tensor, bool]:
    return tensor, tensor.dtype == torch.int64


def _batch(features: Tensor, offsets: Tensor) -> int:
    return (offsets.numel() - 1) // max(features.size(0), 1)


def _group_outputs(n: int, unique_dtype: torch.dtype) -> list[Tensor]:
    return [
        torch.full((n,), 7, dtype=unique_dtype),
        torch.full((n + 1,), 7, dtype=torch.int32),
        torch.full((n,), 7, dtype=torch.int32),
        torch.full((1,), 7, dtype=torch.int32),
    ]


def group(keys: Tensor, num_keys: int) -> tuple[Tensor, ...]:
    """Emulated `group`."""
    out = _group_outputs(keys.numel(), keys.dtype)
    library().call("group", *_indices(keys), keys.numel(), num_keys, num_keys >= WIDE_FROM, *out)
    return tuple(out)


def group_inverse(segments: Tensor, permutation: Tensor, count: Tensor) -> Tensor:
    """Emulated `group_inverse`."""
    inverse = torch.empty_like(permutation)
    library().call("group_inverse", segments, permutation, count, permutation.numel(), inverse)
    return inverse


def bounds_check(
    indices: Tensor, offsets: Tensor, features: Tensor, mode: str
) -> tuple[Tensor, Tensor]:
    """Emulated `bounds_check`."""
    repaired = torch.empty(offsets.numel(), dtype=torch.int32)
    violations = torch.zeros(2, dtype=torch.int64)
    sizes = (indices.numel(), offsets.numel() - 1, _batch(features, offsets))
    words: tuple[Word, ...] = (*_indices(indices), *_indices(offsets), features, *sizes)
    library().call("bounds_check", *words, mode == "fatal", repaired, violations)
    return repaired, violations


def _lookup_words(
    weights: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    pooling: str,
    columns: int,
) -> tuple[Word, ...]:
    return (
        *(weights, DTYPES[weights.dtype], features, features.size(0)),
        *(*_indices(indices), *_indices(offsets), indices.numel()),
        *(_batch(features, offsets), columns, POOLINGS[pooling], sample_weights),
    )


def tbe_lookup(
    weights: Tensor,
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    sample_weights: Tensor | None,
    pooling: str,
    columns: int,
    output_dtype: torch.dtype,
) -> Tensor:
    """Emulated `tbe_lookup`."""
    lines = indices.numel() if pooling == "none" else _batch(features, offsets)
    out = torch.full((lines, columns), torch.nan, dtype=output_dtype)
    words = _lookup_words(weights, features, indices, offsets, sample_weights, pooling, columns)
    library().call("lookup", *words, out, DTYPES[output_dtype])
    return out


def tbe_group(
    features: Tensor, indices: Tensor, offsets: Tensor, total_rows: int
) -> tuple[Tensor, ...]:
    """Emulated `tbe_group`."""
    n = indices.numel()
    rows, segments, lookups, count = _group_outputs(n, torch.int64)
    bags, scratch = torch.full((n,), 7, dtype=torch.int32), torch.empty(n, dtype=torch.int32)
    sizes = (_batch(features, offsets), offsets.numel() - 1, n, total_rows, total_rows >= WIDE_FROM)
    inputs = (features, *_indices(indices), *_indices(offsets), *sizes)
    library().call("tbe_group", *inputs, rows, segments, lookups, bags, count, scratch)
    return rows, segments, lookups, bags, count


def _update(
    step: tuple[Word, ...],
    grad: Tensor,
    features: Tensor,
    groups: Sequence[Tensor],
    offsets: Tensor,
    sample_weights: Tensor | None,
    pooling: str,
) -> None:
    rows, segments, lookups, bags, count = groups
    pooled = pooling != "none"
    mean_dim = -(-grad.size(1) // max(features.size(0), 1)) if pooled else grad.size(1)
    sizes = (offsets.numel() - 1, lookups.numel(), POOLINGS[pooling])
    library().call(
        "update",
        mean_dim,
        *step,
        *(grad, DTYPES[grad.dtype], grad.size(1), features, _batch(features, offsets)),
        *(*_indices(offsets), *sizes, sample_weights),
        *(rows, segments, lookups, bags, count),
    )


def tbe_row_grads(
    grad: Tensor,
    features: Tensor,
    *groups_and_rest: Tensor | str | int | None,
) -> Tensor:
    """Emulated `tbe_row_grads`: rows, segments, lookups, bags, count, offsets, ... as the op."""
    *groups, offsets, sample_weights, pooling, dim = groups_and_rest
    assert isinstance(dim, int)
    assert isinstance(groups[0], Tensor)
    out = torch.zeros(groups[0].numel(), dim)
    step = (None, None, out, 0, None, None, None)
    _update(step, grad, features, groups, offsets, sample_weights, pooling)
    return out


def _step_words(
    weights: Tensor, states: Sequence[Tensor], hyper: Tensor, optimizer: str
) -> tuple[tuple[Word, ...], ctypes.Array]:
    name = ctypes.create_string_buffer(optimizer.encode())
    by_row = optimizer == "rowwise_adagrad"
    element = [None, None] if by_row else [*states, None, None][:2]
    row = states[0] if by_row else None
    return (name, hyper, weights, DTYPES[weights.dtype], *element, row), name


def tbe_update_(
    weights: Tensor,
    states: Sequence[Tensor],
    hyper: Tensor,
    optimizer: str,
    grad: Tensor,
    features: Tensor,
    *groups_and_rest: Tensor | str | None,
) -> None:
    """Emulated `tbe_update_`: rows, segments, lookups, bags, count, offsets, ... as the op."""
    *groups, offsets, sample_weights, pooling = groups_and_rest
    step, _name = _step_words(weights, states, hyper, optimizer)
    _update(step, grad, features, groups, offsets, sample_weights, pooling)


def tbe_sample_weight_grad(
    grad: Tensor, weights: Tensor, features: Tensor, indices: Tensor, offsets: Tensor, pooling: str
) -> Tensor:
    """Emulated `tbe_sample_weight_grad`."""
    out = torch.zeros(indices.numel())
    words = _lookup_words(weights, features, indices, offsets, None, pooling, grad.size(1))
    library().call("sample_weight_grad", *words, grad, DTYPES[grad.dtype], out)
    return out


def update_rows_(
    weights: Tensor, states: Sequence[Tensor], hyper: Tensor, optimizer: str, grads: Tensor
) -> None:
    """Emulated `update_rows_`."""
    step, _name = _step_words(weights, states, hyper, optimizer)
    library().call("update_rows", *step, grads, *grads.shape)


def fill_uniform_(tensor: Tensor, low: float, high: float, seed: int) -> None:
    """Emulated `fill_uniform_`."""
    bits = struct.unpack("qq", struct.pack("dd", low, high))
    library().call("fill_uniform", tensor, tensor.numel(), DTYPES[tensor.dtype], *bits, seed)
