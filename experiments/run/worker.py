"""A job in its own process: code of the child process, and of the parent.

`measure_job` starts a child, which runs `serve`, and receives its records. If the child dies or
raises, its records are lost. Its last note names the arm that failed; another child measures the
other arms.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from experiments import kinds
from experiments.config.schema import Config, UsageError
from experiments.config.sweep import Arm, Cell
from experiments.machine import bandwidth, environment, memory, preflight
from experiments.measure.outcome import Outcome, make_record
from experiments.measure.process import Child, ChildDied, Limits, note
from experiments.measure.session import MeasureRequest, Session
from experiments.results.identity import bench_version, context_of
from experiments.results.store import Record
from experiments.run.jobs import Job
from experiments.run.ranks import RankProcesses

MEMORY_LIMIT = 0.95  # memory limit of a child ÷ free memory, to protect the machine
CEILING_SECONDS = 1.5  # argument `seconds` of `bandwidth.measure_ceilings`
TARGET = "experiments.run.worker:serve"


def serve(pipe: Connection, request: MeasureRequest) -> None:
    """Measure a cell, and send the list of its records; the child process calls this."""
    config = request.session.config
    if config.device.threads:
        torch.set_num_threads(config.device.threads)
    memory.keep_freed_blocks()
    session = dataclasses.replace(request.session, note=note)
    note("|starting")
    records = kinds.find(request.cell.kind).measure(request.cell, session, request.seconds)
    pipe.send([record | {"threads": torch.get_num_threads()} for record in records])


def measure_job(
    job: Job, session: Session, seconds: float, watch: Callable[[str], object]
) -> list[Record]:
    """Measure a job in a child process, or in one per rank; return its records.

    If the child dies or raises, the arm that it was measuring gets records of the failure, and
    another child measures the other arms. If that arm is unknown, all arms get these records.

    Args:
        job: job to measure.
        session: run and process.
        seconds: budget for timing, for each child.
        watch: function that is called about twice per second with the note of the child,
            "arm|activity".
    """
    begin_s = time.monotonic()
    cell, failure_records = job.cell, []
    records: list[Record] = []
    while cell.arms:
        request = MeasureRequest(cell, session, seconds)
        with _start_child(request) as child:
            try:
                records = child.receive(watch)
                break
            except ChildDied as death:
                noted_arm = _noted_arm(cell, child.note)
                failed_arms = cell.arms if noted_arm is None else (noted_arm,)
                for failed_arm in failed_arms:
                    failure_records += _failure_records(cell, failed_arm, death, session)
                cell = cell.with_arms(*(arm for arm in cell.arms if arm not in failed_arms))
    all_records = [*records, *failure_records]
    shared = {
        "job_records": len(all_records),  # points.jsonl has fewer after an interrupted write
        "wall_s": round(time.monotonic() - begin_s, 3),
        "limit_s": session.config.timing.limit_seconds,
        "bench_version": bench_version(),
    }
    return [record | shared for record in all_records]


def _start_child(request: MeasureRequest) -> Child | RankProcesses:
    """Start the process of a request, or one per rank; on a CPU with a limit of memory."""
    config = request.session.config
    memory_bytes = None
    if request.session.device.type == "cpu":
        memory_bytes = int(MEMORY_LIMIT * memory.available_bytes(request.session.device))
    limits = Limits(config.timing.limit_seconds or math.inf, memory_bytes)
    if config.device.ranks > 1:
        return RankProcesses(request, limits)
    return Child(TARGET, (request,), limits=limits)


def _noted_arm(cell: Cell, last_note: str) -> Arm | None:
    """Return the arm that the child's last note names, else the only arm; None if unknown."""
    key = last_note.partition("|")[0]
    arms = [arm for arm in cell.arms if arm.key == key]
    return arms[0] if arms else cell.arms[0] if len(cell.arms) == 1 else None


def _failure_records(cell: Cell, arm: Arm, death: ChildDied, session: Session) -> list[Record]:
    """Return the records of an arm whose process died, one per mode and without samples."""
    modes = kinds.find(cell.kind).measurement.modes or session.config.timing.modes
    outcomes = [Outcome(arm, mode) for mode in modes]
    for outcome in outcomes:
        outcome.fail(death)
    return [make_record(cell, outcome, session) for outcome in outcomes]


def survey(config: Config, device: torch.device, words: Sequence[str]) -> dict[str, Any]:
    """Return the content of environment.json, ceilings and preflight included.

    A child examines the machine, so that the parent never opens the GPU.

    Raises:
        UsageError: the child died or raised, or device.strict is set and the machine is unfit.
    """
    with Child("experiments.run.worker:send_survey", (config, device, list(words))) as child:
        try:
            facts: dict[str, Any] = child.receive()
        except ChildDied as death:
            raise UsageError(
                f"this machine could not be examined: {death}; `python run.py doctor` checks it"
            ) from death
    if config.device.strict:
        preflight.require_fit(facts["preflight"])
    return facts


def send_survey(pipe: Connection, config: Config, device: torch.device, words: list[str]) -> None:
    """Send the content of environment.json; the child process of `survey` calls this."""
    if config.device.threads:
        torch.set_num_threads(config.device.threads)
    facts = environment.environment_content(device, words)
    facts |= context_of(facts) | {"preflight": preflight.check(device)}
    seconds = 0.0 if config.timing.max_rows else CEILING_SECONDS
    ceilings = bandwidth.measure_ceilings(device, seconds)
    pipe.send(facts | {"copy_gb_s": ceilings["copy_gb_s"], "bandwidth": ceilings})
