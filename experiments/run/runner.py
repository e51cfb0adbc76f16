"""A run from configuration to report; an interrupted run has a report too.

`run` expands the configuration to cells, starts a directory, and lets `JobRunner` measure the jobs:
each in fresh processes, reused if an earlier run has its records, or left out when the budget is
used up. Then `finish` writes the report and derives the exit status.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Column, Table

from experiments import kinds
from experiments.config.schema import AXES, Config, Mode, UsageError, device_kind
from experiments.config.sweep import SWEEP, Cell, axes_of
from experiments.contenders import registry
from experiments.kinds.base import Effort, Ranks, load
from experiments.machine import memory
from experiments.machine.flags import explain
from experiments.measure.session import Session
from experiments.paths import ROOT, shown_path
from experiments.report import text, write_report
from experiments.results.store import Record, RunStore
from experiments.run.jobs import (
    EarlierJobs,
    Job,
    earlier_jobs,
    job_passes,
    max_job_seconds,
    num_replicates,
)
from experiments.run.progress import Display, cell_words
from experiments.run.worker import measure_job, survey
from experiments.workloads.workload import dense_bytes, table_shapes

WIDTH = 120  # columns of the table outside a terminal
BUILD_BYTES_PER_SECOND = 0.5e9  # rate of building and checking tables
MIN_SHARE = 0.1  # minimum of the timing of a job that begins late ÷ timing.cell_seconds
TIMED_SHARE = 0.6  # timing ÷ time of a job, which builds and checks contenders too
FAILURES = ("error", "timeout", "wrong")


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Measure and report; return the exit status (see cli.HELP).

    A dry run prints the plan instead, and a kind that leads its run does all by itself. In the main
    thread, SIGTERM acts as Ctrl-C from now on.

    Args:
        config: checked configuration.
        question: question of the experiment.
        words: words of the command line.

    Raises:
        UsageError: the run is impossible; no contender was measured.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's Ctrl-C
    kind = kinds.find(config.kind)
    if kind.leads:
        return int(load(kind.leads)(config, question=question, words=words))
    device = device_of(config)
    cells = [cell for cell in kinds.expand(config) if cell.arms]
    if not cells:
        raise UsageError("nothing to measure: contenders, where or exclude leave no contender")
    if config.dry_run:
        return print_plan(cells, config, device)
    environment = survey(config, device, words)
    folder = ROOT / config.report.folder / config.name
    earlier = earlier_jobs(folder, config, environment["context_id"])
    store = RunStore.begin(config, environment)
    session = Session(config, device, store.path.name)
    with Display(sum(len(jobs) for jobs in job_passes(cells, config))) as display:
        display.say(heading(config, cells, environment))
        jobs = JobRunner(session, store, display, earlier, environment["context_id"])
        status = jobs.run(cells)
    return finish(store, config, status=status, question=question, extra=jobs.summary(cells))


def device_of(config: Config) -> torch.device:
    """Return the device of a run; raise UsageError if it has not what modes and ranks need."""
    kind = device_kind(config.device.kind)
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda: torch finds no GPU here; leave device out or use device=cpu")
    if kind == "cpu" and Mode.graph in config.timing.modes:
        raise UsageError(
            "timing.modes: graph replays CUDA graphs, and the device is cpu; "
            "choose from hot, cold, wall, or use device=cuda"
        )
    if kind == "cuda" and config.device.ranks > torch.cuda.device_count():
        raise UsageError(
            f"device.ranks={config.device.ranks} needs a GPU for each rank, and torch finds "
            f"{torch.cuda.device_count()}; use fewer, or device=cpu"
        )
    return torch.device(kind)


def heading(config: Config, cells: Sequence[Cell], environment: dict[str, Any]) -> str:
    """Return the opening line of a run: experiment, cells, device, code; and warnings."""
    code = text.commit(environment) or "no git"
    processes = text.count(config.timing.replicates, "process", "processes")
    if config.device.ranks > 1:
        processes += f" × {config.device.ranks} ranks"
    left_out = len(kinds.expand(dataclasses.replace(config, where=[], exclude=[]))) - len(cells)
    ruled_out = f" ({left_out} left out by where and exclude)" * bool(left_out)
    flags = environment["preflight"]["flags"]
    if values := values_left_out(cells, config):
        ruled_out += (
            f" (without {', '.join(values)}: timing.max_cells={config.timing.max_cells}; 0 has all)"
        )
    warning = f"\nmeasurements may be less precise: {', '.join(map(explain, flags))}" * bool(flags)
    return (
        f"{config.name} · {text.count(len(cells), 'cell')}{ruled_out} × {processes} · "
        f"{environment['device']} · torch {environment['torch']} · {code}{warning}"
    )


class StoreError(Exception):
    """The records of a job could not be written."""


class JobRunner:
    """Run the jobs of a run one after the other, within its budget of time.

    Attributes:
        session: run.
        store: directory of the run.
        display: output on the terminal.
        earlier: records of earlier runs to reuse.
        context_id: context of this run.
        fitted: cells shrunk to memory, by key; every process of a cell has the same tables.
        process_s: seconds of the last measured process of each cell, by key.
        outcomes: number of records by status.
        jobs: number of jobs with records; for `reused` of them the records are of earlier runs.
        left_out: number of jobs without time.
        remaining: number of further processes of each cell that was begun, by key.
        not_begun: keys of the cells without time.
    """

    def __init__(
        self,
        session: Session,
        store: RunStore,
        display: Display,
        earlier: EarlierJobs,
        context_id: str,
    ) -> None:
        self.session, self.store, self.display = session, store, display
        self.earlier, self.context_id = earlier, context_id
        self.started = time.monotonic()
        self.fitted: dict[str, Cell] = {}
        self.process_s: dict[str, float] = {}
        self.outcomes: Counter[str] = Counter()
        self.jobs = self.reused = self.left_out = 0
        self.remaining: dict[str, int] = {}
        self.not_begun: set[str] = set()

    def run(self, cells: Sequence[Cell]) -> str:
        """Measure the cells; return "finished", "interrupted" or the error that ended the run."""
        try:
            for jobs in job_passes(cells, self.session.config):
                self._run_pass(jobs)
            if self.left_out:
                total = self.session.config.timing.total_seconds
                self.display.say(
                    f"no time for {self.left_out} of {self.left_out + self.jobs} processes "
                    f"(timing.total_seconds={total:g}); the same command continues with them"
                )
        except (KeyboardInterrupt, SystemExit):  # the latter by rich: `| head` has ended
            self.display.say(
                "interrupted: the report has what was measured; the same command continues"
            )
            return "interrupted"
        except StoreError as error:
            self.display.say(f"the records cannot be written ({error}); earlier ones are complete")
            return f"store: {error}"
        return "finished"

    def _run_pass(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if self._fits(job):
                records = self._records(job)
                try:
                    self.store.append(*records)
                except OSError as error:
                    raise StoreError(error.strerror or str(error)) from error
                self.jobs += 1
                self._print(job, records)
            else:
                self.left_out += 1
                self.display.skip()

    def _fits(self, job: Job) -> bool:
        """Return whether to measure a job, and count it in `remaining` or its cell in `not_begun`.

        The first process of a cell decides for all. A cell always fits if it has one process only
        or is the headline's, if an earlier run has its records, before anything was measured, and
        in a run without a budget.
        """
        key, config = job.cell.key, self.session.config
        if key not in self.remaining and key not in self.not_begun:
            if self._has_time(job):
                self.remaining[key] = num_replicates(job.cell, config)
            else:
                self.not_begun.add(key)
        if key in self.remaining:
            self.remaining[key] -= 1
        return key in self.remaining

    def _has_time(self, job: Job) -> bool:
        config = self.session.config
        total, num_processes = config.timing.total_seconds, num_replicates(job.cell, config)
        is_headline = bool(config.report.headline) and job.cell.section == config.report.headline
        was_measured = job.key(config) in self.earlier
        if not total or num_processes == 1 or is_headline or was_measured or not self.process_s:
            return True
        mean_s = sum(self.process_s.values()) / len(self.process_s)
        expected_s = mean_s * (num_processes + sum(self.remaining.values()))
        return time.monotonic() - self.started + expected_s <= total

    def _records(self, job: Job) -> list[Record]:
        """Return the records of a job, reused from an earlier run or newly measured.

        All processes of a cell have tables of one size. The first process sets it in `fitted`, and
        earlier records are reused only if their tables had it. Also counts `reused`, or stores the
        duration in `process_s`.
        """
        key, replicate = job.key(self.session.config)
        earlier_records = self.earlier.get((key, replicate))
        if earlier_records and self._same_tables(job.cell, earlier_records[0]["rows_scale"]):
            self.reused += 1
            of_run = {"order": job.order, "cell_number": job.number, "run_id": self.session.run_id}
            return [{"reused_from": r["run_id"], **r, **of_run} for r in earlier_records]
        if job.cell.key not in self.fitted:
            ranked_session = self.session.over_ranks_of(job.cell)
            self.fitted[job.cell.key] = fit_memory(job.cell, ranked_session)
        cell = self.fitted[job.cell.key]
        identity = {"point_key": key, "context_id": self.context_id, "cell_number": job.number}
        session = dataclasses.replace(
            self.session.over_ranks_of(cell),
            replicate=replicate,
            order=job.order,
            identity=identity,
        )
        start = time.monotonic()
        name = cell_words(cell)
        records = measure_job(
            dataclasses.replace(job, cell=cell),
            session,
            self._seconds(),
            lambda note: self.display.begin(f"{name} {note.replace('|', ' ')}"),
        )
        self.process_s[job.cell.key] = time.monotonic() - start
        return records

    def _same_tables(self, cell: Cell, scale: float) -> bool:
        """Return whether an earlier job, with `rows_scale` `scale`, had tables of this run's size.

        Earlier runs may differ, because tables are shrunk to the free memory. A cell that is not
        yet in `fitted` gets the size of the earlier job.
        """
        if cell.key not in self.fitted:
            self.fitted[cell.key] = dataclasses.replace(cell, rows_scale=scale)
        return self.fitted[cell.key].rows_scale == scale

    def _seconds(self) -> float:
        """Return the budget for timing the next job, at most timing.cell_seconds.

        With timing.total_seconds it is the job's share of the remaining time, but at least
        MIN_SHARE of timing.cell_seconds.
        """
        timing = self.session.config.timing
        if not timing.total_seconds:
            return timing.cell_seconds
        remaining_s = timing.total_seconds - (time.monotonic() - self.started)
        job_share = TIMED_SHARE * remaining_s / max(1, self.display.total - self.display.done)
        return min(timing.cell_seconds, max(job_share, MIN_SHARE * timing.cell_seconds))

    def _print(self, job: Job, records: Sequence[Record]) -> None:
        """Count the outcomes; print a line for each cell's first process and for every failure."""
        self.outcomes.update(r["status"] for r in records)
        failures = [r for r in records if r["status"] in FAILURES]
        reused = " (reused)" * ("reused_from" in records[0])
        cell = self.fitted[job.cell.key]
        outcome = kinds.find(str(records[0]["kind"])).progress(records)
        line = f"{cell_words(cell):<42} {outcome}{reused}"
        self.display.finish(line if not job.replicate or failures else "")

    def summary(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Return the entries of run.json."""
        return {
            "cells": len(cells),
            "cells_left_out": len(self.not_begun),
            "values_left_out": values_left_out(cells, self.session.config),
            "jobs": self.jobs,
            "reused": self.reused,
            "outcomes": dict(self.outcomes),
            "seconds": round(time.monotonic() - self.started, 1),
        }


def finish(
    store: RunStore, config: Config, *, status: str, question: str, extra: dict[str, Any]
) -> int:
    """Write run.json and the report, print the answer, and return the exit status.

    If writing fails or is interrupted, print the command that writes the report later.

    Args:
        store: directory of the run.
        config: configuration of the run.
        status: "finished", "interrupted" or the error that ended the run.
        question: question of the experiment.
        extra: further entries of run.json, with `outcomes`, the number of records by status.
    """
    page = shown_path(store.path / "index.html")
    end = {"experiment": config.name, "question": question, "status": status, **extra}
    try:
        store.write_json("run.json", end)
        answer = write_report(store.path)
    except (KeyboardInterrupt, OSError) as error:
        problem = f"error: {error}" if isinstance(error, OSError) else "interrupted"
        command = f"python run.py report {page.parent}"
        print(f"{problem}; there is no report yet: '{command}' writes it", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 130
    print(f"\n{answer}\n")
    outcomes = extra["outcomes"]
    failures = sum(outcomes.get(name, 0) for name in FAILURES)
    if failures:
        print(f"{text.count(failures, 'measurement')} failed; the report says which and why")
    print(f"report: {page}")
    if status == "interrupted":
        return 130
    if status != "finished":
        return 1
    return 5 if failures or (config.strict and outcomes.get("oom", 0)) else 0


def fit_memory(cell: Cell, session: Session) -> Cell:
    """Return the cell, its tables shrunk if the contenders would exceed device.memory_share.

    That is a share of the free memory. Compressed contenders do not count; a cell with no others
    counts as one with an uncompressed one.
    """
    kind = kinds.find(cell.kind)
    if not kind.measurement.makes_tables:
        return cell
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    adagrad = session.config.optimizer.value == "adagrad"
    needed_bytes = max(1, dense_arms(cell)) * dense_bytes(shapes) * (2 if adagrad else 1)
    if session.device.type == "cpu" and kind.arms.ranks is not Ranks.OF_WORLDS:
        needed_bytes *= session.config.device.ranks  # all ranks share the memory of the host
    allowed_bytes = memory.available_bytes(session.device) * session.config.device.memory_share
    if needed_bytes <= allowed_bytes:
        return cell
    return dataclasses.replace(cell, rows_scale=cell.rows_scale * allowed_bytes / needed_bytes)


def dense_arms(cell: Cell) -> int:
    """Return the number of contenders of the cell that hold its tables uncompressed."""
    if not kinds.find(cell.kind).measurement.makes_tables:
        return 0
    return sum(registry.facts_of(arm.contender).dense for arm in cell.arms)


def values_left_out(cells: Sequence[Cell], config: Config) -> list[str]:
    """Return the values of the sweep that no cell has, as "D=16"; [] without timing.max_cells."""
    if not config.timing.max_cells:
        return []
    swept_cells = [cell for cell in cells if cell.section == SWEEP]
    measured_values = {
        axis: {getattr(cell.workload, axis) for cell in swept_cells} for axis in AXES
    }
    measured_values["rank"] = {arm.rank for cell in swept_cells for arm in cell.arms}
    return [
        f"{axis}={value:g}"
        for axis, values in axes_of(config).items()
        if axis != "B" or not config.timing.max_batch  # a capped batch differs from its value
        for value in dict.fromkeys(values)
        if value not in measured_values[axis]
    ]


def print_plan(cells: Sequence[Cell], config: Config, device: torch.device) -> int:
    """Print the cells with their memory and time; return exit status 0."""
    session = Session(config, device, "dry-run")
    headings = ("contenders", "tables as fp32", "processes", "at most")
    table = Table(Column("cell", no_wrap=True), *headings, box=None)
    total, unlimited = 0.0, 0
    for cell in cells:
        kind = kinds.find(cell.kind)
        fitted_cell = fit_memory(cell, session.over_ranks_of(cell))
        size = text.DASH
        if kind.measurement.makes_tables:
            scaled = f" ({100 * fitted_cell.rows_scale:.3g} % of the rows)" * (
                fitted_cell.rows_scale < 1
            )
            shapes = table_shapes(fitted_cell.workload, scale=fitted_cell.rows_scale)
            size = text.size(dense_bytes(shapes)) + scaled
        seconds = max_process_seconds(fitted_cell, config) * num_replicates(cell, config)
        limited = kind.measurement.effort is not Effort.TRAINED
        total += seconds if limited else 0.0
        unlimited += not limited
        table.add_row(
            cell_words(fitted_cell),
            ", ".join(arm.key for arm in cell.arms),
            size,
            str(num_replicates(cell, config)),
            text.seconds(seconds) if limited else text.DASH,
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    if values := values_left_out(cells, config):
        console.print(f"\nWithout {', '.join(values)}: timing.max_cells={config.timing.max_cells}.")
    limit = config.timing.total_seconds
    bound = f", cut to about {limit:g} s by timing.total_seconds" if 0 < limit < total else ""
    times = [f"about {text.seconds(total)} at most{bound}"] if total else []
    times += [f"no limit for {text.count(unlimited, 'cell')} that train"] if unlimited else []
    console.print(
        f"\n{text.count(len(cells), 'cell')}; {'; '.join(times)}; "
        f"{text.size(memory.available_bytes(device))} of memory free. Nothing was measured."
    )
    return 0


def max_process_seconds(cell: Cell, config: Config) -> float:
    """Return `max_job_seconds` of a cell plus an estimate for building its uncompressed tables."""
    built_bytes = 0
    if num_dense := dense_arms(cell):
        built_bytes = num_dense * dense_bytes(table_shapes(cell.workload, scale=cell.rows_scale))
    return max_job_seconds(cell, config) + built_bytes / BUILD_BYTES_PER_SECOND
