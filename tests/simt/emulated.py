"""The emulated kernels behind the names and arguments of `torch.ops.emblib`."""

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.ops.codes import BOUNDS_CHECK, OPTIMIZER, POOLING
from emblib.reference.optim import OPTIMIZERS
from tests.simt.library import Word, library

DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
FUNCTORS = {code: name for name, code in OPTIMIZER.items()}
# Above this many rows the sort needs 64-bit keys; tests lower it to run that path on small tables.
WIDE_FROM = 2**32 - 1
# The largest cluster of the device that groups small batches in one launch; 0 sorts them.
MAX_CLUSTER = 0


def _indices(tensor: Tensor) -> tuple[Tensor, bool]:
    return tensor, tensor.dtype == torch.int64


def _batch(features: Tensor, offsets: Tensor) -> int:
    return (offsets.numel() - 1) // max(features.size(0), 1)


def _map(
    features: Tensor, offsets: Tensor, bag_layout: Tensor | None, columns: int
) -> tuple[Word, ...]:
    return bag_layout, max(_batch(features, offsets), 1), columns


class BatchCheck:
    """The outputs of a check while lookups are grouped."""

    def __init__(self, offsets: Tensor) -> None:
        self.repaired = torch.full((offsets.numel(),), 7, dtype=torch.int32)
        self.violations = torch.tensor([7, 7])  # to be added to


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
    sizes = (keys.numel(), num_keys, num_keys >= WIDE_FROM, MAX_CLUSTER)
    library().call("group", *_indices(keys), *sizes, *out)
    return tuple(out)


def group_inverse(segments: Tensor, permutation: Tensor, count: Tensor) -> Tensor:
    """Emulated `group_inverse`."""
    inverse = torch.empty_like(permutation)
    library().call("group_inverse", segments, permutation, count, permutation.numel(), inverse)
    return inverse


def bounds_check(
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    bag_layout: Tensor | None,
    mode: int,
    launches: str = "bounds_check",
) -> tuple[Tensor, Tensor]:
    """Emulated `bounds_check`; `launches` may be those in front of a lookup, "check_batch"."""
    repaired = torch.empty(offsets.numel(), dtype=torch.int32)
    violations = torch.zeros(2, dtype=torch.int64)
    sizes = (indices.numel(), offsets.numel() - 1, *_map(features, offsets, bag_layout, 0))
    words: tuple[Word, ...] = (*_indices(indices), *_indices(offsets), features, *sizes)
    library().call(launches, *words, mode == BOUNDS_CHECK["fatal"], repaired, violations)
    return repaired, violations


def _tier_words(weights: Sequence[Tensor], slots: Tensor | None) -> tuple[Word, ...]:
    words: list[Word] = []
    for tier in [*weights, None, None, None][:4]:
        words += [0, 0] if tier is None else [tier, tier.numel()]
    home = next((w.dtype for w in weights[:3] if w.numel()), weights[0].dtype)
    cached = len(weights) == 4 and weights[3].numel() > 0
    return (*words, DTYPES[home], DTYPES[weights[3].dtype if cached else home], slots)


def _lookup_words(
    tiers: tuple[Word, ...],
    features: Tensor,
    batch: tuple[Tensor, Tensor, Tensor | None],
    sample_weights: Tensor | None,
    pooling: int,
    columns: int,
) -> tuple[Word, ...]:
    indices, offsets, bag_layout = batch
    return (
        *(*tiers, features, features.size(0), *_indices(indices), *_indices(offsets)),
        *(indices.numel(), offsets.numel() - 1, *_map(features, offsets, bag_layout, columns)),
        *(pooling, sample_weights),
    )


def tbe_lookup(
    weights: Sequence[Tensor], features: Tensor, indices: Tensor, offsets: Tensor, *rest: Any
) -> Tensor:
    """Emulated `tbe_lookup`: then slots, bag_layout, sample_weights, ... as the op."""
    slots, bag_layout, sample_weights, pooling, columns, output_dtype = rest
    shape: tuple[int, ...] = (_batch(features, offsets), columns)
    if pooling == POOLING["none"]:
        shape = (indices.numel(), columns)
    elif bag_layout is not None:
        shape = (columns,)
    out = torch.full(shape, torch.nan, dtype=output_dtype)
    tiers, batch = _tier_words(weights, slots), (indices, offsets, bag_layout)
    words = _lookup_words(tiers, features, batch, sample_weights, pooling, columns)
    library().call("lookup", *words, out, DTYPES[output_dtype])
    return out


def tbe_group(
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    bag_layout: Tensor | None,
    total_rows: int,
    check: BatchCheck | None = None,
) -> tuple[Tensor, ...]:
    """Emulated `tbe_group`; with `check` it looks at the offsets and counts violations too."""
    n = indices.numel()
    rows, segments, lookups, count = _group_outputs(n, torch.int64)
    bags, scratch = torch.full((n,), 7, dtype=torch.int32), torch.empty(n, dtype=torch.int32)
    sizes = (offsets.numel() - 1, n, total_rows, total_rows >= WIDE_FROM, MAX_CLUSTER)
    batch = (bag_layout, max(_batch(features, offsets), 1))
    inputs = (features, *_indices(indices), *_indices(offsets), *batch, *sizes)
    checks = (None, False, None) if check is None else (check.repaired, True, check.violations)
    outputs = (rows, segments, lookups, bags, count, scratch, None)
    library().call("tbe_group", *inputs, *checks, *outputs)
    return rows, segments, lookups, bags, count


def _update(
    step: tuple[Word, ...],
    grad: Tensor,
    features: Tensor,
    groups: Sequence[Tensor],
    bags: tuple[Tensor, Tensor | None],
    row_slots: Tensor | None,
    rest: tuple[Tensor | None, int],
    result_stride: int = 0,
) -> None:
    (offsets, bag_layout), (sample_weights, pooling) = bags, rest
    pooled, columns = pooling != POOLING["none"], grad.size(-1)
    parts = len(features) if bag_layout is None else offsets.numel() - 1
    mean_dim = -(-columns // max(parts, 1)) if pooled else columns
    widest = min(columns, 1024) if pooled and bag_layout is not None else columns
    sizes = (offsets.numel() - 1, groups[2].numel(), pooling, widest)
    library().call(
        "update",
        mean_dim,
        *step,
        grad,
        DTYPES[grad.dtype],
        columns,
        features,
        *_map(features, offsets, bag_layout, columns),
        *_indices(offsets),
        *sizes,
        sample_weights,
        *groups,
        row_slots,
        result_stride,
    )


_NO_TIER: tuple[Word, ...] = (None, 0, 0, None, 0, None, 0, None, None, None, 0)


def tbe_row_grads(
    grad: Tensor,
    features: Tensor,
    *groups_and_rest: Any,
) -> Tensor:
    """Emulated `tbe_row_grads`: rows, segments, lookups, bags, count, offsets, ... as the op."""
    *groups, offsets, bag_layout, sample_weights, pooling, dim = groups_and_rest
    out = torch.zeros(groups[0].numel(), dim)
    step = (-1, None, out, *_NO_TIER[1:], *_NO_TIER * 3)
    rest = (sample_weights, pooling)
    _update(step, grad, features, groups, (offsets, bag_layout), None, rest, dim)
    return out


def _step_words(
    weights: Sequence[Tensor], states: Sequence[Tensor], hyper: Tensor, optimizer: int
) -> tuple[Word, ...]:
    per_row = OPTIMIZERS[FUNCTORS[optimizer]].per_row
    words: list[Word] = [optimizer, hyper]
    for t, tier in enumerate(weights):
        mine = states[t * len(per_row) : (t + 1) * len(per_row)]
        element = [s for s, by_row in zip(mine, per_row, strict=True) if not by_row]
        row = [s for s, by_row in zip(mine, per_row, strict=True) if by_row]
        words += [tier, DTYPES[tier.dtype], tier.numel()]
        for k in range(2):
            words += [element[k], DTYPES[element[k].dtype]] if k < len(element) else [None, 0]
        words += [*row, None, None, None][:3]
        words.append(min((s.numel() for s in row), default=1 << 40))
    return (*words, *_NO_TIER * (4 - len(weights)))


def tbe_update_(
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    hyper: Tensor,
    optimizer: int,
    grad: Tensor,
    features: Tensor,
    *groups_and_rest: Any,
) -> None:
    """Emulated `tbe_update_`: rows, segments, lookups, bags, count, offsets, ... as the op."""
    *groups, offsets, row_slots, bag_layout, sample_weights, pooling = groups_and_rest
    step = _step_words(weights, states, hyper, optimizer)
    rest = (sample_weights, pooling)
    _update(step, grad, features, groups, (offsets, bag_layout), row_slots, rest)


def tbe_sample_weight_grad(
    grad: Tensor,
    weights: Sequence[Tensor],
    features: Tensor,
    indices: Tensor,
    offsets: Tensor,
    slots: Tensor | None,
    bag_layout: Tensor | None,
    pooling: int,
) -> Tensor:
    """Emulated `tbe_sample_weight_grad`."""
    out = torch.zeros(indices.numel())
    tiers, batch = _tier_words(weights, slots), (indices, offsets, bag_layout)
    words = _lookup_words(tiers, features, batch, None, pooling, grad.size(-1))
    library().call("sample_weight_grad", *words, grad, DTYPES[grad.dtype], out)
    return out


def update_rows_(
    weights: Tensor,
    states: Sequence[Tensor],
    hyper: Tensor,
    optimizer: int,
    grads: Tensor,
    first_row: int = 0,
) -> None:
    """Emulated `update_rows_`."""
    step = _step_words([weights], states, hyper, optimizer)
    library().call("update_rows", *step, grads, *grads.shape, first_row)


def fill_uniform_(tensor: Tensor, low: float, high: float, seed: int) -> None:
    """Emulated `fill_uniform_`."""
    bits = struct.unpack("qq", struct.pack("dd", low, high))
    library().call("fill_uniform", tensor, tensor.numel(), DTYPES[tensor.dtype], *bits, seed)
