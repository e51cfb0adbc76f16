"""The reports of the gate's kinds once more, from what their runs stored."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

from omegaconf import OmegaConf

from experiments.config.schema import Config
from experiments.gate import noise, pages, power
from experiments.gate.pairs import Trial
from experiments.gate.points import points_of
from experiments.gate.verdicts import findings
from experiments.results.store import RunStore, read_config, read_json, read_records

DERIVED = ("status", "meaning", "answer", "points")  # of gate.json; the rest are facts


def write(path: Path) -> str:
    """Every file that follows from the samples; returns the answer."""
    stored = read_config(path / "config.yaml")
    config = cast(
        Config, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), stored))
    )
    if config.kind == "noise":
        return noise.write(path)[0]
    if config.kind == "power":
        return power.write(path)[0]
    told, records = read_json(path, "gate.json"), read_records(path)
    rules = power.kept_rules(RunStore(path))
    if rules is None or not records:
        return str(told.get("answer", "This run ended before it could measure."))
    trial = Trial()
    for record in records:
        trial.remember(record)
    found = findings(points_of(config), trial, rules, records)
    found = dataclasses.replace(found, interrupted=told["status"] == 130)
    facts = {k: v for k, v in told.items() if k not in DERIVED}
    return pages.write_outputs(path, found, facts, told["status"], summary=None)[0]
