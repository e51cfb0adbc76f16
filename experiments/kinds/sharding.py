"""The kinds `sharding` (collections over ranks) and `calibration` (constants of the cost model)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from experiments.config.schema import CaseConfig, Config, Mode, Scaling
from experiments.config.sweep import Cell
from experiments.contenders import registry
from experiments.contenders.registry import SHARDED
from experiments.kinds.base import (
    KEYS,
    ArmRules,
    Compared,
    Effort,
    Kind,
    Measurement,
    Ranks,
    Reporting,
)
from experiments.results import metrics
from experiments.results.store import Record

STEP, COMPUTE = "step", "local"
PARTS = {  # what is timed of a step besides the whole of it
    "input": "distribute ids",
    "local": "look up and update",
    "output": "combine outputs",
}
SAME_BATCH = ("T", "E", "D", "L", "s", "q")


class OverRanks(Kind):
    """A kind whose cells are measured in every world of `sharding.worlds`."""

    arms = ArmRules(ranks=Ranks.OF_WORLDS)

    def kind_of_case(self, case: CaseConfig) -> str:
        """Return this kind, unless the case is about hash tables."""
        return KEYS if case.keys.loads else self.name

    def spread(self, cell: Cell, config: Config) -> Iterator[Cell]:
        """Yield the cell in each world; on one rank both ways of scaling are the same cell.

        A contender that does not know ranks is left out of worlds of several ranks.
        """
        case = config.cases.get(cell.section)
        asked = case.sharding if case else config.sharding
        max_ranks = config.timing.max_ranks or max(asked.worlds)
        seen = set()
        for ranks in sorted({min(world, max_ranks) for world in asked.worlds}):
            for scaling in asked.scaling[:1] if ranks == 1 else asked.scaling:
                size = cell.workload.B
                batch = max(1, size // ranks) if scaling is Scaling.strong else size
                alone = [a for a in cell.arms if registry.facts_of(a.contender).alone]
                arms = tuple(a for a in cell.arms if ranks == 1 or a not in alone)
                if (ranks, batch) in seen or not arms:
                    continue
                seen.add((ranks, batch))
                yield replace(
                    cell,
                    arms=arms,
                    workload=replace(cell.workload, B=batch),
                    ranks=ranks,
                    scaling=scaling,
                    title=f"{cell.title}, {world_title(ranks, scaling, asked.scaling)}",
                )


def world_title(ranks: int, scaling: Scaling, asked: Iterable[Scaling]) -> str:
    """Return "2 ranks", and how they were scaled where that is a question."""
    world = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{world}, {scaling.value}" if ranks > 1 and len(list(asked)) > 1 else world


class Sharding(OverRanks):
    """What does a step cost over ranks, and what does the cost model predict?"""

    name = "sharding"
    measurement = Measurement("experiments.measure.sharding:sharding_cell")
    reporting = Reporting("experiments.kind_reports.sharding", compared=Compared.PROCESSES)

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return sharding.csv and predictions.csv."""
        return {"sharding": frame(records), "predictions": predictions(records)}


class Calibration(OverRanks):
    """What do lookups, updates and messages cost on this machine?"""

    name = "calibration"
    arms = ArmRules(only="constants", ranks=Ranks.OF_WORLDS)
    measurement = Measurement(
        "experiments.measure.sharding:calibration_cell", effort=Effort.ONCE, modes=(Mode.hot,)
    )
    reporting = Reporting(
        "experiments.kind_reports.calibration",
        compared=Compared.MACHINES,
        success="None: the constants of {count} worlds were measured.",
    )

    def progress(self, records: Sequence[Record]) -> str:
        done = any(record["status"] == "ok" for record in records)
        return "calibrated" if done else super().progress(records)


def counterpart(contender: str) -> str:
    """Return emblib's contender of the same sharding type; empty where there is none."""
    if contender in ("torchrec_fused", "torchrec_unsharded"):
        return "collection"
    kind = contender.removeprefix("torchrec_")
    return f"{SHARDED}{kind}" if kind != contender else ""


def beside_torchrec(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of TorchRec's contenders that were compared with emblib's."""
    return rows[rows["ratio"].notna() & rows["contender"].str.startswith("torchrec_")]


def type_of(contender: str) -> str:
    """Return the sharding type of a sharded contender, as in 'row-wise'; the name of others."""
    for prefix in (SHARDED, "torchrec_"):
        if contender.startswith(prefix):
            return contender.removeprefix(prefix).replace("_", "-")
    return contender


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per arm and mode of a cell and phase, all its processes together.

    `ratio` is the time ÷ that of emblib's counterpart in the same cell, paired in each round.
    """
    return metrics.phase_rows(
        records,
        Sharding.name,
        lambda record: counterpart(record["arm"]),
        _row,
        phases_of=lambda group: metrics.sampled_phases(group, STEP),
    )


def _row(
    group: Sequence[Record], phase: str, base: Sequence[Record], pools: metrics.Pools
) -> dict[str, Any]:
    taken = metrics.good(group)
    record = taken[0] if taken else group[0]
    time = metrics.summarise_processes([metrics.seconds(r, phase) for r in taken], pools.times)
    effect = metrics.ratio(taken, metrics.good(base), phase, pools.ratios)
    names = ("section", "cell", "contender", "arm", "label", "rows_scale", "lookups")
    return {
        **{name: record[name] for name in names},
        **record["params"],
        "type": type_of(record["contender"]),
        "world_size": record["world_size"],
        "scaling": record.get("scaling", Scaling.weak.value),
        "mode": metrics.mode_of(record),
        "phase": phase,
        "status": metrics.status_of(group),
        "reason": record["reason"],
        **time.columns(),
        "samples": time.n,
        "processes": len(taken),
        **effect.columns(),
        "weights_bytes": record["weights_bytes"],
    }


def steps(rows: pd.DataFrame) -> pd.DataFrame:
    """Return a row per arm and cell: the step, its compute time, its efficiency over ranks.

    Columns besides those of `frame`: compute_s, communication_s (NaN where the contender does not
    tell its parts), base_s (the step of one rank on the same batch of each, or of all) and
    efficiency.
    """
    if not len(rows):
        return rows
    good = rows[(rows["phase"] == STEP) & (rows["status"] == "ok")].copy()
    compute = {
        (r["cell"], r["arm"], r["mode"]): r["median_s"]
        for _, r in rows[rows["phase"] == COMPUTE].iterrows()
    }
    keys = list(zip(good["cell"], good["arm"], good["mode"], strict=True))
    good["compute_s"] = [compute.get(key, math.nan) for key in keys]
    good["communication_s"] = (good["median_s"] - good["compute_s"]).clip(lower=0.0)
    alone = good[good["world_size"] == 1]
    base = {_identity(r, r["B"]): float(r["median_s"]) for _, r in alone.iterrows()}
    good["base_s"] = [base.get(_identity(r, _batch(r)), math.nan) for _, r in good.iterrows()]
    share = [
        1 if r["scaling"] == Scaling.weak.value else 1 / r["world_size"] for _, r in good.iterrows()
    ]
    good["efficiency"] = good["base_s"] * share / good["median_s"]
    return good


def _identity(row: Mapping[Any, Any] | pd.Series, batch: int) -> tuple[Any, ...]:
    names = ("section", "arm", "mode", *SAME_BATCH)
    return (*(row[name] for name in names), batch)


def _batch(row: Mapping[Any, Any] | pd.Series) -> int:
    """Return the batch of one rank that the row's batch is scaled from."""
    strong = row["scaling"] == Scaling.strong.value and row["world_size"] > 1
    return int(row["B"] * row["world_size"] if strong else row["B"])


def predictions(records: Sequence[Record]) -> pd.DataFrame:
    """Return a row per arm and cell with predicted_s and median_s, and per larger world.

    The constants are those that the same process measured; of several processes the mean counts.
    """
    groups: dict[tuple[str, str, int, str], list[tuple[Record, Mapping[str, Any]]]] = {}
    for record in records:
        if record.get("kind") == Sharding.name and record["status"] == "ok":
            for told in record.get("predicted", []):
                key = record["cell"], record["arm"], int(told["ranks"]), told["scaling"]
                groups.setdefault(key, []).append((record, told))
    rows = []
    for (cell, arm, ranks, scaling), group in groups.items():
        record = group[0][0]
        here = ranks == record["world_size"]
        times = [metrics.seconds(r, STEP) for r, _ in group]
        rows.append(
            {
                "section": record["section"],
                "cell": cell,
                "arm": arm,
                "contender": record["contender"],
                "label": record["label"],
                "type": type_of(record["contender"]),
                "world_size": ranks,
                "scaling": scaling,
                "beyond": not here,
                "predicted_s": _mean(group, "step_s"),
                "predicted_compute_s": _mean(group, "compute_s"),
                "median_s": metrics.summarise_processes(times).median if here else math.nan,
                "batch": int(group[0][1]["batch"]),
                **{a: record["params"][a] for a in SAME_BATCH},
            }
        )
    return pd.DataFrame(rows)


def _mean(group: Sequence[tuple[Record, Mapping[str, Any]]], name: str) -> float:
    return sum(float(told[name]) for _, told in group) / len(group)


def agreement(rows: pd.DataFrame) -> tuple[float, float, int]:
    """Compare predicted with measured steps.

    Returns Spearman's rank correlation, the median factor (>= 1), and the number of measured
    points.
    """
    measured = rows[~rows["beyond"]] if len(rows) else rows
    if len(measured) < 3:
        return math.nan, math.nan, len(measured)
    ranks = measured["predicted_s"].rank(), measured["median_s"].rank()
    factor = (measured["predicted_s"] / measured["median_s"]).map(lambda x: max(x, 1 / x))
    return float(ranks[0].corr(ranks[1])), float(factor.median()), len(measured)
