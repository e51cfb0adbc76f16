"""The benchmark harness: runs experiments of conf/ on emblib and its peers, and reports them.

It sees emblib's public names only; emblib never imports it. Its packages, lowest first (each
imports from those before it only, for annotations from any):

    paths, config     where things are; the schema of conf/; arms, and the cells of a sweep
    workloads         tables, and batches of lookups into them: distributions, trace files
    machine           the machine: environment, flags, bandwidth, ceilings, telemetry, memory
    timing            clocks, warm-up, the race, statistics and verdicts
    contenders        the implementations that are measured; `registry`, what is known of each by
                      name, is below config
    quality           models that are trained with tables made smaller
    results           records on disk, and the metrics computed from them
    measure           one cell of each kind, measured in its own process (needs torch)
    kinds             the kinds of experiments: their cells and their tables of numbers
    report            figures, tables and pages of one run; published figures
    kind_reports      what the report of each kind says and draws
    configure         the command line, checked
    run               jobs in fresh processes, from configuration to report; several ranks
    gate              the kind that compares two revisions of emblib
    bundle            results as an archive that can be verified
    compare           one experiment on several machines
    evidence          what README.md and docs/benchmarks.md quote: its plan, and how old it is
    front_page, kernel_times, doctor, gallery, launch, listing, reference, cli
                      commands: `python run.py COMMAND --help`

What it calls things. A *sample* is one timed execution of a *phase* (forward or step). An *arm* is
a contender with its rank or its cache's size. A *round* takes every phase of every arm in random
order and then in reverse. A *cell* is one workload with its arms; its *section* is the name of its
case, or the sweep. A *job* measures a cell in one fresh process, its *replicate*; a *pass* is a job
for each cell. A *record*, a line of points.jsonl, is what became of an arm in one job and one
*mode* (hot, cold, ...). The *kind* of an experiment says what is done with its cells.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load"]


def load(*run_directories: str | Path) -> pd.DataFrame:
    """Return the results of any number of runs as one table: a row per cell, contender and phase.

    The columns are those of results.csv, and `run`: the directory's name.
    """
    import pandas as pd

    from experiments.report.data import Run

    tables = [Run.read(Path(p)).table.assign(run=Path(p).name) for p in run_directories]
    return pd.concat(tables, ignore_index=True)
