"""The interface of a kind of experiment: its cells, their measurement, their report.

To add a kind, write a subclass of `Kind` and add a line to KINDS in `experiments/kinds`. A kind
needs a `name` and a `measurement` with the function that measures a cell; all else has the defaults
of the class attributes of `Kind`. Other packages read the attributes `cell_kinds`, `arms`,
`measurement` and `reporting`. Functions are stated as "module:function", so that the command line
loads neither torch nor matplotlib.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from experiments.config.schema import CaseConfig, Config, Mode, ReportConfig, UsageError, require
from experiments.config.sweep import Arm, Cell, case_cells, swept_cells
from experiments.contenders import registry
from experiments.results.store import Record
from experiments.timing import statistics

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from experiments.measure.session import Session
    from experiments.report.data import Run
    from experiments.report.document import Tile
    from experiments.report.style import Figure
    from experiments.report.tables import Table, TitledTable

TIME = "time"  # kind of cells whose contenders are timed side by side
KEYS = "keys"  # kind of cases with `keys.loads`; also the group of their settings
UPDATE_RULE = ("optimizer", "lr")  # keys that a kind without a step ignores
# Keys that only a race of contenders reads (`timing.race`), and all that only timed kinds read.
RACE = ("timing.min_seconds", "timing.max_rounds", "timing.precision")
WARM_UP = ("timing.warmup", "timing.warmup_seconds", "timing.warmup_cap")
AMOUNT = (*RACE, *WARM_UP, "timing.cell_seconds", "timing.min_rounds", "timing.pool")


@dataclass(frozen=True)
class CellKinds:
    """The kinds of the cells of an experiment, and their order.

    Attributes:
        sweep: kind of the cells of `sweep`; "" for the kind itself.
        cases: kind of the cells of `cases` that name none; "" for the kind itself.
        sweep_first: True to report the sweep before the cases.
    """

    sweep: str = ""
    cases: str = TIME
    sweep_first: bool = False


class Ranks(Enum):
    """Number of processes that measure a cell together: one, or that of a configuration key."""

    ONE = "one"
    OF_RUN = "device.ranks"
    OF_WORLDS = "sharding.worlds"  # a cell per world, whose ranks share the tables


class ContenderType(Enum):
    """The type of contenders that an experiment may have, see `check_contender_types`."""

    BAGS = "contenders that look up bags"
    KEYED = "hash tables"
    SERVED = "read-only tables"
    BOTH = "contenders that look up bags, and hash tables"


@dataclass(frozen=True)
class ArmRules:
    """The arms of the cells: what each cell compares.

    Most arms are contenders, the libraries to measure. The others are computed from a trace, or are
    methods of kind=quality; their names are in `experiments/config/sweep.py`.

    Attributes:
        only_arm: the only arm of every cell, in place of contenders; "" for several arms.
        computed_arms: arms that every cell of the sweep has in addition to contenders.
        optional_arms: computed arms and methods that `contenders` may name.
        contenders: type of the contenders.
        ranks: number of processes that measure a cell together.
    """

    only_arm: str = ""
    computed_arms: tuple[str, ...] = ()
    optional_arms: tuple[str, ...] = ()
    contenders: ContenderType = ContenderType.BAGS
    ranks: Ranks = Ranks.ONE


class Repetition(Enum):
    """The number of processes that measure a cell one after the other, and their time limit."""

    TIMED = "timing.replicates processes, each for timing.cell_seconds"
    TRAINED = "timing.replicates processes, each until its models are trained"
    ONCE = "one process, because any other would count the same"


@dataclass(frozen=True)
class Measurement:
    """The measurement of a cell.

    Attributes:
        cell: "module:function" of the function (cell, session, seconds) -> records; "" for none.
        repetition: number of processes, and their time limit.
        modes: modes; () for timing.modes.
        makes_tables: True if tables are built. Then a trace must state their rows, and tables that
            exceed device.memory_share of the free memory are shrunk.
        packages: packages, besides the contenders' packages, whose version changes a result.
        ignores: keys and groups of the configuration that change nothing; an axis of `workload`
            stands for that of `sweep` too.
    """

    cell: str = ""
    repetition: Repetition = Repetition.TIMED
    modes: tuple[Mode, ...] = ()
    makes_tables: bool = True
    packages: tuple[str, ...] = ()
    ignores: tuple[str, ...] = ()


class Comparability(IntEnum):
    """The comparisons that a kind's numbers permit; a level includes those of lower value."""

    NOTHING = 0
    MACHINES = 1  # numbers of several machines
    ROUNDS = 2  # contenders that take turns in a process
    PROCESSES = 3  # contenders over several processes, which gives a verdict


@dataclass(frozen=True)
class Reporting:
    """The report of a run.

    Attributes:
        module: module with NOTES, `answer`, `figures` and other functions that `Kind` calls.
        special_report: "module:function" of a function (directory of a run) -> answer, which writes
            the kind's own report instead of the usual one; "" for the usual report.
        comparability: comparisons that the numbers permit.
        success: sentence that replaces the count of failures if nothing failed; {count} is the
            number of outcomes.
    """

    module: str = ""
    special_report: str = ""
    comparability: Comparability = Comparability.ROUNDS
    success: str = "None: all {count} measurements ran and agreed with the reference."


class OptionRule(NamedTuple):
    """The permitted values of an option.

    Attributes:
        text: rule in words, after "must be".
        holds: function that returns whether a value, or an entry of a list, is permitted.
        may_be_empty: True if a list may be empty.
    """

    text: str
    holds: Callable[[Any], bool]
    may_be_empty: bool = False


AT_LEAST_ONE = OptionRule(">= 1", lambda value: value >= 1)
NOT_NEGATIVE = OptionRule(">= 0", lambda value: value >= 0)
POSITIVE = OptionRule("> 0", lambda value: value > 0)
SHARE = OptionRule("in (0, 1]", lambda value: 0 < value <= 1)


@dataclass(frozen=True)
class CaseReport:
    """The part of a case in a report: sentences after the first one, tables and figures."""

    answer: Sequence[str] = ()
    tables: Sequence[TitledTable] = ()
    figures: Sequence[Figure] = ()


class Kind:
    """A kind of experiment: its cells, their measurement and their report.

    The methods below "Cells" and "Measuring" are called before and while a run measures, those
    below "Reporting" when its report is written, which may be later and on another machine.

    Attributes:
        name: name in `kind=NAME`.
        options: dataclass of the configuration's `options`; None without options.
        option_rules: permitted values by option; an option without a rule may have any.
        cell_kinds: kinds of the cells.
        arms: arms of the cells.
        measurement: measurement of a cell.
        reporting: report of a run.
        runner: "module:function" of a function (config, *, question, words) -> exit status that
            replaces `experiments.run.runner.run` and has its arguments: the question of the
            experiment and the words of the command line. "" to use that one.
    """

    name: ClassVar[str]
    options: ClassVar[type | None] = None
    option_rules: ClassVar[Mapping[str, OptionRule]] = {}
    cell_kinds: ClassVar[CellKinds] = CellKinds()
    arms: ClassVar[ArmRules] = ArmRules()
    measurement: ClassVar[Measurement] = Measurement()
    reporting: ClassVar[Reporting] = Reporting()
    runner: ClassVar[str] = ""

    # Cells

    def check(self, config: Config) -> None:
        """Raise UsageError if the configuration does not suit the kind.

        The default checks only that the kind can have the ranks of `device.ranks`.
        """
        if config.device.ranks > 1 and self.arms.ranks is not Ranks.OF_RUN:
            hint = "; say sharding.worlds" * (self.arms.ranks is Ranks.OF_WORLDS)
            raise UsageError(f"device.ranks: only kind=time has ranks, this is {self.name}{hint}")

    def cells(self, config: Config) -> tuple[list[Cell], list[Cell]]:
        """Return the cells of the cases, and the cells of the sweep.

        Their tables and batches are not shrunk to the caps of the timing preset yet.

        Raises:
            UsageError: a rule of the sweep cannot be read, zipped axes differ in length, or a file
                is missing.
        """
        case_variants = [
            variant for cell in self.case_cells(config) for variant in self.variants(cell, config)
        ]
        swept_variants = [
            variant for cell in self.swept_cells(config) for variant in self.variants(cell, config)
        ]
        return case_variants, swept_variants

    def case_cells(self, config: Config) -> list[Cell]:
        """Return a cell per case; a case with `keys.loads` that names no kind has kind=keys."""

        def kind_of(case: CaseConfig) -> str:
            return case.kind or (KEYS if case.keys.loads else self.cell_kinds.cases or self.name)

        cells, only_arm = case_cells(config, kind_of), self.arms.only_arm
        return [cell.with_arms(Arm(only_arm)) for cell in cells if cell.arms] if only_arm else cells

    def check_options(self, options: Mapping[str, Any], prefix: str = "") -> None:
        """Raise UsageError for values of `options` that break a rule.

        `options` has every option of the kind. `prefix` is "cases.NAME." for options of a case, and
        "" for those of the run.
        """
        for name, rule in self.option_rules.items():
            value, option = options[name], f"{prefix}options.{name}"
            entries = value if isinstance(value, list) else [value]
            if not entries and not rule.may_be_empty:
                raise UsageError(f"{option} must not be empty")
            require(f"{option} must be {rule.text}", value, holds=all(map(rule.holds, entries)))

    def as_case(self, cell: Cell) -> Cell:
        """Complete a cell of this kind that is a case in an experiment of another kind."""
        return cell

    def swept_cells(self, config: Config) -> list[Cell]:
        """Return the cells of the sweep."""
        only_arm = self.arms.only_arm
        names = [only_arm] if only_arm else [*config.contenders, *self.arms.computed_arms]
        kind = self.cell_kinds.sweep or self.name
        loads = config.keys.loads if kind == KEYS else ()
        return list(swept_cells(config, kind, names, loads))

    def variants(self, cell: Cell, config: Config) -> Iterator[Cell]:
        """Yield the variants of a cell; by default the cell itself."""
        yield cell

    # Measuring

    def measure(self, cell: Cell, session: Session, seconds: float) -> list[Record]:
        """Measure a cell in this process and return its records; `seconds` is for timing."""
        records: list[Record] = load(self.measurement.cell)(cell, session, seconds)
        return records

    def progress(self, records: Sequence[Record]) -> str:
        """Return the line that the terminal shows for the records of a measured cell.

        The default shows the median of the phase "step"; a kind without it must override this.
        """
        return progress_line(
            "step", records, lambda record: f"{1e3 * median_seconds(record, 'step'):.3g} ms"
        )

    # Reporting

    def frames(self, records: Sequence[Record], settings: ReportConfig) -> dict[str, pd.DataFrame]:
        """Return {file name: table of numbers}; `settings` is the configuration's `report`."""
        return {}

    def write_files(self, run: Run) -> Mapping[str, str]:
        """Return {name: text} of further files of a run's directory."""
        return self._call_report("write_files", {}, run)

    def write_special_report(self, path: Path) -> str | None:
        """Write the kind's own report of the run in `path`; return its answer.

        None if the kind has the usual report, which is not written here.
        """
        target = self.reporting.special_report
        return str(load(target)(path)) if target else None

    def answer(self, run: Run) -> list[str]:
        """Return the sentences that answer the question; the first is the headline."""
        return self._call_report("answer", [], run)

    def figures(self, run: Run) -> list[Figure]:
        """Return the figures, the main one first."""
        return self._call_report("figures", [], run)

    def tables(self, run: Run) -> Sequence[TitledTable]:
        """Return the tables that follow the results of the first mode."""
        return self._call_report("tables", (), run)

    def case_report(self, run: Run) -> CaseReport:
        """Return the section about cases of this kind in the report of another kind."""
        return self._call_report("case_report", CaseReport(), run)

    def notes(self) -> Sequence[str]:
        """Return the paragraphs about the kind's numbers for "How to read this"."""
        module = self.reporting.module
        return getattr(importlib.import_module(module), "NOTES", ()) if module else ()

    def section_table(self, run: Run, section: str) -> Table | None:
        """Return the table of results of a section, by default of timed cells; None without any."""
        table: Table | None = self._call_report("section_table", None, run, section)
        if table is None and len(run.results_of(section)):
            table = load("experiments.report.results:section_table")(run, section)
        return table

    def tiles(self, run: Run) -> list[Tile]:
        """Return the numbers at the top of the page."""
        return self._call_report("tiles", [], run)

    def readme_lines(self, run: Run, command: str, link: str) -> list[str] | None:
        """Return the lines of a run in docs/benchmarks.md; None for its answer alone.

        `command` states what ran where; `link` leads to the report.
        """
        return self._call_report("readme_lines", None, run, command, link)

    def _call_report(self, name: str, default: Any, *arguments: Any) -> Any:
        """Call a function of the reporting module; return `default` if it has none."""
        module = importlib.import_module(self.reporting.module) if self.reporting.module else None
        function = getattr(module, name, None)
        return function(*arguments) if function else default


def load(target: str) -> Callable[..., Any]:
    """Import the object that "module:name" refers to.

    Raises:
        ImportError, AttributeError: there is no such module or object.
        ValueError: `target` is "".
    """
    module_name, _, object_name = target.partition(":")
    target_object: Callable[..., Any] = getattr(importlib.import_module(module_name), object_name)
    return target_object


def progress_line(
    quantity: str, records: Sequence[Record], format_number: Callable[[Record], str]
) -> str:
    """Return a line with the formatted number of each record, or the status if it is not "ok"."""
    outcomes = [
        f"{record['label']} {format_number(record)}"
        if record["status"] == "ok"
        else f"{record['label']}: {record['status']}"
        for record in records
    ]
    return f"{quantity}: {' · '.join(outcomes)}"


def median_seconds(record: Record, phase: str) -> float:
    """Return the median seconds of a record's phase; raise KeyError if it has no such phase."""
    return statistics.summarise([seconds for _, seconds in record["samples"][phase]]).median


def check_contender_types(prefix: str, names: Sequence[str], required_type: ContenderType) -> None:
    """Raise UsageError unless all contenders are of the type `required_type`.

    Args:
        prefix: "cases.NAME." or "", for the message.
        names: names of contenders; those of computed arms and methods are skipped.
        required_type: any type but BOTH.
    """
    for name in names:
        entry, is_served = registry.entry_of(name), required_type is ContenderType.SERVED
        unserved_type = ContenderType.KEYED if entry.keyed else ContenderType.BAGS
        actual_type = ContenderType.SERVED if entry.served else unserved_type
        if actual_type is required_type or name not in registry.names():
            continue
        if is_served or entry.served:
            reason = f"has {'no ' * is_served}read-only tables; those are measured in kind=serving"
        elif entry.keyed:
            reason = "is a table of keys; those are measured where keys.loads names loads"
        else:
            reason = "is not a table of keys; only those are measured where keys.loads names loads"
        also_growth = "" if is_served or entry.served else ", and in kind=growth"
        raise UsageError(f"{prefix}contenders: {name} {reason}{also_growth}")
