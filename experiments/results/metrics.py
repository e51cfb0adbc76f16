"""From records to metrics: pure functions, so that changing a metric needs no new run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.config.schema import PHASES, Mode
from experiments.results.store import Record
from experiments.timing import statistics
from experiments.timing.statistics import Effect, ProcessSpread, Summary

INDEX_BYTES = 8  # int64 ids and offsets
WEIGHT_BYTES = 4  # float32
PROCESSES_FOR_A_VERDICT = 3
GPU_BUSY = 0.8  # share of a step that the GPU works, below which the host sets the pace
MARGIN = 0.05  # differences below this are the same for a report; the gate has margins of its own

FORMULA = (
    "Useful bytes are those the task itself must move, the same for every contender of a cell. "
    "Forward: lookups × (4·D + 8) + offsets × 8 + output × 4. Step: forward + output gradient × "
    "4 + distinct rows × 2 × (4·D + optimizer state of a row). Useful bandwidth is useful bytes "
    "÷ median time. It counts a row again each time it is looked up, so on skewed ids caches can"
    " lift it above the machine's copy bandwidth; the 'distinct' variant counts each row once "
    "per batch."
)


def useful_bytes(record: Record, phase: str, *, distinct: bool = False) -> float:
    """Return the bytes of FORMULA for one batch; `distinct` counts each row of the batch once."""
    row = WEIGHT_BYTES * record["params"]["D"]
    lookups, unique = record["lookups"], record["unique_rows"] or math.nan
    output = WEIGHT_BYTES * record["params"]["B"] * record["columns"]
    rows_read = (unique if distinct else lookups) * row
    offsets = INDEX_BYTES * (record["features"] * record["params"]["B"] + 1)
    forward = rows_read + INDEX_BYTES * lookups + offsets + output
    if phase == "forward":
        return forward
    return forward + output + 2 * unique * (row + row_state_bytes(record))


def row_state_bytes(record: Record) -> float:
    """Return the bytes of optimizer state per plain row; NaN for an optimizer not known here."""
    per_row = {"sgd": 0, "rowwise_adagrad": 4, "adagrad": 4 * record["params"]["D"]}
    return per_row.get(record["optimizer"], math.nan)


def seconds(record: Record, phase: str) -> list[float]:
    """Return all raw samples in seconds."""
    return [float(s) for _, s in record["samples"].get(phase, [])]


def host_seconds(group: Sequence[Record], phase: str) -> float:
    """Return the median seconds that the host spent in a call; NaN on a CPU, where it is all."""
    walls = [float(s) for r in group for _, s in (r.get("wall_samples") or {}).get(phase, [])]
    return statistics.summarise(walls).median if walls else math.nan


def host_bound(mode: str, gpu_s: float, host_s: float) -> bool:
    """Return whether the GPU would idle for a fifth of the time or more if calls followed eagerly.

    `gpu_s` is the time on the GPU, and in mode wall the time from call to completion. Unknown
    times give False.
    """
    if mode == Mode.wall.value:
        return host_s > GPU_BUSY * gpu_s
    return gpu_s < GPU_BUSY * host_s


def best_of_rounds(record: Record, phase: str) -> dict[int, float]:
    """Return, per round, the faster of its two samples, which was disturbed less."""
    best: dict[int, float] = {}
    for number, sample in record["samples"].get(phase, []):
        best[int(number)] = min(float(sample), best.get(int(number), math.inf))
    return best


def frame(records: Sequence[Record], baseline: str) -> pd.DataFrame:
    """Return a row per arm, mode and phase of a cell, all its processes together.

    Ratios are to the arm `baseline` of the same cell and mode, paired within each process.
    """
    return phase_rows(records, "time", lambda _: baseline, _row, phases_of=lambda _: PHASES)


Group = Sequence[Record]
RowOf = Callable[[Group, str, Group, "Pools"], dict[str, Any]]


def phase_rows(
    records: Sequence[Record],
    kind: str,
    baseline_of: Callable[[Record], str],
    row_of: RowOf,
    *,
    phases_of: Callable[[Group], Sequence[str]],
    pair: Callable[[Group, str], Group] = lambda base, phase: base,
) -> pd.DataFrame:
    """Return a row per arm, mode and phase of the cells of a kind, all processes together.

    Args:
        records: records of a run, of all kinds.
        kind: The kind whose cells count.
        baseline_of: The arm that the arm of a record is compared with.
        row_of: Makes a row of a group, its phase, its baseline's group, and the run's spread.
        phases_of: The phases of a group.
        pair: The baseline's records as they are paired with a phase.
    """
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        if record.get("kind", "time") == kind:
            groups.setdefault((record["cell"], record["arm"], mode_of(record)), []).append(record)
    pairs: dict[tuple[str, str], list[tuple[Group, Group]]] = {}
    measured = []
    for (cell, _, mode), group in groups.items():
        base = groups.get((cell, baseline_of(group[0]), mode), [])
        for phase in phases_of(group):
            pairs.setdefault((mode, phase), []).append((group, pair(base, phase)))
            measured.append((group, mode, phase, base))
    pools = {key: Pools.of(group_pairs, key[1]) for key, group_pairs in pairs.items()}
    return pd.DataFrame(
        [row_of(group, phase, base, pools[mode, phase]) for group, mode, phase, base in measured]
    )


def sampled_phases(group: Group, otherwise: str) -> Sequence[str]:
    """Return the phases that a group has samples of; `otherwise` where it has none."""
    return next((list(r["samples"]) for r in group if r["samples"]), [otherwise])


@dataclass(frozen=True)
class Pools:
    """The variation between processes in one mode and phase of a run, for cells with only two."""

    times: ProcessSpread | None
    ratios: ProcessSpread | None

    @classmethod
    def of(cls, pairs: Sequence[tuple[Sequence[Record], Sequence[Record]]], phase: str) -> Pools:
        """Pool the arms of a run, each given with its baseline."""
        taken = [(good(group), good(base)) for group, base in pairs]
        ratios = [process_logs(arm, base, phase) for arm, base in taken if arm and arm != base]
        return cls(
            statistics.pool(process_medians(arm, phase) for arm, _ in taken),
            statistics.pool(ratios),
        )


def good(group: Sequence[Record]) -> list[Record]:
    """Return the processes of an arm that count: none once one of them was wrong."""
    return [r for r in group if r["status"] == "ok"] if status_of(group) == "ok" else []


def mode_of(record: Record) -> str:
    """Return 'hot', 'cold', ...; records of the first schema have only hot ones."""
    return str(record.get("mode", Mode.hot.value))


def _row(
    group: Sequence[Record], phase: str, base: Sequence[Record], pools: Pools
) -> dict[str, Any]:
    record = next((r for r in group if r["status"] == "ok"), group[0])
    status, taken = status_of(group), good(group)
    sampled = [seconds(r, phase) for r in taken]
    time = summarise_processes(sampled, pools.times)
    ends = statistics.tail([s for each in sampled for s in each])
    effect = ratio(taken, good(base), phase, pools.ratios)
    judged = effect.processes >= PROCESSES_FOR_A_VERDICT
    identity = {k: record[k] for k in ("section", "cell", "contender", "rank", "arm", "label")}
    unique = record["unique_rows"] or math.nan
    return {
        **identity,
        "cache": record.get("cache", 0.0),
        "mode": mode_of(record),
        "phase": phase,
        "status": status,
        **record["params"],
        **time.columns(),
        "host_s": (host := host_seconds(taken, phase)),
        "host_bound": host_bound(mode_of(record), time.median, host),
        "min_s": ends.least,
        "p90_s": ends.p90,
        "p99_s": ends.p99,
        "samples": time.n,
        "processes": len(taken),
        "stop_reason": record["stop_reason"],
        "flags": "; ".join(_flags(group)),
        **effect.columns(),
        "verdict": statistics.verdict(effect, MARGIN).value if judged else "",
        "visible": statistics.smallest_visible(effect, MARGIN) if judged else math.nan,
        "ns_per_lookup": 1e9 * time.median / record["lookups"],
        "lookups_per_s": record["lookups"] / time.median,
        "useful_gb_s": useful_bytes(record, phase) / time.median / 1e9,
        "distinct_gb_s": useful_bytes(record, phase, distinct=True) / time.median / 1e9,
        "gflop_s": _flops(record, phase) / time.median / 1e9,
        "flops": _flops(record, phase),
        "lookups": record["lookups"],
        "unique_fraction": unique / record["lookups"],
        "weights_bytes": record["weights_bytes"],
        "optimizer_state_bytes": record["optimizer_state_bytes"],
        "cache_bytes": record.get("cache_bytes", 0),
        "peak_bytes": record["peak_bytes"],
        "dense_bytes": record["dense_bytes"],
        "compression": compression(record),
        "lookup_hit_rate": hit_rate(record, "lookup"),
        "row_hit_rate": hit_rate(record, "row"),
        "rows_scale": record["rows_scale"],
        "world_size": record.get("world_size", 1),
        "reason": record["reason"],
    }


def _flops(record: Record, phase: str) -> float:
    """Return the operations of the products of a contender that has some, else NaN."""
    return float((record.get("flops") or {}).get(phase, math.nan))


def status_of(group: Sequence[Record]) -> str:
    """Return 'ok' if any process measured the arm and none found it wrong."""
    statuses = [r["status"] for r in group]
    if "wrong" in statuses:
        return "wrong"
    return "ok" if "ok" in statuses else str(statuses[0]) if statuses else "missing"


def _flags(group: Sequence[Record]) -> list[str]:
    """Return what a reader should know of some of the processes, each flag once."""
    flags = [flag for r in group for flag in r.get("flags", [])]
    failed = [r["status"] for r in group if r["status"] != "ok"]
    if failed and len(failed) < len(group):
        flags.append(f"{failed[0]} in {len(failed)} of {len(group)} processes")
    return list(dict.fromkeys(flags))


def summarise_processes(
    samples: Sequence[Sequence[float]], others: ProcessSpread | None = None
) -> Summary:
    """Summarise all samples of all processes; the interval is over the processes' medians.

    One process gives no interval, because its samples show the noise within it only, and processes
    differ by more. The interval is widened to contain the median of all samples, which a process
    with many samples can pull away from the mean over processes.
    """
    together = statistics.summarise([s for taken in samples for s in taken])
    medians = [statistics.summarise(taken).median for taken in samples if taken]
    spread = statistics.combine([math.log(m) for m in medians], others)
    if math.isnan(spread.lo):
        return dataclasses.replace(together, lo=math.nan, hi=math.nan)
    lo, hi = min(spread.lo, together.median), max(spread.hi, together.median)
    return dataclasses.replace(together, lo=lo, hi=hi)


def process_medians(arm: Sequence[Record], phase: str) -> list[float]:
    """Return the log of the median time of each process that has samples."""
    sampled = [seconds(r, phase) for r in arm]
    return [math.log(statistics.summarise(taken).median) for taken in sampled if taken]


def ratio(
    arm: Sequence[Record], base: Sequence[Record], phase: str, others: ProcessSpread | None = None
) -> Effect:
    """Return arm / base: per process the median over rounds, over processes mean and t-interval.

    One process gives no interval; `others` is what two processes use, see `statistics.combine`.
    """
    return statistics.combine(process_logs(arm, base, phase), others)


def process_logs(arm: Sequence[Record], base: Sequence[Record], phase: str) -> list[float]:
    """Return the log of arm / base of each process that measured both in a common round."""
    others = {replicate_of(r): r for r in base}
    pairs = [
        (best_of_rounds(r, phase), best_of_rounds(others[replicate_of(r)], phase))
        for r in arm
        if replicate_of(r) in others
    ]
    pairs = [(best, other) for best, other in pairs if best.keys() & other.keys()]
    return [statistics.process_effect(best, other) for best, other in pairs]


def replicate_of(record: Record) -> int:
    """Return the number of the fresh process; the first schema had one."""
    return int(record.get("replicate", 0))


def hit_rate(record: Record, of: str) -> float:
    """Return the share of lookups or distinct rows of the timed batches that a cache served."""
    counted = record.get("counters") or {}
    return counted[f"{of}_hits"] / counted[f"{of}s"] if counted.get(f"{of}s") else math.nan


def compression(record: Record) -> float:
    """Return the bytes of plain float32 tables ÷ those of this contender's parameters."""
    return record["dense_bytes"] / record["weights_bytes"] if record["weights_bytes"] else math.nan
