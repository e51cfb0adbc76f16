"""Numbers that others published, reports/published/*.yaml: each with its source and its work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, cast

from omegaconf import OmegaConf

from experiments.paths import ROOT

FOLDER = ROOT / "reports" / "published"
FILE_KEYS = {"title", "source", "url", "experiment", "device", "device_words", "work", "note",
             "rows"}  # fmt: skip


class Nature(Enum):
    """What kind of claim a figure is, and so what it takes to reproduce it."""

    exact = "exact"  # follows from sizes alone: must come out anywhere
    measured = "measured"  # belongs to a machine: can come out only there


class Quantity(Enum):
    """What a figure counts; anchors.OURS computes the same of our runs."""

    compression = "compression"
    us_per_lookup = "us_per_lookup"
    milliseconds = "milliseconds"
    seconds_of_ten = "seconds_of_ten"  # batches, TorchRec's epoch
    fbgemm_gb_s = "fbgemm_gb_s"  # by FBGEMM's model of the bytes
    times_baseline = "times_baseline"
    giga_keys_per_s = "giga_keys_per_s"  # 2**30 keys
    other = "other"


@dataclass(frozen=True)
class Place:
    """Where the same quantity is in a run of ours."""

    section: str
    arm: str
    phase: str = "step"


@dataclass(frozen=True)
class Figure:
    """One published number."""

    name: str
    value: float
    unit: str
    last_digit: float = 0.0  # what one step of the last printed digit is worth
    quantity: Quantity = Quantity.other
    nature: Nature = Nature.measured
    device: str = ""  # key of conf/hardware; empty where the source names none
    device_words: str = "device not named"
    work: Mapping[str, Any] = field(default_factory=dict)
    ours: Place | None = None
    not_here: str = ""  # why no run of ours can have it
    peer: str = ""  # whose figure it is, where our contender is another program
    otherwise: str = ""  # what they did in another way, so that even there ours cannot be judged
    note: str = ""


def shown(value: float) -> str:
    """With the digits that it was printed with, thousands separated."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,}"


@dataclass(frozen=True)
class Source:
    """One publication."""

    key: str  # the file's name
    title: str
    source: str  # what was read, and when it was written
    url: str
    experiment: str  # that runs its configuration; empty where none can
    note: str
    figures: tuple[Figure, ...]


def read(path: Path) -> Source:
    """One file; raises ValueError that says what is wrong with it."""
    raw = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
    wrong = sorted(set(raw) - FILE_KEYS)
    if wrong:
        raise ValueError(f"{path.name}: unknown key '{wrong[0]}'; there is {', '.join(FILE_KEYS)}")
    for key in ("title", "source", "url", "rows"):
        if not raw.get(key):
            raise ValueError(f"{path.name}: '{key}' is missing: a figure needs its source")
    common: dict[str, Any] = {k: raw[k] for k in ("device", "device_words") if k in raw}
    figures = tuple(
        _figure(
            path.name, {**common, **row, "work": {**raw.get("work", {}), **row.get("work", {})}}
        )
        for row in raw["rows"]
    )
    return Source(
        path.stem, raw["title"], raw["source"], raw["url"], raw.get("experiment", ""),
        str(raw.get("note", "")).strip(), figures,
    )  # fmt: skip


def _figure(file: str, row: dict[str, Any]) -> Figure:
    known = {f.name for f in fields(Figure)}
    wrong = sorted(set(row) - known)
    if wrong:
        raise ValueError(f"{file}: unknown key '{wrong[0]}' of a row; there is {', '.join(known)}")
    ours = row.pop("ours", None)
    try:
        row |= {"quantity": Quantity(row.get("quantity", "other"))}
        row |= {"nature": Nature(row.get("nature", "measured"))}
    except ValueError as error:
        raise ValueError(f"{file}, {row.get('name')}: {error}") from None
    if ours is None and not row.get("not_here"):
        raise ValueError(f"{file}, {row.get('name')}: say `ours:` or, with the reason, `not_here:`")
    return Figure(**row, ours=Place(**ours) if ours else None)


@cache
def sources(folder: Path = FOLDER) -> tuple[Source, ...]:
    """Every publication, by file name."""
    return tuple(read(path) for path in sorted(folder.glob("*.yaml")))


def of_experiment(name: str, folder: Path = FOLDER) -> list[Source]:
    """Those whose configuration an experiment runs."""
    return [source for source in sources(folder) if source.experiment == name]
