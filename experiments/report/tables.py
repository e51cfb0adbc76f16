"""Tables of a run as rows of text, rendered once for Markdown and once for the web."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from experiments.config.sweep import SWEEP
from experiments.machine.ceilings import Roofs
from experiments.machine.flags import explain, remedy
from experiments.report import notes, text
from experiments.report.answer import where
from experiments.report.data import Run
from experiments.results.metrics import WEIGHT_BYTES

FILTERED = 8  # rows from which on a table can be filtered


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
        lines += [
            [" ".join(v.shown.replace("|", "\\|").split("\n")) for v in row] for row in self.rows
        ]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def html(self) -> str:
        """A sortable table; a long one can be filtered."""
        words = [self._is_text(column) for column in range(len(self.heads))]
        heads = "".join(
            f'<th scope="col"{" class=text" * is_text}><button type="button">{html.escape(h)}'
            "</button></th>"
            for h, is_text in zip(self.heads, words, strict=True)
        )
        body = "\n".join(
            "<tr>" + "".join(_cell(n, v, is_text=words[n]) for n, v in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        search = (
            '<input type=search class=filter placeholder="filter rows, e.g. D=64 TT" '
            'aria-label="Show only rows that contain these words">'
        )
        return (
            f"<div class=table>{search * (len(self.rows) >= FILTERED)}"
            '<div class="scroll"><table class="sortable"><thead><tr>'
            f"{heads}</tr></thead><tbody>\n{body}\n</tbody></table></div></div>"
        )

    def _is_text(self, column: int) -> bool:
        """Words rather than numbers: nothing in the column has a number to sort by."""
        return all(math.isnan(row[column].key) for row in self.rows)


LONG = 40  # characters from which on a cell may break into lines


def _cell(column: int, value: Value, *, is_text: bool) -> str:
    key = "" if math.isnan(value.key) else f' data-key="{value.key:.6g}"'
    kind = f' class="text{" long" * (len(value.shown) > LONG)}"' if is_text else ""
    tag = 'th scope="row"' if column == 0 else "td"
    return f"<{tag}{kind}{key}>{html.escape(value.shown)}</{tag[:2]}>"


def section_table(run: Run, section: str) -> Table:
    """One case, or the sweep: a row per contender and cell of a run of one mode."""
    rows = run.of(section)
    sweep = section == SWEEP
    has_cache = rows["row_hit_rate"].notna().any()
    has_state = (run.table["optimizer_state_bytes"].fillna(0) > 0).any()
    has_verdict = (run.table["processes"].max() or 0) > 1
    has_gather = bool(Roofs.of(run.environment).gather_gb_s)
    heads = [*(["point"] if sweep else []), "contender"]
    heads += ["lookups served", "rows served"] if has_cache else []
    heads += ["forward", "step", f"step ÷ {run.baseline.label} [95\u00a0%]"]
    heads += ["verdict", "processes", "visible from"] if has_verdict else []
    heads += ["per lookup", "useful GB/s", "distinct GB/s"]
    heads += ["of gather"] if has_gather else []
    heads += ["parameters", "compression", "scratch"]
    heads += ["optimizer state"] if has_state else []
    lines = []
    for (_, _), pair in rows.groupby(["cell", "arm"], sort=False):
        phases = {str(r["phase"]): r for _, r in pair.iterrows()}
        step = phases["step"]
        line = [Value(where(run, step))] if sweep else []
        line.append(Value(str(step["label"])))
        if step["status"] != "ok":
            line.append(Value(str(step["status"])))
            lines.append(line + [Value(text.NONE)] * (len(heads) - len(line)))
            continue
        line += [_share(step[f"{k}_hit_rate"]) for k in ("lookup", "row")] if has_cache else []
        line += [Value(text.seconds(p["median_s"]), p["median_s"]) for p in phases.values()]
        line += [_ratio(step, run.baseline.key)]
        line += _verdict(step, run.baseline.key) if has_verdict else []
        line += _speed(step)
        line += [_share(_of_gather(run, step))] if has_gather else []
        line += _memory(step)
        line += [_bytes(step["optimizer_state_bytes"])] if has_state else []
        lines.append(line)
    return Table(heads, lines)


def _ratio(step: pd.Series, baseline: str) -> Value:
    if text.missing(step["ratio"]):
        return Value(text.NONE)
    if step["arm"] == baseline:
        return Value("1", 1.0)
    shown = f"{text.times(step['ratio'])} {text.interval(step['ratio_lo'], step['ratio_hi'])}"
    return Value(shown, step["ratio"])


def _verdict(step: pd.Series, baseline: str) -> list[Value]:
    """What the processes say together, how many they are, what they could have seen."""
    count = Value(f"{step['processes']:.0f}", float(step["processes"]))
    if step["arm"] == baseline:
        return [Value("baseline"), count, Value(text.NONE)]
    visible = float(step["visible"])
    smallest = (
        Value(text.NONE) if math.isnan(visible) else Value(f"±{100 * visible:.1f} %", visible)
    )
    return [Value(text.verdict(step["verdict"]) or text.NONE), count, smallest]


def _speed(step: pd.Series) -> list[Value]:
    return [
        Value(text.seconds(step["ns_per_lookup"] / 1e9), step["ns_per_lookup"]),
        Value(text.digits(step["useful_gb_s"]), step["useful_gb_s"]),
        Value(text.digits(step["distinct_gb_s"]), step["distinct_gb_s"]),
    ]


def _memory(step: pd.Series) -> list[Value]:
    return [
        _bytes(step["weights_bytes"]),
        Value(_compression(step["compression"]), step["compression"]),
        _bytes(step["peak_bytes"]),
    ]


def _of_gather(run: Run, step: pd.Series) -> float:
    """Distinct bytes as a share of the gather bandwidth measured for rows of about this size."""
    gather = Roofs.of(run.environment).gather(WEIGHT_BYTES * float(step["D"]))
    return float(step["distinct_gb_s"]) / gather


def _share(value: float) -> Value:
    return Value(text.NONE if text.missing(value) else f"{text.digits(100 * value)} %", 100 * value)


def _bytes(value: float | None) -> Value:
    known = math.nan if value is None else float(value)
    return Value(text.size(known), known)


def _compression(value: float) -> str:
    return "1×" if value == 1 else text.times(value)


def environment_table(run: Run) -> Table:
    """Provenance as name and value."""
    return Table(
        ["", ""], [[Value(k), Value(v)] for k, v in dict.fromkeys(flatten(run.environment))]
    )


def flags_table(run: Run) -> Table:
    """What was not as it should be for measuring, and what would help."""
    rows = [
        [Value(flag), Value(explain(flag)), Value(f"{n}", float(n)), Value(remedy(flag))]
        for flag, n in notes.flag_counts(run).items()
    ]
    return Table(["flag", "what it means", "rows", "what would help"], rows)


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
            shown = f"{text.digits(value)} GB/s (read + write)"
            found += [("copy bandwidth", shown)] * (("copy bandwidth", shown) not in found)
        elif prefix.endswith("gather gb s "):
            found.append((f"gather bandwidth, rows of {key} B", f"{text.digits(value)} GB/s"))
        elif value is not None and value != []:
            shown = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            found.append((name, shown))
    return found


def readme_table(run: Run) -> list[str]:
    """Return the headline's table as it stands in the README."""
    lines = [
        f"| contender | forward | step | step ÷ {run.baseline.label} | parameters | compression |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows = run.table[run.table["cell"] == run.headline_cell()]
    for _, pair in rows.groupby("arm", sort=False):
        phases = {str(r["phase"]): r for _, r in pair.iterrows()}
        step, forward = phases["step"], phases["forward"]
        if step["status"] != "ok":
            lines.append(f"| {step['label']} | {step['status']} | – | – | – | – |")
            continue
        ratio = f"{text.times(step['ratio'])} {text.interval(step['ratio_lo'], step['ratio_hi'])}"
        lines.append(
            f"| {step['label']} | {text.seconds(forward['median_s'])} "
            f"| {text.seconds(step['median_s'])} "
            f"| {'1' if step['arm'] == run.baseline.key else ratio} "
            f"| {text.size(step['weights_bytes'])} | {text.times(step['compression'])} |"
        )
    return lines
