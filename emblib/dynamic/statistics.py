"""Statistics of dynamic tables: ages of evicted keys, keys that return, lookups that get no row.

`StatisticsCollector` adds to counters on the device of the tables after the keys of a batch are
inserted. It reads nothing back, so a training step on a GPU does not wait. `TableStatistics` is
what a reader gets: numbers of one table on one rank, which `TableStatistics.merged` adds up.

Keys that return are recognised by the last evicted keys, which are stored in cells, one per hash
value: a key replaces the previous key of its cell. So memory is bounded, old evictions are
forgotten, and no key is recognised that was not evicted. With m cells, a key is still recognised
with probability exp(-n / m) after n later evictions, so the count is a lower bound.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from emblib.dynamic.tiers.store import TierStats
from emblib.ops import hash
from emblib.ops.effects import Effects
from emblib.ops.hash import InsertedBatch, Keys, tables_of
from emblib.specs import check_count

AGE_BOUNDS = tuple(1 << power for power in range(32))
"""Upper bounds of the bins of ages, in training steps; one more bin has all higher ages."""

_NUM_BINS = len(AGE_BOUNDS) + 1
_MIN_CELLS = 64  # cells per table; any number above 1 would do
_MAX_REMEMBERED = 1 << 40  # keys per table; they take 8 TiB
_MULTIPLIER = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed number


@dataclass(frozen=True)
class AgeHistogram:
    """The ages of evicted keys, in bins that double.

    Attributes:
        counts: number of keys per bin. Bin i has the ages that are at most `AGE_BOUNDS[i]` and
            above the bound before; the last bin has the ages above all bounds.
        total_age: sum of all ages.
    """

    counts: tuple[int, ...] = (0,) * _NUM_BINS
    total_age: int = 0

    @property
    def num_keys(self) -> int:
        """Return the number of keys in all bins."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """Return the mean age; NaN without keys."""
        return self.total_age / self.num_keys if self.num_keys else math.nan

    def quantile(self, share: float) -> float:
        """Return the upper bound of the bin with the quantile `share`, in [0, 1]; NaN without keys.

        It is at most twice the exact quantile, or 1, and infinite in the last bin.
        """
        num_seen, num_required = 0, share * self.num_keys
        for bound, count in zip((*AGE_BOUNDS, math.inf), self.counts, strict=True):
            num_seen += count
            if count and num_seen >= num_required:
                return float(bound)
        return math.nan

    def __add__(self, other: AgeHistogram) -> AgeHistogram:
        """Merge two histograms."""
        pairs = zip(self.counts, other.counts, strict=True)
        return AgeHistogram(tuple(a + b for a, b in pairs), self.total_age + other.total_age)

    def since(self, earlier: AgeHistogram) -> AgeHistogram:
        """Return the keys that were added after an earlier histogram of the same table.

        If the counts were reset in between, all keys are returned. A reset is recognised by
        differences of counts and ages that keys cannot have.
        """
        counts = [a - b for a, b in zip(self.counts, earlier.counts, strict=True)]
        total_age = self.total_age - earlier.total_age
        lowest_ages = (0, *(bound + 1 for bound in AGE_BOUNDS))
        min_total = sum(n * age for n, age in zip(counts, lowest_ages, strict=True))
        max_total = math.inf if counts[-1] else sum(map(operator.mul, counts, AGE_BOUNDS))
        if min(counts) < 0 or not min_total <= total_age <= max_total:
            return self
        return AgeHistogram(tuple(counts), total_age)


@dataclass(frozen=True)
class TableStatistics:
    """Numbers of one dynamic table on one rank; counts are of training, since the last reset.

    A key counts once per batch, a lookup per position. Without `track_statistics` the counts from
    `refused_lookups` to `eviction_ages` are None. With a backing store, the table is its fast tier:
    promoted rows count as inserted, demoted ones as evicted.

    Attributes:
        step: number of training forwards; of several shards the largest.
        keys: number of keys in the table.
        rows: number of rows in use, at most `capacity`.
        capacity: maximum number of rows.
        nbytes: bytes of the rows in use and fallback rows, with optimizer states and index.
        lookups: positions of batches.
        hits: lookups whose key had a row before the batch.
        inserted: keys that got a row.
        evicted: keys that were evicted, by new ones or because the table shrank.
        expired: keys that were removed because of their age.
        erased: keys that were removed by a call.
        refused: keys without a row for want of a slot.
        not_admitted: keys that admission rejected.
        refused_lookups: lookups of `refused` keys.
        not_admitted_lookups: lookups of `not_admitted` keys.
        reinserted: inserted keys that are remembered as evicted; None if no keys are remembered.
        eviction_ages: steps between the last use of evicted keys and their eviction. Expired and
            erased keys do not count.
        tiers: counts of the tiers; None without a backing store.

    Example:
        >>> table = emblib.DynamicSpec(capacity=32, dim=4, name="item")
        >>> bags = emblib.DynamicEmbeddingBags([table], emblib.optim.SGD(0.1))
        >>> bags.track_statistics(remember=1_000)
        >>> for first in (0, 32, 0):  # 32 keys, 32 others that evict them, then the first again
        ...     pooled = bags(torch.arange(first, first + 32), torch.tensor([0, 32]))
        >>> numbers = bags.table_handles()["item"].statistics()
        >>> numbers.evicted, numbers.reinserted, numbers.eviction_ages.mean
        (64, 32, 1.0)
    """

    step: int
    keys: int
    rows: int
    capacity: int
    nbytes: int
    lookups: int
    hits: int
    inserted: int
    evicted: int
    expired: int
    erased: int
    refused: int
    not_admitted: int
    refused_lookups: int | None = None
    not_admitted_lookups: int | None = None
    reinserted: int | None = None
    eviction_ages: AgeHistogram | None = None
    tiers: TierStats | None = None

    @property
    def hit_rate(self) -> float:
        """Return the share of lookups that hit; NaN without lookups."""
        return self.hits / self.lookups if self.lookups else math.nan

    @property
    def load(self) -> float:
        """Return the keys per row in use."""
        return self.keys / self.rows if self.rows else math.nan

    @property
    def reinsertion_rate(self) -> float:
        """Return the share of inserted keys that had been evicted; NaN if it is not known."""
        if self.reinserted is None or not self.inserted:
            return math.nan
        return self.reinserted / self.inserted

    @classmethod
    def merged(cls, shards: Sequence[TableStatistics]) -> TableStatistics:
        """Add up the numbers of the shards of a table, of which there is at least one.

        Raises:
            ValueError: there are none.
        """
        if not shards:
            raise ValueError("statistics of at least one shard are needed, got none")
        fields_of_shards = [
            {name: getattr(shard, name) for name in cls.__dataclass_fields__} for shard in shards
        ]
        merged: dict[str, Any] = {}
        for name in cls.__dataclass_fields__:
            values = [
                fields_of_shard[name]
                for fields_of_shard in fields_of_shards
                if fields_of_shard[name] is not None
            ]
            if not values:
                merged[name] = None
            elif name == "step":
                merged[name] = max(values)
            elif name == "tiers":
                counts = [asdict(tiers) for tiers in values]
                merged[name] = TierStats(**{n: sum(c[n] for c in counts) for n in counts[0]})
            else:
                merged[name] = sum(values[1:], values[0])
        return cls(**merged)


class TrackedCounts(NamedTuple):
    """The counts of one table that `StatisticsCollector` adds to the fields of `TableStatistics`.

    `reinserted` is None if no evicted keys are remembered.
    """

    refused_lookups: int
    not_admitted_lookups: int
    reinserted: int | None
    eviction_ages: AgeHistogram


def checked_remember(remember: int) -> int:
    """Return a number of evicted keys to remember per table as an int.

    Raises:
        ValueError: `remember` is negative or more than 2^40.
        TypeError: it is not an int.
    """
    number = check_count("remember", remember, minimum=0)
    if number > _MAX_REMEMBERED:
        raise ValueError(f"remember must be at most 2^40, got {number}")
    return number


class StatisticsCollector:
    """Count what the insertions of batches do, on the device of the tables.

    Counters are on the CPU first; recording moves them to the device of the tables. The owner of
    the tables holds its lock around every call; only `read` waits for a GPU.

    Args:
        num_tables: the number of tables.
        remember: number of evicted keys per table to remember, 8 bytes each, rounded up to a power
            of two, at least 64; 0 remembers none. See `checked_remember` for its errors.
    """

    def __init__(self, num_tables: int, remember: int = 0) -> None:
        self.remember = remember = checked_remember(remember)
        self._num_tables = num_tables
        self._ages = torch.zeros(num_tables * _NUM_BINS, dtype=torch.int64, device="cpu")
        self._total_age, self._refused, self._not_admitted, self._reinserted = (
            torch.zeros(num_tables, dtype=torch.int64, device="cpu") for _ in range(4)
        )
        self._bounds = torch.tensor(AGE_BOUNDS, device="cpu")
        self._cells_log2 = (max(remember, _MIN_CELLS) - 1).bit_length()
        self._evicted_keys: Tensor | None = None
        self._forget()

    def _forget(self) -> None:
        """Forget all evicted keys: every cell gets a key that belongs to another cell."""
        if not self.remember:
            return
        device, num_cells = self._ages.device, 1 << self._cells_log2
        cell_indices = torch.arange(num_cells, device=device)
        # Key 0 is written to all cells but its own, which gets the first key of another cell.
        cell_of_zero = self._cell_of(cell_indices[:1])
        other_key = (self._cell_of(cell_indices) != cell_of_zero).int().argmax()
        table_keys = torch.where(cell_indices == cell_of_zero, other_key, 0)
        # On a GPU keys of weight 0 are written to a spare last cell.
        evicted_keys = torch.cat([table_keys.repeat(self._num_tables), table_keys[:1]])
        if self._evicted_keys is None:
            self._evicted_keys = evicted_keys
        else:  # in place, since a captured step writes to this memory
            self._evicted_keys.copy_(evicted_keys)

    def _cell_of(self, keys: Tensor) -> Tensor:
        """Return the cell of each key among those of its table, int64 `[n]`: its hash."""
        return keys * _MULTIPLIER >> 64 - self._cells_log2 & (1 << self._cells_log2) - 1

    def reset(self) -> None:
        """Set the counts to zero; remembered keys stay."""
        for counts in (
            self._ages,
            self._total_age,
            self._refused,
            self._not_admitted,
            self._reinserted,
        ):
            counts.zero_()

    def clear(self) -> None:
        """Set the counts to zero and forget the evicted keys."""
        self.reset()
        self._forget()

    def _move_to(self, device: torch.device) -> None:
        for name, value in self.__dict__.items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def record(self, keys: Keys, inserted: InsertedBatch, clock: Tensor, effects: Effects) -> None:
        """Count an insertion, before a backing store changes its result.

        Repeated with the same `effects`, it counts nothing more, whatever the result is by then.

        Args:
            keys: the batch.
            inserted: the result of its insertion, with misses.
            clock: int64 `[1]`, the tick of the batch.
            effects: the calls of this function that were made before an interruption.
        """
        misses, result = inserted.misses, inserted.result
        assert misses is not None
        assert result is not None
        if self._ages.device != clock.device:
            self._move_to(clock.device)
        status, offsets = result.status, misses.offsets
        if not status.is_cuda:
            status = status[: int(offsets[-1])]
        miss_indices = torch.arange(status.numel(), device=status.device)
        table_of_miss = torch.searchsorted(offsets[1:], miss_indices, right=True)
        table_of_miss.clamp_(max=self._num_tables - 1)
        is_evicting = status == hash.EVICTING
        if self._evicted_keys is not None:
            positions, weights = _positions_where(is_evicting | (status == hash.NEW))
            inserted_keys = keys.ids[misses.first[: status.numel()][positions]]
            cells = self._cells_of(table_of_miss[positions], inserted_keys)
            self._count_reinserted(cells, table_of_miss[positions], weights, effects)
        positions, weights = _positions_where(is_evicting)
        evicted_keys, stamps, _ = result.evicted[: status.numel()][positions].unbind(1)
        self._add_evicted(table_of_miss[positions], evicted_keys, clock - stamps, weights, effects)
        self._count_lookups(keys, inserted, status, effects)

    def record_evicted(
        self, table: int, keys: Tensor, stamps: Tensor, clock: Tensor, effects: Effects
    ) -> None:
        """Count keys that a table evicted without an insertion, because it shrank.

        Repeated with the same `effects`, it counts nothing more.

        Args:
            table: number of the table.
            keys: int64 `[n]`.
            stamps: int64 `[n]`, tick of the last use of each key.
            clock: int64 `[1]`, the current tick.
            effects: the calls of this function that were made before an interruption.
        """
        if self._ages.device != clock.device:
            self._move_to(clock.device)
        tables, weights = torch.full_like(keys, table), torch.ones_like(keys)
        self._add_evicted(tables, keys, clock - stamps, weights, effects)

    def _add_evicted(
        self, tables: Tensor, keys: Tensor, ages: Tensor, weights: Tensor, effects: Effects
    ) -> None:
        """Count evicted keys of weight 1 and remember them; all vectors have one entry per key."""
        bins = torch.bucketize(ages, self._bounds)
        _add_once(effects, self._ages, tables * _NUM_BINS + bins, weights)
        _add_once(effects, self._total_age, tables, torch.where(weights > 0, ages, 0))
        if self._evicted_keys is not None:
            self._remember(self._cells_of(tables, keys), weights)

    def _cells_of(self, tables: Tensor, keys: Tensor) -> _Cells:
        """Return keys of some tables with their cells, numbered over all tables."""
        return _Cells((tables << self._cells_log2) + self._cell_of(keys), keys)

    def _count_reinserted(
        self, cells: _Cells, tables: Tensor, weights: Tensor, effects: Effects
    ) -> None:
        """Count the keys of weight 1 that are remembered as evicted."""
        assert self._evicted_keys is not None
        is_known = self._evicted_keys[cells.indices] == cells.keys
        _add_once(effects, self._reinserted, tables, is_known * weights)

    def _remember(self, cells: _Cells, weights: Tensor) -> None:
        """Store evicted keys; of several keys of one cell the largest, in any order of threads."""
        assert self._evicted_keys is not None
        spare_cell = self._evicted_keys.numel() - 1
        indices = torch.where(weights > 0, cells.indices, spare_cell)
        self._evicted_keys.scatter_reduce_(0, indices, cells.keys, "amax", include_self=False)

    def _count_lookups(
        self, keys: Keys, inserted: InsertedBatch, status_of_misses: Tensor, effects: Effects
    ) -> None:
        """Count the positions of the batch whose keys have no row."""
        status = inserted.status
        assert status is not None
        has_losses = status.is_cuda or bool((status_of_misses >= hash.REFUSED).any())
        if not has_losses:
            return
        tables = tables_of(keys)
        for counts, code in (
            (self._refused, hash.REFUSED),
            (self._not_admitted, hash.NOT_ADMITTED),
        ):
            positions, weights = _positions_where(status == code)
            _add_once(effects, counts, tables[positions], weights)

    def read(self) -> list[TrackedCounts]:
        """Return the counts per table (reads the device)."""
        counts_by_table = self._ages.view(self._num_tables, _NUM_BINS).tolist()
        reinserted = self._reinserted.tolist() if self.remember else [None] * self._num_tables
        return [
            TrackedCounts(
                refused, not_admitted, num_reinserted, AgeHistogram(tuple(counts), total_age)
            )
            for refused, not_admitted, num_reinserted, counts, total_age in zip(
                self._refused.tolist(),
                self._not_admitted.tolist(),
                reinserted,
                counts_by_table,
                self._total_age.tolist(),
                strict=True,
            )
        ]


class _Cells(NamedTuple):
    """Keys, and the index of the cell of each key among the evicted keys; int64 `[n]` each."""

    indices: Tensor
    keys: Tensor


def _positions_where(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positions of true entries and their weight 1, int64 `[n]` each.

    On a GPU their number is not known, so these are all positions, and false ones have weight 0.
    """
    if mask.is_cuda:
        return torch.arange(mask.numel(), device=mask.device), mask.long()
    positions = mask.nonzero().view(-1)
    return positions, torch.ones_like(positions)


def _add_once(effects: Effects, counts: Tensor, positions: Tensor, values: Tensor) -> None:
    """Add values to counts once, though an interrupted caller may run again."""
    effects.call_once(torch.ops.aten.index_add_.default, counts, 0, positions, values)
