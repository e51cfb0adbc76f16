"""Pairs of processes, one after the other, until the rules need no more; each is stored at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from experiments.config.schema import Config
from experiments.gate import judge
from experiments.gate.judge import Evidence, Request, Rules, Stage
from experiments.gate.pair import Found, Job, Revisions, Side, Taken, run_pair
from experiments.gate.points import Built, Point
from experiments.results.store import Record, RunStore
from experiments.run.progress import Display

Measure = Callable[[Job, Revisions], Found]


@dataclass
class Trial:
    """One run of the gate's procedure: what it found so far."""

    number: int = 0
    slow: float = 1.0
    attempt: int = 1
    evidence: Evidence = field(default_factory=Evidence)
    failed: dict[str, dict[Side, Built]] = field(default_factory=dict)
    weights: dict[str, dict[str, dict[str, float]]] = field(default_factory=dict)

    def remember(self, record: Record) -> None:
        """What a stored record says, as when it was measured."""
        if record["status"] == "ok":
            stage = Stage(record["stage"])
            self.evidence.add(stage, record["point"], record["effect"])
            if record.get("weight"):
                self.weights[record["point"]] = record["weight"]
        else:
            side = Side(record["side"])
            built = Built(record["status"], record["reason"])
            self.failed.setdefault(record["point"], {})[side] = built
            self.evidence.lost.add(record["point"])


@dataclass
class Conductor:
    """What the trials of a run share."""

    config: Config
    device: torch.device
    points: Sequence[Point]
    rules: Rules
    revisions: Revisions
    store: RunStore
    display: Display
    measure: Measure = run_pair
    pairs: int = 0  # of processes so far; their seeds follow from it

    def finish(self, trial: Trial) -> Trial:
        """Measure until the rules are content."""
        names = [p.name for p in self.points if p.name in self.rules.margins]
        while request := judge.next_request(names, trial.evidence, self.rules):
            self.step(trial, request)
        return trial

    def step(self, trial: Trial, request: Request) -> None:
        """One pair of processes."""
        started = time.monotonic()
        first = trial.number == 0 and not trial.evidence.first
        job = Job(
            [p for p in self.points if p.name in request.points],
            self.config,
            str(self.device),
            self.pairs,
            slow=trial.slow,
            check=first,
        )
        self.display.begin(f"{request.stage.value} set, {len(job.points)} points")
        found = self.measure(job, self.revisions)
        wall = round(time.monotonic() - started, 3)
        records = self._records(trial, request, job, found, wall)
        self.store.append(*records)
        for record in records:
            trial.remember(record)
        self.pairs += 1

    def _records(
        self, trial: Trial, request: Request, job: Job, found: Found, wall: float
    ) -> list[Record]:
        """One per point that was measured, and one per side that could not do a point."""
        mode = self.config.timing.modes[0].value
        records = []
        for point in job.points:
            shared: dict[str, Any] = {
                "run_id": self.store.path.name,
                "experiment": self.config.name,
                "kind": self.config.kind.value,
                "point": point.name,
                "section": point.cell.section,
                "cell": point.cell.key,
                "contender": point.arm.contender,
                "arm": point.arm.key,
                "phase": point.phase,
                "mode": mode,
                "trial": trial.number,
                "attempt": trial.attempt,
                "slow": trial.slow,
                "stage": request.stage.value,
                "pair": job.number,
                "wall_s": wall,
            }
            for side, built in found.failed.get(point.name, {}).items():
                lost = {"status": built.status, "reason": built.reason, "side": side.value}
                records.append(shared | lost)
            if point.name in found.taken and point.name not in found.failed:
                records.append(shared | {"status": "ok"} | measured(found.taken[point.name]))
        return records


def measured(taken: Taken) -> dict[str, Any]:
    """The samples of a pair at a point, and what follows from them."""
    return {
        "effect": taken.effect,
        "executions": taken.executions,
        "warm": taken.warm,
        "weight": taken.weight,
        "base_ns": _nanoseconds(taken.base),
        "head_ns": _nanoseconds(taken.head),
    }


def _nanoseconds(blocks: Sequence[Sequence[float]]) -> list[list[int]]:
    return [[round(1e9 * s) for s in block] for block in blocks]


def seconds_of(records: Sequence[Record], point: str, side: Side) -> list[float]:
    """The faster sample of every block, of all pairs."""
    key = f"{side.value}_ns"
    taken = [r[key] for r in records if r["point"] == point and r["status"] == "ok"]
    return [min(block) / 1e9 for blocks in taken for block in blocks]
