"""The outcomes of contenders in cells, failures too: a map, a table and a sentence."""

from __future__ import annotations

from typing import Any

import pandas as pd

from experiments.report import text
from experiments.report.charts import Square, squares
from experiments.report.data import Run
from experiments.report.style import STATUS_COLOURS, Figure, Panel
from experiments.report.tables import Table, Value
from experiments.results.metrics import mode_of, replicate_of

MEANINGS = {  # by status
    "ok": "measured",
    "partly": "measured in some of its processes",
    "oom": "out of memory",
    "timeout": "no progress within the time limit",
    "wrong": "its result differs from the reference",
    "error": "failed",
    "missing": "a package is not installed",
    "unsupported": "the contender does not offer this",
}
MAP_LABELS = {"ok": "✓", "partly": "½", "oom": "oom", "timeout": "time", "unsupported": "n/a"}
"""Labels of squares of the map by status; a status without an entry is its own label."""
OK_OPACITY, FAILURE_OPACITY = 0.25, 0.6  # of squares of the map: failures stand out
SHORT_AXES = ("D=", "B=", "L=", "s=")  # of a cell's key: the axes that short names keep


def outcome_frame(run: Run) -> pd.DataFrame:
    """Return a row per contender, cell and mode, with its outcome over all processes.

    Columns: cell, arm, label, mode, process (that of the first record), `status` (a key of
    MEANINGS), `reason` (the reasons of all failures), `num_ok` (processes with status "ok"),
    `num_processes`.
    """
    columns = ["cell", "arm", "label", "status", "reason"]
    frame = pd.DataFrame(run.records, columns=columns, dtype=object)
    frame["mode"] = [mode_of(r) for r in run.records]
    frame["process"] = [replicate_of(r) for r in run.records]
    keys = ["cell", "arm", "mode"]
    last = frame.drop_duplicates([*keys, "process"], keep="last")  # a repeated process counts once
    rows = [_combine_processes(group) for _, group in last.groupby(keys, sort=False)]
    return pd.DataFrame(rows, columns=[*frame, "num_ok", "num_processes"])


def _combine_processes(processes: pd.DataFrame) -> dict[str, Any]:
    """Return the outcome of a contender in a cell, from the rows of its processes.

    One "wrong" process makes it "wrong". Otherwise it is "ok", "partly", or, if all failed, the
    failure of the first process.
    """
    # Plain strings instead of operations on columns: the dtype of a text column, above all of an
    # empty one, depends on the release of pandas and on pyarrow.
    outcomes = zip(processes["status"], processes["reason"], strict=True)
    failures = [
        (status, "" if text.is_missing(reason) else str(reason))
        for status, reason in outcomes
        if status != "ok"
    ]
    statuses, reasons = [status for status, _ in failures], [reason for _, reason in failures]
    if "wrong" in statuses:
        status = "wrong"
    elif len(failures) < len(processes):
        status = "partly" if failures else "ok"
        reasons = [f"{status}: {reason}" for status, reason in failures]
    else:
        status = statuses[0]
    counts = {"num_ok": len(processes) - len(failures), "num_processes": len(processes)}
    return {
        **processes.iloc[0],
        "status": status,
        "reason": "; ".join(dict.fromkeys(reasons)),
        **counts,
    }


def figures(run: Run) -> list[Figure]:
    """Draw a map of all outcomes; [] if all are "ok"."""
    results = outcome_frame(run)
    if (results["status"] == "ok").all():
        return []
    legend = "; ".join(f"{s}: {MEANINGS[s]}" for s in MEANINGS if s in set(results["status"]))
    results["short_name"] = results["cell"].map(_short_name)
    is_unique = results["short_name"].nunique() == results["cell"].nunique()
    cells = results["short_name" if is_unique else "cell"]
    arms = results["label"]
    # The longer list becomes the rows of the map, because names of rows need no tilt.
    y_names, x_names = (arms, cells) if arms.nunique() > cells.nunique() else (cells, arms)
    entries = [
        Square(
            column,
            row,
            MAP_LABELS.get(status, status),
            STATUS_COLOURS.get(status, STATUS_COLOURS["error"]),
            OK_OPACITY if status == "ok" else FAILURE_OPACITY,
        )
        for column, row, status in zip(x_names, y_names, results["status"], strict=True)
    ]
    width = max(5.4, 2.6 + 0.55 * x_names.nunique())
    height = max(2.2, 0.26 * y_names.nunique() + 1.6)
    return [
        Figure(
            "outcomes",
            "Outcome of every measurement",
            f"Cells by contenders. {legend}. Reasons are in the table.",
            f"{len(results)} measurements",
            [Panel("Outcomes", squares(entries), width, height)],
        )
    ]


def _short_name(cell: str) -> str:
    """Return the section of a cell's key, and those of its axes that SHORT_AXES has."""
    section, *axes = cell.split(" ")
    return " ".join([section, *(a for a in axes if a[:2] in SHORT_AXES)])


def failures_table(run: Run) -> Table:
    """Return a row per outcome that is not "ok", with the reason; "partly" is not "ok"."""
    results = outcome_frame(run)
    return Table.of(
        results[results["status"] != "ok"],
        {
            "contender": "label",
            "cell": "cell",
            "mode": "mode",
            "status": "status",
            "processes measured": lambda o: Value(
                f"{o['num_ok']} of {o['num_processes']}", o["num_ok"] / o["num_processes"]
            ),
            "reason": "reason",
        },
    )


def failures_sentence(run: Run) -> str:
    """Count the outcomes that are not "ok"; without any, return the kind's words of success."""
    statuses = outcome_frame(run)["status"]
    failures = statuses[statuses != "ok"].value_counts()
    if not len(failures):
        return run.kind.reporting.success.format(count=len(statuses))
    counts = ", ".join(f"{failures[status]} {status}" for status in MEANINGS if status in failures)
    return (
        f"{failures.sum()} of {len(statuses)} measurements have no result, or not all of it: "
        f"{counts}."
    )
