"""Options of a cache of rows in front of tensor trains, and its counters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from emblib.ops.autograd import updates_in_backward
from emblib.ops.cache import WAYS
from emblib.optim import NO_UPDATE, Optimizer, description
from emblib.specs import (
    CacheConfig,
    CachePolicy,
    DynamicSpec,
    Eviction,
    OptionEnum,
    Placement,
    TTSpec,
    check_count,
    check_counts,
    format_config,
)

_SPILLED_PER_ROW = 8  # default of `spill_rows` per row of the cache; not measured
_COUNTED_PER_ROW = 4  # default of `counted` per stored row; not measured
_INDEX_LOAD = 0.5  # load at which every id finds a slot


class RowEviction(OptionEnum):
    """Treatment of a row that leaves the cache.

    Example:
        >>> emblib.TTCache(rows=1_000, eviction=emblib.RowEviction.SPILL).eviction
        <RowEviction.SPILL: 'spill'>
    """

    PROJECT = "project"
    """The cores are moved towards its values, by a few steps along their gradient."""
    SPILL = "spill"
    """The row stays stored, with its optimizer state, in host memory. See `TTCache`."""
    DROP = "drop"
    """Its updates are lost: lookups compute the row from the cores again (FBTT)."""


@dataclass(frozen=True)
class TTCache:
    """Cache of the most used rows of tensor trains: its size and when its rows are chosen.

    With `SPILL` a chosen row stays stored. Stored rows are a table in host memory (pinned, if the
    module is on a GPU) behind a cache of `rows` rows in the memory of the module:
    `Placement.MANAGED_CACHING`, with the policy LFU. A *spilled* row is one that is not in that
    cache. Its lookup fetches the row and its optimizer state into the cache, unless all 32 ways of
    its set have rows that are used more often or are in flight; then it is read and updated in host
    memory. No update is lost, and no lookup waits for the host. The cost is the transfer of the row
    and its state, and of the row that is written back. On a CPU both memories are the same, so
    `PROJECT` or `DROP` with more rows are faster.

    Host memory for `rows + spill_rows` rows per table is allocated at construction. When it is
    full, the least used stored rows leave as with `PROJECT`, one per newly chosen row; rows without
    a count leave first, and among equally used ones the larger id.

    Args:
        rows: number of rows in the cache per table, one number for all or one each.
        eviction: treatment of rows that leave the cache.
        counted: maximum number of ids, over all tables, whose uses are counted; when it is reached,
            new ids replace the least used ones. None is 4 times the stored rows.
        every: number of training lookups after which rows are chosen again; None chooses them only
            in `populate`.
        spill_rows: rows per table that host memory has besides `rows`, one number for all or one
            each, with `SPILL` only; by default 8 times `rows`.

    Raises:
        ValueError: a number is below its minimum, `spill_rows` is set without `SPILL`, or there is
            no eviction of this name. A number of tables that differs from that of the module
            raises when the module is made.
        TypeError: a number is not an int.

    Example:
        >>> cache = emblib.TTCache(rows=2)  # chosen again only by `populate`
        >>> bags = emblib.CachedTTEmbeddingBags([emblib.TTSpec(1_000, 16, (8, 8))], cache)
        >>> pooled = bags(torch.tensor([3, 14, 3, 15, 14]), torch.tensor([0, 5]))
        >>> bags.populate()
        >>> bags.cached_ids(0)
        tensor([ 3, 14])
    """

    rows: int | Sequence[int]
    eviction: RowEviction = RowEviction.PROJECT
    counted: int | None = None
    every: int | None = None
    spill_rows: int | Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "eviction", RowEviction(self.eviction))
        for name in ("counted", "every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        object.__setattr__(self, "rows", check_counts("rows", self.rows))
        if self.spill_rows is not None:
            counts = check_counts("spill_rows", self.spill_rows, minimum=0)
            object.__setattr__(self, "spill_rows", counts)
        if self.spill_rows is not None and self.eviction is not RowEviction.SPILL:
            raise ValueError(
                f"spill_rows is for eviction='spill', got it with {self.eviction.value!r}: leave "
                "it out, or choose that eviction"
            )

    def rows_of(self, tables: Sequence[TTSpec]) -> list[int]:
        """Return the number of cached rows per table, at most its rows.

        Raises:
            ValueError: `rows` has another number of tables; `stored_rows_of`, `row_cache`,
                `counted_of` and `index_specs` raise it too.
        """
        return _per_table("rows", self.rows, tables)

    def stored_rows_of(self, tables: Sequence[TTSpec]) -> list[int]:
        """Return the number of stored rows per table, cached or spilled, at most its rows."""
        num_cached = self.rows_of(tables)
        if self.eviction is not RowEviction.SPILL:
            return num_cached
        if self.spill_rows is None:
            num_spilled = [_SPILLED_PER_ROW * cache_rows for cache_rows in num_cached]
        else:
            num_spilled = _per_table("spill_rows", self.spill_rows, tables)
        row_counts = zip(num_cached, num_spilled, tables, strict=True)
        return [
            min(num_cached_rows + num_spilled_rows, spec.rows)
            for num_cached_rows, num_spilled_rows, spec in row_counts
        ]

    @property
    def placement(self) -> Placement:
        """Return the memory of stored rows."""
        is_spilling = self.eviction is RowEviction.SPILL
        return Placement.MANAGED_CACHING if is_spilling else Placement.DEVICE

    def row_cache(self, tables: Sequence[TTSpec]) -> CacheConfig | None:
        """Return the cache options of stored rows in host memory; None if on the device."""
        if not self.placement.cached:
            return None
        num_sets = math.ceil(sum(self.rows_of(tables)) / WAYS)
        return CacheConfig(policy=CachePolicy.LFU, sets=num_sets)

    def counted_of(self, tables: Sequence[TTSpec]) -> int:
        """Return the number of ids, of all tables, whose uses are counted."""
        return self.counted or _COUNTED_PER_ROW * sum(self.stored_rows_of(tables))

    def index_specs(self, tables: Sequence[TTSpec]) -> tuple[DynamicSpec, DynamicSpec]:
        """Return the hash tables of ids that are stored, and of those that are counted."""
        num_stored = math.ceil(sum(self.stored_rows_of(tables)) / _INDEX_LOAD)
        return (
            DynamicSpec(num_stored, 1, eviction=Eviction.NONE),
            DynamicSpec(self.counted_of(tables), 1, eviction=Eviction.LFU),
        )


def _per_table(name: str, value: int | Sequence[int], tables: Sequence[TTSpec]) -> list[int]:
    """Return a number of rows for each table, at most as many as the table has."""
    numbers = [value] * len(tables) if isinstance(value, int) else value
    if len(numbers) != len(tables):
        raise ValueError(f"{name} must be a number or one per table, got {value}")
    return [min(rows, spec.rows) for rows, spec in zip(numbers, tables, strict=True)]


@dataclass(frozen=True)
class TTCacheStats:
    """Counts since the last `reset_cache_stats`.

    Attributes:
        lookups: valid ids of training lookups.
        hits: lookups whose row was stored, in the cache or spilled.
        spill_hits: lookups whose row was spilled when their batch was looked up.
        evicted: rows that left the stored rows for the cores; spilling does not count.
        changed: sum of squared differences between evicted rows and the cores' rows.
        lost: sum of squared differences that remain after the cores were updated.
        spilled: current number of stored rows that are not in the cache.
        tables: the same counts per table, by name; the `tables` of these are empty.
    """

    lookups: int
    hits: int
    spill_hits: int
    evicted: int
    changed: float
    lost: float
    spilled: int
    tables: Mapping[str, TTCacheStats] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float:
        """Return the fraction of lookups whose row was stored; NaN without lookups."""
        return self.hits / self.lookups if self.lookups else math.nan


TT_COUNTERS = ("lookups", "hits", "spill_hits", "evicted")
"""The columns of `counters`: the first fields of `TTCacheStats`."""
assert tuple(f.name for f in fields(TTCacheStats))[: len(TT_COUNTERS)] == TT_COUNTERS


def least_used_first(stored_keys: Tensor, rows: Tensor, keys: Tensor, uses: Tensor) -> Tensor:
    """Return rows that may leave in the order in which they do: the least used ones first.

    Of equally used rows the one with the larger key leaves first.

    Args:
        stored_keys: int64 `[stored rows]`, key of each stored row.
        rows: int64 `[n]`, the rows to order.
        keys: int64 `[m]`, counted keys, ascending; the others have 0 uses.
        uses: int64 `[m]`, uses of `keys`.
    """
    row_keys = stored_keys[rows]
    counts = torch.zeros_like(row_keys)
    if len(keys):
        indices = torch.searchsorted(keys, row_keys).clamp(max=len(keys) - 1)
        counts = torch.where(keys[indices] == row_keys, uses[indices], 0)
    key_order = row_keys.argsort(descending=True)
    return rows[key_order[counts[key_order].argsort(stable=True)]]


def check_arguments(
    cache: TTCache, optimizer: Optimizer | None, device: torch.device | str | None
) -> None:
    """Raise TypeError or ValueError for arguments that a row cache does not support."""
    if not isinstance(cache, TTCache):
        raise TypeError(f"cache must be a TTCache, e.g. TTCache(10_000), got {cache!r}")
    if torch.empty(0, device=device).is_meta:
        raise ValueError(
            "the hash table of a cache cannot be on meta: construct the module on its device"
        )
    optimizer = NO_UPDATE if optimizer is None else optimizer
    if optimizer.deferred:
        raise ValueError(
            f"{format_config(optimizer)} would apply gradients of rows that may have been "
            "replaced: leave deferred out, or use TableBatchedTTEmbeddingBags"
        )
    if cache.eviction is RowEviction.SPILL and not updates_in_backward(optimizer):
        raise ValueError(
            f"{description(optimizer)} leaves gradients, and rows in host memory have none: use an "
            "optimizer that backward applies, e.g. optim.SGD(0.01), or another eviction"
        )
