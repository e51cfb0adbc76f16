"""Show runs of the gate over commits: one figure per point, and the points that moved.

A run compares two commits and measures a ratio, head ÷ base. Two runs are linked if the head of one
is the base of the other, and linked runs form a *chain*. The *level* of a commit is 1 at the start
of a chain, else the level of its base times the ratio. So a level is relative to the first commit
of its chain, and runs may be from different machines. Levels are computed by point, for times and
for instructions. If the base of a run has no level of the quantity at the point, its level is 1, as
at the start of a chain. The interval of a level combines the intervals of all runs since the start
of its chain.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config.schema import UsageError
from experiments.gate.instructions import NATIVE, TOTAL
from experiments.gate.rules import EXIT_INTERRUPTED
from experiments.paths import ROOT
from experiments.report import document, text
from experiments.report.charts import DASHED, Curve, Mark, Scale, curves
from experiments.report.document import Notice, Page, Section, Tile
from experiments.report.style import COLOURS, FASTER, INK, SLOWER, WIDTH, Figure, Panel
from experiments.report.tables import Column, Table, Value
from experiments.results.store import RunStore

FOLDER = ROOT / "build" / "trend"
TIME = "time"
QUANTITIES = {  # (name in the legend, colour, line) by quantity
    TIME: ("time", INK, "-"),
    TOTAL: ("instructions", COLOURS["torch"], "-"),
    NATIVE: ("of them in emblib", COLOURS["cached_lfu"], DASHED),
}
FAILED_STATES = ("MISSING", "FAILED")
MOVED_COLOURS = {"SLOWER": SLOWER, "FASTER": FASTER}  # by state of a finding
MAX_NAMES = 5  # maximum number of names of commits below a panel
PANEL_HEIGHT = 2.7  # inches
LEVEL_RANGE = (0.95, 1.05)  # levels that every panel shows, so that noise looks small
HOW_TO_READ = (
    "Every run of the gate compares a commit with an earlier one, its base, in turn on one "
    "machine. The level of a commit is the level of its base times the ratio measured; the first "
    "commit of a chain of runs has level 1. Machines may change from run to run.",
    "Time: head ÷ base with its 95 % interval; the band combines the intervals of all runs since "
    "the chain began. Instructions: of one call, counted by callgrind, all of them and those "
    "within emblib's library.",
    "What moved is what the gate itself calls slower or faster, confirmed by a second measurement, "
    "and counted numbers beyond their limits: 1 % of instructions, 1 % and 16 MiB of peak memory, "
    "any other byte, half a percentage point of hits.",
)


@dataclass(frozen=True)
class Commit:
    """A commit that the gate measured, see `revisions.commit_facts`."""

    sha: str  # the whole hash
    date: str  # date of the commit, ISO 8601
    subject: str  # first line of its message

    @property
    def name(self) -> str:
        """Return the beginning of the hash."""
        return self.sha[:8]


@dataclass(frozen=True)
class GateRun:
    """A finished run of the gate between two commits, from its gate.json."""

    base: Commit
    head: Commit
    device: str  # cpu or cuda
    machine: str
    measured: str  # time of the run, ISO 8601
    points: Mapping[str, Mapping[str, Any]]  # findings by point, as `verdicts.as_json` writes them

    def ratios(self, point: str) -> Iterator[tuple[str, Level]]:
        """Yield each of QUANTITIES that was measured at a point, with head ÷ base."""
        finding = self.points.get(point, {})
        if finding.get("ratio"):
            ends = [finding.get(end) for end in ("lo", "hi")]
            low, high = (math.nan if end is None else math.log(end) for end in ends)
            yield TIME, Level(math.log(finding["ratio"]), (high - low) / 2)
        for name, sides in (finding.get("counts") or {}).items():
            if sides.get("base") and sides.get("head"):
                yield name, Level(math.log(sides["head"] / sides["base"]))


@dataclass(frozen=True)
class Level:
    """A ratio and its 95 % interval, as logarithms. The default is the exact ratio 1."""

    log: float = 0.0  # natural logarithm of the ratio
    half_width: float = 0.0  # half the width of the interval of `log`; nan if it is unknown

    def __add__(self, other: Level) -> Level:
        return Level(self.log + other.log, math.hypot(self.half_width, other.half_width))

    @property
    def ratio(self) -> float:
        """Return the ratio."""
        return math.exp(self.log)

    @property
    def ends(self) -> tuple[float, float]:
        """Return the interval of the ratio."""
        return math.exp(self.log - self.half_width), math.exp(self.log + self.half_width)


class PointInRun(NamedTuple):
    """A finding about a point, and its run."""

    run: GateRun
    finding: Mapping[str, Any]  # as `verdicts.as_json` writes it

    @property
    def is_worse(self) -> bool:
        """Return whether the gate called the point slower, or a counted number grew."""
        return self.finding["state"] == "SLOWER" or bool(self.finding.get("grown"))


@dataclass(frozen=True)
class Trend:
    """Runs of the gate, linked into chains."""

    runs: Sequence[GateRun]  # each after the run whose head is its base

    @property
    def commits(self) -> list[Commit]:
        """Return the commits without repeats: of each run the base, then the head."""
        return list(
            dict.fromkeys(
                commit for gate_run in self.runs for commit in (gate_run.base, gate_run.head)
            )
        )

    @property
    def points(self) -> list[str]:
        """Return the names of all points."""
        return list(dict.fromkeys(name for gate_run in self.runs for name in gate_run.points))

    def chains(self) -> list[list[Commit]]:
        """Return the commits of each chain of runs, first to last.

        A commit with several runs to it is in the chain of the first one. A branch, a second run
        from one base, is part of the chain of that base.
        """
        chains: dict[Commit, list[Commit]] = {}
        for gate_run in self.runs:
            chain = chains.setdefault(gate_run.base, [gate_run.base])
            if gate_run.head not in chains:
                chain.append(gate_run.head)
                chains[gate_run.head] = chain
        return list({id(chain): chain for chain in chains.values()}.values())

    def levels(self, point: str) -> dict[tuple[Commit, str], Level]:
        """Return the level of a point by commit and quantity."""
        levels: dict[tuple[Commit, str], Level] = {}
        for gate_run in self.runs:
            for quantity, ratio in gate_run.ratios(point):
                base_level = levels.setdefault((gate_run.base, quantity), Level())
                levels.setdefault((gate_run.head, quantity), base_level + ratio)
        return levels

    def moves(self) -> list[PointInRun]:
        """Return the findings of points whose time or counts moved, in the order of the runs."""
        return [
            PointInRun(gate_run, finding)
            for gate_run in self.runs
            for finding in gate_run.points.values()
            if finding["state"] in MOVED_COLOURS or finding.get("grown") or finding.get("shrunk")
        ]

    def failures(self) -> list[PointInRun]:
        """Return the findings of points that failed, of which no run says whether they moved."""
        return [
            PointInRun(gate_run, finding)
            for gate_run in self.runs
            for finding in gate_run.points.values()
            if finding["state"] in FAILED_STATES
        ]


def read_trend(folders: Sequence[Path], device: str = "") -> tuple[Trend, list[str]]:
    """Read every gate.json in folders, at any depth, whatever the names of the files.

    If several runs have the same head, the latest one counts.

    Args:
        folders: folders to search.
        device: "cpu" or "cuda" to skip runs on the other one; "" for any.

    Returns:
        The trend, and the exclusions: a line per run that is not in the trend, with the reason.

    Raises:
        UsageError: a folder is missing, there is no run between two commits, or there are runs on
            CPUs and on GPUs.
    """
    runs: dict[Commit, GateRun] = {}
    devices = set()
    exclusions = []
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}")
        for path in sorted(folder.rglob("*.json")):
            gate_result = _read_findings(path)
            if gate_result is None and path.name == "gate.json":
                exclusions.append(f"{path.relative_to(folder)}: it is damaged")
            if gate_result is None or (device and gate_result.get("device") not in (device, None)):
                continue
            try:
                reason = _exclusion_reason(gate_result)
                gate_run = None if reason else _parse_gate_run(gate_result)
            except (LookupError, TypeError, AttributeError):  # missing or wrong entries
                reason, gate_run = "it is damaged", None
            if gate_run is None:
                exclusions.append(f"{path.relative_to(folder)}: {reason}")
                continue
            devices.add(gate_run.device)
            if gate_run.head not in runs or runs[gate_run.head].measured < gate_run.measured:
                runs[gate_run.head] = gate_run
    if not runs:
        reason = f" ({exclusions[0]})" if exclusions else ""
        folder_names = ", ".join(map(str, folders))
        raise UsageError(f"{folder_names}: no finished run of the gate between two commits{reason}")
    if len(devices) > 1:
        raise UsageError("there are runs on CPUs and on GPUs: choose with --device cpu or cuda")
    return Trend(_order_by_link(runs)), exclusions


def _order_by_link(runs: Mapping[Commit, GateRun]) -> list[GateRun]:
    """Order runs by the date of their head, but each run after the run whose head is its base.

    The keys of `runs` are the heads.

    Dates alone do not do: a commit may be older than its base, on a branch for example.
    """
    ordered_runs: dict[Commit, GateRun] = {}
    for gate_run in sorted(
        runs.values(), key=lambda gate_run: (gate_run.head.date, gate_run.measured)
    ):
        linked_runs: dict[Commit, GateRun] = {}  # from `gate_run` back; a circle of bases ends it
        next_run: GateRun | None = gate_run
        while next_run and next_run.head not in ordered_runs and next_run.head not in linked_runs:
            linked_runs[next_run.head] = next_run
            next_run = runs.get(next_run.base)
        ordered_runs |= dict(reversed(linked_runs.items()))
    return list(ordered_runs.values())


def _read_findings(path: Path) -> dict[str, Any] | None:
    """Return the content of a file if it has that of a gate.json, else None."""
    try:
        gate_result = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_gate = isinstance(gate_result, dict) and {"status", "answer", "points"} <= gate_result.keys()
    return gate_result if is_gate else None


def _exclusion_reason(gate_result: Mapping[str, Any]) -> str:
    """Return why the run of a gate.json is not in a trend; "" if it is."""
    if gate_result["status"] == EXIT_INTERRUPTED:
        return "it was interrupted"
    if not gate_result["points"]:
        return f"it has no findings ({gate_result['answer']})"
    commits = gate_result.get("commits")
    if commits is None:
        return "it was measured before the gate stored commits"
    if not commits.get("base") or not commits.get("head"):
        return "a side is a working tree with changes"
    if commits["base"]["sha"] == commits["head"]["sha"]:
        return "it compares a commit with itself"
    return ""


def _parse_gate_run(gate_result: Mapping[str, Any]) -> GateRun:
    """Return the run of a gate.json for which `_exclusion_reason` is empty.

    Raises:
        KeyError, TypeError: an entry is missing, or of another type.
    """
    base, head = (Commit(**gate_result["commits"][side]) for side in ("base", "head"))
    points = {finding["point"]: finding for finding in gate_result["points"] if finding["state"]}
    return GateRun(
        base, head, gate_result["device"], gate_result["machine"], gate_result["measured"], points
    )


def page_of(trend: Trend, exclusions: Sequence[str] = (), command: str = "") -> Page:
    """Return the page of a trend, with a remark per line of `exclusions`; `command` repeats it."""
    commits, moves = trend.commits, trend.moves()
    num_worse = sum(move.is_worse for move in moves)
    num_better = len(moves) - num_worse
    machines = sorted({gate_run.machine for gate_run in trend.runs})
    chains = trend.chains()
    notices = [Notice(f"Left out: {reason}.", "remark") for reason in exclusions]
    for failure in trend.failures():
        finding = failure.finding
        explanation = f"{finding['point']} {finding['state'].lower()}: {finding.get('reason')}"
        notices.append(Notice(f"{failure.run.head.name}, {explanation}"))
    if len(chains) > 1:
        first_commits = ", ".join(chain[0].name for chain in chains)
        notices.append(
            Notice(
                f"No run links the {len(chains)} chains of commits that begin at {first_commits}: "
                "their levels are not comparable."
            )
        )
    return Page(
        name="gate trend",
        answer=sentences(trend),
        sections=[
            Section("Points", figures=[_figure(trend)]),
            Section("What moved", table=_moved_table(moves)),
            Section("Commits", table=_commit_table(trend)),
            Section(
                "Every figure", fold_label="Every point at every commit", table=_level_table(trend)
            ),
            Section("How to read this", points=HOW_TO_READ),
            Section("Reproduce", code=command),
        ],
        subtitle=" · ".join(machines),
        tiles=[
            Tile(str(len(commits)), "commits"),
            Tile(str(len(trend.points)), "points"),
            Tile(str(num_worse), "regressions", "bad" if num_worse else ""),
            Tile(str(num_better), "improvements", "good" if num_better else ""),
        ],
        notices=notices,
    )


def sentences(trend: Trend) -> list[str]:
    """State how many points moved, and the point whose last level is the highest."""
    commits, moves = trend.commits, trend.moves()
    first, last = commits[0], commits[-1]
    change = "nothing moved"
    if moves:
        num_points = len({move.finding["point"] for move in moves})
        num_heads = len({move.run.head for move in moves})
        change = f"{text.count(num_points, 'point')} moved at {text.count(num_heads, 'commit')}"
    if failures := trend.failures():
        num_points = len({failure.finding["point"] for failure in failures})
        change += f", {text.count(num_points, 'point')} failed"
    answer = [f"{text.count(len(commits), 'commit')} from {first.name} to {last.name}: {change}."]
    for quantity in (TIME, TOTAL):
        last_levels: dict[str, Level] = {}
        for point in trend.points:
            for (_, level_quantity), level in trend.levels(point).items():
                if level_quantity == quantity:
                    last_levels[point] = level
        if last_levels:
            slowest = max(last_levels, key=lambda point: last_levels[point].log)
            label, _, _ = QUANTITIES[quantity]
            answer.append(f"Largest level of {label}: {slowest}, {last_levels[slowest].ratio:.3f}.")
    return answer


def _figure(trend: Trend) -> Figure:
    """Return the figure of all levels, a panel per point."""
    commits = trend.commits
    panels = [_panel(trend, point) for point in trend.points]
    caption = (
        "Level of each commit relative to the first; lower is better. Band: 95 % interval of the "
        "time, combined over the runs since then. Filled dots: the gate called the commit slower "
        "(red) or faster (blue) than its base."
    )
    sizes = f"{text.count(len(panels), 'point')}, {text.count(len(commits), 'commit')}"
    return Figure("trend", "Time and instructions over commits", caption, sizes, panels, columns=2)


def _panel(trend: Trend, point: str) -> Panel:
    """Draw the levels of a point over the commits, a line per chain and quantity."""
    commits = trend.commits
    position_of = {commit: position for position, commit in enumerate(commits)}
    levels, lines, legend_labels = trend.levels(point), [], set()
    for chain in trend.chains():
        for quantity, (label, colour, line) in QUANTITIES.items():
            measured_commits = [commit for commit in chain if (commit, quantity) in levels]
            if not measured_commits:
                continue
            chain_levels = [levels[commit, quantity] for commit in measured_commits]
            ends = [level.ends for level in chain_levels] if quantity == TIME else []
            lines.append(
                Curve(
                    [position_of[commit] for commit in measured_commits],
                    [level.ratio for level in chain_levels],
                    colour,
                    "" if label in legend_labels else label,
                    "o",
                    line,
                    width=1.4,
                    size=3,
                    low=[low for low, _ in ends] or None,
                    high=[high for _, high in ends] or None,
                    is_band=True,
                )
            )
            legend_labels.add(label)
    for state, colour in MOVED_COLOURS.items():
        dots = [
            (position_of[gate_run.head], levels[gate_run.head, TIME].ratio)
            for gate_run in trend.runs
            if gate_run.points.get(point, {}).get("state") == state
            and (gate_run.head, TIME) in levels
        ]
        if dots:
            x, y = zip(*dots, strict=True)
            lines.append(Curve(x, y, colour, marker="o", line="", size=7, is_on_top=True))
    step = max(1, math.ceil(len(commits) / MAX_NAMES))
    ticks = list(range(0, len(commits), step))
    x_scale = Scale("", ticks=ticks, names=[commits[tick].name for tick in ticks])
    y_scale = Scale("÷ first commit", reach=LEVEL_RANGE)
    drawing = curves(
        lines, x_scale, y_scale, name_position="below", columns=3, marks=[Mark(1.0, line=DASHED)]
    )
    return Panel(point, drawing, WIDTH, PANEL_HEIGHT)


def _count_ratio(finding: Mapping[str, Any], name: str) -> Value:
    """Return an entry for head ÷ base of a counted quantity."""
    counts = (finding.get("counts") or {}).get(name)
    ratio = counts["head"] / counts["base"] if counts and counts["base"] else None
    return Value.of(ratio, lambda value: f"{value:.4f}")


def _time_ratio(finding: Mapping[str, Any]) -> Value:
    """Return an entry for head ÷ base of the time, with its interval if it is known."""
    low, high = finding.get("lo"), finding.get("hi")
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return Value.of(finding.get("ratio"), lambda value: f"{value:.3f}{interval}")


# Columns of a table with a row per finding.
FINDING_COLUMNS: dict[str, Column] = {
    "commit": lambda row: row.run.head.name,
    "point": lambda row: row.finding["point"],
    "verdict": lambda row: row.finding["state"],
    "time ÷ base": lambda row: _time_ratio(row.finding),
}


def _moved_table(moves: Sequence[PointInRun]) -> Table:
    """Return a row per finding of a point that moved."""
    return Table.of(
        moves,
        {
            **FINDING_COLUMNS,
            "instructions ÷ base": lambda move: _count_ratio(move.finding, TOTAL),
            "in emblib ÷ base": lambda move: _count_ratio(move.finding, NATIVE),
            "counted": lambda move: (
                "; ".join((*(move.finding.get("grown") or ()), *(move.finding.get("shrunk") or ())))
                or text.DASH
            ),
            "subject": lambda move: move.run.head.subject,
        },
    )


def _commit_table(trend: Trend) -> Table:
    """Return a row per run, with the number of points in each state."""

    def count_states(gate_run: GateRun) -> str:
        states = [finding["state"] for finding in gate_run.points.values()]
        return ", ".join(
            f"{states.count(state)} {state.lower()}" for state in dict.fromkeys(sorted(states))
        )

    return Table.of(
        trend.runs,
        {
            "commit": lambda gate_run: gate_run.head.name,
            "date": lambda gate_run: gate_run.head.date[:10],
            "against": lambda gate_run: gate_run.base.name,
            "verdicts": count_states,
            "machine": lambda gate_run: gate_run.machine,
            "measured": lambda gate_run: gate_run.measured[:16],
            "subject": lambda gate_run: gate_run.head.subject,
        },
    )


def _level_table(trend: Trend) -> Table:
    """Return a row per finding of every run, with the levels of its commit."""
    levels_by_point = {point: trend.levels(point) for point in trend.points}
    rows = [
        PointInRun(gate_run, finding)
        for gate_run in trend.runs
        for finding in gate_run.points.values()
    ]

    def level_column(quantity: str) -> Column:
        def level_value(row: PointInRun) -> Value:
            """Return the entry of one quantity; a dash if the run did not measure it."""
            level = levels_by_point[row.finding["point"]].get((row.run.head, quantity))
            return Value.of(level.ratio if level else None, lambda value: f"{value:.4f}")

        return level_value

    def count_value(row: PointInRun) -> Value:
        counts = (row.finding.get("counts") or {}).get(TOTAL) or {}
        return Value.of(counts.get("head"), lambda value: f"{value:,.0f}")

    return Table.of(
        rows,
        {
            **FINDING_COLUMNS,
            **{
                f"{label} ÷ first": level_column(quantity)
                for quantity, (label, _, _) in QUANTITIES.items()
            },
            "instructions": count_value,
        },
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `trend`."""
    parser.description = (
        "Show runs of the gate over commits. Folders are searched at any depth for files with the "
        "content of a gate.json. Exit status: 0 done, 2 wrong usage."
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the page (build/trend)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="", help="only runs on it")


def run(arguments: argparse.Namespace) -> int:
    """Write the page of a trend and print its answer; return exit status 0.

    Raises:
        UsageError: see `read_trend`.
        OSError: the page cannot be written.
    """
    trend, exclusions = read_trend(arguments.folders, arguments.device)
    words = ["python", "run.py", "trend", *map(str, arguments.folders)]
    words += ["--device", arguments.device] if arguments.device else []
    report = page_of(trend, exclusions, shlex.join(words))
    store = RunStore(arguments.out.resolve())
    files = document.write(store.path, report)
    store.write("trend.md", report.markdown(figures=False))
    print(" ".join(report.answer))
    print(f"report: {files}")
    return 0
