"""Measure a cell of kind keys: operations on hash tables at several loads, timed interleaved.

A cell is a workload. Each of its arms is a hash table at a load (keys ÷ slots), which is filled and
checked. Then the operations of all arms are timed in one race; an operation is a phase.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

from torch import Tensor

from experiments.config.sweep import Arm, Cell
from experiments.contenders.key_checks import verify_key_table
from experiments.contenders.keys import KeyTable, KeyTask
from experiments.contenders.registry import build
from experiments.measure.outcome import Outcome, build_arms, make_record
from experiments.measure.session import Session
from experiments.measure.timing import race_modes
from experiments.results.store import Record
from experiments.timing.call_clock import CallClock, TimedCall
from experiments.workloads.keys import KeyCall, KeyCalls, values_of
from experiments.workloads.workload import table_shapes

INSERTIONS = ("find_or_insert_slots", "find_or_insert", "insert_or_assign", "insert_and_evict")
OPERATIONS_WITH_VALUES = ("find_or_insert", "insert_or_assign", "insert_and_evict")
KEYS_PER_FILL = 1 << 20  # keys per call while a table is filled
MAX_FILL_ROUNDS = 64  # further calls that fill the last slots of a table
FULL_SHARE = 0.999  # share of the wanted keys at which a table counts as filled


@dataclasses.dataclass
class FilledTable:
    """A filled and checked table of an arm, with its calls.

    Attributes:
        table: the table.
        calls: source of the keys of each call.
        keys_to_erase: keys that the last call inserted, to be erased before the next call, on the
            host; None if there are none.
    """

    table: KeyTable
    calls: KeyCalls
    keys_to_erase: Tensor | None = None

    def restore(self) -> None:
        """Erase `keys_to_erase`, if there are any."""
        if self.keys_to_erase is not None:
            self.table.erase(self.keys_to_erase.to(self.table.task.device))
            self.keys_to_erase = None


class Operation(TimedCall):
    """An operation on the table of an arm, as a phase of the race.

    An operation that inserts gets new keys at each call, unless all its keys are present. Other
    operations repeat `num_calls` prepared calls. Inserted keys are erased before the next call, if
    the table can erase and had free slots for all of them. Otherwise they stay, and later keys may
    evict others.

    Args:
        filled: table of the arm.
        name: name of the method of the table.
        num_calls: number of prepared calls.
    """

    def __init__(self, filled: FilledTable, name: str, num_calls: int) -> None:
        self.filled, self.operation = filled, getattr(filled.table, name)
        self.repeats = filled.table.period if name in INSERTIONS else 1
        self.inserts_new_keys = (
            name in INSERTIONS and filled.calls.num_present < filled.calls.keys_per_call
        )
        self.value_dim = filled.table.task.dim if name in OPERATIONS_WITH_VALUES else 0
        calls = () if self.inserts_new_keys else range(num_calls)
        self.prepared_calls = [self._prepare(filled.calls.next(self.value_dim)) for _ in calls]

    def _prepare(self, call: KeyCall) -> Any:
        return self.filled.table.prepare(call.keys, call.values)

    def prepare(self, batch_number: int) -> Any:
        self.filled.restore()
        if not self.inserts_new_keys:
            return self.prepared_calls[batch_number]
        call = self.filled.calls.next(self.value_dim)
        free_slots = self.filled.table.task.slots - self.filled.calls.num_resident
        if self.filled.table.has_erase and len(call.new_keys) <= free_slots:
            self.filled.keys_to_erase = call.new_keys
        return self._prepare(call)

    def call(self, arguments: Any) -> object:
        return self.operation(arguments)


def keys_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return one record per arm and mode; `seconds` is the budget for timing all of them.

    See `_record` for the entries that other kinds do not have.
    """
    outcomes, filled_tables = _build(cell, session)
    phases = {}
    for key, filled in filled_tables.items():
        with outcomes[key].catching():
            session.note(f"{key}|preparing calls")
            phases[key] = _operations(cell, filled, session)
    clock_for = partial(CallClock, session.device)
    modes = race_modes(session, seconds, session.config.timing, outcomes, phases, clock_for)
    return [
        _record(cell, outcome, session, filled_tables.get(key))
        for outcomes_in_mode in modes
        for key, outcome in outcomes_in_mode.items()
    ]


def _operations(cell: Cell, filled_table: FilledTable, session: Session) -> dict[str, Operation]:
    names = [name for name in cell.keys.operations if name in filled_table.table.operations]
    return {name: Operation(filled_table, name, session.config.timing.pool) for name in names}


def task_of(cell: Cell, arm: Arm, session: Session) -> KeyTask:
    """Return the slots, columns and keys for which an arm's table is built."""
    (shape,) = table_shapes(cell.workload, scale=cell.rows_scale)
    num_resident = max(1, round(arm.load * shape.rows))
    return KeyTask(shape.rows, shape.dim, session.device, num_resident)


def _build(cell: Cell, session: Session) -> tuple[dict[str, Outcome], dict[str, FilledTable]]:
    """Build, fill and check the tables, see `build_arms`."""
    has_inserts = any(name in INSERTIONS for name in cell.keys.operations) and cell.keys.hits < 1

    def build_filled(arm: Arm) -> FilledTable:
        task = task_of(cell, arm, session)
        calls = KeyCalls(
            cell.workload, cell.keys, task.num_resident, session.seed, inserts=has_inserts
        )
        table: KeyTable = build(arm.contender, task)
        session.note(f"{arm.key}|filling")
        calls.num_resident = fill(table, calls)
        session.note(f"{arm.key}|checking")
        # At least one, and no more than there are.
        num_checked = min(max(calls.num_present, 1), calls.num_resident)
        last_keys = calls.space.key_range(calls.num_resident - num_checked, num_checked)
        verify_key_table(table, calls.space, last_keys)
        table.reset_after_checks()
        return FilledTable(table, calls)

    return build_arms(cell, session, build_filled)


def fill(table: KeyTable, calls: KeyCalls) -> int:
    """Insert the keys numbered 0, 1, ...: first `table.task.num_resident`, then further ones.

    It ends when FULL_SHARE of `num_resident` keys are present. Return the number of inserted keys.
    Filling a table completely takes more keys than slots,
    because late keys evict earlier ones before the last slot is taken. Some of the evicted keys are
    keys that calls use, which are therefore inserted again. After MAX_FILL_ROUNDS further calls the
    table stays as it is.
    """
    num_required, num_inserted = table.task.num_resident, 0
    for _ in range(MAX_FILL_ROUNDS + -(-num_required // KEYS_PER_FILL)):
        # Counting is slow for some tables, so it waits until the table may be full.
        is_counted = num_inserted >= num_required
        num_missing = num_required - (table.size() if is_counted else num_inserted)
        if is_counted and num_missing <= (1 - FULL_SHARE) * num_required:
            break
        keys = calls.space.key_range(num_inserted, min(KEYS_PER_FILL, num_missing))
        table.fill(keys, values_of(keys, table.task.dim))
        num_inserted += len(keys)
    if num_inserted > num_required:
        num_recent = min(calls.num_present, num_inserted)
        keys_of_calls = calls.space.key_range(num_inserted - num_recent, num_recent)
        table.fill(keys_of_calls, values_of(keys_of_calls, table.task.dim))
    return num_inserted


def _record(cell: Cell, outcome: Outcome, session: Session, filled: FilledTable | None) -> Record:
    """Return the record of an arm: its outcome, and the size and content of its table.

    Further entries are `load` and `hits`, the share of present keys in a call (the configured one
    if the table was not built). A table that was built also has `slots`, `keys_there` (number of
    keys at the end) and `weights_bytes`.
    """
    record = make_record(cell, outcome, session) | {
        "load": outcome.arm.load,
        "hits": cell.keys.hits,
    }
    if filled is not None:
        record |= {
            "slots": filled.table.task.slots,
            "keys_there": filled.table.size(),
            "hits": filled.calls.hits,
            "weights_bytes": filled.table.nbytes(),
        }
    return record
