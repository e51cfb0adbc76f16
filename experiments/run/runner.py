"""A run from configuration to report: every outcome is a record, every ending has a report."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from experiments.caches import rates
from experiments.caches.trace_cell import trace_cell
from experiments.config.configure import UsageError, device_kind
from experiments.config.schema import Config, Kind
from experiments.config.sweep import Cell, expand
from experiments.machine import environment
from experiments.paths import ROOT
from experiments.report import write_report
from experiments.results.store import Record, RunStore
from experiments.run.cell import Session, fit_memory, measure_cell
from experiments.run.progress import Display
from experiments.timing import memory, stats

TIMED_SHARE = 0.6  # of a cell's time; building and checking its contenders take the rest


def run(config: Config, *, question: str, words: Sequence[str]) -> int:
    """Measure and report; returns the exit status (0, 2, 5 or 130, see cli.HELP)."""
    try:
        device = _device(config)
        cells = expand(config)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    folder = Path(config.report.folder)
    store = RunStore.create(folder if folder.is_absolute() else ROOT / folder, config.name)
    store.write_config(config)
    memory.keep_freed_blocks()
    started = time.monotonic()
    status = _measure(cells, Session(config, device, store.path.name), store, words)
    store.write_json(
        "run.json",
        {
            "experiment": config.name,
            "question": question,
            "status": status,
            "cells": len(cells),
            "seconds": round(time.monotonic() - started, 1),
        },
    )
    summary = write_report(store.path)
    print(f"\n{summary.answer}\n")
    if summary.failures:
        print(f"{summary.failures} measurement(s) failed or were wrong; the report says which")
    print(f"report: {_relative(store.path / 'index.html')}")
    if status == "interrupted":
        return 130
    return 5 if summary.failures else 0


def _device(config: Config) -> torch.device:
    kind = device_kind(config.device.kind)
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("device=cuda: torch finds no GPU here; leave device out or use device=cpu")
    if config.device.threads:
        torch.set_num_threads(config.device.threads)
    return torch.device(kind)


def _measure(cells: Sequence[Cell], session: Session, store: RunStore, words: Sequence[str]) -> str:
    """All cells; 'finished', or 'interrupted' with what was measured until then in the store."""
    found = environment.describe(session.device, list(words))
    with Display(len(cells)) as display:
        display.say(f"{session.config.name} · {len(cells)} cells · {found['device']}")
        try:
            found["copy_gb_s"] = environment.copy_bandwidth(session.device) / 1e9
            store.write_json("environment.json", found)
            for cell in cells:
                display.begin(_where(cell))
                fitted = fit_memory(cell, session)
                if cell.kind is Kind.cache:
                    records = trace_cell(fitted, session)
                else:
                    records = measure_cell(fitted, session, _seconds(session, display))
                for record in records:
                    store.append(record)
                display.finish(f"{_where(fitted):<42} {_outcome(records)}")
        except KeyboardInterrupt:
            display.say("interrupted: reporting what was measured")
            store.write_json("environment.json", found)
            return "interrupted"
    return "finished"


def _seconds(session: Session, display: Display) -> float:
    """Timing budget of the next cell: its share of what is left of the run's."""
    timing = session.config.timing
    if not timing.total_seconds:
        return timing.cell_seconds
    left = timing.total_seconds - display.elapsed()
    fair = TIMED_SHARE * left / max(1, display.total - display.done)
    return min(timing.cell_seconds, max(fair, timing.cell_seconds / 10))


def _where(cell: Cell) -> str:
    w = cell.workload
    law = f" s={w.s:g}" if w.law.value == "zipf" else " uniform"
    tables = f" T={w.T}" if w.T > 1 else ""
    return f"{cell.section:<12}{tables} D={w.D} B={w.B} L={w.L}{law}"


def _outcome(records: Sequence[Record]) -> str:
    """Each contender's median step or hit rate, or what became of it."""
    parts = []
    traced = any(record.get("kind") == Kind.cache.value for record in records)
    if traced:  # one size stands for all
        sizes = sorted({record["cache_rows"] for record in records})
        records = [r for r in records if r["cache_rows"] == sizes[(len(sizes) - 1) // 2]]
    for record in records:
        if record["status"] == "ok" and traced:
            rate = rates.counted(record).lookups
            parts.append(f"{record['label']} {100 * rate:.0f}")
        elif record["status"] == "ok":
            seconds = [s for _, s in record["samples"]["step"]]
            parts.append(f"{record['label']} {1e3 * stats.summarise(seconds).median:.3g} ms")
        else:
            parts.append(f"{record['label']}: {record['status']}")
    return ("% of lookups served: " if traced else "step: ") + " · ".join(parts)


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
