"""Published figures of others (reports/published/*.yaml), and our verdict on each of them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import pandas as pd
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.machine import ceilings
from experiments.paths import REFERENCE, ROOT
from experiments.report.data import Run
from experiments.results.store import runs_in

FOLDER = ROOT / "reports" / "published"


class Nature(Enum):
    """The kind of a published figure, which determines where it can be reproduced."""

    exact = "exact"  # follows from sizes alone: must come out on any machine
    measured = "measured"  # depends on the machine: can come out only there


class Quantity(Enum):
    """The quantity of a published figure. `_our_number` computes it from a row of our results."""

    compression = "compression"  # bytes of plain tables ÷ bytes
    us_per_lookup = "us_per_lookup"
    milliseconds = "milliseconds"  # of a batch
    seconds_of_ten = "seconds_of_ten"  # of ten batches, which are an epoch in TorchRec's benchmark
    fbgemm_gb_s = "fbgemm_gb_s"  # by FBGEMM's model of the bytes
    times_baseline = "times_baseline"  # time ÷ the baseline's
    giga_keys_per_s = "giga_keys_per_s"  # 2**30 keys per second
    other = "other"  # none that our runs have


@dataclass
class RunPoint:
    """The row of our results to compare with: its section, arm and phase."""

    section: str
    arm: str
    phase: str = "step"


@dataclass
class PublishedFigure:
    """One published number, a row of a file of reports/published.

    Attributes:
        name: name, unique within the publication together with the unit; figures with the same
            beginning before a colon share a line of the overview.
        value: number as printed.
        unit: unit as printed.
        last_digit: value of one step of the last printed digit; 0 if rounding does not matter.
        quantity: kind of number; `other` if our runs have none of this kind.
        nature: whether it follows from sizes or depends on the machine.
        device: key of conf/hardware; "" if the source names no device that is there.
        device_words: device in words, where conf/hardware has none.
        work: values that our record must have: entries of `params`, `optimizer`, `rows`, `mode`.
        ours: row of our results to compare with; None with `not_here`.
        not_here: why no run of ours can have the figure.
        peer: program that was measured, if our contender is another one.
        otherwise: difference of method, which leaves a measured figure without a verdict; "" for
            none.
        note: remark.
    """

    name: str
    value: float
    unit: str
    last_digit: float = 0.0
    quantity: Quantity = Quantity.other
    nature: Nature = Nature.measured
    device: str = ""
    device_words: str = "device not named"
    work: dict[str, Any] = field(default_factory=dict)
    ours: RunPoint | None = None
    not_here: str = ""
    peer: str = ""
    otherwise: str = ""
    note: str = ""


@dataclass
class Publication:
    """One publication."""

    key: str  # the file's name
    title: str
    source: str  # what was read, and when it was written
    url: str
    figures: tuple[PublishedFigure, ...]
    experiment: str = ""  # our experiment of the same configuration; "" where none can run it
    note: str = ""


def format_number(value: float) -> str:
    """Return a number with its thousands separated; a whole number has no decimal point."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,}"


@cache
def publications(folder: Path = FOLDER) -> tuple[Publication, ...]:
    """Return every publication, in the order of the names of the files."""
    return tuple(read_publication(path) for path in sorted(folder.glob("*.yaml")))


def publications_of(name: str) -> list[Publication]:
    """Return the publications whose configuration the experiment `name` runs."""
    return [source for source in publications() if source.experiment == name]


def read_publication(path: Path) -> Publication:
    """Read one file of reports/published.

    `device`, `device_words` and `work` of the file apply to every row; a row may override them, of
    `work` entry by entry.

    Raises:
        ValueError: an entry is wrong or missing.
        yaml.YAMLError, OSError: the file is not YAML, or cannot be read.
    """
    yaml_entries = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.load(path)))
    if not isinstance(yaml_entries, dict):
        raise ValueError(f"{path.name} must have keys and values at its top, got a list")
    shared: dict[str, Any] = {
        key: yaml_entries.pop(key)
        for key in ("device", "device_words", "work")
        if key in yaml_entries
    }
    figures = []
    rows = yaml_entries.pop("rows", None) or []
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError(f"{path.name}: 'rows' must be a list of entries with keys and values")
    for row in rows:
        location = f"{path.name}, {row.get('name')}"
        work = {**(shared.get("work") or {}), **(row.get("work") or {})}
        figure = _build(PublishedFigure, {**shared, **row, "work": work}, location)
        if figure.ours is None and not figure.not_here:
            raise ValueError(f"{location}: say `ours:` or, with the reason, `not_here:`")
        figures.append(figure)
    source = _build(Publication, {"key": path.stem, "figures": [], **yaml_entries}, path.name)
    if not figures:
        raise ValueError(f"{path.name}: 'rows' is missing: a source needs its figures")
    return dataclasses.replace(source, figures=tuple(figures))


T = TypeVar("T", PublishedFigure, Publication)


def _build(kind: type[T], values: Mapping[str, Any], location: str) -> T:
    """Return the dataclass of checked values; raise ValueError, beginning with the location."""
    try:
        return cast(T, OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), values)))
    except OmegaConfBaseException as error:
        raise ValueError(f"{location}: {str(error).splitlines()[0]}") from None


EXACT_TOLERANCE = 0.02  # relative deviation at which an exact figure still counts as reproduced
MEASURED_TOLERANCE = 0.15  # the same for a measured figure
RULE = (
    f"The rule. A figure is judged if the same work was done, and, if it was measured, by the same "
    f"program on the same device. It is 'reproduced' when ours is within "
    f"{100 * EXACT_TOLERANCE:.0f} % of a figure that follows from sizes alone, which leaves room "
    f"for another choice of factors, or our median within {100 * MEASURED_TOLERANCE:.0f} % of one "
    "that was measured, or ours within half a unit of the last printed digit of either; otherwise "
    "it 'differs'. A figure that is not judged is 'not run here', with the reason; where there is "
    "a number of ours it is still shown, and is not divided by theirs."
)


class Reproduction(Enum):
    """The verdict on a published figure, by RULE."""

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    NOT_RUN = "not run here"


@dataclass(frozen=True)
class JudgedFigure:
    """One published figure, our number, and the verdict."""

    source: Publication
    figure: PublishedFigure
    verdict: Reproduction
    reason: str
    ours: float = math.nan  # our number in the unit of the figure; nan if we have none
    lo: float = math.nan  # lower end of our number's interval; nan without one
    hi: float = math.nan  # upper end
    device: str = ""  # device of our run; "" without a number


def count_verdicts(judgements: Sequence[JudgedFigure]) -> dict[Reproduction, int]:
    """Return the number of judgements by verdict; verdicts without one have 0."""
    return {
        verdict: sum(judgement.verdict is verdict for judgement in judgements)
        for verdict in Reproduction
    }


def judge_references(extra: Sequence[Path] = ()) -> list[JudgedFigure]:
    """Compare every publication with the runs of its experiment: references, and those of `extra`.

    A publication without a run is judged without our numbers. `extra` are directories of further
    runs; one without config.yaml is ignored.

    Raises:
        UsageError: a run is damaged.
    """
    run_folders = (*runs_in(REFERENCE, "*/*"), *extra)
    paths = [path for path in run_folders if (path / "config.yaml").is_file()]
    runs = [Run.read(path) for path in paths]
    judgements = []
    for source in publications():
        runs_of_source: list[Run | None] = [
            run for run in runs if run.config.name == source.experiment
        ]
        judgements += [
            judgement
            for run in runs_of_source or [None]
            for judgement in judge_figures(run, source)
        ]
    return judgements


def judge_run(run: Run) -> list[JudgedFigure]:
    """Compare a run with every publication whose configuration its experiment runs."""
    return [
        judgement
        for source in publications_of(str(run.config.name))
        for judgement in judge_figures(run, source)
    ]


def judge_figures(run: Run | None, source: Publication) -> list[JudgedFigure]:
    """Compare all figures of a source with those of a run; without a run, none is judged."""
    return [_judge(run, source, figure) for figure in source.figures]


def _judge(run: Run | None, source: Publication, figure: PublishedFigure) -> JudgedFigure:
    """Return the verdict on a figure by RULE, with our number wherever the run has one."""
    row, reason = None, ""
    if figure.not_here or figure.ours is None:
        reason = figure.not_here
    elif run is None:
        reason = f"no run of {source.experiment} at hand"
    elif run.is_smoke:
        reason = "this is a smoke run: its sizes are capped"
    else:
        row, reason = _our_row(run, figure, figure.ours)
    if row is None or run is None:
        return JudgedFigure(source, figure, Reproduction.NOT_RUN, reason)
    our_value, lo, hi = _our_number(figure, row)
    if math.isnan(our_value):
        return JudgedFigure(source, figure, Reproduction.NOT_RUN, "our run has no such number")
    verdict, reason = Reproduction.NOT_RUN, _why_not_comparable(run, figure, row)
    if not reason:
        tolerance = EXACT_TOLERANCE if figure.nature is Nature.exact else MEASURED_TOLERANCE
        deviation = our_value / figure.value - 1
        is_close = abs(deviation) <= max(tolerance, figure.last_digit / 2 / figure.value)
        verdict = Reproduction.REPRODUCED if is_close else Reproduction.DIFFERS
        reason = f"{abs(100 * deviation):.1f} % {'above' if deviation > 0 else 'below'} it"
    device = str(run.environment.get("device", ""))
    return JudgedFigure(source, figure, verdict, reason, our_value, lo, hi, device)


def _our_row(run: Run, figure: PublishedFigure, point: RunPoint) -> tuple[pd.Series | None, str]:
    """Return (our row of results, ""), or (None, why there is no row with status "ok")."""
    table = run.operations
    if not len(table) or not (table["section"] == point.section).any():
        table = run.table
    if len(table):
        is_at_point = (table["arm"] == point.arm) & (table["phase"] == point.phase)
        table = table[is_at_point & (table["section"] == point.section)]
    if not len(table):
        return None, f"our run has no {point.arm} in {point.section}"
    # Prefer the mode of the published figure; `work_differences` names the mode if it is another.
    rows_in_mode = table[table["mode"] == figure.work.get("mode")]
    row = (rows_in_mode if len(rows_in_mode) else table).iloc[0]
    return (row, "") if row["status"] == "ok" else (None, f"{row['status']}: {row['reason']}")


Formula = Callable[[pd.Series, float], float]  # (row, its time in seconds) -> number
FORMULAS: Mapping[Quantity, Formula] = {
    Quantity.compression: lambda row, _: float(row["compression"]),
    Quantity.us_per_lookup: lambda row, time_s: 1e6 * time_s / float(row["lookups"]),
    Quantity.milliseconds: lambda row, time_s: 1e3 * time_s,
    Quantity.giga_keys_per_s: lambda row, time_s: float(row["lookups"]) / time_s / 2**30,
    Quantity.seconds_of_ten: lambda row, time_s: 10 * time_s,
    # FBGEMM's benchmark counts the bytes of the looked-up rows once for a forward, and three times
    # for a step.
    Quantity.fbgemm_gb_s: lambda row, time_s: (
        (3 if row["phase"] == "step" else 1)
        * 4
        * float(row["lookups"])
        * float(row["D"])
        / time_s
        / 1e9
    ),
}


def _our_number(figure: PublishedFigure, row: pd.Series) -> tuple[float, float, float]:
    """Return our number in the figure's unit, and the ends of its interval; nan if unknown."""
    if figure.quantity is Quantity.times_baseline:
        our_value, *ends = (float(row[name]) for name in ("ratio", "ratio_lo", "ratio_hi"))
    elif figure.quantity in FORMULAS:
        formula = FORMULAS[figure.quantity]
        our_value, *ends = (formula(row, float(row[name])) for name in ("median_s", "lo_s", "hi_s"))
    else:
        return math.nan, math.nan, math.nan
    if figure.nature is Nature.exact:
        return our_value, math.nan, math.nan  # computed from sizes, not sampled
    return our_value, min(ends), max(ends)


def _why_not_comparable(run: Run, figure: PublishedFigure, row: pd.Series) -> str:
    """Return why our number cannot be judged against theirs; "" if it can."""
    differences = work_differences(run, figure, row)
    if differences:
        return f"ours is other work: {', '.join(differences)}"
    if figure.nature is Nature.measured:
        our_device = ceilings.of_environment(run.environment)
        if our_device is None or our_device.key != figure.device:
            return f"another device: theirs is of {their_device(figure)}"
        if figure.peer:
            return f"another program: theirs is {figure.peer}"
        if figure.otherwise:
            return f"done in another way there: {figure.otherwise}"
    return ""


def work_differences(run: Run, figure: PublishedFigure, row: pd.Series) -> list[str]:
    """Return in words how the work of a row differs from the published work; [] if it does not.

    `row` is a row of `run.table` or `run.operations` with status "ok".
    """
    scale = float(row["rows_scale"])
    differences = [f"rows scaled to {100 * scale:.3g} %"] if scale < 1 else []
    record = next(
        record
        for record in run.records
        if all(record[key] == row[key] for key in ("section", "arm", "status"))
    )
    names = ("optimizer", "rows")
    our_work = {**record["params"], **{name: record[name] for name in names}, "mode": row["mode"]}

    def format_work(value: Any) -> str:
        return f"{value:,}" if isinstance(value, int) else str(value)

    return differences + [
        f"{key} {format_work(our_work.get(key))} for {format_work(value)}"
        for key, value in figure.work.items()
        if our_work.get(key) != value
    ]


def their_device(figure: PublishedFigure) -> str:
    """Return the name of a figure's device by conf/hardware, else its `device_words`."""
    devices = ceilings.known_devices()
    names = (device.name for device in devices if device.key == figure.device)
    return next(names, figure.device_words)
