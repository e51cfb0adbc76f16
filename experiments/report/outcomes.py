"""What became of every contender of every cell: failures are results, as a map and as a table."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from experiments.report.data import Outcome, Run
from experiments.report.style import STATUS, Drawing, Figure, Panel
from experiments.report.tables import Table, Value

MEANING = {
    "ok": "measured",
    "partly": "measured in some of its processes",
    "oom": "out of memory",
    "timeout": "silent for longer than the limit",
    "wrong": "computes something else than the reference",
    "error": "failed",
    "missing": "a package is not installed",
    "unsupported": "the contender does not offer this",
}
MARK = {"ok": "✓", "partly": "½", "oom": "oom", "timeout": "time", "unsupported": "n/a"}


def figures(run: Run) -> list[Figure]:
    """A map of all outcomes, where there is anything but success."""
    outcomes = run.outcomes()
    if all(o.status == "ok" for o in outcomes):
        return []
    seen = dict.fromkeys(o.status for o in outcomes)
    words = "; ".join(f"{s}: {MEANING.get(s, s)}" for s in MEANING if s in seen)
    return [
        Figure(
            "outcomes",
            "What became of every measurement",
            f"A line per cell, a column per contender. {words}. Reasons are in the table.",
            f"{len(outcomes)} measurements",
            [Panel("Outcomes", _draw(outcomes), *_size(outcomes))],
        )
    ]


def _size(outcomes: list[Outcome]) -> tuple[float, float]:
    lines = len({o.cell for o in outcomes})
    columns = len({o.label for o in outcomes})
    return max(5.4, 2.6 + 0.55 * columns), max(2.2, 0.26 * lines + 1.6)


def _draw(outcomes: list[Outcome]) -> Drawing:
    cells = list(dict.fromkeys(o.cell for o in outcomes))
    labels = list(dict.fromkeys(o.label for o in outcomes))

    def draw(axes: Axes) -> None:
        for outcome in outcomes:
            x, y = labels.index(outcome.label), cells.index(outcome.cell)
            good = outcome.status == "ok"
            shade = STATUS.get(outcome.status, STATUS["error"])
            axes.add_patch(
                Rectangle((x - 0.47, y - 0.45), 0.94, 0.9, color=shade, lw=0,
                          alpha=0.25 if good else 0.6)
            )  # fmt: skip
            mark = MARK.get(outcome.status, outcome.status)
            axes.text(x, y, mark, ha="center", va="center", fontsize=7, in_layout=False)
        axes.set_xlim(-0.5, len(labels) - 0.5)
        axes.set_ylim(len(cells) - 0.5, -0.5)
        axes.set_xticks(range(len(labels)), labels, fontsize=8, rotation=30, ha="right")
        axes.set_yticks(range(len(cells)), [_short(c) for c in cells], fontsize=8)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        for side in ("left", "bottom"):
            axes.spines[side].set_visible(False)

    return draw


def _short(cell: str) -> str:
    """A cell's key without what is long and says little: the section and four axes."""
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
