"""Numbers of a model's tables for monitoring: as Prometheus text, and as lines of a CSV file.

`prometheus_text` has the numbers of dynamic tables with their tiers, of caches of dense tables, and
of caches of tensor-train tables; `append_csv` has those of dynamic tables only. No function here
communicates with other ranks: each rank exports its shards, under a label with the rank, and the
monitoring system adds up their numbers. Reading counters waits for the device, so call these
functions from time to time, not in every step.
"""

from __future__ import annotations

import csv
import io
import math
import operator
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, SupportsIndex

from torch import nn

from emblib.collections.groups import TableGroups
from emblib.dynamic.cached_tt import CachedTTEmbeddingBags
from emblib.dynamic.statistics import AGE_BOUNDS, AgeHistogram, TableStatistics
from emblib.sharding.dense import unwrapped
from emblib.tables import TableBatchedEmbeddingBags
from emblib.tables.durable_files import saving

__all__ = ["append_csv", "local_statistics", "prometheus_text", "write_textfile"]

Labels = Mapping[str, str | int]
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")
_RESERVED_LABELS = ("module", "table", "reason", "le")
AGE_METRIC = "emblib_eviction_age_steps"


def local_statistics(model: nn.Module) -> dict[tuple[str, str], TableStatistics]:
    """Return the numbers of the dynamic tables of a model on this rank, by module path and name.

    If `model` is a `DistributedModelParallel`, paths begin within it, so they are the same as
    without ranks. The numbers of a sharded table are sums over the shards of this rank; a table
    without a shard on this rank is left out.

    Example:
        >>> table = emblib.DynamicSpec(capacity=32, dim=4, name="item")
        >>> model = torch.nn.ModuleDict({"bags": emblib.DynamicEmbeddingBags([table])})
        >>> numbers = emblib.telemetry.local_statistics(model)
        >>> numbers["bags", "item"].rows
        32
    """
    statistics: dict[tuple[str, str], TableStatistics] = {}
    paths: list[str] = []
    for path, module in unwrapped(model).named_modules():
        is_covered = any(not outer or path.startswith(f"{outer}.") for outer in paths)
        if is_covered or not hasattr(module, "table_handles"):
            continue
        paths.append(path)
        for name, handle in module.table_handles().items():
            if handle.shards:
                statistics[path, name] = handle.local.statistics()
    return statistics


def prometheus_text(model: nn.Module, labels: Labels | None = None) -> str:
    """Return the numbers of dynamic tables and caches in the Prometheus text format, version 0.0.4.

    Metrics are described in docs/operations.md. Serve it as `text/plain; version=0.0.4`.

    Args:
        model: a module of tables, or a model with some, also a `DistributedModelParallel`.
        labels: names and values of labels of all samples, e.g. `{"rank": "0"}`; None for none.

    Raises:
        TypeError: the value of a label is neither a string nor an int.
        ValueError: a label has a name that Prometheus refuses, or one that emblib uses: module,
            table, reason, le.

    Example:
        >>> table = emblib.DynamicSpec(capacity=32, dim=4, name="item")
        >>> bags = emblib.DynamicEmbeddingBags([table])
        >>> text = emblib.telemetry.prometheus_text(bags, {"rank": "0"})
        >>> print(next(line for line in text.splitlines() if line.startswith("emblib_rows")))
        emblib_rows{rank="0",module="",table="item"} 32
    """
    labels = _check_labels(labels)
    metrics: dict[str, _Metric] = {}
    for (path, table), statistics in local_statistics(model).items():
        _add_dynamic_table(metrics, {**labels, "module": path, "table": table}, statistics)
    path_by_module: dict[Any, str] = {}  # a shared table counts at its first collection
    for path, module in unwrapped(model).named_modules():
        path_by_module.setdefault(module, path)
        if isinstance(module, TableGroups):  # whose modules of tables are not submodules
            shared_modules = [table.module for table in module.shared_slices()]
            for tables in (*module.table_modules(), *shared_modules):
                path_by_module.setdefault(tables, path)
    for module, path in path_by_module.items():
        _add_cache(metrics, {**labels, "module": path}, module)
    return "".join(line for metric in metrics.values() for line in metric.lines())


def _check_labels(labels: Labels | None) -> dict[str, str]:
    """Return labels with their values as text; raise as `prometheus_text` does."""
    label_texts = {}
    for name, value in ({} if labels is None else dict(labels)).items():
        if not isinstance(name, str) or not _LABEL_NAME.fullmatch(name) or name in _RESERVED_LABELS:
            raise ValueError(
                "a label is letters, digits and _, without __ in front, and none of "
                f"{', '.join(_RESERVED_LABELS)}; got {name!r}"
            )
        if not isinstance(value, str | SupportsIndex):
            raise TypeError(f"the label {name!r} must be a string or an int, got {value!r}")
        label_texts[name] = value if isinstance(value, str) else str(operator.index(value))
    return label_texts


def write_textfile(model: nn.Module, path: str | Path, labels: Labels | None = None) -> None:
    """Write `prometheus_text` to a file, as the textfile collector of node_exporter reads it.

    The file is replaced at once, so a reader sees all of the old or all of the new text. Give each
    rank a file of its own; the collector reads names that end in `.prom`.

    Raises:
        OSError: the file cannot be written, then the old one stays; or the path is a device, pipe
            or directory, which cannot be replaced.
        TypeError, ValueError: labels, see `prometheus_text`.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file: a textfile replaces it; name another path")
    text = prometheus_text(model, labels)
    with saving(path) as file:
        file.write(text.encode())


# The metrics


@dataclass
class _Metric:
    """A metric of the text format.

    Attributes:
        name: name of the metric.
        metric_type: "counter", "gauge" or "histogram".
        help_text: description, one line.
        samples: value of each sample, by (suffix of the name, labels).
    """

    name: str
    metric_type: str
    help_text: str
    samples: dict[tuple[str, tuple[tuple[str, str], ...]], float] = field(default_factory=dict)

    def add(self, labels: Mapping[str, str], value: float, suffix: str = "") -> None:
        """Add a value to a sample, because slices of one table may be in several modules."""
        key = suffix, tuple(labels.items())
        self.samples[key] = self.samples.get(key, 0) + value

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text format, each with its line break."""
        yield f"# HELP {self.name} {_escape(self.help_text)}\n"
        yield f"# TYPE {self.name} {self.metric_type}\n"
        for (suffix, labels), value in self.samples.items():
            texts = [f'{name}="{_escape(label, quotes=True)}"' for name, label in labels]
            yield f"{self.name}{suffix}{{{','.join(texts)}}} {_format_number(value)}\n"


def _escape(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text


def _format_number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


_COUNTERS = {
    "lookups": "Lookups of training batches.",
    "hits": "Lookups whose key had a row.",
    "inserted": "Keys that got a row.",
    "evicted": "Keys that were evicted by new ones.",
    "expired": "Keys that were removed because of their age.",
    "erased": "Keys that were removed by a call.",
    "reinserted": "Inserted keys that are remembered as evicted.",
}
_GAUGES = {
    "keys": "Keys in the table, in the fast tier.",
    "rows": "Rows in use.",
    "capacity": "Maximum number of rows.",
    "nbytes": "Bytes of the rows in use, with optimizer states and index.",
    "load": "Keys per row in use.",
}
_GAUGE_NAMES = {"capacity": "capacity_rows", "nbytes": "table_bytes", "load": "load_ratio"}
_TIER_COUNTERS = {
    "backing_hits": "Missing keys that were in the backing store.",
    "prefetched": "Backing hits whose rows had been prefetched.",
    "new": "Missing keys that were in neither tier.",
    "promoted": "Rows moved from the backing store to the fast tier.",
    "demoted": "Rows moved from the fast tier to the backing store.",
    "served_in_place": "Rows read and trained in the backing store.",
    "dropped": "Rows dropped by a full backing store.",
}
_CACHE_COUNTERS = {
    "lookups": "Lookups of cached tables.",
    "lookup_misses": "Lookups of rows that were not in the cache.",
    "unique": "Distinct rows per batch.",
    "unique_misses": "Distinct rows per batch that were not in the cache.",
    "conflict_unique_misses": "Distinct rows per batch that found no way in the cache.",
    "conflict_misses": "Lookups of rows that found no way in the cache.",
    "write_backs": "Evicted rows.",
}
_TT_CACHE_COUNTERS = {
    "lookups": "Lookups of tensor-train tables with a cache.",
    "hits": "Lookups whose row was stored.",
    "spill_hits": "Lookups whose row was spilled.",
    "evicted": "Rows that left the stored rows for the cores.",
}


def _add_sample(
    metrics: dict[str, _Metric],
    name: str,
    help_text: str,
    labels: Mapping[str, str],
    value: float | None,
) -> None:
    """Add a value to a sample, unless it is None; names that end in `_total` are counters."""
    if value is None:
        return
    metric_type = "counter" if name.endswith("_total") else "gauge"
    metrics.setdefault(name, _Metric(name, metric_type, help_text)).add(labels, value)


def _add_dynamic_table(
    metrics: dict[str, _Metric], labels: dict[str, str], statistics: TableStatistics
) -> None:
    """Add the numbers of a dynamic table to the metrics."""
    text = "Training forwards."
    _add_sample(metrics, "emblib_training_steps_total", text, labels, statistics.step)
    for name, text in _GAUGES.items():
        value = getattr(statistics, name)
        _add_sample(metrics, f"emblib_{_GAUGE_NAMES.get(name, name)}", text, labels, value)
    for name, text in _COUNTERS.items():
        unit = "" if name in ("lookups", "hits") else "_keys"
        _add_sample(metrics, f"emblib_{name}{unit}_total", text, labels, getattr(statistics, name))
    for reason, num_keys, num_lookups in (
        ("no_slot", statistics.refused, statistics.refused_lookups),
        ("admission", statistics.not_admitted, statistics.not_admitted_lookups),
    ):
        reason_labels = {**labels, "reason": reason}
        text = "Keys per batch that got no row."
        _add_sample(metrics, "emblib_refused_keys_total", text, reason_labels, num_keys)
        text = "Lookups of keys that got no row."
        _add_sample(metrics, "emblib_refused_lookups_total", text, reason_labels, num_lookups)
    if statistics.eviction_ages is not None:
        _add_ages(metrics, labels, statistics.eviction_ages)
    if statistics.tiers is not None:
        for name, text in _TIER_COUNTERS.items():
            value = getattr(statistics.tiers, name)
            _add_sample(metrics, f"emblib_tier_{name}_total", text, labels, value)


def _add_ages(metrics: dict[str, _Metric], labels: dict[str, str], ages: AgeHistogram) -> None:
    """Add a histogram of ages, with cumulative buckets, to the metrics."""
    text = "Steps from the last use of evicted keys to their eviction."
    metric = metrics.setdefault(AGE_METRIC, _Metric(AGE_METRIC, "histogram", text))
    num_keys = 0
    for bound, count in zip((*AGE_BOUNDS, math.inf), ages.counts, strict=True):
        num_keys += count
        metric.add({**labels, "le": _format_number(float(bound))}, num_keys, "_bucket")
    metric.add(labels, ages.total_age, "_sum")
    metric.add(labels, num_keys, "_count")


def _add_cache(metrics: dict[str, _Metric], labels: dict[str, str], module: nn.Module) -> None:
    """Add the counters of the cache of one module, by table."""
    stats_by_table: Mapping[str, Any] = {}
    prefix, help_texts = "emblib_cache", _CACHE_COUNTERS
    if isinstance(module, TableBatchedEmbeddingBags) and module.row_cache is not None:
        stats_by_table = module.cache_stats().tables
    elif isinstance(module, CachedTTEmbeddingBags):
        stats_by_table = module.cache_stats().tables
        prefix, help_texts = "emblib_tt_cache", _TT_CACHE_COUNTERS
        for table, stats in stats_by_table.items():
            table_labels = {**labels, "table": table}
            text = "Stored rows that are not in the cache."
            _add_sample(metrics, "emblib_tt_cache_spilled_rows", text, table_labels, stats.spilled)
    for table, stats in stats_by_table.items():
        for name, text in help_texts.items():
            table_labels = {**labels, "table": table}
            _add_sample(metrics, f"{prefix}_{name}_total", text, table_labels, getattr(stats, name))


# The CSV file, a series of numbers over time

_KEY_COLUMNS = ("time_s", "labels", "module", "table")  # the columns before the numbers of a table
_AGE_PREFIX = "age_"  # of a column; the largest age of the bin follows


def csv_columns() -> list[str]:
    """Return the columns of the CSV file: time, labels, module, table, numbers, bins of ages."""
    number_columns = ["step", *_GAUGES, *_COUNTERS, "refused", "not_admitted"]
    lookup_columns = ["refused_lookups", "not_admitted_lookups"]
    age_columns = [f"{_AGE_PREFIX}{_format_number(bound)}" for bound in (*AGE_BOUNDS, math.inf)]
    return [*_KEY_COLUMNS, *number_columns, *lookup_columns, *age_columns]


def append_csv(
    model: nn.Module,
    path: str | Path,
    labels: Labels | None = None,
    time_s: float | None = None,
) -> None:
    """Append one line per dynamic table to a CSV file, which `python run.py statistics` draws.

    Counts are totals since the last reset of statistics; numbers that a table does not count are
    empty. Give each rank a file of its own.

    Args:
        model: a module of tables, or a model with some, also a `DistributedModelParallel`.
        path: the file; a new or empty one gets a line of column names.
        labels: names and values of labels of the lines, which share a column, as `rank=0;host=a`;
            None for none.
        time_s: time in seconds since 1970; None is now.

    Raises:
        OSError: the file cannot be written; an existing one then stays as it was.
        TypeError: the value of a label is neither a string nor an int.
        ValueError: the file has other columns; or a label has a name that `prometheus_text` refuses
            or a value with ";".
    """
    path, columns = Path(path), csv_columns()
    new_lines = io.StringIO()
    writer = csv.writer(new_lines, lineterminator="\n")
    num_bytes = path.stat().st_size if path.exists() else 0
    if num_bytes:
        with path.open("rb") as file:
            (header,) = csv.reader([file.readline().decode()])
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":  # a process ended within a line
                new_lines.write("\n")
        if header != columns:
            raise ValueError(f"{path} has other columns, {header}: name another file")
    else:
        writer.writerow(columns)
    seconds = time.time() if time_s is None else float(time_s)
    label_texts = [f"{name}={value}" for name, value in _check_labels(labels).items()]
    if any(";" in label_text for label_text in label_texts):
        raise ValueError(f"';' separates the labels of a series, so none may contain it: {labels}")
    for (module, table), statistics in local_statistics(model).items():
        writer.writerow([seconds, ";".join(label_texts), module, table, *_csv_numbers(statistics)])
    try:
        with path.open("a", newline="", encoding="utf-8") as file:
            file.write(new_lines.getvalue())
    except OSError:  # e.g. a full disk: no part of a line stays
        if path.is_file():
            os.truncate(path, num_bytes)
        raise


def _csv_numbers(statistics: TableStatistics) -> Sequence[Any]:
    """Return the values of the columns after `_KEY_COLUMNS`, "" where a table has no number."""
    names = csv_columns()[len(_KEY_COLUMNS) :]
    ages = statistics.eviction_ages
    numbers = [getattr(statistics, name) for name in names if not name.startswith(_AGE_PREFIX)]
    age_counts: Sequence[Any] = [None] * (len(AGE_BOUNDS) + 1) if ages is None else ages.counts
    return ["" if value is None else value for value in (*numbers, *age_counts)]
