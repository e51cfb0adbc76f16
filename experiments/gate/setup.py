"""Start a run of the gate's kinds: device, points, environment, noise floor, run directory."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from omegaconf import OmegaConf

from experiments.config.schema import Config, UsageError
from experiments.gate import revisions
from experiments.gate.pairs import Side, SideFolders
from experiments.gate.points import Point, points_of
from experiments.gate.rules import Rules
from experiments.paths import ROOT
from experiments.report import text
from experiments.results.identity import digest
from experiments.results.store import Record, RunStore, read_config, read_json, read_records
from experiments.run.runner import device_of
from experiments.run.worker import survey
from experiments.timing import statistics

SCHEMA = 1  # version of noise.json; a floor of another version is ignored

# Noise by point, from a file of gate.noise: number of `pairs`, their `effects` (log ratios of A
# against A), and `mad` and `p95`, the median and the 95 % quantile of |effect|.
NoiseFloor = Mapping[str, Mapping[str, Any]]


def measurement_key(config: Config) -> str:
    """Return a key of how pairs are measured; a noise floor applies to gates with the same key.

    It is a part of the file names of the floors in reports/noise. So a new or renamed entry here,
    or a new field of CaseConfig or GatePoint, makes these floors unusable: measure them again.
    timing.replicates has no effect, because `margin` scales the noise to any number of pairs.
    """
    timing, device = config.timing, config.device
    return digest(
        {
            "cases": {name: dataclasses.asdict(case) for name, case in config.cases.items()},
            "points": [dataclasses.asdict(point) for point in config.gate.points],
            "modes": timing.modes,
            "pool": timing.pool,
            "warmup": [timing.warmup, timing.warmup_seconds, timing.warmup_cap],
            "blocks": timing.min_rounds,
            "caps": [timing.max_rows, timing.max_batch],
            "threads": device.threads,
            "device": device.kind,
        }
    )


def machine_key(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of machine and software that a gate must share with its noise floor."""
    gpu = environment.get("gpu") or {}
    return {
        "hardware_id": environment["hardware_id"],
        "driver": gpu.get("driver"),
        "torch": environment["torch"],
        "threads": environment.get("threads"),
    }


def floor_file(environment: Mapping[str, Any], config: Config) -> str:
    """Return the name of the noise floor's file for a machine and a way of measuring."""
    return f"{environment['hardware_id']}-{measurement_key(config)[:8]}.json"


def noise_floor_content(
    environment: Mapping[str, Any],
    config: Config,
    effects: Mapping[str, Sequence[float]],
    time_utc: str,
) -> dict[str, Any]:
    """Return the content of noise.json.

    Args:
        environment: environment of the run.
        config: configuration of the run.
        effects: log(A ÷ A) of each pair by point; at least one per point.
        time_utc: time of the run, ISO 8601; "" if it is unknown.
    """
    return {
        "schema": SCHEMA,
        "machine": environment["device"],
        "measured": time_utc,
        "key": machine_key(environment),
        "measures": measurement_key(config),
        "points": {
            point: {
                "pairs": len(logs),
                "mad": statistics.median_deviation(logs),
                "p95": statistics.quantile(sorted(map(abs, logs)), 0.95),
                "effects": [round(x, 6) for x in logs],
            }
            for point, logs in effects.items()
        },
    }


def find_noise_floor(
    folder: Path, environment: Mapping[str, Any], config: Config
) -> NoiseFloor | None:
    """Return the floor for this machine, its software and this way of measuring.

    None if `folder` has none, or only one that is damaged, is of another SCHEMA, or has another
    `machine_key`.
    """
    path = folder / floor_file(environment, config)
    try:
        stored_floor = json.loads(path.read_text())
        if stored_floor["schema"] != SCHEMA or stored_floor["key"] != machine_key(environment):
            return None
        points: NoiseFloor = stored_floor["points"]
        is_complete = all(math.isfinite(noise["mad"]) for noise in points.values())
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None
    return points if is_complete else None


def margin(floor: NoiseFloor, point: str, min_effect: float, pairs: int) -> float:
    """Return a point's margin, a relative effect, for the mean of `pairs` pairs.

    It is `min_effect` if the floor does not have the point.
    """
    if point not in floor:
        return min_effect
    return statistics.gate_margin(min_effect, floor[point]["mad"], pairs)


@dataclass(frozen=True)
class GateStart:
    """The preparation of a run: configuration, device, points, machine and noise floor."""

    config: Config
    device: torch.device
    points: list[Point]
    environment: dict[str, Any]  # content of environment.json
    floor: NoiseFloor | None  # noise floor of this machine; None if it was not measured

    @property
    def rules(self) -> Rules:
        """Return the numbers of pairs, and the margins of points that are not too noisy to gate."""
        gate, pairs = self.config.gate, self.config.timing.replicates
        floor = self.floor or {}
        margins = {
            point.name: margin(floor, point.name, gate.min_effect, pairs) for point in self.points
        }
        gated = {
            name: point_margin
            for name, point_margin in margins.items()
            if point_margin <= gate.max_margin
        }
        return Rules(pairs, max(pairs, gate.max_pairs), gated)

    @property
    def is_smoke(self) -> bool:
        """Return whether sizes are capped, only to test that everything runs."""
        timing = self.config.timing
        return bool(timing.max_rows or timing.max_batch)

    def create(self) -> RunStore:
        """Create a run directory; raise UsageError where it cannot be written."""
        return RunStore.begin(self.config, self.environment)


def start_gate(config: Config, words: Sequence[str]) -> GateStart:
    """Examine the machine and check the configuration of a run; nothing is written.

    `words` are the arguments of the command line, for environment.json.

    Raises:
        UsageError: the device, a point or gate.inject is impossible, or the machine is unfit.
    """
    device = device_of(config)
    points = points_of(config)
    if not 1 <= config.gate.inject < math.inf:
        raise UsageError(f"gate.inject must be >= 1, got {config.gate.inject:g}")
    if config.gate.inject > 1 and device.type != "cpu":
        raise UsageError("gate.inject keeps the host busy, which a GPU does not notice: device=cpu")
    environment = survey(config, device, words)
    floor = find_noise_floor(ROOT / config.gate.noise, environment, config)
    return GateStart(config, device, points, environment, floor)


def write_info(
    store: RunStore, config: Config, question: str, status: str, begin_s: float, **extra: Any
) -> None:
    """Write run.json of a run that ends now.

    Args:
        store: directory of the run.
        config: configuration of the run.
        question: question of the experiment.
        status: "finished", "interrupted" or "incomplete".
        begin_s: time.monotonic() at the beginning of the run.
        extra: further entries.
    """
    run_info = {"experiment": config.name, "question": question, "status": status}
    seconds = round(time.monotonic() - begin_s, 1)
    store.write_json("run.json", {**run_info, "seconds": seconds, **extra})


def find_unfinished(start: GateStart) -> tuple[RunStore, list[Record]] | None:
    """Lock the latest unfinished run of the same configuration, code and machine.

    Return it with its records, so that the new run can continue it; None if there is none. Damaged
    runs are skipped.
    """
    folder = ROOT / start.config.report.folder / start.config.name
    config_text = OmegaConf.to_yaml(OmegaConf.structured(start.config))
    for path in sorted(folder.glob("*/config.yaml"), reverse=True):
        store = RunStore(path.parent)
        with suppress(ValueError):
            if (
                path.read_text() == config_text
                and read_json(store.path, "run.json").get("status") != "finished"
                and read_json(store.path, "environment.json").get("context_id")
                == start.environment["context_id"]
                and store.claim()
            ):
                return store, read_records(store.path)
    return None


def head_on_both_sides(start: GateStart, say: Callable[[str], object]) -> SideFolders:
    """Build head, and return its folder for both sides.

    A working tree is copied, so that later edits do not affect the run. `say` prints a message
    before a step that takes long.

    Raises:
        UsageError: head is unknown or does not build.
    """
    head = revisions.checkout(start.config.gate.head)
    try:
        revisions.provide_libraries(head, head, start.device.type, say)
    except revisions.BuildError as error:
        raise UsageError(str(error)) from error
    return dict.fromkeys(Side, str(head.folder))


def heading(start: GateStart, activity: str) -> str:
    """Return a line with experiment, activity, number of points, machine and kind of margins."""
    environment = start.environment
    margins = "margins from this machine's noise floor" if start.floor else "no noise floor here"
    return (
        f"{start.config.name} · {activity} · {text.count(len(start.points), 'point')} · "
        f"{environment['device']} · torch {environment['torch']} · {margins}"
    )


def print_plan(config: Config, activity: str) -> int:
    """Print the plan of a dry run: the points and the activity; return exit status 0."""
    points = points_of(config)
    for point in points:
        print(f"  {point.name:<32} {point.description}")
    print(f"\n{text.count(len(points), 'point')}, {activity}. Nothing was measured.")
    return 0


def read_stored_config(path: Path) -> Config:
    """Return the configuration of the run in `path`; keys that it lacks have their defaults."""
    config = OmegaConf.merge(OmegaConf.structured(Config), read_config(path / "config.yaml"))
    return cast(Config, OmegaConf.to_object(config))


def describe_pairs(config: Config) -> str:
    """Return the number of pairs of processes of a gate in words."""
    pairs, max_pairs = config.timing.replicates, config.gate.max_pairs
    first_set = f"{pairs} to {text.count(max(pairs, max_pairs), 'pair')} of processes"
    return f"{first_set}, and as many again to confirm what looks slower"
