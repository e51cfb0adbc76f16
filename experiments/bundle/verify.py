"""Does every number of a bundle follow from its samples?"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from experiments.bundle import archive
from experiments.bundle.archive import BundleError
from experiments.bundle.claims import claims_of
from experiments.bundle.pack import VERSION, harness
from experiments.report import write_report
from experiments.report.data import Run
from experiments.report.stories import STORIES, story

RELATIVE = 1e-9  # a number that is read back from text and computed again in another order
MOST_SHOWN = 5
NUMBERS = ("value", "lo", "hi")  # of a claim


@dataclass
class Checked:
    """What was looked at, what is wrong, and what a reader should know besides."""

    description: dict[str, Any]
    numbers: int = 0
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check(path: Path, folder: Path) -> Checked:
    """Unpack into `folder`, with every checksum compared, and rebuild; raises BundleError."""
    contents = archive.read(path)
    if "bundle.json" not in contents:
        raise BundleError("it has no bundle.json: not a bundle")
    description = json.loads(contents["bundle.json"])
    version = description.get("bundle_version")
    if version != VERSION:
        raise BundleError(f"bundle_version is {version}, this harness reads {VERSION}")
    archive.unpack(contents, folder)
    checked = Checked(description, notes=list(description["notes"]))
    same = description["harness"] == harness()
    if not same:
        checked.notes.append(
            "The bundle was packed by another version of the harness. Numbers are compared where "
            "both have them; what the report says in words is not."
        )
    for entry in description["runs"]:
        problems = _check_run(entry, folder / entry["folder"], checked, words=same)
        checked.problems += [f"{entry['folder']}: {problem}" for problem in problems]
    return checked


def _check_run(
    entry: Mapping[str, Any], folder: Path, checked: Checked, *, words: bool
) -> list[str]:
    run = Run.read(folder)
    if run.kind not in STORIES:
        return []  # a note of the bundle says so
    again = _rebuilt(folder)
    problems = []
    names = {p.name for place in (folder, again) for p in place.glob("*.csv")}
    for name in sorted(names):
        if not (folder / name).is_file():
            problems.append(f"{name} is missing, but the samples give it")
        elif not (again / name).is_file():
            checked.notes.append(
                f"{entry['folder']}/{name} is not made of the samples: not checked"
            )
        else:
            different, count = differences(_table(folder / name), _table(again / name))
            problems += [f"{name}: {text}" for text in different]
            checked.numbers += count
    now = {(c["about"], c["what"]): c for c in (claim.plain() for claim in claims_of(run))}
    for claim in entry["claims"]:
        rebuilt_claim = now.get((claim["about"], claim["what"]))
        if rebuilt_claim is None or not all(_equal(claim[n], rebuilt_claim[n]) for n in NUMBERS):
            problems.append(f"claim '{claim['what']}' of {claim['about']} is not in the samples")
        checked.numbers += 1
    if words:
        report = (folder / "report.md").read_text()
        problems += [
            f"report.md does not say what the samples say: {sentence}"
            for sentence in story(run).answer(run)
            if sentence not in report
        ]
    return problems


def _rebuilt(folder: Path) -> Path:
    """Another directory with the run's samples, and all tables that follow from them."""
    target = folder.with_name(f"{folder.name}.again")
    shutil.copytree(
        folder, target, ignore=shutil.ignore_patterns("*.csv", "*.png", "*.md", "*.html")
    )
    config = OmegaConf.load(target / "config.yaml")
    OmegaConf.update(config, "report.figures", False)
    OmegaConf.save(config, target / "config.yaml")
    write_report(target)
    return target


def _table(path: Path) -> pd.DataFrame:
    """Empty for a file without columns."""
    try:
        return pd.read_csv(path)
    except pd.errors.EmptyDataError:
        return pd.DataFrame()


def differences(packed: pd.DataFrame, rebuilt: pd.DataFrame) -> tuple[list[str], int]:
    """In words, at most a few; and how many numbers were compared."""
    if len(packed) != len(rebuilt):
        return [f"{len(packed)} rows, but the samples give {len(rebuilt)}"], 0
    columns = [c for c in packed.columns if c in rebuilt.columns]
    found = []
    count = 0
    for column in columns:
        for row, (old, new) in enumerate(zip(packed[column], rebuilt[column], strict=True)):
            count += isinstance(old, (int, float))
            if not _equal(old, new):
                found.append(f"row {row + 1}, {column}: {old}, but the samples give {new}")
    more = [f"and {len(found) - MOST_SHOWN} more"] if len(found) > MOST_SHOWN else []
    return [*found[:MOST_SHOWN], *more], count


def _equal(old: Any, new: Any) -> bool:
    if _missing(old) or _missing(new):
        return _missing(old) and _missing(new)
    try:
        return math.isclose(float(old), float(new), rel_tol=RELATIVE, abs_tol=0.0)
    except ValueError:
        return bool(old == new)


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isnan(value))
