"""The report of contenders timed side by side: functions of `report`, and lines in the README."""

from __future__ import annotations

from experiments.report.answer import answer, tiles
from experiments.report.data import Run
from experiments.report.figures import figures
from experiments.report.results import readme_table
from experiments.results import metrics

__all__ = ["NOTES", "answer", "figures", "readme_lines", "tiles"]

NOTES = (metrics.FORMULA,)


def readme_lines(run: Run, command: str, link: str) -> list[str] | None:
    """Return the lines with the headline's table; None for a run without timed cells."""
    if run.table.empty:
        return None
    headline_rows = run.table[run.table["cell"] == run.headline_cell()]
    section, batch = headline_rows.iloc[0][["section", "B"]]
    return [
        f"{command}: {run.title(section)}, B = {int(batch):,}.",
        "",
        *readme_table(run),
        "",
        f"Step = forward + backward + update. {link}",
    ]
