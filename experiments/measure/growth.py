"""Measure a cell of kind growth: the time of every call while hash tables fill from empty.

A cell is a table size; its arms are hash tables, which are filled by turns in one process. Then
each arm is filled once more, alone, to measure its memory.
"""

from __future__ import annotations

import gc
import random
import time
from functools import partial

import torch
from torch import Tensor

from experiments.config.schema import GROWTH_PHASE
from experiments.config.sweep import Arm, Cell
from experiments.contenders.keys import KeyTable, KeyTask
from experiments.contenders.registry import WrongResult, build
from experiments.machine import memory
from experiments.machine.telemetry import telemetry_for
from experiments.measure.keys import KEYS_PER_FILL
from experiments.measure.outcome import Outcome, build_arms, make_record
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.workloads.keys import KeySpace, values_of
from experiments.workloads.workload import table_shapes

FILLED_LOAD = 0.75  # keys ÷ slots after the last call


def growth_cell(cell: Cell, session: Session, seconds: float) -> list[Record]:
    """Return one record per arm: the seconds of each call, and the memory of a separate pass.

    The arms take turns at each call, in random order. `seconds` is not used, because only a filled
    table has shown its longest pause. A record has `keys_there`, the number of keys of all calls,
    and unless the arm failed the entries of `_measure_memory` and `weights_bytes`.
    """
    space = KeySpace(cell.workload.order, session.seed)
    outcomes, tables = build_arms(cell, session, lambda arm: _build_table(cell, arm, session))
    with telemetry_for(session.device) as telemetry:
        _fill_in_turns(cell, session, outcomes, tables, space)
    records = []
    bytes_of_arm = {key: table.nbytes() for key, table in tables.items()}
    tables.clear()
    for arm in cell.arms:
        outcome = outcomes[arm.key]
        outcome.race_result.conclude(telemetry.flags(), telemetry.summary())
        record: Record = {"keys_there": key_counts(cell)[1]}
        if outcome.status == "ok":
            session.note(f"{arm.key}|weighing")
            with outcome.catching():
                record |= _measure_memory(cell, arm, session, space)
                record["weights_bytes"] = bytes_of_arm[arm.key]
        records.append(make_record(cell, outcome, session) | record)
    return records


def key_counts(cell: Cell) -> tuple[int, int]:
    """Return the keys per call, and the keys of all calls: FILLED_LOAD of the slots, rounded down.

    There is at least one call.
    """
    (shape,) = table_shapes(cell.workload, scale=cell.rows_scale)
    keys_per_call = cell.workload.B * cell.workload.L
    return keys_per_call, max(1, int(FILLED_LOAD * shape.rows) // keys_per_call) * keys_per_call


def _build_table(cell: Cell, arm: Arm, session: Session) -> KeyTable:
    (shape,) = table_shapes(cell.workload, scale=cell.rows_scale)
    initial_slots = max(1, round(cell.keys.first * shape.rows))
    _, num_total = key_counts(cell)
    slots = max(shape.rows, num_total)
    task = KeyTask(slots, shape.dim, session.device, num_total, initial_slots)
    return build(arm.contender, task)


def _fill_in_turns(
    cell: Cell,
    session: Session,
    outcomes: dict[str, Outcome],
    tables: dict[str, KeyTable],
    space: KeySpace,
) -> None:
    """Insert new keys into every table, call by call, then check the tables.

    Set the samples of each outcome, (index of the call, seconds), and its stop reason.
    """
    keys_per_call, num_total = key_counts(cell)
    rng = random.Random(session.seed)
    for key in tables:
        outcomes[key].race_result.samples = {GROWTH_PHASE: []}
    for call_index in range(num_total // keys_per_call):
        keys = space.key_range(call_index * keys_per_call, keys_per_call)
        running_arms = [key for key in tables if outcomes[key].status == "ok"]
        for key in rng.sample(running_arms, len(running_arms)):
            session.note(f"{key}|call {call_index + 1}")
            with outcomes[key].catching():
                outcomes[key].race_result.samples[GROWTH_PHASE].append(
                    (call_index, _timed_fill(tables[key], keys))
                )
    for key, table in tables.items():
        if outcomes[key].status == "ok":
            session.note(f"{key}|checking")
            with outcomes[key].catching():
                _verify_filled(table, space, num_total)
                outcomes[key].race_result.stop_reason = "filled"


def _timed_fill(table: KeyTable, keys: Tensor) -> float:
    """Insert new keys and return the seconds, on a GPU until it is idle again.

    `keys` is int64 `[n]` on the host. Its copy to the device is not timed.
    """
    device = table.task.device
    values, keys = values_of(keys, table.task.dim).to(device), keys.to(device)
    synchronise = partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None
    synchronise()
    start = time.perf_counter_ns()
    table.fill(keys, values)
    synchronise()
    return (time.perf_counter_ns() - start) / 1e9


def _verify_filled(table: KeyTable, space: KeySpace, num_total: int) -> None:
    """Raise WrongResult unless every key is present and has a slot to itself and its value.

    A table without the operation "find" has no values to compare.
    """
    slot_blocks = []
    for first in range(0, num_total, KEYS_PER_FILL):
        keys = space.key_range(first, min(KEYS_PER_FILL, num_total - first))
        values = values_of(keys, table.task.dim)
        slot_blocks.append(table.find_slots(table.prepare(keys, values)).cpu())
        if "find" in table.operations and not torch.equal(
            table.find(table.prepare(keys, values)).cpu(), values
        ):
            raise WrongResult("after growth a key has another value")
    slots = torch.cat(slot_blocks)
    if (slots == table.absent).any():
        raise WrongResult(f"after growth {int((slots == table.absent).sum())} keys are not there")
    if len(slots.unique()) < num_total:
        raise WrongResult("after growth two keys have one slot")


def _measure_memory(cell: Cell, arm: Arm, session: Session, space: KeySpace) -> Record:
    """Measure the peak memory while a table grows, and the memory that it occupies at the end.

    Returns:
        `peak_bytes` and `kept_bytes`, None if unknown.
    """
    keys_per_call, num_total = key_counts(cell)
    tables: list[KeyTable] = []

    def grow() -> None:
        table = _build_table(cell, arm, session)
        for first in range(0, num_total, keys_per_call):
            keys = space.key_range(first, keys_per_call)
            table.fill(keys.to(session.device), values_of(keys, table.task.dim).to(session.device))
        tables.append(table)

    bytes_before = _bytes_in_use(session.device)
    peak_bytes = memory.peak_bytes(grow, session.device)
    bytes_after = _bytes_in_use(session.device)
    tables.clear()
    is_known = bytes_before is not None and bytes_after is not None and peak_bytes is not None
    kept_bytes = (bytes_after or 0) - (bytes_before or 0) if is_known else None
    return {"peak_bytes": peak_bytes, "kept_bytes": kept_bytes}


def _bytes_in_use(device: torch.device) -> int | None:
    """Return the bytes in use on the device; None if unknown."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return int(torch.cuda.memory_allocated(device))
    memory.release_freed_blocks()
    return memory.resident_bytes("VmRSS")
