"""The tables of a run: results of a section, machine and software, flags of the machine."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.config.sweep import SWEEP
from experiments.machine.ceilings import MeasuredCeilings
from experiments.machine.flags import explain, remedy
from experiments.report import notes, text
from experiments.report.answer import sweep_point
from experiments.report.data import Run
from experiments.report.tables import (
    Column,
    Table,
    Value,
    bytes_value,
    count_value,
    factor_value,
    number_value,
    percent_value,
    ratio_value,
    time_value,
)
from experiments.results.metrics import WEIGHT_BYTES


def section_table(run: Run, section: str) -> Table:
    """Return the table of one case, or of the sweep: one row per contender and cell.

    The run must be of one mode, and `run.table` must have rows of the section. A row of the table
    is computed from the row of the step in `run.table` (`results.metrics.frame` lists its columns)
    and from `forward_s`, the median seconds of the forward.
    """
    rows = run.results_of(section)
    measured_ceilings = MeasuredCeilings.from_environment(run.environment)
    is_sweep = section == SWEEP
    keys = ["cell", "arm"]
    forward = rows[rows["phase"] == "forward"].set_index(keys)["median_s"].rename("forward_s")
    columns: dict[str, Column] = {}
    if is_sweep:
        columns["point"] = lambda row: sweep_point(run, row)
    columns["contender"] = "label"
    if rows["row_hit_rate"].notna().any():
        columns["lookups served"] = lambda row: percent_value(row["lookup_hit_rate"])
        columns["rows served"] = lambda row: percent_value(row["row_hit_rate"])
    columns["forward"] = lambda row: time_value(row["forward_s"])
    columns["step"] = lambda row: time_value(row["median_s"])
    if rows["host_s"].notna().any():
        columns["host"] = lambda row: time_value(row["host_s"])
        columns["bound by"] = lambda row: (
            text.DASH
            if text.is_missing(row["host_s"])
            else ("host" if row["host_bound"] else "GPU")
        )
    columns[f"step ÷ {run.baseline.label} [95\u00a0%]"] = lambda row: ratio_value(
        row, is_baseline=row["arm"] == run.baseline.key
    )
    if (run.table["processes"].max() or 0) > 1:
        columns["verdict"] = lambda row: (
            "baseline"
            if row["arm"] == run.baseline.key
            else text.verdict(row["verdict"]) or text.DASH
        )
        # If all cells have the same number of processes, the subtitle of the page says it.
        if rows.loc[rows["status"] == "ok", "processes"].nunique() > 1:
            columns["processes"] = lambda row: count_value(row["processes"])
        columns["smallest effect shown"] = lambda row: (
            text.DASH
            if row["arm"] == run.baseline.key
            else Value.of(row["visible"], lambda value: f"±{100 * value:.1f} %")
        )
    columns["per lookup"] = lambda row: Value.of(
        row["ns_per_lookup"], lambda value: text.seconds(value / 1e9)
    )
    columns["useful GB/s"] = lambda row: number_value(row["useful_gb_s"])
    columns["distinct GB/s"] = lambda row: number_value(row["distinct_gb_s"])
    if measured_ceilings.gather_gb_s:  # bandwidth of random reads of rows of about this size
        columns["of gather"] = lambda row: percent_value(
            float(row["distinct_gb_s"]) / measured_ceilings.gather(WEIGHT_BYTES * float(row["D"]))
        )
    if rows["gflop_s"].notna().any():  # of the matrix products of tensor trains
        columns["GFLOP/s"] = lambda row: number_value(row["gflop_s"])
        columns["of sgemm"] = lambda row: percent_value(
            float(row["gflop_s"]) / measured_ceilings.sgemm_gflop_s
        )
    columns["parameters"] = lambda row: bytes_value(row["weights_bytes"])
    columns["compression"] = lambda row: Value.of(
        row["compression"], lambda value: "1×" if value == 1 else text.times(value)
    )
    columns["scratch"] = lambda row: bytes_value(row["peak_bytes"])
    if (pd.to_numeric(run.table["optimizer_state_bytes"]) > 0).any():
        columns["optimizer state"] = lambda row: bytes_value(row["optimizer_state_bytes"])
    steps = rows[rows["phase"] == "step"].join(forward, on=keys)
    return Table.of(steps, columns, num_label_columns=1 + is_sweep)


def environment_table(run: Run) -> Table:
    """Return the table of the run's machine and software, without headings or repeated rows."""
    rows = [
        [Value(key), Value(value)]
        for key, value in dict.fromkeys(flatten_environment(run.environment))
    ]
    return Table(["", ""], rows, is_plain=True)


def flags_table(run: Run) -> Table:
    """Return the table of the flags of steps: meaning, number of rows, remedy."""
    return Table.of(
        notes.flag_counts(run).items(),
        {
            "flag": lambda flag_count: flag_count[0],
            "what it means": lambda flag_count: explain(flag_count[0]),
            "rows": lambda flag_count: count_value(flag_count[1]),
            "what would help": lambda flag_count: remedy(flag_count[0]),
        },
    )


def flatten_environment(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Return (name, value in words) of the entries of a nested dictionary.

    A name is `prefix` and the keys from the outermost to the entry's, joined by spaces, with spaces
    for underscores. Bandwidths and matrix products have names of their own, the same at every
    level, so that a caller can recognise a second copy. None and [] are left out.
    """
    entries: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict):
            entries += flatten_environment(value, f"{name} ")
        elif key == "memory_bytes" and value:
            entries.append((name.replace(" bytes", ""), text.size(value)))
        elif key == "copy_gb_s" and value:
            entries.append(("copy bandwidth", f"{text.digits(value)} GB/s (read + write)"))
        elif key == "sgemm_gflop_s" and value:
            entries.append(("float32 matrix products", f"{text.digits(value)} GFLOP/s"))
        elif prefix.endswith("gather gb s "):
            entries.append((f"gather bandwidth, rows of {key} B", f"{text.digits(value)} GB/s"))
        elif value is not None and value != []:
            words = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            entries.append((name, words))
    return entries


def readme_table(run: Run) -> list[str]:
    """Return the lines of the headline's table in Markdown.

    The run must be of one mode, and its headline must have results.
    """
    rows = run.table[run.table["cell"] == run.headline_cell()]
    forward = rows[rows["phase"] == "forward"].set_index("arm")["median_s"].rename("forward_s")
    columns: dict[str, Column] = {
        "contender": "label",
        "forward": lambda row: time_value(row["forward_s"]),
        "step": lambda row: time_value(row["median_s"]),
        f"step ÷ {run.baseline.label}": lambda row: ratio_value(
            row, is_baseline=row["arm"] == run.baseline.key
        ),
        "parameters": lambda row: bytes_value(row["weights_bytes"]),
        "compression": lambda row: factor_value(row["compression"]),
    }
    steps = rows[rows["phase"] == "step"].join(forward, on="arm")
    return Table.of(steps, columns, num_label_columns=1).markdown().splitlines()
