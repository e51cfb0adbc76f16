"""Collect the reports of many runs in a folder with an index, and print the answers as Markdown.

Every report is self-contained, so that the pages need no web server.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import pandas as pd

from experiments.config.schema import UsageError, folder_name
from experiments.report import text
from experiments.report.document import Page, Section
from experiments.report.tables import Table, Value
from experiments.results.store import read_json

NAME = "measurements"
TITLE = f"<title>{NAME} · emblib</title>"


def reports(folder: Path) -> pd.DataFrame:
    """Return one row per run with a report below `folder`, by experiment, the latest first.

    Columns: directory (a Path), and texts: experiment, status, device and measured (ISO 8601), each
    "None" if the run did not record it; answer, the bold sentence of report.md, or ""; emblib, the
    commit, or "no commit".

    Raises:
        ValueError: a run.json or environment.json is damaged.
    """
    directories = [path.parent for path in folder.rglob("index.html")]
    rows = [_report(directory) for directory in directories if (directory / "run.json").is_file()]
    columns = ["directory", "experiment", "status", "answer", "device", "measured", "emblib"]
    frame = pd.DataFrame(rows, columns=columns, dtype=object)
    frame = frame.sort_values(["measured", "directory"], ascending=False)
    return frame.sort_values("experiment", kind="stable")


def _report(directory: Path) -> dict[str, Any]:
    """Return the entry of a run's report in the gallery."""
    try:
        run_info, environment = (
            read_json(directory, f"{name}.json") for name in ("run", "environment")
        )
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error
    page = directory / "report.md"
    lines = page.read_text().splitlines() if page.is_file() else []
    answer_line = next((line for line in lines if line.startswith("**")), "")
    return {
        "directory": directory,
        "experiment": str(run_info.get("experiment")),
        "status": str(run_info.get("status")),
        "answer": answer_line.partition("**")[2].partition("**")[0],
        "device": str(environment.get("device")),
        "measured": str(environment.get("time_utc")),
        "emblib": text.commit(environment) or "no commit",
    }


def page_paths(runs: pd.DataFrame) -> list[str]:
    """Return the path of each report's page in the gallery, <experiment>/<run>/index.html.

    `runs` is the result of `reports`.

    Raises:
        ValueError: the name of an experiment is not that of a folder.
    """
    folders: list[str] = []
    for experiment, directory in zip(runs["experiment"], runs["directory"], strict=True):
        try:
            folder_name(experiment)  # a run.json may be from anywhere
        except UsageError as error:
            raise ValueError(f"{directory}: {error}") from error
        name, device = directory.name, directory.resolve().parent.name
        # A reference is stored as <device>/<experiment>.
        folder = base = f"{experiment}/{device if name == experiment else name}"
        number = 1
        while folder in folders:  # runs of several machines may have one name
            number += 1
            folder = f"{base}-{number}"
        folders.append(folder)
    return [f"{folder}/index.html" for folder in folders]


def write(runs: pd.DataFrame, out: Path) -> None:
    """Write the pages and the index to `out`, in place of an older gallery.

    Args:
        runs: result of `reports`.
        out: folder that does not exist, is empty, or has a gallery; its content is deleted.

    Raises:
        ValueError: `out` has other files, or the runs themselves; a run has an unsafe name.
    """
    if any(path.resolve().is_relative_to(out.resolve()) for path in runs["directory"]):
        raise ValueError(f"{out} has the runs themselves in it: choose another folder")
    links = page_paths(runs)
    if out.exists():
        if not out.is_dir() or (any(out.iterdir()) and not _is_gallery(out)):
            raise ValueError(f"{out} is not empty and no gallery: choose another folder")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    for link, directory in zip(links, runs["directory"], strict=True):
        (out / link).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(directory / "index.html", out / link)
    table = Table.of(
        runs.assign(link=links),
        {
            "experiment": lambda row: Value(row["experiment"], link=row["link"]),
            **{name: name for name in ("answer", "status", "device", "measured", "emblib")},
        },
    )
    answer = f"{text.count(len(runs), 'report')}." if len(runs) else "No run has a report."
    (out / "index.html").write_text(Page(NAME, [answer], [Section(table=table)]).html({}))


def _is_gallery(folder: Path) -> bool:
    """Return whether a folder has a gallery; the index.html of a report has another title."""
    index = folder / "index.html"
    return index.is_file() and TITLE in index.read_text(errors="replace")


def markdown(runs: pd.DataFrame) -> str:
    """Return the answers of `reports` as Markdown, for the summary of a job of CI."""
    lines = [
        f"- **{row.experiment}**{f' ({row.status})' * (row.status != 'finished')}: {row.answer}"
        for row in runs.itertuples()
    ]
    return text.markdown_document(
        ["### Measurements", "", *(lines or ["No run has a report."]), ""]
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command line of `gallery`."""
    parser.description = __doc__
    parser.add_argument("folder", type=Path, help="folder with runs in it, at any depth")
    parser.add_argument("--out", type=Path, required=True, help="folder of the pages; is created")


def run(arguments: argparse.Namespace) -> int:
    """Write a gallery and print the answers; return 0.

    Raises:
        UsageError: there is no such folder, a run is damaged, or `write` refuses `--out` or a run.
    """
    if not arguments.folder.is_dir():
        raise UsageError(f"there is no folder {arguments.folder}")
    try:
        runs = reports(arguments.folder)
        write(runs, arguments.out)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(markdown(runs))
    return 0
