"""The kinds `time` and `anchor`: contenders timed side by side, on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.kinds.base import (
    TIME,
    ArmRules,
    CellKinds,
    Compared,
    Kind,
    Measurement,
    Ranks,
    Reporting,
    Sort,
)
from experiments.results import metrics
from experiments.results.store import Record

if TYPE_CHECKING:
    import pandas as pd


class Timing(Kind):
    """What does the subject cost, and what does it save, compared with the baseline?"""

    name = TIME
    arms = ArmRules(ranks=Ranks.OF_RUN)
    measurement = Measurement("experiments.measure.timing:measure_cell")
    reporting = Reporting("experiments.kind_reports.time", compared=Compared.PROCESSES)

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return results.csv: a row per cell, contender, mode and phase."""
        return {"results": metrics.frame(records, str(settings.baseline))}


class Anchor(Kind):
    """Do published figures come out here, and where is emblib on the same work?"""

    name = "anchor"
    cell_kinds = CellKinds(sweep=TIME)
    arms = ArmRules(contenders=Sort.BOTH)
    reporting = Reporting("experiments.kind_reports.anchor")
