"""The README's front-page table: FBGEMM's time ÷ emblib's, from the `cpu_peers` reference.

`tests/bench/cpu_peers.py` measures both libraries in one process, in alternating rounds. A cell of
the table is the median over the rounds. Ties and losses stay in the table and are marked; so is
each cell that a second reference, `optimizer_steps`, contradicts.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.paths import REFERENCE
from experiments.timing.statistics import Summary, summarise

START, END = "<!-- peers:start -->", "<!-- peers:end -->"
DEVICE = "amd-epyc-2-threads"
SHAPES = {
    "A": "1 table × 1,000,000 rows × 128 columns, 2,048 bags of 20 ids, uniform",
    "B": "26 tables × 100,000 rows × 64 columns, 2,048 bags of 1 id per table, uniform",
    "C": "10 tables × 1,000,000 rows × 64 columns, 512 bags of 20 ids per table, Zipf 1.15",
}
THREADS = (1, 2)
# (phase, variant, optimizer) of cpu_peers -> the row's title.
WORK = {
    ("forward", "fp32", "sgd"): "forward, fp32",
    ("step", "fp32", "sgd"): "step, fp32, SGD",
    ("step", "fp32", "rowwise_adagrad"): "step, fp32, row-wise Adagrad",
    ("forward", "fp16", "sgd"): "forward, fp16",
    ("step", "fp16", "sgd"): "step, fp16, SGD",
    ("forward", "sequence", "sgd"): "forward, fp32, no pooling",
    ("step", "sequence", "sgd"): "step, fp32, SGD, no pooling",
}
# The same step in optimizer_steps, where it was measured there too.
OPTIONS = {
    ("step", "fp32", "sgd"): "SGD",
    ("step", "fp32", "rowwise_adagrad"): "rowwise Adagrad",
    ("step", "fp16", "sgd"): "SGD, fp16",
}
DISAGREEMENT = 1.25  # ratio between the two references beyond which a cell is marked

Key = tuple[str, str, str, str, int]  # phase, variant, optimizer, shape, threads


def ratios(folder: Path = REFERENCE / DEVICE) -> dict[Key, Summary]:
    """Return FBGEMM's time ÷ emblib's per measured point, paired by round."""
    rows: list[dict[str, Any]] = json.loads((folder / "cpu_peers/cpu_peers.json").read_text())[
        "rows"
    ]
    return {
        (row["phase"], row["variant"], row["optimizer"], row["case"], row["threads"]): summarise(
            [
                peer / emblib
                for peer, emblib in zip(
                    row["samples"]["peer"], row["samples"]["emblib"], strict=True
                )
            ]
        )
        for row in rows
        if row["peer"] == "fbgemm"
    }


def second_opinions(folder: Path = REFERENCE / DEVICE) -> dict[Key, float]:
    """Return the same ratio from the `optimizer_steps` reference, for the points it contains."""
    with (folder / "optimizer_steps/optimizer_steps.csv").open(newline="") as file:
        measured = {
            (row["option"], row["case"], int(row["threads"])): float(row["ratio"])
            for row in csv.DictReader(file)
            if row["contender"] == "fbgemm" and row["status"] == "ok" and row["ratio"]
        }
    return {
        (*work, shape, threads): measured[option, shape, threads]
        for work, option in OPTIONS.items()
        for shape in SHAPES
        for threads in THREADS
        if (option, shape, threads) in measured
    }


def cell(ratio: Summary, second: float | None) -> str:
    """Format one ratio; mark ties (the interval contains 1), losses and contradicted values."""
    word = " (tie)" if ratio.lo <= 1 <= ratio.hi else " (slower)" if ratio.median < 1 else ""
    return f"{ratio.median:.2f}×{word}{' †' if _contradicts(ratio, second) else ''}"


def _contradicts(ratio: Summary, second: float | None) -> bool:
    if second is None:
        return False
    return max(second / ratio.median, ratio.median / second) > DISAGREEMENT


def table(measured: Mapping[Key, Summary], second: Mapping[Key, float]) -> str:
    """Return the Markdown table and the notes that explain its marks."""
    columns = [(shape, threads) for shape in SHAPES for threads in THREADS]
    heads = [f"{shape}, {threads} thread{'s' * (threads > 1)}" for shape, threads in columns]
    lines = [
        f"| FBGEMM's time ÷ emblib's | {' | '.join(heads)} |",
        f"| --- |{' ---: |' * len(heads)}",
    ]
    for work, title in WORK.items():
        keys = [(*work, *column) for column in columns]
        cells = [cell(measured[key], second.get(key)) for key in keys]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines += ["", *(f"- {shape}: {words}." for shape, words in SHAPES.items())]
    marked = [key for key in measured if _contradicts(measured[key], second.get(key))]
    if marked:
        listed = ", ".join(
            f"{second[key]:.2f}× ({WORK[key[:3]]}, {key[3]}, {key[4]} thread{'s' * (key[4] > 1)})"
            for key in marked
        )
        lines.append(f"- † The second reference, `optimizer_steps`, has other values: {listed}.")
    return "\n".join(lines)


def rendered(readme: str, folder: Path = REFERENCE / DEVICE) -> str:
    """Return the README's text with the table between the markers replaced."""
    if readme.count(START) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must contain {START} and {END} once each")
    before, rest = readme.split(START)
    block = table(ratios(folder), second_opinions(folder))
    return f"{before}{START}\n{block}\n{END}{rest.split(END)[1]}"
