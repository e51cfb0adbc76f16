"""A run from configuration to report; an interrupted run has a report too.

`run` expands the configuration to cells, creates the run's directory, and lets `JobRunner` go
through the jobs: each is measured in a fresh process, reused if an earlier run has its records, or
left out when the time is used up. Then `finish` writes the report and derives the exit status.
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
from experiments.config.sweep import SWEEP, Cell, axes_of, exact
from experiments.contenders import registry
from experiments.kinds.base import Ranks, Repetition, load
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
from experiments.run.progress import Display, describe_cell
from experiments.run.worker import measure_job, survey
from experiments.workloads.workload import dense_bytes, table_shapes

WIDTH = 120  # columns of the table outside a terminal
BUILD_BYTES_PER_SECOND = 0.5e9  # rate of building and checking tables
MIN_SHARE = 0.1  # minimum budget for timing of a late job ÷ timing.cell_seconds
TIMED_SHARE = 0.6  # timing ÷ whole time of a job, which builds and checks contenders too
FAILURES = ("error", "timeout", "wrong")  # statuses by which a run fails


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Measure the cells of an experiment and write its report; return the exit status (cli.HELP).

    A dry run prints the plan instead. If the kind has a `runner`, that does all the work. If the
    main thread calls this, SIGTERM acts as Ctrl-C from then on.

    Args:
        config: checked configuration.
        question: question of the experiment, for the report.
        words: words of the command line, for the report.

    Raises:
        UsageError: the run is impossible; nothing was measured.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's Ctrl-C
    kind = kinds.find(config.kind)
    if kind.runner:
        return int(load(kind.runner)(config, question=question, words=words))
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
    """Return the device of a run.

    Raises:
        UsageError: there is no GPU, too few GPUs for the ranks, or mode graph on a CPU.
    """
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
    """Return the first line of a run's output: experiment, cells, device, code; and warnings.

    `cells` are those to measure, `environment` is the content of environment.json.
    """
    code = text.commit(environment) or "no git"
    processes = text.count(config.timing.replicates, "process", "processes")
    if config.device.ranks > 1:
        processes += f" × {config.device.ranks} ranks"
    all_cells = kinds.expand(dataclasses.replace(config, where=[], exclude=[]))
    num_excluded = len(all_cells) - len(cells)
    cell_note = f" ({num_excluded} left out by where and exclude)" if num_excluded else ""
    flags = environment["preflight"]["flags"]
    if values := values_left_out(cells, config):
        cell_note += (
            f" (without {', '.join(values)}: timing.max_cells={config.timing.max_cells}; 0 has all)"
        )
    warning = ""
    if flags:
        warning = f"\nmeasurements may be less precise: {', '.join(map(explain, flags))}"
    return (
        f"{config.name} · {text.count(len(cells), 'cell')}{cell_note} × {processes} · "
        f"{environment['device']} · torch {environment['torch']} · {code}{warning}"
    )


class StoreError(Exception):
    """The records of a job cannot be written; the message is that of the system."""


class JobRunner:
    """Run the jobs of a run one after the other, within its budget of time.

    Attributes:
        session: session of the run.
        store: directory of the run.
        display: output on the terminal.
        earlier: records of earlier runs that may be reused.
        context_id: context of this run.
        fitted_cells: cells shrunk to memory, by key; every process of a cell has the same tables.
        process_s: seconds of the last measured process of each cell, by key.
        outcomes: number of records by status.
        num_jobs: number of jobs with records.
        num_reused: number of these jobs whose records are of earlier runs.
        num_left_out: number of jobs for which no time was left.
        num_remaining: number of processes that admitted cells still need, by key.
        cells_left_out: keys of the cells for which no time was left.
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
        self.begin_s = time.monotonic()
        self.fitted_cells: dict[str, Cell] = {}
        self.process_s: dict[str, float] = {}
        self.outcomes: Counter[str] = Counter()
        self.num_jobs = self.num_reused = self.num_left_out = 0
        self.num_remaining: dict[str, int] = {}
        self.cells_left_out: set[str] = set()

    def run(self, cells: Sequence[Cell]) -> str:
        """Measure the cells; return "finished", "interrupted" or the error that ended the run."""
        try:
            for jobs in job_passes(cells, self.session.config):
                self._run_pass(jobs)
            if self.num_left_out:
                total_s = self.session.config.timing.total_seconds
                num_processes = self.num_left_out + self.num_jobs
                self.display.say(
                    f"no time for {self.num_left_out} of {num_processes} processes "
                    f"(timing.total_seconds={total_s:g}); the same command continues with them"
                )
        except (KeyboardInterrupt, SystemExit):  # rich raises the latter if `| head` has ended
            self.display.say(
                "interrupted: the report has what was measured; the same command continues"
            )
            return "interrupted"
        except StoreError as error:
            self.display.say(f"the records cannot be written ({error}); earlier ones are complete")
            return f"store: {error}"
        return "finished"

    def _run_pass(self, jobs: Sequence[Job]) -> None:
        """Measure or leave out each job; raise StoreError if records cannot be written."""
        for job in jobs:
            if self._admit(job):
                records = self._provide_records(job)
                try:
                    self.store.append(*records)
                except OSError as error:
                    raise StoreError(error.strerror or str(error)) from error
                self.num_jobs += 1
                self._report_job(job, records)
            else:
                self.num_left_out += 1
                self.display.skip()

    def _admit(self, job: Job) -> bool:
        """Return whether to measure a job; update `num_remaining` or `cells_left_out`.

        The decision on the first process of a cell is the decision on all.
        """
        key, config = job.cell.key, self.session.config
        if key not in self.num_remaining and key not in self.cells_left_out:
            if self._has_time(job):
                self.num_remaining[key] = num_replicates(job.cell, config)
            else:
                self.cells_left_out.add(key)
        if key in self.num_remaining:
            self.num_remaining[key] -= 1
        return key in self.num_remaining

    def _has_time(self, job: Job) -> bool:
        """Return whether all processes of the job's cell fit into the time that is left.

        Always True for a cell with one process, the headline's cells, a cell with earlier records,
        the first cell that is measured, and in a run without timing.total_seconds.
        """
        config = self.session.config
        total_s, num_processes = config.timing.total_seconds, num_replicates(job.cell, config)
        is_headline = bool(config.report.headline) and job.cell.section == config.report.headline
        was_measured = job.key(config) in self.earlier
        if not total_s or num_processes == 1 or is_headline or was_measured or not self.process_s:
            return True
        mean_s = sum(self.process_s.values()) / len(self.process_s)
        expected_s = mean_s * (num_processes + sum(self.num_remaining.values()))
        return time.monotonic() - self.begin_s + expected_s <= total_s

    def _provide_records(self, job: Job) -> list[Record]:
        """Return the records of a job, reused from an earlier run or newly measured.

        All processes of a cell have tables of one size. The first process sets it in
        `fitted_cells`, and earlier records are reused only if their tables had this size. The
        method updates `num_reused` or `process_s`.
        """
        key, replicate = job.key(self.session.config)
        earlier_records = self.earlier.get((key, replicate))
        if earlier_records and self._has_same_tables(job.cell, earlier_records[0]["rows_scale"]):
            self.num_reused += 1
            changes = {
                "order": job.order,
                "cell_number": job.cell_number,
                "run_id": self.session.run_id,
                "cell": job.cell.key,  # it depends on the other cells of the run
                "title": job.cell.title,
            }
            return [
                {"reused_from": record["run_id"], **record, **changes} for record in earlier_records
            ]
        if job.cell.key not in self.fitted_cells:
            rank_session = self.session.over_ranks_of(job.cell)
            self.fitted_cells[job.cell.key] = fit_memory(job.cell, rank_session)
        cell = self.fitted_cells[job.cell.key]
        identity = {"point_key": key, "context_id": self.context_id, "cell_number": job.cell_number}
        session = dataclasses.replace(
            self.session.over_ranks_of(cell),
            replicate=replicate,
            order=job.order,
            identity=identity,
        )
        begin_s = time.monotonic()
        name = describe_cell(cell)
        records = measure_job(
            dataclasses.replace(job, cell=cell),
            session,
            self._timing_budget(),
            lambda note: self.display.begin(f"{name} {note.replace('|', ' ')}"),
        )
        self.process_s[job.cell.key] = time.monotonic() - begin_s
        return records

    def _has_same_tables(self, cell: Cell, rows_scale: float) -> bool:
        """Return whether an earlier job with this `rows_scale` had tables of this run's size.

        Earlier runs may differ, because tables are shrunk to the free memory. A cell that is not
        yet in `fitted_cells` is added with the size of the earlier job.
        """
        if cell.key not in self.fitted_cells:
            self.fitted_cells[cell.key] = dataclasses.replace(cell, rows_scale=rows_scale)
        return self.fitted_cells[cell.key].rows_scale == rows_scale

    def _timing_budget(self) -> float:
        """Return the seconds for timing the next job, at most timing.cell_seconds.

        With timing.total_seconds it is the job's share of the remaining time, but at least
        MIN_SHARE of timing.cell_seconds.
        """
        timing = self.session.config.timing
        if not timing.total_seconds:
            return timing.cell_seconds
        remaining_s = timing.total_seconds - (time.monotonic() - self.begin_s)
        num_jobs_left = max(1, self.display.num_jobs - self.display.num_done)
        job_s = TIMED_SHARE * remaining_s / num_jobs_left
        return min(timing.cell_seconds, max(job_s, MIN_SHARE * timing.cell_seconds))

    def _report_job(self, job: Job, records: Sequence[Record]) -> None:
        """Count the outcomes; print a line for each cell's first process and for every failure."""
        self.outcomes.update(record["status"] for record in records)
        has_failed = any(record["status"] in FAILURES for record in records)
        reuse_note = " (reused)" if "reused_from" in records[0] else ""
        cell = self.fitted_cells[job.cell.key]
        outcome = kinds.find(str(records[0]["kind"])).progress(records)
        line = f"{describe_cell(cell):<42} {outcome}{reuse_note}"
        self.display.finish(line if not job.replicate or has_failed else "")

    def summary(self, cells: Sequence[Cell]) -> dict[str, Any]:
        """Return the entries of run.json about cells, jobs and their time, after `run`."""
        return {
            "cells": len(cells),
            "cells_left_out": len(self.cells_left_out),
            "values_left_out": values_left_out(cells, self.session.config),
            "jobs": self.num_jobs,
            "reused": self.num_reused,
            "outcomes": dict(self.outcomes),
            "seconds": round(time.monotonic() - self.begin_s, 1),
        }


def finish(
    store: RunStore, config: Config, *, status: str, question: str, extra: dict[str, Any]
) -> int:
    """Write run.json and the report, print the answer, and return the exit status (cli.HELP).

    If writing fails or is interrupted, print the command that writes the report later.

    Args:
        store: directory of the run.
        config: configuration of the run.
        status: "finished", "interrupted" or the error that ended the run.
        question: question of the experiment.
        extra: further entries of run.json, with `outcomes`, the number of records by status.
    """
    page = shown_path(store.path / "index.html")
    run_info = {"experiment": config.name, "question": question, "status": status, **extra}
    try:
        store.write_json("run.json", run_info)
        answer = write_report(store.path)
    except (KeyboardInterrupt, OSError) as error:
        problem = f"error: {error}" if isinstance(error, OSError) else "interrupted"
        command = f"python run.py report {page.parent}"
        print(f"{problem}; there is no report yet: '{command}' writes it", file=sys.stderr)
        return 1 if isinstance(error, OSError) else 130
    print(f"\n{answer}\n")
    outcomes = extra["outcomes"]
    num_failures = sum(outcomes.get(status, 0) for status in FAILURES)
    if num_failures:
        print(f"{text.count(num_failures, 'measurement')} failed; the report says which and why")
    print(f"report: {page}")
    if status == "interrupted":
        return 130
    if status != "finished":
        return 1
    return 5 if num_failures or (config.strict and outcomes.get("oom", 0)) else 0


def fit_memory(cell: Cell, session: Session) -> Cell:
    """Return the cell, with fewer rows if its tables exceed device.memory_share of free memory.

    The uncompressed tables of its contenders count, at least those of one contender; compressed
    ones do not.
    """
    kind = kinds.find(cell.kind)
    if not kind.measurement.makes_tables:
        return cell
    shapes = table_shapes(cell.workload, scale=cell.rows_scale)
    has_row_states = session.config.optimizer.value == "adagrad"
    needed_bytes = max(1, num_dense_arms(cell)) * dense_bytes(shapes) * (2 if has_row_states else 1)
    if session.device.type == "cpu" and kind.arms.ranks is not Ranks.OF_WORLDS:
        needed_bytes *= session.config.device.ranks  # all ranks share the memory of the host
    allowed_bytes = memory.available_bytes(session.device) * session.config.device.memory_share
    if needed_bytes <= allowed_bytes:
        return cell
    return dataclasses.replace(cell, rows_scale=cell.rows_scale * allowed_bytes / needed_bytes)


def num_dense_arms(cell: Cell) -> int:
    """Return the number of contenders of the cell that store its tables uncompressed."""
    if not kinds.find(cell.kind).measurement.makes_tables:
        return 0
    return sum(registry.entry_of(arm.contender).dense for arm in cell.arms)


def values_left_out(cells: Sequence[Cell], config: Config) -> list[str]:
    """Return the values of the sweep that none of the cells has, e.g. "D=16".

    [] without timing.max_cells, which is the only reason for them.
    """
    if not config.timing.max_cells:
        return []
    swept_cells = [cell for cell in cells if cell.section == SWEEP]
    measured_values = {
        axis: {getattr(cell.workload, axis) for cell in swept_cells} for axis in AXES
    }
    measured_values["rank"] = {arm.rank for cell in swept_cells for arm in cell.arms}
    return [
        f"{axis}={exact(value)}"
        for axis, values in axes_of(config).items()
        if axis != "B" or not config.timing.max_batch  # a capped batch differs from its value
        for value in dict.fromkeys(values)
        if value not in measured_values[axis]
    ]


def print_plan(cells: Sequence[Cell], config: Config, device: torch.device) -> int:
    """Print the cells with their memory and longest time; measure nothing; return 0."""
    session = Session(config, device, "dry-run")
    headings = ("contenders", "tables as fp32", "processes", "at most")
    table = Table(Column("cell", no_wrap=True), *headings, box=None)
    total_s, num_unlimited = 0.0, 0
    for cell in cells:
        kind = kinds.find(cell.kind)
        fitted_cell = fit_memory(cell, session.over_ranks_of(cell))
        size = text.DASH
        if kind.measurement.makes_tables:
            shapes = table_shapes(fitted_cell.workload, scale=fitted_cell.rows_scale)
            size = text.size(dense_bytes(shapes))
            if fitted_cell.rows_scale < 1:
                size += f" ({100 * fitted_cell.rows_scale:.3g} % of the rows)"
        seconds = max_process_seconds(fitted_cell, config) * num_replicates(cell, config)
        has_limit = kind.measurement.repetition is not Repetition.TRAINED
        total_s += seconds if has_limit else 0.0
        num_unlimited += not has_limit
        table.add_row(
            describe_cell(fitted_cell),
            ", ".join(arm.key for arm in cell.arms),
            size,
            str(num_replicates(cell, config)),
            text.seconds(seconds) if has_limit else text.DASH,
        )
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    if values := values_left_out(cells, config):
        console.print(f"\nWithout {', '.join(values)}: timing.max_cells={config.timing.max_cells}.")
    limit = config.timing.total_seconds
    cut_note = f", cut to about {limit:g} s by timing.total_seconds" if 0 < limit < total_s else ""
    times = [f"about {text.seconds(total_s)} at most{cut_note}"] if total_s else []
    if num_unlimited:
        times.append(f"no limit for {text.count(num_unlimited, 'cell')} that train")
    console.print(
        f"\n{text.count(len(cells), 'cell')}; {'; '.join(times)}; "
        f"{text.size(memory.available_bytes(device))} of memory free. Nothing was measured."
    )
    return 0


def max_process_seconds(cell: Cell, config: Config) -> float:
    """Return `max_job_seconds` of a cell plus an estimate for building its uncompressed tables."""
    built_bytes = 0
    if num_dense := num_dense_arms(cell):
        built_bytes = num_dense * dense_bytes(table_shapes(cell.workload, scale=cell.rows_scale))
    return max_job_seconds(cell, config) + built_bytes / BUILD_BYTES_PER_SECOND
