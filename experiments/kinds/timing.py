"""The kinds `time` and `anchor`: contenders timed side by side, on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from experiments.kinds.base import TIME, Kind
from experiments.results import metrics
from experiments.results.store import Record

if TYPE_CHECKING:
    import pandas as pd

    from experiments.report.data import Run
    from experiments.report.document import Tile
    from experiments.report.style import Figure


class Timing(Kind):
    """What does the subject cost, and what does it save, compared with the baseline?"""

    name = "time"
    has_ranks = True
    measures = "experiments.measure.timing:measure_cell"
    report = "experiments.report.answer"
    notes = (metrics.FORMULA,)
    verdicts = True

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return results.csv: a row per cell, contender, mode and phase."""
        return {"results": metrics.frame(records, str(settings.baseline))}

    def figures(self, run: Run) -> list[Figure]:
        """Return ratios, sweeps, costs and the roofline."""
        from experiments.report import figures

        return figures.figures(run)

    def tiles(self, run: Run) -> list[Tile]:
        """Return the ratio to the baseline, the memory and the rate."""
        from experiments.report import answer

        return answer.tiles(run)

    def readme_lines(self, run: Run, command: str, link: str) -> list[str] | None:
        """Return the headline's table."""
        from experiments.report import results

        if run.table.empty:
            return None
        cell = run.table["cell"] == run.headline_cell()
        section, batch = run.table[cell].iloc[0][["section", "B"]]
        return [
            f"{command}: {run.title(section)}, B = {int(batch):,}.",
            "",
            *results.readme_table(run),
            "",
            f"Step = forward + backward + update. {link}",
        ]


class Anchor(Kind):
    """Do published figures come out here, and where is emblib on the same work?"""

    name = "anchor"
    swept_kind = TIME
    keyed: ClassVar[bool | None] = None  # its cases are what is measured
    report = "experiments.kinds.anchor_report"
    notes = (metrics.FORMULA,)
