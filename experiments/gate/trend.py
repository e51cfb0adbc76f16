"""Show runs of the gate over commits: one figure per point, and what moved.

A run compares two commits and gives a ratio, head ÷ base. Two runs are linked where the head of one
is the base of the other, and linked runs form a *chain*. The *level* of a commit is 1 at the start
of a chain, else the level of its base times the ratio: it is relative to the first commit of the
chain. So the runs may be from different machines. Levels are computed for times and for
instructions. The interval of a level combines the intervals of all runs since the start of its
chain, and widens along it.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from experiments.config.schema import UsageError
from experiments.gate.instructions import NATIVE, TOTAL
from experiments.paths import ROOT
from experiments.report import document, text
from experiments.report.charts import DASHED, Curve, Mark, Scale, curves
from experiments.report.document import Notice, Page, Section, Tile
from experiments.report.style import COLOURS, FASTER, INK, SLOWER, WIDTH, Figure, Panel
from experiments.report.tables import Column, Table, Value
from experiments.results.store import RunStore

FOLDER = ROOT / "build" / "trend"
TIME = "time"
QUANTITIES = {  # in the legend, with colour and line
    TIME: ("time", INK, "-"),
    TOTAL: ("instructions", COLOURS["torch"], "-"),
    NATIVE: ("of them in emblib", COLOURS["cached_lfu"], DASHED),
}
MOVED = {"SLOWER": SLOWER, "FASTER": FASTER}
MAX_NAMES = 5  # names of commits below a panel are at most so many
PANEL_HEIGHT = 2.7  # inches
LEVEL_RANGE = (0.95, 1.05)  # every panel shows it, so that noise does not look like change
HOW = (
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
    date: str  # of the commit, ISO 8601
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
        """Yield each quantity that was measured at a point, with its head ÷ base."""
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
    half: float = 0.0  # half the width of the interval of `log`; nan where it is unknown

    def __add__(self, other: Level) -> Level:
        return Level(self.log + other.log, math.hypot(self.half, other.half))

    @property
    def ratio(self) -> float:
        """Return the ratio."""
        return math.exp(self.log)

    @property
    def ends(self) -> tuple[float, float]:
        """Return the interval of the ratio."""
        return math.exp(self.log - self.half), math.exp(self.log + self.half)


class PointInRun(NamedTuple):
    """A finding about a point, and its run."""

    run: GateRun
    finding: Mapping[str, Any]

    @property
    def is_worse(self) -> bool:
        """Return whether the gate called the point slower, or a counted number grew."""
        return self.finding["state"] == "SLOWER" or bool(self.finding.get("grown"))


@dataclass(frozen=True)
class Trend:
    """Runs in the order of their commits, linked into chains."""

    runs: Sequence[GateRun]

    @property
    def commits(self) -> list[Commit]:
        """Return the commits without repeats: of each run the base, then the head."""
        return list(dict.fromkeys(c for result in self.runs for c in (result.base, result.head)))

    @property
    def points(self) -> list[str]:
        """Return the names of all points."""
        return list(dict.fromkeys(name for result in self.runs for name in result.points))

    def chains(self) -> list[list[Commit]]:
        """Return the commits of each chain of runs."""
        chains: dict[Commit, list[Commit]] = {}
        for result in self.runs:
            chain = chains.setdefault(result.base, [result.base])
            if result.head not in chains:
                chain.append(result.head)
                chains[result.head] = chain
        return list({id(chain): chain for chain in chains.values()}.values())

    def levels(self, point: str) -> dict[tuple[Commit, str], Level]:
        """Return the level of a point by commit and quantity."""
        levels: dict[tuple[Commit, str], Level] = {}
        for result in self.runs:
            for name, ratio in result.ratios(point):
                base_level = levels.setdefault((result.base, name), Level())
                levels[result.head, name] = base_level + ratio
        return levels

    def moves(self) -> list[PointInRun]:
        """Return the findings of points whose time or counts moved, in the order of the runs."""
        return [
            PointInRun(result, finding)
            for result in self.runs
            for finding in result.points.values()
            if finding["state"] in MOVED or finding.get("grown") or finding.get("shrunk")
        ]


def read_trend(folders: Sequence[Path], device: str = "") -> tuple[Trend, list[str]]:
    """Read every gate.json in folders, at any depth and of any name.

    Returns the trend, and a line per run that is left out. Runs on another `device` are skipped. If
    several runs have the same head, the latest one counts.

    Raises:
        UsageError: no folder, no run between two commits, or runs on CPUs and on GPUs.
    """
    runs: dict[Commit, GateRun] = {}
    devices = set()
    left_out = []
    for folder in folders:
        if not folder.is_dir():
            raise UsageError(f"there is no folder {folder}")
        for path in sorted(folder.rglob("*.json")):
            saved = _read_findings(path)
            if saved is None or (device and saved.get("device") not in (device, None)):
                continue
            if reason := _reason_left_out(saved):
                left_out.append(f"{path.relative_to(folder)}: {reason}")
                continue
            result = _gate_run(saved)
            devices.add(result.device)
            if result.head not in runs or runs[result.head].measured < result.measured:
                runs[result.head] = result
    if not runs:
        reasons = f" ({left_out[0]})" if left_out else ""
        folder_names = ", ".join(map(str, folders))
        raise UsageError(
            f"{folder_names}: no finished run of the gate between two commits{reasons}"
        )
    if len(devices) > 1:
        raise UsageError("there are runs on CPUs and on GPUs: choose with --device cpu or cuda")
    ordered = sorted(runs.values(), key=lambda result: (result.head.date, result.measured))
    return Trend(ordered), left_out


def _read_findings(path: Path) -> dict[str, Any] | None:
    """Return the content of a file if it is that of a gate.json, else None."""
    try:
        saved = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    is_gate = isinstance(saved, dict) and {"status", "answer", "points"} <= saved.keys()
    return saved if is_gate else None


def _reason_left_out(saved: Mapping[str, Any]) -> str:
    """Return why a run has no place in a trend; empty where it has."""
    commits = saved.get("commits")
    if commits is None:
        return "it was measured before the gate stored commits"
    if not commits.get("base") or not commits.get("head"):
        return "a side is a working tree with changes"
    if commits["base"]["sha"] == commits["head"]["sha"]:
        return "it compares a commit with itself"
    if saved["status"] == 130 or not saved["points"]:
        return f"it has no findings ({saved['answer']})"
    return ""


def _gate_run(saved: Mapping[str, Any]) -> GateRun:
    """Return the run of a gate.json for which `_reason_left_out` is empty."""
    base, head = (Commit(**saved["commits"][side]) for side in ("base", "head"))
    points = {finding["point"]: finding for finding in saved["points"]}
    return GateRun(base, head, saved["device"], saved["machine"], saved["measured"], points)


def page(trend: Trend, left_out: Sequence[str] = (), command: str = "") -> Page:
    """Return the page of a trend."""
    commits, moves = trend.commits, trend.moves()
    slower = [move for move in moves if move.is_worse]
    faster = len(moves) - len(slower)
    machines = sorted({result.machine for result in trend.runs})
    chains = trend.chains()
    notices = [Notice(f"Left out: {reason}.", "remark") for reason in left_out]
    if len(chains) > 1:
        begins = ", ".join(chain[0].name for chain in chains)
        notices.append(
            Notice(
                f"No run links the {len(chains)} chains of commits that begin at {begins}: their "
                "levels are not comparable."
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
            Section("How to read this", points=HOW),
            Section("Reproduce", code=command),
        ],
        subtitle=" · ".join(machines),
        tiles=[
            Tile(str(len(commits)), "commits"),
            Tile(str(len(trend.points)), "points"),
            Tile(str(len(slower)), "regressions", "bad" if slower else ""),
            Tile(str(faster), "improvements", "good" if faster else ""),
        ],
        notices=notices,
    )


def sentences(trend: Trend) -> list[str]:
    """Return what moved, and the points that are farthest from where they began."""
    commits, moves = trend.commits, trend.moves()
    first, last = commits[0], commits[-1]
    moved = "nothing moved"
    if moves:
        points = len({move.finding["point"] for move in moves})
        heads = len({move.run.head for move in moves})
        moved = f"{text.count(points, 'point')} moved at {text.count(heads, 'commit')}"
    commit_words = f"{text.count(len(commits), 'commit')} from {first.name} to {last.name}"
    answer = [f"{commit_words}: {moved}."]
    for name in (TIME, TOTAL):
        last_levels: dict[str, Level] = {}
        for point in trend.points:
            for (_, quantity), level in trend.levels(point).items():
                if quantity == name:
                    last_levels[point] = level
        if last_levels:
            worst = max(last_levels, key=lambda point: last_levels[point].log)
            label, _, _ = QUANTITIES[name]
            answer.append(f"Largest level of {label}: {worst}, {last_levels[worst].ratio:.3f}.")
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
    position_of = {commit: number for number, commit in enumerate(commits)}
    levels, lines, labelled = trend.levels(point), [], set()
    for chain in trend.chains():
        for name, (label, colour, line) in QUANTITIES.items():
            of_chain = [(position_of[c], levels[c, name]) for c in chain if (c, name) in levels]
            if not of_chain:
                continue
            x, values = zip(*of_chain, strict=True)
            ends = [level.ends for level in values] if name == TIME else []
            lines.append(
                Curve(
                    x,
                    [level.ratio for level in values],
                    colour,
                    "" if label in labelled else label,
                    "o",
                    line,
                    width=1.4,
                    size=3,
                    low=[low for low, _ in ends] or None,
                    high=[high for _, high in ends] or None,
                    band=True,
                )
            )
            labelled.add(label)
    for state, colour in MOVED.items():
        dots = [
            (position_of[result.head], levels[result.head, TIME].ratio)
            for result in trend.runs
            if result.points.get(point, {}).get("state") == state and (result.head, TIME) in levels
        ]
        if dots:
            x, y = zip(*dots, strict=True)
            lines.append(Curve(x, y, colour, marker="o", line="", size=7, above=True))
    step = max(1, math.ceil(len(commits) / MAX_NAMES))
    ticks = list(range(0, len(commits), step))
    x_scale = Scale("", ticks=ticks, names=[commits[tick].name for tick in ticks])
    y_scale = Scale("÷ first commit", reach=LEVEL_RANGE)
    drawing = curves(
        lines, x_scale, y_scale, name_position="below", columns=3, marks=[Mark(1.0, line=DASHED)]
    )
    return Panel(point, drawing, WIDTH, PANEL_HEIGHT)


def _change(finding: Mapping[str, Any], name: str) -> Value:
    """Return an entry for head ÷ base of a counted quantity."""
    sides = (finding.get("counts") or {}).get(name)
    ratio = sides["head"] / sides["base"] if sides and sides["base"] else None
    return Value.of(ratio, lambda v: f"{v:.4f}")


def _time(finding: Mapping[str, Any]) -> Value:
    low, high = finding.get("lo"), finding.get("hi")
    interval = f" [{low:.3f}, {high:.3f}]" if low is not None and high is not None else ""
    return Value.of(finding.get("ratio"), lambda v: f"{v:.3f}{interval}")


# Columns of a table with a row per finding.
FINDING_COLUMNS: dict[str, Column] = {
    "commit": lambda row: row.run.head.name,
    "point": lambda row: row.finding["point"],
    "verdict": lambda row: row.finding["state"],
    "time ÷ base": lambda row: _time(row.finding),
}


def _moved_table(moves: Sequence[PointInRun]) -> Table:
    return Table.of(
        moves,
        {
            **FINDING_COLUMNS,
            "instructions ÷ base": lambda move: _change(move.finding, TOTAL),
            "in emblib ÷ base": lambda move: _change(move.finding, NATIVE),
            "counted": lambda move: (
                "; ".join((*(move.finding.get("grown") or ()), *(move.finding.get("shrunk") or ())))
                or text.DASH
            ),
            "subject": lambda move: move.run.head.subject,
        },
    )


def _commit_table(trend: Trend) -> Table:
    def states(result: GateRun) -> str:
        states = [finding["state"] for finding in result.points.values()]
        return ", ".join(f"{states.count(s)} {s.lower()}" for s in dict.fromkeys(sorted(states)))

    return Table.of(
        trend.runs,
        {
            "commit": lambda result: result.head.name,
            "date": lambda result: result.head.date[:10],
            "against": lambda result: result.base.name,
            "verdicts": states,
            "machine": lambda result: result.machine,
            "measured": lambda result: result.measured[:16],
            "subject": lambda result: result.head.subject,
        },
    )


def _level_table(trend: Trend) -> Table:
    levels = {point: trend.levels(point) for point in trend.points}
    rows = [PointInRun(r, finding) for r in trend.runs for finding in r.points.values()]

    def level_column(name: str) -> Column:
        def level(row: PointInRun) -> Value:
            value = levels[row.finding["point"]].get((row.run.head, name))
            return Value.of(value.ratio if value else None, lambda v: f"{v:.4f}")

        return level

    def count(row: PointInRun) -> Value:
        sides = (row.finding.get("counts") or {}).get(TOTAL) or {}
        return Value.of(sides.get("head"), lambda v: f"{v:,.0f}")

    return Table.of(
        rows,
        {
            **FINDING_COLUMNS,
            **{
                f"{label} ÷ first": level_column(name) for name, (label, _, _) in QUANTITIES.items()
            },
            "instructions": count,
        },
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `trend`."""
    parser.description = (
        "Show runs of the gate over commits. Folders are searched at any depth for files with the "
        "content of a gate.json. Exit status: 0 done, 2 wrong usage."
    )
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the page")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="", help="only runs on it")


def run(arguments: argparse.Namespace) -> int:
    """Write the page of a trend; raise UsageError where there is nothing to show."""
    trend, left_out = read_trend(arguments.folders, arguments.device)
    command = f"python run.py trend {' '.join(map(str, arguments.folders))}"
    report = page(trend, left_out, command)
    store = RunStore(arguments.out.resolve())
    written = document.write(store.path, report)
    store.write("trend.md", report.markdown(figures=False))
    print(" ".join(report.answer))
    print(f"report: {written}")
    return 0
