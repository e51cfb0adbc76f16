"""Committed reference results, and the README's table of them.

`python -m experiments.reference keep RUN | write | check`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments import front_page
from experiments.config import configure
from experiments.paths import REFERENCE, ROOT
from experiments.report import text
from experiments.report.data import Run
from experiments.results.store import POINTS, has_records, pack_records, runs_in

START, END = "<!-- results:start -->", "<!-- results:end -->"
QUESTIONS = ("<!-- experiments:start -->", "<!-- experiments:end -->")  # in reports/README.md
KEPT = ("*.yaml", "*.json", "*.jsonl", "*.xz", "*.csv", "*.md", "*.png")


def keep(run_directory: Path, folder: Path = REFERENCE) -> Path:
    """Copy a run to reports/reference/<device>/<experiment>, its raw samples compressed."""
    run = Run.read(run_directory)
    if run.smoke or run.info.get("status") != "finished":
        raise ValueError("only a finished run at full size can be a reference")
    device = re.sub(r"[^a-z0-9]+", "-", str(run.environment["device"]).lower()).strip("-")
    target = folder / device / str(run.config.name)
    if target.exists():
        shutil.rmtree(target)
    target.mkdir(parents=True)
    for pattern in KEPT:
        for source in sorted(run_directory.glob(pattern)):
            shutil.copy2(source, target / source.name)
    if (target / POINTS).is_file():
        pack_records(target)
    return target


def results(folder: Path = REFERENCE) -> str:
    """Return the README's block: headline tables or answers of all references, with provenance."""
    blocks, answers = [], []
    for path in runs_in(folder, "*/*"):
        run = Run.read(path)
        lines = run.kind.readme_lines(run, _ran(run), _link(path))
        if lines is None:
            answers.append(_line(run, path))
        else:
            blocks.append("\n".join(lines))
    blocks += ["\n".join(answers)] if answers else []
    return text.markdown_document(
        ["\n\n".join(blocks) or "No reference results are committed yet."]
    )


def _ran(run: Run) -> str:
    e, git = run.environment, run.environment.get("git") or {}
    return (
        f"`{e['command']}` on {e['device']} (torch {e['torch']}, emblib {git.get('sha')}, "
        f"{e['time_utc'][:10]})"
    )


def _line(run: Run, path: Path) -> str:
    """Return the bold sentence of a run's report, which is its answer."""
    answer = re.search(r"\*\*(.+?)\*\*", (path / "report.md").read_text())
    return f"- {_ran(run)}: {answer[1] if answer else 'no answer.'} {_link(path)}"


def _link(path: Path) -> str:
    report = path / "report.md"
    return f"[Full report]({report.relative_to(ROOT) if report.is_relative_to(ROOT) else report})"


def rendered(readme: str, folder: Path = REFERENCE) -> str:
    """Return the README's text with the block between the markers replaced."""
    if readme.count(START) != 1 or readme.count(END) != 1:
        raise ValueError(f"README.md must contain {START} and {END} once each")
    before, rest = readme.split(START)
    return f"{before}{START}\n{results(folder)}\n{END}{rest.split(END)[1]}"


def questions(page: str) -> str:
    """Return the text of reports/README.md with its table of experiments up to date."""
    start, end = QUESTIONS
    before, rest = page.split(start)
    lines = ["| question | experiment |", "| --- | --- |"]
    for name in configure.groups()["experiment"]:
        asked = configure.question(name)
        lines.append(f"| {asked[:1].upper()}{asked[1:]} | `python run.py +experiment={name}` |")
    return "\n".join([f"{before}{start}", *lines, f"{end}{rest.split(end)[1]}"])


def main(arguments: Sequence[str]) -> int:
    """Run `keep`, `write` or `check`; exit 1 if README.md differs from the references."""
    parser = argparse.ArgumentParser(prog="python -m experiments.reference", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("keep", help="make a run a reference").add_argument("run", type=Path)
    commands.add_parser("write", help="put the tables into README.md")
    commands.add_parser("check", help="are README.md's tables up to date?")
    parsed = parser.parse_args(arguments)
    if parsed.command == "keep":
        if not (parsed.run / "config.yaml").is_file() or not has_records(parsed.run):
            parser.error(f"{parsed.run} is not a run: it has no config.yaml with a points.jsonl")
        print(keep(parsed.run).relative_to(ROOT))
        return 0
    status = 0
    for name, update in (
        ("README.md", lambda page: front_page.rendered(rendered(page))),
        ("reports/README.md", questions),
    ):
        path = ROOT / name
        page = path.read_text()
        expected = update(page)
        if parsed.command == "write":
            path.write_text(expected)
        elif page != expected:
            print(f"{name} is out of date: run `python -m experiments.reference write`")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
