"""The interface of a kind of experiment: which cells it has, how they are measured and reported.

A new kind is a subclass of `Kind` in one file and a line in the table of `experiments/kinds`. What
the subclass leaves out behaves as the kind `time` does: contenders timed side by side. Methods that
measure or draw import what they need themselves, so that the command line loads neither torch nor
matplotlib; larger kinds name a module that does (`measures`, `report`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from experiments.config.schema import CaseConfig, Config, UsageError
from experiments.config.sweep import Arm, Cell, case_cells, swept_cells
from experiments.contenders import registry
from experiments.results.store import Record
from experiments.timing import statistics

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from experiments.report.data import Run
    from experiments.report.document import Tile
    from experiments.report.style import Figure
    from experiments.report.tables import Table
    from experiments.run.session import Session

TIME = "time"  # the kind of cells whose contenders are timed side by side
KEYS = "keys"  # the kind of a case that names loads of hash tables


@dataclass(frozen=True)
class CaseReport:
    """What a case adds to a report: sentences after the first one, tables and figures."""

    answer: Sequence[str] = ()
    tables: Sequence[tuple[str, str, Table]] = ()
    figures: Sequence[Figure] = ()


class Kind:
    """A kind of experiment; its class attributes say where it differs from timing contenders."""

    name: ClassVar[str]
    options: ClassVar[type | None] = None  # dataclass of the configuration's `options`

    # Cells
    swept_kind: ClassVar[str] = ""  # kind of the cells of `sweep`; empty: this one
    case_kind: ClassVar[str] = TIME  # kind of the cells of `cases`
    swept_first: ClassVar[bool] = False  # cells of the sweep come before the cases
    only_arm: ClassVar[str] = ""  # the one arm of every cell, instead of contenders
    extra_arms: ClassVar[Sequence[str]] = ()  # computed arms that every cell of the sweep has
    choices: ClassVar[Sequence[str]] = ()  # computed arms that `contenders` may name
    has_ranks: ClassVar[bool] = False  # device.ranks may be more than 1
    over_ranks: ClassVar[bool] = False  # a cell for each of sharding.worlds; one table per world
    keyed: ClassVar[bool | None] = False  # contenders are hash tables; None: some are
    makes_tables: ClassVar[bool] = True

    # Measuring
    packages: ClassVar[Sequence[str]] = ()  # besides the contenders', which change a result
    measures: ClassVar[str] = ""  # "module:function": (cell, session, seconds) -> records
    leads: ClassVar[str] = ""  # "module:function": (config, *, question, words) -> exit status
    timed: ClassVar[bool] = True  # samples are seconds: timing.replicates processes per cell
    limited: ClassVar[bool] = True  # False: a process takes as long as its training does
    has_modes: ClassVar[bool] = True  # a cell is measured in each of timing.modes

    # Reporting
    report: ClassVar[str] = ""  # module with answer(run), figures(run), tables(run) and NOTES
    notes: ClassVar[Sequence[str]] = ()  # of "How to read this", after the report module's NOTES
    rebuilds: ClassVar[str] = ""  # "module:function": (path) -> answer; the kind's own report
    verdicts: ClassVar[bool] = False  # contenders are judged over processes
    side_by_side: ClassVar[bool] = True  # contenders take turns in the same process
    comparable: ClassVar[bool] = True  # runs on several machines can be compared
    done: ClassVar[str] = "None: all {count} measurements ran and agreed with the reference."

    # Cells

    def check(self, config: Config) -> None:
        """Raise UsageError where the configuration does not suit the kind."""
        if config.device.ranks > 1 and not self.has_ranks:
            hint = "; say sharding.worlds" * self.over_ranks
            raise UsageError(f"device.ranks: only kind=time has ranks, this is {self.name}{hint}")

    def cells(self, config: Config) -> tuple[list[Cell], list[Cell]]:
        """Return the cells of the cases and those of the sweep."""
        cases = [c for cell in self.case_cells(config) for c in self.spread(cell, config)]
        swept = [c for cell in self.swept_cells(config) for c in self.spread(cell, config)]
        return cases, swept

    def case_cells(self, config: Config) -> list[Cell]:
        """Return a cell per case."""
        cells = case_cells(config, lambda case: case.kind or self.kind_of_case(case))
        if not self.only_arm:
            return cells
        return [cell.with_arms(Arm(self.only_arm)) for cell in cells]

    def kind_of_case(self, case: CaseConfig) -> str:
        """Return the kind of a case that names none: one that names loads is about hash tables."""
        return KEYS if case.keys.loads else self.case_kind

    def check_options(self, options: Mapping[str, Any], prefix: str = "") -> None:
        """Raise UsageError where options of this kind, of a run or of a case, do not suit it."""

    def as_case(self, cell: Cell) -> Cell:
        """Return a cell of this kind that is a case of another kind's experiment."""
        return cell

    def swept_cells(self, config: Config) -> list[Cell]:
        """Return the cells of the sweep."""
        names = [self.only_arm] if self.only_arm else [*config.contenders, *self.extra_arms]
        kind = self.swept_kind or self.name
        loads = config.keys.loads if kind == KEYS else ()
        return list(swept_cells(config, kind, names, loads))

    def spread(self, cell: Cell, config: Config) -> Iterator[Cell]:
        """Yield the cell in each of its variants; by default the cell itself."""
        yield cell

    # Measuring

    def measure(self, cell: Cell, session: Session, seconds: float) -> list[Record]:
        """Measure a cell in the process it was given; `seconds` is the budget for timing."""
        records: list[Record] = load(self.measures)(cell, session, seconds)
        return records

    def lead(self, config: Config, *, question: str, words: Sequence[str]) -> int:
        """Lead a whole run and return its exit status (kinds with `leads` only)."""
        return int(load(self.leads)(config, question=question, words=words))

    def progress(self, records: Sequence[Record]) -> str:
        """Return the terminal's line about a measured cell."""
        return "step: " + " · ".join(
            f"{r['label']}: {r['status']}"
            if r["status"] != "ok"
            else f"{r['label']} {1e3 * median_of(r, 'step'):.3g} ms"
            for r in records
        )

    # Reporting

    def frames(self, records: Sequence[Record], settings: Any) -> dict[str, pd.DataFrame]:
        """Return the tables of numbers, by file name; `settings` is the `report` configuration."""
        return {}

    def write_files(self, run: Run) -> Mapping[str, str]:
        """Return further files of a run directory, by name."""
        return {}

    def rebuild(self, path: Path) -> str | None:
        """Write the kind's own report and return its answer; None: the kind has the common one."""
        return str(load(self.rebuilds)(path)) if self.rebuilds else None

    def answer(self, run: Run) -> list[str]:
        """Return the sentences that answer the question; the first is the headline."""
        found: list[str] = self._report().answer(run)
        return found

    def figures(self, run: Run) -> list[Figure]:
        """Return the figures, the main one first."""
        found: list[Figure] = self._report().figures(run)
        return found

    def tables(self, run: Run) -> Sequence[tuple[str, str, Table]]:
        """Return (title, explanation, table) of each table before the results."""
        of = getattr(self._report(), "tables", None) if self.report else None
        found: Sequence[tuple[str, str, Table]] = of(run) if of else ()
        return found

    def case_report(self, run: Run) -> CaseReport:
        """Return what cases of this kind add to the report of another kind's experiment."""
        return CaseReport()

    def how_to_read(self) -> Sequence[str]:
        """Return what a reader must know about the kind's numbers."""
        own = getattr(self._report(), "NOTES", ()) if self.report else ()
        return (*own, *self.notes)

    def section_table(self, run: Run, section: str) -> Table | None:
        """Return a section's table of results; None: there is nothing to show."""
        if not len(run.of(section)):
            return None
        found: Table = load("experiments.report.results:section_table")(run, section)
        return found

    def tiles(self, run: Run) -> list[Tile]:
        """Return the numbers at the top of the page."""
        return []

    def readme_lines(self, run: Run, command: str, link: str) -> list[str] | None:
        """Return the run's lines in the README's results; None: the answer stands there.

        `command` says what ran where; `link` leads to the report.
        """
        return None

    def _report(self) -> Any:
        return importlib.import_module(self.report)


def load(target: str) -> Callable[..., Any]:
    """Import the object that "module:name" refers to."""
    module, _, name = target.partition(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return found


def median_of(record: Record, phase: str) -> float:
    """Return the median seconds of a record's phase."""
    return statistics.summarise([seconds for _, seconds in record["samples"][phase]]).median


def check_keyed(prefix: str, names: Sequence[str], *, wanted: bool) -> None:
    """Raise UsageError unless the contenders are all hash tables, or none is one."""
    for name in names:
        if wanted is not registry.keyed(name) and name in registry.names():
            a = "a table of keys" if registry.keyed(name) else "no table of keys"
            where = "where keys.loads names loads, or in kind=growth"
            raise UsageError(f"{prefix}contenders: {name} is {a}; those are measured {where}")
