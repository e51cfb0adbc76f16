"""`python run.py ...`: check the command line, then run; usage errors exit 2 with one line."""

from __future__ import annotations

import argparse
import gc
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments import kinds, launch
from experiments.config import configure
from experiments.config.schema import Config, UsageError
from experiments.contenders import registry
from experiments.paths import CONF, REFERENCE
from experiments.results.store import read_json, runs_in
from experiments.run import jobs

HELP = """\
Measure embedding tables and write a report.

  python run.py +experiment=NAME [key=value ...]
  python run.py +experiment=NAME --cfg job         print the composed configuration, run nothing
  python run.py -m +experiment=A,B                 one run after another (Hydra's multirun)
  python run.py --list                             what there is, and what can run here

examples
  python run.py +experiment=tt_vs_tbe
  python run.py +experiment=tt_vs_tbe timing=quick sweep.D=[64] sweep.rank=[16,32]
  python run.py +experiment=tt_vs_tbe cases.criteo.workload.B=512 device.threads=1

  python run.py +experiment=tt_vs_tbe dry_run=true          what would be measured, for how long
  python run.py +experiment=tt_vs_tbe rerun=failed          ... once more where something failed

A command that is given again goes on where the last one ended: what an earlier run has measured, of
the same code on the same machine, is taken from there (rerun=all measures everything again).

exit status
  0  done; running out of memory is a result (with strict=true it is a failure)
  1  the tool broke                       2  wrong usage
  3  the gate: a confirmed regression     4  the gate is not sure, and gate.strict=true
  5  done, but a contender failed, was wrong or ran out of time
  6  the gate: nothing to compare         130  interrupted; what was measured is kept and reported

CPU threads wait passively (OMP_WAIT_POLICY=PASSIVE unless it is set): a little slower on an idle
machine, far steadier on a shared one.
"""


def listing() -> str:
    """Return the experiments with their questions, and the choices of every other group."""
    choices = configure.groups()
    told = [(name, configure.question(name)) for name in choices.pop("experiment")]
    options = [(group, ", ".join(names)) for group, names in choices.items()]
    left = max(len(name) for name, _ in (*told, *options)) + 4
    lines = ["experiments"]
    for number, (name, words) in enumerate((*told, *options)):
        lines += ["groups"] if number == len(told) else []
        lines += textwrap.wrap(
            words, 100, initial_indent=f"  {name}".ljust(left), subsequent_indent=" " * left
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run the command line and return the exit status."""
    try:
        return _main(arguments)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


def _main(arguments: Sequence[str]) -> int:
    # A thread that waits by spinning holds the core that the thread it waits for needs, if anything
    # else runs: on two busy cores every contender then takes 10 to 50 times as long. OpenMP reads
    # this when torch is loaded, so it is set first; a value of the user's own wins.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    flags = [a for a in arguments if a.startswith("-")]
    words = [a for a in arguments if not a.startswith("-")]
    if {"-h", "--help"} & set(flags):
        print(HELP + "\n" + listing())
        return 0
    if "--list" in flags:
        return show_list(words)
    try:
        if {"-m", "--multirun"} & set(flags):
            from experiments import launch

            return launch.run(arguments)
        if flags:
            return _hydra(arguments)
        if not any(w.lstrip("+").startswith("experiment=") for w in words):
            configure.check_keys(words)
            raise UsageError("which experiment? e.g. python run.py +experiment=tt_vs_tbe")
        config = configure.load(words)
        chosen = next(w for w in words if w.lstrip("+").startswith("experiment="))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        if "which experiment" in str(error):
            print("\n" + listing(), file=sys.stderr)
        return 2
    from experiments.run import runner  # torch, pandas and matplotlib load only when there is work

    gc.freeze()  # else a seventh of a small run is spent looking through torch
    return runner.run(config, question=configure.question(chosen.partition("=")[2]), words=words)


def _hydra(arguments: Sequence[str]) -> int:
    """Pass Hydra's own flags (-m, --cfg, ...) on, after the same check of the keys."""
    import hydra
    from omegaconf import DictConfig

    configure.register()
    values = {"-c", "--cfg", "-p", "--package", "-cp", "--config-path", "-cn", "--config-name"}
    values |= {"-cd", "--config-dir", "-i", "--info"}
    words = [
        a
        for before, a in zip(["", *arguments], arguments, strict=False)
        if not a.startswith("-") and before not in values and not a.startswith("hydra.")
    ]
    configure.check_keys(words)
    chosen = [w.partition("=")[2] for w in words if w.lstrip("+").startswith("experiment=")]
    status: int | None = None

    def job(composed: DictConfig) -> None:
        nonlocal status
        status = 1  # unless it gets to its end
        try:
            if not chosen:
                raise UsageError("which experiment? e.g. python run.py +experiment=tt_vs_tbe")
            config = configure.checked(composed)
        except UsageError as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
            return
        from experiments.run import runner

        status = runner.run(config, question=configure.question(chosen[-1]), words=words)

    os.environ.setdefault("HYDRA_FULL_ERROR", "0")
    sys.argv = ["run.py", *arguments]
    try:
        hydra.main(version_base="1.3", config_path=str(CONF), config_name="config")(job)()
    except SystemExit as end:
        if end.code == 1 and status is None:
            return 2  # Hydra could not compose what was typed, and has said so
        raise
    return status or 0


UNKNOWN = "–"
NEEDS_A_GPU = "needs a GPU"
WIDTH = 110  # where it is not a terminal's
UNBROKEN = 24  # characters that stay on one line


@dataclass
class Section:
    """A table of the list."""

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    note: str = ""


# What there is


def experiments() -> Section:
    """List the experiments with their questions and costs at their default presets."""
    section = Section(
        "Experiments",
        ("name and question", "kind", "cells", "at most"),
        note="python run.py +experiment=NAME; dry_run=true shows the cells and what they need",
    )
    device = "cuda" if launch.list_gpus() else "cpu"  # auto would load torch to find out
    for name in configure.groups()["experiment"]:
        question = configure.question(name)
        try:
            config = configure.load([f"+experiment={name}", f"device={device}"])
            kind, (cells, seconds) = config.kind, extent(config)
        except UsageError as error:
            kind, cells, seconds, question = "broken", UNKNOWN, UNKNOWN, str(error)
        section.rows.append((f"{name}\n{question}", kind, cells, seconds))
    return section


def extent(config: Config) -> tuple[str, str]:
    """Return the cells and time limit; unknown for an experiment that runs its own procedure."""
    if kinds.find(config.kind).leads:
        return UNKNOWN, UNKNOWN
    cells = kinds.expand(config)
    total = sum(jobs.replicates(cell, config) * jobs.seconds_of(cell, config) for cell in cells)
    return str(len(cells)), _duration(min(total, config.timing.total_seconds or math.inf))


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def contenders() -> Section:
    """List the contenders and whether they can run here."""
    section = Section(
        "Contenders",
        ("name", "in reports", "one per", "here"),
        note="contenders=[tbe,torch] chooses; CONTRIBUTING.md says how to add one",
    )
    variants = {"rank": "rank", "cache": "cache size", "": ""}
    on_gpu = bool(launch.list_gpus())
    for name, entry in registry.entries().items():
        elsewhere = NEEDS_A_GPU * (entry.cuda_only and not on_gpu)
        here = entry.missing() or elsewhere or "; ".join(entry.unknown_versions()) or "yes"
        section.rows.append((name, entry.label, variants[entry.variants], here))
    return section


def workloads() -> Section:
    """List the group `workload`."""
    return _group("Workloads", "workload", "workload=NAME, and workload.B=512 for a part of one")


def presets() -> Section:
    """List the group `timing`."""
    note = "timing=NAME, and timing.cell_seconds=5 for a part of one"
    return _group("Timing presets", "timing", note)


def _group(title: str, group: str, note: str) -> Section:
    section = Section(title, ("name", "what it is"), note=note)
    for name in configure.groups()[group]:
        section.rows.append((name, summary(CONF / group / f"{name}.yaml")))
    return section


def summary(file: Path) -> str:
    """Return the opening comment of a YAML file."""
    lines: list[str] = []
    for line in file.read_text().splitlines():
        if line.startswith("# @package"):
            continue
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").strip())
    return " ".join(lines)


def hardware() -> Section:
    """List the table of devices, with theoretical figures."""
    from experiments.machine.ceilings import FIGURES, table

    section = Section(
        "Hardware",
        ("name", *FIGURES.values()),
        note="as their makers say, sources in conf/hardware; reports divide by the bandwidth",
    )
    for device in table():
        figures = [device.figures.get(key) for key in FIGURES]
        texts = [UNKNOWN if figure is None else f"{figure:,.4g}" for figure in figures]
        section.rows.append((device.name, *texts))
    return section


def references(folder: Path = REFERENCE) -> Section:
    """List the committed runs."""
    section = Section(
        "Committed results",
        ("device", "experiment", "torch", "emblib", "measured"),
        note="in reports/reference; python -m experiments.reference keep RUN adds one",
    )
    for run in runs_in(folder, "*/*"):
        found: dict[str, Any] = read_json(run, "environment.json")
        sha = (found.get("git") or {}).get("sha") or UNKNOWN
        when = str(found.get("time_utc", UNKNOWN))[:10]
        device = str(found.get("device", run.parent.name))
        section.rows.append((device, run.name, str(found.get("torch", UNKNOWN)), sha, when))
    return section


SECTIONS: dict[str, Callable[[], Section]] = {
    "experiments": experiments,
    "contenders": contenders,
    "workloads": workloads,
    "presets": presets,
    "hardware": hardware,
    "references": references,
}

# How it is shown


def show(names: Sequence[str] = (), console: Console | None = None) -> int:
    """Print the named sections, or all, each as soon as it is complete."""
    if console is None:
        console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    for number, name in enumerate(names or SECTIONS):
        section = SECTIONS[name]()
        if number:
            console.print()
        console.print(_heading(section))
        console.print(_table(section) if section.rows else Text("  none yet", style="dim"))
        if section.note:
            console.print(Text(f"  {section.note}", style="dim"))
    return 0


def _heading(section: Section) -> Text:
    return Text.assemble((section.title, "bold"), (f"  {len(section.rows)}", "dim"))


def _table(section: Section) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0), show_edge=False)
    for number, title in enumerate(section.columns):
        texts = [row[number] for row in section.rows]
        figures = number > 0 and all(re.fullmatch(r"–|[\d,.]+( \w+)?", text) for text in texts)
        table.add_column(
            title,
            justify="right" if figures else "left",
            no_wrap=max(map(len, texts)) <= UNBROKEN,
        )
    for first, *others in section.rows:
        name, _, below = first.partition("\n")
        text = Text.assemble((name, "cyan"), (f"\n{below}" if below else "", "dim"))
        table.add_row(text, *map(_cell, others))
    return table


def _cell(text: str) -> Text:
    style = {"yes": "green", "broken": "red", UNKNOWN: "dim"}.get(text, "")
    return Text(text, style="yellow" if text.startswith(("not installed", NEEDS_A_GPU)) else style)


def show_list(arguments: Sequence[str] | None = None) -> int:
    """Print the list; return 0, or 2 for an unknown section."""
    parser = argparse.ArgumentParser(prog="python -m experiments.list", description=__doc__)
    parser.add_argument(
        "section",
        nargs="*",
        metavar="SECTION",
        help=f"{', '.join(SECTIONS)}; all, if none is named",
    )
    chosen: list[str] = parser.parse_args(arguments).section
    for name in chosen:
        if name not in SECTIONS:
            parser.error(f"no section '{name}'. There is: {', '.join(SECTIONS)}")
    return show(chosen)
