"""The emulated kernels of the cache behind the names and arguments of `emblib.ops.cache`."""

from collections.abc import Sequence

import torch
from torch import Tensor

from emblib.ops.codes import CACHE_POLICY
from tests.simt.emulated import DTYPES
from tests.simt.library import Word, library

TIERS = 4


def plan_(
    tags: Tensor,
    stamps: Tensor,
    counts: Tensor | None,
    counters: Tensor,
    clock: Tensor,
    tables: Tensor,
    *batch_and_policy: Tensor | int,
) -> tuple[Tensor, Tensor]:
    """Emulated `cache_plan_`: rows, segments and count, then the policy."""
    *batch, policy = batch_and_policy
    rows, segments, count = (tensor for tensor in batch if isinstance(tensor, Tensor))
    row_slots = torch.full((rows.numel(),), 7, dtype=torch.int32)
    evicted = torch.full((rows.numel(),), 7)
    lfu = policy == CACHE_POLICY["lfu"]
    state: tuple[Word, ...] = (tags, stamps, counts, tags.size(0), lfu, clock, counters)
    inputs: tuple[Word, ...] = (tables, tables.size(0), rows, segments, count, rows.numel())
    library().call("cache_plan", *state, *inputs, row_slots, evicted)
    return row_slots, evicted


def locate(tags: Tensor, tables: Tensor, rows: Tensor, count: Tensor) -> Tensor:
    """Emulated `cache_locate`."""
    out = torch.full((rows.numel(),), 7, dtype=torch.int32)
    inputs = (tags, tags.size(0), tables, tables.size(0), rows, count, rows.numel())
    library().call("cache_locate", *inputs, out)
    return out


def lookup_slots(row_slots: Tensor, segments: Tensor, lookups: Tensor, count: Tensor) -> Tensor:
    """Emulated `cache_lookup_slots`."""
    out = torch.full((lookups.numel(),), 7, dtype=torch.int32)
    inputs = (row_slots, segments, lookups, count, lookups.numel())
    library().call("cache_lookup_slots", *inputs, out)
    return out


def _memory(
    weights: Sequence[Tensor], states: Sequence[Tensor], hyper: Tensor, tables: Tensor
) -> tuple[Word, ...]:
    per_tier = len(states) // TIERS
    elements = weights[-1].numel()
    by_row = [k for k, state in enumerate(states[-per_tier:], 1) if state.numel() < elements]
    slots = min((states[-per_tier:][k - 1].numel() for k in by_row), default=2**62)
    words: list[Word] = [hyper, tables, tables.size(0), 1 + per_tier]
    words += [sum(1 << k for k in by_row), elements, slots]
    for tier in range(TIERS):
        for tensor in (weights[tier], *states[tier * per_tier : (tier + 1) * per_tier]):
            words += [tensor, DTYPES[tensor.dtype]]
    return tuple(words)


def move_(
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    hyper: Tensor,
    tables: Tensor,
    rows: Tensor,
    count: Tensor,
    row_slots: Tensor,
    evicted: Tensor,
    postponed: Sequence[Tensor] = (),
) -> None:
    """Emulated `cache_move_`."""
    padded: list[Tensor | None] = [*postponed, *[None] * (5 - len(postponed))]
    clock, conflicts, *fetches = padded
    sets = 0 if conflicts is None else conflicts.numel()
    moves = (rows, row_slots, evicted, count, rows.numel())
    batch: tuple[Word, ...] = (*moves, clock, conflicts, sets, *fetches)
    library().call("cache_move", *batch, *_memory(weights, states, hyper, tables))


def flush_(
    weights: Sequence[Tensor],
    states: Sequence[Tensor],
    hyper: Tensor,
    tables: Tensor,
    tags: Tensor,
) -> None:
    """Emulated `cache_flush_`."""
    memory = _memory(weights, states, hyper, tables)
    library().call("cache_flush", tags, tags.numel(), *memory)
