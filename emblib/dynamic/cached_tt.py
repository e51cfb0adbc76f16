"""Tensor trains whose most used rows are stored as they are, and looked up without the cores."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from emblib.dynamic.hash_table import HashTable
from emblib.optim import Optimizer
from emblib.reference import tt as reference
from emblib.specs import (
    Choice,
    DynamicSpec,
    Eviction,
    Pooling,
    TableSpec,
    TTSpec,
    brief,
    check_count,
)
from emblib.tables import TableBatchedEmbeddingBags, TableBatchedTTEmbeddingBags

_COUNTED = 4  # ids counted per row of the cache, by default
_PROJECTIONS = 8  # gradient steps by which the changes of evicted rows go into the cores
_INDEX_LOAD = 0.5  # at which every id finds a slot
_CHUNK = 1 << 14  # rows made at a time
_MOST_ROWS_IN_INT64 = 1 << 31  # whose product with a multiplier fits


class RowEviction(Choice):
    """What becomes of a row that leaves the cache."""

    PROJECT = "project"
    """The cores take on its values, as far as they can, by steps along their gradient."""
    DROP = "drop"
    """What it learned is lost: the row is again what the cores make of it (FBTT)."""


@dataclass(frozen=True)
class TTCache:
    """Which rows of tensor trains are stored, and when that changes.

    Args:
        rows: stored per table, one number for all or one each.
        eviction: what becomes of rows that leave.
        counted: ids of all tables whose uses are counted, the least used lose their counts to
            others; by default 4 times the rows stored.
        every: training lookups after which the rows are chosen again; None: only `populate` does.
    """

    rows: int | Sequence[int]
    eviction: RowEviction = RowEviction.PROJECT
    counted: int | None = None
    every: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "eviction", RowEviction(self.eviction))
        for name in ("counted", "every"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    def rows_of(self, tables: Sequence[TTSpec]) -> list[int]:
        """Return the rows stored of each table, at most all of it."""
        given = [self.rows] * len(tables) if isinstance(self.rows, int) else list(self.rows)
        if len(given) != len(tables):
            raise ValueError(f"rows must be a number or one per table, got {self.rows}")
        pairs = zip(given, tables, strict=True)
        return [min(check_count("rows", rows), spec.rows) for rows, spec in pairs]


class TTCacheStats(NamedTuple):
    """Counts since the last `reset_cache_stats`.

    Attributes:
        lookups: valid ids of training lookups.
        hits: those whose row was stored.
        evicted: rows that left the cache.
        changed: sum of squares of what these had learned since they came.
        lost: sum of squares of what the cores did not take on.
    """

    lookups: int
    hits: int
    evicted: int
    changed: float
    lost: float


class CachedTTEmbeddingBags(nn.Module):
    """Looks up tensor-train tables, of which the most used rows are stored as they are.

    A stored row is owned by the cache: lookups read it, backward updates it with the optimizer, and
    the cores have no part in it; `to_dense` and `state_dict` have its values. Training lookups
    count ids in a hash table; `populate` stores the most used ones from then on. New rows
    start with what the cores make of them and with zero optimizer states. Rows must not be chosen
    between a lookup and its backward, which raises then.

    Args:
        tables: rows, dim, ranks, factors and name of each tensor train.
        cache: which rows are stored.
        optimizer: one of `emblib.optim`, of cores and of stored rows.
        pooling: SUM, MEAN, or NONE for one vector per lookup.
        feature_tables: the table of each feature; by default feature i reads table i.
        init: of the cores, as in `TableBatchedTTEmbeddingBags`.
        device: of everything; not meta.

    Raises:
        TypeError: no `TTCache`.
        ValueError: rows that do not fit the tables, a deferred optimizer, the device meta.

    Example:
        >>> tables = [emblib.TTSpec(1_000_000, 64, (16, 16))]
        >>> bags = emblib.CachedTTEmbeddingBags(tables, emblib.TTCache(10_000, every=1000))
        >>> bags(torch.tensor([3, 14, 15]), torch.tensor([0, 2, 3])).shape
        torch.Size([2, 64])
    """

    key_bases: Tensor
    row_bases: Tensor
    row_of_slot: Tensor
    key_of_row: Tensor
    counters: Tensor
    changes: Tensor
    ends: Tensor

    def __init__(
        self,
        tables: Sequence[TTSpec],
        cache: TTCache,
        optimizer: Optimizer | None = None,
        *,
        pooling: Pooling = Pooling.SUM,
        feature_tables: Sequence[int] | None = None,
        init: str = "gaussian",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(cache, TTCache):
            raise TypeError(f"cache must be a TTCache, e.g. TTCache(10_000), got {cache!r}")
        if torch.empty(0, device=device).is_meta:
            raise ValueError(
                "the hash table of a cache cannot be on meta: construct the module on its device"
            )
        if optimizer is not None and optimizer.deferred:
            raise ValueError(
                f"{brief(optimizer)} would apply gradients of rows that may have been replaced: "
                "leave deferred out, or use TableBatchedTTEmbeddingBags"
            )
        self.cache, self.tables = cache, tuple(tables)
        options: dict[str, Any] = {
            "pooling": pooling,
            "feature_tables": feature_tables,
            "device": device,
        }
        self.trains = TableBatchedTTEmbeddingBags(tables, optimizer, init=init, **options)
        self.optimizer, self.pooling = self.trains.optimizer, self.trains.pooling
        self.cache_rows = cache.rows_of(self.tables)
        specs = zip(self.cache_rows, self.tables, strict=True)
        stored = [TableSpec(rows, spec.dim, spec.name) for rows, spec in specs]
        self.rows = TableBatchedEmbeddingBags(stored, optimizer, **options)
        total = sum(self.cache_rows)
        self.index = _hash_table(math.ceil(total / _INDEX_LOAD), Eviction.NONE, device)
        self.counts = _hash_table(cache.counted or _COUNTED * total, Eviction.LFU, device)
        self._first_key = [0, *accumulate(spec.rows for spec in self.tables)]
        self._first_row = [0, *accumulate(self.cache_rows)]
        features = self.trains.feature_tables
        by_feature = {
            "key_bases": [self._first_key[t] for t in features],
            "row_bases": [self._first_row[t] for t in features],
            "ends": [self.tables[t].rows for t in features],
        }
        for name, values in by_feature.items():
            self.register_buffer(name, torch.tensor(values, device=device), persistent=False)
        slots = torch.full((self.index.capacity(),), -1, device=device)
        self.register_buffer("row_of_slot", slots, persistent=False)
        self.register_buffer("key_of_row", torch.full((total,), -1, device=device))
        self.register_buffer("counters", torch.zeros(3, dtype=torch.int64, device=device))
        self.register_buffer("changes", torch.zeros(2, dtype=torch.float64, device=device))
        self._since = 0  # training lookups since the rows were chosen
        self._choice = 0  # number of that choice
        self.register_load_state_dict_post_hook(_rebuild_index)

    def forward(
        self, indices: Tensor, offsets: Tensor, per_sample_weights: Tensor | None = None
    ) -> Tensor:
        """Pool embeddings to `[B, sum D]`, or `[L, D]` for pooling NONE.

        Arguments and errors are those of `TableBatchedTTEmbeddingBags`.
        """
        if self._since >= (self.cache.every or math.inf) and self._counts_uses():
            self.populate()
        rows = self._stored_rows(indices, offsets, counted=self._counts_uses())
        stored = rows >= 0
        cold = torch.where(stored, -1, indices)
        found: Tensor = self.trains(cold, offsets, per_sample_weights)
        out = found + self.rows(rows.to(indices.dtype), offsets, per_sample_weights)
        if out.requires_grad:
            out.register_hook(partial(self._check_choice, self._choice))
        return out

    def _check_choice(self, choice: int, gradient: Tensor) -> None:
        """Raise where the stored rows are other ones than at the lookup: they would be updated."""
        if choice != self._choice:
            raise RuntimeError(
                "rows of the cache were replaced between a lookup and its backward: call "
                "populate() after backward; with TTCache(every=...), make one lookup per "
                "backward, or use every=None and call populate()"
            )

    def _counts_uses(self) -> bool:
        return self.training and torch.is_grad_enabled()

    @torch.no_grad()
    def _stored_rows(self, indices: Tensor, offsets: Tensor, *, counted: bool) -> Tensor:
        """Return for each lookup its row among those stored of its table, or -1."""
        features = len(self.ends)
        batch = (offsets.numel() - 1) // features
        ends = offsets.long()[::batch] if batch else offsets.new_zeros(features + 1).long()
        sizes = (ends[1:] - ends[:-1]).clamp(min=0)
        number = indices.numel()
        of_feature = torch.arange(features, device=indices.device)
        if features == 1:
            feature = of_feature.expand(number)
        else:
            feature = torch.bucketize(
                torch.arange(number, device=indices.device), sizes.cumsum(0)[:-1], right=True
            )
        ids = indices.long()
        valid = (ids >= 0) & (ids < self.ends[feature])
        keys = torch.where(valid, ids + self.key_bases[feature], -1)
        slots = self.index.slots(keys)
        rows = torch.where(slots >= 0, self.row_of_slot[slots], -1)
        if counted:
            self.counts.find_or_insert_slots(keys)  # invalid ids too, as a key that no table has
            self.counters[0] += valid.sum()
            self.counters[1] += (rows >= 0).sum()
            self._since += 1
        return torch.where(rows >= 0, rows - self.row_bases[feature], -1)

    @torch.no_grad()
    def populate(self) -> None:
        """Store the most used rows from now on; rows that are stored already stay as they are."""
        exported = list(self.counts.export())
        keys = torch.cat([part.keys for part in exported]) if exported else self.key_of_row[:0]
        uses = torch.cat([part.scores for part in exported]) if exported else keys
        for table in range(len(self.tables)):
            first, last = self._first_key[table : table + 2]
            own = (keys >= first) & (keys < last)
            self._populate_table(table, keys[own], uses[own])
        self._since = 0

    def _populate_table(self, table: int, keys: Tensor, uses: Tensor) -> None:
        keys, order = keys.sort()  # equal uses: the smaller id first
        best = keys[uses[order].argsort(descending=True, stable=True)[: self.cache_rows[table]]]
        first, last = self._first_row[table : table + 2]
        present = self.key_of_row[first:last]
        leaving = (present >= 0) & ~torch.isin(present, best)
        if leaving.any():
            self._evict(table, leaving.nonzero().squeeze(1))
        new = best[~torch.isin(best, present)]
        free = (present < 0).nonzero().squeeze(1)[: len(new)]
        self._store(table, free, new)

    def _evict(self, table: int, rows: Tensor) -> None:
        """Remove rows, numbered within a table's stored rows."""
        first = self._first_row[table]
        keys = self.key_of_row[first + rows]
        ids = keys - self._first_key[table]
        values = self.rows.table_weights()[table][rows].detach()
        made = self._made(table, ids)
        changed = float((values - made).double().square().sum())
        if self.cache.eviction is RowEviction.PROJECT:
            self._project(table, ids, values)
            made = self._made(table, ids)
        lost = float((values - made).double().square().sum())
        self.changes += torch.tensor([changed, lost], device=self.changes.device)
        self.counters[2] += len(rows)
        self._choice += 1
        self.row_of_slot[self.index.slots(keys)] = -1
        self.index.erase(keys)
        self.key_of_row[first + rows] = -1

    def _store(self, table: int, rows: Tensor, keys: Tensor) -> None:
        """Store keys in free rows, with what the cores make of them."""
        if not len(keys):
            return
        self._choice += 1
        slots = self.index.find_or_insert_slots(keys).slots
        rows, keys, slots = rows[slots >= 0], keys[slots >= 0], slots[slots >= 0]
        first = self._first_row[table]
        self.row_of_slot[slots] = first + rows
        self.key_of_row[first + rows] = keys
        with self.rows.overwriting():
            self.rows.table_weights()[table][rows] = self._made(
                table, keys - self._first_key[table]
            )
            for state in self.rows.table_optimizer_states()[table].values():
                state[rows] = 0

    def _made(self, table: int, ids: Tensor) -> Tensor:
        """Return what the cores make of ids."""
        cores = [core.detach() for core in self.trains.table_cores(table)]
        made = [
            self._rows_of(table, cores, self._places_of(table, some)) for some in ids.split(_CHUNK)
        ]
        return torch.cat(made)

    def _places_of(self, table: int, ids: Tensor) -> Tensor:
        """Return the rows of the train that ids stand for."""
        spec = self.tables[table]
        multiplier, offset = spec.permutation
        if spec.rows > _MOST_ROWS_IN_INT64:
            return reference.permuted(ids, spec.rows, spec.permutation)
        return (ids * multiplier + offset) % spec.rows

    def _rows_of(self, table: int, cores: Sequence[Tensor], places: Tensor) -> Tensor:
        spec = self.tables[table]
        return reference.rows(cores, places, spec.row_factors, spec.dim_factors)

    def _project(self, table: int, ids: Tensor, values: Tensor) -> None:
        """Step the cores towards making `values` of ids.

        Each step is along the gradient of the squared error, as long as is best where rows are
        linear in the cores, and half that until the error falls.
        """
        places = self._places_of(table, ids)
        cores = [core.detach().clone() for core in self.trains.table_cores(table)]
        error = float((self._rows_of(table, cores, places) - values).square().sum())
        for _ in range(_PROJECTIONS):
            left = values - self._rows_of(table, cores, places)
            spec = self.tables[table]
            grads = reference.core_grads(cores, places, left, spec.row_factors, spec.dim_factors)
            moved = self._moved(table, cores, grads, places)
            size = float(moved.square().sum())
            step = float((moved * left).sum()) / size if size else 0.0
            while step > 1e-8:
                tried = [c + step * g for c, g in zip(cores, grads, strict=True)]
                now = float((self._rows_of(table, tried, places) - values).square().sum())
                if now < error:
                    break
                step /= 2
            else:
                break
            cores, error = tried, now
        for core, value in zip(self.trains.table_cores(table), cores, strict=True):
            core.copy_(value)

    def _moved(
        self, table: int, cores: Sequence[Tensor], grads: Sequence[Tensor], places: Tensor
    ) -> Tensor:
        """Return the derivative of rows as the cores move along their gradients."""

        def rows(*moving: Tensor) -> Tensor:
            return self._rows_of(table, moving, places)

        found: Tensor = torch.func.jvp(rows, tuple(cores), tuple(grads))[1]
        return found

    @torch.no_grad()
    def to_dense(self, table: int) -> Tensor:
        """Return a table as a dense `[rows, D]` matrix, stored rows included."""
        dense = self.trains.to_dense(table)
        first, last = self._first_row[table : table + 2]
        keys = self.key_of_row[first:last]
        rows = (keys >= 0).nonzero().squeeze(1)
        ids = keys[rows] - self._first_key[table]
        dense[ids] = self.rows.table_weights()[table].detach()[rows].to(dense.dtype)
        return dense

    def cached_ids(self, table: int) -> Tensor:
        """Return the ids whose rows are stored."""
        first, last = self._first_row[table : table + 2]
        keys = self.key_of_row[first:last]
        return keys[keys >= 0] - self._first_key[table]

    def cache_stats(self) -> TTCacheStats:
        """Return counts since the last reset (reads the device)."""
        lookups, hits, evicted = self.counters.tolist()
        return TTCacheStats(lookups, hits, evicted, *self.changes.tolist())

    def reset_cache_stats(self) -> None:
        """Set the counts of `cache_stats` to zero."""
        self.counters.zero_()
        self.changes.zero_()

    @torch.no_grad()
    def empty_cache(self) -> None:
        """Remove all stored rows, as `cache.eviction` says, and forget all counts."""
        for table in range(len(self.tables)):
            first, last = self._first_row[table : table + 2]
            rows = (self.key_of_row[first:last] >= 0).nonzero().squeeze(1)
            if len(rows):
                self._evict(table, rows)
        self.counts.clear()

    def _rebuild_index(self) -> None:
        """Enter the stored keys into an empty index."""
        self.index.clear()
        self.row_of_slot.fill_(-1)
        rows = (self.key_of_row >= 0).nonzero().squeeze(1)
        slots = self.index.find_or_insert_slots(self.key_of_row[rows]).slots
        self.row_of_slot[slots] = rows

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rebuild_index()

    def reset_parameters(self) -> None:
        """Redraw the cores, reset optimizer states, empty the cache and forget all counts."""
        self.trains.reset_parameters()
        self.rows.reset_parameters()
        self.key_of_row.fill_(-1)
        self._rebuild_index()
        self.counts.clear()
        self.reset_cache_stats()
        self._since, self._choice = 0, self._choice + 1

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of cores and stored rows, from the next backward on."""
        self.trains.set_learning_rate(lr)
        self.rows.set_learning_rate(lr)

    def nbytes(self) -> dict[str, int]:
        """Return the bytes of `weights` (cores), `cache` (rows and index) and `optimizer_state`."""
        trains, rows = self.trains.nbytes(), self.rows.nbytes()
        index = self.row_of_slot.nbytes + self.key_of_row.nbytes
        tables = sum(t.nbytes for h in (self.index, self.counts) for t in h.index.tensors())
        return {
            "weights": trains["weights"],
            "cache": rows["weights"] + index + tables,
            "optimizer_state": trains["optimizer_state"] + rows["optimizer_state"],
        }


def _rebuild_index(module: Any, incompatible: Any) -> None:
    module._rebuild_index()


def _hash_table(capacity: int, eviction: Eviction, device: torch.device | str | None) -> HashTable:
    """Return a table of keys; its values are not used."""
    return HashTable(DynamicSpec(capacity, 1, eviction=eviction), device=device, seed=0)
