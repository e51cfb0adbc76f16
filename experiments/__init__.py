"""The benchmark harness: runs experiments of conf/ on emblib and its peers, and reports them.

It sees emblib's public names only; emblib never imports it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["hit_rates", "load", "samples"]


def load(*run_directories: str | Path) -> pd.DataFrame:
    """Results of any number of runs as one tidy table: a row per cell, contender and phase.

    The columns are those of results.csv, and `run`: the directory's name.
    """
    import pandas as pd

    from experiments.report.data import Run

    tables = [Run.read(Path(p)).table.assign(run=Path(p).name) for p in run_directories]
    return pd.concat(tables, ignore_index=True)


def hit_rates(*run_directories: str | Path) -> pd.DataFrame:
    """Traces through caches of any number of runs: a row per trace, contender and size.

    The columns are those of hit_rates.csv, and `run`: the directory's name.
    """
    import pandas as pd

    from experiments.report.data import Run

    tables = [Run.read(Path(p)).traces.assign(run=Path(p).name) for p in run_directories]
    return pd.concat([t for t in tables if len(t)] or [pd.DataFrame()], ignore_index=True)


def samples(*run_directories: str | Path) -> pd.DataFrame:
    """Every raw sample of any number of runs: a row per sample, in the order they were taken.

    Columns: run, section, cell, arm, mode, replicate, phase, round, seconds.
    """
    import pandas as pd

    from experiments.results.metrics import mode_of, replicate_of
    from experiments.results.store import read_records

    names = ("section", "cell", "arm")
    rows = [
        {"run": Path(path).name, **{k: record[k] for k in names}, "mode": mode_of(record)}
        | {"replicate": replicate_of(record), "phase": phase, "round": number, "seconds": seconds}
        for path in run_directories
        for record in read_records(Path(path))
        if record.get("kind", "time") == "time"
        for phase, taken in record["samples"].items()
        for number, seconds in taken
    ]
    return pd.DataFrame(rows)
