"""The kind `predictions`: steps of tensor trains, timed, and predicted from counts of their work.

`measure.predictions` has the model that predicts them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd

from experiments.config.schema import Config, Mode, Optimizer, UsageError
from experiments.config.sweep import Arm, Cell
from experiments.kinds import base
from experiments.results.store import Record
from experiments.timing import statistics

SMOKE_ROWS, SMOKE_LOOKUPS = 20_000, 640  # maxima in a smoke run
# Entries that identify a predicted step; `order` is the order of ids, `cached` a share of rows.
STEP_KEYS = ("rank", "skew", "order", "lookups", "cached")


@dataclass
class PredictionsOptions:
    """The steps that are timed and predicted.

    Attributes:
        ranks: TT ranks of the tensor trains, a cell per rank.
        lookups: lookups per batch.
        skews: exponents of the Zipf distribution of ids; 0 is uniform.
        cached: cached rows ÷ all rows, in addition to steps without a cache.
        rounds: samples per kind of step.
    """

    ranks: list[int] = field(default_factory=lambda: [16, 32])
    lookups: list[int] = field(default_factory=lambda: [10_240, 40_960])
    skews: list[float] = field(default_factory=lambda: [0.0, 1.05, 1.2])
    cached: list[float] = field(default_factory=lambda: [0.01, 0.1])
    rounds: int = 9


class Predictions(base.Kind):
    """Answer whether distinct rows and prefixes predict the time of a step of tensor trains."""

    name = "predictions"
    options = PredictionsOptions
    option_rules: ClassVar[Mapping[str, base.OptionRule]] = {
        "ranks": base.AT_LEAST_ONE,
        "lookups": base.AT_LEAST_ONE,
        "skews": base.NOT_NEGATIVE,
        "cached": base.SHARE._replace(may_be_empty=True),
        "rounds": base.AT_LEAST_ONE,
    }
    arms = base.ArmRules(only_arm="trains")
    measurement = base.Measurement(
        "experiments.measure.predictions:predictions_cell",
        repetition=base.Repetition.ONCE,
        modes=(Mode.hot,),
        makes_tables=False,
        ignores=(
            *("workload.T", "workload.B", "workload.s", "workload.q", "workload.order"),
            "workload.distribution",
            *("tt", "cache", base.KEYS, "lr"),
        ),
    )
    reporting = base.Reporting(
        "experiments.kind_reports.predictions",
        comparability=base.Comparability.NOTHING,
        success="None: the steps of {count} tables were timed and predicted.",
    )

    def check(self, config: Config) -> None:
        """Raise UsageError unless the optimizer is SGD, whose steps the model predicts."""
        super().check(config)
        if config.optimizer is not Optimizer.sgd:
            raise UsageError("optimizer: kind=predictions times steps of sgd")

    def cells(self, config: Config) -> tuple[list[Cell], list[Cell]]:
        """Return no cases, and a cell per rank; one process times the steps of a cell in turns."""
        options = dict(config.options)
        workload = config.workload
        if config.timing.max_rows:  # a smoke run
            workload = dataclasses.replace(workload, E=min(workload.E, SMOKE_ROWS))
            options["ranks"] = options["ranks"][:1]
            options["cached"] = options["cached"][:1]
            options["lookups"] = [
                min(num_lookups, SMOKE_LOOKUPS) for num_lookups in options["lookups"][:1]
            ]
            options["rounds"] = 1
        return [], [
            Cell(
                f"rank {rank}",
                f"{workload.E:,} x {workload.D}, rank {rank}",
                workload,
                (Arm(self.arms.only_arm, rank),),
                kind=self.name,
                options={**options, "ranks": [rank]},
            )
            for rank in options["ranks"]
        ]

    def progress(self, records: Sequence[Record]) -> str:
        """Return the range of predicted ÷ measured time."""
        rows = frame(records)
        if not len(rows):
            return super().progress(records)
        low, high = rows["ratio"].min(), rows["ratio"].max()
        return f"predicted ÷ measured: {low:.2f} to {high:.2f}"

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return predictions.csv: a row per predicted step."""
        return {"predictions": frame(records)}


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return predictions.csv: a row per predicted step (STEP_KEYS), over all processes.

    `measured_s`, `predicted_s`, `two_terms_s` (rows and products alone; nan with a cache) and
    `by_hits_s` (uncached time × lookups that miss) are seconds of a step; `ratio` is predicted ÷
    measured, `ratio_lo` and `ratio_hi` its extremes over processes. `rows` counts distinct rows per
    batch. `hit_rate` and `row_hit_rate` are shares of lookups and of distinct rows. Except for the
    extremes, numbers are medians over processes.
    """
    points_of_step: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in records:
        if record.get("kind") == Predictions.name and record["status"] == "ok":
            for point in record["points"]:
                key = tuple(point[name] for name in STEP_KEYS)
                points_of_step.setdefault(key, []).append(point)
    return pd.DataFrame([_row(key, points) for key, points in points_of_step.items()])


def _row(key: tuple[Any, ...], points: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the row of a step from its `points`, one per process (`measure.predictions`)."""

    def median(values: Sequence[float | None]) -> float:
        return statistics.summarise([value for value in values if value is not None]).median

    median_columns = ("predicted_s", "two_terms_s", "by_hits_s", "rows", "hit_rate", "row_hit_rate")
    measured_s = [
        statistics.summarise([seconds for _, seconds in point["samples"]]).median
        for point in points
    ]
    ratios = [
        point["predicted_s"] / seconds for point, seconds in zip(points, measured_s, strict=True)
    ]
    return {
        **dict(zip(STEP_KEYS, key, strict=True)),
        "processes": len(points),
        **{name: median([point[name] for point in points]) for name in median_columns},
        "measured_s": median(measured_s),
        "ratio": median(ratios),
        "ratio_lo": min(ratios),
        "ratio_hi": max(ratios),
    }
