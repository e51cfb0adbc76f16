"""Runs with made-up samples: every shape that a report must survive, without measuring anything."""

from __future__ import annotations

import functools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments import configure
from experiments.config.schema import Config
from experiments.config.sweep import Arm, Cell
from experiments.kinds import expand
from experiments.results.store import RunStore

FACTORS = {"tbe": 1.0, "torch": 2.0, "tt": 3.0, "reference_tt": 40.0}
BANDWIDTH: dict[str, Any] = {
    "copy_gb_s": 50.0,
    "sgemm_gflop_s": 80.0,
    "gather_gb_s": {"64": 6.0, "128": 11.0, "256": 18.0, "512": 25.0},
}


@dataclass(frozen=True)
class Recipe:
    """What a made-up run consists of; `fate` gives a record's status and reason."""

    words: Sequence[str] = ("+experiment=tt_vs_tbe",)
    replicates: int = 3
    modes: Sequence[str] = ("hot",)
    rounds: int = 8
    fate: Callable[[Arm, Cell, int], tuple[str, str]] = lambda arm, cell, process: ("ok", "")
    short: Sequence[int] = ()  # cells that missed the last pass
    error: float = 0.0  # relative error of compressed contenders
    environment: dict[str, Any] = field(default_factory=dict)
    status: str = "finished"


@functools.cache
def _load(words: tuple[str, ...]) -> Config:
    return configure.load(words)


def make_run(path: Path, recipe: Recipe) -> Path:
    """A run directory as the harness leaves it, of its timed cells and without its report."""
    config = _load((*recipe.words, "device=cpu", f"timing.replicates={recipe.replicates}"))
    cells = [cell for cell in expand(config) if cell.kind == "time"]
    store = RunStore(path)
    store.write_config(config)
    store.write_json("environment.json", {**ENVIRONMENT, **recipe.environment})
    question = configure.question(config.name)
    store.write_json(
        "run.json",
        {
            "experiment": config.name,
            "question": question,
            "status": recipe.status,
            "cells": len(cells),
        },
    )
    chance = random.Random(7)
    for process in range(recipe.replicates):
        for number, cell in enumerate(cells):
            if process and process == recipe.replicates - 1 and number in recipe.short:
                continue
            for mode in recipe.modes:
                store.append(*(record(a, cell, mode, process, recipe, chance) for a in cell.arms))
    return path


ENVIRONMENT = {
    "time_utc": "2026-01-02T03:04:05+00:00",
    "command": "python run.py +experiment=tt_vs_tbe",
    "device": "Made-up CPU, 2 threads",
    "torch": "2.13.0",
    "git": {"sha": "0123456789ab", "dirty": True},
    "copy_gb_s": 50.0,
    "bandwidth": BANDWIDTH,
    "threads": 2,
}


def record(
    arm: Arm, cell: Cell, mode: str, process: int, recipe: Recipe, chance: random.Random
) -> dict[str, Any]:
    """One line of points.jsonl."""
    status, reason = recipe.fate(arm, cell, process)
    work = cell.workload
    lookups = work.T * work.B * work.L
    dense = 4 * work.T * work.E * work.D
    small = arm.contender.endswith("tt")
    return {
        "run_id": "made-up",
        "point_key": "0",
        "context_id": "0",
        "replicate": process,
        "attempt": 1,
        "order": process,
        "experiment": "made-up",
        "kind": "time",
        "section": cell.section,
        "title": cell.title,
        "cell": cell.key,
        "params": {k: getattr(v, "value", v) for k, v in vars(work).items()},
        "contender": arm.contender,
        "rank": arm.rank,
        "cache": arm.cache,
        "arm": arm.key,
        "label": arm.label,
        "mode": mode,
        "optimizer": "sgd",
        "status": status,
        "reason": reason,
        "stop_reason": "precise" if status == "ok" else "",
        "seed": 1,
        "world_size": 1,
        "rows_scale": 1.0,
        "features": work.T,
        "columns": work.T * work.D,
        "rows": work.T * work.E,
        "lookups": lookups,
        "unique_rows": 0.5 * lookups if status == "ok" else None,
        "pool_sha256": "0",
        "dense_bytes": dense,
        "flags": [],
        "weights_bytes": (dense // 100 * max(1, arm.rank // 8) if small else dense)
        if status == "ok"
        else None,
        "optimizer_state_bytes": 0,
        "cache_bytes": 0,
        "peak_bytes": 8 * lookups,
        "counters": {},
        "flops": {"forward": 1e6, "step": 3e6} if arm.contender == "tt" else {},
        "samples": _samples(arm, cell, mode, recipe, chance) if status == "ok" else {},
        **({"error": {"relative": recipe.error / arm.rank}} if small and recipe.error else {}),
    }


def _samples(
    arm: Arm, cell: Cell, mode: str, recipe: Recipe, chance: random.Random
) -> dict[str, list[tuple[int, float]]]:
    """Two samples a round, with a bias of the process and spikes upwards only."""
    work = cell.workload
    cost = 4e-9 * work.T * work.B * work.L * math.sqrt(work.D) * FACTORS.get(arm.contender, 1.5)
    cost *= (1 + arm.rank / 32) * (1.7 if mode == "cold" else 1.0)
    cost *= math.exp(chance.gauss(0, 0.02))
    return {
        phase: [
            (number, cost * part * (1 + chance.expovariate(12)))
            for number in range(recipe.rounds)
            for _ in range(2)
        ]
        for phase, part in (("forward", 0.35), ("step", 1.0))
    }


def lines(path: Path) -> list[dict[str, Any]]:
    """The records of a run as they are in the file."""
    return [json.loads(x) for x in (path / "points.jsonl").read_text().splitlines()]
