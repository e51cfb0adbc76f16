"""Reports of many runs as one folder of pages: `python -m experiments.gallery FOLDER --out OUT`.

Every report is self-contained, so that any web server, or none, shows them. Prints the answers as
Markdown.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.report import document, text
from experiments.results.store import read_json

TITLE = "<title>emblib: measurements</title>"


@dataclass(frozen=True)
class Report:
    """The report of a run, and what the list shows of it."""

    directory: Path
    experiment: str
    status: str
    answer: str
    device: str
    time: str
    commit: str

    @property
    def target(self) -> str:
        """Return where the report's page is in the gallery."""
        name, device = self.directory.name, self.directory.resolve().parent.name
        # References are named by their experiment, in a folder a device.
        return f"{self.experiment}/{device if name == self.experiment else name}/index.html"


def reports(folder: Path) -> list[Report]:
    """Return every run below `folder` that has a report, by experiment, the latest first."""
    found = [_report(path.parent) for path in folder.rglob("index.html")]
    known = [report for report in found if report is not None]
    latest = sorted(known, key=lambda report: (report.time, report.directory.name), reverse=True)
    return sorted(latest, key=lambda report: report.experiment)


def _report(directory: Path) -> Report | None:
    if not (directory / "run.json").is_file():
        return None  # some other page
    info, environment = read_json(directory, "run.json"), read_json(directory, "environment.json")
    return Report(
        directory,
        str(info.get("experiment")),
        str(info.get("status")),
        _answer(directory / "report.md"),
        str(environment.get("device")),
        str(environment.get("time_utc")),
        text.commit(environment) or "no commit",
    )


def _answer(path: Path) -> str:
    """Return the first sentence of the report, which answers its question."""
    lines = path.read_text().splitlines() if path.is_file() else []
    bold = next((line for line in lines if line.startswith("**")), "")
    return bold.partition("**")[2].partition("**")[0]


def write(found: Sequence[Report], out: Path) -> None:
    """Write the pages and their list, in place of an older gallery; raise ValueError elsewhere."""
    if any(report.directory.resolve().is_relative_to(out.resolve()) for report in found):
        raise ValueError(f"{out} has the runs themselves in it: choose another folder")
    if out.exists():
        if not out.is_dir() or (any(out.iterdir()) and not _is_gallery(out)):
            raise ValueError(f"{out} is not empty and no gallery: choose another folder")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    for report in found:
        target = out / report.target
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(report.directory / "index.html", target)
    (out / "index.html").write_text(document.gallery(found))


def _is_gallery(folder: Path) -> bool:
    """Return whether a folder is a gallery; a report has an index.html of its own."""
    index = folder / "index.html"
    return index.is_file() and TITLE in index.read_text(errors="replace")


def markdown(found: Sequence[Report]) -> str:
    """Return the list in Markdown, for the summary of a job."""
    lines = [
        f"- **{report.experiment}**"
        + (f" ({report.status})" if report.status != "finished" else "")
        + f": {report.answer}"
        for report in found
    ]
    return text.markdown_document(
        ["### Measurements", "", *(lines or ["No run has a report."]), ""]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `gallery`."""
    parser.description = __doc__
    parser.add_argument("folder", type=Path, help="with runs in it, at any depth")
    parser.add_argument("--out", type=Path, required=True)


def run(arguments: argparse.Namespace) -> int:
    """Write a gallery; return 2 where there is nothing to show, or `--out` is something else."""
    if not arguments.folder.is_dir():
        print(f"error: there is no folder {arguments.folder}", file=sys.stderr)
        return 2
    found = reports(arguments.folder)
    try:
        write(found, arguments.out)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(markdown(found))
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m experiments.gallery")
    add_arguments(parser)
    sys.exit(run(parser.parse_args()))
