"""Metrics computed from records by pure functions, so that a new metric needs no new run.

A *record* has the results of one arm (a contender) in one process, see `store.Record`. A *group* is
the records of an arm in a cell and mode, one per process. `phase_rows` forms the groups of a kind,
pairs each with the group of its baseline, and returns a row per phase (a timed call, "forward" or
"step").
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import pandas as pd

from experiments.config.schema import PHASES, Mode
from experiments.results.store import Record
from experiments.timing import statistics
from experiments.timing.statistics import Effect, ProcessSpread, Summary

INDEX_BYTES = 8  # int64 ids and offsets
WEIGHT_BYTES = 4  # float32
PROCESSES_FOR_A_VERDICT = 3  # fewest processes of an arm with a verdict
GPU_BUSY = 0.8  # share of a step that the GPU works; below it a step is bound by the host
MARGIN = 0.05  # relative difference that a report neglects; the gate has margins of its own

FORMULA = (
    "Useful bytes are those the task itself must move, the same for every contender of a cell. "
    "Forward: lookups × (4·D + 8) + offsets × 8 + output × 4. Step: forward + output gradient × "
    "4 + distinct rows × 2 × (4·D + optimizer state of a row). Useful bandwidth is useful bytes "
    "÷ median time. It counts a row again each time it is looked up, so on skewed ids caches can"
    " lift it above the machine's copy bandwidth; the 'distinct' variant counts each row once "
    "per batch."
)


def useful_bytes(record: Record, phase: str, *, distinct: bool = False) -> float:
    """Return the useful bytes of a batch by FORMULA; `distinct` counts each row once.

    Every phase other than "forward" counts as a step. nan for a step, or with `distinct`, if the
    record has no number of distinct rows.
    """
    row_bytes = WEIGHT_BYTES * record["params"]["D"]
    num_lookups, num_distinct = record["lookups"], record["unique_rows"] or math.nan
    output_bytes = WEIGHT_BYTES * record["params"]["B"] * record["columns"]
    read_bytes = (num_distinct if distinct else num_lookups) * row_bytes
    offset_bytes = INDEX_BYTES * (record["features"] * record["params"]["B"] + 1)
    forward_bytes = read_bytes + INDEX_BYTES * num_lookups + offset_bytes + output_bytes
    if phase == "forward":
        return forward_bytes
    return forward_bytes + output_bytes + 2 * num_distinct * (row_bytes + row_state_bytes(record))


def row_state_bytes(record: Record) -> float:
    """Return the bytes of optimizer state per plain row; nan for an unknown optimizer."""
    per_row = {"sgd": 0, "rowwise_adagrad": 4, "adagrad": 4 * record["params"]["D"]}
    return per_row.get(record["optimizer"], math.nan)


def seconds(record: Record, phase: str) -> list[float]:
    """Return the samples of a phase in seconds."""
    return [float(sample_s) for _, sample_s in record["samples"].get(phase, [])]


def host_seconds(group: Sequence[Record], phase: str) -> float:
    """Return the median seconds that a call on a GPU takes on the host; nan on a CPU."""
    host_s = [
        float(sample_s)
        for record in group
        for _, sample_s in (record.get("wall_samples") or {}).get(phase, [])
    ]
    return statistics.summarise(host_s).median if host_s else math.nan


def is_host_bound(mode: str, gpu_s: float, host_s: float) -> bool:
    """Return whether a GPU would work for less than GPU_BUSY of the time in a sequence of calls.

    Args:
        mode: mode of the samples.
        gpu_s: seconds of a call on the GPU; in mode wall from the call to its completion.
        host_s: seconds of a call on the host.

    The result is False if a time is nan.
    """
    if mode == Mode.wall.value:
        return host_s > GPU_BUSY * gpu_s
    return gpu_s < GPU_BUSY * host_s


def best_of_rounds(record: Record, phase: str) -> dict[int, float]:
    """Return {round: seconds} of the fastest sample of each round, which was disturbed least."""
    best_s: dict[int, float] = {}
    for round_number, sample_s in record["samples"].get(phase, []):
        best_so_far = best_s.get(int(round_number), math.inf)
        best_s[int(round_number)] = min(float(sample_s), best_so_far)
    return best_s


def frame(records: Sequence[Record], baseline: str) -> pd.DataFrame:
    """Return results.csv: one row per timed cell, arm, mode and phase, over all processes.

    Columns, besides identity, the workload's axes and `status`:

    - `median_s`, `q25_s`, `q75_s` over all samples, and `lo_s`, `hi_s`, the interval of the median
      over processes; `min_s`, `p90_s`, `p99_s`; seconds of a call.
    - `host_s`, seconds of the host in a call on a GPU, and `host_bound`.
    - `ratio`, `ratio_lo`, `ratio_hi`: time ÷ that of the arm `baseline` in the same cell and mode,
      paired within each process; `verdict` and `visible` from three processes on.
    - `useful_gb_s` and `distinct_gb_s` by FORMULA, `gflop_s`, `lookups_per_s`.
    - `*_bytes` of parameters, optimizer state, cache, scratch and plain tables; `compression`.

    A row whose status is not "ok" has nan in place of times, rates and ratios.
    """
    return phase_rows(records, "time", lambda _: baseline, _row, phases_of=lambda _: PHASES)


Group = Sequence[Record]
"""The records of an arm in a cell and mode, one per process."""

K = TypeVar("K")


def group_records(
    records: Sequence[Record], kind: str, key: Callable[[Record], K]
) -> dict[K, list[Record]]:
    """Group the records of a kind by `key` of a record, keys in the order of their first record."""
    groups: dict[K, list[Record]] = {}
    for record in records:
        if record.get("kind", "time") == kind:
            groups.setdefault(key(record), []).append(record)
    return groups


RowOf = Callable[[Group, str, Group, "PooledSpreads"], dict[str, Any]]


def phase_rows(
    records: Sequence[Record],
    kind: str,
    baseline_of: Callable[[Record], str],
    row_of: RowOf,
    *,
    phases_of: Callable[[Group], Sequence[str]],
    pooled_base: Callable[[Group, str], Group] = lambda base, phase: base,
) -> pd.DataFrame:
    """Return one row per cell, arm, mode and phase of a kind, over all processes.

    Without a record of the kind the frame has no rows and no columns.

    Args:
        records: records of a run, of all kinds.
        kind: kind whose cells get rows.
        baseline_of: function of a record that returns the arm to compare its arm with.
        row_of: function of a group, a phase, the baseline's group ([] without one) and the pooled
            spreads that returns a row.
        phases_of: function of a group that returns its phases.
        pooled_base: function of the baseline's group and a phase that returns the baseline of the
            ratios in the pooled spreads. `row_of` still gets the baseline's group itself.

    Raises:
        ValueError: a measured process is recorded twice, or a sample is not a positive time.
    """
    groups = group_records(
        records, kind, lambda record: (record["cell"], record["arm"], mode_of(record))
    )
    for group in groups.values():
        _check_samples(group)
    pairs: dict[tuple[str, str], list[tuple[Group, Group]]] = {}
    rows_to_make = []
    for (cell, _, mode), group in groups.items():
        base = groups.get((cell, baseline_of(group[0]), mode), [])
        for phase in phases_of(group):
            pairs.setdefault((mode, phase), []).append((group, pooled_base(base, phase)))
            rows_to_make.append((group, mode, phase, base))
    spreads = {key: PooledSpreads.of(group_pairs, key[1]) for key, group_pairs in pairs.items()}
    return pd.DataFrame(
        [
            row_of(group, phase, base, spreads[mode, phase])
            for group, mode, phase, base in rows_to_make
        ]
    )


def _check_samples(group: Group) -> None:
    """Raise ValueError for records of a group from which wrong times or intervals would follow."""
    name = f"{group[0]['cell']}, {group[0]['arm']}"
    replicates = [replicate_of(record) for record in group if record["status"] == "ok"]
    if len(set(replicates)) < len(replicates):
        raise ValueError(f"{name}: a process is recorded twice, and would count as two")
    for record in group:
        for phase, samples in record["samples"].items():
            for _, sample_s in samples:
                if not (isinstance(sample_s, int | float) and 0 < sample_s < math.inf):
                    raise ValueError(f"{name}, {phase}: {sample_s!r} is not a time in seconds")


def sampled_phases(group: Group, default: str) -> Sequence[str]:
    """Return the phases with samples in a group, or [`default`] without any."""
    return next((list(record["samples"]) for record in group if record["samples"]), [default])


@dataclass(frozen=True)
class PooledSpreads:
    """The spreads between processes of times and ratios, pooled over a mode and phase of a run.

    Attributes:
        times: spread of the logarithms of medians; None if no arm was measured in two processes.
        ratios: spread of the logarithms of ratios; None if no arm was measured in two processes
            together with its baseline.
    """

    times: ProcessSpread | None
    ratios: ProcessSpread | None

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[Sequence[Record], Sequence[Record]]], phase: str
    ) -> PooledSpreads:
        """Pool the arms of a run, each given by its group and the group of its baseline."""
        arms = [(usable_records(group), usable_records(base)) for group, base in pairs]
        log_medians = (
            [
                math.log(statistics.summarise(samples_s).median)
                for record in arm
                if (samples_s := seconds(record, phase))
            ]
            for arm, _ in arms
        )
        log_ratios = [process_logs(arm, base, phase) for arm, base in arms if arm and arm != base]
        return cls(statistics.pool_spreads(log_medians), statistics.pool_spreads(log_ratios))


def usable_records(group: Sequence[Record]) -> list[Record]:
    """Return the records with status "ok"; [] if the arm was wrong in one of the processes."""
    is_ok = status_of(group) == "ok"
    return [record for record in group if is_ok and record["status"] == "ok"]


def mode_of(record: Record) -> str:
    """Return the mode of a record, which is "hot" in the first schema."""
    return str(record.get("mode", Mode.hot.value))


def _row(
    records: Sequence[Record], phase: str, base_records: Sequence[Record], spreads: PooledSpreads
) -> dict[str, Any]:
    """Return a row of results.csv; arguments as for `row_of` of `phase_rows`."""
    record = next((record for record in records if record["status"] == "ok"), records[0])
    ok_records = usable_records(records)
    by_process = [seconds(record, phase) for record in ok_records]
    time = summarise_processes(by_process, spreads.times)
    tails = statistics.tail_of([sample_s for samples in by_process for sample_s in samples])
    effect = ratio_of(ok_records, usable_records(base_records), phase, spreads.ratios)
    has_verdict = effect.processes >= PROCESSES_FOR_A_VERDICT
    identity = {
        name: record[name] for name in ("section", "cell", "contender", "rank", "arm", "label")
    }
    return {
        **identity,
        "cache": record.get("cache", 0.0),
        "mode": mode_of(record),
        "phase": phase,
        **outcome_of(records),
        **record["params"],
        **time.columns(),
        "host_s": (host := host_seconds(ok_records, phase)),
        "host_bound": is_host_bound(mode_of(record), time.median, host),
        "min_s": tails.minimum,
        "p90_s": tails.p90,
        "p99_s": tails.p99,
        "samples": time.n,
        "processes": len(ok_records),
        "stop_reason": record["stop_reason"],
        "flags": "; ".join(_flags(records)),
        **effect.columns(),
        "verdict": statistics.verdict(effect, MARGIN).value if has_verdict else "",
        "visible": statistics.smallest_detectable(effect, MARGIN) if has_verdict else math.nan,
        "ns_per_lookup": 1e9 * time.median / record["lookups"],
        "lookups_per_s": record["lookups"] / time.median,
        "useful_gb_s": useful_bytes(record, phase) / time.median / 1e9,
        "distinct_gb_s": useful_bytes(record, phase, distinct=True) / time.median / 1e9,
        "gflop_s": _flops(record, phase) / time.median / 1e9,
        "lookups": record["lookups"],
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
    }


def _flops(record: Record, phase: str) -> float:
    """Return the floating-point operations of a phase; nan without products."""
    return float((record.get("flops") or {}).get(phase, math.nan))


def status_of(group: Sequence[Record]) -> str:
    """Return "wrong" if a record has it, else "ok" if a record has it, else the first status.

    It is "missing" for an empty group.
    """
    statuses = [record["status"] for record in group]
    if "wrong" in statuses:
        return "wrong"
    return "ok" if "ok" in statuses else str(statuses[0]) if statuses else "missing"


def outcome_of(group: Sequence[Record]) -> dict[str, str]:
    """Return the columns `status` (of `status_of`) and `reason`, of the first process with it."""
    status = status_of(group)
    return {
        "status": status,
        "reason": next(record["reason"] for record in group if record["status"] == status),
    }


def _flags(group: Sequence[Record]) -> list[str]:
    """Return the flags of all processes, each once, and a flag if only some of them failed."""
    flags = [flag for record in group for flag in record.get("flags", [])]
    failures = [record["status"] for record in group if record["status"] != "ok"]
    if failures and len(failures) < len(group):
        flags.append(f"{failures[0]} in {len(failures)} of {len(group)} processes")
    return list(dict.fromkeys(flags))


def summarise_processes(
    samples: Sequence[Sequence[float]], pooled_spread: ProcessSpread | None = None
) -> Summary:
    """Summarise the samples of all processes; the interval is over the medians of processes.

    One process has no interval, because processes differ by more than the noise within one. The
    interval is widened to contain the median of all samples, which a process with many samples can
    pull away from the mean over processes. For two processes, `pooled_spread` is the least spread,
    see `statistics.combine_processes`.
    """
    all_samples = statistics.summarise([s for process in samples for s in process])
    medians = [statistics.summarise(process).median for process in samples if process]
    spread = statistics.combine_processes([math.log(median) for median in medians], pooled_spread)
    if math.isnan(spread.lo):
        return dataclasses.replace(all_samples, lo=math.nan, hi=math.nan)
    lo, hi = min(spread.lo, all_samples.median), max(spread.hi, all_samples.median)
    return dataclasses.replace(all_samples, lo=lo, hi=hi)


def ratio_of(
    arm: Sequence[Record],
    base: Sequence[Record],
    phase: str,
    pooled_spread: ProcessSpread | None = None,
) -> Effect:
    """Return arm ÷ base of a phase: the mean over processes of the medians over their rounds.

    For two processes, `pooled_spread` is the least spread, see `statistics.combine_processes`.
    """
    return statistics.combine_processes(process_logs(arm, base, phase), pooled_spread)


def process_logs(arm: Sequence[Record], base: Sequence[Record], phase: str) -> list[float]:
    """Return log(arm ÷ base) of each process that measured both in a common round.

    It is the median over the rounds (`statistics.process_effect`).
    """
    base_by_replicate = {replicate_of(record): record for record in base}
    pairs = [
        (
            best_of_rounds(record, phase),
            best_of_rounds(base_by_replicate[replicate_of(record)], phase),
        )
        for record in arm
        if replicate_of(record) in base_by_replicate
    ]
    pairs = [
        (arm_best, base_best) for arm_best, base_best in pairs if arm_best.keys() & base_best.keys()
    ]
    return [statistics.process_effect(arm_best, base_best) for arm_best, base_best in pairs]


def timed_columns(
    processes: Sequence[Record], base: Sequence[Record], phase: str, spreads: PooledSpreads
) -> dict[str, Any]:
    """Return the columns about the times of a phase, in seconds, and about its ratio to `base`.

    They are median_s, q25_s, q75_s, lo_s, hi_s; samples and processes (counts); ratio, ratio_lo,
    ratio_hi. A number for which there are too few processes is nan.
    """
    time = summarise_processes([seconds(record, phase) for record in processes], spreads.times)
    effect = ratio_of(processes, base, phase, spreads.ratios)
    counts = {"samples": time.n, "processes": len(processes)}
    return {**time.columns(), **counts, **effect.columns()}


def replicate_of(record: Record) -> int:
    """Return the number of the process of a record, which is 0 in the first schema."""
    return int(record.get("replicate", 0))


def hit_rate(record: Record, unit: str) -> float:
    """Return the share of lookups (`unit` "lookup") or rows ("row") that hit, or nan."""
    counters = record.get("counters") or {}
    return counters[f"{unit}_hits"] / counters[f"{unit}s"] if counters.get(f"{unit}s") else math.nan


def compression(record: Record) -> float:
    """Return the bytes of plain float32 tables ÷ bytes of the contender's parameters, or nan."""
    return record["dense_bytes"] / record["weights_bytes"] if record["weights_bytes"] else math.nan
