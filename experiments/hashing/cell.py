"""A cell of kind keys: operations on tables of keys, timed interleaved, at several loads."""

from __future__ import annotations

import dataclasses
import gc
import random
from typing import Any

import torch
from torch import Tensor

from experiments.config.sweep import Arm, Cell
from experiments.contenders import build_keyed
from experiments.contenders.key_table import KeyTable, KeyTask
from experiments.hashing.clock import CallClock, TimedCall
from experiments.hashing.verify import verify
from experiments.hashing.work import FILL, Call, Calls, values_of
from experiments.machine.telemetry import telemetry_for
from experiments.results.store import Record
from experiments.run.outcome import Outcome, describe
from experiments.run.session import Session
from experiments.timing.race import Race
from experiments.work.workload import table_shapes

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
        """As it was before the last call; a table that was full stays as full."""
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
        """A call that changes the table has keys of its own; others are made once."""
        self.built.restore()
        if not self.changes:
            return self.ready[number]
        call = self._next()
        room = self.built.table.task.slots - self.built.calls.resident
        if self.built.table.erases and len(call.new) <= room:
            self.built.added = call.new
        return self._prepare(call)

    def call(self, ready: Any) -> object:
        """The operation."""
        return self.work(ready)


def keys_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """One record per arm and mode; `seconds` is the budget for timing them all."""
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
    """What the table of an arm is built for."""
    (shape,) = table_shapes(cell.workload, scale=cell.rows_scale)
    resident = max(1, round(arm.load * shape.rows))
    return KeyTask(shape.rows, shape.dim, session.device, resident)


def _build(cell: Cell, outcomes: dict[str, Outcome], session: Session) -> dict[str, Built]:
    """The tables, filled and found right, in random order; the others' outcomes say why not."""
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
    """Put keys in until as many are there as were asked for; how many that took.

    A full table takes more: some of the last ones evict others before every slot is taken. Those
    that the calls use, the last ones, are put in once more then, as some of them gave way.
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
