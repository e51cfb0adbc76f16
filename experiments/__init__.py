"""The benchmark harness: runs experiments of conf/ on emblib and its peers, and reports them.

It uses public names of emblib only, and emblib never imports it. Its packages, lowest first; each
imports from those above it only, except for annotations:

    paths, config     folders; the schema of conf/; the arms and cells of a sweep
    workloads         tables, and batches of lookups into them: distributions, trace files
    machine           the machine: environment, flags, bandwidth, ceilings, telemetry, memory
    timing            clocks, warm-up, the race, statistics and verdicts
    contenders        the implementations that are measured; `registry`, the facts of each by name,
                      is below config
    quality           models that are trained with compressed tables
    results           records on disk, and the metrics computed from them
    measure           one cell of each kind, measured in its own process (needs torch)
    kinds             the kinds of experiments: their cells and their tables of numbers
    report            figures, tables and pages of one run; published figures
    kind_reports      the answer, figures and tables of each kind's report
    configure         the check of the command line
    run               jobs in fresh processes, from configuration to report; several ranks
    gate              the kind that compares two revisions of emblib
    bundle            results as an archive that can be verified
    compare           one experiment on several machines
    evidence          what README.md and docs/benchmarks.md quote: its plan, and how old it is
    front_page, doctor, gallery, launch, listing, reference, table_statistics, cli
                      commands: `python run.py COMMAND --help`

Terms. A *sample* is a timed execution of a *phase* (forward or step). An *arm* is a contender with
a rank or a cache size. A *round* takes two samples of every phase of every arm: in random order,
then in the reverse order. A *cell* is a workload with its arms; its *section* is the name of its
case, or "sweep". A *job* measures a cell in a fresh process; the number of that process among those
of the cell is its *replicate*. A *pass* is a sequence of jobs, one per cell of a block. A *record*
is a line of points.jsonl: the outcome of an arm in a job and a *mode* (hot, cold, ...). The *kind*
of an experiment determines how its cells are measured and reported.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["load"]


def load(*run_directories: str | Path) -> pd.DataFrame:
    """Return the results of runs as one table: one row per cell, arm, mode and phase.

    The columns are those of results.csv (`results.metrics.frame`), and `run`, the name of the run's
    directory; the paths of all directories, as they were given, if two have one name.

    Raises:
        ValueError: no run is given.
        UsageError: a run is damaged.
        OSError: there is no config.yaml.
    """
    import pandas as pd

    from experiments.report.data import Run

    names = [Path(path).name for path in run_directories]
    if len(set(names)) < len(names):  # such as references of several machines
        names = [str(path) for path in run_directories]
    tables = [
        Run.read(Path(path)).table.assign(run=name)
        for path, name in zip(run_directories, names, strict=True)
    ]
    return pd.concat(tables, ignore_index=True)
