"""The kinds `sharding` (collections over ranks) and `calibration` (constants of the cost model).

A cell is one workload in a world of ranks; an arm is one sharding type. A *record* has the samples
of one arm in one process. `frame` has a row per arm, mode and phase (a step, or a part of one).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pandas as pd

from experiments.config.schema import Config, Mode, Scaling
from experiments.config.sweep import Cell
from experiments.contenders import registry
from experiments.contenders.registry import SHARDED
from experiments.kinds import base
from experiments.results import metrics
from experiments.results.store import Record

# Phases: a whole step, and its part on a rank's own rows, lookup and update.
STEP, COMPUTE = "step", "local"
# Phases that are parts of a step (`Contender.parts`) -> heading of the report's column.
PARTS = {"input": "distribute ids", "local": "look up and update", "output": "combine outputs"}
SAME_BATCH = ("T", "E", "D", "L", "s", "q")  # axes that are the same in every world


class OverRanks(base.Kind):
    """Base of kinds whose cells are measured in every world of `sharding.worlds`."""

    cell_kinds = base.CellKinds(cases="")
    arms = base.ArmRules(ranks=base.Ranks.OF_WORLDS)

    def variants(self, cell: Cell, config: Config) -> Iterator[Cell]:
        """Yield the cell for each world and scaling; on one rank all scalings are the same.

        A world of several ranks has no contenders that run in one process only. A world that is
        left without contenders is skipped. timing.max_ranks caps the number of ranks.
        """
        case = config.cases.get(cell.section)
        sharding = case.sharding if case else config.sharding
        max_ranks = config.timing.max_ranks or max(sharding.worlds)
        yielded_worlds = set()
        for ranks in sorted({min(world, max_ranks) for world in sharding.worlds}):
            for scaling in sharding.scaling[:1] if ranks == 1 else sharding.scaling:
                stated_batch = cell.workload.B
                batch = max(1, stated_batch // ranks) if scaling is Scaling.strong else stated_batch
                one_process_arms = [
                    arm for arm in cell.arms if registry.entry_of(arm.contender).alone
                ]
                arms = tuple(arm for arm in cell.arms if ranks == 1 or arm not in one_process_arms)
                if (ranks, batch) in yielded_worlds or not arms:
                    continue
                yielded_worlds.add((ranks, batch))
                yield replace(
                    cell,
                    arms=arms,
                    workload=replace(cell.workload, B=batch),
                    ranks=ranks,
                    scaling=scaling,
                    title=f"{cell.title}, {world_title(ranks, scaling, sharding.scaling)}",
                )


def world_title(ranks: int, scaling: Scaling, scalings: Sequence[Scaling]) -> str:
    """Return "2 ranks", or "2 ranks, weak" if the experiment has several scalings."""
    world = "1 rank" if ranks == 1 else f"{ranks} ranks"
    return f"{world}, {scaling.value}" if ranks > 1 and len(scalings) > 1 else world


class Sharding(OverRanks):
    """Answer what a step over ranks costs, and what the cost model predicts."""

    name = "sharding"
    measurement = base.Measurement(
        "experiments.measure.sharding:sharding_cell", ignores=(base.KEYS,)
    )
    reporting = base.Reporting(
        "experiments.kind_reports.sharding", comparability=base.Comparability.PROCESSES
    )

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return sharding.csv and predictions.csv."""
        return {"sharding": frame(records), "predictions": predictions(records)}


class Calibration(OverRanks):
    """Answer what lookups, updates and messages cost on this machine."""

    name = "calibration"
    arms = base.ArmRules(only_arm="constants", ranks=base.Ranks.OF_WORLDS)
    measurement = base.Measurement(
        "experiments.measure.sharding:calibration_cell",
        repetition=base.Repetition.ONCE,
        modes=(Mode.hot,),
        ignores=(
            *("workload", "sharding.scaling", "sharding.beyond", "cache", base.KEYS),
            *base.UPDATE_RULE,
        ),
    )
    reporting = base.Reporting(
        "experiments.kind_reports.calibration",
        comparability=base.Comparability.MACHINES,
        success="None: the constants of {count} worlds were measured.",
    )

    def progress(self, records: Sequence[Record]) -> str:
        is_calibrated = any(record["status"] == "ok" for record in records)
        return "calibrated" if is_calibrated else super().progress(records)


def counterpart(contender: str) -> str:
    """Return emblib's contender with the sharding type of a contender of TorchRec.

    It is "" for a contender that is not TorchRec's.
    """
    if contender in ("torchrec_fused", "torchrec_unsharded"):
        return "collection"
    sharding_type = contender.removeprefix("torchrec_")
    return f"{SHARDED}{sharding_type}" if sharding_type != contender else ""


def torchrec_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of TorchRec's contenders that have a ratio to emblib's."""
    return rows[rows["ratio"].notna() & rows["contender"].str.startswith("torchrec_")]


def sharding_type_of(contender: str) -> str:
    """Return the sharding type of a contender, such as "row-wise"; the name of an unsharded one."""
    for prefix in (SHARDED, "torchrec_"):
        if contender.startswith(prefix):
            return contender.removeprefix(prefix).replace("_", "-")
    return contender


def frame(records: Sequence[Record]) -> pd.DataFrame:
    """Return sharding.csv: a row per cell, arm, mode and phase, over all processes.

    Columns: `type` (sharding type), `world_size` (ranks), `scaling` ("weak" or "strong"), the
    workload's axes, `weights_bytes` of all ranks, and those of `metrics.timed_columns`. A time is
    that of the slowest rank. `ratio` is the time ÷ that of emblib's counterpart in the cell, paired
    by round. Phases are forward, step and PARTS.
    """
    return metrics.phase_rows(
        records,
        Sharding.name,
        lambda record: counterpart(record["arm"]),
        _row,
        phases_of=lambda group: metrics.sampled_phases(group, STEP),
    )


def _row(
    records: Sequence[Record],
    phase: str,
    base_records: Sequence[Record],
    pools: metrics.PooledSpreads,
) -> dict[str, Any]:
    """Return a row of `frame`; arguments as for `row_of` of `metrics.phase_rows`."""
    ok_records = metrics.usable_records(records)
    record = (ok_records or records)[0]
    names = ("section", "cell", "contender", "arm", "label", "rows_scale", "lookups")
    return {
        **{name: record[name] for name in names},
        **record["params"],
        "type": sharding_type_of(record["contender"]),
        "world_size": record["world_size"],
        "scaling": record.get("scaling", Scaling.weak.value),
        "mode": metrics.mode_of(record),
        "phase": phase,
        **metrics.outcome_of(records),
        **metrics.timed_columns(ok_records, metrics.usable_records(base_records), phase, pools),
        "weights_bytes": record["weights_bytes"],
    }


def step_frame(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the steps in `rows` of `frame` that have a time, with times of parts and efficiency.

    New columns: compute_s, and communication_s, the rest of the step (nan for a contender without
    parts); base_s, the step of one rank, see `_one_rank_batch`; and efficiency, base_s ÷ median_s,
    with strong scaling also ÷ world_size. Empty `rows` are returned as they are.
    """
    if not len(rows):
        return rows
    ok_rows = rows[(rows["phase"] == STEP) & (rows["status"] == "ok")].copy()
    compute_seconds = {
        (row["cell"], row["arm"], row["mode"]): row["median_s"]
        for _, row in rows[rows["phase"] == COMPUTE].iterrows()
    }
    keys = list(zip(ok_rows["cell"], ok_rows["arm"], ok_rows["mode"], strict=True))
    ok_rows["compute_s"] = [compute_seconds.get(key, math.nan) for key in keys]
    ok_rows["communication_s"] = (ok_rows["median_s"] - ok_rows["compute_s"]).clip(lower=0.0)
    rows_of_one_rank = ok_rows[ok_rows["world_size"] == 1]
    seconds_of_one_rank = {
        _step_key(row, row["B"]): float(row["median_s"]) for _, row in rows_of_one_rank.iterrows()
    }
    ok_rows["base_s"] = [
        seconds_of_one_rank.get(_step_key(row, _one_rank_batch(row)), math.nan)
        for _, row in ok_rows.iterrows()
    ]
    batch_shares = [
        1 if row["scaling"] == Scaling.weak.value else 1 / row["world_size"]
        for _, row in ok_rows.iterrows()
    ]
    ok_rows["efficiency"] = ok_rows["base_s"] * batch_shares / ok_rows["median_s"]
    return ok_rows


def _step_key(row: Mapping[Any, Any] | pd.Series, batch: int) -> tuple[Any, ...]:
    names = ("section", "arm", "mode", *SAME_BATCH)
    return (*(row[name] for name in names), batch)


def _one_rank_batch(row: Mapping[Any, Any] | pd.Series) -> int:
    """Return the batch of one rank with which a row is compared.

    With strong scaling it is the batch of all ranks together, else the batch per rank.
    """
    is_divided = row["scaling"] == Scaling.strong.value and row["world_size"] > 1
    return int(row["B"] * row["world_size"] if is_divided else row["B"])


def predictions(records: Sequence[Record]) -> pd.DataFrame:
    """Return predictions.csv: a row per predicted step of a measured cell or of a larger world.

    `predicted_s` and `predicted_compute_s` are the cost model's seconds of a step; a process
    predicts with its own constants, and several processes are averaged. `median_s` is the measured
    step. It is nan where `beyond` is True: that world was not measured. `batch` is bags per rank.
    """
    steps_by_key: dict[tuple[str, str, int, str], list[tuple[Record, Mapping[str, Any]]]] = {}
    for record in records:
        if record.get("kind") == Sharding.name and record["status"] == "ok":
            for predicted_step in record.get("predicted", []):
                key = (
                    record["cell"],
                    record["arm"],
                    int(predicted_step["ranks"]),
                    predicted_step["scaling"],
                )
                steps_by_key.setdefault(key, []).append((record, predicted_step))
    rows = []
    for (cell, arm, ranks, scaling), group in steps_by_key.items():
        record = group[0][0]
        is_measured = ranks == record["world_size"]
        times = [metrics.seconds(record, STEP) for record, _ in group]
        rows.append(
            {
                "section": record["section"],
                "cell": cell,
                "arm": arm,
                "contender": record["contender"],
                "label": record["label"],
                "type": sharding_type_of(record["contender"]),
                "world_size": ranks,
                "scaling": scaling,
                "beyond": not is_measured,
                "predicted_s": _mean(group, "step_s"),
                "predicted_compute_s": _mean(group, "compute_s"),
                "median_s": metrics.summarise_processes(times).median if is_measured else math.nan,
                "batch": int(group[0][1]["batch"]),
                **{axis: record["params"][axis] for axis in SAME_BATCH},
            }
        )
    return pd.DataFrame(rows)


def _mean(group: Sequence[tuple[Record, Mapping[str, Any]]], name: str) -> float:
    return sum(float(predicted_step[name]) for _, predicted_step in group) / len(group)


class Agreement(NamedTuple):
    """The quality of predicted steps.

    Attributes:
        rank_correlation: Spearman's correlation of predicted and measured steps; nan below three.
        median_factor: median of the larger ÷ the smaller of both times, >= 1; nan below three.
        points: number of measured steps.
    """

    rank_correlation: float
    median_factor: float
    points: int


def prediction_agreement(rows: pd.DataFrame) -> Agreement:
    """Compare the measured steps in `rows` of `predictions` with their predictions.

    Steps of worlds that were not measured are skipped.
    """
    measured_rows = rows[~rows["beyond"]] if len(rows) else rows
    if len(measured_rows) < 3:
        return Agreement(math.nan, math.nan, len(measured_rows))
    correlation = measured_rows["predicted_s"].corr(measured_rows["median_s"], method="spearman")
    factors = (measured_rows["predicted_s"] / measured_rows["median_s"]).map(
        lambda factors: max(factors, 1 / factors)
    )
    return Agreement(float(correlation), float(factors.median()), len(measured_rows))
