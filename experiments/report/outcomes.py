"""What became of every contender of every cell: failures are results, as a map and as a table."""

from __future__ import annotations

from experiments.report.charts import Square, squares
from experiments.report.data import Outcome, Run
from experiments.report.style import STATUS, Figure, Panel
from experiments.report.tables import Table, Value

MEANING = {
    "ok": "measured",
    "partly": "measured in some of its processes",
    "oom": "out of memory",
    "timeout": "no progress within the time limit",
    "wrong": "its result differs from the reference",
    "error": "failed",
    "missing": "a package is not installed",
    "unsupported": "the contender does not offer this",
}
MARK = {"ok": "✓", "partly": "½", "oom": "oom", "timeout": "time", "unsupported": "n/a"}


def figures(run: Run) -> list[Figure]:
    """Draw a map of all outcomes, where any is not a success."""
    outcomes = run.outcomes()
    if all(o.status == "ok" for o in outcomes):
        return []
    seen = dict.fromkeys(o.status for o in outcomes)
    words = "; ".join(f"{s}: {MEANING.get(s, s)}" for s in MEANING if s in seen)
    return [
        Figure(
            "outcomes",
            "Outcome of every measurement",
            f"A line per cell, a column per contender. {words}. Reasons are in the table.",
            f"{len(outcomes)} measurements",
            [_map(outcomes)],
        )
    ]


def _map(outcomes: list[Outcome]) -> Panel:
    short = {o.cell: _short(o.cell) for o in outcomes}
    unique = len(set(short.values())) == len(short)
    entries = [
        Square(
            o.label,
            short[o.cell] if unique else o.cell,
            MARK.get(o.status, o.status),
            STATUS.get(o.status, STATUS["error"]),
            0.25 if o.status == "ok" else 0.6,
        )
        for o in outcomes
    ]
    width = max(5.4, 2.6 + 0.55 * len({entry.column for entry in entries}))
    height = max(2.2, 0.26 * len({entry.row for entry in entries}) + 1.6)
    return Panel("Outcomes", squares(entries), width, height)


def _short(cell: str) -> str:
    """Return a cell's key without what is long and says little: the section and four axes."""
    words = cell.split(" ")
    kept = [w for w in words[1:] if w[:2] in ("D=", "B=", "L=", "s=")]
    return " ".join([words[0], *kept])


def table(run: Run) -> Table:
    """Return the contenders without a measurement, and why."""
    return Table.of(
        [o for o in run.outcomes() if o.status != "ok"],
        {
            "contender": lambda o: o.label,
            "cell": lambda o: o.cell,
            "mode": lambda o: o.mode,
            "status": lambda o: o.status,
            "processes measured": lambda o: Value(f"{o.good} of {o.total}", o.good / o.total),
            "reason": lambda o: o.reason,
        },
    )


def sentence(run: Run) -> str:
    """How many of the measurements have no result."""
    outcomes = run.outcomes()
    bad = [o for o in outcomes if o.status != "ok"]
    if bad:
        counts = {s: sum(o.status == s for o in bad) for s in MEANING}
        words = ", ".join(f"{n} {s}" for s, n in counts.items() if n)
        return (
            f"{len(bad)} of {len(outcomes)} measurements have no result, or not all of it: {words}."
        )
    return run.kind.done.format(count=len(outcomes))
