"""The report of contenders timed side by side: functions of `report`, and lines in the README."""

from __future__ import annotations

from experiments.report.answer import answer, tiles
from experiments.report.data import Run, select
from experiments.report.figures import timed_figures as figures
from experiments.report.results import readme_table
from experiments.results import metrics

__all__ = ["NOTES", "answer", "figures", "readme_lines", "tiles"]

NOTES = (metrics.FORMULA,)


def readme_lines(run: Run, command: str, link: str) -> list[str] | None:
    """Return the lines with the headline's table; None if the headline was not timed.

    Arguments as for `Kind.readme_lines`.
    """
    headline_rows = select(run.table, cell=run.headline_cell())
    if headline_rows.empty:
        return None
    section, batch = headline_rows.iloc[0][["section", "B"]]
    return [
        f"{command}: {run.title(section)}, B = {int(batch):,}.",
        "",
        *readme_table(run),
        "",
        f"Step = forward + backward + update. {link}",
    ]
