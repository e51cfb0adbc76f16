"""The noise floor of a machine: how far a revision seems to differ from itself, point by point."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.config.schema import Config
from experiments.results.identity import digest
from experiments.timing import comparison, stats

SCHEMA = 1


@dataclass(frozen=True)
class Floor:
    """What noise.json says."""

    source: str  # file name
    points: Mapping[str, Mapping[str, Any]]
    measured: str  # when

    def margin(self, point: str, least: float, pairs: int) -> float:
        """Of a point, for an effect over so many pairs; of one that it does not know, the least."""
        known = self.points.get(point)
        return comparison.margin(least, known["mad"], pairs) if known else least


def summarise(effects: Sequence[float]) -> dict[str, Any]:
    """Of the effects of pairs that compare a revision with itself."""
    ordered = sorted(abs(x) for x in effects)
    return {
        "pairs": len(effects),
        "mad": comparison.median_deviation(effects),
        "p95": stats.quantile(ordered, 0.95),
        "effects": [round(x, 6) for x in effects],
    }


def measures(config: Config) -> str:
    """Equal where pairs are measured alike, so that a floor holds for a gate."""
    timing, device = config.timing, config.device
    return digest(
        {
            "cases": {k: dataclasses.asdict(c) for k, c in config.cases.items()},
            "points": [dataclasses.asdict(p) for p in config.gate.points],
            "modes": timing.modes,
            "pool": timing.pool,
            "warmup": [timing.warmup, timing.warmup_seconds, timing.warmup_cap],
            "blocks": timing.min_rounds,
            "caps": [timing.max_rows, timing.max_batch],
            "threads": device.threads,
            "device": device.kind,
        }
    )


def key(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree between the machine of a floor and that of a gate."""
    gpu = environment.get("gpu") or {}
    return {
        "hardware_id": environment["hardware_id"],
        "driver": gpu.get("driver"),
        "torch": environment["torch"],
        "threads": environment.get("threads"),
    }


def name(environment: Mapping[str, Any], config: Config) -> str:
    """One file a machine and way of measuring."""
    return f"{environment['hardware_id']}-{measures(config)[:8]}.json"


def content(
    environment: Mapping[str, Any],
    config: Config,
    effects: Mapping[str, Sequence[float]],
    when: str,
) -> dict[str, Any]:
    """noise.json."""
    return {
        "schema": SCHEMA,
        "machine": environment["device"],
        "measured": when,
        "key": key(environment),
        "measures": measures(config),
        "points": {point: summarise(found) for point, found in effects.items()},
    }


def read(folder: Path, environment: Mapping[str, Any], config: Config) -> Floor | None:
    """The floor of this machine and way of measuring; None where there is none."""
    source = folder / name(environment, config)
    try:
        found = json.loads(source.read_text())
    except (OSError, json.JSONDecodeError):
        return None
    if found.get("schema") != SCHEMA or found["key"] != key(environment):
        return None
    return Floor(source.name, found["points"], found["measured"])
