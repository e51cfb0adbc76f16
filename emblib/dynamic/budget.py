"""MemoryBudget: one number of bytes for many dynamic tables, which grow and shrink within it.

Each table that can grow has a *limit*, the buckets up to which it may grow now. The bytes of all
limits, of the other tables and of fallback rows together do not exceed the budget. Before a table
grows, its index asks the budget (`HashIndex.grant`), which raises the limit as far as bytes are
free. A table that gets no more buckets evicts keys of its own.

Every `interval` training forwards, a module *publishes* the pressure in its tables and makes a
*decision* over the published numbers of all modules. If no bytes are free, the *receiver* is the
table whose evicted keys had been unused for the shortest time, of those below their capacity. The
*donor* is the table whose lowest-ranked keys are unused for the longest time. If the donor's age is
more than `ratio` times the receiver's, the donor shrinks by a share of its rows, and the freed
bytes are reserved for the receiver until the next decision. Without `ratio`, tables of equal
pressure would take rows from each other for ever.

A module shrinks its donors at the beginning of its next training forward, under its own lock. So
modules in several threads do not wait for each other's steps, and in one thread the result depends
on the sequence of steps alone.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from emblib.columns import HashEntryColumn
from emblib.dynamic.dynamic_tables import tables_of
from emblib.dynamic.hash_index import HashIndex
from emblib.dynamic.shrinking import release_rows, shrink_to
from emblib.dynamic.state import DynamicState, track_statistics
from emblib.dynamic.statistics import AgeHistogram
from emblib.ops import hash
from emblib.optim.base import number_or_nan
from emblib.specs import SLOTS_PER_BUCKET, check_count

_SAMPLED_BUCKETS = 256  # per table and publication, for `Pressure.lowest_age`; not measured
_VERSION_BYTES = 8  # per row, of versions, which the index records once steps overlap


class Pressure(NamedTuple):
    """The pressure in a table. The age of a key is the number of training forwards since its use.

    Attributes:
        evicted_keys: number of keys that new ones evicted since the publication before.
        evicted_age: mean age of these keys when they were evicted; NaN for none.
        lowest_age: mean age of the lowest-ranked key per bucket, of a sample of buckets; infinite
            if the table could shrink by a step without evicting keys.
    """

    evicted_keys: int
    evicted_age: float
    lowest_age: float


class BudgetedTable(NamedTuple):
    """A table of a budget, for reports.

    Attributes:
        name: name of the table in the model; of a sharded table, with the number of the shard.
        nbytes: bytes that the table may use now, without its fallback rows.
        rows: rows that it may use now, without its fallback rows.
        pressure: the pressure as last published. None before the first publication; after a
            decision None for its donor and receiver, until they publish again.
    """

    name: str
    nbytes: int
    rows: int
    pressure: Pressure | None


class MemoryBudget:
    """A number of bytes for the rows of many dynamic tables, on the CPU.

    Tables grow from `initial_capacity` to at most `capacity` while the budget has room. When it is
    used up, tables whose evicted keys were used most recently grow at the expense of tables whose
    lowest-ranked keys are unused for the longest time (docs/dynamic.md).

    The bytes of a table are those of its rows in use, with weights, optimizer states and index, and
    of its fallback rows. Each row in use also counts 8 bytes for versions, recorded only if
    steps overlap. Overflow rows and the store of a `BackingStore`, counters of admission and
    statistics do not count. Tables that cannot grow count with their whole size. Tables with
    `Eviction.NONE` grow, but never shrink.

    A sharded model has one budget per rank, of the shards of the rank; ranks do not communicate.
    Copies of a module and modules that load its checkpoint belong to no budget; a copy of a budget
    has no tables. Methods may be called in any thread, `attach` while no thread uses the model.

    Args:
        nbytes: the number of bytes.
        interval: number of training forwards of a module between two of its decisions.
        share: share of its rows by which a table shrinks per decision, in (0, 0.5]. It shrinks by
            at least one bucket, and by the bytes of one bucket of the table that grows, but not
            below `initial_capacity`.
        ratio: factor, above 1, by which the age of the lowest-ranked keys of the table that shrinks
            must exceed the age of the evicted keys of the table that grows.

    Raises:
        TypeError: `nbytes` or `interval` is not an int.
        ValueError: `nbytes` or `interval` is below 1, or `share` or `ratio` is not a number or out
            of range.

    Example:
        >>> specs = [
        ...     emblib.DynamicSpec(1_000, dim=4, name=name, initial_capacity=32)
        ...     for name in ("item", "user")
        ... ]
        >>> bags = emblib.DynamicEmbeddingBags(specs, emblib.optim.SGD(0.1))
        >>> budget = emblib.MemoryBudget(20_000)
        >>> budget.attach(bags)
        >>> ids, offsets = torch.arange(600), torch.tensor([0, 600, 600])  # all of "item"
        >>> pooled = bags(ids, offsets)
        >>> sum(bags.nbytes().values()) <= budget.used() <= 20_000
        True
    """

    def __init__(
        self, nbytes: int, *, interval: int = 64, share: float = 1 / 16, ratio: float = 1.5
    ) -> None:
        self.nbytes = check_count("nbytes", nbytes)
        self.interval = check_count("interval", interval)
        if not 0.0 < number_or_nan(share) <= 0.5:  # false for NaN
            raise ValueError(f"share must be a number in (0, 0.5], got {share!r}")
        if not number_or_nan(ratio) > 1.0:
            raise ValueError(
                f"ratio must be a number above 1, or rows move for ever, got {ratio!r}"
            )
        self.share, self.ratio = share, ratio
        self._lock = threading.Lock()
        self._modules: list[_BudgetedModule] = []

    def __reduce__(self) -> tuple[Callable[[int], MemoryBudget], tuple[int]]:
        """Copy and pickle the arguments of the budget alone, not its tables."""
        make_budget = partial(
            type(self), interval=self.interval, share=self.share, ratio=self.ratio
        )
        return make_budget, (self.nbytes,)

    def __repr__(self) -> str:
        options = f"interval={self.interval}, share={self.share:g}, ratio={self.ratio:g}"
        return f"MemoryBudget({self.nbytes}, {options})"

    def attach(self, model: nn.Module) -> None:
        """Add all dynamic tables of a model, after it has its optimizers and is sharded.

        Of a sharded model these are the shards of this rank. Their statistics are tracked from now
        on, see `DynamicEmbeddingBags.track_statistics`.

        Raises:
            TypeError: `model` is not a module.
            RuntimeError: tables of the model are on meta.
            ValueError: the model has no dynamic tables, or its tables are on CUDA, belong to a
                budget already, or use more bytes than the budget has left; nothing is changed.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"a memory budget takes a module, got {type(model).__name__}: call attach once per "
                "model"
            )
        names: dict[int, dict[int, str]] = {}
        states: dict[int, DynamicState] = {}
        handles = tables_of(model)
        for name, handle in handles.items():
            for number, state, index in handle.local_shards():
                states[id(state)] = state
                shard_name = f"{name}.{number}" if len(handle.owners) > 1 else name
                names.setdefault(id(state), {})[index] = shard_name
        if not handles:
            raise ValueError("a memory budget is for dynamic tables, and the model has none")
        for state in states.values():
            _check_can_join(state)
        new_modules = [
            _BudgetedModule.from_state(self, names[number], state)
            for number, state in states.items()
        ]
        with self._lock:
            needed_bytes = sum(module.nbytes for module in new_modules)
            free_bytes = self.nbytes - self._used_bytes()
            if needed_bytes > free_bytes:
                raise ValueError(
                    f"the tables of {type(model).__name__} use {needed_bytes} bytes already, and "
                    f"the budget of {self.nbytes} has {free_bytes} left; choose a larger budget or "
                    "a smaller initial_capacity"
                )
            self._modules += new_modules
        for module, state in zip(new_modules, states.values(), strict=True):
            if state.statistics is None:
                track_statistics(state)
            for table in module.tables:
                state.index.set_limit(table.number, table.limit)
            state.index.grant, state.budget = module.grant, module

    def used(self) -> int:
        """Return the bytes that the tables may use now, at most `nbytes`; see the class."""
        with self._lock:
            return self._used_bytes()

    def tables(self) -> list[BudgetedTable]:
        """Return what each table that can grow may use now, in the order of `attach`."""
        with self._lock:
            self._used_bytes()  # drops the tables of deleted modules
            return [
                BudgetedTable(
                    table.name,
                    table.limit * table.bucket_bytes,
                    table.limit * SLOTS_PER_BUCKET,
                    table.pressure,
                )
                for table in self._growable_tables()
            ]

    def _used_bytes(self) -> int:
        """Drop deleted modules, and return the bytes that the tables of the others may use.

        The caller must hold the lock of the budget.
        """
        self._modules = [module for module in self._modules if module.state_reference() is not None]
        return sum(module.nbytes for module in self._modules)

    def _growable_tables(self) -> Iterator[_GrowableTable]:
        return (table for module in self._modules for table in module.tables)

    def raise_limit(self, table: _GrowableTable, buckets: int) -> None:
        """Raise the limit of a table towards a number of buckets, as far as bytes are free.

        Bytes that are reserved for other tables are not free. Bytes reserved for this table are
        used first.
        """
        with self._lock:
            reserved_bytes = (
                sum(growable_table.reserved_bytes for growable_table in self._growable_tables())
                - table.reserved_bytes
            )
            free_bytes = max(0, self.nbytes - self._used_bytes() - reserved_bytes)
            num_new_buckets = min(buckets - table.limit, free_bytes // table.bucket_bytes)
            if num_new_buckets > 0:
                bytes_from_reserve = min(table.reserved_bytes, num_new_buckets * table.bucket_bytes)
                table.reserved_bytes -= bytes_from_reserve
                table.limit += num_new_buckets

    def lower_limit(self, table: _GrowableTable, buckets: int) -> None:
        """Lower the limit of a table that has shrunk; it has no target and receiver afterwards.

        If it had a receiver, the freed bytes are reserved for that table.
        """
        with self._lock:
            if table.receiver is not None:
                table.receiver.reserved_bytes += (table.limit - buckets) * table.bucket_bytes
            table.limit, table.target_buckets, table.receiver = buckets, None, None

    def decide(self) -> None:
        """Choose a receiver and a donor among the published tables, if their ages differ enough.

        Then set `target_buckets` and `receiver` of the donor, and forget the published pressure of
        both. Bytes that are reserved for tables become free for all first, in any case.
        """
        with self._lock:
            free_bytes = self.nbytes - self._used_bytes()
            for table in self._growable_tables():
                table.reserved_bytes = 0  # what a receiver did not take is free for all
            pressures = [
                (table, table.pressure)
                for table in self._growable_tables()
                if table.pressure is not None
            ]
            receivers = [
                (pressure.evicted_age, table)
                for table, pressure in pressures
                if pressure.evicted_keys
                and free_bytes < table.bucket_bytes
                and table.limit < table.max_buckets
            ]
            if not receivers:
                return
            receiver_age, receiver = min(receivers, key=lambda pair: pair[0])
            donors = [
                (pressure.lowest_age, table)
                for table, pressure in pressures
                if table is not receiver and table.can_shrink and table.limit > table.min_buckets
            ]
            donor_age, donor = max(donors, key=lambda pair: pair[0], default=(0.0, receiver))
            if donor_age <= self.ratio * max(receiver_age, 1.0):  # ages below a step count as one
                return
            num_for_receiver = -(-receiver.bucket_bytes // donor.bucket_bytes)
            num_buckets = max(donor.min_freed_buckets(self.share), num_for_receiver)
            donor.target_buckets = max(donor.min_buckets, donor.limit - num_buckets)
            donor.receiver = receiver
            # Neither table takes part again before it has published.
            donor.pressure = receiver.pressure = None


def _check_can_join(state: DynamicState) -> None:
    """Raise ValueError if tables are in a budget already, or not on the CPU."""
    if state.budget is not None:
        raise ValueError(f"the tables {state.table_names} belong to a memory budget already")
    if state.index.tags.device.type != "cpu":
        raise ValueError(
            f"the tables {state.table_names} are on {state.index.tags.device}, where memory is "
            "allocated for the whole capacity; a memory budget is for tables on the CPU. Choose "
            "capacities that fit together, e.g. with plan_memory"
        )


@dataclass(eq=False)
class _GrowableTable:
    """A table of a budget that can grow.

    The budget changes `limit`, `reserved_bytes`, `target_buckets` and `receiver` under its lock,
    and resets `pressure` to None. The thread that trains the module sets `pressure` and `ages`, and
    reads the others without the lock of the budget.

    Attributes:
        number: number of the table in its module.
        name: name for reports.
        bucket_bytes: bytes per bucket, with rows, optimizer states and index.
        min_buckets: buckets of `initial_capacity`, below which it does not shrink.
        max_buckets: buckets of `capacity`.
        can_shrink: whether it may shrink, which evicts keys; false for `Eviction.NONE`.
        limit: buckets up to which it may grow now.
        reserved_bytes: bytes that a donor freed for this table, and that it has not used yet.
        target_buckets: buckets to which it shrinks next; None for none.
        receiver: table for which it shrinks.
        pressure: numbers of the last publication, or None, as in `BudgetedTable`.
        ages: ages of all keys evicted until the last publication or shrink.
    """

    number: int
    name: str
    bucket_bytes: int
    min_buckets: int
    max_buckets: int
    can_shrink: bool
    limit: int
    reserved_bytes: int = 0
    target_buckets: int | None = None
    receiver: _GrowableTable | None = None
    pressure: Pressure | None = None
    ages: AgeHistogram = field(default_factory=AgeHistogram)

    def min_freed_buckets(self, share: float) -> int:
        """Return the number of buckets of `share`: at least one, unless at `min_buckets`."""
        return min(self.limit - self.min_buckets, max(1, int(share * self.limit)))


class _BudgetedModule:
    """A module in a budget.

    The caller of `grant` and `begin_step` must hold the lock of the module.

    Args:
        budget: the budget.
        state: the tables of the module, referenced weakly.
        tables: tables of the module that can grow.
        fixed_bytes: bytes of the other tables and of all fallback rows.
    """

    def __init__(
        self,
        budget: MemoryBudget,
        state: DynamicState,
        tables: list[_GrowableTable],
        fixed_bytes: int,
    ) -> None:
        self._budget, self.tables, self._fixed_bytes = budget, tables, fixed_bytes
        self.state_reference = weakref.ref(state)
        self._table_of_number = {table.number: table for table in tables}
        self._num_steps = 0

    @classmethod
    def from_state(
        cls, budget: MemoryBudget, table_names: dict[int, str], state: DynamicState
    ) -> _BudgetedModule:
        """Make the object for a module, with `table_names` by number; change nothing else."""
        tables, fixed_bytes = [], 0
        for table_number, spec in enumerate(state.specs):
            buckets = state.index.buckets(table_number)
            slot_bytes = hash.bytes_per_slot(state.index.order, "cpu") + _VERSION_BYTES
            bucket_bytes = SLOTS_PER_BUCKET * (state.moved_bytes(table_number) + slot_bytes)
            fixed_bytes += spec.fallback_rows * state.layout.row_bytes(table_number)
            if spec.buckets == spec.max_buckets:
                fixed_bytes += buckets * bucket_bytes
                continue
            table = _GrowableTable(
                number=table_number,
                name=table_names.get(table_number, state.table_names[table_number]),
                bucket_bytes=bucket_bytes,
                min_buckets=spec.buckets,
                max_buckets=spec.max_buckets,
                can_shrink=spec.eviction.order != "none",
                limit=buckets,
            )
            tables.append(table)
        return cls(budget, state, tables, fixed_bytes)

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Copy and pickle this object as None, because copies of a module have no budget."""
        return type(None), ()

    @property
    def nbytes(self) -> int:
        """Return the bytes that the tables may use now."""
        return self._fixed_bytes + sum(table.limit * table.bucket_bytes for table in self.tables)

    def grant(self, number: int, buckets: int) -> int:
        """Raise a table's limit towards a number of buckets; return how many of them it may have.

        A table that is not growable, or whose module was deleted, gets the number it asks for.
        """
        table, state = self._table_of_number.get(number), self.state_reference()
        if table is None or state is None:
            return buckets
        if buckets > table.limit:
            self._budget.raise_limit(table, buckets)
        if state.index.limits[number] != table.limit:
            state.index.set_limit(number, table.limit)
        return min(buckets, table.limit)

    def begin_step(self, state: DynamicState) -> None:
        """Publish and decide once per interval; shrink the tables that decisions made donors.

        Call it at the beginning of each training forward.
        """
        self._num_steps += 1
        if self._num_steps % self._budget.interval == 0:
            for table in self.tables:
                self._release_unused(table, state)
            self._publish(state)
            self._budget.decide()
        for table in self.tables:
            if table.target_buckets is not None:
                self._shrink(table, table.target_buckets, state)

    def _release_unused(self, table: _GrowableTable, state: DynamicState) -> None:
        """Lower a limit to the buckets in use, e.g. after `clear`, and release the other memory.

        A donor keeps its limit until it shrinks.
        """
        buckets = state.index.buckets(table.number)
        if buckets < table.limit and table.target_buckets is None:
            rows_before, rows = table.limit * SLOTS_PER_BUCKET, buckets * SLOTS_PER_BUCKET
            release_rows(state, table.number, rows_before, rows)
            state.index.set_limit(table.number, buckets)
            self._budget.lower_limit(table, buckets)

    def _publish(self, state: DynamicState) -> None:
        """Publish the pressure in the tables; without statistics, nothing."""
        if state.statistics is None:
            return
        statistics = state.statistics.read()
        for table in self.tables:
            ages = statistics[table.number].eviction_ages
            new_ages = ages.since(table.ages)
            lowest_age = _lowest_age(
                state, table.number, table.min_freed_buckets(self._budget.share)
            )
            table.pressure = Pressure(new_ages.num_keys, new_ages.mean, lowest_age)
            table.ages = ages

    def _shrink(self, table: _GrowableTable, buckets: int, state: DynamicState) -> None:
        """Shrink a table, then lower its limit; after an interrupt the next step completes it."""
        shrink_to(state, table.number, buckets)
        if state.statistics is not None:  # the keys that it evicted just now are not pressure
            table.ages = state.statistics.read()[table.number].eviction_ages
        state.index.set_limit(table.number, buckets)
        self._budget.lower_limit(table, buckets)


def _lowest_age(state: DynamicState, table: int, num_freed_buckets: int) -> float:
    """Return the mean age of the lowest-ranked key per bucket, of evenly spaced buckets.

    It is infinite if `num_freed_buckets` fewer buckets would have all keys at `max_load`, or if the
    sampled buckets are empty.
    """
    index = state.index
    buckets, spec = index.buckets(table), state.specs[table]
    if (
        index.size(table) * 1024
        <= (buckets - num_freed_buckets) * SLOTS_PER_BUCKET * spec.max_load_1024ths
    ):
        return math.inf
    num_sampled = min(buckets, _SAMPLED_BUCKETS)
    bucket_indices = torch.arange(num_sampled, device="cpu") * buckets // num_sampled
    entries = index.table_entries(table).view(buckets, SLOTS_PER_BUCKET, -1)[bucket_indices]
    is_used = index.table_tags(table).view(buckets, SLOTS_PER_BUCKET)[bucket_indices] != 0
    return _mean_lowest_age(index, entries, is_used)


def _mean_lowest_age(index: HashIndex, entries: torch.Tensor, is_used: torch.Tensor) -> float:
    """Return the mean age of the lowest-ranked entry per bucket; infinite without entries.

    It is the oldest one, or with scores the oldest of those with the lowest score.

    Args:
        index: the index, whose clock gives ages.
        entries: int64 `[buckets, 32, 2 or 3]`, see `HashEntryColumn`; the third column is scores.
        is_used: bool `[buckets, 32]`, the slots with an entry.
    """
    max_int64 = torch.iinfo(torch.int64).max
    if entries.shape[2] > HashEntryColumn.SCORE:
        scores = entries[:, :, HashEntryColumn.SCORE].masked_fill(~is_used, max_int64)
        is_used = is_used & (scores == scores.amin(1, keepdim=True))
    stamps = entries[:, :, HashEntryColumn.STAMP].masked_fill(~is_used, max_int64).amin(1)
    stamps = stamps[is_used.any(1)]
    return float((index.clock - stamps).double().mean()) if stamps.numel() else math.inf
