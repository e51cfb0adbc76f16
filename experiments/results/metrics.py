"""Records to numbers: pure functions, so that changing a metric never needs another run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd

from experiments.config.schema import Kind
from experiments.results.store import Record
from experiments.timing import stats
from experiments.timing.race import PHASES

INDEX_BYTES = 8  # int64 ids and offsets
WEIGHT_BYTES = 4  # float32

FORMULA = (
    "Useful bytes are those the task itself must move, the same for every contender of a cell. "
    "Forward: lookups × (4·D + 8) + offsets × 8 + output × 4. Step: forward + output gradient × "
    "4 + distinct rows × 2 × (4·D + optimizer state of a row). Useful bandwidth is useful bytes "
    "÷ median time. It counts a row again each time it is looked up, so on skewed ids caches can"
    " lift it above the machine's copy bandwidth; the 'distinct' variant counts each row once "
    "per batch."
)


def useful_bytes(record: Record, phase: str, *, distinct: bool = False) -> float:
    """Bytes of FORMULA for one batch; `distinct` counts each row of the batch once."""
    row = WEIGHT_BYTES * record["params"]["D"]
    lookups, unique = record["lookups"], record["unique_rows"]
    output = WEIGHT_BYTES * record["params"]["B"] * record["columns"]
    rows_read = (unique if distinct else lookups) * row
    offsets = INDEX_BYTES * (record["features"] * record["params"]["B"] + 1)
    forward = rows_read + INDEX_BYTES * lookups + offsets + output
    if phase == "forward":
        return forward
    return forward + output + 2 * unique * (row + row_state_bytes(record))


def row_state_bytes(record: Record) -> int:
    """Optimizer state that belongs to one plain row."""
    per_row = {"sgd": 0, "rowwise_adagrad": 4, "adagrad": 4 * record["params"]["D"]}
    return per_row[record["optimizer"]]


def seconds(record: Record, phase: str) -> list[float]:
    """All raw samples."""
    return [float(s) for _, s in record["samples"].get(phase, [])]


def best_of_rounds(record: Record, phase: str) -> dict[int, float]:
    """Round -> the faster of its two samples: the one that was disturbed less."""
    best: dict[int, float] = {}
    for number, sample in record["samples"].get(phase, []):
        best[int(number)] = min(float(sample), best.get(int(number), math.inf))
    return best


def frame(records: Sequence[Record], baseline: str) -> pd.DataFrame:
    """One row per timed record and phase, with its ratio to `baseline` paired within the cell."""
    records = [r for r in records if r.get("kind", Kind.time.value) == Kind.time.value]
    base = {r["cell"]: r for r in records if r["arm"] == baseline and r["status"] == "ok"}
    rows = [_row(r, phase, base.get(r["cell"])) for r in records for phase in PHASES]
    return pd.DataFrame(rows)


def _row(record: Record, phase: str, baseline: Record | None) -> dict[str, Any]:
    taken = seconds(record, phase)
    ok = record["status"] == "ok" and bool(taken)
    time = stats.summarise(taken if ok else [])
    pair = None
    if ok and baseline:
        own, other = best_of_rounds(record, phase), best_of_rounds(baseline, phase)
        pair = stats.paired_ratio(own, other)
    identity = {k: record[k] for k in ("section", "cell", "contender", "rank", "arm", "label")}
    return {
        **identity,
        "cache": record.get("cache", 0.0),
        "phase": phase,
        "status": record["status"],
        **record["params"],
        "median_s": time.median,
        "q25_s": time.q25,
        "q75_s": time.q75,
        "lo_s": time.lo,
        "hi_s": time.hi,
        "samples": time.n,
        "stop_reason": record["stop_reason"],
        "ratio": pair.median if pair else math.nan,
        "ratio_lo": pair.lo if pair else math.nan,
        "ratio_hi": pair.hi if pair else math.nan,
        "ns_per_lookup": 1e9 * time.median / record["lookups"],
        "useful_gb_s": useful_bytes(record, phase) / time.median / 1e9,
        "distinct_gb_s": useful_bytes(record, phase, distinct=True) / time.median / 1e9,
        "lookups": record["lookups"],
        "unique_fraction": record["unique_rows"] / record["lookups"],
        "weights_bytes": record["weights_bytes"],
        "optimizer_state_bytes": record["optimizer_state_bytes"],
        "cache_bytes": record.get("cache_bytes", 0),
        "peak_bytes": record["peak_bytes"],
        "dense_bytes": record["dense_bytes"],
        "compression": compression(record),
        "lookup_hit_rate": hit_rate(record, "lookup"),
        "row_hit_rate": hit_rate(record, "row"),
        "rows_scale": record["rows_scale"],
        "reason": record["reason"],
    }


def hit_rate(record: Record, of: str) -> float:
    """Share of the lookups or of the distinct rows of the timed batches that a cache served."""
    counted = record.get("counters") or {}
    return counted[f"{of}_hits"] / counted[f"{of}s"] if counted.get(f"{of}s") else math.nan


def compression(record: Record) -> float:
    """Bytes of the same tables as plain float32 ÷ bytes of this contender's parameters."""
    return record["dense_bytes"] / record["weights_bytes"] if record["weights_bytes"] else math.nan
