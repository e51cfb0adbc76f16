"""Report the outcome of every contender in every cell: a map, a table and a sentence of failures.

A failure is any status but "ok": "partly", "unsupported" and "missing" too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pandas as pd

from experiments.report import text
from experiments.report.charts import Square, squares
from experiments.report.data import Run
from experiments.report.style import STATUS_COLOURS, Figure, Panel
from experiments.report.tables import Table, Value
from experiments.results.metrics import mode_of, replicate_of

STATUS_MEANINGS = {
    "ok": "measured",
    "partly": "measured in only some of its processes",
    "oom": "out of memory",
    "timeout": "no progress within the time limit",
    "wrong": "its result differs from the reference",
    "error": "failed",
    "missing": "a package is not installed",
    "unsupported": "the contender does not offer this",
}
STATUS_LABELS = {"ok": "✓", "partly": "½", "oom": "oom", "timeout": "time", "unsupported": "n/a"}
"""Labels of squares of the map by status; a status without an entry is its own label."""
OK_OPACITY, FAILURE_OPACITY = 0.25, 0.6  # of the map's squares; failures are more opaque


def outcome_frame(run: Run) -> pd.DataFrame:
    """Return one row per contender, cell and mode, with its outcome over all processes.

    Records must have the keys cell, arm, label, status and reason; not checked, and a record
    without status counts as a failure. The keys mode and replicate are optional. Of a repeated
    process the last record counts.

    Returns:
        A frame with the columns
            cell, arm, label: strings; `arm` is the key of the contender, `label` its name.
            status: a key of `STATUS_MEANINGS`, or a status of a newer harness.
            reason: the distinct reasons of all failures, joined; "" without failures. In an outcome
                "partly", the status precedes each reason.
            mode: a string.
            process: the lowest number of a process, an int.
            num_ok: number of processes with status "ok".
            num_processes: number of processes.
    """
    columns = ["cell", "arm", "label", "status", "reason"]
    frame = pd.DataFrame(run.records, columns=columns, dtype=object)
    frame["mode"] = [mode_of(record) for record in run.records]
    frame["process"] = [replicate_of(record) for record in run.records]
    keys = ["cell", "arm", "mode"]
    last_records = frame.drop_duplicates([*keys, "process"], keep="last")
    # A repeated process has a late record.
    last_records = last_records.sort_values("process", kind="stable")
    rows = [_combine_processes(group) for _, group in last_records.groupby(keys, sort=False)]
    return pd.DataFrame(rows, columns=[*frame, "num_ok", "num_processes"])


def _combine_processes(process_rows: pd.DataFrame) -> dict[str, Any]:
    """Combine the rows of a contender's processes in one cell and mode into one row.

    `process_rows` has one row per process, in their order. One "wrong" process makes the outcome
    "wrong". Otherwise it is "ok", "partly", or, if all failed, the failure of the first process.
    """
    # Plain strings instead of operations on columns: the dtype of a text column, above all of an
    # empty one, depends on the release of pandas and on pyarrow.
    outcomes = zip(process_rows["status"], process_rows["reason"], strict=True)
    failures = [
        (status, "" if text.is_missing(reason) else str(reason))
        for status, reason in outcomes
        if status != "ok"
    ]
    statuses, reasons = [status for status, _ in failures], [reason for _, reason in failures]
    if "wrong" in statuses:
        status = "wrong"
    elif len(failures) < len(process_rows):
        status = "partly" if failures else "ok"
        reasons = [f"{status}: {reason}" for status, reason in failures]
    else:
        status = statuses[0]
    counts = {"num_ok": len(process_rows) - len(failures), "num_processes": len(process_rows)}
    return {
        **process_rows.iloc[0],
        "status": status,
        "reason": "; ".join(dict.fromkeys(reasons)),
        **counts,
    }


def outcome_figures(run: Run) -> list[Figure]:
    """Draw a map of all outcomes, with one panel per mode. Return no figure if all are "ok"."""
    results = outcome_frame(run)
    statuses = set(results["status"])
    if statuses <= {"ok"}:
        return []
    legend = "; ".join(
        f"{status}: {meaning}" for status, meaning in STATUS_MEANINGS.items() if status in statuses
    )
    results["cell"] = _short_names(results["cell"])
    modes = list(results.groupby("mode", sort=False))
    return [
        Figure(
            "outcomes",
            "Outcome of every measurement",
            f"Cells by contenders. {legend}. Reasons are in the table.",
            text.count(len(results), "measurement"),
            [
                _map_panel("Outcomes" if len(modes) == 1 else f"Outcomes, {mode}", results_of_mode)
                for mode, results_of_mode in modes
            ],
        )
    ]


def _map_panel(title: str, results: pd.DataFrame) -> Panel:
    """Return a panel with one square per contender and cell, from the outcomes of one mode.

    `results` are rows of `outcome_frame`.
    """
    cells, contenders = results["cell"], results["label"]
    # The longer list becomes the rows, because their labels are horizontal and need less space.
    contenders_are_rows = contenders.nunique() > cells.nunique()
    y_names, x_names = (contenders, cells) if contenders_are_rows else (cells, contenders)
    map_squares = [
        Square(
            column,
            row,
            STATUS_LABELS.get(status, status),
            STATUS_COLOURS.get(status, STATUS_COLOURS["error"]),
            OK_OPACITY if status == "ok" else FAILURE_OPACITY,
        )
        for column, row, status in zip(x_names, y_names, results["status"], strict=True)
    ]
    width = max(5.4, 2.6 + 0.55 * x_names.nunique())
    height = max(2.2, 0.26 * y_names.nunique() + 1.6)
    return Panel(title, squares(map_squares), width, height)


def _short_names(cells: Iterable[str]) -> list[str]:
    """Shorten the keys of cells, "section D=64 ...", to what tells them apart."""
    names = [cell.split(" ") for cell in cells]
    num_cells = len(set(map(tuple, names)))
    for position in range(max(map(len, names)) - 1, 0, -1):
        shorter_names = [words[:position] + words[position + 1 :] for words in names]
        if len(set(map(tuple, shorter_names))) == num_cells:
            names = shorter_names
    return [" ".join(words) for words in names]


def failures_table(run: Run) -> Table:
    """Return one row per failure, with its reason."""
    results = outcome_frame(run)
    return Table.of(
        results[results["status"] != "ok"],
        {
            "contender": "label",
            "cell": "cell",
            "mode": "mode",
            "status": "status",
            "processes measured": lambda row: Value(
                f"{row['num_ok']} of {row['num_processes']}", row["num_ok"] / row["num_processes"]
            ),
            "reason": "reason",
        },
    )


def failures_sentence(run: Run) -> str:
    """Return a sentence: the number of failures by status, or without any the kind's `success`."""
    statuses = outcome_frame(run)["status"]
    failures = statuses[statuses != "ok"].value_counts()
    if not len(failures):
        return run.kind.reporting.success.format(count=len(statuses))
    known_first = [*STATUS_MEANINGS, *failures.index]
    counts = {status: failures[status] for status in known_first if status in failures}
    listed_counts = ", ".join(f"{count} {status}" for status, count in counts.items())
    return (
        f"{failures.sum()} of {text.count(len(statuses), 'measurement')} are incomplete or have no "
        f"result: {listed_counts}."
    )
