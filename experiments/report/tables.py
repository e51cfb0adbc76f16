"""Tables of a run as rows of text, rendered once for Markdown and once for the web."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.config.sweep import SWEEP
from experiments.report import text
from experiments.report.answer import where
from experiments.report.data import Run


@dataclass(frozen=True)
class Value:
    """A table entry: what is shown, and the number it sorts by."""

    shown: str
    key: float = math.nan


@dataclass(frozen=True)
class Table:
    """Column headings and rows."""

    heads: Sequence[str]
    rows: Sequence[Sequence[Value]]

    def markdown(self) -> str:
        """A GitHub table; numbers to the right."""
        lines = [list(self.heads), ["---", *["---:"] * (len(self.heads) - 1)]]
        lines += [[v.shown.replace("|", "\\|") for v in row] for row in self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def html(self) -> str:
        """A sortable table."""
        heads = "".join(
            f'<th scope="col"><button type="button">{html.escape(h)}</button></th>'
            for h in self.heads
        )
        body = "\n".join(
            "<tr>" + "".join(_cell(n, v) for n, v in enumerate(row)) + "</tr>" for row in self.rows
        )
        return (
            '<div class="scroll"><table class="sortable"><thead><tr>'
            f"{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
        )


def _cell(column: int, value: Value) -> str:
    key = "" if math.isnan(value.key) else f' data-key="{value.key:.6g}"'
    tag = 'th scope="row"' if column == 0 else "td"
    return f"<{tag}{key}>{html.escape(value.shown)}</{tag[:2]}>"


def section_table(run: Run, section: str) -> Table:
    """One case, or the sweep: a row per contender and cell."""
    rows = run.of(section)
    sweep = section == SWEEP
    has_cache = rows["row_hit_rate"].notna().any()
    heads = [*(["point"] if sweep else []), "contender"]
    heads += ["lookups served", "rows served"] if has_cache else []
    heads += ["forward", "step"]
    heads += [f"step ÷ {run.baseline.label} [95 %]", "per lookup", "useful GB/s", "parameters"]
    heads += ["compression", "scratch"]
    has_state = (run.table["optimizer_state_bytes"].fillna(0) > 0).any()
    heads += ["optimizer state"] if has_state else []
    lines = []
    for (_, _), pair in rows.groupby(["cell", "arm"], sort=False):
        phases = {str(r["phase"]): r for _, r in pair.iterrows()}
        step = phases["step"]
        line = _line(phases["forward"], step, run.baseline.key)
        line += [_bytes(step["optimizer_state_bytes"])] if has_state else []
        if has_cache:
            line[1:1] = [_share(step[f"{k}_hit_rate"]) for k in ("lookup", "row")]
        lines.append([Value(where(run, step)), *line] if sweep else line)
    return Table(heads, lines)


def _line(forward: pd.Series, step: pd.Series, baseline: str) -> list[Value]:
    if step["status"] != "ok":
        blank = [Value(text.NONE)] * 7
        return [Value(str(step["label"])), Value(str(step["status"])), *blank]
    ratio = f"{text.times(step['ratio'])} {text.interval(step['ratio_lo'], step['ratio_hi'])}"
    if text.missing(step["ratio"]):
        ratio = text.NONE
    elif step["arm"] == baseline:
        ratio = "1"
    return [
        Value(str(step["label"])),
        Value(text.seconds(forward["median_s"]), forward["median_s"]),
        Value(text.seconds(step["median_s"]), step["median_s"]),
        Value(ratio, step["ratio"]),
        Value(text.seconds(step["ns_per_lookup"] / 1e9), step["ns_per_lookup"]),
        Value(text.digits(step["useful_gb_s"]), step["useful_gb_s"]),
        _bytes(step["weights_bytes"]),
        Value(_compression(step["compression"]), step["compression"]),
        _bytes(step["peak_bytes"]),
    ]


def _share(value: float) -> Value:
    return Value(text.NONE if text.missing(value) else f"{text.digits(100 * value)} %", 100 * value)


def _bytes(value: float | None) -> Value:
    known = math.nan if value is None else float(value)
    return Value(text.size(known), known)


def _compression(value: float) -> str:
    return "1×" if value == 1 else text.times(value)


def failures_table(run: Run) -> Table:
    """Contenders without a measurement, and why."""
    rows = [
        [Value(r["label"]), Value(r["cell"]), Value(r["status"]), Value(r["reason"])]
        for r in run.failures()
    ]
    return Table(["contender", "cell", "status", "reason"], rows)


def environment_table(run: Run) -> Table:
    """Provenance as name and value."""
    return Table(["", ""], [[Value(k), Value(v)] for k, v in flatten(run.environment)])


def flatten(tree: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested names joined by spaces, values in readable units, what is unknown left out."""
    found: list[tuple[str, str]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}".replace("_", " ")
        if isinstance(value, dict):
            found += flatten(value, f"{name} ")
        elif key == "memory_bytes" and value:
            found.append((name.replace(" bytes", ""), text.size(value)))
        elif key == "copy_gb_s" and value:
            found.append(("copy bandwidth", f"{text.digits(value)} GB/s (read + write)"))
        elif value is not None and value != []:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            found.append((name, shown))
    return found
