"""What a machine's memory can do, as its own run measured it: the roofs under its contenders."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Roofs:
    """Measured bandwidth in GB/s, bytes read plus bytes written; gathers by the bytes of a row."""

    copy_gb_s: float = math.nan
    gather_gb_s: tuple[tuple[int, float], ...] = ()

    @classmethod
    def of(cls, environment: Mapping[str, Any]) -> Roofs:
        """From environment.json; runs from before gathers were measured have the copy only."""
        found = environment.get("bandwidth") or {}
        copied = found.get("copy_gb_s") or environment.get("copy_gb_s")
        gathered = {int(k): float(v) for k, v in (found.get("gather_gb_s") or {}).items()}
        return cls(float(copied) if copied else math.nan, tuple(sorted(gathered.items())))

    def gather(self, row_bytes: float) -> float:
        """For rows of about that size: the nearest that was measured, by ratio."""
        if not self.gather_gb_s:
            return math.nan
        _, found = min(self.gather_gb_s, key=lambda pair: abs(math.log(pair[0] / row_bytes)))
        return found
