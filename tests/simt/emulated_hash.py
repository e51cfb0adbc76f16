"""The emulated kernels of the hash table behind the arguments of `emblib.ops.hash`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.ops.codes import INSERT_POLICY
from emblib.ops.hash import SLOTS_PER_BUCKET
from tests.simt.emulated import DTYPES
from tests.simt.library import Word, library


def _index(index: Sequence[Tensor]) -> tuple[Word, ...]:
    tags, entries, tables, _, _ = index
    return (*index, entries.size(1), tables.size(0), tags.numel())


def _batch(ids: Tensor, starts: Tensor, tables: Tensor) -> tuple[Word, ...]:
    return ids, starts, tables, ids.numel(), tables.numel()


def find(index: Sequence[Tensor], *keys: Tensor) -> Tensor:
    """Emulated `hash_find`."""
    slots = torch.full_like(keys[0], 7)
    library().call("hash_find", *_index(index), *_batch(*keys), slots)
    return slots


def touch_(
    index: Sequence[Tensor],
    ids: Tensor,
    starts: Tensor,
    tables: Tensor,
    counts: Tensor | None,
    batch_scores: Tensor | None,
    order: int,
) -> tuple[Tensor, ...]:
    """Emulated `hash_touch_`."""
    slots, first, totals = (torch.full_like(ids, 7) for _ in range(3))
    groups = torch.full_like(ids, 7, dtype=torch.int32)
    out = (first, groups, totals, torch.full((index[2].size(0) + 1,), 7))
    words = (*_index(index), *_batch(ids, starts, tables))
    library().call("hash_touch", *words, slots, counts, batch_scores, order, *out)
    return slots, *out


def grow_(
    index: Sequence[Tensor],
    rows: Sequence[Tensor],
    row_layout: Tensor,
    ids: Tensor,
    starts: Tensor,
    tables: Tensor,
    *slots_ends_admitted: Tensor | None,
) -> None:
    """Emulated `hash_grow_`."""
    words = (*_index(index), *_batch(ids, starts, tables), *slots_ends_admitted)
    library().call("hash_grow", *words, row_layout, len(rows), *rows)


def insert_(
    index: Sequence[Tensor],
    ids: Tensor,
    first: Tensor,
    totals: Tensor,
    offsets: Tensor,
    admitted: Tensor | None,
    *scores_order_policy_slots_groups: Tensor | int | None,
) -> tuple[Tensor, ...]:
    """Emulated `hash_insert_`."""
    batch_scores, order, insert_policy, *batch = scores_order_policy_slots_groups
    out = (
        torch.full_like(ids, 7),
        torch.full_like(ids, 7, dtype=torch.uint8),
        torch.full((ids.numel(), 3), 7),
        torch.full_like(ids, 7),
        torch.full_like(ids, 7, dtype=torch.uint8),
    )
    missing = (ids, ids.numel(), first, totals, offsets, admitted, batch_scores)
    ways = (order, insert_policy == INSERT_POLICY["competes"])
    library().call("hash_insert", *_index(index), *missing, *ways, *batch, ids.numel(), *out)
    return out


def _rows(values: Tensor, *others: Tensor) -> tuple[Word, ...]:
    """Return the words of rows that are copied from or to `others`."""
    size = values.element_size()
    bits = values.size(1) * size | values.stride(0) * size | values.data_ptr()
    for other in others:
        bits |= other.data_ptr()
    alignment = min(16, bits & -bits) if bits else 16
    pointer = values.data_ptr()  # rows may be slices of longer ones
    return (pointer, values.size(1) * size, values.stride(0) * size, values.size(0), alignment)


def _fill(values: Tensor, default_value: float) -> int:
    """Return the bits of a default value, repeated in 32 bits."""
    one = torch.full((1,), default_value, dtype=values.dtype)
    return int(one.expand(4 // values.element_size()).contiguous().view(torch.int32))


def find_rows(
    index: Sequence[Tensor], ids: Tensor, starts: Tensor, tables: Tensor, *values_default: Any
) -> tuple[Tensor, Tensor]:
    """Emulated `hash_find_rows`."""
    values, default_value = values_default
    out = values.new_full((ids.numel(), values.size(1)), 7)
    found = torch.ones_like(ids, dtype=torch.bool)
    words = (*_index(index), *_batch(ids, starts, tables), *_rows(values, out))
    library().call("hash_find_rows", *words, _fill(values, default_value), out, found)
    return out, found


def read_rows(values: Tensor, slots: Tensor, default_value: float) -> Tensor:
    """Emulated `hash_read_rows`."""
    out = values.new_full((slots.numel(), values.size(1)), 7)
    fill = _fill(values, default_value)
    none = (None, None, None)
    library().call("hash_read_rows", *_rows(values, out), slots, slots.numel(), *none, fill, out)
    return out


def start_rows_(
    values: Tensor,
    slots: Tensor,
    groups: Tensor,
    first: Tensor,
    starting: Tensor,
    *default_reads: float,
) -> Tensor:
    """Emulated `hash_start_rows_`."""
    default_value, reads = default_reads
    out = values.new_full((slots.numel() if reads else 0, values.size(1)), 7)
    words = (*_rows(values, out, starting), slots, slots.numel(), starting, groups, first)
    target = out if reads else None
    library().call("hash_read_rows", *words, _fill(values, default_value), target)
    return out


def write_rows_(values: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Emulated `hash_write_rows_`."""
    library().call("hash_write_rows", *_rows(values, rows), slots, slots.numel(), rows)


def add_rows_(values: Tensor, slots: Tensor, *groups_rows: Tensor) -> None:
    """Emulated `hash_add_rows_`."""
    *groups, rows = groups_rows
    words = (*_rows(values, rows), DTYPES[values.dtype], slots, *groups, slots.numel(), rows)
    library().call("hash_add_rows", *words)


def evicted_rows(
    values: Sequence[Tensor], slots: Tensor, status: Tensor, evicted: Tensor
) -> tuple[Any, ...]:
    """Emulated `hash_evicted_rows`."""
    n = slots.numel()
    out = [matrix.new_full((n, matrix.size(1)), 7) for matrix in values]
    keys, stamps, scores = (torch.full_like(slots, 7) for _ in range(3))
    count = torch.full((1,), 7)
    words: list[Word] = [slots, status, evicted, n, keys, stamps, scores, count, len(out)]
    for matrix, rows in zip(values, out, strict=True):
        words += [*_rows(matrix, rows), rows]
    library().call("hash_evicted_rows", *words)
    return keys, out, stamps, scores, count


def erase_(index: Sequence[Tensor], *keys: Tensor) -> Tensor:
    """Emulated `hash_erase_`."""
    slots = torch.full_like(keys[0], 7)
    library().call("hash_erase", *_index(index), *_batch(*keys), slots)
    return slots


def expire_(
    index: Sequence[Tensor], table: int, first_bucket: int, num_buckets: int, before: int
) -> Tensor:
    """Emulated `hash_expire_`."""
    removed = torch.ones(num_buckets * SLOTS_PER_BUCKET, dtype=torch.bool)
    words = (*_index(index), table, first_bucket, num_buckets, before)
    library().call("hash_expire", *words, removed)
    return removed


def initial_rows_(
    row_buffers: Sequence[Tensor],
    layout: Tensor,
    rules: Tensor,
    ids: Tensor,
    first: Tensor,
    *ends_slots_seed: Tensor | int,
) -> None:
    """Emulated `hash_initial_rows_`."""
    words: list[Word] = [layout, rules, ids, first, *ends_slots_seed]
    words += [layout.size(0), len(row_buffers), first.numel()]
    for buffer in row_buffers:
        words += [buffer, DTYPES[buffer.dtype]]
    library().call("hash_initial_rows", *words)


OPS: dict[str, Callable[..., Any]] = {
    "find": find,
    "touch_": touch_,
    "grow_": grow_,
    "insert_": insert_,
    "erase_": erase_,
    "expire_": expire_,
}

ROW_OPS: dict[str, Callable[..., Any]] = {
    "read_rows": read_rows,
    "start_rows_": start_rows_,
    "write_rows_": write_rows_,
    "add_rows_": add_rows_,
    "evicted_rows": evicted_rows,
}
