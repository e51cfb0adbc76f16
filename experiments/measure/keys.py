"""Measure a cell of kind keys: operations on hash tables, timed interleaved, at several loads."""

from __future__ import annotations

import dataclasses
import gc
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from experiments.config.schema import Distribution, KeysConfig, Mode, Order, WorkloadConfig
from experiments.config.sweep import Arm, Cell
from experiments.contenders.keys import KeyTable, KeyTask, build_keyed
from experiments.machine.bandwidth import WORDS
from experiments.machine.telemetry import telemetry_for
from experiments.measure.outcome import Outcome, Wrong, describe
from experiments.results.store import Record
from experiments.run.session import Session
from experiments.timing.clock import Clock, ColdClock, Phase, Reading, UnsupportedMode, Work
from experiments.timing.race import Race
from experiments.workloads import distributions
from experiments.workloads.distributions import Ids
from experiments.workloads.workload import table_shapes


class TimedCall(ABC):
    """An operation with its preparation.

    `repeats` calls that are timed together count as one of their mean, where a few of them take
    most of the time.
    """

    repeats: int = 1

    @abstractmethod
    def before(self, number: int) -> Any:
        """Undo the last call and make the arguments of this one; not timed."""

    @abstractmethod
    def call(self, ready: Any) -> object:
        """Make the timed call."""

    def __call__(self, number: int) -> object:
        """Prepare and make the call."""
        return self.call(self.before(number))


class CallClock(Clock):
    """A host clock around the call alone, with a synchronisation on both sides on a GPU."""

    def __init__(
        self, device: torch.device, mode: Mode, now: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        if mode not in (Mode.hot, Mode.wall) and (mode, device.type) != (Mode.cold, "cpu"):
            raise UnsupportedMode(
                f"operations on tables of keys have no mode {mode.value} on {device.type}: use hot"
            )
        self.mode, self.device, self.now = mode, device, now
        self.flush = ColdClock().flush if mode is Mode.cold else lambda: None
        self.inside = 0.0

    def adapt(self, phase: Phase, pool: int) -> Phase:
        """Wrap the phase so that only its inner call is timed."""
        return self._timed(phase) if isinstance(phase, TimedCall) else phase

    def _timed(self, phase: TimedCall) -> Phase:
        def run(number: int) -> None:
            ready = phase.before(number)
            self.flush()
            self._synchronise()
            start = self.now()
            for _ in range(phase.repeats):
                phase.call(ready)
            self._synchronise()
            self.inside += (self.now() - start) / phase.repeats

        return run

    def time(self, work: Callable[[], object]) -> float:
        """Return the seconds inside the calls that `work` makes."""
        self.inside = 0.0
        work()
        return self.inside / 1e9

    def read(self, works: Iterable[Work]) -> list[Reading]:
        """Take samples whose cost includes their preparation."""
        found = []
        for work in works:
            begun = self.now()
            seconds = self.time(work.call)
            found.append(Reading(seconds, seconds, (self.now() - begun) / 1e9))
        return found

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


FILL = 1 << 20  # keys at a time when a table is filled
BITS = 24  # of a key's value: what a float32 holds


@dataclass(frozen=True)
class KeySpace:
    """Numbered keys: key n is n (ranked), or a seeded bijection of the 64-bit numbers."""

    order: Order
    seed: int

    def keys(self, numbers: Ids) -> Tensor:
        """Return the keys of those numbers; different numbers have different keys."""
        if self.order is Order.ranked:
            return torch.from_numpy(numbers.copy())
        start = np.random.default_rng(self.seed).integers(0, 2**64, dtype=np.uint64)
        x: NDArray[np.uint64] = numbers.astype(np.uint64) + start
        # SplitMix64 (Steele, Lea, Flood 2014) of a counter.
        x = x * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return torch.from_numpy((x ^ x >> np.uint64(31)).view(np.int64))

    def run(self, first: int, count: int) -> Tensor:
        """Return the keys numbered first, first + 1, ..."""
        return self.keys(np.arange(first, first + count, dtype=np.int64))


def values_of(keys: Tensor, dim: int) -> Tensor:
    """Return [keys, dim] float32 values, each row computed from its key."""
    base = (keys * -7046029254386353131 >> 40 & (1 << BITS) - 1).float() / (1 << BITS)
    return base[:, None] + torch.arange(dim)


@dataclass(frozen=True)
class Call:
    """The keys of one call, and which of them are new to the table."""

    keys: Tensor
    values: Tensor
    new: Tensor  # those that were never there


class Calls:
    """Calls on a table that holds the keys 0 .. resident - 1 of a space.

    Operations that insert nothing draw present keys by the workload's distribution. For others the
    present keys of a call are those inserted last, in another order each time: used in every call,
    they stay in a full table. The absent keys of a call are always new.
    """

    def __init__(
        self, work: WorkloadConfig, keys: KeysConfig, resident: int, seed: int, *, inserts: bool
    ) -> None:
        self.work, self.resident, self.inserts, self.seed = work, resident, inserts, seed
        self.space = KeySpace(work.order, seed)
        self.size = work.B * work.L
        self.known = round(keys.hits * self.size)
        if inserts:
            self.known = min(self.known, resident)
        self.made = 0

    @property
    def hits(self) -> float:
        """Return the share of a call's keys that are present, limited by the table's keys."""
        return self.known / self.size

    def next(self, dim: int) -> Call:
        """Return the keys and values of the next call; `dim` 0 leaves the values out."""
        rng = np.random.default_rng([self.seed, self.made])
        fresh = self.size - self.known
        first = self.resident + self.made * fresh
        new = self.space.run(first, fresh)
        self.made += 1
        keys = torch.cat([self.space.keys(self._there(rng)), new])
        keys = keys[torch.from_numpy(rng.permutation(self.size))]
        return Call(keys, values_of(keys, dim) if dim else torch.empty(self.size, 0), new)

    def _there(self, rng: np.random.Generator) -> Ids:
        if self.inserts:
            return np.arange(self.resident - self.known, self.resident, dtype=np.int64)
        if self.work.distribution is Distribution.zipf and self.work.s:
            ranks = distributions.zipf_ranks(
                rng, self.known, self.resident, self.work.s, self.work.q
            )
            return distributions.permute(ranks, self.resident, self.seed)
        return rng.integers(0, self.resident, self.known, dtype=np.int64)


CHECKED = 2048  # keys that are there
AWAY = 1 << 40  # numbers of keys that no call uses


def verify(table: KeyTable, space: KeySpace, resident: Tensor) -> None:
    """Check every operation of the table on keys of which `resident` are present; raises Wrong.

    What is put in on the way is taken out again, where the table can do that.
    """
    some = resident[torch.linspace(0, len(resident) - 1, min(CHECKED, len(resident))).long()]
    # Few enough that a table which is nearly full has room for them.
    away = space.run(AWAY, max(1, len(some) // 8))
    keys = torch.cat([some, away, some[:3]])
    if table.ceiling:
        places = table.prepare(keys, values_of(keys, 0))
        if not torch.equal(table.find_slots(places) * WORDS, places):
            raise Wrong("find_slots: a line does not hold its own number")
        return
    _slots(table, "find_slots", keys, len(some), len(away))
    if "find" in table.operations:
        _values(table, "find", some, values_of(some, table.task.dim))
    if "find_or_insert_slots" in table.operations:
        known = torch.cat([some, some[:3]])
        _slots(table, "find_or_insert_slots", known, len(some), 0)
    if table.erases:
        _changing(table, away, some)


def _changing(table: KeyTable, away: Tensor, some: Tensor) -> None:
    """Check operations that insert keys: their results, and what is present afterwards."""
    dim = table.task.dim
    if "find_or_insert" in table.operations:
        _values(table, "find_or_insert", away, values_of(away, dim))
        _values(table, "find_or_insert", away, values_of(away, dim), other=True)
        _values(table, "find", away, values_of(away, dim))
        _values(table, "find_or_insert", some, values_of(some, dim), other=True)
    if "insert_or_assign" in table.operations:
        table.insert_or_assign(table.prepare(away, -values_of(away, dim)))
        _values(table, "find", away, -values_of(away, dim))
    if "insert_and_evict" in table.operations:
        evicted = table.insert_and_evict(table.prepare(away, values_of(away, dim))).cpu()
        _values(table, "find", away, values_of(away, dim))
        gone = _run(table, "find_slots", evicted)
        if len(evicted) and (gone != table.absent).any():
            raise Wrong("insert_and_evict: a key that it reports as evicted is still there")
    table.erase(away.to(table.task.device))
    if (_run(table, "find_slots", away) != table.absent).any():
        raise Wrong("erase: a key is still there")


def _run(table: KeyTable, operation: str, keys: Tensor) -> Tensor:
    prepared = table.prepare(keys, values_of(keys, table.task.dim))
    result: Tensor = getattr(table, operation)(prepared)
    return result.cpu()


def _slots(table: KeyTable, operation: str, keys: Tensor, there: int, away: int) -> None:
    """Check the slots of `there` present keys, `away` absent keys, and the first ones once more."""
    slots = _run(table, operation, keys)
    if slots.shape != keys.shape:
        raise Wrong(f"{operation}: shape {tuple(slots.shape)} for {len(keys)} keys")
    own = slots[:there]
    if (own == table.absent).any():
        raise Wrong(f"{operation}: a key that is there is not found")
    if len(own.unique()) < there:
        raise Wrong(f"{operation}: two keys have one slot")
    if (slots[there : there + away] != table.absent).any():
        raise Wrong(f"{operation}: a key that is not there is found")
    again = slots[there + away :]
    if not torch.equal(again, own[: len(again)]):
        raise Wrong(f"{operation}: a key that comes twice has two slots")


def _values(
    table: KeyTable, operation: str, keys: Tensor, want: Tensor, *, other: bool = False
) -> None:
    """Check an operation's values; `other` passes values that known keys must ignore."""
    passed = want + 1 if other else want
    got: Tensor = getattr(table, operation)(table.prepare(keys, passed))
    if not torch.equal(got.cpu(), want):
        raise Wrong(f"{operation}: values differ from those that were put in")


INSERTING = ("find_or_insert_slots", "find_or_insert", "insert_or_assign", "insert_and_evict")
WITH_VALUES = ("find_or_insert", "insert_or_assign", "insert_and_evict")
TOPPED = 64  # rounds of filling up: a full table takes a new key only where it has room
FULL = 0.999  # of what was asked for


@dataclasses.dataclass
class Built:
    """An arm with its table and its calls."""

    table: KeyTable
    calls: Calls
    added: Tensor | None = None  # by the last call, to be taken out before the next

    def restore(self) -> None:
        """Restore the table to its state before the last call; a full table stays full."""
        if self.added is not None:
            self.table.erase(self.added.to(self.table.task.device))
            self.added = None


class Operation(TimedCall):
    """One operation of one arm."""

    def __init__(self, built: Built, name: str, pool: int) -> None:
        self.built, self.name = built, name
        self.work = getattr(built.table, name)
        self.repeats = built.table.period if name in INSERTING else 1
        self.changes = name in INSERTING and built.calls.known < built.calls.size
        dim = built.table.task.dim if name in WITH_VALUES else 0
        self.dim = dim
        self.ready = [] if self.changes else [self._prepare(self._next()) for _ in range(pool)]

    def _next(self) -> Call:
        return self.built.calls.next(self.dim)

    def _prepare(self, call: Call) -> Any:
        return self.built.table.prepare(call.keys, call.values)

    def before(self, number: int) -> Any:
        """Prepare the call: one that changes the table gets new keys, others are made once."""
        self.built.restore()
        if not self.changes:
            return self.ready[number]
        call = self._next()
        room = self.built.table.task.slots - self.built.calls.resident
        if self.built.table.erases and len(call.new) <= room:
            self.built.added = call.new
        return self._prepare(call)

    def call(self, ready: Any) -> object:
        """Run the operation."""
        return self.work(ready)


def keys_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return a record per arm and mode; `seconds` is the budget for timing them all."""
    gc.collect()
    modes = session.config.timing.modes
    timing = dataclasses.replace(session.config.timing, cell_seconds=seconds / len(modes))
    outcomes = {arm.key: Outcome(arm) for arm in cell.arms}
    built = _build(cell, outcomes, session)
    phases = {
        key: {
            name: Operation(b, name, timing.pool)
            for name in cell.keys.operations
            if name in b.table.operations
        }
        for key, b in built.items()
    }
    records, ready = [], outcomes
    for mode in modes:
        outcomes = {k: dataclasses.replace(o, mode=mode) for k, o in ready.items()}
        going = {k: p for k, p in phases.items() if outcomes[k].status == "ok" and p}
        session.note("|timing")
        race = Race(
            going,
            timing,
            CallClock(session.device, mode),
            session.seed,
            telemetry=telemetry_for(session.device),
            note=session.note,
        )
        for key, measured in (race.run() if going else {}).items():
            outcomes[key].measured = measured
            if measured.error:
                outcomes[key].fail(measured.error)
        records += [_record(cell, o, session, built.get(k)) for k, o in outcomes.items()]
    return records


def task_of(cell: Cell, arm: Arm, session: Session) -> KeyTask:
    """Return the task that an arm's table is built for."""
    (shape,) = table_shapes(cell.workload, scale=cell.rows_scale)
    resident = max(1, round(arm.load * shape.rows))
    return KeyTask(shape.rows, shape.dim, session.device, resident)


def _build(cell: Cell, outcomes: dict[str, Outcome], session: Session) -> dict[str, Built]:
    """Build, fill and check the tables in random order; a failure becomes the arm's outcome."""
    built: dict[str, Built] = {}
    inserts = any(name in INSERTING for name in cell.keys.operations) and cell.keys.hits < 1
    for arm in random.Random(session.seed).sample(cell.arms, len(cell.arms)):
        try:
            task = task_of(cell, arm, session)
            calls = Calls(cell.workload, cell.keys, task.resident, session.seed, inserts=inserts)
            session.note(f"{arm.key}|building")
            table = build_keyed(arm.contender, task)
            session.note(f"{arm.key}|filling")
            calls.resident = fill(table, calls)
            session.note(f"{arm.key}|checking")
            last = calls.space.run(calls.resident - calls.known, calls.known)
            verify(table, calls.space, last)
            table.ready()
            built[arm.key] = Built(table, calls)
        except Exception as error:  # whatever it is becomes this contender's row
            outcomes[arm.key].fail(error)
    return built


def fill(table: KeyTable, calls: Calls) -> int:
    """Insert keys until the wanted number is present; return how many were inserted.

    A full table takes more: some of the last ones evict others before every slot is taken. Those
    that the calls use, the last ones, are inserted once more then, as some of them were evicted.
    """
    wanted, put = table.task.resident, 0
    for _ in range(TOPPED + -(-wanted // FILL)):
        missing = wanted - (table.size() if put else 0)
        if put >= wanted and missing <= (1 - FULL) * wanted:
            break
        keys = calls.space.run(put, min(FILL, max(missing, 1)))
        table.fill(keys, values_of(keys, table.task.dim))
        put += len(keys)
    if put > wanted:
        used = calls.space.run(put - calls.known, calls.known)
        table.fill(used, values_of(used, table.task.dim))
    return put


def _record(cell: Cell, outcome: Outcome, session: Session, built: Built | None) -> Record:
    record = describe(cell, outcome, session) | {
        "load": outcome.arm.load,
        "hits": cell.keys.hits,
        "threads": torch.get_num_threads(),
    }
    if built is not None:
        task = built.table.task
        record |= {
            "slots": task.slots,
            "keys_there": int(built.table.size()),
            "hits": built.calls.hits,
            "weights_bytes": built.table.nbytes(),
        }
    return record


def run_keys(
    contender: str, batches: Sequence[Ids], slots: int, session: Session
) -> dict[str, list[int]]:
    """Count per batch the keys that were present before the batch was inserted.

    The table is found right first, with other keys and more slots.
    """
    space = KeySpace(Order.permuted, session.seed)
    checked = _build_for_trace(contender, 4 * CHECKED, session)
    some = space.run(0, CHECKED)
    checked.fill(some, values_of(some, 1))
    verify(checked, space, some)
    table = _build_for_trace(contender, slots, session)
    samples: dict[str, list[int]] = {k: [] for k in ("lookups", "lookup_hits", "rows", "row_hits")}
    for ids in batches:
        rows, lookups = np.unique(ids, return_counts=True)
        slots_of = table.find_slots(_prepare_trace(table, rows)).cpu().numpy()
        there = slots_of != table.absent
        table.find_or_insert_slots(_prepare_trace(table, ids))
        samples["lookups"].append(len(ids))
        samples["lookup_hits"].append(int(lookups[there].sum()))
        samples["rows"].append(len(rows))
        samples["row_hits"].append(int(there.sum()))
    return samples


def _build_for_trace(contender: str, slots: int, session: Session) -> KeyTable:
    return build_keyed(contender, KeyTask(slots, 1, session.device, slots))


def _prepare_trace(table: KeyTable, ids: Ids) -> Any:
    keys = torch.from_numpy(ids.astype(np.int64))
    return table.prepare(keys, torch.zeros(len(ids), 1))
