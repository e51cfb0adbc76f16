"""The kind `serving`: latency and throughput of lookups in read-only tables under load.

A *record* has the `points` of one arm in one process. A point has the counts of latencies for one
number of clients and one load. `latencies` adds up the counts of all processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pandas as pd

from experiments.config.schema import MAX_WORKERS, Config, DeviceKind, Mode, UsageError
from experiments.kinds import base
from experiments.results import metrics
from experiments.results.store import Record
from experiments.timing import statistics
from experiments.timing.latencies import CLOSED, counts_of, latency_quantile_s, phase_of

MIN_TAIL = 200  # minimum number of requests for a p99, so that two requests exceed it


@dataclass
class ServingOptions:
    """The clients that send requests, and how fast.

    Attributes:
        clients: numbers of threads that look up at once.
        loads: rates of arrival ÷ the rate of closed blocks, in which each client sends a request
            as soon as its last one was answered.
        rounds: blocks of requests per arm, number of clients and load.
    """

    clients: list[int] = field(default_factory=lambda: [1, 2])
    loads: list[float] = field(default_factory=lambda: [0.3, 0.6, 0.8])
    rounds: int = 4


class Serving(base.Kind):
    """Answer how long requests wait for read-only tables, and how many can be answered."""

    name = "serving"
    options = ServingOptions
    option_rules: ClassVar[Mapping[str, base.OptionRule]] = {
        "clients": base.OptionRule(
            f"in [1, {MAX_WORKERS}]", lambda clients: 1 <= clients <= MAX_WORKERS
        ),
        "loads": base.OptionRule("in (0, 1)", lambda load: 0 < load < 1, may_be_empty=True),
        "rounds": base.AT_LEAST_ONE,
    }
    arms = base.ArmRules(contenders=base.ContenderType.SERVED)
    measurement = base.Measurement(
        "experiments.measure.serving:serving_cell",
        modes=(Mode.hot,),
        ignores=(base.KEYS, *base.UPDATE_RULE, *base.RACE, *base.WARM_UP, "timing.min_rounds"),
    )
    reporting = base.Reporting(
        "experiments.kind_reports.serving",
        comparability=base.Comparability.NOTHING,
        success="None: all {count} measurements ran, and their sums agreed with float32 rows.",
    )

    def check(self, config: Config) -> None:
        super().check(config)
        if config.device.kind is DeviceKind.cuda:
            raise UsageError("device.kind: kind=serving measures lookups on the CPU, say cpu")

    def progress(self, records: Sequence[Record]) -> str:
        """Return the 99th percentile of the latency of each arm with the last number of clients."""

        def p99(record: Record) -> str:
            closed_points = [point for point in record["points"] if point["load"] == CLOSED]
            return f"{1e3 * latency_quantile_s(counts_of(closed_points[-1:]), 0.99):.3g} ms"

        return base.progress_line("p99", records, p99)

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return latencies.csv and cold_starts.csv."""
        baseline = str(settings.baseline)
        return {"latencies": latencies(records, baseline), "cold_starts": cold_starts(records)}


def _group_by_arm(records: Sequence[Record]) -> dict[tuple[str, str], list[Record]]:
    """Return the records of each arm of a cell, one per process."""
    return metrics.group_records(
        records, Serving.name, lambda record: (record["cell"], record["arm"])
    )


ARM_COLUMNS = ("section", "cell", "contender", "arm", "label")


def latencies(records: Sequence[Record], baseline: str) -> pd.DataFrame:
    """Return latencies.csv: a row per cell, arm, clients and load, over all processes.

    `load` is CLOSED for closed blocks, else the rate of arrival ÷ the rate of closed blocks.
    `p50_s` and `p99_s` are percentiles of the latency in seconds; the latter is nan below MIN_TAIL
    `requests`. Medians over processes: `requests_per_s`, `bags_per_s` (bags of one table). `bytes`
    are those of the tables. `ratio`, in rows of closed blocks only, is the time per request ÷ the
    time of the arm `baseline`, paired within rounds. An arm that was not measured has one row.
    """
    groups = _group_by_arm(records)
    rows = []
    for (cell, _), group in groups.items():
        ok_records = metrics.usable_records(group)
        base_records = metrics.usable_records(groups.get((cell, baseline), []))
        shared_columns = {name: group[0][name] for name in ARM_COLUMNS} | group[0]["params"]
        shared_columns |= metrics.outcome_of(group)
        clients_and_loads = dict.fromkeys(
            (point["clients"], point["load"]) for record in ok_records for point in record["points"]
        )
        rows += [
            shared_columns | _row(ok_records, base_records, *pair) for pair in clients_and_loads
        ] or [shared_columns]
    return pd.DataFrame(rows)


def _row(
    ok_records: Sequence[Record], base_records: Sequence[Record], clients: int, load: float
) -> dict[str, Any]:
    """Return a row of `latencies` from records of an arm and the baseline, by process."""
    points = [
        point
        for record in ok_records
        for point in record["points"]
        if (point["clients"], point["load"]) == (clients, load)
    ]
    counts = counts_of(points)
    requests, batch = sum(counts.values()), ok_records[0]["params"]["B"]
    requests_per_s = statistics.summarise(
        [point["requests"] / point["seconds"] for point in points]
    ).median
    time_ratio = (
        metrics.ratio_of(ok_records, base_records, phase_of(clients)) if load == CLOSED else None
    )
    return {
        "clients": clients,
        "load": load,
        "requests": requests,
        "processes": len(points),
        "p50_s": latency_quantile_s(counts, 0.5),
        "p99_s": latency_quantile_s(counts, 0.99) if requests >= MIN_TAIL else math.nan,
        "requests_per_s": requests_per_s,
        "bags_per_s": requests_per_s * batch,
        **(time_ratio.columns() if time_ratio else {}),
        "bytes": ok_records[0]["weights_bytes"],
    }


def cold_starts(records: Sequence[Record]) -> pd.DataFrame:
    """Return cold_starts.csv: per arm and `pages` the seconds from opening a file to an answer.

    `pages` is "memory" or "disk", see `measure.serving.cold_start`. `bytes` is the size of the
    tables, `file_bytes` the size of the file. A row's samples are from all processes and cells with
    tables of that size, which differ only in the batch of the first answer.
    """
    groups: dict[tuple[str, int], list[Record]] = {}
    for (_, arm), group in _group_by_arm(records).items():
        for record in metrics.usable_records(group):
            groups.setdefault((arm, record["weights_bytes"]), []).append(record)
    rows = []
    for group in groups.values():
        for pages in ("memory", "disk"):
            seconds = [
                record["cold_start"][pages] for record in group if record["cold_start"].get(pages)
            ]
            if not seconds:
                continue
            time_summary = statistics.summarise(seconds)
            rows.append(
                {
                    **{name: group[0][name] for name in ("contender", "arm", "label")},
                    "pages": pages,
                    "bytes": group[0]["weights_bytes"],
                    "file_bytes": group[0]["cold_start"]["bytes"],
                    **time_summary.columns(),
                    "samples": time_summary.n,
                }
            )
    return pd.DataFrame(rows)
