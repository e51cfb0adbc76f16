"""Measure a cell of kind time: build and check its contenders, time them, measure their memory.

`measure_cell` runs in a process of its own. If a cell has several ranks, all of them call it
together, and `session.sync` makes them agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from experiments.config.schema import PHASES, Mode, TimingConfig
from experiments.config.sweep import Arm, Cell
from experiments.contenders import registry
from experiments.contenders.base import Contender, Task
from experiments.contenders.registry import build
from experiments.machine import memory
from experiments.machine.telemetry import telemetry_for
from experiments.measure.outcome import Outcome, build_arms, make_record, pool_entries, verify
from experiments.measure.session import Session
from experiments.results.store import Record
from experiments.timing.clock import Clock, UnsupportedMode, clock_for
from experiments.timing.race import Phase, Race
from experiments.workloads.workload import Batch, Pool, make_pool, table_shapes

PhasesOf = Callable[[Contender, Pool], dict[str, Phase]]
CHECKED_BATCH = 32  # bags per table in a check: the reference of trains needs much memory per bag


def measure_cell(
    cell: Cell, session: Session, seconds: float, phases_of: PhasesOf | None = None
) -> list[Record]:
    """Return one record per arm and mode.

    An arm that fails has a record with status and reason; the other arms go on.

    Args:
        cell: cell to measure.
        session: run and process.
        seconds: budget for timing all arms in all modes.
        phases_of: function that returns the phases of a contender on a pool of batches, by default
            forward and step. One must be "step". An error that it raises fails that arm only.
    """
    timing = session.config.timing
    if any(arm.cache for arm in cell.arms):
        timing = dataclasses.replace(timing, pool=cell.cache.pool)
    session.note("|making batches")
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    pool = make_pool(cell.workload, shapes, timing.pool, session.pool_seed)
    timing = dataclasses.replace(timing, pool=len(pool.batches))  # a short trace gives fewer
    outcomes, contenders = _build_contenders(cell, session)
    sync = session.sync
    sync.share_failures(outcomes)
    phases_of, phases = phases_of or whole_steps, {}
    for key, contender in contenders.items():
        if outcomes[key].status == "ok":
            with outcomes[key].catching():
                phases[key] = sync.phases(key, phases_of(contender, pool))
    sync.share_failures(outcomes)
    modes = race_modes(
        session,
        seconds,
        timing,
        outcomes,
        phases,
        lambda mode: sync.clock(clock_for(session.device, mode)),
        after_warmup=lambda key: contenders[key].reset_counters(),
        counters=lambda key: sync.sum_over_ranks(contenders[key].counters()),
    )
    records = []
    for outcomes_in_mode in modes:
        for key in phases:
            if outcomes_in_mode[key].status == "ok":
                session.note(f"{key}|weighing")
                _measure_sizes(outcomes_in_mode[key], contenders[key], phases[key], timing)
                outcomes_in_mode[key].flops = _flops(contenders[key], pool)
        records += [
            make_record(cell, outcome, session) | pool_entries(pool)
            for outcome in outcomes_in_mode.values()
        ]
    return records


def race_modes(
    session: Session,
    seconds: float,
    timing: TimingConfig,
    outcomes: Mapping[str, Outcome],
    phases: Mapping[str, Mapping[str, Phase]],
    clock_of: Callable[[Mode], Clock],
    **hooks: Any,
) -> Iterator[dict[str, Outcome]]:
    """Time the arms in each mode of the run; yield the outcomes of all arms per mode.

    Args:
        session: run and process.
        seconds: budget of all modes together.
        timing: amount of measuring.
        outcomes: outcomes of building the arms, by arm.
        phases: phases of each built arm.
        clock_of: function that returns the clock of a mode. If it raises UnsupportedMode, all arms
            are unsupported in that mode.
        hooks: further arguments of `Race`.
    """
    modes = session.config.timing.modes
    timing = dataclasses.replace(timing, cell_seconds=seconds / len(modes))
    for mode in modes:
        outcomes_in_mode = {
            key: dataclasses.replace(outcome, mode=mode) for key, outcome in outcomes.items()
        }
        ready_phases = {
            key: arm_phases
            for key, arm_phases in phases.items()
            if outcomes_in_mode[key].status == "ok" and arm_phases
        }
        try:
            clock = clock_of(mode)
        except UnsupportedMode as error:
            for outcome in outcomes_in_mode.values():
                if outcome.status == "ok":
                    outcome.fail(error)
            yield outcomes_in_mode
            continue
        session.note("|timing")
        telemetry = session.sync.telemetry(telemetry_for(session.device))
        race = Race(
            ready_phases,
            timing,
            clock,
            session.seed,
            telemetry=telemetry,
            note=session.note,
            **hooks,
        )
        for key, race_result in (race.run() if ready_phases else {}).items():
            outcomes_in_mode[key].race_result = race_result
            if race_result.error:
                outcomes_in_mode[key].fail(race_result.error)
        yield outcomes_in_mode


def _measure_sizes(
    outcome: Outcome, contender: Contender, phases: Mapping[str, Phase], timing: TimingConfig
) -> None:
    """Set counters, sizes and peak memory of an outcome, by further steps after the timing."""
    step = phases["step"]
    outcome.counters = counting_pass(contender, step, timing.pool)
    outcome.nbytes = contender.nbytes()
    outcome.peak_bytes = memory.peak_bytes(partial(step, 0), contender.task.device)


def counting_pass(contender: Contender, step: Phase, num_batches: int) -> dict[str, int]:
    """Step once on each of `num_batches` batches; return the counts of the cache meanwhile.

    {} without a cache; then no step is made. The counters are reset first, the cache is not.
    """
    if not contender.counters():
        return {}
    contender.reset_counters()
    for number in range(num_batches):
        step(number)
    return contender.counters()


def _flops(contender: Contender, pool: Pool) -> dict[str, float]:
    """Return the floating-point operations of a contender per phase, mean over the batches."""
    flops_by_batch = [contender.flops(batch) for batch in pool.batches]
    return {
        phase: sum(flops[phase] for flops in flops_by_batch) / len(flops_by_batch)
        for phase in flops_by_batch[0]
    }


def _build_contenders(
    cell: Cell, session: Session
) -> tuple[dict[str, Outcome], dict[str, Contender]]:
    """Build and check the contenders, see `build_arms`."""
    batch = make_check_batch(cell, session.seed)

    def build_checked(arm: Arm) -> Contender:
        contender: Contender = build(arm.contender, task_of(cell, arm, session))
        session.note(f"{arm.key}|checking")
        verify(contender, batch)
        return contender

    return build_arms(cell, session, build_checked)


def make_check_batch(cell: Cell, seed: int) -> Batch:
    """Return the batch on which contenders are checked.

    Its ids differ from the timed ones, unless the workload is a trace.
    """
    workload = dataclasses.replace(cell.workload, B=min(CHECKED_BATCH, cell.workload.B))
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    return make_pool(workload, shapes, 1, seed + 1).batches[0]


def whole_steps(contender: Contender, pool: Pool) -> dict[str, Phase]:
    """Return the contender's `forward` and `step` on the batches of a pool as phases.

    Call n uses batch n modulo the number of batches.
    """
    prepared = [contender.prepare(batch) for batch in pool.batches]

    def phase(name: str) -> Phase:
        call = getattr(contender, name)
        return lambda number: call(prepared[number % len(prepared)])

    return {name: phase(name) for name in PHASES}


def task_of(cell: Cell, arm: Arm, session: Session) -> Task:
    """Return tables, optimizer and device for which an arm's contender is built."""
    # `row_factors` fit only tables of the size that the workload states.
    is_full_size = cell.rows_scale == 1.0
    return Task(
        shapes=table_shapes(cell.workload, scale=cell.rows_scale),
        optimizer=session.config.optimizer,
        lr=session.config.lr,
        device=session.device,
        rank=arm.rank,
        tt_tables=cell.tt.tables,
        row_factors=tuple(cell.tt.row_factors) if is_full_size else (),
        dim_factors=tuple(cell.tt.dim_factors),
        shrunk=cell.rows_scale < 1.0,
        cache=arm.cache,
        new_keys=registry.entry_of(arm.contender).new_keys,
        directory=cell.cache.directory,
    )
