"""Numbers that others published, reports/published/*.yaml: each with its source and its work."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, cast

import pandas as pd
from omegaconf import OmegaConf

from experiments.machine import ceilings
from experiments.paths import ROOT
from experiments.report.data import Run

FOLDER = ROOT / "reports" / "published"
FILE_KEYS = {
    "title",
    "source",
    "url",
    "experiment",
    "device",
    "device_words",
    "work",
    "note",
    "rows",
}


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
        path.stem,
        raw["title"],
        raw["source"],
        raw["url"],
        raw.get("experiment", ""),
        str(raw.get("note", "")).strip(),
        figures,
    )


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


EXACT, MEASURED = 0.02, 0.15
RULE = (
    f"The rule. A figure that follows from sizes alone is 'reproduced' when ours is within "
    f"{100 * EXACT:.0f} % of it, which leaves room for another choice of factors, or within half a "
    f"unit of its last printed digit, and 'differs' otherwise. A figure that was measured is "
    f"'reproduced' when our median is within {100 * MEASURED:.0f} % of it and 'differs' otherwise, "
    "but only if the same program did the same work on the same device. In every other case it is "
    "'not run here', with the reason; where there is a number of ours it is still shown, and is "
    "not divided by theirs."
)


class Verdict(Enum):
    """What became of a published figure."""

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    NOT_RUN = "not run here"


@dataclass(frozen=True)
class Finding:
    """One published figure, ours, and the verdict."""

    source: Source
    figure: Figure
    verdict: Verdict
    reason: str
    ours: float = math.nan
    lo: float = math.nan
    hi: float = math.nan
    device: str = ""  # where ours was measured


Measure = Callable[[pd.Series, float], float]  # of a row, with its time in seconds

OURS: Mapping[Quantity, Measure] = {
    Quantity.compression: lambda row, _: float(row["compression"]),
    Quantity.us_per_lookup: lambda row, s: 1e6 * s / float(row["lookups"]),
    Quantity.milliseconds: lambda row, s: 1e3 * s,
    Quantity.giga_keys_per_s: lambda row, s: float(row["lookups"]) / s / 2**30,
    Quantity.seconds_of_ten: lambda row, s: 10 * s,
    # Its benchmark counts the looked-up rows alone, and three times their bytes for a whole step.
    Quantity.fbgemm_gb_s: lambda row, s: (
        (3 if row["phase"] == "step" else 1) * 4 * float(row["lookups"]) * float(row["D"]) / s / 1e9
    ),
}


def findings(run: Run | None, source: Source) -> list[Finding]:
    """All figures of a source beside those of a run; without a run there is nothing beside them."""
    return [_finding(run, source, figure) for figure in source.figures]


def _finding(run: Run | None, source: Source, figure: Figure) -> Finding:
    def not_run(reason: str, **ours: Any) -> Finding:
        return Finding(source, figure, Verdict.NOT_RUN, reason, **ours)

    if figure.not_here or figure.ours is None:
        return not_run(figure.not_here)
    if run is None:
        return not_run(f"no run of {source.experiment} at hand")
    if run.smoke:
        return not_run("this is a smoke run: its sizes are capped")
    row, reason = _row(run, figure)
    if row is None:
        return not_run(reason)
    ours = _ours(run, figure, row)
    if math.isnan(ours["ours"]):
        return not_run("our run has no such number")
    changed = differences(run, figure, row)
    if changed:
        return not_run(f"ours is other work: {', '.join(changed)}", **ours)
    if figure.nature is Nature.measured:
        here = ceilings.of_environment(run.environment)
        if here is None or here.key != figure.device:
            return not_run(f"another device: theirs is of {theirs(figure)}", **ours)
        if figure.peer:
            return not_run(f"another program: theirs is {figure.peer}", **ours)
        if figure.otherwise:
            return not_run(f"done in another way there: {figure.otherwise}", **ours)
    return _judged(source, figure, ours)


def _judged(source: Source, figure: Figure, ours: dict[str, Any]) -> Finding:
    allowed = EXACT if figure.nature is Nature.exact else MEASURED
    off = ours["ours"] / figure.value - 1
    close = abs(off) <= max(allowed, figure.last_digit / 2 / figure.value)
    verdict = Verdict.REPRODUCED if close else Verdict.DIFFERS
    words = f"{abs(100 * off):.1f} % {'above' if off > 0 else 'below'} it"
    return Finding(source, figure, verdict, words, **ours)


def theirs(figure: Figure) -> str:
    """Return the device of a published figure, as far as its source says."""
    device = next((d.name for d in ceilings.table() if d.key == figure.device), "")
    return device or figure.device_words


def _row(run: Run, figure: Figure) -> tuple[pd.Series | None, str]:
    place, table = figure.ours, run.table
    assert place is not None
    if len(run.operations) and (run.operations["section"] == place.section).any():
        table = run.operations
    chosen = (
        table[
            (table["section"] == place.section)
            & (table["arm"] == place.arm)
            & (table["phase"] == place.phase)
        ]
        if len(table)
        else table
    )
    if not len(chosen):
        return None, f"our run has no {place.arm} in {place.section}"
    # Of several modes the one that theirs was measured in, so that the others are not judged.
    alike = chosen[chosen["mode"] == figure.work.get("mode")]
    row = (alike if len(alike) else chosen).iloc[0]
    if row["status"] != "ok":
        return None, f"{row['status']}: {row['reason']}"
    return row, ""


def _ours(run: Run, figure: Figure, row: pd.Series) -> dict[str, Any]:
    device = str(run.environment.get("device", ""))
    if figure.quantity is Quantity.times_baseline:
        names = ("ratio", "ratio_lo", "ratio_hi")
        ours, lo, hi = (float(row[name]) for name in names)
    elif figure.quantity in OURS:
        measure = OURS[figure.quantity]
        ours, lo, hi = (measure(row, float(row[k])) for k in ("median_s", "lo_s", "hi_s"))
    else:
        ours = lo = hi = math.nan
    if figure.nature is Nature.exact:
        lo = hi = math.nan  # nothing about it is a sample
    return {"ours": ours, "lo": min(lo, hi), "hi": max(lo, hi), "device": device}


def differences(run: Run, figure: Figure, row: pd.Series) -> list[str]:
    """How the work that our run did differs from the published one, key by key."""
    scale = float(row["rows_scale"])
    found = [f"rows scaled to {100 * scale:.3g} %"] if scale < 1 else []
    record = next(
        r
        for r in run.records
        if r["section"] == row["section"] and r["arm"] == row["arm"] and r["status"] == "ok"
    )
    known = {**record["params"], **{k: record[k] for k in ("optimizer", "rows")}}
    known["mode"] = row["mode"]
    for key, theirs in figure.work.items():
        if known.get(key) != theirs:
            found.append(f"{key} {_plain(known.get(key))} for {_plain(theirs)}")
    return found


def _plain(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def of_run(run: Run) -> list[Finding]:
    """Beside every publication whose configuration the run's experiment is."""
    sources = of_experiment(str(run.config.name))
    return [finding for source in sources for finding in findings(run, source)]


def counted(found: Sequence[Finding]) -> dict[Verdict, int]:
    """How many of each."""
    return {verdict: sum(f.verdict is verdict for f in found) for verdict in Verdict}
