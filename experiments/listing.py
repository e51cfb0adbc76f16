"""List experiments, contenders, workloads, presets, hardware and committed results."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments import configure, kinds, launch
from experiments.config.schema import Config, UsageError
from experiments.contenders import registry
from experiments.kinds.base import Repetition
from experiments.paths import CONF, REFERENCE
from experiments.results.store import read_json, runs_in
from experiments.run import jobs

UNKNOWN = "–"
NEEDS_A_GPU = "needs a GPU"
WIDTH_CHARACTERS = 110  # width outside a terminal
UNBROKEN_CHARACTERS = 24  # maximum length of texts that are not wrapped


@dataclass
class Listing:
    """A section of the list: a table, with a note below it.

    Attributes:
        title: heading.
        columns: headings of the columns.
        rows: texts by column. A line break in the first one starts its second line.
        note: line below the table; "" for none.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    note: str = ""


def experiments() -> Listing:
    """Return the experiments: question, kind, number of cells and time limit by default."""
    section = Listing(
        "Experiments",
        ("name and question", "kind", "cells", "at most"),
        note="python run.py +experiment=NAME; dry_run=true shows the cells and what they need; "
        "training has no limit and is not counted",
    )
    device = "cuda" if launch.list_gpus() else "cpu"  # auto would load torch to find out
    for name in configure.groups()["experiment"]:
        question = configure.question(name)
        try:
            config = configure.load([f"+experiment={name}", f"device={device}"])
            kind, (cells, seconds) = config.kind, cells_and_time(config)
        except UsageError as error:
            kind, cells, seconds, question = "broken", UNKNOWN, UNKNOWN, str(error)
        section.rows.append((f"{name}\n{question}", kind, cells, seconds))
    return section


def cells_and_time(config: Config) -> tuple[str, str]:
    """Return the number of cells of an experiment, and the longest time that it takes, as texts.

    Both are UNKNOWN for a kind with a runner of its own. Cells that train have no limit of time and
    do not count; if all cells train, the time is UNKNOWN.
    """
    if kinds.find(config.kind).runner:
        return UNKNOWN, UNKNOWN
    cells = kinds.expand(config)
    limited_cells = [
        cell
        for cell in cells
        if kinds.find(cell.kind).measurement.repetition is not Repetition.TRAINED
    ]
    if not limited_cells:
        return str(len(cells)), UNKNOWN
    total = sum(
        jobs.num_replicates(cell, config) * jobs.max_job_seconds(cell, config)
        for cell in limited_cells
    )
    return str(len(cells)), _duration(min(total, config.timing.total_seconds or math.inf))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def contenders() -> Listing:
    """Return the contenders, and whether they can run here."""
    section = Listing(
        "Contenders",
        ("name", "in reports", "one per", "here"),
        note="contenders=[tbe,torch] chooses; CONTRIBUTING.md says how to add one",
    )
    variants = {"rank": "rank", "cache": "cache size", "": ""}
    on_gpu = bool(launch.list_gpus())
    for name, entry in registry.entries().items():
        gpu_note = NEEDS_A_GPU * (entry.cuda_only and not on_gpu)
        availability = entry.missing() or gpu_note or "; ".join(entry.unknown_versions()) or "yes"
        section.rows.append((name, entry.label, variants[entry.variants], availability))
    return section


def group_options(title: str, group: str, example: str) -> Listing:
    """Return the options of a config group with the opening comments of their files."""
    note = f"{group}=NAME, and {group}.{example} for a part of one"
    section = Listing(title, ("name", "what it is"), note=note)
    for name in configure.groups()[group]:
        section.rows.append((name, opening_comment(CONF / group / f"{name}.yaml")))
    return section


def opening_comment(file: Path) -> str:
    """Return the comment at the beginning of a YAML file as one line; "" without one."""
    lines: list[str] = []
    for line in file.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


def hardware() -> Listing:
    """Return the devices of conf/hardware with their theoretical figures."""
    from experiments.machine.ceilings import FIGURES, known_devices

    section = Listing(
        "Hardware",
        ("name", *FIGURES.values()),
        note="as their makers say, sources in conf/hardware; reports divide by the bandwidth",
    )
    for device in known_devices():
        figures = [device.figures.get(key) for key in FIGURES]
        texts = [UNKNOWN if figure is None else f"{figure:,.4g}" for figure in figures]
        section.rows.append((device.name, *texts))
    return section


def references(folder: Path = REFERENCE) -> Listing:
    """Return the committed runs in `folder`, <device>/<experiment>."""
    section = Listing(
        "Committed results",
        ("device", "experiment", "torch", "emblib", "measured"),
        note="in reports/reference; to add one: python run.py reference keep RUN",
    )
    for path in runs_in(folder, "*/*"):
        environment: dict[str, Any] = read_json(path, "environment.json")
        sha = (environment.get("git") or {}).get("sha") or UNKNOWN
        date = str(environment.get("time_utc", UNKNOWN))[:10]
        device = str(environment.get("device", path.parent.name))
        section.rows.append((device, path.name, str(environment.get("torch", UNKNOWN)), sha, date))
    return section


SECTIONS: dict[str, Callable[[], Listing]] = {
    "experiments": experiments,
    "contenders": contenders,
    "workloads": partial(group_options, "Workloads", "workload", "B=512"),
    "presets": partial(group_options, "Timing presets", "timing", "cell_seconds=5"),
    "hardware": hardware,
    "references": references,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `list`."""
    parser.add_argument(
        "sections",
        nargs="*",
        metavar="SECTION",
        help=f"{', '.join(SECTIONS)}; all, if none is named",
    )


def run(arguments: argparse.Namespace) -> int:
    """Print the list; raise UsageError for an unknown section."""
    for name in arguments.sections:
        if name not in SECTIONS:
            raise UsageError(f"no section '{name}'. There is: {', '.join(SECTIONS)}")
    show(arguments.sections)
    return 0


def show(names: Sequence[str] = (), console: Console | None = None) -> None:
    """Print the sections of these names (keys of SECTIONS), or all, each once it is complete."""
    if console is None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH_CHARACTERS)
    for number, name in enumerate(names or SECTIONS):
        section = SECTIONS[name]()
        if number:
            console.print()
        count = (f"  {len(section.rows)}", "dim")
        console.print(Text.assemble((section.title, "bold"), count))
        console.print(_table(section) if section.rows else Text("  none yet", style="dim"))
        if section.note:
            console.print(Text(f"  {section.note}", style="dim"))


def _table(section: Listing) -> Table:
    """Return a section as a table of rich; columns of numbers are aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for number, title in enumerate(section.columns):
        texts = [row[number] for row in section.rows]
        is_numeric = number > 0 and all(re.fullmatch(r"–|[\d,.]+( \w+)?", text) for text in texts)
        table.add_column(
            title,
            justify="right" if is_numeric else "left",
            no_wrap=max(map(len, texts)) <= UNBROKEN_CHARACTERS,
        )
    for first, *further_cells in section.rows:
        name, _, subtitle = first.partition("\n")
        text = Text.assemble((name, "cyan"), (f"\n{subtitle}" if subtitle else "", "dim"))
        table.add_row(text, *map(_cell, further_cells))
    return table


def _cell(text: str) -> Text:
    style = {"yes": "green", "broken": "red", UNKNOWN: "dim"}.get(text, "")
    return Text(text, style="yellow" if text.startswith(("not ", NEEDS_A_GPU)) else style)
