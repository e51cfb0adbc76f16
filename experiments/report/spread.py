"""What the headline's numbers are made of: every raw sample, in the order it was taken."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes

from experiments.report.data import Run
from experiments.report.palette import INK, colour_of
from experiments.report.plots import scales
from experiments.report.style import Drawing, Figure, Panel
from experiments.results.metrics import seconds
from experiments.timing.stats import summarise

FEW = 60  # samples of a contender, up to which the dots are large
GAP = 0.06  # between processes, in widths of one


def figures(run: Run) -> list[Figure]:
    """Samples of the headline's cell by phase."""
    cell = run.headline_cell()
    records = [
        r
        for r in run.records
        if r["cell"] == cell and r["status"] == "ok" and "step" in r["samples"]
    ]
    if not records:
        return []
    section = run.headline
    return [
        Figure(
            "samples",
            f"Every sample on {run.title(section)}",
            "One dot is one timed execution (or the mean of a few, where one is too short to "
            "time), in the order they were taken; each column is a fresh process. The line is the "
            "process's median. Steps and drifts mean that the machine changed under the "
            "measurement; nothing is left out.",
            run.sizes(section),
            [Panel(p.capitalize(), _draw(records, p)) for p in ("step", "forward")],
        )
    ]


def _draw(records: list[dict[str, Any]], phase: str) -> Drawing:
    arms = list(dict.fromkeys(r["arm"] for r in records))

    def draw(axes: Axes) -> None:
        for place, arm in enumerate(arms):
            own = sorted((r for r in records if r["arm"] == arm), key=_process)
            width = 0.86 / len(own)
            for number, record in enumerate(own):
                taken = [1e3 * s for s in seconds(record, phase)]
                left, span = place - 0.43 + number * width, width * (1 - GAP)
                x = [left + span * (i + 0.5) / len(taken) for i in range(len(taken))]
                shade = colour_of(record["contender"])
                size = 3.2 if len(taken) * len(own) > FEW else 6
                axes.plot(x, taken, ".", color=shade, ms=size, alpha=0.65, mew=0)
                middle = summarise(taken).median
                axes.hlines(middle, left, left + span, color=INK, lw=1.2)
        names = {r["arm"]: r["label"] for r in records}
        axes.set_xticks(range(len(arms)), [_two_lines(names[a]) for a in arms], fontsize=8)
        axes.tick_params(axis="x", length=0)
        axes.grid(visible=False, axis="x")
        scales(axes, "", "time (ms)")

    return draw


def _process(record: dict[str, Any]) -> int:
    return int(record.get("replicate", 0))


def _two_lines(label: str) -> str:
    """Long names are broken at the middle-most space."""
    gaps = [i for i, c in enumerate(label) if c == " "]
    if len(label) < 11 or not gaps:
        return label
    at = min(gaps, key=lambda i: abs(i - len(label) / 2))
    return f"{label[:at]}\n{label[at + 1 :]}"
