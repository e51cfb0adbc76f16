"""The data of a run for its report, read from the run's directory.

A *section* is the name of a case, or "sweep"; a cell is a workload with its arms. `Run.table` is
results.csv: one row per cell, arm, mode and phase, over all processes.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import DictConfig, OmegaConf

from experiments.config.schema import AXES, Mode, UsageError
from experiments.config.sweep import SWEEP, Arm, variants_of
from experiments.kinds import KINDS, Kind, find
from experiments.kinds.base import TIME, CaseReport, Comparability
from experiments.report import text
from experiments.results.metrics import mode_of, replicate_of
from experiments.results.store import Record, read_config, read_json, read_records
from experiments.workloads.distributions import describe_distribution

# Keys of every run's config.yaml, whatever its age; a copy that broke off lacks the last ones.
REQUIRED_KEYS = ("workload", "contenders", "timing", "report.subject", "report.baseline")
AXIS_NAMES = {
    "T": "tables T",
    "E": "rows per table E",
    "D": "dimension D",
    "B": "batch size B",
    "L": "lookups per bag L",
    "s": "skew: zipf exponent s",
    "q": "zipf offset q",
    "rank": "TT rank",
}


def select(table: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Return the rows that have, in each named column, the named value.

    A table that is not empty must have the columns.
    """
    for column, value in values.items():
        if len(table):
            table = table[table[column] == value]
    return table


@dataclass(frozen=True)
class Run:
    """One finished or interrupted run, read from its directory; nothing is written.

    Attributes:
        path: directory of the run.
        config: config.yaml, with present names of keys that were renamed.
        environment: environment.json (`machine.environment.environment_content`); {} without it.
        info: run.json: question, status and counts of the whole run.
        records: lines of points.jsonl in the order of the experiment's cells, see `Record`.
        frames: tables of numbers that the kinds compute from the records (`Kind.frames`), by the
            names of their CSV files. A table without a cell of its kind has no rows and no columns.
    """

    path: Path
    config: DictConfig
    environment: dict[str, Any]
    info: dict[str, Any]
    records: list[Record]
    frames: dict[str, pd.DataFrame] = field(repr=False)

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read the files that store.RunStore wrote.

        Raises:
            UsageError: a file is damaged, a record lacks an entry that the tables need, has a
                sample that is not a time, or is there twice, or this harness does not have a kind
                of the run.
            OSError: config.yaml cannot be read.
        """
        try:
            config = read_config(path / "config.yaml")
            for key in REQUIRED_KEYS:
                if OmegaConf.select(config, key) is None:
                    raise ValueError(f"config.yaml is incomplete: it has no {key}")
            # In the order of the experiment, not in the order of measuring.
            records = sorted(
                read_records(path), key=lambda record: int(record.get("cell_number", 0))
            )
            info, environment = (read_json(path, f"{name}.json") for name in ("run", "environment"))
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from error
        for labelled in (info, *records):
            for name in {"question", "title", "label"} & labelled.keys():
                labelled[name] = text.one_line(str(labelled[name]))
        kinds = [TIME, *(record.get("kind", TIME) for record in records), _kind_name(config)]
        if unknown := [kind for kind in kinds if kind not in KINDS]:
            raise UsageError(
                f"{path}: this harness has no kind of experiment '{unknown[0]}'. There is: "
                f"{', '.join(KINDS)}. Report it with the harness that measured it"
            )
        frames: dict[str, pd.DataFrame] = {}
        try:
            for kind in dict.fromkeys(kinds):
                frames |= find(kind).frames(records, config.report)
        except KeyError as error:
            raise UsageError(f"{path}: points.jsonl has a record without {error}") from error
        except ValueError as error:
            raise UsageError(f"{path}: points.jsonl: {error}") from error
        return cls(path, config, environment, info, records, frames)

    def frame(self, name: str) -> pd.DataFrame:
        """Return the table of numbers of that name; without columns if no cell is of its kind."""
        return self.frames.get(name, pd.DataFrame())

    @property
    def table(self) -> pd.DataFrame:
        """Return the results: a row per timed cell, arm, mode and phase (`metrics.frame`)."""
        return self.frame("results")

    @property
    def traces(self) -> pd.DataFrame:
        """Return the hit rates: a row per trace, cache and size (`kinds.cache.frame`)."""
        return self.frame("hit_rates")

    @property
    def operations(self) -> pd.DataFrame:
        """Return the operations: a row per table, load, mode and call (`kinds.keys.frame`)."""
        return self.frame("operations")

    @property
    def modes(self) -> list[str]:
        """Return the names of the modes in the order of the records; ["hot"] without records.

        The answer is about the first one.
        """
        return list(dict.fromkeys(mode_of(record) for record in self.records)) or [Mode.hot.value]

    def in_mode(self, mode: str) -> Run:
        """Return the part of the run that was measured in one mode.

        Tables without a column `mode` belong to the first mode, and are empty in the others.
        """

        def rows_in_mode(table: pd.DataFrame) -> pd.DataFrame:
            if "mode" in table:
                return table[table["mode"] == mode]
            return table if mode == self.modes[0] else table[:0]

        return dataclasses.replace(
            self,
            records=[record for record in self.records if mode_of(record) == mode],
            frames={name: rows_in_mode(table) for name, table in self.frames.items()},
        )

    @property
    def baseline(self) -> Arm:
        """Return the arm that all others are compared with (`report.baseline`)."""
        return Arm(str(self.config.report.baseline))

    @property
    def subject(self) -> Arm:
        """Return the arm that the question is about (`report.subject`, with its rank or cache)."""
        report = self.config.report
        name, rank = str(report.subject), int(report.subject_rank)
        size = float(report.subject_cache) if variants_of(name) == "cache" else 0.0
        return Arm(name, rank if variants_of(name) == "rank" else 0, size)

    @property
    def kind(self) -> Kind:
        """Return the kind of the run."""
        return find(_kind_name(self.config))

    def case_reports(self) -> list[CaseReport]:
        """Return a part of the report per kind of the cases, without the kind of the run."""
        kind_names = dict.fromkeys(record.get("kind", TIME) for record in self.records)
        kinds = (find(name) for name in kind_names if name != self.kind.name)
        return [kind.case_report(self) for kind in kinds]

    @property
    def status(self) -> str:
        """Return how the run ended: "finished", "interrupted", "killed" or an error in words."""
        # A run that is killed, or whose disk is full, has no run.json.
        return str(self.info.get("status", "finished" if self.info else "killed"))

    @property
    def is_smoke(self) -> bool:
        """Return whether sizes were capped, so that the numbers mean nothing (timing=smoke)."""
        timing = self.config.timing
        return bool(timing.max_rows or timing.max_batch or timing.max_cells)

    @property
    def headline(self) -> str:
        """Return the section that answers the question: the headline case, else the sweep."""
        return str(self.config.report.headline) or SWEEP

    def headline_cell(self) -> str | None:
        """Return the key of the cell that answers the question; None if it has no record.

        If the sweep answers it, that is the cell of the base point.
        """
        cells = [record["cell"] for record in self.records if record["section"] == self.headline]
        return cells[0] if cells else None

    def median_spread(self) -> float:
        """Return the median over `table` of (upper - lower quartile) ÷ median; nan without rows."""
        table = self.table
        if not len(table):
            return math.nan
        return float(((table["q75_s"] - table["q25_s"]) / table["median_s"]).dropna().median())

    def sections(self) -> list[str]:
        """Return the sections that have records, in the order of the experiment's cells."""
        return list(dict.fromkeys(record["section"] for record in self.records))

    def results_of(self, section: str) -> pd.DataFrame:
        """Return the rows of `table` of one section."""
        return select(self.table, section=section)

    def title(self, section: str) -> str:
        """Return the section's title; its name if it has no records."""
        return next(
            (record["title"] for record in self.records if record["section"] == section), section
        )

    def sizes(self, section: str) -> str:
        """Describe the workload of the section's first cell in one line.

        The section must have records.
        """
        record = next(record for record in self.records if record["section"] == section)
        params, num_tables = record["params"], record["features"]
        prefix = "Base point: " if self.has_base_point(section) else ""
        return (
            f"{prefix}{num_tables} table{'s' * (num_tables > 1)}, "
            f"{record['rows']:,} rows, D={params['D']}, B={params['B']:,}, "
            f"{record['lookups']:,} lookups per batch, {describe_distribution(params)}"
        )

    def has_base_point(self, section: str) -> bool:
        """Return whether the section is a sweep whose points vary a base point.

        A sweep that is measured before the cases has none: its cells are workloads of the user.
        """
        return section == SWEEP and not self.kind.cell_kinds.sweep_first

    def failures(self) -> list[Record]:
        """Return the records whose status is not "ok"."""
        return [record for record in self.records if record["status"] != "ok"]

    def processes_per_cell(self) -> Mapping[str, int]:
        """Return the number of processes of each cell that has a record to compare by process."""
        kinds = {name: find(name).reporting.comparability for name in KINDS}
        processes = {
            (record["cell"], replicate_of(record))
            for record in self.records
            if kinds[record.get("kind", TIME)] is Comparability.PROCESSES
        }
        return Counter(cell for cell, _ in processes)

    @property
    def planned_processes(self) -> int:
        """Return the number of processes planned per cell, which is 1 in the first schema."""
        return int(OmegaConf.select(self.config, "timing.replicates", default=1))

    def swept_axes(self) -> list[str]:
        """Return the axes with at least two measured values, in the order of the schema."""

        def is_swept(axis: str) -> bool:
            values = set(self.results_along(axis)["x"])
            return len(values - {0} if axis == "rank" else values) > 1

        return [axis for axis in (*AXES, "rank") if is_swept(axis)]

    def results_along(self, axis: str) -> pd.DataFrame:
        """Return the sweep's rows with status "ok" that differ from its base point in `axis` only.

        `axis` is one of AXES, or "rank". The further column `x` has its values. For an axis other
        than "rank", rows have no rank or one of tt.ranks, and no cache or the first of
        cache.fractions.
        """
        rows = self.results_of(SWEEP)
        if not len(rows):
            return rows.assign(x=[])
        base_point = rows.iloc[0]
        fixed_axes = [axis_name for axis_name in AXES if axis_name != axis]
        rows = rows[
            (rows[fixed_axes] == base_point[fixed_axes]).all(axis=1) & (rows["status"] == "ok")
        ]
        if axis != "rank":  # the configured ranks, and at most one size of the cache
            ranks = {0, *(int(rank) for rank in self.config.tt.ranks)}
            caches = [0.0, *self.config.cache.fractions[:1]] if "cache" in self.config else [0.0]
            rows = rows[rows["rank"].isin(ranks) & rows["cache"].isin(caches)]
        return rows.assign(x=rows[axis])


def _kind_name(config: DictConfig) -> str:
    """Return the name of the kind; the oldest runs have none, and are of the kind "time"."""
    return str(OmegaConf.select(config, "kind", default=TIME))
