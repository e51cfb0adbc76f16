"""The kinds `time` and `anchor`: contenders timed side by side, on the same batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from experiments.kinds import base
from experiments.results import metrics
from experiments.results.store import Record

if TYPE_CHECKING:
    import pandas as pd


class Timing(base.Kind):
    """Answer what the subject costs and what it saves, compared with the baseline."""

    name = base.TIME
    arms = base.ArmRules(ranks=base.Ranks.OF_RUN)
    measurement = base.Measurement("experiments.measure.timing:measure_cell", ignores=(base.KEYS,))
    reporting = base.Reporting(
        "experiments.kind_reports.time", comparability=base.Comparability.PROCESSES
    )

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return results.csv: a row per cell, contender, mode and phase."""
        return {"results": metrics.frame(records, str(settings.baseline))}


class Anchor(base.Kind):
    """Answer whether published figures can be reproduced, and how emblib compares with them."""

    name = "anchor"
    cell_kinds = base.CellKinds(sweep=base.TIME)
    arms = base.ArmRules(contenders=base.ContenderType.BOTH)
    reporting = base.Reporting("experiments.kind_reports.anchor")
