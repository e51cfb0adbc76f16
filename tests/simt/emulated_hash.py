"""The emulated kernels of the hash table behind the arguments of `emblib.ops.hash`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from emblib.ops.codes import INSERT_POLICY
from emblib.ops.hash import SLOTS, InsertResult, Misses
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
) -> Tensor:
    """Emulated `hash_touch_`."""
    slots = torch.full_like(ids, 7)
    words = (*_index(index), *_batch(ids, starts, tables))
    library().call("hash_touch", *words, slots, counts, batch_scores, order)
    return slots


def misses(
    ids: Tensor,
    starts: Tensor,
    tables: Tensor,
    slots: Tensor,
    counts: Tensor | None,
    num_tables: int,
) -> Misses:
    """Emulated `hash_misses`."""
    first, totals = torch.full_like(ids, 7), torch.full_like(ids, 7)
    groups, offsets = torch.full_like(ids, 7, dtype=torch.int32), torch.full((num_tables + 1,), 7)
    out = (first, groups, totals, offsets)
    library().call("hash_misses", *_batch(ids, starts, tables), num_tables, slots, counts, *out)
    return Misses(*out)


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
    *scores_order_policy: Tensor | int | None,
) -> InsertResult:
    """Emulated `hash_insert_`."""
    batch_scores, order, insert_policy = scores_order_policy
    assert not isinstance(batch_scores, int)
    assert isinstance(order, int)
    out = (
        torch.full_like(ids, 7),
        torch.full_like(ids, 7, dtype=torch.uint8),
        torch.full((ids.numel(), 3), 7),
    )
    missing = (ids, ids.numel(), first, totals, offsets, admitted, batch_scores)
    ways = (order, insert_policy == INSERT_POLICY["competes"])
    library().call("hash_insert", *_index(index), *missing, *ways, *out)
    return InsertResult(*out)


def fill_slots(slots: Tensor, inserted: Tensor, groups: Tensor) -> Tensor:
    """Emulated `hash_fill_slots`."""
    filled = torch.full_like(slots, 7)
    sizes = (inserted.numel(), slots.numel())
    library().call("hash_fill_slots", slots, inserted, groups, *sizes, filled)
    return filled


def erase_(index: Sequence[Tensor], *keys: Tensor) -> Tensor:
    """Emulated `hash_erase_`."""
    slots = torch.full_like(keys[0], 7)
    library().call("hash_erase", *_index(index), *_batch(*keys), slots)
    return slots


def expire_(
    index: Sequence[Tensor], table: int, first_bucket: int, num_buckets: int, before: int
) -> Tensor:
    """Emulated `hash_expire_`."""
    removed = torch.ones(num_buckets * SLOTS, dtype=torch.bool)
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
    "misses": misses,
    "grow_": grow_,
    "insert_": insert_,
    "fill_slots": fill_slots,
    "erase_": erase_,
    "expire_": expire_,
}
